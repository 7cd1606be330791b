"""`qgate baselines`: what is shown, found, removed and accepted, and what stays as it is."""

from __future__ import annotations

import math
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Candidate, Key, Store, write_candidate
from qgate.cli import main
from qgate.results import write_results
from tests.adoption.repository import clean, run
from tests.baselines.building import ORIGIN, accepting, contents, key, recorded
from tests.results.making import header, record

Capsys = pytest.CaptureFixture[str]
CANDIDATES = Path("qgate-out/candidates")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """baselines/tiny with accepted errors of 2-1 (12) and 2-4 (1)."""
    monkeypatch.chdir(tmp_path)
    return recorded(Path("baselines"))


def baselines(*argv: str) -> int:
    return main(["baselines", *argv])


def complaint(capsys: Capsys, *argv: str) -> str:
    assert baselines(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def candidate(
    value: float = 2e-4, mode: str = "2-1", source: str = "test_a", **origin: object
) -> None:
    new_candidate = Candidate(replace(ORIGIN, **origin), mode, source, {key(): value})  # type: ignore[arg-type]
    write_candidate(CANDIDATES, new_candidate)


# list and verify -------------------------------------------------------------------------------


def test_list_says_what_there_is_and_what_it_was_made_with(capsys: Capsys) -> None:
    assert baselines("list") == 0
    text = capsys.readouterr().out
    for word in ("tiny", ORIGIN.weights[:12], "10 samples of 512", "2.8.0", "cpu", "abc1234"):
        assert word in text
    assert "plain, rotated; 4 tensors" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["2-1", "12", "cpu"] in [row[:3] for row in rows]
    assert ["2-4", "1", "cpu"] in [row[:3] for row in rows]


@pytest.mark.parametrize("verb", ["list", "verify", "prune --mode 2-1"])
def test_no_baseline_is_not_all_well(verb: str, capsys: Capsys) -> None:
    verb, *arguments = verb.split()
    assert "'empty'" in complaint(capsys, verb, *arguments, "--baselines", "empty")
    assert "'tiny'" not in complaint(capsys, verb, *arguments, "--baselines", "empty")
    assert "unknown model" in complaint(capsys, verb, "--model", "other")


@pytest.mark.parametrize("verb", ["list", "verify", "accept", "prune"])
def test_a_url_is_no_folder_of_baselines(verb: str, capsys: Capsys) -> None:
    assert main(["baselines", verb, "--baselines", "s3://bucket/base"]) == 2
    error_text = capsys.readouterr().err
    assert "the folder of baselines 's3://bucket/base' is a URL, and has to be a path" in error_text
    assert "such as baselines, and commit it" in error_text


def test_verify_is_green_on_what_was_recorded(capsys: Capsys) -> None:
    assert baselines("verify") == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_verify_gives_a_problem_per_line(store: Store, capsys: Capsys) -> None:
    file = store.folder / "accepted" / "2-4.txt"
    file.write_bytes(file.read_bytes().replace(b"0.5", b"nan"))
    reference = store.folder / "reference-plain.safetensors"
    data = bytearray(reference.read_bytes())
    data[-1] ^= 1
    reference.write_bytes(data)
    assert baselines("verify") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert any("2-4.txt:" in line and "never accepted" in line for line in lines)
    assert any("reference-plain.safetensors" in line for line in lines)


def test_verify_sees_folders_without_a_manifest_and_damaged_ones(
    store: Store, capsys: Capsys
) -> None:
    Path("baselines/lost").mkdir()
    (store.folder / "manifest.json").write_text("{", encoding="utf-8")
    assert baselines("verify") == 1
    text = capsys.readouterr().out
    assert "lost" in text
    assert "manifest.json" in text


# prune -----------------------------------------------------------------------------------------


def test_prune_asks_what_to_remove(store: Store, capsys: Capsys) -> None:
    before = contents(store.folder)
    message = complaint(capsys, "prune")
    assert all(word in message for word in ("--mode", "--model", "--results"))
    assert contents(store.folder) == before


def run_of(*sites: str, torn: bool = False, **given: object) -> str:
    """The results of a run of suite test_layer_outputs in mode 2-1."""
    write_results("results.jsonl", header(**given), [record(site, scope="local") for site in sites])
    if torn:
        Path("results.jsonl").write_bytes(Path("results.jsonl").read_bytes()[:-9])
    return "results.jsonl"


def test_prune_removes_what_a_complete_run_did_not_measure(store: Store, capsys: Capsys) -> None:
    store.commit(accepting({replace_suite("test_task"): 0.5}))
    before = contents(store.folder)
    sites = [f"layers.{k}:output" for k in range(12) if k != 7]
    results = run_of(*sites, complete=True)
    assert baselines("prune", "--results", results, "--dry-run") == 0
    out = capsys.readouterr().out
    assert "layers.7:output local relative_mse: 0.0008 -> none" in out
    assert "1 accepted errors would go" in out
    assert contents(store.folder) == before
    assert baselines("prune", "--results", results) == 0
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert key("layers.7:output") not in accepted.values
    assert len(accepted.values) == 12, "another suite, which did not run, is not looked at"
    assert store.modes() == ["2-1", "2-4"]
    capsys.readouterr()
    assert baselines("prune", "--results", results) == 0
    assert capsys.readouterr().out == "nothing is unused\n"


def replace_suite(suite: str) -> Key:
    return key()._replace(suite=suite)


@pytest.mark.parametrize(
    ("given", "torn", "word"),
    [({}, False, "left something out"), ({"complete": False}, False, "left something out"),
     ({"complete": True}, True, "torn")],
)  # fmt: skip
def test_prune_trusts_complete_runs_only(
    given: dict[str, object], torn: bool, word: str, store: Store, capsys: Capsys
) -> None:
    before = contents(store.folder)
    results = run_of("layers.0:output", "layers.1:output", torn=torn, **given)
    assert word in complaint(capsys, "prune", "--results", results)
    assert contents(store.folder) == before


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        (["--mode", "2-4"], ["2-1"]),
        (["--mode", "2-*"], []),
        (["--mode", "2-4,2-1"], []),
        (["--model", "tiny"], []),
        (["--mode", "2-1", "--model", "tiny"], ["2-4"]),
    ],
)
def test_prune_removes_what_is_named(argv: list[str], left: list[str], store: Store) -> None:
    assert baselines("prune", *argv) == 0
    assert store.modes() == left
    assert store.bases() == ["plain", "rotated"]


