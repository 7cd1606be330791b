"""Folders of encoders, vision and two inputs, gated end to end with nothing but their name."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401

from qgate.errors import QgateError
from qgate.models import Sampling, load
from tests.models.fed_folders import save_network
from tests.plugin.conftest import run_alone
from tests.plugin.projects import begin
from tests.shares import always, proof, slow_file

pytestmark = slow_file

pytest.importorskip("transformers")

SHORT = (
    "--samples=2",
    "--seqlen=16",
    "--calib-samples=2",
    "--calib-seqlen=16",
    "--mode=int8",
    "-q",
)
LAYERS = {
    "BertModel": 2,
    "ViTForImageClassification": 2,
    "CLIPModel": 4,
    "HubertModel": 2,
    "DetrForObjectDetection": 5,
    "ViltModel": 2,
    "ClapModel": 4,
}
GATES = ("test_layer_outputs.py", "test_outputs.py", "test_reference.py", "test_canary.py")


@pytest.fixture(scope="module")
def saved(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a network and load it: a test with `pytester` forgets what it imported first."""
    folder = tmp_path_factory.mktemp("saved") / kind
    save_network(kind, folder)
    with contextlib.suppress(QgateError):
        load(f"hf:{folder}", sampling=Sampling(samples=1, seqlen=8))
    return folder


@pytest.fixture
def home(saved: Path, pytester: pytest.Pytester) -> Path:
    """A folder with a network, the suites of layers, outputs, reference and canary, no baseline."""
    shutil.copytree(saved, pytester.path / saved.name)
    return begin(pytester, *GATES)


one_network = pytest.mark.parametrize("kind", ["ViTForImageClassification"], scope="module")


@proof
@pytest.mark.parametrize("kind", LAYERS, scope="module")
def test_a_folder_is_gated_from_end_to_end(
    kind: str, home: Path, pytester: pytest.Pytester
) -> None:
    command = ["suites", f"--model=hf:{kind}", *SHORT]
    recorded = run_alone(pytester, *command, "--update-baselines")
    assert recorded.ret == pytest.ExitCode.OK, recorded.stdout.str()
    result = run_alone(pytester, *command)
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    result.assert_outcomes(passed=3 + LAYERS[kind])
    rows = [json.loads(line) for line in (home / "qgate-out/results.jsonl").open()][1:]
    assert {row["model"] for row in rows} == {f"hf:{kind}"}
    assert any(row["values"] for row in rows)


@proof
@one_network
def test_a_name_is_the_same_wherever_the_folder_is(home: Path, pytester: pytest.Pytester) -> None:
    """Recorded in one place, compared in another: same baselines, tests and records."""
    shutil.copytree(home / "ViTForImageClassification", home / "here")
    shutil.copytree(home / "here", home / "elsewhere" / "lr=3")
    options = ["suites", *SHORT]
    named = "--model=hf:here=vit"
    first = run_alone(pytester, *options, named)
    assert first.ret == pytest.ExitCode.TESTS_FAILED
    assert "--model hf:here=vit --update-baselines" in first.stdout.str()
    run_alone(pytester, *options, named, "--update-baselines")
    assert [path.name for path in (home / "baselines").iterdir()] == ["vit"]
    result = run_alone(pytester, *options, f"--model=hf:{home}/elsewhere/lr=3=vit", "-vv")
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(["*test_layer_outputs*vit-int8-layers.0] PASSED*"])
    records = (home / "qgate-out/results.jsonl").read_text()
    assert "elsewhere" not in "".join(records.splitlines()[1:])


@proof
@one_network
def test_a_length_that_cuts_no_sample_is_in_no_manifest(
    home: Path, pytester: pytest.Pytester
) -> None:
    options = ["suites/test_outputs.py", "--model=hf:ViTForImageClassification=vit", *SHORT]
    run_alone(pytester, *options, "--update-baselines")
    manifest = home / "baselines/vit/manifest.json"
    recorded = json.loads(manifest.read_text())
    assert recorded["seqlen"] == 0
    for seqlen in (0, 512):  # as earlier manifests have it
        recorded["seqlen"] = seqlen
        manifest.write_text(json.dumps(recorded))
        result = run_alone(pytester, *options, "--seqlen=32")
        assert result.ret == pytest.ExitCode.OK, result.stdout.str()


@always
def test_a_bad_name_and_two_of_one_name_stop_the_run(pytester: pytest.Pytester) -> None:
    (begin(pytester, *GATES) / "here").mkdir()
    for models, words in (
        (["hf:here=a/b"], "name 'a/b' of model 'hf:here=a/b' is not allowed"),
        (["hf:here=x", "hf:there=x"], "are all called 'x'"),
    ):
        result = run_alone(pytester, "suites", *SHORT, *(f"--model={model}" for model in models))
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert result.stderr.str().count(words) == 1, result.stderr.str()
        assert "Traceback" not in result.stderr.str() + result.stdout.str()


@pytest.mark.parametrize("kind", ["T5ForConditionalGeneration"], scope="module")
def test_a_folder_that_cannot_be_fed_stops_the_run(
    home: Path, pytester: pytest.Pytester, kind: str
) -> None:
    result = run_alone(pytester, "suites", f"--model=hf:{kind}", *SHORT)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.stderr.str().splitlines() if line]
    assert len(lines) == 1
    assert "has an encoder and a decoder" in lines[0]
    assert not (home / "baselines").exists()
