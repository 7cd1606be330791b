"""Gates over dumps: what is pooled is the whole, and a drift is told from another batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qgate import formats
from qgate.baselines import Store
from qgate.dumps import Dump, Record
from qgate.dumps.gate import DumpGates, DumpSubject, distribution
from qgate.dumps.gate_sites import SitePool, Sites, losses_of_pool, needs_values, pool
from qgate.errors import QgateError
from qgate.formats.losses import Losses
from qgate.gate import Policy
from qgate.gate.sessions import Outcome
from tests.campaigns.mutants.bed import with_markers
from tests.dumps.gated import at, tensors, with_nan, with_outliers, write_dump
from tests.dumps.making import known
from tests.shares import proof, share

OVERFLOW, DISTRIBUTIONS = "dump_overflow", "dump_distributions"
FORMATS = ("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
SITE = "layers.1.fc:forward.input"
TWO = ("layers.3", "outside")


def gates_over(folder: Path, baselines: Path, **how: Any) -> DumpGates:
    policy = Policy.from_table({})
    return DumpGates(DumpSubject(folder, "dump-toy"), baselines, policy, **how)


def verdicts(of: DumpGates, suite: str, layers: Sequence[str] = ()) -> Iterator[Outcome]:
    of.check_baseline()
    session = with_markers(of, suite)
    for layer in layers or of.layers(suite):
        if suite == DISTRIBUTIONS:
            yield session.distributions(suite, layer)
            continue
        for fmt in FORMATS:
            if of.left_out(suite, fmt, layer) is None:
                yield session.overflow(suite, fmt, layer)


def texts(of: DumpGates, *suites: str, layers: Sequence[str] = ()) -> list[str]:
    suite_names = suites or (OVERFLOW, DISTRIBUTIONS)
    return [
        outcome.text
        for suite in suite_names
        for outcome in verdicts(of, suite, layers)
        if outcome.text
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The accepted record of a healthy dump."""
    folder: Path = tmp_path_factory.mktemp("recorded")
    gates = gates_over(write_dump(folder / "dump"), folder / "baselines", updating="all")
    assert texts(gates) == []
    gates.commit()
    return folder / "baselines"


# What is pooled -------------------------------------------------------------------------------------


def pools(folder: Path) -> dict[str, SitePool]:
    dump = Dump.open(folder)
    return {site.name: pool(dump, site.records) for site in Sites.of(dump).sites}


