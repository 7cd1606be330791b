"""What suites on dumps, checkpoints and engines have in common: how they are asked for and held."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from qgate.cli import main
from qgate.storage.locations import location_of
from tests import bucket as stores
from tests.checkpoints.exports import parent_tensors, write
from tests.checkpoints.faults import UP
from tests.checkpoints.gated import double_scales, grow_scales, planted
from tests.dumps.gated import at, write_dump
from tests.engines import runs
from tests.engines.gated import logits_pair, more_noise, one_token
from tests.plugin.conftest import Run
from tests.plugin.projects import add, files, header, page, records
from tests.plugin.subjects import SUBJECTS, Gates, Subject
from tests.shares import share

memory = stores.memory
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning"),
    share(4, group="runs"),
]
DUMP, CHECKPOINT, ENGINES = SUBJECTS.values()
each_subject = pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)


@pytest.mark.parametrize(
    ("subject", "deselected", "note"),
    [
        (DUMP, 5, "2 suites on dumps left out: give --dump DIR"),
        (CHECKPOINT, 3, "1 suite on checkpoints left out: give --checkpoint CHILD"),
        (ENGINES, 1, "1 suite on engines left out: give --engines A B"),
    ],
    ids=SUBJECTS,
)
def test_without_a_subject_they_are_left_out_with_one_note(
    gates: Gates, deselected: int, note: str
) -> None:
    result = gates("--mode", "2-1")
    result.assert_outcomes(deselected=deselected)
    assert result.stdout.str().count(note) == 1


def test_other_suites_do_not_notice_those_that_were_left_out(project: Path, suites: Run) -> None:
    before = suites("--layers", "first")
    for subject in SUBJECTS.values():
        add(project, *subject.suites)
    after = suites("--layers", "first")
    assert before.ret == after.ret == pytest.ExitCode.OK
    before.assert_outcomes(passed=2, deselected=4)
    after.assert_outcomes(passed=2, deselected=4 + 5 + 3 + 1)
    complete = suites()
    assert complete.ret == pytest.ExitCode.OK
    assert header(project)["complete"], "what was left out was not asked for"


PAIR = CHECKPOINT.options
NPZ = ENGINES.options


@pytest.mark.parametrize(
    ("subject", "options", "says"),
    [
        (DUMP, ("--dump", "dmup"), "--dump 'dmup' is not there"),
        (DUMP, ("--dump", "qgate.toml"), "--dump 'qgate.toml' is a file: name the folder"),
        (DUMP, ("--dump", "suites"), "suites' is no dump: it has no dump.json"),
        (CHECKPOINT, ("--checkpoint", "chlid"), "--checkpoint 'chlid' is not there"),
        (CHECKPOINT, ("--checkpoint", "child", "--parent", "nowhere"), "--parent 'nowhere' is not there"),
        (CHECKPOINT, ("--checkpoint", "suites"), "suites' has no "),
        (CHECKPOINT, ("--checkpoint", "qgate.toml"), "qgate.toml' is a file that is not "),
        (CHECKPOINT, ("--checkpoint", "parent"), "holds no quantized weight and declares none; is it the parent"),
        (CHECKPOINT, ("--checkpoint", "child", "--parent", "child"), "is quantized itself: "),
        (CHECKPOINT, ("--checkpoint", "child", "--parent", "other"), "0 of 5 quantized weights are like their"),
        (CHECKPOINT, ("--parent", "parent"), "--parent 'parent' is of a checkpoint: give --checkpoint CHILD"),
        (CHECKPOINT, ("--checkpoint", "torn"), "torn"),
        (CHECKPOINT, (*PAIR, "--layers", "nine"), "--layers 'nine' matches no layer of checkpoint child: model.l"),
        (CHECKPOINT, ("--ckpt", "child"), "unrecognized arguments: --ckpt"),
        (CHECKPOINT, (*PAIR, "--recipe", "none.yaml"), "--recipe 'none.yaml' is not there"),
        (CHECKPOINT, ("--recipe", "qgate.toml"), "--recipe 'qgate.toml' is of a checkpoint: give --checkpoint"),
        (CHECKPOINT, ("--layout", "qgate.toml"), "--layout 'qgate.toml' is of a checkpoint: give --checkpoint"),
        (ENGINES, ("--engines", "trianer.npz", "rollout.npz"), "--engines 'trianer.npz' is not there"),
        (ENGINES, ("--engines", "trainer.npz"), "argument --engines: expected 2 arguments"),
        (ENGINES, ("--engines", "trainer.npz", "qgate.toml"), "qgate.toml' is no dump; files that can be"),
        (ENGINES, ("--engines", "trainer.npz", "shorter.npz"), "give two files of the same requests"),
        (ENGINES, ("--engines", "trainer.npz", "other.npz"), "the engines did not score the same tokens"),
        (ENGINES, ("--engines-weights", "a", "b"), "--engines-weights are those of engines: give --engines"),
        (ENGINES, (*NPZ, "--engines-weights", "a", "b"), "--engines-weights 'a' is not there"),
    ],
)  # fmt: skip
def test_bad_input_is_one_usage_error(
    house: Path, gates: Gates, subject: Subject, options: tuple[str, ...], says: str
) -> None:
    if subject is CHECKPOINT:
        write(house / "other", parent_tensors(seed=5), {})
        (house / "torn").mkdir()
        data = (house / "child" / "model.safetensors").read_bytes()
        (house / "torn" / "model.safetensors").write_bytes(data[:-100])
    if subject is ENGINES:
        runs.write_npz(house / "shorter.npz", runs.scored(samples=3))
        runs.write_npz(house / "other.npz", runs.scored(seed=3, samples=8))
    result = gates(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert sum(says in line and "error" in line.lower() for line in result.errlines) == 1
    assert not (house / "baselines").exists()


@pytest.mark.parametrize(
    ("subject", "name"), [(DUMP, "--dump 'dump'"), (CHECKPOINT, "--checkpoint 'child'")]
)
def test_a_folder_without_permission_is_a_usage_error(
    gates: Gates, monkeypatch: pytest.MonkeyPatch, subject: Subject, name: str
) -> None:
    """Root may read everything, so the system's answer is played here."""
    monkeypatch.setattr("qgate.storage.locations.os.access", lambda *_: False)
    result = gates(*subject.options[:2])
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*qgate: {name} cannot be read: permission denied.*"])


