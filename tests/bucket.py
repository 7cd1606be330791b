"""A bucket on a server of this machine that speaks S3, and a store in memory that starts empty.

A test file has these fixtures by giving them their names again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import fsspec
import pytest
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "dumps"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks S3."""
    made = ThreadedMotoServer(port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of that server; its bucket `dumps` is empty."""
    log_in(server, monkeypatch)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    for name in keys(client):
        client.delete_object(Bucket=BUCKET, Key=name)
    client.delete_bucket(Bucket=BUCKET)


def log_in(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let everything that speaks S3 talk to a server."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()


def keys(client: Any, prefix: str = "") -> list[str]:
    """The names of all objects in the bucket."""
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    return [each["Key"] for each in listed.get("Contents", [])]


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store behind `memory://`, empty before and after."""
    found = fsspec.filesystem("memory")
    _clear(found)
    yield found
    _clear(found)


def _clear(memory: Any) -> None:
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
