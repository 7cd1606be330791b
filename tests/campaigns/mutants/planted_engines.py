"""Defects of one of two engines, and of how they are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qgate.engines import compute
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Sow, of_engines
from tests.engines.gated import collect, network, older_weights, other_module


def _served(plant: Callable[[nn.Module], None]) -> Sow:
    """Give the gates another engine than the one that was accepted."""

    def sow(bed: Bed) -> None:
        wrong = network()
        plant(wrong)
        folder = bed.healthy.folder / f"engine-{bed.mode}-{plant.__qualname__}-{id(plant)}"
        bed.session.subject.actual = collect(folder, wrong)

    return sow


def _logits(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Change what the head returns."""

    def plant(module: nn.Module) -> None:
        head = module.get_submodule("lm_head")
        plain = head.forward
        head.forward = lambda x: change(plain(x).clone())  # type: ignore[method-assign]

    return plant


def _one_token(logits: Tensor) -> Tensor:
    logits[1, 30] *= 1.5
    return logits


def _one_sample(logits: Tensor) -> Tensor:
    logits[2] += torch.randn(logits[2].shape, generator=torch.Generator().manual_seed(4))
    return logits


def _in_another_order(logits: Tensor) -> Tensor:
    return logits[..., torch.randperm(logits.shape[-1], generator=torch.Generator().manual_seed(2))]


def _not_a_number(logits: Tensor) -> Tensor:
    logits[3, 7] = torch.nan
    return logits


def _late_head(logits: Tensor) -> Tensor:
    return logits.roll(1, 1)


def _float16_logits(logits: Tensor) -> Tensor:
    return logits.half().float()


def _stale_norm(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("model.norm.weight").mul_(1.001)


def _samples_left_out(bed: Bed) -> None:
    """Read the values of every other sample as missing."""

    def wrapped(plain: Any) -> Any:
        def token_values(a: Any, r: Any) -> Any:
            values = plain(a, r)
            if a.name in ("1", "3"):
                values.actual[:] = torch.nan
            return values

        return token_values

    bed.wrap(compute, "token_values", wrapped)


MUTANTS = (
    of_engines("engine_one_token", "tokens", _served(_logits(_one_token)),
               "token 31 of sample 1 carries"),
    of_engines("engine_one_sample", "tokens", _served(_logits(_one_sample)), "sample 2 carries"),
    of_engines("engine_temperature", "tokens", _served(_logits(lambda x: x / 0.7)),
               "the logits are .* applies a temperature"),
    of_engines("engine_vocabulary_moved", "tokens", _served(_logits(_in_another_order)),
               "another order of the vocabulary"),
    of_engines("engine_one_position_late", "tokens", _served(_logits(_late_head)),
               "those of one position"),
    of_engines("engine_logits_in_float16", "tokens", _served(_logits(_float16_logits)),
               "all tokens"),
    of_engines("engine_not_a_number", "tokens", _served(_logits(_not_a_number)),
               "1 NaN or infinite in actual"),
    of_engines("engine_samples_left_out", "tokens", _samples_left_out,
               "compared_tokens 94 instead of 188"),
    of_engines("engine_weights_of_an_older_step", "weights", _served(older_weights),
               "up_proj.*the weight is not that of the other engine"),
    of_engines("engine_stale_norm", "weights", _served(_stale_norm),
               "model.norm.*the weight is not that of the other engine"),
    of_engines("engine_other_module", "sites", _served(other_module),
               "o_proj forward output.*it is the first that differs"),
    of_engines("engine_weights_of_an_older_step_in_modules", "sites", _served(older_weights),
               "layers.2.mlp.up_proj forward weight"),
)  # fmt: skip
