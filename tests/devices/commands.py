"""Commands in small, on a device and on the CPU.

Equal have to be: counts, sweeps, and all that `collect` writes of a model whose numbers are small
integers, which each device computes exactly. Float32 outputs of a layer may be 1e-9 of their energy
apart (5 digits), magnitudes 1e-3. A quantized model flips codes where its inputs differ in a last
bit: its own error may be 10 % larger or smaller than on the CPU.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import qgate
from qgate.cli import main
from qgate.dumps import Dump
from qgate.kernels import cases as numbers
from tests.devices.cases import Cases, Setting

_FP32, _MAGNITUDE, _NOISE = 1e-9, 1e-3, 0.1
_COUNTS = ("tensors", "elements", "counted", "nan", "posinf", "neginf")
_PROGRAM = """\
import sys
import torch
if sys.argv[1].startswith("sim"):
    import tests.devices.plugin
x = torch.arange(128.0).remainder(7).view(8, 16)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
with torch.no_grad():
    for parameter in model.parameters():
        integers = torch.arange(parameter.numel()).remainder(5) - 2.0
        parameter.copy_(integers.view(parameter.shape))
model.to(sys.argv[1])(x.to(sys.argv[1])).sum().backward()
"""


def _ran(*words: object) -> str:
    status = main([str(word) for word in words])
    sys.stdout.flush()
    return f"qgate {words[0]} ended with status {status}" if status else ""


def _folders(setting: Setting, name: str) -> tuple[Path, Path]:
    home = setting.folder / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home / "there", home / "here"


def _relative(error: Any, reference: Any) -> float:
    return float(np.square(error).sum() / np.square(reference).sum())


def capture(setting: Setting) -> str:
    device_folder, cpu_folder = _folders(setting, "capture")
    for device, folder in ((setting.device, device_folder), ("cpu", cpu_folder)):
        options = ("--model", "tiny-llama", "--samples", 2, "--seqlen", 64, "--device", device)
        if wrong := _ran("layers", "capture", "--mode", "int8", *options, "--output-dir", folder):
            return wrong
    return _captures_apart(device_folder, cpu_folder)


def _captures_apart(there: Path, here: Path) -> str:
    files = sorted(path.name for path in here.glob("*.npy"))
    if files != sorted(path.name for path in there.glob("*.npy")) or not files:
        return f"it wrote other files than on the CPU: {files}"
    for name in files:
        a, b = (np.load(folder / name).astype(np.float64) for folder in (there, here))
        if name.startswith("mode_fp32"):
            energy_share = _relative(a - b, b)
            if not energy_share <= _FP32:
                return f"{name}: {energy_share:.2g} of the energy differs, at most {_FP32:g}"
            continue
        reference = np.load(here / f"mode_fp32_{name.split('_', 2)[2]}").astype(np.float64)
        device_error, cpu_error = (_relative(tensor - reference, reference) for tensor in (a, b))
        if not abs(device_error - cpu_error) <= _NOISE * cpu_error:
            return f"{name}: its relative squared error is {device_error:.4g} instead of {cpu_error:.4g}"
    return ""


def activations(setting: Setting) -> str:
    device_folder, cpu_folder = _folders(setting, "activations")
    for device, folder in ((setting.device, device_folder), ("cpu", cpu_folder)):
        wrong = _ran(
            "activations", "--model", "tiny-llama", "--memory.device", device,
            "--data.num_samples", 4, "--data.seq_len", 64, "--formats", "int8,mxfp4_e2m1",
            "--smoothing.formats", "int8", "--output.formats", "json", "--save_dir", folder,
        )  # fmt: skip
        if wrong:
            return wrong
    device_layers, cpu_layers = (
        json.loads((folder / "activations.json").read_text())["layers"]
        for folder in (device_folder, cpu_folder)
    )
    return _activations_apart(device_layers, cpu_layers)


def _activations_apart(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> str:
    if [layer["module"] for layer in found] != [layer["module"] for layer in wanted] or not found:
        return "it measured other layers than on the CPU"
    for one, other in zip(found, wanted, strict=True):
        where, a, b = one["module"], one["portrait"], other["portrait"]
        for name in _COUNTS:
            if a[name] != b[name]:
                return f"{where}: {name} {a[name]} instead of {b[name]}"
        for name in ("amax", "rms", "std"):
            if not math.isclose(a[name], b[name], rel_tol=_MAGNITUDE):
                return f"{where}: {name} {a[name]} instead of {b[name]}"
        for fmt, loss in b["formats"].items():
            if not math.isclose(a["formats"][fmt]["noise"], loss["noise"], rel_tol=_NOISE):
                return f"{where}: noise of {fmt} {a['formats'][fmt]['noise']} instead of {loss['noise']}"
    return ""


def collect(setting: Setting) -> str:
    home = _folders(setting, "collect")[0].parent
    (home / "program.py").write_text(_PROGRAM)
    for level in ("tensors", "statistics"):
        folders = [home / level / device for device in ("there", "here")]
        for folder, device in zip(folders, (setting.device, "cpu"), strict=True):
            options = ("--dir", folder, "--level", level)
            if wrong := _ran("collect", *options, "--", home / "program.py", device):
                return wrong
        if wrong := _dumps_apart(*folders, level):
            return f"{level}: {wrong}"
    return ""


def _dumps_apart(there: Path, here: Path, level: str) -> str:
    dumps = [Dump.open(folder) for folder in (there, here)]
    device_records, cpu_records = (
        {record.title: record for record in dump.records()} for dump in dumps
    )
    if device_records.keys() != cpu_records.keys() or not device_records:
        return f"it collected {len(device_records)} tensors instead of {len(cpu_records)}"
    for title, record in cpu_records.items():
        if level == "tensors":
            a, b = (
                d.tensor(r[title])
                for d, r in zip(dumps, (device_records, cpu_records), strict=True)
            )
            if not torch.equal(a, b):
                return f"{title}: other values than on the CPU"
        for where, one, other in _pairs(
            dict(device_records[title].stats), dict(record.stats), title
        ):
            if isinstance(one, float) and isinstance(other, float):
                # The root of a difference of two sums: half of their digits are noise.
                noise = 4e-8 * abs(record.stats["mean"]) if where.endswith(", std") else 1e-300
                if not math.isclose(one, other, rel_tol=1e-12, abs_tol=noise):
                    return f"{where}: {one} instead of {other}"
            elif one != other:
                return f"{where}: {one} instead of {other}"
    return ""


def _pairs(one: Any, other: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from _pairs(one.get(key), other.get(key), f"{where}, {key}")
    else:
        yield where, one, other


def sweep_of_saved_tensor(setting: Setting) -> str:
    """The command reads what a program saved on the device."""
    device_folder, cpu_folder = _folders(
        setting, "sweep"
    )  # their names are not the same, those inside are
    x = numbers.bell_curve(torch.bfloat16, count=20_000).view(-1, 50)
    device_tensor = (
        x if setting.device.startswith("sim") else x.to(setting.device)
    )  # which no file holds
    for folder, tensor in ((device_folder, device_tensor), (cpu_folder, x)):
        folder.mkdir()
        torch.save(tensor, folder / "x.pt")
        with contextlib.chdir(folder):
            if wrong := _ran("sweep", "x.pt", "--no-plots", "--quiet", "--output-dir", "out"):
                return wrong
    files = sorted(path.name for path in (cpu_folder / "out/x").glob("*.csv"))
    if not files:
        return "it wrote no table"
    for name in files:
        if (device_folder / "out/x" / name).read_bytes() != (
            cpu_folder / "out/x" / name
        ).read_bytes():
            return f"{name} is another than that of the CPU's tensor"
    return ""


def sweeps(setting: Setting) -> str:
    x = numbers.bell_curve(torch.bfloat16, count=20_000).view(-1, 50)
    for fmt, options in (("fp8_e4m3", {}), ("hif8", {}), ("mxfp4", {"granularity": "block"})):
        device_frame, cpu_frame = (
            qgate.sweep(t, fmt, **options).to_frame() for t in (x.to(setting.device), x)
        )
        if list(device_frame) != list(cpu_frame) or len(device_frame) != len(cpu_frame):
            return f"{fmt}: other levels than on the CPU"
        for name in cpu_frame:
            a, b = device_frame[name], cpu_frame[name]
            same = (
                np.allclose(a, b, 1e-9, 0, equal_nan=True) if b.dtype == float else (a == b).all()
            )
            if not same:
                return f"{fmt}: {name} is another than on the CPU"
    return ""


def cases(_: Setting) -> Cases:
    return {
        "capture": capture,
        "activations": activations,
        "collect": collect,
        "qgate.sweep": sweeps,
        "sweep of a saved tensor": sweep_of_saved_tensor,
    }
