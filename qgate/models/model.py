"""Models to gate: a module, its inputs, and the names of its parts."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from qgate.devices import exact_math
from qgate.errors import QgateError, unknown
from qgate.hooks.tapping import tap_sites
from qgate.models.fingerprints import fingerprint
from qgate.models.refusals import refusal, which_of
from qgate.models.sites import Site, kind_of, sites_of
from qgate.text import listed

Basis = str
PLAIN: Basis = "plain"
_HEADS = re.compile(
    r"(^|\.)(lm_head|embed_out|output_embeddings|cls|classifier|score|qa_outputs)(\.|$)"
)


@dataclass(eq=False, repr=False)
class Model:
    """A model to gate.

    module       any torch module; it is put in evaluation mode
    inputs       the samples of the evaluation: each a tensor of token ids, a tuple of positional
                 or a dict of keyword arguments
    name         how results and baselines call it
    calibration  samples that scales are calibrated on, or what cuts them; not those evaluated
    modes        modes of its own: name -> a qgate.Mode, or a callable that takes this Model and
                 returns a module quantized for real
    layers       names of the blocks that are gated one by one, first to last (found if not given)
    head         names of the linear layers that make the logits and stay as they are (found)
    part         regular expression: only modules whose names it finds are measured and quantized
    bases        other coordinates of its activations: name -> callable module -> module
    """

    module: nn.Module
    inputs: Sequence[Any]
    name: str = "model"
    calibration: Sequence[Any] | Callable[[], Sequence[Any]] = ()
    modes: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    head: tuple[str, ...] | None = None
    part: str = ""
    bases: Mapping[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)
    basis: Basis = PLAIN
    _rotated: dict[Basis, tuple[tuple[object, ...], Model]] = field(
        default_factory=dict, init=False, repr=False
    )
    _sites: tuple[Site, ...] | None = field(default=None, repr=False)
    _weights_digest: tuple[object, str] | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {type(self.module).__name__}, basis={self.basis!r})"

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"a Model holds a torch.nn.Module, not {type(self.module).__name__}.")
        if not len(self.inputs):
            raise QgateError(f"model {self.name!r} has no inputs: there is nothing to run it on.")
        try:
            inside = re.compile(self.part)
        except re.error as error:
            raise QgateError(f"part {self.part!r} is not a regular expression: {error}.") from None
        names = [name for name, _ in self.module.named_modules()]
        if not any(inside.search(name) for name in names):
            raise QgateError(
                f"part {self.part!r} finds no module of {self.name}; it has "
                f"{listed(names[1:], 20)}."
            )
        self.module.eval()
        self.layers = tuple(self.layers) or blocks_of(self.module, inside)
        self.head = tuple(self.head) if self.head is not None else head_of(self.module)
        for name in (*self.layers, *self.head):
            if name not in names:
                raise unknown(f"module of {self.name}", name, names[1:])

    @property
    def device(self) -> torch.device:
        first = next(self.module.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def sites(self) -> list[Site]:
        """Return the sites of `part` that a tensor passes, in the order of passing.

        The first sample is run to find them. A model in a mode has those of the model it
        stands for.

        They are found by running the first sample. In a mode they are those of the model that it
        stands for.
        """
        if self._sites is None:
            self._sites = self._used_sites()
        return list(self._sites)

    def idle_sites(self) -> list[Site]:
        """Return the sites that no tensor passes, such as those a fused path goes around."""
        passed = set(self.sites())
        return [site for site in self._all_sites() if site not in passed]

    def layer_of(self, module: str) -> str:
        """Return the block that a module is in, empty for one outside all blocks."""
        inside = [name for name in self.layers if f"{module}.".startswith(f"{name}.")]
        return max(inside, key=len, default="")

    def _used_sites(self) -> tuple[Site, ...]:
        order: dict[Site, None] = {}

        def take(site: Site, _tensor: Tensor) -> None:
            order.setdefault(site)

        with torch.no_grad(), tap_sites(self.module, self._all_sites(), take):
            self(self.inputs[0])
        return tuple(order)

    def _all_sites(self) -> list[Site]:
        inside = re.compile(self.part)
        return [site for site in sites_of(self.module, self.layers) if inside.search(site.module)]

    def calibration_samples(self) -> Sequence[Any]:
        """Return the samples that scales are calibrated on."""
        samples = self.calibration() if callable(self.calibration) else self.calibration
        if not len(samples):
            raise QgateError(
                f"{self.name} has no samples to calibrate on: give its Model calibration=[…]."
            )
        return samples

    def __call__(self, sample: Any) -> Tensor:
        """Run one sample and return the first tensor of the result, usually logits."""
        return first_tensor(self._run(sample), self.name)

    def outputs(self, sample: Any) -> dict[str, Tensor]:
        """Run one sample and return all floating tensors of the result, `logits` first."""
        result = self._run(sample)
        logits = first_tensor(result, self.name)
        more = {
            f"output{label}": tensor
            for label, tensor in _tensors(result)
            if tensor is not logits and tensor.is_floating_point()
        }
        return {"logits": logits, **more}

    def _run(self, sample: Any) -> Any:
        moved = _moved(sample, self.device)
        try:
            with exact_math():
                if isinstance(moved, Mapping):
                    return self.module(**moved)
                if isinstance(moved, tuple):
                    return self.module(*moved)
                return self.module(moved)
        except QgateError:
            raise
        except Exception as error:
            raise refusal(self.name, which_of(self.inputs, sample), sample, error) from error

    def in_basis(self, basis: Basis) -> Model:
        """Return the same model, not quantized, with its activations in other coordinates."""
        if basis == self.basis:
            return self
        if self.basis != PLAIN:
            raise QgateError(f"{self.name} is in basis {self.basis!r} already, not in {PLAIN!r}.")
        if basis not in self.bases:
            raise unknown(f"basis of {self.name}", basis, [PLAIN, *self.bases])
        state = tuple(fingerprint(p) for p in self.module.state_dict(keep_vars=True).values())
        stored = self._rotated.get(basis)
        if stored is None or stored[0] != state:
            rotated_model = replace(
                self, module=self.bases[basis](self.module), basis=basis, _sites=None
            )
            stored = self._rotated[basis] = (state, rotated_model)
        return stored[1]

    def with_module(self, module: nn.Module) -> Model:
        """Return a model of the same inputs and sites around a quantized module."""
        names = {name for name, _ in module.named_modules()}
        return replace(
            self,
            module=module,
            layers=tuple(name for name in self.layers if name in names),
            head=tuple(name for name in self.head or () if name in names),
            _sites=tuple(self.sites()),
        )

    def weights_hash(self) -> str:
        """Return the SHA-256 of names, shapes, dtypes and bytes of all parameters and buffers."""
        state = tuple(fingerprint(p) for p in self.module.state_dict(keep_vars=True).values())
        if self._weights_digest is None or self._weights_digest[0] != state:
            digest = hashlib.sha256()
            for name, tensor in self.module.state_dict().items():
                _feed(digest, name, tensor)
            self._weights_digest = (state, digest.hexdigest())
        return self._weights_digest[1]


def inputs_hash(samples: Sequence[Any]) -> str:
    """Return the SHA-256 of the tensors of the samples, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        for label, tensor in _tensors(sample):
            _feed(digest, label, tensor)
        digest.update(b"--\n")
    return digest.hexdigest()


