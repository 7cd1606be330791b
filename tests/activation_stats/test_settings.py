"""The configuration of `qgate activations`: what loads, what is refused, and in which words."""

from __future__ import annotations

import contextlib
import re
import tomllib
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qgate.activation_stats.setting_names import UNSAID, full_name
from qgate.activation_stats.settings import (
    KEYS,
    ActivationSettings,
    changed_values,
    default_config_text,
    read_settings,
)
from qgate.activation_stats.subjects import data_request
from qgate.documents import split_list
from qgate.errors import QgateError
from qgate.models.samples import DataRequest
from qgate.settings import Setting, values_of

# The configuration of quant-smooth-ana's README; it must load as it is.
KNOWN_FILE = r"""
# 模型配置
model:
  path: "/path/to/your/model"
  name: "my-model"

# 数据配置
data:
  source: "pile"  # 或 custom:/path/to/file.txt
  num_samples: 64
  seq_len: 1024
  seed: 0

# 可视化配置
visualization:
  save_dir: "./figures"
  dpi: 200
  
  # 启用的可视化
  enabled:
    magnitude_input: true
    magnitude_output: true
    magnitude_weight: false
    outlier_layer_wise: true
    outlier_position: true
    outlier_token: true
    heatmap_3d: false
    distribution: false
  
  # Magnitude 配置 - 使用正则表达式匹配层
  magnitude:
    patterns:
      - "mlp\\.down_proj"      # 匹配所有 down_proj 层
      - "mlp\\.up_proj"        # 匹配所有 up_proj 层
      - "self_attn\\.q_proj"   # 匹配所有 q_proj 层
      - "self_attn\\.o_proj"   # 匹配所有 o_proj 层
    reduce_dim: null
  
  # Outlier 配置 - 使用正则表达式匹配层
  outlier:
    threshold: 64
    pattern: "layers\\.\\d+$"  # 匹配 transformer 层输出
    decode_tokens: true
  
  # 层选择（可选）- 过滤要分析的层
  layer_selection:
    patterns:
      - "layers\\.\\d+\\.mlp\\.down_proj"
      - "layers\\.\\d+\\.self_attn\\.q_proj"

# 显存配置
memory:
  device: "cuda"
  offload_device: "cpu"
  auto_offload: true
"""  # noqa: W293

# Every key of quant-smooth-ana's configuration, by section.
KNOWN_KEYS = {
    "model": "path name",
    "data": "source num_samples seq_len seed",
    "data.custom": "format text_column",
    "memory": "device offload_device auto_offload",
    "visualization": "save_dir dpi show_legend",
    "visualization.enabled": (
        "magnitude_input magnitude_output magnitude_weight outlier_layer_wise outlier_position "
        "outlier_token heatmap_3d distribution percentile_range"
    ),
    "visualization.magnitude": "patterns reduce_dim combined_plot",
    "visualization.magnitude.weight": "patterns",
    "visualization.outlier": "threshold pattern top_n decode_tokens",
    "visualization.distribution": "patterns plot_types is_input num_layers_to_show",
    "visualization.heatmap_3d": "pattern sample_idx is_input view_angle num_2d_layers",
    "visualization.percentile_range": "patterns is_input use_abs style num_layers_to_show",
    "visualization.layer_selection": "patterns",
    "output": "formats include_raw_data report_name",
}
NAMES = list(KEYS)
by_name = pytest.mark.parametrize("each", KEYS.values(), ids=NAMES)


def another(key: Setting) -> Any:
    """A value of a key that is not its default."""
    default = key.default[0] if isinstance(key.default, tuple) else key.default
    value: Any
    if key.allowed_as == "the name of a format":
        value = "hif4"
    elif key.choices:
        value = next(c for c in key.choices if c != default)
    elif key.kind is bool:
        value = not default
    elif key.kind is str:
        value = r"layers\.\d{1,2}"
    else:
        value = key.kind(default or 0) + (1 if key.kind is int else 0.125)
    return (value,) * (key.length or 1) if key.is_list else value


