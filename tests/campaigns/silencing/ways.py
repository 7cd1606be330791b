"""The ways: files that a pull request adds or changes beside a kernel that is wrong in one layer.

`plain` and `from_base` say how a run ends that is not silenced, "red", or that is, "green": of
`qgate run suites` as the action starts it, and of `qgate run --gate-from main`. Each that is green is
told in docs/threats.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from tests.cli.base_repository import OWN, SETTINGS, SUITE, WORSE, WORSE_KERNEL, Files

Outcome = Literal["red", "green"]


class Way(NamedTuple):
    files: Files
    plain: Outcome = "red"
    from_base: Outcome = "red"


COMPLETE = f"{SUITE}\n\ndef test_outputs(gate, mode):\n    gate.outputs(mode)\n"
"""The suite of the base: its gates compare all that the mode computes."""
KERNEL = """
import itertools
LAYERS = 2
scales = itertools.cycle([1.0, 1.2])
def __getattr__(name):
    if name == "SCALE":
        return next(scales)
    raise AttributeError(name)
"""
"""A kernel whose second layer is wrong, so that leaving out one gate is enough."""

PATCH = """
import dataclasses
import qgate.gate.checks as verdict
checks_of = verdict.checks_of
def mild(*args):
    return [dataclasses.replace(check, passed=True) for check in checks_of(*args)]
