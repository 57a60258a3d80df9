"""What compiled code depends on outside of its graph: the machine, the installation, settings.

torch's keys hold no CPU ISA. Inductor compiles with ``-march=native``, so code made on one machine
may use any instruction that machine has: on another one it returns wrong numbers or crashes
(measured with ``ATEN_CPU_CAPABILITY=avx2``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from s3cache.graph._graph import graph_modules
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import KeyDetails


def read(names: str, **more: object) -> str:
    """Return attributes of torch by their dotted names, and ``more``; functions are called."""
    import torch

    values = {name: attrgetter(name)(torch) for name in names.split()}
    called = {name: value() if callable(value) else value for name, value in values.items()}
    if len(called) == 1:
        return str(called[names])
    shown = {name.removeprefix("backends."): value for name, value in called.items()}
    return _fields({**shown, **more})


def _fields(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in values.items())


# -- the machine and the installation

# Flags of /proc/cpuinfo that are no instructions a compiler emits: mitigations, virtualisation,
# power, clocks. They differ between kernels and hypervisors on equal processors. Whatever is not
# in this list is taken for an instruction set, so one unknown here costs a miss and no more.
_NOT_INSTRUCTIONS = """
    acc_power acpi aperfmperf apic arat arch_capabilities arch_lbr arch_perfmon art
    auto_ibrs avic bts bus_lock_detect cat_l2 cat_l3 cdp_l2 cdp_l3 clzero cmp_legacy
    constant_tsc core_capabilities cpb cpuid cpuid_fault cqm cqm_llc cqm_mbm_local
    cqm_mbm_total cqm_occup_llc cr8_legacy dca de debug_swap decodeassists ds_cpl dtes64
    dtherm dts dtt epb ept ept_ad erms est extapic extd_apicid flexpriority flush_l1d
    flushbyasid fsrm fsrs fzrm ht hw_pstate hwp hwp_act_window hwp_epp hwp_notify
    hwp_pkg_req hypervisor ibpb ibpb_exit_to_user ibrs ibrs_enhanced ibs ibt ida intel_ppin
    intel_pt invpcid invpcid_single irperf k8 la57 lbrv mba mca mce md_clear monitor mp msr
    mtrr mwaitx nodeid_msr nonstop_tsc nopl npt nrip_save nx ospke osvw overflow_recov
    ovfl_umov pae pat pausefilter pbe pcid pconfig pdcm pdpe1gb perfctr_core perfctr_llc
    perfctr_nb perfmon_v2 pfthreshold pge pku pln pni_monitor pse pse36 pti pts ptsc rapl
    rdt_a rep_good ring3mwait rrsba_ctrl sdbg sep skinit smap smep smx split_lock_detect ss
    ssbd stibp stibp_always_on succor svm svm_lock syscall tce tm tm2 topoext tpr_shadow tsc
    tsc_adjust tsc_deadline_timer tsc_known_freq tsc_reliable tsc_scale v_spec_ctrl
    v_vmsave_vmload vgif virt_ssbd vme vmmcall vmx vnmi vpid wdt x2apic x2avic xtopology
    xtpr
"""


@functools.cache
def instruction_sets() -> str:
    """Return all instructions that a compiler uses here with ``-march=native``, sorted."""
    names = ("flags", "Features")  # x86, Arm
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return " ".join(sorted(set(value.split()) - set(_NOT_INSTRUCTIONS.split())))
    # Not Linux: the model says the same, if less generously.
    return f"{platform.processor()} {platform.version()}"


@functools.cache
def python_abi() -> str:
    """Return what native code is compiled against, and whether Python skips assertions."""
    abi = f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}"
    return f"{abi} without assertions" if sys.flags.optimize else abi


@functools.cache
def build_of_torch() -> str:
    """Return a digest of how torch was built; ``torch.cpu_capability`` is about this processor."""
    import torch

    lines = torch.__config__.show().splitlines()
    built = "\n".join(line for line in lines if "CPU capability" not in line)
    return hashlib.sha256(built.encode()).hexdigest()


# -- devices and threads


def devices_of(gm: GraphModule, inputs: Sequence[object]) -> set[str]:
    """Return devices of all tensors in a graph, and those that it names; ``cpu`` where unknown."""
    import torch

    found: set[str] = set()
    waiting: list[object] = [inputs]
    for _, module in graph_modules(gm):
        waiting += (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        waiting += (*module._parameters.values(), *module._buffers.values())
        for node in module.graph.nodes:
            known = [node.meta[name] for name in internals.NODE_VALUES if name in node.meta]
            if not known and node.op == "placeholder":
                found.add("cpu")  # it was not traced
            waiting += (*known, *node.args, *node.kwargs.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, str):
            found |= {"cpu"} if value.startswith("cpu") else set()
        elif isinstance(value, torch.Tensor):
            value = value.device
        if isinstance(value, torch.device):
            found.add(value.type if value.type in ("cpu", "meta") else str(value))
    return found


def needs_processor(details: KeyDetails, devices: set[str]) -> bool:
    """Return whether code for the processor may be among what the graph is compiled to."""
    return (
        not devices
        or not devices.isdisjoint(("cpu", "meta"))
        or bool(internals.inductor_config.get().cpp_wrapper)
        or internals.may_have_cpu_code(details)
    )


# Of one device among equal ones.
_OF_ONE = frozenset({"pci_bus_id", "pci_device_id", "pci_domain_id", "total_memory", "uuid"})


def accelerators(devices: set[str]) -> str:
    """Return what torch says of the accelerators among ``devices``, and which drivers they have.

    Inductor and Triton put the number of processors, shared memory, registers and the like into
    code, or choose by them; torch's own key has the name of the current device.
    """
    return "; ".join(sorted(filter(None, map(_accelerator, devices - {"cpu", "meta"}))))


def _accelerator(name: str) -> str:
    import torch

    device = torch.device(name)
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (AssertionError, AttributeError, RuntimeError):
        return ""
    fields = {
        field: value
        for field in dir(properties)
        if not field.startswith("_")
        and field not in _OF_ONE
        and isinstance(value := getattr(properties, field), (bool, int, float, str))
    }
    return _fields({**fields, "driver": _cuda_driver() if device.type == "cuda" else ""})


@functools.cache
def _cuda_driver() -> int:
    """Return the version of CUDA that the driver supports, which torch does not say, or 0."""
    version = ctypes.c_int()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def triton_variables(devices: set[str]) -> str:
    """Return the environment variables in Triton's own key, for code on an accelerator."""
    is_used = accelerators(devices)
    return _fields(dict(sorted(internals.triton_environment().items()))) if is_used else ""


