"""Each public function on each dtype in each layout: the value of the plain copy, or one sentence."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import qgate
from qgate import formats
from qgate.dumps import DumpWriter
from qgate.stats import all_bf16, block_counts, counts, errors, massive_beyond
from qgate.tensor_inputs import valueless
from qgate.testing import CheckFailure, check, check_kernel
from tests.dumps.making import record
from tests.shares import proof, share
from tests.warm import run_python

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL = (
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)  # fmt: skip
WHOLE = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool,
)  # fmt: skip
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *SMALL, *WHOLE, *COMPLEX)
Function = Callable[[Tensor], Any]
VALUES = torch.linspace(-4, 4, 64, dtype=torch.float64).reshape(2, 32)


def dense(dtype: torch.dtype, values: Tensor = VALUES) -> Tensor:
    """Return distinct values of a dtype, positive ones where it has no others."""
    if values.min() < 0 and dtype in (*WHOLE, torch.float8_e8m0fnu):
        values = values.abs() + 0.25
    plain: Tensor = (values > 2) if dtype == torch.bool else values.to(dtype)
    return plain


def fake(x: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(x)


# Each makes a tensor of the same values in another layout.
LAYOUTS: dict[str, Function] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.T.contiguous().T,
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "inference": lambda x: torch.inference_mode()(x.clone)(),
    "negative bit": lambda x: torch._neg_view(x.neg()),
    "imaginary part": lambda x: torch.complex(x, x.neg()).conj().imag,
    "conjugate": lambda x: x.conj().resolve_conj().conj() if x.is_complex() else refuse(),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "mkldnn": lambda x: x.to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    "masked": lambda x: torch.masked.masked_tensor(x, torch.ones(x.shape, dtype=torch.bool)),
    "fake": fake,
}


def refuse() -> Tensor:
    raise NotImplementedError


def checked(actual: Tensor, source: Tensor) -> object:
    """Return the report of a check, or the first line of its verdict."""
    try:
        return check(actual, source, format="fp8_e4m3").held
    except CheckFailure as failure:
        return str(failure).partition("\n")[0]


def dumped(x: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Return dtype, shape and digest of a tensor in a dump."""
    with tempfile.TemporaryDirectory() as folder, DumpWriter(Path(folder) / "dump") as writer:
        stored = writer.add(record(), x)
    assert stored.tensor is not None
    return stored.dtype, stored.shape, stored.tensor.digest


def quantized(name: str) -> Function:
    return lambda x: qgate.quantize(x, name)


def encoded(name: str) -> Function:
    return lambda x: qgate.encode(x, name).codes


REFERENCE = torch.linspace(-3, 4, 64).reshape(2, 32)
FUNCTIONS: dict[str, Function] = {
    **{f"quantize {n}": quantized(n) for n in ("fp8_e4m3", "int8", "mxfp8")},
    **{f"encode {n}": encoded(n) for n in ("int8", "mxfp4")},
    "report": lambda x: str(formats.report(x, "mxfp8")),
    "sweep": lambda x: qgate.sweep(x, "fp8_e4m3", 3).record,
    "block sweep": lambda x: qgate.sweep(x, "fp8_e4m3", granularity="block").record,
    "counts": lambda x: counts(x).weighted(),
    "counts via": lambda x: counts(x, via="bf16").weighted(),
    "block counts": lambda x: block_counts(x).total().weighted(),
    "block counts via": lambda x: block_counts(x, via="fp16").total().weighted(),
    "errors, actual": lambda x: errors(x, REFERENCE),
    "errors, reference": lambda x: errors(REFERENCE, x),
    "check, actual": lambda x: checked(x, REFERENCE),
    "check, source": lambda x: checked(REFERENCE, x),
    "massive": massive_beyond,
    "all bf16": all_bf16,
    "dump": dumped,
}
# What no layout changes: dtypes that a function takes.
TAKES = {
    "quantize": FLOATS, "encode": FLOATS, "report": FLOATS, "errors": FLOATS,
    "sweep": (*FLOATS, *SMALL[:2]), "block sweep": (*FLOATS, *SMALL[:2]),
    "counts": (*FLOATS, *SMALL[:2]), "counts via": (*FLOATS, *SMALL[:2]),
    "block counts": (torch.float16, torch.bfloat16), "block counts via": (*FLOATS, *SMALL[:2]),
    "check": (*FLOATS, *SMALL), "massive": FLOATS, "all bf16": DTYPES, "dump": DTYPES,
}  # fmt: skip
PLAIN = ("dense", "transposed", "every second", "parameter", "inference", "negative bit",
         "imaginary part")  # fmt: skip


