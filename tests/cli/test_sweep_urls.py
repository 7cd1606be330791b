"""`qgate sweep` on a bucket of a server that speaks S3: read in ranges, written whole."""

import json
from pathlib import Path

import pytest
import s3fs
import torch
from safetensors.torch import save, save_file

from qgate.cli import main
from tests import bucket as stores
from tests.shares import proof, share

pytestmark = pytest.mark.usefixtures("here")
bucket, server = stores.bucket, stores.server


def shard():
    return {
        f"layer.{i}": torch.randn(64, 128, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    }


@proof
def test_a_sweep_from_bucket_to_bucket_is_that_of_files(bucket, here, capsys):
    save_file(shard(), "w.safetensors")
    bucket.put_object(Bucket="dumps", Key="run/w.safetensors", Body=save(shard()))
    options = ["--granularity", "block", "--output-dir"]
    assert main(["sweep", "w.safetensors:layer.1", *options, "here"]) == 0
    status = main(["sweep", "s3://dumps/run/w.safetensors:layer.1", *options, "s3://dumps/out"])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    bucket_keys = {
        entry["Key"] for entry in bucket.list_objects_v2(Bucket="dumps", Prefix="out/")["Contents"]
    }
    tensor = {f"out/w.layer.1/{path.name}" for path in Path("here/w.layer.1").iterdir()}
    assert bucket_keys == tensor | {"out/index.html"}
    page = bucket.get_object(Bucket="dumps", Key="out/index.html")["Body"].read().decode()
    assert "s3://dumps/run/w.safetensors:layer.1" in page
    assert "<a href='w.layer.1/mxfp_block_scaling_fp8_e4m3.json'" in page
    name = "w.layer.1/mxfp_block_scaling_fp8_e4m3.json"
    remote_record = json.loads(bucket.get_object(Bucket="dumps", Key=f"out/{name}")["Body"].read())
    local = json.loads(Path("here", name).read_text())
    assert remote_record["levels"] == local["levels"]
    assert remote_record["tensor"]["source"] == "s3://dumps/run/w.safetensors:layer.1"
    assert remote_record["tensor"]["sha256"] == local["tensor"]["sha256"]
    assert not list(here.glob(".unfinished*"))


@proof
def test_patterns_and_processes_work_on_buckets(bucket):
    for i in range(3):
        bucket.put_object(
            Bucket="dumps", Key=f"run/t{i}.safetensors", Body=save({"x": shard()[f"layer.{i}"]})
        )
    words = ["sweep", "s3://dumps/run/*.safetensors", "--output-dir", "out", "--no-plots"]
    assert main([*words, "--jobs", "2", "--quiet"]) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "index.html", "t0.x", "t1.x", "t2.x",
    ]  # fmt: skip


@share(3)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://dumps/none.pt", "there is no file 's3://dumps/none.pt'"),
        ("s3://nobucket/none.pt", "there is no file 's3://nobucket/none.pt'"),
        ("s3://dumps/*.pt", "matches 's3://dumps/*.pt'"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_a_missing_record_is_reported(url, words, capsys):
    assert main(["sweep", url, "--no-plots"]) == 2
    assert words in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_told(monkeypatch, capsys):
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert main(["sweep", "s3://elsewhere/x.pt", "--no-plots"]) == 2
    assert "s3://elsewhere/x.pt' cannot be reached" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_whole_is_refused_at_once(capsys):
    torch.save(torch.randn(4, 32), "x.pt")
    assert main(["sweep", "x.pt", "--output-dir", "https://host/x"]) == 2
    assert "https:// may leave half a file behind" in capsys.readouterr().err
