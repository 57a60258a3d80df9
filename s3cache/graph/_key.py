"""The key of a graph: a digest over named components, each with a digest of its own.

A whole graph has a key only if no code but torch's own takes part in tracing it. The key of an FX
graph, the second level, has what was traced, so code that has done its work by then does not matter
to it.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from s3cache.artifact import SCHEMA
from s3cache.entries import digest_of
from s3cache.graph import _environment as env
from s3cache.graph import _graph as graph
from s3cache.graph import _user_code as code
from s3cache.graph._graph import Component
from s3cache.graph._overrides import overrides
from s3cache.graph._results import BypassReason, Finding, RegisteredVersion
from s3cache.graph._safety import described_passes, unsafe_graph_reasons
from s3cache.graph._torch_details import CanonicalPickler, torch_components
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import KeyDetails, KeyPickler


@dataclass(frozen=True, slots=True)
class Key:
    """A cache key that can say what it is made of."""

    components: Mapping[str, Component]

    @property
    def digest(self) -> str:
        """64 hexadecimal digits; equal keys have equal components, whatever their order."""
        return digest_of({name: each.digest for name, each in self.components.items()})

    @property
    def parts(self) -> dict[str, Mapping[str, str]]:
        """What components consist of, by name, where the value does not say it."""
        return {name: each.parts for name, each in self.components.items() if each.parts}

    def without_parts(self) -> Key:
        """Return the same key, which takes less memory."""
        return Key(
            {name: Component(one.digest, one.value) for name, one in self.components.items()}
        )


@dataclass(frozen=True)
class _Subject:
    """What a digest is made of: a whole graph, an FX graph, or settings alone."""

    details: KeyDetails
    gm: GraphModule
    inputs: Sequence[object]
    pickler: KeyPickler
    version: RegisteredVersion
    scope: Literal["aot", "fx", "settings"]
    compilers: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_traced(self) -> bool:
        return self.scope != "aot"

    @functools.cached_property
    def canonical(self) -> CanonicalPickler:
        return CanonicalPickler(self.pickler, self.version, traced=self.is_traced)

    @functools.cached_property
    def devices(self) -> set[str]:
        return env.devices_of(self.gm, self.inputs)

    @property
    def storage_offsets(self) -> str:
        return graph.storage_offsets(self.inputs) if graph.reads_storage_offsets(self.gm) else ""

    @functools.cached_property
    def is_for_cpu(self) -> bool:
        return env.needs_processor(self.details, self.devices)


_ALL, _KEYS = {"aot", "fx", "settings"}, {"aot", "fx"}
_AOT, _FX, _SETTINGS = {"aot"}, {"fx"}, {"settings"}

#: The component of graphs that have to answer their first call with fake tensors, and of no others:
#: what they answer is in their entries.
FIRST_CALL = "compile.first_call"

#: What a key is made of, in order, after one component for each attribute of torch's own details:
#: the name of a component, the digests that have it, and what computes it. Nothing is left out but
#: a component that has nothing to say (``""`` or None). docs/keys.md says what each is for.
COMPONENTS: tuple[tuple[str, Container[str], Callable[[_Subject], Finding]], ...] = (
    # the machine and the installation
    ("s3cache.schema", _ALL, lambda _: str(SCHEMA)),
    ("machine.arch", _ALL, lambda _: platform.machine()),
    ("machine.os", _ALL, lambda _: platform.system()),
    ("machine.isa", _KEYS, lambda of: env.instruction_sets() if of.is_for_cpu else None),
    ("machine.accelerator", _KEYS, lambda of: env.accelerators(of.devices)),
    ("python.abi", _ALL, lambda _: env.python_abi()),
    ("torch.version", _ALL, lambda _: env.read("__version__")),
    ("torch.build", _ALL, lambda _: env.build_of_torch()),
    ("torch.cxx_abi", _ALL, lambda _: env.read("compiled_with_cxx11_abi")),
    ("triton.environment", _KEYS, lambda of: env.triton_variables(of.devices)),
    # settings of the process
    ("torch.cpu_capability", _KEYS, lambda of: env.read(env.CAPABILITY) if of.is_for_cpu else None),
    ("torch.num_threads", _KEYS, lambda of: env.threads(of.details, of.gm)),
    ("torch.num_threads", _SETTINGS, lambda of: env.read("get_num_threads") if of.inputs else None),
    ("torch.float32_matmul_precision", _ALL, lambda _: env.matmul_precision()),
    ("torch.precision", _ALL, lambda _: env.read(env.PRECISION)),
    ("torch.backends", _ALL, lambda _: env.read(env.BACKENDS)),
    ("torch.attention", _ALL, lambda _: env.attention()),
    ("torch.modes", _ALL, lambda _: env.modes()),
    ("functorch.budget", _ALL, lambda _: env.joint_passes()),
    ("dynamo.config", _ALL, lambda _: env.dynamo_options()),
    ("shapes.config", _ALL, lambda _: env.shape_options()),
    ("autocast", _SETTINGS, lambda _: env.autocast()),
    # the graph and its inputs
    ("graph.annotations", _KEYS, lambda of: graph.node_annotations(of.gm, of.canonical)),
    ("graph.constants", _KEYS, lambda of: graph.constants(of.gm)),
    ("inputs.sharing", _KEYS, lambda of: graph.sharing(of.inputs)),
    ("inputs.places", _KEYS, lambda of: of.storage_offsets),
    ("inputs.non_leaf", _KEYS, lambda of: graph.non_leaf_inputs(of.inputs)),
    ("inputs.bounds", _KEYS, lambda _: graph.size_bounds()),
    (FIRST_CALL, _KEYS, lambda _: "fake" if internals.is_first_call_fake() else ""),
    # code that is not torch's
    ("graph.operators", _AOT, lambda of: code.custom_operators(of.gm, of.version)),
    ("graph.operators", _FX, lambda of: code.traced_operators(of.gm, of.version)),
    ("graph.vouched", _KEYS, lambda of: code.registered_versions(of.gm, of.version)),
    ("graph.values", _FX, lambda of: graph.traced_values(of.gm)),
    ("graph.fakes", _FX, lambda of: code.refaked_operators(of.gm, of.version)),
    ("graph.functions", _AOT, lambda of: code.functions(of.gm, of.version)),
    ("graph.subclasses", _AOT, lambda of: code.subclasses(of.gm, of.inputs, of.version)),
    ("compile.compilers", _AOT, lambda of: code.compilers_component(of.compilers, of.version)),
    ("torch.overrides", _KEYS, lambda of: _overrides(of.version, traced=of.is_traced)),
    ("torch.overrides", _SETTINGS, lambda of: _overrides(of.version, again=True, traced=True)),
)


def key_of(
    details: KeyDetails,
    pickler: KeyPickler,
    registered_version: RegisteredVersion,
    *,
    compilers: Mapping[str, object] | None = None,
    traced: bool = False,
) -> Key | list[BypassReason]:
    """Digest torch's details of a graph, and what torch leaves out; or return what is against it.

    Args:
        details: what torch's own key is made of.
        pickler: torch's pickler for keys.
        compilers: what compiles the graph, if it may be the user's, by name.
        traced: whether it is an FX graph: all that users' code has made of a graph.
    """
    gm, inputs = details.gm, details.example_inputs
    assert gm is not None
    scope: Literal["aot", "fx"] = "fx" if traced else "aot"
    return _key(_Subject(details, gm, inputs, pickler, registered_version, scope, compilers or {}))


def _key(subject: _Subject) -> Key | list[BypassReason]:
    findings = [*torch_components(subject.details, subject.canonical)]
    findings += (
        (name, compute(subject)) for name, scopes, compute in COMPONENTS if subject.scope in scopes
    )
    components: dict[str, Component] = {}
    reasons: list[BypassReason] = []
    for name, finding in findings:
        if isinstance(finding, list):
            reasons += finding
        elif finding:
            components[name] = (
                finding if isinstance(finding, Component) else Component.of_text(finding)
            )
    return reasons or Key(components)


def bypass_reasons(
    gm: GraphModule, inputs: Sequence[object], registered_version: RegisteredVersion
) -> list[BypassReason]:
    """Return every reason why a whole graph has no key, if its nodes or the process allow none.

    Otherwise the key itself finds what else there may be against it.
    """
    reasons = unsafe_graph_reasons(gm, inputs, registered_version)
    if reasons:
        with contextlib.suppress(Exception):
            findings: list[Finding] = [
                code.custom_operators(gm, registered_version),
                code.subclasses(gm, inputs, registered_version),
                _overrides(registered_version, again=True),
            ]
            for finding in findings:
                reasons += finding if isinstance(finding, list) else []
    return reasons


def _overrides(
    registered_version: RegisteredVersion, *, again: bool = False, traced: bool = False
) -> Finding:
    component, reasons = overrides(registered_version, again=again, traced=traced)
    return reasons or component


def settings_digest(*, of_threads: bool, registered_version: RegisteredVersion) -> str | None:
    """Digest all that code of any graph would be made under now; None if it has no digest.

    ``of_threads`` says whether their number matters: not to code for another device.
    """
    gm, processor = _nothing()
    inputs = [processor] if of_threads else []
    with (
        described_passes(registered_version, traced=True),
        internals.backends_unasked(),
        internals.without_modes.get()(),
        internals.tracing.get()(None),
    ):
        try:
            details = internals.details_of.get()(gm, inputs, {}, [])
        except Exception:  # noqa: BLE001 - torch takes no plain function for a pass
            return None
    for name in internals.GRAPHS_DETAILS.names:
        details.__dict__.pop(name, None)
    pickler = internals.fx_pickler.get()(gm)
    key = _key(_Subject(details, gm, inputs, pickler, registered_version, "settings"))
    return key.digest if isinstance(key, Key) else None


@functools.cache
def _nothing() -> tuple[GraphModule, Tensor]:
    """Return a graph of nothing, and an input that is on the processor."""
    import torch
    from torch.fx import Graph, GraphModule

    empty = Graph()
    empty.output(())
    with internals.without_modes.get()():
        return GraphModule({}, empty), torch.empty(0, device="cpu")
