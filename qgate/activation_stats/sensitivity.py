"""Sensitivity: one layer quantized at a time, and the fewest to keep in higher precision.

A layer is quantized by hooks around its forward: its input on the way in, its weight for as long as
it runs. The weight that it has is put back as the very tensor it was, also after an error, so there
is never a copy of the model and nothing to undo.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qgate.activation_stats._format_losses import quantizer_of
from qgate.activation_stats.record import Proposal, Sensitive
from qgate.activation_stats.subjects import Sample
from qgate.capture.flowing import first_numbers
from qgate.devices import exact_math
from qgate.errors import QgateError
from qgate.formats.quantizer import Quantizer
from qgate.models.sites import is_transposed_linear
from qgate.stats import massive_beyond, serial

Progress = Callable[[str, int, int], None]
_SAME = 1e-6
_ROOM = 2**28
"""Bytes of quantized weights and of reference outputs that are kept between passes."""
_EXACT_DB = 320.0
NO_LOSS = (
    "sensitivity.target_loss needs a model that predicts next tokens: token ids in and logits out, "
    "and none that depends on tokens that come later. Give sensitivity.target_sqnr_db."
)


@dataclass
class Errors:
    """Sums of squares, with and without massive elements, and of the loss of tokens."""

    signal: float = 0.0
    noise: float = 0.0
    rest_signal: float = 0.0
    rest_noise: float = 0.0
    loss: float = 0.0
    tokens: int = 0

    def add(self, actual: Tensor, reference: Tensor, beyond: float) -> None:
        """Add the errors of a tensor; the rest has no element of a reference beyond a magnitude."""
        wide = reference.double()
        # In the order of one thread: processes differ in how many they have.
        with serial():
            squares = wide.square()
            wrong = (actual.double() - wide).square_()
            signal, noise = float(squares.sum()), float(wrong.sum())
            self.signal, self.noise = self.signal + signal, self.noise + noise
            if beyond < math.inf:
                rest = wide.abs() <= beyond
                signal, noise = float(squares[rest].sum()), float(wrong[rest].sum())
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
    """±320 in place of infinities and of what is not finite."""
    if not (math.isfinite(noise) and math.isfinite(signal)):
        return -_EXACT_DB
    if noise == 0:
        return _EXACT_DB
    return 10 * math.log10(signal / noise) if signal else -_EXACT_DB


@dataclass
class Layers:
    """Linear layers of a module, to be quantized in a format while a context is open."""

    root: nn.Module
    names: Sequence[str]
    format: str
    locals: dict[str, Errors] = field(default_factory=dict)
    _weights: dict[str, Tensor] = field(default_factory=dict)
    _held: int = 0

    def __post_init__(self) -> None:
        self._quantizer = quantizer_of(self.format)

    @contextlib.contextmanager
    def quantized(self, names: Sequence[str], *, local: bool = False) -> Iterator[None]:
        """These layers compute in the format; `local` takes the error of each one's own output."""
        handles: list[Any] = []
        swapped: dict[str, nn.Parameter | None] = {}
        try:
            for name in names:
                module = self.root.get_submodule(name)
                handles += [
                    module.register_forward_pre_hook(
                        self._before(name, swapped, local), with_kwargs=True
                    ),
                    module.register_forward_hook(
                        self._after(name, swapped, local), with_kwargs=True, always_call=True
                    ),
                ]
            yield
        finally:
            for handle in handles:
                handle.remove()
            for name in list(swapped):
                _put_back(self.root.get_submodule(name), swapped, name)

    def _before(
        self, name: str, swapped: dict[str, nn.Parameter | None], local: bool
    ) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if local:
                x = first_numbers([*args, *kwargs.values()])
                self._inputs[name] = (args, kwargs) if x is not None else ((), {})
            swapped[name] = module._parameters["weight"]
            weight = nn.Parameter(self._weight(name, module), requires_grad=False)
            module._parameters["weight"] = weight
            turned = [_replaced(value, self._quantizer) for value in args]
            return tuple(turned), {k: _replaced(v, self._quantizer) for k, v in kwargs.items()}

        return hook

    def _after(
        self, name: str, swapped: dict[str, nn.Parameter | None], local: bool
    ) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
            _put_back(module, swapped, name)
            if not local or name not in self._inputs:
                return
            args, kwargs = self._inputs.pop(name)
            actual = first_numbers(result)
            # Not the call: that would run the hooks again.
            reference = first_numbers(module.forward(*args, **kwargs))
            if actual is not None and reference is not None:
                errors = self.locals.setdefault(name, Errors())
                errors.add(actual, reference, massive_beyond(reference))

        return hook

    _inputs: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def _weight(self, name: str, module: nn.Module) -> Tensor:
        if name in self._weights:
            return self._weights[name]
        weight: Tensor = module._parameters["weight"].detach()  # type: ignore[union-attr]
        turned = is_transposed_linear(module)
        made = _rows_quantized(self._quantizer, weight.T if turned else weight)
        made = made.T.contiguous() if turned else made
        size = made.numel() * made.element_size()
        if self._held + size <= _ROOM:
            self._weights[name], self._held = made, self._held + size
        return made


def _put_back(module: nn.Module, swapped: dict[str, nn.Parameter | None], name: str) -> None:
    if name in swapped:
        module._parameters["weight"] = swapped.pop(name)


def _replaced(value: Any, quantizer: Quantizer) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return _rows_quantized(quantizer, value)
    return value


