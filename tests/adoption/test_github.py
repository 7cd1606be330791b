"""The composite action and its workflow: valid, safe, and run step by step in fresh clones."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.adoption.checks import schema_complaints, shell_complaints
from tests.adoption.github import BASH, Job, evaluated
from tests.adoption.repository import PROGRAMS, Product, program
from tests.campaigns.forked import ran
from tests.results.making import record, write
from tests.shares import proof

ROOT = Path(__file__).resolve().parents[2]
ACTION = ROOT / "action.yml"
STARTER = ROOT / "qgate" / "starter" / "ci"
WORKFLOW = STARTER / "github.yml"
COMMENT = STARTER / "github-comment.yml"
CONTEXT = {
    "token": "secret", "ref_name": "main", "run_id": "7", "run_attempt": "1",
    "server_url": "https://github.com", "repository": "them/product",
}  # fmt: skip


def runs(path: Path) -> list[str]:
    """The scripts of an action or a workflow."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    lists = [workflow["runs"]["steps"]] if "runs" in workflow else [
        job["steps"] for job in workflow["jobs"].values()
    ]  # fmt: skip
    return [step["run"] for steps in lists for step in steps if "run" in step]


def test_the_action_that_is_written_is_that_of_the_repository() -> None:
    copy = STARTER / "action.yml"
    assert copy.read_bytes() == ACTION.read_bytes(), "cp action.yml qgate/starter/ci/action.yml"


@proof
def test_files_are_what_their_schemas_say(tmp_path: Path) -> None:
    assert schema_complaints("github-actions", ACTION) == ""
    workflows = (ROOT / folder for folder in ("docs/ci", ".github/workflows"))
    examples = sorted(path for folder in workflows for path in folder.glob("*.yml"))
    assert schema_complaints("github-workflows", WORKFLOW, COMMENT, *examples) == ""
    broken = tmp_path / "action.yml"
    broken.write_text(ACTION.read_text().replace("using: composite", "using: bash"))
    assert "bash" in schema_complaints("github-actions", broken)


@pytest.mark.parametrize("path", [ACTION, WORKFLOW, COMMENT], ids=["action", "workflow", "comment"])
def test_scripts_take_nothing_but_the_environment(path: Path) -> None:
    """An expression in a script is text that somebody else may have written."""
    for script in runs(path):
        assert "${{" not in script
        assert "eval" not in script.split()
        assert shell_complaints(script, "bash") == ""


def test_every_input_is_used_and_told() -> None:
    action = yaml.safe_load(ACTION.read_text())
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    body = json.dumps(action["runs"])
    for name in action["inputs"]:
        assert re.search(rf"inputs\.{name}\b", body), name
        assert f"`{name}`" in page, name
    assert set(re.findall(r"inputs\.([\w-]+)", body)) <= set(action["inputs"])


@proof
def test_red_then_refreshed_then_green(tmp_path: Path) -> None:
    """As a repository sees it that has just got its gates; each job has a clone of its own."""
    product = Product.begin(tmp_path, "--ci", "github")

    def job(name: str, **inputs: str) -> Job:
        number = len(list(tmp_path.glob("clone*")))
        workflow_job = Job(
            product.clone(f"clone{number}"), tmp_path / f"beside{number}", product.environment,
            CONTEXT, inputs,
        )  # fmt: skip
        return workflow_job.run(workflow_job.folder / ".github" / "workflows" / "qgate.yml", name)

    red = job("gates")
    assert red.failed
    assert re.search(r"^::error file=suites/.* missing at layers\.0", red.log, re.MULTILINE)
    assert red.summary.startswith("## qgate: 4 of 4 gates have nothing to be compared with yet")
    artifact_names = {path.name for path in (red.artifacts / "qgate-out").iterdir()}
    assert {"results.jsonl", "results.csv", "report.html", "candidates"} <= artifact_names
    assert list((red.artifacts / "qgate-out" / "candidates").iterdir())
    assert product.installed == ["pytest-qgate[all]"]
    (upload,) = [action for action, _ in red.used if "upload" in action]
    assert upload.startswith("actions/upload-artifact@")

    refresh = job("refresh-baselines", which="failed")
    assert not refresh.failed, refresh.log
    branch = "qgate/baselines-7-1"
    changed = product.git(product.origin, "diff", "--stat", f"main..{branch}")
    assert "baselines/example/accepted/my_int8.txt" in changed
    gh_words = (tmp_path / "gh.log").read_text().splitlines()
    assert gh_words[:6] == ["pr", "create", "--base", "main", "--head", branch]

    product.git(product.work, "pull", "--quiet", "origin", branch)
    product.git(product.work, "push", "--quiet", "origin", "HEAD:main")
    green = job("gates")
    assert not green.failed, green.log
    assert green.summary.startswith("## qgate: 4 gates passed")
    header = json.loads((green.artifacts / "qgate-out" / "results.jsonl").open().readline())
    (accepted,) = header["accepted_at"]
    assert (accepted["model"], accepted["mode"]) == ("example", "my_int8")
    assert accepted["commit"] == product.git(product.origin, "rev-parse", branch).strip()


