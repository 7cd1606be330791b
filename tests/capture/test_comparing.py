"""Two runs compared: local errors stay where they are made, carried ones go on, nothing is mixed up."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qgate import Model, QgateError, Rule, capture, modes
from qgate.capture import Capture, compare, compare_runs, run
from qgate.models.mamba.network import Mamba, MambaConfig
from qgate.models.mamba.rotation import ROTATED, rotate
from qgate.stats import ErrorStats
from tests.capture import networks
from tests.capture.networks import model
from tests.models.checkpoints import randomize

BLOCKS = [f"layers.{k}:output" for k in range(3)]
IO = r"layers.\d:(input|output)$"
Errors = dict[str, ErrorStats]


def changed(it: Model, name: str, by: float = 0.5) -> Model:
    """The model with one bias shifted."""
    other = it.with_module(copy.deepcopy(it.module))
    with torch.no_grad():
        other.module.get_submodule(name).bias.add_(by)  # type: ignore[operator, union-attr]
    return other


def quantized(it: Model) -> Model:
    rule = Rule(":(input|weight)$", "int8", per="row")
    return modes.apply(modes.Mode("rows", "", rules=(rule,)), it).model


def mses(found: Errors) -> list[float]:
    return [error.metric("mse") for error in found.values()]


# Local and carried -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [networks.Block, networks.Masked, networks.InTuple, networks.InDict, networks.InOutput])  # fmt: skip
@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_error_planted_in_a_block_is_local_to_it(where: int, block: Any) -> None:
    it = model(block)
    broken = changed(it, f"layers.{where}.mix")
    local = mses(compare_runs(broken, it, local=True))
    carried = mses(compare_runs(broken, it))
    assert [error > 0 for error in local] == [k == where for k in range(3)]
    assert [error > 0 for error in carried] == [k >= where for k in range(3)]
    assert local[where] == carried[where] > 1e-3


def test_with_nothing_quantized_the_local_error_is_zero() -> None:
    it = model()
    plan = modes.make_plan(modes.find_mode("fp32", "other"), it)
    same = modes.apply(modes.find_mode("fp32", "other"), it).model
    assert not plan.entries
    for local in (True, False):
        errors = compare_runs(same, it, IO + "|mix:|norm:", local=local)
        assert len(errors) == 3 * (2 + 3 + 2)
        assert set(mses(errors)) == {0.0}
        assert all(error.elements > 0 for error in errors.values())


def test_the_local_error_of_the_first_block_is_its_carried_error() -> None:
    it = model()
    q = quantized(it)
    local, carried = compare_runs(q, it, local=True), compare_runs(q, it)
    assert local[BLOCKS[0]].metrics() == carried[BLOCKS[0]].metrics()
    assert local[BLOCKS[2]].metric("mse") < carried[BLOCKS[2]].metric("mse")


def test_a_block_that_runs_twice_cannot_be_forced() -> None:
    it = model(twice=True)
    it.sites()
    assert it.layers == ("layers.0", "layers.1")
    it = Model(it.module, it.inputs, "net", layers=("layers.0", "layers.1", "layers.2"))
    assert (
        compare_runs(it, it)["layers.2:output"].elements
        == 2 * compare_runs(it, it)["layers.1:output"].elements
    )
    with pytest.raises(QgateError, match=r"layers\.2 runs more than once per sample"):
        compare_runs(it, it, local=True)


def test_without_blocks_nothing_can_be_forced() -> None:
    one = Model(nn.Sequential(nn.LayerNorm(4)), [torch.ones(1, 4)], "one")
    assert mses(compare_runs(one, one, ":output")) == [0]
    with pytest.raises(QgateError, match="one has no list of blocks"):
        compare_runs(one, one, ":output", local=True)


# The two ways to compare -------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
def test_captures_compared_are_runs_compared(local: bool) -> None:
    it = model()
    q = quantized(it)
    reference = run(it, IO + "|mix:output")
    actual = run(q, IO + "|mix:output", forced=reference if local else None)
    together, separate_errors = (
        compare(actual, reference),
        compare_runs(q, it, IO + "|mix:output", local=local),
    )
    assert list(together) == list(separate_errors)
    for site, error in together.items():
        assert error.metrics() == pytest.approx(
            separate_errors[site].metrics(), rel=1e-9, nan_ok=True
        )
        assert error.elements == separate_errors[site].elements == 24 * networks.WIDTH
    assert together[BLOCKS[1]].metric("mse") > 0


def test_what_is_written_into_later_is_compared_as_it_was() -> None:
    class InPlace(networks.Block):
        def forward(self, x: Tensor) -> Any:
            y = self.mix(self.norm(x))
            return y.zero_().add_(x)

    it = model(InPlace)
    errors = compare_runs(changed(it, "layers.0.mix", 0.5), it, ["layers.0.mix:output"])
    assert errors["layers.0.mix:output"].metric("mse") == pytest.approx(0.25)


def test_samples_of_their_own_can_be_given() -> None:
    it = model()
    q = quantized(it)
    errors = compare_runs(q, it, samples=it.inputs[1:3])
    assert errors[BLOCKS[0]].elements == 2 * 9 * networks.WIDTH
    assert run(q, samples=[torch.tensor([[1, 2]])])[BLOCKS[0]][0].shape == (1, 2, networks.WIDTH)


def test_progress_is_told() -> None:
    steps: list[tuple[int, int]] = []
    compare_runs(model(), model(), progress=lambda *now: steps.append(now))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_nan_and_inf_pass_through_and_are_counted() -> None:
    it = model()
    broken = changed(it, "layers.1.mix")
    with torch.no_grad():
        broken.module.layers[1].mix.bias[3] = float("nan")  # type: ignore[union-attr, index, operator]
        broken.module.layers[1].mix.bias[4] = float("inf")  # type: ignore[union-attr, index, operator]
    for local in (True, False):
        errors = compare_runs(broken, it, local=local)
        first, middle, last = (errors[site] for site in BLOCKS)
        assert first.finite
        assert (middle.actual_non_finite.nan, middle.actual_non_finite.positive_infinity) == (
            24,
            24,
        )
        assert middle.reference_non_finite.total == 0
        assert not middle.metric("mse") <= 1e9, "a limit must not hold"
        assert last.finite == local
    error = compare_runs(broken, broken)[BLOCKS[1]]
    assert error.reference_non_finite.nan == error.actual_non_finite.nan == 24
    assert not error.finite


# What cannot be compared -------------------------------------------------------------------------


def mamba() -> Model:
    network = Mamba(MambaConfig(32, 16, 2, 32, d_state=4)).eval()
    randomize(network)
    return Model(network, model().inputs, "small-mamba", bases={ROTATED: rotate})


def test_other_coordinates_are_refused() -> None:
    it = mamba()
    fp16 = modes.apply(modes.find_mode("fp16", "mamba"), it).model
    plain, turned = run(it), run(fp16)
    for compared in (lambda: compare_runs(fp16, it), lambda: compare(turned, plain)):
        with pytest.raises(
            QgateError,
            match=r"basis 'rotated' and small-mamba in basis 'plain'.*in_basis\('rotated'\)",
        ):
            compared()
    errors = compare_runs(fp16, it.in_basis("rotated"), local=True)
    assert all(0 < error.metric("relative_mse") < 1e-5 for error in errors.values())
    with pytest.raises(QgateError, match="basis 'plain'"):
        run(fp16, forced=run(it, IO))


@pytest.mark.parametrize(
    "samples",
    [
        lambda given: [x.flip(-1) for x in given],
        lambda given: given[:-1],
        lambda given: [x[:, :-1] if x.shape[1] > 1 else x for x in given],
        lambda given: [given[0], given[2], given[1], given[3]],
    ],
)  # fmt: skip
def test_other_samples_are_refused(samples: Any) -> None:
    it = model()
    other = replace(it, inputs=samples(it.inputs))
    with pytest.raises(QgateError, match="different samples"):
        compare(run(other), run(it))
    with pytest.raises(QgateError, match="other samples"):
        run(other, forced=run(it, IO))


def test_what_lacks_is_an_error() -> None:
    it = model()
    with pytest.raises(QgateError, match=r"captured site 'layers\.0:output'"):
        compare(run(it, ["layers.1:output"]), run(it))
    shorter = run(it)
    shorter.tensors[BLOCKS[1]].pop()
    with pytest.raises(
        QgateError, match=r"layers\.1:output was passed 3 times in one run and 4 times"
    ):
        compare(shorter, run(it))
    empty = Capture("net", "plain", shorter.inputs, {BLOCKS[0]: []})
    with pytest.raises(QgateError, match="passed 0 times"):
        compare(empty, empty)


def test_other_shapes_are_refused() -> None:
    class Longer(networks.Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(torch.cat([x, x], 1))

    class Last(networks.Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x[:, -1:])

    it = model()
    with pytest.raises(QgateError, match="shape"):
        compare_runs(model(Longer), it)
    with pytest.raises(QgateError, match="shape"):
        compare_runs(model(Last), it)
    with pytest.raises(
        QgateError,
        match=r"layers\.1:input cannot be forced: sample 0 is \(1, 10, 16\) here and \(1, 5, 16\)",
    ):
        compare_runs(model(Longer), it, [BLOCKS[0]], local=True)


def test_a_site_that_only_the_reference_has_is_an_error() -> None:
    class Renamed(networks.Block):
        def __init__(self) -> None:
            super().__init__()
            self.linear = self.mix
            del self.mix

        def forward(self, x: Tensor) -> Any:
            return x + self.linear(self.norm(x)).relu()

    with pytest.raises(QgateError, match=r"layers\.0\.mix:output is not in this model any more"):
        compare_runs(model(Renamed), model(), ["layers.0.mix:output"])


# Memory ------------------------------------------------------------------------------------------


def live_bytes() -> int:
    gc.collect()
    return sum(
        t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) is Tensor and t.layout is torch.strided
    )


@pytest.mark.parametrize("local", [True, False])
def test_memory_does_not_grow_with_the_samples(local: bool) -> None:
    gc.collect()
    gc.freeze()  # what is there already is not counted again for every sample
    it = model(lengths=(64,) * 6)
    q = quantized(it)
    sizes: list[int] = []
    compare_runs(
        q, it, IO + "|mix|norm", local=local, progress=lambda *_: sizes.append(live_bytes())
    )
    assert len(sizes) == 6
    assert max(sizes[2:]) <= sizes[1] + 1024
    record = run(it, IO + "|mix|norm")
    assert record.nbytes() > 6 * 10 * 64 * networks.WIDTH * 4  # what a capture of all would hold
    before = live_bytes()
    del record
    assert before - live_bytes() > 6 * 10 * 64 * networks.WIDTH * 4, "the count sees tensors"


def test_a_capture_is_a_collection_of_sites() -> None:
    record = run(model())
    assert list(record) == BLOCKS
    assert len(record) == 3
    assert (record.model, record.basis) == ("net", "plain")
    assert capture.Capture is Capture
