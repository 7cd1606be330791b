"""Run a model and capture the tensors at its sites, without changing the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qgate.capture.next_tokens import PADDING, are_logits, masked_ids
from qgate.charts.overviews import Overview, Overviewed
from qgate.devices import exact_math
from qgate.errors import QgateError, unknown
from qgate.hooks import ModuleHooks
from qgate.hooks.observing import compile_pattern
from qgate.hooks.tapping import tap_sites
from qgate.models.model import Model, inputs_hash
from qgate.models.rows import real_tokens, token_ids, without_padding
from qgate.models.sites import Site, like
from qgate.text import counted, listed, megabytes

LOSS_SCALE = 2.0**8
"""Keeps gradients in float16 above its smallest numbers, as training does."""
_GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it differ in their fractions, near ones by much."""
Loss = Callable[[Tensor, Any], Tensor]
Keep = Callable[[int, Site, Tensor], "Tensor | None"]


@dataclass(repr=False)
class Capture(Overviewed):
    """Tensors by site, sample after sample; samples may differ in length.

    `gradients` has the gradients of the loss with respect to the same tensors, if requested: for an
    input the part that comes through its module, for a weight the sum over the samples.
    """

    model: str
    basis: str
    inputs: str
    tensors: dict[str, list[Tensor]] = field(default_factory=dict)
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)

    def __getitem__(self, site: str) -> list[Tensor]:
        if site not in self.tensors:
            raise unknown("captured site", site, self.tensors)
        return self.tensors[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def overview(self) -> Overview:
        """Describe the captured sites; no value is read."""
        title = f"Capture of {self.model}: {counted(len(self.tensors), 'site')}, "
        title += megabytes(self.nbytes())
        return Overview(title, list(self.tensors), self._site_row, "site", drawn="elements")

    def _site_row(self, site: str) -> dict[str, object]:
        samples = self.tensors[site]
        return {
            "site": site,
            "samples": len(samples),
            "first shape": "×".join(map(str, samples[0].shape)) if samples else "",
            "elements": sum(sample.numel() for sample in samples),
            "gradients": "yes" if site in self.gradients else "no",
        }

    def nbytes(self) -> int:
        """Return the bytes of all captured tensors."""
        captured = [*self.tensors.values(), *self.gradients.values()]
        return sum(t.numel() * t.element_size() for ts in captured for t in ts)


def pick_sites(model: Model, selection: str | Sequence[str] | None = None) -> list[Site]:
    """Choose sites by regular expression or by name; without either, the outputs of all blocks."""
    sites = model.sites()
    names = [site.name for site in sites]
    if selection is None:
        outputs = [site for site in sites if site.is_block and site.port == "output"]
        if not outputs:
            raise QgateError(
                f"{model.name} has no list of blocks; say which sites: {listed(names, 20)}."
            )
        return outputs
    if not isinstance(selection, str):
        by_name = dict(zip(names, sites, strict=True))
        for name in selection:
            if name not in by_name and name in (site.name for site in model.idle_sites()):
                raise QgateError(
                    f"nothing passes {name} of {model.name}: its module is not part of the forward "
                    "pass, or a fused path goes around it."
                )
            if name not in by_name:
                raise unknown(f"site of {model.name}", name, by_name)
        return [by_name[name] for name in dict.fromkeys(selection)]
    pattern = compile_pattern(selection, "pattern of sites")
    matches = [site for site in sites if pattern.search(site.name)]
    if not matches:
        raise QgateError(
            f"{selection!r} matches no site of {model.name}. Sites: {listed(names, 20)}."
        )
    return matches


def run(
    model: Model,
    sites: str | Sequence[str] | Sequence[Site] | None = None,
    *,
    samples: Sequence[Any] | None = None,
    forced: Capture | None = None,
    gradients: bool = False,
    loss: Loss | None = None,
) -> Capture:
    """Run the model on its samples and capture the sites.

    With `forced`, a capture of the reference with the inputs of the blocks, every block gets the
    reference's input: errors captured then are local, not carried. Gradients are local too, if that
    capture has those at the outputs of the blocks, which every block gets on the way back.
    """
    samples = model.inputs if samples is None else samples
    if sites is not None and not isinstance(sites, str):
        sites = [str(site) for site in sites]
    chosen = pick_sites(model, sites)
    record = Capture(model.name, model.basis, inputs_hash(samples))
    if not len(samples):
        raise QgateError(f"there are no samples to run {model.name} on.")
    if forced is not None and (forced.basis, forced.inputs) != (record.basis, record.inputs):
        raise QgateError(
            f"the inputs to force on {model.name} are in basis {forced.basis!r} or of other "
            f"samples: capture the reference in basis {model.basis!r} on the same samples."
        )
    record.tensors = {site.name: [] for site in chosen}

    def keep(_sample: int, site: Site, tensor: Tensor) -> None:
        # Later layers may write to the buffer, and a view would keep all of it alive.
        record.tensors[site.name].append(tensor.detach().clone())

    if gradients:
        _with_gradients(model, chosen, samples, keep, loss, record, forced)
    else:
        with torch.no_grad():
            for index, sample in enumerate(samples):
                pass_through(model, chosen, index, sample, keep, forced)
    return record


def pass_through(
    model: Model,
    sites: Iterable[Site],
    index: int,
    sample: Any,
    keep: Keep,
    forced: Capture | None = None,
    *,
    strict: bool = True,
) -> dict[str, Tensor]:
    """Pass one sample through the model and return its outputs.

    A site without a tensor is an error; unless it is strict, one of an expert is not where others
    of its layer had some.
    """
    sites = list(sites)
    passed: set[str] = set()
    ran: set[str] = set()

    def take(site: Site, tensor: Tensor) -> Tensor | None:
        passed.add(site.name)
        return keep(index, site, tensor)

    def force(site: Site, tensor: Tensor) -> Tensor:
        if site.name in ran:
            raise QgateError(f"{site.module} runs more than once per sample: it cannot be forced.")
        ran.add(site.name)
        reference = [] if forced is None else forced[site.name]
        if index >= len(reference) or reference[index].shape != tensor.shape:
            shape = tuple(reference[index].shape) if index < len(reference) else "nothing"
            raise QgateError(
                f"{site} cannot be forced: sample {index} is {tuple(tensor.shape)} here and "
                f"{shape} in the reference. Capture both from the same samples."
            )
        tensor = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
        value = reference[index].to(tensor.dtype)
        return cast("Tensor", _Forced.apply(tensor, value))  # type: ignore[no-untyped-call]

    inputs: list[Site] = []
    if forced is not None:
        inputs = [site for site in model.sites() if site.is_block and site.port == "input"]
        if not inputs:
            raise QgateError(f"{model.name} has no list of blocks whose inputs could be forced.")
    with tap_sites(model.module, inputs, force), tap_sites(model.module, sites, take):
        outputs = model.outputs(sample)
    _check_passed(model, sites, passed, index, strict=strict)
    return outputs


def _check_passed(
    model: Model, sites: Iterable[Site], passed: Collection[str], index: int, *, strict: bool
) -> None:
    """Refuse a pass in which a site got no tensor; weights of experts need not be read."""
    alike = {like(name) for name in passed}
    missed = [
        site.name
        for site in sites
        if site.name not in passed
        and not (like(site.name) in alike and (site.port == "weight" or not strict))
    ]
    if missed:
        raise QgateError(
            f"nothing passed {', '.join(missed[:5])} of {model.name} in sample {index}: the module "
            "is not part of this forward pass, or a fused path goes around it."
        )


class _Forced(torch.autograd.Function):
    """The reference's tensor on the way forward; the gradient passes on to the blocks before."""

    @staticmethod
    def forward(_context: Any, tensor: Tensor, reference: Tensor) -> Tensor:  # noqa: ARG004
        return reference.clone()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def loss_of(outputs: Mapping[str, Tensor], sample: Any) -> Tensor:
    """Return the loss of the logits, and the weighted mean square of each other output."""
    loss = next_token_loss(outputs["logits"], sample)
    for name, output in outputs.items():
        if name != "logits" and output.numel():
            loss = loss + _weighted_square(output).to(loss.device)
    return loss


def next_token_loss(logits: Tensor, sample: Any) -> Tensor:
    """Return the mean cross entropy of the next token, or the loss of outputs without tokens."""
    ids, real = token_ids(sample), real_tokens(sample)
    if ids is not None and are_logits(logits, ids) and ids.shape[-1] > 1:
        ids = masked_ids(ids, sample).to(logits.device)
        rows = logits[..., :-1, :].float().flatten(0, -2)
        return cross_entropy(rows, ids[..., 1:].flatten(), ignore_index=PADDING)
    return _weighted_square(without_padding(logits, real))


def _weighted_square(output: Tensor) -> Tensor:
    """Return the mean of squares, with weights from 0.5 to 1.5 that differ along each row.

    Without them a norm at the end, of features or of an embedding, would keep the loss constant,
    and all gradients would be what rounding leaves of zero.
    """
    number = output[0].numel() if output.dim() > 1 and len(output) else output.numel()
    steps = torch.arange(1, number + 1, dtype=torch.float64, device="cpu") * _GOLDEN
    weights = (steps.frac() + 0.5).to(output.device, torch.float32)
    return (output.float().square().reshape(-1, max(number, 1)) * weights).mean()


def _with_gradients(
    model: Model,
    sites: list[Site],
    samples: Sequence[Any],
    keep: Keep,
    loss: Loss | None,
    record: Capture,
    forced: Capture | None = None,
) -> None:
    at_outputs = _forced_gradients(model, sites, forced)
    grads = record.gradients = {site.name: [] for site in sites}
    leaves = {
        s.name: _leaf(model.module.get_submodule(s.module)) for s in sites if s.port == "weight"
    }
    missing = [name for name, leaf in leaves.items() if not leaf.requires_grad]
    if missing:
        raise QgateError(
            f"{missing[0]} of {model.name} takes no gradient: call requires_grad_(True) on it."
        )
    hooks = ModuleHooks()
    views: list[tuple[Site, Tensor, Any]] = []

    def take(sample_index: int, site: Site, tensor: Tensor) -> Tensor | None:
        keep(sample_index, site, tensor)
        if site.port == "weight" or not tensor.requires_grad:
            return None
        if site.port not in ("output", "state"):
            # A separate view, so that an input's gradient is that of this module alone.
            tensor = tensor.view_as(tensor)
            views.append((site, tensor, tensor.grad_fn))
        elif tensor._is_view():
            # Writing into a view takes its hooks away.
            tensor = tensor.clone()
        index = len(grads[site.name])
        grads[site.name].append(torch.zeros_like(tensor))

        def arrived(grad: Tensor) -> Tensor | None:
            if site.name in at_outputs:
                grad = (at_outputs[site.name][sample_index] * scale).to(grad)
            grads[site.name][index] = unscaled(grad.detach())
            return grad if site.name in at_outputs else None

        hooks.keep(tensor.register_hook(arrived))
        return tensor

    parameters = [p for p in model.module.parameters() if p.requires_grad]
    scale = LOSS_SCALE if any(p.dtype == torch.float16 for p in parameters) else 1.0

    def unscaled(grad: Tensor) -> Tensor:
        return grad.clone() if scale == 1 else grad.float() * (1 / scale)

    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            for sample_index, sample in enumerate(samples):
                outputs = pass_through(model, sites, sample_index, sample, take, forced)
                logits = outputs["logits"]
                value = loss_of(outputs, sample) if loss is None else loss(logits, sample)
                for site, tensor, node in views:
                    if tensor.grad_fn is not node:  # its hook is lost, and zeros would be read
                        raise QgateError(
                            f"{site.module} writes into its input in place: there is no gradient "
                            f"at {site}."
                        )
                views.clear()
                if not value.requires_grad:
                    raise QgateError(
                        f"the loss of {model.name} takes no gradient: call requires_grad_(True)."
                    )
                try:
                    with exact_math():
                        (value * scale).backward()
                except RuntimeError as error:
                    if "inplace operation" not in str(error):
                        raise
                    raise QgateError(
                        f"{model.name} takes no gradients, without qgate either: its code writes "
                        "in place into a tensor that torch needs on the way back."
                    ) from error
        for name, site_gradients in grads.items():
            if len(site_gradients) < len(record.tensors[name]) and name not in leaves:
                raise QgateError(f"no gradient reaches {name} of {model.name}: it depends on none.")
        for name, leaf in leaves.items():
            grads[name] = [torch.zeros_like(leaf) if leaf.grad is None else unscaled(leaf.grad)]
    finally:
        hooks.remove()
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _forced_gradients(
    model: Model, sites: Sequence[Site], forced: Capture | None
) -> dict[str, list[Tensor]]:
    """Return the reference's gradients at the outputs of all blocks, none in a free run."""
    if forced is None:
        return {}
    outputs = [s.name for s in model.sites() if s.is_block and s.port == "output"]
    captured = {site.name for site in sites}
    for name in outputs:
        if name not in forced.gradients or name not in captured:
            raise QgateError(
                f"gradients of {model.name} cannot be forced without {name}: capture the "
                "reference, and this run, with gradients at the inputs and outputs of all blocks."
            )
    return {name: forced.gradients[name] for name in outputs}


def _leaf(module: nn.Module) -> nn.Parameter:
    """Return the parameter behind a weight, which may be quantized by a parametrization."""
    if isinstance(module._parameters.get("weight"), nn.Parameter):
        return module._parameters["weight"]  # type: ignore[return-value]
    if hasattr(module, "parametrizations"):
        return module.parametrizations.weight.original  # type: ignore[union-attr, return-value]
    return module.weight  # type: ignore[return-value]
