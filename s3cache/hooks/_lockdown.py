"""Lock torch's own caches down, for where only what is signed may be used.

What torch writes is not signed: the code of graphs, which it runs if there is a file under its
name, libraries, kernels of Triton, profiles and graphs that it unpickles. In its directory these
may be from an entry that was used before signatures were required, or from anybody who could write
there. So torch gets a directory of its own for as long as the policy is what it is; what is
compiled there is found there again. Its remote profiles, and artifacts that programs load into its
caches, are left alone. Where that is not possible, because this torch has other internals, it has
no caches at all.
"""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

from s3cache._logs import logger_of
from s3cache.errors import ConfigError
from s3cache.hooks._patching import Patches
from s3cache.store import Directory, check_way, make_parents, private_directory
from s3cache.torch_api import internals

if TYPE_CHECKING:
    from collections.abc import Callable

    from s3cache.torch_api.protocols import Function

__all__ = ["TorchCacheLockdown", "disable_torch_caches", "own_directory"]

logger = logger_of("trust")


class TorchCacheLockdown:
    """Keeps torch from using what was not signed.

    Args:
        policy: what tells the policy from every other.
    """

    def __init__(self, policy: str) -> None:
        self._name = f"s3cache-{policy}"

    def install(self, patches: Patches) -> None:
        with contextlib.suppress(OSError):  # others may sit where it is to be
            internals.cache_dir.get()()  # sets the variable first, unless it is set
        for variable in internals.DIRECTORIES:
            before = os.environ.get(variable)
            if before is not None and os.path.basename(before) != self._name:
                self._move(variable, before, patches)
        patches.replace(internals.populate_caches, self._populator)
        patches.replace(internals.remote_profiles, self._none)

    def _move(self, variable: str, before: str, patches: Patches) -> None:
        place, forget = own_directory(os.path.join(before, self._name))

        def back() -> None:
            os.environ[variable] = before
            internals.clear_caches.get()()
            forget()

        os.environ[variable] = place
        internals.clear_caches.get()()  # some remember where their files are
        patches.at_undo(back)

    def _populator(self, original: Function[object]) -> Function[object]:
        def populate_caches(artifacts: object) -> object:
            logger.warning(
                "trust is 'require', and artifacts of "
                "torch.compiler.load_cache_artifacts are not signed: none is loaded"
            )
            return original({})

        return populate_caches

    def _none(self, original: Function[object]) -> Function[object]:
        def get_remote_cache() -> object:
            return None

        return get_remote_cache


def disable_torch_caches(patches: Patches) -> None:
    """Turn all of torch's caches off: for a torch that has other internals than we know.

    What it writes on its way goes to a directory that is removed in the end. Nothing but a public
    option and the environment are relied on; processes that this one starts inherit the latter.

    Raises:
        UnsupportedTorchError: this torch does not even have that option.
    """
    for variable in internals.DIRECTORIES:
        _set_variable(variable, *private_directory(), patches)
    _set_variable(internals.NO_CACHES, "1", lambda: None, patches)
    patches.set(internals.force_disable_caches, True)


def _set_variable(variable: str, value: str, forget: Callable[[], None], patches: Patches) -> None:
    before = os.environ.get(variable)
    os.environ[variable] = value
    patches.at_undo(partial(_put_back, variable, before, forget))


def _put_back(variable: str, before: str | None, forget: Callable[[], None]) -> None:
    if before is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before
    forget()


def own_directory(path: str) -> tuple[str, Callable[[], None]]:
    """Return a directory that no other user can write to or exchange, and what to call at the end.

    It is ``path``, which stays, unless others have, or could have, a hand in it.

    Raises:
        ConfigError: there is no place for one.
    """
    try:
        make_parents(os.path.abspath(path))
        check_way(path)
        Directory.at(path, make=True)
    except (ConfigError, OSError) as exc:
        logger.warning("torch keeps nothing of what it compiles: %s", exc)
        return private_directory()
    return path, lambda: None
