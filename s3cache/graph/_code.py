"""A digest of what a Python function does: of its code, and of all that it comes by.

Two functions with equal digests behave alike. File names, line numbers and names of local variables
do not matter; names of arguments, constants, defaults, closures, and the functions and values that
are referred to do:
through modules and packages, attributes and methods, however far away. What is torch's or Python's
is known by name, as versions in the key say what it is.

Whatever cannot be followed is a reason to refuse: what C code keeps to itself, what a function asks
of the process or the machine. Code of an installed library is followed like any other; where it
comes by such a thing, the digest of all files of the library stands for it.
"""

from __future__ import annotations

import abc
import builtins
import collections
import functools
import hashlib
import importlib.util
import itertools
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import _s3cache_autoload
from s3cache.graph._elsewhere import answer_of, counts_as, operators_in, registered_for
from s3cache.graph._homes import (
    Home,
    home_of,
    home_of_file,
    is_pure,
    is_users_function,
    name_of,
)
from s3cache.graph._reads import (
    IN_CONTAINERS,
    Chain,
    closure_of,
    code_digest,
    names_in,
    reads_of,
    writes_of,
)
from s3cache.graph._values import CONTAINERS, follow_value
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from s3cache.torch_api.protocols import Operator, OperatorPacket

__all__ = [
    "ASKS_PROCESS",
    "Parts",
    "UntoldError",
    "code_fingerprint",
    "fingerprint",
    "source_fingerprint",
    "told",
    "written_by",
]

#: What an operator is made of: words, and functions that are run or traced while it is compiled.
Parts: TypeAlias = tuple[Sequence[str], Sequence[object]]

# What all walks for one digest may take together, those for elements of sets included. A plain
# value is one step. That is some seconds.
_MAX_STEPS = 500_000
_STEPS_OF_VALUE = 10
_STEPS_OF_WALK = 50
_MAX_NESTED_SETS = 20
# Makes a walk leave out what clocks say.
_CLOCKS = "clocks"
# They write what an object is given, and not what it notes later.
_MAKERS = ("__init__", "__new__", "__post_init__", "__setstate__")
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_NATIVE = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
# What differs between processes that are alike, by the names under which it is asked for.
ASKS_PROCESS = frozenset(
    """
    current_device device_count get_coordinate get_device_capability get_device_name
    get_device_properties get_global_rank get_group_rank get_local_rank get_node_local_rank get_rank
    get_rng_state get_world_size initial_seed max_memory_allocated mem_get_info memory_allocated
    memory_reserved memory_stats
    """.split()  # noqa: SIM905 - nobody reads one word a line
)
# These are part of a graph where they are traced, but not where they are run.
_DRAWS = frozenset(["rand", "rand_like", "randint", "randn", "randn_like", "randperm"])
# What launchers tell a process of its place among the others.
_RANKS = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")
_REFLECTS = frozenset(["getattr", "vars", "dir", "attrgetter", "methodcaller"])
# Members of a class that say nothing about what it does.
_ABOUT_CLASSES = frozenset(
    """
    __abstractmethods__ __annotate__ __annotate_func__ __annotations_cache__
    __conditional_annotations__ __dict__ __firstlineno__ __slotnames__
    __static_attributes__ __type_params__ __weakref__ _abc_impl _autograd_function_id
    """.split()  # noqa: SIM905 - nobody reads one word a line
)
# What code seldom asks of a function or a class; followed where it names them, or a function of
# Python's that asks for them.
_SUBCLASSES = "__subclasses__"
_SELDOM = (
    "__annotations__",
    "__doc__",
    "__module__",
    "__name__",
    "__qualname__",
    "__slots__",
    _SUBCLASSES,
)
_ASKED_BY = {
    "get_annotations": "__annotations__",
    "get_type_hints": "__annotations__",
    "getdoc": "__doc__",
    "getfullargspec": "__annotations__",
    "repr": "__qualname__",
    "signature": "__annotations__",
    "str": "__qualname__",
}


class UntoldError(Exception):
    """It cannot be told what a function does.

    Attributes:
        about: what a user may vouch for instead, if anything.
    """

    def __init__(self, message: str, about: object = None) -> None:
        super().__init__(message)
        self.about = about


