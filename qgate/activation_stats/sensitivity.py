"""Sensitivity: one layer quantized at a time, and the fewest to keep in higher precision.

Hooks quantize a layer: its input on the way in, its weight while it runs. Afterwards, also after an
error, the module has the very weight tensor that it had, so the model is never copied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qgate.activation_stats._quantizers import quantizer_of
from qgate.activation_stats.record import EXACT_DB, Proposal, Sensitive
from qgate.activation_stats.subjects import Sample
from qgate.capture.next_tokens import look_ahead
from qgate.devices import exact_math
from qgate.errors import QgateError
from qgate.hooks import ModuleHooks
from qgate.hooks.nested import first_float_tensor
from qgate.models.sites import is_transposed_linear
from qgate.stats import massive_beyond, serial

Progress = Callable[[str, int, int], None]
_CACHE_BYTES = 2**28
NO_LOSS = (
    "sensitivity.target_loss needs a model that predicts next tokens: token ids in and logits out, "
    "and none that depends on tokens that come later. Give sensitivity.target_sqnr_db."
)


class _TensorCache(dict[Any, Tensor]):
    """Tensors between passes, of at most `_CACHE_BYTES`; others are computed again."""

    def keep(self, key: object, tensor: Tensor) -> Tensor:
        if sum(other.nbytes for other in self.values()) + tensor.nbytes <= _CACHE_BYTES:
            self[key] = tensor
        return tensor


@dataclass
class OutputErrors:
    """Sums of squares, with and without massive elements, and the loss of tokens."""

    signal: float = 0.0
    noise: float = 0.0
    rest_signal: float = 0.0
    rest_noise: float = 0.0
    loss: float = 0.0
    tokens: int = 0

    def add(self, actual: Tensor, reference: Tensor, massive: float) -> None:
        """Add the errors of a tensor; the `rest` leaves out references above `massive`."""
        wide = reference.double()
        # In the order of one thread: processes differ in how many they have.
        with serial():
            squares = wide.square()
            error_squares = (actual.double() - wide).square_()
            signal, noise = float(squares.sum()), float(error_squares.sum())
            self.signal, self.noise = self.signal + signal, self.noise + noise
            if massive < math.inf:
                below = wide.abs() <= massive
                signal, noise = float(squares[below].sum()), float(error_squares[below].sum())
            self.rest_signal += signal
            self.rest_noise += noise

    @property
    def sqnr_db(self) -> float:
        return _decibels(self.signal, self.noise)

    @property
    def rest_db(self) -> float:
        """The SQNR without massive elements."""
        return _decibels(self.rest_signal, self.rest_noise)

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.tokens if self.tokens else None


def _decibels(signal: float, noise: float) -> float:
    """Return an SQNR, ±320 in place of infinities and of what is not finite."""
    if not (math.isfinite(noise) and math.isfinite(signal)):
        return -EXACT_DB
    if noise == 0:
        return EXACT_DB
    return 10 * math.log10(signal / noise) if signal else -EXACT_DB


class QuantizableLayers:
    """Linear layers of a module, to be quantized in a format while a context is open."""

    def __init__(self, root: nn.Module, names: Sequence[str], format: str) -> None:
        self.root, self.names, self.format = root, names, format
        self.local_errors: dict[str, OutputErrors] = {}
        self._quantizer = quantizer_of(format)
        self._weights = _TensorCache()

    @contextlib.contextmanager
    def quantized(self, names: Sequence[str], *, local: bool = False) -> Iterator[None]:
        """Let these layers compute in the format; `local` measures the error of each output."""
        originals: dict[nn.Module, nn.Parameter | None] = {}
        calls: dict[nn.Module, tuple[Any, Any]] = {}

        def quantize(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
            if local and first_float_tensor([*args, *kwargs.values()]) is not None:
                calls[module] = args, kwargs
            originals[module] = module._parameters["weight"]
            weight = nn.Parameter(self._weight(modules[module], module), requires_grad=False)
            module._parameters["weight"] = weight
            changed = {key: self._replaced(value) for key, value in kwargs.items()}
            return tuple(map(self._replaced, args)), changed

        def restore(module: nn.Module, _args: Any = None, result: Any = None) -> None:
            if module in originals:
                module._parameters["weight"] = originals.pop(module)
            if module not in calls:
                return
            args, kwargs = calls.pop(module)
            actual = first_float_tensor(result)
            # Not the call: that would run the hooks again.
            reference = (
                None if actual is None else first_float_tensor(module.forward(*args, **kwargs))
            )
            if actual is not None and reference is not None:
                errors = self.local_errors.setdefault(modules[module], OutputErrors())
                errors.add(actual, reference, massive_beyond(reference))

        modules = {self.root.get_submodule(name): name for name in names}
        with ModuleHooks() as hooks:
            for module in modules:
                hooks.add(module, quantize, restore, always=True)
            try:
                yield
            finally:
                calls.clear()
                for module in list(originals):
                    restore(module)

    def _replaced(self, value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return self._rows_quantized(value) if is_number else value

    def _weight(self, name: str, module: nn.Module) -> Tensor:
        if name in self._weights:
            return self._weights[name]
        weight: Tensor = module._parameters["weight"].detach()  # type: ignore[union-attr]
        transposed = is_transposed_linear(module)
        quantized = self._rows_quantized(weight.T if transposed else weight)
        return self._weights.keep(name, quantized.T.contiguous() if transposed else quantized)

    def _rows_quantized(self, x: Tensor) -> Tensor:
        """Quantize with scales of rows of the last dimension, or of blocks along it."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._quantizer(rows).reshape(x.shape) if rows.numel() else x


