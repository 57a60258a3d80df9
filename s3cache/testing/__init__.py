"""What tests of programs with a compile cache need: fresh machines, and buckets.

They are also pytest fixtures, ``s3cache_machine`` and ``s3cache_moto``. Nothing in s3cache itself
imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from s3cache.util import lazy_exports

if TYPE_CHECKING:
    from s3cache.testing.machines import Machine as Machine
    from s3cache.testing.machines import Outcome as Outcome
    from s3cache.testing.machines import ProgramError as ProgramError
    from s3cache.testing.machines import assert_warm_start as assert_warm_start
    from s3cache.testing.plugin import MachineFactory as MachineFactory
    from s3cache.testing.plugin import MotoBucket as MotoBucket
    from s3cache.testing.plugin import MotoServer as MotoServer
else:
    # pytest imports this package in every project where s3cache is installed.
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        machines="Machine Outcome ProgramError assert_warm_start",
        plugin="MachineFactory MotoBucket MotoServer",
    )
