"""A tour of the museum: every exhibit under every limit, and the page made from it.

python -m tests.museum.tour               the table; exit 1 if qgate misses an exhibit
python -m tests.museum.tour --write       docs/museum.md and its pictures, too
python -m tests.museum.tour --seeds 20    so many draws for each right implementation
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qgate.testing import CheckFailure
from tests.markdown import markdown_table
from tests.museum import limits
from tests.museum.exhibit import KINDS, Exhibit, load_exhibits
from tests.museum.pictures import draw_exhibit

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, PICTURES = DOCS / "museum.md", DOCS / "museum"
BEGIN, END = "<!-- made by python -m tests.museum.tour --write -->", "<!-- made until here -->"
SEEDS = 20
UNSEEN = "none at ordinary inputs"
"""Damage of a fault that zero rows, NaN or another length show, and drawn values do not."""
FLOAT_NOISE = 1e-5
"""Relative error under which a right implementation counts as unquantized."""


@dataclass(frozen=True)
class Outcome:
    """The verdicts of limits and of qgate on one exhibit.

    passed      limit → True if the faulty implementation passes it, for those that apply
    refused     limits that the right implementation fails
    red_seeds   first lines of qgate's failures of the right implementation, one per seed
    first_line  of qgate's failure, empty if the faulty implementation passed
    damage      of the faulty result, in words
    """

    exhibit: Exhibit
    passed: dict[str, bool]
    refused: frozenset[str]
    red_seeds: list[str]
    first_line: str
    damage: str

    @property
    def is_named(self) -> bool:
        return bool(re.search(self.exhibit.cause, self.first_line))


def visit(exhibit: Exhibit, seeds: int = SEEDS) -> Outcome:
    """Hold both implementations of an exhibit at every limit and at qgate's check."""
    right = exhibit.result(exhibit.right, exhibit.draw(0))
    faulty = exhibit.result(exhibit.faulty, exhibit.draw(0))
    reference = exhibit.reference(exhibit.draw(0))
    try:
        exhibit.check(exhibit.faulty)
        first_line = ""
    except CheckFailure as failure:
        first_line = failure.cause
    verdicts = dict(_judge(exhibit, right, reference, right))
    return Outcome(
        exhibit,
        dict(_judge(exhibit, faulty, reference, right)),
        frozenset(name for name, passes in verdicts.items() if not passes),
        list(check_right(exhibit, seeds)),
        first_line,
        describe_damage(right, faulty, reference),
    )


def _judge(
    exhibit: Exhibit, actual: Tensor, reference: Tensor, right: Tensor
) -> Iterator[tuple[str, bool]]:
    """Apply each limit to a result; the reference is the one of unquantized tensors."""
    for limit in limits.LIMITS:
        yield limit.name, limit.passes(actual, reference)
    yield limits.CALC_DIFF, limits.deepgemm_passes(actual, reference, exhibit.formats)
    if exhibit.terms is not None:
        sizes = exhibit.sizes(exhibit.draw(0))
        yield limits.LLAMA, limits.llama_passes(actual, reference, exhibit.terms, sizes)
    if exhibit.tolerance is not None:
        rtol, atol = exhibit.tolerance.rtol, exhibit.tolerance.atol
        compared = right if exhibit.tolerance.against == "right" else reference
        yield limits.OWN, limits.is_close(actual, compared, rtol, atol)


def check_right(exhibit: Exhibit, seeds: int) -> Iterator[str]:
    """Check the right implementation with several draws; return what was refused, and at which."""
    for seed in range(seeds):
        try:
            exhibit.check(exhibit.right, seed)
        except CheckFailure as failure:
            yield f"seed {seed}: {failure.cause}"


def describe_damage(right: Tensor, faulty: Tensor, reference: Tensor) -> str:
    """Say how much worse a faulty result is at the output."""
    if torch.equal(faulty, right):
        return UNSEEN
    if not bool(faulty.isfinite().all()):
        return f"{int((~faulty.isfinite()).sum()):,} of {faulty.numel():,} values not finite"
    error, least = limits.relative_rms(faulty, reference), limits.relative_rms(right, reference)
    if not error:
        return "not quantized"
    if least < FLOAT_NOISE:
        return f"{error:.2g} of the RMS"
    return f"{20 * math.log10(error / least):+.1f} dB"


# The page ----------------------------------------------------------------------------------------