def test_prune_of_nothing_is_an_error(capsys: Capsys) -> None:
    for named in ("5-*", "2-1,5-*"):
        message = complaint(capsys, "prune", "--mode", named)
        assert "'5-*'" in message
        assert "2-1, 2-4" in message


# accept ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [[], ["qgate-out"], [str(CANDIDATES)], ["qgate-out/results.jsonl"]]
)
def test_accept_makes_candidates_the_baseline(
    path: list[str], store: Store, capsys: Capsys
) -> None:
    candidate(2e-4)
    Path("qgate-out/results.jsonl").write_text("", encoding="utf-8")
    before = contents(store.folder)
    assert baselines("accept", "--dry-run", *path) == 0
    assert "0.0001 -> 0.0002" in capsys.readouterr().out
    assert contents(store.folder) == before
    assert baselines("accept", *path) == 0
    out = capsys.readouterr().out
    assert "layers.0:output local relative_mse: 0.0001 -> 0.0002" in out
    assert "1 entries changed, 0 of 1 candidates refused" in out
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert accepted.values[key()] == 2e-4
    assert len(accepted.values) == 12
    assert baselines("accept", *path) == 0
    assert "accepted already" in capsys.readouterr().out


def test_accept_takes_the_modes_asked_for(store: Store, capsys: Capsys) -> None:
    candidate(2e-4)
    candidate(0.25, mode="2-4")
    assert baselines("accept", "--mode", "2-4") == 0
    accepted = store.accepted("2-1"), store.accepted("2-4")
    assert [a.values[key()] for a in accepted if a is not None] == [1e-4, 0.25]
    capsys.readouterr()
    assert "of the modes" in complaint(capsys, "accept", "--mode", "3")


