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

Is `check_kernel` green on right code that others wrote, and red where it is wrong? It was asked about {right} kernels of
{packages} packages and {faults} faults planted in them. `like` is what a user of the package would write: plain operators on
plain tensors; no check declares a coarser arithmetic. `python -m tests.kernel_checks.real` asks again, on a CPU;
`tests/kernel_checks/real/verdicts.jsonl` has each verdict, and each run of the tests repeats some.

{summary}"""
BUGS = """## Bugs found in published code

Each is the package's own code as published."""
RIGHT_KERNELS = """## Right kernels

*Named* is what the report says of a kernel beside green: conventions of quantized arguments, and the arithmetic or the
rounding between operators that explains the result."""
FAULTS = """## Planted faults

*Named* counts first lines with the cause, or with the place and the size of the error. `…` is for several numbers; the
first line is that of one case."""


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
        BUGS,
        markdown_table(
            ["package", "kernel", "what is wrong", "first line"],
            [[_package(v), v.kernel, v.fault, _code(v.first_line)] for v in bugs],
        ),
        RIGHT_KERNELS,
        markdown_table(["package", "kernels", "named"], list(_right_rows(right))),
        FAULTS,
        markdown_table(["fault", "cases", "named", "first line"], list(_fault_rows(faults))),
        "## What is missed",
        "\n\n".join(
            [
                _missed("Right kernels that are red", right, "green"),
                _missed("Faults that are not red", faults, "red"),
                "\n".join(f"- {remark}" for remark in REMARKS),
            ]
        ),
        "## What could not run",
        "\n".join(f"- {what}: {reason}" for what, reason in LEFT_OUT.items()),
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
    named, known = sum(v.named for v in faults), sum(v.has_words for v in faults)
    return (
        f"**{green} of {len(right)} right kernels are green, {red} of {len(faults)} planted faults are red.** The first line names "
        f"the cause of {named} of the {known} faults that have a good name."
    )


def _right_rows(right: Sequence[Verdict]) -> Iterable[list[str]]:
    """Yield a row for all kernels of a package of which the report says the same."""
    groups = defaultdict(list)
    for verdict in right:
        if verdict.verdict == "green":
            groups[_package(verdict), _escape(verdict.first_line)].append(verdict.kernel)
    for (package, first_line), kernels in groups.items():
        yield [package, "; ".join(kernels), first_line]


def _fault_rows(faults: Sequence[Verdict]) -> Iterable[list[str]]:
    """Yield a row for all faults whose names differ in numbers alone."""
    groups = defaultdict(list)
    for verdict in faults:
        if verdict.verdict == "red":
            groups[re.sub(r"[-+]?\b\d[\d.e-]*", "…", verdict.fault)].append(verdict)
    for name, cases in groups.items():
        is_one = len({case.fault for case in cases}) == 1
        best = max(cases, key=lambda case: case.named)
        yield [
            cases[0].fault if is_one else name,
            str(len(cases)),
            str(sum(case.named for case in cases)),
            _code(best.first_line),
        ]


def _missed(words: str, verdicts: Sequence[Verdict], right_verdict: str) -> str:
    wrong = [v for v in verdicts if v.verdict != right_verdict]
    lines = [f"- {v.title}: {_code(v.first_line) or 'green'}" for v in wrong]
    return "\n".join([f"{words}: {len(wrong)}.", "", *lines]).strip()


def _package(verdict: Verdict) -> str:
    return verdict.package.replace(
        verdict.distribution, f"{verdict.distribution} {verdict.version}"
    )


def _code(first_line: str) -> str:
    """Show a first line without the name of the kernel, which is the collection's own."""
    line = re.sub(r"^kernel is wrong(: | )", "", first_line)
    return f"`{_escape(line)}`" if line else ""


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
