"""A product's repository, its origin, and the machines of a CI service that clone it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qgate.cli import main

PROGRAMS = Path(sys.executable).parent
SETTINGS = """model = ["qgate_model:build"]
mode = ["my_int8"]
samples = 2
seqlen = 32
"""
# Named by the service, and by whoever runs these tests in one.
_FOREIGN = ("PYTEST_", "COV_", "GITHUB_", "GIT_", "CI", "QGATE_", "BUILD_")


@dataclass
class Product:
    """`work` is where its author is; `origin` is what CI clones."""

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def origin(self) -> Path:
        return self.folder / "origin.git"

    @classmethod
    def begin(cls, folder: Path, *options: str) -> Product:
        product = cls(folder)
        product.git(folder, "init", "--quiet", "--bare", "--initial-branch=main", "origin.git")
        product.git(folder, "clone", "--quiet", str(product.origin), "work")
        words = ["init", str(product.work), "--suites", "layer_outputs,outputs", *options]
        assert main(words) == 0
        (product.work / "qgate.toml").write_text(SETTINGS)
        product.publish("Gates")
        return product

    def publish(self, message: str) -> None:
        self.git(self.work, "add", "--all")
        self.git(self.work, "commit", "--quiet", "--message", message)
        self.git(self.work, "push", "--quiet", "origin", "HEAD:main")

    def clone(self, name: str) -> Path:
        self.git(self.folder, "clone", "--quiet", str(self.origin), name)
        return self.folder / name

    @property
    def environment(self) -> dict[str, str]:
        """Of a fresh machine of CI, where only installing is left out and written down."""
        shims = self.folder / "shims"
        if not shims.exists():
            shims.mkdir()
            program(
                shims / "python",
                _PYTHON.format(log=self.folder / "installed", python=sys.executable),
            )
            program(shims / "gh", f'printf "%s\\n" "$@" >> "{self.folder}/gh.log"\n')
        path = os.pathsep.join(map(str, (shims, PROGRAMS, os.environ.get("PATH", os.defpath))))
        return {**clean(), "PATH": path, "CI": "true"}

    @property
    def installed(self) -> list[str]:
        return (self.folder / "installed").read_text(encoding="utf-8").splitlines()

    @staticmethod
    def git(folder: Path, *words: str) -> str:
        return run(["git", *words], folder)


_PYTHON = """if [ "$1 $2 $3" = "-m pip install" ]; then shift 3; echo "$*" >> "{log}"; exit 0; fi
exec "{python}" "$@"
"""


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}")
    path.chmod(0o755)


def clean() -> dict[str, str]:
    """The environment without what a service or another test has put there."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    who = {f"GIT_{role}_{field}": f"{field.lower()}@example.org"
           for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")}  # fmt: skip
    return {**variables, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def run(
    words: list[object], folder: Path, known: Mapping[str, str] | None = None, status: int = 0
) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=clean() if known is None else known,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout
