"""Growth of the error of a mode along a long text, and where the mode stops predicting it.

A recurrent state is rounded once per token, so its error may grow with the text. The samples of the
evaluation are joined to one text, which the mode and its reference read in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, nll_loss

from qgate.errors import QgateError
from qgate.gate.measured import Measured
from qgate.metrics.intervals import mean_interval
from qgate.models import Model
from qgate.models.rows import is_text
from qgate.results.pictures import LONG_TEXT, LongTextPicture, predicted_tokens

TOKENS = 4096
_STRETCHES = 16
_LEAST = 1e-8
"""KL divergence, in nats, below which it is float noise."""
GATED = ("bits_per_byte", "kl_divergence", "error_growth", "predicted_tokens")


def long_text(model: Model) -> Tensor:
    """Return the samples of the evaluation as one text, cut after 4,097 tokens."""
    texts = [sample for sample in model.inputs if is_text(sample)]
    if len(texts) < len(model.inputs) or any(len(text) != 1 for text in texts):
        raise QgateError(
            f"the samples of {model.name} are no single texts of token ids: modes of recurrent "
            "states are compared along a long one. Give samples of shape (1, tokens)."
        )
    joined = torch.cat(texts, 1)[:, : TOKENS + 1]
    if joined.shape[1] <= 2 * _STRETCHES:
        raise QgateError(
            f"the samples of {model.name} are {joined.shape[1]} tokens in all: give more or longer "
            f"ones (--samples, --seqlen), {2 * _STRETCHES + 1} tokens at least."
        )
    return joined


@torch.no_grad()
def token_logits(model: Model, text: Tensor) -> Tensor:
    """Return the logits of every token but the last."""
    return model.outputs(text)["logits"][0, :-1].float().cpu()


def long_text_row(model: Model, quantized: Model, reference: Tensor) -> Measured:
    """Measure a model in a mode along the long text; `reference` has the reference's logits."""
    text = long_text(model)
    actual = token_logits(quantized, text)
    picture = compare_along(text[0].cpu(), actual, reference)
    values = {
        "bits_per_byte": _mean(picture["bits"]),
        "kl_divergence": _mean(picture["kl"]),
        "error_growth": _growth(picture["kl"]),
        "predicted_tokens": float(predicted_tokens(picture)),
        "compared_tokens": float(picture["stretch"] * len(picture["kl"])),
    }
    nonfinite = int((~actual.isfinite()).sum())
    return Measured(
        site=LONG_TEXT, layer="", scope="task", values=values, order=1, nonfinite=nonfinite,
        floor=_LEAST, gated=GATED, pictures=() if nonfinite else (picture,),
    )  # fmt: skip


def compare_along(ids: Tensor, actual: Tensor, reference: Tensor) -> LongTextPicture:
    """Compare logits with those of the reference, in 16 stretches of tokens."""
    stretch = len(actual) // _STRETCHES
    picture = LongTextPicture(
        kind="long_text", stretch=stretch, kl=[], bits=[], reference=[], half_95=[]
    )
    for first in range(0, stretch * _STRETCHES, stretch):
        part = slice(first, first + stretch)
        q, p = (log_softmax(x[part].double(), -1) for x in (actual, reference))
        following = ids[1:][part]
        bits, right = (nll_loss(x, following, reduction="none") / math.log(2) for x in (q, p))
        mean, half = mean_interval(right.tolist())
        picture["kl"].append(float((p.exp() * (p - q)).sum(-1).mean()))
        picture["bits"].append(float(bits.mean()))
        picture["reference"].append(mean)
        picture["half_95"].append(half)
    return picture


def _growth(kl: Sequence[float]) -> float:
    """Return how many times the divergence of the last quarter is that of the first, as log2."""
    quarter = len(kl) // 4
    first, last = (_mean(part) + _LEAST for part in (kl[:quarter], kl[-quarter:]))
    return math.log2(last / first) if math.isfinite(first) and math.isfinite(last) else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
