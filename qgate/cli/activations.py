"""Statistics of activations and weights: magnitudes, outliers, formats, smoothing, sensitivity.

  qgate activations --model tiny-llama
  qgate activations --model hf:PATH --config my.yaml --data.num_samples 128
  qgate activations --model hf:PATH --outlier.threshold 100 --sensitivity.enabled true
  qgate activations --model hf:PATH --list-layers 'down_proj'
  qgate activations --model hf:PATH --jobs 2
  qgate activations --write-config my.yaml
  qgate activations figures/activations.json --dpi 300

Every key of the configuration (`--write-config` prints all, with what they mean) is an option, with
or without `visualization.` before it; a list has commas. Pictures, tables and analysis_report.html
are written to visualization.save_dir, a folder or a URL (s3://bucket/folder). The record that a run
leaves there, activations.json or the folder with it, is drawn again without the model. Exit status:
1 if values are not finite or if a module that was matched never ran, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qgate.cli._activation_records import is_place, redraw
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError

if TYPE_CHECKING:
    from torch import nn

    from qgate.activation_stats.record import ActivationsRecord
    from qgate.activation_stats.settings import ActivationSettings
    from qgate.activation_stats.subjects import MeasuredNetwork
    from qgate.engine import Workers
    from qgate.storage.places import Place

_NOTHING = "-"


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help="tiny-llama, hf:PATH, mamba:PATH, FILE.py:build; over "
        "model.path of the configuration")  # fmt: skip
    add("--config", metavar="FILE", help="a configuration (.yaml or .toml), or its URL")
    add("--list-layers", nargs="?", const=".", metavar="REGEX", help="print the names of the "
        "model's modules (those that match), and stop")  # fmt: skip
    add("--write-config", nargs="?", const=_NOTHING, metavar="FILE", help="print the commented "
        "defaults, or write them to a new file (.yaml or .toml), and stop")  # fmt: skip
    add("--dry-run", action="store_true", help="check all there is to check before the first "
        "forward pass, say what would run, and stop")  # fmt: skip
    add("--verbose", action="store_true", help="print every setting, and the times")
    add("--trust-remote-code", action="store_true", help="let Python files that come with an "
        "hf: folder run on this machine; only for folders whose code you have read")  # fmt: skip
    add_workers(parser)
    parser.set_defaults(takes_more=True)


def run(args: argparse.Namespace) -> int:
    from qgate.activation_stats.settings import read_settings

    workers = workers_from(args)
    record, overrides = _words(args.more)
    if record is not None:
        return redraw(record, overrides, args, _bars())
    if args.write_config is not None:
        _refuse_with("--write-config", overrides, args)
        return _write_config(args.write_config)
    if args.model is not None:
        if any(name.lstrip("-") == "model.path" for name, _ in overrides):
            raise QgateError("--model and --model.path are the same key: give one of them.")
        overrides.append(("model.path", args.model))
    settings = read_settings(args.config, overrides)
    notes: list[str] = []
    if workers.is_local:
        settings, notes = _on_this_machine(settings, overrides)
    if args.verbose:
        _print_settings(settings)
    for note in notes:
        print(f"note    {note}", file=sys.stderr)
    name = _named(settings)
    from qgate.activation_stats.subjects import subject_of, trusted_subject

    model = trusted_subject(name) if args.trust_remote_code else name
    if args.list_layers is not None:
        return _list_layers(subject_of(model).module, args.list_layers)
    if args.dry_run:
        return _dry_run(model, settings)
    return _run(model, settings, workers, notes, verbose=args.verbose)


# What a command line says ------------------------------------------------------------------------


def _words(more: Sequence[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """A record to draw again, if one is named, and `--a.b value` and `--a.b=value`; what is none of
    these is an error."""
    record: str | None = None
    found: list[tuple[str, str]] = []
    left = list(more)
    while left:
        word = left.pop(0)
        if record is None and is_place(word):
            record = word
            continue
        if not word.startswith("--") or len(word) < 3:
            raise QgateError(
                f"{word!r} belongs to no option, and is no record to draw again (activations.json, "
                "or the folder with it); a list is one word with commas, as in "
                "--heatmap_3d.view_angle 30,45."
            )
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            _check_key(name)
            if not left or left[0].startswith("--"):
                raise QgateError(
                    f"{word} has no value; write {word} VALUE, or {word}=VALUE where the value "
                    "begins with a dash."
                )
            value = left.pop(0)
        found.append((name, value))
    return record, found


def _check_key(name: str) -> None:
    """An unknown key is told before its missing value is."""
    from qgate.activation_stats.setting_values import listed
    from qgate.activation_stats.settings import keys

    listed(name, {each.name: each for each in keys()})


def _refuse_with(option: str, overrides: Sequence[object], args: argparse.Namespace) -> None:
    if overrides or args.model or args.config or args.list_layers or args.dry_run:
        raise QgateError(f"{option} writes the defaults; it goes with no other option.")


def _on_this_machine(
    settings: ActivationSettings, overrides: Sequence[tuple[str, str]]
) -> tuple[ActivationSettings, list[str]]:
    """A file that was written elsewhere may ask for a GPU: then it is told what runs instead.

    Who asks for one on the command line means this machine, and gets an error.
    """
    from qgate.devices import resolve

    notes = []
    memory = settings.memory
    asked = {name.removeprefix("--").removeprefix("visualization.") for name, _ in overrides}
    for field in ("device", "offload_device"):
        if f"memory.{field}" in asked:
            continue
        try:
            resolve(getattr(memory, field))
        except QgateError as error:
            if "was asked for" not in str(error):
                raise
            notes.append(f"memory.{field} {getattr(memory, field)}: {error} The CPU is used.")
            changes: dict[str, Any] = {field: "cpu"}
            memory = replace(memory, **changes)
    return replace(settings, memory=memory), notes


def _print_settings(settings: ActivationSettings) -> None:
    from qgate.activation_stats.settings import keys

    for each in keys():
        value = each.of(settings)
        shown = list(value) if isinstance(value, tuple) else value
        mark = " " if value == each.default else "*"
        print(f"{mark} {each.name}: {shown}")
    print()


def _write_config(name: str) -> int:
    from qgate.activation_stats.setting_texts import default_config_text
    from qgate.storage.places import check_writable, user_place
    from qgate.storage.writing import create_text

    if name == _NOTHING:
        print(default_config_text(), end="")
        return 0
    path = user_place(name)
    check_writable(path)
    kind = path.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml"):
        raise QgateError(f"{name!r} is no .yaml, .yml or .toml file.")
    text = default_config_text("toml" if kind == ".toml" else "yaml")
    try:
        create_text(path, text)
    except FileExistsError:
        raise QgateError(f"{name!r} is there already; give a new name.") from None
    print(f"{path}: every key with its default. qgate activations --model NAME --config {path}")
    return 0


# The model ---------------------------------------------------------------------------------------


def _named(settings: ActivationSettings) -> str:
    """The name of the model; a bare folder, as configuration files have it, is of Hugging Face."""
    path = settings.model.path
    if path is None:
        raise QgateError(
            "no model: give --model tiny-llama, hf:PATH, mamba:PATH or FILE.py:build, or "
            "model.path in the configuration."
        )
    scheme = path.partition(":")[0].lower()
    if scheme in ("hf", "mamba") or path.rpartition(":")[0].endswith(".py"):
        return path
    looks = path.startswith((".", "~", "/")) or (":" not in path and "/" in path)
    return f"hf:{path}" if looks or Path(path).is_dir() else path


def _list_layers(module: nn.Module, pattern: str) -> int:
    from qgate.capture.flowing import matching
    from qgate.models.sites import kind_of

    names = [name for name in matching(module, pattern, "--list-layers") if name]
    rows = []
    for name in names:
        one = module.get_submodule(name)
        weight = getattr(one, "weight", None)
        shape = " x ".join(map(str, getattr(weight, "shape", ()))) if weight is not None else ""
        rows.append((name, kind_of(one), shape or type(one).__name__))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    for name, kind, shape in rows:
        print(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {shape}")
    every = sum(1 for name, _ in module.named_modules() if name)
    print(f"{len(names)} of {every} modules")
    return 0


# Running -----------------------------------------------------------------------------------------


def _check_writing(settings: ActivationSettings) -> None:
    from qgate.activation_stats.files import check_folder
    from qgate.activation_stats.reading import look_of
    from qgate.activation_stats.settings import changed

    check_folder(settings.visualization.save_dir, look_of(changed(settings)))


def _dry_run(model: str | MeasuredNetwork, settings: ActivationSettings) -> int:
    from qgate.activation_stats.plan import plan_of
    from qgate.activation_stats.subjects import passes_of, subject_of
    from qgate.devices import resolve

    _check_writing(settings)
    subject = subject_of(model)
    resolve(settings.memory.device)
    resolve(settings.memory.offload_device)
    plan = plan_of(subject.module, settings, subject.part)
    passes = passes_of(subject, None, settings)
    print(f"model    {subject.name} ({type(subject.module).__name__})")
    print(f"data     {passes.source}")
    for kind, panels in plan.panels.items():
        for pattern, names in panels.items():
            print(f"{kind:<17} {pattern}: {len(names)} layers")
    if plan.smoothed:
        print(f"smoothing         {len(plan.smoothed)} layers")
    if plan.sensitive:
        print(f"sensitivity       {len(plan.sensitive)} layers in "
              f"{', '.join(settings.sensitivity.formats)}")  # fmt: skip
    for note in [*plan.notes, *passes.notes]:
        print(f"note     {note}")
    print(f"would run {len(passes.samples)} forward passes and write to "
          f"{settings.visualization.save_dir}")  # fmt: skip
    return 0


def _run(
    model: str | MeasuredNetwork,
    settings: ActivationSettings,
    workers: Workers,
    notes: Sequence[str],
    *,
    verbose: bool,
) -> int:
    from qgate.activation_stats.compute import activations
    from qgate.activation_stats.texts import activation_text

    _check_writing(settings)
    with _bars() as step:
        result = activations(model, settings=settings, workers=workers, progress=step)
        result.record["notes"][:0] = notes
        written = _write(result.record, settings.visualization.save_dir, step)
    print(activation_text(result.record))
    if verbose:
        times = ", ".join(
            f"{name} {value:.1f} s" for name, value in result.record["seconds"].items()
        )
        print(f"\ntimes   {times}")
    print(
        f"\n{len(written)} files, the first is {written[0]}"
        if written
        else "\nno files were asked for"
    )
    return 1 if result.failed else 0


def _write(record: ActivationsRecord, folder: str, step: Any) -> list[Place]:
    """What a store refuses after hours of work, as a login ends, is kept on this machine."""
    from qgate.activation_stats.files import UndrawnError, write_report
    from qgate.activation_stats.reading import Look
    from qgate.storage.places import may_refuse_later

    try:
        return write_report(record, folder, progress=lambda done, of: step("pictures", done, of))
    except (OSError, QgateError) as error:
        if not may_refuse_later(folder) or isinstance(error, UndrawnError):
            raise
        kept = tempfile.mkdtemp(prefix="qgate-activations-")
        write_report(record, kept, Look(formats=("json",)))
        raise QgateError(
            f"{str(error).rstrip('.')}. What was found is kept in {kept!r}: `qgate activations "
            f"{shlex.quote(kept)} --save_dir {shlex.quote(folder)}` writes all of it there."
        ) from None


@contextlib.contextmanager
def _bars() -> Iterator[Any]:
    """One bar for each thing that is done, on a terminal; in a log it would be noise."""
    if not sys.stderr.isatty():
        yield lambda _what, _done, _of: None
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def step(what: str, done: int, of: int) -> None:
        if what not in bars:
            for other in bars.values():
                other.close()
            bars[what] = tqdm(desc=what, file=sys.stderr, leave=False)
        bars[what].total = of
        bars[what].update(done - bars[what].n)

    try:
        yield step
    finally:
        for bar in bars.values():
            bar.close()