def outcome(function: Function, x: Tensor) -> tuple[str, object]:
    """Return a value as bytes that can be compared, or the sentence of a refusal."""
    try:
        value = function(x)
    except (TypeError, ValueError, qgate.QgateError) as error:
        return "refused", error
    if not isinstance(value, Tensor):
        return "value", pickle.dumps(value)
    if valueless(value):
        return "value", (value.shape, value.dtype)
    return "value", value.detach().contiguous().view(torch.uint8).tolist()


def is_sentence(error: Exception) -> bool:
    """Tell if an error is one line of our own that ends with what to do."""
    text = str(error)
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    is_ours = traceback is not None and "qgate" in traceback.tb_frame.f_globals["__name__"]
    return is_ours and "\n" not in text and text.endswith(".") and text.lower().count("torch.") < 3


def tensors(values: Tensor = VALUES) -> Iterator[tuple[str, torch.dtype, Tensor]]:
    """Yield every layout that torch can make of every dtype."""
    for dtype in DTYPES:
        for layout, make in LAYOUTS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    x = make(dense(dtype, values))
                except (RuntimeError, NotImplementedError, TypeError, ValueError):
                    continue  # torch itself has no such tensor
            yield layout, dtype, x


def cells() -> Iterator[tuple[str, str, torch.dtype, Tensor]]:
    """Yield every layout that torch can make of every dtype, for every function."""
    for layout, dtype, x in tensors():
        for function in FUNCTIONS:
            yield function, layout, dtype, x


@proof
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_gives_the_value_of_its_plain_copy_or_a_sentence() -> None:
    plain_outcomes: dict[tuple[str, torch.dtype], tuple[str, object]] = {}
    wrong, case_count, values = [], 0, 0
    for name, layout, dtype, x in cells():
        function, head = FUNCTIONS[name], name.split(",")[0]
        key = name, dtype
        if key not in plain_outcomes:
            plain_outcomes[key] = outcome(function, dense(dtype).clone())
        kind, result = outcome(function, x)
        case_count, values = case_count + 1, values + (kind == "value")
        takes = TAKES.get(head, TAKES.get(head.split(" ")[0], ()))
        if layout in PLAIN and dtype in takes:
            right = kind == "value" and result == plain_outcomes[key][1]
        elif kind == "value":
            # A tracer's tensor has a shape and a dtype; anything else has no value.
            is_conjugate = layout == "conjugate" and dtype in takes
            right = is_conjugate and result == plain_outcomes[key][1]
            right |= head.startswith("quantize") and layout in ("meta", "fake") and dtype in FLOATS
        else:
            right = isinstance(result, Exception) and is_sentence(result)
        if not right:
            wrong.append(f"{name} of {dtype} {layout}: {kind} {str(result)[:90]!r}")
    assert case_count >= 2000, case_count
    assert values >= 250, values
    assert not wrong, f"{len(wrong)} of {case_count}:\n" + "\n".join(wrong[:40])


