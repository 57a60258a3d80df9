"""A warning names each kind of bypass once, with a fix that works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import s3cache
import tests.support.compiler  # noqa: F401
from s3cache.cache import Cache
from s3cache.graph import BypassReason
from s3cache.hooks._bypasses import Bypasses
from tests.hooks.jobs import log_records
from tests.support.marks import slow
from tests.support.sites import Site

pytestmark = pytest.mark.timeout(900)


@slow
def test_the_first_bypass_of_a_kind_is_a_warning_with_a_fix_that_works(site: Site) -> None:
    """The second bypass is logged at INFO. After the fix, the same graph is cached."""
    ran = site.machine("one").run("test_bypasses:fixes", site.url)
    assert ran.pop("stderr").count("Traceback") == 0
    assert len(ran) == 5
    for code, seen in ran.items():
        assert seen["levels"] == ["WARNING", "INFO"], code
        assert seen["lines"] == 2, code  # the fix, and where to read on
        assert seen["before"] == [{code: 2}, 0]
        assert seen["after"] == [{code: 2}, 1]


def test_each_function_is_named_with_its_fix_and_no_message_is_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A user who applies one fix must not learn in the next run that there are many more."""
    caplog.set_level("INFO", "s3cache.bypasses")
    engine = Cache.open(None, local=False).engine
    bypasses = Bypasses(engine)
    reasons = [
        BypassReason("function", f"calls f{n}", f"f{n}()", target=f"f{n}") for n in range(200)
    ]
    for some in (reasons[:2], reasons[1:3], reasons[:2], reasons, *([each] for each in reasons)):
        bypasses.warn(some)
    engine.close()
    first, second, third, many, *others = caplog.records
    assert [each.levelname for each in (first, second, third, many)] == [
        *("WARNING", "WARNING", "INFO", "WARNING")
    ]
    assert [line in first.getMessage() for line in ("calls f0", "f0()", "calls f1", "f1()")] == [
        *(True, True, True, True)
    ]
    assert len(many.getMessage().splitlines()) < 30
    assert "190 more" in many.getMessage()
    assert sum(each.levelname == "WARNING" for each in others) < 60


def test_a_program_with_its_own_decompositions_compiles() -> None:
    """No key of either level contains them; torch then makes its own key without our reducer."""
    compile_fx = torch._inductor.compile_fx.compile_fx
    table = {torch.ops.aten.sin.default: lambda x: x * 3}

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_fx(gm, inputs, decompositions=table)

    torch._dynamo.reset()
    x = torch.ones(3)
    with s3cache.enabled("memory://decompositions", local=False):
        assert torch.equal(torch.compile(lambda x: x.sin(), backend=backend)(x), x * 3)


def test_a_program_may_register_a_kernel_with_keyword_arguments() -> None:
    with s3cache.enabled("memory://kernels", local=False):
        library = torch.library.Library("s3cache_keywords", "DEF")
        _libraries.append(library)
        library.define("doubled(Tensor x) -> Tensor")
        library.impl(op_name="doubled", fn=lambda x: x * 2, dispatch_key="CPU")
    assert torch.ops.s3cache_keywords.doubled(torch.ones(2)).tolist() == [2, 2]


# -- the job


_libraries: list[Any] = []  # an operator lives as long as its library


def users_own(x: Any) -> Any:
    """Triple ``x``; Dynamo does not trace into it (``allow_in_graph``)."""
    return x * 3


def _programs() -> dict[str, tuple[Callable[[], None], Callable[[Any], Any]]]:
    """Return, by code, the cause of a bypass and the function to compile."""
    inductor = torch._inductor.config
    torch.compiler.allow_in_graph(users_own)
    # Its backward formula has no identity: it is registered from no file.
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
    """Compile from scratch, and run the backward if there are gradients."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        out = torch.compile(function)(x).sum()
    if grad:
        out.backward()


def fixes(url: str) -> dict[str, Any]:
    """Return, for each code, the levels of its log records, and counts before and after a fix."""
    records, found = log_records(logging.INFO), {}
    x = torch.ones(3, 3, requires_grad=True)
    for code, (prepare, function) in _programs().items():
        prepare()
        grad = code != "freezing"  # with gradients on, nothing is frozen
        with s3cache.enabled(url, local=False) as cache:
            del records[:]
            for _ in range(2):
                _run(function, x, grad)
            seen = [each for each in records if "not cached as a whole" in each.getMessage()]
            before = cache.stats()
            assert seen, (code, before)
            first, *lines = seen[0].getMessage().splitlines()
            assert f"as a whole ({code}): " in first
            exec(lines[0].strip(), {})  # as pasted into another file
            assert lines[-1].strip() == f"read on: s3cache explain {code}"
            assert "read on" not in seen[1].getMessage()
            _run(function, x, grad)
            after = cache.stats()
        found[code] = {
            "levels": [each.levelname for each in seen],
            "lines": len(lines),
            "before": [dict(before.bypass_reasons), before.saved],
            "after": [dict(after.bypass_reasons), after.saved],
        }
    return found
