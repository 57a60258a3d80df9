"""The name of torch that chooses the number of compile workers."""

from __future__ import annotations

from collections.abc import Callable

from s3cache.torch_api import Internal

FEATURE = "bounding compile workers of all ranks together (ranks)"

ASYNC_COMPILE = "torch._inductor.async_compile"
compile_threads = Internal[Callable[[], int]](
    f"{ASYNC_COMPILE}:get_compile_threads", feature=FEATURE
)
