"""Settings of `qgate activations`: every key with its default and its meaning.

The keys are those of quant-smooth-ana, whose YAML files load as they are. The commented default
file and the messages are made from the fields below; those about the report hold where a record is
drawn again. `read_settings` reads a file and, over it, the options of a command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qgate import formats
from qgate.activation_stats.setting_names import full_name, resolve_keys
from qgate.errors import QgateError, unknown
from qgate.settings import Form, pattern, sections_of, setting, settings_of, struct_of, values_of
from qgate.storage.documents import read_document
from qgate.storage.locations import user_location

if TYPE_CHECKING:
    from qgate.storage.locations import Location


def _formats(default: tuple[str, ...], doc: str) -> Any:
    """Declare a list of number formats."""
    return setting(
        default, doc, check=lambda name: formats.get(name).name, allowed_as="the name of a format"
    )


def _pattern(doc: str, **about: Any) -> Any:
    """Declare a regular expression, or a list of them."""
    doc = doc.replace("REGEX", "a regular expression over module names")
    return setting(None, doc, check=pattern, allowed_as="a regular expression", **about)


@dataclass(frozen=True)
class SampleFiles:
    """The files that are read."""

    format: Literal["text", "document", "json", "jsonl", "csv", "parquet"] | None = setting(
        None,
        "text (a sample per line), document (one text), json, jsonl, csv, parquet; null: by ending",
    )
    text_column: str = setting(
        "text", "the field of JSON, CSV, Parquet or a data set with the text"
    )


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    path: str | None = setting(None, "the model: tiny-llama, hf:PATH, mamba:PATH or FILE.py:build")
    name: str | None = setting(None, "what figures and files call it; null: made from the path")


@dataclass(frozen=True)
class DataSettings:
    """The text that it reads."""

    source: str = setting(
        "builtin",
        "builtin, pile, wikitext2, c4, redpajama, custom:FILE, hf:NAME or tokens:FILE.npy",
    )
    num_samples: int = setting(64, "samples the model is run on", low=1)
    seq_len: int | None = setting(
        None,
        "tokens of a sample; null: 512 of the built-in text, 1024 of any other, or as many as "
        "the model has positions",
        low=1,
    )
    seed: int = setting(0, "draws the rows and windows of the data", low=0)
    path: str | None = setting(None, "a local copy, file or folder, of the data set of data.source")
    subset: str | None = setting(None, "the subset of a data set; null: its usual one")
    split: str | None = setting(
        None, "the split of a data set; null: validation, else test, else train"
    )
    custom: SampleFiles = SampleFiles()


@dataclass(frozen=True)
class MemorySettings:
    """The devices that it computes on."""

    device: str = setting("auto", "where the model computes: auto, cpu, cuda or cuda:N")
    offload_device: str = setting("cpu", "where layers wait until they compute")
    auto_offload: bool = setting(
        True, "compute layer by layer if the model does not fit the device"
    )


@dataclass(frozen=True)
class EnabledAnalyses:
    """The analyses that are made."""

    magnitude_input: bool = setting(True, "the largest, median and smallest of each layer's input")
    magnitude_output: bool = setting(True, "the same of each layer's output")
    magnitude_weight: bool = setting(False, "the same of each layer's weight")
    outlier_layer_wise: bool = setting(True, "outlier tokens per layer", about="report")
    outlier_position: bool = setting(
        True, "where in a sample the outlier tokens are", about="report"
    )
    outlier_token: bool = setting(True, "which tokens the outlier tokens are", about="report")
    heatmap_3d: bool = setting(False, "tokens by channels of one sample, as a surface and flat")
    distribution: bool = setting(False, "histograms, box plots, kurtosis")
    percentile_range: bool = setting(False, "percentiles of every channel")


@dataclass(frozen=True)
class WeightSettings:
    """Magnitudes of weights."""

    patterns: tuple[str, ...] | None = _pattern(
        "REGEX: whose weights; null: those of magnitude.patterns"
    )


@dataclass(frozen=True)
class MagnitudeSettings:
    """Magnitudes of |x|."""

    patterns: tuple[str, ...] | None = _pattern(
        "each REGEX is one panel; null: every linear layer of the blocks"
    )
    reduce_dim: Literal[-1, -2, 0] | None = setting(
        -1,
        "-1: the maximum of each token; -2: of each channel; null (or 0): all values as they are",
        about="report",
    )
    combined_plot: bool = setting(
        False, "one figure for all patterns in place of one for each", about="report"
    )
    weight: WeightSettings = WeightSettings()

    @property
    def reduced(self) -> str:
        """The dimension that the vectors of the pictures have."""
        return {-1: "token", -2: "channel"}.get(self.reduce_dim or 0, "all")


@dataclass(frozen=True)
class OutlierSettings:
    """Outlier tokens and channels."""

    threshold: float = setting(
        64.0,
        "a token is an outlier if its maximum is above this many medians of the tokens' maxima",
        above=0,
    )
    pattern: str | None = _pattern(
        "REGEX: whose outputs are searched; null: the blocks of the model"
    )
    top_n: int = setting(
        10, "tokens, positions and channels that are listed", low=1, about="report"
    )
    decode_tokens: bool = setting(True, "show outlier tokens by their text; false: by their id")
    floor: float = setting(0.0, "a token is no outlier unless its maximum is above this", low=0)
    channel_ratio: float = setting(
        10.0,
        "a channel is an outlier if its maximum is above this many medians of the channels'",
        above=0,
    )
    persistence: float = setting(
        0.25,
        "a channel is systematic if it is an outlier in this share of samples",
        above=0,
        high=1,
    )


@dataclass(frozen=True)
class DistributionSettings:
    """Distributions."""

    patterns: tuple[str, ...] | None = _pattern(
        "each REGEX is one panel; null: those of magnitude.patterns"
    )
    plot_types: tuple[Literal["boxplot", "histogram"], ...] = setting(
        ("boxplot", "histogram"), "boxplot, histogram", about="report"
    )
    is_input: bool = setting(True, "of the layers' inputs; false: of their outputs", about="report")
    num_layers_to_show: int = setting(4, "layers in a histogram", low=1, about="report")


@dataclass(frozen=True)
class HeatmapSettings:
    """Tokens by channels of one sample."""

    pattern: str | None = _pattern("REGEX: whose layers; null: the first of magnitude.patterns")
    sample_idx: int = setting(0, "the sample that is drawn, counted from 0", low=0)
    is_input: bool = setting(False, "the layer's input; false: its output", about="report")
    view_angle: tuple[float, float] = setting(
        (30.0, 45.0), "height and turn of the view, in degrees", about="report"
    )
    num_2d_layers: int = setting(2, "layers that are drawn flat as well", low=0, about="report")


@dataclass(frozen=True)
class RangeSettings:
    """Percentiles of channels."""

    patterns: tuple[str, ...] | None = _pattern(
        "each REGEX is one panel; null: those of magnitude.patterns"
    )
    is_input: bool = setting(True, "of the layers' inputs; false: of their outputs", about="report")
    use_abs: bool = setting(False, "of the values without their signs", about="report")
    style: Literal["line", "fill"] = setting("line", "line or fill", about="report")
    num_layers_to_show: int = setting(4, "layers drawn, evenly spaced", low=1)


@dataclass(frozen=True)
class LayerSelection:
    """A filter on all analyses."""

    patterns: tuple[str, ...] | None = _pattern(
        "each REGEX: all analyses see only these layers; null: all", empty=True
    )


@dataclass(frozen=True)
class ViewSettings:
    """The analyses; `visualization.` may be left out of their names."""

    save_dir: str = setting("./figures", "the folder or URL that everything is written to")
    dpi: int = setting(200, "dots per inch of the pictures", low=1, high=2400, about="report")
    show_legend: bool = setting(True, "legends in the pictures", about="report")
    enabled: EnabledAnalyses = EnabledAnalyses()
    magnitude: MagnitudeSettings = MagnitudeSettings()
    outlier: OutlierSettings = OutlierSettings()
    distribution: DistributionSettings = DistributionSettings()
    heatmap_3d: HeatmapSettings = HeatmapSettings()
    percentile_range: RangeSettings = RangeSettings()
    layer_selection: LayerSelection = LayerSelection()


@dataclass(frozen=True)
class OutputSettings:
    """The files that are written."""

    formats: tuple[Literal["png", "svg", "pdf", "html", "csv", "json"], ...] = setting(
        ("png", "html", "csv", "json"),
        "what is written: png, svg, pdf (pictures), html (the report), csv, json (the tables)",
        about="report",
    )
    report_name: str = setting(
        "analysis_report", "the report's file, without its ending", about="report"
    )
    include_raw_data: bool = setting(False, "the vectors behind the figures in the JSON as well")

    @property
    def pictures(self) -> tuple[str, ...]:
        """Endings of the picture files."""
        return tuple(name for name in self.formats if name in ("png", "svg", "pdf"))


@dataclass(frozen=True)
class SmoothingSettings:
    """Smoothing advice."""

    enabled: bool = setting(True, "advice: migration strength of each layer, SQNR before and after")
    formats: tuple[str, ...] = _formats(
        ("int8", "mxfp8_e4m3", "mxfp4_e2m1"), "formats the advice is for"
    )
    alphas: tuple[float, ...] = setting(
        (0.0, 0.25, 0.5, 0.75, 1.0), "migration strengths tried, each from 0 to 1", low=0, high=1
    )


@dataclass(frozen=True)
class SensitivitySettings:
    """Sensitivity of the layers."""

    enabled: bool = setting(False, "quantize one site at a time and rank the layers")
    formats: tuple[str, ...] = _formats(("mxfp4_e2m1",), "formats it is done in")
    target_sqnr_db: float | None = setting(
        None, "keep the fewest layers in high precision that reach this SQNR of the output"
    )
    target_loss: float | None = setting(
        None, "keep the fewest layers in high precision that reach this loss", low=0
    )


@dataclass(frozen=True)
class ActivationSettings:
    """All settings, in sections as their files have them."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    memory: MemorySettings = MemorySettings()
    visualization: ViewSettings = ViewSettings()
    output: OutputSettings = OutputSettings()
    formats: tuple[str, ...] = _formats(
        ("int8", "fp8_e4m3", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"),
        "the SQNR table: what each layer loses in these formats",
    )
    smoothing: SmoothingSettings = SmoothingSettings()
    sensitivity: SensitivitySettings = SensitivitySettings()

    def __post_init__(self) -> None:
        sample, samples = self.visualization.heatmap_3d.sample_idx, self.data.num_samples
        if sample >= samples:
            raise QgateError(
                f"visualization.heatmap_3d.sample_idx {sample} is not allowed with "
                f"data.num_samples {samples}; it is a whole number from 0 to {samples - 1}."
            )


KEYS = settings_of(ActivationSettings)
REPORT_KEYS = tuple(name for name, key in KEYS.items() if key.about == "report")
"""Keys of how a record is shown."""


def value_of(name: str, value: Any, form: Form = "loose", where: str = "") -> Any:
    """Check the value of a key, in a file or on a command line."""
    return KEYS[name].read(value, form, f"{where}{name} ")


def read_settings(
    path: str | Location | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    defaults: Mapping[str, object] | None = None,
) -> ActivationSettings:
    """Read the settings of a file in YAML or TOML, and over them those of a command line.

    `defaults` stand in for what neither of them says.

    A key that is unknown, given twice or of another type is an error.
    """
    values = {name: value_of(name, value) for name, value in (defaults or {}).items()}
    if path is not None:
        location = user_location(path)
        document = read_document(location, "configuration")
        for name, value in resolve_keys(document, KEYS, str(location)).items():
            values[name] = value_of(name, value, where=f"{location}: ")
    given_as: dict[str, str] = {}
    for option, text in overrides:
        name = full_name(option, KEYS)
        if given_as.setdefault(name, option) != option:
            raise QgateError(f"{given_as[name]} and {option} are the same key: give one of them.")
        values[name] = value_of(name, text, "typed")
    return struct_of(ActivationSettings, values)


def report_settings(values: Mapping[str, Any]) -> ActivationSettings:
    """Return how a record is shown, by the settings of its run."""
    own = {name: values[name] for name in REPORT_KEYS if name in values}
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    return struct_of(ActivationSettings, own)


def with_values(settings: ActivationSettings, overrides: Mapping[str, Any]) -> ActivationSettings:
    """Return settings with some values of Python in place of theirs."""
    values = {**values_of(settings)}
    for override, value in overrides.items():
        name = full_name(override.replace("__", "."), KEYS)
        values[name] = value_of(name, value)
    return struct_of(ActivationSettings, values)


def changed_values(settings: ActivationSettings, *, plain: bool = False) -> dict[str, object]:
    """Return the values that differ from the defaults, as JSON has them where `plain` is true."""
    values = {k: v for k, v in values_of(settings).items() if v != KEYS[k].default}
    if plain:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return values


_HEADING = """\
# Settings of `qgate activations --config FILE`. Every line is the default and can be left out.
# On the command line: --outlier.threshold 100, --data.num_samples 128."""


def default_config_text(kind: str = "yaml") -> str:
    """Write a file with every default and its meaning; reading it changes nothing."""
    if kind not in ("yaml", "toml"):
        raise unknown("kind of configuration", kind, ("yaml", "toml"))
    is_toml = kind == "toml"
    lines, opened, sections = [_HEADING], {""}, sections_of(ActivationSettings)
    # TOML wants the keys of a table before the tables inside it.
    for key in sorted(KEYS.values(), key=lambda key: is_toml and "." in key.name):
        section, _, leaf = key.name.rpartition(".")
        above = section.split(".") if section else []
        for depth, title in enumerate(above):
            name = ".".join(above[: depth + 1])
            if name not in opened:
                opened.add(name)
                heading = f"[{name}]" if is_toml else f"{'  ' * depth}{title}:"
                gap = "\n" if is_toml or not depth else ""
                lines.append(f"{gap}{heading}  # {sections[name]}")
        value = _literal(key.default)
        if not is_toml:
            gap = "" if above else "\n"
            lines.append(f"{gap}{'  ' * len(above)}{leaf}: {value}  # {key.help}")
        elif key.default is None:  # TOML has no null
            lines.append(f'# {leaf} = "null"  # {key.help}')
        else:
            lines.append(f"{leaf} = {value}  # {key.help}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """Write a value as both YAML and TOML have it: quoted texts, brackets, true and false."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value)


GATED = with_values(ActivationSettings(), {
    "visualization.enabled.magnitude_input": True,
    "visualization.enabled.magnitude_output": True,
    "visualization.enabled.outlier_layer_wise": True,
    "smoothing.enabled": False,
    "formats": ["fp8_e4m3"],
})  # fmt: skip
"""Analyses that gates of activations are made from."""
