"""What each format takes on a device, by benchmarks/gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.devices.cases import Cases, Setting
from tests.devices.lanes import ROOT
from tests.devices.record import Row

PROGRAM = ROOT / "benchmarks" / "gpu.py"


def _benchmark(setting: Setting) -> Row:
    data = setting.folder / "speed.json"
    data.unlink(missing_ok=True)
    text = PROGRAM.read_text(encoding="utf-8")
    options = ["--device", setting.device]
    options += ["--quick"] * ('"--quick"' in text)
    options += ["--json", str(data)] * ('"--json"' in text)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr, file=sys.stderr)
    figures: dict[str, object] = {"printed": done.stdout}
    if data.exists():
        figures["measured"] = json.loads(data.read_text(encoding="utf-8"))
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
        return Row("benchmark", "wrong", f"status {done.returncode}: {lines[-1]}", figures=figures)
    return Row("benchmark", "noted", f"benchmarks/gpu.py {' '.join(options)}", figures=figures)


def cases(_: Setting) -> Cases:
    return {"benchmark": _benchmark}
