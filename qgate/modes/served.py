"""Modes of what serving quantizes beside weights and inputs: the cache, attention, and states.

They are asked for by name, or by a pattern that begins with a letter (`kv-*`): "all" leaves them
out. A mode of your own is one more literal like these.
"""

from __future__ import annotations

from typing import Any

from qgate.modes.attention.choices import AttentionChoices, TensorChoice
from qgate.modes.mode import Mode
from qgate.modes.states.choices import StateChoice, StateChoices


def _cache(name: str, about: str, fmt: str, share: Any, **more: Any) -> Mode:
    """Return a mode of one choice for keys and values."""
    side = TensorChoice(fmt, share)
    choices = AttentionChoices(keys=side, values=side, **more)
    return Mode(name, about, fits="other", attention=choices, by_name=True)


def _attention(name: str, about: str, queries: TensorChoice, **more: Any) -> Mode:
    """Return a mode that quantizes keys as its queries, and more."""
    choices = AttentionChoices(queries=queries, keys=queries, **more)
    return Mode(name, about, fits="other", attention=choices, by_name=True)


def _states(name: str, about: str, fmt: str, share: Any = "none", **more: Any) -> Mode:
    """Return a mode of one choice for both states; `share` is that of their scales."""
    choice = StateChoice(fmt, share, **more)
    states = StateChoices(conv=choice, ssm=choice)
    return Mode(name, about, states=states, by_name=True)


_FP8 = TensorChoice("fp8_e4m3", "tensor")
_FP8_HEAD = TensorChoice("fp8_e4m3", "head")
_FP8_UNIT = TensorChoice("fp8_e4m3", "unit")
_INT8 = TensorChoice("int8", "token_head")
_MXFP8 = TensorChoice("mxfp8_e4m3", "format")

SERVED_MODES = (
    _cache("kv-fp8", "cache in FP8 (E4M3), a calibrated scale per tensor", "fp8_e4m3", "tensor"),
    _cache("kv-fp8-head", "cache in FP8 (E4M3), a calibrated scale per head", "fp8_e4m3", "head"),
    _cache(
        "kv-fp8-token", "cache in FP8 (E4M3), a scale per token and head", "fp8_e4m3", "token_head"
    ),
    _cache(
        "kv-fp8-prerope", "as kv-fp8, keys stored before rotary positions", "fp8_e4m3", "tensor",
        before_rope=True,
    ),
    _cache("kv-int8", "cache in INT8, a scale per token", "int8", "token"),
    _cache("kv-int4", "cache in INT4, a scale per 32 channels of a head", "int4", "group"),
    _cache(
        "kv-int4-rotated", "as kv-int4, keys multiplied by a Hadamard matrix", "int4", "group",
        rotated=True,
    ),
    _cache(
        "kv-mxfp4", "cache in MXFP4, but for 4 sinks and the last 32 tokens", "mxfp4_e2m1",
        "format", sinks=4, window=32,
    ),
    _cache(
        "kv-nvfp4", "cache in NVFP4, a float32 scale per token and head, but for 4 sinks and the "
        "last 32 tokens", "nvfp4_row", "format", sinks=4, window=32,
    ),
    _cache("kv-nf4", "cache in NF4, a float32 scale per 64 channels", "nf4", "format"),
    _cache(
        "kv-turbo3", "cache of 3 bits: keys and values multiplied by a Hadamard matrix, Lloyd-Max "
        "levels times the RMS of a token's head, as TurboQuant", "lloyd3", "format",
        rotated=True, values_rotated=True,
    ),
    Mode(
        "kv-turbo3-qjl", "as kv-turbo3, keys in levels of 2 bits and a bit that makes scores right "
        "on average (QJL)", fits="other", by_name=True,
        attention=AttentionChoices(
            keys=TensorChoice("lloyd2_qjl", "format"), values=TensorChoice("lloyd3", "format"),
            rotated=True, values_rotated=True,
        ),
    ),
    _attention(
        "attn-fp8", "Q, K and V in FP8 (E4M3), a calibrated scale per tensor; P in FP8 of 0 to 1",
        _FP8, values=_FP8, weights=_FP8_UNIT,
    ),
    _attention(
        "attn-fp8-head", "as attn-fp8, a calibrated scale per head; the output in FP8 per token",
        _FP8_HEAD, values=_FP8_HEAD, weights=_FP8_UNIT, output=TensorChoice("fp8_e4m3", "token"),
    ),
    _attention(
        "attn-int8", "Q and K in INT8 per token and head, P in INT8 of 0 to 1; V as it is",
        _INT8, weights=TensorChoice("int8", "unit"),
    ),
    _attention(
        "attn-mxfp8", "Q, K, V, P and the output in MXFP8, P in blocks along the tokens",
        _MXFP8, values=_MXFP8, weights=_MXFP8, output=_MXFP8,
    ),
    _states("state-bf16", "recurrent states in BF16", "bf16"),
    _states("state-bf16-stochastic", "as state-bf16, rounded at random", "bf16", stochastic=True),
    _states(
        "state-bf16-feedback", "as state-bf16, and what rounding took away in FP8", "bf16",
        remainder="fp8_e4m3",
    ),
    _states("state-fp16", "recurrent states in FP16", "fp16"),
    _states("state-fp16-stochastic", "as state-fp16, rounded at random", "fp16", stochastic=True),
    _states(
        "state-fp8", "recurrent states in FP8 (E4M3), a calibrated scale per tensor", "fp8_e4m3",
        "tensor",
    ),
    _states(
        "state-fp8-channel", "recurrent states in FP8 (E4M3), a calibrated scale per channel",
        "fp8_e4m3", "channel",
    ),
    _states(
        "state-fp8-token", "recurrent states in FP8 (E4M3), scales made at each token", "fp8_e4m3",
        "token",
    ),
    _states(
        "state-fp8-stochastic", "as state-fp8-token, rounded at random", "fp8_e4m3", "token",
        stochastic=True,
    ),
    _states(
        "state-fp8-feedback", "as state-fp8-token, and what rounding took away in FP8", "fp8_e4m3",
        "token", remainder="fp8_e4m3",
    ),
    _states("state-int8", "recurrent states in INT8, scales made at each token", "int8", "token"),
    _states(
        "state-int8-static", "recurrent states in INT8, a calibrated scale per channel", "int8",
        "channel",
    ),
    _states(
        "state-int8-stochastic", "as state-int8, rounded at random", "int8", "token",
        stochastic=True,
    ),
    _states(
        "state-int8-feedback", "as state-int8, and what rounding took away in INT4", "int8",
        "token", remainder="int4",
    ),
)  # fmt: skip
