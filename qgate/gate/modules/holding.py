"""Values of a mode that need no accepted ones: quantized tensors, and modules on other inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qgate.expected.derived import SPECIAL, derive
from qgate.formats import Quantizer
from qgate.gate.measured import Conformance, Measured
from qgate.gate.measuring.site_rows import ModelSites
from qgate.gate.modules.conformance import METRIC as OF_WEIGHTS
from qgate.gate.modules.conformance import QuantizerRun, other_lengths
from qgate.gate.modules.related import mixers_of, related_modules
from qgate.gate.modules.relations import METRIC as RELATIONS_METRIC
from qgate.gate.modules.relations import RelatedCall, calls_of, relate
from qgate.loading import LateModule
from qgate.models import Model, Site
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import row_count
from qgate.modes import Quantized
from qgate.results.coverage import ModuleShapes
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.gate.modules import embedding_rows as embeddings
    from qgate.gate.modules import hard_inputs as hard_inputs
    from qgate.gate.modules import hard_products as hard_products
    from qgate.gate.modules import mixer_conformance as mixer_conformance
    from qgate.gate.modules.mixer_conformance import MixerRun
else:
    embeddings = LateModule("qgate.gate.modules.embedding_rows")
    hard_inputs = LateModule("qgate.gate.modules.hard_inputs")
    hard_products = LateModule("qgate.gate.modules.hard_products")
    mixer_conformance = LateModule("qgate.gate.modules.mixer_conformance")


_CASTS = {"float16": "fp16", "bfloat16": "bf16"}
_FEW = 4
_NEAR = 1e-2
"""Share of a factor's distance from 1 that single weights may be off it."""


class Holding:
    """The values of one mode that are held bit for bit, whatever was accepted."""

    def __init__(
        self,
        quantized: Quantized,
        model: Model,
        meant: Quantized,
        met: dict[str, ModuleShapes] | None = None,
    ) -> None:
        """`meant` is the mode that a kernel of the user's stands for, or the mode itself.

        The shapes that modules take are noted in `met`.
        """
        self._met = {} if met is None else met
        self.quantized, base = quantized, model.in_basis(quantized.model.basis)
        quantizers = None
        if quantized.mode.own:
            quantizers = {} if meant is quantized else meant.plan.quantizers()
        self._modules = list(related_modules(quantized, base, quantizers))
        # A quantized mixer is held as a whole, and related part by part.
        self._whole = mixers_of(quantized, base) or self._modules
        of_own = quantized.mode.own
        self._hard = hard_inputs.HardInputs(quantized, base, meant) if of_own else None
        self._agreements: dict[str, Conformance] = {}
        # A mode that declares nothing may have other embeddings.
        self._declared = None if quantizers == {} else meant.plan.quantizers()
        self._base = base
        self._run: QuantizerRun | MixerRun
        if quantized.mode.choices is not None and quantized.scales is not None:
            self._run = mixer_conformance.MixerRun(quantized, base, quantized.scales)
        else:
            self._run = QuantizerRun(quantized, base, _quantizers(quantized, base))

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Hold the tensors of the passes inside, and then those of other lengths and inputs."""
        with self._run.watch():
            yield
            calls = self._run_other_lengths()
        for related in self._modules:
            if related.site not in calls:
                continue
            call, samples = calls[related.site]
            agreement = relate(related, call, samples)
            if related.shapes == "all" and self._hard is not None:
                agreement = self._hard.add(related.site, call, agreement)
            self._agreements[related.site] = agreement
        if not self.quantized.mode.own:
            self._run_special(calls)
        for site, (call, _samples) in calls.items():
            shapes = self._met.setdefault(site.rpartition(":")[0], ModuleShapes())
            for shape, is_strided in call.met:
                shapes.add(shape, is_strided=is_strided)
        if not self.quantized.mode.own and self.quantized.mode.choices is None:
            self._hold_weights()
        if self._declared is not None:
            for site, agreement in embeddings.embedding_agreements(
                self.quantized, self._base, self._declared
            ):
                self._agreements.setdefault(site, agreement)

    def _hold_weights(self) -> None:
        """Hold the weights that no quantizer reads: they are the reference's, to the last bit."""
        planned = {entry.site.partition(":")[0] for entry in self.quantized.plan.entries}
        planned = set() if self.quantized.mode.dtype is not None else planned
        faults = weight_faults(self._base.module, self.quantized.model.module)
        for name, words, values, differing in faults:
            owner, _, key = name.rpartition(".")
            site = f"{owner}:{key}"
            if owner not in planned and site not in self._run.sites:
                about = f"is not what the reference stores: {words.format(key)}"
                self._agreements[site] = Conformance(OF_WEIGHTS, values, differing, about)

    def _run_other_lengths(self) -> dict[str, tuple[RelatedCall, int]]:
        """Run samples as they are seldom run, and return the calls of modules in the first."""
        model = self.quantized.model
        if self.quantized.mode.own and not (self._modules or self._whole):
            # A graph is held by its outputs, and may refuse any other shape in its own way.
            return {}
        first, *lengths = other_lengths(model) or model.inputs[:1]
        try:
            calls = calls_of(model, {*self._modules, *self._whole}, first)
        except LENGTH_REFUSALS as error:
            about = f"left out: the model refused three samples at once ({_kind_of(error)})"
            agreement = Conformance(RELATIONS_METRIC, 1, 0, about)
            self._agreements = {related.site: agreement for related in self._modules}
            return {}
        for sample in lengths if not self.quantized.mode.own else ():
            # A model may take one length only: what it ran at is held then.
            with torch.no_grad(), contextlib.suppress(*LENGTH_REFUSALS):
                model.outputs(sample)
        samples = row_count(first)
        return {site: (call, samples) for site, call in calls.items()}

    def _run_special(self, calls: Mapping[str, tuple[RelatedCall, int]]) -> None:
        """Quantize and multiply rows of zeros, large values, NaN and others that no text has."""
        is_whole = self._whole is not self._modules
        products = None if is_whole else hard_products.HardProducts(self.quantized, self._base)
        with self._run.watch(), torch.no_grad():
            for related in self._whole:
                if related.site not in calls:
                    continue
                call, _samples = calls[related.site]
                if products is not None and products.holds(related.site):
                    before = self._agreements[related.site]
                    self._agreements[related.site] = products.add(related, call, before)
                    continue
                arguments = list(call.arguments.values())
                for variant in derive(arguments, [], 1, SPECIAL, 0):
                    call.repeat(related.module, variant.arguments)

    def attach(self, rows: Sequence[Measured], places: ModelSites) -> list[Measured]:
        """Return rows with what was held at their sites, and rows of other sites, in order."""
        sites = self._run.sites
        figures = {site: (record.conformance(),) for site, record in sites.items()}
        for site, agreement in self._agreements.items():
            figures[site] = (*figures.get(site, ()), agreement)
        local = {row.site for row in rows if row.about.has_budget}
        attached = [
            replace(row, conformance=figures[row.site])
            if row.about.has_budget and row.site in figures
            else row
            for row in rows
        ]
        last = 0
        for site, conformance in figures.items():
            # Parameters that are no site of the model stand after the site before them.
            last = places.order.get(site, last)
            if site not in local:
                attached.append(places.row(site, "local", last, conformance=conformance))
        return sorted(attached, key=lambda row: (row.order, row.scope))


