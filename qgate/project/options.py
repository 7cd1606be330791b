"""The settings of every run and their defaults, which the settings of a project replace.

Those of a kind of gate are in its `kind.py`; `qgate.project.gate_kinds.known_options` has all.
`Setting.about` says what one is about. Settings of the run are typed again by whoever repeats a
failure; those of its subject are in the failure anyway, and those of the report or of an update
move no number. Those about its baseline are typed again, but not where it is updated. Those in
`TYPED_ONLY` are on the command line alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qgate.settings import Setting, setting, settings_of

COUNTED = 2**15
TYPED_ONLY = ("baseline", "update", "command")
Plots = Literal["failed", "worst", "all", "none"]
PLOTS = get_args(Plots)


@dataclass(frozen=True)
class RunSettings:
    """The options of a run, in the order of its help."""

    mode: tuple[str, ...] = setting(
        ("essential",),
        "ways to quantize the model: names, patterns such as '2-*', or the groups all, quant_only, "
        "fp_only and essential; separated by commas, repeatable",
        "MODES",
        about="subject",
        is_repeatable=True,
    )
    model: tuple[str, ...] = setting(
        ("tiny-mamba",),
        "model to run: tiny-mamba, tiny-llama, mamba:PATH, hf:PATH or package.module:build; "
        "hf:PATH=NAME is called NAME in results and baselines; repeatable",
        "NAME",
        about="subject",
        is_repeatable=True,
    )
    format: tuple[str, ...] | None = setting(
        None,
        "formats for the per-format suites, separated by commas, or all; repeatable (default: "
        "those that a suite names or the run uses)",
        "NAMES",
        about="subject",
        is_repeatable=True,
    )
    layers: str = setting(
        "all", "layers to gate: all, first,last, or a regular expression", "LAYERS"
    )
    reference: str = setting(
        "fp32", "mode to compare with: fp32, or any mode with the same rotation", "MODE"
    )
    baselines: str | None = setting(
        None, "folder of baselines (default: baselines/)", "DIR", is_path=True
    )
    across_weights: bool = setting(
        False,
        "compare relative errors with a baseline of other weights, as of a retrain or a "
        "fine-tune; the limit regression_across_weights (0.25) says how much they may grow",
        about="baseline",
    )
    device: str = setting("auto", "device: auto, cpu, cuda or cuda:N", "D")
    samples: int = setting(10, "number of texts to run", "N")
    seqlen: int = setting(512, "tokens of each text", "N")
    text: str | None = setting(
        None, "text in UTF-8 to run on (default: a built-in one)", "FILE", is_path=True
    )
    tokens: str | None = setting(
        None,
        "token ids (.npy) instead of text; half of them calibrate, unless calib_text is set",
        "FILE",
        is_path=True,
    )
    calib_text: str | None = setting(
        None, "text to calibrate on (default: another built-in one)", "FILE", is_path=True
    )
    calib_samples: int = setting(64, "number of calibration texts", "N")
    calib_seqlen: int = setting(512, "tokens of each calibration text", "N")
    percentile_alpha: float = setting(
        0.9995, "percentile of magnitudes that static scales are made from, as a share", "A"
    )
    calibration: str | None = setting(
        None, "file of static scales; measured and written if it is missing", "FILE", is_path=True
    )
    plots: Plots = setting(
        "worst",
        "gates that the report draws: those that failed, these and the worst that passed (worst), "
        "all, or none, after which nothing can be drawn later",
        about="report",
    )
    no_report: bool = setting(
        False, "do not write qgate-out/report.html; `qgate report` makes it later", about="report"
    )
    shard: str | None = setting(
        None,
        "run part I of N of the tests, such as 2/8; `qgate report --merge` merges the results",
        "I/N",
    )
    allow_partial: bool = setting(
        False,
        "pass although gates were skipped, deselected or left out, where CI is set",
        about="command",
    )
    watch_underflow: bool = setting(
        False,
        "list at the end where quantization lost values below the smallest normal number of the "
        "format (slows the run)",
        about="report",
    )
    update_baselines: bool = setting(
        False, "accept the measured errors that are new or out of tolerance", about="update"
    )
    update_which: Literal["failed", "new", "all"] = setting(
        "failed",
        "errors that an update writes: failed and new ones, new ones only, or all",
        about="update",
    )
    accept_plan: bool = setting(
        False,
        "with --update-baselines: accept changes of the plan, too (which quantizer each site has)",
        about="update",
    )
    update_dry_run: bool = setting(False, "list what an update would write", about="update")


@dataclass(frozen=True)
class CommandSettings:
    """Settings of commands without an option: a project's file has them, or `--set`."""

    engine: str = setting(
        "local", "where processes of --jobs run: local, ray, or ray://host:port of a cluster", "E"
    )
    gpus_per_task: float = setting(0.0, "GPUs that each task asks a Ray cluster for", "X")
    calib_arithmetic: Literal["fp32", "fp16"] = setting(
        "fp32", "precision in which scales and codes are computed: fp32, or fp16 as in Quamba-SE"
    )
    counted: int | Literal["all"] = setting(
        COUNTED,
        "elements of each tensor that a collection counts, chosen by its seed, or all; on a GPU "
        "always all, and extremes are of every element",
        "N",
        low=1,
    )
    sweep_alignment: Literal["exact", "documented"] = setting(
        "exact",
        "range of exponents unless given: exact (from no overflow to no underflow), or that of "
        "megatron-tensor-saver",
    )
    sweep_scale_bits: int = setting(8, "bits of a block's scale, 2 to 8", "B", low=2, high=8)
    sweep_block: int = setting(32, "elements per block", "N", low=1)
    sweep_axis: int = setting(-1, "axis that blocks run along", "N")


@dataclass(frozen=True)
class FileSettings:
    """Settings that only the file of a project has."""

    suites: tuple[str, ...] = setting(
        (), "folders and files that `qgate run` hands to pytest", is_path=True
    )


def of_subject(help: str, metavar: str, **about: Any) -> Any:
    """Declare a setting of a kind of gate that is about its subject; nothing is its default."""
    return setting(None, help, metavar, about="subject", **about)


def by_option(declaration: type) -> Mapping[str, Setting]:
    """Return settings by the names of their options."""
    return {name.replace("_", "-"): each for name, each in settings_of(declaration).items()}


OPTIONS, SETTINGS = by_option(RunSettings), by_option(CommandSettings)
