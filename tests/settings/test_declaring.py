"""A setting is one field: command line, TOML, environment variable and help come from it."""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from typing import Any, Literal, cast

import pytest

import qgate
from qgate.activation_stats.settings import ActivationSettings
from qgate.collecting.settings import CollectSettings, CollectSwitches
from qgate.documents import toml
from qgate.engines.findings import EngineLimits
from qgate.errors import QgateError
from qgate.gate import Limits
from qgate.project.gate_kinds import gate_kinds
from qgate.project.options import CommandSettings, FileSettings, RunSettings
from qgate.settings import (
    Form,
    add_options,
    check_values,
    pattern,
    read_environment,
    setting,
    settings_of,
    typed_values,
)
from qgate.sweeps.settings import SweepSettings


@dataclass(frozen=True)
class Oven:
    """Settings of an oven."""

    degrees: int = setting(180, "how hot it gets", "N", low=30, high=300, variable="OVEN_DEGREES")
    fan: bool = setting(False, "turn on the fan")
    trays: tuple[str, ...] = setting(("top",), "trays to use", "NAMES")
    grill: Literal["off", "low", "high"] = setting("off", "the grill")
    minutes: float | None = setting(None, "how long it bakes (default: until it is done)", above=0)
    racks: int | Literal["all"] = setting("all", "racks to heat", low=1)
    corners: tuple[int, int] = setting((1, 2), "corners to measure in", "A B")
    recipe: str | None = setting(None, "file of a recipe", is_path=True)
    dish: str = setting(".", "which dish", check=pattern, allowed_as="a regular expression")


def parsed(declaration: Any, *words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, declaration)
    return typed_values(parser.parse_args([*words]), declaration)


def read_toml(declaration: Any, text: str) -> dict[str, Any]:
    settings = settings_of(declaration)
    return {name: settings[name].read(value) for name, value in toml(text).items()}


def test_a_new_setting_is_one_field() -> None:
    """It is on the command line, in TOML, in the environment and in help, and its default holds."""
    smoke = ("smoke", int, setting(3, "how much smoke", "S", low=1, variable="OVEN_SMOKE"))
    more: Any = make_dataclass("More", [smoke], bases=(Oven,), frozen=True)
    assert parsed(more, "--smoke", "7") == {"smoke": 7}
    assert read_toml(more, "smoke = 7") == {"smoke": 7}
    assert read_environment(more, {"OVEN_SMOKE": "7"}) == {"smoke": 7}
    parser = argparse.ArgumentParser()
    add_options(parser, more)
    assert "--smoke S" in parser.format_help()
    assert "how much smoke (default: OVEN_SMOKE, or else 3)" in parser.format_help()
    assert more().smoke == 3
    for read in (
        lambda: parsed(more, "--smoke", "0"),
        lambda: read_toml(more, "smoke = 0"),
        lambda: read_environment(more, {"OVEN_SMOKE": "0"}),
        lambda: check_values(more(smoke=0)),
    ):
        with pytest.raises((QgateError, argparse.ArgumentError), match="a whole number from 1"):
            read()


def test_words_of_a_command_line() -> None:
    words = "--degrees 200 --fan --trays top,low --grill high --minutes 1e1 --racks 2 --corners 3 4"
    assert parsed(Oven, *words.split()) == {
        "degrees": 200, "fan": True, "trays": ("top", "low"), "grill": "high", "minutes": 10.0,
        "racks": 2, "corners": ["3", "4"],
    }  # fmt: skip
    assert parsed(Oven) == {}
    assert parsed(Oven, "--racks", "all") == {"racks": "all"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("degrees", "how hot it gets (default: OVEN_DEGREES, or else 180)"),
        ("fan", "turn on the fan"),
        ("trays", "trays to use (default top)"),
        ("grill", "the grill (default off)"),
        ("minutes", "how long it bakes (default: until it is done)"),
        ("corners", "corners to measure in (default 1,2)"),
        ("recipe", "file of a recipe"),
    ],
)
def test_help_says_the_default_once(name: str, words: str) -> None:
    assert settings_of(Oven)[name].argparse["help"] == words


def test_a_variable_that_is_empty_says_nothing() -> None:
    assert read_environment(Oven, {"OVEN_DEGREES": " ", "DEGREES": "3"}) == {}
    with pytest.raises(QgateError, match=r"^OVEN_DEGREES='hot' is not allowed; it is a whole numb"):
        read_environment(Oven, {"OVEN_DEGREES": "hot"})


@pytest.mark.parametrize(
    ("name", "typed", "loose", "strict"),
    [
        ("degrees", "200", 200, 200),
        ("fan", "yes", "yes", True),
        ("minutes", "1e1", "1e1", 10.0),
        ("minutes", "null", "null", None),
        ("trays", "top, low", ["top", "low"], ["top", "low"]),
        ("trays", "top", "top", "top"),
        ("racks", "all", "all", "all"),
        ("corners", "1,2", [1, 2], [1, 2]),
        ("dish", "a|b", "a|b", "a|b"),
    ],
)
def test_one_value_as_each_source_writes_it(name: str, typed: Any, loose: Any, strict: Any) -> None:
    sources: Mapping[Form, Any] = {"typed": typed, "loose": loose, "strict": strict}
    values = {settings_of(Oven)[name].read(raw, form) for form, raw in sources.items()}
    assert len(values) == 1