class ModelRuns:
    """Forward passes of the whole model, compared with those without anything quantized."""

    def __init__(
        self,
        root: nn.Module,
        samples: Sequence[Sample],
        device: torch.device,
        name: str,
        predicts: bool = True,
    ) -> None:
        self.root, self.samples, self.device, self.name = root, samples, device, name
        self.predicts = predicts
        self._references = _TensorCache()
        self._massive: dict[int, float] = {}
        self.reference = OutputErrors()
        for at, sample in enumerate(samples):
            self._add_loss(self.reference, self._reference_of(at), sample)

    def _output(self, sample: Sample) -> Tensor:
        with torch.no_grad(), exact_math():
            result = sample.run(self.root, self.device)
        output = _main_output(result)
        if output is None:
            raise QgateError(f"{self.name} returned {type(result).__name__}, and no numbers.")
        return output

    def _reference_of(self, at: int) -> Tensor:
        """Return the output without quantization."""
        if at in self._references:
            return self._references[at]
        return self._references.keep(at, self._output(self.samples[at]))

    def errors(
        self, layers: QuantizableLayers, names: Sequence[str], *, local: bool = False
    ) -> OutputErrors:
        """Measure the model's output with these layers quantized."""
        errors = OutputErrors()
        for at, sample in enumerate(self.samples):
            reference = self._reference_of(at)
            with layers.quantized(names, local=local):
                actual = self._output(sample)
            if at not in self._massive:
                self._massive[at] = massive_beyond(reference)
            errors.add(actual, reference, self._massive[at])
            self._add_loss(errors, actual, sample)
        return errors

    def _add_loss(self, errors: OutputErrors, logits: Tensor, sample: Sample) -> None:
        ids = sample.ids
        if self.predicts and ids is not None and _are_logits(logits, ids):
            flat = logits.reshape(len(ids), -1)[:-1].float()
            with serial():
                errors.loss += float(cross_entropy(flat, ids[1:].to(flat.device), reduction="sum"))
            errors.tokens += len(ids) - 1


def _main_output(result: Any) -> Tensor | None:
    for part in ("logits", "last_hidden_state"):
        value = getattr(result, part, None)
        if isinstance(value, Tensor):
            return value
    return first_float_tensor(result)


def _are_logits(output: Tensor, ids: Tensor) -> bool:
    """Tell if there is one number per token and vocabulary entry."""
    rows = output.shape[:-1].numel()
    return rows == len(ids) >= 2 and int(ids.max()) < output.shape[-1]


