"""What compiled code depends on and torch's own details leave out, but for custom operators.

The machine: torch's keys hold no CPU ISA. Inductor compiles with ``-march=native``, so code made on
one machine may use any instruction that machine has: on another one it returns wrong numbers or
crashes (measured with ``ATEN_CPU_CAPABILITY=avx2``; docs/keys.md says what is in a key). The
installation, and settings of the process. How a graph's inputs are related, and what its nodes and
constants hold; that is a component only where there is something to say, so that most keys do not
have it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from s3cache.artifact import SCHEMA
from s3cache.graph._safety import graph_modules
from s3cache.graph._stable import Component, bounded
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import KeyDetails

__all__ = [
    "FIRST_CALL",
    "PROCESSOR",
    "device_components",
    "graph_components",
    "input_components",
    "machine_components",
    "needs_processor",
    "places",
    "sees_places",
    "thread_components",
]

#: The component of graphs that have to answer their first call with fake tensors, and of no others.
FIRST_CALL = "compile.first_call"

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
def _instruction_sets() -> str:
    """Everything a compiler told ``-march=native`` might use here, sorted."""
    names = ("flags", "Features")  # x86, Arm
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in names:
                    return " ".join(sorted(set(value.split()) - set(_NOT_INSTRUCTIONS.split())))
    except OSError:
        pass
    # Not Linux: the model says the same, if less generously.
    return f"{platform.processor()} {platform.version()}"


@functools.cache
def installation() -> dict[str, Component]:
    import torch

    parts = {
        "s3cache.schema": str(SCHEMA),
        "machine.arch": platform.machine(),
        "machine.isa": _instruction_sets(),
        "machine.os": platform.system(),
        "python.abi": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}"
        + ("" if not sys.flags.optimize else " without assertions"),
        "torch.version": str(torch.__version__),
        "torch.build": hashlib.sha256(_build().encode()).hexdigest(),
        "torch.cxx_abi": str(torch.compiled_with_cxx11_abi()),
    }
    return {name: Component.of_text(text) for name, text in parts.items()}


def _build() -> str:
    """How torch was built; what it says of this processor is in ``torch.cpu_capability``."""
    import torch

    lines = torch.__config__.show().splitlines()
    return "\n".join(line for line in lines if "CPU capability" not in line)


def thread_components(details: KeyDetails) -> dict[str, Component]:
    """What generated code takes from the number of threads; nothing if it takes nothing.

    C++ is made for that number (depth of parallel loops, ``num_threads(...)``, buffers of
    reductions) unless one of two options says otherwise. Code for another device takes nothing
    from it.
    """
    text = _threads(details)
    return {"torch.num_threads": Component.of_text(text)} if text else {}


def _threads(details: KeyDetails) -> str:
    import torch

    if internals.cpp_threads.get() >= 1:  # made for that many, wherever it runs
        return ""
    count = str(torch.get_num_threads())
    if internals.cpp_dynamic_threads.get():
        # What is made for one thread does not keep others out of what one alone has to do.
        return count if count == "1" or _may_use_templates(details.gm) else "several"
    return "" if internals.tells_threads(details) else count


def _may_use_templates(gm: GraphModule | None) -> bool:
    """Whether code may be made from a template: those split work among a fixed number of threads.

    They do so whatever ``cpp.dynamic_threads`` says: with fewer threads, part of the work is
    left undone.
    """
    inductor = internals.inductor_config.get()
    if inductor.max_autotune or inductor.max_autotune_gemm or inductor.cpu_backend != "cpp":
        return True
    modules = () if gm is None else graph_modules(gm)
    return any(
        "flex_attention" in str(n.target) for _, module in modules for n in module.graph.nodes
    )


def machine_components() -> dict[str, Component]:
    """Components that depend on the machine, the installation and settings of this moment."""
    settings = {name: Component.of_text(text) for name, text in _settings().items()}
    return {**installation(), **settings}


# -- devices

#: Components that only code for the processor depends on.
PROCESSOR = ("machine.isa", "torch.cpu_capability")


def device_components(details: KeyDetails) -> dict[str, Component]:
    """What code for accelerators takes from those that the graph is on; nothing if it is on none.

    Inductor and Triton put the number of processors, shared memory, registers and the like into
    code, or choose by them; torch's own key has the name of the current device.
    """
    said = {_accelerator(device) for device in devices_of(details) - {"cpu", "meta"}} - {""}
    if not said:
        return {}
    components = {"machine.accelerator": Component.of_text("; ".join(sorted(said)))}
    if environment := internals.triton_environment():
        text = _said(dict(sorted(environment.items())))
        components["triton.environment"] = Component.of_text(text)
    return components


def needs_processor(details: KeyDetails) -> bool:
    """Whether code for the processor may be among what the graph is compiled to."""
    return (
        bool({"cpu", "meta"} & (devices := devices_of(details)))
        or not devices
        or bool(internals.inductor_config.get().cpp_wrapper)
        or internals.may_have_cpu_code(details)
    )


def devices_of(details: KeyDetails) -> set[str]:
    """Devices of all tensors in a graph, and those that it names; ``cpu`` too if it cannot tell."""
    import torch

    devices: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            look(value.device)
        elif isinstance(value, torch.device):
            devices.add(value.type if value.type in ("cpu", "meta") else str(value))
        elif isinstance(value, (list, tuple)):
            for part in value:
                look(part)
        elif isinstance(value, dict):
            look(list(value.values()))
        elif isinstance(value, str) and value.startswith("cpu"):
            devices.add("cpu")

    look(details.example_inputs)
    for _, module in () if details.gm is None else graph_modules(details.gm):
        look([value for value in vars(module).values() if isinstance(value, torch.Tensor)])
        look([*module._parameters.values(), *module._buffers.values()])
        for node in module.graph.nodes:
            known = [node.meta[name] for name in internals.NODE_VALUES if name in node.meta]
            if not known and node.op == "placeholder":
                devices.add("cpu")  # nobody has traced it
            look([known, node.args, node.kwargs])
    return devices


# Of one device among equal ones; the rest is said of all of them.
_OF_ONE = frozenset({"pci_bus_id", "pci_device_id", "pci_domain_id", "total_memory", "uuid"})


def _accelerator(name: str) -> str:
    """What torch says of a device, and which driver it has; ``""`` if it says nothing."""
    import torch

    device = torch.device(name)
    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (AssertionError, AttributeError, RuntimeError):
        return ""
    said = {
        field: value
        for field in dir(properties)
        if not field.startswith("_")
        and field not in _OF_ONE
        and isinstance(value := getattr(properties, field), (bool, int, float, str))
    }
    return _said({**said, "driver": _cuda_driver() if device.type == "cuda" else ""})


@functools.cache
def _cuda_driver() -> int:
    """The version of CUDA that the driver supports, which torch does not tell; 0 if unknown."""
    version = ctypes.c_int()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


# -- settings of the process


def _settings() -> dict[str, str]:
    import torch

    backends = torch.backends
    functorch = internals.functorch_config.get()
    return {
        # What ATen and Inductor take the processor for; ATEN_CPU_CAPABILITY lowers it.
        "torch.cpu_capability": str(backends.cpu.get_cpu_capability()),
        "torch.float32_matmul_precision": _matmul_precision(),
        "torch.precision": _said(_precisions()),
        "torch.backends": _said(
            {
                "mkldnn": backends.mkldnn.enabled,
                "mkldnn.deterministic": backends.mkldnn.deterministic,
                "cudnn": backends.cudnn.enabled,
                "cudnn.deterministic": backends.cudnn.deterministic,
                "cudnn.benchmark": backends.cudnn.benchmark,
                "mha.fastpath": backends.mha.get_fastpath_enabled(),
                "opt_einsum": backends.opt_einsum.enabled,
                "opt_einsum.strategy": backends.opt_einsum.strategy,
                "quantized": backends.quantized.engine,
            }
        ),
        # Which attention a graph is traced to.
        "torch.attention": _said(
            {
                **{name: getattr(backends.cuda, asked)() for name, asked in _ATTENTION.items()},
                "priority": list(internals.attention_priority.get()()),
            }
        ),
        # Grad mode and autocast are in torch's own details.
        "torch.modes": _said(
            {
                "inference": torch.is_inference_mode_enabled(),
                "anomaly": torch.is_anomaly_enabled(),
                "view_replay": internals.view_replay_enabled.get()(),
                "autocast_cache": torch.is_autocast_cache_enabled(),
                # A graph that enters autocast without a dtype gets the default one.
                "autocast_dtypes": [
                    str(torch.get_autocast_dtype(device))
                    for device in internals.autocast_devices.get()()
                ],
                "device": str(torch.get_default_device()),
                # Of this thread, which folds constants; torch tells nobody.
                "flush_denormal": sys.float_info.min / 2 == 0,
            }
        ),
        # torch looks at these two only to refuse what has no uuid(); names are in no key of its.
        "functorch.budget": _said(
            {
                "estimator": _named(functorch.activation_memory_budget_runtime_estimator),
                "solver": _named(functorch.activation_memory_budget_solver),
                "joint_custom_pass": _named(functorch.joint_custom_pass),
            }
        ),
        # Settings of Dynamo and of symbolic shapes that what comes after Dynamo reads as well.
        "dynamo.config": _said(
            internals.read_fields(internals.DYNAMO_OPTIONS, internals.dynamo_config.get())
        ),
        "shapes.config": _said(
            internals.read_fields(internals.SHAPES_OPTIONS, internals.shapes_config.get())
        ),
    }


_ATTENTION = {
    "flash": "flash_sdp_enabled",
    "mem_efficient": "mem_efficient_sdp_enabled",
    "math": "math_sdp_enabled",
    "math_reduced": "fp16_bf16_reduction_math_sdp_allowed",
    "cudnn": "cudnn_sdp_enabled",
}
_LIBRARIES = (
    "mkldnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
    "cudnn",
    "cudnn.conv",
    "cudnn.rnn",
    "cuda.matmul",
)


def _matmul_precision() -> str:
    """The one setting for all libraries. It tells nothing where one of them was set by itself."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "by library"


