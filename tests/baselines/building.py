"""Small baselines to test on, and what is in them as plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qgate.baselines import Accepted, Key, Origin, ReferenceTensor, Store, Update
from qgate.baselines.accepted import read_accepted

if TYPE_CHECKING:
    from qgate.storage.locations import Location

ORIGIN = Origin(
    model="tiny",
    weights="3fa2" * 16,
    inputs="77aa" * 16,
    calibration="c0de" * 16,
    samples=10,
    seqlen=512,
    seed=0,
    device="cpu",
    torch="2.8.0",
    commit="abc1234",
)
OTHER_WEIGHTS = replace(ORIGIN, weights="91bc" * 16)


def key(site: str = "layers.0:output", metric: str = "relative_mse") -> Key:
    return Key("test_layer_outputs", site, "local", metric)


def tensors(seed: int = 0, rows: int = 6) -> dict[str, ReferenceTensor]:
    draw = np.random.default_rng(seed)
    return {
        f"layers.{i}:output": ReferenceTensor.of(
            draw.standard_normal((2, rows, 4), dtype=np.float32), cap_bytes=4 * 4 * 8, seed=3
        )
        for i in range(2)
    }


def recording(origin: Origin = ORIGIN, seed: int = 0, bases: Iterable[str] = ("plain",)) -> Update:
    update = Update(origin)
    for basis in bases:
        update.set_reference(basis, tensors(seed))
    return update


def accepting(
    values: dict[Key, float],
    mode: str = "2-1",
    origin: Origin = ORIGIN,
    update: Update | None = None,
) -> Update:
    update = update or Update(origin)
    for changed_key, value in values.items():
        update.set_accepted(mode, changed_key, value)
    return update


def dropping(mode: str, *keys: Key) -> Update:
    update = Update(ORIGIN)
    for dropped_key in keys:
        update.drop(mode, dropped_key)
    return update


def recorded(root: Location) -> Store:
    """A baseline with two bases and two modes."""
    store = Store(root, "tiny")
    update = recording(bases=("plain", "rotated"))
    accepting(
        {key(f"layers.{i}:output"): round(1e-4 * (i + 1), 4) for i in range(12)}, update=update
    )
    accepting({key(): 0.5}, "2-4", update=update)
    store.commit(update)
    return store


def rewrite(path: Path, change: Callable[[Accepted], Accepted]) -> None:
    """Change an accepted file as an update does, with the digests of its new lines."""
    path.write_bytes(change(read_accepted(path.read_bytes(), str(path))).to_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, machinery included."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def marks(folder: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file or folder is touched."""
    paths = [folder, *sorted(folder.rglob("*"))]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def state(store: Store) -> dict[str, Any]:
    """All that readers see, as something that can be compared."""
    snapshot: dict[str, Any] = {"origin": store.origin()}
    for basis in store.bases():
        for site, tensor in store.reference(basis).items():
            snapshot[f"{basis} {site}"] = (tensor.shape, tensor.rows, tensor.values.tobytes())
    for mode in store.modes():
        snapshot[mode] = store.accepted(mode)
    return snapshot


def large_update() -> Update:
    """Files that change, one that comes, two that go."""
    update = accepting({key(): 3.0}, update=recording(OTHER_WEIGHTS, seed=1))
    update.set_accepted("new", key(), 4.0)
    update.drop("2-4", key())
    return update
