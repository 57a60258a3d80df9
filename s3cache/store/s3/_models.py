"""botocore's descriptions of services, less what a store never asks for.

They are several megabytes of JSON: what is kept of them costs memory, each pass of the garbage
collector while a program starts, and something for each request.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

__all__ = ["model_loader"]

# What the stores call; the last two are called by botocore itself, where a bucket turns out to be
# elsewhere and for directory buckets.
_OPERATIONS = (
    "AbortMultipartUpload",
    "CompleteMultipartUpload",
    "CreateMultipartUpload",
    "DeleteObject",
    "GetObject",
    "HeadObject",
    "ListObjectsV2",
    "PutObject",
    "UploadPart",
    "HeadBucket",
    "CreateSession",
)
# Of what botocore would look for, one by one, in the headers of each answer.
_READ = {
    "GetObjectOutput": ("Body", "ContentLength", "ContentRange", "ETag"),
    "HeadObjectOutput": ("ContentLength", "LastModified"),
    "PutObjectOutput": ("ETag",),
}
# S3, and whatever credentials can come from; as the directories of models are called, and as the
# list of endpoints calls them.
_SERVICES = ("s3", "signin", "sso", "sso-oidc", "sts")
_ENDPOINTS = ("oidc", "portal.sso", "s3", "signin", "sts")


@cache
def model_loader() -> Any:
    """A loader of botocore for all stores: the next one's client then takes 10 ms, not 60."""
    from botocore.loaders import JSONFileLoader, create_loader

    class Reader(JSONFileLoader):  # type: ignore[misc]
        """Leaves out before botocore remembers what it read, for good."""

        def load_file(self, file_path: str) -> Any:
            data = super().load_file(file_path)
            service, name = _service(file_path), os.path.basename(file_path)
            if data is None:  # there is no such file
                return None
            if name == "endpoint-rule-set-1":
                return without_unused(data)
            if name == "endpoints":
                return _without_unserved(data)
            return _without_uncalled(data) if (service, name) == ("s3", "service-2") else data

    loader = create_loader(os.environ.get("AWS_DATA_PATH"))
    loader.file_loader = Reader()
    # Else it looks into 400 directories.
    loader.list_available_services = lambda _kind: list(_SERVICES)
    return loader


def _service(path: str) -> str:
    """``s3`` for ``…/s3/2006-03-01/service-2``."""
    return os.path.basename(os.path.dirname(os.path.dirname(path)))


def without_unused(rules: dict[str, Any]) -> dict[str, Any]:
    """The rule set without the parameters that none of its rules looks at.

    botocore remembers the endpoint for each set of parameters, and one is the object's key: it
    would go through all rules for each object, an eighth of what a small request costs.
    """
    text = json.dumps(rules["rules"])
    used = {
        name: rule
        for name, rule in rules["parameters"].items()
        if f'"{name}"' in text or f"{{{name}" in text
    }
    return {**rules, "parameters": used}


def _without_uncalled(model: dict[str, Any]) -> dict[str, Any]:
    """The service model with what is called, and the parts of answers that somebody reads."""
    operations = {
        name: operation for name, operation in model["operations"].items() if name in _OPERATIONS
    }
    shapes = dict(model["shapes"])
    for name, read in _READ.items():
        members = shapes[name]["members"]
        kept = {member: members[member] for member in read if member in members}
        shapes[name] = {**shapes[name], "members": kept}
    named = _named_shapes(operations.values(), shapes)
    return {**model, "operations": operations, "shapes": {name: shapes[name] for name in named}}


def _named_shapes(parts: Iterable[Any], shapes: dict[str, Any]) -> set[str]:
    """Names of all shapes that ``parts`` refer to, directly or through other shapes."""
    named: set[str] = set()
    left = list(_references(parts))
    while left:
        name = left.pop()
        if name not in named:
            named.add(name)
            left.extend(_references([shapes[name]]))
    return named


def _references(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, dict):
            if isinstance(shape := part.get("shape"), str):
                yield shape
            yield from _references(part.values())
        elif isinstance(part, list):
            yield from _references(part)


def _without_unserved(endpoints: dict[str, Any]) -> dict[str, Any]:
    """The list of endpoints with those services alone that a client here can be of."""
    return {
        **endpoints,
        "partitions": [
            {
                **partition,
                "services": {
                    name: endpoint
                    for name, endpoint in partition["services"].items()
                    if name in _ENDPOINTS
                },
            }
            for partition in endpoints["partitions"]
        ],
    }
