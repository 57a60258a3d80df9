"""Groups of options that many commands share, each made into one argument of the command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from functools import wraps
from typing import Any, TypeVar

__all__ = ["grouped"]

_F = TypeVar("_F", bound=Callable[..., Any])


def grouped(**groups: Callable[..., Any]) -> Callable[[_F], Callable[..., Any]]:
    """Have a command take the options of ``groups``, and get what each makes of its own.

    ``@grouped(out=Output)`` above ``def ls(out, limit: int)`` gives a command with the options of
    ``Output.__init__`` and ``limit``.
    """

    def decorate(command: _F) -> Callable[..., Any]:
        parameters = _parameters(command, but=groups)
        names: dict[str, list[str]] = {}
        for name, group in groups.items():
            theirs = _parameters(group)
            names[name] = list(theirs)
            parameters.update(theirs)

        @wraps(command)
        def wrapper(**given: Any) -> Any:
            made = {
                name: group(**{each: given.pop(each) for each in names[name]})
                for name, group in groups.items()
            }
            return command(**given, **made)

        ordered = sorted(parameters.values(), key=lambda each: each.default is not each.empty)
        wrapper.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {each.name: each.annotation for each in ordered}
        del wrapper.__wrapped__  # its signature is not ours
        return wrapper

    return decorate


def _parameters(of: Callable[..., Any], but: Container[str] = ()) -> dict[str, inspect.Parameter]:
    """Its parameters with what their annotations mean; those of groups mean something here only."""
    function = vars(of)["__init__"] if isinstance(of, type) else of
    known = inspect.unwrap(function).__globals__
    return {
        name: parameter.replace(
            annotation=eval(parameter.annotation, known),  # noqa: S307 - our own code
            kind=inspect.Parameter.KEYWORD_ONLY,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "self" and name not in but
    }
