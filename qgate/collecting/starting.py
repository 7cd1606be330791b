"""`qgate.collect`, and its switches in environment variables.

Only this file reads the environment: for the rank of a process without a process group, and for the
variables of Megatron-LM's tensor saver.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qgate.collecting.collector import Collector
from qgate.collecting.progress import Labels
from qgate.collecting.settings import CollectSettings
from qgate.collecting.targets import DEFAULT_SITES
from qgate.errors import QgateError
from qgate.text.printing import print_text

if TYPE_CHECKING:
    from torch import nn

DEFAULT_FOLDER = "./enhanced_tensor_logs"
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
# The variables that are read at every forward pass, and the arguments that override them.
_LABELS = {
    "TENSOR_SAVE_ENABLED": "",
    "CUSTOM_QUANT_TYPE": "quant_type",
    "TENSOR_SAVER_ITERATION": "first_iteration",
    "CURRENT_SAMPLE_IDX": "sample",
}
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def collect(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    sites: str | Sequence[str] = DEFAULT_SITES,
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
    sites       types of layers (attention, linear, conv, norm, embedding, activation), `weights`
                for all modules with weights, and regular expressions of module names, with `|`
                between them; or a list of module names (default: attention|weights)
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
    checked = CollectSettings(
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
        run=run_id(os.environ),
    )
    return Collector(model, folder, checked, rank_and_size=rank_and_size(os.environ), say=say)


def collect_from_environment(
    model: nn.Module | Sequence[nn.Module],
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Collector | None:
    """Start to collect if the environment asks for it; None if it does not.

    It needs no `with`: the collector stops by itself, at the latest when the program ends, and
    prints its summary on standard error. `TENSOR_SAVE_ENABLED` switches it on, `TENSOR_SAVE_DIR` is
    the folder, `CUSTOM_QUANT_TYPE` the label, `TENSOR_SAVER_ITERATION` the label of the first
    iteration, `CONTROL_ITER` their number, `CURRENT_SAMPLE_IDX` the label of the sample.
    Arguments override them. The switch and the three labels are read again at every forward pass.
    """
    environment = os.environ if environment is None else environment
    if not is_enabled(environment):
        return None
    labels = EnvironmentLabels(environment, settings)
    settings = {**settings_of(environment), "say": say_on_stderr, **settings}
    collector = collect(model, settings.pop("folder"), **settings)
    collector.follow(labels)
    return collector.start()


def is_enabled(environment: Mapping[str, str]) -> bool:
    switch = environment.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if switch not in (*_ON, *_OFF):
        raise QgateError(f"TENSOR_SAVE_ENABLED={switch!r}: true or false.")
    return switch in _ON


def settings_of(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments of `collect` that the environment sets."""
    settings: dict[str, object] = {"folder": environment.get("TENSOR_SAVE_DIR") or DEFAULT_FOLDER}
    if environment.get("CUSTOM_QUANT_TYPE"):
        settings["quant_type"] = environment["CUSTOM_QUANT_TYPE"]
    for name, argument in (
        ("TENSOR_SAVER_ITERATION", "first_iteration"),
        ("CONTROL_ITER", "iterations"),
        ("CURRENT_SAMPLE_IDX", "sample"),
    ):
        label = _number(name, environment)
        if label is not None:
            settings[argument] = label
    return settings


def _number(name: str, environment: Mapping[str, str]) -> int | None:
    text = environment.get(name, "").strip()
    if text and not text.isdecimal():
        raise QgateError(f"{name}={text!r}: it is a number from 0.")
    return int(text) if text else None


class EnvironmentLabels:
    """Labels of the environment that changed since the last call, or since it was made.

    A variable is not read where an argument overrides it. Forward passes are counted again once a
    sample is unset. A value that is not allowed is a `problem`, once, and changes nothing.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Collection[str] = ()) -> None:
        self._environment = environment
        self._texts = {
            name: environment.get(name)
            for name, argument in _LABELS.items()
            if argument not in arguments
        }

    def __call__(self) -> Labels:
        labels = Labels()
        for name, before in self._texts.items():
            text = self._environment.get(name)
            if text != before:
                self._texts[name] = text
                try:
                    self._read(name, labels)
                except QgateError as error:
                    labels["problem"] = str(error)
        return labels

    def _read(self, name: str, labels: Labels) -> None:
        if name == "CUSTOM_QUANT_TYPE":
            labels["quant_type"] = self._environment.get(name, "")
        elif name == "CURRENT_SAMPLE_IDX":
            labels["sample"] = _number(name, self._environment)
        elif name == "TENSOR_SAVER_ITERATION":
            iteration = _number(name, self._environment)
            if iteration is not None:
                labels["iteration"] = iteration
        elif name in self._environment:
            labels["enabled"] = is_enabled(self._environment)


def rank_and_size(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks from a launcher's variables; None without a launcher."""
    for rank_name, size_name in _RANKS:
        rank, size = environment.get(rank_name, ""), environment.get(size_name, "")
        if rank.isdecimal():
            return int(rank), max(int(size) if size.isdecimal() else 1, int(rank) + 1)
    return None


def run_id(environment: Mapping[str, str]) -> str:
    """Return the launcher's name of this run, the same on all ranks; empty without one."""
    name = environment.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def say_on_stderr(text: str) -> None:
    with contextlib.suppress(ValueError):  # where the program has closed it
        print_text(f"qgate collect: {text}", file=sys.stderr)
