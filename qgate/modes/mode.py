"""A mode: ordered rules of what is quantized, or the choices of a quantized Mamba block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from qgate.errors import QgateError, unknown
from qgate.formats.settings import QuantizerSettings
from qgate.modes.attention.choices import AttentionChoices
from qgate.modes.states.choices import StateChoices

Per = Literal["format", "row", "group", "static"]
Fits = Literal["any", "mamba", "other"]


@dataclass(frozen=True)
class Rule:
    """Sites of one kind whose name a regular expression finds, and the quantizer they get.

    sites    regular expression, searched in `module:port`
    format   name of a format; None leaves the site as it is
    of       kind of site, such as linear, conv, scan, norm, embedding, block or other; "product"
             for linear layers and for convolutions that are not depthwise, or "any"
    per      which elements share a scale: "format" as the format does it (its blocks, along the
             input channels, or a plain cast), "row" one scale per output channel and per token, or
             per sample before a convolution, "group" one per `group` features or input channels,
             "static" one per tensor, from the calibration samples
    options  further options of the quantizer
    """

    sites: str
    format: str | None
    of: str = "linear"
    per: Per = "format"
    group: int = 128
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.per not in get_args(Per):
            raise unknown("per of a rule", self.per, get_args(Per))
        if self.group < 1:
            raise QgateError(f"group {self.group} is not allowed; it is a whole number from 1.")


@dataclass(frozen=True)
class MambaChoices:
    """The differences between the quantized Mamba modes; the rest is the same W8A8 block.

    conv_rounding    the rounding of the convolution's output to codes: "away" or "even"
    path_a           the input of x_proj: "codes" of the convolution's output, "codes_of_u", or "u"
    path_b           the u of the scan: "codes", "exact" (y itself), or a name in
                     `qgate.modes.simulated.paths`
    scan             order of the sums in the scan
    dynamic_conv     the convolution's input gets its scale from the tensor itself
    float_products   x_proj and dt_proj multiply in float32 with weights on the INT8 grid
    regridded        which of their outputs return to the INT8 grid: all ("products"), those that
                     the scan reads ("scan"), or "none"
    """

    conv_rounding: Literal["away", "even"]
    path_a: Literal["codes", "codes_of_u", "u"]
    path_b: str
    scan: Literal["loop", "block", "einsum"]
    dynamic_conv: bool = False
    float_products: bool = False
    regridded: Literal["products", "scan", "none"] = "none"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed)


PATHS_B = (
    "codes", "exact", "grid", "requantized", "selective", "second_grid", "wide_grid",
    "quarter_grid", "half_grid", "powers", "three_zones",
)  # fmt: skip
_CHOICES = {
    "conv_rounding": ("away", "even"),
    "path_a": ("codes", "codes_of_u", "u"),
    "path_b": PATHS_B,
    "scan": ("loop", "block", "einsum"),
    "regridded": ("products", "scan", "none"),
}
_FORMATS_OF_DTYPES = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Kernel:
    """A model's own mode that has to compute what one of qgate's modes says.

    build       takes the qgate.Model, returns a torch module quantized for real
    stands_for  what it implements: the name of a mode (`int8`, `mxfp8` …), a Mode, a Rule, or a
                quantizer of inputs and weights of linear layers and convolutions
    convention  "mse" if a search finds its scales: it is held by its error alone then
    """

    build: Callable[..., Any]
    stands_for: str | Mode | Rule | QuantizerSettings
    convention: Literal["", "mse"] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.stands_for, str | Mode | Rule | QuantizerSettings):
            raise QgateError(
                f"a kernel stands for the name of a mode, a Mode, a Rule or a Quantizer, not for "
                f"{self.stands_for!r}."
            )
        if self.convention not in ("", "mse"):
            raise unknown("convention of a kernel", self.convention, ("mse",))

    def __call__(self, model: Any) -> Any:
        return self.build(model)

    @property
    def meant(self) -> Mode | None:
        """The mode that it stands for, None where only the name of one was given."""
        if isinstance(self.stands_for, str):
            return None
        if isinstance(self.stands_for, Mode):
            return self.stands_for
        if isinstance(self.stands_for, Rule):
            return Mode(self.stands_for.format or "fp32", "one rule", rules=(self.stands_for,))
        name, options = self.stands_for.format.name, self.stands_for.options
        rule = Rule(":(input|weight)$", name, of="product", options=options)
        return Mode(name, "one quantizer", rules=(rule,))


@dataclass(frozen=True)
class Mode:
    """One mode.

    name      as on the command line
    about     one line for people
    basis     the coordinates its activations live in
    fits      "mamba", "other" (than Mamba) or "any" model
    rules     ordered; the first that finds a site decides it
    choices   of a quantized Mamba block
    attention  of quantized attention: its cache of keys and values
    states    of quantized recurrent states
    dtype     the whole model runs in this dtype
    equals    modes it equals by design, teacher forced, at most up to ties or the order of sums
    causal    later tokens change nothing before them, and a sample is the same in any batch
    own       the model brings it: a callable that returns a module quantized for real
    stands_for  of an own one: the mode whose numbers it has to have, and whose budget it gets
    convention  of an own one: "mse" if a search finds its scales
    meant       of an own one: the mode that it stands for, where that has no name of its own
    by_name     asked for by its name alone: not one of "all"
    """

    name: str
    about: str
    basis: str = "plain"
    fits: Fits = "any"
    rules: tuple[Rule, ...] = ()
    choices: MambaChoices | None = None
    attention: AttentionChoices | None = None
    states: StateChoices | None = None
    dtype: str | None = None
    equals: tuple[str, ...] = ()
    causal: bool = True
    own: bool = False
    stands_for: str = ""
    convention: str = ""
    meant: Mode | None = None
    by_name: bool = False

    def __post_init__(self) -> None:
        if sum(self._parts) > 1:
            raise QgateError(
                f"mode {self.name!r} has more than one of rules, choices, attention, states, dtype "
                "and own; it is one."
            )
        if self.choices is not None and (self.basis, self.fits) != ("rotated", "mamba"):
            raise QgateError(
                f"mode {self.name!r} has choices of the quantized Mamba block, which lives in "
                "basis 'rotated' and fits 'mamba': pass basis='rotated', fits='mamba'."
            )
        if self.dtype not in (None, "float16", "bfloat16"):
            raise unknown(f"dtype of mode {self.name}", self.dtype, ("float16", "bfloat16"))
        if self.stands_for and not self.own:
            raise QgateError(
                f"mode {self.name!r} stands for {self.stands_for!r}, which only a model's own "
                "callable can: rules and choices define their ideal result themselves."
            )
        if self.fits not in get_args(Fits):
            raise unknown(f"fits of mode {self.name}", self.fits, get_args(Fits))

    @property
    def is_reference(self) -> bool:
        return not any(self._parts)

    @property
    def _parts(self) -> list[bool]:
        parts = (self.rules, self.choices, self.attention, self.states, self.dtype, self.own)
        return [bool(part) for part in parts]

    @property
    def formats(self) -> frozenset[str]:
        """Names of the formats that it says it quantizes with; none of a callable's own."""
        if self.meant is not None:
            return self.meant.formats
        named = {rule.format for rule in self.rules} | {_FORMATS_OF_DTYPES.get(self.dtype or "")}
        if self.choices is not None:
            named.add("int8")
        if self.attention is not None:
            named |= self.attention.formats
        if self.states is not None:
            named |= self.states.formats
        return frozenset(name for name in named if name is not None)

    @property
    def runs_together(self) -> bool:
        """True if a sample is the same in a batch as alone, as far as is known."""
        return self.causal and not self.own

    @property
    def calibrated(self) -> bool:
        """True if it needs scales that a calibration measured."""
        return self.choices is not None or (self.attention is not None and self.attention.is_static)
