"""The size of the command line, and what became of commands and options of earlier versions."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from qgate.cli import GROUPS, main, parser
from qgate.cli._moved import COMMANDS
from qgate.cli._settings import setting
from qgate.errors import QgateError
from qgate.project.options import OPTIONS, SETTINGS
from qgate.project.settings import read_project
from tests.cli.test_options import LEAVES

Capsys = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("here")
SHARED = {"--help", "--quiet", "--color"}


def options_of(command: argparse.ArgumentParser) -> list[str]:
    """Return the options that the help of a command lists, but those of all commands."""
    public_actions = [action for action in command._actions if action.help != argparse.SUPPRESS]
    names = [
        max(action.option_strings, key=len) for action in public_actions if action.option_strings
    ]
    return [name for name in names if name not in SHARED]


def too_many(commands: dict[tuple[str, ...], argparse.ArgumentParser]) -> list[str]:
    return [" ".join(words) for words, command in commands.items() if len(options_of(command)) > 12]


def test_no_command_has_more_than_twelve_options() -> None:
    assert too_many(LEAVES) == []
    thirteen = argparse.ArgumentParser()
    for number in range(13):
        thirteen.add_argument(f"--o{number}")
    assert too_many({("more",): thirteen}) == ["more"]


def test_there_are_at_most_fourteen_commands_each_in_one_group(capsys: Capsys) -> None:
    names = {words[0] for words in LEAVES}
    grouped = [name for group in GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(names)
    assert 12 <= len(names) <= 14
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line[:-1] for line in lines if line[:-1] in GROUPS]
    assert titles == list(GROUPS)
    for title, group in GROUPS.items():
        after = lines[lines.index(f"{title}:") + 1 :]
        listed = [line.split()[0] for line in after[: after.index("")] if line[2:3].strip()]
        assert tuple(listed) == group


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("before", [(), ("help",)], ids=["run", "help"])
def test_a_command_of_an_earlier_version_says_what_to_use(
    name: str, before: tuple[str, ...], capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*before, name, "x", "--mode", "y"])
    error = capsys.readouterr().err
    assert (stop.value.code, error.count("\n")) == (2, 1)
    assert f"use `{COMMANDS[name]}`" in error
    words = COMMANDS[name].split()[1:]
    assert any(leaf[: len(leaf)] == tuple(words[: len(leaf)]) for leaf in LEAVES)


@pytest.mark.parametrize(
    ("line", "replacement"),
    [
        ("dumps draw dump --layer 3", "--where layer=N"),
        ("dumps ls dump --quant-type=x", "--where quant_type=NAME"),
        ("dumps compare a b --engine ray", "--set engine=E, or engine in qgate.toml"),
        (
            "sweep a.pt --scale-bits 4",
            "--set sweep_scale_bits=B, or sweep_scale_bits in qgate.toml",
        ),
        ("sweep a.pt --axis 4", "--set sweep_axis=N, or sweep_axis in qgate.toml"),
        ("layers capture --percentile-alpha 1", "--set percentile_alpha=A, or percentile_alpha in"),
        ("layers calibrate --arithmetic fp16", "--set calib_arithmetic=VALUE, or calib_arithmetic"),
        ("activations --gpus-per-task 1", "--set gpus_per_task=X, or gpus_per_task in qgate.toml"),
        ("collect --sample 7 -- a.py", "the variable CURRENT_SAMPLE_IDX=N"),
        ("collect --counted all -- a.py", "counted = N in qgate.toml"),
    ],
)
def test_an_option_of_an_earlier_version_says_what_to_use(
    line: str, replacement: str, capsys: Capsys
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    error = capsys.readouterr().err
    assert (stop.value.code, error.count("\n")) == (2, 1)
    assert "is no option any more: use " + replacement in error


def test_a_setting_is_as_typed_else_that_of_the_project_else_its_default() -> None:
    Path("qgate.toml").write_text('sweep_scale_bits = 5\ncalib_samples = 7\nengine = "ray"\n')
    words = ["--set", "sweep_scale_bits=4", "--set", "sweep_axis=-2"]
    args = parser().parse_args(["sweep", "a.pt", *words])
    names = ("sweep-scale-bits", "sweep-axis", "sweep-block", "engine")
    assert [setting(args, name) for name in names] == [4, -2, 32, "ray"]
    assert setting(parser().parse_args(["sweep", "a.pt"]), "sweep-scale-bits") == 5
    args = parser().parse_args(["layers", "capture", "--set", "percentile_alpha=0.9"])
    assert [setting(args, name) for name in ("percentile-alpha", "calib-samples")] == [0.9, 7]


def test_every_setting_stands_in_a_file_and_none_is_an_option_of_a_run() -> None:
    assert not SETTINGS.keys() & OPTIONS.keys()
    for name, option in SETTINGS.items():
        value = f'"{option.default}"' if isinstance(option.default, str) else option.default
        Path("qgate.toml").write_text(f"{name.replace('-', '_')} = {value}\n")
        assert read_project(Path()).options == {name: option.default}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sweep_block", "write sweep_block=VALUE, where the value is a whole number"),
        ("sweep_block=x", "sweep_block = 'x' is not allowed; it is a whole number from 1"),
        ("sweep_block=0", "sweep_block = '0' is not allowed; it is a whole number from 1"),
        ("sweep_alignment=no", "it is one of exact, documented"),
        ("sweep_blok=3", "unknown setting 'sweep_blok'. Did you mean sweep_block"),
        ("calib_samples=3", "unknown setting 'calib_samples'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(text: str, words: str, capsys: Capsys) -> None:
    Path("a.npy").touch()
    try:
        status = main(["sweep", "a.npy", "--set", text])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert words in capsys.readouterr().err


def test_a_setting_of_another_kind_is_refused_in_the_file() -> None:
    Path("qgate.toml").write_text('sweep_alignment = "no"\n')
    with pytest.raises(QgateError, match="it is one of exact, documented"):
        read_project(Path())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer", "'layer': write FIELD=VALUE"),
        ("layer=3,", "'': write FIELD=VALUE"),
        ("layer=x", "layer is a whole number from 0"),
        ("layr=3", "unknown field 'layr'. Did you mean layer"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(text: str, words: str, capsys: Capsys) -> None:
    with pytest.raises(SystemExit):
        main(["dumps", "ls", "dump", "--where", text])
    assert words in capsys.readouterr().err


def test_conditions_of_one_field_are_alternatives() -> None:
    from qgate.cli._dump_selection import selected_fields

    words = ["--where", "layer=3,name=grad_*", "--where", "layer=4,layer-type=linear"]
    args = parser().parse_args(["dumps", "draw", "dump", *words])
    assert selected_fields(args) == {
        "layer": [3, 4], "name": ["grad_*"], "layer_type": ["linear"],
    }  # fmt: skip
