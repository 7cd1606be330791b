"""Faults of exporters, planted into right exports: what was changed, and words of the finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class ExportFault:
    """A fault: what the export is made by, the tensor, and words of its finding."""

    name: str
    scheme: Any
    subject: str
    words: str
    plant: Callable[..., object]


def _change(
    name: str, change: Callable[[Tensor], Tensor]
) -> Callable[[Tensors, dict[str, Any]], None]:
    def plant(tensors: Tensors, _configuration: dict[str, Any]) -> None:
        before = tensors[name]
        tensors[name] = change(before.clone()).to(before.dtype)

    return plant


def _swap_nibbles(x: Tensor) -> Tensor:
    return x >> 4 | x << 4


def _first_to(value: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x.view(torch.uint8).reshape(-1)[:3] = value
        return x

    return change


def _swap_groups(x: Tensor) -> Tensor:
    return x.reshape(-1, 2).flip(1).reshape(x.shape)


def _remove(name: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def plant(tensors: Tensors, _configuration: dict[str, Any]) -> None:
        del tensors[name]

    return plant


def _leave_unquantized(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    module = UP
    scale, weight = tensors.pop(f"{module}.weight_scale"), tensors[f"{module}.weight"]
    tensors[f"{module}.weight"] = (weight.float() * scale.float()).bfloat16()


def _quantize_the_head(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    weight = tensors["lm_head.weight"].float()
    scale = weight.abs().amax(1, keepdim=True) / 127
    tensors["lm_head.weight"] = (weight / scale).round().to(torch.int8)
    tensors["lm_head.weight_scale"] = scale


def _settings(configuration: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = configuration["quantization_config"]
    return settings


def _ignore(pattern: str) -> Callable[[Tensors, dict[str, Any]], None]:
    return lambda _tensors, configuration: _settings(configuration)["ignore"].append(pattern)


def _declare(**changed: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    def plant(_tensors: Tensors, configuration: dict[str, Any]) -> None:
        _settings(configuration)["config_groups"]["group_0"]["weights"].update(changed)

    return plant


def _never_written(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    tensors[f"{UP}.weight"] = torch.zeros_like(tensors[f"{UP}.weight"])
    tensors[f"{UP}.weight_scale"] = torch.ones_like(tensors[f"{UP}.weight_scale"])


def _subnormal_scales(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    scales = tensors[f"{DOWN}.weight_scale"].float() / 2**15
    tensors[f"{DOWN}.weight_scale"] = scales.to(torch.float8_e4m3fn)
    tensors[f"{DOWN}.weight_global_scale"] /= 2**15


def _some_doubled(x: Tensor) -> Tensor:
    x[::7] *= 2
    return x


def _zero_words(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    """Pack the codes of NaN scales: zeros, in offset binary."""
    tensors[f"{UP}.weight_packed"][3:6] = torch.tensor(-0x77777778, dtype=torch.int32)


def _halve_codes(x: Tensor) -> Tensor:
    """Leave out the lowest bit of each code."""
    return x & 0x66666666 | -0x80000000 & x


def _tie(_tensors: Tensors, configuration: dict[str, Any]) -> None:
    configuration["tie_word_embeddings"] = True


def _skip_experts(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    for number in range(40):
        tensors[f"model.layers.1.mlp.experts.{number}.up_proj.weight"] = torch.eye(8) + number


def _zero_point_outside(tensors: Tensors, _configuration: dict[str, Any]) -> None:
    zeros = torch.zeros_like(tensors[f"{UP}.weight_scale"])
    zeros[5] = 200
    tensors[f"{UP}.weight_zero_point"] = zeros


FAULTS = (
    # Scales
    ExportFault("NaN block scales", "mxfp4", DOWN, "3 of 256 scales are NaN or infinite",
                _change(f"{DOWN}.weight_scale", _first_to(255))),
    ExportFault("NaN E4M3 scales", "nvfp4", DOWN, "3 of 512 scales are NaN or infinite",
                _change(f"{DOWN}.weight_scale", _first_to(127))),
    ExportFault("scales flushed to zero", "nvfp4", DOWN, "3 of 512 scales are zero",
                _change(f"{DOWN}.weight_scale", _first_to(0))),
    ExportFault("scales twice too high", "int8", UP, "all scales are 2 times too high",
                _change(f"{UP}.weight_scale", lambda x: x * 2)),
    ExportFault("scales half too low", "mxfp4", UP, "all scales are 2 times too low",
                _change(f"{UP}.weight_scale", lambda x: x - 1)),
    ExportFault("scales inverted", "fp8-block", UP, "scales are stored inverted",
                _change(f"{UP}.weight_scale", lambda x: 1 / x)),
    ExportFault("scales rolled", "w4a16", UP, "every scale belongs to the group",
                _change(f"{UP}.weight_scale", lambda x: x.reshape(-1).roll(1).reshape(x.shape))),
    ExportFault("neighboring scales swapped", "nvfp4", UP, "scales of neighboring groups are swapped",
                _change(f"{UP}.weight_scale",
                        lambda x: _swap_groups(x.view(torch.uint8)).view(torch.float8_e4m3fn))),
    ExportFault("scales transposed", "w4a16", DOWN, "its 4 x 64 scales are transposed: a weight of 64 x 128",
                _change(f"{DOWN}.weight_scale", lambda x: x.T.contiguous())),
    ExportFault("scales transposed in NVFP4", "nvfp4", DOWN, "its 8 x 64 scales are transposed",
                _change(f"{DOWN}.weight_scale", lambda x: x.view(torch.uint8).T.contiguous().view(x.dtype))),
    ExportFault("scales by columns", "fp8-block", DOWN, "in the order of columns",
                _change(f"{DOWN}.weight_scale", lambda x: x.T.reshape(x.shape))),
    ExportFault("one scale for all", "int8", UP, "all 128 scales are equal",
                _change(f"{UP}.weight_scale", lambda x: x.mean().expand_as(x))),
    ExportFault("negative scales", "int8", UP, "of 128 scales are negative",
                _change(f"{UP}.weight_scale", torch.neg)),
    ExportFault("global scale inverted", "nvfp4", DOWN, "the scale of the whole tensor is stored inverted",
                _change(f"{DOWN}.weight_global_scale", lambda x: 1 / x)),
    ExportFault("halves of a fused weight", "nvfp4", "model.layers.1.mlp.gate_proj",
                "engines fuse gate_proj and up_proj",
                _change(f"{UP}.weight_global_scale", lambda x: x * 1.5)),
    ExportFault("subnormal scales", "nvfp4", DOWN, "of 512 scales are subnormal in E4M3", _subnormal_scales),
    ExportFault("some scales off by two", "fp8", UP, "19 of 128 scales are off by powers of two",
                _change(f"{UP}.weight_scale", _some_doubled)),
    ExportFault("a zero point out of range", "int8", UP, "1 zero points are no codes", _zero_point_outside),
    ExportFault("words of zeros", "w4a16", UP, "3 rows of 128 .* its values are zero, and the parent's are not", _zero_words),
    ExportFault("codes that never occur", "w4a16", UP, "8 of 16 codes never occur",
                _change(f"{UP}.weight_packed", _halve_codes)),
    # Codes
    ExportFault("nibbles swapped", "nvfp4", UP, "the order of nibbles",
                _change(f"{UP}.weight_packed", _swap_nibbles)),
    ExportFault("nibbles of MXFP4 swapped", "mxfp4", DOWN, "the order of nibbles",
                _change(f"{DOWN}.weight_packed", _swap_nibbles)),
    ExportFault("codes cut", "int8", UP, "codes keep the upper 6 of their 8 bits",
                _change(f"{UP}.weight", lambda x: x // 4 * 4)),
    ExportFault("rows moved", "int8", UP, "rows stand in another order",
                lambda tensors, _: tensors.update({
                    f"{UP}.{part}": tensors[f"{UP}.{part}"].roll(1, 0)
                    for part in ("weight", "weight_scale")})),
    ExportFault("never written", "int8", UP, "all values are zero|scales are equal", _never_written),
    ExportFault("zero points off by one", "w4a16-zero-points", UP, "zero points are 1 too high",
                _change(f"{UP}.weight_zero_point", lambda x: x + 0x11111111)),
    # What is there
    ExportFault("a layer is not quantized", "int8", UP, "it is not quantized, and the recipe", _leave_unquantized),
    ExportFault("the head is quantized", "int8", "lm_head", "the recipe ignores it", _quantize_the_head),
    ExportFault("an idle pattern", "int8", "re:.*visual.*", "matches no module", _ignore("re:.*visual.*")),
    ExportFault("another group size", "w4a16", UP, "int4 per 32, and the recipe declares int4 per 64",
                _declare(group_size=64)),
    ExportFault("another strategy", "fp8", UP, "the recipe declares fp8_e4m3 per tensor",
                _declare(strategy="tensor")),
    ExportFault("another width", "w8a16", UP, "int8 per row, and the recipe declares int4",
                _declare(num_bits=4)),
    ExportFault("a norm is lost", "int8", "model.norm.weight", "it is in the parent alone",
                _remove("model.norm.weight")),
    ExportFault("a tensor too many", "int8", "model.extra.weight", "it is in the child alone",
                lambda tensors, _: tensors.update({"model.extra.weight": torch.ones(4)})),
    ExportFault("a norm of zeros", "int8", "model.norm.weight", "all values are zero",
                _change("model.norm.weight", torch.zeros_like)),
    ExportFault("a constant norm", "int8", "model.norm.weight", "all values are 0.5, the parent's are not",
                _change("model.norm.weight", lambda x: x * 0 + 0.5)),
    ExportFault("a constant matrix", "int8", "model.embed_tokens", "all values are 3: nothing wrote them",
                _change("model.embed_tokens.weight", lambda x: x * 0 + 3)),
    ExportFault("memory that nothing wrote", "int8", "model.embed_tokens", "memory that nothing wrote",
                _change("model.embed_tokens.weight", lambda x: x.index_fill(0, torch.tensor([3]), 3e38))),
    ExportFault("a head that is not the embedding", "int8", "lm_head", "it is tied to model.embed_tokens", _tie),
    ExportFault("experts that were skipped", "int8", r"model.layers.*.mlp.experts.*.up_proj",
                "40 weights are not quantized, and the recipe declares", _skip_experts),
    ExportFault("FP8 codes without scales", "fp8", UP,
                r"its weight_scale is missing: weight \(F8_E4M3\) alone cannot be decoded",
                _remove(f"{UP}.weight_scale")),
    ExportFault("INT8 codes without scales", "int8", UP, r"its weight_scale is missing: weight \(I8\) alone",
                _remove(f"{UP}.weight_scale")),
    ExportFault("words without scales", "w4a16", UP, "its weight_scale is missing",
                _remove(f"{UP}.weight_scale")),
    ExportFault("words without a shape", "w4a16", UP, "its weight_shape is missing",
                _remove(f"{UP}.weight_shape")),
    ExportFault("no scale of the whole tensor", "nvfp4", UP, "its weight_global_scale is missing",
                _remove(f"{UP}.weight_global_scale")),
    ExportFault("scales without codes", "mxfp4", UP, "its weight_packed is missing",
                _remove(f"{UP}.weight_packed")),
    ExportFault("scales 1.1 times too high", "w4a16", UP, "all scales are 1.1 times too high",
                _change(f"{UP}.weight_scale", lambda x: x * 1.1)),
    ExportFault("a norm changed", "int8", "model.norm.weight", "not the parent's",
                _change("model.norm.weight", lambda x: x * 1.05)),
    ExportFault("NaN in the embedding", "int8", "model.embed_tokens", "values are NaN or infinite",
                _change("model.embed_tokens.weight", lambda x: x.index_fill(0, torch.tensor([3]), torch.nan))),
    ExportFault("scales of another shape", "int8", UP, "do not fit a weight",
                _change(f"{UP}.weight_scale", lambda x: x[:50])),
)  # fmt: skip


def all_of(
    ending: str, change: Callable[[Tensor], Tensor]
) -> Callable[[Tensors, dict[str, Any]], None]:
    """Return a fault of all quantized weights."""

    def plant(tensors: Tensors, _configuration: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith(f"_proj.{ending}"):
                tensors[name] = change(tensors[name].clone()).to(tensors[name].dtype)

    return plant


def _swap_in_words(x: Tensor) -> Tensor:
    return _swap_nibbles(x.view(torch.uint8)).view(torch.int32)


NAN = float("nan")
FAULTS_OF_ALL = (
    ExportFault("nibbles of NVFP4", "nvfp4", "", "the order of nibbles",
                all_of("weight_packed", _swap_nibbles)),
    ExportFault("nibbles of MXFP4", "mxfp4", "", "the order of nibbles",
                all_of("weight_packed", _swap_nibbles)),
    ExportFault("nibbles of words", "w4a16", "", "the order of nibbles",
                all_of("weight_packed", _swap_in_words)),
    ExportFault("global scales inverted", "nvfp4", "",
                "the scale of the whole tensor is stored inverted",
                all_of("weight_global_scale", lambda x: 1 / x)),
    ExportFault("scales inverted", "int8", "", "scales are stored inverted",
                all_of("weight_scale", lambda x: 1 / x)),
    ExportFault("zero codes", "fp8", "", "all values are zero", all_of("weight", lambda x: x.float() * 0)),
    ExportFault("zero words", "w4a16", "", "all codes are equal", all_of("weight_packed", torch.zeros_like)),
    ExportFault("zero words of 8 bits", "w8a16", "", "all codes are equal",
                all_of("weight_packed", torch.zeros_like)),
    ExportFault("zero scales", "nvfp4", "", "all values are zero",
                all_of("weight_scale", lambda x: x.float() * 0)),
    ExportFault("NaN scales", "fp8-block", "", r"16 of 16 scales are NaN|[48] of [48] scales are NaN",
                all_of("weight_scale", lambda x: x * NAN)),
    ExportFault("NaN codes", "fp8", "", "4,096 of 4,096 values are NaN",
                all_of("weight", lambda x: x.float() * NAN)),
    ExportFault("negative scales", "int8", "", "scales are negative", all_of("weight_scale", torch.neg)),
    ExportFault("scales 1000 times too high", "w4a16", "", "all scales are [0-9.e+]+ times too high",
                all_of("weight_scale", lambda x: x * 1000)),
)  # fmt: skip
"""Faults of all weights, as those of exporters are: the cause, not "is not the parent"."""
