"""Files of others: regular ones are read, up to a size; what never ends is refused in one sentence."""

from __future__ import annotations

import io
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qgate import results
from qgate.baselines.candidates import read_candidates
from qgate.baselines.store import BASELINES
from qgate.checkpoints.opening import open_checkpoint
from qgate.comparing import layer_files
from qgate.drawing.reading import read_analysis
from qgate.dumps import Dump
from qgate.dumps.tensor_files import read_tensors
from qgate.engines.logprob_lines import read_logprob_lines
from qgate.errors import QgateError
from qgate.models.samples.text_files import read_text
from qgate.models.samples.token_files import read_token_rows
from qgate.modes.calibration import load_calibration
from qgate.stats import Counts
from qgate.storage import foreign
from qgate.storage.documents import read_document
from qgate.storage.folders import LocalFolder
from qgate.storage.updates import LocalFiles
from tests.page.gate_records import write_results


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    os.mkfifo(path)


PLANTED = {"leads to a device": _device, "is a pipe": _pipe}
Reading = Callable[[Path], object]


def _checkpoint(file: Path) -> None:
    save_file({"w": torch.ones(2, 2)}, file.parent / "model.safetensors")
    open_checkpoint(str(file.parent))


def _results(file: Path) -> None:
    for _ in results.read(file)[1]:
        pass


READERS: dict[str, tuple[str, Reading]] = {
    "results": ("results.jsonl", _results),
    "a dump": ("dump.json", lambda file: Dump.open(file.parent)),
    "an index": ("index.jsonl", lambda file: LocalFolder(file.parent).open(file.name)),
    "settings": ("config.yaml", lambda file: read_document(file, "settings")),
    "an analysis": ("analysis.json", read_analysis),
    "log-probabilities": ("run.jsonl", lambda file: read_logprob_lines(str(file))),
    "a text": ("text.txt", read_text),
    "a packed text": ("text.txt.gz", read_text),
    "token ids": ("ids.npy", read_token_rows),
    "tensors of torch": ("t.pt", lambda file: [*read_tensors(str(file))]),
    "tensors of numpy": ("t.npz", lambda file: [*read_tensors(str(file))]),
    "safetensors": ("t.safetensors", lambda file: [*read_tensors(str(file))]),
    "counts": ("counts.npz", Counts.load),
    "a calibration": ("calibration.json", load_calibration),
    "the config of a checkpoint": ("config.json", _checkpoint),
    "a candidate": ("a.json", lambda file: read_candidates(file.parent)),
    "captured layers": ("mode_fp32-plain_stats.json", lambda file: layer_files.read_dump(file.parent, "fp32-plain")),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("reader", READERS)
def test_what_never_ends_is_refused(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    file = tmp_path / name
    PLANTED[kind](file)
    with pytest.raises(QgateError, match=f"{re.escape(str(file))}' {kind}, and [a-z -]+ are read"):
        read(file)


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind("s")
        with pytest.raises(QgateError, match="'s' is a socket, and texts are read from regular"):
            foreign.open_foreign(Path("s"), "texts", None)


def test_a_file_of_holes_has_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "qgate.yaml"
    with file.open("wb") as empty:
        empty.truncate(1 << 40)
    with pytest.raises(QgateError, match="has 1099511627776 bytes, and settings may have 64 MB"):
        read_document(file, "settings")


def test_accepted_errors_of_holes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "accepted").mkdir()
    with (tmp_path / "accepted" / "fp16.txt").open("wb") as empty:
        empty.truncate(50 << 30)
    with pytest.raises(QgateError, match="has 53687091200 bytes, and baselines may have 2048 MB"):
        LocalFiles(tmp_path, BASELINES).read(["accepted/fp16.txt"])


def test_a_file_that_does_not_fit_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            raise MemoryError

    monkeypatch.setattr(foreign, "open_foreign", lambda *_: Endless())
    with pytest.raises(QgateError, match="'x' is larger than the memory that is left here"):
        foreign.read_foreign(Path("x"), "tensors")


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    write_results(file, 3, failing=0)
    with file.open("r+b") as grown:
        grown.truncate(1 << 34)
    with pytest.raises(QgateError, match="a line of more than 64 MB, which results never have"):
        _results(file)


def test_a_link_to_a_file_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\r\ny")
    (tmp_path / "b").symlink_to("a")
    assert foreign.read_foreign(tmp_path / "b", "texts", 4) == b"x\r\ny"
    assert foreign.read_foreign_text(tmp_path / "b", "texts") == "x\ny"
    with pytest.raises(FileNotFoundError):
        foreign.read_foreign(tmp_path / "c", "texts")
    with pytest.raises(IsADirectoryError):
        foreign.read_foreign(tmp_path, "texts")
