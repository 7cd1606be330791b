"""Attention in 16 bits that is right in another arithmetic than that of the reference's code.

Fused attention rounds probabilities alone. Code that computes operator by operator also rounds
scores, and a block has twice the error against FP32, without a fault. Such an attention is judged
as a kernel is: each result must be what the reference's code gives under the roundings of one
arithmetic. What this adds to errors is measured: the mode runs once more with what the reference's
code gives in the dtype of the run, and all of its own code around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qgate.errors import QgateError
from qgate.expected.intermediates import HALVES
from qgate.gate.measuring.call_arguments import CallArguments
from qgate.gate.measuring.passes import shortened
from qgate.gate.segments.attention_code import AttentionCall, AttentionCode, find_attention
from qgate.hooks.module_hooks import ModuleHooks
from qgate.kernel_checks.arithmetic import Accounted
from qgate.kernel_checks.fits import ArithmeticFit, Case
from qgate.kernel_checks.fitting import judge
from qgate.kernel_checks.gradients import Gradient
from qgate.kernel_checks.requests import KernelRequest
from qgate.kernel_checks.runs import EXAMPLE, KernelRun
from qgate.kernel_checks.subject import KernelSubject
from qgate.models import Model

OTHER_CALL = "another call"


@dataclass(frozen=True)
class TakenCall:
    """One call of attention in a run: what its code read, and what it made of that.

    projected  results of the projections before it
    """

    name: str
    code: AttentionCode
    arguments: CallArguments
    projected: list[Tensor]
    actual: Tensor

    @property
    def call(self) -> AttentionCall:
        """Return the reference's code with the weights of the run, for wider arguments."""
        stored = self.code.stored_in(self.actual.dtype).stored_in(torch.float32)
        return stored.called(self.arguments)

    @property
    def tensors(self) -> list[Tensor]:
        """Return what the code gets: results of projections, and the other tensors of the call."""
        return [*self.projected, *self.call.tensors]

    @property
    def is_otherwise(self) -> bool:
        """Tell if a result of 16 bits is not that of the reference's code."""
        with torch.no_grad():
            return self.actual.dtype in HALVES and not torch.equal(self.by_reference(), self.actual)

    def by_reference(self) -> Tensor:
        """Return what the reference's code gives in the dtype of the run."""
        call = self.code.stored_in(self.actual.dtype).called(self.arguments)
        return call(*self.tensors).to(self.actual.dtype)