def said(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(said, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def refusal(
    tmp_path: Path, *overrides: tuple[str, str], text: str | None = None, name: str = "c.yaml"
) -> str:
    path = None
    if text is not None:
        path = tmp_path / name
        path.write_text(text)
    with pytest.raises(QgateError) as caught:
        read_settings(path, overrides)
    return str(caught.value)


# What loads --------------------------------------------------------------------------------------


def test_a_file_of_quant_smooth_ana_loads_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "my model.yaml"
    path.write_text(KNOWN_FILE, encoding="utf-8")
    loaded = read_settings(path, [("data.num_samples", "128"), ("outlier.threshold", "100")])
    assert data_request(loaded) == DataRequest("pile", num_samples=128, seq_len=1024)
    assert loaded.visualization.outlier.threshold == 100
    assert loaded.visualization.outlier.pattern == r"layers\.\d+$"
    assert loaded.visualization.magnitude.patterns is not None
    assert loaded.visualization.magnitude.patterns[0] == r"mlp\.down_proj"
    assert loaded.visualization.magnitude.reduce_dim is None
    assert changed_values(loaded)["memory.device"] == "cuda"
    assert "visualization.enabled.distribution" not in changed_values(loaded)


def test_every_key_of_quant_smooth_ana_has_one_meaning() -> None:
    full_names = {
        f"{section}.{key}" for section, keys in KNOWN_KEYS.items() for key in keys.split()
    }
    assert full_names <= set(NAMES)
    assert len(NAMES) == len(set(NAMES))
    for key in KEYS.values():
        assert len(key.help) > 5
        assert key.name == full_name(key.name, NAMES)


def test_no_short_name_is_that_of_another_key() -> None:
    short = [name.removeprefix(UNSAID) for name in NAMES]
    assert len(short) == len(set(short))
    tops = {name.partition(".")[0] for name in NAMES} - {"visualization"}
    inside = {n.removeprefix(UNSAID).partition(".")[0] for n in NAMES if n.startswith(UNSAID)}
    assert not tops & inside


def test_empty_settings_are_the_defaults(tmp_path: Path) -> None:
    assert read_settings() == ActivationSettings()
    assert changed_values(read_settings()) == {}
    for k, text in enumerate(
        ["", "# nothing\n", "---\n", "data:\n", "visualization:\n  outlier:\n"]
    ):
        path = tmp_path / f"{k}.yaml"
        path.write_text(text)
        assert read_settings(path) == ActivationSettings()
    (tmp_path / "e.toml").write_text("")
    assert read_settings(tmp_path / "e.toml") == ActivationSettings()
    with pytest.raises(FrozenInstanceError):
        read_settings().data.seed = 1


@by_name
def test_a_key_is_set_by_a_file_and_by_the_command_line(each: Setting, tmp_path: Path) -> None:
    value = another(each)
    for name in {each.name, each.name.removeprefix(UNSAID), f"--{each.name.replace('_', '-')}"}:
        assert changed_values(read_settings(None, [(name, said(value))])) == {each.name: value}
    tree: Any = list(value) if isinstance(value, tuple) else value
    for part in reversed(each.name.split(".")):
        tree = {part: tree}
    (tmp_path / "c.yml").write_text(yaml.safe_dump(tree))
    assert changed_values(read_settings(tmp_path / "c.yml")) == {each.name: value}
    inner = tree.get("visualization", tree)
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(inner))
    back = read_settings(tmp_path / "short.yaml", [(each.name, "null")] if each.nullable else [])
    assert changed_values(back) == (
        {each.name: None}
        if each.nullable and each.default is not None
        else {}
        if each.nullable
        else {each.name: value}
    )


@pytest.mark.parametrize("kind", ["yaml", "toml"])
def test_the_default_file_reads_back_and_comments_every_key(kind: str, tmp_path: Path) -> None:
    text = default_config_text(kind)
    path = tmp_path / f"c.{kind}"
    path.write_text(text, encoding="utf-8")
    read = read_settings(path)
    assert read == ActivationSettings()
    assert changed_values(read) == {}
    for key in KEYS.values():
        leaf = key.name.rpartition(".")[2]
        assert re.search(rf"^ *(# )?{leaf} ?[:=] .*  # {re.escape(key.help)}$", text, re.M), (
            key.name
        )
    loaded = yaml.safe_load(text) if kind == "yaml" else tomllib.loads(text)
    assert loaded["visualization"]["outlier"]["threshold"] == 64
    with pytest.raises(QgateError, match=r"'ini'.*toml, yaml"):
        default_config_text("ini")


def test_a_toml_file_says_null_in_words(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[magnitude]\nreduce_dim = "null"\n[data]\nseq_len = 8\n')
    assert changed_values(read_settings(tmp_path / "c.toml")) == {
        "visualization.magnitude.reduce_dim": None,
        "data.seq_len": 8,
    }


@pytest.mark.parametrize("word", ["false", "False", "no", "OFF", "0"])
def test_false_is_false(word: str, tmp_path: Path) -> None:
    assert read_settings(None, [("memory.auto_offload", word)]).memory.auto_offload is False
    (tmp_path / "c.yaml").write_text(f"memory: {{auto_offload: {word}}}")
    assert read_settings(tmp_path / "c.yaml").memory.auto_offload is False
    (tmp_path / "q.yaml").write_text(f"memory: {{auto_offload: '{word}'}}")
    assert read_settings(tmp_path / "q.yaml").memory.auto_offload is False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("magnitude.patterns", r"layers\.\d{1,2}$, mlp", (r"layers\.\d{1,2}$", "mlp")),
        ("magnitude.patterns", r"(up|down)_proj", (r"(up|down)_proj",)),
        ("magnitude.patterns", r"[0-9]+\.mlp,x", (r"[0-9]+\.mlp", "x")),
        ("magnitude.patterns", r'["a,b", "mlp\\.x"]', ("a,b", r"mlp\.x")),
        ("layer_selection.patterns", "[]", None),
        ("formats", "mxfp8,MXFP4", ("mxfp8_e4m3", "mxfp4_e2m1")),
        ("heatmap_3d.view_angle", "[10, 20.5]", (10.0, 20.5)),
        ("outlier.threshold", "1e3", 1000.0),
        ("visualization.model_name", "x", None),
        ("data.source", "custom:/a b/ü,c.txt", "custom:/a b/ü,c.txt"),
        ("model.path", "123", "123"),
    ],
)
def test_values_of_a_command_line(name: str, text: str, value: Any) -> None:
    read = read_settings(None, [(name, text)])
    if name == "visualization.model_name":
        assert read.model.name == "x"
    else:
        assert values_of(read)[full_name(name, NAMES)] == value


