"""Scopes of errors: what is compared with what at a site, and how that is judged.

A new scope is one literal here. Checks, limits, texts and pages read its fields; files and rules of
limits name it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from qgate.metrics import METRICS
from qgate.registry import Registry

TENSOR_METRICS = ("relative_mse", "one_minus_correlation")


class Tier(IntEnum):
    """Nearness of a failure to its place: the most direct evidence comes first."""

    LOCAL = 0
    LOCAL_ACCEPTED = 1
    NONFINITE = 2
    CARRIED = 3
    BACKWARD = 4
    TASK = 5
    WHOLE = 6
    ABSENT = 7


@dataclass(frozen=True, kw_only=True)
class Scope:
    """One way to measure an error: what it is compared with, and how it is judged.

    name               as results, accepted errors and rules of limits have it
    gated              metrics that need an accepted value
    limits             defaults of limits that differ from those of other scopes
    sources            where metrics come from whose bounds are about it, unless a rule names scopes
    tier               how directly a failure points at its place
    is_local           the error is made at its site: what goes in is right
    enters             the first failure in the order of the model is where the error enters
    spreads            what is wrong at one site may be the cause of errors at others
    has_budget         it is held against the error of an ideal quantizer
    against_noise      it is held against float noise: the expected tensor has the same quantization
    over_tokens        it is a mean over the tokens that blocks carry along
    is_two_sided       an error far below the accepted one fails, too
    is_steady          the tensors stay the same: a smaller error than accepted is another quantizer
    has_grades         its figures are graded in words, and drawn along the blocks
    is_covering        a site that is compared counts as covered
    of_whole_model     it is measured while the whole model runs quantized
    pairs_samples      samples are judged by their mean change, not each by itself
    own_bounds         a row has only the bounds of metrics that it has
    better_words       what a smaller error than accepted means, where that is not "far better"
    """

    name: str
    gated: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    tier: Tier = Tier.CARRIED
    is_local: bool = False
    enters: bool = False
    spreads: bool = True
    has_budget: bool = False
    against_noise: bool = False
    over_tokens: bool = False
    is_two_sided: bool = False
    is_steady: bool = False
    has_grades: bool = False
    is_covering: bool = False
    of_whole_model: bool = False
    pairs_samples: bool = True
    own_bounds: bool = False
    better_words: str = ""

    @property
    def is_task(self) -> bool:
        return self.tier is Tier.TASK

    @property
    def is_gradient(self) -> bool:
        return self.tier is Tier.BACKWARD


SCOPES: Registry[Scope] = Registry("scope")
"""All scopes: the one that tells most of a layer comes first."""


def scope_of(name: str) -> Scope:
    """Return a scope by its name in files; one of another version or suite is a plain one."""
    return SCOPES.entries.get(name) or Scope(name=name)


# How far other weights moved errors is in docs/limits.md: each is the next round share above it.
# The smallest divergence of a task is mostly noise, and gradients are of two samples: other
# instructions moved them by up to 7 %.
for _scope in (
    Scope(
        name="carried", gated=TENSOR_METRICS, over_tokens=True, is_two_sided=True, has_grades=True,
        is_covering=True, of_whole_model=True,
    ),
    Scope(
        name="local", gated=TENSOR_METRICS, tier=Tier.LOCAL, is_local=True, enters=True,
        has_budget=True, is_two_sided=True, has_grades=True, is_covering=True,
        limits={"regression_across_weights": 0.5},
    ),
    Scope(
        name="sweep", gated=("relative_mse",), is_steady=True,
        limits={"regression_across_weights": 4.0},
    ),
    Scope(name="forward", gated=TENSOR_METRICS, sources=("experts",)),
    Scope(
        name="backward", gated=TENSOR_METRICS, tier=Tier.BACKWARD,
        limits={"regression_other_device": 0.1, "regression_across_weights": 9.0},
    ),
    Scope(
        name="task", gated=tuple(metric.name for metric in METRICS.of("task")), tier=Tier.TASK,
        sources=("task", "metric", "long_text"), is_covering=True, of_whole_model=True,
        limits={"regression_other_device": 0.15, "regression_across_weights": 1.0},
    ),
    Scope(
        name="checkpoint", sources=("checkpoint",), tier=Tier.LOCAL, spreads=False, is_steady=True,
        better_words="is not what was accepted",
    ),
    Scope(
        name="engines", sources=("engines",), enters=True, pairs_samples=False, own_bounds=True,
    ),
    Scope(
        name="static", gated=("static_scale",), tier=Tier.LOCAL, is_local=True, enters=True,
        limits={
            "regression": 0.001, "regression_other_device": 0.001, "regression_across_weights": 9.0,
        },
        better_words="has another calibrated scale than accepted",
    ),
    Scope(name="isolated", tier=Tier.LOCAL, is_local=True, enters=True, against_noise=True),
):  # fmt: skip
    SCOPES.add(_scope)
