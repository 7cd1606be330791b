"""Runs on a second kind of device: accepted errors beside those of the first, which stay.

The second kind is the CPU under another name, so that the same numbers are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Accepted, Key, Store, verify
from qgate.baselines.accepted import accepted_file, read_accepted
from qgate.cli import main
from qgate.devices import arithmetic_of
from tests.baselines.building import rewrite
from tests.gate.benches import LLAMA
from tests.plugin.conftest import Run
from tests.plugin.projects import SITE, accepted, add, files, header, page, records, tightened
from tests.shares import proof, share, slow_file

pytestmark = slow_file

CUDA = "cuda-sm_90-deadbeef"
FILE = f"{LLAMA}/{accepted_file('int8', 'cuda')}"
KEY = Key("layer_outputs", SITE, "local", "relative_mse")
On = Callable[[str], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Name the device that the next runs are on."""

    def name(device: str) -> None:
        monkeypatch.setattr(
            "qgate.gate.measuring.model_subject.arithmetic_of", lambda _device: device
        )

    return name


@pytest.fixture
def gates(suites: Run) -> Run:
    """Run the gates of one layer."""

    def run(*options: str, suite: str = "layer_outputs") -> pytest.RunResult:
        few = ("--layers", r"layers\.1", "--plots=none")
        return suites(*few, *options, paths=(f"suites/test_{suite}.py",))

    return run


def here() -> str:
    import torch

    return arithmetic_of(torch.device("cpu"))


def beside(project: Path) -> Accepted:
    return read_accepted((project / "baselines" / FILE).read_bytes(), FILE)


def moved(project: Path, by: float, file: str = "") -> None:
    """Multiply one accepted error."""

    def change(errors: Accepted) -> Accepted:
        value = errors.values[KEY]
        assert isinstance(value, float)
        return replace(errors, values={**errors.values, KEY: value * by})

    rewrite(project / "baselines" / file if file else accepted(project), change)


def test_values_of_the_first_device_hold_with_the_limit_for_another_kind(
    project: Path, gates: Run, on: On
) -> None:
    before = files(project)
    moved(project, 1 / 1.04)
    gates().assert_outcomes(failed=1)  # as 4 % over accepted is on the first device
    on(CUDA)
    gates().assert_outcomes(passed=1)
    moved(project, 1.04 / 1.06)
    result = gates()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        f"*{SITE}*% over accepted, 5 % allowed (accepted on {here()})*",
        f"*baseline  baselines/tiny-llama/accepted/int8.txt (accepted on {here()}, this run is on "
        f"{CUDA})*",
    ])  # fmt: skip
    (row,) = (row for row in records(project)[1:] if not row["passed"])
    (check,) = (check for check in row["checks"] if not check["passed"])
    assert check["accepted_on"] == here()
    assert f"accepted on {here()}" in page(project)
    assert {*files(project)} == {*before}


@proof
def test_an_update_adds_a_file_and_leaves_the_first_one(
    project: Path, gates: Run, on: On, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tightened(project)
    before = files(project)
    on(CUDA)
    gates("--update-baselines", "--update-dry-run").stdout.fnmatch_lines([
        f"tiny-llama int8: 1 value would be added for {CUDA} in accepted/int8@cuda.txt, beside "
        f"those of {here()} in accepted/int8.txt"
    ])  # fmt: skip
    assert files(project) == before
    result = gates("--update-baselines")
    assert result.ret == pytest.ExitCode.OK
    note = (
        f"tiny-llama int8: 1 value added for {CUDA} in accepted/int8@cuda.txt, beside those of "
        f"{here()} in accepted/int8.txt"
    )
    result.stdout.fnmatch_lines([note])
    assert note in header(project)["notes"]
    assert {name: data for name, data in files(project).items() if name != FILE} == before
    errors = beside(project)
    assert (errors.device, errors.kind) == (CUDA, "cuda")
    assert errors.values == {KEY: pytest.approx(expected)}
    assert verify(Store(project / "baselines", LLAMA)) == []
    # Its own value holds like one of the first device: 4 % are too many again.
    gates().assert_outcomes(passed=1)
    moved(project, 1 / 1.04, FILE)
    result = gates()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "*% over accepted, 2 % allowed*",
        "*baseline  baselines/tiny-llama/accepted/int8@cuda.txt, and for all other values "
        f"baselines/tiny-llama/accepted/int8.txt (accepted on {here()}, this run is on {CUDA})*",
    ])  # fmt: skip
    # Another arithmetic of the same kind changes the same file.
    on("cuda-sm_80-0badcafe")
    gates("--update-baselines", "--update-which", "all")
    assert beside(project).device == "cuda-sm_80-0badcafe"
    # The first device sees nothing of it, and accepts for itself.
    on(here())
    result = gates()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*10x accepted*"])
    own = (project / "baselines" / FILE).read_bytes()
    monkeypatch.chdir(project)
    assert main(["baselines", "accept"]) == 0
    assert (project / "baselines" / FILE).read_bytes() == own
    gates().assert_outcomes(passed=1)