def test_the_last_of_two_equal_options_holds() -> None:
    said_twice = [("data.seed", "1"), ("data.seed", "2")]
    assert read_settings(None, said_twice).data.seed == 2


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (("outlier.treshold", "3"), ["'outlier.treshold'", "mean outlier.threshold"]),
        (("data.num_sampels", "3"), ["mean data.num_samples"]),
        (("threshold", "3"), ["mean outlier.threshold"]),
        (("trust_remote_code", "true"), ["unknown key 'trust_remote_code'"]),
        (("model.trust_remote_code", "true"), ["Allowed: model.name, model.path."]),
        (("outlier", "3"), ["is a section", "outlier.threshold"]),
        (("visualization", "3"), ["is a section", "save_dir"]),
        (("data.num_samples", "1.5"), ["data.num_samples '1.5'", "a whole number from 1"]),
        (("data.num_samples", "0"), ["'0'", "from 1"]),
        (("data.num_samples", "null"), ["a whole number"]),
        (("data.seed", "-1"), ["from 0"]),
        (("memory.auto_offload", "maybe"), ["'maybe'", "true or false"]),
        (("magnitude.patterns", "mlp("), ["visualization.magnitude.patterns", "'mlp('", "subpattern", "regular expression"]),
        (("outlier.pattern", "*x"), ["visualization.outlier.pattern '*x'", "nothing to repeat"]),
        (("magnitude.patterns", "[]"), ["one or more"]),
        (("magnitude.reduce_dim", "3"), ["one of -1, -2, 0, or null"]),
        (("outlier.threshold", "nan"), ["'nan'", "a number above 0"]),
        (("outlier.threshold", "inf"), ["'inf'"]),
        (("outlier.threshold", "0"), ["above 0"]),
        (("outlier.persistence", "1.5"), ["above 0 to 1"]),
        (("formats", "mxfp8,e4m4"), ["formats: unknown format 'e4m4'", "fp8_e4m3"]),
        (("percentile_range.style", "dots"), ["style 'dots' is not allowed; it is one of line, fill"]),
        (("output.formats", "png,exe"), ["'exe'", "csv, html, json"]),
        (("heatmap_3d.view_angle", "1"), ["a list of two numbers"]),
        (("heatmap_3d.sample_idx", "64"), ["from 0 to 63"]),
        (("data.source", " "), ["empty", "a text"]),
        (("smoothing.alphas", "0.5,2"), ["from 0 to 1"]),
    ],
)  # fmt: skip
def test_an_option_is_refused(override: tuple[str, str], words: list[str], tmp_path: Path) -> None:
    message = refusal(tmp_path, override)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1\nb: 2\n", ["broken YAML in line 2, column 2"]),
        ("data:\n\tsource: x\n", ["line 2, column 1", "Tabs"]),
        ("data:\n  seed: 1\n  seed: 2\n", ["line 3, column 3", "'seed' is there twice"]),
        ("a: 1\n---\nb: 2\n", ["another document"]),
        ("data: !!python/object/apply:os.system ['touch was-run']\n", ["line 1, column 7", "python/object"]),
        ("? [1, 2]\n: 3\n", ["line 1"]),
        ("a: \x01\n", ["special characters"]),
        ("- 1\n", ["holds list"]),
        ("just words\n", ["holds str"]),
        ("data: 3\n", ["data 3", "a section with data.source"]),
        ("data: {custom: text}\n", ["data.custom 'text'", "data.custom.format"]),
        ("dta: {seed: 1}\n", ["unknown key 'dta'", "mean data"]),
        ("outlier: {treshold: 1}\n", ["'outlier.treshold'", "outlier.threshold"]),
        ("data: &a\n  custom: *a\n", ["broken YAML", "an alias stands for what it is a part of"]),
        ("data: {num_samples: '64'}\n", ["data.num_samples '64'", "a whole number from 1"]),
        ("data: {num_samples: 64.0}\n", ["64.0"]),
        ("data: {num_samples: true}\n", ["True", "a whole number"]),
        ("data: {num_samples: }\n", ["data.num_samples null"]),
        ("data: {seed: 2024-01-01}\n", ["data.seed"]),
        ("model: {name: 123}\n", ["model.name 123", "quote"]),
        ("outlier: {pattern: [a, b]}\n", ["['a', 'b']", "a regular expression"]),
        ("outlier: {threshold: many}\n", ["'many'", "a number"]),
        ("formats: {a: 1}\n", ["formats {'a': 1}", "a list"]),
        ("formats: [1]\n", ["[1]", "the name of a format"]),
        ("outlier: {threshold: 1}\nvisualization: {outlier: {threshold: 2}}\n", ["outlier.threshold and visualization.outlier.threshold", "same key"]),
        ("model: {name: a}\nvisualization: {model_name: b}\n", ["same key"]),
        ("model: {trust_remote_code: true}\n", ["unknown key 'model.trust_remote_code'"]),
        ("1: 2\n", ["unknown key '1'"]),
    ],
)  # fmt: skip
def test_a_yaml_file_is_refused(
    text: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(tmp_path, text=text)
    words = [*words, str(tmp_path / "c.yaml")]
    assert [word for word in words if word not in message] == []
    assert not (tmp_path / "was-run").exists()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match=r"nope\.yaml' cannot be read: there is no such file"):
        read_settings(tmp_path / "nope.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(QgateError, match=r"folder\.yaml' cannot be read"):
        read_settings(tmp_path / "folder.yaml")
    assert "no .yaml, .yml or .toml" in refusal(tmp_path, text="x", name="c.ini")
    assert "broken TOML" in refusal(tmp_path, text="a = \n", name="c.toml")
    assert "line 1, column 5" in refusal(tmp_path, text="a = \n", name="c.toml")
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: caf\xe9}")
    with pytest.raises(QgateError, match=r"UTF-8: byte 0xe9 at position 17"):
        read_settings(tmp_path / "latin.yaml")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfmodel: {name: x}\r\n")
    assert read_settings(tmp_path / "bom.yaml").model.name == "x"


