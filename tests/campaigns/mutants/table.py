"""The page of all planted faults, docs/faults.md.

python -m tests.campaigns.mutants.table          print it
python -m tests.campaigns.mutants.table --write  write it
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from tests.campaigns.mutants.bed import ACTIVATIONS, CHECKPOINT, DUMP, ENGINES, FORMATS
from tests.campaigns.mutants.mutant import Mutant

PAGE = Path(__file__).resolve().parents[3] / "docs" / "faults.md"
_SUBJECTS = {
    DUMP: "a dump", ACTIVATIONS: "tiny-llama", FORMATS: "the formats", CHECKPOINT: "a checkpoint",
    ENGINES: "two engines",
}  # fmt: skip
_HEAD = """# Faults that the gates catch

{caught} faults were planted in models, kernels, formats, suites, accepted files, dumps, checkpoints and engines. Each turns
the gate of its suite red, at the place or with the words of the last column; code without a fault stays green beside them, with
other threads and in another order. {placed} of them have a place, and the first line of the run names it.
`python -m pytest tests/campaigns/mutants --every-case` does all of it, and every run of the tests a share. The faults
of accepted files, of plans and of partial runs are tests of their own, in `tests/baselines` and `tests/plugin`.
"""
_SURVIVORS = """
## Not caught

| fault | of | why |
|---|---|---|
"""


def page(mutants: tuple[Mutant, ...]) -> str:
    """Return the page as Markdown: a table for each suite, then what no gate sees."""
    caught = [mutant for mutant in mutants if not mutant.survives]
    text = _HEAD.format(caught=len(caught), placed=sum(bool(m.source) for m in caught))
    for suite, group in groupby(sorted(caught, key=lambda m: m.suite), key=lambda m: m.suite):
        rows = "\n".join(map(_row, group))
        text += f"\n## {suite}\n\n| fault | of | seen at, or as |\n|---|---|---|\n{rows}\n"
    lost = [f"| {_words(m.name)} | {_subject(m)} | {m.survives} |" for m in mutants if m.survives]
    return text + _SURVIVORS + "\n".join(lost) + "\n" if lost else text


def _row(mutant: Mutant) -> str:
    patterns = (mutant.first or mutant.source, mutant.says)
    place = " / ".join(filter(None, map(_plain, patterns)))
    return f"| {_words(mutant.name)} | {_subject(mutant)} | {place} |"


def _words(name: str) -> str:
    return re.sub("[-_]", " ", name)


def _subject(mutant: Mutant) -> str:
    subject = _SUBJECTS.get(mutant.model, mutant.model)
    return f"{subject}, {mutant.mode}" if mutant.mode else subject


def _plain(pattern: str) -> str:
    """Return the words of a regular expression: what is open in it is an ellipsis."""
    open_parts = re.sub(r"\(\?[:=!].*?\)|\[[^]]*\][+*?]?|\\d\+?|\.[*+]\??", "…", pattern)
    words = re.sub(r"\\(.)", r"\1", open_parts).strip(" |^$").replace("|", " or ")
    return f"`{words}`" if words else ""


def main() -> None:
    from tests.campaigns.mutants.test_planted import MUTANTS

    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(MUTANTS), encoding="utf-8")
    else:
        print(page(MUTANTS))


if __name__ == "__main__":
    main()
