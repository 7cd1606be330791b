"""Faults over exports of every kind, and the right exports: the proof that all are named.

Each export is a folder or a file with its parent; folders of safetensors have what is shipped
beside weights. A fault changes tensors or a file of an export.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import torch
from onnx import numpy_helper
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import gguf_exports, onnx_exports, own_exports, torchao_exports
from tests.checkpoints.exports import export as compressed
from tests.checkpoints.exports import parent_tensors, with_stored, write
from tests.checkpoints.references import awq_parts, gptq_parts, nearest, with_stored_scales
from tests.checkpoints.shipped_exports import NETWORK, parent_shipment

UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.0.mlp.down_proj"
V = "model.layers.1.self_attn.v_proj"
Plant = Callable[[Path], object]
Tensors = dict[str, Tensor]
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "chat_template.jinja", "preprocessor_config.json",
)  # fmt: skip
OWN_NAMES = {
    "own codes": "unpacked with zero points",
    "own words": "words along the inputs, transposed",
}


def _by_parts(folder: Path, settings: dict[str, Any], parts: Callable[[Tensor], Tensors]) -> Path:
    tensors = with_stored(lambda weight: parts(weight.float()))
    return write(folder, tensors, {"quantization_config": settings})


def _gptq(folder: Path) -> Path:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    return _by_parts(folder, settings, lambda w: gptq_parts(with_stored_scales(nearest(w))))


def _awq(folder: Path) -> Path:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return _by_parts(folder, settings, lambda w: awq_parts(with_stored_scales(nearest(w))))


def _modelopt(folder: Path) -> Path:
    """Store NVFP4 as ModelOpt does, with one scale of all weights and static input scales."""
    largest = max(float(x.abs().max()) for name, x in parent_tensors().items() if "_proj" in name)
    whole = torch.tensor(largest / (6 * 448))

    def parts(w: Tensor) -> Tensors:
        tiles = w.reshape(len(w), -1, 16)
        scales = (tiles.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        ratios = (tiles / (scales.float() * whole)[..., None]).reshape(w.shape)
        codes = (ratios.abs()[..., None] - LEVELS).abs().argmin(2).to(torch.uint8)
        codes += 8 * (ratios < 0).to(torch.uint8)
        return {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales,
                "weight_scale_2": whole.clone(), "input_scale": torch.tensor(0.001)}  # fmt: skip

    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    path = _by_parts(folder, settings, parts)

    def by_kind(tensors: Tensors) -> None:
        for number, name in enumerate(sorted(name for name in tensors if "input_scale" in name)):
            kind = 1 + (".mlp." in name) + 3 * ("o_proj" in name or "down" in name) * (1 + number)
            tensors[name] = torch.tensor(kind * 3e-4)

    _change_tensors(path, by_kind)
    return path


SAFETENSORS: dict[str, Callable[[Path], object]] = {
    "compressed-tensors INT4": lambda folder: compressed(folder, "w4a16-zero-points"),
    "compressed-tensors FP8": lambda folder: compressed(folder, "fp8"),
    "compressed-tensors NVFP4": lambda folder: compressed(folder, "nvfp4"),
    "ModelOpt": _modelopt,
    "GPTQ": _gptq,
    "AWQ": _awq,
    "torchao": lambda folder: torchao_exports.export(folder, "int8"),
    **{key: functools.partial(lambda folder, name: own_exports.export(folder.parent, name), name=name)
       for key, name in OWN_NAMES.items()},
}  # fmt: skip
EXPORTS = (*SAFETENSORS, "GGUF", "ONNX")


@dataclass(frozen=True)
class Exported:
    """A right export: the child, its parent, and the file of its layout."""

    child: Path
    parent: Path
    layout: Path | None = None


def export_all(root: Path) -> dict[str, Exported]:
    """Write all right exports, and their parents."""
    shipment = parent_shipment()
    files = {name: shipment.files[name] for name in FILES}
    parent = write(root / "parent", parent_tensors(), NETWORK)
    _write_files(parent, files)
    exports = {}
    for name, exporter in SAFETENSORS.items():
        folder = root / name.replace(" ", "-") / "child"
        folder.mkdir(parents=True)
        exporter(folder)
        settings = json.loads((folder / "config.json").read_text())
        _write_files(folder, {**files, "config.json": {**NETWORK, **settings}})
        layout = folder.parent / "layout.toml"
        exports[name] = Exported(folder, parent, layout if layout.exists() else None)
    wide = write(root / "wide", gguf_exports.parent_tensors(), {})
    export = gguf_exports.export(gguf.GGMLQuantizationType.Q8_0)
    exports["GGUF"] = Exported(export.write(root / "gguf" / "child.gguf"), wide)
    plain = onnx_exports.write_parent(root / "plain")
    path = root / "onnx" / "child.onnx"
    path.parent.mkdir()
    onnx.save(onnx_exports.HAND_EXPORTS["int8 per output"](), path)
    return exports | {"ONNX": Exported(path, plain)}


def _write_files(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")


def planted(exported: Exported, plant: Plant, root: Path) -> Exported:
    """Copy an export with a fault."""
    root.mkdir(parents=True, exist_ok=True)
    child = root / exported.child.name
    if exported.child.is_dir():
        shutil.copytree(exported.child, child)
    else:
        shutil.copy(exported.child, child)
    plant(child)
    return Exported(child, exported.parent, exported.layout)


# Changes ------------------------------------------------------------------------------------------


def _change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata)


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def swap(tensors: Tensors) -> None:
        before = tensors[name]
        is_byte = before.dtype.itemsize == 1
        after = change((before.view(torch.uint8) if is_byte else before).clone())
        tensors[name] = after.view(before.dtype) if is_byte else after

    return lambda folder: _change_tensors(folder, swap)


def tensors(change: Callable[[Tensors], object]) -> Plant:
    return lambda folder: _change_tensors(folder, change)


def document(name: str, change: Callable[[dict[str, Any]], object]) -> Plant:
    def plant(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return plant


def text(name: str, content: str) -> Plant:
    return lambda folder: (folder / name).write_text(content)


def removed(name: str) -> Plant:
    return lambda folder: (folder / name).unlink()


def blocks(name: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Plant:
    """Change the rows of bytes of a tensor of the GGUF file."""

    def plant(path: Path) -> None:
        export = gguf_exports.export(gguf.GGMLQuantizationType.Q8_0)
        data, kind = export.tensors[name]
        export.tensors[name] = change(data.copy()), kind
        export.write(path)

    return plant


def initializer(name: str, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Plant:
    """Change a tensor of the ONNX file."""

    def plant(path: Path) -> None:
        model = onnx.load(path)
        stored = next(x for x in model.graph.initializer if x.name == name)
        values = numpy_helper.to_array(stored).copy()
        stored.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(values)), name))
        onnx.save(model, path)

    return plant


def swap_rows(x: Any) -> Any:
    x[[5, 9]] = x[[9, 5]]
    return x


def down_one(x: Tensor) -> Tensor:
    return x.roll(1, 0)


def garbage_row(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x[17] = torch.randint(0, 200, x[17].shape, generator=generator).to(x.dtype)
    return x


def _columns_swapped(x: Any) -> Any:
    x[:, [2, 7]] = x[:, [7, 2]]
    return x


def _of_awq(tensors: Tensors) -> None:
    """Store the outputs of a word as they follow each other, not in AWQ's order."""
    words, order = tensors[f"{UP}.qweight"], (0, 4, 1, 5, 2, 6, 3, 7)
    parts = [(words >> 4 * position & 15) << 4 * n for n, position in enumerate(order)]
    tensors[f"{UP}.qweight"] = torch.stack(parts).sum(0).int()


