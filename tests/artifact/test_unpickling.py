"""The pickle of an entry may name the parts of compiled graphs, but no function that acts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import gc
import importlib
import inspect
import io
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jinja2.utils
import numpy as np
import pytest
import sympy  # type: ignore[import-untyped]
import torch

from s3cache.artifact import unpickle
from s3cache.artifact._artifact import is_listed
from s3cache.errors import CorruptError
from s3cache.torch_api.internals import UNPICKLED


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: object


@dataclasses.dataclass
class Record:
    name: str
    parts: object


class Plain:
    """A class that is unpickled without a call of its constructor."""

    def __init__(self, n: int) -> None:
        self.n = n


class ByName:
    """A member of an enumeration that pickles itself by name, as some do."""

    def __reduce__(self) -> Any:
        return getattr, (Colour, "RED")


# Listed names that only some releases of torch have.
ELSEWHERE = {
    "torch._functorch._aot_autograd.schemas.CacheableAOTConfig",
    "torch._inductor.remote_cache.LocalAutotuneCache",
    "torch._inductor.remote_cache.LocalCacheBackend",
    "torch.compiler._cache.CacheArtifactRecorder",
}
ACTED: list[object] = []


def act(*args: object) -> object:
    """A function of the program."""
    ACTED.append(args)
    return args


class Acting:
    """Acts in its constructor and when its state is restored."""

    def __init__(self, *args: object) -> None:
        act(*args)

    def __setstate__(self, state: object) -> None:
        act(state)


class ActingWhenMade:
    def __new__(cls, *args: object) -> Any:
        act(*args)
        return object.__new__(cls)


class ActingWhenGone:
    def __del__(self) -> None:
        act(self)


VALUES = [
    [1, 2.5, True, None, "a", b"b", (1,), {1}, frozenset({2}), {"k": 1 + 2j}, bytearray(b"c")],
    [slice(1, 2), range(3), Ellipsis, NotImplemented, type(None), int, int | None, list[int]],
    [collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1])],
    [dt.date(2020, 1, 1), decimal.Decimal("1.5"), re.compile("a", re.IGNORECASE)],
    [Colour.RED, Pair(1, Colour), Record("x", [Record])],
    ValueError("no"),
    [inspect.signature(len), Pair],  # listed, with a __setstate__ in Python
]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_values_and_classes_of_the_program_can_be_unpickled(protocol: int) -> None:
    for value in VALUES:
        found = unpickle(pickle.dumps(value, protocol))
        assert repr(found) == repr(value)
    found = unpickle(pickle.dumps([Plain(3), Plain, act], protocol))
    assert isinstance(found, list)
    assert isinstance(found[0], Plain)
    assert found[0].n == 3
    assert found[1:] == [Plain, act]
    assert unpickle(pickle.dumps(ByName(), protocol)) is Colour.RED


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # from torch 2.11
def test_tensors_and_torch_types_can_be_unpickled() -> None:
    for tensor in (torch.arange(3.0), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()):
        found: Any = unpickle(pickle.dumps(tensor))
        assert torch.equal(found.to_dense(), tensor.to_dense())
    value = [
        torch.float32,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
        torch.Size([2]),
    ]
    value += [torch.sin, torch.nn.functional.gelu, torch.nn.functional.silu]
    assert unpickle(pickle.dumps(value)) == value
    with pytest.raises(CorruptError, match="from_file"):
        unpickle(pickle.dumps(torch.from_file))


@dataclasses.dataclass
class Call:
    function: Any
    args: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.function, self.args


def named(module: str, name: str) -> bytes:
    """Return a pickle that names this object of this module."""
    out = io.BytesIO()
    out.write(b"\x80\x04")
    for text in (module, name):
        out.write(b"\x8c" + bytes([len(text)]) + text.encode())
    out.write(b"\x93.")
    return out.getvalue()


@pytest.mark.parametrize(
    "function",
    [
        "builtins.eval", "builtins.exec", "builtins.open", "builtins.__import__",
        "builtins.compile", "builtins.print", "builtins.setattr", "builtins.globals",
        "io.open", "_io.FileIO", "os.system", "posix.system", "os.environ", "subprocess.Popen",
        "operator.attrgetter", "types.FunctionType", "importlib.import_module", "pickle.loads",
        "sys.exit", "sys.modules", "pathlib.os.system", "timeit.Timer", "torch.ops.load_library",
        # Names that a module of the program has imported.
        "tests.artifact.test_unpickling.subprocess.Popen",
        "tests.artifact.test_unpickling.unpickle",
        "tests.artifact.test_unpickling.Plain.__init__.__globals__",
        "s3cache.artifact.unpickle",
    ],
)  # fmt: skip
def test_functions_that_act_may_not_be_named(function: str) -> None:
    for cut in range(1, function.count(".") + 1):
        parts = function.split(".")
        with pytest.raises(CorruptError):
            unpickle(named(".".join(parts[:cut]), ".".join(parts[cut:])))


def test_a_graph_of_a_refused_entry_is_deleted_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The graph has no attributes yet, and torch's ``__del__`` reads one."""
    from torch._inductor.output_code import CompiledFxGraph

    errors: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    graph = object.__new__(CompiledFxGraph)
    vars(graph).update(compiled_fn_runner=None, constants=subprocess.Popen)
    with pytest.raises(CorruptError, match=r"subprocess\.Popen"):
        unpickle(pickle.dumps(graph))
    vars(graph).update(constants=Plain)  # the second, careful attempt reads it
    found: Any = unpickle(pickle.dumps(graph))
    assert found.constants is Plain
    del graph
    gc.collect()
    assert errors == []


