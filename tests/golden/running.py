"""Run groups in processes of the lowest common arithmetic, and compare or keep what they give."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.golden.cases import GROUPS, ROOT, STORED
from tests.golden.comparing import Difference, differences

# What every x86-64 machine computes alike: no wide vectors, no fused products, one thread.
PLAIN_ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "Prescott",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F",
    "NPY_DISABLE_CPU_FEATURES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
FIXED = {
    "COLUMNS": "100",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TQDM_DISABLE": "1",
    "TZ": "UTC",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
KEPT = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "TEMP", "TMPDIR", "VIRTUAL_ENV")


class GroupError(Exception):
    """A group whose process failed, with what it printed last."""


def environment(*, plain: bool) -> dict[str, str]:
    """Variables of a group's process: none of the caller's that could change what is printed."""
    inherited = {name: os.environ[name] for name in KEPT if name in os.environ}
    arithmetic = PLAIN_ARITHMETIC if plain else {"OMP_NUM_THREADS": "1"}
    return {
        **inherited,
        **FIXED,
        **{k: v for k, v in arithmetic.items() if v},
        "PYTHONPATH": str(ROOT),
    }


def run_groups(names: Iterable[str], output: Path, *, plain: bool = True) -> None:
    """Run groups in a new process, each in a fork of it; `output` gets a folder per case."""
    with tempfile.TemporaryDirectory(prefix="qgate-golden-") as folder:
        settings = environment(plain=plain)
        command = [sys.executable, "-m", "tests.golden.work", str(output.resolve()), *names]
        done = subprocess.run(
            command, cwd=folder, env=settings, capture_output=True, text=True, check=False
        )
    if done.returncode:
        last = "\n".join(f"{done.stdout}{done.stderr}".splitlines()[-15:])
        raise GroupError(f"golden cases failed:\n{last}")


def cases_of(groups: Iterable[str]) -> list[str]:
    return [step.case for name in groups for step in GROUPS[name].steps]


def selected(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups and their cases that the names choose, each a group or the beginning of a case."""
    chosen = {}
    for group, its in GROUPS.items():
        cases = [step.case for step in its.steps]
        matching = [case for case in cases if group in names or case.startswith(tuple(names))]
        chosen[group] = matching if names else cases
    nonempty = {group: cases for group, cases in chosen.items() if cases}
    if not nonempty:
        raise SystemExit(f"no golden case begins with {', '.join(names)}: {', '.join(GROUPS)}")
    return nonempty


def texts(folder: Path) -> dict[str, str]:
    """The golden files of a case by their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in paths}


def case_differences(case: str, made: Path) -> dict[str, list[Difference]]:
    """What differs in each file of a case from what is stored; files on one side differ whole."""
    return text_differences(texts(STORED / case), texts(made / case))


def text_differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, list[Difference]]:
    by_file = {}
    for name in sorted({*old, *new}):
        if name not in new:
            by_file[name] = [Difference(1, "the file is no longer written", None)]
        elif name not in old:
            by_file[name] = [Difference(1, None, "the file is new")]
        elif lines := differences(old[name], new[name]):
            by_file[name] = lines
    return by_file


def shown(case: str, found: Mapping[str, list[Difference]], most: int = 20) -> str:
    """Differences as text: the file, the line, old and new."""
    lines = []
    for name, file_differences in found.items():
        lines.append(
            f"{case}/{name}: {len(file_differences)} {'line differs' if len(file_differences) == 1 else 'lines differ'}"
        )
        lines += [str(difference) for difference in file_differences[:most]]
        lines += (
            [f"  and {len(file_differences) - most} more lines"]
            if len(file_differences) > most
            else []
        )
    return "\n".join(lines)


def write_case(case: str, made: Path) -> None:
    """Replace what is stored of a case."""
    shutil.rmtree(STORED / case, ignore_errors=True)
    shutil.copytree(made / case, STORED / case)


def remove_unknown() -> list[str]:
    """Remove stored cases that are no more."""
    case_names = set(cases_of(GROUPS))
    unknown = sorted(path.name for path in STORED.iterdir() if path.name not in case_names)
    for name in unknown:
        shutil.rmtree(STORED / name)
    return unknown
