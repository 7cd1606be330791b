"""Runs the jobs of a workflow with a composite action here: `run` steps by bash as a runner does,
`uses` steps written down, of which an upload copies its files.

Only what the files of this project use is understood; anything else is an error.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.DOTALL)
_NAME = re.compile(r"\b(inputs|steps|env|runner|github|vars)\.([\w.-]+)")
_STRING = re.compile(r"('(?:[^']|'')*')")
# https://docs.github.com/actions: what `shell: bash` runs, and what a `run` without a shell does.
BASH = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclass
class Job:
    """One job in a clone: what its steps left, and whether it is red."""

    folder: Path
    beside: Path
    environment: Mapping[str, str]
    github: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    failed: bool = False
    log: str = ""
    used: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    @property
    def summary(self) -> str:
        return (self.beside / "summary").read_text(encoding="utf-8")

    @property
    def artifacts(self) -> Path:
        return self.beside / "artifacts"

    def run(self, workflow: Path, name: str) -> Job:
        self.beside.mkdir(parents=True)
        (self.beside / "summary").touch()
        job = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"][name]
        self._steps(job["steps"], dict(self.inputs), "")
        return self

    def _steps(
        self, steps: list[dict[str, Any]], inputs: dict[str, str], prefix: str
    ) -> dict[str, str]:
        """The outputs of the steps, as `steps.ID.outputs.NAME`."""
        context = {f"inputs.{key}": value for key, value in inputs.items()}
        context |= {f"github.{key}": value for key, value in self.github.items()}
        context |= {"runner.os": "Linux"}
        for number, step in enumerate(steps):
            condition = str(step.get("if", "success()"))
            is_due = evaluated(condition, context)
            if not is_due or (self.failed and "always()" not in condition):
                continue
            if "uses" in step:
                arguments = {k: filled(v, context) for k, v in step.get("with", {}).items()}
                outputs = self._uses(step["uses"], arguments)
            else:
                output = self.beside / f"{prefix}{number}.out"
                self._bash(step, context, output)
                lines = output.read_text(encoding="utf-8").splitlines()
                outputs = dict(line.split("=", 1) for line in lines)
            context |= {f"steps.{step.get('id')}.outputs.{k}": v for k, v in outputs.items()}
        return context

    def _uses(self, what: str, given: dict[str, str]) -> dict[str, str]:
        self.used.append((what, given))
        if what.startswith("./"):
            action = yaml.safe_load((self.folder / what / "action.yml").read_text(encoding="utf-8"))
            unknown = given.keys() - action["inputs"].keys()
            assert not unknown, f"{what} has no input {unknown}"
            defaults = {k: filled(v["default"], {}) for k, v in action["inputs"].items()}
            context = self._steps(action["runs"]["steps"], defaults | given, "action-")
            return {k: filled(v["value"], context) for k, v in action["outputs"].items()}
        if what.startswith("actions/upload-artifact@"):
            source, target = self.folder / given["path"], self.artifacts / given["name"]
            assert "/" not in given["name"], "an artifact's name has no slash"
            if source.exists():
                shutil.copytree(source, target)
        return {}

    def _bash(self, step: Mapping[str, Any], known: dict[str, str], output: Path) -> None:
        assert set(step) <= {"name", "id", "if", "shell", "working-directory", "env", "run"}
        assert step.get("shell", "bash") == "bash"
        output.touch()
        script = self.beside / "script.sh"
        script.write_text(step["run"], encoding="utf-8")
        own = {key: filled(value, known) for key, value in step.get("env", {}).items()}
        done = subprocess.run(
            [*BASH, str(script)],
            cwd=self.folder / filled(step.get("working-directory", "."), known),
            env={
                **self.environment,
                "GITHUB_ACTIONS": "true",
                "GITHUB_OUTPUT": str(output),
                "GITHUB_STEP_SUMMARY": str(self.beside / "summary"),
                **own,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        self.log += done.stdout
        self.failed = self.failed or done.returncode != 0


def filled(text: object, known: Mapping[str, str]) -> str:
    """A value of the file with its expressions replaced by what they come to."""
    plain = str(text).lower() if isinstance(text, bool) else str(text)
    return _EXPRESSION.sub(lambda found: str(evaluated(found[1], known)), plain)


def evaluated(expression: str, known: Mapping[str, str]) -> Any:
    """What an expression comes to; contexts that are not there are empty, as on a runner."""
    parts = _STRING.split(expression)
    for index in range(0, len(parts), 2):
        text = _NAME.sub(lambda found: f"known.get({found[0]!r}, '')", parts[index])
        text = text.replace("&&", " and ").replace("||", " or ")
        parts[index] = text
    functions = {
        "always": lambda: True,
        "success": lambda: True,
        "hashFiles": lambda *_: "0" * 64,
        "__builtins__": {},
    }
    return eval("".join(parts).strip(), functions, {"known": known})
