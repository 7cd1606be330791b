"""The options of every run and their defaults, which the settings of a project replace.

Those of a kind of gate are in its `kind.py`; `qgate.project.gate_kinds.known_options` has all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# What an option is: a type, or the texts that it may be.
Kind = type | tuple[str, ...]


class PathPair:
    """Kind of an option that takes two paths."""


@dataclass(frozen=True, eq=False)
class Option:
    """One option: how argparse reads it, its default, and what it is about.

    Options about the run are typed again by whoever repeats a failure; those of its subject are
    in the failure anyway, and those of the report or of an update move no number. Those about its
    baseline are typed again, but not where it is updated. Those of a baseline, of an update and of
    one command (`command`) are no settings of a project. A `setting` is no option: the file of a
    project has it, or `--set` of a command.
    """

    help: str
    default: Any = None
    about: Literal["run", "subject", "report", "baseline", "update", "command", "setting"] = "run"
    metavar: str | None = None
    kind: Kind = str

    @property
    def is_setting(self) -> bool:
        """Return True if the file of a project may set it."""
        return self.about not in ("baseline", "update", "command")

    @property
    def argparse(self) -> dict[str, object]:
        """Arguments of `add_argument`: nothing given is None, for a project's file may say it."""
        if self.kind is bool:
            return {"help": self.help, "action": "store_true", "default": None}
        if isinstance(self.kind, tuple):
            return {"help": self.help, "choices": self.kind}
        reads: dict[object, dict[str, object]] = {
            list: {"action": "append"},
            int: {"type": int},
            float: {"type": float},
            PathPair: {"nargs": 2, "metavar": tuple((self.metavar or "").split())},
        }
        return {"help": self.help, "metavar": self.metavar, **reads.get(self.kind, {})}


PLOTS = ("failed", "worst", "all", "none")

OPTIONS = {
    "mode": Option(
        "ways to quantize the model: names, patterns such as '2-*', or the groups all, quant_only, "
        "fp_only and essential (default); separated by commas, repeatable",
        ["essential"],
        "subject",
        "MODES",
        list,
    ),
    "model": Option(
        "model to run: tiny-mamba (default), tiny-llama, mamba:PATH, hf:PATH or "
        "package.module:build; hf:PATH=NAME is called NAME in results and baselines; repeatable",
        ["tiny-mamba"],
        "subject",
        "NAME",
        list,
    ),
    "format": Option(
        "formats for the per-format suites, separated by commas, or all; repeatable (default: "
        "those that a suite names or the run uses)",
        None,
        "subject",
        "NAMES",
        list,
    ),
    "layers": Option(
        "layers to gate: all (default), first,last, or a regular expression",
        "all",
        metavar="LAYERS",
    ),
    "reference": Option(
        "mode to compare with: fp32 (default), or any mode with the same rotation",
        "fp32",
        metavar="MODE",
    ),
    "baselines": Option(
        "folder of baselines (default: baselines/)",
        metavar="DIR",
        kind=Path,
    ),
    "across-weights": Option(
        "compare relative errors with a baseline of other weights, as of a retrain or a fine-tune; "
        "the limit regression_across_weights (0.25) says how much they may grow",
        False,
        "baseline",
        kind=bool,
    ),
    "device": Option("device: auto (default), cpu, cuda or cuda:N", "auto", metavar="D"),
    "samples": Option("number of texts to run (default 10)", 10, metavar="N", kind=int),
    "seqlen": Option("tokens of each text (default 512)", 512, metavar="N", kind=int),
    "text": Option("text in UTF-8 to run on (default: a built-in one)", metavar="FILE", kind=Path),
    "tokens": Option(
        "token ids (.npy) instead of text; half of them calibrate, unless calib_text is set",
        metavar="FILE",
        kind=Path,
    ),
    "calib-text": Option(
        "text to calibrate on (default: another built-in one)", metavar="FILE", kind=Path
    ),
    "calib-samples": Option("number of calibration texts (default 64)", 64, metavar="N", kind=int),
    "calib-seqlen": Option("tokens of each (default 512)", 512, metavar="N", kind=int),
    "percentile-alpha": Option(
        "percentile of magnitudes that static scales are made from, as a share (default 0.9995)",
        0.9995,
        metavar="A",
        kind=float,
    ),
    "calibration": Option(
        "file of static scales; measured and written if it is missing", metavar="FILE", kind=Path
    ),
    "plots": Option(
        "gates that the report draws: those that failed, these and the worst that passed (worst, "
        "the default), all, or none, after which nothing can be drawn later",
        "worst",
        "report",
        kind=PLOTS,
    ),
    "no-report": Option(
        "do not write qgate-out/report.html; `qgate report` makes it later",
        False,
        "report",
        kind=bool,
    ),
    "shard": Option(
        "run part I of N of the tests, such as 2/8; `qgate report --merge` merges the results",
        metavar="I/N",
    ),
    "allow-partial": Option(
        "pass although gates were skipped, deselected or left out, where CI is set",
        False,
        "command",
        kind=bool,
    ),
    "watch-underflow": Option(
        "list at the end where quantization lost values below the smallest normal number "
        "of the format (slows the run)",
        False,
        "report",
        kind=bool,
    ),
    "update-baselines": Option(
        "accept the measured errors that are new or out of tolerance",
        False,
        "update",
        kind=bool,
    ),
    "update-which": Option(
        "errors that an update writes: failed and new ones (default), new ones only, or all",
        "failed",
        "update",
        kind=("failed", "new", "all"),
    ),
    "accept-plan": Option(
        "with --update-baselines: accept changes of the plan, too (which quantizer each site has)",
        False,
        "update",
        kind=bool,
    ),
    "update-dry-run": Option("list what an update would write", False, "update", kind=bool),
}

SETTINGS = {
    "engine": Option(
        "where processes of --jobs run: local (default), ray, or ray://host:port of a cluster",
        "local",
        "setting",
        "E",
    ),
    "gpus-per-task": Option(
        "GPUs that each task asks a Ray cluster for (default 0)", 0.0, "setting", "X", float
    ),
    "calib-arithmetic": Option(
        "precision in which scales and codes are computed: fp32 (default), or fp16 as in Quamba-SE",
        "fp32",
        "setting",
        kind=("fp32", "fp16"),
    ),
    "counted": Option(
        "elements of each tensor that a collection of statistics counts, or all (default 32768)",
        str(2**15),
        "setting",
        "N",
    ),
    "sweep-alignment": Option(
        "range of exponents unless given: exact (from no overflow to no underflow, default), or "
        "that of megatron-tensor-saver",
        "exact",
        "setting",
        kind=("exact", "documented"),
    ),
    "sweep-scale-bits": Option(
        "bits of a block's scale, 2 to 8 (default 8)", 8, "setting", "B", int
    ),
    "sweep-block": Option("elements per block (default 32)", 32, "setting", "N", int),
    "sweep-axis": Option("axis that blocks run along (default -1)", -1, "setting", "N", int),
}
"""Settings without an option, by name."""