def fingerprint(value: object, parts_of: Callable[[Operator], Parts] | None = None) -> str:
    """32 hexadecimal digits, the same in every process with the same Python and torch.

    It is that of a function, class or operator that is traced: numbers that it draws at random are
    part of the graph.

    Args:
        value: the function.
        parts_of: what custom operators that it calls are made of; without it they are only named.

    Raises:
        UntoldError: it comes by what cannot be followed; says what.
    """
    return _followed(_Walk(ASKS_PROCESS, parts_of), value)


def source_fingerprint(value: object) -> str:
    """The same, less the state that the code itself writes, and with clocks allowed.

    It is equal before and after a wrapper has counted, timed or noted calls.

    Raises:
        UntoldError: as :func:`fingerprint`.
    """
    left_out = frozenset({_CLOCKS, *written_by(value)})
    return _followed(_Walk(ASKS_PROCESS, None, left_out=left_out), value)


def written_by(value: object) -> set[str]:
    """Names of the attributes and variables that a function or an object writes when called."""
    walk = _Walk(ASKS_PROCESS, None, left_out=frozenset({_CLOCKS}))
    walk.follow(value)
    return walk.writes


def _place_of_table(value: dict[object, object]) -> str | None:
    """Which of torch's tables it is: of decompositions, lowerings and the like."""
    for place in (*_s3cache_autoload.PLACES, *internals.LATER_PLACES):
        if internals.is_table(place) and internals.contents(place) is value:
            return place
    return None


def told(value: object, parts_of: Callable[[Operator], Parts] | None = None) -> str:
    """The same of a function that is run while something is compiled; may draw no numbers."""
    return _followed(_Walk(ASKS_PROCESS | _DRAWS, parts_of), value)


def _followed(walk: _Walk, value: object) -> str:
    walk.follow(value)
    if walk.untold:
        raise UntoldError(walk.untold)
    return walk.digest()


def code_fingerprint(code: types.CodeType) -> str:
    """The same of compiled Python code by itself, its names and those of its variables."""
    walk = _Walk(frozenset(), None)
    walk.say(code.co_name, *code.co_varnames, *code.co_freevars, "code")
    walk.code(code)
    return walk.digest()


