"""What the pickle of an entry may name: what compiled graphs are made of, and nothing that runs."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pickle
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from s3cache.artifact import unpickled
from s3cache.errors import CorruptError

if TYPE_CHECKING:
    from pathlib import Path


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    a: int
    b: object


@dataclasses.dataclass
class Record:
    name: str
    parts: object


class Rebuilt:
    """Comes back by a function of its own module."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return rebuilt, (self.n,)


class ByName:
    """A member of an enumeration, as some pickle themselves."""

    def __reduce__(self) -> Any:
        return getattr, (Colour, "RED")


def rebuilt(n: int) -> Rebuilt:
    return Rebuilt(n)


VALUES = [
    [1, 2.5, True, None, "a", b"b", (1,), {1}, frozenset({2}), {"k": 1 + 2j}, bytearray(b"c")],
    [slice(1, 2), range(3), Ellipsis, NotImplemented, type(None), int, int | None, list[int]],
    [collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1])],
    [dt.date(2020, 1, 1), decimal.Decimal("1.5"), re.compile("a", re.IGNORECASE)],
    [Colour.RED, Pair(1, Colour), Record("x", [Record])],
    ValueError("no"),
]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_values_and_what_the_program_defines_come_back(protocol: int) -> None:
    for value in VALUES:
        found = unpickled(pickle.dumps(value, protocol))
        assert repr(found) == repr(value)
    found = unpickled(pickle.dumps(Rebuilt(3), protocol))
    assert isinstance(found, Rebuilt)
    assert found.n == 3
    assert unpickled(pickle.dumps(ByName(), protocol)) is Colour.RED


def test_tensors_types_and_trees_come_back() -> None:
    import torch

    tensors = [torch.arange(3.0), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()]
    for tensor in tensors:
        assert torch.equal(unpickled(pickle.dumps(tensor)).to_dense(), tensor.to_dense())  # type: ignore[attr-defined]
    value = [
        torch.float32,
        torch.strided,
        torch.channels_last,
        torch.device("cpu"),
        torch.Size([2]),
    ]
    assert unpickled(pickle.dumps(value)) == value
    activations = [torch.sin, torch.nn.functional.gelu, torch.nn.functional.silu]
    assert unpickled(pickle.dumps(activations)) == activations
    with pytest.raises(CorruptError, match="from_file"):
        unpickled(pickle.dumps(torch.from_file))


@dataclasses.dataclass
class Call:
    function: Any
    args: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return self.function, self.args


def named(module: str, name: str) -> bytes:
    """The pickle of something by that name, as if it were so pickled."""
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
        "subprocess.run", "operator.attrgetter", "operator.methodcaller", "types.FunctionType",
        "types.CodeType", "importlib.import_module", "pickle.loads", "pickle.Unpickler", "sys.exit",
        "sys.modules", "threading.Thread", "socket.socket", "shutil.rmtree", "pathlib.os.system",
        "collections._sys.modules", "timeit.Timer", "code.InteractiveInterpreter",
        # What a module of the program has imported from elsewhere.
        "tests.artifact.test_unpickling.subprocess.Popen",
        "tests.artifact.test_unpickling.io.open",
        "tests.artifact.test_unpickling.unpickled",
        "tests.artifact.test_unpickling.Rebuilt.__init__.__globals__",
        "s3cache.artifact.unpickled",
    ],
)  # fmt: skip
def test_nothing_that_runs_something_else_is_named(function: str) -> None:
    for cut in range(1, function.count(".") + 1):
        parts = function.split(".")
        with pytest.raises(CorruptError):
            unpickled(named(".".join(parts[:cut]), ".".join(parts[cut:])))


@pytest.mark.parametrize(
    "name",
    [
        "load",
        "save",
        "compile",
        "hub.load",
        "nn.functional.os",
        "nn.functional.torch",
        "storage._load_from_bytes",
        "ops.load_library",
    ],
)
def test_functions_of_torch_are_few(name: str) -> None:
    module, _, last = f"torch.{name}".rpartition(".")
    found: object = None
    try:
        found = unpickled(named(module, last))
    except (CorruptError, AttributeError, ModuleNotFoundError):
        return
    assert getattr(found, "__module__", "").startswith("s3cache.")  # ours, in its place


def test_a_storage_is_unpickled_by_no_other_classes(tmp_path: Path) -> None:
    """torch's own function, which every pickled tensor names, would."""
    import torch

    trace = tmp_path / "betrayed"
    inner = io.BytesIO()
    torch.save(Call(open, (str(trace), "w")), inner)
    evil = pickle.dumps(Call(torch.storage._load_from_bytes, (inner.getvalue(),)))
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        unpickled(evil)
    assert not trace.exists()
    pickle.loads(evil).close()
    assert trace.exists()  # it would have


def test_nothing_is_imported_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing runs code, of whatever is in the way."""
    (tmp_path / "s3cache_in_the_way.py").write_text("class Innocent: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CorruptError, match="not imported here"):
        unpickled(named("s3cache_in_the_way", "Innocent"))
    assert "s3cache_in_the_way" not in sys.modules


def test_what_holds_data_is_imported_where_need_be() -> None:
    code = """if True:
        import sys
        from s3cache.artifact import unpickled
        assert "fractions" not in sys.modules
        print(unpickled(bytes.fromhex(sys.argv[1])))
    """
    data = pickle.dumps([fractions.Fraction(1, 3), decimal.Decimal(2)])
    found = subprocess.run(
        [sys.executable, "-c", code, data.hex()], capture_output=True, text=True, check=True
    )
    assert found.stdout == "[Fraction(1, 3), Decimal('2')]\n"


@pytest.mark.parametrize("owner", [Colour, Record, [], "text"])
def test_attributes_are_of_enumerations_only(owner: object) -> None:
    with pytest.raises(CorruptError, match="__class__"):
        unpickled(pickle.dumps(Call(getattr, (owner, "__class__"))))
