"""A job for a separate process, because a declaration is valid for the whole process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable

from s3cache.errors import UnsupportedTorchError
from s3cache.torch_api import Fields, Internal, installed_release, require
from s3cache.torch_api.__main__ import main

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
