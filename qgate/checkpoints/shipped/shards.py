"""Compare the files of a checkpoint with each other: the index, shards, code and leftovers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from qgate.checkpoints.accounting import ALONE
from qgate.checkpoints.record import CheckpointFinding, CheckpointRecord
from qgate.checkpoints.shipped.files import ShippedFiles, differs, is_missing, same_value
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.wrong_files import NO_WEIGHTS
from qgate.text import counted, one_line
from qgate.text.wording import megabytes

INDEX = "model.safetensors.index.json"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".npz", ".ckpt", ".h5")
PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
OFF = 1.5
"""Ratio of a stated size to that of all tensors at which it is a finding."""


def shard_findings(
    checkpoint: Checkpoint, child: ShippedFiles, parent: ShippedFiles
) -> Iterator[CheckpointFinding]:
    """Find tensors and files that nothing refers to, and references without a target."""
    index = child.settings(INDEX)
    listed = index.get("weight_map")
    weight_map = listed if isinstance(listed, Mapping) else {}
    if weight_map:
        yield from _index_findings(checkpoint, weight_map)
        if not lost_shards(checkpoint, weight_map):
            yield from _total_findings(checkpoint, index, parent)
    opened = {entry.file for entry in checkpoint.entries.values()}
    indexed = set(map(str, weight_map.values()))
    for name, is_folder in child.names.items():
        if is_folder or not name.endswith(WEIGHT_FILES) or name in NO_WEIGHTS or parent.has(name):
            continue
        if name not in opened and name not in indexed:
            ending = PurePosixPath(next(iter(opened), "")).suffix
            yield CheckpointFinding(
                one_line(name), f"nothing refers to it beside {ending} files: remove it"
            )
    yield from _code_findings(child, parent)


def leave_out_lost(record: CheckpointRecord, child: Checkpoint) -> None:
    """Leave out findings of weights whose shard is missing, which is a finding itself."""
    listed = ShippedFiles(child).settings(INDEX).get("weight_map")
    lost = lost_shards(child, listed) if isinstance(listed, Mapping) else {}
    names = {name.rpartition(".")[0] for names in lost.values() for name in names}
    record.findings = [
        finding
        for finding in record.findings
        if finding.cause != ALONE or finding.subject.rpartition(".")[0] not in names
    ]


def lost_shards(checkpoint: Checkpoint, weight_map: Mapping[str, object]) -> dict[str, list[str]]:
    """Return files that an index names and a folder with others of them lacks, with tensors."""
    files = {entry.file for entry in checkpoint.entries.values()}
    listed = {str(file) for file in weight_map.values()}
    names = ShippedFiles(checkpoint).names
    lost = [file for file in sorted(listed) if file not in names] if listed & files else []
    return {file: [n for n, own in weight_map.items() if str(own) == file] for file in lost}


def _index_findings(
    checkpoint: Checkpoint, weight_map: Mapping[str, object]
) -> Iterator[CheckpointFinding]:
    entries = checkpoint.entries
    gone = [name for name in weight_map if name not in entries]
    lost = lost_shards(checkpoint, weight_map)
    for file, names in lost.items():
        yield CheckpointFinding(
            one_line(file),
            f"the shard is missing: the index has {counted(len(names), 'tensor')} in it, first "
            f"{one_line(names[0])!r}; copy it",
        )
    gone = [name for name in gone if str(weight_map[name]) not in lost]
    if gone:
        first = gone[0]
        yield CheckpointFinding(
            f"{INDEX} {one_line(first)}",
            f"{len(gone):,} of {len(weight_map):,} tensors that it names are in no file, first in "
            f"{one_line(str(weight_map[first]))!r}: write the index again",
        )
    stated = {name: str(weight_map[name]) for name in entries if name in weight_map}
    moved = [name for name, file in stated.items() if file != entries[name].file]
    if moved:
        first, more = moved[0], f" ({len(moved):,} tensors)" if len(moved) > 1 else ""
        yield CheckpointFinding(
            f"{INDEX} {one_line(first)}",
            f"it is {one_line(stated[first])!r} here, and the tensor lies in "
            f"{entries[first].file!r}{more}: write the index again",
        )
    unlisted = [name for name in entries if name not in weight_map]
    if unlisted:
        first = unlisted[0]
        yield CheckpointFinding(
            f"{INDEX} {one_line(first)}",
            f"{len(unlisted):,} of {len(entries):,} stored tensors are not in the index, and "
            f"loaders leave them out, first in {entries[first].file!r}: write the index again",
        )


def _total_findings(
    checkpoint: Checkpoint, index: Mapping[str, object], parent: ShippedFiles
) -> Iterator[CheckpointFinding]:
    """Find a stated size that is far off; small differences come from tensors that are shared."""
    stated, parents = _total(index), _total(parent.settings(INDEX))
    stored = sum(entry.size for entry in checkpoint.entries.values())
    is_copied = stated == parents != stored
    if stated and stored and (is_copied or not 1 / OFF < stated / stored < OFF):
        origin = "; it is the parent's" if is_copied else ""
        yield CheckpointFinding(
            f"{INDEX} metadata.total_size",
            f"it is {megabytes(stated)} here, and the tensors have {megabytes(stored)}{origin}: "
            "write the index again",
        )


def _total(index: Mapping[str, object]) -> int:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    is_number = isinstance(total, int | float) and math.isfinite(total)
    return int(total) if is_number else 0  # type: ignore[arg-type]


def _code_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find code and settings of processors that the configuration needs, and that are not there."""
    maps = child.settings("config.json").get("auto_map")
    for target in maps.values() if isinstance(maps, Mapping) else ():
        module = str(target).partition(".")[0]
        if "--" not in str(target) and not child.has(f"{module}.py") and parent.has(f"{module}.py"):
            yield is_missing(f"{module}.py", "config.json auto_map names it; copy it")
    for name in PROCESSORS:
        if parent.has(name) and not child.has(name) and not child.has("processor_config.json"):
            yield is_missing(name)
        for key, own, parents in _unlike(child.settings(name), parent.settings(name)):
            yield differs(name, key, own, parents)


def _unlike(
    own: Mapping[str, object], parents: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield values of one kind that differ; versions write names and sizes otherwise."""
    for key in (key for key in parents if key in own and not key.endswith(("_type", "_class"))):
        one, other = own[key], parents[key]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _unlike(one, other, f"{path}{key}.")
        elif type(one) is type(other) and not same_value(one, other):
            yield f"{path}{key}", one, other
