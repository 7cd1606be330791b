"""Code in 16 bits beside the reference's own code in that dtype: bit by bit, and then as a kernel.

The limit of an isolated error in 16 bits leaves room for the roundings of any right code, and so
for an attention whose probabilities are in FP8. But where the reference's code, in the same dtype
and given the same tensors, gives the same bits, nothing is wrong, not even where FP32 code would
look up another row. Other bits are right if some known arithmetic gives them: code that rounds
otherwise is judged as a kernel is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qgate.arithmetic import divided
from qgate.causes.places import place_words
from qgate.errors import QgateError
from qgate.expected.intermediates import HALVES
from qgate.gate.measured import Measured
from qgate.gate.measuring.passes import batches
from qgate.gate.segments.code_faults import code_before
from qgate.gate.segments.half_code import LEAST, replayed, taken
from qgate.gate.segments.probes import PROBES, massive_probe, probes, several
from qgate.gate.segments.rows import IS_PLACE, SAYS_NOTHING
from qgate.gate.segments.segments import Segments
from qgate.kernel_checks.subject import KernelRefusal
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.modes import Quantized, apply

_MOST = 3
"""Sites of code with other bits that are judged: a fault in all layers is one fault."""
_ROUNDINGS, _SIGMAS = 3.0, 8.0
"""Roundings and times its noise that a channel's factor is off from which it is none of either."""
_LEAST_ROWS, _TINY = 12, 1e-300
_MORE, _MORE_OF_ROW = 1.1, 2.0
"""Times the error of the twin, of all rows and of the worst one, that right code may have."""
_OF_CODE = "is not what FP32 code makes of the tensors before it"


@dataclass(frozen=True)
class Twin:
    """The reference's code in the dtype of a mode, which gets the run's tensors at every site.

    beside  the run and that code, in the places of a run and of its reference
    """

    segments: Segments
    beside: Segments

    @classmethod
    def of(cls, quantized: Quantized, segments: Segments) -> Twin:
        """Make the twin of a mode that is one dtype."""
        model = apply(quantized.mode, segments.base).model
        view = replace(segments.view, weights={})
        return cls(segments, Segments(segments.model, model, view))

    @property
    def unit(self) -> float:
        """Return half the distance of 1 to the next number of the dtype."""
        dtypes = {p.dtype for p in self.beside.base.module.parameters() if p.dtype in HALVES}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) / 2

    def differing(self, sample: Any) -> list[str]:
        """List sites at which code gives other bits, those behind another one too, in order."""
        return _differing(self.beside, sample)

    def telling(self, differing: Sequence[str], sample: Any) -> list[str]:
        """Return those of the sites at which a run of the twin gives the bits of the twin.

        Some modules compute in another way where something looks at their parts, as torch's
        attention does.
        """
        if not differing:
            return []
        unsteady = set(_differing(replace(self.beside, model=self.beside.base), sample))
        return [site for site in differing if site not in unsteady]


@torch.no_grad()
def _differing(segments: Segments, sample: Any) -> list[str]:
    passed = taken(segments, sample)
    right = replayed(segments, passed, sample)
    names = dict.fromkeys([*right, *passed.actual])
    return [
        site
        for site in names
        if site not in right or not _are_equal(right[site], passed.actual[site])
    ]


def with_twin(
    rows: Sequence[Measured],
    quantized: Quantized,
    segments: Segments,
    samples: Sequence[Any],
    long: Tensor | None,
) -> tuple[list[Measured], list[str]]:
    """Return isolated errors, and the sites at which code gives other bits than its twin.

    Errors of code that is wrong are red, those of the twin's bits green.

    samples  all samples of the model; `long` is the long text that the mode ran, if it ran one
    """
    twin = Twin.of(quantized, segments)
    is_red = {row.site for row in rows if _is_red(row)}
    probe = next(probes(several(samples)))[0]
    differing = twin.differing(probe)
    telling = twin.telling([site for site in differing if site not in is_red], probe)
    faults = dict(_faults(twin, telling, probe))
    unsteady = [site for site in differing if site not in is_red and site not in telling]
    faults |= dict(_channel_faults(twin, unsteady, probe)) if unsteady else {}
    if long is not None and not is_red and not faults:
        with suppress(QgateError, *LENGTH_REFUSALS):  # which the mode's own pass has said
            late = [site for site in twin.differing(long) if site not in differing]
            faults |= dict(_factor_faults(twin, twin.telling(late, long), long)) if late else {}
    of_code = is_red - _products(segments)  # torch's own convolution may be wrong
    same = set(_same(twin, of_code, samples, long)) if of_code else set()
    judged_rows = [
        _right(row)
        if row.site in same
        else replace(row, why={**(row.why or {}), "isolated": faults[row.site]})
        if row.site in faults
        else row
        for row in rows
    ]
    return judged_rows, differing


def _is_red(row: Measured) -> bool:
    worst = row.parts.get("worst_token", {}).get("relative_mse") or 0.0
    return bool((row.why or {}).get("isolated")) or not worst <= (row.floor or 0.0)


def _right(row: Measured) -> Measured:
    """Return a row whose error is that of right code in that dtype."""
    why = {key: words for key, words in (row.why or {}).items() if key != "isolated"}
    return replace(
        row, values={"relative_mse": 0.0}, parts={"worst_token": {"relative_mse": 0.0}},
        why=why or None,
    )  # fmt: skip


