"""Gates of two engines on the same tokens: their probabilities, their weights, their modules.

Another set of tokens than the accepted one is an error, and no failure. Weights that differ by more
than rounding are findings, which no update of the accepted figures accepts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qgate.baselines import Origin
from qgate.checkpoints.recipe_texts import fold_numbers, fold_texts
from qgate.comparing.dump_comparison import compare_dumps
from qgate.comparing.dump_differences import DumpComparison, PairErrors
from qgate.engines.causes import find_causes
from qgate.engines.comparison import matched_weights, site_of
from qgate.engines.compute import TokenValues, figures_of, values_of
from qgate.engines.opening import EnginePair, open_pair
from qgate.engines.record import TokenFigures, WeightDifference
from qgate.engines.texts import carrier_text, difference_text
from qgate.engines.units import UnitFigures, mean_noise, single_noise, tokens_text, unit_figures
from qgate.engines.weights import MatchedWeights
from qgate.errors import QgateError, unknown
from qgate.gate.measured import Measured
from qgate.gate.policy import FINDINGS, Policy
from qgate.gate.sessions import GateSession, Outcome, gate
from qgate.gate.subjects import Subject, commit_here
from qgate.metrics import METRICS, sample_number
from qgate.modes import Mode

if TYPE_CHECKING:
    from qgate.gate.checks import Verdict

TOKENS, WEIGHTS, SITES = "tokens", "weights", "sites"
PARTS = (TOKENS, WEIGHTS, SITES)
"""Names of the gates, and of their accepted records."""
SCOPE = "engines"
ALL, SAMPLE, TOKEN, FLIPS = "all tokens", "worst sample", "worst token", "most likely tokens"
"""Sites of the gate of tokens."""
PLAN = "quantizer"
_LAYER = "engines"
_NOISE = 1e-13
"""Nats, or relative error, that sums in another order make of equal values."""


class EngineSubject(Subject):
    """Two engines under a name, with the options that name them.

    weights  checkpoints that the engines loaded; without them dumps tell, if these hold weights
    head     the module of dumps that gives logits
    """

    def __init__(
        self,
        actual: str,
        reference: str,
        name: str,
        weights: tuple[str, str] | None = None,
        head: str = "",
        options: Sequence[tuple[str, ...]] = (),
    ) -> None:
        self.actual, self.reference, self.name = actual, reference, name
        self.checkpoints, self.head = weights, head
        self.options = list(options) or [("engines", actual, reference), ("engines-name", name)]

    def origin(self) -> Origin:
        tokens = tokens_text(self.pair.samples)
        return Origin.of_subject(
            "engines", self.name, str(torch.__version__), commit_here(), tokens
        )

    def layer_of(self, site: str) -> str:  # noqa: ARG002
        return _LAYER

    @cached_property
    def pair(self) -> EnginePair:
        """Open both; an error if they cannot be read or are not of the same tokens."""
        return open_pair(self.actual, self.reference, self.head)

    @cached_property
    def parts(self) -> list[str]:
        """List the gates that there is something to compare for."""
        dumps = self.pair.actual.dump is not None and self.pair.reference.dump is not None
        present = {TOKENS: True, WEIGHTS: self.weights is not None, SITES: dumps}
        return [part for part in PARTS if present[part]]

    @cached_property
    def values(self) -> list[TokenValues]:
        return values_of(self.pair.samples)

    @cached_property
    def figures(self) -> TokenFigures:
        return figures_of(self.pair.samples, self.values)

    @cached_property
    def units(self) -> UnitFigures:
        return unit_figures(self.pair.samples, self.values)

    @cached_property
    def weights(self) -> MatchedWeights | None:
        return matched_weights(self.pair, self.checkpoints)

    @cached_property
    def sites(self) -> DumpComparison:
        actual, reference = self.pair.actual.dump, self.pair.reference.dump
        if actual is None or reference is None:
            raise QgateError(f"{self.name}: the engines are no dumps, so no modules are compared.")
        return compare_dumps(actual, reference, operation="forward")


class EngineGates(GateSession):
    """Gates of two engines."""

    subject: EngineSubject

    def __init__(
        self, subject: EngineSubject, baselines: Path, policy: Policy, **options: Any
    ) -> None:
        declared = policy.without_findings(SCOPE, "gates of engines")
        super().__init__(subject, baselines, declared, **options)

    # Before anything is compared ------------------------------------------------------------------

    def check_accepted(self) -> None:
        """Refuse other tokens than the accepted ones, and files that lack what was accepted."""
        recorded, subject = self.ledger.recorded, self.subject
        if recorded is None or self.ledger.updating is not None:
            return
        origin = self.origin()
        if recorded.kind == origin.kind and recorded.inputs != origin.inputs:
            then, now = _counts(recorded.inputs), _counts(origin.inputs)
            words = f"{then} then, {now} now" if then != now else f"{now}, with other ids"
            raise QgateError(
                f"the engines scored other tokens than those that were accepted for "
                f"{subject.name} ({words}): let them score the same ones, give another "
                f"{self.spelled('engines-name')}, or accept these with "
                f"{self.spelled('update-baselines')}."
            )
        lacking = [part for part in self.store.modes() if part not in subject.parts]
        if recorded.kind == origin.kind and lacking:
            ways = {
                WEIGHTS: f"dumps with weights, or checkpoints by {self.spelled('engines-weights')}",
                SITES: "dumps of modules",
            }
            part = lacking[0]
            raise QgateError(
                f"the accepted record of {subject.name} has {part}, and nothing tells them now: "
                f"give {ways.get(part, 'the files that it was made of')}, or another "
                f"{self.spelled('engines-name')}."
            )

    def check_policy(self, policy: Policy | None = None) -> None:
        """Refuse a marker, or a rule for these engines by name, that fits no site or gate."""
        narrow = (policy or self.policy).own()
        if any(setting.sites for setting in narrow.settings):
            narrow.check_sites(self._sites())
        narrow.check_modes(PARTS)

    def _sites(self) -> list[str]:
        """List all sites that a rule or marker may name."""
        weights, names = self.subject.weights, [ALL, SAMPLE, TOKEN, FLIPS]
        if weights is not None:
            names += [*map(fold_numbers, weights.names), *(d.name for d in weights.differences)]
        if SITES in self.subject.parts:
            names += [row.site for row in self._site_rows()]
        return names

    def notes(self) -> list[str]:
        """Say which gates there is nothing to compare for."""
        whys = {
            WEIGHTS: "weights are not compared: name the checkpoints by "
            f"{self.spelled('engines-weights')} A B",
            SITES: "modules are not compared: not both engines are dumps",
        }
        return [why for part, why in whys.items() if part not in self.subject.parts]

    def layers(self, suite: str) -> list[str]:  # noqa: ARG002
        """List the parts that there is something to compare for."""
        return self.subject.parts

    # The gates ------------------------------------------------------------------------------------

    @gate
    def part(self, suite: str, part: str) -> Outcome:
        """Judge one of the parts by its name."""
        if part not in PARTS:
            raise unknown("part of engines", part, PARTS)
        gates = {TOKENS: self.tokens, WEIGHTS: self.weights, SITES: self.sites}
        return gates[part](suite)

    def tokens(self, suite: str) -> Outcome:
        """Judge how far apart the probabilities are: over all tokens, a sample, and a token."""
        figures, units = self.subject.figures, self.subject.units
        divergence = "kl" if units.is_kl else "k3"
        values: dict[str, float | None] = {
            "compared_tokens": float(figures.tokens),
            "k3": figures.k3.mean,
            "equal_share": figures.equal_share,
            "kl": None if figures.kl is None else figures.kl.mean,
        }
        means, largest = units.means, units.largest
        before = {site: self._accepted_units(suite, site) for site in (ALL, TOKEN)}
        rows = [
            _row(
                ALL,
                0,
                values,
                nonfinite=figures.not_finite,
                floor=max(_NOISE, mean_noise(before[ALL], means)),
                parts=_unit_parts(divergence, means),
                gated=("compared_tokens", divergence),
            ),
            _row(
                SAMPLE,
                1,
                {divergence: max(means, default=None)},
                floor=max(_NOISE, single_noise(before[ALL], means)),
                gated=(divergence,),
            ),
            _row(
                TOKEN,
                2,
                {"largest_logprob": figures.magnitude.largest},
                floor=max(_NOISE, single_noise(before[TOKEN], largest)),
                parts=_unit_parts("largest_logprob", largest),
                gated=("largest_logprob",),
            ),
            self._flips_row(suite),
        ]
        return self._judge(suite, Mode(TOKENS, "the probabilities of tokens"), rows)

    def _flips_row(self, suite: str) -> Measured:
        """Return the share of flips, which of two runs moves as counts of rare events do."""
        figures = self.subject.figures
        if figures.flips is None:
            return _row(FLIPS, 3, {"flips_share": None})
        positions = figures.flip_positions
        before = float(self._accepted_of(suite, FLIPS).get("flips_share", 0.0))
        noise = 2 * math.sqrt(2 * before * positions) / positions
        values = {"flips_share": figures.flips.mean}
        return _row(FLIPS, 3, values, floor=noise, grain=1 / positions, gated=("flips_share",))

    def _accepted_units(self, suite: str, site: str) -> dict[int, float]:
        """Return the accepted figures of units by their number."""
        return {
            number: float(value)
            for name, value in self._accepted_of(suite, site).items()
            if (number := sample_number(METRICS.find(name).part)) is not None
        }

    def _accepted_of(self, suite: str, site: str) -> Mapping[str, float | str]:
        return self.ledger.accepted(TOKENS, False).by_site.get((suite, site, SCOPE), {})

    def weights(self, suite: str) -> Outcome:
        """Judge whether both have the same weights: equal, rounded as accepted, or not."""
        matched = self.subject.weights
        if matched is None:
            raise QgateError(
                f"no weights of {self.subject.name} are there to compare: give dumps that hold "
                f"them, or checkpoints by {self.spelled('engines-weights')} A B."
            )
        rounded = {d.name: d for d in matched.differences if d.relation == "rounded"}
        findings = [d for d in matched.differences if d.relation != "rounded"]
        rows = [
            _row(d.name, order, {FINDINGS: 1.0}, why={FINDINGS: difference_text(d)})
            for order, d in enumerate(findings)
        ]
        texts = fold_texts((name, _relation(rounded.get(name))) for name in matched.names)
        rows += [
            _row(f"{site} of both", order, {FINDINGS: 0.0}, texts={PLAN: text}, gated=(PLAN,))
            for order, (site, text) in enumerate(texts.items(), len(rows))
        ]
        return self._judge(suite, Mode(WEIGHTS, "the weights of both"), rows)

    def sites(self, suite: str) -> Outcome:
        """Judge the outputs of modules, of which the first beyond its accepted error is named."""
        return self._judge(suite, Mode(SITES, "the modules of both"), self._site_rows())

    def _site_rows(self) -> list[Measured]:
        grouped: dict[str, list[PairErrors]] = {}
        for pair in self.subject.sites.pairs:
            if pair.kind != "summary":
                grouped.setdefault(site_of(pair.title), []).append(pair)
        if not grouped:
            raise QgateError(
                f"no module of {self.subject.name} has values in both dumps: nothing is compared."
            )
        return [_site_row(site, at, pairs) for at, (site, pairs) in enumerate(grouped.items())]

    def diagnose(self, mode: Mode, verdict: Verdict) -> Mapping[tuple[str, str], str]:
        """Name what explains the difference, and which token, sample or module it begins at."""
        if mode.name == TOKENS:
            carrier = carrier_text(self.subject.figures)
            causes = [*find_causes(self.subject.pair.samples), *([carrier] if carrier else [])]
            return {row.key: "; ".join(causes) for row in verdict.measured if causes}
        first = self.subject.sites.first if mode.name == SITES else None
        if first is None or first.origin != "local":
            return {}
        return {
            (site_of(first.title), SCOPE): "it is the first that differs while the inputs agree"
        }

    def _judge(self, suite: str, mode: Mode, rows: Sequence[Measured]) -> Outcome:
        notes = {"engines": f"{self.subject.actual} and {self.subject.reference}"}
        return self.judge(suite, mode, rows, _LAYER, notes, label=SCOPE, whole=[_LAYER])


def _site_row(site: str, order: int, pairs: Sequence[PairErrors]) -> Measured:
    """Return one tensor of a module, of several calls the worst."""
    unfit = next((pair.why for pair in pairs if pair.kind == "unfit"), "")
    if unfit:
        return _row(site, order, {FINDINGS: 1.0}, why={FINDINGS: f"cannot be compared: {unfit}"})
    values = {
        FINDINGS: 0.0,
        "relative_mse": _largest(pair.relative_mse for pair in pairs),
        "max_abs": _largest(pair.max_abs for pair in pairs),
    }
    bad = sum(pair.nonfinite for pair in pairs)
    return _row(site, order, values, nonfinite=bad, floor=_NOISE, gated=("relative_mse",))


def _largest(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.nan if any(map(math.isnan, numbers)) else max(numbers)


def _relation(difference: WeightDifference | None) -> str:
    return "equal" if difference is None else f"rounded ({' and '.join(difference.dtypes)})"


def _unit_parts(metric: str, values: Sequence[float]) -> dict[str, dict[str, float | None]]:
    return {f"sample_{at}": {metric: value} for at, value in enumerate(values)}


def _row(site: str, order: int, values: Mapping[str, float | None], **more: Any) -> Measured:
    gated = more.pop("gated", ())
    why = {**dict.fromkeys(gated, ""), **more.pop("why", {})}
    values = {FINDINGS: 0.0, **values}
    return Measured(
        site=site,
        layer=_LAYER,
        scope=SCOPE,
        values=values,
        order=order,
        nonfinite=more.pop("nonfinite", 0),
        gated=gated,
        why=why,
        **more,
    )


def _counts(inputs: str) -> str:
    """Return the counts of samples and tokens without their hash."""
    return inputs.removeprefix("engines ").rpartition(" ")[0]
