"""The key of a graph: a digest over named components with their own digests.

A whole graph has a key only if no foreign code takes part in tracing it. The key of an FX graph, at
the second level, covers the traced graph, so code that ran before does not matter.

torch's keys do not contain the CPU's instruction sets. Inductor compiles with ``-march=native``, so
code may use any instruction of its machine: on another machine it returns wrong numbers or crashes
(measured with ``ATEN_CPU_CAPABILITY=avx2``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pickle
import platform
import sys
import sysconfig
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, cast

from s3cache.artifact import SCHEMA
from s3cache.entries import digest_of
from s3cache.graph import _describe as describe
from s3cache.graph import _graph as graph
from s3cache.graph import _user_code as code
from s3cache.graph._describe import Component, RegisteredVersion, UnidentifiedError
from s3cache.graph._graph import DetailsDescriber
from s3cache.graph._origin import SCALARS
from s3cache.graph._overrides import overrides
from s3cache.graph._results import BypassReason, Finding, suggested_fix
from s3cache.graph._safety import described_passes
from s3cache.torch_api import AnyObject, Fields, internals

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Config, KeyDetails, KeyPickler


@dataclass(frozen=True, slots=True)
class Key:
    """A cache key with its components.

    Attributes:
        components: by name.
        device: the accelerator of the graph, such as ``cuda:3``, if all equal devices share the
            key; else "".
    """

    components: Mapping[str, Component]
    device: str = ""

    @property
    def digest(self) -> str:
        """64 hexadecimal digits, independent of the order of components."""
        return digest_of({name: each.digest for name, each in self.components.items()})

    @property
    def parts(self) -> dict[str, Mapping[str, str]]:
        """The parts of components, by name, if their values do not show them."""
        return {name: each.parts for name, each in self.components.items() if each.parts}

    def without_parts(self) -> Key:
        """Return the key without parts, which takes less memory."""
        bare = {name: replace(one, parts={}) for name, one in self.components.items()}
        return replace(self, components=bare)


def read(names: str, **more: object) -> str:
    """Format attributes of torch, given by dotted names, and ``more``; functions are called."""
    import torch

    values = {name.removeprefix("backends."): attrgetter(name)(torch) for name in names.split()}
    called = {name: value() if callable(value) else value for name, value in values.items()}
    return _fields({**called, **more}) if len(called) > 1 else str(*called.values())


def _fields(values: Mapping[str, object]) -> str:
    containers = (tuple, list, dict, set, frozenset)
    return " ".join(
        f"{name}={describe.constant_text(value) if isinstance(value, containers) else repr(value)}"
        for name, value in values.items()
    )


# -- the machine and the installation

# Flags of /proc/cpuinfo that are not instructions a compiler emits: mitigations, virtualisation,
# power, clocks. They differ between kernels and hypervisors on equal processors. Any other flag
# counts as an instruction set, so an unknown flag costs a miss at most.
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
    """Return the instruction sets that a compiler uses here with ``-march=native``, sorted."""
    names = ("flags", "Features")  # x86, Arm
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return " ".join(sorted(set(value.split()) - set(_NOT_INSTRUCTIONS.split())))
    # Not Linux: use the model, which is stricter.
    return f"{platform.processor()} {platform.version()}"


def python_abi() -> str:
    """Return the ABI for native code, and whether Python skips assertions."""
    abi = f"{sys.implementation.cache_tag} {sysconfig.get_config_var('SOABI')}"
    return f"{abi} without assertions" if sys.flags.optimize else abi


@functools.cache
def build_of_torch() -> str:
    """Return a digest of torch's build configuration, without the processor's capability."""
    import torch

    lines = torch.__config__.show().splitlines()
    built = "\n".join(line for line in lines if "CPU capability" not in line)
    return hashlib.sha256(built.encode()).hexdigest()


# -- devices and threads


def devices_of(gm: GraphModule, inputs: Sequence[object]) -> set[str]:
    """Return devices of all tensors in a graph and devices that it names; ``cpu`` if unknown."""
    import torch

    is_wrapper = internals.is_wrapper_subclass.get()
    devices: set[str] = set()
    waiting: list[object] = [inputs]
    for _, module in describe.graph_modules(gm):
        waiting += (value for value in vars(module).values() if isinstance(value, torch.Tensor))
        waiting += (*module._parameters.values(), *module._buffers.values())
        for node in module.graph.nodes:
            traced = [node.meta[name] for name in internals.NODE_VALUES if name in node.meta]
            if not traced and node.op == "placeholder":
                devices.add("cpu")  # not traced
            waiting += (*traced, *node.args, *node.kwargs.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, (list, tuple)):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, str):
            devices |= {"cpu"} if value.startswith("cpu") else set()
        elif isinstance(value, torch.Tensor):
            if is_wrapper(value):
                inner, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
                waiting += (getattr(value, name) for name in inner)
            value = value.device
        if isinstance(value, torch.device):
            devices.add(value.type if value.type in ("cpu", "meta") else str(value))
    return devices


def current_device(devices: set[str]) -> device | None:
    """Return the only accelerator among ``devices`` if it is the current one, else None.

    Code for it differs from code for an equal device only in the index. Each process of a job has
    its own device, so keys leave the index out: ``cuda:0`` and ``cuda:3`` share an entry.
    """
    import torch

    accelerators = devices - {"cpu", "meta", internals.MOVABLE}
    if len(accelerators) != 1 or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    device = torch.device(*accelerators)
    return device if device == internals.current_device(internals.MOVABLE) else None


def accelerators(devices: set[str]) -> str:
    """Return torch's properties of the accelerators among ``devices``, and their drivers.

    Code from Inductor and Triton depends on the number of processors, shared memory, registers and
    so on; torch's own key only has the name of the current device.
    """
    import torch

    texts = []
    for name in devices - {"cpu", "meta"}:
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError):
            fields = internals.shared_properties(torch.device(name))
            fields.pop("total_memory", None)  # equal devices differ in it
            texts.append(_fields(fields))
    return "; ".join(sorted(texts))


def triton_environment(devices: set[str]) -> str:
    """Return the variables in Triton's own key if there may be code for an accelerator."""
    found = internals.triton_environment() if accelerators(devices) else {}
    return _fields(dict(sorted(found.items())))


