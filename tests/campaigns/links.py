"""A link in the place of every folder that a verb writes to, to a folder with files of others.

A verb may write through the link or refuse it in a sentence. It never removes a file of others, nor
the folder that the link leads to.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.forked import OURS, ran
from tests.campaigns.scenarios import SCENARIOS
from tests.campaigns.wholeness import differing, tree

_PRECIOUS = ("keep.txt", "results.old", "inner/index.html")


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    for name, share in shares(names, count).items():
        bench = benches.of(SCENARIOS[name])
        for folder in output_folders(bench)[:share]:
            _linked(bench, folder)
        tallies.append(bench.tally)
        say(f"{name}: done")
    return tallies


def output_folders(bench: Bench) -> list[Path]:
    """List folders below the case in which a run makes, changes or removes a file."""
    changed = [
        name
        for name in sorted(bench.old.keys() | bench.new.keys())
        if bench.old.get(name) != bench.new.get(name)
    ]
    parents = {parent for name in changed for parent in Path(name).parents}
    return sorted(parents - {Path()})


_REFUSAL = "is a link, and nothing is written through it"


def _linked(bench: Bench, folder: Path) -> None:
    new = bench.new
    link, outside = bench.fresh() / folder, bench.home / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    outside.parent.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.move(link, outside)
    for name in _PRECIOUS:
        path = outside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a file of others")
    link.symlink_to(outside)
    ended = ran(bench.scenario.verb, bench.case)
    bad = [
        f"{name} of others is {'changed' if (outside / name).is_file() else 'gone'}"
        for name in _PRECIOUS
        if not (outside / name).is_file() or (outside / name).read_text() != "a file of others"
    ]
    if "Traceback" in ended.said or ended.status == OURS:
        bad.append(f"a crash: {ended.said[-600:]!r}")
    elif ended.status == bench.scenario.status and _REFUSAL not in " ".join(ended.said.split()):
        inside = {name: data for name, data in new.items() if folder in Path(name).parents}
        through = {f"{folder}/{name}": data for name, data in tree(link).items()}
        bad += [f"after it {text}" for text in differing(through, inside)]
        bench.tally.seen["written through" if link.is_symlink() else "a folder of its own"] += 1
    else:
        bench.tally.seen["refused"] += 1
        if not ended.said.strip():
            bad.append(f"status {ended.status} without a word")
    bench.note(f"a link in the place of {folder}", ended, bad)
