"""Samples that do not fit the memory of a device together: fewer at a time give the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import Model
from qgate.device_errors import DeviceMemoryError, DeviceMemoryWarning, device_error
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.layer_captures import capture_modes
from qgate.models import Sampling, load
from qgate.modes.setups import ModelSetup
from tests.shares import proof, share

SAMPLING = Sampling(samples=6, seqlen=16, calib_samples=4, calib_seqlen=16)
TEXT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.11 GiB of "
    "which 1.20 GiB is free. Process 7 has 77.90 GiB memory in use."
)
FITS = "GPU 1 \\(79.11 GiB, 1.20 GiB free; 2.00 GiB more wanted\\)"


def built(rows: int) -> tuple[Callable[[], Model], list[int]]:
    """Return what builds a model on a device that holds some rows at a time, and its passes."""
    sizes: list[int] = []

    def forget(_module: Any, args: tuple[Tensor, ...]) -> None:
        sizes.append(len(args[0]))
        if len(args[0]) > rows:
            raise torch.OutOfMemoryError(TEXT)

    def build() -> Model:
        model = load("tiny-llama", sampling=SAMPLING)
        # Behind the first block, so that a pass that fails has left something.
        model.module.get_submodule(model.layers[1]).register_forward_pre_hook(forget)
        return model

    return build, sizes


def bench_of(build: Callable[[], Model]) -> Bench:
    return Bench(ModelSetup("own", "cpu", SAMPLING, build=build))


@share(2)
@pytest.mark.parametrize("name", ["int8", "kv-int8"])
def test_fewer_samples_at_a_time_measure_the_same(name: str) -> None:
    whole = bench_of(lambda: load("tiny-llama", sampling=SAMPLING))
    expected = whole.measure(whole.mode(name))
    build, sizes = built(3)
    bench = bench_of(build)
    with pytest.warns(DeviceMemoryWarning) as caught:
        rows = bench.measure(bench.mode(name))
    messages = [str(w.message) for w in caught if w.category is DeviceMemoryWarning]
    assert len(messages) == 1, messages
    assert messages[0].startswith(
        "8 samples of tiny-llama at a time do not fit the memory of GPU 1 ("
    )
    assert messages[0].endswith("; 2 do.")
    assert bench.at_once == 2
    assert sizes.count(6) == 1, "what did not fit once is not tried again"
    assert [(r.site, r.scope) for r in rows] == [(r.site, r.scope) for r in expected]
    for row, other in zip(rows, expected, strict=True):
        if row.scope == "isolated":  # float noise, the largest of the passes
            assert row.values == pytest.approx(other.values, abs=1e-12), row.site
        else:
            assert row.values == other.values, f"{row.site} {row.scope}"
    assert all(map(torch.equal, bench.outputs(bench.mode(name)), whole.outputs(whole.mode(name))))


def test_a_sample_that_does_not_fit_alone_is_one_sentence() -> None:
    build, _ = built(0)
    with pytest.raises(
        DeviceMemoryError,
        match=rf"^the memory of {FITS} is too small for sample 0 of 0 to 5 of tiny-llama "
        r"\(int64 1 x 16\)\. Give fewer or "
        r"shorter samples \(--samples, --seqlen\), a device with more memory, or --device cpu\.$",
    ):
        _ = bench_of(build).model


@proof
def test_captured_layers_are_the_same(tmp_path: Path) -> None:
    build, _ = built(1)
    with pytest.warns(DeviceMemoryWarning, match="1 does"):
        few = list(
            capture_modes(ModelSetup("own", "cpu", SAMPLING, build=build), "int8", tmp_path / "few")
        )
    whole = ModelSetup("tiny-llama", "cpu", SAMPLING)
    list(capture_modes(whole, "int8", tmp_path / "whole"))
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert len(few) == 2
    assert files == sorted(path.name for path in (tmp_path / "few").iterdir())
    for name in files:
        if not name.endswith(".json"):
            assert (tmp_path / "few" / name).read_bytes() == (
                tmp_path / "whole" / name
            ).read_bytes()


def test_another_error_is_none_of_the_device() -> None:
    assert device_error(RuntimeError("CUDA error: invalid argument")) is None
    assert device_error(ValueError("device-side assert triggered")) is None
