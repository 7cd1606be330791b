"""Gradients of the code between quantizers as gates tell them: with limits, words and rows."""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qgate.expected.dispatching import MovedOperators
from qgate.expected.noise import moved
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.gradient_factors import METRIC
from qgate.gate.measuring.gradient_segments import (
    OF_CODE,
    GradientPass,
    SegmentGradients,
    take_gradients,
)
from qgate.gate.measuring.segment_noise import limit_of
from qgate.gate.measuring.segment_probes import TRAINING, probes, several
from qgate.gate.measuring.segment_rows import SAYS_NOTHING, pattern
from qgate.gate.measuring.segment_views import Passed, plain_view, view_around_mixers, view_of
from qgate.gate.measuring.segments import Segments, SiteError
from qgate.gate.measuring.training_mode import (
    evaluated,
    recomputing_fault,
    training_fault,
    training_mode,
    trains_as_it_runs,
)
from qgate.hooks.recomputing import noted_checkpoints
from qgate.models import Model
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.modes import Quantized
from qgate.modes.applying import apply
from qgate.modes.formats import FORMAT_MODES
from qgate.text import listed

_STEP = 2.0**-18
"""The relative step when noise is measured: so small that no token goes to another expert."""
_ADDED_IN_HALF = 0.25
"""The limit for gradients of vectors in 16 bits: torch's layer norm on a CPU adds the tokens up in
that dtype, and 12 % of a sum over 1,000 tokens were lost."""


