"""Components of torch's own key: one for each attribute of its details object.

So attributes that a newer torch adds are in the key, too. torch's own pickler for keys makes the
bytes of each value.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import io
import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from s3cache.graph._graph import (
    Component,
    autograd_function_text,
    bounded,
    code_on,
    graph_as_text,
    without_aot_names,
    without_index,
)
from s3cache.graph._identity import UnidentifiedError, identity
from s3cache.graph._origin import origin_of
from s3cache.graph._results import (
    BypassReason,
    Finding,
    RegisteredVersion,
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

_LEFT_OUT = frozenset(name for fields in internals.CACHING_OPTIONS for name in fields.names)
_SCALARS = (type(None), bool, int, float, complex, str)
_ALL_CHARACTERS = 128 << 10
_SETS = (set, frozenset, WeakSet)
_MAPPINGS = (MappingProxyType, WeakKeyDictionary, WeakValueDictionary)
# Counters of graphs in a process are in no key.
_OF_THE_PROCESS = frozenset({"aot_id", "precompile_backend_id"})


def torch_components(
    details: KeyDetails, canonical: CanonicalPickler
) -> Iterator[tuple[str, Finding]]:
    """Yield the name of each attribute of ``details``, and its component or reasons against it."""
    for name, value in vars(details).items():
        if name in internals.CACHING_DETAILS.names:  # our entries are always bundled
            continue
        if name == internals.CURRENT_DEVICE and canonical.device is not None:
            continue
        try:
            if name in internals.CONFIG_DETAILS.names:
                yield name, _config_component(name, value, canonical)
                continue
            if name == "aot_config":
                value = internals.without_backend_id(value)
            elif name == internals.PASSES_OF_BACKENDS:
                value = internals.passes_by_device(cast("Sequence[object]", value))
            elif name in internals.PROVENANCE_DETAILS.names and internals.debugging.get():
                value = 0 if value == 1 else value  # TORCH_COMPILE_DEBUG has set it to 1
            data = canonical(value)
            yield name, Component.of_bytes(data, _value_text(value), _parts_of(value, canonical))
        except Exception as exc:  # noqa: BLE001 - pickling runs code of others
            yield name, _reasons(name, exc, canonical.last_of_user)


def _reasons(name: str, error: BaseException, owner: type | None) -> list[BypassReason]:
    """Return why a component has no bytes; ``owner`` is the user's last class that was pickled."""
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


# -- options

# The last component of each kind: most graphs of a process have the same configuration.
_last: dict[str, tuple[object, Component]] = {}


def _config_component(
    name: str, value: bytes | Mapping[str, object], canonical: CanonicalPickler
) -> Component:
    values = pickle.loads(value) if isinstance(value, bytes) else value  # noqa: S301 - torch's own
    plain, others = [], []
    for option, setting in sorted(values.items()):
        if option in _LEFT_OUT:
            continue
        if type(setting) in _SCALARS:
            plain.append((option, type(setting), setting))
        else:
            others.append((option, _ordered(setting, canonical.registered_version)))
    data = canonical(others)
    known = _last.get(name)
    if known is None or known[0] != (plain, data):
        content = repr([(option, setting) for option, _, setting in plain]).encode() + data
        changed = _changed(name, values, canonical)
        shown = " ".join(f"{option}={text}" for option, (text, _) in changed.items()) or "defaults"
        parts = bounded((option, default + text) for option, (text, default) in changed.items())
        known = (plain, data), Component.of_bytes(content, shown, parts)
        _last[name] = known
    return known[1]


def _ordered(value: object, registered_version: RegisteredVersion) -> object:
    """Return ``value`` with ordered sets, and identities in place of functions."""
    if isinstance(value, dict):
        return [
            (name, _ordered(value[name], registered_version)) for name in sorted(value, key=str)
        ]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(_ordered(item, registered_version) for item in value)]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, FunctionType):
        return value, identity(value, registered_version)
    return value


def _changed(
    name: str, values: Mapping[str, object], canonical: CanonicalPickler
) -> dict[str, tuple[str, str]]:
    """Return the options without their default value, each with ``DEFAULT → ``."""
    configs: dict[str, Config] = {
        "autograd_config": internals.functorch_config.get(),
        "inductor_config": internals.inductor_config.get(),
    }
    known = configs[name]._config if name in configs else None
    changed = {}
    for option, setting in sorted(values.items()):
        if option in _LEFT_OUT or (known is not None and option not in known):
            continue
        default = ""
        if known is not None:
            if known[option].default == setting:
                continue
            default = f"{_option_text(option, known[option].default, canonical)} → "
        changed[option] = _option_text(option, setting, canonical), default
    return changed