def _as_e5m2(tensors: Tensors) -> None:
    ratios = parent_tensors()[f"{UP}.weight"].float() / tensors[f"{UP}.weight_scale"].float()
    codes = ratios.to(torch.float8_e5m2).view(torch.uint8)
    tensors[f"{UP}.weight"] = codes.view(torch.float8_e4m3fn)


def _nibble_late(x: Tensor) -> Tensor:
    nibbles = torch.stack([x & 15, x >> 4], -1).flatten(1).roll(1, 1)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _copied(source: str, target: str) -> Plant:
    return tensors(lambda t: t.update({target: t[source].clone()}))


def _without_a_shard(folder: Path) -> None:
    """Divide the tensors into two shards, of which the second one is lost."""
    path, files = (
        folder / "model.safetensors",
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    )
    with safe_open(path, "pt") as file:
        tensors_by_name = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weight_map = {
        name: files[n >= len(tensors_by_name) // 2]
        for n, name in enumerate(sorted(tensors_by_name))
    }
    first = {name: x for name, x in tensors_by_name.items() if weight_map[name] == files[0]}
    save_file(first, folder / files[0])
    path.unlink()
    size = sum(x.numel() * x.element_size() for x in tensors_by_name.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _recipe(**changes: object) -> Plant:
    return document("config.json", lambda d: d["quantization_config"].update(changes))


def _scale_of_the_head(tensors: Tensors) -> None:
    tensors["lm_head.input_scale"] = torch.tensor(0.002)


@dataclass(frozen=True)
class CampaignFault:
    """A fault of one export: the subject of its finding, and words of the cause."""

    export: str
    plant: Plant
    subject: str
    words: str


T, G, C = "tokenizer_config.json", "generation_config.json", "config.json"
INT4, FP8, NVFP4 = "compressed-tensors INT4", "compressed-tensors FP8", "compressed-tensors NVFP4"
WEIGHTS: dict[str, CampaignFault] = {
    "rows of words swapped": CampaignFault(INT4, tensor(f"{UP}.weight_packed", swap_rows), UP, "rows 5 and 9 are swapped"),
    "scales a row down": CampaignFault(INT4, tensor(f"{UP}.weight_scale", down_one), UP, "belongs to the row before it, zero points do not"),
    "a garbage row of words": CampaignFault(INT4, tensor(f"{UP}.weight_packed", garbage_row), UP, "most row 17, .*"),
    "a zero point off": CampaignFault(INT4, tensor(f"{UP}.weight_zero_point", lambda x: x.index_add(0, torch.tensor([2]), torch.ones(1, x.shape[1], dtype=x.dtype))), UP, "row 16, .*the zero point is 1 too high"),
    "columns of FP8 swapped": CampaignFault(FP8, tensor(f"{UP}.weight", _columns_swapped), UP, "columns 2 and 7 are swapped"),
    "scales of FP8 tripled": CampaignFault(FP8, tensor(f"{DOWN}.weight_scale", lambda x: x * 3), DOWN, "all scales are 3 times too high"),
    "blocks of NVFP4 a row down": CampaignFault(NVFP4, tensor(f"{UP}.weight_scale", down_one), UP, "belongs to the row before it"),
    "a scale of the whole tensor": CampaignFault(NVFP4, tensor(f"{DOWN}.weight_global_scale", lambda x: x * 4), DOWN, "all scales are 4 times too low"),
    "nibbles of ModelOpt": CampaignFault("ModelOpt", tensor(f"{UP}.weight", lambda x: x >> 4 | x << 4), UP, "order of nibbles"),
    "halves of ModelOpt": CampaignFault("ModelOpt", tensor(f"{UP}.weight_scale_2", lambda x: x * 2), "gate_proj", "engines fuse gate_proj and up_proj"),
    "an input scale at 1": CampaignFault("ModelOpt", tensor(f"{DOWN}.input_scale", torch.ones_like), f"{DOWN}.input_scale", "it is 1, .*nothing calibrated it"),
    "an input scale of q, k, v": CampaignFault("ModelOpt", tensor(f"{V}.input_scale", lambda x: x * 8), f"{V}.input_scale", "weights that read one input"),
    "zero points of GPTQ": CampaignFault("GPTQ", tensor(f"{UP}.qzeros", lambda x: x + 0x11111111), UP, "zero points are 1 too high"),
    "columns in other groups": CampaignFault("GPTQ", tensor(f"{UP}.g_idx", lambda x: x.flip(0)), UP, "group|g_idx"),
    "words of GPTQ swapped": CampaignFault("GPTQ", tensor(f"{UP}.scales", lambda x: x.roll(1, 1)), UP, "belongs to the row before it"),
    "an order of AWQ": CampaignFault("AWQ", tensor(f"{UP}.scales", lambda x: x * 0.5), UP, "all scales are 2 times too low"),
    "outputs of AWQ": CampaignFault("AWQ", tensor(f"{UP}.scales", lambda x: x.roll(-1, 1)), UP, "belongs to the row after it"),
    "rows of torchao": CampaignFault("torchao", tensors(lambda t: t.update({f"{UP}._weight_qdata": swap_rows(t[f"{UP}._weight_qdata"])})), UP, "rows 5 and 9 are swapped"),
    "scales of torchao": CampaignFault("torchao", tensors(lambda t: t.update({f"{UP}._weight_scale": t[f"{UP}._weight_scale"] * 2})), UP, "all scales are 2 times too high"),
    "rows of GGUF": CampaignFault("GGUF", blocks("blk.1.ffn_up.weight", swap_rows), "blk.1.ffn_up", "rows 5 and 9 are swapped"),
    "another order in GGUF": CampaignFault("GGUF", blocks("blk.0.ffn_down.weight", lambda x: np.roll(x, 1, 0)), "blk.0.ffn_down", "rows stand in another order"),
    "rows of ONNX": CampaignFault("ONNX", initializer("layers.1.up.weight_quantized", _columns_swapped), "layers.1.up", "rows 2 and 7 are swapped"),
    "scales of ONNX": CampaignFault("ONNX", initializer("layers.1.up.weight_scale", lambda x: np.roll(x, 1)), "layers.1.up", "belongs to the group before it"),
    "own scales doubled": CampaignFault("own codes", tensor(f"{UP}.W_scale", lambda x: x * 2), UP, "all scales are 2 times too high"),
    "own zero points": CampaignFault("own codes", tensor(f"{UP}.W_zero", lambda x: x - 1), UP, "zero points are 1 too low"),
    "own scales a row down": CampaignFault("own words", tensor(f"{UP}.s", lambda x: x.roll(1, 1)), UP, "belongs to the row before it, zero points do not"),
    "words in the order of neighbors": CampaignFault("AWQ", tensors(_of_awq), UP, "read in the order of AWQ, and stand in that of their neighbors"),
    "words of inputs swapped": CampaignFault("GPTQ", tensor(f"{UP}.qweight", lambda x: x[[3, 1, 2, 0, *range(4, len(x))]]), UP, "columns stand in another order: 16 of 64, column 0 is the parent's 24"),
    "codes of E5M2": CampaignFault(FP8, tensors(_as_e5m2), UP, "codes are read as fp8_e4m3 and are fp8_e5m2"),
    "one element of FP8": CampaignFault(FP8, tensor(f"{UP}.weight", lambda x: x.index_put((torch.tensor([40]), torch.tensor([11])), torch.tensor(0x7E, dtype=torch.uint8))), UP, "1 row of 128 has far more error than the others, most row 40"),
    "nibbles one late": CampaignFault(NVFP4, tensor(f"{UP}.weight_packed", _nibble_late), UP, "columns stand in another order: each is the parent's 1 before it"),
    "codes of torchao cut": CampaignFault("torchao", tensors(lambda t: t.update({f"{UP}._weight_qdata": t[f"{UP}._weight_qdata"].clamp(-64, 63)})), UP, "codes are cut off at -64 and 63 of int8"),
    "own codes cut": CampaignFault("own codes", tensor(f"{UP}.W_q", lambda x: x.clamp(0, 11)), UP, "codes are cut off at 0 and 11 of uint4"),
    "a head that is the embedding": CampaignFault("torchao", _copied("model.embed_tokens.weight", "lm_head.weight"), "lm_head", "it is model.embed_tokens.weight of the parent"),
    "a row of the embedding": CampaignFault("own codes", tensor("model.embed_tokens.weight", lambda x: x.index_fill(0, torch.tensor([7]), 0)), "model.embed_tokens", "1 row of 96 is zero, first row 7"),
    "rows of the head": CampaignFault("ModelOpt", tensor("lm_head.weight", swap_rows), "lm_head", "rows 5 and 9 are swapped"),
    "a norm less one": CampaignFault("GPTQ", tensor("model.norm.weight", lambda x: x - 1), "model.norm", "every value is 1 less"),
    "a norm of another place": CampaignFault("AWQ", _copied("model.norm.weight", "model.layers.1.input_layernorm.weight"), "model.layers.1.input_layernorm", "it is model.norm.weight of the parent"),
    "own scales lost": CampaignFault("own words", tensors(lambda t: t.pop(f"{UP}.s")), UP, "its s is missing"),
}  # fmt: skip
BESIDE: dict[str, CampaignFault] = {
    "no tokenizer": CampaignFault(INT4, removed("tokenizer.json"), "tokenizer.json", "missing here"),
    "another end": CampaignFault(INT4, document(T, lambda d: d.update(eos_token="</s>")), f"{T} eos_token", "'</s>' here and '<.im_end.>' in the parent"),
    "truncated prompts": CampaignFault("GPTQ", document("tokenizer.json", lambda d: d.update(truncation={"max_length": 512})), "tokenizer.json truncation", "512"),
    "another id": CampaignFault("AWQ", document("tokenizer.json", lambda d: d["model"]["vocab"].update(a=4, b=3)), "tokenizer.json model.vocab", "2 of 31 tokens have other ids"),
    "another template": CampaignFault("GPTQ", text("chat_template.jinja", "{{ messages }}\n"), "chat_template.jinja chat_template line 1", "here and"),
    "no template": CampaignFault("ModelOpt", removed("chat_template.jinja"), "chat_template.jinja", "missing here"),
    "no defaults": CampaignFault("ModelOpt", removed(G), G, "missing here"),
    "an end lost": CampaignFault(FP8, document(G, lambda d: d.update(eos_token_id=1)), f"{G} eos_token_id", r"1 here and \[1, 30\]"),
    "a shorter context": CampaignFault(FP8, document(C, lambda d: d.update(max_position_embeddings=4096)), f"{C} max_position_embeddings", "4096 here and 8192"),
    "another rope": CampaignFault(NVFP4, document(C, lambda d: d["rope_scaling"].update(factor=32.0)), f"{C} rope_scaling.factor", "32.0 here and 8.0"),
    "another epsilon": CampaignFault("torchao", document(C, lambda d: d.update(rms_norm_eps=1e-6)), f"{C} rms_norm_eps", "1e-06 here and 1e-05"),
    "no preprocessor": CampaignFault("torchao", removed("preprocessor_config.json"), "preprocessor_config.json", "missing here"),
    "a scale of the head": CampaignFault("own codes", tensors(_scale_of_the_head), "lm_head.input_scale", "BF16 and not quantized"),
    "an embedding in FP32": CampaignFault(INT4, tensor("model.embed_tokens.weight", Tensor.float), "model.embed_tokens", "F32 here and BF16 in the parent"),
    "a shard that is lost": CampaignFault(FP8, _without_a_shard, "model-00002-of-00002.safetensors", "the shard is missing: the index has 18 tensors in it"),
    "a cache without scales": CampaignFault(FP8, _recipe(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}), f"{C} quantization_config.kv_cache_scheme", "no k_scale or v_scale is stored"),
    "a format of other codes": CampaignFault(FP8, _recipe(format="int-quantized"), f"{C} quantization_config.format", "codes are stored as in 'float-quantized'"),
    "a dtype that nothing has": CampaignFault(NVFP4, document(C, lambda d: d.update(torch_dtype="float16")), f"{C} dtype", "declares F16, .* are BF16 as in the parent"),
    "heads of keys": CampaignFault(FP8, document(C, lambda d: d.update(num_key_value_heads=1)), f"{C} num_key_value_heads", "with 1 head of 16, and the parent's keys have 64 rows"),
    "inputs without scales": CampaignFault(FP8, document(C, lambda d: d["quantization_config"]["config_groups"]["group_0"].update(input_activations={"num_bits": 8, "dynamic": False})), "model.layers.0.mlp.down_proj.input_scale", "missing for 14 weights of 14, which the recipe declares static"),
    "no recipe": CampaignFault(INT4, document(C, lambda d: d.pop("quantization_config")), f"{C} quantization_config", "it is missing, and codes are stored for 14 weights"),
    "two recipes": CampaignFault("ModelOpt", text("hf_quant_config.json", json.dumps({"quantization": {"quant_algo": "FP8"}})), "hf_quant_config.json quantization.quant_algo", "'FP8' here and 'NVFP4' in config.json"),
    "no architecture": CampaignFault("GPTQ", document(C, lambda d: d.pop("architectures")), f"{C} architectures", "missing here and .'LlamaForCausalLM'. in the parent"),
    "another size of images": CampaignFault("AWQ", document("preprocessor_config.json", lambda d: d.update(size=336)), "preprocessor_config.json size", "336 here and 224"),
    "an added token with two texts": CampaignFault("GPTQ", document(T, lambda d: d.update(added_tokens_decoder={"32": {"content": "<x>"}})), f"{T} added_tokens_decoder.32", "'<x>' here and '<.im_end.>' in tokenizer.json"),
    "an end in prompts": CampaignFault("torchao", document(T, lambda d: d.update(add_eos_token=True)), f"{T} add_eos_token", "True here and nothing"),
    "two templates": CampaignFault("ModelOpt", document(T, lambda d: d.update(chat_template="{{ messages[0] }}")), f"{T} chat_template", "another one than that of chat_template.jinja"),
    "two ends": CampaignFault(FP8, document("special_tokens_map.json", lambda d: d.update(eos_token="</s>")), "special_tokens_map.json eos_token", "'</s>' here and '<.im_end.>' in tokenizer_config.json"),
    "a card of another format": CampaignFault(NVFP4, text("README.md", "# tiny FP8\n"), "README.md title", "'FP8' here, and the weights are fp4_e2m1"),
    "weights of another export": CampaignFault("AWQ", text("pytorch_model.bin", "x"), "pytorch_model.bin", "nothing refers to it"),
    "a stale index": CampaignFault("own words", text("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})), "model.safetensors.index.json a", "1 of 1 tensors that it names are in no file"),
}  # fmt: skip
FAULTS = WEIGHTS | BESIDE
