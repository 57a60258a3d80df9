"""What a value is that code refers to: all that makes others of its class behave otherwise.

Values of Python's library and of NumPy's keep their state to themselves, and torch's are large:
these say it in ways of their own. Of other objects it is what they have as attributes, and of such
as C alone sees into what pickling would make of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import decimal
import enum
import hashlib
import logging
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from s3cache.graph._elsewhere import hooks_around
from s3cache.graph._homes import Home, home_of, name_of
from s3cache.graph._reads import content_of
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CONTAINERS", "Walk", "follow_value"]

CONTAINERS = (list, tuple, dict, set, frozenset)
_VALUES = (str, bytes, int, float, complex)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_MAX_BYTES = 1 << 22  # of one tensor or array: some milliseconds
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes


class Walk(Protocol):
    """A walk through all that code comes by, see :mod:`s3cache.graph._code`.

    ``through`` is the library by whose code a value is referred to, ``""`` for the user's.
    """

    def say(self, *words: object) -> None:
        """Have the digest depend on ``words``."""

    def word_for(self, value: object, through: str) -> str:
        """A word for ``value``, which is followed later."""

    def say_all(self, kind: str, values: Iterable[object], through: str) -> None:
        """Words for all of ``values``."""

    def say_members(self, kind: str, members: Mapping[str, object], through: str) -> None:
        """The attributes of an object."""

    def contents(self, value: object, through: str) -> None:
        """What is in one of Python's containers, or in one derived from those."""

    def refuse(self, what: str, through: str) -> None:
        """It cannot be followed: a reason, unless a library that it is part of answers for it."""

    def environment(self, through: str) -> None:
        """It refers to the variables of the process as a whole."""


def follow_value(walk: Walk, value: object, through: str) -> None:
    """Whatever is neither code nor a plain value nor a container of Python's."""
    if not (_of_python(walk, value, through) or _of_torch(walk, value, through)):
        _object(walk, value, through)


def _of_python(walk: Walk, value: object, through: str) -> bool:
    """Values of Python's library that keep their state to themselves; whether it is one."""
    if value is os.environ or value is getattr(os, "environb", None):
        walk.environment(through)
    elif isinstance(value, enum.Enum):
        walk.say_all("enum", (type(value), value._name_, value._value_), through)
        later = {name: part for name, part in vars(value).items() if not _is_of_enum(name)}
        walk.say_all("members", (later,), through)
    elif isinstance(value, re.Pattern):
        walk.say_all("pattern", (value.pattern, value.flags), through)
    elif isinstance(value, logging.Logger):
        walk.say("logger")
    elif isinstance(value, _LOCKS):
        walk.say("lock")
    elif isinstance(value, types.UnionType):
        walk.say_all("union", value.__args__, through)
    elif isinstance(value, types.GenericAlias):
        walk.say_all("generic", (value.__origin__, value.__args__), through)
    elif isinstance(value, types.MappingProxyType):
        walk.say_all("proxy", (dict(value),), through)
    elif isinstance(value, types.CellType):
        walk.say_all("cell", (content_of(value),), through)
    elif isinstance(value, weakref.ReferenceType):
        walk.say_all("weak", (type(value), value()), through)
    elif isinstance(value, (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)):
        walk.say_all("weak", (type(value), dict(value.items())), through)
    elif isinstance(value, weakref.WeakSet):
        walk.say_all("weak", (type(value), set(value)), through)
    elif isinstance(value, contextvars.ContextVar):
        walk.say("context")
        with contextlib.suppress(LookupError):
            walk.say_all("value", [value.get()], through)
    else:
        return False
    return True


def _of_torch(walk: Walk, value: object, through: str) -> bool:
    """The same of torch's, and of numpy's."""
    import torch

    if isinstance(value, torch.Tensor):
        _tensor(walk, value, through)
    elif isinstance(value, torch.fx.GraphModule):
        made = internals.GENERATED.names
        state = {name: part for name, part in vars(value).items() if name not in made}
        walk.say_all("graph", (type(value).__base__, type(value).forward, state), through)
    elif isinstance(value, torch.jit.ScriptFunction):
        text = re.sub(r" +#.*", "", str(value.inlined_graph))
        walk.say("script", text)
        if "<Tensor" in text:
            walk.refuse("refers to a scripted function with a tensor in it", through)
    elif type(value).__module__.partition(".")[0] == "numpy":
        return _of_numpy(walk, value, through)
    else:
        return False
    return True


def _tensor(walk: Walk, value: Tensor, through: str) -> None:
    import torch

    walk.say_all("tensor", (type(value), vars(value)), through)
    walk.say(value.dtype, tuple(value.shape), value.device, value.requires_grad)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    seen = plain and value.layout is torch.strided and not value.is_quantized
    if not seen or value.is_meta or value.numel() * value.element_size() > _MAX_BYTES:
        walk.refuse("refers to a tensor that is large, or of a class of its own", through)
        return
    walk.say(value.stride(), value.storage_offset(), value.is_leaf)
    walk.say(value.is_conj(), value.is_neg())
    with internals.without_modes.get()(), torch.no_grad():
        data = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        walk.say(hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest())


