"""Device: what entries with code for accelerators need beyond their keys.

*Promises*: a key leaves the index of the current device out, so equal devices share an entry. It is
used on another device only if every mention of the first one is known and replaced. Code that may
contain the number of a rank is used by that rank only. Once torch has measured the kernels of a
graph, its entry is sealed: it has only the fastest configurations.

*Subscribes to*: ``limit``, ``fits``, ``load``, ``rebuilding``, ``saving``, ``describe``, ``saved``;
``hit`` once a graph with kernels of Triton is loaded; and ``finishing`` of the cache.

*Without it*: an entry that is limited to a device or a rank is not used, and none is saved.
"""

from __future__ import annotations

from s3cache.seam import Feature

#: What is off if torch lacks names of measurements.
SEALING = "sharing which configurations of kernels are the fastest"

FEATURE = Feature(
    name="device",
    does="sharing code for accelerators and ranks",
    reports=f"{__name__}.report:report",
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
)