@contextmanager
def taken_calls(
    module: nn.Module,
    codes: Mapping[str, AttentionCode],
    take: Callable[[TakenCall], Tensor | None],
) -> Iterator[None]:
    """Hand over each call of attention; a tensor that `take` returns replaces its result."""
    called: dict[str, CallArguments] = {}
    projected: dict[str, dict[str, Tensor]] = {}

    def watch(hooks: ModuleHooks, name: str, code: AttentionCode) -> None:
        attention = module.get_submodule(name)

        def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
            called[name], projected[name] = CallArguments(args, kwargs), {}

        def end(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
            leaves = projected[name]
            if not args or not leaves.keys() >= set(code.sources):
                return None
            results = [leaves[leaf] for leaf in code.sources]
            replaced = take(TakenCall(name, code, called[name], results, args[0]))
            return None if replaced is None else ((replaced, *args[1:]), kwargs)

        hooks.add(attention, begin)
        for leaf in code.sources:

            def keep(_module: nn.Module, _args: Any, result: Tensor, leaf: str = leaf) -> None:
                projected[name][leaf] = result

            hooks.add(attention.get_submodule(leaf), None, keep)
        hooks.add(attention.get_submodule(code.result), end, first=True)

    with ModuleHooks() as hooks:
        for name, code in codes.items():
            watch(hooks, name, code)
        yield


@dataclass(frozen=True)
class HeldResult:
    """A result of attention, or a gradient of it, beside the function that it should come from."""

    name: str
    part: str
    like: Callable[..., Tensor]
    arguments: list[Tensor]
    actual: Tensor


@dataclass
class TakenGradients:
    """Gradients at what one call of attention read, and at what it made of it."""

    call: TakenCall
    outer: Tensor | None = None
    inner: dict[int, Tensor] = field(default_factory=dict)

    def watch(self) -> None:
        """Keep the gradients of the pass back."""

        def keep_outer(gradient: Tensor) -> None:
            self.outer = gradient

        self.call.actual.register_hook(keep_outer)
        for position, tensor in enumerate(self.call.projected):
            tensor.register_hook(functools.partial(self.inner.__setitem__, position))

    def results(self) -> Iterator[HeldResult]:
        """Yield each gradient with the one of the reference's code."""
        call = self.call
        if self.outer is None:
            return
        arguments = [*(tensor.detach() for tensor in call.tensors), self.outer]
        for position, actual in self.inner.items():
            part = call.code.sources[position]
            like = Gradient(call.call, position, (), f"the gradient of {part}")
            yield HeldResult(call.name, part, like, arguments, actual)


@dataclass
class RunAttention:
    """The attention of a mode beside that of the reference's code.

    arithmetics  the arithmetic of results and of gradients, by the name of the module and of the
                 projection that gets the gradient; None where sums are exact
    wrong        the name of a module whose results no arithmetic explains
    """

    model: Model
    codes: Mapping[str, AttentionCode]
    arithmetics: dict[tuple[str, str], Accounted | None] = field(default_factory=dict)
    wrong: str = ""

    @classmethod
    def of(cls, actual: Model, base: Model) -> RunAttention:
        """Find the attention of the reference that a model has under the same names."""
        present = {name for name, _ in actual.module.named_modules()}
        codes = {
            name: code
            for name, code in find_attention(base, shortened(base.inputs[0])).items()
            if present.issuperset(f"{name}.{leaf}" for leaf in (*code.sources, code.result))
        }
        return cls(actual, codes)

    def is_right_otherwise(self, samples: Sequence[Any]) -> bool:
        """Tell if all attention is right, and some is not what the reference's code gives."""

        @torch.no_grad()
        def run(sample: Any) -> None:
            with taken_calls(self.model.module, self.codes, self._hold):
                self.model.outputs(sample)

        return self._is_right(samples, run)

    def has_right_gradients(
        self, samples: Sequence[Any], run_backward: Callable[[Any], object]
    ) -> bool:
        """Tell the same of the gradients of attention, in passes back of samples."""

        def run(sample: Any) -> None:
            calls: list[TakenGradients] = []

            def watch(taken: TakenCall) -> None:
                if taken.is_otherwise:
                    self._hold(taken)
                    calls.append(TakenGradients(taken))
                    calls[-1].watch()

            with taken_calls(self.model.module, self.codes, watch):
                run_backward(sample)
            for call in calls:
                for result in call.results():
                    self._judge(result)

        return self._is_right(samples, run)

    def _is_right(self, samples: Sequence[Any], run: Callable[[Any], None]) -> bool:
        """Run a short sample first, on which arithmetics are looked for."""
        self.arithmetics.clear()
        try:
            for sample in (shortened(samples[0]), *samples) if self.codes else ():
                run(sample)
                if self.wrong or not self.arithmetics:
                    return False
        # A broken model may raise anything when its code runs in another way.
        except (QgateError, RuntimeError, ValueError, TypeError):
            return False
        return bool(self.arithmetics)

    def by_reference(self) -> AbstractContextManager[None]:
        """Let the reference's code compute the attention of the passes inside."""
        return taken_calls(self.model.module, self.codes, TakenCall.by_reference)

    def words(self) -> str:
        """Say how attention is computed, for a report."""
        return "; ".join(dict.fromkeys(of.words() for of in self.arithmetics.values() if of))

    def _hold(self, taken: TakenCall) -> None:
        if taken.is_otherwise:
            call, tensors = taken.call, [tensor.detach() for tensor in taken.tensors]
            self._judge(HeldResult(taken.name, "", call, tensors, taken.actual.detach()))

    @torch.no_grad()
    def _judge(self, result: HeldResult) -> None:
        """Judge a result as that of a kernel, with the reference's code as its reference."""
        if self.wrong:
            return
        key, like = (result.name, result.part), result.like
        subject = KernelSubject(like, like, result.name, {}, None, {}, None, "float32")
        earlier = self.arithmetics.get(key)
        run = KernelRun(OTHER_CALL if earlier else EXAMPLE, result.arguments, result.actual)
        # Layers of one model mostly compute alike.
        alike = (of for (_, part), of in self.arithmetics.items() if part == result.part)
        for accounted in [earlier] if earlier else filter(None, alike):
            flips = next(iter(accounted.fits.values())).flip_energy if earlier else 0.0
            fit = ArithmeticFit(Case.of(subject, {}, run), accounted.arithmetic, flips)
            if fit.is_right:
                self.arithmetics.setdefault(key, Accounted(accounted.arithmetic, {run.name: fit}))
                return
        judgement = None if earlier else judge(subject, [run], KernelRequest())
        if judgement is None or judgement.failing:
            self.wrong = result.name
            return
        self.arithmetics[key] = judgement.accounted
