"""One model on the bench: every forward pass once, and what the gate wants to know of it.

A mode is measured in three runs. Free-running, the outputs of all blocks: the error carried along.
With every block given the reference's input: the error made in each block. And a short stretch of
text with every site given the reference's tensor, against the error of an ideal quantizer there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qgate.capture import Capture
from qgate.capture.running import pass_through, run
from qgate.errors import QgateError
from qgate.models import Model, Site
from qgate.models.tapping import tapped
from qgate.modes import Calibration, Mode, Quantized, apply
from qgate.pipeline.ideals import TAPS, ideal_tensors
from qgate.pipeline.setups import ModelSetup
from qgate.stats import ErrorStats, errors

BUDGET_TOKENS = 128
_BATCH = 8
_BACKWARD_SAMPLES = 2
METRICS = ("relative_mse", "correlation", "mse", "mae", "max_abs", "sqnr_db", "cosine")


@dataclass(frozen=True)
class SiteErrors:
    """The errors at one site in one scope, as plain numbers."""

    site: str
    layer: str
    scope: str
    order: int
    values: dict[str, float]
    nonfinite: int
    nonfinite_reference: int
    ideal: float | None = None
    quantizer: str = ""
    worst_channel: float | None = None


@dataclass
class Bench:
    """A model with everything computed so far; modes are measured once and kept."""

    setup: ModelSetup
    reference_mode: str = "fp32"
    progress: Callable[[str], None] = lambda _text: None
    _model: Model | None = None
    _calibration: Calibration | None = None
    _references: dict[str, Capture] = field(default_factory=dict)
    _measured: dict[str, list[SiteErrors]] = field(default_factory=dict)
    _quantized: dict[str, Quantized] = field(default_factory=dict)
    _gradients: dict[str, list[SiteErrors]] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        if self._model is None:
            self.progress(f"loading {self.setup.model}")
            self._model = self.setup.load()
        return self._model

    @property
    def layers(self) -> list[str]:
        """The names of the blocks, without what they have in common."""
        return [short_layer(name) for name in self.model.layers]

    @property
    def calibration(self) -> Calibration:
        if self._calibration is None:
            self.progress(f"calibrating {self.model.name}")
            self._calibration = self.setup.calibrate(self.model)
        return self._calibration

    def quantized(self, mode: Mode) -> Quantized:
        """The model in a mode."""
        if mode.name not in self._quantized:
            scales = self.calibration if mode.calibrated else None
            self._quantized[mode.name] = apply(mode, self.model, scales)
        return self._quantized[mode.name]

    def reference(self, basis: str) -> Capture:
        """Inputs and outputs of all blocks, and the logits, of the reference in a basis."""
        if basis not in self._references:
            model = self._reference_model(basis)
            self.progress(f"reference of {model.name}, basis {basis}")
            self._references[basis] = _outer(model, model.inputs)
        return self._references[basis]

    def _reference_model(self, basis: str) -> Model:
        if self.reference_mode == "fp32":
            return self.model.in_basis(basis)
        mode = self.setup.select(self.reference_mode, self.model)[0]
        quantized = self.quantized(mode)
        if quantized.plan.basis != basis:
            raise QgateError(
                f"reference {mode.name!r} is in basis {quantized.plan.basis!r}, and what is "
                f"compared with it in {basis!r}: choose modes of one basis."
            )
        return quantized.model

    def measure(self, mode: Mode) -> list[SiteErrors]:
        """All errors of a mode, sites in the order of execution."""
        if mode.name not in self._measured:
            quantized = self.quantized(mode)
            self.progress(f"mode {mode.name} of {self.model.name}")
            basis = quantized.model.basis
            reference = self.reference(basis)
            together = mode.causal and not mode.own
            carried = _outer(quantized.model, self.model.inputs, together=together)
            local = _outer(quantized.model, self.model.inputs, reference, together)
            found = self._blocks("carried", carried, reference)
            found += self._blocks("local", local, reference)
            found += self.site_errors(quantized)
            self._measured[mode.name] = sorted(found, key=lambda each: (each.order, each.scope))
        return self._measured[mode.name]

    def outputs(self, mode: Mode | None) -> list[Tensor]:
        """The logits of every sample, of a mode or of the reference."""
        if mode is None:
            return self.reference("plain").tensors["logits"]
        model = self.quantized(mode).model
        with torch.no_grad():
            return [model(sample) for sample in self.model.inputs]

    def gradients(self, mode: Mode) -> list[SiteErrors]:
        """The gradients of a mode at the outputs of blocks and at weights, against FP32's."""
        if mode.name not in self._gradients:
            quantized = self.quantized(mode)
            self.progress(f"gradients of {self.model.name} in mode {mode.name}")
            base = self._reference_model(quantized.model.basis)
            samples = self.model.inputs[:_BACKWARD_SAMPLES]
            sites = [
                site
                for site in base.sites()
                if self.model.layer_of(site.module)
                and (
                    (site.kind == "block" and site.port == "output")
                    or (site.kind == "linear" and site.port == "weight")
                )
            ]
            key = f"{base.basis} gradients"
            if key not in self._references:
                self._references[key] = run(base, sites, samples=samples, gradients=True)
            expected = self._references[key].gradients
            actual = run(quantized.model, sites, samples=samples, gradients=True).gradients
            order = self._order()
            found = []
            for site in sites:
                pairs = zip(actual[site.name], expected[site.name], strict=True)
                parts = [errors(a.float(), r.float()) for a, r in pairs]
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                layer = short_layer(self.model.layer_of(site.module))
                place = order.get(site.name, 0)
                found.append(_plain(site.name, layer, "backward", place, total))
            self._gradients[mode.name] = found
        return self._gradients[mode.name]

    def _blocks(self, scope: str, actual: Capture, reference: Capture) -> list[SiteErrors]:
        order = self._order()
        found = []
        for layer in self.model.layers:
            site = f"{layer}:output"
            pairs = zip(actual[site], reference[site], strict=True)
            total: ErrorStats | None = None
            for a, r in pairs:
                part = errors(a.float(), r.float(), channel_axis=-1)
                total = part if total is None else total + part
            if total is None:
                raise QgateError(f"nothing was compared at {site}.")
            found.append(_plain(site, short_layer(layer), scope, order.get(site, 0), total))
        return found

    def _order(self) -> dict[str, int]:
        return {site.name: place for place, site in enumerate(self.model.sites())}

    def site_errors(
        self, quantized: Quantized, declared: Quantized | None = None
    ) -> list[SiteErrors]:
        """Every quantized site on a short text, fed by the reference, against the ideal there.

        The ideal is that of the mode itself, or of what was declared in its place.
        """
        meant = quantized if declared is None else declared
        base = self._reference_model(quantized.model.basis)
        sample = _shortened(self.model.inputs[0])
        wanted = self._compared_sites(quantized, base)
        inputs = [s for s in base.sites() if s.kind == "block" and s.port == "input"]
        flowing = _flow(base, {*wanted, *inputs, *_weights(base)}, sample)
        actual = _fed(quantized, wanted, sample, flowing)
        scales = self._calibration if quantized.mode.calibrated else None
        ideal = ideal_tensors(meant.mode, meant.plan, base, flowing, scales)
        named = {entry.site: entry.does for entry in quantized.plan.entries}
        order = self._order()
        found = []
        for site in wanted:
            name = site.name
            made = errors(actual[name].float(), flowing[name].float(), channel_axis=-1)
            best = _relative(ideal[name], flowing[name]) if name in ideal else None
            layer = short_layer(self.model.layer_of(site.module))
            found.append(
                _plain(name, layer, "local", order.get(name, 0), made, best, named.get(name, ""))
            )
        return found

    def _compared_sites(self, quantized: Quantized, base: Model) -> list[Site]:
        """Sites inside blocks that the mode quantizes, and the outputs of linear layers there."""
        head = set(self.model.head or ())
        planned = {entry.site for entry in quantized.plan.entries}
        everything = bool({"*"} & planned)
        taps = quantized.mode.choices is not None
        found = []
        for site in base.sites():
            if not self.model.layer_of(site.module) or site.module in head:
                continue
            leaf = f"{site.module.rpartition('.')[2]}:{site.port}"
            if taps:
                wanted = leaf in TAPS and ".mixer." in site.module
            else:
                wanted = site.name in planned or (site.kind == "linear" and site.port != "weight")
                wanted = wanted and (everything or _touched(site, planned))
            if wanted:
                found.append(site)
        return found


