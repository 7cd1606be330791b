"""The 27 errors of the known scaling tool, by their numbers in the table they were measured in.

Each test puts in what went wrong there and asks for what is right. The last test sees to it that no
number is missing.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qgate
from qgate.cli import main
from tests.shares import proof

OUT = Path("draw") / "scaling_analysis"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def activation(bits: int = 14, seed: int = 0) -> torch.Tensor:
    """N(0,1) with log-normal channels, a few of them 20 to 100 times larger."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn(512, generator=generator))
    channels[::200] *= 60
    return (torch.randn(2**bits // 512, 512, generator=generator) * channels).bfloat16()


def swept(x: object, *options: str, name: str = "x") -> tuple[int, dict]:
    """The exit status of the command and the record it wrote, if it did."""
    torch.save(x, f"{name}.pt")
    status = main(["sweep", f"{name}.pt", "--no-plots", "--granularity", "tensor", "-v", *options])
    path = OUT / name / "mxfp_scaling_fp8_e4m3.json"
    return status, json.loads(path.read_text()) if path.exists() else {}


def test_error_01_a_nan_is_counted_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    x = activation()
    x[0, 0] = math.nan
    status, record = swept(x)
    assert status == 1
    assert record["tensor"]["nan"] == 1
    out = capsys.readouterr().out
    assert "1 NaN in the tensor" in out
    assert all(0 < level["metrics"]["cosine"] <= 1 for level in record["levels"])


def test_error_02_an_inf_fails_and_an_inf_made_by_rounding_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x = activation()
    x[0, 0] = math.inf
    status, record = swept(x)
    assert status == 1
    assert isinstance(record["parameters"]["max_exp"], float)
    assert math.isfinite(record["parameters"]["max_exp"])
    assert (
        swept(torch.tensor([1e200, 1.0], dtype=torch.float64), "--via", "bf16", name="wide")[0] == 1
    )
    assert "rounding wide to bf16 makes 1 Inf of finite numbers" in capsys.readouterr().out


def test_error_03_cosine_stays_below_one_whatever_the_threads() -> None:
    x = activation(20)
    threads = torch.get_num_threads()
    try:
        levels = []
        for count in (1, 2):
            torch.set_num_threads(count)
            levels.append(qgate.sweep(x, "e4m3").levels)
    finally:
        torch.set_num_threads(threads)
    assert levels[0] == levels[1]
    exact = x.double()
    for level in levels[0]:
        assert level["metrics"]["cosine"] <= 1
    level = levels[0][0]
    q = qgate.quantize(exact, "e4m3", scale=2.0 ** level["exponent"])
    cosine = float((q * exact).sum() / (q.norm() * exact.norm()))
    assert level["metrics"]["cosine"] == pytest.approx(cosine, rel=1e-12)


def test_error_04_sqnr_shows_saturation_that_psnr_hides() -> None:
    level = qgate.sweep(activation(18), "e4m3", max_exp=-14, min_exp=-14).levels[-1]
    assert level["overflow_share"] > 0.9
    assert level["metrics"]["psnr_db"] > 25
    assert level["metrics"]["sqnr_db"] < 0.1
    first = next(iter(level["metrics"]))
    assert first == "sqnr_db"


def test_error_05_a_parameter_overflows_as_its_values_do() -> None:
    x = activation().float()
    ends = "--max-scale-exp", "-6", "--min-scale-exp", "-8"
    _, parameter = swept(torch.nn.Parameter(x), *ends, name="p")
    _, plain = swept(x, *ends, name="v")
    assert parameter["levels"] == plain["levels"]
    assert max(level["overflow_share"] for level in parameter["levels"]) > 0.01


def test_error_06_the_default_end_lets_nothing_overflow_and_energy_is_told() -> None:
    x = activation(16)
    record = qgate.sweep(x, "e4m3").record
    top = next(level for level in record["levels"] if "maximum" in level["marks"])
    assert top["overflow"] == 0
    documented = qgate.sweep(x, "e4m3", alignment="documented").record
    assert documented["parameters"]["max_exp"] == record["parameters"]["max_exp"] - 1
    lower = next(lv for lv in record["levels"] if lv["exponent"] == top["exponent"] - 2)
    assert lower["overflow_share"] < 0.01 < lower["overflow_energy"]


def test_error_07_integers_and_the_usual_scale_are_always_levels() -> None:
    for bits in (14, 16, 20):
        for fmt in ("fp8_e4m3", "fp4_e2m1", "mxfp8_e4m3", "mxfp4_e2m1"):
            record = qgate.sweep(activation(bits), fmt).record
            exponents = {level["exponent"] for level in record["levels"]}
            ends = record["parameters"]
            assert {
                float(e) for e in range(int(ends["min_exp"]), int(ends["max_exp"]) + 1)
            } <= exponents
            assert float(ends["usual"]["exponent"]) in exponents
            assert (ends["usual"]["kind"] == "production") == fmt.startswith("mx")
            assert record["levels"][record["advice"]["recommended"]]["e8m0"]


def test_error_08_the_block_sweep_speaks_about_mx() -> None:
    x = activation(18)
    exact = x.double()
    for fmt in ("mxfp8_e4m3", "mxfp4_e2m1"):
        blocks = qgate.sweep(x, fmt, granularity="block")
        production = next(level for level in blocks.levels if level["exponent"] == 0)
        q = qgate.quantize(exact, fmt)
        assert production["metrics"]["mse"] == pytest.approx(float(((q - exact) ** 2).mean()))
        assert blocks.record["advice"]["speaks_about"] == "an offset to every block's own exponent"


def test_error_09_one_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] = 3e4
    status, record = swept(x)
    assert status == 0
    chosen = record["levels"][record["advice"]["recommended"]]
    out = capsys.readouterr().out
    exponents = re.findall(r"(?:RECOMMENDED Scaling Factor|Use scaling factor): 2\^(-?[\d.]+)", out)
    assert len(exponents) == 2
    # The one element holds nearly all the energy, and amax / max has it exactly. Of powers of two,
    # 7 is the first that keeps it.
    assert [float(s) for s in exponents] == [pytest.approx(chosen["exponent"], abs=1e-4)] * 2
    assert chosen["exponent"] == pytest.approx(math.log2(x[3].item() / 448), abs=1e-6)
    assert "use 2^7: SQNR" in out
    assert chosen["overflow"] == 0
    assert "Nothing overflows" in out


def test_error_10_an_explicit_end_means_what_it_says() -> None:
    _, record = swept(activation(), "--max-scale-exp", "10")
    assert record["levels"][0]["exponent"] == 10
    _, record = swept(activation(), "--min-scale-exp", "-10")
    assert record["parameters"]["min_exp"] == -10
    assert record["levels"][-1]["exponent"] == -10


def test_error_11_scale_bits_matter_and_nonsense_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, wide = swept(activation() * 2.0**20, name="a")
    _, narrow = swept(activation() * 2.0**20, "--set", "sweep_scale_bits=5", name="b")
    assert [lv["e8m0"] for lv in wide["levels"]] != [lv["e8m0"] for lv in narrow["levels"]]
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "a.pt", "--set", "sweep_scale_bits=-5"])
    assert stop.value.code == 2
    assert "sweep_scale_bits = '-5' is not allowed" in capsys.readouterr().err


