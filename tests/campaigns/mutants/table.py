"""The page of all planted faults, docs/faults.md.

python -m tests.campaigns.mutants.table          print it
python -m tests.campaigns.mutants.table --write  write it
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.campaigns.mutants.bed import (
    ACTIVATIONS,
    CHECKPOINT,
    DUMP,
    ENGINES,
    FORMATS,
    RELATIONS,
)
from tests.campaigns.mutants.mutant import Mutant

PAGE = Path(__file__).resolve().parents[3] / "docs" / "faults.md"
_SUBJECTS = {
    DUMP: "a dump", ACTIVATIONS: "tiny-llama", FORMATS: "the formats", CHECKPOINT: "a checkpoint",
    ENGINES: "two engines", RELATIONS: "tiny-llama",
}  # fmt: skip
_SPELLINGS = {
    "bf16": "BF16", "db": "dB", "e4m3": "E4M3", "fp8": "FP8", "hif8": "HiF8", "inf": "Inf",
    "int16": "INT16", "int8": "INT8", "kl": "KL", "mxfp4": "MXFP4", "mxfp8": "MXFP8", "nan": "NaN",
    "rope": "RoPE", "silu": "SiLU",
}  # fmt: skip
_SHOWN = 3
_HEAD = """# Faults that the gates catch

qgate's tests plant {caught} faults, one at a time. Each turns a gate of its [suite](gates.md#the-suites) red, and for {placed} of
them the first line names the place where the error enters; without a fault the same gates are green. "Since day one" means that the
fault was there when the baseline was recorded.

`python -m pytest tests/campaigns/mutants --every-case` plants all of them, and each run of qgate's tests plants some;
`tests/campaigns/mutants` has each by the name that a row shows.

| suite | in | faults | such as |
|---|---|---|---|
"""
_SURVIVORS = """
## Faults that no gate catches

| fault | in | why |
|---|---|---|
"""


def page(mutants: tuple[Mutant, ...]) -> str:
    """Return the page as Markdown: a table of all suites, then what no gate sees."""
    caught = [mutant for mutant in mutants if not mutant.survives]
    rows = "\n".join(_rows(sorted(caught, key=lambda mutant: mutant.suite)))
    text = (
        _HEAD.format(caught=len(caught), placed=sum(bool(m.source) for m in caught)) + rows + "\n"
    )
    lost = [f"| {_words(m)} | {_subject(m.model, m.mode)} | {m.survives} |"
            for m in mutants if m.survives]  # fmt: skip
    return text + _SURVIVORS + "\n".join(lost) + "\n" if lost else text


def _rows(mutants: Iterable[Mutant]) -> Iterator[str]:
    """Write a row for the faults of a suite: where they are planted, and some of all models."""
    suites: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        suites.setdefault(mutant.suite, []).append(mutant)
    for suite, planted in suites.items():
        subjects = dict.fromkeys(_SUBJECTS.get(mutant.model, mutant.model) for mutant in planted)
        words = list(dict.fromkeys(_words(mutant) for mutant in planted))
        excerpt = words[:: -(-len(words) // _SHOWN)]
        more = "; …" if len(excerpt) < len(words) else ""
        yield f"| test_{suite} | {', '.join(subjects)} | {len(planted)} | {'; '.join(excerpt)}{more} |"


def _words(mutant: Mutant) -> str:
    """Return the name of a fault as words, without its mode, which has a column."""
    name = mutant.name.removesuffix(f"-in-{mutant.mode}").removesuffix("-in-mamba")
    words = re.sub("[-_]", " ", name)
    for subject in ("activations", "checkpoint", "dump", "engine", "relations"):
        words = words.removeprefix(f"{subject} ")  # the column beside it says so
    words = words.replace("1e 4", "1e-4")
    spelled = " ".join(_SPELLINGS.get(word, word) for word in words.split())
    return f"{spelled[:1].upper()}{spelled[1:]}"


def _subject(model: str, mode: str) -> str:
    subject = _SUBJECTS.get(model, model)
    return f"{subject}, {mode}" if mode else subject


def main() -> None:
    from tests.campaigns.mutants.test_planted import MUTANTS

    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(MUTANTS), encoding="utf-8")
    else:
        print(page(MUTANTS))


if __name__ == "__main__":
    main()
