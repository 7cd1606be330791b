"""`qgate completion`: bash itself completes with the script that is printed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qgate.cli import main

CASES = {
    ("ba",): ["baselines"],
    ("baselines", "pr"): ["prune"],
    ("dumps", "compare", "A", "--rel"): ["--relative-mse"],
    ("sweep", "--granularity", ""): ["tensor", "block"],
    ("--color", ""): ["auto", "always", "never"],
    ("help", "dum"): ["dumps"],
    ("run", "--update-b"): ["--update-baselines"],
    ("report", "formats", "--hist"): ["--history"],
    ("run", "--mode", "mxfp6"): ["mxfp6_e3m2", "mxfp6_e2m3"],
    ("run", "--mode", "=", "quant"): ["quant_only"],
    ("baselines", "prune", "--mode", "int8,essen"): ["int8,essential"],
    ("capture", "--model", "tiny-l"): ["tiny-llama"],
    ("show", "mode", "nvf"): ["nvfp4"],
    ("sweep", "--elem-format", "hif"): ["hif8", "hif4"],
    ("report", "--format", ""): ["comment"],
    ("run", "--plots", "w"): ["worst"],
    ("help", "results", ""): ["merge"],
    ("checkpoint", "child", "--parent", "p"): [],  # bash completes files
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_verbs_options_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    lines = [capsys.readouterr().out]
    for words in CASES:
        quoted = " ".join(f"'{word}'" for word in words)
        lines.append(
            f"COMP_WORDS=(qgate {quoted}); COMP_CWORD={len(words)}; _qgate; echo ${{COMPREPLY[@]}}"
        )
    script = tmp_path / "complete.sh"
    script.write_text("\n".join(lines))
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    completed = dict(zip(CASES, map(str.split, done.stdout.splitlines()), strict=True))
    assert completed == CASES


def test_zsh_uses_the_same_script(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    assert capsys.readouterr().out == f"autoload -U +X bashcompinit && bashcompinit\n{bash}"
