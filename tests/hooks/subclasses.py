"""Programs on tensor subclasses that look equal from outside and hold different tensors."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import s3cache
from tests.hooks.jobs import account, log_records, machine_here

COLUMNS = 4


class Unregistered(Tensor):
    """Tensors of any sizes and kinds behind one outer size, with plain data about them."""

    def __new__(cls, parts: dict[str, Tensor], about: object, requires_grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2), requires_grad=requires_grad)

    def __init__(self, parts: dict[str, Tensor], about: object, *_: object) -> None:
        self.parts, self.about = [*parts], about
        vars(self).update(parts)

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return self.parts, self.about

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], about: object, *_: object) -> Any:
        return cls(inner, about)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.parts})"  # torch 2.11 prints it during a trace

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        (packed,) = (each for each in args if isinstance(each, cls))
        made = {}
        for name in packed.parts:
            inner = [getattr(each, name) if each is packed else each for each in args]
            made[name] = func(*inner, **(kwargs or {}))
        return cls(made, packed.about)


class Registered(Unregistered):
    """The same; graphs with it are cached at the first level."""


s3cache.register_cacheable(Registered, version="1")


def airy(x: Any) -> Any:
    """Inductor calls ATen for it, and checks sizes and strides: no C++ is compiled."""
    return torch.special.airy_ai(x.to_local() if isinstance(x, DTensor) else x)


# -- what is compared


def leaves(value: Any) -> list[Tensor]:
    """Return the plain tensors inside a value."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    if is_traceable_wrapper_subclass(value):
        inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
        return leaves([each for each in inner if isinstance(each, Tensor)])
    return [value]


def is_same(ours: Any, expected: Any) -> bool:
    """Return whether all plain tensors are equal in sizes, strides, type and values."""
    return all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and torch.allclose(a, b, equal_nan=True)
        for a, b in zip(leaves(ours), leaves(expected), strict=True)
    )


def outcome(function: Callable[..., Any], value: Any, **options: Any) -> str:
    """Run a function compiled and uncompiled; return ``same``, or how they differ."""
    torch.compiler.reset()
    try:
        ours = torch.compile(function, **options)(value)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return "same" if is_same(ours, function(value)) else "different"


# -- generated inputs: by name, a function that makes one


def _tensor(rows: int, columns: int, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    values = torch.linspace(-1, 1, rows * columns, dtype=torch.float64).reshape(shape).to(dtype)
    return values.t() if transposed else values


def packed(kind: type, seed: int) -> Any:
    """Return a subclass with random content."""
    draw = random.Random(seed)

    def tensor() -> Tensor:
        dtype = draw.choice([torch.float32, torch.float64])
        return _tensor(
            draw.choice([0, 1, 3]), draw.choice([2, 5]), dtype, transposed=draw.random() < 0.4
        )

    def made(depth: int) -> Any:
        count = draw.choice([1, 2])
        parts = {
            f"part{i}": made(depth - 1) if depth and draw.random() < 0.4 else tensor()
            for i in range(count)
        }
        about = draw.choice([None, {"names": {"a", "b", "c"}}, ("a", 1)])
        return kind(parts, about, draw.random() < 0.3)

    return made(2)


def shard(
    rows: int,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
    requires_grad: bool = False,
    placements: Sequence[Any] = (Shard(0),),
) -> DTensor:
    """Return this rank's part of a matrix of ``rows`` rows, made without other ranks."""
    own = rows
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            chunks = [len(each) for each in torch.empty(own, 0).chunk(mesh.size(dim))]
            place = mesh.get_local_rank(dim)
            own = chunks[place] if place < len(chunks) else 0
    part = _tensor(own, COLUMNS, dtype, transposed=transposed).requires_grad_(requires_grad)
    return DTensor.from_local(
        part,
        mesh,
        placements,
        shape=torch.Size((rows, COLUMNS)),
        stride=(COLUMNS, 1),
        run_check=False,
    )


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[-len(shape) :])


def _reversed(size: int) -> DeviceMesh:
    return DeviceMesh("cpu", [*reversed(range(size))])


