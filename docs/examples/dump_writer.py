"""Write a dump and read it."""

from pathlib import Path
from tempfile import mkdtemp

import torch

from qgate.dumps import Dump, DumpWriter, Record

folder = Path(mkdtemp()) / "dump"
with DumpWriter(folder, header={"model": "tiny"}) as writer:
    record = Record(
        order=0,
        layer_type="linear",
        operation="forward",
        phase="pre",
        component="linear",
        name="input",
        module="layers.0.fc1",
        layer=0,
        iteration=0,
    )
    stored = writer.add(record, torch.ones(4, 4, dtype=torch.bfloat16))

dump = Dump.open(folder)
for record in dump.records(layer_type="linear", name="in*"):
    print(record.title, dump.tensor(record).dtype)
print(dump.notes())
