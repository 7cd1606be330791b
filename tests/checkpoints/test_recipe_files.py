from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from qgate.checkpoints.comparison import compare
from qgate.checkpoints.recipe_files import parse_recipe, read_recipe_file
from qgate.cli import main
from qgate.errors import QgateError
from tests.checkpoints.exports import SCHEMES, export, parent_tensors, write
from tests.checkpoints.methods import export_awq, export_gptq


@pytest.mark.parametrize("name", SCHEMES)
def test_the_recipe_written_out_is_one_to_give_back(name: str, tmp_path: Path) -> None:
    child = str(export(tmp_path / "child", name))
    record = compare(child)
    assert record.written_recipe["ignore"] == ["lm_head"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(record.written_recipe))
    second_record = compare(child, recipe_file=str(path))
    assert second_record.findings == []
    assert second_record.written_recipe == record.written_recipe
    for kind in (".json", ".toml"):
        other = path.with_suffix(kind)
        targets = record.written_recipe["targets"]
        assert isinstance(targets, dict)
        toml = "ignore = ['lm_head']\n[targets]\n" + "\n".join(
            f"'{target}' = {_toml(entry)}" for target, entry in targets.items()
        )
        other.write_text(json.dumps(record.written_recipe) if kind == ".json" else toml)
        assert read_recipe_file(str(other)) == read_recipe_file(str(path))


def _toml(entry: object) -> str:
    if not isinstance(entry, dict):
        return json.dumps(entry)
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in entry.items()) + "}"


def test_a_recipe_says_what_a_child_does_not(tmp_path: Path) -> None:
    write(tmp_path / "parent", parent_tensors(), {})
    tensors = load_file(export(tmp_path / "child", "w4a16") / "model.safetensors")
    write(tmp_path / "child", tensors, {"quantization_config": {"quant_method": "own"}})
    child, recipe = str(tmp_path / "child"), tmp_path / "recipe.yaml"
    with pytest.raises(QgateError, match=r"quant_method 'own'.*with --recipe FILE"):
        compare(child)
    recipe.write_text("targets: {Linear: {format: int4, block: 32}}\nignore: [lm_head]\n")
    record = compare(child, str(tmp_path / "parent"), recipe_file=str(recipe))
    assert record.findings == []
    recipe.write_text("targets: {Linear: {format: int4, block: 64}}\nignore: ['re:.*visual.*']\n")
    causes = [finding.cause for finding in compare(child, recipe_file=str(recipe)).findings]
    assert "it is int4 per 32, and the recipe declares int4 per 64" in causes
    assert "this ignore pattern matches no module" in causes
    assert "it is not quantized, and the recipe declares int4 per 64" in causes


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_a_recipe_of_other_methods_is_given_back(name: str, tmp_path: Path) -> None:
    child = str((export_gptq if name == "gptq" else export_awq)(0).write(tmp_path / "child"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(compare(child).written_recipe))
    assert yaml.safe_load(recipe.read_text())["targets"] == {
        "Linear": {"format": "uint4", "block": 32}
    }
    assert compare(child, recipe_file=str(recipe)).findings == []


def test_layers_of_another_format_are_patterns(tmp_path: Path) -> None:
    tensors = load_file(export(tmp_path / "child", "int8") / "model.safetensors")
    other = load_file(export(tmp_path / "other", "fp8") / "model.safetensors")
    for name, tensor in other.items():
        if "down_proj" in name or "1.mlp.up_proj" in name:
            tensors[name] = tensor
    record = compare(str(write(tmp_path / "child", tensors, {})))
    assert record.written_recipe == {
        "targets": {
            "Linear": {"format": "int8", "granularity": "channel"},
            "model.layers.*.mlp.down_proj": {"format": "fp8_e4m3", "granularity": "channel"},
            "model.layers.1.mlp.up_proj": {"format": "fp8_e4m3", "granularity": "channel"},
        },
        "ignore": ["lm_head"],
    }
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(record.written_recipe))
    assert compare(str(tmp_path / "child"), recipe_file=str(recipe)).findings == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no targets; give patterns of modules with formats"),
        ("targets: [int8]", "it names no targets"),
        ("targets: {Linear: int9}", "'Linear': unknown format 'int9'"),
        ("targets: {Linear: 8}", "'Linear' is 8, and not a format"),
        ("targets: {Linear: {block: 3}}", "and not a format"),
        (
            "targets: {Linear: int8}\nignored: []",
            "the key 'ignored' is unknown; a recipe file has targets",
        ),
        ("targets: {Linear: int8}\nignore: lm_head", "ignore is 'lm_head', and not a list"),
        ("targets: {Linear: int8}\nignore: ['re:(']", "the pattern 're:\\(' is no regular"),
        ("targets: {Linear: {format: int8, blok: 3}}", "'Linear' has 'blok'"),
        ("targets: {Linear: {format: nvfp4, block: 3}}", "whose blocks are those of the format"),
        ("targets: {Linear: {format: int8, block: 0}}", "block is 0; give the columns"),
        ("targets: {Linear: {format: int8, block: [1, 2, 3]}}", "block is \\[1, 2, 3\\]"),
        ("targets: {Linear: {format: int8, granularity: row}}", "tensor, channel and block are"),
        ("targets: {Linear: {format: int8, granularity: tensor, block: 2}}", "needs granularity"),
        ("targets: {Linear: {format: int8, zero_points: 3}}", "zero_points is 3"),
        ("targets: {Linear: [", "is broken YAML in line 1"),
        ("- a", "holds list and not keys"),
    ],
)
def test_a_bad_recipe_is_one_clear_error(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    child = str(export(tmp_path / "child", "int8"))
    with pytest.raises(QgateError, match=words):
        compare(child, recipe_file=str(path))
    assert main(["checkpoint", child, "--recipe", str(path)]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert str(path) in error


def test_a_recipe_that_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QgateError, match="there is no such file"):
        read_recipe_file(str(tmp_path / "recipe.yaml"))
    with pytest.raises(QgateError, match=r"is no \.yaml, \.yml, \.toml or \.json file"):
        read_recipe_file(str(tmp_path / "recipe.txt"))


def test_formats_with_blocks_of_their_own_have_their_names() -> None:
    recipe = parse_recipe({"targets": {"Linear": "nvfp4", "re:.*experts.*": "mxfp4_e2m1"}})
    assert str(recipe.format_of("up")) == "fp4_e2m1 per 16"
    assert str(recipe.format_of("experts.0.up")) == "fp4_e2m1 per 32"
