"""The recipe of docs/failures.md that finds the commit at which a gate turned red."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

# Imported here, since a run in a fork would import them each time.
import qgate.gate.measuring.model_gates
import qgate.plugin.records
import qgate.plugin.sessions
import qgate.plugin.summary  # noqa: F401
from qgate.cli import main
from tests.adoption.repository import PROGRAMS, SETTINGS, clean, run
from tests.campaigns.forked import ran
from tests.shares import proof

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
# It stands for no format of qgate: any error may be accepted.
REPLACED = {'Kernel(my_int8, stands_for="int8")': "my_int8", "/ 127": "/ LEVELS"}
LEVELS = "LEVELS = 127\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A project whose second commit makes its kernel worse, and accepts that.

    The third one cannot be imported.
    """
    folder = tmp_path / "clone"
    folder.mkdir()
    run(["git", "init", "--quiet", "--initial-branch=main"], folder)
    assert main(["init", str(folder), "--suites", "layer_outputs"]) == 0
    (folder / "qgate.toml").write_text(SETTINGS)
    source = folder / "suites" / "qgate_model.py"
    text = source.read_text()
    for old, new in {
        **REPLACED,
        "import copy\n": "import copy\nfrom levels import LEVELS\n",
    }.items():
        assert old in text
        text = text.replace(old, new)
    source.write_text(text)

    def accept() -> int:
        os.environ.clear()
        os.environ.update(clean())
        words = ["suites", "-q", "-p", "no:cacheprovider", "--update-baselines", "--no-report"]
        return int(pytest.main([*words, "--layers", "first"]))

    for subject, kernel in {
        "Accept": LEVELS,
        "Use 96 levels, and accept": "LEVELS = 96\n",
        "Import what is not there": "import nowhere\n",
        "Document that": "LEVELS = 96  # as many\n",
    }.items():
        (folder / "suites" / "levels.py").write_text(kernel)
        if "ccept" in subject:
            ended = ran(accept, folder)
            assert ended.status == 0, ended.said
        run(["git", "add", "--all", "suites", "baselines", "qgate.toml"], folder)
        run(["git", "commit", "--quiet", "--message", subject], folder)
    run(["git", "tag", "v1.2", "main~3"], folder)
    return folder


@proof
def test_the_commit_and_the_site_are_found(clone: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## The commit that broke a gate")[2]
    (recipe,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    path = os.pathsep.join([str(PROGRAMS), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-e", "-c", recipe], cwd=clone, env={**clean(), "PATH": path, "CI": "true"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    red = run(["git", "rev-parse", "main~2"], clone).strip()
    assert f"{red} is the first bad commit" in done.stdout
    assert "No module named 'nowhere'" in done.stdout, "the commit that was skipped"
    assert re.search(r"^cause: layers\.0\.up:output ", done.stdout, re.MULTILINE), done.stdout
    assert run(["git", "branch", "--show-current"], clone) == "main\n"
