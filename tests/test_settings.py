"""Sources of settings, and errors for bad settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from infra.docs import options
from s3cache.cache import Cache
from s3cache.errors import ConfigError
from s3cache.settings import Settings, warn_of_unknown_variables


def test_arguments_override_the_environment_which_overrides_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Settings.load()[0].lookup_timeout_s == 10.0
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "3.5")
    assert Settings.load()[0].lookup_timeout_s == 3.5
    assert Settings.load(lookup_timeout_s=None)[0].lookup_timeout_s == 3.5
    assert Settings.load(lookup_timeout_s=2)[0].lookup_timeout_s == 2
    monkeypatch.setenv("S3CACHE_LOOKUP_TIMEOUT_S", "")  # an empty variable counts as not set
    assert Settings.load()[0].lookup_timeout_s == 10.0


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("url", "memory://x", "memory://x"),
        ("mode", "read-only", "read-only"),
        ("strict", "Yes", True),
        ("local", "false", False),
        ("local_dir", "/tmp/here", "/tmp/here"),
        ("local_max_bytes", "500MB", 500_000_000),
        ("local_max_bytes", "10GiB", 10 << 30),
        ("local_max_bytes", "2 k", 2_000),
        ("lookup_timeout_s", "0.25", 0.25),
        ("upload_concurrency", "3", 3),
    ],
)
def test_text_from_any_source_is_parsed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    given: dict[str, Any] = {name: text}
    for settings in (Settings(**given), Settings.load(**given)[0]):
        assert getattr(settings, name) == value
        assert type(getattr(settings, name)) is type(value)
    monkeypatch.setenv(f"S3CACHE_{name.upper()}", text)
    assert getattr(Settings.load()[0], name) == value


BAD: list[tuple[str, Any]] = [
    *(("mode", value) for value in ("readonly", 1, None)),
    *(("strict", value) for value in ("maybe", 2)),
    *(("local_dir", value) for value in (5,)),
    *(("local_max_bytes", value) for value in ("10 parsecs", "-1", 0, 1.5, True)),
    *(("local_max_files", value) for value in (0, "many")),
    *(("lookup_timeout_s", value) for value in ("soon", -1, "1e3", float("nan"), True, [1])),
    *(("attempt_timeout_s", value) for value in (0, "0", float("inf"))),
    *(("breaker_failures", value) for value in (0, 2.0)),
    *(("upload_queue_max_count", value) for value in ("", -3)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_raises_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**{name: value})
    assert caught.value.thing == f"option {name}"
    assert caught.value.cause
    assert caught.value.fix
    if isinstance(value, str) and value:
        monkeypatch.setenv(f"S3CACHE_{name.upper()}", value)
        with pytest.raises(ConfigError) as caught:
            Settings.load()
        assert caught.value.thing == f"environment variable S3CACHE_{name.upper()}"
        assert value in caught.value.cause


def test_options_of_the_store_are_passed_to_it(tmp_path: Path) -> None:
    settings, rest = Settings.load(url="s3://bucket", region="eu-west-1", profile=None, strict=True)
    assert settings.strict
    assert rest == {"region": "eu-west-1"}
    with pytest.raises(ConfigError, match="option region: needs a URL"):
        Cache.open(region="eu-west-1", local_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("lookup_timeout", "did you mean 'lookup_timeout_s'?"),
        ("endpointurl", "did you mean 'endpoint_url'?"),
        ("bucket", "use "),
    ],
)
def test_an_unknown_option_is_refused(option: str, hint: str) -> None:
    given: dict[str, Any] = {option: 3}
    with pytest.raises(ConfigError) as caught:
        Settings.load(**given)
    assert f"option {option}: is not known" in str(caught.value)
    assert hint in caught.value.fix


@pytest.mark.parametrize("url", ["", "http://host", "s3://", "file:relative", "memory://x?a=1"])
def test_a_bad_url_is_refused_before_a_directory_is_created(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Cache.open(url, local_dir=str(tmp_path / "tier"))
    assert not (tmp_path / "tier").exists()


def test_unknown_variables_are_named_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable in ("MODE", "REGION", "ENDPOINT_URL", "AUTOLOAD", "TEST_ANYTHING"):
        monkeypatch.setenv(f"S3CACHE_{variable}", "read-only")
    warn_of_unknown_variables()
    assert caplog.messages == []
    monkeypatch.setenv("S3CACHE_MOED", "off")
    monkeypatch.setenv("S3CACHE_XYZZY", "1")
    warn_of_unknown_variables()
    assert sorted(caplog.messages) == [
        "environment variable S3CACHE_MOED is not known; did you mean 'S3CACHE_MODE'?",
        "environment variable S3CACHE_XYZZY is not known; nothing reads it",
    ]


def test_the_local_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Settings().local_dir == str(tmp_path / "s3cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings().local_dir == str(tmp_path / ".cache" / "s3cache")
    # Without a home, it is in the temporary directory.
    monkeypatch.setenv("HOME", str(tmp_path / "not-there"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Settings().local_dir == str(tmp_path / f"s3cache-{os.geteuid()}")


@pytest.mark.needs
def test_the_file_of_typed_arguments_is_up_to_date() -> None:
    """``make docs-settings`` writes it."""
    assert options.FILE.read_text(encoding="utf-8") == options.generated()
