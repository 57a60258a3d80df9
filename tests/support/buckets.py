"""Making buckets, which s3cache itself never does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from s3cache.store import S3Options


async def make_bucket(options: S3Options) -> None:
    """Create the bucket that ``options`` name."""
    import aioboto3

    session = aioboto3.Session(options.access_key, options.secret_key)
    async with session.client(
        "s3", region_name=options.region, endpoint_url=options.endpoint_url
    ) as client:
        await client.create_bucket(Bucket=options.bucket)
