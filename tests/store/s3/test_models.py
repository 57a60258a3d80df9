"""What is left out of botocore's models makes clients cheaper and no request different."""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterator
from typing import Any

import botocore.model
import pytest
from botocore.loaders import create_loader
from botocore.regions import EndpointResolver

from s3cache.store.s3 import _parts, _probe, _store
from s3cache.store.s3._models import model_loader, without_unused

# And two that botocore calls itself, for redirects and directory buckets.
CALLED = sorted(
    {
        "".join(word.capitalize() for word in name.split("_"))
        for module in (_store, _parts, _probe)
        for name in re.findall(r"client\.([a-z_0-9]+)\(", inspect.getsource(module))
    }
    - {"Close"}
    | {"CreateSession", "HeadBucket"}
)


def fresh_loader() -> Any:
    """One that no client was made with, for botocore changes the paths in a model it uses."""
    return model_loader.__wrapped__()


def test_the_stores_source_was_read() -> None:
    assert {"GetObject", "ListObjectsV2", "UploadPart"} <= set(CALLED)


def test_only_parameters_that_no_rule_looks_at_are_left_out() -> None:
    whole = create_loader().load_service_model("s3", "endpoint-rule-set-1")
    rules = fresh_loader().load_service_model("s3", "endpoint-rule-set-1")
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
    assert list(without_unused(rules)["parameters"]) == ["Key"]


@pytest.mark.parametrize("name", CALLED)
def test_what_is_called_is_described_as_botocore_describes_it(name: str) -> None:
    whole, ours = (
        botocore.model.ServiceModel(loader.load_service_model("s3", "service-2"), "s3")
        for loader in (create_loader(), fresh_loader())
    )
    expected, found = whole.operation_model(name), ours.operation_model(name)
    assert found.http == expected.http
    assert _text(found.input_shape) == _text(expected.input_shape)
    assert [_text(each) for each in found.error_shapes] == [
        _text(each) for each in expected.error_shapes
    ]
    if name == "ListObjectsV2":  # of others, members are left out
        assert _text(found.output_shape) == _text(expected.output_shape)


def test_answers_keep_what_is_read() -> None:
    shapes = fresh_loader().load_service_model("s3", "service-2")["shapes"]
    assert set(shapes["GetObjectOutput"]["members"]) == {
        "Body",
        "ContentLength",
        "ContentRange",
        "ETag",
    }
    assert set(shapes["HeadObjectOutput"]["members"]) == {"ContentLength", "LastModified"}
    assert set(shapes["PutObjectOutput"]["members"]) == {"ETag"}


@pytest.mark.parametrize("service", ["sso", "sso-oidc", "sts"])
def test_services_that_credentials_come_from_are_left_as_they_are(service: str) -> None:
    whole = create_loader().load_service_model(service, "service-2")
    assert fresh_loader().load_service_model(service, "service-2") == whole


@pytest.mark.parametrize("service", ["s3", "sts", "portal.sso", "oidc"])
@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1", "cn-north-1", "us-gov-west-1"])
def test_endpoints_are_where_botocore_has_them(service: str, region: str) -> None:
    whole, ours = (
        EndpointResolver(loader.load_data("endpoints")).construct_endpoint(service, region)
        for loader in (create_loader(), fresh_loader())
    )
    assert ours == whole


def test_models_of_a_directory_of_the_user_are_found(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "sts" / "2099-01-01" / "service-2.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"metadata": {"apiVersion": "2099-01-01"}}')
    monkeypatch.setenv("AWS_DATA_PATH", os.fspath(tmp_path))
    found = fresh_loader().load_service_model("sts", "service-2")
    assert found == {"metadata": {"apiVersion": "2099-01-01"}}


def _text(shape: Any) -> list[str]:
    """All that a shape says, to its leaves."""
    return list(_lines(shape, ""))


def _lines(shape: Any, path: str) -> Iterator[str]:
    if shape is None:
        return
    yield f"{path} {shape.name} {shape.type_name} {shape.serialization} {shape.metadata}"
    for name, member in getattr(shape, "members", {}).items():
        yield from _lines(member, f"{path}.{name}")
    for part in ("member", "key", "value"):
        yield from _lines(getattr(shape, part, None), f"{path}/{part}")
