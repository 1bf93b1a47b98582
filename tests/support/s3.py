"""A client for a test's S3 server, and an upload of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def s3_client(address: str) -> Any:
    """A client with accepted credentials."""
    import boto3  # takes a second

    return boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )


def upload(client: Any, folder: Path, bucket: str, prefix: str) -> str:
    """Upload all files of a folder below a prefix; returns their address.  The bucket `public` is readable by
    everybody."""
    acl = "public-read" if bucket == "public" else "private"
    for file in folder.rglob("*"):
        if file.is_file():
            key = f"{prefix}/{file.relative_to(folder).as_posix()}"
            client.put_object(Bucket=bucket, Key=key, Body=file.read_bytes(), ACL=acl)
    return f"s3://{bucket}/{prefix}"
