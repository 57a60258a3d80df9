"""S3Store and the bucket around it, on moto."""

from __future__ import annotations

from typing import Any

import aioboto3

from s3cache.store import S3Options, S3Store


async def objects(options: S3Options) -> dict[str, dict[str, Any]]:
    """What plain boto finds under the prefix."""
    session = aioboto3.Session(options.access_key, options.secret_key)
    async with session.client(
        "s3", region_name=options.region, endpoint_url=options.endpoint_url
    ) as client:
        page = await client.list_objects_v2(Bucket=options.bucket, Prefix=f"{options.prefix}/")
        keys = [each["Key"] for each in page.get("Contents", ())]
        return {key: await client.head_object(Bucket=options.bucket, Key=key) for key in keys}


async def test_others_find_the_object_under_its_prefix(moto_options: S3Options) -> None:
    store = S3Store(moto_options)
    await store.put("a/key", b"data", metadata={"writer": "me"})
    await store.aclose()
    found = await objects(moto_options)
    assert list(found) == [f"{moto_options.prefix}/a/key"]
    (head,) = found.values()
    assert head["ContentType"] == "application/octet-stream"
    assert head["Metadata"] == {"writer": "me"}


async def test_the_probes_marker_is_there_but_not_listed(moto_options: S3Options) -> None:
    store = S3Store(moto_options)
    await store.put("key", b"x", mode="create")
    assert [info.key async for info in store.list()] == ["key"]
    await store.aclose()
    assert f"{moto_options.prefix}/.s3cache-probe" in await objects(moto_options)
