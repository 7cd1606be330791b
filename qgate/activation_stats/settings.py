"""Settings of `qgate activations`: every key with its default and its meaning.

The keys are those of quant-smooth-ana, whose YAML files load as they are. The commented default
file and the messages are made from this table. `read_settings` reads a file and, over it, the
options of a command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from functools import reduce
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from qgate.activation_stats.setting_values import (
    SettingKey,
    full_name,
    resolve_keys,
    value_of,
)
from qgate.errors import QgateError, unknown
from qgate.storage.documents import read_document
from qgate.storage.locations import user_location

if TYPE_CHECKING:
    from qgate.storage.locations import Location

_VIEW = "visualization."
SECTIONS = {
    "model": "The model",
    "data": "The text that it reads",
    "data.custom": "How files are read",
    "memory": "Where it computes",
    "visualization": "The analyses; `visualization.` may be left out of their names",
    "visualization.enabled": "Which analyses are made",
    "visualization.magnitude": "Magnitudes of |x|",
    "visualization.magnitude.weight": "Magnitudes of weights",
    "visualization.outlier": "Outlier tokens and channels",
    "visualization.distribution": "Distributions",
    "visualization.heatmap_3d": "Tokens by channels of one sample",
    "visualization.percentile_range": "Percentiles of channels",
    "visualization.layer_selection": "A filter on all analyses",
    "output": "What is written",
    "smoothing": "Smoothing advice",
    "sensitivity": "Sensitivity of the layers",
}


def _key(name: str, kind: type, default: Any, doc: str, **rules: Any) -> SettingKey:
    """Describe a key; it may be null where that is its default or `nullable` is true."""
    many = rules.pop("many", False) or isinstance(default, tuple)
    nullable = rules.pop("nullable", False) or default is None
    return SettingKey(name, kind, default, doc, many, nullable, rules)


def _switch(name: str, default: bool, doc: str) -> SettingKey:
    return _key(name, bool, default, doc)


def _choice(name: str, default: Any, doc: str, *choices: str) -> SettingKey:
    return _key(name, str, default, doc, choices=choices)


def _formats(name: str, default: tuple[str, ...], doc: str) -> SettingKey:
    return _key(name, str, default, doc, registered=True)


def _pattern(name: str, doc: str) -> SettingKey:
    doc = f"a regular expression over module names: {doc}"
    return _key(f"{_VIEW}{name}", str, None, doc, pattern=True)


def _patterns(name: str, doc: str, **rules: Any) -> SettingKey:
    doc = doc.replace("REGEX", "a regular expression over module names")
    return _key(f"{_VIEW}{name}.patterns", str, None, doc, pattern=True, many=True, **rules)


_PANELS = "each REGEX is one panel; null: those of magnitude.patterns"
KEYS: dict[str, SettingKey] = {key.name: key for key in (
    _key("model.path", str, None, "the model: tiny-llama, hf:PATH, mamba:PATH or FILE.py:build"),
    _key("model.name", str, None, "what figures and files call it; null: made from the path"),
    _key("data.source", str, "builtin",
         "builtin, pile, wikitext2, c4, redpajama, custom:FILE, hf:NAME or tokens:FILE.npy"),
    _key("data.num_samples", int, 64, "samples the model is run on", low=1),
    _key("data.seq_len", int, None,
         "tokens of a sample; null: 512 of the built-in text, 1024 of any other, or as many as "
         "the model has positions", low=1),
    _key("data.seed", int, 0, "draws the rows and windows of the data", low=0),
    _key("data.path", str, None, "a local copy, file or folder, of the data set of data.source"),
    _key("data.subset", str, None, "the subset of a data set; null: its usual one"),
    _key("data.split", str, None,
         "the split of a data set; null: validation, else test, else train"),
    _choice("data.custom.format", None,
            "text (a sample per line), document (one text), json, jsonl, csv, parquet; null: by "
            "ending", "text", "document", "json", "jsonl", "csv", "parquet"),
    _key("data.custom.text_column", str, "text",
         "the field of JSON, CSV, Parquet or a data set with the text"),
    _key("memory.device", str, "auto", "where the model computes: auto, cpu, cuda or cuda:N"),
    _key("memory.offload_device", str, "cpu", "where layers wait until they compute"),
    _switch("memory.auto_offload", True,
            "compute layer by layer if the model does not fit the device"),
    _key(f"{_VIEW}save_dir", str, "./figures",
         "the folder or URL that everything is written to"),
    _key(f"{_VIEW}dpi", int, 200, "dots per inch of the pictures", low=1, high=2400),
    _switch(f"{_VIEW}show_legend", True, "legends in the pictures"),
    _switch(f"{_VIEW}enabled.magnitude_input", True,
            "the largest, median and smallest of each layer's input"),
    _switch(f"{_VIEW}enabled.magnitude_output", True, "the same of each layer's output"),
    _switch(f"{_VIEW}enabled.magnitude_weight", False, "the same of each layer's weight"),
    _switch(f"{_VIEW}enabled.outlier_layer_wise", True, "outlier tokens per layer"),
    _switch(f"{_VIEW}enabled.outlier_position", True,
            "where in a sample the outlier tokens are"),
    _switch(f"{_VIEW}enabled.outlier_token", True, "which tokens the outlier tokens are"),
    _switch(f"{_VIEW}enabled.heatmap_3d", False,
            "tokens by channels of one sample, as a surface and flat"),
    _switch(f"{_VIEW}enabled.distribution", False, "histograms, box plots, kurtosis"),
    _switch(f"{_VIEW}enabled.percentile_range", False, "percentiles of every channel"),
    _patterns("magnitude", "each REGEX is one panel; null: every linear layer of the blocks"),
    _key(f"{_VIEW}magnitude.reduce_dim", int, -1,
         "-1: the maximum of each token; -2: of each channel; null (or 0): all values as they are",
         choices=(-1, -2, 0), nullable=True),
    _switch(f"{_VIEW}magnitude.combined_plot", False,
            "one figure for all patterns in place of one for each"),
    _patterns("magnitude.weight", "REGEX: whose weights; null: those of magnitude.patterns"),
    _key(f"{_VIEW}outlier.threshold", float, 64.0,
         "a token is an outlier if its maximum is above this many medians of the tokens' maxima",
         above=0),
    _pattern("outlier.pattern", "whose outputs are searched; null: the blocks of the model"),
    _key(f"{_VIEW}outlier.top_n", int, 10, "tokens, positions and channels that are listed",
         low=1),
    _switch(f"{_VIEW}outlier.decode_tokens", True,
            "show outlier tokens by their text; false: by their id"),
    _key(f"{_VIEW}outlier.floor", float, 0.0,
         "a token is no outlier unless its maximum is above this", low=0),
    _key(f"{_VIEW}outlier.channel_ratio", float, 10.0,
         "a channel is an outlier if its maximum is above this many medians of the channels'",
         above=0),
    _key(f"{_VIEW}outlier.persistence", float, 0.25,
         "a channel is systematic if it is an outlier in this share of samples",
         above=0, high=1),
    _patterns("distribution", _PANELS),
    _choice(f"{_VIEW}distribution.plot_types", ("boxplot", "histogram"), "boxplot, histogram",
            "boxplot", "histogram"),
    _switch(f"{_VIEW}distribution.is_input", True,
            "of the layers' inputs; false: of their outputs"),
    _key(f"{_VIEW}distribution.num_layers_to_show", int, 4, "layers in a histogram", low=1),
    _pattern("heatmap_3d.pattern", "whose layers; null: the first of magnitude.patterns"),
    _key(f"{_VIEW}heatmap_3d.sample_idx", int, 0, "the sample that is drawn, counted from 0",
         low=0),
    _switch(f"{_VIEW}heatmap_3d.is_input", False, "the layer's input; false: its output"),
    _key(f"{_VIEW}heatmap_3d.view_angle", float, (30.0, 45.0),
         "height and turn of the view, in degrees", length=2),
    _key(f"{_VIEW}heatmap_3d.num_2d_layers", int, 2, "layers that are drawn flat as well", low=0),
    _patterns("percentile_range", _PANELS),
    _switch(f"{_VIEW}percentile_range.is_input", True,
            "of the layers' inputs; false: of their outputs"),
    _switch(f"{_VIEW}percentile_range.use_abs", False, "of the values without their signs"),
    _choice(f"{_VIEW}percentile_range.style", "line", "line or fill", "line", "fill"),
    _key(f"{_VIEW}percentile_range.num_layers_to_show", int, 4, "layers drawn, evenly spaced",
         low=1),
    _patterns("layer_selection", "each REGEX: all analyses see only these layers; null: all",
              empty=True),
    _choice("output.formats", ("png", "html", "csv", "json"),
            "what is written: png, svg, pdf (pictures), html (the report), csv, json (the tables)",
            "png", "svg", "pdf", "html", "csv", "json"),
    _key("output.report_name", str, "analysis_report", "the report's file, without its ending"),
    _switch("output.include_raw_data", False, "the vectors behind the figures in the JSON as well"),
    _formats("formats", ("int8", "fp8_e4m3", "mxfp8_e4m3", "mxfp4_e2m1", "nvfp4"),
             "the SQNR table: what each layer loses in these formats"),
    _switch("smoothing.enabled", True,
            "advice: migration strength of each layer, SQNR before and after"),
    _formats("smoothing.formats", ("int8", "mxfp8_e4m3", "mxfp4_e2m1"),
             "formats the advice is for"),
    _key("smoothing.alphas", float, (0.0, 0.25, 0.5, 0.75, 1.0),
         "migration strengths tried, each from 0 to 1", low=0, high=1),
    _switch("sensitivity.enabled", False, "quantize one site at a time and rank the layers"),
    _formats("sensitivity.formats", ("mxfp4_e2m1",), "formats it is done in"),
    _key("sensitivity.target_sqnr_db", float, None,
         "keep the fewest layers in high precision that reach this SQNR of the output"),
    _key("sensitivity.target_loss", float, None,
         "keep the fewest layers in high precision that reach this loss", low=0),
)}  # fmt: skip


class SettingSection(SimpleNamespace):
    """The values of a section by the names of their keys; they do not change."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


