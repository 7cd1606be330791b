"""Which modes a user means by names, groups and patterns, and what a wrong name is answered."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys

import pytest

from qgate.cli import main
from qgate.errors import QgateError
from qgate.modes.selection import GROUPS, find_mode, is_selected, names, own_mode, select
from tests.shares import proof, share

FAMILIES = ("mamba", "other")
EVERY = [(family, name) for family in FAMILIES for name in names(family)]


def chosen(wanted: str | list[str], family: str = "mamba", own: tuple[str, ...] = ()) -> list[str]:
    return [mode.name for mode in select(wanted, family, own)]


@share(6)
@pytest.mark.parametrize(("family", "name"), EVERY)
def test_every_mode_is_found_by_its_own_name(family: str, name: str) -> None:
    for spelling in (name, name.upper(), f"  {name} ", name.replace("-", "_")):
        assert find_mode(spelling, family).name == name
        assert chosen(spelling, family) == [name]


def test_there_are_the_modes_of_both_families() -> None:
    assert min(len(names("mamba")), len(names("other"))) > 30
    assert set(names()) == {*names("mamba"), *names("other")}
    assert len(names()) == len(set(names()))
    assert names()[0] == "fp32"


def test_one_name_may_be_two_modes() -> None:
    mamba, other = (find_mode("fp16", family) for family in FAMILIES)
    assert (mamba.basis, other.basis) == ("rotated", "plain")
    assert mamba.rules
    assert other.dtype == "float16"


@pytest.mark.parametrize("family", FAMILIES)
def test_groups(family: str) -> None:
    every = [
        name for name in names(family) if name != "fp32" and not find_mode(name, family).by_name
    ]
    assert chosen("all", family) == every
    assert chosen("quant_only", family) == [n for n in every if n not in ("fp16", "bf16")]
    assert chosen("fp_only", family) == ["fp32", "fp16"]
    essential = {"mamba": ["0", "2-1", "2-2", "2-4"], "other": ["mxfp8", "mxfp4", "int8"]}
    assert chosen("essential", family) == essential[family]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("query", [*GROUPS, "mx*", "mxfp8,INT8"])
def test_a_query_means_what_it_selects_without_a_model(query: str, family: str) -> None:
    every = names(family)
    meant = {name for name in every if name != "fp32" and is_selected(name, query, every)}
    assert meant == set(chosen(query, family)) - {"fp32"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", GROUPS)
def test_groups_know_no_case_and_no_space_around(group: str, family: str) -> None:
    assert chosen(f" {group.upper()} ", family) == chosen(group, family) != []


def test_lists_keep_the_order_and_name_each_mode_once() -> None:
    assert chosen("2-4,0, 2-4 ,essential") == ["2-4", "0", "2-1", "2-2"]
    assert chosen(["2-4", "0,2-1", "0"]) == ["2-4", "0", "2-1"]
    assert chosen("fp32,FP32, fp_only") == ["fp32", "fp16"]


@pytest.mark.parametrize(
    ("pattern", "family", "expected"),
    [
        ("2-*", "mamba", ["2-0", "2-1", "2-2", "2-3", "2-4"]),
        ("2-[13]", "mamba", ["2-1", "2-3"]),
        ("?", "mamba", ["0", "3", "4"]),
        ("MXFP8*", "other", ["mxfp8", "mxfp8_e5m2"]),
        (" *fp4 ", "other", ["mxfp4", "nvfp4"]),
        ("fp*", "other", ["fp8_e4m3", "fp16"]),
    ],
)
def test_patterns(pattern: str, family: str, expected: list[str]) -> None:
    assert chosen(pattern, family) == expected


@pytest.mark.parametrize(
    ("pattern", "family", "other"), [("kv-*", "other", "mamba"), ("state-*", "mamba", "")]
)
def test_modes_that_are_asked_for_by_name_are_in_no_group(
    pattern: str, family: str, other: str
) -> None:
    named = chosen(pattern, family)
    assert all(find_mode(name, family).by_name for name in named)
    assert chosen(f"{named[0]}, {named[1].replace('-', '_')}", family) == named[:2]
    for group_pattern in (*GROUPS, "*", "*fp8*", "?v-fp8", "[k]v-*", "[s]tate-*"):
        with contextlib.suppress(QgateError):
            assert not {*named} & {*chosen(group_pattern, family)}
    if not other:
        # States are in models of both families.
        assert chosen(pattern, "other") == named
        return
    with pytest.raises(QgateError, match="does not fit this model: it is for"):
        select(named[0], other)
    with pytest.raises(QgateError, match="matches no mode that fits this model"):
        select(pattern, other)


def test_a_pattern_never_means_the_reference() -> None:
    assert "fp32" not in chosen("*", "other")
    assert "fp32" not in chosen("*") == chosen("all")


@pytest.mark.parametrize("wanted", ["", "0,,2-1", ",", "0,", "0, ,2-1", [""], ["0", " "]])
def test_an_empty_part_is_an_error(wanted: str | list[str]) -> None:
    with pytest.raises(QgateError, match=r"^unknown mode ''\. Allowed: 0, 2-0, "):
        select(wanted, "mamba")


@pytest.mark.parametrize("wanted", [[], ()])
def test_no_wish_at_all_is_an_error_that_names_the_groups(wanted: list[str]) -> None:
    with pytest.raises(QgateError, match="no mode") as caught:
        select(wanted, "mamba")
    assert all(group in str(caught.value) for group in GROUPS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("given", "near"),
    [("mxfp9", "mxfp"), ("int", "int8"), ("essentials", "essential"), ("quant", "quant_only")],
)
def test_an_unknown_mode_is_answered_with_near_ones_and_all(
    given: str, near: str, family: str
) -> None:
    with pytest.raises(QgateError) as caught:
        select(f"mxfp8,{given}", family)
    text = str(caught.value)
    assert text.startswith(f"unknown mode {given!r}. Did you mean ")
    hint, _, allowed = text.partition(" Allowed: ")
    assert near in hint
    assert set(allowed.rstrip(".").split(", ")) == set(names(family))
    assert "\n" not in text


@pytest.mark.parametrize(
    ("given", "family", "kind"),
    [
        ("2-1", "other", "Mamba models"),
        ("2_1", "other", "Mamba models"),
        (" 6-4 ", "other", "Mamba models"),
    ],
)
def test_a_mode_that_does_not_fit_is_told_from_an_unknown_one(
    given: str, family: str, kind: str
) -> None:
    with pytest.raises(QgateError) as caught:
        select(given, family, model="my-model")
    text = str(caught.value)
    assert text.startswith(f"mode {given.strip()!r} does not fit my-model: it is for {kind}.")
    assert all(name in text for name in names(family))


@pytest.mark.parametrize(
    ("pattern", "family"), [("mxfp9*", "mamba"), ("2-*", "other"), ("7?", "mamba")]
)
def test_a_pattern_that_matches_nothing_lists_what_it_could(pattern: str, family: str) -> None:
    with pytest.raises(QgateError) as caught:
        select(["int8", pattern], family, model="my-model")
    text = str(caught.value)
    assert text.startswith(f"mode pattern {pattern!r} matches no mode that fits my-model: ")
    assert all(name in text for name in names(family) if name != "fp32")


def test_modes_of_a_model_are_chosen_like_others() -> None:
    own = ("My-Kernel", "w3")
    assert chosen("My-Kernel", own=own) == ["My-Kernel"]
    assert chosen("all", own=own)[-2:] == ["My-Kernel", "w3"]
    assert chosen("quant_only", own=own)[-2:] == ["My-Kernel", "w3"]
    assert chosen("my-*,w?", "other", own) == ["My-Kernel", "w8", "w4", "w3"]
    mode = select("w3", "mamba", own)[0]
    assert mode == own_mode("w3")
    assert mode.own
    assert not mode.is_reference
    assert not mode.calibrated
    with pytest.raises(QgateError, match=r"unknown mode 'w5'\..*My-Kernel.*w3"):
        select("w5", "mamba", own)
    with pytest.raises(QgateError, match="unknown mode 'w3'"):
        select("w3", "mamba")


def test_a_model_may_bring_its_own_int8() -> None:
    assert find_mode("int8", "other", own=["int8"]).own
    assert chosen("all", "other", ("int8",)).count("int8") == 1
    assert next(m for m in select("all", "other", ["int8"]) if m.name == "int8").own


@pytest.mark.parametrize("wanted", [None, "all", *GROUPS])
def test_the_command_lists_what_is_meant(
    wanted: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", "modes", *([wanted] if wanted else [])]) == 0
    table, _, groups_text = capsys.readouterr().out.partition("\n\n")
    listed = [line.split()[0] for line in table.splitlines()[2:]]
    expected = {n for family in FAMILIES for n in chosen(wanted or "all", family)}
    assert set(listed) == expected
    assert all(group in groups_text for group in GROUPS)
    assert "fp32" in groups_text


def test_the_list_says_for_which_models_a_mode_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "modes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:3] for line in lines]
    assert ["2-1", "mamba", "rotated"] in rows
    assert ["int8", "any", "plain"] in rows
    assert ["fp16", "mamba", "rotated"] in rows
    assert ["fp16", "other", "plain"] in rows


@pytest.mark.parametrize("name", names())
def test_what_a_mode_equals_exists_in_its_family(name: str) -> None:
    for family in FAMILIES:
        if name in names(family):
            mode = find_mode(name, family)
            assert all(find_mode(other, family).name == other for other in mode.equals)
            assert mode.about
            assert not re.search(r"[.!]$|\n", mode.about)


@proof
def test_choosing_modes_loads_no_torch() -> None:
    code = (
        "import sys; from qgate import modes; from qgate.modes.selection import select;"
        "from qgate.cli import main;"
        "select('all', 'mamba'); modes.find_mode('2-1', 'mamba'); modes.Rule('x', None);"
        "assert main(['show', 'modes', '2-*']) == 0 and main(['show', 'modes', 'nope']) == 2;"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pandas'} & set(sys.modules);"
        "sys.exit(' '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2-4" in done.stdout
    process = subprocess.run(
        [sys.executable, "-c", code.replace("heavy =", "sys.modules['torch'] = sys; heavy =")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode != 0
    assert "torch" in process.stderr