# Scripts alone, with a pytest that writes down what it is asked for -----------------------------


PYTEST = """import json, os, sys
from pathlib import Path
Path("asked.json").write_text(json.dumps(
    {"argv": sys.argv[1:], "allow": os.environ.get("QGATE_ALLOW_CI_UPDATE")}))
"""


def called(folder: Path, rest: str = "", **inputs: str) -> Job:
    """The action alone, with these inputs."""
    folder.mkdir(exist_ok=True)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "pytest.py").write_text(PYTEST + rest)
    product = Product(folder)
    environment = product.environment
    for name, script in {
        "qgate": 'if [ "$1" = run ]; then case "$*" in\n'
        '*--gate-from*) printf "%s\\n" "$@" > asked; exit 0 ;;\n'
        f'*) shift; exec python "{programs}/pytest.py" "$@" ;; esac; fi\n'
        'echo "$@" > "$2/report.html"; echo killed > "$2/summary.md"\n',
    }.items():
        program(folder / "shims" / name, script)
    work = folder / "work"
    work.mkdir()
    (work / "action.yml").write_bytes(ACTION.read_bytes())
    input_lines = "".join(
        f"\n          {key}: {json.dumps(value)}" for key, value in inputs.items()
    )
    flow = work / "flow.yml"
    flow.write_text(
        f"jobs:\n  a:\n    steps:\n      - uses: ./\n        with:\n          python-version: ''{input_lines}\n"
    )
    return Job(work, folder / "beside", environment).run(flow, "a")


def publish_baselines(product: Product) -> None:
    words = ["suites", "--update-baselines", "-q", "--no-report", "-p", "no:cacheprovider"]
    ended = ran(lambda: int(pytest.main(words)), product.work)
    assert ended.status == 0, ended.said
    product.publish("Baselines")


def asked(job: Job) -> dict[str, object]:
    return json.loads((job.folder / "asked.json").read_text())


def test_inputs_become_options_and_nothing_else(tmp_path: Path) -> None:
    """Quotes, substitutions and commands are text to the script that passes them on."""
    evil = """x"; touch pwned; echo "$(touch pwned)`touch pwned`' && {a,b} * ~"""
    job = called(
        tmp_path,
        mode=evil,
        layers=r"layers\.[0-2]$",
        suites="suites 'my gates'",
        options="-n 2 -k 'a or b' --samples=4",
        shard="2/8",
        install="pytest-qgate[hf] 'other <2'",
    )
    assert not job.failed
    assert asked(job) == {
        "argv": [
            "suites", "my gates", "-n", "2", "-k", "a or b", "--samples=4",
            f"--qgate-mode={evil}", r"--qgate-layers=layers\.[0-2]$", "--qgate-shard=2/8",
        ],
        "allow": None,
    }  # fmt: skip
    assert not list(tmp_path.rglob("pwned"))
    assert Product(tmp_path).installed == ["pytest-qgate[hf] other <2"]


@pytest.mark.parametrize("status", [0, 1, 5])
def test_the_exit_status_is_kept(tmp_path: Path, status: int) -> None:
    job = called(tmp_path, f"os.mkdir('qgate-out'); sys.exit({status})", shard="1/2")
    assert job.failed == bool(status)
    output = (job.beside / "action-3.out").read_text()
    assert output == f"artifact=qgate-out-1-of-2\nexit-code={status}\n"
    assert [path.name for path in job.artifacts.iterdir()] == ["qgate-out-1-of-2"]


