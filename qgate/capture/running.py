"""Run a model and keep what flows at its sites; the model is afterwards as it was before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from qgate.capture.captures import Capture
from qgate.devices import exact_math
from qgate.errors import QgateError, unknown
from qgate.models.model import Model, inputs_hash
from qgate.models.sites import Site
from qgate.models.tapping import tapped

Loss = Callable[[Tensor, Any], Tensor]
Keep = Callable[[int, Site, Tensor], "Tensor | None"]


def pick_sites(model: Model, wanted: str | Sequence[str] | None = None) -> list[Site]:
    """Sites by regular expression or by name; without either, the outputs of all blocks."""
    sites = model.sites()
    if wanted is None:
        found = [site for site in sites if site.kind == "block" and site.port == "output"]
        if not found:
            raise QgateError(
                f"{model.name} has no list of blocks; say which sites: {_listed(sites)}."
            )
        return found
    if not isinstance(wanted, str):
        by_name = {site.name: site for site in sites}
        for name in wanted:
            if name in (site.name for site in ([] if name in by_name else model.idle_sites())):
                raise QgateError(
                    f"nothing passes {name} of {model.name}: its module is not part of the forward "
                    "pass, or a fused path goes around it."
                )
            if name not in by_name:
                raise unknown(f"site of {model.name}", name, by_name)
        return [by_name[name] for name in dict.fromkeys(wanted)]
    try:
        pattern = re.compile(wanted)
    except re.error as error:
        raise QgateError(f"{wanted!r} is not a regular expression: {error}.") from None
    found = [site for site in sites if pattern.search(site.name)]
    if not found:
        raise QgateError(f"{wanted!r} matches no site of {model.name}. Sites: {_listed(sites)}.")
    return found


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

    With `forced`, a capture of the reference with the inputs of the blocks, every block is given
    the reference's input: what is captured then is made here, and not carried along.
    """
    samples = model.inputs if samples is None else samples
    chosen = _chosen(model, sites)
    record = Capture(model.name, model.basis, inputs_hash(samples))
    if not len(samples):
        raise QgateError(f"there are no samples to run {model.name} on.")
    if forced is not None and (forced.basis, forced.inputs) != (record.basis, record.inputs):
        raise QgateError(
            f"the inputs to force on {model.name} are in basis {forced.basis!r} or of other "
            f"samples: capture the reference in basis {model.basis!r} on the same samples."
        )
    if forced is not None and gradients:
        raise QgateError("gradients end at inputs that are forced: capture them in a free run.")
    record.tensors = {site.name: [] for site in chosen}

    def keep(_sample: int, site: Site, tensor: Tensor) -> None:
        # The buffer may be written again by what follows, and a view keeps all of it alive.
        record.tensors[site.name].append(tensor.detach().clone())

    if gradients:
        _with_gradients(model, chosen, samples, forced, keep, loss or next_token_loss, record)
    else:
        with torch.no_grad():
            for index, sample in enumerate(samples):
                pass_through(model, chosen, index, sample, keep, forced)
    return record


def _listed(sites: Sequence[Site], most: int = 20) -> str:
    names = [site.name for site in sites]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _chosen(model: Model, sites: str | Sequence[str] | Sequence[Site] | None) -> list[Site]:
    if sites is None or isinstance(sites, str):
        return pick_sites(model, sites)
    listed = list(sites)
    return pick_sites(model, [str(site) for site in listed])


def pass_through(
    model: Model,
    sites: Iterable[Site],
    index: int,
    sample: Any,
    keep: Keep,
    forced: Capture | None = None,
) -> Tensor:
    """One sample through the model; a site that nothing passed is an error."""
    sites = list(sites)
    seen: set[str] = set()
    calls: dict[str, int] = {}

    def take(site: Site, tensor: Tensor) -> Tensor | None:
        seen.add(site.name)
        return keep(index, site, tensor)

    def force(site: Site, tensor: Tensor) -> Tensor:
        if calls.setdefault(site.name, 0):
            raise QgateError(f"{site.module} runs more than once per sample: it cannot be forced.")
        calls[site.name] += 1
        return _given(forced, site, index, tensor)

    inputs = [] if forced is None else _block_inputs(model)
    with tapped(model.module, inputs, force), tapped(model.module, sites, take):
        result = model(sample)
    missed = [site.name for site in sites if site.name not in seen]
    if missed:
        raise QgateError(
            f"nothing passed {', '.join(missed[:5])} of {model.name} in sample {index}: the module "
            "is not part of this forward pass, or a fused path goes around it."
        )
    return result


