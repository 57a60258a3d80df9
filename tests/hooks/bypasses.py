"""Programs that are not cached, until they do what the warning says."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


_libraries: list[Any] = []  # an operator lives as long as its library


def users_own(x: Any) -> Any:
    """A function that Dynamo is told to leave alone."""
    return x * 3


def _programs() -> dict[str, tuple[Callable[[], None], Callable[[Any], Any]]]:
    """By code: what brings the bypass about, and the function to compile."""
    import torch
    from torch._inductor import config as inductor

    torch.compiler.allow_in_graph(users_own)
    # Nobody can tell what its formula is: it is registered from no file.
    _libraries.append(lib := torch.library.Library("bypasses", "FRAGMENT"))
    lib.define("f(Tensor x) -> Tensor")
    lib.impl("f", lambda x: x * 5, "CPU")
    torch.library.register_fake("bypasses::f", lambda x: torch.empty_like(x))
    torch.library.register_autograd("bypasses::f", lambda ctx, grad: grad * 5)

    def option(config: Any, name: str, value: Any) -> Callable[[], None]:
        return lambda: setattr(config, name, value)

    return {
        "function": (lambda: None, lambda x: users_own(x) + 2),
        "custom-operator": (lambda: None, lambda x: torch.ops.bypasses.f(x) + 4),
        "fx-graph-cache-off": (option(inductor, "fx_graph_cache", False), lambda x: x.sin() + 5),
        "freezing": (option(inductor, "freezing", True), lambda x: x.sin() + 6),
        "constant-folding": (
            option(inductor, "aot_inductor.use_runtime_constant_folding", True),
            lambda x: x.sin() + 7,
        ),
    }


def _run(function: Callable[[Any], Any], x: Any, grad: bool) -> None:
    """Compile it anew, and go backward if there are gradients."""
    import torch

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        out = torch.compile(function)(x).sum()
    if grad:
        out.backward()


def ways_out(url: str) -> dict[str, Any]:
    """For each code: how often and at which level it was told, and whether its way out works."""
    import torch

    import s3cache

    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger = logging.getLogger("s3cache")
    logger.addHandler(Handler())
    logger.setLevel(logging.INFO)
    found = {}
    x = torch.ones(3, 3, requires_grad=True)
    for code, (prepare, function) in _programs().items():
        prepare()
        grad = code != "freezing"  # where gradients are on, nothing is frozen
        with s3cache.enabled(url, local=False) as cache:
            del records[:]
            for _ in range(2):
                _run(function, x, grad)
            told = [each for each in records if "not cached as a whole" in each.getMessage()]
            before = cache.stats()
            assert told, (code, before)
            first, *lines = told[0].getMessage().splitlines()
            assert f"as a whole ({code}): " in first
            exec(lines[0].strip(), {})  # as pasted into another file
            assert lines[-1].strip() == f"read on: s3cache explain {code}"
            assert "read on" not in told[1].getMessage()
            _run(function, x, grad)
            after = cache.stats()
        found[code] = {
            "levels": [each.levelname for each in told],
            "lines": len(lines),
            "before": [dict(before.bypass_reasons), before.saved],
            "after": [dict(after.bypass_reasons), after.saved],
        }
    return found
