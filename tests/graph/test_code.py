"""Digests of functions: equal for equal behaviour, and different where behaviour may be."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import math
import operator
import os
import pickle
import random
import subprocess
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from s3cache.graph._code import (
    UntoldError,
    fingerprint,
    source_fingerprint,
    told,
    written_by,
)
from s3cache.torch_api import internals


def written(source: str, **names: Any) -> Callable[..., Any]:
    exec(source, names)
    function: Callable[..., Any] = names["f"]
    return function


BASE = "def f(x, by=2): return x.sin() * by + 1"


def helper(x: int) -> int:
    return x + 1


def other_helper(x: int) -> int:
    return x + 2


@pytest.mark.parametrize(
    "source",
    [
        BASE,
        "\n\n# a comment\ndef f(x, by=2):\n    return x.sin() * by + 1",
    ],
)
def test_what_does_not_matter(source: str) -> None:
    assert fingerprint(written(source)) == fingerprint(written(BASE))


def test_names_of_local_variables_do_not_matter_and_those_of_arguments_do() -> None:
    local = "def f(x):\n    {0} = x + 1\n    return {0} * 2"
    assert fingerprint(written(local.format("y"))) == fingerprint(written(local.format("z")))

    # The same instructions: what is called with ``a=1, b=2`` has them the other way around.
    swapped = "def g({0}, {1}): return {0} * 3 + {1}\ndef f(x): return g(a=1, b=2)"
    one, other = (written(swapped.format(*names)) for names in ("ab", "ba"))
    assert one(0) != other(0)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize(
    "source",
    [
        "def f(x, by=3): return x.sin() * by + 1",
        "def f(x, by=2): return x.cos() * by + 1",
        "def f(x, by=2): return x.sin() * by + 2",
        "def f(x, by=2): return x.sin() * by + 1.0",
        "def f(x, by=2): return x.sin() * by - 1",
        "def f(x, *, by=2): return x.sin() * by + 1",
        "def f(x, by=2): return (lambda: x.sin() * by + 1)()",
    ],
)
def test_what_matters(source: str) -> None:
    assert fingerprint(written(source)) != fingerprint(written(BASE))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (helper, other_helper),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (torch.ones(2), torch.zeros(2)),
        (torch.float32, torch.float64),
        (functools.partial(helper, 1), functools.partial(helper, 2)),
        (written("def f(): return G", G=1), written("def f(): return G", G=2)),
        (torch.ops.aten.mm.default, torch.ops.aten.bmm.default),
        (torch.ops.aten.mm.default, torch.ops.aten.mm.out),
        (torch.ops.higher_order.wrap, torch.ops.higher_order.cond),
    ],
)
def test_what_it_refers_to_matters(one: Any, other: Any) -> None:
    source = "def f(x): return (x, value)"
    again = [fingerprint(written(source, value=each)) for each in (one, one, other)]
    assert again[0] == again[1] != again[2]

    def closing_over(value: Any) -> Callable[..., Any]:
        return lambda x: (x, value)

    assert fingerprint(closing_over(one)) == fingerprint(closing_over(one))
    assert fingerprint(closing_over(one)) != fingerprint(closing_over(other))


def test_a_user_function_that_poses_as_torchs_is_looked_into() -> None:
    def posing(value: int) -> Callable[..., Any]:
        @functools.wraps(torch.nn.functional.relu)
        def relu(x: Any) -> Any:
            return x + value

        return relu

    assert posing(1).__module__ == "torch.nn.functional"
    assert fingerprint(posing(1)) != fingerprint(posing(2))


def test_a_user_function_inside_of_torchs_is_looked_into() -> None:
    def wrapped(value: int) -> Callable[..., Any]:
        return torch.no_grad()(lambda x: x + value)

    assert fingerprint(wrapped(1)) == fingerprint(wrapped(1)) != fingerprint(wrapped(2))


def test_functions_that_refer_to_each_other_end() -> None:
    names: dict[str, Any] = {}
    exec("def f(n): return g(n - 1)\ndef g(n): return f(n - 1)", names)
    assert fingerprint(names["f"]) == fingerprint(names["f"])


class Counted:
    """A callable whose behaviour is in its state, its base class and a property."""

    by = (1, 2)

    def __init__(self, count: int) -> None:
        self.count = count

    @property
    def twice(self) -> int:
        return self.count * 2

    def __call__(self, x: int) -> int:
        return x * self.twice


class Slotted:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def attributed(count: int) -> Callable[..., Any]:
    function = written("def f(x): return x * f.count")
    function.count = count  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    "make",
    [
        Counted,
        Slotted,
        attributed,
        lambda count: type("Derived", (Counted,), {"by": [count]}),
        lambda count: type("Derived", (Counted,), {"twice": property(lambda self: count)}),
        lambda count: functools.lru_cache(written("def f(): return G", G=count)),
        lambda count: collections.defaultdict(functools.partial(int, count)),
        lambda count: int | (str, None)[count - 1],
        lambda count: list[(int, str)[count - 1]],  # type: ignore[misc]
        lambda count: written("def f(): return getattr(m, 'by')", m=module(by=count)),
        lambda count: written("def f(): return m.inner.by", m=module(inner=module(by=count))),
    ],
)
def test_what_is_told_tells_all(make: Callable[[int], Any]) -> None:
    def holding(value: Any) -> Callable[..., Any]:
        return lambda x: (x, value)

    assert told(holding(make(1))) == told(holding(make(1))) != told(holding(make(2)))


def module(**names: Any) -> types.ModuleType:
    made = types.ModuleType("s3cache_tests_module")
    vars(made).update(names)
    return made


def test_what_python_and_torch_compute_is_told() -> None:
    source = "def f(x): return torch.sin(x) + math.sqrt(len(x)) + x.open()"
    assert told(written(source, torch=torch, math=math))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(x): return time.time()", "time"),
        ("def f(x): return clock()", "time"),
        ("def f(x): return os.environ", "environment"),
        ("def f(x): return chance()", "random"),
        ("def f(x): return open('x')", "open"),
        ("def f(x): return [eval(e) for e in x]", "eval"),
        ("def f(x):\n    import os\n    return os.getpid()", "getpid"),
        ("def f(x):\n    import ensurepip.__main__ as late", "not imported yet"),
        ("def f(x): return torch.distributed.get_rank()", "get_rank"),
        ("def f(x): return x + large", "tensor"),
        ("def f(x): return handle", "state"),
        ("def f(x): return modules['os'].environ", "as a whole"),
    ],
)
def test_what_asks_the_process_or_the_machine_is_not_told(source: str, what: str) -> None:
    names = {
        "time": time,
        "clock": time.time,
        "os": os,
        "chance": random.random,
        "torch": torch,
        "large": torch.ones(2**20 + 1),
        "handle": (each for each in (1,)),
        "modules": {"os": os},
    }
    with pytest.raises(UntoldError, match=what):
        told(written(source, **names))


def test_numbers_that_sympy_draws_and_hashes_that_it_keeps_do_not_matter() -> None:
    """Lowerings refer to its classes and symbols, which differ in each process."""
    sympy = pytest.importorskip("sympy")

    def refers_to(symbol: object) -> Any:
        return lambda: (symbol, sympy.Dummy, sympy.floor)

    one, other = sympy.Dummy("x"), sympy.Dummy("x")
    assert one != other
    assert fingerprint(refers_to(one)) == fingerprint(refers_to(other))
    assert fingerprint(refers_to(one)) != fingerprint(refers_to(sympy.Dummy("y")))


def test_what_contains_itself_ends() -> None:
    def of(value: int) -> str:
        knot: dict[Any, Any] = {0: value}
        knot[1] = knot
        return told(written("def f(): return knot", knot=knot))

    assert of(1) == of(1) != of(2)


def test_what_torch_answers_of_the_process_is_a_part_of_it() -> None:
    threads = torch.get_num_threads()

    def of(count: int) -> str:
        torch.set_num_threads(count)
        return fingerprint(written("def f(x): return torch.get_num_threads()", torch=torch))

    try:
        assert of(1) == of(1) != of(2)
    finally:
        torch.set_num_threads(threads)


def test_to_follow_code_that_names_an_option_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch is about to remove some; to look at what code reads is not to read it."""
    import torch._dynamo.config as config

    entries = vars(config)["_config"]
    for name in ("inline_inbuilt_nn_modules", "specialize_int"):
        monkeypatch.setattr(entries[name], "deprecated", True, raising=False)  # not in torch 2.11
        monkeypatch.setattr(entries[name], "_deprecation_warned", False, raising=False)

    def asking(x: Any) -> Any:
        return x if torch._dynamo.config.inline_inbuilt_nn_modules else -x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fingerprint(asking)
        internals.read_fields(internals.DYNAMO_OPTIONS, config)


