"""Gradients of the code between quantizers, against those of FP32 code fed with the run's tensors.

While the model under test runs and its loss goes back, the tensors at its sites are taken with
their gradients. The reference then runs on the same sample; every site gets the run's tensor, and
the tensor that its own code made there gets the run's gradient. What arrives at the beginning of
each segment, and at each parameter in it, is what right code makes of the gradients behind it, to
float noise. A gradient that is wrong later in the model is no error of the code before it.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qgate.capture.running import LOSS_SCALE, loss_of
from qgate.devices import exact_math
from qgate.expected.dispatching import MovedOperators
from qgate.expected.intermediates import HALVES
from qgate.expected.noise import mover
from qgate.formats.quantizer import Quantizer, inside_range
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.site_errors import check_alike
from qgate.gate.segments.gradient_factors import METRIC
from qgate.gate.segments.noise import limit_of
from qgate.gate.segments.probes import TRAINING, probes, several
from qgate.gate.segments.rows import SAYS_NOTHING, pattern
from qgate.gate.segments.segments import Segments, SiteError, Worst
from qgate.gate.segments.training_mode import (
    evaluated,
    recomputing_fault,
    trained_parameters,
    training_fault,
    training_mode,
    trains_as_it_runs,
)
from qgate.gate.segments.views import (
    Passed,
    plain_view,
    swapped,
    view_around_mixers,
    view_of,
)
from qgate.hooks.recomputing import noted_checkpoints
from qgate.hooks.tapping import tap_sites
from qgate.models import Model, Site
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import real_tokens
from qgate.modes import Quantized
from qgate.modes.applying import apply
from qgate.modes.formats import FORMAT_MODES
from qgate.text import listed

_STEP = 2.0**-18
"""The relative step when noise is measured: so small that no token goes to another expert."""
_ADDED_IN_HALF = 0.25
"""The limit for gradients of vectors in 16 bits: torch's layer norm on a CPU adds the tokens up in
that dtype, and 12 % of a sum over 1,000 tokens were lost."""

_TWIN_ROUNDINGS = 3.0
"""Roundings by which a row may be off that of the reference's code in the same dtype: gradients of
several readers are added in another order."""
_MORE, _MORE_OF_ROW = 1.1, 2.0
"""Times the error of right code, of all rows and of the worst one, from which code is wrong."""
_OTHER: Any = object()
"""In place of a gradient: code that the run has otherwise depends on the tensor."""
_LEAST_FACTOR = 1e-3
"""Distance of a factor in 16 bits from 1 from which it is a fault: rounded weights make less."""
_RIGHT_ROUNDINGS = 4.0
"""Roundings that a factor in right code has at most: attention of tiny-llama has 2.2 in bf16."""
_MOST = 0.5
"""The largest distance that is called a factor: beyond, something else is wrong."""
_SIGMAS, _LEAST_ROWS = 6.0, 32
"""Times its noise that such a factor has, over at least so many rows."""
Comparison = Callable[[SiteError, SiteError], bool]
OF_CODE = "FP32 code makes of the gradients behind it"
OF_TWIN = "is not what the reference's code in {} makes of the gradients behind it"


def gradient_noise(base: Model, sample: Any, name: str, is_half: bool) -> dict[str, float]:
    """Return by site how many rounding errors of tensors and gradients arrive at the worst row.

    Code in 16 bits rounds what each operator gives, so there those errors count as well.
    """
    segments = Segments(base, base, plain_view(base))
    run = take_gradients(segments, sample)
    if not run.outputs:
        return {}
    near = mover(_STEP)

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


def twin_faults(
    twin: SegmentGradients,
    known: Mapping[str, str],
    right: Callable[[], SegmentGradients],
    compared: Callable[[str, Comparison], bool],
    dtype: str,
) -> Iterator[tuple[str, str]]:
    """Yield faults of gradients in 16 bits, given those that FP32 code finds.

    What the reference's own code makes in that dtype, to the last bit, is right. Where sums in
    another order have other bits, they have them in a run of that code, too. Code that rounds in
    other places on the way back, as a fused activation does, is as near to FP32 as that code. What
    is nearer has rounded less.

    right     gradients of such a run
    compared  tells if a comparison of a site's gradient with that run's holds: how far both are
              from FP32
    """
    for site, errors in twin.errors.items():
        error = errors.worst.error
        if not error > 0 and not math.isnan(error):
            continue
        of_right = right().errors.get(site)
        noise = 0.0 if of_right is None else of_right.worst.error
        limit = max((_TWIN_ROUNDINGS * errors.unit) ** 2, 2 * noise)
        if site in known:
            yield site, known[site]
        elif (not error <= limit and not compared(site, _is_nearer)) or (
            of_right is not None
            and noise == 0
            and not all(_are_neighbors(worst, errors.unit) for worst in errors.passes.values())
            and compared(site, _is_farther)
        ):
            words = _pattern(errors, min(limit, error / 2), site in twin.parameters)
            yield site, f"{OF_TWIN.format(dtype)}: {words}"
    yield from ((site, words) for site, words in known.items() if site not in twin.errors)


def _beside_twin(
    beside: Segments,
    dtype: str,
    passes: Sequence[tuple[Any, str, GradientPass]],
    gradients: SegmentGradients,
    faults: Mapping[str, str],
    right: Callable[[], SegmentGradients | None],
) -> dict[str, str]:
    """Return the faults that are left beside the reference's own code in the dtype of the run.

    beside  the model under test, and in the place of the reference its code in that dtype
    """
    twin = gradients_of(beside, passes)
    if twin.is_other_code:  # which may round otherwise on the way back, too
        return dict(faults)

    @functools.cache
    def of_twin() -> SegmentGradients:
        alone = replace(beside, model=beside.base, errors={})
        runs = [(sample, name, take_gradients(alone, sample)) for sample, name, _run in passes]
        return gradients_of(alone, runs)

    def compared(site: str, compare: Comparison) -> bool:
        right_gradients, errors = right(), gradients.errors.get(site)
        of_right = None if right_gradients is None else right_gradients.errors.get(site)
        return errors is not None and of_right is not None and compare(errors, of_right)

    return dict(twin_faults(twin, faults, of_twin, compared, dtype))


def _is_farther(errors: SiteError, of_right: SiteError) -> bool:
    """Tell if errors in 16 bits are larger than those of right code, in all or in one row."""
    in_all = errors.relative_mse <= _MORE * of_right.relative_mse
    return not (in_all and errors.worst.error <= _MORE_OF_ROW * of_right.worst.error)


def _are_neighbors(worst: Worst, unit: float) -> bool:
    """Tell if each value is the expected one or the next in a dtype, as other sums may round it."""
    if worst.actual is None or worst.expected is None:
        return True
    expected = worst.expected
    room = 2 * unit * expected.abs().clamp_min(float(expected.square().mean().sqrt()))
    return bool(((worst.actual - expected).abs() <= room).all())


def _is_nearer(errors: SiteError, of_right: SiteError) -> bool:
    """Tell if errors in 16 bits are smaller than those of right code, in all and in one row."""
    in_all = _MORE * errors.relative_mse <= of_right.relative_mse
    return in_all and errors.worst.error <= of_right.worst.error


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
        first = (sample, name, take_gradients(segments, sample))
        gradients.compare(*first)
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
                    if checkpoints and run.outputs:
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
        passes = [first, *([(sample, name, run)] if sample is probe else [])]
        runs = [(taken, title) for taken, title, _run in passes]

        @functools.cache
        def of_right_code() -> SegmentGradients | None:
            return self._in_half(base, gradients.half, runs)

        faults = dict(
            [fault] if fault else gradient_faults(gradients, self._noise[key], of_right_code)
        )
        mode = quantized.mode
        if mode.dtype is not None and not mode.own and base.device.type == "cpu" and not fault:
            beside = Segments(quantized.model, apply(mode, base).model, replace(view, weights={}))
            faults = _beside_twin(beside, mode.dtype, passes, gradients, faults, of_right_code)
        if recomputed and not faults:
            faults[recomputed[0]] = recomputed[1]
        return self._with_faults(rows, gradients.values, faults, fault is not None)

    def _with_faults(
        self,
        rows: Sequence[Measured],
        values_at: Mapping[str, int],
        faults: Mapping[str, str],
        of_training: bool,
    ) -> list[Measured]:
        """Return rows with the numbers of gradients, and the words of those that are wrong."""
        figures: dict[str, list[Conformance]] = defaultdict(list)
        counts: dict[str, int] = defaultdict(int)
        for site, values in values_at.items():
            row = self._row_of(site, rows)
            if site in faults:
                words = faults[site]
                if site != row:
                    words = f"{'' if of_training else 'the gradient at '}{site} {words}"
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
        return gradients_of(segments, [(*run, take_gradients(segments, run[0])) for run in runs])

    def _row_of(self, site: str, rows: Sequence[Measured]) -> str:
        """Return the row that a site is told with: its own, that of its layer, or the last one."""
        names = [row.site for row in rows]
        if site in names:
            return site
        layer = self.layer_of(site.partition(":")[0])
        return next((row.site for row in rows if layer and row.layer == layer), names[-1])


@dataclass
class GradientPass:
    """Tensors of one pass by site with their gradients, and the gradients of the parameters.

    of_ends      gradients of what code made at a site, before a quantizer there
    read         gradients of what the code behind the site reads
    parameters   gradients by name of the parameter
    outputs      the gradients of the loss at what the model returns, by name
    """

    passed: Passed
    of_ends: Mapping[str, Sequence[Tensor | None]]
    read: Mapping[str, Sequence[Tensor | None]]
    parameters: Mapping[str, Tensor | None]
    outputs: Mapping[str, Tensor]


class _Tap(torch.autograd.Function):
    """A copy of a tensor, which hands over the gradient that arrives at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        ctx.keep = keep
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.keep(gradients[0].detach())
        return gradients[0], None


