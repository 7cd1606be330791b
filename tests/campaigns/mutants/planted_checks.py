"""Defects of the task, of the reference and of the canary: the checks that vouch for the others."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qgate.engines.compute import TokenValues
from qgate.formats import Quantizer
from qgate.gate import checks
from qgate.gate.measuring import ideals, loaded_model, self_checks, tasks
from qgate.gate.measuring.bench import Bench
from qgate.modes import applying
from tests.campaigns.mutants.bed import Bed
from tests.campaigns.mutants.mutant import Mutant, Sow, llama, mamba
from tests.campaigns.mutants.planted import altered, truncating_blocks

# The task -----------------------------------------------------------------------------------------


def _outputs(change: Callable[[list[Tensor]], list[Tensor]]) -> Sow:
    """Other logits of the mode; those of the reference stay."""

    def wrapped(plain: Any) -> Any:
        return lambda self, mode: plain(self, mode) if mode is None else change(plain(self, mode))

    return lambda bed: bed.wrap(Bench, "outputs", wrapped)


def _of_reference(plain: Any) -> Any:
    return lambda self, _mode: plain(self, None)


def _tokens(change: Callable[[Any, Any, Any], TokenValues]) -> Sow:
    """Other values of the tokens of a sample: of the pair that it is measured by."""

    def wrapped(plain: Any) -> Any:
        return lambda actual, reference: change(plain, actual, reference)

    return lambda bed: bed.wrap(tasks, "token_values", wrapped)


def _hits_shifted(plain: Any, actual: Any, reference: Any) -> TokenValues:
    """The token itself is looked for in what predicts the one after it."""
    values = plain(actual, reference)
    best = actual.logits(1, len(actual)).argmax(-1).numpy()
    hits = np.concatenate([values.actual_right[:1], best == actual.ids[:-1]])
    return dataclasses.replace(values, actual_right=hits.astype(float))


def _kl_turned(plain: Any, actual: Any, reference: Any) -> TokenValues:
    return dataclasses.replace(plain(actual, reference), kl=plain(reference, actual).kl)


def _kl_of_worst(plain: Any, actual: Any, reference: Any) -> TokenValues:
    values = plain(actual, reference)
    return dataclasses.replace(values, kl=np.full_like(values.kl, np.nanmax(values.kl)))


def _in_nats(bed: Bed) -> None:
    bed.patch.setattr(tasks, "_NATS", 1.0)


# The reference ------------------------------------------------------------------------------------


def _live(bed: Bed) -> nn.Module:
    return bed.session.bench.model.module


def _reads(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """The forward pass of a linear layer sees another weight than its parameters say."""
    plain = type(module)

    def weight(self: nn.Module) -> Tensor:
        return change(self._parameters["weight"])

    module.__class__ = type(plain.__name__, (plain,), {"weight": property(weight)})


def _bf16_weights(bed: Bed) -> None:
    for module in _live(bed).modules():
        if isinstance(module, nn.Linear):
            _reads(module, lambda w: w.bfloat16().float())


def _bf16_model(bed: Bed) -> None:
    """The weights themselves: another model, which its hash tells."""
    for parameter in _live(bed).parameters():
        parameter.data = parameter.data.bfloat16().float()


def _samples(change: Callable[[list[Tensor]], list[Tensor]]) -> Sow:
    def sow(bed: Bed) -> None:
        model = bed.session.bench.model
        model.inputs = change(list(model.inputs))

    return sow


def _in_another_order(plain: Any) -> Any:
    """Samples come back in another order than they went in."""

    def outer(*args: Any, **options: Any) -> Any:
        captured = plain(*args, **options)
        for site, tensors in captured.tensors.items():
            captured.tensors[site] = tensors[::-1]
        return captured

    return outer


def _plan_left_on(mode: str) -> Sow:
    """The hooks of a mode are left on the FP32 model."""

    def sow(bed: Bed) -> None:
        model = bed.session.bench.model
        selected = bed.session.bench.setup.select(mode, model)[0]
        plan = applying.make_plan(selected, model)
        applying._install(model.module, model.sites(), plan.quantizers())

    return sow


def _inputs_left_quantized(bed: Bed) -> None:
    """Of a plan only the quantizers of inputs are left on."""
    model = bed.session.bench.model
    sites = [site for site in model.sites() if site.kind == "linear" and site.port == "input"]
    applying._install(model.module, sites, {site.name: Quantizer("int8") for site in sites})


def _norm_in_half(bed: Bed) -> None:
    """What stands between the linear layers of FP32 is computed in float16."""
    at = _live(bed).get_submodule("model.layers.2.post_attention_layernorm")
    plain = at.forward
    at.forward = lambda x: plain(x).half().float()


def _replaced(bed: Bed) -> None:
    """One linear layer multiplies in bfloat16."""
    at = _live(bed).get_submodule("model.layers.3.mlp.up_proj")
    at.forward = lambda x: linear(x.bfloat16(), at.weight.bfloat16()).float()


def _deaf(bed: Bed) -> None:
    """The forward pass goes through a copy of a weight: whoever changes it changes nothing."""
    at = _live(bed).get_submodule("model.layers.0.self_attn.q_proj")
    old_weight = at.weight.detach().clone()
    at.forward = lambda x: linear(x, old_weight)


def _turned_wrongly(bed: Bed) -> None:
    """In the rotated basis one layer writes to the residual stream with the wrong sign."""
    model = bed.session.bench.model
    plain = model.bases["rotated"]

    def rotated(module: nn.Module) -> nn.Module:
        turned_module = plain(module)
        turned_module.get_parameter("backbone.layers.2.mixer.out_proj.weight").data.neg_()
        return turned_module

    model.bases = {**model.bases, "rotated": rotated}


# The canary ---------------------------------------------------------------------------------------


def _defined_by_truncation(bed: Bed) -> None:
    """The definition truncates too: the healthy quantizer agrees with its ideal."""
    truncating_blocks(bed)
    plain = ideals.define

    def define(x: Any, q: Quantizer) -> Any:
        other = copy.copy(q)
        other.rounding = "zero"
        return plain(x, other)

    bed.patch.setattr(ideals, "define", define)


def _rounding_ignored(bed: Bed) -> None:
    altered(lambda q, _: setattr(q, "rounding", "even"))(bed)


def _identity_in_bf16(bed: Bed) -> None:
    """A plan that quantizes nothing casts to bf16 and back on the way out."""
    plain = self_checks.apply

    def apply(mode: Any, model: Any, *rest: Any) -> Any:
        quantized = plain(mode, model, *rest)
        quantized.model.module.register_forward_hook(lambda _m, _a, y: y.bfloat16().float())
        return quantized

    bed.patch.setattr(self_checks, "apply", apply)


def _identity_of_a_copy(bed: Bed) -> None:
    """A plan works on a copy of the model, in which a weight lost its last bits."""
    plain = applying.sharing_copy

    def copied(module: nn.Module) -> nn.Module:
        duplicate = copy.deepcopy(plain(module))
        with torch.no_grad():
            duplicate.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1 + 2.0**-20)
        return duplicate

    bed.patch.setattr(applying, "sharing_copy", copied)


def _policy(**limits: Any) -> Sow:
    def sow(bed: Bed) -> None:
        bed.session.policy = bed.session.policy.with_marker(limits)

    return sow


NOTHING = "a quantizer that truncates passes the gate: it gates nothing"
CHANGED = "a plan that quantizes nothing changes the model's output"
_BETWEEN = (
    "the reference had the fault when it was recorded; the gate checks the products of linear "
    "layers, and not what was done to their inputs before"
)
Q_OUTPUT = r"model\.layers\.0\.self_attn\.q_proj:output"

TASK = (
    llama("logits-of-another-sample", "int8", _outputs(lambda found: found[::-1]), says="kl_divergence .* at logits"),
    llama("logits-a-token-late", "w4", _outputs(lambda found: [y.roll(1, 1) for y in found]), says="task_change .* at logits"),
    llama("accuracy-of-the-token-before", "int8", _tokens(_hits_shifted), says="next_token_accuracy .* at logits"),
    llama("kl-arguments-swapped", "mxfp4", _tokens(_kl_turned), says="kl_divergence .* at logits"),
    mamba("kl-arguments-swapped-of-mamba", "mxfp4", _tokens(_kl_turned), says="kl_divergence .* at logits"),
    mamba("kl-of-the-worst-token", "2-1", _tokens(_kl_of_worst), says="kl_divergence .* at logits"),
    llama("logits-at-another-temperature", "int8", _outputs(lambda found: [0.95 * y for y in found]), says="kl_divergence .* at logits"),
    llama("task-measured-on-the-reference", "mxfp4", lambda bed: bed.wrap(Bench, "outputs", _of_reference), says="at logits"),
    llama("bits-reported-in-nats", "int8", _in_nats, says="task_change .* at logits"),
)  # fmt: skip
REFERENCE = (
    llama("reference-multiplies-bf16-weights", "", _bf16_weights, Q_OUTPUT, says=r"plain model\.layers\.\d:output"),
    llama("reference-of-a-bf16-model", "", _bf16_model, says="the baseline was made with other weights"),
    llama("reference-of-other-samples", "", _samples(lambda found: [ids.flip(-1) for ids in found]), says="the baseline was made with other inputs"),
    llama("reference-of-fewer-samples", "", _samples(lambda found: found[:1]), says="the baseline was made with 2 samples, and there are 1 now"),
    llama("samples-in-another-order", "", lambda bed: bed.wrap(loaded_model, "outer_tensors", _in_another_order), r"plain model\.layers\.0:output"),
    llama("plan-left-on", "", _plan_left_on("int8"), says="is quantized: one pass of it calls"),
    llama("plan-left-on-since-day-one", "", _plan_left_on("int8"), says="is quantized: one pass of it calls", unrecorded=True),
    llama("inputs-left-quantized", "", _inputs_left_quantized, says="is quantized: one pass of it calls"),
    llama("norm-in-float16", "", _norm_in_half, r"plain model\.layers\.2:output"),
    llama("linear-replaced-by-a-bf16-one", "", _replaced, r"plain model\.layers\.3:output", says=r"model\.layers\.3\.mlp\.up_proj:output +local +relative_mse"),
    llama("linear-of-bf16-since-day-one", "", _replaced, r"model\.layers\.3\.mlp\.up_proj:output", unrecorded=True),
    llama("weights-are-not-read", "", _deaf, says="a weight moved by a hundredth does not show in the reference"),
    mamba("rotated-with-a-wrong-sign", "", _turned_wrongly, r"rotated backbone\.layers\.2:output"),
    llama("inputs-quantized-since-day-one", "", _inputs_left_quantized, says="is quantized: one pass of it calls", unrecorded=True),
    llama("norm-in-float16-since-day-one", "", _norm_in_half, says="relative_mse", unrecorded=True, survives=_BETWEEN),
)  # fmt: skip
CANARY = (
    llama("every-quantizer-truncates", "", truncating_blocks, Q_OUTPUT.replace(":output", ":input"), says="over the ideal mxfp8_e4m3 .*quantizer, 0.5 allowed"),
    llama("the-definition-truncates-too", "", _defined_by_truncation, says=NOTHING),
    llama("the-canary-does-not-truncate", "", _rounding_ignored, says=NOTHING),
    llama("budget-of-20-db-allowed", "", _policy(budget_db=20.0, reason="planted"), says=NOTHING),
    llama("budget-not-checked", "", lambda bed: bed.patch.setattr(checks, "_budget", lambda *_: iter(())), says=NOTHING),
    llama("every-value-counts-as-within-its-limit", "", lambda bed: bed.patch.setattr(checks, "within", lambda *_: True), says=NOTHING),
    llama("quantizing-nothing-rounds-to-bf16", "", _identity_in_bf16, says=CHANGED),
    llama("quantizing-nothing-runs-a-changed-copy", "", _identity_of_a_copy, says=CHANGED),
)  # fmt: skip
MUTANTS: tuple[Mutant, ...] = (
    *(dataclasses.replace(mutant, suite="task") for mutant in TASK),
    *(dataclasses.replace(mutant, suite="reference") for mutant in REFERENCE),
    *(dataclasses.replace(mutant, suite="canary") for mutant in CANARY),
)  # fmt: skip
