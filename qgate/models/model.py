"""Models to gate: a module, its inputs, and the names of its parts."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qgate.device_errors import lost_device
from qgate.devices import exact_math
from qgate.errors import QgateError, unknown
from qgate.hooks.observing import compile_pattern
from qgate.hooks.recomputing import straight_calls
from qgate.hooks.tapping import tap_sites
from qgate.interruptions import raise_interruption, raised_by_users
from qgate.models.blocks import blocks_of, leaves_of
from qgate.models.fingerprints import fingerprint
from qgate.models.refusals import refusal, which_of
from qgate.models.rows import is_text, map_tensors, tensors_of, with_companions
from qgate.models.sites import Site, any_number, sites_of
from qgate.models.task_metric import TaskMetric, check_metric
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
    metric       task of a model that predicts no next tokens: a callable that names what it needs
                 of outputs, reference and inputs, and returns a number, or one for each sample
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
    metric: TaskMetric | None = None
    _rotated: dict[Basis, tuple[tuple[object, ...], Model]] = field(
        default_factory=dict, init=False, repr=False
    )
    _sites: tuple[Site, ...] | None = field(default=None, repr=False)
    _output_channels: Mapping[str, int] = field(default_factory=dict, repr=False)
    _picks_layers: bool = field(default=False, init=False, repr=False)
    _weights_digest: tuple[object, str] | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        return f"Model({self.name!r}, {type(self.module).__name__}, basis={self.basis!r})"

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise TypeError(f"a Model holds a torch.nn.Module, not {type(self.module).__name__}.")
        if not len(self.inputs):
            raise QgateError(f"model {self.name!r} has no inputs: there is nothing to run it on.")
        inside = compile_pattern(self.part, "part")
        names = [name for name, _ in self.module.named_modules()]
        if not any(inside.search(name) for name in names):
            raise QgateError(
                f"part {self.part!r} finds no module of {self.name}; it has "
                f"{listed(names[1:], 20)}."
            )
        check_metric(self.metric, self.name)
        # An exported graph is in one mode for good.
        with contextlib.suppress(NotImplementedError):
            self.module.eval()
        # A mode's model has the layers of what it stands for: none, if each runs several times.
        self._picks_layers = not self.layers and self._sites is None
        if self._picks_layers:
            self.layers = blocks_of(self.module, inside) or leaves_of(self.module, inside)
        self.layers = tuple(self.layers)
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

        They are found by running the first sample. In a mode they are those of the model that it
        stands for.
        """
        if self._sites is None:
            self._sites = self._used_sites()
        return list(self._sites)

    def idle_sites(self) -> list[Site]:
        """Return the sites that no tensor passes, such as those a fused path goes around."""
        passed = {site.name for site in self.sites()}
        return [site for site in self._all_sites() if site.name not in passed]

    def layer_of(self, module: str) -> str:
        """Return the block that a module is in, empty for one outside all blocks."""
        inside = [name for name in self.layers if f"{module}.".startswith(f"{name}.")]
        return max(inside, key=len, default="")

    def channel_axis(self, name: str) -> int:
        """Return the axis of the channels of a site or an output: the last one but for images."""
        return self._channel_axes.get(name, -1)

    @cached_property
    def _channel_axes(self) -> dict[str, int]:
        return {site.name: site.channels for site in self.sites()} | dict(self._output_channels)

    def _used_sites(self) -> tuple[Site, ...]:
        calls: Counter[Site] = Counter()
        shapes: dict[str, tuple[int, ...]] = {}
        stored = dict(self.module.named_parameters(remove_duplicate=False))
        computed: set[str] = set()

        def take(site: Site, tensor: Tensor) -> None:
            calls[site] += 1
            if site.port == "weight" and tensor is not stored.get(f"{site.module}.weight"):
                computed.add(site.module)  # as torch.func.functional_call gives them
            shapes.setdefault(site.name, tuple(tensor.shape))

        sites = self._all_sites()
        blocks = [site for site in sites if site.is_block]
        inner = [site for site in sites if not site.is_block]
        with (
            torch.no_grad(),
            tap_sites(self.module, blocks, take),
            tap_sites(self.module, inner, take, lenient=True),
        ):
            outputs = self.outputs(self.inputs[0])
        if self._picks_layers:
            # Only what runs once per sample can be given the reference's input.
            of_blocks = {site.module: count for site, count in calls.items() if site.is_block}
            ran = _of_all_rows([name for name, n in of_blocks.items() if n == 1], shapes)
            leaves = leaves_of(self.module, re.compile(self.part))
            if not ran and self.layers != leaves:
                self.layers = leaves
                return self._used_sites()
            self.layers = tuple(ran)
        # Behind convolutions channels come before what they slide over.
        maps = {
            (len(shape), shape[site.channels])
            for site in calls
            if site.channels != -1 and site.port == "output"
            for shape in [shapes[site.name]]
        }

        def channels(shape: tuple[int, ...]) -> int:
            is_map = len(shape) > 2 and (len(shape), shape[1]) in maps
            return 1 - len(shape) if is_map else -1

        self._output_channels = {name: channels(tuple(t.shape)) for name, t in outputs.items()}
        return tuple(
            replace(
                site,
                kind="other" if site.module in computed else site.kind,
                is_product=site.is_product and site.module not in computed,
                is_block=site.module in self.layers,
                channels=site.channels
                if site.channels < -1 or site.is_product
                else channels(shapes[site.name]),
            )
            for site in calls
            if not (site.port == "weight" and site.module in computed)
        )

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
            for label, tensor in tensors_of(result)
            if tensor is not logits and tensor.is_floating_point()
        }
        return {"logits": logits, **more}

    def _run(self, sample: Any) -> Any:
        device = self.device
        moved = map_tensors(sample, lambda tensor: tensor.to(device))
        if is_text(moved) and len(self.inputs):
            moved = with_companions(self.module.forward, moved, self.inputs[0])
        try:
            with exact_math(), straight_calls():
                if isinstance(moved, Mapping):
                    return self.module(**moved)
                if isinstance(moved, tuple):
                    return self.module(*moved)
                return self.module(moved)
        except QgateError:
            raise
        except raised_by_users() as error:
            raise_interruption()
            # Samples may be on the device that is lost: nothing compares them there any more.
            which = "a sample" if lost_device(error) else which_of(self.inputs, sample)
            raise refusal(self.name, which, sample, error, self.module) from error

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
            self.sites()
            rotated_model = replace(
                self, module=self.bases[basis](self.module), basis=basis, _sites=None
            )
            stored = self._rotated[basis] = (state, rotated_model)
        return stored[1]

    def with_module(self, module: nn.Module) -> Model:
        """Return a model of the same inputs and sites around a quantized module."""
        names, sites = {name for name, _ in module.named_modules()}, tuple(self.sites())
        return replace(
            self,
            module=module,
            layers=tuple(name for name in self.layers if name in names),
            head=tuple(name for name in self.head or () if name in names),
            _sites=sites,
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
        for label, tensor in tensors_of(sample):
            _feed(digest, label, tensor)
        digest.update(b"--\n")
    return digest.hexdigest()


def first_tensor(result: Any, name: str) -> Tensor:
    """Return the logits of a result, by name, else its first floating-point tensor."""
    for field_name in ("logits", "last_hidden_state"):
        value = getattr(result, field_name, None)
        value = result.get(field_name) if isinstance(result, Mapping) else value
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
    tensors = tensors_of(result)
    for _, tensor in tensors:
        if tensor.is_floating_point():
            return tensor
    shapes = [f"{tensor.dtype} {tuple(tensor.shape)}" for _, tensor in tensors]
    contents = f"only {listed(shapes, 4)}" if tensors else "no tensor"
    raise QgateError(
        f"{name} returned {type(result).__name__} with {contents}: a gate compares floating-point "
        "outputs. Let the module return its logits or embeddings."
    )


def _feed(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if flat.numel():
        digest.update(flat.view(torch.uint8).numpy().data)


def head_of(root: nn.Module) -> tuple[str, ...]:
    linears = {name: m for name, m in root.named_modules() if isinstance(m, nn.Linear)}
    embeddings = getattr(root, "get_output_embeddings", None)
    output = embeddings() if callable(embeddings) else None
    named = tuple(name for name, module in linears.items() if module is output)
    return named or tuple(name for name in linears if _HEADS.search(name))


def _of_all_rows(blocks: list[str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Leave out what gets rows that a router chose: modules of one place have other numbers."""
    rows: dict[str, set[int]] = {}
    for name in blocks:
        of_place = rows.setdefault(any_number(name), set())
        of_place.update(shapes.get(f"{name}:input", ())[:1])
    return [name for name in blocks if len(rows[any_number(name)]) < 2]
