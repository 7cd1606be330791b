"""Isolated errors: what a run made between its quantizers, against FP32 code fed with its tensors.

While the model under test runs, the tensors at its sites are taken. The reference then runs on the
same sample, and every site gets the run's tensor as soon as its own was compared with it. What is
compared is so the work of one segment of code, from tensors that the run quantized or passed on to
the next site: a code that fell to the other side upstream is no error, in any mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qgate.device_errors import DeviceMemoryError
from qgate.gate.segments.probes import (
    PROBES,
    TRAINING,
    massive_probe,
    massive_values,
    probes,
)
from qgate.gate.segments.views import (
    Passed,
    SegmentView,
    TakenTensors,
    free_products,
    swapped,
)
from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models import Model
from qgate.models.experts import chooses, routers_of
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import real_tokens, tensors_of, without_padding
from qgate.models.sites import Site
from qgate.results.coverage import ModuleShapes
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.gate.segments import routing as routing
else:
    routing = LateModule("qgate.gate.segments.routing")

MOST_BYTES = 1 << 30
"""Bytes of tensors of one batch that may wait for the reference."""
WHOLE = "whole samples"
_MASSIVE_OWN = 2.0**-6
"""Share of a row's energy by which code of one's own in 16 bits may be off among massive values,
where it rounds in another order; what is cut off is further."""
_MASSIVE_ROOM = 2.0**2
"""Times the error of other tokens that theirs may have: noise was not measured there."""


@dataclass
class Worst:
    """The row of a site, a token or what else the last axis belongs to, with the largest error."""

    error: float = -1.0
    actual: Tensor | None = None
    expected: Tensor | None = None
    inputs: Tensor | None = None
    row: int = 0
    sample: str = ""
    of_numbers: Tensor | None = None
    padded: Tensor | None = None
    """Of each sample of a batch the largest error, and whether it has padding."""

    def place(self) -> str:
        """Say which row of which sample it is."""
        return f"worst at token {self.row} of {self.rows}, {self.sample}"

    def some_of_batch(self, limit: float) -> str:
        """Name the samples of a batch that are wrong beside right ones; empty if all are."""
        if self.of_numbers is None:
            return ""
        wrong = ~(self.of_numbers <= limit)
        if bool(wrong.all()):
            return ""
        if self.padded is not None and torch.equal(wrong, self.padded):
            return "in the rows with padding alone, which is not masked: "
        numbers = listed([*map(str, wrong.nonzero().flatten().tolist())], 5)
        return f"in number {numbers} of {len(wrong)} of a batch, and right in the others: "

    @property
    def rows(self) -> int:
        return 0 if self.expected is None else self.expected.numel() // self.expected.shape[-1]


@dataclass
class SiteError:
    """Errors of one site over all passes."""

    squared_error: float = 0.0
    energy: float = 0.0
    passes: dict[str, Worst] = field(default_factory=dict)
    nonfinite: int = 0
    longest: int = 1
    unit: float = 0.0
    channels: int = 0

    @property
    def worst(self) -> Worst:
        return max(self.passes.values(), key=lambda worst: worst.error, default=Worst())

    def clearest(self, limit: float) -> Worst:
        """Return the largest sample beyond a limit, where patterns show best; massive ones last."""
        wrong = {name: worst for name, worst in self.passes.items() if not worst.error <= limit}
        beyond = [worst for name, worst in wrong.items() if name != PROBES[5] or len(wrong) == 1]
        return max(beyond, key=lambda worst: (worst.rows, worst.error), default=self.worst)

    def agreeing(self, limit: float) -> list[str]:
        """List the passes that keep a limit."""
        return [name for name, worst in self.passes.items() if worst.error <= limit]

    @property
    def relative_mse(self) -> float:
        return self.squared_error / self.energy if self.energy else 0.0


class NoRouters:
    """The routers of a model that has none."""

    replaced: Sequence[Tensor] = ()
    faults: Mapping[str, str] = MappingProxyType({})

    def record(self) -> AbstractContextManager[None]:
        return nullcontext()

    follow = record


@dataclass
class Segments:
    """Isolated errors of one mode, added pass by pass."""

    model: Model
    base: Model
    view: SegmentView
    is_own: bool = False
    massive_noise: Mapping[str, float] = field(default_factory=dict)
    """By site, the float noise among massive values in units of that of other ones."""
    errors: dict[str, SiteError] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    met_shapes: dict[str, ModuleShapes] = field(default_factory=dict)
    least_unit: float = 0.0
    _overwritten: set[str] = field(default_factory=set)
    _bytes: float | None = None

    def __post_init__(self) -> None:
        self.left_out |= self.view.left_out
        run, reference = self.model.module, self.base.module
        names = routers_of(reference)
        follows = bool(names) or chooses(reference)
        self.routers: Any = routing.of(run, reference, names) if follows else NoRouters()

    @property
    def is_half(self) -> bool:
        """Tell if a mode computes in 16 bits."""
        return any(errors.unit for errors in self.errors.values())

    @torch.no_grad()
    def probe(self, sample: Any, long: Tensor | None) -> None:
        """Hold inputs of other shapes: an odd length in a batch, one token, and a long text.

        A mode of the model's own gets the long text and massive values alone, which say most.
        """
        if not self.view.ports:
            return
        inputs = [] if self.is_own else list(probes(sample))
        is_wide = all(p.dtype != torch.float16 for p in self.model.module.parameters())
        massive = [(massive_probe(sample), PROBES[5])] if is_wide else []
        for probe, name in [*inputs, *([] if long is None else [(long, PROBES[4])]), *massive]:
            try:
                with self.massive(name), self.watch(probe, name, is_probe=True) as outputs:
                    outputs |= self.model.outputs(probe)
            except (*LENGTH_REFUSALS, DeviceMemoryError) as error:
                self.left_out.setdefault(
                    name, f"the model refuses it ({type(error.__cause__ or error).__name__})"
                )

    @cached_property
    def _first_input(self) -> Site | None:
        """Return the site where massive values come from: nothing is computed there."""
        first = f"{self.model.layers[0]}:input" if self.model.layers else ""
        return next((site for site in self.view.sites if site.name == first), None)

    @cached_property
    def _massive_results(self) -> set[Site]:
        run, base = self.model.module, self.base.module
        return free_products(self.view, run, base, own=self.is_own)

    def massive(self, name: str) -> AbstractContextManager[Any]:
        """Give massive values to both models, in the pass of that name alone.

        They are before the first layer and behind products, where the reference gets the run's.
        """
        first = [] if self._first_input is None else [self._first_input]
        sides = self.model.module, self.base.module
        return (
            massive_values(*sides, first, self._massive_results)
            if name == PROBES[5]
            else nullcontext()
        )

    @contextmanager
    def watch(self, sample: Any, name: str, is_probe: bool = False) -> Iterator[dict[str, Tensor]]:
        """Take the tensors of the pass inside, and compare them with the reference afterwards.

        What the pass returned belongs into the dict.
        """
        outputs: dict[str, Tensor] = {}
        if not self.view.ports or not (is_probe or self._fits(sample)):
            yield outputs
            return
        # Before the first pass nobody knows which tensors are overwritten: all are copied.
        learns = is_probe or self._bytes is None
        recorder = TakenTensors(self._overwritten, learns)
        with self.routers.record(), recorder.watch(self.model.module, self.view.ports):
            yield outputs
        if learns:
            self._overwritten |= recorder.overwritten()
            self._bytes = recorder.nbytes() / max(1, _size(sample))
        for site in self.view.sites:
            if site.port == "input" and site.is_product:
                shapes = self.met_shapes.setdefault(site.module, ModuleShapes(site.channels))
                for tensor in recorder.tensors.get(site.name, ()):
                    shapes.add(tensor.shape, is_strided=not tensor.is_contiguous())
        self.replay(sample, self.view.read(recorder.tensors), name, outputs)

    def _fits(self, sample: Any) -> bool:
        if self._bytes is None or self._bytes * _size(sample) <= MOST_BYTES:
            return True
        self.left_out.setdefault("long samples", "their tensors take too much memory")
        return False

    @torch.no_grad()
    def replay(self, sample: Any, passed: Passed, name: str, outputs: Mapping[str, Tensor]) -> None:
        """Run the reference with the run's tensors in the place of its own."""
        calls: dict[str, int] = {}
        real = real_tokens(sample)
        sites = [site for site in self.view.sites if site.name in passed.actual]
        latest: dict[str, Tensor] = {}
        is_massive, other_sites = name == PROBES[5], set[str]()

        def take(site: Site, tensor: Tensor) -> Tensor | None:
            index = calls[site.name] = calls.get(site.name, -1) + 1
            actual, forwarded = passed.actual[site.name], passed.forwarded[site.name]
            if index >= len(actual) or actual[index].numel() != tensor.numel():
                # What the run does in another number of calls, or other shapes, is its own.
                self._reject(site, "the run passes it in other calls or shapes")
                other_sites.add(site.name)
                return None
            # Massive values of other calls are others, and so is all that follows from them.
            if site.name not in self.view.silent and not (is_massive and other_sites):
                inputs = latest.get(site.module) if site.port == "output" else None
                sides = actual[index], tensor, inputs
                self.compare(site, sides, name, real)
            value = forwarded[index].to(tensor.dtype)
            value = value if value.shape == tensor.shape else value.reshape(tensor.shape)
            if site.port not in ("output", "state"):
                latest[site.module] = value
            return value

        module = self.base.module
        taps = tap_sites(module, sites, take)
        with taps, swapped(module, self.view.weights), self.routers.follow():
            expected = self.base.outputs(sample)
        for output, tensor in outputs.items():
            is_alike = output in expected and expected[output].shape == tensor.shape
            if is_alike and not (is_massive and other_sites):
                axis = self.base.channel_axis(output)
                site = Site("", "output", "other", channels=axis)
                self.compare(site, (tensor, expected[output], None), name, real, output)
        for site in sites:
            if calls.get(site.name, -1) + 1 != len(passed.actual[site.name]):
                self._reject(site, "the run passes it in other calls")

    def _longest(self, site: Site, expected: Tensor, inputs: Tensor | None) -> int:
        """Return a bound on the number of terms that one result of a segment adds up."""
        if site.kind == "conv" and site.is_product:
            weight = self.base.module.get_submodule(site.module).weight
            assert isinstance(weight, Tensor)
            return weight.numel() // weight.shape[1 if site.transposed else 0]
        if inputs is not None and site.kind in ("linear", "norm"):
            return inputs.shape[site.channel_axis(inputs)]
        return max(expected.shape)

    def _reject(self, site: Site, reason: str) -> None:
        self.left_out.setdefault(site.name, reason)

    def compare(
        self,
        site: Site,
        sides: tuple[Tensor, Tensor, Tensor | None],
        name: str,
        real: Tensor | None,
        output: str = "",
    ) -> None:
        actual, expected, inputs = sides
        if actual is expected or not expected.is_floating_point() or not expected.numel():
            return
        if name == PROBES[5] and (site == self._first_input or site in self._massive_results):
            return
        is_own_half = self.is_own and name in PROBES[4:] and _unit(actual) > 0
        if is_own_half and name == PROBES[4]:
            return  # code that rounds in another order may be further off at one token of many
        if not expected.dim():
            actual, expected = actual.reshape(1), expected.reshape(1)
        errors = self.errors.setdefault(output or site.name, SiteError())
        kind_of_pass = name if name in PROBES or name == TRAINING else WHOLE
        worst = errors.passes.setdefault(kind_of_pass, Worst())
        errors.unit = max(errors.unit, self.least_unit, _unit(actual))
        if name not in PROBES[4:]:
            # The long text, which no sample is as long as, has to keep the limit of the others.
            errors.longest = max(errors.longest, self._longest(site, expected, inputs))
        actual = actual.reshape(expected.shape)
        if site.channels != -1 or real is not None:
            actual, expected = (
                without_padding(side, real).movedim(site.channel_axis(side), -1)
                for side in (actual, expected)
            )
            inputs = None if inputs is None else without_padding(inputs, real)
        errors.channels = expected.shape[-1]
        size = torch.linalg.vector_norm(expected, dim=-1)
        exact, is_half = expected, site.name in self.view.half
        expected = expected.half().float() if is_half else expected
        if torch.equal(actual, expected):
            worst.error = max(worst.error, 0.0)
            errors.energy += float(size.double().square().sum())
            return
        difference = actual.float() - exact
        if is_half:
            # Beyond what rounding does: next to a tie either neighbor is right.
            difference = difference.abs() - (expected - exact).abs()
        distance = torch.linalg.vector_norm(difference, dim=-1)
        if not math.isfinite(float(distance.sum())):
            # NaN and infinities of both are no difference; of one they are counted apart.
            finite = actual.isfinite() & expected.isfinite()
            errors.nonfinite += int((actual.isfinite() != expected.isfinite()).sum())
            distance = torch.linalg.vector_norm(difference.where(finite, 0.0), dim=-1)
            size = torch.linalg.vector_norm(expected.where(finite, 0.0), dim=-1)
        squares, energy = distance.double().square(), size.double().square()
        if errors.unit:
            # An element below the normal numbers may be off by a smallest step.
            squares = (squares - errors.channels * _subnormal(actual) ** 2).clamp_min(0.0)
        if is_own_half:
            squares = (squares - _MASSIVE_OWN * row_scales(energy)).clamp_min(0.0)
        if name == PROBES[5]:
            noise = max(1.0, self.massive_noise.get(output or site.name, 1.0))
            squares = squares / (_MASSIVE_ROOM * noise * noise)
        else:
            errors.squared_error += float(squares.sum())
            errors.energy += float(energy.sum())
        ratios = squares / row_scales(energy)
        if not worst.error >= float(ratios.max()):
            row = int(ratios.argmax())
            at, of_numbers = slice(None), _by_number(ratios, real)
            if expected.dim() > 2 and len(expected) > 1:
                of_numbers = ratios.reshape(len(expected), -1).amax(1)
                index, row = divmod(row, energy[0].numel())
                at = slice(index, index + 1)
                name = f"number {index} of {name}"
            errors.passes[kind_of_pass] = Worst(
                float(ratios.max()),
                actual[at].float().clone(),
                expected[at].clone(),
                None if inputs is None else inputs[at].clone(),
                row,
                name,
                of_numbers,
                None if real is None else ~real.all(1),
            )