def threads(details: KeyDetails, gm: GraphModule) -> str:
    """Return how generated code depends on the number of threads; ``""`` if it does not.

    C++ depends on the number (depth of parallel loops, ``num_threads(...)``, buffers of reductions)
    unless one of two options changes that. Code for other devices does not.

    Code from templates splits work among a fixed number of threads, even with
    ``cpp.dynamic_threads``: with fewer threads, some of the work is not done.
    """
    if internals.cpp_threads.get() >= 1:  # the code has this fixed number
        return ""
    count = read("get_num_threads")
    if internals.cpp_dynamic_threads.get():
        inductor = internals.inductor_config.get()
        may_use_templates = (
            inductor.max_autotune
            or inductor.max_autotune_gemm
            or inductor.cpu_backend != "cpp"
            or any(
                "flex_attention" in str(node.target)
                for _, module in describe.graph_modules(gm)
                for node in module.graph.nodes
            )
        )
        # Code for one thread lacks the locks that several threads need.
        return count if count == "1" or may_use_templates else "several"
    # Since torch 2.13, torch's own key has the number if there is code for the processor.
    return "" if hasattr(details, internals.ASKS_FOR_CPU_CODE) else count


# -- settings of the process

#: The processor's capability for ATen and Inductor; ATEN_CPU_CAPABILITY lowers it.
CAPABILITY = "backends.cpu.get_cpu_capability"
#: Switches of the libraries with kernels.
BACKENDS = (
    "backends.mkldnn.enabled backends.mkldnn.deterministic backends.cudnn.enabled "
    "backends.cudnn.deterministic backends.cudnn.benchmark backends.mha.get_fastpath_enabled "
    "backends.opt_einsum.enabled backends.opt_einsum.strategy backends.quantized.engine"
)
#: The precision for float32 of torch as a whole and of each library.
PRECISION = "backends.fp32_precision " + " ".join(
    f"backends.{library}.fp32_precision"
    for library in (
        *("mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"),
        *("cudnn", "cudnn.conv", "cudnn.rnn", "cuda.matmul"),
    )
)
# Tracing selects one of the allowed kernels.
_ATTENTION = (
    "backends.cuda.flash_sdp_enabled backends.cuda.mem_efficient_sdp_enabled "
    "backends.cuda.math_sdp_enabled backends.cuda.fp16_bf16_reduction_math_sdp_allowed "
    "backends.cuda.cudnn_sdp_enabled"
)