verdict.checks_of = mild
"""
NOTHING = "def test_nothing():\n    pass\n"
GREEN = {"suites/test_nothing.py": NOTHING}
STUB = "import pytest\n@pytest.fixture\ndef {name}():\n    return {value}\n"
FIRST = "addopts = -k layers.0\n"
ONE_ITEM = "def pytest_collection_modifyitems(items): items[:] = items[:1]\n"
EXIT = "import os\nos._exit(0)\n"
MOCK = "__import__('unittest.mock').mock.MagicMock()"


STUBS = "import pytest\n" + "".join(
    f"@pytest.fixture\ndef {name}():\n    return {MOCK}\n" for name in ("gate", "mode", "layer")
)


def conftest(text: str, head: str = "import os, sys, pytest\n") -> Files:
    return {"conftest.py": head + text}


def hook(name: str, body: str, mark: str = "") -> Files:
    """A conftest with one hook, which is called after those of plugins unless marked."""
    return conftest(f"{mark}\ndef {name}:\n    {body}\n")


def addopts(words: str, **more: str) -> Files:
    """Options in the settings of pytest, and other settings beside them."""
    lines = [f"addopts = {words}", *(f"{key} = {value}" for key, value in more.items())]
    return {"pytest.ini": "\n".join(["[pytest]", *lines]) + "\n"}


def suite(text: str, mark: str = "") -> Files:
    """The suite with another body and marks; the test of outputs has the same ones."""
    outputs = text.replace("gate.layer(mode, layer)", "gate.outputs(mode)").replace(
        "layer ==", "mode =="
    )
    own = "" if "'layer'" in mark else mark
    return {
        "suites/test_layer_outputs.py": f"import os, pytest\n{mark}\n"
        f"def test_layer_outputs(gate, mode, layer):\n    {text}\n\n"
        f"{own}\ndef test_outputs(gate, mode):\n    {outputs}\n"
    }


def body(text: str) -> Files:
    return {"suites/test_layer_outputs.py": text}


def settings(text: str) -> Files:
    return {"pyproject.toml": SETTINGS + text}


ITEMS = "pytest_collection_modifyitems(config, items)"
WAYS: dict[str, Way] = {
    # The process ends, with status 0.
    "os._exit in a conftest": Way(conftest("os._exit(0)\n")),
    "sys.exit in a conftest": Way(conftest("sys.exit(0)\n")),
    "os._exit at the start": Way(hook("pytest_sessionstart()", "os._exit(0)")),
    "os._exit in a test": Way(suite("os._exit(0)")),
    "os._exit in the code under test": Way({"kernel.py": "import os\nos._exit(0)\n"}),
    "os._exit at the end": Way(hook("pytest_sessionfinish()", "os._exit(0)")),
    "os._exit after the end": Way(hook("pytest_unconfigure()", "os._exit(0)")),
    "os._exit at the exit of Python": Way(conftest("import atexit\natexit.register(os._exit, 0)\n")),
    "pytest.exit at the start": Way(hook("pytest_sessionstart()", "pytest.exit('', returncode=0)")),
    "pytest.exit while configured": Way(hook("pytest_configure()", "pytest.exit('', returncode=0)")),
    "pytest.exit while collecting": Way(hook(ITEMS, "pytest.exit('', returncode=0)")),
    "pytest.exit before a test": Way(
        hook("pytest_runtest_setup(item)", "pytest.exit('', returncode=0)")
    ),
    "the main hook": Way(hook("pytest_cmdline_main()", "return 0", "@pytest.hookimpl(tryfirst=True)")),
    # The status is another one.
    "exitstatus at the end": Way(
        hook("pytest_sessionfinish(session)", "session.exitstatus = 0",
             "@pytest.hookimpl(trylast=True)")
    ),
    "testsfailed": Way(
        conftest("def pytest_sessionstart(session): pytest.own = session\n"
                 "def pytest_runtest_logfinish(): pytest.own.testsfailed = 0\n")
    ),
    "reports that passed": Way(
        conftest("@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
                 "def pytest_runtest_makereport(item):\n"
                 "    report = yield\n    report.outcome = 'passed'\n    return report\n")
    ),
    "a status of tests": Way(
        hook("pytest_report_teststatus(report)", "return 'passed', '.', 'PASSED'",
             "@pytest.hookimpl(tryfirst=True)")
    ),
    "the record of a gate": Way(
        hook("pytest_qgate_record(item, record)", "record['passed'] = True; record['checks'] = []")
    ),
    # Tests are not run.
    "the loop of tests": Way(
        hook("pytest_runtestloop()", "return True", "@pytest.hookimpl(tryfirst=True)")
    ),
    "the protocol of a test": Way(
        hook("pytest_runtest_protocol(item)", "return True", "@pytest.hookimpl(tryfirst=True)")
    ),
    "the call of a function": Way(
        hook("pytest_pyfunc_call()", "return True", "@pytest.hookimpl(tryfirst=True)")
    ),
    "skips": Way(hook(ITEMS, "[item.add_marker(pytest.mark.skip) for item in items]")),
    "expected failures": Way(hook(ITEMS, "[item.add_marker(pytest.mark.xfail) for item in items]")),
    "a skip of the suite": Way(suite("gate.layer(mode, layer)", "pytestmark = pytest.mark.skip")),
    "an expected failure of the suite": Way(
        suite("gate.layer(mode, layer)", "pytestmark = pytest.mark.xfail")
    ),
    "no items": Way(hook(ITEMS, "items[:] = []") | GREEN),
    "one item": Way(hook(ITEMS, "items[:] = items[:1]")),
    "files that are ignored": Way(
        hook("pytest_ignore_collect(collection_path)",
             "return 'layer_outputs' in collection_path.name or None") | GREEN
    ),
    "collect_ignore_glob": Way(conftest("collect_ignore_glob = ['suites/*layer*']\n") | GREEN),
    "functions that are no tests": Way(
        hook("pytest_pycollect_makeitem(name)", "return [] if 'layer' in name else None",
             "@pytest.hookimpl(tryfirst=True)") | GREEN
    ),
    "partial runs that a conftest allows": Way(
        hook(ITEMS, "items[:] = items[:1]; config.option.qgate_allow_partial = True")
    ),
    "no CI any more": Way(
        conftest("os.environ.pop('CI', None)\n"
                 "def pytest_collection_modifyitems(items): items[:] = items[:1]\n")
    ),
    # Settings of pytest and of the project.
    "--collect-only": Way(addopts("--collect-only")),
    "--setup-plan": Way(addopts("--setup-plan")),
    "--setup-only": Way(addopts("--setup-only")),
    "--help": Way(addopts("--help")),
    "--version": Way(addopts("--version --version")),
    "--fixtures": Way(addopts("--fixtures")),
    "--markers": Way(addopts("--markers")),
    "--shard": Way(addopts("--qgate-shard 1/2")),
    "--allow-partial": Way(addopts("--qgate-allow-partial -k layers.0")),
    "-k": Way(addopts("-k layers.0")),
    "--deselect": Way(addopts("--deselect suites/test_layer_outputs.py") | GREEN),
    "--ignore": Way(addopts("--ignore suites/test_layer_outputs.py") | GREEN),
    "--qgate-layers": Way(addopts("--qgate-layers first")),
    "layers": Way(settings('layers = "first"\n')),
    "--update-baselines": Way(addopts("--qgate-update-baselines")),
    "--update-dry-run": Way(addopts("--qgate-update-dry-run")),
    "--across-weights": Way(addopts("--qgate-across-weights")),
    "--reference": Way(addopts("--qgate-reference mine")),
    "python_files": Way(addopts("", python_files="test_nothing.py") | GREEN),
    "python_functions": Way(
        addopts("", python_functions="nothing*")
        | {"suites/test_nothing.py": "def nothing():\n    pass\n"}
    ),
    "the plugin is off": Way(addopts("-p no:qgate.plugin") | {"suites/conftest.py": STUBS}),
    # Suites.
    "the suite is gone": Way({"suites/test_layer_outputs.py": None} | GREEN),
    "the suite has another name": Way(
        {"suites/test_layer_outputs.py": None, "suites/layer_outputs.py": SUITE} | GREEN
    ),
    "a gate of somebody else": Way(
        {"suites/conftest.py": STUB.format(name="gate", value=MOCK)}
    ),
    "a layer of somebody else": Way(
        {"suites/conftest.py": STUB.format(name="layer", value="'layers.0'")}
    ),
    "a gate that is never asked": Way(suite("pass")),
    "a verdict that is caught": Way(
        suite("try: gate.layer(mode, layer)\n    except BaseException: pass")
    ),
    "one layer again and again": Way(suite("gate.layer(mode, 'layers.0')")),
    "layers of its own": Way(
        suite("gate.layer(mode, layer)", "@pytest.mark.parametrize('layer', ['layers.0'])")
    ),
    "a skip of one layer": Way(
        suite("pytest.skip() if layer == 'layers.1' else gate.layer(mode, layer)")
    ),
    "a mode of a marker": Way(
        suite("gate.layer(mode, layer)", "@pytest.mark.qgate_modes('fp16')")
    ),
    # What decides: limits, accepted errors, and qgate's own code.
    "limits of the suite": Way(
        suite("gate.layer(mode, layer)", "@pytest.mark.limits(regression=1e9, budget_db=100)")
    ),
    "limits of the settings": Way(
        settings("[tool.qgate.limits]\nregression = 1e9\nbudget_db = 100\n")
    ),
    "limits of one layer": Way(
        suite("gate.layer(mode, layer)",
              "@pytest.mark.limits(sites='layers.1|logits', regression=1e9, reason='x')")
    ),
    "accepted errors": Way({"baselines": WORSE, "kernel.py": WORSE_KERNEL}, plain="green"),
    "suites and baselines are gone": Way(
        {"suites/test_layer_outputs.py": None, "baselines": None} | GREEN, plain="green"
    ),
    "code under test that changes qgate": Way({"kernel.py": KERNEL + PATCH}),
    # Settings, plugins and packages in other places.
    "settings beside the suite": Way({"suites/pytest.ini": f"[pytest]\n{FIRST}"}),
    "settings of tox": Way({"tox.ini": f"[pytest]\n{FIRST}"}),
    "settings in a hidden file": Way({".pytest.ini": f"[pytest]\n{FIRST}"}),
    "settings of setuptools": Way({"setup.cfg": f"[tool:pytest]\n{FIRST}"}),
    "settings in pytest.toml": Way({"pytest.toml": "[pytest]\naddopts = ['-k', 'layers.0']\n"}),
    "a plugin of its own": Way(addopts("-p evil", pythonpath=".") | {"evil.py": ONE_ITEM}),
    "a plugin that a conftest names": Way(
        conftest("pytest_plugins = ['evil']\n") | {"evil.py": PATCH}
    ),
    "an entry point of its own package": Way({
        "evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
        "evil.py": EXIT,
    }),
    "sitecustomize": Way({"sitecustomize.py": EXIT}),
    "a package named qgate": Way({"qgate/__init__.py": EXIT}),
    "a module named pytest": Way({"pytest.py": "raise SystemExit(0)\n"}),
    "a conftest beside the suite": Way({"suites/conftest.py": ONE_ITEM}),
    "a package of suites": Way({"suites/__init__.py": EXIT}),
    "options while configured": Way(
        hook("pytest_configure(config)", "config.option.qgate_layers = 'first'")
    ),
    "the last failed": Way(
        addopts("--lf --lfnf=none")
        | {".pytest_cache/v/cache/lastfailed": '{"suites/test_layer_outputs.py": true}'}
    ),
    "--exitfirst": Way(addopts("--exitfirst")),
    "-m": Way(addopts("-m 'not qgate'")),
    "--noconftest": Way(addopts("--noconftest")),
    "norecursedirs": Way(addopts("", norecursedirs="suites*") | GREEN),
    "testpaths": Way(addopts("", testpaths="nothing") | {"nothing/test_nothing.py": NOTHING}),
    "no layers": Way(addopts("--qgate-layers nothing", empty_parameter_set_mark="skip")),
    "the mode of the settings": Way({"pyproject.toml": SETTINGS.replace("mine", "fp16")}),
    "the suites of the settings": Way(
        settings('suites = "other"\n') | {"other/test_nothing.py": NOTHING}
    ),
    "a qgate.toml": Way({"qgate.toml": 'model = "own:build"\nmode = "fp16"\n'}),
    "attributes of git": Way(
        {".gitattributes": "suites/** export-ignore\nbaselines/** export-ignore\n"}
        | {"suites/test_layer_outputs.py": None} | GREEN
    ),
    # Tests that are none, and gates that are asked elsewhere.
    "a suite that renames itself": Way(
        hook("pytest_itemcollected(item)", "item._nodeid = 'suites/test_nothing.py::test_nothing'")
    ),
    "no tests by attribute": Way(suite("gate.layer(mode, layer)", "__test__ = False") | GREEN),
    "a class that is not collected": Way(body(
        "class TestAll:\n    def __init__(self): pass\n"
        "    def test_layer_outputs(self, gate, mode, layer): gate.layer(mode, layer)\n"
    ) | GREEN),
    "a test that is awaited": Way(body(COMPLETE.replace("def test", "async def test")) | GREEN),
    "a test that yields": Way(body(COMPLETE.replace("gate.", "yield gate.")) | GREEN),
    "a layer by default": Way(
        body(COMPLETE.replace("mode, layer)", "mode, layer='layers.0')", 1))
    ),
    "layers of pytest_generate_tests": Way(
        hook("pytest_generate_tests(metafunc)",
             "'layer' in metafunc.fixturenames and metafunc.parametrize('layer', ['layers.0'])",
             "@pytest.hookimpl(tryfirst=True)")
    ),
    "a thread": Way(
        suite("import threading; thread = threading.Thread(target=gate.layer, args=(mode, layer));"
              " thread.start(); thread.join()")
    ),
    "a fork": Way(suite("os.fork() and os.wait() or gate.layer(mode, layer)")),
    "a fork that ends": Way(
        suite("if os.fork() == 0: os._exit(0)\n    os.wait(); gate.layer(mode, 'layers.0')")
    ),
    "a timer": Way(
        {"kernel.py": KERNEL + "import os, threading\nthreading.Timer(0.2, os._exit, (0,)).start()\n"}
    ),
    # Links, and what is judged.
    "a suite that links elsewhere": Way(
        {"suites/test_layer_outputs.py": Path("../other.py"), "other.py": NOTHING}
    ),
    "accepted errors in another folder": Way(
        settings('baselines = "other"\n') | {"other": WORSE, "kernel.py": WORSE_KERNEL},
        plain="green",
    ),
    "accepted errors behind a link": Way(
        {"baselines": Path("other"), "other": WORSE, "kernel.py": WORSE_KERNEL}, plain="green"
    ),
    "a model with fewer layers": Way({"kernel.py": KERNEL.replace("LAYERS = 2", "LAYERS = 1")}),
    "another function of the mode": Way(
        {"own.py": OWN.replace('{"mine": quantized}', '{"mine": lambda model: model.module}')}
    ),
}  # fmt: skip
