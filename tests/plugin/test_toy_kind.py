"""A kind of gate that one file brings: collected, judged, accepted, and shown like those of qgate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from qgate.errors import QgateError
from qgate.project import gate_kinds
from qgate.project.gate_kinds import GateKind
from qgate.registry import Registry
from qgate.settings import setting
from tests.plugin.conftest import run_alone
from tests.plugin.projects import files, page, records
from tests.shares import proof

SUITE = """def test_boards(length_gate, board):
    length_gate.board(board)

def test_other(length_gate):
    length_gate.bord("oak")
"""
LENGTHS = ("-p", "toy_lengths", "-p", "no:cacheprovider", "--lengths", "lengths.json")


@pytest.fixture
def workshop(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of somebody who has installed the kind."""
    home = pytester.path
    monkeypatch.syspath_prepend(home)
    shutil.copy(Path(__file__).with_name("toy_gates.py"), home / "toy_lengths.py")
    (home / "suites").mkdir()
    (home / "suites" / "test_lengths.py").write_text(SUITE.partition("\n\n")[0])
    write_lengths(home, oak=3.0, ash=2.0)
    (home / "qgate.toml").write_text('lengths_name = "boards"\n')
    return home


def write_lengths(home: Path, **boards: float) -> None:
    (home / "lengths.json").write_text(json.dumps(boards))


def test_a_kind_of_one_file_is_judged_accepted_and_shown(
    pytester: pytest.Pytester, workshop: Path
) -> None:
    result = run_alone(pytester, "suites", *LENGTHS)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "qgate: *, lengths lengths.json as boards, *",
            "2 tests have no accepted errors yet; -v names all",
            "  to record it: pytest suites/test_lengths.py --lengths lengths.json "
            "--lengths-name boards --update-baselines",
        ]
    )
    result = run_alone(pytester, "suites", *LENGTHS, "--update-baselines")
    assert result.parseoutcomes() == {"updated": 2}
    assert files(workshop).keys() == {"boards/manifest.json", "boards/accepted/boards.txt"}
    assert json.loads(files(workshop)["boards/manifest.json"])["inputs"] == "lengths:"

    run_alone(pytester, "suites", *LENGTHS).assert_outcomes(passed=2)
    write_lengths(workshop, oak=3.0, ash=2.5)
    result = run_alone(pytester, "suites", *LENGTHS)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["log2_amax 2.5 > 2.03 at ash (lengths boards): 1.41x accepted*"])
    _, *rows = records(workshop)
    assert [(row["suite"], row["site"], row["passed"]) for row in rows] == [
        ("lengths", "oak", True), ("lengths", "ash", False),
    ]  # fmt: skip
    assert "test_boards[ash]" in page(workshop)
    assert "--lengths lengths.json" in rows[1]["commands"]["again"]

    (workshop / "qgate.toml").write_text(
        'lengths_name = "boards"\n[[limits.rules]]\nsites = "ash"\nregression = 0.5\n'
        'reason = "ash bends"\n'
    )
    run_alone(pytester, "suites", *LENGTHS).assert_outcomes(passed=2)
    one = run_alone(pytester, "suites", *LENGTHS, "--layers", "oak")
    one.assert_outcomes(passed=1, deselected=1)


@proof
def test_the_gates_of_a_kind_are_left_out_without_its_subject(
    pytester: pytest.Pytester, workshop: Path
) -> None:
    result = run_alone(pytester, "suites", *LENGTHS[:4])
    result.assert_outcomes(deselected=1)
    result.stdout.fnmatch_lines(["1 suite on lengths left out: give --lengths FILE"])
    missing = run_alone(pytester, "suites", *LENGTHS[:5], "gone.json")
    assert missing.ret == pytest.ExitCode.USAGE_ERROR
    missing.stderr.fnmatch_lines(["*--lengths 'gone.json' is not there*"])
    (workshop / "suites" / "test_lengths.py").write_text(SUITE)
    other = run_alone(pytester, "suites", *LENGTHS, "-k", "other")
    other.stdout.fnmatch_lines(["*there is no gate 'bord' here; there are board."])
    listing = run_alone(pytester, "--fixtures", *LENGTHS[:4]).stdout
    listing.fnmatch_lines(["length_gate*", "*Holds lengths against accepted ones."])
    listing.fnmatch_lines(["board*", "*A board of --lengths; *"])


class PlainKind(GateKind):
    """A kind of no gates."""

    name, fixture = "plain", "plain_gate"


PLAIN = PlainKind()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry of this test alone, which is not loaded yet."""
    monkeypatch.setattr(gate_kinds, "_KINDS", Registry("kind of gate"))
    monkeypatch.setattr(gate_kinds, "_LOADED", [])


def points(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    point = EntryPoint("plain", value, gate_kinds.GROUP)
    monkeypatch.setattr(gate_kinds, "entry_points", lambda group: [point] * (group == point.group))
    monkeypatch.setattr(gate_kinds, "_is_offered", lambda: True)


@pytest.mark.usefixtures("registry")
def test_entry_points_bring_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, f"{__name__}:PLAIN")
    assert [kind.name for kind in gate_kinds.gate_kinds()][-1] == "plain"


@pytest.mark.usefixtures("registry")
def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, "no_such_package:KIND")
    with pytest.raises(QgateError, match=r"'plain' of no_such_package:KIND cannot be loaded"):
        gate_kinds.gate_kinds()


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "fixture", "option", "words"),
    [
        ("dump", "plain_gate", "plain", "kind of gate 'dump' is registered twice"),
        ("plain", "dump_layer", "plain", "uses the fixture 'dump_layer', which is that of 'dump"),
        ("plain", "plain_gate", "mode", "has the option 'mode', which exists already"),
        ("plain", "plain_gate", "recipe", "has the option 'recipe', which exists already"),
    ],
)
def test_names_of_others_are_refused(name: str, fixture: str, option: str, words: str) -> None:
    kind = PlainKind()
    kind.name, kind.fixture = name, fixture
    kind.options = make_dataclass("More", [(option, bool, setting(False, "more"))])
    with pytest.raises(QgateError, match=words):
        gate_kinds.register(kind)
    assert name not in {other.name for other in gate_kinds.gate_kinds()} - {"dump"}