def attention() -> str:
    """Return the allowed attention kernels and their order."""
    return read(_ATTENTION, priority=list(internals.attention_priority.get()()))


def matmul_precision() -> str:
    """Return the setting for all libraries; it is undefined if a library has its own."""
    try:
        return read("get_float32_matmul_precision")
    except RuntimeError:
        return "by library"


def modes(device: device | None) -> str:
    """Return the modes that torch's own details lack; they have grad mode and autocast."""
    import torch

    devices = internals.autocast_devices.get()()
    return read(
        "is_inference_mode_enabled is_anomaly_enabled is_autocast_cache_enabled",
        view_replay=internals.view_replay_enabled.get()(),
        # A graph that enters autocast without a dtype uses the default.
        autocast_dtypes=[str(torch.get_autocast_dtype(device)) for device in devices],
        device=str(describe.without_index(torch.get_default_device(), device)),
        # The mode of this thread, which folds constants; torch has no function to read it.
        flush_denormal=sys.float_info.min / 2 == 0,
    )


def autocast() -> str:
    """Return the devices for which autocast is on."""
    import torch

    return str([(n, torch.is_autocast_enabled(n)) for n in internals.autocast_devices.get()()])


def joint_passes() -> str:
    """Return the names of joint passes, which torch's keys lack: torch only checks for uuid()."""
    functorch = internals.functorch_config.get()
    budget = "activation_memory_budget_"
    options = (f"{budget}runtime_estimator", f"{budget}solver", "joint_custom_pass")
    values = {name.removeprefix(budget): getattr(functorch, name) for name in options}
    return _fields(
        {
            name: [type(value).__qualname__, value.uuid()] if hasattr(value, "uuid") else value
            for name, value in values.items()
        }
    )


def options(names: Fields, config: AnyObject) -> str:
    """Return options of torch as text: those that are also read after Dynamo."""
    return _fields({name: internals.read_quietly(config.get(), name, None) for name in names})


# -- torch's own key
#
# There is a component for each attribute of torch's details, so attributes that a newer torch adds
# are in the key, too. torch's own pickler says how it reduces its objects for keys.

_LEFT_OUT = frozenset(name for fields in internals.CACHING_OPTIONS for name in fields.names)
# Counters of graphs in a process are in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})


def torch_components(
    details: KeyDetails, describer: DetailsDescriber
) -> Iterator[tuple[str, Finding]]:
    """Yield the name of each attribute of ``details``, and its component or reasons against it."""
    for name, value in vars(details).items():
        if name in internals.CACHING_DETAILS.names:  # our entries are always bundled
            continue
        if name == internals.CURRENT_DEVICE and describer.device is not None:
            continue
        if name == "aot_config":
            value = internals.without_backend_id(value)
        elif name == internals.PASSES_OF_BACKENDS:
            value = internals.passes_by_device(cast("Sequence[object]", value))
        elif name in internals.PROVENANCE_DETAILS.names and internals.debugging.get():
            value = 0 if value == 1 else value  # TORCH_COMPILE_DEBUG has set it to 1
        describer.codes, describer.last_of_user = [], None
        describer.is_for_options = name in internals.CONFIG_DETAILS.names
        try:
            if describer.is_for_options:
                yield name, _options(name, value, describer)
                continue
            text = describer.of(value)
            if code := "\n".join(describer.codes):
                yield name, Component.of(text, _summary(value), [("code", code)], 128 << 10)
            else:
                yield name, Component.of(text, _summary(value), _parts(value, describer))
        except Exception as exc:  # noqa: BLE001 - describing runs code of others
            yield name, _reasons_against(name, exc, describer.last_of_user)
    describer.is_for_options = False