def _by_number(ratios: Tensor, real: Tensor | None) -> Tensor | None:
    """Return the largest error of each row of a batch with padding, whose real tokens follow."""
    if real is None or ratios.numel() != int(real.sum()):
        return None
    numbers = real.to(ratios.device).nonzero()[:, 0]
    largest = ratios.new_zeros(len(real))
    return largest.scatter_reduce(0, numbers, ratios.reshape(-1), "amax")


def row_scales(energy: Tensor) -> Tensor:
    """Return what the error of each row is measured against: its energy, or the usual one's."""
    usual = energy.median() if energy.numel() else energy.new_zeros(())
    return energy.clamp_min(float(usual)).clamp_min(torch.finfo(energy.dtype).tiny)


def _size(sample: Any) -> int:
    return sum(tensor.numel() for _, tensor in tensors_of(sample))


def _subnormal(tensor: Tensor) -> float:
    """Return the smallest step of a dtype, which is that of numbers below its normal ones."""
    limits = torch.finfo(tensor.dtype)
    return limits.tiny * limits.eps


def _unit(tensor: Tensor) -> float:
    """Return half the distance of 1 to the next number of a dtype that is coarser than float32."""
    eps = torch.finfo(tensor.dtype).eps
    return eps / 2 if eps > torch.finfo(torch.float32).eps else 0.0
