"""What cannot be meant, on the command line or in the settings, ends a run before any gate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.plugin.conftest import Run, run_alone
from tests.plugin.projects import files
from tests.shares import share

# Settings of the project, options, and words of the error.
ROWS: list[tuple[str, list[str], str]] = [
    ("", ["--mode", "int9"], "unknown mode 'int9'. Did you mean int8"),
    ("", ["--mode", "9-*"], "mode pattern '9-*' matches no mode that fits tiny-llama"),
    ("", ["--layers", "layers.9"], "--layers 'layers.9' matches no layer of tiny-llama: layers.0,"),
    ("", ["--layers", "("], "--layers '(' is not a regular expression"),
    ("", ["--model", "tiny-lama"], "unknown model 'tiny-lama'. Did you mean tiny-llama"),
    ("", ["--format", "mxfp9"], "--format mxfp9: unknown format 'mxfp9'. Did you mean"),
    ("", ["--format", "binary8p9se"], "K from 3 to 8 bits"),
    ("", ["--reference", "int9"], "unknown mode 'int9'. Did you mean int8"),
    ("", ["--samples", "0"], "samples"),
    ("", ["--device", "tpu"], "unknown device 'tpu'"),
    ("", ["--percentile-alpha", "3"], "percentile alpha 3.0 is not allowed"),
    *(
        ("", [f"--shard={text}"], f"shard '{text}' is not allowed; 2/8 is the second of eight")
        for text in ("0/2", "3/2", "2", "a/b", "1/0", "-1/2", "1/2/3")
    ),
    ("", ["--shard", "3/3"], "shard 3/3 is empty: "),
    ("", ["--shard", "1/2", "--update-baselines"], "--update-baselines is refused with --shard"),
    ("", ["--across-weights", "--update-baselines"], "--across-weights holds errors against a base"),
    ("", ["--across-weights", "--update-dry-run"], "--across-weights holds errors against a base"),
    ("", ["--accept-plan"], "--accept-plan accepts another plan beside --update-baselines"),
    ("", ["--update-which", "new"], "--update-which new says what an update writes, and nothing is"),
    ("", ["--baselines", "http://127.0.0.1:1/b", "--update-baselines"], "may leave half a file"),
    ("", ["--baselines", "nonsense://b"], "nonsense:// is not known"),
    ("", ["--baselines", "gs://b/base"], "gs:// needs gcsfs"),
    ("", ["--plots", "some"], "invalid choice: 'some'"),
    ("", ["--watch-underflow=yes"], "ignored explicit argument 'yes'"),
    ("", ["--watch-underflows"], "unrecognized arguments: --watch-underflows"),
    ("modell = 'x'", [], "unknown key 'modell'. Did you mean model"),
    ("across_weights = true", [], "unknown key 'across_weights'"),
    ("allow_partial = true", [], "unknown key 'allow_partial'"),
    ("samples = 'many'", [], "samples = 'many' is not allowed; it is a whole number"),
    ("samples = true", [], "samples = True is not allowed"),
    ("mode = [1]", [], "mode = [1] is not allowed; it is a text or a list of texts"),
    ("mode = ", [], "qgate.toml: Invalid value"),
    ("baselines = 3", [], "baselines = 3 is not allowed; it is a path"),
    ("plots = 'some'", [], "plots = 'some' is not allowed; it is one of failed, worst, all"),
    ("plots = 3", [], "plots = 3 is not allowed"),
    ("no_report = 'yes'", [], "no_report = 'yes' is not allowed; it is true or false"),
    ("watch_underflow = 'yes'", [], "watch_underflow = 'yes' is not allowed; it is true or"),
    ("limits = 3", [], "limits = 3 is not allowed; it is a table"),
    ("[limits]\nbudgetdb = 3", [], "unknown key of [limits] of qgate.toml 'budgetdb'"),
    ("[limits]\nbudget_db = -1", [], "limit budget_db = -1 is not allowed"),
    ("[limits]\nregression = 1.0", [], "limit regression = 1.0 switches that kind of limit off"),
    ("[limits]\nabsolute = ['mse>3']", [], "limit 'mse>3' would pass bad values"),
    ("[[limits.rules]]\nsites = 'layer\\.'", [], "'layer\\\\.' matches no site"),
]  # fmt: skip


@share(6)
@pytest.mark.parametrize(
    ("settings", "options", "words"), ROWS, ids=[" ".join([*row[1]]) or row[0] for row in ROWS]
)
def test_what_cannot_be_meant_is_a_usage_error(
    project: Path, suites: Run, monkeypatch: pytest.MonkeyPatch,
    settings: str, options: list[str], words: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (project / "qgate.toml").write_text(f"{settings}\n")
    before = files(project)
    result = suites(*options)
    output = str(result.stderr) + str(result.stdout)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, output
    assert output.count(words) == 1
    assert "Traceback" not in output
    assert files(project) == before


@share(4)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("[limits]\nbudget_db = -1", "limit budget_db = -1 is not allowed"),
        ("mode = 'int9'", "unknown mode 'int9'. Did you mean int8"),
    ],
)
def test_workers_tell_it_as_well(
    pytester: pytest.Pytester, project: Path, settings: str, words: str
) -> None:
    (project / "qgate.toml").write_text(f"{settings}\n")
    result = run_alone(pytester, "suites", "--model", "tiny-llama", "-n", "1")
    output = str(result.stderr) + str(result.stdout)
    assert result.ret == pytest.ExitCode.USAGE_ERROR, output
    assert words in output
    assert "Traceback" not in output
