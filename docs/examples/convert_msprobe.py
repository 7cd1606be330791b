"""Convert tensors that msprobe dumped into a dump of qgate."""

import json
import re
from pathlib import Path
from tempfile import mkdtemp

import torch

from qgate.dumps import Dump, DumpWriter, Record

NAME = re.compile(
    r"Module\.(?P<module>.+)\.(?P<type>\w+)\."
    r"((?P<operation>forward|backward)\.(?P<call>\d+)\.(?P<port>input|output|parameters)"
    r"|parameters_grad\.(?P<again>\d+))\.(?P<which>[\w.]+)\.pt"
)


def tensor_name(match):
    """Name a tensor as qgate does: msprobe calls the gradient of an output `backward.input`."""
    port, which = match["port"], match["which"]
    if match["again"]:
        return f"grad_{which}"
    if match["operation"] == "backward":
        port = {"input": "grad_output", "output": "grad_input"}[port]
    return port if which == "0" else which if port == "parameters" else f"{port}_{which}"


def convert(step, folder, iteration=0):
    """Write the tensors of one step and rank (step0/rank0 or step0/proc123) as a dump."""
    files = re.findall(r'"data_name": *"([^"/]+\.pt)"', Path(step, "dump.json").read_text())
    with DumpWriter(folder, header={"model": "converted"}) as writer:
        for order, file in enumerate(files):
            tensor = torch.load(Path(step, "dump_tensor_data", file), weights_only=True)
            match = NAME.fullmatch(file)
            if match is None or not isinstance(tensor, torch.Tensor):
                print("left out:", file)
                continue
            name, operation = tensor_name(match), match["operation"] or "backward"
            goes_in = name.startswith("grad_output") or match["port"] == "parameters"
            goes_in = goes_in or (operation == "forward" and match["port"] == "input")
            layer = re.search(r"\.(\d+)\.", f".{match['module']}.")
            record = Record(
                order=order,
                layer_type=match["type"].lower(),
                operation=operation,
                phase="pre" if goes_in else "post",
                component=match["type"].lower(),
                name=name,
                module=match["module"],
                layer=int(layer[1]) if layer else None,
                iteration=iteration,
                call=int(match["call"] or match["again"]),
            )
            writer.add(record, tensor)


# A folder as msprobe writes it, in place of yours.
step = Path(mkdtemp(), "step0", "proc1234")
Path(step, "dump_tensor_data").mkdir(parents=True)
saved = [
    "Module.layers.0.fc1.Linear.forward.0.input.0.pt",
    "Module.layers.0.fc1.Linear.forward.0.output.0.pt",
    "Module.layers.0.fc1.Linear.forward.0.parameters.weight.pt",
    "Functional.relu.0.forward.input.0.pt",
    "Module.layers.0.fc1.Linear.backward.0.input.0.pt",
    "Module.layers.0.fc1.Linear.parameters_grad.0.weight.pt",
]
for file in saved:
    torch.save(torch.randn(8, 8), step / "dump_tensor_data" / file)
(step / "dump.json").write_text(json.dumps({"data": [{"data_name": file} for file in saved]}))

convert(step, step.with_name("dump"))
records = list(Dump.open(step.with_name("dump")).records(module="layers.0.fc1"))
names = [record.name for record in records]
assert names == ["input", "output", "weight", "grad_output", "grad_weight"]
