"""`suites/test_activations.py`: what another training may move, and what it may not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.plugin.projects import begin
from tests.shares import always, proof, share, slow_file

pytestmark = [slow_file, pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")]
Gates = Callable[..., pytest.RunResult]
NORM = "model.layers.1.input_layernorm.weight"
HARMLESS = "for weight in weights.values(): weight *= 1 + 1e-3 * torch.randn_like(weight)"
PLANTED = {
    "a norm twice as large": f"weights['{NORM}'] *= 2",
    "an outlier channel": f"weights['{NORM}'][weights['{NORM}'].abs().argmax()] *= 16",
    "a dead layer": "weights['model.layers.1.mlp.up_proj.weight'].zero_()",
    "a massive token": "weights['model.embed_tokens.weight'][101] *= 100",
    "not a number": f"weights['{NORM}'][3] = float('nan')",
}


@pytest.fixture
def gates(pytester: pytest.Pytester) -> Gates:
    """The suite on a model of the project's own, whose weights are changed by a line of code."""
    begin(pytester, "test_activations.py")

    def run(*options: str, change: str = "pass") -> pytest.RunResult:
        (pytester.path / "mine.py").write_text(
            "import torch\n"
            "from qgate.models import Sampling, load\n"
            "def build(samples, seqlen):\n"
            "    sampling = Sampling(samples=samples, seqlen=seqlen)\n"
            "    model = load('tiny-llama', sampling=sampling)\n"
            "    torch.manual_seed(0)\n"
            "    weights = dict(model.module.named_parameters())\n"
            "    with torch.no_grad():\n"
            f"        {change}\n"
            "    model.name = 'mine'\n"
            "    return model\n"
        )
        short = ["--samples=2", "--seqlen=64", "--model=mine.py:build"]
        return pytester.runpytest_inprocess("suites", *short, *options)

    return run


@pytest.fixture
def accepted(pytester: pytest.Pytester, gates: Gates, recorded_once: Callable[..., None]) -> None:
    recorded_once("activations", pytester.path, lambda: gates("--update-baselines"))


@share(2)
@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize("change", ["pass", HARMLESS])
def test_the_same_model_and_one_trained_a_little_further_pass(gates: Gates, change: str) -> None:
    gates(change=change).assert_outcomes(passed=5)


@proof
@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize("name", PLANTED)
def test_what_makes_a_model_harder_to_quantize_fails(gates: Gates, name: str) -> None:
    result = gates(change=PLANTED[name])
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    failed = result.parseoutcomes()["failed"]
    assert 1 <= failed <= 5
    output = result.stdout.str()
    assert "activations-mine" in output
    if name == "not a number":
        assert "non-finite values" in output
    elif name != "a massive token":
        assert "test_activations[mine.py:build-layers.1]" in output
        assert "[mine.py:build-layers.0]" not in output.partition("short test summary")[2]


@proof
def test_without_a_record_it_says_how_to_make_one(gates: Gates) -> None:
    result = gates()
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(["*no accepted*", "*--update-baselines*"])


@always
@pytest.mark.usefixtures("accepted")
def test_other_samples_than_those_of_its_record_are_refused(
    pytester: pytest.Pytester, gates: Gates
) -> None:
    folders = [path.name for path in (pytester.path / "baselines").iterdir()]
    assert folders == ["activations-mine"], "the record is apart from that of the modes"
    result = gates("--samples=3")
    result.assert_outcomes(errors=1, deselected=4)
    result.stdout.fnmatch_lines(["*was made with 2 samples, and there are 3 now*"])