def _reasons_against(name: str, error: BaseException, owner: type | None) -> list[BypassReason]:
    """Return why a component has no text; ``owner`` is the user's last class that was reduced."""
    while error.__cause__ is not None:
        error = error.__cause__
    if name in internals.CONFIG_DETAILS.names:
        if reasons := list(unpicklable_options()):
            return reasons
        if isinstance(error, UnidentifiedError):
            fix = suggested_fix(error.about)
            return [BypassReason("config", f"an option of {name} {error}", fix, target=name)]
    fix = "keep that object out of the compiled function: pass the tensors and numbers in it"
    if owner is not None:
        kind = describe.qualified_name(owner)
        fix = f"give {kind} a __reduce__ that does not depend on the process"
    return [BypassReason("component", f"{name} has no stable bytes: {error}", fix, target=name)]


def _options(
    name: str, value: bytes | Mapping[str, object], describer: DetailsDescriber
) -> Component:
    """Return the component of all options of one kind; it shows those without their default."""
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    texts = {n: describer.of(values[n]) for n in sorted(values) if n not in _LEFT_OUT}
    configs = {
        "autograd_config": internals.functorch_config,
        "inductor_config": internals.inductor_config,
    }
    changed, before = dict(texts), dict.fromkeys(texts, "")
    if name in configs:
        entries = configs[name].get()._config
        defaults = {n: entries[n].default for n in texts if n in entries}
        changed = {n: texts[n] for n, default in defaults.items() if default != values[n]}
        before = {n: f"{_short(defaults[n], describer.of(defaults[n]))} → " for n in changed}
    new = {n: _short(values[n], text) for n, text in changed.items()}
    shown = " ".join(f"{n}={text}" for n, text in new.items()) or "defaults"
    return Component.of(repr(texts), shown, ((n, before[n] + text) for n, text in new.items()))


def _short(setting: object, text: str) -> str:
    """Return a setting as text for people, with digits of its digest if it is not complete."""
    items = setting if isinstance(setting, (list, tuple)) else [setting]
    if {*map(type, items)} <= {*SCALARS}:
        return repr(setting)
    return f"{_item_text(setting)} #{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def unpicklable_options() -> Iterator[BypassReason]:
    """Yield a reason for each option of torch that cannot be in a key."""
    configs: list[Config] = [internals.functorch_config.get(), internals.inductor_config.get()]
    for config in configs:
        ignored = (
            *getattr(config, "_save_config_ignore", ()),  # some modules lack one of them
            *getattr(config, "_cache_config_ignore_prefix", ()),
        )
        for option, entry in config._config.items():
            if option.startswith(ignored) or entry.alias is not None:
                continue
            try:
                pickle.dumps(internals.read_quietly(config, option))
            except Exception as exc:  # noqa: BLE001 - whatever pickling meets
                name = f"{config.__name__}.{option}"
                fix = "set it to a function or class at the top level of a module"
                message = f"{name} cannot be pickled: {exc}"
                yield BypassReason("config", message, fix, target=name)


# -- its texts for people; different components may have equal ones


def _summary(value: object) -> str:
    import torch

    if isinstance(value, torch.fx.GraphModule):
        return f"graph of {len(value.graph.nodes)} nodes"
    if isinstance(value, (list, tuple)):
        return f"{len(value)}: {' '.join(map(_item_text, value[:20]))}" if value else "none"
    if isinstance(value, dict):
        return " ".join(f"{name}={_item_text(item)}" for name, item in value.items()) or "none"
    return _item_text(value)


