"""Reproductions of failing sites: their tensors in a file, and a script that compares them.

A script needs qgate and the file beside it, and neither the model nor the suites.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from qgate.formats import Quantizer
from qgate.gate.segments.traced_code import traced_code
from qgate.kernel_checks.explained import CodeCall
from qgate.storage.files import naming, neighbor
from qgate.storage.out_folders import REPRODUCTION_FILES
from qgate.storage.removing import refuse_links
from qgate.text import one_line

MOST_BYTES = 1 << 24
"""Bytes of tensors that a reproduction may have; a larger one is not written."""
INPUTS, SCRIPT = REPRODUCTION_FILES

_HEAD = '''"""{title}."""

from pathlib import Path

{imports}
from safetensors.torch import load_file

tensors = load_file(Path(__file__).with_name("{file}"))
'''
_CAST = """quantizer = Quantizer({quantizer})
expected = torch.from_numpy(quantize(tensors["source"].double().numpy(), quantizer))
actual = quantizer(tensors["source"])
"""
_PRODUCT = """x, weight, bias = (tensors.get(name) for name in ("input", "weight", "bias"))
bias64 = None if bias is None else bias.double()
expected = torch.nn.functional.linear(x.double(), weight.double(), bias64)
actual = torch.nn.functional.linear(x, weight, bias)
"""
_TENSORS = """expected = tensors["expected"]
actual = tensors["actual"]
"""
_CHECKED = """

def {name}(*given):
    # As the run gave it: call the code here to try a change.
    if not all(map(torch.equal, given, arguments)):
        raise ValueError("the run has no result of other arguments")
    return tensors["actual"]


try:
    check_kernel({name}, *arguments, {declared}, relations=[])
    print("the result is what correct code may give")
except CheckFailure as failure:
    print(failure)
"""
_KERNEL = """quantizers = {{{quantizers}}}
arguments = [tensors[name] for name in ("input", "weight", "bias") if name in tensors]
"""
_CODE = """aten = torch.ops.aten
names = {names}
arguments = [tensors[f"argument {{number}}"] for number in range(len(names))]


def reference({parameters}):
    {lines}
"""
_NAMES = """    for number, name in enumerate(names):
        print(f"  argument {number} is {name}")
"""
_TAIL = """expected = expected.double()
room = {noise} * float(expected.square().mean().sqrt())
for name, values in (("the run", tensors["actual"]), ("computed now", actual)):
    wrong = ~torch.isclose(values.double(), expected, rtol=1e-6, atol=room)
    print(f"{{name}}: {{int(wrong.sum())}} of {{wrong.numel()}} values differ from the expected")