# -- walks end


class Registered:
    """Objects whose class knows them all."""

    known: Any = set()  # noqa: RUF012 - of the class, as programs have it

    def __init__(self, value: int) -> None:
        self.value = value


def registered(kind: type, values: list[int]) -> Callable[..., Any]:
    """A function that refers to a class that keeps its objects, of which there are several."""

    objects = [Registered(value) for value in values]
    kept.append(objects)

    class Kept(Registered):
        known = kind(objects)

    for each in objects:
        each.__class__ = Kept
    return lambda x: (Kept(x).value, Kept.known)


kept: list[Any] = []  # a weak set does not keep them


@pytest.mark.parametrize("kind", [set, frozenset, weakref.WeakSet])
def test_a_class_may_keep_a_set_of_its_objects(kind: type) -> None:
    digests = [fingerprint(registered(kind, values)) for values in ([1], [1, 2, 3], [1, 2, 4])]
    assert len(set(digests)) == 3
    assert fingerprint(registered(kind, [3, 2, 1])) == digests[1]


class Endless(set[int]):
    def __iter__(self) -> Any:
        return itertools.repeat(1)


@pytest.mark.timeout(30)
def test_an_iterator_of_a_users_class_is_not_asked() -> None:
    """It need not end."""
    digests = [fingerprint(written("def f(): return s", s=Endless({n}))) for n in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_a_walk_that_would_take_for_ever_ends_and_says_so() -> None:
    sets: list[set[Any]] = [set() for _ in range(12)]
    for index, each in enumerate(sets):
        others = [one for one in sets if one is not each]
        each.add(functools.partial(max, others, index))
    with pytest.raises(UntoldError, match="refers to too much"):
        fingerprint(written("def f(): return sets", sets=sets))

    with pytest.raises(UntoldError, match="refers to too much"):
        fingerprint(written("def f(): return numbers", numbers=[0] * 1_000_000))


# -- what C keeps to itself


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (operator.attrgetter("a", "b.c"), operator.attrgetter("a", "b.d")),
        (operator.itemgetter(1, "x"), operator.itemgetter(1, "y")),
        (operator.methodcaller("f", 1, by=2), operator.methodcaller("f", 1, by=3)),
        (itertools.count(1), itertools.count(2)),
    ],
)
def test_what_python_has_in_c_is_what_it_was_made_of(one: Any, other: Any) -> None:
    """Not where its code lies in memory, which is another place in each process."""
    digest = fingerprint(written("def f(x): return get(x)", get=one))
    assert digest == fingerprint(written("def f(x): return get(x)", get=copy.copy(one)))
    assert digest != fingerprint(written("def f(x): return get(x)", get=other))

    code = (
        "from __future__ import annotations; import pickle, sys;"
        "from s3cache.graph._code import fingerprint;"
        "names = {'get': pickle.loads(bytes.fromhex(sys.argv[1]))};"
        "exec('def f(x): return get(x)', names); print(fingerprint(names['f']))"
    )
    command = [sys.executable, "-c", code, pickle.dumps(one).hex()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == (
        digest
    )


# -- what only counts


class Counting:
    def __init__(self, function: Any, *, fast: bool = False) -> None:
        self.function, self.fast = function, fast
        self.calls = 0
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.seen.append(time.perf_counter())
        return self.function(*args)


def counting(function: Any) -> Any:
    calls = 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        counted.last = args  # type: ignore[attr-defined]
        totals[function.__name__] = totals.get(function.__name__, 0) + 1
        return function(*args)

    return counted


totals: dict[str, int] = {}


@pytest.mark.parametrize("make", [Counting, counting])
def test_by_its_source_a_wrapper_is_the_same_whatever_it_has_counted(make: Any) -> None:
    wrapper = make(helper)
    before = source_fingerprint(wrapper)
    wrapper(1)
    assert source_fingerprint(wrapper) == before
    assert source_fingerprint(make(helper)) == before
    assert written_by(wrapper)

    # What it was given, and does not write itself, is another matter.
    assert source_fingerprint(make(other_helper)) != before
    assert source_fingerprint(Counting(helper, fast=True)) != before
