"""Target: compile for a GPU that this machine does not have, with ``s3cache warm --target``.

*Promises*: the job gets the keys of the machine with the GPU, or it is not run. No entry contains
a value or a measurement of the stand-in for the GPU.

*Subscribes to*: no event; its hooks are installed with those of the cache, or the cache is off.

*Without it*: graphs for a GPU are compiled on machines that have it.

``description`` collects all inputs of keys on a machine with a GPU, and compares them with this
machine. ``standin`` builds a library from ``device.c``, which torch takes for the GPU.
"""

from __future__ import annotations

import os

from s3cache.seam import Feature, JobOption
from s3cache.util.options import PREFIX

#: Set if a program compiles for a GPU that is not there: the versions of torch and Python, in JSON.
TARGET = f"{PREFIX}TARGET"
#: The properties of that GPU, for the stand-in library.
STANDIN = f"{PREFIX}STANDIN"

FEATURE = Feature(
    name="target",
    does="compiling for a GPU that is not there (s3cache warm --target)",
    bypasses=("target",),
    is_used=lambda _: bool(os.environ.get(TARGET)),
    installs=f"{__name__}.install:install",
    torch=f"{__name__}.names",
    variables=(TARGET.removeprefix(PREFIX), STANDIN.removeprefix(PREFIX)),
    commands=(f"{__name__}.description:target",),
    job_options=(
        JobOption(
            "target",
            "FILE",
            "Compile for this GPU, described by s3cache target (experimental). No GPU is needed: "
            "a CUDA build of torch finds the GPU that the file describes, on which kernels do "
            "nothing. If that machine would compute other keys than this one, the job is not run, "
            "and the error lists the differences.",
            f"{__name__}.description:stand_in",
        ),
    ),
)