"""
_CHECKING = (
    "import torch\nfrom qgate import Quantizer\n"
    "from qgate.testing import CheckFailure, check_kernel\nfrom torch.nn.functional import linear"
)
_CODING = "import torch\nfrom qgate.testing import CheckFailure, check_kernel"
_QUANTIZING = (
    "import torch\nfrom qgate import Quantizer\nfrom qgate.formats.definition import quantize"
)


@dataclass(frozen=True)
class Reproduction:
    """Tensors of one failing site, and the body of a script that compares them.

    noise   share of the RMS of the expected values that float arithmetic may be off; None where
            the body compares by itself
    """

    site: str
    mode: str
    tensors: Mapping[str, Tensor]
    imports: str
    body: str
    noise: float | None

    def folder_name(self) -> str:
        """Return a name for files, with the site first."""
        return re.sub(r"[^\w.-]+", ".", f"{self.site}.{self.mode}").strip(".")

    def write(self, folder: Path, title: str) -> Path | None:
        """Write tensors and script into a new folder, or replace it; None if they are too large."""
        tensors = {
            name: tensor.detach().cpu().contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > MOST_BYTES:
            return None
        target = folder / self.folder_name()
        refuse_links(folder.parent, f"{folder.name}/{target.name}", doing="written")
        folder.mkdir(parents=True, exist_ok=True)
        safe = one_line(title).replace("\\", "/").replace('"', "'")
        head = _HEAD.format(title=safe, imports=self.imports, file=INPUTS)
        with naming(target), neighbor(target, folder=True) as part:
            (part / INPUTS).write_bytes(save(tensors))
            tail = "" if self.noise is None else _TAIL.format(noise=self.noise)
            text = f"{head}{self.body}{tail}"
            (part / SCRIPT).write_text(text, encoding="utf-8", newline="\n")
            target.mkdir(exist_ok=True)
            for name in REPRODUCTION_FILES:
                (part / name).replace(target / name)
        return target


def of_cast(
    site: str, mode: str, actual: Tensor, source: Tensor, quantizer: Quantizer
) -> Reproduction | None:
    """Return a tensor that a quantizer made, with its source; None for scales of other tensors."""
    words = _quantizer_words(quantizer)
    if words is None:
        return None
    body = _CAST.format(quantizer=words)
    tensors = {"source": source, "actual": actual}
    return Reproduction(site, mode, tensors, _QUANTIZING, body, 1e-6)


def _quantizer_words(quantizer: Quantizer) -> str | None:
    """Write the arguments that make a quantizer; None where a tensor is among them."""
    if any(isinstance(value, Tensor) for value in quantizer.options.values()):
        return None
    options = (f"{name}={value!r}" for name, value in quantizer.options.items())
    return ", ".join([repr(quantizer.format.name), *options])


def of_kernel(
    site: str,
    mode: str,
    actual: Tensor,
    factors: tuple[Tensor, Tensor, Tensor | None],
    quantizers: Mapping[str, Quantizer],
) -> Reproduction | None:
    """Return what a kernel made of an unquantized input and weight, to be checked by itself."""
    names = ("input", "weight", "bias")
    tensors = {name: value for name, value in zip(names, factors, strict=True) if value is not None}
    listed = []
    for port, quantizer in quantizers.items():
        words = _quantizer_words(quantizer)
        if words is None or port not in tensors:
            return None
        listed.append(f"{names.index(port)}: Quantizer({words})")
    body = _KERNEL.format(quantizers=", ".join(listed))
    body += _CHECKED.format(name="kernel", declared="like=linear, inputs=quantizers")
    return Reproduction(site, mode, {**tensors, "actual": actual}, _CHECKING, body, None)


def of_product(
    site: str, mode: str, actual: Tensor, factors: tuple[Tensor, Tensor, Tensor | None]
) -> Reproduction:
    """Return the output of a linear layer, with its input, its weight and its bias."""
    x, weight, bias = factors
    tensors = {"input": x, "weight": weight, "actual": actual}
    if bias is not None:
        tensors["bias"] = bias
    return Reproduction(site, mode, tensors, "import torch", _PRODUCT, 1e-4)


def of_code(site: str, mode: str, call: CodeCall) -> Reproduction:
    """Return what code between sites made of its arguments, beside the reference's code.

    Code that cannot be written as operators leaves the tensor that it should have given.
    """
    actual = call.code(*call.arguments)
    arguments = {f"argument {n}": value for n, value in enumerate(call.arguments)}
    code = traced_code(call.like, call.arguments, call.names)
    if code is None:
        expected = call.like(*call.arguments)
        tensors = {**arguments, "actual": actual, "expected": expected}
        return Reproduction(site, mode, tensors, "import torch", _TENSORS, 1e-4)
    body = _CODE.format(
        names=list(call.names),
        parameters=", ".join(code.parameters),
        lines="\n    ".join(code.lines),
    )
    coarse = "" if call.arithmetic == "float32" else f", arithmetic={call.arithmetic!r}"
    body += _CHECKED.format(name="code", declared=f"like=reference{coarse}") + _NAMES
    tensors = {**arguments, **code.constants, "actual": actual}
    return Reproduction(site, mode, tensors, _CODING, body, None)


def of_tensors(
    site: str, mode: str, actual: Tensor, expected: Tensor, source: Tensor | None
) -> Reproduction:
    """Return a tensor beside the one of the reference, with the input of its module."""
    tensors = {"actual": actual, "expected": expected}
    if source is not None:
        tensors["input"] = source
    return Reproduction(site, mode, tensors, "import torch", _TENSORS, 1e-4)