def gradients_of(
    segments: Segments, passes: Sequence[tuple[Any, str, GradientPass]]
) -> SegmentGradients:
    """Hold passes of a run, each a sample with its name and gradients, at the reference's code."""
    gradients = SegmentGradients(segments)
    for sample, name, run in passes:
        gradients.compare(sample, name, run)
    return gradients


def take_gradients(segments: Segments, sample: Any) -> GradientPass:
    """Run a sample forward and its loss backward, and keep what passes the sites."""
    model, view = segments.model, segments.view
    tensors: dict[str, list[Tensor]] = defaultdict(list)
    gradients: dict[str, list[Any]] = defaultdict(list)

    def take(port: Any, tensor: Tensor) -> Tensor | None:
        return tapped(port.name, tensor)

    def tapped(name: str, tensor: Tensor) -> Tensor | None:
        of_site, index = gradients[name], len(gradients[name])
        tensors[name].append(tensor.detach().clone())
        of_site.append(None)
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return None
        copied: Tensor = _Tap.apply(tensor, lambda g: of_site.__setitem__(index, g))  # type: ignore[no-untyped-call]
        return copied

    first = [port for port in view.ports if port.first]
    after = [port for port in view.ports if not port.first]
    parameters = trained_parameters(model.module)
    with (
        torch.enable_grad(),
        segments.routers.record(),
        tap_sites(model.module, first, take, first=True),
        tap_sites(model.module, after, take),
    ):
        outputs = model.outputs(sample)
        copies = {name: tapped(name, output) for name, output in outputs.items()}
        if copies["logits"] is None or not parameters:
            return GradientPass(Passed(), {}, {}, {}, {})
        outputs |= {name: copied for name, copied in copies.items() if copied is not None}
        with exact_math():
            loss = loss_of(outputs, sample) * LOSS_SCALE
            of_parameters = torch.autograd.grad(loss, [*parameters.values()], allow_unused=True)
    of_outputs = {name: gradients.pop(name)[0] for name in outputs}
    for name in outputs:
        del tensors[name]
    by_site = view.read(gradients)
    return GradientPass(
        view.read(tensors), by_site.actual, by_site.forwarded,
        dict(zip(parameters, of_parameters, strict=True)),
        {name: gradient for name, gradient in of_outputs.items() if gradient is not None},
    )  # fmt: skip


