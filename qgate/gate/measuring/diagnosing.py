"""Faults of sites that failed, in words: their tensors are captured again and looked at.

Nothing of this runs for a gate that passes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from qgate.capture import Capture
from qgate.causes.rows import describe_block, describe_factor, describe_rows
from qgate.causes.tensors import predicate, tensor_fault
from qgate.errors import QgateError
from qgate.expected.conventions import with_options
from qgate.expected.distances import relative_error
from qgate.expected.modules import exact_product
from qgate.expected.searched_scales import scales_of
from qgate.formats import Quantizer
from qgate.gate.checks import Check, Verdict
from qgate.gate.measuring.bench import Bench
from qgate.gate.measuring.passes import fed, float64_array, flow, outer_tensors, shortened
from qgate.gate.measuring.reproductions import (
    Reproduction,
    of_cast,
    of_code,
    of_kernel,
    of_product,
    of_tensors,
)
from qgate.gate.segments.code_faults import code_before, name_of
from qgate.gate.segments.rows import IS_PLACE, IS_VAGUE, SAYS_NOTHING
from qgate.kernel_checks.casts import check_cast
from qgate.kernel_checks.explained import module_fault
from qgate.kernel_checks.record import CheckFailure
from qgate.kernel_checks.subject import KernelRefusal
from qgate.models import Model, Site
from qgate.models.refusals import LENGTH_REFUSALS
from qgate.models.rows import is_text
from qgate.modes import Mode, Quantized
from qgate.results.failure_causes import is_wrong_gradient
from qgate.results.kinds import scope_of

MOST_SITES, MOST_OF_GATE, MOST_TRIES = 8, 2, 4
"""Sites of a mode that are diagnosed, of a gate, and of a gate as long as none has words."""
MOST_SEARCHES = 16
"""Sites of a run at which all faults of code are tried, which takes seconds each."""
_IS_SURE = (
    r"torch's own|in number .* of a batch|in a text longer than the samples: the result|"
    r"its \S+ is \S+\.\w+ \("
)
"""Words of a fault in 16 bits that are sure: no other batch, and no other code, has it."""
_MOST_ENERGY = 1e3
"""Times the square of a factor's distance from 1 that the error of a row may be."""
MASK = "depends on later tokens: its mask, or what pads it, is wrong"
_STALE = 1.5
"""Times the scale that values need from which a static one is called stale."""
_LARGEST_CODE = 127
"""Of int8, which mixers quantize to."""
Diagnoses = dict[tuple[str, str], str]


