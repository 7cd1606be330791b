"""The options of a run and their defaults, which the settings of a project replace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# What an option is: a type, or the texts that it may be.
Kind = type | tuple[str, ...]


class PathPair:
    """Kind of an option that takes two paths."""


@dataclass(frozen=True)
class Option:
    """One option: how argparse reads it, its default, and what it is about.

    Options about the run are typed again by whoever repeats a failure; those of its subject are
    in the failure anyway, and those of the report or of an update move no number. Those about its
    baseline are typed again, but not where it is updated. Those of a baseline, of an update and of
    one command (`command`) are no settings of a project.
    """

    help: str
    default: Any = None
    about: Literal["run", "subject", "report", "baseline", "update", "command"] = "run"
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


OPTIONS = {
    "mode": Option(
        "modes: names, patterns such as '2-*', groups all, quant_only, fp_only, essential "
        "(default); separated by commas, repeatable",
        ["essential"],
        "subject",
        "MODES",
        list,
    ),
    "model": Option(
        "tiny-mamba (default), tiny-llama, mamba:PATH, hf:PATH or package.module:build; "
        "hf:PATH=NAME is called NAME in results and baselines; repeatable",
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
    "layers": Option("all (default), first,last, or a regular expression", "all", metavar="LAYERS"),
    "dump": Option(
        "tensors collected from a run, for the suites on dumps; left out without it",
        None,
        "subject",
        "DIR",
        Path,
    ),
    "dump-name": Option(
        "what the accepted record of that dump is called (default: dump- and its model)",
        None,
        "subject",
        "NAME",
    ),
    "checkpoint": Option(
        "a quantized checkpoint, for the suite on checkpoints; left out without it",
        None,
        "subject",
        "CHILD",
        Path,
    ),
    "parent": Option(
        "the checkpoint that it was made from; without one its errors are not measured",
        None,
        "subject",
        "PARENT",
        Path,
    ),
    "recipe": Option(
        "what was meant with that checkpoint, where it does not say so itself: a recipe file",
        None,
        "subject",
        "FILE",
        Path,
    ),
    "checkpoint-name": Option(
        "what the accepted record of that checkpoint is called (default: its folder's name)",
        None,
        "subject",
        "NAME",
    ),
    "engines": Option(
        "two engines on the same tokens, for the suite on engines; left out without them",
        None,
        "subject",
        "A B",
        PathPair,
    ),
    "engines-name": Option(
        "what the accepted record of these engines is called (default: engines- and A's name)",
        None,
        "subject",
        "NAME",
    ),
    "engines-weights": Option(
        "the checkpoints that they loaded, to tell whether these are the same",
        None,
        "subject",
        "CKPT_A CKPT_B",
        PathPair,
    ),
    "engines-logits": Option(
        "the module of dumps that gives logits (default: the last that may)",
        None,
        "subject",
        "MODULE",
    ),
    "reference": Option(
        "what modes are compared with: fp32 (default) or any mode of the same basis",
        "fp32",
        metavar="MODE",
    ),
    "baselines": Option(
        "where baselines are, a folder or a URL such as s3://bucket/baselines (default: "
        "baselines/)",
        metavar="DIR",
        kind=Path,
    ),
    "across-weights": Option(
        "hold relative errors against a baseline of other weights, of a retrain or a fine-tune, "
        "with the room of the limit regression_across_weights (0.25)",
        False,
        "baseline",
        kind=bool,
    ),
    "relations": Option(
        "also run the suite of relations, which runs by itself where its file is named",
        False,
        kind=bool,
    ),
    "bitwise": Option(
        "hold relations at the same bits, as batch-invariant kernels claim, not at float noise",
        False,
        kind=bool,
    ),
    "device": Option("auto (default), cpu, cuda or cuda:N", "auto", metavar="D"),
    "samples": Option("texts evaluated (10)", 10, metavar="N", kind=int),
    "seqlen": Option("tokens of each (512)", 512, metavar="N", kind=int),
    "text": Option("text in UTF-8 to run on (default: a built-in one)", metavar="FILE", kind=Path),
    "tokens": Option(
        "token ids (.npy) in place of text; without --calib-text half of them calibrate",
        metavar="FILE",
        kind=Path,
    ),
    "calib-text": Option(
        "text to calibrate on (default: another built-in one)", metavar="FILE", kind=Path
    ),
    "calib-samples": Option("calibrated on (64)", 64, metavar="N", kind=int),
    "calib-seqlen": Option("tokens of each (512)", 512, metavar="N", kind=int),
    "percentile-alpha": Option(
        "of calibrated percentiles (0.9995)", 0.9995, metavar="A", kind=float
    ),
    "calibration": Option("static scales to use, or to make and keep", metavar="FILE", kind=Path),
    "plots": Option(
        "what the report draws: failed gates, these and the worst that passed (worst, the "
        "default), all, or none, which also leaves nothing to draw later",
        "worst",
        "report",
        kind=("failed", "worst", "all", "none"),
    ),
    "no-report": Option(
        "leave no qgate-out/report.html; `qgate report` makes it of the records",
        False,
        "report",
        kind=bool,
    ),
    "shard": Option(
        "run the I-th of N parts of the tests, as in 2/8; `qgate results merge` puts the "
        "results together",
        metavar="I/N",
    ),
    "allow-partial": Option(
        "where CI is set, let a run pass that skips, deselects or leaves out gates",
        False,
        "command",
        kind=bool,
    ),
    "since": Option(
        "run only the gates that the difference from a commit can touch, at which all passed; all "
        "of them where that is unclear",
        None,
        "command",
        "COMMIT",
    ),
    "watch-underflow": Option(
        "list at the end where quantization lost values below the smallest normal number "
        "of the format (slows the run)",
        False,
        "report",
        kind=bool,
    ),
    "update-baselines": Option(
        "accept what is measured: write new errors and those out of tolerance",
        False,
        "update",
        kind=bool,
    ),
    "update-which": Option(
        "what an update writes: failed and new entries (default), new ones only, or all",
        "failed",
        "update",
        kind=("failed", "new", "all"),
    ),
    "accept-plan": Option(
        "beside --update-baselines: also accept another plan, what quantizes which site",
        False,
        "update",
        kind=bool,
    ),
    "update-dry-run": Option("say what an update would write", False, "update", kind=bool),
}
