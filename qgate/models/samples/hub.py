"""Data sets that the datasets library loads, quietly; no other file imports it.

Only formats that are data are loaded: no script of a data set runs, nothing is unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qgate.errors import QgateError, unknown
from qgate.models.optional_libraries import load_quietly
from qgate.models.samples.text_files import no_column
from qgate.storage.foreign import check_foreign_files

# Tried in this order where no split was asked for: text a model is less likely to have seen first.
SPLITS = ("validation", "val", "test", "train")


@dataclass(frozen=True)
class NamedDataset:
    """A data set with a short name: its address, and the part of it that is read."""

    hub: str
    split: str
    subset: str | None = None
    files: str | None = None
    revision: str | None = None
    joined: bool = False  # rows are pieces of one text


NAMED_DATASETS = {
    "pile": NamedDataset("mit-han-lab/pile-val-backup", "validation"),
    "wikitext2": NamedDataset("Salesforce/wikitext", "train", "wikitext-2-raw-v1", joined=True),
    "c4": NamedDataset("allenai/c4", "train", files="en/c4-train.00000-of-01024.json.gz"),
    # Its own form is a script; this is what the hub made of it.
    "redpajama": NamedDataset(
        "togethercomputer/RedPajama-Data-1T-Sample", "train", revision="refs/convert/parquet"
    ),
}


class Column(Sequence[str | None]):
    """Texts of a loaded data set, read from its files one by one."""

    def __init__(self, table: Any, column: str, name: str) -> None:
        if column not in table.column_names:
            raise no_column(name, column, table.column_names)
        # A saved data set may carry a way to give rows out: as tensors, or without some columns.
        self._table = table.with_format(None).select_columns([column])
        self._column, self._name = column, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, at: Any) -> Any:
        value = self._table[int(at)][self._column]
        if value is not None and not isinstance(value, str):
            raise QgateError(
                f"{self._name!r} has no text in {self._column!r} of row {at}, but "
                f"{type(value).__name__} {str(value)[:40]!r}."
            )
        return value


def from_hub(
    name: str,
    column: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    named: NamedDataset | None = None,
) -> tuple[Column, str]:
    """Load the texts of a data set of the hub, or of its copy in the cache, and name the part."""
    options: dict[str, object] = {}
    if named is not None:
        options = {"revision": named.revision}
        options |= {"data_files": {named.split: named.files}} if named.files else {}
    with _datasets(f"data set {name!r}") as datasets:
        try:
            if split is None:
                splits = list(datasets.get_dataset_split_names(name, subset, **options))
                split = next((usual for usual in SPLITS if usual in splits), splits[0])
            table = datasets.load_dataset(name, subset, split=split, **options)
        except Exception as error:
            raise _not_loaded(name, error) from None
        where = " ".join(filter(None, [name, subset, split]))
        return Column(table, column, name), where


def from_disk(
    folder: Path, column: str, split: str | None, usual: Sequence[str] = SPLITS
) -> tuple[Column, str]:
    """Load the texts of a folder that the library itself has saved."""
    name = str(folder)
    check_foreign_files(folder, "data sets")
    with _datasets(f"{name!r}") as datasets:
        try:
            loaded = datasets.load_from_disk(name)
        except Exception as error:
            raise QgateError(
                f"{name!r} cannot be read as a data set saved to disk: {_error_text(error)}."
            ) from None
        if isinstance(loaded, dict):
            splits = list(loaded)
            chosen = split or next((part for part in usual if part in splits), splits[0])
            if chosen not in loaded:
                raise unknown(f"data.split of {name!r}", chosen, splits)
            loaded, split = loaded[chosen], chosen
        elif split is not None and str(loaded.split or split) != split:
            raise unknown(f"data.split of {name!r}", split, [str(loaded.split)])
        return Column(loaded, column, name), " ".join(filter(None, [name, split]))


def _not_loaded(name: str, error: Exception) -> QgateError:
    text = _error_text(error)
    if "onfig name is missing" in text or "BuilderConfig" in text:
        way_out = "Name one with --data.subset"
    elif "nknown split" in text or "Bad split" in text:
        way_out = "Name one that is there with --data.split"
    elif "scripts are no longer supported" in text:
        way_out = "It would have to run its own code, which is refused; give a local copy of its "
        way_out += "files: --data.path FILE or FOLDER"
    else:
        way_out = "Without a network, give a local copy: --data.path FILE or FOLDER"
    return QgateError(f"the data set {name!r} cannot be loaded ({text}). {way_out}.")


def _error_text(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _datasets(purpose: str) -> AbstractContextManager[Any]:
    """Import the library without warnings and progress bars."""
    advice = "pip install 'pytest-qgate[data]', or give a local copy of the text: --data.path FILE."
    bars = "datasets.utils", "disable_progress_bars", "enable_progress_bars"
    needs = f"{purpose} needs the datasets library"
    return load_quietly("datasets", bars, needs, advice, logging.ERROR)