class SiteDiagnoses:
    """Diagnoses of the failing sites of one model, each made once and a few per mode."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._by_mode: dict[str, Diagnoses] = {}
        self._reproductions: dict[str, Reproduction] = {}
        self._own_faults: dict[str, set[str]] = {}
        self._searches = 0
        self._gradients: tuple[str, dict[str, tuple[list[Tensor], list[Tensor]]]] = ("", {})

    def reproduction(self, mode: str, site: str) -> Reproduction | None:
        """Return the tensors of the first site that failed in a mode, once, if it is this one."""
        first = self._reproductions.get(mode)
        return first if first is not None and first.site == site else None

    def of_verdict(self, mode: Mode, verdict: Verdict) -> Mapping[tuple[str, str], str]:
        """Diagnose the failures of a gate that errors enter at, those without a cause left out."""
        diagnoses = self._by_mode.setdefault(mode.name, {})
        if self._bench.reference_basis() is not None:
            return diagnoses
        entries = {(check.site, check.scope): check for check in _entries(verdict)}
        for number, (key, check) in enumerate(entries.items()):
            if number >= MOST_OF_GATE and any(map(diagnoses.get, entries)):
                break
            # Gradients cost little, and what they follow from may come after them.
            dear = sum(not scope_of(scope).is_gradient for _, scope in diagnoses)
            if key not in diagnoses and (check.about.is_gradient or dear < MOST_SITES):
                diagnoses[key] = self._fault(mode, check)
        # A fault may be named at one site only, and explain others: each is asked again.
        for key, check in entries.items() if self._own_faults.get(mode.name) else ():
            is_block = check.site.rpartition(":")[0] in self._bench.model.layers
            if diagnoses.get(key) == "" and not (check.about.is_gradient or is_block):
                diagnoses[key] = self._diagnose(mode, check.site, searches=False)
        return {key: words for key, words in diagnoses.items() if words}

    def _diagnose(self, mode: Mode, name: str, *, keep: bool = True, searches: bool = True) -> str:
        quantized = self._bench.quantized(mode)
        base = self._bench.model.in_basis(quantized.model.basis)
        site = next((site for site in base.sites() if site.name == name), None)
        if site is None or mode.dtype is not None:
            return ""
        try:
            if site.is_block and site.port == "output" and not site.is_product:
                return self._block(quantized, site, keep)
            if mode.choices is not None:
                return self._mixer_site(quantized, base, site)
            if mode.own:
                return self._own_product(quantized, base, site, searches)
            return self._site(quantized, base, site)
        # A broken model may raise anything when it runs again; its verdict stands without words.
        except (QgateError, *LENGTH_REFUSALS):
            return ""

    def _fault(self, mode: Mode, check: Check) -> str:
        """Diagnose a failure; an isolated error inside a block has words of its own."""
        if check.about.is_gradient:
            return self._gradient(mode, check.site)
        if check.about.against_noise and self._is_recurrent(check.site):
            return ""  # its reason says what is wrong inside
        if check.about.against_noise and (words := self._code_fault(mode, check)):
            return words
        if check.about.against_noise and not _is_unnamed(check.reason):
            return ""
        words = self._diagnose(mode, check.site)
        is_block = check.site.rpartition(":")[0] in self._bench.model.layers
        if check.about.against_noise and not is_block:
            return self._mask_fault(mode, check.layer)
        return words

    def _is_recurrent(self, site: str) -> bool:
        name = site.rpartition(":")[0]
        modules = dict(self._bench.model.module.named_modules())
        return isinstance(modules.get(name), nn.RNNBase)

    def _code_fault(self, mode: Mode, check: Check) -> str:
        """Name what the code before a site does wrong, where its fault has no name yet."""
        is_product, is_unnamed = "the product of" in check.reason, _is_unnamed(check.reason)
        is_open = re.search(SAYS_NOTHING, check.reason) if is_product else is_unnamed
        is_vague = not is_product and bool(re.search(IS_VAGUE, _words_of(check.reason)))
        quantized = self._bench.quantized(mode)
        # Among the roundings of 16 bits a fault looks like any pattern; code runs with one sample.
        is_half = mode.dtype is not None and not re.search(_IS_SURE, check.reason)
        is_vague = is_vague or (is_half and not is_product)
        if not (is_open or is_vague) or self._searches >= MOST_SEARCHES:
            return ""
        self._searches += 1
        base = self._bench.model.in_basis(quantized.model.basis)
        view = self._bench.segments(quantized).view
        try:
            code = code_before(quantized.model, base, view, check.site)
            if code is None:
                return ""
            fault = code.fault()
            if fault and mode.name not in self._reproductions:
                # A script that cannot be made costs no name.
                with contextlib.suppress(QgateError, *LENGTH_REFUSALS, KernelRefusal):
                    self._keep(of_code(check.site, mode.name, code.call))
        except (QgateError, *LENGTH_REFUSALS, KernelRefusal):
            return ""
        words = name_of(fault)
        if not words or (is_vague and not is_open and "depends on" in words):
            return ""
        factor = re.search(r"(\d+\.?\d*) times", words)
        if is_half and factor and (float(factor[1]) - 1) ** 2 * _MOST_ENERGY < (check.value or 0.0):
            return ""  # roundings that look like a factor
        return f"is not what FP32 code makes of the tensors before it: {words}"

    def _gradient(self, mode: Mode, name: str) -> str:
        """Diagnose a gradient; those of the latest mode are kept, for its other sites."""
        try:
            if self._gradients[0] != mode.name:
                self._gradients = mode.name, self._bench.gradient_pairs(mode)
        except (QgateError, RuntimeError, ValueError):
            return ""
        actual, expected = self._gradients[1][name]
        return describe_factor(torch.cat(actual), torch.cat(expected))

    def _mask_fault(self, mode: Mode, layer: str) -> str:
        """Say if the block around a site lets later tokens through; nothing else of it is said."""
        names = [name for name in self._bench.model.layers if layer and name.endswith(layer)]
        if len(names) != 1:
            return ""
        words = self._diagnose(mode, f"{names[0]}:output", keep=False)
        return words if words == MASK else ""

    def _site(self, quantized: Quantized, base: Model, site: Site) -> str:
        """Diagnose a tensor beside the reference's, with the module's inputs from the reference."""
        sample = shortened(self._bench.model.inputs[0])
        sites = [other for other in base.sites() if other.module == site.module]
        flowing = flow(base, sites, sample)
        inputs = [other for other in sites if other.port == "input"]
        actual = fed(quantized, sites, sample, flowing, inputs)
        quantizer = quantized.plan.quantizers().get(site.name)
        names, result = (site.name, quantized.mode.name), actual[site.name]
        if quantizer is not None and site.port != "output":
            self._keep(of_cast(*names, result, flowing[site.name], quantizer))
            return cast_fault(result, flowing[site.name], quantizer)
        if quantizer is not None:
            return ""
        if site.is_product and site.port == "output":
            x, weight = (actual[f"{site.module}:{port}"] for port in ("input", "weight"))
            module = base.module.get_submodule(site.module)
            expected = exact_product(module, x, weight)
            assert expected is not None
            if site.kind == "linear":
                self._keep(of_product(*names, result, _factors(module, site, x, weight)))
            else:
                self._keep(of_tensors(*names, result, expected, x))
            sides = (result, expected, flowing[site.name])
            return tensor_fault(*(side.movedim(site.channels, -1) for side in sides))
        source = next((flowing[other.name] for other in inputs if other.name in flowing), None)
        self._keep(of_tensors(*names, result, flowing[site.name], source))
        return tensor_fault(result, flowing[site.name])

    def _own_product(self, quantized: Quantized, base: Model, site: Site, searches: bool) -> str:
        """Diagnose a product of a kernel of the model's own beside what it stands for."""
        meant = self._bench.meant_of(quantized)
        source, inside = f"{site.module}:input", quantized.model.module
        weight = f"{site.module}:weight"
        if meant is quantized or quantized.mode.convention or not site.is_product:
            return ""
        sample = shortened(self._bench.model.inputs[0])
        flowing = flow(base, [s for s in base.sites() if s.name in (source, weight)], sample)
        x = flowing[source]
        reference, own = (of.get_submodule(site.module) for of in (base.module, inside))
        ports = meant.plan.quantizers()
        quantizers = {
            port: ports[name]
            for port in ("input", "weight", "output")
            if (name := f"{site.module}:{port}") in ports
        }
        earlier = self._own_faults.setdefault(quantized.mode.name, set())
        searches = searches and self._searches < MOST_SEARCHES
        words = module_fault(reference, own, x, quantizers, earlier, searches=searches)
        self._searches += searches and words not in earlier
        earlier |= {words} - {""}
        if words and site.kind == "linear":
            factors = _factors(reference, site, x, flowing[weight])
            with torch.no_grad():
                result = own(x)
            self._keep(of_kernel(site.name, quantized.mode.name, result, factors, quantizers))
        return predicate(words)

    def _mixer_site(self, quantized: Quantized, base: Model, site: Site) -> str:
        """Say if the calibrated scale of a tensor in a mixer is not what the reference's needs."""
        scales = {entry.site: entry.scale for entry in quantized.plan.entries}
        if (scale := scales.get(site.name)) is None or site.port == "weight":
            return ""
        values = flow(base, [site], shortened(self._bench.model.inputs[0]))[site.name]
        peak = float(values.abs().max())
        return _scale_fault(scale * _LARGEST_CODE / peak) if peak else ""

    def _keep(self, reproduction: Reproduction | None) -> None:
        if reproduction is not None:
            self._reproductions.setdefault(reproduction.mode, reproduction)

    def _block(self, quantized: Quantized, site: Site, keep: bool) -> str:
        """Diagnose a block's output on all samples, with its inputs from the reference."""
        mode, model = quantized.mode, quantized.model
        reference = self._bench.reference(model.basis)
        samples = self._bench.model.inputs
        together = self._bench.runs_together(mode)
        actual = outer_tensors(model, samples, reference, together, most=self._bench.at_once)[
            site.name
        ]
        expected, source = reference[site.name], reference[f"{site.module}:input"]
        worst = max(range(len(actual)), key=lambda n: relative_error(actual[n], expected[n]))
        if keep:
            sample = (actual[worst], expected[worst], source[worst])
            self._keep(of_tensors(site.name, mode.name, *sample))
        words = describe_block(torch.cat(actual), torch.cat(expected), torch.cat(source))
        if words or not (mode.causal and is_text(samples[0])):
            return words or describe_rows(actual, expected)
        length = samples[0].shape[1] // 2
        forced = Capture(reference.model, reference.basis, "")
        forced.tensors = {name: [of[0][:, :length]] for name, of in reference.tensors.items()
                          if of[0].dim() > 1}  # fmt: skip
        alone = outer_tensors(model, [samples[0][:, :length]], forced, together)[site.name][0]
        # Not the last tokens of the prefix: a fault of the end moves with it.
        early = length - min(4, length // 4)
        moved = relative_error(alone[:, :early], actual[0][:, :early])
        if moved > 0.05 * relative_error(actual[0], expected[0]):
            return MASK
        return describe_rows(actual, expected)


def _words_of(reason: str) -> str:
    """Return the words of a reason that say what is wrong, without the worst place."""
    return reason.partition(" (worst at")[0]


def _is_unnamed(reason: str) -> bool:
    """Tell if a reason says at most where an error is."""
    return bool(re.search(f"{SAYS_NOTHING}|{IS_PLACE}", _words_of(reason)))


def _entries(verdict: Verdict) -> Sequence[Check]:
    """Return the failures of a gate where its error may enter, the likeliest first."""
    first: dict[str, Check] = {}
    of_tensors = [check for check in verdict.failed if check.limit.has_number]
    local = [check for check in of_tensors if check.about.is_local]
    # A wrong gradient flows back.
    errors = [check for check in of_tensors if check.limit.is_accepted]
    gradients = [check for check in errors if is_wrong_gradient(vars(check))]
    likely = sorted(
        local, key=lambda c: (c.limit.needs_accepted, c.order, not c.about.against_noise)
    )
    for check in likely or sorted(gradients, key=lambda c: -c.order):
        first.setdefault(check.site, check)
    return list(first.values())[:MOST_TRIES]


def cast_fault(actual: Tensor, source: Tensor, quantizer: Quantizer) -> str:
    """Say what is wrong with a quantized tensor; empty if it is what its quantizer defines."""
    try:
        check_cast(actual, source, quantizer, options={})
    except CheckFailure as failure:
        return predicate(failure.cause.removeprefix(f"the {quantizer.format.name} tensor "))
    return _stale_scale(source, quantizer)


def _stale_scale(source: Tensor, quantizer: Quantizer) -> str:
    """Say how far a static scale is from what the values need."""
    if quantizer.scale is None:
        return ""
    values = float64_array(source).reshape(1, -1)
    fitting = with_options(quantizer, granularity="tensor", scale=None, axis=None)
    return _scale_fault(float(quantizer.scale) / float(scales_of(values, fitting)[0]))


def _scale_fault(factor: float) -> str:
    if 1 / _STALE < factor < _STALE:
        return ""
    effect = "large values saturate" if factor < 1 else "steps are too wide"
    return f"has {factor:.3g} times the scale that its values need, {effect}: a stale calibration"


def _factors(
    module: nn.Module, site: Site, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the input of a linear layer, its weight as (outputs, inputs), and its own bias."""
    bias = getattr(module, "bias", None)
    turned = weight.T if site.transposed else weight
    return x, turned, None if bias is None else bias.detach()