def whole(ranks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors_by_site: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        for record, tensor in tensors(rank, ranks, 0, dtype):
            tensors_by_site.setdefault(
                f"{record.module}:{record.operation}.{record.name}", []
            ).append(tensor)
    return {name: torch.cat(shards) for name, shards in tensors_by_site.items()}


@share(3)
@pytest.mark.parametrize("level", ["tensors", "statistics"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ranks_and_iterations_merged_are_the_whole(
    tmp_path: Path, level: str, dtype: torch.dtype
) -> None:
    merged = pools(write_dump(tmp_path / "d", ranks=3, level=level, dtype=dtype))
    true = whole(3, dtype)
    assert merged.keys() == true.keys()
    for name, tensor in true.items():
        stored = tensor.bfloat16() if dtype == torch.float32 else tensor
        assert merged[name].n == tensor.numel()
        assert merged[name].rounded == (dtype == torch.float32)
        for fmt in ("fp8_e4m3", "hif8", "fp16"):
            done = formats.report(stored, fmt)
            assert losses_of_pool(merged[name], fmt) == done + Losses()
        size = stored.double().abs()
        statistics = distribution(merged[name])
        assert statistics["log2_mean"] == pytest.approx(size.mean().log2().item())
        assert statistics["rms"] == pytest.approx(size.square().mean().sqrt().item())
        assert statistics["amax"] == size.max().item()
        tail = (size**4).mean() ** 0.25 / size.square().mean().sqrt()
        assert statistics["log2_tail"] == pytest.approx(tail.log2().item())


def test_block_formats_are_measured_tensor_by_tensor(tmp_path: Path) -> None:
    gates = gates_over(write_dump(tmp_path / "d", ranks=2), tmp_path, updating="all")
    outcome = gates.overflow(OVERFLOW, "mxfp4_e2m1", "layers.1")
    parts = [t for rank in (0, 1) for r, t in tensors(rank, 2, 0, torch.bfloat16)
             if (r.module, r.name) == ("layers.1.fc", "input")]  # fmt: skip
    done = [formats.report(part, "mxfp4_e2m1") for part in parts]
    (row,) = (measured for measured in outcome.verdict.measured if measured.site == SITE)
    share = sum(losses.flushed for losses in done) / sum(report.finite for report in done)
    assert row.values["flushed_share"] == pytest.approx(share)
    assert all(map(needs_values, ("mxfp4_e2m1", "int8")))
    assert not needs_values("fp8_e4m3")


def test_infinities_are_no_share_and_fail_by_themselves(tmp_path: Path) -> None:
    def infinite(tensor: Tensor) -> Tensor:
        with_infinities = tensor.clone()
        with_infinities[0, :4] = torch.inf
        return with_infinities

    folder = write_dump(tmp_path / "d", change=at("layers.1.fc", "input", infinite))
    with_infinities = pools(folder)[SITE]
    losses = losses_of_pool(with_infinities, "fp8_e4m3")
    assert (losses.inf, losses.saturated, losses.finite) == (8, 0, with_infinities.n - 8)
    assert losses.beyond_range == 8
    (text,) = texts(gates_over(folder, tmp_path, updating="all"), DISTRIBUTIONS)
    assert text.startswith(
        f"non-finite values at {SITE} (dump values): 8 NaN or infinite in actual"
    )
    assert "first in L1 layers.1.fc forward input, rank 0, iteration 0" in text


def test_folders_of_the_known_collector_have_sites_by_layer_and_type(tmp_path: Path) -> None:
    for counter, (layer, rank) in enumerate([(0, 0), (0, 1), (1, 0)]):
        known(tmp_path / "k", torch.randn(4, 32), layer=layer, rank=rank, counter=counter,
              phase="pre", component="linear", iteration=0)  # fmt: skip
    sites = Sites.of(Dump.open(tmp_path / "k"))
    assert [(site.name, len(site.records)) for site in sites.sites] == [
        ("layers.0.linear:forward.input", 2),
        ("layers.1.linear:forward.input", 1),
    ]
    assert sites.layers == ["layers.0", "layers.1"]


# What is accepted -----------------------------------------------------------------------------------


@share(4)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_other_batches_and_ranks_are_within_the_limits(
    recorded: Path, tmp_path: Path, seed: int, ranks: int
) -> None:
    assert texts(gates_over(write_dump(tmp_path / "d", seed=seed, ranks=ranks), recorded)) == []


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "input",
            lambda t: t * 2,
            rf"log2_(mean|p90) .* at {SITE} \(dump values\): 2\S*x accepted, up to 1.52x",
        ),
        ("input", with_outliers, rf"log2_tail .* at {SITE}"),
        ("output", torch.zeros_like, r"log2_\w+ -200 < .* at layers.1.fc:forward.output"),
        (
            "input",
            with_nan,
            rf"non-finite values at {SITE} .*first in L1 layers.1.fc forward input",
        ),
        ("grad_output", lambda t: t * 2.0**-3, r"at layers.1.fc:backward.grad_output .*0.1"),
    ],
)
def test_a_drift_is_told(
    recorded: Path, tmp_path: Path, name: str, change: Callable[[Tensor], Tensor], says: str
) -> None:
    folder = write_dump(tmp_path / "d", seed=1, change=at("layers.1.fc", name, change))
    (text,) = texts(gates_over(folder, recorded), DISTRIBUTIONS)
    assert re.search(says, text.partition("\n")[0]), text


def test_what_a_cast_clips_breaks_an_absolute_limit_and_is_never_accepted(
    recorded: Path, tmp_path: Path
) -> None:
    folder = write_dump(tmp_path / "d", change=at("layers.1.fc", "input", lambda t: t * 1000))
    failure_texts = texts(gates_over(folder, recorded), OVERFLOW)
    assert "absolute limit, what is cast lies beyond the format" in failure_texts[0]
    own = tmp_path / "own"
    own_gates = gates_over(folder, own, updating="all")
    assert len(texts(own_gates, OVERFLOW)) == 1
    own_gates.commit()
    accepted = Store(own, "dump-toy").accepted("fp8_e4m3")
    assert accepted is not None
    assert not any(key.site == SITE for key in accepted.values)


def test_a_layer_that_is_gone_is_not_measured(recorded: Path, tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "d", wanted=lambda record: record.layer != 1)
    gates = gates_over(folder, recorded)
    assert gates.layers(DISTRIBUTIONS) == ["layers.0", "layers.1", "outside"]
    failure_texts = texts(gates)
    assert len(failure_texts) == 1 + len(FORMATS)
    assert all("not measured at layers.1.fc:" in text for text in failure_texts)


def test_a_module_of_another_name_is_missing_and_absent(recorded: Path, tmp_path: Path) -> None:
    names = {"layers.1.fc": "layers.1.linear"}
    gates = gates_over(write_dump(tmp_path / "d", renamed=names), recorded)
    (failed,) = (outcome for outcome in verdicts(gates, DISTRIBUTIONS) if outcome.text)
    kinds = {(check.kind, check.site.partition(":")[0]) for check in failed.verdict.failed}
    assert kinds == {("missing", "layers.1.linear"), ("absent", "layers.1.fc")}


