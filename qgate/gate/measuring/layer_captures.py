"""Capture of the outputs of layers in each mode and its reference, kept on disk."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qgate._version import __version__
from qgate.capture.running import pass_through
from qgate.comparing.layer_files import (
    REFERENCE,
    CaptureSettings,
    LayerCapture,
    captured,
    read_dump,
    stats_path,
    writing,
)
from qgate.errors import QgateError
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.passes import batches, short_layer
from qgate.gate.measuring.self_checks import NOISE, unquantized, unread_weight
from qgate.models import Model, Site
from qgate.models.model import inputs_hash
from qgate.modes import Calibration, Mode, apply
from qgate.modes.setups import ModelSetup

Say = Callable[[str], None]
Step = Callable[[int, int], None]


def capture_modes(
    setup: ModelSetup,
    patterns: str,
    folder: Path,
    layers: str = "first,last",
    *,
    overwrite: bool = False,
    say: Say = lambda _text: None,
    step: Step = lambda _done, _total: None,
) -> Iterator[LayerCapture]:
    """Return the captures one after the other as they appear in the folder, references first.

    Models are made one at a time, and not kept.
    """
    setup.check_modes(patterns)
    _check_writable(folder)
    bench = Bench(setup, progress=say)
    model = bench.model
    chosen = setup.select(patterns, model)
    sites = _sites(model, layers)
    of = CaptureSettings(
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
    misfits = _misfits(folder, of, sites)
    if misfits and not overwrite:
        raise QgateError(
            f"{str(folder)!r} holds captures of something else: {'; '.join(misfits.values())}. "
            "Name another --output-dir, or replace them with --overwrite."
        )
    _check_reference(bench)
    # mode_fp32 is in every folder: people load it by its name.
    bases = [model.basis, *(model.basis if mode.own else mode.basis for mode in chosen)]
    references = list(dict.fromkeys(bases))
    modes = [mode for mode in chosen if not mode.is_reference]
    gone = [path for stem in misfits for path in _files(folder, stem)]
    for path in gone:
        say(f"{path} goes")
    runs: list[str | Mode] = [*references, *modes]
    for number, basis_or_mode in enumerate(runs, 1):
        run_of = _settings_of(bench, of, basis_or_mode)
        say(f"[{number}/{len(runs)}] mode {run_of.mode}, basis {run_of.basis}")

        def write(
            at: str | Mode = basis_or_mode, of: CaptureSettings = run_of, gone: list[Path] = gone
        ) -> LayerCapture:
            return _written(bench, at, of, folder, sites, gone, step)

        try:
            capture = bench.in_parts(write)
        except OSError as error:
            raise QgateError(
                f"mode {run_of.mode} could not be written into {str(folder)!r}: {error.strerror}."
            ) from None
        yield capture
        gone = []


def _settings_of(bench: Bench, of: CaptureSettings, run: str | Mode) -> CaptureSettings:
    """Return the settings of one run: the reference in a basis, or a mode."""
    if isinstance(run, str):
        return replace(of, basis=run)
    scales = bench.calibration if run.calibrated else None
    basis = bench.model.basis if run.own else run.basis
    return replace(of, mode=run.name, basis=basis, calibration=_scales_hash(scales))


def _written(
    bench: Bench,
    run: str | Mode,
    of: CaptureSettings,
    folder: Path,
    sites: Mapping[str, str],
    gone: Sequence[Path],
    step: Step,
) -> LayerCapture:
    """Run a basis or a mode, and write its capture whole or not at all."""
    casts: Callable[[], Mapping[str, dict[str, int]]] = dict
    if isinstance(run, str):
        model, together = bench.model.in_basis(run), True
    else:
        quantized = apply(run, bench.model, bench.calibration if run.calibrated else None)
        model, together, casts = quantized.model, run.causal and not run.own, quantized.casts
    lost = [site for site in sites.values() if site.rpartition(":")[0] not in model.layers]
    if lost:
        raise QgateError(f"{', '.join(lost)} is not there in mode {of.mode}: nothing captured.")
    with writing(folder, of, sites, gone) as writer:
        _pass_all(model, together, bench.at_once, bench.model.inputs, sites, writer.add, step)
        writer.casts = {name: dict(counts) for name, counts in casts().items()}
    if writer.result is None:
        raise QgateError(f"mode {of.mode} was not captured.")
    return writer.result


def _scales_hash(scales: Calibration | None) -> str | None:
    if scales is None:
        return None
    entries = {site: asdict(entry) for site, entry in scales.scales.items()}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode("utf-8")).hexdigest()


# What to capture -------------------------------------------------------------------------------


def _sites(model: Model, layers: str) -> dict[str, str]:
    """Return sites by the name of their layer on disk, in the order of the layers."""
    names = list(model.layers)
    if not names:
        raise QgateError(f"{model.name} has no list of blocks: say layers=(…) in its qgate.Model.")
    indices = sorted(set(_indices(layers, names)))
    sites = {f"layer_{index}": f"{names[index]}:output" for index in indices}
    passed = {site.name for site in model.sites()}
    missing = [site for site in sites.values() if site not in passed]
    if missing:
        raise QgateError(f"nothing passes {', '.join(missing)} of {model.name}: not captured.")
    return sites


def _indices(layers: str, names: Sequence[str]) -> list[int]:
    words = {"first": 0, "last": len(names) - 1}
    parts = [part.strip().lower() for part in layers.split(",")]
    if parts == ["all"]:
        return list(range(len(names)))
    if all(part in words or part.isdecimal() for part in parts):
        indices = [words[part] if part in words else int(part) for part in parts]
        beyond = [index for index in indices if index >= len(names)]
        if beyond:
            raise QgateError(f"there is no layer {beyond[0]}: there are 0 to {len(names) - 1}.")
        return indices
    try:
        pattern = re.compile(layers)
    except re.error as error:
        raise QgateError(f"--layers {layers!r} is no regular expression: {error}.") from None
    indices = [index for index, name in enumerate(names) if pattern.search(name)]
    if not indices:
        listed = ", ".join(short_layer(name) for name in names)
        raise QgateError(f"--layers {layers!r} matches no layer: {listed}.")
    return indices


def _misfits(folder: Path, of: CaptureSettings, sites: Mapping[str, str]) -> dict[str, str]:
    """Return what is in a folder and of something else, by stem, with the reason."""
    misfits: dict[str, str] = {}
    for stem in captured(folder):
        try:
            earlier = read_dump(folder, stem)
        except QgateError as error:
            misfits[stem] = str(error).rstrip(".")
            continue
        pairs = [
            ("model", earlier.of.model, of.model),
            ("weights", earlier.of.weights, of.weights),
            ("inputs", earlier.of.inputs, of.inputs),
            ("layers", ", ".join(earlier.layers), ", ".join(sites)),
        ]
        for name, old, new in pairs:
            if old != new:
                misfits[stem] = (
                    f"{stem} is of {name} {_short_digest(old)}, and this is of {_short_digest(new)}"
                )
                break
    return misfits


def _short_digest(text: str) -> str:
    return f"{text[:12]}…" if re.fullmatch(r"[0-9a-f]{40,}", text) else repr(text)


def _files(folder: Path, stem: str) -> list[Path]:
    """List what a stem owns: its stats file and the layers beside it."""
    named = re.compile(rf"mode_{re.escape(stem)}_layer_[0-9]+\.npy")
    layers = [path for path in sorted(folder.iterdir()) if named.fullmatch(path.name)]
    return [stats_path(folder, stem), *layers]


def _check_writable(folder: Path) -> None:
    """Refuse a folder before minutes of work, not after them."""
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
    """Refuse a reference that is quantized anywhere: what it computes is computed again."""
    model = bench.model
    odd = {str(p.dtype) for p in model.module.parameters() if p.is_floating_point()}
    odd -= {"torch.float32"}
    if odd:
        raise QgateError(
            f"{model.name} has weights of {', '.join(sorted(odd))}: no FP32 reference."
        )
    if not any(site.kind == "linear" and site.port == "output" for site in model.sites()):
        return
    for check in unquantized(bench):
        error = check.values["relative_mse"]
        if error is None or not error <= NOISE:
            raise QgateError(
                f"the reference of {model.name} is not FP32: {check.site} is not the product of "
                f"its parameters (relative MSE {error})."
            )
    if unread := unread_weight(bench):
        raise QgateError(f"a changed weight of {unread} does not show: its outputs are stale.")


# Running ---------------------------------------------------------------------------------------


def _pass_all(
    model: Model,
    together: bool,
    most: int,
    samples: Sequence[Any],
    sites: Mapping[str, str],
    add: Callable[[str, Tensor], None],
    step: Step,
) -> None:
    layers = {site: layer for layer, site in sites.items()}
    tapped = [site for site in model.sites() if site.name in layers]
    # The rows of a batch are told apart where each sample is one row.
    together = together and all(
        isinstance(sample, Tensor) and sample.dim() > 1 and len(sample) == 1 for sample in samples
    )
    done = 0
    with torch.no_grad():
        for listed in batches(samples, together, most):
            batch = listed[0] if len(listed) == 1 else torch.cat(listed)

            def keep(
                _index: int, site: Site, tensor: Tensor, batch: Any = batch, n: int = len(listed)
            ) -> None:
                for rows in _rows(tensor, batch, n, site.name):
                    add(layers[site.name], rows)

            pass_through(model, tapped, done, batch, keep)
            done += len(listed)
            step(done, len(samples))


def _rows(tensor: Tensor, batch: Any, count: int, site: str) -> Iterator[Tensor]:
    """Return (tokens, width) of each sample, without tokens that a mask calls padding."""
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