def _kind_of(error: Exception) -> str:
    return type(error.__cause__ or error).__name__


def _quantizers(quantized: Quantized, base: Model) -> dict[str, Quantizer]:
    """Return the quantizers of a plan; of a mode in another dtype, the cast of every weight."""
    if quantized.mode.dtype is None:
        return quantized.plan.quantizers()
    dtype = getattr(torch, quantized.mode.dtype)
    cast = Quantizer(_CASTS[quantized.mode.dtype], saturate=False, dtype=dtype)
    network = quantized.model.module

    def is_stored(site: Site) -> bool:
        # A weight that is computed when it is read is a result of others that are.
        stored = network.get_submodule(site.module)._parameters.get("weight")
        return stored is not None and stored.dtype == dtype

    return {s.name: cast for s in base.sites() if s.port == "weight" and is_stored(s)}


def other_weights(
    reference: nn.Module,
    own: nn.Module,
    skipped: Collection[str] = (),
    network: nn.Module | None = None,
) -> str:
    """Name the first parameter of a run that is another one, and its rows; empty if none is.

    network  the whole reference: one of its other parameters may be there instead
    """
    for name, words, _, _ in weight_faults(reference, own, skipped):
        mine = attrgetter(name)(own).detach()
        for other, values in network.named_parameters() if network is not None else ():
            if values.shape == mine.shape and torch.equal(mine, values.to(mine.device, mine.dtype)):
                return f"its {name} is {other}"
        return words.format(f"its {name}")
    return ""


def weight_faults(
    reference: nn.Module, own: nn.Module, skipped: Collection[str] = ()
) -> Iterator[tuple[str, str, int, int]]:
    """Yield parameters of a run that are others: name, words, values, and how many of them differ.

    Weights in 16 bits are the reference's, rounded once.
    """
    for name, parameter in reference.named_parameters():
        try:
            mine = attrgetter(name)(own)
        except AttributeError:
            continue
        right = parameter.detach()
        if name in skipped or not isinstance(mine, Tensor) or mine.shape != right.shape:
            continue
        if mine is parameter or not right.dim():
            continue
        rounded = right.to(mine.device, mine.dtype)
        if torch.equal(mine, rounded):
            continue
        differ = ~((mine == rounded) | (mine.isnan() & rounded.isnan())).reshape(len(right), -1)
        wrong = differ.any(1).nonzero().flatten()
        if not len(wrong):
            continue
        numbers = listed([str(int(row)) for row in wrong], _FEW)
        is_mixture = right.dim() == 3 and "expert" in f"{name} {type(own).__name__}".lower()
        kind = "experts" if is_mixture else "rows"
        a, r = mine.detach()[wrong].double(), rounded[wrong].double()
        factor = float((a * r).sum() / r.square().sum().clamp_min(1e-300))
        room = _NEAR * abs(factor - 1) * r.abs().max()
        is_factor = bool(((a - factor * r).abs() <= room).all())
        size = f"{factor:.4g} times the reference's" if is_factor else "other ones"
        words = f"{len(wrong):,} of {len(right):,} {kind} of {{}} ({numbers}) are {size}"
        yield name, words, right.numel(), int(differ.sum())
