"""Static scales of a model, measured on prompts, in a JSON file that names their origin."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from qgate._version import __version__
from qgate.arithmetic import divided
from qgate.device_errors import in_parts
from qgate.errors import QgateError
from qgate.hooks.tapping import tap_sites
from qgate.loading import LateModule
from qgate.models.model import inputs_hash
from qgate.storage.files import replacing
from qgate.storage.foreign import read_foreign

if TYPE_CHECKING:
    from qgate.models.model import Model
    from qgate.models.sites import Site
    from qgate.modes.attention import planning as planning
    from qgate.modes.attention import sources as sources
else:
    planning = LateModule("qgate.modes.attention.planning")
    sources = LateModule("qgate.modes.attention.sources")

VERSION = 1
_BATCH = 8
_TINY_RANGE, _TINY_SCALE = 1e-5, 1e-6
_EMA = 0.01

Observer = Literal["minmax", "percentile"]
OBSERVED: dict[str, Observer] = {
    "in_proj:input": "minmax",
    "in_proj:output": "minmax",
    "x_proj:input": "percentile",
    "x_proj:output": "minmax",
    "dt_proj:output": "minmax",
    "scan:state": "percentile",
    "out_proj:input": "minmax",
}


@dataclass(frozen=True)
class CalibrationSettings:
    """The percentile and the arithmetic of scales; "fp16" is that of Quamba-SE."""

    percentile_alpha: float = 0.9995
    arithmetic: Literal["fp32", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        if not 0.5 <= self.percentile_alpha <= 1:
            raise QgateError(
                f"percentile alpha {self.percentile_alpha!r} is not allowed; it is a share from "
                "0.5 to 1, such as 0.9995."
            )
        if self.arithmetic not in ("fp32", "fp16"):
            raise QgateError(f"arithmetic {self.arithmetic!r} is not allowed; it is fp32 or fp16.")


@dataclass(frozen=True)
class SiteScale:
    """One static scale with its origin; `wide` is the scale the percentile 1 would give."""

    scale: float
    observer: Observer
    range: float
    wide: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Scales by site, with the hashes of the weights and samples they were measured on."""

    scales: dict[str, SiteScale]
    settings: CalibrationSettings
    model: str
    weights: str
    inputs: str
    samples: int
    basis: str = "rotated"
    versions: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, site: str) -> SiteScale:
        if site not in self.scales:
            raise QgateError(
                f"the calibration of {self.model} has no scale for site {site!r}; it has "
                f"{', '.join(self.scales)}."
            )
        return self.scales[site]

    def ranges(self) -> dict[str, float]:
        """Return the range of each site, which its scale is made from."""
        return {site: entry.range for site, entry in self.scales.items()}

    def origin(self, site: str) -> str:
        """Describe the origin of a scale."""
        entry = self[site]
        if entry.observer == "minmax":
            return f"calibrated, largest of {self.samples} samples / 127"
        alpha = self.settings.percentile_alpha
        return f"calibrated, percentile {alpha:g} of {self.samples} samples / 127"

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        record = {"qgate": "calibration", "version": VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            text = json.dumps(record, indent=1, allow_nan=False) + "\n"
            part.write_text(text, encoding="utf-8", newline="\n")


def load_calibration(path: Path) -> Calibration:
    """Read a calibration that `save` wrote."""
    try:
        record = json.loads(read_foreign(path, "calibrations"))
        if record["qgate"] != "calibration":
            raise KeyError("qgate")
        if record["version"] != VERSION:
            raise QgateError(
                f"{str(path)!r} is a calibration of version {record['version']!r}, and this qgate "
                f"reads version {VERSION}: delete it to calibrate again."
            )
        settings = CalibrationSettings(**record["settings"])
        scales = {site: _site_scale(entry) for site, entry in record["scales"].items()}
        names = ("model", "weights", "inputs", "samples", "basis", "versions")
        return Calibration(scales, settings, **{name: record[name] for name in names})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise QgateError(
            f"{str(path)!r} is no calibration of qgate ({type(error).__name__}: {error}): delete "
            "it to calibrate again, or name another file."
        ) from None


def _site_scale(entry: Mapping[str, Any]) -> SiteScale:
    site_scale = SiteScale(**entry)
    if site_scale.observer not in ("minmax", "percentile"):
        raise ValueError(f"there is no observer {site_scale.observer!r}")
    scales = [site_scale.scale, *([site_scale.wide] if site_scale.observer == "percentile" else [])]
    for scale in scales:
        if not (isinstance(scale, float) and 0 < scale < float("inf")):
            raise ValueError(f"scale {scale!r} is no number above zero")
    return site_scale


def calibrated(
    model: Model,
    settings: CalibrationSettings,
    path: Path | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Read the calibration of a file, or measure one and write it there.

    A file of another model, other samples or other settings is refused.
    """
    if path is not None and path.exists():
        stored = load_calibration(path)
        samples = model.calibration_samples()
        origins = {
            "weights": (stored.weights, model.weights_hash()),
            "calibration samples": (stored.inputs, inputs_hash(samples)),
            "settings": (stored.settings, settings),
        }
        for label, (old, new) in origins.items():
            if old != new:
                raise QgateError(
                    f"the calibration in {str(path)!r} was made with other {label} "
                    f"({_origin_text(old)}) than those of {model.name} now ({_origin_text(new)}). "
                    "Delete the file to calibrate again, or name another one."
                )
        return stored
    if path is not None:
        _check_writable(path)
    calibration = measure(model, settings, progress=progress)
    if path is not None:
        calibration.save(path)
    return calibration


def _origin_text(origin: object) -> str:
    """Shorten a hash to its beginning; write settings in full."""
    if isinstance(origin, CalibrationSettings):
        return ", ".join(f"{name} {value}" for name, value in asdict(origin).items())
    return str(origin)[:12]


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before minutes of work."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise QgateError(f"cannot write {str(path)!r}: its folder is not writable.")


def measure(
    model: Model,
    settings: CalibrationSettings,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Run the FP32 model on the calibration samples and observe its sites.

    A Mamba model is folded and rotated; of others the ranges of keys and values are observed.
    """
    import numpy
    import torch

    is_mamba = "rotated" in (model.basis, *model.bases)
    if not is_mamba:
        _check_attention(model)
    samples = model.calibration_samples()

    def batches(at_once: int) -> Iterator[Tensor]:
        done = 0
        for batch in _batches(samples, at_once):
            yield batch
            done += len(batch)
            if progress:
                progress(done, len(samples))

    def scales(at_once: int) -> dict[str, SiteScale]:
        if is_mamba:
            return _mixer_scales(model, settings, batches(at_once))
        return _cache_scales(model, batches(at_once))

    return Calibration(
        in_parts(scales, _BATCH, model.name, model.device)[0],
        settings,
        model.name,
        model.weights_hash(),
        inputs_hash(samples),
        len(samples),
        "rotated" if is_mamba else model.basis,
        {"qgate": __version__, "torch": torch.__version__, "numpy": numpy.__version__},
    )


def _check_attention(model: Model) -> None:
    try:
        sources.named_attentions(model)
    except QgateError:
        raise QgateError(
            f"{model.name} fits no mode with calibrated scales: those are for Mamba models, and "
            "for attention whose cache can be quantized. `qgate show modes` lists the modes."
        ) from None


def _cache_scales(model: Model, batches: Iterator[Tensor]) -> dict[str, SiteScale]:
    ranges = cache_ranges(model, batches)
    return {site: SiteScale(reach / 127, "minmax", reach) for site, reach in ranges.items()}


def _mixer_scales(
    model: Model, settings: CalibrationSettings, batches: Iterator[Tensor]
) -> dict[str, SiteScale]:
    import torch

    turned = model.in_basis("rotated")
    sites = [site for site in turned.sites() if _observer(site)]
    ranges: dict[str, _Ranges] = defaultdict(lambda: _Ranges(settings))

    def take(site: Site, tensor: Tensor) -> None:
        observer = _observer(site)
        if observer:
            ranges[site.name].add(tensor, observer)

    with torch.no_grad(), tap_sites(turned.module, sites, take):
        for batch in batches:
            turned(batch)
    return {site.name: ranges[site.name].scale(site.name) for site in sites}


def _observer(site: Site) -> Observer | None:
    leaf = f"{site.module.rpartition('.')[2]}:{site.port}"
    return OBSERVED.get(leaf) if ".mixer." in site.module else None


def _batches(samples: Sequence[Tensor], most: int) -> Iterator[Tensor]:
    """Join neighbors of one length; each sample is still observed alone."""
    import torch

    batch: list[Tensor] = []
    for sample in samples:
        if not isinstance(sample, torch.Tensor):
            raise QgateError(
                f"calibration samples are tensors of token ids, not {type(sample).__name__}."
            )
        if batch and (sample.shape != batch[0].shape or len(batch) == most):
            yield torch.cat(batch)
            batch = []
        batch.append(sample)
    if batch:
        yield torch.cat(batch)


class _Ranges:
    """The range of one site over prompts: a running maximum, or a running mean of quantiles."""

    def __init__(self, settings: CalibrationSettings) -> None:
        self.settings = settings
        self.range: Tensor | None = None
        self.widest: Tensor | None = None
        self.observer: Observer = "minmax"

    def add(self, tensor: Tensor, observer: Observer) -> None:
        self.observer = observer
        for prompt in tensor.detach().float().abs():
            largest = prompt.amax()
            if observer == "minmax":
                low = prompt.new_tensor(_TINY_RANGE)
                largest = largest.maximum(low)
                self.range = largest if self.range is None else self.range.maximum(largest)
            else:
                high = quantile(prompt, self.settings.percentile_alpha)
                self.range = _running_mean(self.range, high)
                self.widest = _running_mean(self.widest, largest)

    def scale(self, site: str) -> SiteScale:
        reach = self.range if self.widest is None else self.widest
        if self.range is None or reach is None or not bool(reach.isfinite()):
            reason = "no tensor passed it" if reach is None else f"its range is {float(reach)}"
            raise QgateError(f"site {site} cannot be calibrated: {reason}.")
        wide = None if self.widest is None else _scale_of(self.widest, "fp32")
        arithmetic = "fp32" if self.observer == "percentile" else self.settings.arithmetic
        scale = _scale_of(self.range, arithmetic)
        if scale == float("inf"):
            raise QgateError(
                f"site {site} cannot be calibrated in fp16: its range {float(self.range):g} is "
                "beyond 65504. Set calib_arithmetic to fp32."
            )
        return SiteScale(scale, self.observer, float(self.range), wide)


def _running_mean(mean: Tensor | None, new: Tensor) -> Tensor:
    return new if mean is None else mean + _EMA * (new - mean)


def _scale_of(reach: Tensor, arithmetic: str) -> float:
    low = reach.half() if arithmetic == "fp16" else reach
    return max(float(divided(low, 127)), _TINY_SCALE)


def quantile(values: Tensor, alpha: float) -> Tensor:
    """Return a quantile by linear interpolation between neighbors, of any number of values."""
    flat = values.reshape(-1)
    position = alpha * (flat.numel() - 1)
    below = int(position)
    largest = flat.topk(flat.numel() - below).values
    low = largest[-1]
    high = largest[-2] if len(largest) > 1 else low
    return low + (high - low) * (position - below)


def cache_ranges(model: Model, batches: Iterator[Tensor]) -> dict[str, float]:
    """Run the FP32 model and return the largest magnitudes of what its caches would store."""
    attentions = dict(sources.named_attentions(model))
    owners = {
        f"{at}.{leaf}": (at, side)
        for at, source in attentions.items()
        for side in "qkv"
        for leaf in source.leaves(side)
    }
    ranges: dict[str, Tensor] = {}
    addends: dict[tuple[str, str], list[Tensor]] = {}

    def take(site: Site, tensor: Tensor) -> None:
        at, side = owners[site.module]
        source, parts = attentions[at], addends.setdefault((at, side), [])
        parts.append(tensor.detach().float())
        if len(parts) < len(source.leaves(side)):
            return
        heads = source.side_of(side, sources.sum_of(addends.pop((at, side))))
        sides: dict[planning.Side, Tensor] = {"values": heads}
        if side == "q":
            sides = {"queries": source.positions.turn(heads, 0)}
        if side == "k":
            sides = {"keys_before_rope": heads, "keys": source.positions.turn(heads, 0)}
        for kind, values in sides.items():
            largest = values.abs().amax((0, 2, 3))
            before = ranges.get(planning.range_site(at, kind))
            ranges[planning.range_site(at, kind)] = (
                largest if before is None else largest.maximum(before)
            )

    sites = [site for site in model.sites() if site.module in owners and site.port == "output"]
    with torch.no_grad(), tap_sites(model.module, sites, take):
        for batch in batches:
            model(batch)
    return dict(_named(ranges))


def _named(ranges: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    for site, per_head in ranges.items():
        reaches: Sequence[float] = per_head.clamp_min(_TINY_RANGE).tolist()
        if not torch.isfinite(per_head).all():
            raise QgateError(f"{site} cannot be calibrated: its range is {max(reaches)}.")
        yield site, max(reaches)
        yield from ((f"{site}[{head}]", reach) for head, reach in enumerate(reaches))
