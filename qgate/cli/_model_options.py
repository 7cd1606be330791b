"""The options by which commands are told which model to run, on what, and how to calibrate it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qgate.pipeline.setups import ModelSetup


def add_model_options(parser: argparse.ArgumentParser, model: str = "tiny-mamba") -> None:
    """`--model` and the rest; `setup_of` reads them."""
    add = parser.add_argument_group("model").add_argument
    add(
        "--model",
        default=model,
        metavar="NAME",
        help="tiny-mamba, tiny-llama, mamba:PATH, hf:PATH or package.module:build "
        f"(default {model})",
    )
    add("--device", default="cpu", metavar="D", help="auto, cpu, cuda or cuda:N (default cpu)")
    add("--samples", type=int, default=10, metavar="N", help="texts evaluated (default 10)")
    add("--seqlen", type=int, default=512, metavar="N", help="tokens of each (default 512)")
    add("--seed", type=int, default=0, metavar="N", help="which texts are drawn (default 0)")
    add("--text", type=Path, metavar="FILE", help="text to run on (default: a built-in one)")
    add("--tokens", type=Path, metavar="FILE", help="token ids (.npy) in place of text")
    add = parser.add_argument_group("calibration").add_argument
    add("--calib-samples", type=int, default=64, metavar="N", help="texts calibrated on (64)")
    add("--calib-seqlen", type=int, default=512, metavar="N", help="tokens of each (512)")
    add("--calib-text", type=Path, metavar="FILE", help="text for it (default: another built-in)")
    add("--percentile-alpha", type=float, default=0.9995, metavar="A", help="(default 0.9995)")
    add(
        "--arithmetic",
        default="fp32",
        choices=("fp32", "fp16"),
        help="of weights and scales; fp16 gives the codes of the known tool",
    )
    add("--calibration", type=Path, metavar="FILE", help="scales (.json): read, or made and kept")


def setup_of(args: argparse.Namespace) -> ModelSetup:
    """What the options say, not loaded yet."""
    from qgate.models import Sampling
    from qgate.modes import CalibrationSettings
    from qgate.pipeline.setups import ModelSetup

    sampling = Sampling(
        samples=args.samples,
        seqlen=args.seqlen,
        calib_samples=args.calib_samples,
        calib_seqlen=args.calib_seqlen,
        seed=args.seed,
        text=args.text,
        calib_text=args.calib_text,
    )
    settings = CalibrationSettings(args.percentile_alpha, args.arithmetic)
    return ModelSetup(args.model, args.device, sampling, args.tokens, args.calibration, settings)


class CalibrationBar:
    """Progress on standard error while scales are measured."""

    def __init__(self) -> None:
        self._bar: object = None

    def __enter__(self) -> CalibrationBar:
        return self

    def __call__(self, done: int, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, desc="calibrating", unit="sample", leave=False)
        self._bar.update(done - self._bar.n)  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()  # type: ignore[attr-defined]