def predicts_next(root: nn.Module, samples: Sequence[Sample], device: torch.device) -> bool:
    """Tell if a model has a loss of next tokens: logits that do not depend on later tokens.

    A model that reads in both directions knows the token that it would predict. One sample is run
    twice, the second time with other tokens in its second half.
    """
    sample = next((s for s in samples if s.ids is not None and len(s.ids) >= 2), None)
    if sample is None or sample.ids is None:
        return False
    ids = sample.ids
    half = len(ids) // 2
    changed_ids = ids.clone()
    changed_ids[half:] = (ids[half:] == 0).to(ids.dtype)
    with torch.no_grad(), exact_math():
        first, second = (
            _main_output(call.run(root, device)) for call in (sample, sample.with_ids(changed_ids))
        )
    if first is None or second is None or not _are_logits(first, ids):
        return False
    before, after = (x.reshape(len(ids), -1)[:half] for x in (first, second))
    return not look_ahead(before, after)


def quantize_alone(runs: ModelRuns, layers: QuantizableLayers, name: str) -> Sensitive:
    """Measure the model with one layer quantized and no other."""
    errors = runs.errors(layers, [name], local=True)
    sensitive = Sensitive(
        module=name,
        format=layers.format,
        sqnr_db=errors.sqnr_db,
        sqnr_db_without_massive=errors.rest_db,
    )
    local = layers.local_errors.pop(name, None)
    if local is not None:
        sensitive["local_sqnr_db"] = local.sqnr_db
        sensitive["local_sqnr_db_without_massive"] = local.rest_db
    before, after = runs.reference.mean_loss, errors.mean_loss
    if before is not None and after is not None and math.isfinite(after - before):
        sensitive["loss_change"] = after - before
    return sensitive


@dataclass(frozen=True)
class SensitivityTarget:
    """An SQNR of the model's output to reach, or a loss not to exceed."""

    sqnr_db: float | None = None
    loss: float | None = None

    @property
    def text(self) -> str:
        if self.sqnr_db is not None:
            return f"SQNR of the output ≥ {self.sqnr_db:g} dB"
        return f"loss ≤ {self.loss:g}"

    def value(self, errors: OutputErrors) -> float:
        if self.sqnr_db is not None:
            return errors.sqnr_db
        loss = errors.mean_loss
        if loss is None:
            raise QgateError(NO_LOSS)
        return loss if math.isfinite(loss) else 1e300

    def reached(self, value: float) -> bool:
        if self.sqnr_db is not None:
            return value >= self.sqnr_db
        return self.loss is not None and value <= self.loss


def propose(
    runs: ModelRuns, layers: QuantizableLayers, ranking: Sequence[str], target: SensitivityTarget
) -> Proposal:
    """Find the fewest layers to keep as they are that reach the target, all others quantized.

    Bisects the ranking, then tries each kept layer without, from the least harmful on. Real passes
    measure every number.
    """
    measured: dict[frozenset[str], float] = {}

    def value(keep: Sequence[str]) -> float:
        key = frozenset(keep)
        if key not in measured:
            quantized = [name for name in layers.names if name not in key]
            measured[key] = target.value(runs.errors(layers, quantized))
        return measured[key]

    n = len(ranking)
    curve = {0: value([])}
    low, high = 0, n
    if target.reached(curve[0]):
        high = 0
    else:
        curve[n] = value(ranking)
        while target.reached(curve[n]) and high - low > 1:
            middle = (low + high) // 2
            curve[middle] = value(ranking[:middle])
            low, high = (low, middle) if target.reached(curve[middle]) else (middle, high)
    keep = list(ranking[:high])
    reached = target.reached(value(keep))
    for name in reversed(list(keep)) if reached else ():
        fewer = [module for module in keep if module != name]
        if target.reached(value(fewer)):
            keep = fewer
            curve[len(keep)] = value(keep)
    return Proposal(
        format=layers.format,
        target=target.text,
        reached=reached,
        keep=keep,
        value=value(keep),
        all_quantized=curve[0],
        curve=sorted(curve.items()),
    )