def first_tensor(result: Any, name: str) -> Tensor:
    """Return the logits of a Hugging Face output, else the first tensor of a tuple or dict."""
    for field_name in ("logits", "last_hidden_state"):
        value = getattr(result, field_name, None)
        if isinstance(value, Tensor):
            return value
    for _, tensor in _tensors(result):
        return tensor
    raise QgateError(f"{name} returned {type(result).__name__}, and no tensor is in it.")


def _tensors(value: Any, label: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(label, value)]
    if isinstance(value, Mapping):
        pairs: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list | tuple):
        pairs = list(enumerate(value))
    else:
        return []
    return [tensor for key, item in pairs for tensor in _tensors(item, f"{label}.{key}")]


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value


def _feed(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)


def blocks_of(root: nn.Module, inside: re.Pattern[str]) -> tuple[str, ...]:
    """Return the first of the longest lists of modules of one class."""
    best: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        same = len({type(child) for child in module}) == 1
        names = tuple(f"{name}.{k}".lstrip(".") for k in range(len(module)))
        # A list of linear layers is a part of one block.
        same = same and (kind_of(module[0]) == "other" or any(True for _ in module[0].children()))
        if same and len(names) > len(best) and inside.search(names[0]):
            best = names
    return best


def head_of(root: nn.Module) -> tuple[str, ...]:
    linears = {name: m for name, m in root.named_modules() if isinstance(m, nn.Linear)}
    embeddings = getattr(root, "get_output_embeddings", None)
    output = embeddings() if callable(embeddings) else None
    named = tuple(name for name, module in linears.items() if module is output)
    return named or tuple(name for name in linears if _HEADS.search(name))
