"""Components of torch's own key: one for each attribute of its details object."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import pickle
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

from s3cache.graph._describe import (
    PLAIN_KINDS,
    Describer,
    UnidentifiedError,
    identity,
    without_index,
)
from s3cache.graph._graph import (
    autograd_function_text,
    code_on,
    graph_as_text,
    without_aot_names,
)
from s3cache.graph._origin import origin_of, value_at
from s3cache.graph._results import (
    BypassReason,
    Component,
    Finding,
    RegisteredVersion,
    bounded,
    qualified_name,
    suggested_fix,
)
from s3cache.graph._user_code import context_hash, table_text
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor, device
    from torch.fx import GraphModule

    from s3cache.torch_api.protocols import (
        Config,
        DecompositionTable,
        DeviceMesh,
        Function,
        KeyDetails,
        KeyPickler,
    )

_Object = TypeVar("_Object")
_ALL_CHARACTERS = 128 << 10

# -- torch's own key
#
# There is a component for each attribute of torch's details, so attributes that a newer torch adds
# are in the key, too. torch's own pickler says how it reduces its objects for keys.

_LEFT_OUT = frozenset(name for fields in internals.CACHING_OPTIONS for name in fields.names)
_SCALARS = (type(None), bool, int, float, complex, str)
# Counters of graphs in a process are in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})
# The last component of options of each kind: most graphs of a process have the same.
_last_options: dict[str, tuple[dict[str, str], Component]] = {}


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
        try:
            if name in internals.CONFIG_DETAILS.names:
                yield name, _options(name, value, describer)
                continue
            text = describer.of(value)
            code = [("code", "\n".join(describer.codes))]
            is_graph = bool(describer.codes)
            parts = (
                bounded(code, _ALL_CHARACTERS) if is_graph else bounded(_parts(value, describer))
            )
            yield (
                name,
                Component.of_bytes(text.encode(errors="surrogatepass"), _summary(value), parts),
            )
        except Exception as exc:  # noqa: BLE001 - describing runs code of others
            yield name, _reasons_against(name, exc, describer.last_of_user)


def _reasons_against(name: str, error: BaseException, owner: type | None) -> list[BypassReason]:
    """Return why a component has no text; ``owner`` is the user's last class that was reduced."""
    while error.__cause__ is not None:
        error = error.__cause__
    if name in internals.CONFIG_DETAILS.names:
        if options := list(unpicklable_options()):
            return options
        if isinstance(error, UnidentifiedError):
            fix = suggested_fix(error.about)
            return [BypassReason("config", f"an option of {name} {error}", fix, target=name)]
    fix = "keep that object out of the compiled function: pass the tensors and numbers in it"
    if owner is not None:
        fix = f"give {qualified_name(owner)} a __reduce__ that does not depend on the process"
    return [BypassReason("component", f"{name} has no stable bytes: {error}", fix, target=name)]


def _options(
    name: str, value: bytes | Mapping[str, object], describer: DetailsDescriber
) -> Component:
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    describer.is_for_options = True
    try:
        texts = {n: describer.of(values[n]) for n in sorted(values) if n not in _LEFT_OUT}
        known = _last_options.get(name)
        if known is None or known[0] != texts:
            changed = dict(_changed(name, values, texts, describer))
            shown = " ".join(f"{n}={new}" for n, (new, _) in changed.items()) or "defaults"
            parts = bounded((n, default + new) for n, (new, default) in changed.items())
            data = repr(texts).encode(errors="surrogatepass")
            known = _last_options[name] = texts, Component.of_bytes(data, shown, parts)
        return known[1]
    finally:
        describer.is_for_options = False