def test_a_run_that_was_killed_has_a_report(tmp_path: Path) -> None:
    write = (
        "os.mkdir('qgate-out'); Path('qgate-out/results.jsonl').touch(); os.kill(os.getpid(), 9)"
    )
    job = called(tmp_path, write)
    assert job.failed
    assert "exit-code=137" in (job.beside / "action-3.out").read_text()
    assert (job.artifacts / "qgate-out" / "report.html").exists()
    assert job.summary == "killed\n"


def test_updates_are_asked_for(tmp_path: Path) -> None:
    job = called(tmp_path / "on", update="true", **{"update-which": "new"}, install="", artifact="")
    assert asked(job) == {
        "argv": ["suites", "--qgate-update-baselines", "--qgate-update-which=new"],
        "allow": "1",
    }
    assert not job.artifacts.exists()
    odd = called(tmp_path / "odd", update="yes")
    assert odd.failed
    assert "update is true or false" in odd.log
    assert not (odd.folder / "asked.json").exists()


@pytest.mark.parametrize(
    ("given", "options"), [("true", ["--qgate-allow-partial"]), ("false", []), ("", [])]
)
def test_a_job_that_runs_a_part_says_so(tmp_path: Path, given: str, options: list[str]) -> None:
    inputs = {"allow-partial": given} if given else {}
    job = called(tmp_path / "work", layers="first", **inputs)
    assert asked(job)["argv"] == ["suites", "--qgate-layers=first", *options]
    odd = called(tmp_path / "odd", **{"allow-partial": "yes"})
    assert odd.failed
    assert "::error title=qgate::allow-partial is true or false" in odd.log
    assert not (odd.folder / "asked.json").exists()


@proof
def test_a_part_is_red_and_green_where_the_job_allows_it(tmp_path: Path) -> None:
    product = Product.begin(tmp_path, "--ci", "github")
    publish_baselines(product)
    flow = "jobs:\n  part:\n    steps:\n      - uses: ./.github/actions/qgate\n        with:\n"
    for name, allowed in (("red", "false"), ("green", "true")):
        clone = product.clone(name)
        (clone / "flow.yml").write_text(
            f"{flow}          layers: first\n          allow-partial: {allowed!r}\n"
        )
        job = Job(clone, tmp_path / f"beside-{name}", product.environment, CONTEXT)
        job.run(clone / "flow.yml", "part")
        assert job.failed is (name == "red"), job.log
        partial = "::error title=qgate::partial run, only 2 of 4 gates were held"
        assert (partial in job.log) is (name == "red")
        assert ("gates held: 2 of 4" in job.log) is (name == "green")


def test_gates_of_another_commit_are_asked_of_qgate(tmp_path: Path) -> None:
    job = called(tmp_path, mode="int8", options="-n 2", **{"gate-from": "origin/$(touch pwned)"})
    assert "'$(touch pwned)'" not in job.log
    words = (job.folder / "asked").read_text().splitlines()
    option_words = ["--qgate-mode=int8", "--gate-from=origin/$(touch pwned)"]
    assert words == ["run", "suites", "-n", "2", *option_words]
    assert not list(tmp_path.rglob("pwned"))


# A conftest and suites that hold nothing, beside code that lost a layer.
SILENT = "def pytest_collection_modifyitems(items):\n    items[:] = []\n"


