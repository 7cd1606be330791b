"""The texts of a run on a terminal: at 80 and 160 columns, worst first, with any names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qgate.page.terminal import (
    TerminalLine,
    cut_middle,
    display_width,
    green_lines,
    is_green,
    other_cause_lines,
    red_lines,
    site_text,
    summary,
    table,
    tables,
    wrapped_lines,
)
from qgate.results import Tally
from qgate.results.coverage import undeclared_texts
from qgate.results.run_facts import other_tests_record
from tests.page.gate_records import HOSTILE
from tests.results.making import record
from tests.results.test_texts import MIXED, stored

SNAPSHOTS = Path(__file__).parent / "stored_texts"
# How to write them anew: remove the file, run this test, and look at what it wrote.


def check_snapshot(name: str, lines: list[TerminalLine]) -> None:
    path = SNAPSHOTS / f"{name}.txt"
    text = "".join(f"{line.color[:1] or ' '} {line.text}".rstrip() + "\n" for line in lines)
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was written: look at it, and run this again.")
    assert text == path.read_text(encoding="utf-8")


def real_like(failing: bool = True, models: tuple[str, ...] = ("tiny-mamba",)) -> Tally:
    """Three modes, failures of every kind, long metrics, grades of what is carried.

    Made here and not at random, since snapshots have every digit.
    """
    records = []
    for model in models:
        for m, mode in enumerate(("2-1", "mxfp8_e4m3", "int8")):
            for layer in range(4):
                error = 10.0 ** (m - 5) * (1 + layer)
                made_record = record(
                    f"backbone.layers.{layer}.mixer.in_proj:output", error, model=model, mode=mode,
                    layer=f"layers.{layer}", order=layer, node=f"{model} {mode} {layer}",
                    accepted={"relative_mse": error * (1 + 0.01 * m)},
                )  # fmt: skip
                if mode != "int8":
                    made_record["values"] |= {"mse": error * 0.7, "correlation": 1 - error}
                    made_record["grades"] = {"mse": "good", "correlation": "fair"}
                records.append(made_record)
    if failing:
        long, new, nan, worse = records[1], records[5], records[6], records[10]
        long["checks"][0] |= {
            "metric": "relative_mse@worst_channel",
            "value": 3.2e-4,
            "bound": 1.1e-5,
            "times": 29.1,
            "passed": False,
        }
        new["checks"][0] |= {"kind": "missing", "bound": None, "times": None, "passed": False}
        nan["checks"][0] |= {"kind": "nonfinite", "value": None, "times": None, "passed": False}
        worse["checks"][0] |= {
            "kind": "budget",
            "value": 2.5e-3,
            "bound": 1.02e-3,
            "times": 2.451,
            "passed": False,
        }
        for failing_record in (long, new, nan, worse):
            failing_record["passed"] = False
    return Tally(records)


def whole_header(**changed: Any) -> dict[str, Any]:
    """Return the header of a run that compared all of two modes."""

    def share(count: int) -> dict[str, int]:
        return {"held": count, "of": count}

    coverage = [
        {
            "model": "tiny-mamba", "mode": mode, "modules": share(30), "outputs": share(1),
            "layers": share(5), "tokens": share(5120), "unit": "tokens", "uncovered": [],
        }
        for mode in ("2-1", "int8")
    ]  # fmt: skip
    power = [
        {"model": "tiny-mamba", "mode": mode, "defects": [
            {"kind": "weight", "size": 2.0**-24, "site": "a"},
            {"kind": "channel", "size": size, "site": "a"},
            {"kind": "task", "size": 0.0213, "site": "logits"},
        ]}
        for mode, size in (("2-1", 0.00059), ("int8", 0.02))
    ]  # fmt: skip
    extent = {
        "gates": 12, "judged": 12, "omitted": [], "allowed": False, "fails": False,
        "coverage": coverage,
    }  # fmt: skip
    return {"extent": extent, "power": power, **changed}


def test_a_green_run_is_said_in_a_few_lines() -> None:
    tally, header = real_like(failing=False), whole_header()
    assert is_green(tally, header)
    texts = [line.text for line in green_lines(tally, 80, header, ["dumps", "23 of 28 formats"])]
    assert texts == [
        "12 gates passed: modes 2-1, int8 of tiny-mamba; 60/60 modules, 10/10 layers, 2/2",
        "  outputs",
        "  would have seen: in int8, which sees least of 2 modes: a channel off by 2 %,",
        "    0.021 bits per byte",
        "  not asked for: dumps, 23 of 28 formats (-v says how)",
    ]


def test_what_improved_is_one_line_of_a_green_run() -> None:
    better = record("a:output", 1e-5, accepted={"relative_mse": 2e-5}, node="better")
    better["checks"][0]["improved"] = True
    tally = real_like(failing=False)
    tally.add(better)
    assert is_green(tally, whole_header())
    texts = [line.text for line in green_lines(tally, 80, whole_header(), [])]
    assert "  1 improved: bank it with --update-baselines" in texts
    assert len(texts) == 5


def test_kernels_that_declare_nothing_are_named() -> None:
    header = whole_header()
    header["extent"]["coverage"][1]["undeclared"] = True
    words = (
        "int8 does not say what it stands for: what was recorded first is taken for right "
        '(Kernel(build, stands_for="int8"))'
    )
    for lines in (green_lines, red_lines):
        texts = [line.text for line in lines(real_like(failing=False), 400, header, [])]
        assert words in [text.strip() for text in texts]
    assert undeclared_texts(header) == [words]
    assert undeclared_texts(whole_header()) == []


def test_what_a_green_run_left_out_is_named_with_as_many_names_as_there_is_room_for() -> None:
    left_out = {
        "cause": "skipped", "reason": "needs a GPU", "model": "tiny-mamba", "mode": "int8",
        "places": [f"backbone.layers.{number}" for number in range(9)], "gates": 9,
    }  # fmt: skip
    header = whole_header()
    header["extent"] |= {"gates": 21, "omitted": [left_out]}
    tally = real_like(failing=False)
    assert is_green(tally, header)
    texts = [line.text for line in green_lines(tally, 80, header, [])]
    assert texts[2:4] == [
        "  gates held: 12 of 21; 9 skipped: needs a GPU (int8 at backbone.layers.0,",
        "    backbone.layers.1, backbone.layers.2 and 6 more)",
    ]
    (text,) = (line.text for line in green_lines(tally, 60, header, []) if "held" in line.text)
    assert text == "  gates held: 12 of 21; 9 skipped: needs a GPU (-v says all)"
    header["extent"]["fails"] = True
    assert not is_green(tally, header)


@pytest.mark.parametrize(
    "changed",
    [
        {"shard": "1/2"},
        {"exit": None},
        {"exit": 1},
        {"other": other_tests_record({"test_a": "failed"}, {"test_a": "broken"})},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_is_not_wholly_green_is_said_at_length(changed: dict[str, Any]) -> None:
    assert not is_green(real_like(failing=False), whole_header(**changed))
    assert not is_green(real_like(), whole_header())


@pytest.mark.parametrize("width", [40, 80])
def test_a_red_run_is_said_in_a_few_lines(width: int) -> None:
    lines = red_lines(real_like(), width, whole_header(), "qgate-out/repro")
    assert all(display_width(line.text) <= width for line in lines)
    check_snapshot(f"red-{width}", lines)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("kind", ["summary", "tables"])
def test_the_texts_of_a_run(kind: str, width: int) -> None:
    lines = {"summary": summary, "tables": tables}[kind](real_like(), width)
    assert all(display_width(line.text) <= width for line in lines)
    check_snapshot(f"{kind}-{width}", lines)


@pytest.mark.parametrize("width", [80, 160])
def test_the_texts_of_a_green_run(width: int) -> None:
    tally = real_like(False, ("tiny-mamba", "tiny-llama"))
    assert tally.counts.failed == 0
    check_snapshot(f"green-{width}", summary(tally, width))


def test_the_cause_comes_first_then_counts_and_other_causes() -> None:
    other = record("fine", 9.9e-5, mode="1")
    # Each in a mode of its own, so that none follows from another.
    alone = [{**stored(entry), "mode": f"m{number}"} for number, entry in enumerate(MIXED)]
    lines = summary(Tally([*alone, other]), 150)
    texts = [line.text for line in lines]
    assert texts[0].startswith("cause: count (tiny, mode m7) is out of its limit: nonfinite 2")
    assert texts[1].startswith("6 of 10 gates failed, 1 new, 6 faults in m")
    assert "comparisons: 3 passed, 7 failed | 11 check" in texts[1]
    failed = [text for text in texts if text.startswith("failed: ")]
    assert {text.split()[1] for text in failed} == {"nan", "none", "above-zero", "ten", "twice"}
    assert (
        "failed: ten (tiny, mode m3) is out of its limit: relative_mse 1.00e-03, limit <= 1.02e-04, "
        "9.8x its limit (regression)"
    ) in failed
    (unknown,) = [text for text in texts if text.startswith("no accepted errors yet")]
    assert "for 1 comparison (tiny m4): record them with --update-baselines" in unknown
    assert not any("bank it" in text for text in texts), "one advice, and it is to mend the cause"


def test_failures_that_follow_are_folded() -> None:
    later = [record(f"layers.{n}:output", 1.0, order=n, layer=f"layers.{n}") for n in range(2, 6)]
    cause = record("layers.2.up:output", 3e-4, order=2, layer="layers.2", scope="local")
    for failure in (cause, *later):
        failure["node"] = f"test[{failure['layer']}]"
    texts = [line.text for line in summary(Tally([*later, cause]), 150)]
    assert texts[0].startswith("cause: layers.2.up:output (tiny, mode 2-1) is out of its limit: ")
    assert "; follow from it: 3 layers" in " ".join(" ".join(texts[:2]).split())
    assert not any(text.startswith("failed: ") for text in texts)


def test_what_is_left_out_is_counted() -> None:
    many = Tally(record(f"s{n}", 1.0 + n, mode=f"m{n}") for n in range(14))
    texts = [line.text for line in summary(many, 150, modes=3, rows=3)]
    assert sum(text.startswith("failed: ") for text in texts) == 3
    assert "+10 more causes in results.jsonl" in texts
    assert "+11 more modes" in texts
    more_rows = [line.text for line in tables(many, 150, modes=13, rows=14)]
    assert "+1 more mode" in more_rows
    assert not any("more in results" in text for text in more_rows)
    one = Tally(record(f"s{n}", 1.0 + n, node="one") for n in range(500))
    assert [line.text for line in tables(one, 150)][-1] == "+480 more in results.jsonl"


def test_nothing_is_not_a_success() -> None:
    assert [(line.text, line.color) for line in summary(Tally(), 80)] == [
        ("nothing was compared", "red")
    ]


def test_a_line_of_a_failure_has_metric_value_limit_and_layer_at_every_width() -> None:
    long = record(
        "backbone.layers.7.mixer.some.very.deep.module.in_proj:output",
        1e-3,
        layer="layers.7",
        model="a-model-with-a-name",
        mode="mxfp8_e4m3_with_more",
    )
    (cause,) = Tally([long]).causes
    for width in (*range(60, 260, 7), 80):
        lines = [line.text for line in other_cause_lines(cause, width)]
        texts = " ".join(" ".join(lines).split())
        assert all(display_width(text) <= width for text in lines)
        for part in ("failed: ", "layers.7", "relative_mse 1.00e-03", "limit <= 1.02e-04", "9.8x"):
            assert part in texts, (width, lines)
    assert len(other_cause_lines(cause, 250)) == 1


@pytest.mark.parametrize(
    ("site", "layer", "width", "expected"),
    [
        ("a.layers.1.fc:output", "layers.1", 30, "a.layers.1.fc:output"),
        ("backbone.layers.1.fc:output", "layers.1", 24, "…layers.1.fc:output"),
        ("backbone.layers.1.mixer.in_proj:output", "layers.1", 24, "…layers.1…in_proj:output"),
        ("layers.1.mixer.in_proj.long:output", "layers.1", 20, "layers.1…long:output"),
        ("backbone.layers.1.fc:output", "layers.1", 9, "layers.1"),
        ("something.without.a.layer:output", "layers.1", 16, "somet…yer:output"),
        ("something.without.a.layer:output", "", 16, "somet…yer:output"),
    ],
)  # fmt: skip
def test_a_site_keeps_its_layer(site: str, layer: str, width: int, expected: str) -> None:
    text = site_text(site, layer, width)
    assert display_width(text) <= width
    assert text == expected


@given(st.text(), st.text(max_size=8), st.integers(3, 60))
def test_names_fit_and_are_printable(name: str, layer: str, width: int) -> None:
    for text in (site_text(name, layer, width), cut_middle(name, width)):
        assert display_width(text) <= width
    assert site_text(name, layer, width).isprintable()


@settings(max_examples=40)
@given(st.text(max_size=60), st.integers(60, 170))
@example(name="##[", width=60)
@example(name="##[ ::" * 8, width=60)
def test_nothing_of_a_name_reaches_the_terminal(name: str, width: int) -> None:
    tally = Tally([record(name, 1.0, mode=name, model=name, layer=name, scope=name), record("b")])
    for lines in (summary(tally, width), tables(tally, width)):
        for line in lines:
            assert line.text.isprintable()
            assert display_width(line.text) <= width + 1
            assert not line.text.lstrip().startswith("::")


def test_hostile_names_are_shown_as_they_are() -> None:
    records = [
        record(name, 1.0, mode=name, model=name, scope=name)
        for name in (*HOSTILE, "::error::x", "##vso[task.complete]", "a\n::error::b")
    ]
    for width in (80, 160):
        texts = [line.text for line in tables(Tally(records), width)]
        text = "\n".join(texts)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "<script>" in text
        assert not any(line_text.lstrip().startswith("::") for line_text in texts)
        assert "##vso[" not in text


def test_sentences_break_between_words() -> None:
    texts = [line.text for line in wrapped_lines(["one two " * 20, "x" * 150], 80)]
    assert all(len(text) <= 80 for text in texts)
    assert "".join(texts).count("one") == 20
    assert not any(text.endswith(" o") for text in texts)


def test_a_number_keeps_its_sign_and_a_command_is_whole() -> None:
    words = "  would have seen: a channel off by 1 %, a token by 0.00021 %"
    command = "  again: python qgate-out/repro/layers.0.up.output.mine/run.py"
    for width in range(40, 61):
        texts = [line.text for line in wrapped_lines([words, command], width)]
        assert texts[-1] == command
        assert not any(text.lstrip().startswith("%") for text in texts)
        assert all(text.startswith("    ") for text in texts[1:-1])


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    assert table(["a", "n"], [["x\n  y", "1"], ["z", "22"]], numbers=(1,)) == [
        "a     n",
        "---  --",
        "x     1",
        "  y",
        "z    22",
    ]


def test_colors_only_where_asked() -> None:
    assert TerminalLine("x", "red").colored(True) == "\x1b[31mx\x1b[0m"
    assert TerminalLine("x", "red").colored(False) == "x"
    assert TerminalLine("x").colored(True) == "x"


def test_what_a_tally_keeps_does_not_grow_with_records() -> None:
    """A file of any size is summed up in the memory of its tests."""
    big: dict[str, Any] = record("a", 1.0, node="one", pictures=[{"x": "y" * 1000}])
    tally = Tally({**big, "site": f"s{n}"} for n in range(2000))
    assert "yyyy" not in repr(vars(tally))
    assert len(tally.failures) <= 80
