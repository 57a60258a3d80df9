"""What compiled code depends on that torch's keys leave out: the machine and the installation.

torch's keys hold no CPU ISA. Inductor compiles with ``-march=native``, so code made on one machine
may use any instruction that machine has: on another one it returns wrong numbers or crashes
(measured with ``ATEN_CPU_CAPABILITY=avx2``; docs/keys.md says what is in a key).
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from typing import Any

from s3cache.artifact import SCHEMA
from s3cache.graph._key import Component

__all__ = ["machine_components"]

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
def _installation() -> dict[str, Component]:
    import torch

    parts = {
        "s3cache.schema": str(SCHEMA),
        "machine.arch": platform.machine(),
        "machine.isa": _instruction_sets(),
        "machine.os": platform.system(),
        "python.abi": f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}",
        "torch.version": str(torch.__version__),
        "torch.build": hashlib.sha256(torch.__config__.show().encode()).hexdigest(),
        "torch.cxx_abi": str(getattr(torch._C, "_GLIBCXX_USE_CXX11_ABI", "")),
    }
    return {name: Component.of_text(text) for name, text in parts.items()}


def machine_components() -> dict[str, Component]:
    """Components that depend on the machine, the installation and settings of this moment."""
    return {**_installation(), **{name: Component.of_text(text) for name, text in _now().items()}}


def _now() -> dict[str, str]:
    import torch

    backends: Any = torch.backends  # in parts untyped
    functorch = torch._functorch.config
    return {
        # What ATen and Inductor take the processor for; ATEN_CPU_CAPABILITY lowers it.
        "torch.cpu_capability": str(torch._C._get_cpu_capability()),
        "torch.num_threads": str(torch.get_num_threads()),
        "torch.float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.precision": _said(_precisions(backends)),
        "torch.backends": _said(
            {
                "mkldnn": backends.mkldnn.enabled,
                "mkldnn.deterministic": backends.mkldnn.deterministic,
                "cudnn": backends.cudnn.enabled,
                "cudnn.deterministic": backends.cudnn.deterministic,
                "cudnn.benchmark": backends.cudnn.benchmark,
                "mha.fastpath": backends.mha.get_fastpath_enabled(),
                "opt_einsum": getattr(backends.opt_einsum, "enabled", None),
                "opt_einsum.strategy": getattr(backends.opt_einsum, "strategy", None),
                "quantized": backends.quantized.engine,
            }
        ),
        # Which attention a graph is traced to.
        "torch.attention": _said(
            {
                "flash": backends.cuda.flash_sdp_enabled(),
                "mem_efficient": backends.cuda.mem_efficient_sdp_enabled(),
                "math": backends.cuda.math_sdp_enabled(),
                "math_reduced": backends.cuda.fp16_bf16_reduction_math_sdp_allowed(),
                "cudnn": backends.cuda.cudnn_sdp_enabled(),
                "priority": _attention_priority(),
            }
        ),
        # Grad mode and autocast are in torch's own details.
        "torch.modes": _said(
            {
                "inference": torch.is_inference_mode_enabled(),
                "anomaly": torch.is_anomaly_enabled(),
                "view_replay": torch._C._is_view_replay_enabled(),
                "multithreading": torch._C._is_multithreading_enabled(),
                "autocast_cache": torch.is_autocast_cache_enabled(),
                # A graph that enters autocast without a dtype gets the default one.
                "autocast_dtypes": [
                    str(torch.get_autocast_dtype(each))
                    for each in torch._C._autocast_supported_devices()
                ],
                "device": str(torch.get_default_device()),
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
        "dynamo.config": _said(_read(torch._dynamo.config, _DYNAMO)),
        "shapes.config": _said(_read(torch.fx.experimental._config, _SHAPES)),
    }


_DYNAMO = (
    "capture_scalar_outputs",
    "enable_compiler_collectives",
    "fake_tensor_disable_inference_mode",
    "leaf_function_check_escaped_gradients",
    "leaf_function_validate_outputs",
    "specialize_float",
    "specialize_int",
)
_SHAPES = (
    "aggressive_guard_free_semantics",
    "backed_size_oblivious",
    "meta_nonzero_assume_all_nonzero",
    "no_data_dependent_graph_break",
    "skip_dtype_check_in_meta_registrations",
    "symbol_guard_limit_before_specialize",
    "unify_view_symbols_bso_meta",
    "use_duck_shape",
)


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


def _precisions(backends: Any) -> dict[str, object]:
    """What each library may use for float32; ``None`` where this torch has no such setting."""
    found: dict[str, object] = {"": getattr(backends, "fp32_precision", None)}
    for name in _LIBRARIES:
        part = backends
        for step in name.split("."):
            part = getattr(part, step, None)
        found[name] = getattr(part, "fp32_precision", None)
    return found


def _attention_priority() -> object:
    import torch

    order = getattr(torch._C, "_get_sdp_priority_order", None)
    return None if order is None else list(order())


def _named(value: Any) -> object:
    uuid = getattr(value, "uuid", None)
    return [type(value).__qualname__, uuid()] if callable(uuid) else value


def _read(config: Any, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(config, name, None) for name in names}


def _said(values: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value!r}" for name, value in values.items())