@proof
def test_a_pull_request_cannot_silence_the_gates_of_its_base(tmp_path: Path) -> None:
    product = Product.begin(tmp_path, "--ci", "github")
    model = product.work / "suites" / "qgate_model.py"
    text = model.read_text().replace("depth: int = 3", "depth: int = DEPTH")
    model.write_text(text.replace("import qgate\n", "import qgate\nfrom product import DEPTH\n", 1))
    (product.work / "product.py").write_text("DEPTH = 3\n")
    publish_baselines(product)
    for name, changes, log_words in (
        ("green", {"conftest.py": SILENT}, "4 of 4 held"),
        (
            "red",
            {"conftest.py": SILENT, "product.py": "DEPTH = 2\n"},
            " of origin/main have no verdict: ",
        ),
    ):
        clone = product.clone(name)
        for path, text in changes.items():
            (clone / path).write_text(text)
        workflow = clone / ".github" / "workflows" / "qgate.yml"
        about = {**CONTEXT, "base_ref": "main"}
        job = Job(clone, tmp_path / f"beside-{name}", product.environment, about)
        job.run(workflow, "base-gates")
        assert job.failed is (name == "red"), job.log
        assert log_words in job.log
        assert (job.artifacts / "qgate-base-out" / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("event", "asked", "head", "runs"),
    [
        ("pull_request", "true", "us/product", True),
        ("pull_request", "", "us/product", False),
        ("pull_request", "", "them/product", True),
        ("pull_request", "", "", True),
        ("push", "true", "", False),
    ],
    ids=[
        "asked",
        "not asked",
        "of a fork, which has no variables",
        "of a fork that is gone",
        "push",
    ],
)
def test_base_gates_run_for_forks_and_where_asked(
    event: str, asked: str, head: str, runs: bool
) -> None:
    condition = yaml.safe_load(WORKFLOW.read_text())["jobs"]["base-gates"]["if"]
    context = {
        "github.event_name": event,
        "github.repository": "us/product",
        "vars.QGATE_BASE_GATES": asked,
        "github.event.pull_request.head.repo.full_name": head,
    }
    assert evaluated(condition, context) is runs


@pytest.mark.parametrize(
    ("event", "head", "labels", "runs"),
    [
        ("push", None, '["self-hosted", "gpu"]', True),
        ("push", None, "", False),
        ("pull_request", "us/product", '"gpu-large"', True),
        ("pull_request", "us/product", "", False),
        ("pull_request", "them/product", '"gpu-large"', False),
        ("workflow_dispatch", None, '"gpu-large"', False),
    ],
)
def test_gates_on_a_gpu_run_where_there_is_a_runner_and_for_no_fork(
    event: str, head: str | None, labels: str, runs: bool
) -> None:
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["gpu-gates"]
    context = {
        "github.event_name": event,
        "github.repository": "us/product",
        "vars.QGATE_GPU_RUNNER": labels,
        "github.event.pull_request.head.repo.full_name": head,
    }
    assert evaluated(job["if"], context) is runs
    assert job["steps"][-1]["with"]["device"] == "cuda"


# Comments --------------------------------------------------------------------------------------

OWN = {"event.workflow_run.id": "9", "event.workflow_run.html_url": "https://github.com/run/9",
       "event.workflow_run.head_sha": "c0ffee", "event.workflow_run.head_branch": "$(touch pwned)",
       "event.workflow_run.head_repository.owner.login": "somebody"}  # fmt: skip
GH = """printf '%s\\n' "$*" >> "{beside}/gh.log"
case "$*" in
  "run download"*) test -d "{results}" && cp -R "{results}" results ;;
  *"/pulls "*) test -e "{beside}/closed" || echo 7 ;;
  *"--paginate"*) cat "{beside}/earlier" 2> /dev/null || true ;;
  *) cp comment.md "{beside}/posted" ;;
esac
"""


def commented(folder: Path, **said: str) -> tuple[Job, str]:
    """The comment job with these answers of GitHub, and what it asked for."""
    product, beside = Product(folder), folder / "answers"
    beside.mkdir(exist_ok=True)
    for name, text in said.items():
        (beside / name).write_text(text)
    environment = product.environment
    script = GH.format(beside=beside, results=folder / "results")
    program(folder / "shims" / "gh", script)
    work = folder / f"work{len(list(folder.glob('work*')))}"
    work.mkdir()
    job = Job(work, folder / f"beside-{work.name}", environment, {**CONTEXT, **OWN})
    job.run(COMMENT, "comment")
    return job, (beside / "gh.log").read_text()


