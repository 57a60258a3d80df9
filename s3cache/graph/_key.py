"""The key of a graph: a digest over named components, each with a digest of its own.

torch collects all that its compiled code depends on in one details object; every attribute of it is
a component, so what a newer torch adds is covered. The other modules of this package add what torch
leaves out; :func:`key_of` has all of them, in order.

A whole graph has a key only if no code but torch's own takes part in tracing it. The key of the
second level has what was traced, so code that has done its part by then does not matter to it.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, cast

from s3cache.entries import digest_of
from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._operators import (
    function_component,
    operator_component,
    refaked_operators,
)
from s3cache.graph._overrides import overrides
from s3cache.graph._passes import compilers_text, described_passes
from s3cache.graph._safety import Unsafe, graph_modules, way_out
from s3cache.graph._stable import Component, StableBytes, bounded, shown_parts
from s3cache.graph._subclasses import subclass_component
from s3cache.graph._surroundings import (
    PROCESSOR,
    device_components,
    graph_components,
    input_components,
    machine_components,
    needs_processor,
    thread_components,
)
from s3cache.graph._traced import traced_values
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import Config, KeyDetails, KeyPickler

__all__ = ["Key", "key_of", "settings_digest", "unpicklable_options"]


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
        """What each component consists of, of those whose value does not say it."""
        return {name: each.parts for name, each in self.components.items() if each.parts}

    def without_parts(self) -> Key:
        """The same key, which takes less memory."""
        return Key(
            {name: Component(one.digest, one.value) for name, one in self.components.items()}
        )


def key_of(
    details: KeyDetails,
    pickler: KeyPickler,
    *,
    vouched: Callable[[object], str | None],
    compilers: Mapping[str, object] | None = None,
    traced: bool = False,
) -> Key | list[Unsafe]:
    """Digest torch's details of a graph, and what torch leaves out; or every reason against it.

    Args:
        details: what torch's own key is made of.
        pickler: torch's pickler for keys.
        vouched: the version of a function, operator or module that the user vouched for.
        compilers: what compiles the graph, of what may be the user's, by name.
        traced: whether the graph is all that code of the user's has made of it: one half.
    """
    stable = StableBytes(pickler, vouched, traced=traced)
    components, unsafe = _details_components(details, stable)
    components.update(machine_components())
    if not needs_processor(details):
        for name in PROCESSOR:
            del components[name]
    components.update(device_components(details))
    components.update(thread_components(details))
    if details.gm is not None:
        components.update(graph_components(details.gm, stable))
    components.update(input_components(details.gm, details.example_inputs))
    found, reasons = _code_components(
        details.gm, details.example_inputs, vouched, compilers or {}, traced=traced, again=False
    )
    components.update(found)
    unsafe += reasons
    return unsafe or Key(components)


def unsafe_code(
    gm: GraphModule, inputs: Sequence[object], vouched: Callable[[object], str | None]
) -> list[Unsafe]:
    """Return what else keeps ``gm`` from the first level, where :func:`unsafe_parts` does."""
    _, reasons = _code_components(gm, inputs, vouched, {}, traced=False, again=True)
    return [reason for reason in reasons if reason.code != "function"]


def _code_components(
    gm: GraphModule | None,
    inputs: Sequence[object],
    registered: Callable[[object], str | None],
    compilers: Mapping[str, object],
    *,
    traced: bool,
    again: bool,
) -> tuple[dict[str, Component], list[Unsafe]]:
    """Return components for code that is not torch's, and reasons why some of it allows no key."""
    found: dict[str, tuple[Component | None, list[Unsafe]]] = {}
    if gm is not None:
        found["graph.operators"] = operator_component(gm, registered, traced=traced)
        found["graph.vouched"] = _versions_component(gm, registered)
    if traced:
        if gm is not None:
            found["graph.values"] = traced_values(gm), []
            found["graph.fakes"] = refaked_operators(gm, registered)
    else:
        if gm is not None:
            found["graph.functions"] = function_component(gm, registered)
        found["graph.subclasses"] = subclass_component(gm, inputs, registered)
        found["compile.compilers"] = _compilers_component(compilers, registered)
    found["torch.overrides"] = overrides(registered, again=again, traced=traced)
    components = {name: each for name, (each, _) in found.items() if each is not None}
    return components, [reason for _, reasons in found.values() for reason in reasons]


