"""Open a checkpoint by its path or URL: which kind of file it is decides who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from qgate.checkpoints.gguf.files import open_gguf
from qgate.checkpoints.onnx.files import open_onnx
from qgate.checkpoints.safetensors_shards import open_shards
from qgate.checkpoints.stored import REMOTE_AHEAD, Checkpoint, Stamps
from qgate.checkpoints.torch_files import open_torch
from qgate.errors import QgateError, first_line
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder, files_in
from qgate.storage.locations import user_location

Opener = Callable[[str, Folder, list[str]], Checkpoint]
OPENERS: Mapping[str, Opener] = {
    ".safetensors": open_shards,
    ".gguf": open_gguf,
    ".onnx": open_onnx,
    **dict.fromkeys((".pt", ".pth", ".bin"), open_torch),
}
"""Who opens the files of a folder by their ending; of several kinds in a folder, the first."""
NO_CHECKPOINTS = (".npz", ".npy")
"""Endings of files that may hold weights, and are not opened as checkpoints."""
INNER = 3
"""Folders inside each other that are looked into for a checkpoint, as caches of hubs have them."""
CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")


def open_checkpoint(spec: str) -> Checkpoint:
    """Open a folder of files that hold one checkpoint, or one such file, at a path or URL."""
    folder, name = _folder(spec)
    if name:
        ending, names = _ending(name), [name]
        if folder.stamp(name) is None:
            raise QgateError(f"there is no file {spec!r}.")
    else:
        ending, names = _files(spec, folder)
    checkpoint = OPENERS[ending](spec, folder, names)
    checkpoint.folder = None if name else folder
    checkpoint.configuration |= {
        name: _configuration(folder, name)
        for name in CONFIGURATIONS
        if folder.stamp(name) is not None
    }
    files = dict.fromkeys([*names, *(entry.file for entry in checkpoint.entries.values())])
    checkpoint.stamps = _stamps(folder, files)
    if folder.parallel_reads > 1:
        checkpoint.ahead = REMOTE_AHEAD
    return checkpoint


def open_again(spec: str, stamps: Stamps) -> Checkpoint:
    """Open a checkpoint whose files have had these stamps, and still have them."""
    checkpoint = open_checkpoint(spec)
    _check_stamps(spec, stamps, checkpoint.stamps)
    return checkpoint


def check_unchanged(*checkpoints: Checkpoint | None) -> None:
    """Refuse files that have been written while they were read."""
    for checkpoint in checkpoints:
        if checkpoint is not None:
            folder = _folder(checkpoint.label)[0].fresh()
            stamps = _stamps(folder, checkpoint.stamps)
            _check_stamps(checkpoint.label, checkpoint.stamps, stamps)


def _check_stamps(spec: str, before: Stamps, now: Stamps) -> None:
    changed = [name for name, stamp in before.items() if now.get(name) != stamp]
    if changed:
        fate = "was changed" if changed[0] in now else "was removed"
        raise QgateError(
            f"{spec!r}: {changed[0]!r} {fate} while it was read. Run the command again when "
            "nothing writes there."
        )


def _stamps(folder: Folder, names: Iterable[str]) -> Stamps:
    stamps = {name: folder.stamp(name) for name in names}
    return {name: stamp for name, stamp in stamps.items() if stamp is not None}


def _folder(spec: str) -> tuple[Folder, str]:
    """Return the folder of a checkpoint, and the name of the file if it is a single one."""
    location = user_location(spec)
    if _ending(spec):
        return folder_of(location.parent), location.name
    return folder_of(location), ""


def _ending(name: str) -> str:
    return next((ending for ending in OPENERS if name.endswith(ending)), "")


def _files(spec: str, folder: Folder) -> tuple[str, list[str]]:
    """List the files of the first kind that a folder has."""
    kinds = ", ".join(OPENERS)
    if folder.kind() != "folder":
        kind = f"a file that is not {kinds}" if folder.kind() == "file" else "not there"
        raise QgateError(
            f"{spec!r} is {kind}; give a folder with {kinds} files, or one such file."
            f"{_converting(spec) if folder.kind() == 'file' else ''}"
        )
    files = files_in(folder)
    for ending in OPENERS:
        names = [name for name in files if name.endswith(ending)]
        if names:
            return ending, names
    inner = _inner_folder(folder, INNER)
    advice = f" Its folder {inner!r} has: give that one." if inner else _converting(*files)
    raise QgateError(f"{spec!r} has no {kinds} file.{advice}")


def _converting(*names: str) -> str:
    """Return what to do where weights are in files of another kind."""
    has_others = any(name.endswith(NO_CHECKPOINTS) for name in names)
    return " Write the weights of numpy as .safetensors first." if has_others else ""


def _inner_folder(folder: Folder, depth: int) -> str:
    """Return the path of a folder inside that holds a checkpoint; empty where none does."""
    for name, is_folder in sorted(folder.names().items()):
        if not is_folder or name.startswith("."):
            continue
        inner = folder.inside(name)
        if any(_ending(file) for file in files_in(inner)):
            return name
        if depth > 1 and (deeper := _inner_folder(inner, depth - 1)):
            return f"{name}/{deeper}"
    return ""


def _configuration(folder: Folder, name: str) -> object:
    try:
        settings = json.loads(folder.read(name))
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(folder.at(name))!r} is no JSON: {first_line(error)}.") from None
    if not isinstance(settings, dict):
        raise QgateError(
            f"{str(folder.at(name))!r} is a {type(settings).__name__}, and not settings by name, "
            "as { … } has them."
        )
    return settings
