"""Mistakes that type checkers find. This file never runs: `make lint` checks it with mypy.

A comment on each wrong line names the error. Strict mypy also reports comments without an error.
"""

from __future__ import annotations

import s3cache
from s3cache import Cache, frame, store
from s3cache.options import Options


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


def unknown_names(cache: Cache) -> None:
    s3cache.enabel("s3://bucket")  # type: ignore[attr-defined]
    cache.looukp("abc")  # type: ignore[attr-defined]
    cache.settings.strict = True  # type: ignore[misc]


def results_that_were_not_checked(cache: Cache, entry: frame.Frame) -> None:
    print(cache.lookup("abc").entry)  # type: ignore[union-attr]
    print(cache.save("abc", entry).durable)  # type: ignore[union-attr]
    s3cache.active().stats()  # type: ignore[union-attr]


def a_check_without_the_arguments_of_the_function() -> None:
    def step(x: int) -> int:
        return x

    s3cache.check(step)  # type: ignore[call-arg]
    s3cache.check(step, "one")  # type: ignore[arg-type]
    s3cache.register_cacheable(step)  # type: ignore[call-arg]
