"""`qgate.collect`, and its switches in environment variables.

Only this file reads the environment: for the rank of a process without a process group, and for the
variables of Megatron-LM's tensor saver.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias

from qgate.collecting.collector import Collector
from qgate.collecting.progress import Labels
from qgate.collecting.settings import CollectSettings, CollectSwitches
from qgate.errors import QgateError
from qgate.settings import help_table, read_environment, struct_of, variables_of
from qgate.text.printing import print_text

if TYPE_CHECKING:
    from torch import nn

_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
# The variables that are read at every forward pass, and their settings.
_VARIABLES = {
    name: label
    for name, label in {**variables_of(CollectSwitches), **variables_of(CollectSettings)}.items()
    if label.name in ("enabled", "quant_type", "first_iteration", "sample")
}
P = ParamSpec("P")
Network: TypeAlias = "nn.Module | Sequence[nn.Module]"


def _with_arguments_of(
    settings: Callable[P, CollectSettings],
) -> Callable[[Callable[..., Collector]], Callable[Concatenate[Network, str | Path, P], Collector]]:
    """Give a function the signature of settings, and their table in its docstring."""

    def dressed(function: Callable[..., Collector]) -> Any:
        own = list(inspect.signature(function).parameters.values())[:2]
        more = inspect.signature(settings).parameters.values()
        function.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        function.__doc__ = f"{inspect.getdoc(function)}\n\n{help_table(CollectSettings)}\n"
        return function

    return dressed


@_with_arguments_of(CollectSettings)
def collect(model: Network, folder: str | Path, **settings: Any) -> Collector:
    """Collect the tensors of a model's layers into a dump: `with qgate.collect(model, "dump/"):`.

    The folder is a path, or a URL as in s3://bucket/run. `sites` may be a list of module names,
    too. The hooks are gone after the last of the iterations, and `say` is called with the summary
    when the dump is closed.
    """
    return Collector(
        model,
        folder,
        CollectSettings(**settings),
        rank_and_size=rank_and_size(os.environ),
        run=run_id(os.environ),
    )


def collect_from_environment(
    model: Network, environment: Mapping[str, str] | None = None, **settings: Any
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
    """Tell if the environment switches collecting on."""
    return bool(read_environment(CollectSwitches, environment).get("enabled"))


def settings_of(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the arguments of `collect` that the environment sets."""
    switches = struct_of(CollectSwitches, read_environment(CollectSwitches, environment))
    return {"folder": switches.folder, **read_environment(CollectSettings, environment)}


class EnvironmentLabels:
    """Labels of the environment that changed since the last call, or since it was made.

    A variable is not read where an argument overrides it. Forward passes are counted again once a
    sample is unset. A value that is not allowed is a `problem`, once, and changes nothing.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Collection[str] = ()) -> None:
        self._environment = environment
        self._texts = {
            name: environment.get(name)
            for name, label in _VARIABLES.items()
            if label.name not in arguments
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
        label, text = _VARIABLES[name], self._environment.get(name, "")
        value = label.read_word(text, f"{name}=") if text.strip() else None
        if label.name == "quant_type":
            labels["quant_type"] = text
        elif label.name == "sample":
            labels["sample"] = value
        elif label.name == "first_iteration" and value is not None:
            labels["iteration"] = value
        elif label.name == "enabled" and name in self._environment:
            labels["enabled"] = bool(value)


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