def _item_text(value: object) -> str:
    """Return a value in a few characters, without addresses, which differ by process."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (*SCALARS, torch.dtype, torch.device, torch.SymInt)):
        return str(value)
    return type(value).__qualname__


def _parts(value: object, describer: DetailsDescriber) -> Iterator[tuple[str, str]]:
    """Return the named parts of a value that has a text, to describe differences."""
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
        value = {n: v for n, v in fields.items() if n not in _OF_THE_PROCESS and not callable(v)}
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, (dict, list, tuple)):  # isinstance with Mapping takes 3 ms
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return ((str(name), describer.for_people(part)) for name, part in pairs)


# -- the components


@dataclass(frozen=True)
class _Subject:
    """The subject of a digest: a whole graph, an FX graph, or settings alone."""

    details: KeyDetails
    gm: GraphModule
    inputs: Sequence[object]
    pickler: KeyPickler
    version: RegisteredVersion
    scope: Literal["aot", "fx", "settings"]
    compilers: Mapping[str, object] = field(default_factory=dict)

    @functools.cached_property
    def describer(self) -> DetailsDescriber:
        traced = self.scope != "aot"
        return DetailsDescriber(self.pickler, self.version, traced=traced, device=self.device)

    @functools.cached_property
    def devices(self) -> set[str]:
        return devices_of(self.gm, self.inputs)

    @functools.cached_property
    def device(self) -> device | None:
        return current_device(self.devices)

    @property
    def storage_offsets(self) -> str:
        return graph.storage_offsets(self.inputs) if graph.reads_storage_offsets(self.gm) else ""

    @functools.cached_property
    def is_for_cpu(self) -> bool:
        """Whether the compiled graph may have code for the processor."""
        return (
            not self.devices
            or not self.devices.isdisjoint(("cpu", "meta"))
            or bool(internals.inductor_config.get().cpp_wrapper)
            or internals.may_have_cpu_code(self.details)
        )


_ALL, _KEYS = {"aot", "fx", "settings"}, {"aot", "fx"}
_AOT, _FX, _SETTINGS = {"aot"}, {"fx"}, {"settings"}

#: The component of graphs that answer their first call with fake tensors. Their entries describe
#: the outputs.
FIRST_CALL = "compile.first_call"

#: The components of a key, in order, after one component for each attribute of torch's own details:
#: the name, the digests that include it, and the function that computes it. Only empty components
#: (``""`` or None) are left out. docs/keys.md explains each.
COMPONENTS: tuple[tuple[str, Container[str], Callable[[_Subject], Finding]], ...] = (
    # the machine and the installation
    ("s3cache.schema", _ALL, lambda _: str(SCHEMA)),
    ("machine.arch", _ALL, lambda _: platform.machine()),
    ("machine.os", _ALL, lambda _: platform.system()),
    ("machine.isa", _KEYS, lambda of: instruction_sets() if of.is_for_cpu else None),
    ("machine.accelerator", _KEYS, lambda of: accelerators(of.devices)),
    ("python.abi", _ALL, lambda _: python_abi()),
    ("torch.version", _ALL, lambda _: read("__version__")),
    ("torch.build", _ALL, lambda _: build_of_torch()),
    ("torch.cxx_abi", _ALL, lambda _: read("compiled_with_cxx11_abi")),
    ("triton.environment", _KEYS, lambda of: triton_environment(of.devices)),
    # settings of the process
    ("torch.cpu_capability", _KEYS, lambda of: read(CAPABILITY) if of.is_for_cpu else None),
    ("torch.num_threads", _KEYS, lambda of: threads(of.details, of.gm)),
    ("torch.num_threads", _SETTINGS, lambda of: read("get_num_threads") if of.inputs else None),
    ("torch.float32_matmul_precision", _ALL, lambda _: matmul_precision()),
    ("torch.precision", _ALL, lambda _: read(PRECISION)),
    ("torch.backends", _ALL, lambda _: read(BACKENDS)),
    ("torch.attention", _ALL, lambda _: attention()),
    ("torch.modes", _KEYS, lambda of: modes(of.device)),
    ("torch.modes", _SETTINGS, lambda _: modes(current_device({read("get_default_device")}))),
    ("functorch.budget", _ALL, lambda _: joint_passes()),
    ("dynamo.config", _ALL, lambda _: options(internals.DYNAMO_OPTIONS, internals.dynamo_config)),
    ("shapes.config", _ALL, lambda _: options(internals.SHAPES_OPTIONS, internals.shapes_config)),
    ("autocast", _SETTINGS, lambda _: autocast()),
    # the graph and its inputs
    ("graph.annotations", _KEYS, lambda of: graph.node_annotations(of.gm, of.describer)),
    ("graph.constants", _KEYS, lambda of: graph.constants(of.gm)),
    ("inputs.sharing", _KEYS, lambda of: graph.sharing(of.inputs)),
    ("inputs.places", _KEYS, lambda of: of.storage_offsets),
    ("inputs.non_leaf", _KEYS, lambda of: graph.non_leaf_inputs(of.inputs)),
    ("inputs.sizes", _KEYS, lambda of: internals.known_of_sizes(of.gm, of.inputs)),
    (FIRST_CALL, _KEYS, lambda _: "fake" if internals.is_first_call_fake() else ""),
    # code that is not torch's
    ("graph.operators", _AOT, lambda of: code.custom_operators(of.gm, of.version)),
    ("graph.operators", _FX, lambda of: code.traced_operators(of.gm, of.version)),
    ("graph.versions", _KEYS, lambda of: code.registered_versions(of.gm, of.version)),
    ("graph.values", _FX, lambda of: graph.traced_values(of.gm, of.device)),
    ("graph.fakes", _FX, lambda of: code.refaked_operators(of.gm, of.version)),
    ("graph.functions", _AOT, lambda of: code.functions(of.gm, of.version)),
    ("graph.subclasses", _AOT, lambda of: code.subclasses(of.gm, of.inputs, of.version)),
    ("compile.compilers", _AOT, lambda of: code.compilers_component(of.compilers, of.version)),
    (
        "torch.overrides",
        _KEYS,
        lambda of: overrides(of.version, again=False, traced=of.scope == "fx"),
    ),
    ("torch.overrides", _SETTINGS, lambda of: overrides(of.version, traced=True)),
)


def key_of(
    details: KeyDetails,
    pickler: KeyPickler,
    registered_version: RegisteredVersion,
    *,
    compilers: Mapping[str, object] | None = None,
    traced: bool = False,
) -> Key | list[BypassReason]:
    """Return the key of a graph, or the reasons why it has none.

    Args:
        details: the input of torch's own key.
        pickler: torch's pickler for keys.
        compilers: functions that compile the graph, if they may be the user's, by name.
        traced: whether it is an FX graph, on which no more user code runs.
    """
    gm, scope = details.gm, "fx" if traced else "aot"
    inputs, version = details.example_inputs, registered_version
    return _key(_Subject(details, gm, inputs, pickler, version, scope, compilers or {}))  # type: ignore[arg-type]


def _key(subject: _Subject) -> Key | list[BypassReason]:
    components: dict[str, Component] = {}
    reasons: list[BypassReason] = []
    own = ((name, find(subject)) for name, scopes, find in COMPONENTS if subject.scope in scopes)
    for name, finding in chain(torch_components(subject.details, subject.describer), own):
        if isinstance(finding, list):
            reasons += finding
        elif finding:
            components[name] = Component.of(finding) if isinstance(finding, str) else finding
    return reasons or Key(components, str(subject.device or ""))


def settings_digest(*, of_threads: bool, registered_version: RegisteredVersion) -> str | None:
    """Digest all settings that affect the code of any graph now; None if they have no digest.

    ``of_threads`` says whether to include the number of threads, on which only code for the
    processor depends.
    """
    gm, processor = _nothing()
    inputs = [processor] if of_threads else []
    with (
        described_passes(registered_version, traced=True),
        internals.skip_backend_init(),
        internals.without_modes.get()(),
        internals.tracing.get()(None),
    ):
        try:
            details = internals.details_of.get()(gm, inputs, {}, [])
        except Exception:  # noqa: BLE001 - torch takes no plain function for a pass
            return None
    for name in (*internals.GRAPHS_DETAILS.names, internals.CURRENT_DEVICE):
        details.__dict__.pop(name, None)
    pickler = internals.fx_pickler.get()(gm)
    key = _key(_Subject(details, gm, inputs, pickler, registered_version, "settings"))
    return key.digest if isinstance(key, Key) else None


def settings_text(registered_version: RegisteredVersion) -> str | None:
    """Return all settings as text without importing Inductor's compiler; None if they have none.

    The text has at least the content of :func:`settings_digest`, and is only compared with another
    such text.
    """
    subject = cast("_Subject", SimpleNamespace(version=registered_version, inputs=(0,)))
    configs = internals.functorch_config.get(), internals.inductor_config.get()
    texts = [internals.options_text(each) for each in configs]
    findings = [find(subject) for _, scopes, find in COMPONENTS if "settings" in scopes]
    if None in texts or any(isinstance(finding, list) for finding in findings):
        return None
    return "\n".join(map(str, (*texts, *findings)))


@functools.cache
def _nothing() -> tuple[GraphModule, Tensor]:
    """Return an empty graph, and an input on the processor."""
    import torch
    from torch.fx import Graph, GraphModule

    empty = Graph()
    empty.output(())
    with internals.without_modes.get()():
        return GraphModule({}, empty), torch.empty(0, device="cpu")
