"""Jobs for processes of their own: a declaration holds for the whole process."""

from __future__ import annotations

import contextlib
import io
from typing import Protocol

from s3cache.errors import UnsupportedTorchError
from s3cache.torch_api import Fields, Internal, bind_declarations, installed_release, survey
from s3cache.torch_api.__main__ import main
from s3cache.torch_api._declare import Shape, Words

LATER = (installed_release()[0], installed_release()[1] + 1)


class Guard(Protocol):
    """Half right: objects of ``torch._guards:Guard`` have the first."""

    source: object
    target: object


def table_of_mistakes() -> dict[str, object]:
    """Return what the table says of right declarations, and of wrong ones in every way."""
    before = len(survey())
    Internal("torch:nonsense")
    Internal("torch.nonsense:compile")
    Internal("torch:compile", since=LATER)
    Internal("torch:nonsense", since=LATER, instead="sense")
    Internal("torch:compile", works=lambda _: False)
    Fields("torch._guards:Guard", "source nonsense later", added={"later": LATER})
    Shape("torch._guards:Guard", Guard)
    Words("torch._guards:TracingContext.try_get", "tracing_context nonsense")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main()
    return {"status": status, "lines": printed.getvalue().splitlines()[before:]}


def absent_names() -> dict[str, object]:
    """Return what is got, and raised, where this torch lacks a name."""
    found: dict[str, object] = {}
    later: Internal[object] = Internal("torch:compile", since=LATER, instead="eager mode")
    found["find"] = later.find()
    missing: Internal[object] = Internal("torch:nonsense")
    for name, act in (
        ("later", later.get),
        ("missing", missing.get),
        ("found", missing.find),
        ("all", bind_declarations),
    ):
        try:
            act()
        except UnsupportedTorchError as exc:
            found[name] = str(exc)
    return found