def _changed(
    name: str, values: Mapping[str, object], texts: Mapping[str, str], describer: DetailsDescriber
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the options without their default value, each with its text and ``DEFAULT → ``."""
    configs: dict[str, Config] = {
        "autograd_config": internals.functorch_config.get(),
        "inductor_config": internals.inductor_config.get(),
    }
    known = configs[name]._config if name in configs else None
    for option, text in texts.items():
        if known is None:
            yield option, (_short(values[option], text), "")
        elif option in known and (default := known[option].default) != values[option]:
            shown = f"{_short(default, describer.of(default))} → "
            yield option, (_short(values[option], text), shown)


def _short(setting: object, text: str) -> str:
    """Return a setting as text for people, with digits of its digest if it is not complete."""
    if isinstance(setting, (list, tuple)) and {*map(type, setting)} <= {*_SCALARS}:
        return repr(setting)
    if type(setting) in _SCALARS:
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

    if isinstance(value, bytes):
        return value.hex()[:32]
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
    if isinstance(value, (*_SCALARS, torch.dtype, torch.device, torch.SymInt)):
        return str(value)
    return type(value).__qualname__


def _parts(value: object, describer: DetailsDescriber) -> Iterator[tuple[str, str]]:
    """Yield the named parts of a value that has a text, to describe differences."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):  # isinstance with Mapping takes 3 ms
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    elif dataclasses.is_dataclass(value):
        names = (each.name for each in dataclasses.fields(value))
        fields = ((n, getattr(value, n, None)) for n in names if n not in _OF_THE_PROCESS)
        pairs = ((name, part) for name, part in fields if not callable(part))
    for name, part in pairs:
        yield str(name), describer.for_people(part)


class DetailsDescriber(Describer):
    """Describes torch's details by content: tensors by their metadata, graphs by their code.

    Attributes:
        codes: of the graphs in the last value, outermost first.
        last_of_user: the class of the last object that is the user's.
        is_for_options: whether functions need an identity; others are named in a graph.
    """

    max_depth = 150

    def __init__(
        self,
        pickler: KeyPickler,
        registered_version: RegisteredVersion = lambda _: None,
        *,
        traced: bool = False,
        device: device | None = None,
    ) -> None:
        from torch import Tensor, strided
        from torch.fx import GraphModule

        super().__init__(device)
        self.codes: list[str] = []
        self.last_of_user: type | None = None
        self.is_for_options, self._meshes = False, 0
        self._registered_version, self._traced = registered_version, traced
        self._inherited = internals.inherited_reducer(pickler)
        self._reducers = pickler.dispatch_table
        self._metadata_of = internals.tensor_metadata.get()
        self._is_wrapper = internals.is_wrapper_subclass.get()
        self._source, self._fake = internals.source.get(), internals.fake_tensor.get()
        self._graph, self._tensor, self._strided = GraphModule, Tensor, strided
        self._mesh, self._script = internals.device_mesh.get(), internals.script_object.get()
        self._state = internals.backward_state.get()
        self._table = internals.given_decompositions.find()
        # A step has hundreds of inputs. Objects are kept, so that their ids stay unique.
        self._texts: dict[int, tuple[object, str | None]] = {}

    def special(self, value: object) -> str | None:
        kind = type(value)
        if kind is self._fake:
            return self._once(cast("Tensor", value), self._tensor_text)
        if kind is list and PLAIN_KINDS.issuperset(map(type, cast("list[object]", value))):
            return repr(value)
        if isinstance(value, self._source):  # parameters of a module share their base sources
            return self._once(value, self._source_text)
        if isinstance(value, self._tensor) and self._is_wrapper(value):
            return self._subclass_text(value)
        if isinstance(value, self._graph):
            return self._graph_text(value)
        if kind is self._script:  # stands for an object that a graph takes as input
            value = getattr(value, internals.REAL_OBJECT)
        if isinstance(value, self._mesh):
            return self._mesh_text(value)
        if kind is self._state:  # it has no content yet
            return "BackwardState"
        if kind is self._table:
            table = cast("DecompositionTable", value).table
            return f"decompositions {table_text(table, self._registered_version)}"
        return None

    def _once(self, value: _Object, describe: Callable[[_Object], str | None]) -> str | None:
        known = self._texts.get(id(value))
        if known is None:
            known = self._texts[id(value)] = value, describe(value)
        return known[1]

    def code(self, value: object) -> str:
        reduced = self._inherited(value)
        if reduced is not NotImplemented:
            return self._reduced_text(value, reduced)
        if isinstance(value, (type, types.FunctionType)):
            text = qualified_name(value)
            if value_at(value.__module__, value.__qualname__) is not value:
                text = repr(pickle.dumps(value))  # raises the reason why it cannot be imported
            is_function = isinstance(value, types.FunctionType) and self.is_for_options
            return f"{text} {identity(value, self._registered_version)}" if is_function else text
        return self.other(value)

    def other(self, value: object) -> str:
        kind = type(value)
        reduced = self._inherited(value)
        if reduced is NotImplemented:
            reduce = self._reducers.get(kind)
            reduced = (
                value.__reduce_ex__(pickle.DEFAULT_PROTOCOL) if reduce is None else reduce(value)
            )
        if origin_of(kind).kind in ("library", "user"):
            self.last_of_user = kind
        return self._reduced_text(value, reduced)

    def _reduced_text(self, value: object, reduced: object) -> str:
        if not isinstance(reduced, tuple):
            return repr(pickle.dumps(value))
        parts = [[*part] if isinstance(part, Iterator) else part for part in reduced]
        is_of_torch = type(value).__module__.partition(".")[0] == "torch"
        if is_of_torch and len(parts) > 2 and isinstance(parts[2], dict):
            # The hash of DTensor's objects differs by process.
            parts[2] = {name: item for name, item in parts[2].items() if name != "_hash"}
        return self.all(type(value).__qualname__, parts)

    def for_people(self, value: object, depth: int = 0) -> str:
        """Return the text of a part of a value, which need not be complete."""
        if isinstance(value, self._source):
            return internals.name_of_source(value) or ""
        if isinstance(value, (list, tuple)) and depth < 3:
            return f"[{', '.join(self.for_people(item, depth + 1) for item in value[:1024])}]"
        try:
            return self.of(value)
        except Exception:  # noqa: BLE001 - it is not in the key
            return type(value).__qualname__

    def _tensor_text(self, value: Tensor) -> str:
        metadata = self._metadata_of(value)
        if self.device is not None:
            device = without_index(metadata.device, self.device)
            metadata = dataclasses.replace(metadata, device=device)
        kind = cast("Hashable", type(metadata))
        try:
            values = tuple(getattr(metadata, name) for name in _names_of_fields(kind))
            return _text_of_fields(kind, values)
        except TypeError:  # symbolic sizes have no hash; their text has symbols
            return repr(metadata)

    def _subclass_text(self, value: Tensor) -> str:
        """Describe a wrapper subclass by its own metadata, its context, and all that it wraps.

        torch's key leaves the inner tensors to the class, and DTensor's has only the outer sizes:
        ranks with shards of different sizes would share code.
        """
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        if any(map(internals.is_numbered_length, value.shape)):
            raise UnidentifiedError("is a jagged tensor outside of the inputs", value)
        strides = value.stride() if value.layout is self._strided else ()
        fields = value.dtype, value.layout, value.requires_grad, value.shape, strides, value.device
        inner = [(name, getattr(value, name)) for name in names]
        return self.all(
            qualified_name(type(value)), [*map(str, fields[:3]), *fields[3:], context, inner]
        )

    def _mesh_text(self, mesh: DeviceMesh) -> str:
        """Describe a device mesh: its layout, this rank's position, the names of its groups."""
        if self._meshes == 2:  # parts of a mesh refer back to it
            return "DeviceMesh"
        state = {
            name: item.tolist() if isinstance(item, self._tensor) else item
            for name, item in mesh.__getstate__().items()
            if name != "_hash"  # differs by process
        }
        self._meshes += 1
        try:
            return self.all("DeviceMesh", [state])
        finally:
            self._meshes -= 1

    def _source_text(self, source: object) -> str | None:
        """Return the source as an expression, or ``None`` if a part has none."""
        kind = cast("Hashable", type(source))
        fields = [self._field_text(getattr(source, name)) for name in _names_of_fields(kind)]
        is_complete = None not in fields
        return f"{qualified_name(kind)}({','.join(map(str, fields))})" if is_complete else None

    def _field_text(self, value: object) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self._once(value, self._source_text)
        return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else None

    def _graph_text(self, gm: GraphModule) -> str | None:
        """Return the result of torch's reducer, without compiling the generated code."""
        line_of = internals.line_for_global()
        if line_of is None:
            return None
        generated = internals.GENERATED.names
        attributes = {name: value for name, value in vars(gm).items() if name not in generated}
        context_fn = gm.meta.get(internals.CHECKPOINT_CONTEXT) if gm.meta else None
        if context_fn is not None:  # seldom something to pickle
            hashed = context_hash(context_fn, self._registered_version)
            attributes["meta"] = {**gm.meta, internals.CHECKPOINT_CONTEXT: hashed}
        text, imports = graph_as_text(gm.graph, self.device), None
        if text is None:
            code = gm.graph.python_code(root_module="self")
            described = {
                name: autograd_function_text(value) for name, value in code.globals.items()
            }
            imports = sorted(
                described[name] or line_of(name, value) + self._class_version(value)
                for name, value in code.globals.items()
            )
            text = without_aot_names(gm, code.src) if any(described.values()) else code.src
            if self.device is not None:
                text = code_on(text, self.device, without_index(self.device, self.device))
        self.codes.append(text)
        return self.all("graph", [attributes, text, imports])

    def _class_version(self, value: object) -> str:
        """Return the registered version of a user's class with an object in the graph."""
        if not isinstance(value, type) or not internals.is_opaque_type.get()(value):
            return ""
        version = self._registered_version(value)
        if version is not None:
            return f" version {version}"
        if not self._traced and origin_of(value).kind != "torch":
            what = f"an object of {qualified_name(value)}"
            raise UnidentifiedError(f"{what}, which has code that takes part in tracing", value)
        return ""


@functools.cache
def _names_of_fields(kind: Hashable) -> tuple[str, ...]:
    assert dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@functools.lru_cache(maxsize=4096)  # many layers have equal parameters
def _text_of_fields(kind: Hashable, values: tuple[object, ...]) -> str:
    return repr(cast("Function[object]", kind)(*values))
