"""Relations of a model: every way to compute its tokens, compared site by site with one run.

Weights of attention are the one cast whose tensor no run can be fed: what softmax gives has another
width in each chunk, so that a compared run casts its own, and noise now and then moves a value to
the neighboring code. Few tokens are off by less than one code, and none of them if the same runs
are made without that cast: a fault of the code around it stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from qgate.capture.next_tokens import predicts_next_tokens
from qgate.errors import QgateError, unknown
from qgate.expected.noise import ARITHMETICS, has_a_factor
from qgate.models import Model
from qgate.models.sites import any_number
from qgate.modes import Quantized
from qgate.modes.attention.core import AttentionCore
from qgate.relations.caches import TextCalls
from qgate.relations.causes import BATCH_SCALE, explain, follows_a_seed
from qgate.relations.noise import FloatNoise, mean_energy, measure_noise, token_errors
from qgate.relations.parts import part_results
from qgate.relations.record import (
    EXACT,
    LEFT,
    RELATIONS,
    REPEAT,
    Disagreement,
    RelationReport,
    where,
)  # fmt: skip
from qgate.relations.recording import FedRun, Pass, Recording, leaf_sites, record
from qgate.relations.restarts import (
    LARGEST,
    Rebuilding,
    digests,
    digests_elsewhere,
    parameter_bytes,
)
from qgate.relations.ways import TOKENS, Way, WholeRows, rows_of, ways_of
from qgate.text import one_line

_OF_PLAIN_CALLS = frozenset({"alone", "others", "permuted", "padded right", LEFT, "prefix"})
"""Relations whose calls the reference takes, too."""
_BEFORE = 3
"""Sites before a disagreement that its words name."""

_RARE = 0.02
"""Share of tokens that noise may reach; at least one."""
_CODE = 2.0**-3
"""Distance between neighboring codes of the coarsest format of weights, FP8 with three bits."""


@dataclass
class WayJudge:
    """Comparison of one way: which sites and tokens differ by more than noise."""

    limit_of: Callable[[str], float]
    usual: Callable[[str], float]
    sees_factors: bool = False
    values: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: dict[str, list[tuple[Tensor, Pass]]] = field(default_factory=lambda: defaultdict(list))
    factors: set[str] = field(default_factory=set)
    """Sites whose difference follows their values, which the noise of sums does not."""

    def __call__(self, site: str, actual: Tensor, expected: Tensor, call: Pass) -> None:
        self.values[site] += actual.numel()
        if self.sees_factors and has_a_factor(actual.double() - expected.double(), expected):
            self.factors.add(site)
        self.errors[site].append((token_errors(actual, expected, self.usual(site)), call))

    def differs(self, site: str) -> bool:
        return any(not bool((errors == 0).all()) for errors, _ in self.errors[site])

    def wrong(self, site: str) -> bool:
        limit = self.limit_of(site)
        return any(not bool((errors <= limit).all()) for errors, _ in self.errors[site])


class ModelRelations:
    """Relations of a model in a mode; `base` is the model as it is, in the same basis."""

    is_long = False
    """True where axes of a tensor may be as long as the text by chance."""

    def __init__(
        self,
        quantized: Quantized,
        base: Model,
        *,
        bitwise: bool = False,
        rebuilding: Rebuilding | None = None,
        rows: WholeRows | None = None,
    ) -> None:
        self.quantized, self.base, self.bitwise = quantized, base, bitwise
        self.model = quantized.model
        self.rebuilding = rebuilding
        self.report = RelationReport(f"{base.name} in {quantized.mode.name}")
        self.rows = rows_of(base) if rows is None else rows
        self.may_share_scales = False
        """A scale of a whole call is a note: the mode declares nothing else."""
        self.excuses_reference = False
        """What the reference does not keep, either, is left out: its tokens depend on others."""
        self._unsteady = ""
        """How calls on one input differ, as those with atomic sums do; empty where they agree."""
        self.sites = leaf_sites(self.model)
        self._recording: Recording | None = None
        self._noise: FloatNoise | None = None
        self._energies: dict[str, float] = {}

    @property
    def recording(self) -> Recording:
        """Return the run of all rows at once, which every way is compared with."""
        if self._recording is None:
            self._recording = self._record()
            if not self._recording.tensors:
                raise QgateError(
                    f"{self.base.name} has no tensor with {self.rows.rows} rows: its relations "
                    "cannot be compared. Let its samples and outputs have one entry per row in "
                    "front."
                )
        return self._recording

    def _record(self) -> Recording:
        return record(self.model, self.sites, self.rows.whole)

    @property
    def noise(self) -> FloatNoise:
        """Return the limits of float noise, measured on the model as it is."""
        if self._noise is None:
            dtype = self.quantized.mode.dtype
            unit = 0.0 if dtype is None else ARITHMETICS[dtype]
            few = self.rows.first(TOKENS)
            self._noise = measure_noise(self.base, leaf_sites(self.base), few, unit)
        return self._noise

    @noise.setter
    def noise(self, noise: FloatNoise) -> None:
        self._noise = noise

    def check(self, chosen: frozenset[str] = frozenset(RELATIONS)) -> RelationReport:
        """Compare all ways of the relations asked for; the report has what disagrees."""
        rebuilding = self._rebuilding_for(chosen)
        if rebuilding is not None and "process" in chosen:
            # The other process computes beside this one.
            with digests_elsewhere(rebuilding) as elsewhere:
                self._compare_ways(chosen, rebuilding)
                self._compare_elsewhere(elsewhere)
        else:
            self._compare_ways(chosen, rebuilding)
        if {"split K", "split N"} & chosen:
            self._compare_parts(chosen)
        order = [site for site in self.recording.tensors if site in self.report.sites]
        self.report.sites = {site: self.report.sites[site] for site in order}
        self.report.limits = {site: self._limit(site, "") for site in order}
        if not self.report.agreed and not self.report.disagreements:
            raise QgateError(
                f"no relation of {self.base.name} could be asked: "
                f"{'; '.join(f'{k}: {v}' for k, v in self.report.left_out.items()) or 'none asked'}"
            )
        return self.report

    def _compare_ways(self, chosen: frozenset[str], rebuilding: Rebuilding | None) -> None:
        """Run all ways in this process, the mode built again last."""
        for way in self._ways():
            if way.relation in chosen:
                self._compare(way)
        if rebuilding is not None and "restart" in chosen:
            way = Way("restart", "when the mode is built again", lambda: iter([self.rows.whole]))
            self._compare(way, rebuilding.quantized().model)

    def _rebuilding_for(self, chosen: frozenset[str]) -> Rebuilding | None:
        """Return how the mode is built again, if that was asked for and the model is small."""
        if self.rebuilding is None or not {"restart", "process"} & chosen:
            return None
        size = parameter_bytes(self.base)
        if size > LARGEST:
            self.report.left_out["restart, process"] = f"{size / 2**30:.0f} GiB are built once"
            return None
        return self.rebuilding

    def _ways(self) -> Iterator[Way]:
        whole = self.rows.whole
        for number in (2, 3):
            yield Way("repeat", f"in call {number} of the same input", lambda: iter([whole]))
        some = self.rows.some([0])
        other = Pass(some.sample, some.rows, some.tokens)
        yield Way("after others", "after another request", lambda: iter([other, whole]))
        listed = ways_of(self.model, self.rows, self.is_causal, self.report.left_out)
        yield from (way for way in listed if not (way.relation == LEFT and self.leaves_out_left()))

    def leaves_out_left(self) -> bool:
        """Tell if rounding at random goes by the number of a token; the report says so."""
        states = self.quantized.mode.states
        is_random = states is not None and states.is_stochastic
        if is_random:
            self.report.left_out[LEFT] = "rounding at random counts tokens, and padding with them"
        return is_random

    @cached_property
    def is_causal(self) -> bool:
        """Tell if the model as it is promises that later tokens change nothing before them."""
        return TextCalls.of(self.base).promises_order or predicts_next_tokens(self.base)

    def _limit(self, site: str, relation: str) -> float:
        is_exact = relation in EXACT and not self._unsteady
        return 0.0 if self.bitwise or is_exact else self.noise.limit(site, self.rows.tokens)

    def _usual(self, site: str) -> float:
        """Return the mean energy of the tokens recorded at a site."""
        if site not in self._energies:
            self._energies[site] = mean_energy(self.recording.tensors[site][0])
        return self._energies[site]

    def _compare(self, way: Way, model: Model | None = None) -> None:
        """Run a way; note the first site in the order of the model that disagrees."""
        is_repeat = way.relation == REPEAT
        judge = WayJudge(lambda site: self._limit(site, way.relation), self._usual, is_repeat)
        sites = self.sites if model is None else leaf_sites(model)
        model = model or self.model
        is_fed = is_repeat or way.relation not in EXACT or bool(self._unsteady)
        run = FedRun(model, sites, self.recording, judge, force=is_fed)
        try:
            run.run(way.calls())
        except QgateError as error:
            self.report.left_out[f"{way.relation} {way.words}"] = f"refused: {error}"
            return
        if run.missing:
            where = f"{way.relation}, {len(run.missing)} sites such as {min(run.missing)}"
            self.report.left_out[where] = "tensors there have no place for each row and token"
        if not judge.values:
            return
        for site, values in judge.values.items():
            self.report.count(site, values)
        differing = [s for s in self.recording.tensors if s in judge.errors and judge.differs(s)]
        if differing and is_repeat and not self._unsteady:
            self._unsteady = f"{differing[0]} has other bits {way.words}, within float noise"
        wrong = [site for site in differing if judge.wrong(site) or site in judge.factors]
        if is_fed and wrong:
            flipped = self._flipped(way, wrong, judge)
            for site in flipped:
                del judge.errors[site]
            wrong = [site for site in wrong if site not in flipped]
        if differing and not wrong and is_repeat and follows_a_seed(self.model):
            wrong = differing  # the noise of sums follows no seed
        is_excused = self.excuses_reference and way.relation in _OF_PLAIN_CALLS
        if wrong and is_excused and (also := self._wrong_in_reference(way, self.rows.whole)):
            own = [site for site in wrong if any_number(site) not in also]
            if len(own) < len(wrong):
                self.report.left_out[way.relation] = "the reference gives other values, too"
            if not own:
                return
            wrong = own
        if wrong:
            # Behind the first other bits of a call that nothing fed, all others follow from them.
            named = wrong[:1] if way.relation in EXACT else wrong
            disagreements = [self._disagreement(way, s, judge) for s in named]
            if self.may_share_scales and all(BATCH_SCALE in d.cause for d in disagreements):
                self.report.left_out[f"{way.relation} {way.words}"] = disagreements[0].cause
                self.report.agree(way.relation)
                return
            self.report.disagreements += disagreements
            return
        if differing and self._unsteady and not self.bitwise:
            self.report.left_out["the same bits in every call"] = self._unsteady
        self.report.agree(way.relation)
        for site, listed in judge.errors.items():
            worst = max(float(errors.max()) for errors, _ in listed)
            self.report.errors[site] = max(worst, self.report.errors.get(site, 0.0))

    def reference_agrees(self, way: Way, whole: Pass) -> bool:
        """Tell if the model as it is gives in another way what it gives for all rows at once."""
        return not self._wrong_in_reference(way, whole)

    def _wrong_in_reference(self, way: Way, whole: Pass) -> set[str]:
        """Return the sites at which the model as it is gives something else in another way."""
        judge = WayJudge(lambda site: self.noise.limit(site, self.rows.tokens), lambda _site: 0.0)
        sites = leaf_sites(self.base)
        recording = record(self.base, sites, whole, is_long=self.is_long)
        FedRun(self.base, sites, recording, judge).run(way.calls())
        return {any_number(site) for site in judge.errors if judge.wrong(site)}

    def _flipped(self, way: Way, wrong: Sequence[str], judge: WayJudge) -> list[str]:
        """Return sites that differ by codes of attention weights alone, which noise turned."""
        cores = {site: core for site, core in cores_by_site(self.model).items() if site in wrong}
        few = [
            site
            for site in cores
            if may_be_flips([errors for errors, _ in judge.errors[site]], judge.limit_of(site))
        ]
        if not few or self.bitwise:
            return []
        second_judge = WayJudge(judge.limit_of, judge.usual)
        with without_casts([cores[site] for site in few]):
            recording = self._record()
            FedRun(self.model, self.sites, recording, second_judge).run(way.calls())
        return [
            site for site in few if site in second_judge.errors and not second_judge.wrong(site)
        ]

    def _compare_elsewhere(self, wait: Callable[[], dict[str, str]]) -> None:
        """Compare a run of the mode built in another process."""
        try:
            elsewhere = wait()
        except Exception as error:  # of whatever cannot be sent, or made, there
            self.report.left_out["process"] = f"{type(error).__name__}: {one_line(error)}"
            return
        own_digests = digests(self.recording.tensors)
        differing = [site for site in own_digests if own_digests[site] != elsewhere.get(site, "")]
        if not differing:
            self.report.agree("process")
            return
        if self._unsteady and not self.bitwise:
            self.report.left_out["process"] = (
                f"its bits differ, as in one process: {self._unsteady}"
            )
            return
        site, count = differing[0], len(differing)
        self.report.disagreements.append(
            Disagreement(
                relation="process",
                way="in another process",
                site=site,
                after=(),
                wrong=count,
                compared=len(own_digests),
                where=f"{count} of {len(own_digests)} sites",
                error=math.nan,
                limit=0.0,
            )
        )

    def _compare_parts(self, chosen: frozenset[str]) -> None:
        """Compare linear layers in parts with the whole of them."""
        for part in part_results(self.quantized, self.recording, self.report.left_out):
            if part.relation not in chosen:
                continue
            # Two sums of parts are two sums in another order.
            limit = 0.0 if part.is_own else 2 * self.noise.limit(part.site)
            errors = token_errors(part.actual, part.expected)
            wrong = ~(errors <= limit)
            if part.site in self.recording.tensors:
                self.report.count(part.site, part.actual.numel())
            if not bool(wrong.any()):
                self.report.agree(part.relation)
                continue
            first = int(wrong.nonzero()[0])
            self.report.disagreements.append(
                Disagreement(
                    part.relation,
                    part.words,
                    part.site,
                    (),
                    int(wrong.sum()),
                    len(errors),
                    f"the values from row {first} on",
                    float(errors.max()),
                    limit,
                )
            )

    def _disagreement(self, way: Way, site: str, judge: WayJudge) -> Disagreement:
        limit = self._limit(site, way.relation)
        order = list(self.recording.tensors)
        before = tuple(order[max(0, order.index(site) - _BEFORE) : order.index(site)])
        wrong, compared, worst = 0, 0, 0.0
        places: list[tuple[int, int, int, int]] = []
        for errors, call in judge.errors[site]:
            bad = ~(errors <= limit)
            compared += len(errors)
            wrong += int(bad.sum())
            worst = max(worst, float(errors.max()))
            if len(errors) == sum(span.length for span in call.spans):
                row, token, source_row, source_token = (i[bad] for i in call.indices)
                places += zip(
                    source_row.tolist(),
                    source_token.tolist(),
                    token.tolist(),
                    row.tolist(),
                    strict=True,
                )
        return Disagreement(
            relation=way.relation,
            way=way.words,
            site=site,
            after=before,
            wrong=wrong,
            compared=compared,
            where=where(places, self.rows.tokens),
            error=worst,
            limit=limit,
            cause=explain(self.quantized, site, way.relation, self.recording),
        )


def checked_relations(relations: Sequence[str] | None) -> frozenset[str]:
    """Return the relations asked for; all of them by default."""
    if relations is None:
        return frozenset(RELATIONS)
    listed = [relations] if isinstance(relations, str) else list(relations)
    for relation in listed:
        if relation not in RELATIONS:
            raise unknown("relation", relation, RELATIONS)
    return frozenset(listed)


def cores_by_site(model: Model) -> dict[str, AttentionCore]:
    """Return attentions that cast their weights, by the site that the product of these reaches."""
    return {
        f"{name}.output:input": module
        for name, module in model.module.named_modules()
        if isinstance(module, AttentionCore) and getattr(module.attend.weights, "quantizer", None)
    }


def may_be_flips(errors: Sequence[Tensor], limit: float) -> bool:
    """Tell if errors of tokens beyond a limit are as few and as small as turned codes make them."""
    listed = torch.cat(list(errors))
    beyond = int((~(listed <= limit)).sum())
    return beyond <= max(1, _RARE * len(listed)) and bool((listed <= _CODE).all())


@contextmanager
def without_casts(cores: Sequence[AttentionCore]) -> Iterator[None]:
    """Leave the weights of attentions as softmax gives them."""
    casts = [core.attend.weights for core in cores]
    try:
        for core in cores:
            core.attend.weights = nn.Identity()  # type: ignore[assignment]
        yield
    finally:
        for core, cast in zip(cores, casts, strict=True):
            core.attend.weights = cast
