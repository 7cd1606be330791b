"""Files of tensors, dumps of runs, and what is kept beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from qgate.baselines import Store, read_candidates, stored_models, verify, write_candidate
from qgate.baselines.candidates import Candidate
from qgate.comparing import layer_files as storing
from qgate.dumps import Dump
from qgate.dumps.choosing import totals
from qgate.dumps.following import Follower
from qgate.dumps.tensor_files import read_tensors
from qgate.dumps.verifying import problems, unnamed
from qgate.modes import Calibration, CalibrationSettings, load_calibration
from qgate.modes.calibration import SiteScale
from qgate.stats.value_counts import Counts, counts
from qgate.storage.locations import location_of
from qgate.storage.updates import UPDATE, write_update
from tests.baselines.building import ORIGIN, key, recorded
from tests.campaigns.fuzzing.target import Target
from tests.dumps.making import GENERATIONS, known, record, write

FILES = "qgate.dumps.tensor_files:"
READING = "qgate.storage.tensor_reading:"


def small() -> dict[str, torch.Tensor]:
    x = torch.arange(32.0).reshape(4, 8)
    return {"w": x.bfloat16(), "b": x[0].clone(), "n": torch.arange(4)}


def _one_file(folder: Path) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.is_file())


def read_stored(spec: str) -> None:
    for stored in read_tensors(spec):
        stored.sha256()
        assert stored.name is not None


def _read_file(folder: Path) -> None:
    read_stored(str(_one_file(folder)))


def _read_url(folder: Path) -> None:
    path = _one_file(folder)
    remote_path = location_of(f"memory://fuzz/{path.name}")
    remote_path.parent.mkdir(parents=True, exist_ok=True)
    remote_path.write_bytes(path.read_bytes())
    read_stored(str(remote_path))


def _npz(folder: Path, name: str = "t.npz") -> None:
    np.savez_compressed(folder / name, w=np.ones((4, 8), np.float32), n=np.arange(4))


def _nested(folder: Path) -> None:
    torch.save(
        {"layer": {"w": small()["w"], "more": [small()["b"], (small()["n"],)]}, "step": 3},
        folder / "t.pt",
    )


def _counts(folder: Path) -> None:
    counts(small()["w"]).save(folder / "c.npz")


def _dump(folder: Path) -> None:
    for rank in range(2):
        write(folder, [small()["w"], small()["b"], torch.zeros(2, dtype=torch.complex64)], rank=rank,
              world_size=2, told={"stats": {"amax": 1.0}, "nonfinite": {"nan": 1}})  # fmt: skip


def read_dump(folder: Path) -> None:
    dump = Dump.open(folder)
    dump.notes()
    list(problems(dump))
    unnamed(dump)
    json.dumps(totals(dump))
    for dump_record in dump.records():
        assert dump_record.title
        dump.shard(dump_record)
    follower = Follower(folder)
    follower.poll()
    assert follower.ended in (True, False)


def _in_memory(folder: Path) -> str:
    """The same files in a store, by its URL."""
    root = f"memory://fuzz-{folder.parent.name}"
    remote_root = location_of(root)
    if remote_root.exists():
        remote_root.fs.rm(remote_root.path, recursive=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            remote_path = location_of(f"{root}/{path.relative_to(folder).as_posix()}")
            remote_path.parent.mkdir(parents=True, exist_ok=True)
            remote_path.write_bytes(path.read_bytes())
    return root


def read_stored_dump(folder: Path) -> None:
    dump = Dump.open(_in_memory(folder))
    dump.notes()
    list(problems(dump))
    json.dumps(totals(dump))


def _known(folder: Path) -> None:
    for generation in GENERATIONS.values():
        known(folder, small()["b"], **generation)
    known(folder, small()["b"], zipped=False, layer=7, **GENERATIONS[4])
    torch.save({"tensor": small()["w"], "metadata": {"operation": "forward"}}, folder / "other.pt")


def _baseline(folder: Path) -> None:
    recorded(folder)


def read_baseline(folder: Path) -> None:
    from tests.baselines.building import state

    store = Store(folder, "tiny")
    verify(store)
    stored_models(folder)
    state(store)


def _broken_off(folder: Path) -> None:
    """A baseline whose update counts, and has replaced nothing yet."""
    store = recorded(folder)
    name = "accepted/2-4.txt"
    accepted = store.accepted("2-4")
    assert accepted is not None
    content = replace(accepted, values={key(): 0.25}).to_bytes()
    (store.folder / UPDATE).write_bytes(write_update({name: content}))


def _candidates(folder: Path) -> None:
    candidate = Candidate(
        ORIGIN,
        "2-1",
        "suites/x.py::test",
        {key(): 1e-3, key("b"): float("inf")},
        {key(): "too large"},
    )
    write_candidate(folder / "candidates", candidate)


def _zipped(folder: Path) -> None:
    import zipfile

    _candidates(folder)
    (candidate,) = (folder / "candidates").iterdir()
    with zipfile.ZipFile(folder / "c.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(candidate, f"qgate-out/candidates/{candidate.name}")
    candidate.unlink()


def _calibration(folder: Path) -> None:
    scales = {"layers.0.in_proj:input": SiteScale(0.1, "minmax", 12.7),
              "layers.0.x_proj:input": SiteScale(0.1, "percentile", 12.7, 0.2)}  # fmt: skip
    Calibration(scales, CalibrationSettings(), "m", "w", "i", 4, versions={"torch": "2"}).save(
        folder / "c.json"
    )


def _captured(folder: Path) -> None:
    of = storing.CaptureSettings(
        "fp32", "tiny", "plain", "w", "i", None, 2, 3, 0, "cpu", "2", "0", "now"
    )
    with storing.writing(folder, of, {"layer_0": "a:output"}) as writer:
        for _ in range(2):
            writer.add("layer_0", torch.ones(3, 4))


def read_captured(folder: Path) -> None:
    for dump in storing.find(folder, "fp32"):
        for name in dump.layers:
            for (part,) in storing.portions(storing.open_layer(folder, dump, name)):
                part.sum()


def _tokens(folder: Path) -> None:
    np.save(folder / "ids.npy", np.arange(64))


def _read_tokens(folder: Path) -> None:
    from qgate.modes.setups import read_token_ids

    read_token_ids(_one_file(folder))


def _shards_of_records(folder: Path) -> Any:
    return write(folder, [small()["w"]], told={"extra": {"a": 1}}) and record(0)


TARGETS = (
    Target("tensors .pt", lambda f: torch.save(small(), f / "t.pt"), _read_file, ("qgate.storage.archives:load_torch",), share=20),
    Target("tensors .pt, nested", _nested, _read_file, ("qgate.storage.archives:load_torch",), share=20),
    Target("tensors .pt, old form",
           lambda f: torch.save(small(), f / "t.pt", _use_new_zipfile_serialization=False), _read_file,
           ("qgate.storage.archives:load_torch",), share=20),
    Target("tensors .safetensors", lambda f: save_file(small(), f / "t.safetensors"), _read_file,
           (f"{READING}open_safetensors",)),
    Target("tensors .npy", lambda f: np.save(f / "t.npy", np.ones((4, 8), np.float32)), _read_file,
           (f"{READING}read_npy",)),
    Target("tensors .npz", _npz, _read_file, (f"{FILES}_read_npz", "qgate.storage.archives:check_archive")),
    Target("url .pt", lambda f: torch.save(small(), f / "t.pt"), _read_url, (f"{READING}read_torch", "qgate.storage.archives:load_torch", "qgate.storage.archives:_check_pickle")),
    Target("url .safetensors", lambda f: save_file(small(), f / "t.safetensors"), _read_url,
           ("qgate.storage.safetensors_heads:read_head", "qgate.storage.foreign:read_range")),
    Target("url .npy", lambda f: np.save(f / "t.npy", np.ones((4, 8), np.float32)), _read_url,
           (f"{READING}read_npy",)),
    Target("url .npz", _npz, _read_url, (f"{FILES}_read_npz", "qgate.storage.archives:check_archive")),
    Target("counts", _counts, lambda f: Counts.load(f / "c.npz"), ("qgate.stats.value_counts:load",)),
    Target("token ids", _tokens, _read_tokens, (f"{READING}read_npy",)),
    Target("dump", _dump, read_dump,
           ("qgate.dumps.index:_read", "qgate.dumps.layout:read_manifest", f"{READING}open_tensors",
            "qgate.dumps.shards:tensor"), share=30),
    Target("dump by a url", _dump, read_stored_dump,
           ("qgate.storage.safetensors_heads:read_head", "qgate.storage.object_folders:read")),
    Target("dump of megatron-tensor-saver", _known, read_dump, ("qgate.storage.archives:load_torch",)),
    Target("baseline", _baseline, read_baseline,
           ("qgate.storage.updates:_get", "qgate.baselines._reading:read_json"), share=30),
    Target("baseline, update cut off", _broken_off, read_baseline,
           ("qgate.storage.updates:sealed_files", "qgate.storage.updates:_get")),
    Target("candidates", _candidates, lambda f: read_candidates(f / "candidates"),
           ("qgate.baselines.candidates:read_candidates", "qgate.baselines._reading:read_json")),
    Target("candidates, zipped", _zipped, lambda f: read_candidates(f / "c.zip"),
           ("qgate.baselines.candidates:_read_zip",)),
    Target("calibration", _calibration, lambda f: load_calibration(f / "c.json"),
           ("qgate.modes.calibration:load_calibration",)),
    Target("captured layers", _captured, read_captured,
           ("qgate.comparing.layer_files:read_dump", "qgate.comparing.layer_files:open_layer",
            "qgate.comparing.layer_files:_sha256")),
)  # fmt: skip
