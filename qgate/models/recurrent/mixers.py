"""Mixers of transformers that keep a state, with the state of every token in reach.

The classes compute projections, norms and gates by their own code. They call one function for the
convolution and one for the recurrence; here these are modules, which can be hooked and which store.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from qgate.models.mamba.scanning import Scan
from qgate.models.mamba.state import MixerState
from qgate.models.recurrent.scans import DeltaScan, Mamba2Scan, ShortConv, StateScan

Adapter = Callable[..., Any]
"""Calls a scan with what the code of a mixer gives its own function."""
_CACHES = ("cache_params", "past_key_values")
_CONVOLUTION = "causal_conv1d_fn"


def _as_mamba(mixer: Any, cache: MixerState | None, *args: Tensor, **more: Any) -> Any:
    """Call the scan of Mamba-1; tensors of transformers are (batch, channels, tokens)."""
    u, dt, _A, B, C = args
    result = mixer.scan(
        u=u.mT, dt=dt.mT, B=B.mT, C=C.mT, z=more["z"].mT, A_log=mixer.A_log, D=mixer.D,
        dt_bias=more["delta_bias"], **_cached(cache),
    )  # fmt: skip
    return (result.output.mT, result.state) if more["return_last_state"] else result.output.mT


def _as_mamba2(mixer: Any, cache: MixerState | None, *args: Tensor, **more: Any) -> Any:
    u, dt, A, B, C = args
    result = mixer.scan(
        u=u, dt=dt, B=B, C=C, A=A, D=more["D"], dt_bias=more["dt_bias"],
        limit=tuple(more["dt_limit"]), **_cached(cache),
    )  # fmt: skip
    output = result.output.unflatten(-1, u.shape[2:])
    state = result.state.unflatten(1, u.shape[2:])
    return (output, state) if more["return_final_states"] else output


def _as_delta_rule(
    mixer: Any, cache: MixerState | None, *args: Tensor, g: Tensor, beta: Tensor, **_more: Any
) -> Any:
    q, k, v = args
    result = mixer.scan(q=q, k=k, v=v, g=g, beta=beta, **_cached(cache))
    output = result.output.unflatten(-1, v.shape[2:]).to(q.dtype)
    return output, result.state.unflatten(1, v.shape[2:]).transpose(-1, -2)


def _cached(cache: MixerState | None) -> dict[str, MixerState]:
    return {} if cache is None else {"cache": cache}


@dataclass(frozen=True)
class MixerKind:
    """A kind of mixer: its function for the recurrence, None for a convolution alone.

    before  children that read the convolution or the recurrence first, for each state
    """

    name: str
    function: str | None
    scan: type[StateScan] | None
    adapter: Adapter | None
    before: Mapping[str, tuple[str, ...]]


_NORMS = {"conv": ("norm", "o_norm", "out_proj", "o_proj")}
_NORMS["ssm"] = _NORMS["conv"]
_MAMBA = MixerKind(
    "Mamba-1", "mamba_selective_scan", Scan, _as_mamba,
    {"conv": ("x_proj",), "ssm": ("out_proj",)},
)  # fmt: skip
_MAMBA2 = MixerKind("Mamba-2", "mamba2_chunk_scan", Mamba2Scan, _as_mamba2, _NORMS)
_DELTA = MixerKind(
    "gated delta rule", "torch_chunk_gated_delta_rule", DeltaScan, _as_delta_rule, _NORMS
)
_KIMI = MixerKind(
    "gated delta rule", "chunk_kimi_delta_attention", DeltaScan, _as_delta_rule, _NORMS
)
_SHORT = MixerKind("short convolution", None, None, None, {"conv": ("out_proj",)})

MIXERS: Mapping[str, MixerKind] = {
    "MambaMixer": _MAMBA,
    "FalconMambaMixer": _MAMBA,
    "JambaMambaMixer": _MAMBA,
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
    "Qwen3NextGatedDeltaNet": _DELTA,
    "Qwen3_5GatedDeltaNet": _DELTA,
    "Qwen3_5MoeGatedDeltaNet": _DELTA,
    "OlmoHybridGatedDeltaNet": _DELTA,
    "KimiLinearDeltaAttention": _KIMI,
    "Lfm2ShortConv": _SHORT,
    "Lfm2MoeShortConv": _SHORT,
}
"""Classes of transformers whose states are in reach."""


def kind_of(module: nn.Module) -> MixerKind | None:
    """Return the kind of a mixer of transformers that can be reached; None for other modules."""
    kind = MIXERS.get(type(module).__name__)
    if kind is None:
        return None
    names = _code(type(module)).__code__.co_names
    is_known = _CONVOLUTION in names and (kind.function is None or kind.function in names)
    return kind if is_known else None


def is_reached(module: nn.Module) -> bool:
    """Tell if the states of a mixer are in reach."""
    return hasattr(type(module), "mixer_kind")


def keeps_unknown_state(module: nn.Module) -> bool:
    """Tell if a module reads a state of transformers' caches that is not in reach."""
    if kind_of(module) is not None or not inspect.isfunction(type(module).forward):
        return False
    names = _code(type(module)).__code__.co_names
    return not {"get_conv_state", "get_recurrent_state", "update_recurrent_state"}.isdisjoint(names)


