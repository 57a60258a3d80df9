"""Types of the public names. This file never runs: `make lint` checks it with mypy.

A comment on each wrong line names the error. Strict mypy also reports comments without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from typing_extensions import Unpack, assert_type

import s3cache
from s3cache import Cache, frame, store
from s3cache.cache import Hit, Miss, NotSaved, Saved
from s3cache.errors import AccessDeniedError
from s3cache.graph import Graph, Report
from s3cache.options import Options
from s3cache.stats import CacheStats, Listener, TransferEvent

if TYPE_CHECKING:
    from collections.abc import Callable


def settings_are_typed() -> None:
    assert_type(s3cache.enable(), Cache)
    assert_type(s3cache.enable("s3://bucket/prefix", region="eu-west-1", strict=True), Cache)
    assert_type(s3cache.enable(local_max_bytes="10GiB", lookup_timeout_s=5, mode="off"), Cache)
    assert_type(Cache.open("file:///mnt/cache", create=False, local=None), Cache)
    with s3cache.enabled("memory://example", recache=True) as cache:
        assert_type(cache, Cache)
    assert_type(s3cache.active(), Cache | None)


def settings_can_be_passed_on(url: str, **options: Unpack[Options]) -> Cache:
    return s3cache.enable(url, **options)


def settings_can_be_kept() -> Cache:
    options: Options = {"mode": "read-only", "lookup_timeout_s": 2.5}
    return settings_can_be_passed_on("s3://bucket", **options)


def results_are_a_hit_or_a_miss(cache: Cache, entry: frame.Frame) -> None:
    found = cache.lookup("abc", accept=lambda entry: entry.header.kind == "demo")
    assert_type(found, Hit | Miss)
    if isinstance(found, Hit):
        assert_type(found.entry, frame.Frame)
        assert_type(found.tier, Literal["local", "remote"])
    else:
        assert_type(found, Miss)
        assert_type(found.error, Exception | None)
    saved = cache.save("abc", entry)
    assert_type(saved, Saved | NotSaved)
    assert_type(cache.flush().complete, bool)
    assert_type(cache.stats(), CacheStats)
    assert_type(cache.stats().saved, int)


def print_event(event: TransferEvent) -> None:
    print(event)


def listeners_are_functions(cache: Cache) -> Callable[[], None]:
    listener: Listener = print_event
    return cache.subscribe(listener)


def errors_are_one_tree() -> None:
    try:
        s3cache.enable(strict=True)
    except s3cache.ConfigError as error:
        assert_type(error.fix, str)
    except AccessDeniedError as error:
        assert_type(error.attempts, int)
    except s3cache.S3CacheError as error:
        assert_type(error, s3cache.S3CacheError)


def a_registered_function_keeps_its_type() -> None:
    def double(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * times

    registered = s3cache.register_cacheable(double, version="1")
    assert_type(registered(torch.ones(2), 2), torch.Tensor)


def a_check_takes_what_the_function_takes(model: torch.nn.Linear) -> None:
    def step(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return x * scale

    report = s3cache.check(step, torch.ones(2), scale=2.0)
    assert_type(report, Report)
    assert_type(report.graphs, tuple[Graph, ...])
    assert_type(s3cache.check(model, torch.ones(2)).cacheable, bool)


def stores_are_opened_by_url() -> None:
    assert_type(store.open_store("s3://bucket", region="eu-west-1"), store.Store)
    options = s3cache.S3Options("bucket", "prefix", region="eu-west-1")
    assert_type(options.region, str | None)
    assert_type(store.S3Store(options), store.S3Store)


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