def _precisions() -> dict[str, object]:
    """What each library, and torch as a whole, may use for float32."""
    from torch import backends

    return {
        name: attrgetter(f"{name}.fp32_precision".lstrip("."))(backends)
        for name in ("", *_LIBRARIES)
    }


def _named(value: object) -> object:
    uuid = getattr(value, "uuid", None)
    return [type(value).__qualname__, uuid()] if callable(uuid) else value


def _said(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in values.items())


# -- inputs and graph


def input_components(gm: GraphModule | None, inputs: Sequence[object]) -> dict[str, Component]:
    """Components of how inputs are related, to each other, to storages and to autograd."""
    texts = {
        "inputs.sharing": _sharing(inputs),
        "inputs.places": places(inputs) if gm is not None and sees_places(gm) else "",
        "inputs.non_leaf": _non_leaf(inputs),
        "inputs.bounds": _bounds(),
        FIRST_CALL: _first_call(),
    }
    return {name: Component.of_text(text) for name, text in texts.items() if text}


def graph_components(gm: GraphModule, stable: Callable[[object], bytes]) -> dict[str, Component]:
    """Components of what nodes carry and of tensors that the graph holds itself.

    Raises:
        Exception: what torch's pickler raises for an annotation that it cannot pickle.
    """
    components = {}
    if annotations := list(_annotations(gm)):
        data = b"".join(node.encode() + stable(value) for node, value in annotations)
        nodes = " ".join(node for node, _ in annotations)
        parts = bounded((node.lstrip("."), _annotation_text(value)) for node, value in annotations)
        components["graph.annotations"] = Component.of_bytes(data, nodes, parts)
    if constants := "; ".join(_constants(gm)):
        components["graph.constants"] = Component.of_text(constants)
    return components


