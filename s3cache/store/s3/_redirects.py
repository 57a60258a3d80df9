"""Which regions a server may send a request on to.

Where a bucket is elsewhere, S3 names its region in a header or in its error, and botocore asks
there again, signed anew, and from then on at once. It believes what it reads: the region of another
partition, which is another operator (AWS China is), gets the session token and the customer's
key; and what is no region makes all later requests fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from s3cache.store.s3._place import partition_region

__all__ = ["region_judge"]

# As AWS names its own. Others have names like RegionOne, which are signed for, and no more: where a
# server was named, its region does not change which one is asked.
_OF_AWS = re.compile(r"[a-z0-9-]{1,63}")
_OF_OTHERS = re.compile(r"[A-Za-z0-9._-]{1,63}")


def region_judge(*, is_aws: bool) -> Callable[..., None]:
    """A handler for ``needs-retry.s3``, to be called before the one that follows redirects."""

    def judge(request_dict: Any, response: Any, operation: Any, **_: Any) -> None:
        if response is None:  # there was no answer
            return
        answer, context = response[1], request_dict["context"]
        headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        named = headers.get("x-amz-bucket-region"), answer.get("Error", {}).get("Region")
        if all(_is_near(region, context.get("client_region") or "") for region in named if region):
            return
        context.setdefault("s3_redirect", {})["redirected"] = True  # and once is all it may be
        if operation.name == "HeadBucket":  # by which botocore asks for the region, for another
            headers.pop("x-amz-bucket-region", None)

    def _is_near(region: str, own: str) -> bool:
        if not is_aws:
            return _OF_OTHERS.fullmatch(region) is not None
        is_region = _OF_AWS.fullmatch(region) is not None
        return is_region and partition_region(region) == partition_region(own)

    return judge