def _option_text(option: str, setting: object, canonical: CanonicalPickler) -> str:
    """Return the setting as text; if the text is incomplete, with digits of its digest."""
    ordered = _ordered(setting, canonical.registered_version)
    if _is_plain(ordered):
        return repr(setting)
    digest = hashlib.sha256(canonical((option, ordered))).hexdigest()[:8]
    return f"{_item_text(setting)} #{digest}"


def _is_plain(value: object) -> bool:
    """Return whether ``repr`` is complete and does not depend on the process."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _SCALARS


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


# -- texts for people
#
# They are in no digest: different components may have equal texts.


def _value_text(value: object) -> str:
    import torch

    if isinstance(value, (str, torch.dtype)):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()[:32]
    if isinstance(value, torch.fx.GraphModule):
        return f"graph of {len(value.graph.nodes)} nodes"
    if isinstance(value, (list, tuple)):
        texts = " ".join(_item_text(item) for item in value[:20])
        return f"{len(value)}: {texts}" if value else "none"
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


def _parts_of(value: object, canonical: CanonicalPickler) -> Mapping[str, str]:
    """Return the named parts of a value that was just pickled, to describe differences."""
    if canonical.codes:
        return bounded((("code", "\n".join(canonical.codes)),), _ALL_CHARACTERS)
    parts: Iterator[tuple[object, object]] = iter(())
    if isinstance(value, dict):  # isinstance with Mapping takes 3 ms
        parts = iter(value.items())
    elif isinstance(value, (list, tuple)):
        parts = iter(enumerate(value))
    elif dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        fields = [(n, getattr(value, n, None)) for n in names if n not in _OF_THE_PROCESS]
        parts = ((n, field) for n, field in fields if not callable(field))
    return bounded((str(name), _part_text(part, canonical)) for name, part in parts)


def _part_text(value: object, canonical: CanonicalPickler, depth: int = 0) -> str:
    import torch

    if type(value) in _SCALARS:
        return repr(value)
    if id(value) in canonical.tensor_texts:
        return canonical.tensor_texts[id(value)]
    if isinstance(value, internals.source.get()):
        return internals.name_of_source(value) or ""
    if isinstance(value, (list, tuple)) and depth < 3:
        items = (_part_text(item, canonical, depth + 1) for item in value[:1024])
        return f"[{', '.join(items)}]"
    if isinstance(value, (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.layout)):
        return str(value)
    held = getattr(value, "value", None)  # a box of torch's
    if type(held) in (bool, int):
        return repr(held)
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else type(value).__qualname__


# -- bytes
#
# The pickler calls a Python function for each object in a value. Most are of three kinds, and a
# training step has hundreds: inputs, sources of inputs, and graphs. We convert each of them to one
# text, so that no call is needed for its parts. The text is as complete as torch's reduction.


class CanonicalPickler:
    """Makes bytes that depend on the content of a value, but not on the identity of its items.

    torch's pickler writes a shared object at every reference (``fast``). Some values switch that
    off; here it applies to all values.
    """

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

        self.device = device  # the device to write without its index
        self.registered_version = registered_version
        self.codes: list[str] = []  # of the graphs in the last value, outermost first
        self.tensor_texts: dict[int, str] = {}  # of tensors in the last value, by id
        self.last_of_user: type | None = None  # the class of the last object that is the user's
        self._traced = traced
        self._inherited = internals.inherited_reducer(pickler)
        self._identity_reducer = internals.same.get()
        self._metadata_of = internals.tensor_metadata.get()
        self._is_wrapper = internals.is_wrapper_subclass.get()
        self._source, self._fake = internals.source.get(), internals.fake_tensor.get()
        self._graph, self._tensor, self._strided = GraphModule, Tensor, strided
        self._mesh, self._script = internals.device_mesh.get(), internals.script_object.get()
        self._state = internals.backward_state.get()
        self._table = internals.given_decompositions.find()
        self._sources: dict[int, tuple[object, str | None]] = {}
        self._pickler = pickler
        pickler.reducer_override = self._reduce

    def __call__(self, value: object) -> bytes:
        """Return the bytes of ``value``; raise the error of torch's pickler if it has none."""
        self.codes, self.tensor_texts, self.last_of_user = [], {}, None
        self._pickler.clear_memo()
        self._pickler.fast = True
        if type(value) is list:  # the inputs: to be asked about each costs as much as its text
            value = [
                ("a tensor", self._tensor_text(item)) if type(item) is self._fake else item
                for item in value
            ]
        data: bytes = self._pickler.dumps(self._ordered(value))
        return data

    def _reduce(self, value: object) -> object:
        """Implement ``reducer_override`` of a pickler; torch reduces most values."""
        reduced: object = None
        if type(value) is self._fake:
            reduced = self._tensor_text(value)
        elif isinstance(value, self._source):
            reduced = self._source_text(value)
        elif isinstance(value, self._tensor) and self._is_wrapper(value):
            reduced = self._subclass_parts(value)
        elif isinstance(value, self._graph):
            reduced = self._graph_parts(value)
        elif type(value) is type(self.device):
            reduced = str(without_index(cast("device", value), self.device))
        elif type(value) is self._script:  # stands for an object that a graph takes as input
            real = getattr(value, internals.REAL_OBJECT)
            reduced = _mesh_text(real) if isinstance(real, self._mesh) else None
        elif isinstance(value, self._mesh):
            reduced = _mesh_text(value)
        elif type(value) is self._state:  # it has no content yet
            reduced = "BackwardState"
        elif type(value) is self._table:
            table = cast("DecompositionTable", value).table
            reduced = f"decompositions {table_text(table, self.registered_version)}"
        elif isinstance(value, (*_SETS, *_MAPPINGS)):
            reduced = self._ordered(value)
        elif "_hash" in getattr(value, "__dict__", ()):
            reduced = _without_hash(value)
        if reduced is not None:
            return self._identity_reducer, (self._ordered(reduced),)
        return self._with_ordered_state(value, self._inherited(value))

    def _with_ordered_state(self, value: object, reduced: object) -> object:
        """Return the reduction of an object with ordered sets in its arguments and its state."""
        if origin_of(type(value)).kind in ("library", "user"):
            self.last_of_user = type(value)
        if reduced is NotImplemented and not isinstance(value, (type, FunctionType)):
            reduce = self._pickler.dispatch_table.get(type(value))
            protocol = pickle.DEFAULT_PROTOCOL
            reduced = value.__reduce_ex__(protocol) if reduce is None else reduce(value)
        if not isinstance(reduced, tuple):
            return reduced
        make, arguments, *more = reduced
        iterated = (iter([*map(self._ordered, each)]) if each else None for each in more[1:3])
        return make, self._ordered(arguments), *map(self._ordered, more[:1]), *iterated, *more[3:]

    def _ordered(self, value: object) -> object:
        """Return ``value`` with lists in place of sets, whose order depends on the hash seed.

        Dictionaries keep their order: code may depend on it.
        """
        kind = type(value)
        if kind is tuple or kind is list:
            items = [*map(self._ordered, cast("Sequence[object]", value))]
            is_same = all(map(is_, items, cast("Sequence[object]", value)))
            return value if is_same else kind(items)
        if kind is dict:
            table = cast("dict[object, object]", value)
            pairs = [(self._ordered(name), self._ordered(item)) for name, item in table.items()]
            is_same = all(a is c and b is d for (a, b), (c, d) in zip(pairs, table.items()))  # noqa: B905
            return value if is_same else (kind.__name__, pairs)
        if isinstance(value, _SETS):
            about = getattr(value, "__dict__", None) if kind not in _SETS else None
            return kind.__qualname__, sorted(map(self._bytes_of, value)), self._ordered(about)
        if isinstance(value, _MAPPINGS):
            return kind.__qualname__, self._ordered(dict(value))
        return value

    def _bytes_of(self, value: object) -> bytes:
        """Return the bytes of a value while another one is pickled."""
        stream = io.BytesIO()
        pickler = _Nested(stream)
        pickler.fast = True
        pickler.dispatch_table = self._pickler.dispatch_table
        pickler.reducer_override = self._reduce  # type: ignore[assignment]
        pickler.dump(self._ordered(value))
        return stream.getvalue()

    def _tensor_text(self, value: Tensor) -> str:
        metadata = self._metadata_of(value)
        if self.device is not None:
            device = without_index(metadata.device, self.device)
            metadata = dataclasses.replace(metadata, device=device)
        text = self.tensor_texts[id(value)] = _metadata_text(metadata)
        return text

    def _subclass_parts(self, value: Tensor) -> tuple[object, ...]:
        """Return a wrapper subclass as its own metadata, its context, and all that it wraps.

        torch's key leaves the inner tensors to the class, and DTensor's has only the outer sizes:
        ranks with shards of different sizes would share code.
        """
        kind = type(value)
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = [(name, getattr(value, name)) for name in names]
        if any(map(internals.is_numbered_length, value.shape)):
            raise UnidentifiedError("is a jagged tensor outside of the inputs", value)
        fields = [str(getattr(value, name)) for name in ("dtype", "layout", "requires_grad")]
        sizes = tuple(value.shape), value.stride() if value.layout is self._strided else ()
        return f"{kind.__module__}.{kind.__qualname__}", fields, sizes, value.device, context, inner

    def _source_text(self, source: object) -> str | None:
        """Return the source as an expression, or ``None`` if a part has none.

        Sources of the parameters of a module share their base sources.
        """
        known = self._sources.get(id(source))
        if known is None:
            kind = type(source)
            names = _init_fields(cast("Hashable", kind))
            fields = [self._field_text(getattr(source, name)) for name in names]
            text = None
            if None not in fields:
                text = f"{kind.__module__}.{kind.__qualname__}({','.join(map(str, fields))})"
            known = source, text  # keep the source alive, so that its id stays unique
            self._sources[id(source)] = known
        return known[1]

    def _field_text(self, value: object) -> str | None:
        if type(value) in (str, int, bool, type(None)):
            return repr(value)
        if isinstance(value, self._source):
            return self._source_text(value)
        return f"{type(value).__qualname__}.{value.name}" if isinstance(value, enum.Enum) else None

    def _graph_parts(self, gm: GraphModule) -> tuple[object, str, object] | None:
        """Return the result of torch's reducer, without compiling the generated code."""
        line_of = internals.line_for_global()
        if line_of is None:
            return None
        generated = internals.GENERATED.names
        attributes = {name: value for name, value in vars(gm).items() if name not in generated}
        context_fn = gm.meta.get(internals.CHECKPOINT_CONTEXT) if gm.meta else None
        if context_fn is not None:  # seldom something to pickle
            hashed = context_hash(context_fn, self.registered_version)
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
        return attributes, text, imports

    def _class_version(self, value: object) -> str:
        """Return the registered version of a user's class with an object in the graph."""
        if not isinstance(value, type) or not internals.is_opaque_type.get()(value):
            return ""
        version = self.registered_version(value)
        if version is not None:
            return f" version {version}"
        if not self._traced and origin_of(value).kind != "torch":
            name = f"{value.__module__}.{value.__qualname__}"
            raise UnidentifiedError(
                f"an object of {name}, which has code that takes part in tracing", value
            )
        return ""