def test_error_12_nothing_is_overwritten_by_a_tensor_of_the_same_name() -> None:
    for folder, seed in (("d1", 1), ("d2", 2)):
        Path(folder).mkdir()
        torch.save(activation(seed=seed), f"{folder}/same.pt")
    argv = ["sweep", "d1/same.pt", "d2/same.pt", "--no-plots", "--output-dir", "out"]
    assert main(argv) == 0
    paths = sorted(Path("out").rglob("mxfp_scaling_fp8_e4m3.json"))
    records = [json.loads(path.read_text())["tensor"] for path in paths]
    assert [r["path"] for r in records] == ["d1/same.pt", "d2/same.pt"]
    assert records[0]["sha256"] != records[1]["sha256"]


@pytest.mark.parametrize("factor", [2.0**-120, 2.0**-140])
def test_error_13_tiny_tensors_have_readable_factors_and_errors(
    factor: float, capsys: pytest.CaptureFixture[str]
) -> None:
    status, record = swept(activation().float() * factor)
    assert status == 0
    chosen = record["levels"][record["advice"]["recommended"]]
    assert 0 < chosen["metrics"]["mse"] < 1e-60
    assert isinstance(chosen["metrics"]["psnr_db"], float)
    out = capsys.readouterr().out
    assert re.search(r"Use scaling factor: 2\^-\d+ \(\d", out)
    assert "factor: 0.000000" not in out


def test_error_14_huge_tensors_have_finite_errors() -> None:
    record = qgate.sweep(activation().float() * 1e30, "e4m3").record
    for level in record["levels"]:
        assert all(math.isfinite(v) for v in level["metrics"].values())


@pytest.mark.parametrize(
    "x",
    [torch.full((9,), 3.0), torch.exp2(torch.arange(-3.0, 4.0)), torch.tensor(2.0)],
    ids=["constant", "powers", "zero-dim"],
)
def test_error_15_exact_levels_have_a_score(x: torch.Tensor) -> None:
    sweep_result = qgate.sweep(x, "e4m3")
    assert sweep_result.recommended["metrics"]["psnr_db"] == math.inf
    assert sweep_result.recommended["score"] == 1.0
    assert all(0 <= level["score"] <= 1 for level in sweep_result.levels)


