"""Open a checkpoint by its path or URL: which kind of file it is decides who reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from qgate.checkpoints.array_files import open_arrays
from qgate.checkpoints.onnx_files import open_onnx
from qgate.checkpoints.safetensors_shards import open_shards
from qgate.checkpoints.stored import Checkpoint
from qgate.checkpoints.torch_files import open_torch
from qgate.errors import QgateError, first_line
from qgate.storage.access import folder_of
from qgate.storage.folders import Folder, files_in
from qgate.storage.locations import user_location

Opener = Callable[[str, Folder, list[str]], Checkpoint]
OPENERS: Mapping[str, Opener] = {
    ".safetensors": open_shards,
    ".onnx": open_onnx,
    ".npz": open_arrays,
    ".pt": open_torch,
    ".pth": open_torch,
    ".bin": open_torch,
}
"""Who opens the files of a folder by their ending; of several kinds in a folder, the first."""
CONFIGURATIONS = ("config.json", "hf_quant_config.json", "quantize_config.json")


def open_checkpoint(spec: str) -> Checkpoint:
    """Open a folder of files that hold one checkpoint, or one such file, at a path or URL."""
    location = user_location(spec)
    ending = _ending(spec)
    if ending:
        folder, names = folder_of(location.parent), [location.name]
        if folder.stamp(location.name) is None:
            raise QgateError(f"there is no file {spec!r}.")
    else:
        folder = folder_of(location)
        ending, names = _files(spec, folder)
    checkpoint = OPENERS[ending](spec, folder, names)
    checkpoint.configuration |= {
        name: _configuration(folder, name)
        for name in CONFIGURATIONS
        if folder.stamp(name) is not None
    }
    return checkpoint


def _ending(name: str) -> str:
    return next((ending for ending in OPENERS if name.endswith(ending)), "")


def _files(spec: str, folder: Folder) -> tuple[str, list[str]]:
    """List the files of the first kind that a folder has."""
    kinds = ", ".join(OPENERS)
    if folder.kind() != "folder":
        what = f"a file that is not {kinds}" if folder.kind() == "file" else "not there"
        raise QgateError(f"{spec!r} is {what}; give a folder with {kinds} files, or one such file.")
    files = files_in(folder)
    for ending in OPENERS:
        names = [name for name in files if name.endswith(ending)]
        if names:
            return ending, names
    raise QgateError(f"{spec!r} has no {kinds} file.")


def _configuration(folder: Folder, name: str) -> object:
    try:
        return json.loads(folder.read(name))
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{str(folder.at(name))!r} is no JSON: {first_line(error)}.") from None
