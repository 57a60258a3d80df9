"""What the core calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from s3cache.hooks import Patches, Session


def install(session: Session) -> None:
    """Install hooks with those that the cache requires."""

    def install_hooks(patches: Patches) -> None:
        from s3cache.features.target._hooks import StandIn

        StandIn(session.bypasses).install(patches)

    session.required.append(install_hooks)


def target() -> dict[str, Any]:
    """Describe this machine's GPU in JSON, for s3cache warm --target FILE elsewhere (experimental).

    The description has the inputs of keys on the GPU: the device and its driver, torch, Triton, and
    the settings of this environment. Write it in the image and environment of the job in
    production.
    """
    from s3cache.features.target.description import describe

    return describe()