# The dtypes that an option takes as a tensor, one number for each element.
OPTIONS = {"scale": (*FLOATS, *SMALL), "zero_point": (*FLOATS, *WHOLE[:-1])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_that_of_its_plain_copy_or_a_sentence(option: str) -> None:
    whole = 2 ** VALUES.abs().floor()
    x, scales = torch.linspace(-999, 999, 64).reshape(2, 32), torch.full((2, 32), 2.5)

    def use(given: Tensor) -> Tensor:
        options = {"scale": scales} | {option: given}
        return qgate.quantize(x, "int8", granularity="block", block=1, **options)  # type: ignore[arg-type]

    plain_outcome = outcome(use, whole.float())
    assert plain_outcome[0] == "value"
    assert plain_outcome != outcome(use, whole.float() + 1)
    wrong, values = [], 0
    for layout, dtype, given in tensors(whole):
        kind, result = outcome(use, given)
        values += kind == "value"
        if layout in PLAIN and dtype in OPTIONS[option]:
            right = (kind, result) == plain_outcome
        else:
            right = isinstance(result, Exception) and is_sentence(result)
        if not right:
            wrong.append(f"{dtype} {layout}: {kind} {str(result)[:90]!r}")
    assert values >= 50, values
    assert not wrong, "\n".join(wrong)


def test_a_torch_without_a_dtype_is_enough() -> None:
    """As torch 2.6, which has no float8_e8m0fnu."""
    code = (
        "import torch\n"
        "del torch.float8_e8m0fnu\n"
        "import qgate.testing\n"
        "print(qgate.quantize(torch.ones(2), 'int8', scale=torch.tensor(0.5)).tolist())\n"
    )
    done = run_python("-c", code, cwd=Path.cwd(), environment=os.environ)
    assert done.stdout.strip() == "[1.0, 1.0]", done.stderr


@share(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_of_torch_end_in_one_sentence(name: str) -> None:
    def one(x: Tensor) -> Tensor:
        FUNCTIONS[name](x)
        return x

    with pytest.raises(
        (TypeError, ValueError, qgate.QgateError), match=r"inside torch\.vmap"
    ) as refusal:
        torch.vmap(one)(VALUES.float())
    assert is_sentence(refusal.value)
    if name == "dump":
        return  # a writer opens files, which torch.compile says itself
    torch._dynamo.reset()
    compiled = torch.compile(one, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph, or call"):
        compiled(VALUES.float())
    torch._dynamo.reset()


def test_errors_are_the_same_in_compiled_code() -> None:
    """Functions that they call are left as they are: torch has fewer operators than NumPy."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def compared(x: Tensor) -> Any:
        return errors(2 * x, x)

    x = torch.randn(64, 32)
    assert compared(x).metric("relative_mse") == errors(2 * x, x).metric("relative_mse")
    torch._dynamo.reset()


DIFFERENTIATED = {
    "saturated": qgate.Quantizer("fp8_e4m3", scale=1.0),
    "blocks": qgate.Quantizer("mxfp8"),
    "rotated": qgate.Quantizer("int8", rotation=[1, -1] * 8),
}


@share(3)
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_tangents_are_those_of_the_gradient(name: str) -> None:
    quantizer = DIFFERENTIATED[name]
    x = torch.linspace(-600, 600, 64).reshape(2, 32)
    direction = torch.randn(2, 2, 32, generator=torch.Generator().manual_seed(0))
    values, tangents = torch.func.jvp(quantizer, (x,), (direction[0],))
    assert torch.equal(values, quantizer(x))
    _, gradient = torch.func.vjp(quantizer, x)
    along = (tangents * direction[1]).sum()
    assert along != 0
    assert torch.allclose(along, (direction[0] * gradient(direction[1])[0]).sum(), rtol=1e-4)
    if name != "rotated":
        rows = torch.func.jacfwd(quantizer)(x[0])
        assert torch.equal(rows, torch.func.jacrev(quantizer)(x[0]))


def test_gradients_in_a_batch_are_refused() -> None:
    with pytest.raises(qgate.QgateError, match=r"cannot be batched by torch\.vmap"):
        torch.func.vmap(torch.func.grad(lambda y: qgate.quantize(y, "int8").sum()))(
            torch.ones(2, 32)
        )


def of_torchao() -> Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(32, 2)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight


def distributed() -> Tensor:
    from torch import distributed as dist
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(REFERENCE, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "way_out"), [(of_torchao, ".dequantize()"), (distributed, ".full_tensor()")]
)
def test_a_subclass_is_refused_with_its_way_out(make: Callable[[], Tensor], way_out: str) -> None:
    x = make()
    wrong = {name: outcome(function, x) for name, function in FUNCTIONS.items()}
    wrong |= {"kernel": outcome(lambda x: check_kernel(torch.neg, x, like=torch.neg), x)}
    right = f"a tensor of type {type(x).__name__}; call {way_out} first"
    assert {name: answer for name, answer in wrong.items() if right not in str(answer[1])} == {}


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "mxfp8_e4m3", "bf16"])
def test_errors_of_numpy_that_a_program_asks_for_are_not_raised(format: str) -> None:
    x = torch.linspace(-4, 4, 256).reshape(8, 32)
    x[0, 0], x[1, 1] = 1e-41, 3e38
    with np.errstate(all="raise"):
        assert qgate.sweep(x, format, 3).record
        assert errors(qgate.quantize(x, format), x).metrics()
        assert check(qgate.quantize(x[2:], format), x[2:], format=format).held
