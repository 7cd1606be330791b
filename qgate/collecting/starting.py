"""`qgate.collect`, and the same switched on from outside by environment variables.

Only here the environment is read: for the rank of a process without a process group, and for the
switches that users of other collectors set already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qgate.collecting import Collector, Wanted
from qgate.errors import QgateError

if TYPE_CHECKING:
    from torch import nn

    from qgate.collecting import Collector

DEFAULT_FOLDER = "./enhanced_tensor_logs"
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def collect(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    sites: str | Sequence[str] = "attention|linear",
    phases: Sequence[str] = ("forward", "backward"),
    iterations: int = 1,
    first_iteration: int = 0,
    samples: int | None = None,
    sample: int | None = None,
    ranks: str | Sequence[int] = "all",
    quant_type: str = "",
    level: Literal["statistics", "tensors"] = "tensors",
    dtype: str = "keep",
    attention_weights: bool = False,
    counted: int | Literal["all"] = 2**15,
    seed: int = 0,
    memory: int = 1 << 28,
    existing: Literal["refuse", "append", "overwrite"] = "refuse",
    extra: Mapping[str, Any] | None = None,
    say: Callable[[str], None] | None = None,
) -> Collector:
    """Collect the tensors of a model's layers into a dump: `with qgate.collect(model, "dump/"):`.

    folder      a path, or a URL as in s3://bucket/run
    sites       types of layers (attention, linear, conv, norm, embedding, activation) and regular
                expressions of module names, with `|` between them; or a list of module names
    phases      forward (inputs, weights, outputs), backward (their gradients), or both
    iterations  how many to collect; the hooks are gone after the last, `first_iteration` is the
                label of the first
    samples     how many forward passes of each iteration; all of them without it
    sample      label of the sample; without one, forward passes are counted
    ranks       which ranks collect, each into its own part of the dump
    quant_type  a label, kept with every record; of hifp8 and the like what they would lose, too
    level       tensors: values and figures; statistics: figures and counts, a few kilobytes each
    dtype       what tensors are stored as: keep, bf16, fp16 or fp32
    attention_weights  also the weights after softmax, computed anew where attention is fused
    counted     the elements of a tensor that are counted, a share chosen by `seed`, or "all"; on a
                GPU it is always all. Extremes and non-finite values are always of every element.
    memory      bytes that may wait to be written; beyond them the model waits
    existing    what to do if the folder holds tensors of this rank: refuse, append or overwrite
    extra       kept with every record
    say         is called with the summary when the dump is closed
    """
    wanted = Wanted(
        sites=sites,
        phases=phases,
        iterations=iterations,
        first_iteration=first_iteration,
        samples=samples,
        sample=sample,
        ranks=ranks,
        quant_type=quant_type,
        level=level,
        dtype=dtype,
        attention_weights=attention_weights,
        counted=counted,
        seed=seed,
        memory=memory,
        existing=existing,
        extra=dict(extra or {}),
        run=run_of(os.environ),
    )
    return Collector(model, folder, wanted, place=place_of(os.environ), say=say)


def collect_from_environment(
    model: nn.Module | Sequence[nn.Module],
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Collector | None:
    """Start to collect if the environment asks for it; None if it does not.

    It needs no `with`: the collector stops by itself, at the latest when the program ends, and says
    on standard error what it got. `TENSOR_SAVE_ENABLED` switches it on, `TENSOR_SAVE_DIR` is the
    folder, `CUSTOM_QUANT_TYPE` the label, `TENSOR_SAVER_ITERATION` the label of the first
    iteration, `CONTROL_ITER` how many there are, `CURRENT_SAMPLE_IDX` the label of the sample.
    Settings given here win over them.
    """
    environment = os.environ if environment is None else environment
    if not enabled(environment):
        return None
    told = {**settings_of(environment), "say": _say, **settings}
    return collect(model, told.pop("folder"), **told).start()


def enabled(environment: Mapping[str, str]) -> bool:
    given = environment.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if given not in (*_ON, *_OFF):
        raise QgateError(f"TENSOR_SAVE_ENABLED={given!r}: true or false.")
    return given in _ON


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of `collect` that the environment sets."""
    found: dict[str, Any] = {"folder": environment.get("TENSOR_SAVE_DIR") or DEFAULT_FOLDER}
    if environment.get("CUSTOM_QUANT_TYPE"):
        found["quant_type"] = environment["CUSTOM_QUANT_TYPE"]
    for name, argument in (
        ("TENSOR_SAVER_ITERATION", "first_iteration"),
        ("CONTROL_ITER", "iterations"),
        ("CURRENT_SAMPLE_IDX", "sample"),
    ):
        text = environment.get(name, "").strip()
        if text and not text.isdecimal():
            raise QgateError(f"{name}={text!r}: it is a number from 0.")
        if text:
            found[argument] = int(text)
    return found


def place_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Rank and number of ranks as a launcher says; None where there is none."""
    for rank_name, size_name in _RANKS:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if rank.isdecimal():
            return int(rank), max(int(size) if size.isdecimal() else 1, int(rank) + 1)
    return None


def run_of(environment: Mapping[str, str]) -> str:
    """What tells this run from others, the same on all its ranks; empty where nothing does."""
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def _say(text: str) -> None:
    print(f"qgate collect: {text}", file=sys.stderr, flush=True)
