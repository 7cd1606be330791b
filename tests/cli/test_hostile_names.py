"""Every command with 22 hostile names in its input: none of them is obeyed or begins a line."""

from __future__ import annotations

import contextlib
import json
import pkgutil
from pathlib import Path

import pytest

import qgate.cli
from qgate.cli import main
from tests.hostile_files import assert_calm, assert_calm_files, write_all
from tests.shares import share


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("hostile")
    write_all(folder)
    return folder


MODELS = "--model hostile_model.py:build --samples 2"
CASES = {
    "activations": [
        "activations --model hostile_model.py:build --data.num_samples 2 --save_dir act "
        "--output.formats csv,html,json --formats int8",
        "activations --model hostile_model.py:build --list-layers .",
        "activations --model hostile_model.py:build --dry-run",
    ],
    "baselines": [
        "baselines list", "baselines verify", "baselines accept candidates --dry-run",
        "baselines accept candidates",
        "baselines prune --mode * --dry-run", "baselines prune --results run/results.jsonl --dry-run",
        "baselines prune --mode *",
    ],
    "check": [
        "check \n::error::y:f --like torch:relu --shape 2x2", "check hostile_model.py:f --like \n::error::y:g --shape 2x2 --json",
        "check hostile_model.py:build --like torch:relu --shape 4x4", "check hostile_model.py:\n::error::y --like torch:relu --shape 4x4",
    ],
    "checkpoint": [
        "checkpoint checkpoints/child --parent checkpoints/parent --output-dir ck",
        "checkpoint checkpoints/child --json", "checkpoint checkpoints/child checkpoints/parent --same",
        "checkpoint checkpoints/child checkpoints/parent --same --json",
    ],
    "collect": ["collect --dir collected --watch-underflow -- hostile_model.py"],
    "doctor": ["doctor", "doctor --json"],
    "dumps": [
        "dumps ls dump --limit 100", "dumps ls dump --json", "dumps info dump", "dumps info dump --json",
        "dumps verify dump", "dumps compare dump other", "dumps compare dump other --json",
        "dumps merge dump --output merged", "dumps export dump --output exported",
        "dumps watch dump --expect 50 --timeout 0", "dumps ls dump --where name=x",
        "dumps draw dump other --output-dir drawn --no-plots", "dumps draw dump --quick --output-dir quickly",
        "dumps draw drawn/analysis.json --output-dir again --no-plots",
    ],
    "engines": [
        "engines engines/trainer.npz engines/rollout.npz --output-dir eng",
        "engines dump other", "engines t.npz t.npz --json",
        "engines engines/trainer.npz engines/rollout.npz --weights checkpoints/child checkpoints/parent",
    ],
    "show": ["show formats x\n::error::y", "show modes --model hostile_model.py:build", "help \n::error::y",
             "show vectors \n::error::y", "show vectors int4 --output \n::error::y/v.npz"],
    "init": ["init product --suites \n::error::y"],
    "layers": [
        f"layers calibrate {MODELS} --calibration c.json",
        f"layers capture {MODELS} --mode int8 --output-dir captured",
        "layers compare int8 --output-dir captured", "layers compare --all --output-dir captured",
    ],
    "report": ["report run --output r.md --output r.csv --output r.html --output r.json",
               "report a=run b=run --output c.html --output c.md", "report run --merge merged-run"],
    "run": ["run --gate-from \n::error::y"],
    "sweep": ["sweep t.safetensors t.npz --no-plots --output-dir swept"],
}  # fmt: skip


def test_every_command_is_here() -> None:
    verbs = {info.name for info in pkgutil.iter_modules(qgate.cli.__path__)}
    assert set(CASES) == {name for name in verbs if not name.startswith("_")}


@share(16)
@pytest.mark.parametrize("command", CASES)
def test_no_name_reaches_the_beginning_of_a_line(
    command: str, house: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(house)
    monkeypatch.syspath_prepend(house)
    before = set(house.rglob("*"))
    for line in CASES[command]:
        with contextlib.suppress(SystemExit):
            main(line.split(" "))
        out, err = capfd.readouterr()
        if line.endswith("--json") and out:
            json.loads(out)
        assert "Traceback" not in err, err
        assert_calm(out, f"{line} printed")
        assert_calm(err, f"{line} said")
    assert_calm_files(set(house.rglob("*")) - before)