def _rows_quantized(quantizer: Quantizer, x: Tensor) -> Tensor:
    """Scales are of rows of the last dimension, or of blocks along it."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return quantizer(rows).reshape(x.shape) if rows.numel() else x


class Runs:
    """Forward passes of the whole model, held against those without anything quantized."""

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
        self._references: dict[int, Tensor] = {}
        self._beyond: dict[int, float] = {}
        self._held = 0
        self.forwards = 0
        self.reference = Errors()
        for at, sample in enumerate(samples):
            self._add_loss(self.reference, self.reference_of(at), sample)

    def output(self, sample: Sample) -> Tensor:
        self.forwards += 1
        with torch.no_grad(), exact_math():
            result = sample.run(self.root, self.device)
        found = _output(result)
        if found is None:
            raise QgateError(f"{self.name} returned {type(result).__name__}, and no numbers.")
        return found

    def reference_of(self, at: int) -> Tensor:
        """Kept where there is room for it, made again where there is not."""
        if at not in self._references:
            made = self.output(self.samples[at])
            size = made.numel() * made.element_size()
            if self._held + size > _ROOM:
                return made
            self._references[at], self._held = made, self._held + size
        return self._references[at]

    def errors(self, layers: Layers, names: Sequence[str], *, local: bool = False) -> Errors:
        """Of the model's output with these layers quantized."""
        found = Errors()
        for at, sample in enumerate(self.samples):
            reference = self.reference_of(at)
            with layers.quantized(names, local=local):
                actual = self.output(sample)
            if at not in self._beyond:
                self._beyond[at] = massive_beyond(reference)
            found.add(actual, reference, self._beyond[at])
            self._add_loss(found, actual, sample)
        return found

    def _add_loss(self, errors: Errors, logits: Tensor, sample: Sample) -> None:
        ids = sample.ids
        if self.predicts and ids is not None and _are_logits(logits, ids):
            flat = logits.reshape(len(ids), -1)[:-1].float()
            with serial():
                errors.loss += float(cross_entropy(flat, ids[1:].to(flat.device), reduction="sum"))
            errors.tokens += len(ids) - 1

    def loss_change(self, found: Errors) -> float | None:
        before, after = self.reference.mean_loss, found.mean_loss
        if before is None or after is None or not math.isfinite(after - before):
            return None
        return after - before


def _output(result: Any) -> Tensor | None:
    for part in ("logits", "last_hidden_state"):
        value = getattr(result, part, None)
        if isinstance(value, Tensor):
            return value
    return first_numbers(result)


def _are_logits(found: Tensor, ids: Tensor) -> bool:
    """Of every token one number for each id there could be."""
    rows = found.shape[:-1].numel()
    return rows == len(ids) >= 2 and int(ids.max()) < found.shape[-1]


def predicts_next(root: nn.Module, samples: Sequence[Sample], device: torch.device) -> bool:
    """If outputs are logits that no later token has a part in, so that there is a loss of next
    tokens: those of a model that reads both ways know the token that they would predict.

    Tried on a beginning of one sample, whose second half is changed.
    """
    sample = next((s for s in samples if s.ids is not None and len(s.ids) >= 2), None)
    if sample is None or sample.ids is None:
        return False
    ids = sample.ids
    half = len(ids) // 2
    others = ids.clone()
    others[half:] = (ids[half:] == 0).to(ids.dtype)
    with torch.no_grad(), exact_math():
        found = [_output(s.run(root, device)) for s in (sample, sample.with_ids(others))]
    first, second = found
    if first is None or second is None or not _are_logits(first, ids):
        return False
    kept, moved = (x.reshape(len(ids), -1)[:half].double() for x in (first, second))
    return bool((kept - moved).abs().max() <= _SAME * kept.abs().max())


def alone(runs: Runs, layers: Layers, name: str) -> Sensitive:
    """One layer quantized, and no other."""
    errors = runs.errors(layers, [name], local=True)
    made = Sensitive(
        module=name,
        format=layers.format,
        sqnr_db=errors.sqnr_db,
        sqnr_db_without_massive=errors.rest_db,
    )
    own = layers.locals.pop(name, None)
    if own is not None:
        made["local_sqnr_db"] = own.sqnr_db
        made["local_sqnr_db_without_massive"] = own.rest_db
    change = runs.loss_change(errors)
    if change is not None:
        made["loss_change"] = change
    return made


def rank(found: Iterable[Sensitive]) -> list[Sensitive]:
    """The most harmful first."""
    return sorted(found, key=lambda each: (each["sqnr_db"], each["module"]))


@dataclass(frozen=True)
class SensitivityTarget:
    """An SQNR of the model's output that is to be reached, or a loss that is not to be passed."""

    sqnr_db: float | None = None
    loss: float | None = None

    @property
    def text(self) -> str:
        if self.sqnr_db is not None:
            return f"SQNR of the output ≥ {self.sqnr_db:g} dB"
        return f"loss ≤ {self.loss:g}"

    def value(self, errors: Errors) -> float:
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
    runs: Runs, layers: Layers, ranking: Sequence[str], target: SensitivityTarget
) -> Proposal:
    """The fewest layers to keep as they are that reach the target with all others quantized.

    Bisection over the ranking, then each kept layer is tried without, from the least harmful. Every
    number is measured by real passes.
    """
    known: dict[frozenset[str], float] = {}

    def value(keep: Sequence[str]) -> float:
        key = frozenset(keep)
        if key not in known:
            rest = [name for name in layers.names if name not in key]
            known[key] = target.value(runs.errors(layers, rest))
        return known[key]

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
    if reached:
        for name in reversed(list(keep)):
            without = [each for each in keep if each != name]
            if target.reached(value(without)):
                keep = without
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