def test_unpickling_runs_no_code_of_the_program() -> None:
    """The error names the function, which a developer can add to the list if a graph needs it."""
    ACTED.clear()
    for function, args in [
        (act, (1,)),
        (Acting, (1,)),
        (functools.partial(act, 1), ()),
        (jinja2.utils.import_string, ("os.system",)),
        (np.memmap, ("/dev/null", "uint8", "w+")),
        (torch._tensor._rebuild_from_type_v2, (act, torch.Tensor, (1,), {})),
    ]:
        with pytest.raises(CorruptError, match=r"internals\.py"):
            unpickle(pickle.dumps(Call(function, args)))
    for cls in (Acting, ActingWhenMade, ActingWhenGone):
        acting = object.__new__(cls)
        acting.__dict__["x"] = 1
        content = pickle.dumps(acting)
        del acting
        ACTED.clear()
        with pytest.raises(CorruptError, match=cls.__name__):
            unpickle(content)
    with pytest.raises(TypeError):  # only operator.or_ is allowed
        unpickle(pickle.dumps(Call(functools.reduce, (act, [1, "a"]))))
    assert ACTED == []


def test_all_sources_of_this_release_are_listed() -> None:
    """Guards contain sources, also those of a compiled optimizer; two other names are listed."""
    from torch._dynamo import source
    from torch._guards import GuardSource, Source

    classes = {n for n, each in vars(source).items() if isinstance(each, type)}
    sources = {n for n in classes if issubclass(getattr(source, n), Source)}
    listed = {name for name in vars(source) if is_listed(source.__name__, name)}
    assert sources <= listed <= sources | {"TensorProperty", GuardSource.__name__}
    assert not is_listed(source.__name__, "utils.Source")
    optimizer_source = source.AttrSource(source.OptimizerSource(source.LocalSource("self")), "lr")
    restored = unpickle(pickle.dumps(source.GradSource(optimizer_source)))
    assert (type(restored), restored) == (source.GradSource, source.GradSource(optimizer_source))


def test_text_is_not_evaluated_as_an_expression() -> None:
    from torch.utils._sympy.functions import FloorDiv

    symbol = sympy.Symbol("s0", integer=True, positive=True)
    for good in (symbol + 1, FloorDiv(symbol, 2), sympy.Eq(symbol, 3), sympy.Float(0.5)):
        assert unpickle(pickle.dumps(good)) == good
    ACTED.clear()
    evil = f"__import__('{__name__}', fromlist='x').act(1)"
    with contextlib.suppress(Exception):
        sympy.sin(evil)
    assert ACTED  # without our unpickler, the code runs
    ACTED.clear()
    for function, args in [
        (sympy.sympify, (evil,)),
        (sympy.sin, (evil,)),
        (sympy.Add, (evil,)),
        (FloorDiv, (evil, 2)),
        (FloorDiv, ((evil,), 2)),
        (sympy.Rational, ((evil,), 2)),
    ]:
        with pytest.raises(CorruptError):
            unpickle(pickle.dumps(Call(function, args)))
    assert ACTED == []


def test_each_listed_name_is_in_this_torch_or_known_to_be_in_another() -> None:
    """A name that no release has would be a mistake in the list."""
    lacking = {
        name
        for name in UNPICKLED
        if name.partition(".")[0] in ("torch", "sympy")
        and not hasattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2])
    }
    assert lacking <= ELSEWHERE


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.elastic.multiprocessing.subprocess_handler.SubprocessHandler",
        "torch.serialization._open_file", "torch.hub.load", "torch._inductor.config",
        "sympy.core.sympify.sympify", "numpy.memmap", "numpy.load",
        "torch.load", "torch.compile",
    ],
)  # fmt: skip
def test_library_functions_that_act_may_not_be_named(name: str) -> None:
    module, _, last = name.rpartition(".")
    importlib.import_module(module)
    with pytest.raises(CorruptError, match=rf"{last}.*internals\.py"):
        unpickle(named(module, last))


def test_a_storage_is_unpickled_with_weights_only(tmp_path: Path) -> None:
    """torch's own function, which every pickled tensor names, unpickles anything."""
    import torch

    trace = tmp_path / "betrayed"
    inner = io.BytesIO()
    torch.save(Call(open, (str(trace), "w")), inner)
    evil = pickle.dumps(Call(torch.storage._load_from_bytes, (inner.getvalue(),)))
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        unpickle(evil)
    assert not trace.exists()
    pickle.loads(evil).close()
    assert trace.exists()  # without our unpickler, the code runs


def test_no_module_of_the_program_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import runs code of any module on the path."""
    (tmp_path / "s3cache_in_the_way.py").write_text("class Innocent: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CorruptError, match="not imported here"):
        unpickle(named("s3cache_in_the_way", "Innocent"))
    assert "s3cache_in_the_way" not in sys.modules


@pytest.mark.parametrize("owner", [Colour, Record, [], "text"])
def test_getattr_works_on_enumerations_only(owner: object) -> None:
    with pytest.raises(CorruptError, match="__class__"):
        unpickle(pickle.dumps(Call(getattr, (owner, "__class__"))))