@dataclass
class _Factor:
    """Sums over the rows of a gradient in 16 bits: a factor in all of them is no rounding."""

    excess: float = 0.0
    energy: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rows: int = 0
    most_right: float = 0.0

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Add the rows of a gradient; of a vector each element is one."""
        width = expected.shape[-1] if expected.dim() > 1 else 1
        right = expected.double().reshape(-1, width)
        rounding = torch.finfo(actual.dtype).eps * 0.5
        self.most_right = _RIGHT_ROUNDINGS * rounding
        excess = ((actual.double().reshape(-1, width) - right) * right).sum(-1).nan_to_num_(0.0)
        energy = right.square().sum(-1)
        self.excess += float(excess.sum())
        self.energy += float(energy.sum())
        pairs = (excess, excess), (excess, energy), (energy, energy)
        sums = (float(a.dot(b)) for a, b in pairs)
        self.squares = tuple(map(sum, zip(self.squares, sums, strict=True)))  # type: ignore[assignment]
        self.rows += int((energy > 0).sum())

    @property
    def size(self) -> float:
        return self.excess / self.energy if self.energy else 0.0

    def words(self, right: float = 0.0) -> str:
        """Name the factor, if there is one: it explains what is no noise between the rows.

        right   how far from 1 it is in right code of that dtype
        """
        size = self.size
        own, mixed, squared = self.squares
        noise = math.sqrt(max(own - 2 * size * mixed + size * size * squared, 0.0))
        right = max(min(right, self.most_right), -self.most_right)
        is_clear = abs(self.excess - right * self.energy) > _SIGMAS * noise
        if self.rows < _LEAST_ROWS or not _LEAST_FACTOR < abs(size - right) < _MOST or not is_clear:
            return ""
        return f"is {1 + size:.4g} times what {OF_CODE}"


@dataclass
class SegmentGradients:
    """Errors of the gradients of one mode, added pass by pass.

    passes_on    by site the words for a quantizer that hands on another gradient
    values       how many values were compared of each gradient
    parameters   the gradients among them that are of parameters
    vectors      those among these with one dimension
    half         the dtype of 16 bits that some of them have
    is_other_code  True if results have other bits than the reference's, too
    """

    segments: Segments
    quantizers: Mapping[str, Quantizer] = field(default_factory=dict)
    passes_on: dict[str, str] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    vectors: set[str] = field(default_factory=set)
    half: torch.dtype | None = None
    is_other_code: bool = False

    def __post_init__(self) -> None:
        self.base, self.view = self.segments.base, self.segments.view
        self._sums = Segments(self.base, self.base, self.view)
        stored = {p.dtype for p in self.segments.model.module.parameters()}
        self._sums.least_unit = max((torch.finfo(t).eps / 2 for t in stored & {*HALVES}), default=0)
        self._factors: dict[tuple[str, bool], _Factor] = defaultdict(_Factor)

    @property
    def errors(self) -> dict[str, SiteError]:
        return self._sums.errors

    def compare(self, sample: Any, name: str, run: GradientPass) -> None:
        """Run the reference with the run's tensors and gradients, and compare what it makes."""
        if not run.outputs:
            return
        module = self.base.module
        sites = {site.name: site for site in self.view.sites if site.name in run.passed.actual}
        trained, stand_ins = trained_parameters(module), _stand_ins(module, self.view.weights)
        weights: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for stand_in in stand_ins:
            weights[stand_in.owner][stand_in.key] = stand_in.weight
        replay = _Replay(run, self.view.silent)
        taps = tap_sites(module, [*sites.values()], replay.take)
        with torch.enable_grad(), swapped(module, weights), taps, self.segments.routers.follow():
            outputs = self.base.outputs(sample)
        replay.others += self.segments.routers.replaced
        self.is_other_code |= replay.is_other_code
        for output, of_output in run.outputs.items():
            right = outputs.get(output, of_output)  # which takes no gradient
            check_alike(self.base, output, [of_output], [right])
            if right.requires_grad:
                replay.ends.append((right, of_output.to(right.dtype)))
        inputs = [*replay.leaves.values(), *trained.values(), *(s.weight for s in stand_ins)]
        expected = replay.gradients(inputs)
        real = real_tokens(sample)
        for (site, index), leaf in replay.leaves.items():
            gradient = expected.get(id(leaf), _OTHER)
            actual = run.read[site][index]
            if gradient is not _OTHER and not (actual is None and gradient is None):
                self._add(sites[site], site, _sides(actual, gradient, leaf), name, real)
                self._hold_quantizer(site, index, run)
        for parameter_name, parameter in trained.items():
            own = [s for s in stand_ins if s.parameter is parameter]
            parts = [expected.get(id(x), _OTHER) for x in (parameter, *(s.weight for s in own))]
            if parameter_name not in run.parameters or any(part is _OTHER for part in parts):
                continue
            handed_on = [parts[0]]
            for stand_in, part in zip(own, parts[1:], strict=True):
                quantizer = self.quantizers.get(f"{stand_in.owner}:{stand_in.key}")
                is_cast = quantizer is not None and part is not None
                handed_on.append(_through(quantizer, parameter, part) if is_cast else part)
            arrived = [part for part in handed_on if part is not None]
            actual = run.parameters[parameter_name]
            if actual is None and not arrived:
                continue
            owner, _, key = parameter_name.rpartition(".")
            total = torch.stack(arrived).sum(0) if arrived else None
            sides = _sides(actual, total, parameter)
            site_name = f"{owner}:{key}"
            self.parameters.add(site_name)
            if parameter.dim() == 1:
                self.vectors.add(site_name)
            self._add(Site(owner, key, "other"), site_name, sides, name, None, replay.rows)

    def factor(self, site: str, right: SegmentGradients | None = None) -> str:
        """Name a factor in a gradient that is computed in 16 bits.

        right   the same passes through right code of that dtype, which may have factors, too:
                attention rounds its results, and where one token leads, alike in all rows; so
                does a decay that they share
        """
        named = {
            in_training: self._factors[site, in_training].words(
                right._factors[site, in_training].size if right else 0.0
            )
            for in_training in (False, True)
            if (site, in_training) in self._factors
        }
        in_evaluation, in_training = named.get(False, ""), named.get(True, "")
        return in_evaluation or (f"{in_training} in {TRAINING}" if in_training else "")

    def _add(
        self, site: Site, name: str, sides: tuple[Tensor, Tensor], of_pass: str,
        real: Tensor | None, terms: int = 1,
    ) -> None:  # fmt: skip
        actual, expected = sides
        self.values[name] = self.values.get(name, 0) + expected.numel()
        self._sums.compare(site, (actual, expected, None), of_pass, real, name)
        if actual.dtype in HALVES:
            self.half = actual.dtype
        if actual.dtype in HALVES or self._sums.least_unit:
            self._factors[name, of_pass == TRAINING].add(actual, expected)
        if name in self.errors:
            self.errors[name].longest = max(self.errors[name].longest, terms)

    def _hold_quantizer(self, site: str, index: int, run: GradientPass) -> None:
        """Hold what a quantizer hands on: the gradient it gets, and nothing where x saturated."""
        quantizer = self.quantizers.get(site)
        of_end, read = run.of_ends[site][index], run.read[site][index]
        if quantizer is None or of_end is None or read is None or of_end is read:
            return
        expected = _through(quantizer, run.passed.actual[site][index], read)
        wrong = int((of_end != expected.to(of_end.dtype)).sum())
        if wrong:
            self.passes_on.setdefault(
                site,
                f"its quantizer hands on another gradient than it gets: {wrong:,} of "
                f"{of_end.numel():,} values are other ones",
            )