class ActivationSettings(SettingSection):
    """All sections, with values by dotted names; a key without one has its default."""

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        tree: dict[str, object] = {name: SettingSection() for name in SECTIONS}
        for name, inner in tree.items():
            above, _, leaf = name.rpartition(".")
            vars(tree[above] if above else self)[leaf] = inner
        for name, key in KEYS.items():
            section, _, leaf = name.rpartition(".")
            value = (values or {}).get(name, key.default)
            vars(tree[section] if section else self)[leaf] = value
        sample, samples = self.visualization.heatmap_3d.sample_idx, self.data.num_samples
        if sample >= samples:
            raise QgateError(
                f"visualization.heatmap_3d.sample_idx {sample} is not allowed with "
                f"data.num_samples {samples}; it is a whole number from 0 to {samples - 1}."
            )

    def values(self) -> dict[str, object]:
        """Return every value by the dotted name of its key."""
        return {name: reduce(getattr, name.split("."), self) for name in KEYS}


def read_settings(
    path: str | Location | None = None,
    overrides: Sequence[tuple[str, str]] = (),
    defaults: Mapping[str, object] | None = None,
) -> ActivationSettings:
    """Read the settings of a file in YAML or TOML, and over them those of a command line.

    `defaults` stand in for what neither of them says.

    A key that is unknown, given twice or of another type is an error.
    """
    values = {name: value_of(KEYS[name], value) for name, value in (defaults or {}).items()}
    if path is not None:
        location = user_location(path)
        document = read_document(location, "configuration")
        for name, value in resolve_keys(document, KEYS, str(location)).items():
            values[name] = value_of(KEYS[name], value, where=f"{location}: ")
    given_as: dict[str, str] = {}
    for option, text in overrides:
        name = full_name(option, KEYS)
        if given_as.setdefault(name, option) != option:
            raise QgateError(f"{given_as[name]} and {option} are the same key: give one of them.")
        values[name] = value_of(KEYS[name], text, text=True)
    return ActivationSettings(values)


def with_values(settings: ActivationSettings, overrides: Mapping[str, Any]) -> ActivationSettings:
    """Return settings with some values of Python in place of theirs."""
    values = settings.values()
    for override, value in overrides.items():
        name = full_name(override.replace("__", "."), KEYS)
        values[name] = value_of(KEYS[name], list(value) if isinstance(value, tuple) else value)
    return ActivationSettings(values)


def changed_values(settings: ActivationSettings, *, plain: bool = False) -> dict[str, object]:
    """Return the values that differ from the defaults, as JSON has them where `plain` is true."""
    values = {k: v for k, v in settings.values().items() if v != KEYS[k].default}
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
    lines, opened = [_HEADING], {""}
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
                lines.append(f"{gap}{heading}  # {SECTIONS[name]}")
        value = _literal(key.default)
        if not is_toml:
            gap = "" if above else "\n"
            lines.append(f"{gap}{'  ' * len(above)}{leaf}: {value}  # {key.doc}")
        elif key.default is None:  # TOML has no null
            lines.append(f'# {leaf} = "null"  # {key.doc}')
        else:
            lines.append(f"{leaf} = {value}  # {key.doc}")
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
