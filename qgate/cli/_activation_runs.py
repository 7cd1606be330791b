"""Runs `qgate activations` on a model: plans, measures, writes."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from qgate.activation_stats.compute import activations
from qgate.activation_stats.files import UndrawnError, check_folder, write_report
from qgate.activation_stats.plan import plan_of
from qgate.activation_stats.record import ActivationsRecord
from qgate.activation_stats.setting_names import UNSAID
from qgate.activation_stats.settings import (
    KEYS,
    ActivationSettings,
    read_settings,
    with_values,
)
from qgate.activation_stats.subjects import (
    MeasuredNetwork,
    sample_set_of,
    subject_of,
    trusted_subject,
)
from qgate.activation_stats.texts import activation_text
from qgate.cli._activation_records import print_activations
from qgate.cli._console import is_quiet, print_json
from qgate.cli._progress import progress_bars
from qgate.cli._project import find_project_modules, model_here, option_here
from qgate.devices import resolve
from qgate.engine import Workers
from qgate.errors import QgateError
from qgate.hooks.observing import matching_modules
from qgate.models.sites import kind_of
from qgate.settings import values_of
from qgate.storage.locations import may_expire
from qgate.text import one_line
from qgate.text.printing import print_line, print_text

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_FIRST_LAYERS = 20
_PROJECT_KEYS = {
    "data.num_samples": "samples",
    "data.seq_len": "seqlen",
    "memory.device": "device",
}


def run(args: argparse.Namespace, overrides: list[tuple[str, str]], workers: Workers) -> int:
    """Do what the options say."""
    if args.model is not None:
        if any(name.lstrip("-") == "model.path" for name, _ in overrides):
            raise QgateError("--model and --model.path are the same key: give one of them.")
        overrides.append(("model.path", args.model))
    settings = read_settings(args.config, overrides, _project_defaults(args))
    notes: list[str] = []
    if workers.is_local:
        settings, notes = _on_this_machine(settings, overrides)
    if args.verbose:
        for key, value in values_of(settings).items():
            text = list(value) if isinstance(value, tuple) else value
            print_line(f"{' ' if value == KEYS[key].default else '*'} {key}: {text}")
        print_line()
    for note in [] if is_quiet() else notes:
        print_line(f"note    {note}", file=sys.stderr)
    name = _named(settings)
    model = trusted_subject(name) if args.trust_remote_code else name
    if args.list_layers is not None:
        return _list_layers(subject_of(model).module, args.list_layers, as_json=args.json)
    if args.dry_run:
        return _dry_run(model, settings)
    return _run(model, settings, workers, notes, verbose=args.verbose, as_json=args.json)


def _project_defaults(args: argparse.Namespace) -> dict[str, object]:
    """Return the keys that the project's settings have under their own names."""
    find_project_modules()
    keys = {name: option_here(option) for name, option in _PROJECT_KEYS.items()}
    keys["model.path"] = None if args.model is not None else model_here()
    return {name: value for name, value in keys.items() if value is not None}


def _on_this_machine(
    settings: ActivationSettings, overrides: Sequence[tuple[str, str]]
) -> tuple[ActivationSettings, list[str]]:
    """Replace a device of the configuration that this machine lacks by the CPU, with a note.

    A device on the command line is meant for this machine, so it is an error later.
    """
    notes = []
    options = {name.removeprefix("--").removeprefix(UNSAID) for name, _ in overrides}
    for key in ("memory.device", "memory.offload_device"):
        device = str(values_of(settings)[key])
        if key in options:
            continue
        try:
            resolve(device)
        except QgateError as error:
            if "was asked for" not in str(error):
                raise
            notes.append(f"{key} {device}: {error} The CPU is used.")
            settings = with_values(settings, {key: "cpu"})
    return settings, notes


# The model ---------------------------------------------------------------------------------------


def _named(settings: ActivationSettings) -> str:
    """Return the name of the model; a bare folder stands for one of Hugging Face."""
    path: str | None = settings.model.path
    if path is None:
        raise QgateError(
            "no model: give --model tiny-llama, hf:PATH, mamba:PATH or FILE.py:build, or "
            "model.path in the configuration."
        )
    scheme = path.partition(":")[0].lower()
    if scheme in ("hf", "mamba") or path.rpartition(":")[0].endswith(".py"):
        return path
    is_folder = path.startswith((".", "~", "/")) or (":" not in path and "/" in path)
    return f"hf:{path}" if is_folder or Path(path).is_dir() else path