def _annotation_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_annotation_text(part)}" for name, part in value.items())
    return repr(value) if isinstance(value, (str, int, float, bool)) else type(value).__qualname__


def _sharing(inputs: Sequence[object]) -> str:
    """Which inputs are in one storage, and where in it.

    Code for inputs that overlap reads one after it has written the other; torch's key is the same
    for inputs that do not.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor, storage in _stored(inputs):
        groups.setdefault(storage._cdata, []).append(f"{name}@{tensor.storage_offset()}")
    return "; ".join(" ".join(group) for group in groups.values() if len(group) > 1)


def places(inputs: Sequence[object]) -> str:
    """Where each input begins in its storage, and how large that is."""
    return " ".join(
        f"{name}@{tensor.storage_offset()}/{storage.nbytes()}"
        for name, tensor, storage in _stored(inputs)
    )


# In names of as_strided and its variants, and of what takes or changes a whole storage.
_NAMES_PLACES = re.compile(r"as_strided|storage|^_?resize|^set_(\.|$)")


def sees_places(gm: GraphModule) -> bool:
    """Whether code made of ``gm`` depends on where inputs begin in their storages.

    All other operators that a graph is traced into are told sizes and strides, and get a pointer
    to the first element. Of those that name a place in a storage, Inductor takes the difference
    to where the input began when it was compiled; Dynamo has no guard for that.
    """
    for _, module in graph_modules(gm):
        for node in module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                called = str(getattr(node.target, "__name__", node.target))
                if _NAMES_PLACES.search(called):
                    return True
    return False


def _stored(inputs: Iterable[object]) -> Iterator[tuple[str, Tensor, UntypedStorage]]:
    """The tensors that lie in a storage, with their names, and the storage.

    A wrapper subclass lies in none; those that it wraps do. Sparse tensors do not.
    """
    from torch import Tensor

    is_wrapper = internals.is_wrapper_subclass.get()
    left = [(str(index), value) for index, value in enumerate(inputs)]
    while left:
        name, value = left.pop(0)
        if not isinstance(value, Tensor):
            continue
        if is_wrapper(value):
            inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            left[:0] = [(f"{name}.{attribute}", getattr(value, attribute)) for attribute in inner]
            continue
        try:
            storage = value.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
        yield name, value, storage


def _non_leaf(inputs: Sequence[object]) -> str:
    """Inputs that autograd reached already: what mutates them is a part of the graph."""
    from torch import Tensor

    return " ".join(
        str(index)
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf
    )


def _bounds() -> str:
    """Bounds that the user set for sizes, e.g. by ``mark_dynamic(..., max=8)``.

    Guards are no part of a key: those of an entry become guards of the program that it is a hit
    for. Where the user set bounds, guards that are narrower than they would be an error there.
    """
    context = internals.current_tracing_context.get()()
    shape_env = getattr(None if context is None else context.fake_mode, "shape_env", None)
    bounded = set()
    for tracked in getattr(shape_env, "tracked_fakes", None) or ():
        # A number has no symbolic context, and few sizes have a constraint.
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        sizes = tracked.fake.shape if constraints else ()
        for size, constraint in zip(sizes, constraints, strict=True):
            bounds = getattr(constraint, "vr", None)
            if bounds is not None:
                bounded.add(f"{size} in [{bounds.lower}, {bounds.upper}]")
    return " ".join(sorted(bounded))


def _first_call() -> str:
    """Whether the compiled graph has to answer its first call with fake tensors.

    What it answers is a part of those entries, and of no others.
    """
    return "fake" if internals.is_first_call_fake() else ""


def _annotations(gm: GraphModule) -> Iterator[tuple[str, object]]:
    """``torch.fx.traceback.annotate`` and the like; torch's pickler drops ``node.meta``."""
    for name, module in graph_modules(gm):
        for index, node in enumerate(module.graph.nodes):
            if node.meta.get("custom"):
                yield f"{name}.{index}", node.meta["custom"]


def _constants(gm: GraphModule) -> Iterator[str]:
    """Values of tensors that are no parameters: of those, code may hold the values."""
    import torch

    frozen, inlined = internals.is_frozen_param.get(), internals.can_inline_constant.get()
    for name, module in graph_modules(gm):
        for attribute, value in sorted(vars(module).items()):
            # Frozen parameters that are not in the code are those of the program that hits.
            if isinstance(value, torch.Tensor) and not (frozen(value) and not inlined(value)):
                yield f"{name}.{attribute} {_values(value)}"


def _values(value: Tensor) -> str:
    import torch

    with internals.without_modes.get()(), torch.no_grad():
        if type(value) is not torch.Tensor or value.is_sparse or value.is_quantized:
            return repr(value)
        data = value.cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(bytes(data.tolist())).hexdigest()
