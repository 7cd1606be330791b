"""What `qgate activations` is asked for: every key with its one default and its one meaning.

The keys are those of the YAML files that people have, so that such a file loads as it is. What a
key means is said here, beside its default, and nowhere else: the commented default file and the
messages are made of it. `read_settings` reads a file and what a command line says over it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qgate.activation_stats.setting_keys import SettingKey, key, keys_of, made, value_of
from qgate.activation_stats.setting_values import listed, parsed_file, resolved
from qgate.errors import QgateError
from qgate.models.samples import DataRequest
from qgate.storage.places import user_place

if TYPE_CHECKING:
    from qgate.models.samples import DataRequest
    from qgate.storage.places import Place

_REGEX = "a regular expression over module names"


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    path: str | None = key(None, "the model: tiny-llama, hf:PATH, mamba:PATH or FILE.py:build")
    name: str | None = key(None, "what figures and files call it; null: made from the path")


@dataclass(frozen=True)
class CustomSettings:
    """How files are read."""

    format: str | None = key(
        None,
        "text (a sample per line), document (one text), json, jsonl, csv, parquet; null: by ending",
        choices=("text", "document", "json", "jsonl", "csv", "parquet"),
    )
    text_column: str = key("text", "the field of JSON, CSV, Parquet or a data set with the text")


@dataclass(frozen=True)
class DataSettings:
    """The text it is run on."""

    source: str = key(
        "builtin",
        "builtin, pile, wikitext2, c4, redpajama, custom:FILE, hf:NAME or tokens:FILE.npy",
    )
    num_samples: int = key(64, "samples the model is run on", low=1)
    seq_len: int | None = key(
        None,
        "tokens of a sample; null: 512 of the built-in text, 1024 of any other, or as many as the "
        "model has positions",
        low=1,
    )
    seed: int = key(0, "draws the rows and windows of the data", low=0)
    path: str | None = key(None, "a local copy, file or folder, of the data set of data.source")
    subset: str | None = key(None, "the subset of a data set; null: its usual one")
    split: str | None = key(
        None, "the split of a data set; null: validation, else test, else train"
    )
    custom: CustomSettings = field(default_factory=CustomSettings)

    def request(self) -> DataRequest:
        """The same for `qgate.models.samples.read_samples`."""
        return DataRequest(
            source=self.source,
            num_samples=self.num_samples,
            seq_len=self.seq_len,
            seed=self.seed,
            path=self.path,
            format=self.custom.format,
            text_column=self.custom.text_column,
            subset=self.subset,
            split=self.split,
        )


@dataclass(frozen=True)
class MemorySettings:
    """Where it computes."""

    device: str = key("auto", "where the model computes: auto, cpu, cuda or cuda:N")
    offload_device: str = key("cpu", "where layers wait that are not computing")
    auto_offload: bool = key(True, "layer by layer on the device where the model does not fit it")


@dataclass(frozen=True)
class EnabledSettings:
    """Which analyses are made."""

    magnitude_input: bool = key(True, "the largest, median and smallest of each layer's input")
    magnitude_output: bool = key(True, "the same of each layer's output")
    magnitude_weight: bool = key(False, "the same of each layer's weight")
    outlier_layer_wise: bool = key(True, "outlier tokens per layer")
    outlier_position: bool = key(True, "where in a sample the outlier tokens are")
    outlier_token: bool = key(True, "which tokens the outlier tokens are")
    heatmap_3d: bool = key(False, "tokens by channels of one sample, as a surface and flat")
    distribution: bool = key(False, "histograms, box plots, kurtosis")
    percentile_range: bool = key(False, "percentiles of every channel")


@dataclass(frozen=True)
class WeightSettings:
    """Magnitudes of weights."""

    patterns: tuple[str, ...] | None = key(
        None, f"{_REGEX}: whose weights; null: those of magnitude.patterns", pattern=True
    )


@dataclass(frozen=True)
class MagnitudeSettings:
    """Magnitudes of |x|."""

    patterns: tuple[str, ...] | None = key(
        None, f"each {_REGEX} is one panel; null: every linear layer of the blocks", pattern=True
    )
    reduce_dim: int | None = key(
        -1,
        "-1: the maximum of each token; -2: of each channel; null (or 0): all values as they are",
        choices=(-1, -2, 0),
    )
    combined_plot: bool = key(False, "one figure for all patterns in place of one for each")
    weight: WeightSettings = field(default_factory=WeightSettings)


@dataclass(frozen=True)
class OutlierSettings:
    """Outlier tokens and channels."""

    threshold: float = key(
        64.0, "a token whose maximum is above so many medians of the tokens' maxima is one", above=0
    )
    pattern: str | None = key(
        None, f"{_REGEX}: whose outputs are searched; null: the blocks of the model", pattern=True
    )
    top_n: int = key(10, "tokens, positions and channels that are listed", low=1)
    decode_tokens: bool = key(True, "tell outlier tokens by their text; false: by their id")
    floor: float = key(0.0, "a token whose maximum is not above this is no outlier", low=0)
    channel_ratio: float = key(
        10.0, "a channel whose maximum is above so many medians of the channels' is one", above=0
    )
    persistence: float = key(
        0.25, "the share of samples in which a channel is one, from which it is systematic",
        above=0, high=1,
    )  # fmt: skip


@dataclass(frozen=True)
class DistributionSettings:
    """Distributions."""

    patterns: tuple[str, ...] | None = key(
        None, f"each {_REGEX} is one panel; null: those of magnitude.patterns", pattern=True
    )
    plot_types: tuple[str, ...] = key(
        ("boxplot", "histogram"), "boxplot, histogram", choices=("boxplot", "histogram")
    )
    is_input: bool = key(True, "of the layers' inputs; false: of their outputs")
    num_layers_to_show: int = key(4, "layers in a histogram", low=1)


@dataclass(frozen=True)
class HeatmapSettings:
    """Tokens by channels of one sample."""

    pattern: str | None = key(
        None, f"{_REGEX}: whose layers; null: the first of magnitude.patterns", pattern=True
    )
    sample_idx: int = key(0, "the sample that is drawn, counted from 0", low=0)
    is_input: bool = key(False, "the layer's input; false: its output")
    view_angle: tuple[float, ...] = key(
        (30.0, 45.0), "height and turn of the view, in degrees", length=2
    )
    num_2d_layers: int = key(2, "layers that are drawn flat as well", low=0)


@dataclass(frozen=True)
class PercentileSettings:
    """Percentiles of channels."""

    patterns: tuple[str, ...] | None = key(
        None, f"each {_REGEX} is one panel; null: those of magnitude.patterns", pattern=True
    )
    is_input: bool = key(True, "of the layers' inputs; false: of their outputs")
    use_abs: bool = key(False, "of the values without their signs")
    style: str = key("line", "line or fill", choices=("line", "fill"))
    num_layers_to_show: int = key(4, "layers drawn, evenly spaced", low=1)


@dataclass(frozen=True)
class SelectionSettings:
    """A filter on all analyses."""

    patterns: tuple[str, ...] | None = key(
        None, f"each {_REGEX}: all analyses see only these layers; null: all", pattern=True,
        empty=True,
    )  # fmt: skip


@dataclass(frozen=True)
class VisualizationSettings:
    """The analyses; `visualization.` may be left out of their names."""

    save_dir: str = key("./figures", "the folder or URL that everything is written to")
    dpi: int = key(200, "dots per inch of the pictures", low=1, high=2400)
    show_legend: bool = key(True, "legends in the pictures")
    enabled: EnabledSettings = field(default_factory=EnabledSettings)
    magnitude: MagnitudeSettings = field(default_factory=MagnitudeSettings)
    outlier: OutlierSettings = field(default_factory=OutlierSettings)
    distribution: DistributionSettings = field(default_factory=DistributionSettings)
    heatmap_3d: HeatmapSettings = field(default_factory=HeatmapSettings)
    percentile_range: PercentileSettings = field(default_factory=PercentileSettings)
    layer_selection: SelectionSettings = field(default_factory=SelectionSettings)


@dataclass(frozen=True)
class OutputSettings:
    """What is written."""

    formats: tuple[str, ...] = key(
        ("png", "html", "csv", "json"),
        "what is written: png, svg, pdf (pictures), html (the report), csv, json (the tables)",
        choices=("png", "svg", "pdf", "html", "csv", "json"),
    )
    report_name: str = key("analysis_report", "the report's file, without its ending")
    include_raw_data: bool = key(False, "the vectors behind the figures in the JSON as well")


@dataclass(frozen=True)
class SmoothingSettings:
    """Smoothing advice."""

    enabled: bool = key(True, "advice: migration strength of each layer, SQNR before and after")
    formats: tuple[str, ...] = key(
        ("int8", "mxfp8_e4m3", "mxfp4_e2m1"), "formats the advice is for", registered=True
    )
    alphas: tuple[float, ...] = key(
        (0.0, 0.25, 0.5, 0.75, 1.0), "migration strengths tried, each from 0 to 1", low=0, high=1
    )


@dataclass(frozen=True)
class SensitivitySettings:
    """Sensitivity of the layers."""

    enabled: bool = key(False, "quantize one site at a time and rank the layers")
    formats: tuple[str, ...] = key(("mxfp4_e2m1",), "formats it is done in", registered=True)
    target_sqnr_db: float | None = key(
        None, "keep the fewest layers in high precision that reach this SQNR of the output"
    )
    target_loss: float | None = key(
        None, "keep the fewest layers in high precision that reach this loss", low=0
    )


@dataclass(frozen=True)
class ActivationSettings:
    """All of it; `keys()` lists every key by its dotted name."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    memory: MemorySettings = field(default_factory=MemorySettings)
    visualization: VisualizationSettings = field(default_factory=VisualizationSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    formats: tuple[str, ...] = key(
        ("int8", "fp8_e4m3", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"),
        "the SQNR table: what each layer loses in these formats",
        registered=True,
    )
    smoothing: SmoothingSettings = field(default_factory=SmoothingSettings)
    sensitivity: SensitivitySettings = field(default_factory=SensitivitySettings)
    source: Any = field(default=None, compare=False)


def keys() -> list[SettingKey]:
    """Every key: its dotted name, type, default, and what it means."""
    return keys_of(ActivationSettings)


def read_settings(
    path: str | Place | None = None, overrides: Sequence[tuple[str, str]] = ()
) -> ActivationSettings:
    """The settings of a file in YAML or TOML, and over them those of a command line.

    Nothing is passed over: a key that is not known, said twice or of another type is an error.
    """
    known = {each.name: each for each in keys()}
    values: dict[str, Any] = {}
    place = None if path is None else user_place(path)
    if place is not None:
        for name, value in resolved(parsed_file(place), known, str(place)).items():
            values[name] = value_of(known[name], value, where=f"{place}: ")
    said: dict[str, str] = {}
    for given, text in overrides:
        name = listed(given, known)
        if said.setdefault(name, given) != given:
            raise QgateError(f"{said[name]} and {given} are the same key: give one of them.")
        values[name] = value_of(known[name], text, text=True)
    settings: ActivationSettings = made(ActivationSettings, values, source=place)
    _check_together(settings)
    return settings


def changed(settings: ActivationSettings, *, plain: bool = False) -> dict[str, Any]:
    """What differs from the defaults: dotted name -> value, as JSON has it where it is `plain`."""
    told = {each.name: each.of(settings) for each in keys() if each.of(settings) != each.default}
    if plain:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in told.items()}
    return told


def _check_together(settings: ActivationSettings) -> None:
    sample, samples = settings.visualization.heatmap_3d.sample_idx, settings.data.num_samples
    if sample >= samples:
        raise QgateError(
            f"visualization.heatmap_3d.sample_idx {sample} is not allowed with data.num_samples "
            f"{samples}; it is a whole number from 0 to {samples - 1}."
        )