def _list_layers(module: nn.Module, pattern: str, *, as_json: bool) -> int:
    names = [name for name in matching_modules(module, pattern, "--list-layers") if name]
    rows = []
    for name in names:
        layer = module.get_submodule(name)
        shape = " x ".join(map(str, getattr(getattr(layer, "weight", None), "shape", ())))
        text = name if as_json else one_line(name)
        rows.append((text, kind_of(layer), shape or type(layer).__name__))
    if as_json:
        print_json([dict(zip(("name", "kind", "shape"), row, strict=True)) for row in rows])
        return 0
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, kind, shape in rows:
        print_line(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape}")
    every = sum(1 for name, _ in module.named_modules() if name)
    print_line(f"{len(names)} of {every} modules")
    return 0


def _print_first_layers(module: nn.Module) -> None:
    """Print names of the first modules with weights of their own, to write patterns for."""
    layers = [
        one_line(name)
        for name, layer in module.named_modules()
        if name and any(True for _ in layer.parameters(recurse=False))
    ]
    first = layers[:_FIRST_LAYERS]
    more = ["... (--list-layers shows all)"] if len(layers) > len(first) else []
    print_line(f"Total layers found: {len(layers)}")
    print_line(f"Showing first {len(first)} layers:")
    for text in (*first, *more):
        print_line(f"  {text}")
    print_line()


# Running -----------------------------------------------------------------------------------------


def _check_writing(settings: ActivationSettings) -> None:
    check_folder(settings.visualization.save_dir, settings)


def _dry_run(model: str | MeasuredNetwork, settings: ActivationSettings) -> int:
    _check_writing(settings)
    subject = subject_of(model)
    _print_first_layers(subject.module)
    resolve(settings.memory.device)
    resolve(settings.memory.offload_device)
    plan = plan_of(subject.module, settings, subject.part)
    samples = sample_set_of(subject, None, settings)
    print_line(f"model    {subject.name} ({type(subject.module).__name__})")
    print_line(f"data     {samples.source}")
    for kind, panels in plan.panels.items():
        for pattern, names in panels.items():
            print_line(f"{kind:<17} {pattern}: {len(names)} layers")
    if plan.smoothed:
        print_line(f"smoothing         {len(plan.smoothed)} layers")
    if plan.sensitive:
        print_line(f"sensitivity       {len(plan.sensitive)} layers in "
              f"{', '.join(settings.sensitivity.formats)}")  # fmt: skip
    for note in [*plan.notes, *samples.notes]:
        print_line(f"note     {note}")
    print_line(f"would run {len(samples.calls)} forward passes and write to "
          f"{settings.visualization.save_dir}")  # fmt: skip
    return 0


def _run(
    model: str | MeasuredNetwork,
    settings: ActivationSettings,
    workers: Workers,
    notes: Sequence[str],
    *,
    verbose: bool,
    as_json: bool,
) -> int:
    _check_writing(settings)
    subject = subject_of(model)
    if not (as_json or is_quiet()):
        _print_first_layers(subject.module)
    with progress_bars() as step:
        result = activations(subject, settings=settings, workers=workers, progress=step)
        result.record["notes"][:0] = notes
        written = _write(result.record, settings.visualization.save_dir, step)
    if as_json:
        print_activations(result.record, written)
        return 1 if result.failed else 0
    print_text(activation_text(result.record))
    if verbose:
        times = ", ".join(
            f"{name} {value:.1f} s" for name, value in result.record["seconds"].items()
        )
        print_text(f"\ntimes   {times}")
    print_text(
        f"\n{len(written)} files, the first is {written[0]}"
        if written
        else "\nno files were asked for"
    )
    return 1 if result.failed else 0


def _write(record: ActivationsRecord, folder: str, step: Any) -> list[Location]:
    """Write the report, or keep the record on this machine where a store refuses it at the end."""
    try:
        return write_report(record, folder, progress=lambda done, of: step("pictures", done, of))
    except (OSError, QgateError) as error:
        if not may_expire(folder) or isinstance(error, UndrawnError):
            raise
        local_folder = tempfile.mkdtemp(prefix="qgate-activations-")
        alone = with_values(ActivationSettings(), {"output.formats": ("json",)})
        write_report(record, local_folder, alone)
        command = f"qgate activations {shlex.quote(local_folder)} --save_dir {shlex.quote(folder)}"
        raise QgateError(
            f"{str(error).rstrip('.')}. The record is kept in {local_folder!r}: `{command}` writes "
            "the whole report there."
        ) from None
