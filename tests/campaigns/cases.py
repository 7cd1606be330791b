"""One scenario made ready once, disturbed many times, and judged each time in the same way."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.campaigns.forked import OURS, Ended, ran, warmed
from tests.campaigns.moments import counting
from tests.campaigns.scenarios import Scenario
from tests.campaigns.wholeness import Tree, differing, is_hidden, shown, strays, torn, tree

MOST_KEPT = 3


@dataclass
class Tally:
    """What was seen over the cases of one scenario; `failures` say fault and finding."""

    name: str
    cases: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Bench:
    """A scenario in folders of its own; the case is always at the same path, which files may name."""

    def __init__(self, scenario: Scenario, home: Path, seed: int) -> None:
        self.scenario = scenario
        self.random = random.Random(f"{scenario.name} {seed}")
        self.home = home / scenario.name.replace(" ", "-")
        self.case = self.home / "case"
        self._before = self.home / "before"
        self.tally = Tally(scenario.name)
        self.seconds = 0.0
        self.steps: list[str] = []
        self.case.mkdir(parents=True)
        prepared = warmed(scenario.prepare, self.case)
        if prepared.status:
            raise AssertionError(f"{scenario.name} cannot be prepared: {prepared.said}")
        shutil.copytree(self.case, self._before, symlinks=True)
        self.old = tree(self.case)

    def fresh(self) -> Path:
        """The folder as it is before."""
        shutil.rmtree(self.case, ignore_errors=True)
        shutil.copytree(self._before, self.case, symlinks=True)
        return self.case

    @cached_property
    def new(self) -> Tree:
        """What an undisturbed run leaves, two of them the same, or no bytes could be compared.

        With it come the seconds that a run takes, and its steps.
        """
        verb, listed = self.scenario.verb, self.home / "steps"
        trees = []
        for run in (warmed, lambda *given: ran(*given, counting(self.case, listed))):
            ended = run(verb, self.fresh())
            if ended.status != self.scenario.status:
                raise AssertionError(f"{self.scenario.name} fails undisturbed: {ended.said}")
            trees.append(tree(self.case))
            self.seconds = ended.seconds
        self.steps = listed.read_text().splitlines()
        differ = differing(trees[1], trees[0])
        if differ or trees[1] == self.old:
            raise AssertionError(f"{self.scenario.name} has no one outcome: {differ}")
        return trees[1]

    @cached_property
    def sizes(self) -> list[int]:
        """How large the files become that the verb writes, and what it takes notes in."""
        changed = [data for name, data in self.new.items() if self.old.get(name) != data]
        return sorted({400, *(len(data) for data in changed)})

    def drawn_size(self) -> int:
        """A byte in one of them."""
        return self.random.randrange(1, self.random.choice(self.sizes) + 1)

    # Judging ------------------------------------------------------------------------------------

    def judge(self, fault: str, ended: Ended, seen: Sequence[str] = ()) -> None:
        """What was seen, the folder now, the same verb once more, and what that leaves."""
        bad = [*seen, *self.state()]
        bad += self.end(ran(self.scenario.verb, self.case))
        self.note(fault, ended, bad)

    def judge_told(self, fault: str, ended: Ended, words: str) -> None:
        """After a fault that a verb can see: it says so and is no crash, unless all went well."""
        bad = []
        went_well = ended.status == self.scenario.status and tree(self.case) == self.new
        if "Traceback" in ended.said or ended.status == OURS:
            bad.append(f"a crash: {ended.said[-600:]!r}")
        elif not went_well and words not in ended.said:
            bad.append(f"{words!r} is not said: {ended.said[-300:]!r}")
        elif not went_well and ended.status == 0:
            bad.append("it ends with 0, and not all was done")
        bad += self.state()
        self.tally.seen["went well" if went_well else "told"] += 1
        bad += self.end(ran(self.scenario.verb, self.case))
        self.note(fault, ended, bad)

    def state(self) -> list[str]:
        """Old or new, whole; which of them is counted."""
        now = tree(self.case)
        contents = shown(now)
        kind = (
            "old"
            if contents == shown(self.old)
            else "new"
            if contents == shown(self.new)
            else "between"
        )
        self.tally.seen[kind] += 1
        if any(is_hidden(name) and name not in self.old and name not in self.new for name in now):
            self.tally.seen["left over"] += 1
        bad = torn(now, self.old, self.new, self.scenario.growing)
        if self.scenario.whole is not None:
            bad += filter(None, [self.scenario.whole(now, self.old, self.new)])
        return bad

    def end(self, followed: Ended) -> list[str]:
        """What the next run makes of what was left."""
        bad = []
        if followed.status not in (self.scenario.status, *self.scenario.again):
            bad.append(f"the next run ends with {followed.status}: {followed.said[-300:]!r}")
        if "Traceback" in followed.said:
            bad.append(f"the next run crashes: {followed.said[-500:]!r}")
        now = tree(self.case)
        bad += [f"the next run leaves {name}" for name in strays(now, self.new)]
        expected = {n: d for n, d in self.new.items() if not n.startswith(self.scenario.free)}
        return bad + [f"after the next run {text}" for text in differing(now, expected)]

    def note(self, fault: str, ended: Ended, bad: list[str]) -> None:
        self.tally.cases += 1
        if not bad:
            return
        self.tally.seen["failed"] += 1
        self.tally.failures.append(f"{fault} (status {ended.status}): {'; '.join(bad[:4])}")
        if self.tally.seen["failed"] <= MOST_KEPT:
            copy_path = self.home / f"failed-{self.tally.seen['failed']}"
            shutil.copytree(self.case, copy_path, symlinks=True)
            (self.home / f"{copy_path.name}.txt").write_text(f"{fault}\n{bad}\n{ended.said}\n")


class Benches:
    """The benches of a campaign, made when they are asked for; `disk` is a file system of its own."""

    def __init__(
        self, home: Path, seed: int, disk: Path | None = None, first_step: int = 1
    ) -> None:
        self.home, self.seed, self.disk = home, seed, disk
        self.first_step = first_step
        self._made: dict[str, Bench] = {}

    def of(self, scenario: Scenario, named: str = "") -> Bench:
        """A bench with nothing counted yet."""
        bench = self._made.get(scenario.name)
        if bench is None:
            bench = Bench(scenario, self.disk or self.home, self.seed)
            self._made[scenario.name] = bench
        bench.tally = Tally(named or scenario.name)
        return bench


def shares(names: list[str], count: int) -> dict[str, int]:
    """A count divided as evenly as it goes."""
    quotient, remainder = divmod(count, len(names))
    return {name: quotient + (index < remainder) for index, name in enumerate(names)}


def spread(draw: random.Random, most: int, count: int) -> list[int]:
    """Numbers from 1 to the most: all of them, or as many as are wanted."""
    return (
        list(range(1, most + 1))
        if count >= most
        else sorted(draw.sample(range(1, most + 1), count))
    )


def temporary(home: Path) -> None:
    """Temporary files of all children belong to the campaign, where they can be counted."""
    import tempfile

    folder = home / "tmp"
    folder.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


Progress = Callable[[str], None]