def summarize(outcomes: Sequence[Outcome]) -> str:
    """Count for each limit the defects that pass and the right implementations it refuses."""
    counts = []
    for name in dict.fromkeys(name for outcome in outcomes for name in outcome.passed):
        applied = [outcome for outcome in outcomes if name in outcome.passed]
        passed = sum(outcome.passed[name] for outcome in applied)
        refused = sum(name in outcome.refused for outcome in applied)
        counts.append((name, passed, refused, len(applied)))
    counts.sort(key=lambda row: -row[1] / row[3])
    table = [
        [name, f"{passed} of {count}", f"{refused} of {count}"]
        for name, passed, refused, count in counts
    ]
    missed = sum(not outcome.first_line for outcome in outcomes)
    total = len(outcomes)
    refused = sum(bool(outcome.red_seeds) for outcome in outcomes)
    table.append(["**qgate**", f"**{missed} of {total}**", f"**{refused} of {total}**"])
    return markdown_table(["limit", "defects that pass", "right code refused"], table)


def make_section(kind: str, outcomes: Sequence[Outcome]) -> str:
    """Return one kind of defect as a heading, a picture and a list."""
    lines = [
        f"* {outcome.exhibit.defect} [{outcome.exhibit.source}]({outcome.exhibit.url}) "
        f"({name_passed(outcome)})"
        for outcome in outcomes
    ]
    return "\n".join(
        [
            f"## {KINDS[kind]}",
            "",
            f"![{KINDS[kind]}: errors of right and faulty code](museum/{kind}.svg)",
            "",
            *lines,
        ]
    )


def choose_drawn(outcomes: Sequence[Outcome]) -> Outcome:
    """Choose the exhibit of a kind's picture: damage at drawn values that most limits let pass."""
    visible = [outcome for outcome in outcomes if outcome.damage != UNSEEN] or list(outcomes)
    return max(visible, key=lambda outcome: sum(outcome.passed.values()) / len(outcome.passed))


def name_passed(outcome: Outcome) -> str:
    """Count the limits that a faulty implementation passes."""
    passed = f"{sum(outcome.passed.values())}/{len(outcome.passed)}"
    return f"{passed}, unseen" if outcome.damage == UNSEEN else passed


def make_page(outcomes: Sequence[Outcome]) -> str:
    """Return the part of the page that is made from a run."""
    unseen = sum(outcome.damage == UNSEEN for outcome in outcomes)
    legend = (
        f"In brackets is how many limits the defect passes; {unseen} defects are *unseen* at ordinary "
        "inputs: `check_kernel` derives rows of zeros, NaN and other lengths. A picture shows the errors "
        "of one right and one faulty result, element by element, relative to the RMS."
    )
    sections = [make_section(kind, group) for kind, group in by_kind(outcomes).items()]
    return "\n\n".join([summarize(outcomes), legend, *sections])


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Group outcomes by kind, in the order of KINDS."""
    groups = {kind: [o for o in outcomes if o.exhibit.kind == kind] for kind in KINDS}
    return {kind: group for kind, group in groups.items() if group}


def replace_made(page: str, made: str) -> str:
    """Put what was made between the two marks of the page."""
    before, _, tail = page.partition(BEGIN)
    _, _, after = tail.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def write_page(outcomes: Sequence[Outcome]) -> None:
    text = replace_made(PAGE.read_text(encoding="utf-8"), make_page(outcomes))
    PAGE.write_text(text, encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for kind, group in by_kind(outcomes).items():
        picture = draw_exhibit(choose_drawn(group).exhibit)
        (PICTURES / f"{kind}.svg").write_text(picture, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write docs/museum.md and pictures")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="draws for each right one")
    args = parser.parse_args()
    outcomes = []
    for exhibit in load_exhibits():
        outcome = visit(exhibit, args.seeds)
        outcomes.append(outcome)
        word = "named" if outcome.is_named else "not named" if outcome.first_line else "PASSES"
        print(f"{exhibit.name:28} {word:9} {outcome.damage:>14}  {outcome.first_line}", flush=True)
        print("".join(f"  right one refused, {line}\n" for line in outcome.red_seeds), end="")
    print(f"\n{summarize(outcomes)}\n")
    named = sum(outcome.is_named for outcome in outcomes)
    caught = sum(bool(outcome.first_line) for outcome in outcomes)
    green = sum(args.seeds - len(outcome.red_seeds) for outcome in outcomes)
    checks = len(outcomes) * args.seeds
    print(f"{caught} of {len(outcomes)} defects are red, {named} with the right cause")
    print(f"{green} of {checks} checks of right implementations are green")
    if args.write:
        write_page(outcomes)
    return int(caught < len(outcomes) or green < checks)


if __name__ == "__main__":
    raise SystemExit(main())