@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize(
    ("subject", "plant", "options", "site", "of", "fault"),
    [
        (
            CHECKPOINT,
            lambda house: planted(house / "child", house / "bad", double_scales),
            ("--checkpoint", "bad", "--parent", "parent", "--checkpoint-name", "child", "-n", "2"),
            f"{UP}.weight (checkpoint weights)",
            "child, mode weights",
            "all scales are 2 times too high: 44.6 dB worse than ideal",
        ),
        (
            ENGINES,
            lambda house: logits_pair(house / "bad", one_token),
            ("--engines", "bad/trainer.npz", "rollout.npz", "--engines-name", "mine"),
            "all tokens (engines tokens)",
            "mine, mode tokens",
            "token 31 of sample 2",
        ),
    ],
    ids=["checkpoint", "engines"],
)
def test_a_fault_is_the_first_line_everywhere(
    house: Path,
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subject: Subject,
    plant: Callable[[Path], object],
    options: tuple[str, ...],
    site: str,
    of: str,
    fault: str,
) -> None:
    plant(house)
    result = gates(*options, "--junitxml=junit.xml")
    result.assert_outcomes(failed=1, passed=subject.count - 1)
    result.stdout.fnmatch_lines(
        [
            f"{site} {fault}*",
            f"cause: {site.partition(' (')[0]} ({of}) {fault}*",
            f"FAILED {site.partition(' (')[0]} ({of}) * - suites/{subject.suites[0]}::*",
        ]
    )
    (failure,) = ET.parse(house / "junit.xml").getroot().iter("failure")
    assert failure.get("message", "").startswith(f"{site} {fault}")
    words = fault.partition(": ")[0]
    assert words in page(house)
    failed = next(row for row in records(house)[1:] if not row["passed"])
    name = f"{options[0]}-name"
    assert f"{name} {options[options.index(name) + 1]}" in failed["commands"]["again"]
    monkeypatch.chdir(house)
    assert main(["report", "qgate-out/results.jsonl"]) == 0
    assert words in capsys.readouterr().out


REGRESSIONS: dict[str, tuple[Subject, Callable[[Path], object], tuple[str, ...], str, str]] = {
    "dump": (
        DUMP,
        lambda house: write_dump(
            house / "later", change=at("layers.1.fc", "input", lambda t: t * 2)
        ),
        ("--dump", "later"),
        "log2_* at layers.1.fc:forward.input (dump values): 2x accepted, up to 1.52x allowed*",
        "numbers of a dump",
    ),
    "checkpoint": (
        CHECKPOINT,
        lambda house: planted(house / "child", house / "later", grow_scales(1.05)),
        ("--checkpoint", "later", "--parent", "parent", "--checkpoint-name", "child"),
        f"* at {UP}.weight (checkpoint weights): * accepted, *allowed*",
        "numbers of a checkpoint",
    ),
    "engines": (
        ENGINES,
        lambda house: logits_pair(house / "later", more_noise(1.2**0.5)),
        ("--engines", "later/trainer.npz", "rollout.npz", "--engines-name", "mine"),
        "kl * at all tokens (engines tokens): 2? % over accepted, 2 % al*",
        "numbers of two engines",
    ),
}