def gradient_noise(base: Model, sample: Any, name: str, is_half: bool) -> dict[str, float]:
    """Return by site how many rounding errors of tensors and gradients arrive at the worst row.

    Code in 16 bits rounds what each operator gives, so there those errors count as well.
    """
    segments = Segments(base, base, plain_view(base))
    run = take_gradients(segments, sample)
    if not run.outputs:
        return {}
    generator = torch.Generator().manual_seed(0)

    def near(tensor: Tensor) -> Tensor:
        near: Tensor = moved(tensor, _STEP, generator).to(tensor.dtype)
        return near

    def near_all(by_site: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        return {
            site: [None if tensor is None else near(tensor) for tensor in tensors]
            for site, tensors in by_site.items()
        }

    passed = Passed(run.passed.actual, near_all(run.passed.forwarded))
    outputs = {name: near(gradient) for name, gradient in run.outputs.items()}
    other = GradientPass(passed, near_all(run.of_ends), run.read, run.parameters, outputs)
    gradients = SegmentGradients(segments)
    with MovedOperators(near) if is_half else nullcontext():
        gradients.compare(sample, name, other)
    return {
        site: math.sqrt(max(errors.worst.error, 0.0)) / _STEP
        for site, errors in gradients.errors.items()
    }


def gradient_faults(
    gradients: SegmentGradients,
    sensitivities: Mapping[str, float],
    right: Callable[[], SegmentGradients | None],
) -> Iterator[tuple[str, str]]:
    """Yield the sites whose gradient is not what FP32 code makes, with what is wrong.

    right   gradients of right code in that dtype, where one in 16 bits has a factor
    """
    for site, errors in gradients.errors.items():
        limit = limit_of(errors, sensitivities.get(site, 1.0))
        is_added_in_half = errors.unit > 0 and site in gradients.vectors
        limit = max(limit, _ADDED_IN_HALF) if is_added_in_half else limit
        is_wrong = not errors.worst.error <= limit
        if is_wrong and errors.unit > 0 and _are_of_right_code(errors, site, right()):
            continue
        words = _pattern(errors, limit, site in gradients.parameters) if is_wrong else ""
        is_unnamed = not words or re.search(f"{SAYS_NOTHING}|^tokens [^c]* are wrong", words)
        is_a_factor = is_unnamed and not is_added_in_half and gradients.factor(site)
        if is_a_factor and (factor := gradients.factor(site, right())):
            yield site, factor
        elif is_wrong:
            beyond = [kind for kind, w in errors.passes.items() if not w.error <= limit]
            mode = f" in {TRAINING}" * (beyond == [TRAINING])
            yield site, f"is not what {OF_CODE}{mode}: {words}"
    yield from gradients.passes_on.items()


def _are_of_right_code(errors: SiteError, site: str, right: SegmentGradients | None) -> bool:
    """Tell if errors in 16 bits are those of right code, which rounds as this one does.

    Behind a sum that almost cancels an activation passes another gradient, by a rounding of it.
    """
    if right is None or site not in right.errors:
        return False
    of_right, places = right.errors[site], {errors.worst.row, right.errors[site].worst.row}
    sides = (errors.squared_error, of_right.squared_error), (errors.energy, of_right.energy)
    return len(places) == 1 and all(math.isclose(*pair, rel_tol=1e-3) for pair in sides)


def _pattern(errors: SiteError, limit: float, is_parameter: bool) -> str:
    """Describe the rows that are wrong, those that take no gradient first."""
    worst = errors.clearest(limit)
    actual, expected = worst.actual, worst.expected
    assert actual is not None
    assert expected is not None
    of_kind = "rows" if is_parameter else "tokens"
    takes = expected.any(-1)
    lost = takes & ~actual.any(-1)
    if bool((lost == takes).all()):
        return "no gradient arrives"
    if bool(lost.any()):
        first = listed([*map(str, lost.reshape(-1).nonzero().flatten().tolist())], 5)
        return f"no gradient arrives at {int(lost.sum())} of {lost.numel()} {of_kind} ({first})"
    words = pattern(worst, limit)
    return words.replace("token", "row") if is_parameter else f"{words} ({worst.place()})"


@dataclass
class GradientCode:
    """Gradients of a model's modes at all of their sites, each held at those of FP32 code."""

    model: Model
    layer_of: Callable[[str], str]
    _noise: dict[tuple[str, bool], dict[str, float]] = field(default_factory=dict)
    _trains: dict[str, bool] = field(default_factory=dict)

    def attach(
        self, rows: Sequence[Measured], quantized: Quantized, meant: Quantized
    ) -> list[Measured]:
        """Return rows of gradients with what was held beside them: each with its layer's row."""
        base = self.model.in_basis(quantized.model.basis)
        view = (
            view_of(quantized, base, meant)
            if quantized.mode.choices is None
            else view_around_mixers(quantized, base)
        )
        if not view.ports or not rows:
            return [*rows]
        segments = Segments(quantized.model, base, view)
        gradients = SegmentGradients(segments, quantized.plan.quantizers())
        sample, name = self.model.inputs[0], "sample 0"
        gradients.compare(sample, name, take_gradients(segments, sample))
        probe, probe_name = next(probes(several(self.model.inputs)))
        fault: tuple[str, str] | None = None
        recomputed: tuple[str, str] | None = None
        # Some models take samples of one length alone.
        with suppress(*LENGTH_REFUSALS), noted_checkpoints() as checkpoints:
            if base.basis not in self._trains:
                self._trains[base.basis] = trains_as_it_runs(base, probe)
            if self._trains[base.basis]:
                right = evaluated(segments, probe)
                with training_mode(quantized.model.module):
                    run = take_gradients(segments, probe)
                    if checkpoints:
                        recomputed = recomputing_fault(quantized.model, probe)
                probe_name = TRAINING
                fault = training_fault(right, run.passed.actual)
            else:
                run = take_gradients(segments, probe)
            sample, name = probe, probe_name
        if sample is probe and fault is None:
            gradients.compare(sample, name, run)
        is_half = any(errors.unit for errors in gradients.errors.values())
        key = (base.basis, is_half)
        if key not in self._noise:
            self._noise[key] = gradient_noise(base, sample, name, is_half)
        runs = [(self.model.inputs[0], "sample 0"), (sample, name)][: 1 + (sample is probe)]

        @functools.cache
        def of_right_code() -> SegmentGradients | None:
            return self._in_half(base, gradients.half, runs)

        faults = dict(
            [fault] if fault else gradient_faults(gradients, self._noise[key], of_right_code)
        )
        if recomputed and not faults:
            faults[recomputed[0]] = recomputed[1]
        figures: dict[str, list[Conformance]] = defaultdict(list)
        counts: dict[str, int] = defaultdict(int)
        for site, values in gradients.values.items():
            row = self._row_of(site, rows)
            if site in faults:
                words = faults[site]
                if site != row:
                    words = f"{'' if fault else 'the gradient at '}{site} {words}"
                figures[row].append(Conformance(METRIC, values, values, words))
            else:
                counts[row] += values
        for row, values in counts.items():
            about = "gradients at sites and of parameters"
            figures[row].append(Conformance(METRIC, values, 0, about))
        return [
            replace(row, conformance=(*row.conformance, *figures.get(row.site, ()))) for row in rows
        ]

    def _in_half(
        self, base: Model, dtype: torch.dtype | None, runs: Sequence[tuple[Any, str]]
    ) -> SegmentGradients | None:
        """Return gradients of the reference's own code in 16 bits, given samples with names."""
        modes = [
            mode
            for mode in FORMAT_MODES
            if dtype is not None and f"torch.{mode.dtype}" == str(dtype)
        ]
        if not modes or base is not self.model.in_basis(modes[0].basis):
            return None
        quantized = apply(modes[0], self.model)
        segments = Segments(quantized.model, base, view_of(quantized, base, quantized))
        gradients = SegmentGradients(segments)
        for sample, name in runs:
            gradients.compare(sample, name, take_gradients(segments, sample))
        return gradients

    def _row_of(self, site: str, rows: Sequence[Measured]) -> str:
        """Return the row that a site is told with: its own, that of its layer, or the last one."""
        names = [row.site for row in rows]
        if site in names:
            return site
        layer = self.layer_of(site.partition(":")[0])
        return next((row.site for row in rows if layer and row.layer == layer), names[-1])
