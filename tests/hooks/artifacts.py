"""Jobs that keep compiled graphs in every form that torch has, and that use them elsewhere.

They run with s3cache or without, and compare each output with eager mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.package.package_exporter import PackageExporter
from torch.package.package_importer import PackageImporter

import s3cache
from tests.hooks.jobs import account, machine_here
from tests.support.watch import lowerings

# -- graphs


@torch.library.custom_op("s3cache_artifacts::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x @ x


@squared.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad @ x.t() + x.t() @ grad


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


squared.register_autograd(_gradient, setup_context=_remember)


def opaque(x: Any) -> Any:
    return x @ x


def waved(x: Any) -> Any:
    return x.sin() * 2


def unchanged(x: Any) -> Any:
    return x


last = unchanged  # the last step of each graph; with ``waved``, it has a kernel


def plain(x: Any) -> Any:
    """A graph that is cached as a whole."""
    return last(x @ x)


def half(x: Any) -> Any:
    """A graph that torch does not cache as a whole either: only the second level serves it."""
    return last(opaque(x) + x)


def custom(x: Any) -> Any:
    """A graph that torch caches and s3cache does not: a rule of its operator is Python."""
    return last(squared(x))


def replaced(x: Any) -> Any:
    """Another one: a function that takes part in each trace is replaced (:func:`_set_up`)."""
    return last(x @ x @ x)


GRAPHS = {function.__name__: function for function in (plain, half, custom, replaced)}


@contextlib.contextmanager
def _set_up(name: str, kernels: bool) -> Iterator[None]:
    global last
    mode = torch._subclasses.fake_tensor.FakeTensorMode
    dispatch = mode.dispatch

    def counted(*args: Any, **kwargs: Any) -> Any:
        return dispatch(*args, **kwargs)

    torch.compiler.reset()
    torch._dynamo.allow_in_graph(opaque)
    if name == "replaced":
        mode.dispatch = counted  # type: ignore[method-assign]
    last = waved if kernels else unchanged
    try:
        yield
    finally:
        mode.dispatch = dispatch  # type: ignore[method-assign]


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def example() -> Any:
    return torch.arange(16.0).reshape(4, 4) / 16


def _traced(function: Any) -> Any:
    """Return the graph that Dynamo passes to a backend."""
    kept = []

    def keep(gm: Any, _: Any) -> Any:
        kept.append(gm)
        return gm.forward

    torch.compile(function, backend=keep)(example())
    return kept[0]


# -- ways to keep them


def _save_standalone(function: Any, path: Path, **options: Any) -> None:
    inductor: Any = torch._inductor
    graph = _traced(function)
    inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    compiled = inductor.standalone_compile(
        graph, inputs, dynamic_shapes="from_graph", options={}, **options
    )
    compiled.save(path=str(path), format="binary")


def _use_standalone(path: Path, _: Any) -> Any:
    inductor: Any = torch._inductor
    return inductor.CompiledArtifact.load(path=str(path), format="binary")(example())[0]


def _save_compiled(function: Any, path: Path) -> None:
    compiled: Any = torch.compile(function, fullgraph=True)
    compiled.aot_compile(((example(),), {})).save_compiled_function(str(path))


def _use_compiled(path: Path, _: Any) -> Any:
    with open(path, "rb") as file:
        return torch.compiler.load_compiled_function(file)(example())


def _save_caches(function: Any, path: Path) -> None:
    """Train, so that a backward is kept too."""
    x = example().requires_grad_()
    torch.compile(function)(x).sum().backward()
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    path.write_bytes(saved[0])


def _use_caches(path: Path, function: Any) -> Any:
    torch.compiler.load_cache_artifacts(path.read_bytes())
    x = example().requires_grad_()
    out = torch.compile(function)(x)
    out.sum().backward()
    return out


def _export(function: Any, path: Path) -> None:
    torch.export.save(torch.export.export(Module(function), (example(),)), path)


def _use_export(path: Path, _: Any) -> Any:
    return torch.compile(torch.export.load(path).module())(example())


def _package_code(function: Any, path: Path) -> None:
    exported = torch.export.export(Module(function), (example(),))
    inductor: Any = torch._inductor
    inductor.aoti_compile_and_package(exported, package_path=str(path))


def _use_code(path: Path, _: Any) -> Any:
    inductor: Any = torch._inductor
    return inductor.aoti_load_package(str(path))(example())


def _package(function: Any, path: Path) -> None:
    with PackageExporter(str(path)) as exporter:
        exporter.extern(["torch.**", "tests.**", "sys", "io"])
        exporter.save_pickle("graph", "graph.pkl", _traced(function))


def _use_package(path: Path, _: Any) -> Any:
    module = PackageImporter(str(path)).load_pickle("graph", "graph.pkl")
    return torch.compile(module)(example())[0]


#: For each way, a function that keeps a graph at a path, and one that uses it in another process.
WAYS: dict[str, tuple[Callable[[Any, Path], None], Callable[[Path, Any], Any]]] = {
    "standalone.bin": (_save_standalone, _use_standalone),
    "standalone aot": (
        lambda function, path: _save_standalone(function, path, aot=True),
        _use_standalone,
    ),
    "aot_compile": (_save_compiled, _use_compiled),
    "caches": (_save_caches, _use_caches),
    "export.pt2": (_export, _use_export),
    "code.pt2": (_package_code, _use_code),
    "package": (_package, _use_package),
}

# -- jobs


def keep(
    url: str | None, names: list[str], ways: list[str], kernels: bool, folder: str = "."
) -> dict[str, Any]:
    """Keep each graph in each way; return errors, and the counts if there is a cache."""
    with s3cache.enabled(url) if url else contextlib.nullcontext() as cache:
        found = {}
        for name in names:
            for way in ways:
                with _set_up(name, kernels):
                    make, path = WAYS[way][0], Path(folder) / f"{name} {way}"
                    found[f"{name} {way}"] = _outcome(partial(make, GRAPHS[name], path))
        if cache is None:
            return {"kept": found}
        cache.flush()
        explained = []
        with contextlib.suppress(s3cache.ConfigError):  # nothing was compiled here
            explained = [each.record for each in s3cache.explain(remote=False).explanations]
        unasked = {reason["message"] for each in explained for reason in each.reasons}
        return {
            "kept": found,
            **account(cache),
            "fx": _counts_of_fx(cache),
            "ahead": any("AOTInductor" in message for message in unasked),
        }


def use(
    url: str | None, names: list[str], ways: list[str], kernels: bool, folder: str
) -> dict[str, Any]:
    """Use what another process has kept; return results, errors, and numbers of lowered graphs."""
    lowered = lowerings()
    with s3cache.enabled(url) if url else contextlib.nullcontext():
        found: dict[str, Any] = {}
        for name in names:
            for way in ways:
                with _set_up(name, kernels):
                    lowered.clear()
                    outcome = _outcome(partial(_equals_eager, name, way, Path(folder)))
                    found[f"{name} {way}"] = [outcome, len(lowered)]
        return {"used": found}


def _equals_eager(name: str, way: str, folder: Path) -> bool:
    function = GRAPHS[name]
    out = WAYS[way][1](folder / f"{name} {way}", function)
    return torch.allclose(out, function(example()))


def _counts_of_fx(cache: Any) -> dict[str, int]:
    level = cache.stats().fx
    return {"hits": sum(level.hits.values()), "saved": level.saved}


def _outcome(step: Callable[[], Any]) -> str:
    try:
        return str(step())
    except Exception as exc:
        return f"{type(exc).__name__}: {str(exc)[:60]}"


def pieces(url: str) -> list[dict[str, Any]]:
    """Train a program in two pieces on two machines, and again on each; return what they compile.

    A backend compiles the pieces in one tracing context: one is cached as a whole, the other is
    refused. Each has a backward that is compiled later.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.passes.split_module import split_module

    def backend(gm: Any, inputs: Any) -> Any:
        whole = split_module(gm, gm, lambda node: int("squared" in str(node.target)))
        piece: Any
        for name, piece in whole.named_children():
            setattr(whole, name, _boxed(compile_fx(piece, inputs)))
        return whole

    def program(x: Any) -> Any:
        return squared(x @ x)

    lowered, found = lowerings(), []
    for name in ("one", "one", "two", "two"):
        with machine_here(url, name) as cache:
            lowered.clear()
            gradients = []
            for function in (torch.compile(program, backend=backend), program):
                x = example().requires_grad_()
                function(x).sum().backward()
                gradients.append(x.grad)
            cache.flush()
            found.append(
                {
                    "right": torch.allclose(*gradients),
                    "lowered": len(lowered),
                    "hits": account(cache)["torch"].get("autograd_cache_hit", 0),
                    "saved": cache.stats().saved,
                }
            )
    return found


def _boxed(function: Any) -> Any:
    class Boxed(torch.nn.Module):
        def forward(self, *inputs: Any) -> Any:
            out = function(*inputs)
            return out[0] if isinstance(out, (list, tuple)) else out

    return Boxed()
