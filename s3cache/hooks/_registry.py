"""Functions that the user vouches for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from s3cache.errors import ConfigError

__all__ = ["Registry"]


class Registry:
    """Functions whose output depends on their inputs and their version alone."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def add(self, function: Callable[..., Any], version: str) -> None:
        """Vouch for ``function``; a new ``version`` makes old entries miss.

        Raises:
            ConfigError: it has no importable name, or the version is empty.
        """
        name = _name_of(function)
        if not name or "<" in name:
            raise ConfigError(
                f"function {function!r}",
                "has no name that other processes share",
                "define it at the top of a module",
            )
        if not version:
            raise ConfigError(f"function {name}", "has no version", "give one, e.g. version='1'")
        self._versions[name] = version

    def holds(self, function: Any) -> bool:
        """Whether the user vouched for ``function``."""
        return self.version_of(function) is not None

    def version_of(self, function: Any) -> str | None:
        """The version that the user gave, if any. An operator stands for its overloads."""
        if not self._versions:
            return None
        version = self._versions.get(_name_of(function))
        packet = getattr(function, "overloadpacket", None)
        if version is None and packet is not None:
            return self._versions.get(_name_of(packet))
        return version

    @contextlib.contextmanager
    def vouched(self, more: Mapping[str, str]) -> Iterator[None]:
        """Have torch's own check accept them, and ``more``, while the block runs."""
        import torch._inductor.config as inductor

        if not self._versions and not more:
            yield
            return
        known = {**self._versions, **more, **inductor.unsafe_marked_cacheable_functions}
        with inductor.patch(unsafe_marked_cacheable_functions=known):
            yield


def _name_of(function: Any) -> str:
    function = getattr(function, "_opoverload", function)  # of torch.library.custom_op
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__name__', '<none>')}"
