"""Mistakes that type checkers find. Never run: `make lint` has mypy read it.

Each wrong line says which error it is, and mypy, being strict, complains of one that is none.
"""

from __future__ import annotations

import s3cache
from s3cache import Cache, Options, frame, store


def misspelt_settings() -> None:
    s3cache.enable("s3://bucket", strikt=True)  # type: ignore[call-arg]
    s3cache.enable("s3://bucket", endpoint="http://127.0.0.1")  # type: ignore[call-arg]
    Cache.open(lookup_timeout=5)  # type: ignore[call-arg]
    with s3cache.enabled(locl=False):  # type: ignore[call-arg]
        pass
    kept: Options = {"recach": True}  # type: ignore[typeddict-unknown-key]
    print(kept)


def settings_of_the_wrong_type() -> None:
    s3cache.enable(mode="readonly")  # type: ignore[arg-type]
    s3cache.enable(local_max_bytes=1.5)  # type: ignore[arg-type]
    s3cache.enable(strict=3.5)  # type: ignore[arg-type]
    s3cache.enable(url=b"s3://bucket")  # type: ignore[arg-type]
    store.open_store("s3://bucket", strict=True)  # type: ignore[call-arg]


def names_that_are_not_there(cache: Cache) -> None:
    s3cache.enabel("s3://bucket")  # type: ignore[attr-defined]
    cache.looukp("abc")  # type: ignore[attr-defined]
    cache.settings.strict = True  # type: ignore[misc]


def results_that_were_not_looked_at(cache: Cache, entry: frame.Frame) -> None:
    print(cache.lookup("abc").entry)  # type: ignore[union-attr]
    print(cache.save("abc", entry).durable)  # type: ignore[union-attr]
    s3cache.active().stats()  # type: ignore[union-attr]


def a_check_without_what_the_function_takes() -> None:
    def step(x: int) -> int:
        return x

    s3cache.check(step)  # type: ignore[call-arg]
    s3cache.check(step, "one")  # type: ignore[arg-type]
    s3cache.register_cacheable(step)  # type: ignore[call-arg]
