"""A trainer and a rollout engine over the steps of a run: drifts, limits, modules, bad input."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from torch import nn

from qgate.cli import main
from qgate.engines import files
from qgate.engines.series import CLIPPED, compare_steps, find_drifts
from qgate.engines.series_page import page
from qgate.engines.series_record import StepDistances
from qgate.engines.series_texts import headline
from qgate.errors import QgateError
from tests.charts.page_reader import PageReader
from tests.engines import runs
from tests.engines.gated import collect, network
from tests.engines.steps import write_steps
from tests.hostile import HOSTILE
from tests.shares import proof, share

Capture = pytest.CaptureFixture[str]
SCHEMA = Path(files.__file__).with_name("series.schema.json")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_steps(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps whose difference grows from step 12 on."""
    folder = tmp_path_factory.mktemp("drifting")
    return write_steps(folder, 1, noise=lambda step: 0.02 * 1.15 ** max(0, step - 11))


def test_a_drift_is_the_first_line_and_fails(
    drifting: Path, tmp_path: Path, capsys: Capture
) -> None:
    command = ["engines", "--steps", str(drifting)]
    assert main([*command, "--output-dir", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(("mean KL rises from step 12 on (", "mean KL rises from step 13 on"))
    assert lines[-1] == f"page: {tmp_path / 'series.html'}"
    text = (tmp_path / "series.html").read_text(encoding="utf-8")
    assert f"<h1><span class='fail'>{lines[0].split(' (')[0]}" in text
    assert text.count('<svg class="plot"') == 4
    assert main([*command, "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(record)
    assert record["drifts"][0]["figure"] == "mean"
    with (tmp_path / "steps.csv").open(encoding="utf-8") as rows:
        table = list(csv.DictReader(rows))
    assert [int(row["step"]) for row in table] == list(range(1, 31))
    assert float(table[4]["k3_quarter_4"]) == record["steps"][4]["quarters"][3]


def test_a_healthy_series_passes(healthy: Path, capsys: Capture) -> None:
    assert main(["engines", "--steps", str(healthy)]) == 0
    assert capsys.readouterr().out.startswith("no drift in 30 steps: mean KL ")


def test_the_figures_of_a_step_are_as_defined(healthy: Path) -> None:
    step = compare_steps(str(healthy)).steps[6]
    ids, rollout, trainer = (
        torch.from_numpy(np.load(healthy / "step-007" / f"{name}.npz")[key])
        for name, key in (("rollout", "tokens"), ("rollout", "logits"), ("trainer", "logits"))
    )
    a, r = runs.Scored(ids, trainer).logprobs[:, 1:], runs.Scored(ids, rollout).logprobs[:, 1:]
    ratio = (a - r).exp()
    p, q = (torch.log_softmax(x[:, :-1].double(), -1) for x in (rollout, trainer))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert step.mean == pytest.approx(float(kl.mean()))
    assert step.q99 == pytest.approx(float(kl.reshape(-1).quantile(0.99)))
    assert step.chi2 == pytest.approx(float((ratio - 1).square().mean()))
    assert step.beyond == float(((a - r).abs() > CLIPPED).double().mean())
    k3 = ratio - 1 - (a - r)
    # 33 tokens, of which the first has no log-probability: the second quarter has 9 to 16.
    assert step.quarters[1] == pytest.approx(float(k3[:, 8:16].mean()))


def _figures(seed: int, drift: Callable[[int], float] = lambda _: 1.0) -> list[StepDistances]:
    """Draw the figures of 30 steps of 2,000 tokens; batches are unlike each other by 10 %."""
    draw = np.random.default_rng(seed)
    steps = []
    for number in range(1, 31):
        size = 0.05 * drift(number) * np.exp(0.1 * draw.standard_normal())
        difference = size * draw.standard_t(4, 2000)
        k3 = np.expm1(difference) - difference
        steps.append(
            StepDistances(
                number,
                2000,
                20,
                float(k3.mean()),
                None,
                float(np.quantile(k3, 0.99)),
                float(np.square(np.expm1(difference)).mean()),
                float((np.abs(difference) > CLIPPED).mean()),
                float(np.abs(difference).max()),
                (0.0,) * 4,
            )
        )
    return steps


@proof
def test_a_hundred_healthy_series_are_no_alarm() -> None:
    assert [seed for seed in range(100) if find_drifts(_figures(seed))] == []


@share(2)
@pytest.mark.parametrize("growth", [1.06, 1.2])
def test_a_drift_from_step_12_on_is_found_within_two_steps(growth: float) -> None:
    for seed in range(10):
        first = find_drifts(_figures(seed, lambda step: growth ** max(0, step - 11)))[0]
        assert first.rises
        assert abs(first.step - 12) <= 2


def test_a_fall_is_said_and_does_not_fail(tmp_path: Path, capsys: Capture) -> None:
    folder = write_steps(tmp_path, 2, noise=lambda step: 0.02 if step < 12 else 0.01)
    assert main(["engines", "--steps", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("mean KL falls from step 12 on (")


def test_few_steps_are_no_verdict(tmp_path: Path, capsys: Capture) -> None:
    folder = write_steps(tmp_path, steps=5)
    assert main(["engines", "--steps", str(folder)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("5 steps are too few to tell a drift, which takes 15: mean KL ")


def test_limits_hold_at_each_step(tmp_path: Path, capsys: Capture) -> None:
    folder = write_steps(tmp_path, steps=6, noise=lambda step: 0.2 if step in (3, 5) else 0.02)
    assert main(["engines", "--steps", str(folder), "--max-kl", "1e-3"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("step 3: mean KL 0.0")
    assert first.endswith(" nats per token is above the limit 0.001, as are 1 more step")


def _rounded(module: nn.Module, digits: int) -> None:
    projection = module.get_submodule("model.layers.2.mlp.down_proj")
    plain = projection.forward
    scale = 10.0**digits
    projection.forward = lambda x: (plain(x) * scale).round() / scale  # type: ignore[method-assign]


def _other_sums(module: nn.Module) -> None:
    """Differ in all layers by little, as another kernel does."""
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and name.endswith(("o_proj", "down_proj")):
            plain = linear.forward
            linear.forward = lambda x, plain=plain: plain(x) * (1 + 1e-5)  # type: ignore[method-assign]


@proof
def test_the_module_of_a_drift_is_named(tmp_path: Path) -> None:
    home = tmp_path / "dumps"
    for step in range(1, 17):
        right, other = network(), network()
        _other_sums(other)
        if step >= 9:
            _rounded(other, 2)
        with torch.no_grad():
            for module in (right, other):
                module.get_submodule("lm_head").weight.mul_(1 + 0.001 * step)
        collect(home / f"{step}" / "trainer", other, 1)
        collect(home / f"{step}" / "rollout", right, 1)
    record = compare_steps(str(home))
    assert record.drifts[0].step == 9
    assert record.module is not None
    assert "model.layers.2.mlp.down_proj forward output" in record.module.site
    assert "; it begins at L2 model.layers.2.mlp.down_proj" in headline(record)


def _no_steps(folder: Path) -> None:
    (folder / "mine").mkdir()


def _one_engine(folder: Path) -> None:
    (folder / "step-3").mkdir()
    (folder / "step-3" / "trainer.npz").touch()


def _twice(folder: Path) -> None:
    write_steps(folder, steps=1)
    (folder / "step-001").rename(folder / "step-1")
    write_steps(folder, steps=1)


def _other_tokens(folder: Path) -> None:
    write_steps(folder, steps=2)
    runs.write_npz(folder / "step-002" / "rollout.npz", runs.scored(samples=6, tokens=33))


def _without_logits(folder: Path) -> None:
    write_steps(folder, steps=2)
    run = runs.scored()
    home = folder / "step-002"
    for name in ("trainer", "rollout"):
        (home / f"{name}.npz").unlink()
        runs.write_lines(home / f"{name}.jsonl", run)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_no_steps, "has no steps: it should hold a folder per step"),
        (_one_engine, "called rollout or engine or reference, such as rollout.npz; it has trainer"),
        (_twice, "has step 1 twice"),
        (_other_tokens, "step 2: the engines did not score the same tokens"),
        (_without_logits, "some steps in"),
    ],
)
def test_bad_folders_are_refused(tmp_path: Path, spoil: Callable[[Path], None], words: str) -> None:
    spoil(tmp_path)
    with pytest.raises(QgateError, match=words):
        compare_steps(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name two engines, as in qgate engines A B, or a folder by --steps DIR."),
        (["--steps", "nowhere"], "there is no folder 'nowhere' of steps."),
        (["--steps", "nowhere", "A"], "takes no A: leave it out."),
        (["--steps", "nowhere", "--same-weights"], "takes no --same-weights: leave it out."),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: Capture, options: list[str], words: str
) -> None:
    assert main(["engines", *options]) == 2
    assert words in capsys.readouterr().err


def test_names_are_text_on_the_page(drifting: Path) -> None:
    record = compare_steps(str(drifting))
    record.folder, record.beyond, record.notes = HOSTILE[0], list(HOSTILE), list(HOSTILE)
    html = page(record, list(HOSTILE))
    tags = {name for name, _ in PageReader(html).tags}
    assert not {"script src", "img", "iframe", "object"} & tags
    assert not any(f">{name}<" in html for name in HOSTILE if "<" in name)
