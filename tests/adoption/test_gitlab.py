"""The GitLab template: valid, and its jobs run line by line in fresh clones."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.adoption.checks import schema_complaints, shell_complaints
from tests.adoption.repository import Product, program
from tests.shares import proof

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "qgate" / "starter" / "ci" / "gitlab.yml"
SERVER = {
    "CI_COMMIT_BRANCH": "main",
    "CI_DEFAULT_BRANCH": "main",
    "CI_PIPELINE_ID": "7",
    "CI_SERVER_HOST": "gitlab.example.org",
    "CI_SERVER_PORT": "443",
    "CI_SERVER_PROTOCOL": "https",
    "CI_PROJECT_PATH": "them/product",
}


def job(path: Path, name: str) -> dict[str, Any]:
    """A job with what it extends."""
    pipeline = yaml.safe_load(path.read_text(encoding="utf-8"))
    entry = pipeline[name]
    return {**pipeline[entry["extends"]], **entry}


def perform(folder: Path, name: str, environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and log: the lines of a job one after the other, then those that always run."""
    entry = job(folder / ".gitlab" / "qgate.yml", name)
    variables = {**environment, **SERVER, "CI_PROJECT_DIR": str(folder)}
    for key, value in entry["variables"].items():
        variables.setdefault(key, re.sub(r"\$(\w+)", lambda found: variables[found[1]], str(value)))
    status, log = 0, ""
    for lines in ([*entry["before_script"], *entry["script"]], entry["after_script"]):
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", "\n".join(lines)],
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=120,
            check=False,
        )
        status, log = status or done.returncode, log + done.stdout
    return status, log


def test_the_template_is_what_the_schema_says(tmp_path: Path) -> None:
    """Its jobs as GitLab puts them together: what begins with a dot is no job to the schema."""
    whole = tmp_path / "whole.yml"
    text = yaml.safe_dump(
        {name: job(TEMPLATE, name) for name in ("qgate", "qgate:refresh-baselines")}
    )
    whole.write_text(text)
    assert schema_complaints("gitlab-ci", TEMPLATE, whole) == ""
    whole.write_text(text.replace("when: always", "when: ever"))
    assert "ever" in schema_complaints("gitlab-ci", whole)


@pytest.mark.parametrize("name", ["qgate", "qgate:refresh-baselines"])
def test_scripts_are_what_any_shell_takes(name: str) -> None:
    """The image of the job may have no bash."""
    entry = job(TEMPLATE, name)
    lines = [*entry["before_script"], *entry["script"], *entry["after_script"]]
    script = "\n".join(lines).replace('cd "$QGATE_DIR"', 'cd "$QGATE_DIR" || exit')
    assert shell_complaints(script, "sh") == ""
    assert shell_complaints("echo $x", "sh") != ""


@proof
def test_refreshed_then_red(tmp_path: Path) -> None:
    """A patch of a clone without baselines, and then a kernel that got worse."""
    product = Product.begin(tmp_path, "--ci", "gitlab")
    assert schema_complaints("gitlab-ci", product.work / ".gitlab-ci.yml") == ""
    environment = product.environment

    refresh = product.clone("refresh")
    status, log = perform(refresh, "qgate:refresh-baselines", environment)
    assert (status, log.splitlines()[-1]) == (0, "git apply qgate-out/baselines.patch")
    patch = refresh / "qgate-out" / "baselines.patch"
    product.git(product.work, "apply", str(patch))
    recorded = product.work / "baselines" / "example" / "accepted" / "my_int8.txt"
    assert recorded.read_bytes() == (refresh / recorded.relative_to(product.work)).read_bytes()

    example = product.work / "suites" / "qgate_model.py"
    example.write_text(
        example.read_text().replace("clamp(min=1e-12) / 127", "clamp(min=1e-12) / 63")
    )
    product.publish("Baselines, and a worse kernel")
    red = product.clone("red")
    status, log = perform(red, "qgate", environment)
    assert status == 1
    assert "accepted (+" in log
    artifacts = job(red / ".gitlab" / "qgate.yml", "qgate")["artifacts"]
    assert (artifacts["when"], artifacts["paths"]) == ("always", ["qgate-out/"])
    assert "relative_mse" in (red / artifacts["reports"]["junit"]).read_text()
    file_names = {path.name for path in (red / "qgate-out").iterdir()}
    assert {"report.html", "results.jsonl", "candidates"} <= file_names
    assert product.installed == ["pytest-qgate[all]"] * 2


def test_with_a_token_a_merge_request_is_opened(tmp_path: Path) -> None:
    """The end of the job alone; a program in git's place writes down the push."""
    product = Product.begin(tmp_path, "--ci", "gitlab")
    environment = product.environment | {"QGATE_PUSH_TOKEN": "secret"}
    shims = tmp_path / "shims"
    write = (
        "mkdir -p baselines qgate-out && echo 1 > baselines/new.txt && touch qgate-out/junit.xml"
    )
    for name, script in {
        "qgate": write,
        "git": f'case "$1" in push) printf "%s\\n" "$@" > "{tmp_path}/pushed";; '
        '*) PATH="${PATH#*:}" exec git "$@";; esac',
    }.items():
        program(shims / name, f"{script}\n")
    clone = product.clone("clone")
    status, log = perform(clone, "qgate:refresh-baselines", environment)
    assert status == 0, log
    assert (tmp_path / "pushed").read_text().splitlines() == [
        "push", "--quiet", "--push-option", "merge_request.create",
        "--push-option", "merge_request.target=main",
        "https://qgate:secret@gitlab.example.org:443/them/product.git", "qgate/baselines-7",
    ]  # fmt: skip
    assert "baselines/new.txt" in product.git(clone, "show", "--stat", "HEAD")
    assert "secret" not in log