def test_results_of_a_fork_become_a_comment(tmp_path: Path) -> None:
    odd = "x|y`</details>@all https://evil.example #1"
    (tmp_path / "results").mkdir()
    write(
        tmp_path / "results" / "results.jsonl", record(odd, 3e-4, mode=odd, model=odd), commit=odd
    )
    job, gh_calls = commented(tmp_path)
    assert not job.failed, job.log
    assert "run download 9 --repo them/product --name qgate-out --dir results" in gh_calls
    assert "-f head=somebody:$(touch pwned)" in gh_calls
    assert "api --silent --method POST repos/them/product/issues/7/comments" in gh_calls
    body = (tmp_path / "answers" / "posted").read_text()
    assert body.startswith(
        "<!-- qgate report --format comment -->\n## qgate: 1 of 1 gate failed, 1 fault in "
    )
    assert body.endswith("\n[All results and the report](https://github.com/run/9)\n")
    plain = re.sub(r"`[^`]*`", "", body).replace("https://github.com/run/9", "")
    assert not re.search(r"</details>|@|https:|(?<!&)#1", plain)
    assert len([line for line in body.splitlines() if line.startswith("| ")]) == 2
    assert not list(tmp_path.rglob("pwned"))
    # The next run writes it anew.
    job, gh_calls = commented(tmp_path, earlier="31\n32\n")
    assert "api --silent --method PATCH repos/them/product/issues/comments/31" in gh_calls


@pytest.mark.parametrize("lacks", ["results", "pull request"])
def test_nothing_to_comment_on_is_no_failure(tmp_path: Path, lacks: str) -> None:
    if lacks != "results":
        write(tmp_path / "results" / "results.jsonl", record("a"))
    job, gh_calls = commented(tmp_path, **({"closed": ""} if lacks != "results" else {}))
    assert not job.failed
    assert "::notice title=qgate::" in job.log
    assert "comments" not in gh_calls


def test_results_that_are_none_are_not_commented(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results.jsonl").symlink_to("/etc/hostname")
    job, gh_calls = commented(tmp_path)
    assert job.failed
    assert "is a link" in job.log
    (tmp_path / "results" / "results.jsonl").unlink()
    (tmp_path / "results" / "results.jsonl").write_text("secrets\n")
    job, gh_calls = commented(tmp_path)
    assert job.failed
    assert "is no results file of qgate" in job.log
    assert "comments" not in gh_calls


def test_the_comment_runs_no_code_of_the_pull_request() -> None:
    flow = yaml.safe_load(COMMENT.read_text())
    assert flow["permissions"] == {}
    (job,) = flow["jobs"].values()
    assert job["permissions"] == {"actions": "read", "pull-requests": "write"}
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used == ["actions/setup-python@v6"], "no checkout, and no action of the repository"
    assert yaml.safe_load(WORKFLOW.read_text())["name"] in flow[True]["workflow_run"]["workflows"]


def test_the_comment_needs_no_more_than_is_installed_for_it(tmp_path: Path) -> None:
    (install,) = (script for script in runs(COMMENT) if "pip install" in script)
    names = install.rpartition("pip install ")[2].split()
    write(tmp_path / "results.jsonl", record("a", 1.0))
    modules = {"pyyaml": "yaml"}
    installed = {modules.get(name, name) for name in names} | {"markupsafe", "typing_extensions"}
    installed.add("_distutils_hack")  # of setuptools, which loads it as Python starts
    code = (
        "import sys\nfrom qgate.cli import main\n"
        "status = main(['report', 'results.jsonl', '--format', 'comment'])\n"
        "files = {name.split('.')[0]: getattr(module, '__file__', '') or ''\n"
        "         for name, module in [*sys.modules.items()] if not name.startswith('__editable__')}\n"
        "print(*(name for name, file in files.items() if 'site-packages' in file), file=sys.stderr)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [PROGRAMS / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stderr.split()) - {"qgate"} <= installed
    assert done.stdout.startswith("<!-- qgate report")


def test_the_runner_of_these_tests_reads_expressions() -> None:
    context = {"inputs.a-b": "x", "steps.s.outputs.o": ""}
    assert evaluated("inputs.a-b == 'x' && 'pip' || ''", context) == "pip"
    assert evaluated("steps.s.outputs.o || inputs.a-b", context) == "x"
    assert evaluated("always() && inputs.c != ''", context) is False
    assert evaluated("'inputs.a-b'", context) == "inputs.a-b"
    assert BASH[-1] == "pipefail"