#: The number of ranks, and how each makes its input.
SHARDED: dict[str, tuple[int, Callable[[], Any]]] = {
    "uneven": (2, lambda: shard(5, _mesh(2))),
    "empty": (2, lambda: shard(1, _mesh(2))),
    "all empty": (2, lambda: shard(0, _mesh(2))),
    "even": (2, lambda: shard(4, _mesh(2))),
    "in reverse": (2, lambda: shard(5, _reversed(2))),
    "transposed": (2, lambda: shard(5, _mesh(2), transposed=True)),
    "even and transposed": (2, lambda: shard(4, _mesh(2), transposed=True)),
    "with gradients": (2, lambda: shard(5, _mesh(2), requires_grad=True)),
    "double": (2, lambda: shard(5, _mesh(2), dtype=torch.float64)),
    "four ranks": (4, lambda: shard(5, _mesh(4))),
    "a part of a mesh": (4, lambda: shard(5, _mesh(2, 2)["b"])),
    "two dimensions": (4, lambda: shard(5, _mesh(2, 2), placements=[Shard(0), Shard(0)])),
    "a replica of shards": (4, lambda: shard(3, _mesh(2, 2), placements=[Replicate(), Shard(0)])),
    "replicas": (2, lambda: shard(5, _mesh(2), placements=[Replicate()])),
    "partial sums": (2, lambda: shard(5, _mesh(2), placements=[Partial()])),
}  # fmt: skip


def sharded(url: str, names: Sequence[str], backwards: bool) -> list[dict[str, Any]]:
    """Take the place of each rank in turn, on two machines; return what each machine has seen."""
    seen: list[dict[str, Any]] = []
    for machine in ("first", "second"):
        with machine_here(url, machine) as cache:
            outcomes = {}
            for name in names:
                size, make = SHARDED[name]
                for rank in sorted(range(size), reverse=backwards):
                    with group(rank, size):
                        outcomes[f"{name}, rank {rank}"] = outcome(airy, make())
            assert not cache.flush(60).remaining
            seen.append({"outcomes": outcomes, **account(cache)})
    return seen


@contextlib.contextmanager
def group(rank: int, size: int) -> Iterator[None]:
    """Make this process a rank of a group in which collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def generated(url: str, seeds: Sequence[int], kind: str) -> list[dict[str, Any]]:
    """Compile for subclasses with random content, on two machines."""
    seen: list[dict[str, Any]] = []
    for machine in ("first", "second"):
        with machine_here(f"{url}", machine) as cache:
            outcomes = {str(seed): outcome(airy, packed(globals()[kind], seed)) for seed in seeds}
            assert not cache.flush(60).remaining
            seen.append({"outcomes": outcomes, **account(cache)})
    return seen


def redistribute(url: str) -> dict[str, Any]:
    """Redistribute DTensors as one rank of two; one of the matrices has a single row."""

    def redistributed(x: Any, placement: Any) -> Any:
        return torch.special.airy_ai(x).redistribute(placements=[placement]).to_local()

    def outcomes() -> dict[str, str]:
        found = {}
        for rows, (old, new) in itertools.product((1, 5), itertools.permutations(PLACEMENTS, 2)):
            x = shard(rows, _mesh(2), placements=[old])
            ours = functools.partial(redistributed, placement=new)
            found[f"{rows} rows, {old} to {new}"] = outcome(ours, x)
        return found

    return _as_one_rank(url, outcomes)


def return_dtensors(url: str) -> dict[str, Any]:
    """Return a DTensor from a graph as one rank of two; the second rank has no rows."""
    return _as_one_rank(url, lambda: {"": outcome(torch.special.airy_ai, shard(1, _mesh(2)))})


def _as_one_rank(url: str, outcomes: Callable[[], dict[str, str]]) -> dict[str, Any]:
    records = log_records()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with s3cache.enabled(url) as cache:
        found = outcomes()
        dist.barrier()
        assert not cache.flush(60).remaining
        log = "\n".join(record.getMessage() for record in records)
        result = {"outcomes": found, "log": log, **account(cache)}
    dist.barrier()
    dist.destroy_process_group()
    return result


PLACEMENTS = (Shard(0), Replicate())
