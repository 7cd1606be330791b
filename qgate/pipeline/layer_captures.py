"""Runs a model free in each mode and its reference, and keeps the outputs of layers on disk."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgate._version import __version__
from qgate.capture.running import pass_through
from qgate.comparing.layer_files import (
    REFERENCE,
    DumpOf,
    LayerCapture,
    LayerCaptureWriter,
    captured,
    read_dump,
    stats_path,
    writing,
)
from qgate.errors import QgateError
from qgate.models import Model, Site
from qgate.models.model import inputs_hash
from qgate.modes import Calibration, Mode, apply
from qgate.pipeline.gates.bench import Bench
from qgate.pipeline.gates.passes import short_layer
from qgate.pipeline.gates.self_checks import NOISE, perturbation_shows, unquantized
from qgate.pipeline.setups import ModelSetup

_BATCH = 8
Say = Callable[[str], None]
Step = Callable[[int, int], None]


@dataclass(frozen=True)
class _Run:
    """One pass to make: the model as it is run, and what its files will say."""

    model: Model
    of: DumpOf
    together: bool
    casts: Callable[[], Mapping[str, dict[str, int]]] = dict


def capture_modes(
    setup: ModelSetup,
    wanted: str,
    folder: Path,
    layers: str = "first,last",
    *,
    overwrite: bool = False,
    say: Say = lambda _text: None,
    step: Step = lambda _done, _total: None,
) -> Iterator[LayerCapture]:
    """The dumps, one after the other as they appear in the folder: the references come first."""
    setup.check_modes(wanted)
    _check_writable(folder)
    bench = Bench(setup, progress=say)
    model = bench.model
    chosen = setup.select(wanted, model)
    sites = _sites(model, layers)
    of = _origin(setup, model)
    misfits = _misfits(folder, of, sites)
    if misfits and not overwrite:
        raise QgateError(
            f"{str(folder)!r} holds captures of something else: {'; '.join(misfits.values())}. "
            "Name another --output-dir, or replace them with --overwrite."
        )
    _check_reference(bench)
    # mode_fp32 is in every folder: people load it by its name.
    bases = list(dict.fromkeys([model.basis, *(_basis(mode, model) for mode in chosen)]))
    quantizing = [mode for mode in chosen if not mode.is_reference]
    total = len(bases) + len(quantizing)
    gone = [path for stem in misfits for path in _files(folder, stem)]
    for path in gone:
        say(f"{path} goes")
    for number, run in enumerate(_runs(bench, of, bases, quantizing), 1):
        say(f"[{number}/{total}] mode {run.of.mode}, basis {run.of.basis}")
        yield _capture(folder, run, model.inputs, sites, gone, step)
        gone = []


def _runs(bench: Bench, of: DumpOf, bases: list[str], modes: list[Mode]) -> Iterator[_Run]:
    """Models are made one at a time, and not kept."""
    for basis in bases:
        yield _Run(bench.model.in_basis(basis), replace(of, mode=REFERENCE, basis=basis), True)
    for mode in modes:
        scales = bench.calibration if mode.calibrated else None
        made = apply(mode, bench.model, scales)
        named = replace(
            of, mode=mode.name, basis=made.model.basis, calibration=_scales_hash(scales)
        )
        yield _Run(made.model, named, mode.causal and not mode.own, made.casts)


def _basis(mode: Mode, model: Model) -> str:
    return model.basis if mode.own else mode.basis


def _origin(setup: ModelSetup, model: Model) -> DumpOf:
    return DumpOf(
        mode=REFERENCE,
        model=model.name,
        basis=model.basis,
        weights=model.weights_hash(),
        inputs=inputs_hash(model.inputs),
        calibration=None,
        samples=len(model.inputs),
        seqlen=setup.sampling.seqlen,
        seed=setup.sampling.seed,
        device=model.device.type,
        torch=str(torch.__version__),
        qgate=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _scales_hash(scales: Calibration | None) -> str | None:
    if scales is None:
        return None
    text = json.dumps(
        {site: asdict(entry) for site, entry in scales.scales.items()}, sort_keys=True
    )
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


# What to capture -------------------------------------------------------------------------------


def _sites(model: Model, layers: str) -> dict[str, str]:
    """Layer name on disk -> site, in the order of the layers."""
    names = list(model.layers)
    if not names:
        raise QgateError(f"{model.name} has no list of blocks: say layers=(…) in its qgate.Model.")
    found = set(_indices(layers, names))
    sites = {f"layer_{index}": f"{names[index]}:output" for index in sorted(found)}
    passed = {site.name for site in model.sites()}
    missing = [site for site in sites.values() if site not in passed]
    if missing:
        raise QgateError(f"nothing passes {', '.join(missing)} of {model.name}: not captured.")
    return sites


def _indices(layers: str, names: Sequence[str]) -> list[int]:
    words = {"first": 0, "last": len(names) - 1}
    parts = [part.strip().lower() for part in layers.split(",")]
    if layers.strip().lower() == "all":
        return list(range(len(names)))
    if all(part in words or part.isdecimal() for part in parts):
        found = [words[part] if part in words else int(part) for part in parts]
        beyond = [index for index in found if index >= len(names)]
        if beyond:
            raise QgateError(f"there is no layer {beyond[0]}: there are 0 to {len(names) - 1}.")
        return found
    try:
        pattern = re.compile(layers)
    except re.error as error:
        raise QgateError(f"--layers {layers!r} is no regular expression: {error}.") from None
    found = [index for index, name in enumerate(names) if pattern.search(name)]
    if not found:
        shown = ", ".join(short_layer(name) for name in names)
        raise QgateError(f"--layers {layers!r} matches no layer: {shown}.")
    return found


def _misfits(folder: Path, of: DumpOf, sites: Mapping[str, str]) -> dict[str, str]:
    """What is in a folder and of something else, by stem, with the reason."""
    found: dict[str, str] = {}
    for stem in captured(folder):
        try:
            there = read_dump(folder, stem)
        except QgateError as error:
            found[stem] = str(error).rstrip(".")
            continue
        pairs = [
            ("model", there.of.model, of.model),
            ("weights", there.of.weights, of.weights),
            ("inputs", there.of.inputs, of.inputs),
            ("layers", ", ".join(there.layers), ", ".join(sites)),
        ]
        for what, old, new in pairs:
            if old != new:
                found[stem] = f"{stem} is of {what} {_brief(old)}, and this is of {_brief(new)}"
                break
    return found


def _brief(text: str) -> str:
    return f"{text[:12]}…" if re.fullmatch(r"[0-9a-f]{40,}", text) else repr(text)


def _files(folder: Path, stem: str) -> list[Path]:
    """What a stem owns: its stats file and the layers beside it."""
    named = re.compile(rf"mode_{re.escape(stem)}_layer_[0-9]+\.npy")
    layers = [path for path in sorted(folder.iterdir()) if named.fullmatch(path.name)]
    return [stats_path(folder, stem), *layers]


def _check_writable(folder: Path) -> None:
    """Before minutes of work, not after them."""
    if folder.exists() and not folder.is_dir():
        raise QgateError(f"{str(folder)!r} is a file; name a folder with --output-dir.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise QgateError(
            f"cannot write into {str(folder)!r}: {error.strerror}; name another --output-dir."
        ) from None


def _check_reference(bench: Bench) -> None:
    """A reference that is quantized anywhere is none: what it computes is computed again."""
    model = bench.model
    odd = {str(p.dtype) for p in model.module.parameters() if p.is_floating_point()}
    odd -= {"torch.float32"}
    if odd:
        raise QgateError(
            f"{model.name} has weights of {', '.join(sorted(odd))}: no FP32 reference."
        )
    if not any(site.kind == "linear" and site.port == "output" for site in model.sites()):
        return
    for each in unquantized(bench):
        apart = each.values["relative_mse"]
        if apart is None or not apart <= NOISE:
            raise QgateError(
                f"the reference of {model.name} is not FP32: {each.site} is not the product of its "
                f"parameters (relative MSE {apart})."
            )
    if not perturbation_shows(bench):
        raise QgateError(f"a changed weight of {model.name} does not show: its outputs are stale.")


# Running ---------------------------------------------------------------------------------------


def _capture(
    folder: Path,
    run: _Run,
    samples: Sequence[Any],
    sites: Mapping[str, str],
    gone: Sequence[Path],
    step: Step,
) -> LayerCapture:
    there = set(run.model.layers)
    lost = [site for site in sites.values() if site.rpartition(":")[0] not in there]
    if lost:
        raise QgateError(f"{', '.join(lost)} is not there in mode {run.of.mode}: nothing captured.")
    try:
        with writing(folder, run.of, sites, gone) as writer:
            _pass_all(run, samples, sites, writer, step)
            writer.casts = {name: dict(counts) for name, counts in run.casts().items()}
    except OSError as error:
        raise QgateError(
            f"mode {run.of.mode} could not be written into {str(folder)!r}: {error.strerror}."
        ) from None
    if writer.result is None:
        raise QgateError(f"mode {run.of.mode} was not captured.")
    return writer.result


def _pass_all(
    run: _Run,
    samples: Sequence[Any],
    sites: Mapping[str, str],
    writer: LayerCaptureWriter,
    step: Step,
) -> None:
    layers = {site: layer for layer, site in sites.items()}
    tapped = [site for site in run.model.sites() if site.name in layers]
    done = 0
    with torch.no_grad():
        for batch, count in _batches(samples, run.together):

            def keep(
                _index: int, site: Site, tensor: Tensor, batch: Any = batch, n: int = count
            ) -> None:
                for rows in _rows(tensor, batch, n, site.name):
                    plain = rows.detach().float().cpu().numpy()
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    writer.layers[layers[site.name]].add(plain, dtype)

            pass_through(run.model, tapped, done, batch, keep)
            done += count
            step(done, len(samples))


def _rows(tensor: Tensor, batch: Any, count: int, site: str) -> Iterator[Tensor]:
    """(tokens, width) of each sample; tokens that a mask calls padding are left out."""
    if not tensor.is_floating_point() or not tensor.dim():
        raise QgateError(
            f"{site} carries {tensor.dtype} {tuple(tensor.shape)}: codes without a scale cannot be "
            "compared with anything."
        )
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if isinstance(mask, Tensor) and mask.shape == tensor.shape[:-1] and count == 1:
        yield tensor[mask.to(tensor.device).bool()]
        return
    for part in tensor.split(1) if count > 1 else [tensor]:
        yield part.reshape(-1, tensor.shape[-1])


def _batches(samples: Sequence[Any], together: bool) -> Iterator[tuple[Any, int]]:
    """Samples of one length side by side, where a mode is the same alone and in a batch."""
    held: list[Tensor] = []
    for sample in samples:
        if not (together and isinstance(sample, Tensor) and sample.dim() > 1 and len(sample) == 1):
            if held:
                yield torch.cat(held), len(held)
                held = []
            yield sample, 1
            continue
        if held and (sample.shape != held[0].shape or len(held) == _BATCH):
            yield torch.cat(held), len(held)
            held = []
        held.append(sample)
    if held:
        yield torch.cat(held), len(held)