def _through(quantizer: Any, x: Tensor, gradient: Tensor) -> Tensor:
    """Return what a straight-through quantizer hands on of a gradient."""
    x = x.detach()
    if quantizer.rotation is not None:
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            (handed_on,) = torch.autograd.grad(quantizer(leaf), leaf, gradient)
        assert isinstance(handed_on, Tensor)
        return handed_on
    if quantizer.saturated_grad != "zero":
        return gradient
    return gradient.where(inside_range(x, quantizer), 0.0)


def _sides(actual: Tensor | None, expected: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return both gradients; one that does not arrive is zero."""
    zeros = torch.zeros_like(like)
    actual = zeros if actual is None else actual.reshape(like.shape)
    expected = zeros if expected is None else expected
    if like.is_complex():
        return torch.view_as_real(actual), torch.view_as_real(expected)
    return actual, expected


@dataclass(frozen=True)
class _StandIn:
    """A quantized weight in the place of a parameter of the reference."""

    owner: str
    key: str
    parameter: Any
    weight: Tensor


def _stand_ins(module: nn.Module, weights: Mapping[str, Mapping[str, Tensor]]) -> list[_StandIn]:
    return [
        _StandIn(
            owner, key, module.get_submodule(owner)._parameters[key],
            value.detach().clone().requires_grad_(),
        )
        for owner, named in weights.items()
        for key, value in named.items()
    ]  # fmt: skip


class _Replay:
    """A pass of the reference with the run's tensors at its sites, cut into segments there.

    leaves   by site and call, the tensors that segments begin with
    ends     those that they end with, with the run's gradients
    others   those that the run makes by code of its own
    is_other_code  True if the run has other bits at a site than the reference makes of its tensors
    """

    def __init__(self, run: GradientPass, silent: Collection[str]) -> None:
        self.leaves: dict[tuple[str, int], Tensor] = {}
        self.ends: list[tuple[Tensor, Tensor]] = []
        self._run, self._silent = run, silent
        self.others: list[Tensor] = []
        self.is_other_code = False
        self._calls: dict[str, int] = {}

    def take(self, site: Site, tensor: Tensor) -> Tensor | None:
        """Begin a segment with the run's tensor; the segment before ends at the reference's own."""
        index = self._calls[site.name] = self._calls.get(site.name, -1) + 1
        forwarded = self._run.passed.forwarded[site.name]
        if index >= len(forwarded) or forwarded[index].numel() != tensor.numel():
            self.others.append(tensor)
            return None
        of_run = self._run.passed.actual[site.name][index]
        self.is_other_code |= not torch.equal(tensor, of_run.reshape(tensor.shape))
        gradient = self._run.of_ends[site.name][index]
        if site.name in self._silent:
            self.others.append(tensor)
        elif tensor.requires_grad and gradient is not None:
            self.ends.append((tensor, gradient.to(tensor.dtype).reshape(tensor.shape)))
        value = forwarded[index].to(tensor.dtype).reshape(tensor.shape)
        if not tensor.requires_grad:
            return value
        leaf = self.leaves[site.name, index] = value.detach().requires_grad_()
        return leaf.clone()  # code that writes into it must not write into a leaf

    @property
    def rows(self) -> int:
        """Return over how many rows the gradient of a parameter may be a sum."""
        sizes = (leaf.numel() // leaf.shape[-1] for leaf in self.leaves.values() if leaf.dim())
        return max(sizes, default=1)

    def gradients(self, inputs: Sequence[Tensor]) -> dict[int, Tensor | None]:
        """Return the gradients of all inputs but those before code that the run has otherwise."""
        expected = _pulled_back(self.ends, inputs)
        own_ends = [(x, torch.ones_like(x)) for x in self.others if x.requires_grad]
        reached = _pulled_back(own_ends, inputs) if own_ends else [None] * len(inputs)
        return {
            id(x): gradient
            for x, gradient, other in zip(inputs, expected, reached, strict=True)
            if other is None
        }


def _pulled_back(
    ends: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    tensors, gradients = zip(*ends, strict=True)
    with exact_math():
        return torch.autograd.grad(tensors, inputs, gradients, allow_unused=True, retain_graph=True)
