"""The page of real kernels: what was checked, what was found, and what `check_kernel` said."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.kernel_checks.real.collection import LEFT_OUT, REMARKS, ROOMS
from tests.kernel_checks.real.verdicts import RIGHT, Verdict
from tests.markdown import markdown_table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "real-kernels.md"
VERDICTS = Path(__file__).resolve().with_name("verdicts.jsonl")
INTRO = """# Real kernels

`check_kernel` was run on {right} right kernels of {packages} packages and on {faults} faults planted in them, against plain operators
on plain tensors. {summary} `python -m tests.kernel_checks.real` repeats it on a CPU;
`tests/kernel_checks/real/verdicts.jsonl` has each verdict in full."""
BUGS = "{bugs} more kernels are red because they are wrong as published: [defects found in published packages](finds.md)."
RIGHT_KERNELS = "## Right kernels"
FAULTS = """## Planted faults

*Named* counts first lines with the cause, or with the place and the size of the error. Faults with one first line but for its
numbers share a row, which shows at most three of them; {fewer} other faults have first lines that five or fewer share."""
MOST_WORDS = 10
"""How much of a first line a table shows."""
MOST_FAULTS, MOST_KINDS = 3, 9
LEAST_CASES = 6
"""How many faults must share a first line to have a row."""


def make_page(verdicts: Sequence[Verdict]) -> str:
    """Return the whole page of a run over all rooms."""
    order = {room.distribution: number for number, room in enumerate(ROOMS)}
    verdicts = sorted(verdicts, key=lambda v: order.get(v.distribution, 0))
    right = [verdict for verdict in verdicts if verdict.fault == RIGHT]
    bugs = [verdict for verdict in verdicts if verdict.is_bug]
    faults = [v for v in verdicts if v.fault != RIGHT and not v.is_bug]
    packages = {verdict.distribution for verdict in verdicts}
    parts = [
        INTRO.format(
            right=len(right), packages=len(packages), faults=len(faults),
            summary=_summary(right, faults),
        ),
        BUGS.format(bugs=len(bugs)),
        RIGHT_KERNELS,
        markdown_table(["package", "kernels", "which"], list(_right_rows(right))),
        FAULTS.format(
            fewer=sum(len(cases) for cases in _by_first_line(faults) if len(cases) < LEAST_CASES)
        ),
        markdown_table(["first line", "faults", "cases", "named"], list(_fault_rows(faults))),
        "## What is missed",
        "\n\n".join(
            [
                _missed("Right kernels that are red", right, "green"),
                _missed("Faults that are not red", faults, "red"),
                _unnamed(faults),
                "\n".join(f"- {remark}" for remark in REMARKS),
                f"{len(LEFT_OUT)} kernels could not run on a CPU; `tests/kernel_checks/real/collection.py` says why.",
            ]
        ),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def read_verdicts(path: Path | None) -> list[Verdict]:
    """Read verdicts that a run kept; none where there is no file."""
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Verdict(**json.loads(line)) for line in lines]


def write_verdicts(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Write what a later run has to repeat: all but the time that each verdict took."""
    records = [asdict(verdict) for verdict in verdicts]
    for record in records:
        del record["seconds"]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


def _summary(right: Sequence[Verdict], faults: Sequence[Verdict]) -> str:
    green = sum(v.verdict == "green" for v in right)
    red = sum(v.verdict == "red" for v in faults)
    named, with_words = sum(v.named for v in faults), sum(v.has_words for v in faults)
    return (
        f"**{green} of {len(right)} right kernels are green, {red} of {len(faults)} planted faults are red**; the first line names "
        f"the cause of {named} of the {with_words} faults that have a good name."
    )


def _right_rows(right: Sequence[Verdict]) -> Iterable[list[str]]:
    """Yield a row for all green kernels of a package, without their variants and dtypes."""
    groups = defaultdict(list)
    for verdict in right:
        if verdict.verdict == "green":
            groups[_package(verdict)].append(verdict.kernel)
    for package, kernels in groups.items():
        names = dict.fromkeys(re.split(r",| (?:bf16|fp16|fp32)$", name)[0] for name in kernels)
        yield [package, str(len(kernels)), "; ".join(names)]


def _fault_rows(faults: Sequence[Verdict]) -> Iterable[list[str]]:
    """Yield a row for all faults whose first lines differ in numbers alone, the most first."""
    for cases in _by_first_line(faults):
        if len(cases) < LEAST_CASES:
            continue
        names = list(dict.fromkeys(_without_numbers(case.fault) for case in cases))
        more = "; …" if len(names) > MOST_FAULTS else ""
        yield [
            _code(cases[0].first_line),
            "; ".join(names[:MOST_FAULTS]) + more,
            str(len(cases)),
            str(sum(case.named for case in cases)),
        ]


def _by_first_line(faults: Sequence[Verdict]) -> list[list[Verdict]]:
    """Group red faults whose first lines differ in numbers alone, the most first."""
    groups = defaultdict(list)
    for verdict in faults:
        if verdict.verdict == "red":
            groups[_without_numbers(_code(verdict.first_line))].append(verdict)
    return sorted(groups.values(), key=len, reverse=True)


def _without_numbers(text: str) -> str:
    return re.sub(r"[-+]?\b\d[\d.,e-]*", "…", text)


def _missed(words: str, verdicts: Sequence[Verdict], right_verdict: str) -> str:
    wrong = [v for v in verdicts if v.verdict != right_verdict]
    lines = [f"- {v.title}: {_code(v.first_line) or 'green'}" for v in wrong]
    return "\n".join([f"{words}: {len(wrong)}.", "", *lines]).strip()


def _unnamed(faults: Sequence[Verdict]) -> str:
    names = [v.fault for v in faults if v.verdict == "red" and v.has_words and not v.named]
    return f"Faults that are red with another cause: {'; '.join(names)}."


def _package(verdict: Verdict) -> str:
    return verdict.package.replace(
        verdict.distribution, f"{verdict.distribution} {verdict.version}"
    )


def _code(first_line: str) -> str:
    """Show the beginning of a first line without the name of the kernel."""
    words = re.sub(r"^kernel is wrong(: | )", "", first_line).split()
    line = " ".join(words[:MOST_WORDS]) + (" …" if len(words) > MOST_WORDS else "")
    return f"`{_escape(line)}`" if line else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