def _compilers_component(
    compilers: Mapping[str, object], registered: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    try:
        text = compilers_text(compilers, registered) if compilers else ""
    except UnidentifiedError as exc:
        otherwise = "give a function that a module defines"
        has_name = hasattr(exc.about, "__qualname__")
        fix = way_out(exc.about, f"if it depends on its inputs alone; or {otherwise}")
        message = f"is compiled by {exc}"
        return None, [Unsafe("custom-callable", message, fix if has_name else otherwise)]
    return (Component.of_text(text) if text else None), []


def settings_digest(*, of_threads: bool, vouched: Callable[[object], str | None]) -> str | None:
    """All that code of any graph would be made under at this moment; ``None`` if it has no digest.

    Args:
        vouched: the version of a function or operator that the user vouched for.
        of_threads: whether the number of threads matters: not to code for another device.
    """
    import torch

    gm, processor = _nothing()
    inputs = [processor] if of_threads else []
    with (
        described_passes(vouched, traced=True),
        internals.backends_unasked(),
        internals.without_modes.get()(),
        internals.tracing.get()(None),
    ):
        details = internals.details_of.get()(gm, inputs, {}, [])
    for name in internals.GRAPHS_DETAILS.names:
        vars(details).pop(name, None)
    stable = StableBytes(internals.fx_pickler.get()(gm), vouched, traced=True)
    components, unsafe = _details_components(details, stable)
    if unsafe:
        return None
    components.update(machine_components())
    for name in PROCESSOR:  # if it matters the key has it, and it stays as long as the process
        del components[name]
    if of_threads:
        components["torch.num_threads"] = Component.of_text(str(torch.get_num_threads()))
    replaced, unsafe = overrides(vouched, traced=True)
    if unsafe:
        return None
    if replaced is not None:
        components["torch.overrides"] = replaced
    components["autocast"] = Component.of_text(str(_autocast()))
    return Key(components).digest


@functools.cache
def _nothing() -> tuple[GraphModule, Tensor]:
    """A graph of nothing, and an input that is on the processor."""
    import torch
    from torch.fx import Graph, GraphModule

    graph = Graph()
    graph.output(())
    with internals.without_modes.get()():
        return GraphModule({}, graph), torch.empty(0, device="cpu")


def _autocast() -> list[tuple[str, bool]]:
    import torch

    devices = internals.autocast_devices.get()()
    return [(device, torch.is_autocast_enabled(device)) for device in devices]


def _versions_component(
    gm: GraphModule, registered: Callable[[object], str | None]
) -> tuple[Component | None, list[Unsafe]]:
    """Return the versions that the user registered what ``gm`` calls with."""
    called: list[object] = [type(module) for module in gm.modules()]
    for _, module in graph_modules(gm):
        called += (node.target for node in module.graph.nodes if node.op == "call_function")
    versions = {
        f"{internals.name_of(target)}={version}"
        for target in called
        if (version := registered(target)) is not None
    }
    return (Component.of_text(" ".join(sorted(versions))) if versions else None), []


# -- torch's own details

_LEFT_OUT = frozenset(name for fields in internals.CACHING_OPTIONS for name in fields.names)
_SCALARS = (type(None), bool, int, float, str)


def _details_components(
    details: KeyDetails, stable: StableBytes
) -> tuple[dict[str, Component], list[Unsafe]]:
    """A component for each attribute, and those attributes that have none."""
    components: dict[str, Component] = {}
    unsafe: list[Unsafe] = []
    for name, value in vars(details).items():
        if name in internals.CACHING_DETAILS.names:  # entries here are bundled in any case
            continue
        try:
            if name in internals.CONFIG_DETAILS.names:
                components[name] = _config_component(name, value, stable)
            else:
                if name == "aot_config":
                    value = internals.without_backend_id(value)
                elif name == internals.PASSES_OF_BACKENDS:
                    value = internals.passes_by_device(cast("Sequence[object]", value))
                elif name in internals.PROVENANCE_DETAILS.names:
                    value = internals.without_debugging(value)
                data = stable(value)
                parts = shown_parts(value, stable)
                components[name] = Component.of_bytes(data, _shown(value), parts)
        except Exception as exc:  # noqa: BLE001 - pickling runs anybody's code
            unsafe += _reasons(name, exc)
    return components, unsafe


def _reasons(name: str, error: Exception) -> list[Unsafe]:
    innermost, is_config = _innermost(error), name in internals.CONFIG_DETAILS.names
    options = list(unpicklable_options()) if is_config else []
    if not options and is_config and isinstance(innermost, UnidentifiedError):
        fix = way_out(innermost.about)
        return [Unsafe("config", f"an option of {name} {innermost}", fix, target=name)]
    return options or [
        Unsafe(
            "component",
            f"{name} has no stable bytes: {_innermost(error)}",
            "give what it holds a __reduce__ that does not depend on the process",
            target=name,
        )
    ]


def _innermost(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _innermost(error.__cause__)


# -- options

# The last one of each kind: most graphs of a process are compiled under one configuration.
_last: dict[str, tuple[object, Component]] = {}


def _config_component(
    name: str, value: bytes | Mapping[str, object], stable: StableBytes
) -> Component:
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    plain = []
    others = []
    for option in sorted(values):
        setting = values[option]
        if option in _LEFT_OUT:
            continue
        if type(setting) in _SCALARS:
            plain.append((option, type(setting), setting))
        else:
            others.append((option, _ordered(setting, stable.vouched)))
    data = stable(others)
    known = _last.get(name)
    if known is None or known[0] != (plain, data):
        whole = repr([(option, setting) for option, _, setting in plain]).encode() + data
        changed = _changed(name, values, stable)
        shown = " ".join(f"{option}={text}" for option, (text, _) in changed.items()) or "defaults"
        parts = bounded((option, default + text) for option, (text, default) in changed.items())
        known = (plain, data), Component.of_bytes(whole, shown, parts)
        _last[name] = known
    return known[1]


def _ordered(value: object, vouched: Callable[[object], str | None]) -> object:
    """Return ``value`` with sets in one order for all processes, and identities of functions."""
    if isinstance(value, dict):
        return [(name, _ordered(value[name], vouched)) for name in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_ordered(each, vouched) for each in value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, FunctionType):
        return value, identity(value, vouched)
    return value


def _changed(
    name: str, values: Mapping[str, object], stable: StableBytes
) -> dict[str, tuple[str, str]]:
    """The options that are not as torch has them by default, and ``DEFAULT → `` of each."""
    configs: dict[str, Config] = {
        "autograd_config": internals.functorch_config.get(),
        "inductor_config": internals.inductor_config.get(),
    }
    known = configs[name]._config if name in configs else None
    changed = {}
    for option, setting in sorted(values.items()):
        if option in _LEFT_OUT or (known is not None and option not in known):
            continue
        text, default = _option_text(option, setting, stable), ""
        if known is not None:
            if known[option].default == setting:
                continue
            default = f"{_option_text(option, known[option].default, stable)} → "
        changed[option] = text, default
    return changed


def _option_text(option: str, setting: object, stable: StableBytes) -> str:
    """The setting in words; where it has none, with the beginning of its digest."""
    if type(setting) in _SCALARS:
        return repr(setting)
    ordered = _ordered(setting, stable.vouched)
    if _is_told(ordered):
        return repr(setting)
    digest = hashlib.sha256(stable((option, ordered))).hexdigest()[:8]
    return f"{_shown_item(setting)} #{digest}"


def _is_told(value: object) -> bool:
    """Whether ``repr`` says all of it, and nothing of the process that it is in."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_told, value))
    return type(value) in _SCALARS


def unpicklable_options() -> Iterator[Unsafe]:
    """Options of torch that cannot be part of a key."""
    configs: tuple[Config, ...] = (
        internals.functorch_config.get(),
        internals.inductor_config.get(),
    )
    for config in configs:
        for option in _keyed_options(config):
            try:
                pickle.dumps(internals.read_quietly(config, option))
            except Exception as exc:  # noqa: BLE001 - whatever pickling meets
                yield Unsafe(
                    "config",
                    f"{config.__name__}.{option} cannot be pickled: {exc}",
                    "set it to a function or class at the top of a module",
                    target=f"{config.__name__}.{option}",
                )


def _keyed_options(config: Config) -> Iterator[str]:
    """The options that torch makes a part of its keys."""
    ignored = (
        *getattr(config, "_save_config_ignore", ()),  # not every module has both of them
        *getattr(config, "_cache_config_ignore_prefix", ()),
    )
    for option, entry in config._config.items():
        if not option.startswith(ignored) and entry.alias is None:
            yield option


# -- for people


def _shown(value: object) -> str:
    import torch

    if isinstance(value, (bool, int, float, type(None))):
        return repr(value)
    if isinstance(value, (str, torch.dtype)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()[:32]
    if isinstance(value, torch.fx.GraphModule):
        return f"graph of {len(value.graph.nodes)} nodes"
    if isinstance(value, (list, tuple)):
        shown = " ".join(_shown_item(item) for item in value[:20])
        return f"{len(value)}: {shown}" if value else "none"
    if isinstance(value, dict):
        items = (f"{name}={_shown_item(item)}" for name, item in value.items())
        return " ".join(items) or "none"
    return type(value).__qualname__


def _shown_item(value: object) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.SymInt)):
        return str(value)
    return type(value).__qualname__
