"""Other people's judgment of files for CI services: published schemas, and ShellCheck."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def schema_complaints(schema: str, *paths: Path) -> str:
    """What the schema, as check-jsonschema brings it, says against a file."""
    transform = ["--data-transform", "gitlab-ci"] if schema == "gitlab-ci" else []
    words = ["check_jsonschema", "--builtin-schema", f"vendor.{schema}", *transform]
    return _said([sys.executable, "-m", *words, *map(str, paths)], "")


def shell_complaints(script: str, shell: str) -> str:
    """What ShellCheck says against a script."""
    program = Path(sys.executable).parent / "shellcheck"
    return _said([str(program), f"--shell={shell}", "-"], script)


def _said(words: list[str], text: str) -> str:
    done = subprocess.run(
        words, input=text, capture_output=True, encoding="utf-8", timeout=60, check=False
    )
    assert bool(done.returncode) == bool(done.stdout.replace("ok -- validation done", "").strip())
    return done.stdout if done.returncode else ""
