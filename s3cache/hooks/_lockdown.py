"""With ``trust="require"``, keep torch from using its own caches, which are not signed.

What torch writes is not signed: code of graphs, which it runs if there is a file under its name,
libraries, kernels of Triton, profiles and graphs that it unpickles. In its directory these may be
from an entry that was used before signatures were required, or from another user. So torch gets a
directory of its own for as long as the policy stays the same. Its remote profiles, and artifacts
that programs load into its caches, are left alone. Where that is not possible, because this torch
has other internals, it has no caches at all.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from s3cache.errors import ConfigError
from s3cache.hooks._state import Patches
from s3cache.store import Directory, check_way, make_parents, private_directory
from s3cache.torch_api import internals
from s3cache.util.logs import logger_of

if TYPE_CHECKING:
    from s3cache.cache import Engine
    from s3cache.torch_api.protocols import Function

logger = logger_of("trust")


def lock_down(engine: Engine, patches: Patches) -> None:
    """Keep torch from using what is not signed; where that fails, it has no caches."""
    try:
        install_lockdown(engine.policy_digest, patches)
    except Exception:
        patches.undo()
        without_torch_caches(engine, patches)
        if engine.settings.strict:
            raise
        logger.warning(
            "torch cannot be kept from what is not signed, so it has no caches", exc_info=True
        )


def without_torch_caches(engine: Engine, patches: Patches) -> None:
    """Disable torch's caches, with a warning where that fails."""
    try:
        disable_torch_caches(patches)
    except Exception:
        if engine.settings.strict:
            raise
        logger.warning("torch may use what is not signed", exc_info=True)


def install_lockdown(policy: str, patches: Patches) -> None:
    """Give torch directories of its own for this ``policy``, and nothing from elsewhere."""
    name = f"s3cache-{policy}"
    with contextlib.suppress(OSError):  # others may sit where it is to be
        internals.cache_dir.get()()  # sets the variable first, unless it is set
    for variable in internals.DIRECTORIES:
        before = os.environ.get(variable)
        if before is None or os.path.basename(before) == name:
            continue
        place, forget = own_directory(os.path.join(before, name))
        patches.at_undo(forget)
        patches.at_undo(internals.clear_caches.get())
        _set_variable(variable, place, patches)
        internals.clear_caches.get()()  # some remember where their files are
    patches.wrap(internals.populate_caches, _populate_with_nothing)
    patches.wrap(internals.remote_profiles, lambda _: None)


def _populate_with_nothing(original: Function[object], _: object) -> object:
    logger.warning(
        "trust is 'require', and artifacts of "
        "torch.compiler.load_cache_artifacts are not signed: none is loaded"
    )
    return original({})


def disable_torch_caches(patches: Patches) -> None:
    """Turn all of torch's caches off, by a public option and the environment alone.

    What torch writes on its way goes to a directory that is removed in the end. Processes that this
    one starts inherit the environment.
    """
    for variable in internals.DIRECTORIES:
        place, forget = private_directory()
        patches.at_undo(forget)
        _set_variable(variable, place, patches)
    _set_variable(internals.NO_CACHES, "1", patches)
    patches.set(internals.force_disable_caches, True)


def _set_variable(variable: str, value: str, patches: Patches) -> None:
    before = os.environ.get(variable)
    os.environ[variable] = value
    if before is None:
        patches.at_undo(lambda: os.environ.pop(variable, None))
    else:
        patches.at_undo(lambda: os.environ.update({variable: before}))


def own_directory(path: str) -> tuple[str, Callable[[], None]]:
    """Return a directory that no other user can write to or exchange, and a clean-up function.

    It is ``path``, which stays, unless other users can change it.
    """
    try:
        make_parents(os.path.abspath(path))
        check_way(path)
        Directory.at(path, make=True)
    except (ConfigError, OSError) as exc:
        logger.warning("torch keeps nothing of what it compiles: %s", exc)
        return private_directory()
    return path, lambda: None