def _code(kind: type[nn.Module]) -> FunctionType:
    """Return the function that a class of transformers, or of one made of it, forwards by."""
    plain: Any = inspect.unwrap(getattr(kind, "plain_forward", kind.forward))
    return plain  # type: ignore[no-any-return]


def reach(mixer: nn.Module) -> None:
    """Put the states of a mixer in reach: it gets the modules `short_conv` and `scan`."""
    kind, plain = kind_of(mixer), type(mixer)
    assert kind is not None
    mixer.short_conv = ShortConv()
    if kind.scan is not None:
        mixer.scan = kind.scan()
    members = {"forward": _forward, "plain_forward": plain.forward, "mixer_kind": kind}
    mixer.__class__ = type(plain.__name__, (plain,), members)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the code of a mixer with the modules in the place of its functions."""
    code, kind = _code(type(self)), self.mixer_kind
    bound = inspect.signature(code).bind(self, *args, **kwargs)
    named = next(name for name in _CACHES if name in inspect.signature(code).parameters)
    own = bound.arguments.get(named)
    tokens = next(x for x in bound.arguments.values() if isinstance(x, Tensor)).shape[1]
    view = None if own is None else CacheView(own, self.layer_idx)
    if view is not None:
        bound.arguments[named] = view
    state = None if view is None else view.state(kind)
    activations = code.__globals__.get("ACT2FN", {})

    def convolve(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_more: Any
    ) -> Tensor:
        inputs = {"input": x.mT, "weight": weight.unsqueeze(1), "bias": bias}
        y: Tensor = self.short_conv(**inputs, **_cached(state)).mT
        return y if activation is None else activations[activation](y)

    def scan(*given: Tensor, **more: Any) -> Any:
        return kind.adapter(self, state, *given, **more)

    functions = {_CONVOLUTION: convolve, kind.function or "": scan}
    names = {**code.__globals__, **functions}
    run = FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
    run.__kwdefaults__ = code.__kwdefaults__
    result = run(*bound.args, **bound.kwargs)
    if view is not None and state is not None:
        view.write(state, tokens)
    return result


class CacheView:
    """The cache of transformers as a reached mixer sees it: without states of earlier tokens.

    So the mixer calls the functions of whole texts, whatever the number of tokens; the modules in
    their place continue from the states that the cache holds.
    """

    def __init__(self, cache: Any, layer: int) -> None:
        self._cache, self._layer = cache, layer

    def get_conv_state(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def get_recurrent_state(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def update_conv_state(self, x: Tensor, *_args: Any, conv_kernel_size: int) -> Tensor:
        self._width = conv_kernel_size
        return x

    def update_recurrent_state(self, state: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        self._recurrent = state
        return state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def state(self, kind: MixerKind) -> MixerState:
        """Return what the cache holds of this layer."""
        layer = self._cache.layers[self._layer]
        if not layer.has_previous_state[0]:
            return MixerState()
        conv, recurrent = layer.conv_states[0].mT[:, 1:], layer.recurrent_states[0]
        if recurrent is not None:
            is_turned = kind.scan is DeltaScan
            recurrent = recurrent.transpose(-1, -2) if is_turned else recurrent
            recurrent = recurrent.flatten(1, -2)
        return MixerState(conv, recurrent, layer.stored_tokens)

    def write(self, state: MixerState, tokens: int) -> None:
        """Store what is kept after so many more tokens."""
        layer = self._cache.layers[self._layer]
        assert state.conv is not None
        layer.has_previous_state[0] = False
        window = torch.nn.functional.pad(state.conv.mT, (1, 0))
        self._cache.update_conv_state(window, self._layer, conv_kernel_size=self._width)
        if state.ssm is not None:
            self._cache.update_recurrent_state(self._recurrent, self._layer)
        layer.stored_tokens = state.length + tokens
