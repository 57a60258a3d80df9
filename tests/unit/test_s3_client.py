"""What is left out of botocore's models makes requests cheaper and nothing different."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
from botocore.loaders import create_loader

from s3cache.store._s3_client import _loader, _timestamp, _without_unused


def test_only_parameters_that_no_rule_looks_at_are_left_out() -> None:
    whole = create_loader().load_service_model("s3", "endpoint-rule-set-1")
    rules = _loader().load_service_model("s3", "endpoint-rule-set-1")
    assert rules["rules"] == whole["rules"]
    left_out = set(whole["parameters"]) - set(rules["parameters"])
    assert "Key" in left_out
    for name in left_out:
        assert f'"{name}"' not in json.dumps(whole["rules"])
    assert {"Bucket", "Region", "Endpoint", "UseFIPS", "ForcePathStyle"} <= set(rules["parameters"])


@pytest.mark.parametrize(
    "use", [{"ref": "Key"}, "{Key}", "https://{Key#part}", {"fn": "x", "argv": ["Key"]}]
)
def test_a_parameter_that_a_rule_looks_at_stays(use: Any) -> None:
    rules = {"parameters": {"Key": {}, "Other": {}}, "rules": [{"conditions": [use]}]}
    assert list(_without_unused(rules)["parameters"]) == ["Key"]


def test_other_services_are_left_as_they_are() -> None:
    whole = create_loader().load_service_model("sts", "service-2")
    assert _loader().load_service_model("sts", "service-2") == whole


@pytest.mark.parametrize(
    "text",
    ["Sat, 21 Nov 2026 08:11:22 GMT", "2026-11-21T08:11:22.000Z", "2026-11-21T08:11:22+00:00"],
)
def test_times_are_read_as_botocore_reads_them(text: str) -> None:
    assert _timestamp(text) == datetime(2026, 11, 21, 8, 11, 22, tzinfo=timezone.utc)


def test_a_number_is_seconds_since_the_epoch() -> None:
    assert _timestamp(0).timestamp() == 0
