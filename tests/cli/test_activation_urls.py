"""`qgate activations` into a store: the run, its dry run, its configuration, what it wrote drawn
again; what cannot be written to is told before the model is loaded."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest

from qgate.activation_stats.settings import read_settings
from qgate.cli import main
from tests import bucket as stores
from tests.shares import proof, share

bucket, memory, server = stores.bucket, stores.memory, stores.server
Capsys = pytest.CaptureFixture[str]
MODEL = """
import torch
from qgate import Model

def build():
    open("loaded", "w").close()
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)
    return Model(torch.nn.Sequential(*layers), [(torch.randn(4, 32),)], "small")
"""
QUICK = (
    "--smoothing.enabled=false",
    "--enabled.magnitude_output=false",
    "--formats=int8",
    "--dpi=20",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that leaves a mark when it is loaded, and room for scratch files."""
    for name in ("here", "scratch"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    Path("small.py").write_text(MODEL)
    return tmp_path / "here"


def run(*args: object) -> int:
    return main(["activations", *map(str, args)])


def small(*more: object) -> int:
    return run("--model", "small.py:build", *QUICK, *more)


def said(data: bytes) -> Any:
    """A record without what differs from run to run."""
    record = json.loads(data)
    del record["seconds"], record["settings"]["visualization.save_dir"]
    return record


@proof
def test_a_run_into_a_bucket_is_that_into_a_folder(bucket: Any, here: Path, capsys: Capsys) -> None:
    assert small("--save_dir", "figures") == 0
    assert small("--save_dir", "s3://dumps/run/out", "--dry-run") == 0
    assert "write to s3://dumps/run/out" in capsys.readouterr().out
    assert stores.keys(bucket) == []
    assert small("--save_dir", "s3://dumps/run/out") == 0
    assert "the first is s3://dumps/run/out/analysis_report.html" in capsys.readouterr().out
    files = {path.name: path.read_bytes() for path in (here / "figures").iterdir()}
    objects = {
        name.removeprefix("run/out/"): bucket.get_object(Bucket="dumps", Key=name)["Body"].read()
        for name in stores.keys(bucket)
    }
    assert objects.keys() == files.keys()
    with_times = {"analysis_report.html", "activations.json"}
    assert {n: objects[n] for n in objects.keys() - with_times} == {
        n: files[n] for n in files.keys() - with_times
    }
    assert said(objects["activations.json"]) == said(files["activations.json"])
    assert list((here.parent / "scratch").iterdir()) == []
    assert not (here / "s3:").exists()


def test_a_record_in_a_store_is_drawn_again(memory: Any, here: Path, capsys: Capsys) -> None:
    assert small("--save_dir", "memory://a/out", "--output.formats", "json") == 0
    record = memory.cat("/a/out/activations.json")
    (here / "loaded").unlink()
    assert run("memory://a/out", "--output.formats", "csv") == 0
    assert {"/a/out/layers.csv", "/a/out/activations.json"} < set(memory.find("/a"))
    assert run("memory://a/out/activations.json", "--save_dir", "local", "--dpi", 20) == 0
    assert (here / "local" / "activations.json").read_bytes() == record
    assert run(here / "local", "--save_dir", "memory://b", "--output.formats", "json") == 0
    assert memory.cat("/b/activations.json") == record == memory.cat("/a/out/activations.json")
    assert not (here / "loaded").exists()
    memory.pipe("/a/out/second-activations.json", record)
    capsys.readouterr()
    for location, words in (
        ("memory://a/out", "several models, name one: memory://a/out/activations.json, memory:"),
        ("memory://a/out/layers.csv", "is no record of activations"),
        ("memory://a", "'memory://a' has no activations.json"),
        ("memory://c/x.json", "there is no record of activations at 'memory://c/x.json'"),
        ("foo://c/x.json", "foo:// is not known"),
    ):
        assert run(location) == 2
        assert words in capsys.readouterr().err


def test_a_configuration_says_where_and_can_be_in_a_store(memory: Any, capsys: Capsys) -> None:
    for ending in ("yaml", "toml"):
        location = f"memory://c/my.{ending}"
        assert run("--write-config", location) == 0
        assert read_settings(location) == read_settings()
        before = memory.cat(f"/c/my.{ending}")
        assert run("--write-config", location) == 2
        assert f"'{location}' is there already" in capsys.readouterr().err
        assert memory.cat(f"/c/my.{ending}") == before
    memory.pipe("/c/mine.yaml", b"save_dir: memory://a/out\noutput: {formats: [json]}\n")
    assert small("--config", "memory://c/mine.yaml") == 0
    assert memory.find("/a") == ["/a/out/activations.json", "/a/out/small-written.json"]
    capsys.readouterr()
    for option, location, words in (
        ("--config", "memory://c/none.yaml", "'memory://c/none.yaml' cannot be read: there is no"),
        ("--config", "memory://c/mine", "'memory://c/mine' is no .yaml"),
        ("--write-config", "memory://c/my.json", "is no .yaml, .yml or .toml file"),
        ("--write-config", "https://host/my.yaml", "https:// may leave half a file behind"),
        ("--write-config", "foo://host/my.yaml", "foo:// is not known"),
    ):
        assert run(option, location) == 2
        assert words in capsys.readouterr().err


@share(4)
@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://nobucket/out", "'s3://nobucket/out' is not there: The specified bucket"),
        ("https://host/out", "'https://host/out': https:// may leave half a file behind"),
        ("s4://dumps/out", "'s4://dumps/out': s4:// is not known"),
        ("gs://dumps/out", "'gs://dumps/out': gs:// needs gcsfs; pip install it"),
        ("s3://dumps/x.csv", "'s3://dumps/x.csv' is a file"),
    ],
)
def test_a_url_that_cannot_be_written_to_is_refused_before_the_model_is_loaded(
    place: str, words: str, bucket: Any, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    bucket.put_object(Bucket="dumps", Key="x.csv", Body=b"mine")
    for more in ((), ("--dry-run",)):
        assert small("--save_dir", place, *more) == 2
        err = capsys.readouterr().err
        assert words in err
        assert len(err.splitlines()) == 1
    assert [path.name for path in here.iterdir()] == ["small.py"]
    assert stores.keys(bucket) == ["x.csv"]


@proof
def test_a_record_that_a_store_refuses_at_the_end_is_kept_in_a_local_folder(
    memory: Any, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    real, puts = type(memory)._open, [0]

    def refuse(self: Any, path: str, mode: str = "rb", **more: Any) -> Any:
        puts[0] += mode != "rb" and ".probe" not in path
        if puts[0] > 3:
            raise PermissionError(13, "The token has expired")
        return real(self, path, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "_open", refuse)
        assert small("--save_dir", "memory://a/out") == 2
    message = capsys.readouterr().err
    assert "The token has expired" in message
    assert "memory://a/out/" in message
    assert len(memory.find("/a")) == 3
    command = re.search(r"`qgate (.*)`", message)
    assert command
    (here / "loaded").unlink()
    assert main(shlex.split(command[1])) == 0
    listed = json.loads(memory.cat("/a/out/small-written.json"))["files"]
    assert [name.removeprefix("/a/out/") for name in memory.find("/a")] == sorted(listed)
    assert "analysis_report.html" in listed
    assert not (here / "loaded").exists()