def test_a_dump_never_takes_the_place_of_a_model(tmp_path: Path) -> None:
    from tests.gate.benches import LLAMA, session

    subject = DumpSubject(write_dump(tmp_path / "d"), LLAMA)
    gates = DumpGates(subject, tmp_path, Policy(), updating="all")
    assert texts(gates, DISTRIBUTIONS) == []
    gates.commit()
    for updating in (None, "all"):
        with pytest.raises(QgateError, match=r"is of a dump, and what is measured is a model"):
            session(tmp_path, LLAMA, updating=updating).check_baseline()


# What cannot be gated -------------------------------------------------------------------------------


def test_counts_do_not_tell_what_a_format_with_scales_does(tmp_path: Path) -> None:
    gates = gates_over(write_dump(tmp_path / "d", level="statistics"), tmp_path, updating="all")
    assert gates.left_out(OVERFLOW, "fp8_e4m3", "layers.0") is None
    assert "only counts were stored" in (gates.left_out(OVERFLOW, "nvfp4", "layers.0") or "")
    assert gates.left_out(OVERFLOW, "fp8_e4m3", "layers.7") == ""


def test_a_dump_without_a_tensor_to_look_at_says_what_there_is(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "d", change=lambda _r, t: (t > 0).long())
    with pytest.raises(
        QgateError, match="no tensor that a gate could look at: 24 records are of int64"
    ):
        _ = gates_over(folder, tmp_path).subject.sites
    folder = write_dump(tmp_path / "none", wanted=lambda _record: False)
    with pytest.raises(QgateError, match="it has no record"):
        _ = gates_over(folder, tmp_path).subject.sites


def test_a_record_that_comes_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = gates_over(write_dump(tmp_path / "d", ranks=2), tmp_path)
    plain = Dump.records

    def twice(self: Dump, **wanted: Any) -> Iterator[Record]:
        yield from plain(self, **wanted)
        yield from plain(self, rank=1)

    monkeypatch.setattr(Dump, "records", twice)
    with pytest.raises(QgateError, match=r"twice .*of rank 1"):
        _ = gates.subject.sites


def test_damage_is_an_error_and_an_end_that_is_cut_off_is_not(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "d", close=False)
    index = folder / "rank00000" / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-20])
    gates = gates_over(folder, tmp_path / "b", updating="all")
    gates.check_baseline()
    assert any("torn" in note for note in gates.subject.notes())
    assert texts(gates, DISTRIBUTIONS) == []
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join([lines[0], b"{broken\n", *lines[2:]]))
    with pytest.raises(QgateError, match=r"is damaged: .* at byte .*qgate dumps verify"):
        gates_over(folder, tmp_path / "b").check_baseline()


def test_a_shard_that_is_truncated_is_an_error(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "d")
    (shard,) = (folder / "rank00000").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(QgateError, match="truncated or damaged"):
        gates_over(folder, tmp_path, updating="all").distributions(DISTRIBUTIONS, "layers.0")


def test_the_last_file_of_the_known_collector_may_be_torn(tmp_path: Path) -> None:
    paths = [
        known(tmp_path / "k", torch.randn(4, 32), layer=0, counter=counter, iteration=counter,
              phase="pre", component="linear", rank=0)
        for counter in range(3)
    ]  # fmt: skip
    whole = paths[2].read_bytes()
    paths[2].write_bytes(whole[:200])
    gates_over(tmp_path / "k", tmp_path).check_baseline()
    paths[2].write_bytes(whole)
    paths[1].write_bytes(b"")
    with pytest.raises(QgateError, match=r"is damaged: .*it is empty"):
        gates_over(tmp_path / "k", tmp_path).check_baseline()


def trained(folder: Path, seed: int) -> Path:
    """Two steps of tiny-llama on a batch of its own, collected."""
    import qgate
    from qgate.models import training
    from qgate.models.language import text
    from qgate.models.text import byte_ids
    from qgate.models.tiny import TINY

    network = TINY.get("tiny-llama").load().train()
    ids = byte_ids(text("calibration", 2**17))
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    with qgate.collect(network, folder, iterations=2):
        for _ in range(2):
            starts = torch.randint(len(ids) - 129, (4,), generator=draw).tolist()
            optimizer.zero_grad()
            training.nats(network, torch.stack([ids[k : k + 129] for k in starts])).backward()
            optimizer.step()
    return folder


@proof
def test_another_batch_of_a_real_training_is_within_the_limits(tmp_path: Path) -> None:
    gates = gates_over(trained(tmp_path / "a", 0), tmp_path, updating="all")
    assert texts(gates, layers=TWO) == []
    gates.commit()
    other = gates_over(trained(tmp_path / "b", 1), tmp_path)
    modules, embedding, attention = 47 * 6, 4, 5 * 8
    assert len(other.subject.sites.sites) == modules + embedding + attention
    assert texts(other, layers=TWO) == []