def _of_numpy(walk: Walk, value: object, through: str) -> bool:
    import numpy as np

    if isinstance(value, np.dtype):
        walk.say("dtype", repr(value))
    elif type(value) is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        walk.say_all("array", (array.dtype, array.shape, array.strides), through)
        if array.dtype.hasobject:
            walk.say_all("objects", array.reshape(-1).tolist(), through)
        elif array.nbytes > _MAX_BYTES:
            walk.refuse("refers to an array that is large", through)
        else:
            walk.say(hashlib.sha256(array.tobytes()).hexdigest())
    elif callable(value):
        name = str(getattr(value, "__name__", ""))
        module = sys.modules.get(str(getattr(value, "__module__", None) or "numpy"))
        walk.say("numpy", name, home_of(type(value)).name)
        if getattr(module, name, None) is not value:
            walk.refuse(f"calls {name_of(value)}, which is not in Python", through)
    else:
        return False
    return True


def _object(walk: Walk, value: object, through: str) -> None:
    kind = type(value)
    # What a class of Python's library can ask for, its objects cannot.
    walk.say("object", name_of(kind) if home_of(kind).kind == "python" else walk.word_for(kind, ""))
    if isinstance(value, decimal.Decimal):
        context = decimal.getcontext()
        walk.say(repr(context).partition(", flags=")[0])
    native = _native_base(kind)
    home = Home("user") if native is None else home_of(native)
    if isinstance(value, _VALUES):
        walk.say(*(base.__repr__(value) for base in _VALUES if isinstance(value, base)))
    elif isinstance(value, CONTAINERS):
        walk.contents(value, through)
    if home.name.partition(" ")[0] in ("sympy", "mpmath"):
        _shown(walk, value, through)
    elif native is not None and home.kind == "python":
        _reduced(walk, value, native, through)
    elif native is not None and home_of(kind).kind == "torch":
        _shown(walk, value, through)
    elif native is not None:
        walk.refuse(f"refers to a {name_of(kind)}, whose state cannot be seen", through)
    if hooks := hooks_around(kind):
        walk.say_all("hooks", hooks, "")
    state = dict(getattr(value, "__dict__", None) or {})
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    if _is_symbolic(kind):  # they keep their hash(), and numbers drawn at random
        _shown(walk, value, through)
    else:
        walk.say_members("state", state, through)
        walk.say_members("slots", slots, through)


def _shown(walk: Walk, value: object, through: str) -> None:
    """What an object says of itself; nothing if that is where it lies in this process."""
    words = repr(value)
    if " at 0x" in words:
        what = f"refers to a {name_of(type(value))}, whose state cannot be seen"
        walk.refuse(what, through)
    else:
        walk.say(words)


def _reduced(walk: Walk, value: object, native: type, through: str) -> None:
    """What pickling would make of an object of Python's library."""
    kind = type(value)
    if native.__module__ in ("random", "_random"):
        walk.refuse(f"refers to a {name_of(kind)}, which draws at random", through)
        return
    own = any(
        getattr(kind, name, None) is not getattr(native, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )
    if own or native in CONTAINERS:
        walk.refuse(f"refers to a {name_of(kind)}, which says itself what it is", through)
        return
    try:
        parts = value.__reduce_ex__(2)
    except TypeError:
        walk.refuse(f"refers to a {name_of(kind)}, whose state cannot be seen", through)
        return
    if isinstance(parts, str):
        walk.say(parts)
        return
    make, args, state, items, pairs = (*parts, None, None, None)[:5]
    named = isinstance(make, (type, types.FunctionType, types.BuiltinFunctionType))
    if named and home_of(make).kind == "python":  # a partial has arguments of its own
        walk.say(name_of(make))
        make, args = None, [each for each in args if each is not kind]
    given = (make, args, state, *([*each] if each else [] for each in (items, pairs)))
    walk.say_all("reduced", given, through)


def _is_of_enum(name: str) -> bool:
    """Whether ``enum`` itself keeps it with each member: ``__objclass__``, ``_name_``."""
    return name.startswith("_") and name.endswith("_")


def _is_symbolic(kind: type) -> bool:
    return home_of(kind).name.partition(" ")[0] in ("sympy", "mpmath")


def _slots(kind: type) -> Iterator[str]:
    """Names of what a class statement declared; members of classes in C show their memory."""
    for base in kind.__mro__:
        if "__slots__" not in vars(base):
            continue
        for name, member in sorted(vars(base).items()):
            if isinstance(member, types.MemberDescriptorType):
                yield name


def _native_base(kind: type) -> type | None:
    """The class because of which objects have something that only C sees, if there is one."""
    for base in kind.__mro__:
        if base is object or base in CONTAINERS or base in _VALUES:
            continue
        if not base.__flags__ & _HEAP_TYPE or base.__base__ is None:
            return base
        declared = vars(base).get("__slots__", ())
        slots = 1 if isinstance(declared, str) else len(list(declared))
        own = sum(name in vars(base) for name in ("__dict__", "__weakref__"))
        if base.__basicsize__ - base.__base__.__basicsize__ > 8 * (slots + own):
            return base
    return None