def _faults(twin: Twin, sites: Sequence[str], probe: Any) -> Iterator[tuple[str, str]]:
    """Yield sites of code that no arithmetic explains, in words; products are held elsewhere."""
    segments = twin.segments
    products = _products(segments)
    for site in [site for site in sites if site not in products][:_MOST]:
        try:
            code = code_before(segments.model, segments.base, segments.view, site)
            words = "" if code is None else code.fault()
            if words and _is_rounding(twin, site, words):
                continue
        except (QgateError, *LENGTH_REFUSALS, KernelRefusal):
            continue
        is_open = bool(re.search(f"{SAYS_NOTHING}|{IS_PLACE}", words))
        if words and not (is_open and _is_as_near(twin, site, probe)):
            yield site, f"{_OF_CODE}: {words}{', by more than roundings' if is_open else ''}"


def _is_as_near(twin: Twin, site: str, sample: Any) -> bool:
    """Tell if a run is as near to FP32 code as the twin is, in all and in the worst row."""
    sizes = []
    for model in (twin.segments.model, twin.beside.base):
        segments = replace(twin.segments, model=model, errors={})
        passed = taken(segments, sample)
        right = replayed(segments, passed, sample)
        if site not in right or right[site][0].dim() < 2:
            return False
        pairs = [
            (actual.double().flatten(0, -2), expected.double().flatten(0, -2))
            for actual, expected in zip(passed.actual[site], right[site], strict=True)
        ]
        errors = torch.cat([(actual - expected).square().sum(-1) for actual, expected in pairs])
        energy = torch.cat([expected.square().sum(-1) for _, expected in pairs])
        sizes.append((float(errors.sum()), float(divided(errors, energy.clamp_min(_TINY)).max())))
    (in_all, worst), (in_all_of_twin, worst_of_twin) = sizes
    return in_all <= _MORE * in_all_of_twin and worst <= _MORE_OF_ROW * worst_of_twin


def _channel_faults(twin: Twin, sites: Sequence[str], sample: Any) -> Iterator[tuple[str, str]]:
    """Yield sites whose bits say nothing, and of which a channel has a factor beside the twin."""
    for site, (actual, right) in _beside_twin(twin, sites, sample):
        error, energy = actual - right, right.square().sum(0)
        excess = divided((error * right).sum(0), energy)
        noise = divided(((error - excess * right) * right).square().sum(0).sqrt(), energy)
        wrong = (excess.abs() > _ROUNDINGS * twin.unit) & (excess.abs() > _SIGMAS * noise)
        if channels := wrong.nonzero().flatten().tolist():
            where = place_words(channels, len(wrong), "channel")
            verb = "are" if channels[1:] else "is"
            factor = 1 + float(excess[channels].mean())
            yield site, f"{_OF_CODE}: {where} {verb} about {factor:.3g} times the expected"


def _factor_faults(twin: Twin, sites: Sequence[str], sample: Any) -> Iterator[tuple[str, str]]:
    """Yield the first site that has a factor beside the twin in a long text, and in none else."""
    for site, (actual, right) in _beside_twin(twin, sites, sample):
        error, energy = actual - right, float(right.square().sum())
        excess = float((error * right).sum()) / max(energy, _TINY)
        noise = float(((error - excess * right) * right).square().sum()) ** 0.5 / max(energy, _TINY)
        if abs(excess) > max(LEAST, _SIGMAS * noise):
            yield (
                site,
                f"{_OF_CODE} in a text longer than the samples: the result is about "
                f"{1 + excess:.4g} times the expected one",
            )
            return


@torch.no_grad()
def _beside_twin(
    twin: Twin, sites: Sequence[str], sample: Any
) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield what a run and the twin give at sites of code, as rows of channels."""
    passed = taken(twin.beside, sample)
    right, products = replayed(twin.beside, passed, sample), _products(twin.segments)
    axes = {site.name: site.channels for site in twin.segments.view.sites}
    for site in [site for site in sites if site in right and site not in products]:
        if right[site][0].dim() < 2:
            continue
        actual, expected = (
            torch.cat([t.double().movedim(axes.get(site, -1), -1).flatten(0, -2) for t in tensors])
            for tensors in (passed.actual[site], right[site])
        )
        if len(expected) >= _LEAST_ROWS:
            yield site, (actual, expected)


def _is_rounding(twin: Twin, site: str, words: str) -> bool:
    """Tell if the twin's own code has such a fault, too: values that are alike round alike."""
    factor = re.search(r"(\d+\.?\d*) times", words)
    if factor is not None and abs(float(factor[1]) - 1) > 2 * twin.unit:
        return False
    right = code_before(twin.beside.base, twin.segments.base, twin.segments.view, site)
    return right is not None and _without_numbers(right.fault()) == _without_numbers(words)


def _without_numbers(words: str) -> str:
    return re.sub(r"[\d.,]+", "", words)


def _products(segments: Segments) -> set[str]:
    """Return the sites of products, which are held by their own checks."""
    listed = (site for site in segments.view.sites if site.is_product)
    return {site.name for site in listed if site.port == "output"}


def _same(twin: Twin, red: set[str], samples: Sequence[Any], long: Tensor | None) -> Iterator[str]:
    """Yield red sites whose bits are the twin's in every pass that the mode was held in."""
    listed = [(probe, "") for probe, _ in probes(several(samples))]
    listed += [(massive_probe(several(samples)), PROBES[5])]
    listed += [] if long is None else [(long, "")]
    listed += [
        (batch[0] if len(batch) == 1 else torch.cat(batch), "")
        for batch in batches(samples, together=True)
    ]
    remaining = set(red)
    for sample, name in listed:
        try:
            with twin.beside.massive(name):
                remaining -= set(twin.differing(sample))
        except LENGTH_REFUSALS:
            continue
        if not remaining:
            return
    yield from remaining


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
        for x, y in zip(one, other, strict=True)
    )
