"""Format modes on convolutions: what shares a scale, and that the model computes the plan."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate import Mode, Model, QgateError, Rule, modes
from qgate.expected.modules import exact_product
from tests.models.networks import network
from tests.shares import share

MODES = ("int8", "fp8_e4m3", "mxfp8", "mxfp4", "nvfp4", "hif8", "w8", "w4")


def applied(name: str, model: Model) -> modes.Quantized:
    return modes.apply(modes.modes_of(model, name)[0], model)


@share(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["convnet", "mixed", "upsampling"])
def test_the_model_computes_what_the_plan_says(name: str, mode: str) -> None:
    model = network(name)
    quantized = applied(mode, model)
    quantizers = quantized.plan.quantizers()
    flowing: dict[str, Tensor] = {}
    for module_name, module in quantized.model.module.named_modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose2d):
            module.register_forward_hook(
                lambda _m, args, result, key=module_name: flowing.update(
                    {f"{key}:input": args[0], f"{key}:output": result}
                )
            )
    with torch.no_grad():
        quantized.model(model.inputs[0])
    outputs = [site for site in flowing if site.endswith(":output")]
    assert outputs
    for site in outputs:
        key = site.rpartition(":")[0]
        source = model.module.get_submodule(key)
        weight = source.weight.detach()
        if f"{key}:weight" in quantizers:
            weight = quantizers[f"{key}:weight"](weight)
        expected = exact_product(source, flowing[f"{key}:input"], weight)
        assert torch.allclose(flowing[site].double(), expected, rtol=1e-4, atol=1e-5), key


def test_scales_are_shared_as_a_kernel_can_factor_them_out() -> None:
    plan = applied("int8", network("upsampling")).plan.quantizers()
    assert (plan["down:weight"].granularity, plan["down:weight"].axis) == ("channel", 0)
    assert (plan["up:weight"].granularity, plan["up:weight"].axis) == ("channel", 1)
    assert (plan["down:input"].granularity, plan["down:input"].axis) == ("channel", 0)
    blocks = applied("mxfp4", network("upsampling")).plan.quantizers()
    assert [blocks[f"{key}:weight"].axis for key in ("down", "up", "wide", "out")] == [1, 0, 1, 0]
    assert [blocks[f"{key}:input"].axis for key in ("down", "wide", "out")] == [-2, -4, -3]


def test_int8_of_a_convolution_is_torch_per_channel_quantization() -> None:
    model = network("convnet")
    quantized = applied("int8", model).model.module.get_submodule("conv1").weight
    weight = model.module.get_submodule("conv1").weight.detach()
    scale = weight.abs().amax((1, 2, 3)) / 127
    zeros = torch.zeros(16, dtype=torch.int32)
    expected = torch.fake_quantize_per_channel_affine(weight, scale, zeros, 0, -127, 127)
    assert torch.allclose(quantized, expected, rtol=1e-6, atol=0)


def test_a_sample_has_its_own_scale_before_a_convolution() -> None:
    quantizer = applied("int8", network("convnet")).plan.quantizers()["conv1:input"]
    small, large = torch.randn(1, 3, 8, 8), 100 * torch.randn(1, 3, 8, 8)
    together = quantizer(torch.cat([small, large]))
    assert torch.equal(together[:1], quantizer(small))


def test_depthwise_convolutions_stay_as_they_are_and_are_named() -> None:
    plan = applied("mxfp8", network("mixed")).plan
    assert not any("depthwise" in site for site in plan.quantizers())
    assert "blocks.1.expand:weight" in plan.quantizers()
    rule = Rule(r"depthwise:weight$", "int8", of="conv", per="row")
    own = modes.make_plan(Mode("mine", "a test", rules=(rule,)), network("mixed"))
    assert len(own.quantizers()) == 3


def test_a_model_without_products_says_what_was_looked_for() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model = Model(Norm(), [torch.randn(2, 4)], "norm")
    with pytest.raises(QgateError, match=r"quantizes nothing of norm: it has no linear layer"):
        applied("int8", model)


class Standardized(nn.Conv2d):
    """A convolution that changes its weight before it multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight, self.bias)


def test_a_convolution_with_code_of_its_own_is_no_product() -> None:
    model = Model(
        nn.Sequential(Standardized(3, 4, 1), nn.Conv2d(4, 2, 1)), [torch.ones(1, 3, 4, 4)]
    )
    plan = applied("int8", model).plan
    assert list(plan.quantizers()) == ["1:input", "1:weight"]
    assert exact_product(model.module[0], torch.ones(1, 3, 4, 4), torch.ones(4, 3, 1, 1)) is None


def test_gradients_reach_the_weights_of_quantized_convolutions() -> None:
    model = network("convnet")
    quantized = applied("mxfp8", model)
    quantized.model(model.inputs[0]).square().mean().backward()
    gradient = model.module.get_submodule("conv1").weight.grad
    assert gradient is not None
    assert bool(gradient.abs().amax() > 0)


@pytest.mark.parametrize("bad", ["convs", "products", ""])
def test_an_unknown_kind_of_a_rule_is_named(bad: str) -> None:
    with pytest.raises(QgateError, match="kind of site"):
        modes.make_plan(
            Mode("mine", "a test", rules=(Rule("", "int8", of=bad),)), network("convnet")
        )


def test_a_convolution_quantizer_matches_the_format_definition() -> None:
    quantizer = applied("mxfp4", network("convnet")).plan.quantizers()["conv2:input"]
    x = torch.randn(2, 16, 5, 5)
    channels = x.permute(0, 2, 3, 1).contiguous()
    expected = qgate.quantize(channels, "mxfp4").permute(0, 3, 1, 2)
    assert torch.equal(quantizer(x), expected)
