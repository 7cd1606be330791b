"""Programs compiled for real GPUs: nothing is flushed, approximated or fused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import qgate
from qgate.formats.engine import on_device
from qgate.formats.engine.job import Job
from qgate.kernels import comparing, launching, reductions
from qgate.kernels.shapes import MemoryLayout
from tests.shares import proof, share, slow_file

pytestmark = slow_file

triton = pytest.importorskip("triton", reason="there is no triton for this platform")

# What loses subnormals, rounds a quotient loosely, or rounds once where twice is meant.
INEXACT = re.compile(r"\.ftz|\.approx|div\.full|\b(?:fma|mad)\.\w*\.?f64|ex2\.|lg2\.|\.sat")
# One rounding of a product and a sum, where a program asks for the remainder.
FUSED = re.compile(r"\b(?:fma|mad)\.\w*\.?f32")
TARGETS = (80, 90, 100)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES: dict[str, tuple[str, torch.dtype, tuple[int, int], dict[str, Any]]] = {
    "mx": ("mxfp8_e4m3", BF16, (64, 64), {}),
    "mx columns": ("mxint8", FP32, (64, 64), {"axis": 0, "rounding": "away"}),
    "nvfp4 columns": ("nvfp4", FP32, (64, 64), {"axis": 0}),
    "choosing": ("if4", BF16, (64, 64), {}),
    "choosing powers": ("if3", BF16, (64, 64), {}),
    "choosing columns": ("mixfp4", FP32, (64, 64), {"axis": 0}),
    "hif4": ("hif4", FP32, (64, 64), {}),
    "hif4 columns": ("hif4", BF16, (64, 64), {"axis": 0}),
    "flat": ("hif8", BF16, (64, 64), {}),
    "block scales": ("int8", BF16, (64, 64), {"granularity": "block", "block": 32}),
    "one scale": ("fp8_e4m3", BF16, (300, 64), {"granularity": "tensor"}),
    "columns": ("int8", FP32, (300, 64), {"granularity": "channel", "axis": 1}),
}
WITH_REMAINDERS = ("hif4", "block scales", "one scale", "columns")
SMALL = ("mx",)  # for the targets before and after


TENSORS = {
    torch.int16: "*i16", torch.int32: "*i32", torch.uint8: "*u8", torch.float32: "*fp32",
    torch.float64: "*fp64",
}  # fmt: skip
NUMBERS = {int: "i32", float: "fp32"}


class Launches(list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
    def __call__(self, program: Any, programs: int, *args: Any, **constants: Any) -> None:
        assert programs > 0
        self.append((program, args, constants))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Launches]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    noted = Launches()
    for family in (launching, reductions, comparing):
        monkeypatch.setattr(family, "launch", noted)
    return noted


def ptx(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], target: int) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program, args, keywords = launch
    constants = {name: value for name, value in keywords.items() if name != "warps"}
    names = program.arg_names
    signature = {
        name: TENSORS[arg.dtype] if isinstance(arg, torch.Tensor) else NUMBERS[type(arg)]
        for name, arg in zip(names, args, strict=False)
    }
    assert list(signature) + list(constants) == names, "what was compiled is called in this order"
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor)
    }
    source = ASTSource(
        fn=program,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": keywords.get("warps", 4), "enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    return str(compiled.asm["ptx"])


def launched(launches: Launches, name: str) -> Launches:
    fmt, dtype, shape, options = CASES[name]
    job = Job(torch.ones(shape, dtype=dtype), qgate.Quantizer(fmt, **options))
    cast = on_device.cast_for(job.x, job.q, job.layout)
    assert cast is not None
    on_device.run(cast, job, torch.empty(job.data.shape, dtype=dtype))
    assert launches
    return launches


@share(7)
@pytest.mark.parametrize(
    ("name", "target"),
    [(name, 90) for name in CASES] + [(name, target) for name in SMALL for target in (80, 100)],
)
def test_no_instruction_is_inexact(launches: Launches, name: str, target: int) -> None:
    for launch in launched(launches, name):
        text = ptx(launch, target)
        assert re.search(r"\s(?:st|atom|red)\.\S*global", text)
        assert not INEXACT.findall(text)
        is_first = "largest" in launch[0].__name__
        assert bool(FUSED.findall(text)) == (name in WITH_REMAINDERS and not is_first)


def test_rows_are_read_and_written_in_whole_vectors(launches: Launches) -> None:
    text = ptx(launched(launches, "mx")[0], 90)
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    assert not re.search(r"(?:ld|st)\.global\.b16", text)


@proof
@pytest.mark.parametrize("name", ["mx columns", "nvfp4 columns", "hif4 columns"])
def test_a_thread_has_all_of_an_upright_block(launches: Launches, name: str) -> None:
    text = ptx(launched(launches, name)[-1], 90)
    assert not re.search(r"bar\.sync|shfl|st\.shared", text)


def test_counting_waits_for_no_result(launches: Launches) -> None:
    reductions.count_by_kernel(torch.ones(5000, dtype=BF16))
    text = ptx(launches[0], 90)
    assert re.search(r"(?:red|atom)\.(?:global|relaxed)?.*add.*32", text)
    assert not INEXACT.findall(text) + FUSED.findall(text)


@proof
@pytest.mark.parametrize(
    ("dtypes", "target"),
    [((BF16, BF16), target) for target in TARGETS] + [((FP16, FP32), 90)],
    ids=str,
)
def test_comparing_is_exact_and_needs_no_barrier(
    launches: Launches, dtypes: tuple[torch.dtype, torch.dtype], target: int
) -> None:
    """One warp, whose sums go through its registers; all memory is the device's."""
    comparing.compare_by_kernel(*(torch.ones(5000, dtype=dtype) for dtype in dtypes), 45)
    text = ptx(launches[0], target)
    assert not INEXACT.findall(text) + FUSED.findall(text)
    assert text.count("bar.sync") < 5
    assert re.search(r"add\.f64|add\.rn\.f64", text)
    assert re.search(r"(?:red|atom)\.(?:global|relaxed)?.*add.*32", text)


@pytest.mark.parametrize("inner", [1, 5, 24, 1000])
@pytest.mark.parametrize("block", [1, 16, 20, 32, 4096])
def test_every_place_has_a_program(block: int, inner: int) -> None:
    memory = MemoryLayout(3, 130, inner, block)
    across = memory.across(4096)
    blocks = memory.outer * memory.groups
    if inner == 1:
        assert memory.programs(4096) * across >= blocks > (memory.programs(4096) - 1) * across
    else:
        assert memory.programs(4096) == blocks * -(-inner // across)
    assert across & (across - 1) == 0