@pytest.mark.parametrize(
    ("name", "raw", "form", "message"),
    [
        ("degrees", "200", "loose", "degrees = '200' is not allowed; it is a whole number from 30 to 300."),
        ("degrees", True, "strict", "degrees = True is not allowed; it is a whole number from 30 to 300."),
        ("degrees", 301, "strict", "degrees = 301 is not allowed; it is a whole number from 30 to 300."),
        ("fan", "yes", "strict", "fan = 'yes' is not allowed; it is true or false."),
        ("minutes", "1e1", "strict", "minutes = '1e1' is not allowed; it is a number above 0."),
        ("minutes", 0, "loose", "minutes = 0 is not allowed; it is a number above 0, or null."),
        ("minutes", float("nan"), "strict", "minutes = nan is not allowed; it is a number above 0."),
        ("trays", [], "strict", "trays = [] is not allowed; it is a text or a list of texts."),
        ("trays", [1], "loose", "trays = [1] is not allowed (it is int; quote a text); it is a text or a list"),
        ("grill", "max", "strict", "grill = 'max' is not allowed; it is one of off, low, high."),
        ("racks", 0, "strict", "racks = 0 is not allowed; it is a whole number from 1, or all."),
        ("corners", [1], "strict", "corners = [1] is not allowed; it is a list of two whole numbers."),
        ("recipe", 3, "strict", "recipe = 3 is not allowed; it is a path."),
        ("recipe", "", "strict", "recipe = '' is not allowed (it is empty); it is a path."),
        ("dish", "(", "strict", "dish = '(' is not allowed (missing ), unterminated subpattern at position 0); it is a regular expression."),
        ("dish", 70 * "((", "strict", "…"),
    ],
)  # fmt: skip
def test_a_refusal_repeats_the_value_and_says_what_is_allowed(
    name: str, raw: Any, form: Form, message: str
) -> None:
    with pytest.raises(QgateError) as caught:
        settings_of(Oven)[name].read(raw, form)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def test_sections_are_dotted_and_fields_without_a_setting_are_none() -> None:
    @dataclass(frozen=True)
    class Bare:
        number: int = 3

    kitchen: Any = make_dataclass("Kitchen", [("oven", Oven, Oven()), ("bare", int, 3)])
    assert list(settings_of(kitchen))[:2] == ["oven.degrees", "oven.fan"]
    assert "bare" not in settings_of(kitchen)
    assert not settings_of(cast(Any, Bare))


def test_a_type_without_a_reader_is_no_setting() -> None:
    broken: Any = make_dataclass("Broken", [("names", dict, setting(None, "some names"))])
    with pytest.raises(TypeError, match="a setting of type"):
        settings_of(broken)


def refused_defaults(*declarations: Any) -> list[str]:
    """List settings whose default is not allowed, or whose help says it a second time."""
    refused = []
    for declaration in declarations:
        for name, of in settings_of(declaration).items():
            try:
                of.read(of.default) if of.default not in (None, (), "") else None
            except QgateError as error:
                refused.append(f"{declaration.__name__}.{name}: {error}")
            if f"(default {of.default})" in of.help or (
                of.help_text == of.help and "(default)" in of.help
            ):
                refused.append(f"{declaration.__name__}.{name}: its help repeats the default")
    return refused


def test_every_default_is_allowed_and_stands_once() -> None:
    kinds = [kind.options for kind in gate_kinds()]
    own = (RunSettings, CommandSettings, FileSettings, CollectSwitches, CollectSettings,
           SweepSettings, EngineLimits, ActivationSettings, Limits)  # fmt: skip
    assert not refused_defaults(*own, *kinds)
    wrong: Any = make_dataclass(
        "Wrong", [("a", int, setting(0, "a", low=1)), ("b", int, setting(1, "b (default 1)"))]
    )
    assert len(refused_defaults(wrong)) == 2


def test_no_setting_is_declared_twice() -> None:
    declared = [RunSettings, CommandSettings, FileSettings, *{k.options for k in gate_kinds()}]
    names = [name for declaration in declared for name in settings_of(declaration)]
    assert len(names) == len(set(names))


def test_a_function_has_the_signature_and_help_of_its_settings() -> None:
    parameters = inspect.signature(qgate.collect).parameters
    assert list(parameters)[:2] == ["model", "folder"]
    for name, of in settings_of(CollectSettings).items():
        assert parameters[name].default == of.default
        assert re.search(rf"^{name} +\S", qgate.collect.__doc__ or "", re.MULTILINE)
    with pytest.raises(TypeError, match="iteration"):
        qgate.collect(None, "dump", iteration=1)  # type: ignore[arg-type, call-arg]


def test_the_command_line_loads_settings_without_torch() -> None:
    program = "import sys, qgate.cli; qgate.cli.parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
