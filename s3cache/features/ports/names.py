"""Names of torch that back its own remote caches."""

from __future__ import annotations

from s3cache.torch_api import AnyClass, Fields

FEATURE = "torch's remote caches of measurements and profiles (ports)"

_REMOTE = "torch._inductor.remote_cache"
remote_cache_backend = AnyClass(f"{_REMOTE}:RemoteCacheBackend", feature=FEATURE)
measured_caches = (
    AnyClass(f"{_REMOTE}:RemoteAutotuneCache", feature=FEATURE),
    AnyClass(f"{_REMOTE}:RemoteBundledAutotuneCache", feature=FEATURE),
)
profile_caches = (AnyClass(f"{_REMOTE}:RemoteDynamoPGOCache", feature=FEATURE),)
Fields(f"{_REMOTE}:RemoteCache", "backend_override_cls", feature=FEATURE)
