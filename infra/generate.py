"""Write the deployed files from ``policies.py``: ``python -m infra.generate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from infra import policies
from infra.aws import template

__all__ = ["files"]

_HERE: Final = Path(__file__).parent
_BUCKETS: Final[dict[policies.Place, str]] = {
    "aws": "arn:aws:s3:::example-compile-cache",
    "minio": "arn:aws:s3:::compile-cache",
}


def files() -> dict[Path, str]:
    """Return the paths and contents of the deployed files."""
    found: dict[Path, str] = {_HERE / "aws" / "template.yaml": template.render()}
    for place, bucket in _BUCKETS.items():
        documents = {
            role.file: policies.identity_policy(role, bucket, place) for role in policies.ROLES
        }
        documents["lifecycle"] = policies.lifecycle(place)
        for name, document in documents.items():
            found[_HERE / place / f"{name}.json"] = json.dumps(document, indent=2) + "\n"
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
