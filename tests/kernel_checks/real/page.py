"""The page of real kernels: what was checked, what was found, and what `check_kernel` said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.kernel_checks.real.collection import LEFT_OUT, REMARKS, ROOMS
from tests.kernel_checks.real.verdicts import RIGHT, Verdict

PAGE = Path(__file__).resolve().parents[3] / "docs" / "real-kernels.md"
INTRO = """# Real kernels

Is `check_kernel` green on right code that others wrote, and red where it is wrong? This page answers for {right} kernels
of {packages} packages, as they stand in the published versions below, and for {faults} faults that were planted in them.
`like` is what a user of the package would write: plain operators on plain tensors. No check declares a coarser
arithmetic. `python -m tests.kernel_checks.real` runs all of them on a CPU, `--write docs/real-kernels.md` writes this page,
and each run of the tests checks a share of it anew. Kernels in Triton run in Triton's interpreter, which has no bf16 and casts to FP8
wrongly; they are checked in fp16 and float32.

{versions}

{summary}
"""
HEADINGS = {
    "bugs": "## Bugs found in published code",
    "right": "## Right kernels",
    "faults": "## Planted faults",
    "missed": "## What is missed",
    "left out": "## What could not run",
}


def make_page(verdicts: Sequence[Verdict]) -> str:
    """Return the whole page of a run over all rooms."""
    order = {room.distribution: number for number, room in enumerate(ROOMS)}
    verdicts = sorted(verdicts, key=lambda v: order.get(v.package.partition(",")[0], 0))
    right = [verdict for verdict in verdicts if verdict.fault == RIGHT]
    bugs = [verdict for verdict in verdicts if verdict.is_bug]
    faults = [v for v in verdicts if v.fault != RIGHT and not v.is_bug]
    packages = dict.fromkeys(room.distribution for room in ROOMS)
    versions = _table(["package", "version"], [[name, _version(name)] for name in packages])
    intro = INTRO.format(
        right=len(right), packages=len(packages), faults=len(faults),
        versions=versions, summary=_summary(right, faults),
    )  # fmt: skip
    parts = [
        intro.strip(),
        HEADINGS["bugs"],
        "Each of these is the package's own code, checked as it stands.",
        _table(
            ["package", "kernel", "what is wrong", "first line"],
            [[v.package, v.kernel, v.fault, _code(v.first_line)] for v in bugs],
        ),
        HEADINGS["right"],
        "*Named* is what the report says of the kernel: the convention of each quantized argument, and the arithmetic "
        "or the rounding of intermediate results that explains it.",
        _table(
            ["package", "kernel", "verdict", "named"],
            [[v.package, v.kernel, _word(v), _said(v)] for v in right],
        ),
        HEADINGS["faults"],
        "*Named* means that the first line holds the cause, or the place and the size of the error. *Red* means that it does "
        "not, or that there is no single good line.",
        _table(
            ["package", "kernel", "fault", "verdict", "first line"],
            [[v.package, v.kernel, v.fault, _word(v), _code(v.first_line)] for v in faults],
        ),
        HEADINGS["missed"],
        _missed(right, faults),
        "\n".join(["Remarks:", "", *(f"- {remark}" for remark in REMARKS)]),
        HEADINGS["left out"],
        "\n".join(f"- {what}: {reason}" for what, reason in LEFT_OUT.items()),
    ]
    return "\n\n".join(parts) + "\n"


def rows(page: str) -> dict[str, str]:
    """Return title → verdict of every kernel and fault on a page."""
    verdicts = {}
    sections = {
        name: page.partition(heading)[2].partition("\n## ")[0] for name, heading in HEADINGS.items()
    }
    for cells in _cells(sections["bugs"]):
        verdicts[f"{cells[0]}: {cells[1]}"] = "bug"
    for cells in _cells(sections["right"]):
        verdicts[f"{cells[0]}: {cells[1]}"] = cells[2].strip("*")
    for cells in _cells(sections["faults"]):
        verdicts[f"{cells[0]}: {cells[1]}: {cells[2]}"] = cells[3].strip("*")
    return verdicts


def word_of(verdict: Verdict) -> str:
    """Return the word of the page for a verdict: green, red, named, or died."""
    if verdict.verdict == "none":
        return "no verdict"
    return "named" if verdict.named else verdict.verdict


def _summary(right: Sequence[Verdict], faults: Sequence[Verdict]) -> str:
    green = sum(v.verdict == "green" for v in right)
    red = sum(v.verdict == "red" for v in faults)
    named, known = sum(v.named for v in faults), sum(v.has_words for v in faults)
    return (
        f"**{green} of {len(right)} right kernels are green, {red} of {len(faults)} planted faults are red.** The first line names "
        f"the cause of {named} of the {known} faults that have a good name."
    )


def _missed(right: Sequence[Verdict], faults: Sequence[Verdict]) -> str:
    parts = []
    for verdicts, wanted, words in ((right, "green", "Right kernels that are red"), (faults, "red", "Faults that are not red")):  # fmt: skip
        wrong = [v for v in verdicts if v.verdict != wanted]
        listed = [
            f"- {v.package}: {v.kernel}{': ' + v.fault if v.fault else ''}: {_code(v.first_line) or 'green'}"
            for v in wrong
        ]
        parts.append("\n".join([f"{words}: {len(wrong)}.", "", *listed]).strip())
    return "\n\n".join(parts)


def _word(verdict: Verdict) -> str:
    word = word_of(verdict)
    return word if verdict.is_as_wanted else f"**{word}**"


def _said(verdict: Verdict) -> str:
    return _escape(verdict.first_line) if verdict.verdict == "green" else _code(verdict.first_line)


def _code(first_line: str) -> str:
    """Show a first line without the name of the kernel, which is the collection's own."""
    line = re.sub(r"^kernel is wrong(: | )", "", first_line)
    return f"`{_escape(line)}`" if line else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|".join(["---"] * len(headings))
    shown = [" | ".join(line) for line in [headings, *lines]]
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {line} |" for line in shown[1:])])


def _cells(section: str) -> list[list[str]]:
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[1:]]


def _version(distribution: str) -> str:
    return version(distribution).partition("+")[0]
