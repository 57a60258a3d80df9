"""Whether a function of torch's is found where torch defines another one.

Only where nobody noted what torch had by itself: ``F.relu = F.silu`` looks like torch's own then.
What a file defines under which name is read from its source, once a name looks odd.
"""

from __future__ import annotations

import functools
import re
import sys
import types

__all__ = ["is_misplaced"]

_DEFINED = re.compile(r"^[ \t]*(?:async )?def (\w+)", re.MULTILINE)


def is_misplaced(value: object, place: str, name: str) -> bool:
    """Whether the file of a namespace defines a function ``name``, and ``value`` is another one.

    Args:
        value: what is found there, or its code, which may have been exchanged.
        place: a module, or the place of a class as ``module:name``.
        name: under which it is found.
    """
    if not isinstance(value, types.FunctionType):
        return False
    code = value.__code__
    is_wrapper = bool(code.co_freevars)
    wraps = is_wrapper and code.co_name != value.__name__  # so it bears the name of what it wraps
    if (value.__name__ if wraps else code.co_name) == name or (is_wrapper and not wraps):
        return False
    module, _, kind = place.partition(":")
    # Classes of torch's say that they are from elsewhere.
    file = code.co_filename if kind else getattr(sys.modules.get(module), "__file__", None)
    return isinstance(file, str) and name in _defined_in(file)


@functools.cache
def _defined_in(file: str) -> frozenset[str]:
    """Names of all functions and methods that a source file defines; none if there is no file."""
    try:
        with open(file, encoding="utf-8") as source:
            return frozenset(_DEFINED.findall(source.read()))
    except (OSError, ValueError):
        return frozenset()