@pytest.mark.parametrize(
    ("origin", "word"),
    [
        ({"weights": "00" * 32}, "other weights"),
        ({"inputs": "00" * 32}, "other inputs"),
        ({"samples": 1}, "10 samples"),
        ({"calibration": "00" * 32}, "calibration"),
        ({"model": "huge"}, "no baseline"),
    ],
)
def test_accept_refuses_what_was_measured_on_something_else(
    origin: dict[str, object], word: str, store: Store, capsys: Capsys
) -> None:
    candidate(**origin)  # type: ignore[arg-type]
    before = contents(store.folder)
    assert baselines("accept") == 1
    out, err = capsys.readouterr()
    assert err.startswith("refused: ")
    assert word in err
    assert "1 of 1 candidates refused" in out
    assert contents(store.folder) == before
    assert not Path("baselines/huge").exists()


def test_accept_refuses_what_is_never_accepted_and_takes_the_rest(
    store: Store, capsys: Capsys
) -> None:
    candidate(math.nan, source="test_nan")
    barred = Candidate(ORIGIN, "2-1", "test_limit", {key(): 9.0}, {key(): "is above 1"})
    write_candidate(CANDIDATES, barred)
    fine = Candidate(ORIGIN, "2-4", "test_fine", {key(): 0.25})
    write_candidate(CANDIDATES, fine)
    assert baselines("accept") == 1
    err = capsys.readouterr().err
    assert "never accepted" in err
    assert "is above 1" in err
    accepted = store.accepted("2-4"), store.accepted("2-1")
    assert [a.values[key()] for a in accepted if a is not None] == [0.25, 1e-4]


def test_accept_needs_candidates(capsys: Capsys) -> None:
    assert "qgate-out" in complaint(capsys, "accept")
    CANDIDATES.mkdir(parents=True)
    assert "no candidates" in complaint(capsys, "accept")
    (CANDIDATES / "x.json").write_text("[]", encoding="utf-8")
    assert "x.json" in complaint(capsys, "accept")


def test_a_new_entry_is_shown_as_new(store: Store, capsys: Capsys) -> None:
    new = Key("test_task", "logits", "task", "bits_per_byte")
    write_candidate(CANDIDATES, Candidate(ORIGIN, "2-1", "test_task", {new: 1.5}))
    assert baselines("accept", "--dry-run") == 0
    assert "none -> 1.5" in capsys.readouterr().out
    assert baselines("accept") == 0
    assert "none -> 1.5" in capsys.readouterr().out
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert accepted.values[new] == 1.5