def _touched(site: Site, planned: set[str]) -> bool:
    return any(f"{site.module}:{port}" in planned for port in ("input", "weight", site.port))


def short_layer(name: str) -> str:
    """`backbone.layers.3` is `layers.3` for people."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 else name


def _weights(model: Model) -> list[Site]:
    return [site for site in model.sites() if site.port == "weight" and site.kind == "linear"]


def _batches(samples: Sequence[Any], together: bool) -> Iterator[Any]:
    """Samples of one length side by side, where a mode is the same alone and in a batch."""
    held: list[Tensor] = []
    for sample in samples:
        if not (together and isinstance(sample, Tensor)):
            yield sample
            continue
        if held and (sample.shape[1:] != held[0].shape[1:] or len(held) == _BATCH):
            yield torch.cat(held)
            held = []
        held.append(sample)
    if held:
        yield torch.cat(held)


def _outer(
    model: Model, samples: Sequence[Any], forced: Capture | None = None, together: bool = True
) -> Capture:
    """Inputs and outputs of the blocks, and the logits; with `forced`, inputs are given."""
    sites = [s for s in model.sites() if s.kind == "block" and s.port in ("input", "output")]
    if not sites:
        raise QgateError(f"{model.name} has no list of blocks: say layers=(…) in its qgate.Model.")
    record = Capture(model.name, model.basis, "")
    record.tensors = {name: [] for name in (*(site.name for site in sites), "logits")}
    place = 0
    with torch.no_grad():
        for batch in _batches(samples, together):

            def keep(_index: int, site: Site, tensor: Tensor) -> None:
                record.tensors[site.name] += _apart(tensor)

            part = None if forced is None else _part(forced, sites, place, _size(batch))
            result = pass_through(model, sites, 0, batch, keep, part)
            record.tensors["logits"] += _apart(result)
            place += _size(batch)
    return record


def _size(batch: Any) -> int:
    return len(batch) if isinstance(batch, Tensor) else 1


def _apart(tensor: Tensor) -> list[Tensor]:
    """The samples of a batch, each as a batch of one."""
    return [row.detach().float().clone() for row in tensor.split(1)]


def _part(forced: Capture, sites: list[Site], place: int, count: int) -> Capture:
    part = Capture(forced.model, forced.basis, "")
    for site in sites:
        if site.port == "input":
            part.tensors[site.name] = [torch.cat(forced[site.name][place : place + count])]
    return part


def _shortened(sample: Any) -> Any:
    """The beginning of a sample of token ids; other samples as they are."""
    if isinstance(sample, Tensor) and not sample.is_floating_point() and sample.dim() == 2:
        return sample[:, :BUDGET_TOKENS]
    return sample


def capture_sites(model: Model, sites: Sequence[Site]) -> dict[str, Tensor]:
    """What flows at sites on a short text."""
    return _flow(model, set(sites), _shortened(model.inputs[0]))


def _flow(model: Model, sites: set[Site], sample: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        found.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad():
        pass_through(model, sites, 0, sample, keep)
    return found


def _fed(
    quantized: Quantized, wanted: list[Site], sample: Any, flowing: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What a mode makes of each site when it is given what the reference has there.

    A quantized Mamba mixer is fed as a whole, its parts hang together; elsewhere every linear layer
    and every other site that is quantized on its way in is fed by itself.
    """
    model = quantized.model
    if quantized.mode.choices is not None:
        gates = [s for s in model.sites() if s.port == "input" and s.kind == "block"]
    else:
        own = quantized.plan.quantizers()
        gates = [
            site
            for site in wanted
            if site.port not in ("weight", "output", "state")
            and (site.kind == "linear" or site.name in own)
        ]
    found: dict[str, Tensor] = {}

    def feed(site: Site, tensor: Tensor) -> Tensor:
        return flowing[site.name].to(tensor.dtype) if site.name in flowing else tensor

    def keep(_index: int, site: Site, tensor: Tensor) -> None:
        found.setdefault(site.name, tensor.detach().clone())

    with torch.no_grad(), tapped(model.module, gates, feed, first=True):
        pass_through(model, wanted, 0, sample, keep)
    return found


def _relative(ideal: np.ndarray[Any, Any], reference: Tensor) -> float:
    true = reference.detach().float().cpu().numpy().astype(np.float64)
    energy = float(np.square(true).sum())
    error = float(np.square(ideal.astype(np.float64).reshape(true.shape) - true).sum())
    return error / energy if energy else 0.0


def _plain(
    site: str,
    layer: str,
    scope: str,
    order: int,
    found: ErrorStats,
    ideal: float | None = None,
    quantizer: str = "",
) -> SiteErrors:
    metrics = found.metrics()
    return SiteErrors(
        site,
        layer,
        scope,
        order,
        {name: metrics[name] for name in METRICS if name in metrics},
        found.actual_non_finite.total,
        found.reference_non_finite.total,
        ideal,
        quantizer,
        _worst_channel(found),
    )


def _worst_channel(found: ErrorStats) -> float | None:
    """The largest squared error of a channel over the mean energy of all of them."""
    channels = found.channels
    if channels is None:
        return None
    energy = float(channels.sum_square_reference.mean())
    return float(channels.sum_square_error.max()) / energy if energy else None
