"""Two of the same verb at once in one folder, and two that change the same files otherwise.

The second begins at a moment of the first drawn from its whole run. Both end; what one of them is
refused is said in a sentence; and what is there afterwards is whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

from tests.campaigns.cases import Bench, Benches, Progress, Tally, shares
from tests.campaigns.forked import OURS, Child, Ended, Verb, ran
from tests.campaigns.moments import slow
from tests.campaigns.scenarios import OTHERS, SCENARIOS
from tests.campaigns.wholeness import Tree, shown, torn, tree, whole_file

# Where a run leaves its results, and where a second one does that begins before the first has ended.
_FIRST, _SECOND = "qgate-out", "qgate-out-2"


def campaign(benches: Benches, names: list[str], count: int, say: Progress) -> list[Tally]:
    tallies = []
    verbs = [(name, SCENARIOS[name].verb) for name in names]
    verbs += [(name, verb) for name in names for verb in OTHERS.get(name, ())]
    counts = shares([str(verb_index) for verb_index in range(len(verbs))], count)
    for index, (name, other) in enumerate(verbs):
        same = other is SCENARIOS[name].verb
        named = name if same else f"{name}, other"
        bench = benches.of(SCENARIOS[name], named)
        pair = Pair(bench, other)
        for number in range(counts[str(index)]):
            pair.run(slowly=number % 3 == 2)
        tallies.append(bench.tally)
        say(f"{named}: done")
    return tallies


class Pair:
    """A scenario and another verb; `outcomes` is what both leave, one after the other."""

    def __init__(self, bench: Bench, other: Verb) -> None:
        self.bench, self.other = bench, other
        self.same = other is bench.scenario.verb
        assert bench.new
        self.outcomes = [bench.old, bench.new]
        self.both = [bench.new]
        if not self.same:
            self.outcomes += [self._after(other)]
            self.both = [self._after(bench.scenario.verb, other),
                         self._after(other, bench.scenario.verb)]  # fmt: skip
            self.outcomes += self.both

    def _after(self, *verbs: Verb) -> Tree:
        self.bench.fresh()
        for verb in verbs:
            ran(verb, self.bench.case)
        return tree(self.bench.case)

    def run(self, *, slowly: bool) -> None:
        bench = self.bench
        moment = bench.random.uniform(0, bench.seconds)
        case = bench.fresh()
        fault = slow(case, 0.002) if slowly else None
        first = Child(bench.scenario.verb, case, fault)
        time.sleep(moment)
        second = Child(self.other, case, fault)
        ends = [first.ended(), second.ended()]
        bad = self._told(ends) + self._state(ends)
        shutil.rmtree(case / _SECOND, ignore_errors=True)
        if not bad and self.same:
            bad += bench.end(ran(bench.scenario.verb, case))
        outputs = "".join(f"\n--- {end.status}: {end.said[-600:]}" for end in ends)
        pace = " slowly" if slowly else ""
        bench.note(
            f"a second one after {moment:.4f} s{pace}", Ended(ends[1].status, outputs, 0), bad
        )

    def _told(self, ends: Sequence[Ended]) -> list[str]:
        bad = []
        scenario = self.bench.scenario
        for end in ends:
            if "Traceback" in end.said or end.status == OURS or end.status < 0:
                bad.append(f"a crash: {end.said[-500:]!r}")
        fine = [process_end.status in (0, scenario.status) for process_end in ends]
        self.bench.tally.seen["both went well" if all(fine) else "one was refused"] += 1
        if not any(fine):
            bad.append(f"neither did its work: {[failed_end.said[-200:] for failed_end in ends]}")
        return bad

    def _state(self, ends: Sequence[Ended]) -> list[str]:
        """Each file as some order of the verbs leaves it; together, if both did their work."""
        now = shown(tree(self.bench.case))
        bad = []
        # A second update reads what the first has accepted, so its table is of its own.
        growing = {**self.bench.scenario.growing, f"{_FIRST}/results.csv": whole_file}
        for name in sorted(now.keys() | set().union(*self.outcomes)):
            # What a run writes beside another one is what it writes alone.
            alone = name.replace(f"{_SECOND}/", f"{_FIRST}/", 1)
            contents = [outcome.get(alone) for outcome in self.outcomes]
            if now.get(name) not in contents:
                bad += torn({alone: now[name]} if name in now else {}, {alone: contents[0] or b""},
                            {alone: contents[1] or b""}, growing)  # fmt: skip
        well = all(end.status in (0, self.bench.scenario.status) for end in ends)
        if well and not self.bench.scenario.growing:
            whole_states = [shown(file_tree) for file_tree in self.both]
            if now not in whole_states:
                names = [
                    n
                    for n in now
                    if all(now[n] != whole_state.get(n) for whole_state in whole_states)
                ]
                missing = [n for n in whole_states[0] if n not in now]
                bad.append(f"both did their work, and it is not there: {names} {missing}")
        return bad