def test_error_16_flushed_means_becomes_zero() -> None:
    x = activation(18)
    exact = x.double()
    level = next(lv for lv in qgate.sweep(x, "mxfp8").levels if "production" in lv["marks"])
    q = qgate.quantize(exact, "e4m3", scale=2.0 ** level["exponent"])
    assert level["flush"] == int(((q == 0) & (exact != 0)).sum()) < level["underflow"]


def test_error_17_elements_round_as_hardware_does() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().abs() <= 448]
    assert torch.equal(qgate.quantize(x, "e4m3"), x.to(torch.float8_e4m3fn).to(torch.bfloat16))


def test_error_18_block_exponents_come_from_bits() -> None:
    x = torch.full((1, 32), 255.0).bfloat16()
    assert qgate.encode(x, "mxfp8").scales.item() == 127 + 7 - 8


def test_error_19_signs_do_not_make_nan() -> None:
    x = torch.tensor([1.7, -1.7, 3.3, -0.2]).bfloat16()
    assert qgate.quantize(x, "mxfp8").tolist() == [1.75, -1.75, 3.25, -0.203125]


def test_error_20_the_error_is_measured_against_the_input_or_the_cast_is_recorded() -> None:
    x = torch.randn(2**12, generator=torch.Generator().manual_seed(1)) * 1.0001
    direct = qgate.sweep(x, "e4m3").levels[0]
    q = qgate.quantize(x.double(), "e4m3", scale=2.0 ** direct["exponent"])
    assert direct["metrics"]["mse"] == pytest.approx(float(((q - x.double()) ** 2).mean()))
    _, record = swept(x, "--via", "bf16")
    assert record["tensor"]["rounded_to"] == "bf16"
    assert record["tensor"]["dtype"] == "float32"
    assert swept(torch.arange(4), name="integers")[0] == 1
    assert swept(torch.tensor([1j]), name="complex")[0] == 1


class Evil:
    """Leaves a marker if the file is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("marker", "w")


def test_error_21_no_code_in_a_file_runs() -> None:
    assert swept(Evil(), name="evil")[0] == 1
    assert not Path("marker").exists()


def test_error_22_the_score_does_not_depend_on_magnitude() -> None:
    x = activation().double()
    a, b = qgate.sweep(x, "e4m3", levels=9), qgate.sweep(x * 2.0**-30, "e4m3", levels=9)
    scores = [[level["score"] for level in sweep_result.levels] for sweep_result in (a, b)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)


@pytest.mark.parametrize("count", ["0", "-1", "x"])
def test_error_23_level_counts_are_checked_at_once(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["sweep", "x.pt", "--num-levels", count])
    assert stop.value.code == 2
    assert f"'{count}' is not allowed; it is a whole number from 1" in capsys.readouterr().err


def test_error_24_nothing_importable_looks_like_a_test() -> None:
    names = [
        n for module in (qgate, qgate.analysis, qgate.stats, qgate.formats) for n in module.__all__
    ]
    assert len(names) > 20
    assert not [name for name in names if name.lower().startswith("test")]


@proof
def test_error_25_ascii_terminals_get_through() -> None:
    torch.save(activation(10), "x.pt")
    run = subprocess.run(
        [sys.executable, "-m", "qgate", "sweep", "x.pt", "--no-plots", "-v"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert run.returncode == 0
    assert b"Failed: 0" in run.stdout


def test_error_26_every_tensor_of_a_file_is_swept_and_keys_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.save({"w": activation(10), "b": activation(10, 1)}, "state.pt")
    torch.save([activation(10), activation(10, 1)], "list.pt")
    torch.save({"step": 3, "name": "x"}, "none.pt")
    assert main(["sweep", "state.pt", "list.pt", "none.pt", "--no-plots", "-v"]) == 1
    out = capsys.readouterr().out
    assert "Total tensors: 5" in out
    assert "it has step: int, name: str" in out
    folders = [path.name for path in OUT.iterdir() if path.is_dir()]
    assert sorted(folders) == ["list.0", "list.1", "state.b", "state.w"]


def test_error_27_the_ends_keep_their_names_when_they_change_sides() -> None:
    """A tensor of one binade fits between its ends: the maximum alignment is the smaller one."""
    sweep_result = qgate.sweep(torch.tensor([1.0, 1.3]), "e4m3")
    ends = sweep_result.record["parameters"]
    assert ends["max_exp"] < ends["min_exp"]
    for level in sweep_result.levels:
        assert ("maximum" in level["marks"]) == (level["exponent"] == ends["max_exp"])
        assert ("minimum" in level["marks"]) == (level["exponent"] == ends["min_exp"])
        if "maximum" in level["marks"]:
            assert level["overflow"] == 0
    position = sweep_result.record["advice"]["position"]
    marks = sweep_result.recommended["marks"]
    assert position == "between" or position in marks


def test_no_error_is_forgotten() -> None:
    numbers = {
        int(m.group(1)) for m in (re.match(r"test_error_(\d\d)_", n) for n in globals()) if m
    }
    assert numbers == set(range(1, 28))
