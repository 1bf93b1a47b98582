"""A client of an S3 server that a test runs, and a folder put onto it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def s3_client(address: str) -> Any:
    """A client with credentials that such a server takes for good."""
    import boto3  # takes a second

    return boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )


def upload(client: Any, folder: Path, bucket: str, prefix: str) -> str:
    """Put all files of a folder below a prefix; returns their address.  In the bucket `public` everybody may read."""
    acl = "public-read" if bucket == "public" else "private"
    for file in folder.rglob("*"):
        if file.is_file():
            key = f"{prefix}/{file.relative_to(folder).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=file.read_bytes(), ACL=acl)
    return f"s3://{bucket}/{prefix}"