@pytest.mark.usefixtures("accepted")
@pytest.mark.parametrize(
    ("subject", "plant", "options", "line", "listed"), REGRESSIONS.values(), ids=REGRESSIONS
)
def test_a_regression_is_red_and_may_be_accepted(
    house: Path,
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    subject: Subject,
    plant: Callable[[Path], object],
    options: tuple[str, ...],
    line: str,
    listed: str,
) -> None:
    plant(house)
    result = gates(*options, *(("-n", "2") if subject is DUMP else ()))
    result.assert_outcomes(failed=1, passed=subject.count - 1)
    advice = f"  if intended: pytest suites/test_*.py {options[0]} {options[1]} *--update-*"
    result.stdout.fnmatch_lines([line, advice])
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates(*options).assert_outcomes(passed=subject.count)
    capsys.readouterr()
    assert main(["baselines", "verify"]) == 0
    assert main(["baselines", "list"]) == 0
    assert listed in capsys.readouterr().out


@each_subject
def test_candidates_need_no_baseline(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, subject: Subject
) -> None:
    gates(*subject.options).assert_outcomes(
        failed=subject.updated["updated"], passed=subject.updated.get("passed", 0)
    )
    monkeypatch.chdir(house)
    assert main(["baselines", "accept"]) == 0
    gates(*subject.options).assert_outcomes(passed=subject.count)


@share(3)
@pytest.mark.parametrize("under", ["suites", "../suites"])
@pytest.mark.parametrize(
    ("subject", "settings"),
    [
        (DUMP, 'dump = "dump"\ndump_name = "mine"\n'),
        (CHECKPOINT, 'checkpoint = "child"\nparent = "parent"\ncheckpoint_name = "mine"\n'),
        (ENGINES, 'engines = ["trainer.npz", "rollout.npz"]\nengines_name = "mine"\n'),
    ],
    ids=SUBJECTS,
)
def test_from_another_directory_and_from_the_settings(
    house: Path, gates: Gates, monkeypatch: pytest.MonkeyPatch, subject: Subject, settings: str, under: str
) -> None:  # fmt: skip
    (house / "qgate.toml").write_text(settings)
    if under != "suites":
        (house / "elsewhere").mkdir()
        monkeypatch.chdir(house / "elsewhere")
    back = under.removesuffix("suites")
    option = f"{subject.options[0]} {back}{subject.options[1]}"
    gates(at=under).stdout.fnmatch_lines([f"  to record it: pytest * {option} *"])
    assert gates("--update-baselines", at=under).parseoutcomes() == subject.updated
    assert (house / "baselines" / "mine" / "manifest.json").is_file()


@pytest.mark.usefixtures("accepted", "memory")
@pytest.mark.parametrize(
    ("subject", "names"), [(DUMP, ["dump"]), (CHECKPOINT, ["child", "parent"])]
)
def test_a_folder_by_url_is_the_folder(
    house: Path, gates: Gates, subject: Subject, names: list[str]
) -> None:
    """The accepted record of the folder is that of the URL."""
    for name in names:
        target = location_of(f"memory://bucket/{name}")
        for path in (house / name).rglob("*.*"):
            file = target / path.relative_to(house / name).as_posix()
            target.fs.pipe_file(file.path, path.read_bytes())
    options = [f"memory://bucket/{word}" if word in names else word for word in subject.options]
    result = gates(*options)
    result.assert_outcomes(passed=subject.count)
    assert options[1] in result.stdout.str()
    result = gates(options[0], f"{options[1]}x")
    assert f"{options[0]} '{options[1]}x' is not there." in result.stderr.str()
    if subject is DUMP:
        result = gates("--dump", "memory://bucket/dump/dump.json")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert "--dump 'memory://bucket/dump/dump.json' is a file" in result.stderr.str()
    settings = [f'{options[k][2:]} = "{options[k + 1]}"\n' for k in range(0, len(options), 2)]
    (house / "qgate.toml").write_text("".join(settings))
    gates().assert_outcomes(passed=subject.count)


@pytest.mark.parametrize(
    ("subject", "kind"),
    [(DUMP, "a dump"), (CHECKPOINT, "a checkpoint"), (ENGINES, "two engines")],
    ids=SUBJECTS,
)
def test_a_name_that_a_model_has_is_refused(
    project: Path, pytester: pytest.Pytester, subject: Subject, kind: str
) -> None:
    add(project, *subject.suites)
    subject.write(project)
    before = files(project)
    option = f"{subject.options[0]}-name"
    paths = [f"suites/{name}" for name in subject.suites]
    named = (*subject.options, option, "tiny-llama", "--update-baselines")
    result = pytester.runpytest_inprocess(*paths, *named)
    result.assert_outcomes(errors=subject.count)
    result.stdout.fnmatch_lines(
        [f"*is of a model, and what is measured is {kind}: give the *({option})*"]
    )
    assert files(project) == before