def test_a_commit_of_accepted_errors_has_what_moved_as_its_message(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in clean().items():
        monkeypatch.setenv(name, text)
    run(["git", "init", "--quiet"], tmp_path)
    candidate(1.5e-4)
    new = Key("test_task", "logits", "task", "bits_per_byte")
    write_candidate(CANDIDATES, Candidate(ORIGIN, "2-4", "test_b", {key(): 0.4, new: 1.5}))
    assert "has changes that are not committed" in complaint(capsys, "accept", "--commit")
    (tmp_path / ".gitignore").write_text("qgate-out\nbaselines/\n")
    run(["git", "add", "--force", ".gitignore", "baselines"], tmp_path)
    run(["git", "commit", "--quiet", "--message", "Baselines"], tmp_path)
    (tmp_path / "staged").touch()
    run(["git", "add", "staged"], tmp_path)
    hook = tmp_path / ".git" / "hooks" / "commit-msg"
    hook.write_text('#!/bin/sh\necho "Signed-off-by: x" >> "$1"\n')
    hook.chmod(0o755)
    before = run(["git", "rev-parse", "HEAD"], tmp_path)
    assert baselines("accept", "--commit", "--dry-run") == 0
    assert "would commit: Accept errors of tiny in 2-1, 2-4\n" in capsys.readouterr().out
    assert run(["git", "rev-parse", "HEAD"], tmp_path) == before

    assert baselines("accept", "--commit") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("committed ")
    assert "tiny 2-4: 1 better, up to -20 % (layers.0:output relative_mse); 1 new\n" in out
    message = run(["git", "log", "-1", "--format=%B"], tmp_path).splitlines()
    assert message[:4] == [
        "Accept errors of tiny in 2-1, 2-4",
        "",
        "tiny 2-1: 1 worse, up to +50 % (layers.0:output relative_mse)",
        "tiny 2-4: 1 better, up to -20 % (layers.0:output relative_mse); 1 new",
    ]
    table = [line.split() for line in message[5:]]
    assert table[:5] == [
        ["what", "moved", "mode", "metric", "before", "now", "change"],
        [*(part for part in table[1])],
        [
            "layers.0:output",
            "(local)",
            "tiny",
            "2-1",
            "relative_mse",
            "1.0e-04",
            "1.5e-04",
            "+50",
            "%",
        ],
        ["layers.0:output", "(local)", "tiny", "2-4", "relative_mse", "0.5", "0.4", "-20", "%"],
        ["logits", "(task)", "tiny", "2-4", "bits_per_byte", "-", "1.5", "new"],
    ]
    assert "Measured at commit abc1234." in message
    assert "Signed-off-by: x" in message, "hooks of the user are run"
    changed = run(["git", "show", "--format=", "--name-only"], tmp_path).split()
    assert changed == ["baselines/tiny/accepted/2-1.txt", "baselines/tiny/accepted/2-4.txt"]
    assert run(["git", "status", "--short"], tmp_path) == "A  staged\n", "only those"
    assert baselines("accept", "--commit") == 0
    assert "committed" not in capsys.readouterr().out, "nothing changed"


def test_a_commit_needs_a_repository(capsys: Capsys) -> None:
    candidate(2e-4)
    assert "is in no git repository" in complaint(capsys, "accept", "--commit")
    assert "0.0001" not in complaint(capsys, "accept", "--commit")


def zipped(*entries: tuple[str, bytes]) -> str:
    with zipfile.ZipFile("artifact.zip", "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return "artifact.zip"


def test_accept_takes_the_artifact_of_ci(store: Store, capsys: Capsys) -> None:
    candidate_bytes = Candidate(ORIGIN, "2-1", "test_a", {key(): 2e-4}).to_bytes()
    for folder in ("qgate-out/candidates", "candidates", "run 7/qgate-out/candidates"):
        other = ("qgate-out/results.jsonl", b"{}"), (f"{folder}/note.txt", b"x")
        assert (
            baselines("accept", zipped((f"{folder}/a.json", candidate_bytes), *other), "--dry-run")
            == 0
        )
        assert "0.0001 -> 0.0002" in capsys.readouterr().out
    assert baselines("accept", "artifact.zip") == 0
    accepted = store.accepted("2-1")
    assert accepted is not None
    assert accepted.values[key()] == 2e-4


def test_a_zip_file_that_is_none_of_ours_is_refused(store: Store, capsys: Capsys) -> None:
    before = contents(store.folder)
    assert "no candidates" in complaint(capsys, "accept", zipped(("x.json", b"{}")))
    big = zipped(("candidates/x.json", b" " * (17 << 20)))
    assert "above 16 MB" in complaint(capsys, "accept", big)
    assert "x.json" in complaint(capsys, "accept", zipped(("candidates/x.json", b"[]")))
    Path("torn.zip").write_bytes(Path("artifact.zip").read_bytes()[:-30])
    assert "torn.zip" in complaint(capsys, "accept", "torn.zip")
    assert "gone.zip" in complaint(capsys, "accept", "gone.zip")
    assert contents(store.folder) == before