def _block_inputs(model: Model) -> list[Site]:
    found = [s for s in model.sites() if s.kind == "block" and s.port == "input"]
    if not found:
        raise QgateError(f"{model.name} has no list of blocks whose inputs could be forced.")
    return found


def _given(forced: Capture | None, site: Site, index: int, tensor: Tensor) -> Tensor:
    if forced is None:
        return tensor
    given = forced[site.name]
    if index >= len(given) or given[index].shape != tensor.shape:
        shape = tuple(given[index].shape) if index < len(given) else "nothing"
        raise QgateError(
            f"{site} cannot be forced: sample {index} is {tuple(tensor.shape)} here and {shape} in "
            "the reference. Capture both from the same samples."
        )
    return given[index].to(tensor.dtype)


def next_token_loss(logits: Tensor, sample: Any) -> Tensor:
    """Mean cross entropy of the next token; of outputs that are no logits, their mean square."""
    ids = sample.get("input_ids") if isinstance(sample, dict) else sample
    if isinstance(ids, Tensor) and not ids.is_floating_point() and logits.shape[:-1] == ids.shape:
        ids = ids.to(logits.device)
        if int(ids.max()) < logits.shape[-1] and ids.shape[-1] > 1:
            return cross_entropy(logits[..., :-1, :].float().flatten(0, -2), ids[..., 1:].flatten())
    return logits.float().square().mean()


def _with_gradients(
    model: Model,
    sites: list[Site],
    samples: Sequence[Any],
    forced: Capture | None,
    keep: Keep,
    loss: Loss,
    record: Capture,
) -> None:
    record.gradients = {site.name: [] for site in sites}
    leaves = {
        s.name: _leaf(model.module.get_submodule(s.module)) for s in sites if s.port == "weight"
    }
    missing = [name for name, leaf in leaves.items() if not leaf.requires_grad]
    if missing:
        raise QgateError(
            f"{missing[0]} of {model.name} takes no gradient: call requires_grad_(True) on it."
        )
    handles: list[Any] = []
    views: list[tuple[Site, Tensor, Any]] = []
    grads = record.gradients

    def take(index: int, site: Site, tensor: Tensor) -> Tensor | None:
        keep(index, site, tensor)
        if site.port == "weight" or not tensor.requires_grad:
            return None
        if site.port not in ("output", "state"):
            # A name of its own, so that an input's gradient is that of this module alone.
            tensor = tensor.view_as(tensor)
            views.append((site, tensor, tensor.grad_fn))
        elif tensor._is_view():
            # Writing into a view takes its hooks away.
            tensor = tensor.clone()
        place = len(grads[site.name])
        grads[site.name].append(torch.zeros_like(tensor))

        def arrived(grad: Tensor) -> None:
            grads[site.name][place] = grad.detach().clone()

        handles.append(tensor.register_hook(arrived))
        return tensor

    parameters = [p for p in model.module.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            for index, sample in enumerate(samples):
                value = loss(pass_through(model, sites, index, sample, take, forced), sample)
                _check_unwritten(views)
                if not value.requires_grad:
                    raise QgateError(
                        f"the loss of {model.name} takes no gradient: call requires_grad_(True)."
                    )
                with exact_math():
                    value.backward()
        short = [name for name in grads if len(grads[name]) < len(record.tensors[name])]
        for name in (name for name in short if name not in leaves):
            raise QgateError(f"no gradient reaches {name} of {model.name}: it depends on none.")
        for name, leaf in leaves.items():
            grads[name] = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()]
    finally:
        for handle in handles:
            handle.remove()
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad


def _check_unwritten(views: list[tuple[Site, Tensor, Any]]) -> None:
    """A view that is written into loses its hook, and the gradient would read as zero."""
    for site, tensor, node in views:
        if tensor.grad_fn is not node:
            raise QgateError(
                f"{site.module} writes into its input in place: there is no gradient at {site}."
            )
    views.clear()


def _leaf(module: nn.Module) -> nn.Parameter:
    """The parameter behind a weight, which a quantizer may stand before."""
    if isinstance(module._parameters.get("weight"), nn.Parameter):
        return module._parameters["weight"]  # type: ignore[return-value]
    if hasattr(module, "parametrizations"):
        return module.parametrizations.weight.original  # type: ignore[union-attr, return-value]
    return module.weight  # type: ignore[return-value]