class _Nested(pickle.Pickler):
    """A pickler with attributes."""


@functools.cache
def _init_fields(kind: Hashable) -> tuple[str, ...]:
    assert dataclasses.is_dataclass(kind)
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)


@functools.cache
def _field_getter(kind: Hashable) -> Callable[[object], tuple[object, ...]]:
    assert dataclasses.is_dataclass(kind)
    return attrgetter(*(field.name for field in dataclasses.fields(kind)))


def _metadata_text(metadata: object) -> str:
    kind = cast("Hashable", type(metadata))
    try:
        return _text_of_fields(kind, _field_getter(kind)(metadata))
    except TypeError:  # symbolic sizes have no hash; their text has symbols
        return repr(metadata)


@functools.lru_cache(maxsize=4096)  # many layers have equal parameters
def _text_of_fields(kind: Hashable, values: tuple[object, ...]) -> str:
    return repr(cast("Function[object]", kind)(*values))


def _without_hash(value: object) -> object:
    """Return the state to pickle of an object of torch, such as DTensor's, without ``hash()``."""
    if type(value).__module__.partition(".")[0] != "torch":
        return None
    make, arguments, state = (*value.__reduce_ex__(2), None)[:3]
    if not isinstance(state, dict):
        return None
    return make, arguments, {name: item for name, item in state.items() if name != "_hash"}


def _mesh_text(mesh: DeviceMesh, depth: int = 0) -> str:
    """Describe a device mesh: its layout, this rank's position, the names of its groups.

    Leave out its ``hash()``, which differs between processes. Its parts may refer back to it.
    """
    import torch

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, type(mesh)):
            return None if depth else _mesh_text(value, depth + 1)
        if isinstance(value, dict):
            return {key: None if depth else plain(item) for key, item in value.items()}
        return value

    state = sorted(mesh.__getstate__().items())
    fields = " ".join(f"{name}={plain(value)!r}" for name, value in state if name != "_hash")
    text = f"DeviceMesh({fields})"
    if " at 0x" in text:
        raise ValueError(f"a device mesh has an object that differs by process: {text}")
    return text
