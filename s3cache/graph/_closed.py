"""Whether a Python function of torch's own depends on its arguments alone.

torch's check has a list of such functions, which lacks some of those that Dynamo itself puts into
graphs. Here their code is read instead, with that of all that they call.
"""

from __future__ import annotations

import builtins
import enum
import sys
import types
from collections.abc import Callable, Iterator

from s3cache.graph._code import ASKS_PROCESS
from s3cache.graph._homes import home_of, is_pure
from s3cache.graph._reads import Chain, reads_of
from s3cache.torch_api import internals

__all__ = ["is_closed"]

_MAX_FUNCTIONS = 100
_PROCESS_GROUPS = "torch._C._distributed"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: what a class statement makes


def is_closed(function: object, is_known: Callable[[object], bool]) -> bool:
    """Say whether ``function`` is torch's, as it came, and reads nothing but its arguments.

    All globals, imports and defaults that its code names are looked at, and so on through the
    Python functions of torch's that it calls. Variables, objects and modules are state: a function
    that reads one is not closed. Functions in C++ are known by torch's version, as they are where
    a graph calls them, but for those that ask for process groups.

    Args:
        function: what a graph calls.
        is_known: whether torch itself says that graphs with a function can be cached.
    """
    if not isinstance(function, types.FunctionType):
        return False
    left, seen = [function], {function}
    while left:
        each = left.pop()
        if len(seen) > _MAX_FUNCTIONS or not _is_as_it_came(each):
            return False
        for value in _read_by(each):
            if not isinstance(value, types.FunctionType):
                if not _is_stateless(value):
                    return False
            elif value not in seen and not _is_pure(value):
                seen.add(value)
                if not (_is_torchs(value) and (is_known(value) or _asks_for_export(value))):
                    left.append(value)
    return True


def _is_torchs(function: types.FunctionType) -> bool:
    """Whether it is in the place that it names, its code is torch's, and its name asks nothing."""
    place: object = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        place = vars(place).get(name) if hasattr(place, "__dict__") else None
    own = place is function and home_of(function).kind == "torch"
    return own and function.__name__ not in ASKS_PROCESS


def _asks_for_export(function: types.FunctionType) -> bool:
    """Whether it asks for a mode of torch.export, which looks nothing up: here there is none."""
    return function is internals.export_mode.find()


def _is_as_it_came(function: types.FunctionType) -> bool:
    """The same, and nothing is kept in it: what a wrapper holds may be anything."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return (
        _is_torchs(function)
        and function.__closure__ is None
        and not vars(function)
        and all(isinstance(value, (type(None), bool, int, float, str)) for value in defaults)
        and ASKS_PROCESS.isdisjoint(reads_of(function.__code__).names)
    )


def _read_by(function: types.FunctionType) -> Iterator[object]:
    """What its code reads of its surroundings."""
    for chain in reads_of(function.__code__).chains:
        if chain.root != "bind" or chain.attributes:  # what a bound module is read for comes too
            yield _value_of(chain, function)


def _value_of(chain: Chain, function: types.FunctionType) -> object:
    """What a chain leads to; :data:`_STATE` if that may be another thing at another time."""
    value: object = _STATE
    if chain.root == "global":
        value = function.__globals__.get(chain.name, vars(builtins).get(chain.name, _STATE))
    elif not chain.level:
        value = sys.modules.get(chain.name, _STATE)
    for attribute in chain.attributes:
        if isinstance(value, type):
            break
        if not isinstance(value, types.ModuleType):
            return _STATE
        value = vars(value).get(attribute, _STATE)
    return value


_STATE = object()


def _is_pure(function: types.FunctionType) -> bool:
    home = home_of(function)
    return home.kind == "python" and is_pure(home.name, function.__qualname__)


def _is_stateless(value: object) -> bool:
    if value is NotImplemented:
        return True
    home = home_of(value)
    if isinstance(value, types.BuiltinFunctionType):
        module, name = str(value.__module__), value.__name__
        if home.kind == "python":
            return is_pure(module, name)
        asks = name in ASKS_PROCESS or module.startswith(_PROCESS_GROUPS)
        return home.kind == "torch" and not asks
    if not isinstance(value, type):
        return False
    if home.kind == "python":
        return is_pure(value.__module__, value.__qualname__)
    in_c = not value.__flags__ & _HEAP_TYPE or type(value).__name__ == "pybind11_type"
    return home.kind == "torch" and (in_c or issubclass(value, enum.Enum))
