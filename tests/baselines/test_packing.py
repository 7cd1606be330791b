"""Updates as plain data: what arrives is what left, and several become one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qgate.baselines import Store, Update, joined, pack, unpack
from qgate.errors import QgateError
from tests.baselines.building import ORIGIN, OTHER_WEIGHTS, accepting, contents, key, recording


def whole() -> Update:
    update = recording(bases=("plain", "rotated"))
    accepting({key(): 0.5, key("b"): 0.1 + 0.2}, "2-1", update=update)
    accepting({key(): 1e-300}, "int8@fp16", update=update)
    update.without_calibration("int8@fp16")
    update.drop("2-4", key("c"))
    return update


def plain(data: object) -> bool:
    if isinstance(data, dict):
        return all(isinstance(k, str) and plain(v) for k, v in data.items())
    if isinstance(data, list):
        return all(plain(item) for item in data)
    return data is None or type(data) in (str, int, float, bool, bytes)


def test_what_arrives_is_what_left(tmp_path: Path) -> None:
    packed = pack(whole())
    assert plain(packed), "it crosses processes without pickle"
    stores = [Store(tmp_path / name, "tiny") for name in ("direct", "packed")]
    for store, update in zip(stores, (whole(), unpack(packed)), strict=True):
        assert store.commit(update)
    assert contents(stores[0].folder) == contents(stores[1].folder)
    unpacked = unpack(json.loads(json.dumps({**packed, "references": []})))
    assert (unpacked.values, unpacked.drops, unpacked.uncalibrated, unpacked.origin) == (
        whole().values, whole().drops, whole().uncalibrated, ORIGIN
    )  # fmt: skip


def test_a_tensor_that_changed_on_the_way_is_refused() -> None:
    packed = pack(whole())
    data = bytearray(packed["references"][0][1])
    data[-1] ^= 1
    packed["references"][0][1] = bytes(data)
    with pytest.raises(QgateError, match="is not the one in the manifest"):
        unpack(packed)


def test_parts_of_a_run_become_one(tmp_path: Path) -> None:
    parts = [
        accepting({key("a"): 1.0}, "2-1"),
        recording(),
        accepting({key("b"): 2.0}, "2-1"),
        accepting({key("a"): 3.0}, "2-4"),
    ]
    parts[2].drop("2-4", key("z"))
    stores = [Store(tmp_path / name, "tiny") for name in ("forth", "back")]
    for store, order in zip(stores, (parts, parts[::-1]), strict=True):
        store.commit(joined(unpack(pack(part)) for part in order))
    assert contents(stores[0].folder) == contents(stores[1].folder)
    accepted = stores[0].accepted("2-1")
    assert accepted is not None
    assert accepted.values == {key("a"): 1.0, key("b"): 2.0}


def test_an_error_measured_by_one_part_is_not_dropped_by_another() -> None:
    dropping = Update(ORIGIN)
    dropping.drop("2-1", key())
    for order in ([dropping, accepting({key(): 1.0})], [accepting({key(): 1.0}), dropping]):
        merged = joined(unpack(pack(part)) for part in order)
        assert merged.values["2-1"] == {key(): 1.0}


@pytest.mark.parametrize("origin", [OTHER_WEIGHTS, replace(ORIGIN, calibration=None)])
def test_parts_that_measured_different_things_are_refused(origin: object) -> None:
    with pytest.raises(QgateError, match="two things of one name, tiny, were measured in one run"):
        joined([accepting({key(): 1.0}), accepting({key(): 1.0}, origin=origin)])  # type: ignore[arg-type]
