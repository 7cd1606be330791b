"""`pytest suites --baselines s3://…`: what a run does with a folder, on a server that speaks S3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qgate.baselines import Key, Store, Update
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.plugin.conftest import Run
from tests.plugin.projects import header
from tests.shares import proof, share

bucket, server = stores.bucket, stores.server

URL = f"s3://{stores.BUCKET}/base"
HERE = ("--baselines", URL)


@pytest.fixture
def filled(bucket: Any, project: Path) -> Any:
    """The recorded baselines, in the bucket and nowhere else."""
    root = project / "baselines"
    for path in root.rglob("*.*"):
        if path.is_file():
            name = f"base/{path.relative_to(root).as_posix()}"
            bucket.put_object(Bucket=stores.BUCKET, Key=name, Body=path.read_bytes())
    for folder in root.iterdir():
        if folder.is_dir():
            Store(location_of(URL), folder.name).migrate()
    root.rename(project / "elsewhere")
    return bucket


def tightened() -> Key:
    """Accept a hundredth of an error that was measured; its key."""
    store = Store(location_of(URL), "tiny-llama")
    accepted, origin = store.accepted("int8"), store.origin()
    assert accepted is not None
    assert origin is not None
    key = next(key for key in accepted.values if key.site.startswith("model.layers.1"))
    update = Update(origin)
    update.set_accepted("int8", key, accepted.values[key] / 100)
    store.commit(update)
    return key


@share(4)
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "two workers"])
@pytest.mark.usefixtures("filled")
def test_red_updated_and_green_again(workers: tuple[str, ...], suites: Run) -> None:
    key = tightened()
    result = suites(*HERE, *workers, alone=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([f"*{key.site}*", f"*{URL}/tiny-llama/accepted/int8.txt*"])
    result = suites(*HERE, *workers, "--update-baselines", alone=True)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["baselines: * entries written", f"*int8.txt: {key}: * -> *"])
    result = suites(*HERE, *workers, alone=True)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines([f"qgate: mode int8, *, baselines {URL}"])


@proof
def test_recorded_where_nothing_was(bucket: Any, project: Path, suites: Run) -> None:
    (project / "qgate.toml").write_text(f'baselines = "{URL}"\n')
    result = suites("--update-baselines", "--layers", "first", alone=True)
    assert result.ret == pytest.ExitCode.OK
    names = stores.keys(bucket)
    assert any(name.startswith("base/tiny-llama/generations/") for name in names)
    assert Store(location_of(URL), "tiny-llama").origin() is not None
    assert not [name for name in names if "/." in name]
    assert suites("--layers", "first", alone=True).ret == pytest.ExitCode.OK
    assert header(project)["baselines"] == URL


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "two workers"])
@pytest.mark.usefixtures("bucket")
def test_what_cannot_be_reached_is_one_usage_error(workers: tuple[str, ...], suites: Run) -> None:
    result = suites("--baselines", "s3://nobucket/base", *workers, alone=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"{result.stdout}\n{result.stderr}"
    assert "qgate: 's3://nobucket/base' cannot be reached: The specified bucket does not" in text
    assert result.parseoutcomes().keys().isdisjoint({"passed", "failed", "errors"})


def test_tests_without_gates_ask_no_store(pytester: pytest.Pytester, project: Path) -> None:
    (project / "qgate.toml").write_text('baselines = "s3://nobucket/base"\n')
    pytester.makepyfile("def test_it(): pass")
    result = pytester.runpytest_inprocess("test_tests_without_gates_ask_no_store.py")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["qgate: *, baselines s3://nobucket/base"])
