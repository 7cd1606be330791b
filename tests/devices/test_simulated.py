"""The simulated device has the manners of a GPU: each of them is seen here."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qgate
from qgate.arithmetic import divided
from qgate.devices import resolve
from tests.campaigns.forked import ran
from tests.devices import simulated
from tests.shares import proof
from tests.test_devices import run_alone

simulated.register()
SIM, OTHER = torch.device("sim:0"), torch.device("sim:1")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def apart(a: Tensor, b: Tensor) -> int:
    """Return how many values are not the same, once both are on the CPU."""
    return int((a.cpu() != b.cpu()).sum())


def test_there_are_two_chips_and_the_first_is_meant_by_the_kind() -> None:
    x = numbers(3).to("sim")
    assert (x.device, x.to(OTHER).device) == (SIM, OTHER)
    assert torch.arange(5, device="sim:1").device == OTHER
    assert torch.zeros_like(x).device == SIM
    assert torch.equal(x.to(OTHER).cpu(), x.cpu())


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
def test_a_mixture_of_devices_is_refused(device: str) -> None:
    x, other = numbers(3).to(SIM), numbers(3).to(device)
    for mixture in (lambda: x + other, lambda: torch.cat([other, x]), lambda: other * x):
        with pytest.raises(RuntimeError, match=r"two devices, .*sim:0"):
            mixture()


def test_a_number_in_a_tensor_of_the_cpu_and_an_index_of_it_are_taken() -> None:
    x = numbers(3)
    assert torch.equal((x.to(SIM) * torch.tensor(3.0)).cpu(), x * 3)
    assert torch.equal(x.to(SIM)[torch.tensor([2, 0])].cpu(), x[[2, 0]])


def test_the_host_has_no_way_to_its_memory() -> None:
    x = numbers(3).to(SIM)
    with pytest.raises(TypeError, match=r"can't convert sim:0 .* call \.cpu\(\)"):
        x.numpy()
    with pytest.raises(RuntimeError, match="no address on the host"):
        x.data_ptr()
    with pytest.raises(RuntimeError, match=r"pickled: call \.cpu\(\) first"):
        pickle.dumps(x)
    assert x.tolist() == x.cpu().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by", [127, 3.0, torch.tensor(127.0)], ids=["int", "float", "of the CPU"])
def test_a_division_by_a_number_multiplies_by_the_reciprocal(
    dtype: torch.dtype, by: float | Tensor
) -> None:
    x = numbers(10_000, dtype=dtype)
    sim_tensor = x.to(SIM)
    if dtype.itemsize > 2:  # a result of 16 bits is rounded from float32, where it is not seen
        assert apart(sim_tensor / by, x / by)
        assert apart(sim_tensor / by, x * (1 / x.new_tensor(float(by)))) == 0
        assert apart(sim_tensor.clone().div_(by), sim_tensor / by) == 0
    assert apart(divided(sim_tensor, by), divided(x, by)) == 0
    assert apart(sim_tensor / sim_tensor.new_tensor(float(by)), x / x.new_tensor(float(by))) == 0
    assert apart(sim_tensor / 8, x / 8) == 0


def test_divisions_name_the_line_of_qgate() -> None:
    """Only lines of the package count, and no power of two."""
    x = numbers(3).to(SIM)
    with simulated.divisions() as lines:
        divided(x, 127)
        x / 127
        qgate.metrics  # noqa: B018
    assert not lines
    planted = compile(
        "def scaled(x, by): return x / by", f"{simulated._PACKAGE}formats/planted.py", "exec"
    )
    names: dict[str, object] = {}
    exec(planted, names)
    with simulated.divisions() as lines:
        for by in (127, 0.3, 4, -0.5, math.inf, 0):
            names["scaled"](x, by)  # type: ignore[operator]
    assert dict(lines) == {"formats/planted.py:scaled": 2}


@pytest.mark.parametrize(
    "add",
    [
        lambda x: x.sum(),
        lambda x: x.mean(0),
        lambda x: x.view(100, -1).sum(-1),
        lambda x: x.view(100, -1).norm(dim=-1),
        lambda x: x.view(100, -1) @ x.view(-1, 100),
        lambda x: functional.linear(x.view(100, -1), x.view(100, -1), x[:100]),
        lambda x: x.view(100, -1).softmax(-1),
        lambda x: functional.conv1d(x.view(1, 100, -1), x[:300].view(1, 100, 3)),
    ],
    ids=["sum", "mean", "sum of rows", "norm", "matmul", "linear", "softmax", "conv1d"],
)
def test_sums_are_added_in_another_order(add: object) -> None:
    x = numbers(10_000) * numbers(10_000, seed=1).exp()
    sim_sums, cpu_sums = add(x.to(SIM)).cpu(), add(x)  # type: ignore[operator]
    assert apart(sim_sums, cpu_sums)
    torch.testing.assert_close(sim_sums, cpu_sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["exp", "log", "sigmoid", "tanh", "rsqrt", "erf", "sin"])
def test_single_results_of_functions_are_rounded_from_float64(name: str) -> None:
    x = numbers(200_000).abs()
    sim_results = getattr(x.to(SIM), name)()
    assert apart(sim_results, getattr(x.double(), name)().float()) == 0
    # Some of torch's own results are right in each bit.
    if name not in ("rsqrt",):
        assert apart(sim_results, getattr(x, name)())


def test_a_cast_to_float8_is_nan_beyond_464() -> None:
    x = torch.tensor([448.0, 464.0, 466.0, -466.0, math.inf, math.nan])
    sim_float8 = x.to(SIM).to(torch.float8_e4m3fn)
    assert sim_float8.float().cpu().nan_to_num(nan=-1).tolist() == [448.0, 448.0, -1, -1, -1, -1]
    filled = torch.zeros(6, dtype=torch.float8_e4m3fn, device=SIM).copy_(x.to(SIM))
    assert filled.float().cpu().isnan().tolist() == sim_float8.float().cpu().isnan().tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_16_bits_rounds_p_before_it_is_divided(
    dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = (numbers(2, 300, 32, dtype=dtype, seed=seed) for seed in range(3))
    sim_attention = functional.scaled_dot_product_attention(
        *(x.to(SIM) for x in (q, k, v)), is_causal=causal
    ).cpu()
    exact = functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=causal
    )
    plain = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert apart(sim_attention, plain)
    assert apart(sim_attention, exact.to(dtype))  # P is rounded on the way
    assert (
        float((sim_attention.double() - exact).norm() / exact.norm()) < 2 * torch.finfo(dtype).eps
    )
    # Three tiles of 128 keys, each of its own largest score, in the order of FlashAttention.
    with torch.inference_mode():
        repeated_attention = functional.scaled_dot_product_attention(
            *(x.to(SIM) for x in (q, k, v)), is_causal=causal
        )
    assert apart(repeated_attention, sim_attention) == 0


def test_the_backward_pass_of_attention_rounds_scaled_scores() -> None:
    """A gradient of q is the rounded P (dP - D) times the scale, in 16 bits, times K."""
    dtype = torch.float16
    q, k, v, grad = (numbers(1, 1, 64, 24, dtype=dtype, seed=seed) for seed in range(4))
    leaf = q.to(SIM).requires_grad_()
    output = functional.scaled_dot_product_attention(leaf, k.to(SIM), v.to(SIM))
    output.backward(grad.to(SIM))
    assert leaf.grad is not None
    factor = 24**-0.5  # no power of two, by which nothing would be rounded
    scores = (q.float() @ k.float().mT) * factor
    p = scores.softmax(-1)
    along = (grad.float() * output.detach().cpu().float()).sum(-1, keepdim=True)
    inner = p * (grad.float() @ v.float().mT - along) * factor
    rounded = inner.to(dtype).float() @ k.float()
    late = (inner / factor).to(dtype).float() @ k.float() * factor

    def distance(expected: Tensor) -> float:
        return float((leaf.grad.cpu().float() - expected.to(dtype).float()).norm())  # type: ignore[union-attr]

    assert distance(rounded) < 0.5 * distance(inner @ k.float())
    assert distance(rounded) < 0.5 * distance(late)


def test_what_the_host_waits_for_is_counted() -> None:
    x = numbers(4).to(SIM)
    with simulated.transfers() as none:
        (x * 2 + x.sum()).clamp(min=0).to(torch.float16)
        x[1:3], x.to(OTHER), torch.where(x > 0, x, -x)
    assert none.names == []
    waits = {
        "cpu": lambda: x.cpu(),
        "item": lambda: x.sum().item(),
        "float": lambda: float(x[0]),
        "bool": lambda: bool((x > 0).any()),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 0],
        "equal": lambda: torch.equal(x, x),
        "copied": lambda: torch.empty(4).copy_(x),
        "synchronize": lambda: torch.sim.synchronize(),  # type: ignore[attr-defined]
    }
    for name, wait in waits.items():
        with simulated.transfers() as some:
            wait()
        assert len(some.names) == 1, name


def test_random_numbers_of_the_device_take_no_generator_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="'sim' device type for generator but found 'cpu'"):
        torch.randn(3, generator=torch.Generator(), device=SIM)


def test_modules_and_copies_keep_device_and_values() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    weights = module[0].weight.detach().clone()
    sim_module = copy.deepcopy(module).to(SIM)
    assert {p.device for p in sim_module.parameters()} | {
        b.device for b in sim_module.buffers()
    } == {SIM}
    copied_module = copy.deepcopy(sim_module)
    with torch.no_grad():
        copied_module[0].weight.mul_(2)
    assert torch.equal(sim_module[0].weight.cpu(), weights)
    assert torch.equal(copied_module[0].weight.cpu(), weights * 2)
    assert isinstance(copied_module[0].weight, nn.Parameter)
    sim_module[0].weight.data = weights.to(SIM) * 3
    assert torch.equal(sim_module[0].weight.cpu(), weights * 3)
    assert torch.equal(sim_module.to("cpu")[0].weight, weights * 3)


def test_gradients_flow_through_hooks_and_to_leaves() -> None:
    x = numbers(5, 4)
    grads = []
    for device in (torch.device("cpu"), SIM):
        torch.manual_seed(0)
        module = nn.Linear(4, 3).to(device)
        seen: list[Tensor] = []
        module.register_full_backward_hook(lambda _m, _i, o, seen=seen: seen.append(o[0]))  # type: ignore[misc]
        leaf = x.clone().to(device).requires_grad_()
        module(leaf).square().sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.device == device == seen[0].device
        grads.append([t.cpu() for t in (leaf.grad, module.weight.grad, seen[0])])  # type: ignore[union-attr]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_inference_mode_gives_the_same_bits() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Conv1d(5, 5, 3))
    module, x = module.to(SIM), numbers(5, 16).to(SIM)
    with torch.inference_mode():
        inside = module(x)
    assert inside.is_inference()
    assert apart(inside, module(x).detach()) == 0


ALONE = """
import torch
from qgate.devices import resolve
before = torch.get_default_device(), resolve("auto"), torch.tensor(1.0) / 3
from tests.devices import simulated
device = simulated.plugged()
device.__enter__()
after = torch.get_default_device(), resolve("auto"), torch.tensor(1.0) / 3
print(before == after, torch.zeros(2).device, torch.randn(3, generator=torch.Generator()).device)
"""


@proof
def test_a_process_with_the_device_computes_without_it_as_before() -> None:
    assert run_alone(ALONE) == "True cpu cpu"


def test_a_fork_has_gradients_after_those_of_the_device(tmp_path: Path) -> None:
    """Tests of other folders run pytest in forks of a process that has the device."""

    def gradients() -> int:
        for device in ("cpu", "sim:1"):
            leaf = torch.ones(3).to(device).requires_grad_()
            leaf.square().sum().backward()
        return 0

    assert gradients() == 0
    assert ran(gradients, tmp_path).said == ""


def test_the_device_is_there_while_it_is_plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(resolve("sim:1")) == "sim:1"
    monkeypatch.setattr(simulated, "_plugged", [False])
    with pytest.raises(qgate.QgateError, match="sees only cpu"):
        resolve("sim:1")