class _Walk:
    """One walk through all that a value comes by, nearest first.

    Members of modules and classes are followed once some code that was met names them.

    Attributes:
        untold: the first thing met that cannot be followed; empty if there is none.
        writes: what the code that was met writes, see :func:`writes_of`.
    """

    def __init__(
        self,
        asks: frozenset[str],
        parts_of: Callable[[Operator], Parts] | None,
        left_out: frozenset[str] = frozenset(),
        outer: _Walk | None = None,
    ) -> None:
        self.untold = ""
        self.writes: set[str] = set()
        self._asks = asks
        self._parts_of = parts_of
        self._left_out = left_out
        self._steps: list[int] = [0] if outer is None else outer._steps
        self._sets: tuple[frozenset[int], ...] = () if outer is None else outer._sets
        self._hash = hashlib.sha256()
        self._order: dict[tuple[int, str], int] = {}
        self._kept: list[object] = []  # an id is only good while its object lives
        self._queue: collections.deque[tuple[int, object, str]] = collections.deque()
        self._names: set[str] = set()
        self._waiting: dict[str, list[tuple[int, str, object, str]]] = {}
        self._users: list[type] = []
        self._abstract: list[type] = []
        self._reflects = False
        self._spaces: list[tuple[types.ModuleType, Callable[[str], object], str]] = []
        self._asks_environment = False

    def follow(self, value: object) -> None:
        """All of ``value``, until there is no more or it cannot be told."""
        self.say(self.word_for(value, ""))
        while self._queue and not self.untold:
            index, each, through = self._queue.popleft()
            self.say("\n", index)
            try:
                self._open(each, index, through)
            except UntoldError as exc:
                self.refuse(str(exc), "")
            except Exception as exc:  # noqa: BLE001 - whatever looking at an object meets
                self.refuse(f"refers to a {name_of(type(each))}, which raises {exc!r}", through)
        # Of Python's abstract classes, which are everybody's.
        for kind, abstract in itertools.product(self._users, self._abstract):
            if counts_as(kind, abstract):
                self.say(self.word_for(kind, ""), self.word_for(abstract, ""))
        if self._asks_environment:
            self.say(*(f"{n}={os.environ[n]}" for n in sorted(self._names) if n in os.environ))

    def digest(self) -> str:
        """Of all that was met yet."""
        return self._hash.hexdigest()[:32]

    def say(self, *words: object) -> None:
        """Have the digest depend on ``words``."""
        for word in words:
            text = str(word).encode(errors="surrogatepass")
            self._hash.update(b"%d:" % len(text) + text)

    def refuse(self, what: str, through: str) -> None:
        """It cannot be followed: a reason, unless a library that it is part of answers for it."""
        self.say("untold", through)
        if not through:
            self.untold = self.untold or what

    def environment(self, through: str) -> None:
        """It refers to the variables of the process as a whole."""
        self._asks_environment |= bool(through)
        self.refuse("reads the environment", through)

    def _ask(self, what: str, through: str) -> None:
        """It asks which process this is, or on what machine."""
        self._asks_environment = True
        self._names.update(_RANKS)
        self.refuse(what, through)

    def word_for(self, value: object, through: str) -> str:
        """A word for ``value``, which is opened later.

        Args:
            value: what is referred to.
            through: the library by whose code it is referred to, ``""`` for the user's.
        """
        self._step(1)
        kind = type(value)
        if kind in _PLAIN:
            if kind is str:
                self._learn(names_in(str(value)))
            return f"{kind.__name__} {value!r}"
        of_somebody = isinstance(value, (types.FunctionType, types.ModuleType, type))
        if of_somebody and home_of(value).kind in ("library", "user"):
            through = ""  # whoever wrote it answers for it
        key = id(value), through
        index = self._order.get(key)
        if index is None:
            self._step(_STEPS_OF_VALUE)
            index = self._order[key] = len(self._order)
            self._kept.append(value)
            self._queue.append((index, value, through))
        return f"#{index}"

    def say_all(self, kind: str, values: Iterable[object], through: str) -> None:
        self.say(kind, *(self.word_for(value, through) for value in values), "end")

    def _step(self, steps: int) -> None:
        self._steps[0] += steps
        if self._steps[0] > _MAX_STEPS:
            raise UntoldError("refers to too much")

    def say_members(self, kind: str, members: Mapping[str, object], through: str) -> None:
        """The attributes of an object or a function, less those that are left out."""
        self.say(kind)
        for name, value in members.items():
            if not self._is_left_out(name, value):
                self.say(self.word_for(name, through), self.word_for(value, through))
        self.say("end")

    def _is_left_out(self, name: str, value: object) -> bool:
        return name in self._left_out and not callable(value)

    def _open(self, value: object, index: int, through: str) -> None:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            self._function(value, index, through)
        elif isinstance(value, type):
            self._class(value, index, through)
        elif isinstance(value, types.ModuleType):
            self._module(value, index, through)
        elif kind in CONTAINERS:
            self.contents(value, through)
        elif isinstance(value, types.MethodType):
            self.say_all("method", (value.__func__, value.__self__), through)
        elif kind is partial:
            assert isinstance(value, partial)
            words = (value.func, value.args, value.keywords, vars(value))
            self.say_all("partial", words, through)
        elif isinstance(value, _NATIVE):
            self._native(value, through)
        elif isinstance(value, (staticmethod, classmethod)):
            self.say_all(kind.__name__, (value.__func__,), through)
        elif kind is property:
            assert isinstance(value, property)
            self.say_all("property", (value.fget, value.fset, value.fdel), through)
        elif isinstance(value, functools._lru_cache_wrapper):
            self.say_all("cache", (value.__wrapped__,), through)
        elif isinstance(value, types.CodeType):
            self.code(value)
            self.refuse("refers to code by itself", through)
        elif (operator := internals.operator_of(value)) is not None:
            self._operator(operator, through)
        else:
            follow_value(self, value, through)

    # -- functions

    def _function(self, function: types.FunctionType, index: int, through: str) -> None:
        home = home_of(function)
        name = name_of(function)
        closure = closure_of(function)
        if home.kind == "torch":
            if function.__name__ in self._asks:
                self._ask(f"calls {name}", through)
            self.say(answer_of(function))
        if internals.ORIGINAL_CALLABLE in vars(function):
            # torch.compile's wrapper, which refers to most of a compiler, and to any backend.
            self.refuse(f"calls {name}, which is compiled by itself", through)
            return
        if home.is_named:
            if home.kind == "python" and not is_pure(home.name, function.__qualname__):
                self.refuse(f"calls {name}", through)
            if "dispatch_cache" in closure and home.name == "functools":  # of singledispatch
                closure = {"registry": closure["registry"]}
            # What its wrappers hold are users' functions.
            self.say_all(home.kind, closure.values(), "torch" if home.kind == "torch" else through)
            self.say(name, home.name)
            return
        through = home.name
        self.say("function", through)
        self.code(function.__code__)
        self.say_all("defaults", (function.__defaults__, function.__kwdefaults__), through)
        self.say_members("attributes", vars(function), through)
        if function.__name__ not in _MAKERS:
            self.writes |= writes_of(function.__code__)
        for seldom in _SELDOM:
            self._wait(index, seldom, getattr(function, seldom, None), through)
        reads = reads_of(function.__code__)
        for asked in sorted(self._asks & reads.names):
            self._ask(f"{name} names {asked}", through)
        self._learn(reads.names)
        for chain in reads.chains:
            self._read(chain, function, closure, through)
        if home.kind == "library":
            self._asks_environment |= not reads.names.isdisjoint(("environ", "getenv", "environb"))
        elif not reads.names.isdisjoint(_REFLECTS | {"__dict__", "__getattribute__"}):
            self._learn_all()

    def code(self, code: types.CodeType) -> None:
        """All of it but for names of local variables, and where it lies in a file."""
        self.say(code_digest(code))

    def _read(
        self, chain: Chain, function: types.FunctionType, closure: dict[str, object], through: str
    ) -> None:
        """What a chain of names leads to, from where a function has it."""
        self.say(chain.root, chain.name, chain.level, *chain.attributes)
        value: object = _NOTHING
        own = through
        if chain.root == "free":
            value = closure.get(chain.name, _NOTHING)
        elif chain.root == "global":
            value = function.__globals__.get(chain.name, _NOTHING)
            if value is _NOTHING:
                value = _builtins(function).get(chain.name, _NOTHING)
        else:
            value = self._imported(chain, function, through)
        name = chain.name
        for attribute in chain.attributes:
            if not isinstance(value, types.ModuleType):
                break
            name = attribute
            home = home_of(value)
            through = {"torch": "torch", "python": through}.get(home.kind, home.name)
            value = self._member_of(value, attribute, home, through)
        if isinstance(value, types.ModuleType) and operators_in(value) is not None:
            through = own  # who takes operators from it answers for them
        if value is _NOTHING or (isinstance(value, types.ModuleType) and chain.root == "bind"):
            self.say("unbound")
        elif self._is_left_out(name, value):
            self.say("written")
        else:
            self.say(self.word_for(value, through))

    def _imported(self, chain: Chain, function: types.FunctionType, through: str) -> object:
        name = chain.name
        if chain.level:
            package = str(function.__globals__.get("__package__"))
            name = package.rsplit(".", chain.level - 1)[0] + (f".{name}" if name else "")
        if name in sys.modules:
            return sys.modules[name]
        root = name.partition(".")[0]
        named = root == "torch" or is_pure(root, "")
        if not named and (root in sys.modules or importlib.util.find_spec(root) is not None):
            self.refuse(f"imports {name}, which is not imported yet", through)
        return _NOTHING

    def _member_of(self, module: types.ModuleType, name: str, home: Home, through: str) -> object:
        if name in vars(module):
            return vars(module)[name]
        if home.kind == "user":
            if "__getattr__" in vars(module):
                self.say(self.word_for(vars(module)["__getattr__"], through))
            return _NOTHING
        return internals.read_quietly(module, name, _NOTHING)

    def _native(self, value: object, through: str) -> None:
        """Functions in C: those of Python and torch are covered by their versions."""
        home = home_of(value)
        name = str(getattr(value, "__qualname__", ""))
        module = str(getattr(value, "__module__", None) or home.name or "builtins")
        self.say("native", module, name, home.name)
        owner = getattr(value, "__self__", None)
        if home.kind == "torch":
            if name.rpartition(".")[2] in self._asks:
                self._ask(f"calls {name_of(value)}", through)
            self.say(answer_of(value))
        of_value = not isinstance(owner, (types.ModuleType, type(None)))
        if module == "time" and _CLOCKS in self._left_out:
            return
        if home.kind == "python" and not (of_value or is_pure(module, name)):
            self.refuse(f"calls {name_of(value)}, which is not in Python", through)
        elif not home.is_named and not of_value:
            self.refuse(f"calls {name_of(value)}, which is not in Python", through or home.name)
        if of_value:
            self.say(self.word_for(owner, through))

    def _operator(self, operator: Operator | OperatorPacket, through: str) -> None:
        self.say("operator", operator)
        if internals.is_higher_order(operator):
            kernels: dict[object, object] = getattr(operator, "py_kernels", {})
            self.say_all(
                "kernels", (type(operator), *filter(is_users_function, kernels.values())), through
            )
        elif self._parts_of is not None:
            for each in internals.overloads_of(operator):
                try:
                    words, functions = self._parts_of(each)
                except UntoldError as exc:
                    home = home_of_file(internals.defined_at(each))
                    self.refuse(f"{each}: {exc}", through if home.kind == "library" else "")
                else:
                    self.say(each, *words)
                    self.say_all("parts", functions, "")

    # -- what has members

    def _wait(self, index: int, name: str, value: object, through: str) -> None:
        """Follow a member once it is named, if it is."""
        if self._is_left_out(name, value):
            return
        if (self._reflects and name not in _SELDOM) or name in self._names:
            self.say("member", index, name, self.word_for(value, through))
        else:
            self._waiting.setdefault(name, []).append((index, name, value, through))

    def _learn(self, names: Iterable[str]) -> None:
        new = set(names) - self._names
        new |= {_ASKED_BY[name] for name in new & _ASKED_BY.keys()} - self._names
        self._names |= new
        for name in sorted(new & self._waiting.keys()):
            for each in self._waiting.pop(name):
                self._wait(*each)
        for space in list(self._spaces) if new else ():
            self._operators(*space, new)

    def _learn_all(self) -> None:
        """Names may be put together: any member may be asked for."""
        self._reflects = True
        waiting, self._waiting = self._waiting, {}
        for name in sorted(waiting):
            for each in waiting[name]:
                self._wait(*each)
        for space in self._spaces:
            self._operators(*space, set())

    def _operators(
        self,
        module: types.ModuleType,
        find: Callable[[str], object],
        through: str,
        names: set[str],
    ) -> None:
        """Those in ``module``, which is referred to as a whole, that code names somewhere."""
        if self._reflects and module.__name__ != internals.TORCH:
            self.refuse(f"refers to all operators of {module.__name__}", through)
        for name in sorted(names):
            if (value := find(name)) is not None:
                self.say(name, self.word_for(value, through))

    def _module(self, module: types.ModuleType, index: int, through: str) -> None:
        home = home_of(module)
        self.say("module", home.name)
        if home.kind == "python" and not is_pure(module.__name__, ""):
            self.refuse(f"refers to the module {module.__name__} as a whole", through)
        elif home.is_named:
            self.say(module.__name__)
            find = operators_in(module) if home.kind == "torch" else None
            if find is not None:
                self._spaces.append((module, find, through))
                self._operators(module, find, through, set(self._names))
        else:
            for name, value in sorted(vars(module).items()):
                if name == "__getattr__":
                    self.say(name, self.word_for(value, home.name))
                elif not _is_special(name):
                    self._wait(index, name, value, home.name)

    def _class(self, kind: type, index: int, through: str) -> None:
        home = home_of(kind)
        self.say("class", home.name)
        if not home.is_named:
            for name in ("__name__", "__qualname__"):  # not among its members
                self._wait(index, name, getattr(kind, name), through)
            self._wait(index, _SUBCLASSES, type.__subclasses__(kind), through)
        for word, values in registered_for(kind):
            self.say_all(word, values, "")
        if home.is_named and isinstance(kind, abc.ABCMeta):
            self._abstract.append(kind)
        elif not home.is_named:
            self._users.append(kind)
        if home.is_named:
            self.say(name_of(kind))
            computes = is_pure(kind.__module__, kind.__qualname__)
            if home.kind == "python" and not computes and not issubclass(kind, BaseException):
                self.refuse(f"refers to {name_of(kind)}", through)
            for base in kind.__mro__:
                for name, member in vars(base).items() if base is not object else ():
                    function = _unbound(member)
                    if isinstance(function, types.FunctionType) and is_users_function(function):
                        self.say("patched", name, self.word_for(function, ""))
            return
        through = home.name
        self.say(
            *(self.word_for(base, "") for base in kind.__bases__), self.word_for(type(kind), "")
        )
        outside = [base for base in kind.__mro__[1:-1] if home_of(base).kind != "user"]
        for name, member in sorted(vars(kind).items()):
            if name in _ABOUT_CLASSES or isinstance(member, types.MemberDescriptorType):
                continue
            if self._is_left_out(name, _unbound(member)):
                continue
            called = name not in _SELDOM and (_is_special(name) or not callable(_unbound(member)))
            if called or (name not in _SELDOM and any(hasattr(base, name) for base in outside)):
                self.say("member", index, name, self.word_for(member, through))
            else:
                self._wait(index, name, member, through)

    # -- values

    def contents(self, value: object, through: str) -> None:
        """Of one of Python's containers, or of one derived from those."""
        if value is sys.modules:
            self.refuse("refers to all modules", through)
        elif IN_CONTAINERS in self._left_out and not isinstance(value, (tuple, frozenset)):
            self.say("written", name_of(type(value)))
        elif isinstance(value, dict) and (place := _place_of_table(value)):
            # It grows while torch works. What others put there is a part of keys of its own.
            self.say("torch's", place)
        elif isinstance(value, (list, tuple)):
            parts: Iterator[object]
            parts = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
            self.say_all("items", parts, through)
        elif isinstance(value, dict):
            for key in dict.keys(value):
                self.say(
                    self.word_for(key, through),
                    self.word_for(dict.__getitem__(value, key), through),
                )
            self.say("end")
        elif isinstance(value, (set, frozenset)):
            self._set(value, through)

    def _set(self, value: Collection[object], through: str) -> None:
        """A set; its elements may lead back to it, as those of a class that keeps its objects."""
        # Not by an iterator of its class, which need not end.
        base: type[Collection[object]] = set if isinstance(value, set) else frozenset
        members = list(base.__iter__(value))
        elements = frozenset(map(id, members))
        if elements in self._sets:
            self.say("the set around", self._sets.index(elements))
            return
        outer, self._sets = self._sets, (*self._sets, elements)
        self.say("set", *sorted(self._alone(each, through) for each in members))
        self._sets = outer

    def _alone(self, value: object, through: str) -> str:
        """A digest of something that has no place among its like."""
        if type(value) in _PLAIN:
            return self.word_for(value, through)
        self._step(_STEPS_OF_WALK)
        if len(self._sets) > _MAX_NESTED_SETS:
            raise UntoldError("refers to too many sets, one in the other")
        walk = _Walk(self._asks, self._parts_of, self._left_out, self)
        walk._names, walk._reflects = set(self._names), True
        walk.follow(value)
        self.writes |= walk.writes
        if walk.untold:
            self.refuse(walk.untold, through)
        return walk.digest()


_NOTHING = object()


def _builtins(function: types.FunctionType) -> dict[str, object]:
    found: dict[str, object] = getattr(function, "__builtins__", None) or vars(builtins)
    return found


def _unbound(member: object) -> object:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
