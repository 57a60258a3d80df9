"""torch's internals exist as declared, and are read at each use."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from s3cache.errors import UnsupportedTorchError
from s3cache.torch_api import (
    Fields,
    Internal,
    declarations,
    installed_release,
    internals,
    require,
    survey,
)
from s3cache.torch_api.__main__ import main
from tests.support.machines import Machine

LATER = (installed_release()[0], installed_release()[1] + 1)


def mistakes() -> dict[str, object]:
    """Return the output and the errors for correct and wrong declarations."""
    Internal("torch:nonsense")
    Internal("torch.nonsense:compile")
    Internal("torch:compile", since=LATER)
    Internal("torch:nonsense", since=LATER)
    Internal("torch:compile", works=lambda _: False)
    Fields("torch._guards:Guard", "source nonsense later", added={"later": LATER})
    Fields("torch._guards:TracingContext.try_get", "tracing_context nothing")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main()
    later = Internal[object]("torch:compile", since=LATER)
    missing = Internal[object]("torch:nonsense")
    acts = {"later": later.get, "missing": missing.get, "found": missing.find, "all": require}
    return {
        "status": status,
        "lines": printed.getvalue().splitlines(),
        "find": later.find(),
        "raised": {name: _raised(act) for name, act in acts.items()},
    }


def _raised(act: Callable[[], object]) -> str:
    try:
        act()
    except UnsupportedTorchError as exc:
        return str(exc)
    return ""


# In some builds torch.__version__ has a suffix that the metadata lacks: 2.13.0+cu130.
VERSION = version("torch")


def test_the_installed_torch_is_as_declared() -> None:
    """``make test-torch TORCH=x`` prints the same for that torch."""
    lacks = [row.name for row in survey() if row.expected and not row.present]
    has = [row.name for row in survey() if row.present and not row.expected]
    assert lacks == [], "declare their last release and their replacement"
    assert has == [], "declare their first release"
    for feature in {declaration.feature for declaration in declarations}:
        require(feature)


def test_each_declared_first_release_is_supported_and_not_the_oldest() -> None:
    for declaration in declarations:
        since = [declaration.since, *getattr(declaration, "added", {}).values()]
        for release in filter(any, since):
            assert internals.OLDEST < release <= internals.NEWEST, declaration.place


def test_every_mistake_in_a_declaration_is_reported(tmp_path: Path) -> None:
    """``python -m s3cache.torch_api`` prints it and exits with 1; its use raises an error."""
    found = Machine(tmp_path).run(f"{__name__}:mistakes", server=0).result
    *lines, last = found["lines"]
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [
        ("MISSING", "torch:nonsense"),
        ("MISSING", "torch.nonsense:compile"),
        ("UNEXPECTED", "torch:compile"),
        ("MISSING", "torch:compile"),
        ("MISSING", "torch._guards:Guard .nonsense"),
        ("MISSING", "torch._guards:TracingContext.try_get .nothing"),
    ]
    assert last.startswith(f"torch {VERSION}, supported: ")
    assert last.endswith(" 6 not as declared")
    assert (found["status"], found["find"]) == (1, None)
    lacks = f"torch {VERSION} lacks torch:"
    since = "{}.{}".format(*LATER)
    assert found["raised"] == {
        "later": f"{lacks}compile, which is of {since}",
        **dict.fromkeys(("missing", "found", "all"), f"{lacks}nonsense"),
    }


def test_a_name_is_read_at_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    config = internals.functorch_config.get()
    before = internals.current_tracing_context.get()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert config.enable_autograd_cache is False
    owner, name = internals.current_tracing_context.owner()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, staticmethod(lambda: None))
        assert internals.current_tracing_context.get() is not before
    assert internals.current_tracing_context.get() is before
