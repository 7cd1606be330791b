"""Code of one's own in 16 bits: a factor that is in all values of a result is no rounding.

The limit of an isolated error lets each result in 16 bits differ by some roundings of that dtype,
and so a scale of attention passes that is 0.3 % off. All values together tell such a factor from
roundings, in whichever order these are made.

A factor on what such code reads may be below its rounding, and is no rounding either: a residual
that counts 1.01 times, or scores 1 % too large, move a result by less than bfloat16 rounds it.
Rounding has no direction, and such a factor has: the result moves as FP32 code says that it moves
with the tensor which the factor belongs to.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qgate.causes.factors import figure_words
from qgate.errors import QgateError
from qgate.expected.intermediates import HALVES
from qgate.expected.noise import ARITHMETICS
from qgate.expected.structure import FACTOR, draw, figures
from qgate.gate.measured import Measured
from qgate.gate.measuring.passes import shortened
from qgate.gate.segments.attention_arithmetic import RunAttention, TakenCall, taken_calls
from qgate.gate.segments.probes import PROBE_SAMPLES, probes, several
from qgate.gate.segments.segments import Segments
from qgate.gate.segments.views import Passed, TakenTensors, swapped, view_of
from qgate.hooks.module_hooks import ModuleHooks
from qgate.hooks.tapping import tap_sites
from qgate.kernel_checks.explained import floating_state
from qgate.models import Model, Site
from qgate.models.rows import is_text
from qgate.modes.applying import apply, in_dtype
from qgate.modes.formats import FORMAT_MODES

LEAST = 1e-3
"""Distance of a factor from 1 from which it is a fault: less may be a weight that is rounded."""
FACTOR_BEYOND = 5.0
"""Times its noise that a factor has: right code had up to 1.5 times, and 0.3 % has 7 times."""
_OF_CODE = "FP32 code makes of the same tensors"

_STEP = 2.0**-5
"""The relative step by which a tensor is moved to see where results go."""
_ROUNDINGS = 0.25
"""Roundings of the dtype by which a factor is off from which it is a fault, times the cube root
of the share of a result that moves with it: right code of ten models had up to 0.1, and 0.2 where
attention is so flat that scores move 0.0005 of it."""
_FEW = 2.0
"""Those of fewer rows than six, which may share one: a norm rounds what it divides a row by."""
_RIGHT_ROUNDINGS = 1.0
"""Roundings that a factor of right code has at most: 0.3 in weights that a forward norms."""
_SIGMAS, _ROWS, _LEAST_ROWS = 8.0, 12, 6
"""Times its noise that a factor is off, over so many rows; twice as often over fewer, whose noise
is less known."""
_LEAST_TOKENS = 4
_LEAST_SHARE = 1e-4
"""Energy of where a result moves, of its own: a norm does not move with what it divides by."""
_RESULT = "the result"
_MOST_OUTSIDE = 40
"""Sites outside of blocks that are moved one at a time."""


def with_half(
    rows: Sequence[Measured],
    segments: Segments,
    sample: Any,
    differing: Collection[str] | None = None,
) -> list[Measured]:
    """Return isolated errors; those of wrong code in 16 bits say what is wrong there.

    Where the reference's code gives the same bits in that dtype, nothing is wrong: only `differing`
    sites are looked at, if they are known.

    In a mode of qgate's own every tensor that code reads may have a factor; code of one's own may
    round in another order, and is held module by module.
    """
    if not segments.is_own:
        return with_gains(rows, segments, sample, differing)
    open_rows = {row.site: row for row in rows if not (row.why or {}).get("isolated")}
    try:
        faults = dict(half_faults(segments.model, segments.base, open_rows))
    # A model of one's own may raise anything when its code runs in another way.
    except (QgateError, RuntimeError, ValueError, TypeError):
        return [*rows]
    return [
        replace(row, why={**(row.why or {}), "isolated": faults[row.site]})
        if open_rows.get(row.site) is row and row.site in faults
        else row
        for row in rows
    ]


@torch.no_grad()
def half_faults(actual: Model, base: Model, sites: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield sites at which code in 16 bits has a factor that it should not have, in words."""
    own, open_sites = actual.module, set(sites)
    codes = {
        name: code
        for name, code in RunAttention.of(actual, base).codes.items()
        if f"{name}.{code.result}:input" in open_sites
    }
    modules = [site.removesuffix(":output") for site in open_sites if site.endswith(":output")]
    attention: dict[str, TakenCall] = {}
    called: dict[str, tuple[Tensor, Tensor]] = {}

    def take(taken: TakenCall) -> None:
        attention.setdefault(taken.name, taken)

    def keep(name: str, _module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = (*args, result)
        if len(args) == 1 and all(isinstance(t, Tensor) and t.dtype in HALVES for t in tensors):
            called.setdefault(name, (args[0], result))

    with ModuleHooks() as hooks, taken_calls(own, codes, take):
        for name in modules:
            if _is_small(base.module, name) and _is_small(own, name):
                hooks.add(own.get_submodule(name), None, functools.partial(keep, name))
        actual.outputs(shortened(several(base.inputs)))
    for name, call in attention.items():
        if call.is_otherwise and (words := _attention_factor(call)):
            yield f"{name}.{call.code.result}:input", f"is not the attention that {words}"
    for name, (x, result) in called.items():
        if words := _module_factor(base.module.get_submodule(name), x, result):
            yield f"{name}:output", f"is not what {words}"


def _is_small(root: nn.Module, name: str) -> bool:
    """Tell if a module has no parts and is no product, whose sums are judged elsewhere."""
    try:
        module = root.get_submodule(name)
    except AttributeError:
        return False
    return not [*module.children()] and all(p.dim() < 2 for p in module.parameters())


def _attention_factor(taken: TakenCall) -> str:
    call = taken.call

    def like(*projected: Tensor) -> Tensor:
        dtype = projected[0].dtype
        more = (t.to(dtype) if t.is_floating_point() else t for t in call.tensors)
        return call(*projected, *more)

    names = [f"the result of {leaf}" for leaf in taken.code.sources]
    return _factor(like, taken.projected, names, taken.actual)


def _module_factor(reference: nn.Module, x: Tensor, result: Tensor) -> str:
    twin = in_dtype(reference, x.dtype)
    if torch.equal(twin(x), result):
        return ""
    state = floating_state(twin)

    def like(x: Tensor, *parameters: Tensor) -> Any:
        return functional_call(reference, dict(zip(state, parameters, strict=True)), (x,))

    names = ["its input", *(f"its {name}" for name in state)]
    return _factor(like, [x, *state.values()], names, result)


def _factor(
    like: Callable[..., Any], arguments: Sequence[Tensor], names: Sequence[str], actual: Tensor
) -> str:
    """Name the factor on all of an argument or of the result that roundings do not explain."""
    unit = ARITHMETICS[str(actual.dtype).removeprefix("torch.")]
    draws = draw(like, [argument.detach() for argument in arguments], unit)
    if not bool(draws.values.isfinite().all() and actual.isfinite().all()):
        return ""
    factors = [
        figure
        for figure in figures(actual, draws)
        if figure.kind == FACTOR and figure.dim is None
        and figure.ratio > FACTOR_BEYOND and abs(figure.size) > LEAST
    ]  # fmt: skip
    if not factors:
        return ""
    words = figure_words(max(factors, key=lambda figure: figure.ratio), draws.values, None)
    for position, name in enumerate(names):
        words = words.replace(f"argument {position} ", f"{name} ")
    return f"{_OF_CODE}: {words}"


class Products(NamedTuple):
    """Errors of a result times where it moves, by row or parts of rows, and the sizes of both."""

    along: Tensor
    squares: Tensor
    energy: Tensor
    rows: int


@dataclass(frozen=True)
class Gain:
    """Distance from 1 of the factor of one tensor in the results of a segment, and its noise.

    energy, share  of where the results move: as it is, and of theirs
    roundings      of the dtype by which it may be off
    """

    source: str
    size: float
    noise: float
    energy: float
    share: float
    roundings: float = _ROUNDINGS

    @property
    def explained(self) -> float:
        return self.size * self.size * self.energy


def with_gains(
    rows: Sequence[Measured],
    segments: Segments,
    sample: Any,
    differing: Collection[str] | None = None,
) -> list[Measured]:
    """Return isolated errors; sites whose code has a factor that it should not have say so."""
    if differing is not None and not differing:
        return [*rows]
    faults = gain_faults(segments, sample)
    if differing is not None:
        faults = {site: words for site, words in faults.items() if site in differing}
    return [
        replace(row, why={**(row.why or {}), "isolated": faults[row.site]})
        if row.site in faults and not (row.why or {}).get("isolated")
        else row
        for row in rows
    ]


def gain_faults(segments: Segments, sample: Any) -> dict[str, str]:
    """Return by site which tensor counts more or less than it should, in words."""
    faults: dict[str, str] = {}
    right: dict[str, list[Gain]] | None = None
    for site, listed in gains(segments, sample).items():
        unit = segments.errors[site].unit if site in segments.errors else math.inf
        wrong = _beyond(listed, unit)
        if wrong and right is None:
            right = _gains_of_torch(segments, sample)
        if wrong := _beyond(wrong, unit, right[site] if right and site in right else ()):
            gain = max(wrong, key=lambda gain: gain.explained)
            source = gain.source.removesuffix(":input")
            name = "the block's input" if source in segments.base.layers else gain.source
            faults[site] = (
                f"is not what FP32 code makes of the tensors before it: {name} counts "
                f"{1 + gain.size:.4g} times, which is no rounding"
            )
    return faults


def _beyond(listed: Sequence[Gain], unit: float, right: Sequence[Gain] = ()) -> list[Gain]:
    """Return factors that are neither roundings of a dtype nor those of right code in it."""
    most_right = _RIGHT_ROUNDINGS * unit
    sizes = {gain.source: max(-most_right, min(most_right, gain.size)) for gain in right}

    def is_beyond(gain: Gain) -> bool:
        most = max(gain.roundings * unit / math.cbrt(gain.share), _SIGMAS * gain.noise)
        return abs(gain.size - sizes.get(gain.source, 0.0)) > most

    return [gain for gain in listed if is_beyond(gain)]


def _gains_of_torch(segments: Segments, sample: Any) -> dict[str, list[Gain]]:
    """Return the factors that the reference's own code has in the run's dtype, as torch rounds.

    A norm of weights that a forward computes is rounded, and with it all that it divides.
    """
    base = segments.base
    dtypes = {f"{p.dtype}" for p in segments.model.module.parameters() if p.is_floating_point()}
    modes = [mode for mode in FORMAT_MODES if {f"torch.{mode.dtype}"} == dtypes]
    if not modes or base.basis != modes[0].basis:
        return {}
    quantized = apply(modes[0], base)
    return gains(Segments(quantized.model, base, view_of(quantized, base, quantized)), sample)


@torch.no_grad()
def gains(segments: Segments, sample: Any) -> dict[str, list[Gain]]:
    """Return by site the factors of the tensors that the code before it reads."""
    products: dict[str, dict[str, list[Products]]] = defaultdict(lambda: defaultdict(list))
    samples = segments.base.inputs[:PROBE_SAMPLES]
    if is_text(sample):
        short = next(probes(sample))[0]
        pieces = min(-(-_ROWS // len(short)), short.shape[1] // _LEAST_TOKENS)
        samples = [short]
        if pieces > 1:  # a result per text needs several of them
            samples += [torch.cat(short.split(short.shape[1] // pieces, 1)[:pieces])]
    for one in samples:
        _add_products(segments, one, products)
    listed: dict[str, list[Gain]] = {}
    for site, by_source in products.items():
        by_tensor = {source: _gain(source, rows) for source, rows in by_source.items()}
        listed[site] = [gain for gain in by_tensor.values() if gain is not None]
    return listed


def _add_products(
    segments: Segments, sample: Any, products: Mapping[str, dict[str, list[Products]]]
) -> None:
    passed = taken(segments, sample)
    right = replayed(segments, passed, sample)

    def add(site: str, source: str, moved: Sequence[Tensor]) -> None:
        sides = zip(passed.actual[site], right[site], moved, strict=True)
        products[site][source] += [_products(*side) for side in sides]

    def block_of(site: str) -> str:
        return segments.base.layer_of(site.partition(":")[0])

    for site, tensors in right.items():
        add(site, _RESULT, [tensor * (1 + _STEP) for tensor in tensors])
    for group in _alike(segments, passed):
        for site, moved in replayed(segments, passed, sample, group).items():
            if not all(map(torch.equal, moved, right[site])):
                add(
                    site, next((s for s in group if block_of(s) == block_of(site)), group[0]), moved
                )


def taken(segments: Segments, sample: Any) -> Passed:
    """Run the model under test, and return what passes its sites, with what it returns."""
    recorder = TakenTensors(copies=True)
    with segments.routers.record(), recorder.watch(segments.model.module, segments.view.ports):
        outputs = segments.model.outputs(sample)
    passed = segments.view.read(recorder.tensors)
    return replace(passed, actual={**passed.actual, **{k: [v] for k, v in outputs.items()}})


def _alike(segments: Segments, passed: Passed) -> list[list[str]]:
    """Group sites that are moved together: those of one name in all blocks, others alone.

    No segment reads two blocks; experts of a block count as one. Layers of one module each are no
    blocks: code between them reads several.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    base, outside = segments.base.module, 0
    for site in segments.view.sites:
        if site.name not in passed.forwarded:
            continue
        layer = segments.base.layer_of(site.module)
        parts = base.get_submodule(layer).children() if layer else iter(())
        block = layer if next(parts, None) is not None else ""
        outside += not block
        if block or outside <= _MOST_OUTSIDE:
            name = re.sub(r"\d+", "#", site.name.removeprefix(block)) if block else site.name
            groups[name].append(site.name)
    return [*groups.values()]


def replayed(
    segments: Segments, passed: Passed, sample: Any, moved: Sequence[str] = ()
) -> dict[str, list[Tensor]]:
    """Return what the reference's code makes at each site of the run's tensors, some moved."""
    results: dict[str, list[Tensor]] = defaultdict(list)
    sites = [site for site in segments.view.sites if site.name in passed.actual]

    def take(site: Site, tensor: Tensor) -> Tensor | None:
        index = len(results[site.name])
        results[site.name].append(tensor)
        forwarded = passed.forwarded[site.name]
        if index >= len(forwarded) or forwarded[index].numel() != tensor.numel():
            return None
        value = forwarded[index].to(tensor.dtype).reshape(tensor.shape)
        is_moved = site.name in moved and value.is_floating_point()
        return value * (1 + _STEP) if is_moved else value.clone()  # code may overwrite it

    module = segments.base.module
    with (
        tap_sites(module, sites, take),
        swapped(module, segments.view.weights),
        segments.routers.follow(),
    ):
        for name, output in segments.base.outputs(sample).items():
            results[name].append(output)
    return {
        site: tensors
        for site, tensors in results.items()
        if site not in segments.view.silent and _are_alike(tensors, passed.actual.get(site, ()))
    }


def _are_alike(results: Sequence[Tensor], of_run: Sequence[Tensor]) -> bool:
    return len(results) == len(of_run) and all(
        x.shape == y.shape and x.is_floating_point() for x, y in zip(results, of_run, strict=True)
    )


def _products(actual: Tensor, right: Tensor, moved: Tensor) -> Products:
    """Return per row what an error has in common with where the result moves, and their sizes."""
    rows = [x.double().reshape(-1, right.shape[-1] if right.dim() else 1) for x in (actual, right)]
    direction = (moved.double().reshape(rows[1].shape) - rows[1]) / _STEP
    sums = ((rows[0] - rows[1]) * direction, direction.square(), rows[1].square())
    # Parts of a row, where there are few: each has roundings of its own.
    parts = min(_ROWS // max(1, len(direction)), direction.shape[-1])
    along, squares, energy = (
        torch.cat(
            [part.sum(-1) for part in of.nan_to_num(0.0, 0.0, 0.0).tensor_split(max(1, parts), -1)]
        )
        for of in sums
    )
    return Products(along, squares, energy, int(direction.any(-1).sum()))


def _gain(source: str, products: Sequence[Products]) -> Gain | None:
    along, squares, energies = (
        torch.cat([getattr(of, name) for of in products]) for name in ("along", "squares", "energy")
    )
    energy, whole = float(squares.sum()), float(energies.sum())
    rows, parts = sum(of.rows for of in products), int((squares > 0).sum())
    if not energy > _LEAST_SHARE * whole or parts < _LEAST_ROWS:
        return None
    size = float(along.sum()) / energy
    noise = math.sqrt(float((along - size * squares).square().sum())) / energy
    noise = noise if parts >= _ROWS else 2 * noise
    share = min(1.0, energy / whole)
    return Gain(source, size, noise, energy, share, _ROUNDINGS if rows >= _LEAST_ROWS else _FEW)
