"""The selective scan: a readable time loop as the definition, and a faster form of equal bits.

Three orders of the same sums exist in practice, and quantized kernels are told apart by them:

block    increments B * (delta * u), the output starts with D * u and then adds C_n * x_n one by one
loop     increments (delta * B) * u, the sum over n, then D * u
einsum   increments as in loop, the C_n * x_n added one by one, then D * u

The state is kept in float32, one step after the other in time, whatever the order: what comes
later never changes what came before. A sample has the same bits alone and in a batch where the
channels fill the registers of the processor (multiples of 32), as in every model of practice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from qgate.errors import unknown
from qgate.kernels import recurrences
from qgate.models.mamba.state import MixerState

Order = Literal["loop", "block", "einsum"]
Store = Callable[[Tensor, int], Tensor]
"""Returns what is kept of a tensor for later tokens, given the number of its token.

That of a scan takes the state after one token, (states, batch, channels).
"""

_CHUNK, _CHUNK_ON_DEVICE = 1 << 19, 1 << 24


class ScanResult(NamedTuple):
    """Output after the gate, and the state after the last token, (batch, channels, states)."""

    output: Tensor
    state: Tensor


class Scan(nn.Module):
    """The scan as a module without parameters, which can be hooked and replaced.

    With `store` each token reads what that made of the state after the token before.
    """

    kind = "mamba"
    ports = ("u", "dt", "B", "C", "z")

    def __init__(self, order: Order = "loop") -> None:
        super().__init__()
        if order not in get_args(Order):
            raise unknown("scan order", order, get_args(Order))
        self.order: Order = order
        self.store: Store | None = None

    def forward(
        self,
        u: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        z: Tensor,
        A_log: Tensor,
        D: Tensor,
        dt_bias: Tensor | None,
        cache: MixerState | None = None,
    ) -> ScanResult:
        inputs = (u, dt, B, C, z, A_log, D, dt_bias, self.order)
        if cache is None:
            return selective_scan(*inputs, store=self.store)
        result = selective_scan(*inputs, state=cache.ssm, first=cache.length, store=self.store)
        cache.ssm = result.state
        return result

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def selective_scan(
    u: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    z: Tensor,
    A_log: Tensor,
    D: Tensor,
    dt_bias: Tensor | None,
    order: Order = "loop",
    *,
    by_definition: bool = False,
    state: Tensor | None = None,
    first: int = 0,
    store: Store | None = None,
) -> ScanResult:
    """Scan over tokens: u, dt, z (batch, tokens, channels), B, C (batch, tokens, states).

    A_log is (channels, states); D and dt_bias have one number per channel. The scan begins with
    `state`, or with zeros, at the token numbered `first`. With `store` each token reads what was
    stored after the one before; the output of a token is made of its state before it is stored.
    """
    u, dt, z, B, C = (x.float().transpose(0, 1).contiguous() for x in (u, dt, z, B, C))
    delta = softplus(dt if dt_bias is None else dt + dt_bias.float())
    A = -torch.exp(A_log.float().t().contiguous())
    D = D.float()
    begin = None if state is None else state.permute(2, 0, 1).contiguous()
    if by_definition:
        y, last = _definition(delta, u, A, B, C, D, order)
    else:
        y, last = _Chunked.apply(delta, u, A, B, C, D, order, begin, first, store)  # type: ignore[no-untyped-call]
    gated = y * (z * torch.sigmoid(z))
    return ScanResult(gated.transpose(0, 1), last.permute(1, 2, 0))


def _definition(
    delta: Tensor, u: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, order: Order
) -> tuple[Tensor, Tensor]:
    """Scan one token after the other, all tensors laid out as (states, batch, channels)."""
    state = delta.new_zeros(A.shape[0], *delta.shape[1:])
    outputs = []
    for d, x, b, c in zip(delta, u, B, C, strict=True):
        b, c = b.t().unsqueeze(-1), c.t().unsqueeze(-1)
        increment = b * (d * x) if order == "block" else (d * b) * x
        state = torch.exp(d * A[:, None]) * state + increment
        if order == "block":
            y = D * x
            for n in range(len(state)):
                y = y + c[n] * state[n]
        elif order == "einsum":
            y = c[0] * state[0]
            for n in range(1, len(state)):
                y = y + c[n] * state[n]
            y = y + D * x
        else:
            y = (state * c).sum(0) + D * x
        outputs.append(y)
    return torch.stack(outputs) if outputs else torch.zeros_like(u), state


def _increments(delta: Tensor, u: Tensor, B: Tensor, order: Order) -> Tensor:
    if order == "block":
        return B.unsqueeze(-1) * (delta * u).unsqueeze(1)
    return (delta.unsqueeze(1) * B.unsqueeze(-1)).mul_(u.unsqueeze(1))


def _outputs(states: Tensor, C: Tensor, skip: Tensor, order: Order, spare: Tensor) -> Tensor:
    """Compute the outputs of a chunk of states; `spare` is overwritten."""
    if order == "block":
        for n in range(states.shape[1]):
            skip += C[:, n].unsqueeze(-1) * states[:, n]
        return skip
    if order == "einsum":
        total = C[:, 0].unsqueeze(-1) * states[:, 0]
        for n in range(1, states.shape[1]):
            total += C[:, n].unsqueeze(-1) * states[:, n]
        return total + skip
    torch.mul(states, C.unsqueeze(-1), out=spare)
    return spare.sum(1) + skip


class _Chunked(torch.autograd.Function):
    """The products and sums of the definition, on chunks of tokens that stay in the cache.

    Only `decay * state + increment` has to go token by token. The backward pass keeps the state at
    the start of every chunk and computes the others again, so that memory grows with the number
    of tokens and not with tokens times states.
    """

    @staticmethod
    def forward(
        ctx: Any,
        delta: Tensor,
        u: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor,
        order: Order,
        state: Tensor | None,
        first: int,
        store: Store | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, batch, channels = delta.shape
        B, C = B.transpose(1, 2).contiguous(), C.transpose(1, 2).contiguous()
        numbers = _CHUNK if delta.device.type == "cpu" else _CHUNK_ON_DEVICE
        step = max(1, numbers // max(1, A.numel() * batch))
        state = delta.new_zeros(A.shape[0], batch, channels) if state is None else state
        y = torch.empty_like(u)
        keep = any(ctx.needs_input_grad)
        starts = []
        for lo in range(0, tokens, step):
            now = slice(lo, lo + step)
            starts += [state] if keep else []
            decay, states, stored = _states(
                delta[now], u[now], A, B[now], state, order, first + lo, store
            )
            y[now] = _outputs(states, C[now], D * u[now], order, decay)
            state = stored[-1].clone()
        if keep:
            ctx.save_for_backward(delta, u, A, B, C, D, *starts)
            ctx.step, ctx.order, ctx.first, ctx.store = step, order, first, store
        return y, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        delta, u, A, B, C, D, *starts = ctx.saved_tensors
        dy = dy.contiguous()
        ddelta, du = torch.empty_like(delta), dy * D
        dB, dC = torch.empty_like(B), torch.empty_like(C)
        dA = torch.zeros_like(A)
        carry = dstate.clone(memory_format=torch.contiguous_format)
        for index in reversed(range(len(starts))):
            now = slice(index * ctx.step, (index + 1) * ctx.step)
            decay, states, stored = _states(
                delta[now], u[now], A, B[now], starts[index], ctx.order, ctx.first + now.start,
                ctx.store,
            )  # fmt: skip
            dC[now] = (states * dy[now].unsqueeze(1)).sum(-1)
            grad = C[now].unsqueeze(-1) * dy[now].unsqueeze(1)
            carry = recurrences.run(decay, grad, carry, backward=True)
            dB[now] = (grad * (delta[now] * u[now]).unsqueeze(1)).sum(-1)
            through = (grad * B[now].unsqueeze(-1)).sum(1)
            du[now] += through * delta[now]
            before = torch.cat([starts[index][None], stored[:-1]])
            grad = grad.mul_(before).mul_(decay)
            dA += (grad * delta[now].unsqueeze(1)).sum((0, 2))
            ddelta[now] = through * u[now] + grad.mul_(A[:, None]).sum(1)
        dD = (dy * u).sum((0, 1))
        grads = (ddelta, du, dA, dB.transpose(1, 2), dC.transpose(1, 2), dD)
        return (*grads, None, None, None, None)


def _states(
    delta: Tensor,
    u: Tensor,
    A: Tensor,
    B: Tensor,
    state: Tensor,
    order: Order,
    first: int,
    store: Store | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute decays and states of a chunk, (tokens, states, batch, channels), and the stored."""
    decay = (delta.unsqueeze(1) * A[:, None]).exp_()
    states = _increments(delta, u, B, order)
    if store is None:
        recurrences.run(decay, states, state)
        return decay, states, states
    spare, stored = torch.empty_like(state), []
    for number, (now, factor) in enumerate(zip(states, decay, strict=True), first):
        torch.mul(factor, state, out=spare)
        state = store(now.add_(spare), number)
        stored.append(state)
    return decay, states, torch.stack(stored)
