"""What tests of programs with a compile cache need, and tests of stores.

:class:`Machine` runs a program as on a machine that has never seen it; :class:`MotoServer` has
buckets for it. As pytest fixtures they are ``s3cache_machine`` and ``s3cache_moto``, which pytest
finds by itself where s3cache is installed. :class:`StoreContract` holds a store to its promises,
and :class:`FaultyStore` breaks them on order.

Nothing in s3cache itself imports this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3cache.testing.contract import RawAccess, StoreContract
    from s3cache.testing.faulty import Fault, FaultRates, FaultyStore, FaultyVerb
    from s3cache.testing.machines import Machine, Outcome, ProgramError
    from s3cache.testing.moto import MotoBucket, MotoServer
    from s3cache.testing.plugin import MachineFactory

__all__ = [
    "Fault",
    "FaultRates",
    "FaultyStore",
    "FaultyVerb",
    "Machine",
    "MachineFactory",
    "MotoBucket",
    "MotoServer",
    "Outcome",
    "ProgramError",
    "RawAccess",
    "StoreContract",
]

# Loaded on first use: pytest imports this package in every project where s3cache is installed.
_LAZY = {
    name: module
    for module, names in {
        "contract": ("RawAccess", "StoreContract"),
        "faulty": ("Fault", "FaultRates", "FaultyStore", "FaultyVerb"),
        "machines": ("Machine", "Outcome", "ProgramError"),
        "moto": ("MotoBucket", "MotoServer"),
        "plugin": ("MachineFactory",),
    }.items()
    for name in names
}

# Hidden from type checkers: to them a module with __getattr__ has every attribute there is.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
