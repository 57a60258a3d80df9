"""What machines ask of Helion's remote cache in these tests."""

from __future__ import annotations


def configuration() -> list[str | None]:
    """Return what there is under a key, then put two configurations and return it again."""
    import helion  # noqa: F401
    from helion.autotuner import remote_cache
    from helion.runtime.settings import Settings

    assert Settings().autotune_cache == "RemoteAutotuneCache"
    backend = remote_cache._load_remote_backend()
    assert list(backend.list()) == []
    found = [remote_cache._remote_get(backend, "key")]
    for data in ("first", "second"):
        remote_cache._remote_put(backend, "key", data)
    return [*found, remote_cache._remote_get(backend, "key")]
