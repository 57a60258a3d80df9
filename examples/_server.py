"""An S3 server for the demo: moto, with one bucket, until standard input ends.

Prints its URL once it answers. The process that started it need not stop it: the pipe closes
when that process ends.
"""

from __future__ import annotations

import sys

BUCKET = "compile-cache"


def main() -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="demo",
        aws_secret_access_key="demo",
    )
    client.create_bucket(Bucket=BUCKET)
    print(f"s3://{BUCKET}/main?endpoint_url={endpoint}&region=us-east-1", flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