@proof
def test_all_and_new_add_no_more_than_they_say(project: Path, gates: Run, on: On) -> None:
    before = files(project)
    on(CUDA)
    gates("--update-baselines", "--update-which", "new")
    assert files(project) == before
    gone = Key("layer_outputs", SITE, "local", "one_minus_correlation")
    rewrite(
        accepted(project),
        lambda of: replace(of, values={k: v for k, v in of.values.items() if k != gone}),
    )
    before = files(project)
    gates("--update-baselines", "--update-which", "new")
    assert {*beside(project).values} == {gone}
    gates("--update-baselines", "--update-which", "all")
    stored = read_accepted(accepted(project).read_bytes(), "")
    layer = {key: value for key, value in stored.values.items() if "layers.1" in key.site}
    layer = {key: value for key, value in layer.items() if key.suite == "layer_outputs"}
    assert beside(project).values == layer | {gone: beside(project).values[gone]}
    assert {name: data for name, data in files(project).items() if name != FILE} == before


@proof
def test_candidates_of_a_second_kind_are_accepted_beside(
    project: Path,
    gates: Run,
    on: On,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tightened(project)
    before = files(project)
    on(CUDA)
    gates().assert_outcomes(failed=1)
    monkeypatch.chdir(project)
    capsys.readouterr()
    assert main(["baselines", "accept"]) == 0
    assert f"1 value added for {CUDA} in accepted/int8@cuda.txt" in capsys.readouterr().out
    assert {name: data for name, data in files(project).items() if name != FILE} == before
    gates().assert_outcomes(passed=1)
    assert main(["baselines", "list"]) == 0
    out = capsys.readouterr().out
    assert f"int8 on cuda  1          {CUDA}" in out
    assert main(["baselines", "prune", "--mode", "int8", "--model", LLAMA]) == 0
    assert {FILE, f"{LLAMA}/accepted/int8.txt"}.isdisjoint(files(project))


@proof
def test_a_site_of_the_first_device_is_removed_there_only(
    project: Path, gates: Run, on: On
) -> None:
    gone = Key("layer_outputs", f"{SITE.replace('up_', 'gone_')}", "local", "relative_mse")
    rewrite(accepted(project), lambda of: replace(of, values={**of.values, gone: 0.5}))
    before = files(project)
    on(CUDA)
    result = gates("--update-baselines")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*only an update on {here()} removes them*"])
    assert files(project) == before
    on(here())
    assert gates("--update-baselines").ret == pytest.ExitCode.OK


@proof
def test_references_stay_those_of_the_first_device(project: Path, gates: Run, on: On) -> None:
    add(project, "test_reference.py")
    gates("--update-baselines", suite="reference").assert_outcomes(passed=1)
    before = files(project)
    assert any(name.endswith(".safetensors") for name in before)
    on(CUDA)
    gates(suite="reference").assert_outcomes(passed=1)
    gates("--update-baselines", "--update-which", "all", suite="reference")
    assert files(project) == before
    assert Store(project / "baselines", LLAMA).origin().device == here()  # type: ignore[union-attr]


@share(10)
@pytest.mark.parametrize("fault", ["edited", "moved here", "moved away", "kind", "stale"])
def test_a_line_that_is_not_of_this_kind_is_named(
    project: Path, gates: Run, on: On, fault: str
) -> None:
    tightened(project)
    on(CUDA)
    gates("--update-baselines")
    first, own = accepted(project), project / "baselines" / FILE
    line = next(line for line in own.read_text().splitlines() if SITE in line)
    lines = first.read_text().splitlines(keepends=True)
    if fault == "edited":
        own.write_text(
            own.read_text().replace(line, line.replace(" 0.", " 1.").replace("e-0", "e-1"))
        )
    elif fault == "moved here":
        copied = next(text for text in lines if SITE in text and "one_minus" in text)
        own.write_text(own.read_text() + copied)
    elif fault == "moved away":
        first.write_text("".join(f"{line}\n" if _is_of_key(text) else text for text in lines))
    elif fault == "kind":
        first.write_bytes(own.read_bytes())
    else:
        rewrite(own, lambda of: replace(of, weights="0" * 64))
    words = {
        "edited": "was edited, or is of another file", "moved here": "was edited, or is of another",
        "moved away": "was edited, or is of another file", "kind": "was copied or renamed",
        "stale": "accepted errors of mode int8 on cuda were measured with other weights",
    }[fault]  # fmt: skip
    result = gates()
    assert result.ret != pytest.ExitCode.OK
    assert words in str(result.stdout) + str(result.stderr)
    (problem, *_) = verify(Store(project / "baselines", LLAMA))
    assert ("whose file has another name" if fault == "kind" else words) in problem


def _is_of_key(text: str) -> bool:
    return text.split()[:4] == [*KEY]


@proof
def test_with_other_weights_an_update_begins_anew(project: Path, gates: Run, on: On) -> None:
    """What is of other weights goes, whatever device it is of: nothing can be compared with it."""
    tightened(project)
    on(CUDA)
    gates("--update-baselines")
    store = Store(project / "baselines", LLAMA)
    rewrite(accepted(project), lambda of: replace(of, weights="0" * 64))
    result = gates()  # its own value is of these weights, and all others are missing
    result.assert_outcomes(failed=1)
    rewrite(project / "baselines" / FILE, lambda of: replace(of, weights="0" * 64))
    assert gates("--update-baselines").ret == pytest.ExitCode.OK
    assert store.accepted("int8").device == CUDA  # type: ignore[union-attr]
    assert not (project / "baselines" / FILE).exists()
    gates().assert_outcomes(passed=1)
