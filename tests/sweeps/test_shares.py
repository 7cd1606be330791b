"""Sweeps of codebooks, whose levels are factors of every block's own scale."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qgate
from qgate import cli
from qgate.formats import definition
from qgate.formats.codebook import Codebook, CodebookFormat
from qgate.sweeps.shares import trained_on


def tensor(seed: int = 0) -> torch.Tensor:
    return torch.randn(40, 200, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["nf4", "bnb_fp4", "lloyd3", "iq2_xxs", "iq4_nl", "lloyd1_qjl"])
def test_each_level_is_the_definition_at_that_share(name: str) -> None:
    x = tensor()
    x[3, 5] = math.nan
    swept = qgate.sweep(x, name, levels=4, max_exp=0.3, min_exp=-0.6)
    assert [level["exponent"] for level in swept.levels] == [0.3, 0.0, -0.3, -0.6]
    fmt = qgate.formats.get(name)
    for level in swept.levels:
        scaled = fmt.with_share(2.0 ** level["exponent"])
        y = definition.quantize(x.double().numpy(), qgate.Quantizer(scaled))
        sound = ~np.isnan(y)
        error = np.square(y - x.double().numpy())[sound].sum()
        ratio = 10 * math.log10(np.square(x.double().numpy())[sound].sum() / error)
        assert level["metrics"]["sqnr_db"] == pytest.approx(ratio, abs=1e-9)
    record = swept.to_dict()
    assert record["tensor"]["poisoned"] == (~sound).sum()
    assert record["failed"] == "1 NaN in the tensor"


def test_levels_for_normal_numbers_need_no_other_scale() -> None:
    """A tenth more or less is worse, and the last levels saturate at half the scale."""
    swept = qgate.sweep(tensor(), "lloyd4", levels=16)
    assert abs(swept.exponent) <= 0.1
    assert swept.reasons[0].startswith("SQNR 2")
    half = swept.levels[-1]
    assert half["exponent"] == -1
    assert half["overflow_share"] > 0.1
    assert half["flush"] == 0


def test_a_book_for_the_largest_number_wastes_levels_on_blocks_of_normal_ones() -> None:
    book = Codebook("quarters", tuple(n / 4 - 1 for n in range(8)))
    swept = qgate.sweep(tensor(), CodebookFormat("mine", book, size=200))
    assert -0.6 < swept.exponent < -0.1
    own = next(level for level in swept.levels if level["marks"] == ["own"])
    gain = swept.recommended["metrics"]["sqnr_db"] - own["metrics"]["sqnr_db"]
    assert gain > 0.5
    assert swept.reasons[-1] == f"The format's own rule, 2^0, has {gain:.2f} dB less."


def test_a_trained_book_is_better_than_a_given_one_where_few_are_large() -> None:
    x = tensor()
    x[:, 3] *= 40
    trained = trained_on(x, "trained4", -1)
    ratios = {
        fmt: qgate.sweep(x, fmt, levels=2).levels[1]["metrics"]["sqnr_db"]
        for fmt in (trained, "nf4")
    }
    assert ratios[trained] > ratios["nf4"] + 3
    record = qgate.sweep(x, trained, levels=2).to_dict()
    assert tuple(record["format"]["levels"]) == trained.element.levels


@pytest.mark.parametrize("scaled_by", ["amax", "rms"])
@pytest.mark.parametrize("share", [0.9, 1.3])
def test_a_share_is_the_definitions_in_the_fast_way_too(scaled_by: str, share: float) -> None:
    nf4 = qgate.formats.get("nf4")
    q = qgate.Quantizer(replace(nf4, scaled_by=scaled_by, share=share))
    for dtype in (torch.float32, torch.float64):
        x = tensor().to(dtype)
        expected = torch.from_numpy(definition.quantize(x.double().numpy(), q)).to(dtype)
        assert torch.equal(q(x), expected)
        assert torch.equal(q.encode(x).decode(), expected)


def test_the_command_sweeps_given_and_trained_books(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": tensor(), "b": tensor(1).bfloat16()}, "t.pt")
    line = ["sweep", "t.pt", "--elem-format", "nf4,trained3", "--no-plots", "--num-levels", "5"]
    assert cli.main(line) == 0
    text = capsys.readouterr().out
    assert "trained3 blocks" in text
    assert "offset" in text
    assert cli.main([*line[:2], "--elem-format", "nf4", "--no-plots", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "the sweep multiplies" in text
    assert "rec: recommended. own: the offset in use, 0." in text


@pytest.mark.parametrize(
    ("x", "fmt", "words"),
    [
        (torch.zeros(4, 64), "nf4", "no finite number other than zero"),
        (qgate.stats.counts(tensor().bfloat16()), "nf4", "sweep the tensor itself"),
        (tensor(), "nvfp4", "chooses its own scales"),
    ],
)
def test_what_is_not_swept(x: object, fmt: str, words: str) -> None:
    with pytest.raises(qgate.QgateError, match=words):
        qgate.sweep(x, fmt)


def test_no_book_is_trained_on_zeros() -> None:
    with pytest.raises(qgate.QgateError, match="no finite number other than zero to train on"):
        trained_on(torch.zeros(3, 64), "trained4", -1)