def test_two_names_of_one_key_on_a_command_line(tmp_path: Path) -> None:
    pair = (("outlier.threshold", "1"), ("visualization.outlier.threshold", "2"))
    assert "same key" in refusal(tmp_path, *pair)


# Properties --------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(
    st.lists(
        st.from_regex(r"(\\d|[a-z.0-9|]){1,8}(\{1,2\}|\(a,b\)|\[x,y\])?", fullmatch=True),
        min_size=1,
        max_size=4,
    )
)
def test_items_joined_by_commas_come_apart_again(items: list[str]) -> None:
    assert split_list(", ".join(items)) == items


@settings(max_examples=60)
@given(st.data())
def test_any_settings_survive_a_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    chosen = data.draw(
        st.lists(st.sampled_from(list(KEYS.values())), unique_by=lambda key: key.name)
    )
    tree: dict[str, Any] = {}
    for key in chosen:
        *above, leaf = key.name.split(".")
        inner = tree
        for part in above:
            inner = inner.setdefault(part, {})
        value = another(key)
        inner[leaf] = list(value) if isinstance(value, tuple) else value
    path = tmp_path_factory.mktemp("any") / "c.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert changed_values(read_settings(path)) == {key.name: another(key) for key in chosen}


@settings(max_examples=150)
@given(st.text(max_size=40))
def test_any_text_is_refused_or_says_nothing(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(QgateError):
        assert read_settings(path) == ActivationSettings()
