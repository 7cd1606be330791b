"""A bucket on a server of this machine that speaks S3, and a store in memory that starts empty.

A test file has these fixtures by giving them their names again.
"""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import boto3
import fsspec
import pytest
import s3fs

BUCKET = "dumps"
# In a process of its own: tests fork, and a fork beside threads that answer requests may hang. Each
# request is whole before the next, as in a real store; moto's own state knows no threads. The
# server ends with the pipe from its parent.
_SERVER = """
import sys, threading
import moto.moto_server.werkzeug_app as app
from werkzeug.serving import make_server
moto, turn = app.DomainDispatcherApplication(app.create_backend_app), threading.Lock()

def answer(environ, start_response):
    with turn:
        return list(moto(environ, start_response))

server = make_server("127.0.0.1", 0, answer, True, request_handler=app.MotoRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(f"http://127.0.0.1:{server.server_port}", flush=True)
sys.stdin.read()
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the only server of this process."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _SERVER]
    process = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(process.terminate)
    return process


@functools.cache
def _address() -> str:
    stream = _server().stdout
    assert stream is not None
    return stream.readline().strip()


@pytest.fixture
def server() -> str:
    """The address of a server that speaks S3."""
    return _address()


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
    return [entry["Key"] for entry in listed.get("Contents", [])]


@pytest.fixture
def memory() -> Iterator[Any]:
    """The store behind `memory://`, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    _clear(filesystem)
    yield filesystem
    _clear(filesystem)


def _clear(memory: Any) -> None:
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