def threads(details: KeyDetails, gm: GraphModule) -> str:
    """Return what generated code takes from the number of threads; ``""`` if nothing.

    C++ is made for that number (depth of parallel loops, ``num_threads(...)``, buffers of
    reductions) unless one of two options says otherwise. Code for another device takes nothing
    from it.
    """
    if internals.cpp_threads.get() >= 1:  # made for that many, wherever it runs
        return ""
    count = read("get_num_threads")
    if internals.cpp_dynamic_threads.get():
        # What is made for one thread does not keep others out of what one alone has to do.
        return count if count == "1" or _may_use_templates(gm) else "several"
    return "" if internals.tells_threads(details) else count


def _may_use_templates(gm: GraphModule) -> bool:
    """Return whether code may be made from a template.

    Templates split work among a fixed number of threads, whatever ``cpp.dynamic_threads`` says:
    with fewer threads, some of the work is left undone.
    """
    inductor = internals.inductor_config.get()
    if inductor.max_autotune or inductor.max_autotune_gemm or inductor.cpu_backend != "cpp":
        return True
    nodes = (node for _, module in graph_modules(gm) for node in module.graph.nodes)
    return any("flex_attention" in str(node.target) for node in nodes)


# -- settings of the process

#: What ATen and Inductor take the processor for; ATEN_CPU_CAPABILITY lowers it.
CAPABILITY = "backends.cpu.get_cpu_capability"
#: Switches of the libraries that kernels are from.
BACKENDS = (
    "backends.mkldnn.enabled backends.mkldnn.deterministic backends.cudnn.enabled "
    "backends.cudnn.deterministic backends.cudnn.benchmark backends.mha.get_fastpath_enabled "
    "backends.opt_einsum.enabled backends.opt_einsum.strategy backends.quantized.engine"
)
#: What torch as a whole, and each library, may use for float32.
PRECISION = "backends.fp32_precision " + " ".join(
    f"backends.{library}.fp32_precision"
    for library in (
        *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
        *("cudnn", "cudnn.conv", "cudnn.rnn", "cuda.matmul"),
    )
)
# A graph is traced to one of the kernels that are allowed.
_ATTENTION = (
    "backends.cuda.flash_sdp_enabled backends.cuda.mem_efficient_sdp_enabled "
    "backends.cuda.math_sdp_enabled backends.cuda.fp16_bf16_reduction_math_sdp_allowed "
    "backends.cuda.cudnn_sdp_enabled"
)
_MODES = "is_inference_mode_enabled is_anomaly_enabled is_autocast_cache_enabled"


def attention() -> str:
    """Return which attention kernels are allowed, and in which order they are tried."""
    return read(_ATTENTION, priority=list(internals.attention_priority.get()()))


def matmul_precision() -> str:
    """Return the one setting for all libraries, which says nothing if one of them has its own."""
    try:
        return read("get_float32_matmul_precision")
    except RuntimeError:
        return "by library"


def modes() -> str:
    """Return the modes that torch's own details lack; those have grad mode and autocast."""
    import torch

    devices = internals.autocast_devices.get()()
    return read(
        _MODES,
        view_replay=internals.view_replay_enabled.get()(),
        # A graph that enters autocast without a dtype gets the default one.
        autocast_dtypes=[str(torch.get_autocast_dtype(device)) for device in devices],
        device=str(torch.get_default_device()),
        # Of this thread, which folds constants; torch has no way to ask.
        flush_denormal=sys.float_info.min / 2 == 0,
    )


def autocast() -> str:
    """Return for which devices autocast is on."""
    import torch

    devices = internals.autocast_devices.get()()
    return str([(device, torch.is_autocast_enabled(device)) for device in devices])


def joint_passes() -> str:
    """Return what torch looks at only to refuse what has no uuid(): its keys have no names."""
    functorch = internals.functorch_config.get()
    options = ("runtime_estimator", "solver")
    values = {name: getattr(functorch, f"activation_memory_budget_{name}") for name in options}
    values["joint_custom_pass"] = functorch.joint_custom_pass
    return _fields(
        {
            name: [type(value).__qualname__, value.uuid()] if hasattr(value, "uuid") else value
            for name, value in values.items()
        }
    )


def dynamo_options() -> str:
    """Return options of Dynamo that what comes after Dynamo reads as well."""
    return _fields(internals.read_fields(internals.DYNAMO_OPTIONS, internals.dynamo_config.get()))


def shape_options() -> str:
    """Return options of symbolic shapes that what comes after Dynamo reads as well."""
    return _fields(internals.read_fields(internals.SHAPES_OPTIONS, internals.shapes_config.get()))
