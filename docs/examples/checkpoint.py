"""Compare a quantized checkpoint with its parent, right and with a planted fault."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import qgate

weight = torch.randn(128, 256)
scale = weight.abs().amax(1, keepdim=True) / 127
codes = (weight / scale).round().to(torch.int8)
declared = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
recipe = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": declared}},
    "ignore": ["lm_head"],
}


def write(folder, tensors, configuration):
    Path(folder).mkdir(exist_ok=True)
    save_file(tensors, f"{folder}/model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(configuration))


write("parent", {"up.weight": weight, "lm_head.weight": torch.eye(4)}, {})
child = {"up.weight": codes, "up.weight_scale": scale, "lm_head.weight": torch.eye(4)}
write("child", child, {"quantization_config": recipe})
assert qgate.checkpoints.compare("child", "parent").findings == []

write("child", {**child, "up.weight_scale": scale * 2}, {"quantization_config": recipe})
record = qgate.checkpoints.compare("child", "parent")
print(record)  # findings and the worst weights, in a few lines
assert record.findings[0].subject == "up.weight"
assert record.findings[0].cause.startswith("all scales are 2 times too high")
assert {weight.name: weight.format for weight in record.weights}["up.weight"] == "int8 per row"
json.dumps(record.to_dict(), allow_nan=False)  # all figures as plain data
