"""The house rules hold, and each of them can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qgate
from tests import house
from tests.conftest import LONGEST_FIRST, TOGETHER

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "pandas", "matplotlib", "pytest")

Rule = Callable[[Path], list[str]]
Files = dict[str, str]


def plant(root: Path, files: Files) -> Path:
    """A package `qgate` with these files and an empty `__init__.py` wherever one is missing."""
    package = root / "qgate"
    for name, text in {"__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in {path.parent for path in package.rglob("*.py")} | {package}:
        (folder / "__init__.py").touch()
    return package


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    violations = rule(ROOT / "qgate")
    assert not violations, "\n".join(violations)


def test_variables_of_tests_say_what_they_hold() -> None:
    violations = house.empty_name_violations(ROOT / "tests")
    assert not violations, "\n".join(violations)


# Per rule: what it must find, as a tree and words that the sentences have to contain.
BAD: dict[Rule, dict[str, tuple[Files, list[str]]]] = {
    house.division_violations: {
        "by a literal": (
            {"modes/a.py": "def f(x):\n    return x.amax() / 127\n"},
            ["qgate/modes/a.py:2: x.amax() / 127 divides by a number"],
        ),
        "in place, by a negative one": (
            {"gate/measuring/a.py": "def f(x):\n    x /= -3.0\n"},
            ["qgate/gate/measuring/a.py:2: x /= -3.0 divides by a number"],
        ),
        "by functions": (
            {"scales/a.py": "import torch\ntorch.div(x, 6)\nx.div_(6)\n"},
            [
                "qgate/scales/a.py:2: torch.div(x, 6) divides by a number",
                "qgate/scales/a.py:3: x.div_(6) divides by a number",
            ],
        ),
        "by constants of this file and of another": (
            {
                "stats/a.py": "HIGH = 127\n",
                "modes/a.py": "from qgate.stats.a import HIGH\nSIX = 6.0\nx / HIGH + x / SIX\n",
            },
            [
                "qgate/modes/a.py:3: x / HIGH divides by a number",
                "qgate/modes/a.py:3: x / SIX divides by a number",
            ],
        ),
        "an exception that is not met": (
            {"modes/calibration.py": ""},
            ["qgate/modes/calibration.py: reach / 127: is there no more"],
        ),
    },
    house.floor_violations: {
        "up": (
            {"formats/a.py": "import qgate.analysis.run\n", "analysis/run.py": ""},
            ["qgate/formats/a.py:1: formats (floor 3) imports analysis (floor 9)"],
        ),
        "up, to a room that is not built": (
            {"registry.py": "\nfrom qgate import stats\n"},
            ["qgate/registry.py:2: registry (floor 1) imports stats (floor 3)"],
        ),
        "sibling, in a function": (
            {"stats/a.py": "def f():\n    from qgate.formats import b\n"},
            ["qgate/stats/a.py:2: stats (floor 3) imports its sibling formats"],
        ),
        "sibling, for annotations": (
            {
                "engines.py": "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from qgate.drawing import Drawing\n"
            },
            ["qgate/engines.py:3: engines (floor 7) imports its sibling drawing"],
        ),
        "what brings a kind of gate": (
            {
                "dumps/gate.py": "import qgate.gate.sessions\nimport qgate.plugin.fixtures\n",
                "dumps/reading.py": "from qgate.dumps.gate import gates\n",
                "page/a.py": "import qgate.dumps.kind\n",
                "gate/a.py": "from qgate.dumps import kind\n",
            },
            [
                "qgate/dumps/gate.py:2: dumps (floor 8.5) imports plugin (floor 10)",
                "qgate/dumps/reading.py:1: dumps (floor 4) imports dumps (floor 8.5)",
                "qgate/gate/a.py:1: gate (floor 8) imports dumps (floor 8.5)",
            ],
        ),
        "sibling, relative": (
            {"capture/a.py": "from ..scales import b\n", "scales/b.py": ""},
            ["qgate/capture/a.py:1: capture (floor 4) imports its sibling scales"],
        ),
        "sibling, relative, from a package's own file": (
            {"models/__init__.py": "from .. import engine\n"},
            ["qgate/models/__init__.py:1: models (floor 3) imports its sibling engine"],
        ),
        "sibling, on the top floor": (
            {"cli/a.py": "from qgate.plugin import b\n", "plugin/b.py": "import qgate.cli.a\n"},
            ["cli (floor 10) imports its sibling plugin", "plugin (floor 10) imports its sibling"],
        ),
        "__main__ is cli": (
            {"__main__.py": "from qgate.plugin import b\n", "page/a.py": "import qgate.cli\n"},
            ["qgate/__main__.py:1: cli (floor 10)", "page (floor 9) imports cli (floor 10)"],
        ),
        "by name": (
            {
                "results.py": "import importlib\n\ndef f(name):\n"
                "    importlib.import_module('qgate.page')\n"
                "    importlib.import_module(f'qgate.analysis.{name}')\n"
            },
            ["results.py:4: results (floor 3) imports page", "results.py:5: results (floor 3)"],
        ),
        "from the roof": (
            {
                "page/a.py": "from qgate import quantize\n",
                "cli/b.py": "import qgate\n",
                "modes.py": "from qgate import *\n",
            },
            [
                "page (floor 9) imports qgate.quantize, which is no room",
                "cli (floor 10) imports qgate, which is no room",
                "modes (floor 5) imports qgate.*, which is no room",
            ],
        ),
        "unknown room": (
            {"attic/a.py": "", "cellar.py": ""},
            [
                "qgate/attic: the room 'attic' has no floor: add it to FLOORS in tests/house.py",
                "qgate/cellar: the room 'cellar' has no floor",
            ],
        ),
    },
    house.cycle_violations: {
        "a file that imports itself": (
            {"stats/a.py": "import qgate.stats.a\n"},
            ["import cycle: qgate.stats.a -> qgate.stats.a"],
        ),
        "two files": (
            {"stats/a.py": "from . import b\n", "stats/b.py": "from qgate.stats.a import x\n"},
            ["import cycle: qgate.stats.a -> qgate.stats.b -> qgate.stats.a"],
        ),
        "three files, in a class and in a branch": (
            {
                "stats/a.py": "class A:\n    import qgate.stats.b\n",
                "stats/b.py": "try:\n    import qgate.stats.c\nexcept ImportError:\n    pass\n",
                "stats/c.py": "from typing import TYPE_CHECKING\n"
                "if not TYPE_CHECKING:\n    from qgate.stats.a import A\n",
            },
            ["qgate.stats.a -> qgate.stats.b -> qgate.stats.c -> qgate.stats.a"],
        ),
        "a file and the package that offers it": (
            {
                "stats/__init__.py": "from qgate.stats.a import x\n",
                "stats/a.py": "from . import y\n",
            },
            ["import cycle: qgate.stats -> qgate.stats.a -> qgate.stats"],
        ),
        "through the package above what is imported": (
            {
                "modes/a.py": "import qgate.stats.b\n",
                "stats/__init__.py": "from qgate.modes import a\n",
                "stats/b.py": "",
            },
            ["import cycle: qgate.modes.a -> qgate.stats -> qgate.modes.a"],
        ),
        "through a function": (
            {
                "stats/a.py": "from qgate.stats.b import x\n",
                "stats/b.py": "def f():\n    from qgate.stats import a\n",
            },
            ["import cycle: qgate.stats.a -> qgate.stats.b -> qgate.stats.a"],
        ),
        "through names of types": (
            {
                "stats/a.py": "from qgate.stats.b import x\n",
                "stats/b.py": "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from qgate.stats.c import C\n",
                "stats/c.py": "def f():\n    import qgate.stats.a\n",
            },
            ["qgate.stats.a -> qgate.stats.b -> qgate.stats.c -> qgate.stats.a"],
        ),
        "two cycles": (
            {
                "stats/a.py": "from . import b\n",
                "stats/b.py": "from . import a\n",
                "stats/c.py": "from . import d\n",
                "stats/d.py": "from . import c\n",
            },
            ["qgate.stats.a -> qgate.stats.b", "qgate.stats.c -> qgate.stats.d"],
        ),
    },
    house.torch_free_violations: {
        "torch": (
            {
                "gate/a.py": "def f():\n    import torch.nn as nn\n",
                "gate/measuring_of.py": "import torch\n",
                "results.py": "from torch import Tensor\n",
                "page/a.py": "from safetensors.torch import load_file\n",
            },
            [
                "qgate/gate/a.py:2: imports torch.nn: gate works without torch",
                "qgate/gate/measuring_of.py:1: imports torch",
                "qgate/results.py:1: imports torch.Tensor",
                "qgate/page/a.py:1: imports safetensors.torch.load_file",
            ],
        ),
        "torch, through others": (
            {
                "page/a.py": "from qgate.analysis import run\n",
                "analysis/run.py": "import qgate.stats.b\n",
                "stats/b.py": "import torch\n",
            },
            ["qgate/page/a.py: page works", "through qgate.analysis.run -> qgate.stats.b."],
        ),
        "pytest": (
            {
                "__init__.py": "import pytest\n",
                "cli/a.py": "def f():\n    from _pytest import config\n",
                "page/a.py": "import pytest_html\n",
            },
            ["qgate/__init__.py:1: imports pytest", "imports _pytest.config", "pytest_html"],
        ),
        "matplotlib": (
            {
                "page/html.py": "def f():\n    import matplotlib.pyplot as plt\n",
                "sweeps/advice.py": "import matplotlib\n",
            },
            ["page/html.py:2: imports matplotlib.pyplot: only charts", "sweeps/advice.py"],
        ),
        "argparse": (
            {"formats/a.py": "from argparse import ArgumentParser\n"},
            ["formats/a.py:1: imports argparse.ArgumentParser: only cli, plugin and settings"],
        ),
        "transformers and datasets": (
            {
                "models/a.py": "from transformers import AutoModel\n",
                "models/b.py": "def f():\n    import datasets\n",
                "models/c.py": "def f():\n    import datasets\n",
            },
            [
                "models/a.py:1: imports transformers.AutoModel: import it inside the function",
                "datasets is loaded in qgate/models/b.py, qgate/models/c.py",
            ],
        ),
    },
    house.name_clash_violations: {
        "function": (
            {"analysis/__init__.py": "def sweep(): ...\n", "analysis/sweep.py": ""},
            ["qgate/analysis/__init__.py:1: 'sweep' is a name here and a file of qgate.analysis"],
        ),
        "re-export": (
            {
                "analysis/__init__.py": "from .sweep import sweep\n__all__ = ['sweep']\n",
                "analysis/sweep.py": "def sweep(): ...\n",
            },
            ["qgate/analysis/__init__.py:1: 'sweep'"],
        ),
        "re-export under another name, beside a package": (
            {"__init__.py": "from qgate.gate.a import check as gate\n", "gate/a.py": ""},
            ["qgate/__init__.py:1: 'gate' is a name here and a file of qgate:"],
        ),
        "lazy, from a table": (
            {
                "__init__.py": "__all__ = ['capture']\n_HOME = {'capture': 'qgate.capture'}\n",
                "capture/a.py": "",
            },
            ["qgate/__init__.py:2: 'capture'"],
        ),
        "lazy, seen by the type checker": (
            {
                "__init__.py": "from typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    from qgate.modes.a import modes\n",
                "modes/a.py": "",
            },
            ["qgate/__init__.py:3: 'modes'"],
        ),
        "assignment": (
            {"stats/__init__.py": "metrics: int = 0\n", "stats/metrics.py": ""},
            ["qgate/stats/__init__.py:1: 'metrics'"],
        ),
        "drawers": (
            {"stats/utils.py": "", "formats/_helpers/a.py": "", "helpers.py": ""},
            ["qgate/stats/utils.py: name it after what is in it", "'_helpers'", "qgate/helpers.py"],
        ),
    },
    house.numerics_env_violations: {
        "environ": (
            {"formats/a.py": "import os\nFAST = os.environ['FAST']\n"},
            ["qgate/formats/a.py:2: reads os.environ: formats takes"],
        ),
        "getenv": (
            {"modes/a.py": "def f():\n    import os as o\n    return o.getenv('X', '')\n"},
            ["qgate/modes/a.py:3: reads os.getenv"],
        ),
        "by its own name": (
            {"stats/a.py": "from os import environ as settings\n\nx = settings.get('X')\n"},
            ["qgate/stats/a.py:3: reads os.environ"],
        ),
        "in every room where numbers are made": (
            {f"{room}.py": "import os\nos.getenv('X')\n" for room in house.NO_ENVIRONMENT},
            [f"qgate/{room}.py:2" for room in house.NO_ENVIRONMENT],
        ),
    },
    house.portability_violations: {
        "a module of POSIX": (
            {"gate/a.py": "import fcntl\ndef f():\n    from pwd import getpwuid\n"},
            ["qgate/gate/a.py:1: imports fcntl", "qgate/gate/a.py:3: imports pwd.getpwuid"],
        ),
        "ends of lines": (
            {"page/a.py": "p.write_text('x')\np.open('w', encoding='utf-8')\n"},
            [
                "qgate/page/a.py:1: text without newline=",
                "qgate/page/a.py:2: text without newline=",
            ],
        ),
        "bytes as text": (
            {"dumps/a.py": "import os\nos.open(p, os.O_WRONLY)\n"},
            ["qgate/dumps/a.py:2: os.open writes text"],
        ),
    },
    house.pickle_violations: {
        "torch.load": (
            {
                "dumps/a.py": "import torch\ntorch.load('x')\ntorch.load('x', weights_only=0)\n",
                "dumps/b.py": "from torch import load as read\nread('x', **{})\n",
            },
            ["qgate/dumps/a.py:2: torch.load without", "qgate/dumps/a.py:3", "qgate/dumps/b.py:2"],
        ),
        "np.load": (
            {
                "dumps.py": "import numpy as np\nnp.load('x', allow_pickle=True)\n"
                "np.load('x', None, True)\nallow = 1\nnp.load('x', allow_pickle=allow)\n"
            },
            ["qgate/dumps.py:2: np.load with allow_pickle", "dumps.py:3", "dumps.py:5"],
        ),
        "picklers": (
            {
                "results.py": "import pickle\n",
                "dumps/a.py": "def f():\n    from joblib import load\n",
                "dumps/b.py": "import dill as d\n",
                "dumps/c.py": "import pandas as pd\npd.read_pickle('x')\n",
            },
            ["results.py:1: imports pickle", "joblib.load", "dumps/b.py:1", "dumps/c.py:2"],
        ),
    },
    house.test_name_violations: {
        "function": ({"gate.py": "\ndef test_gate(): ...\n"}, ["gate.py:2:", "'test_gate'"]),
        "class": ({"gate.py": "class TestResult: ...\n"}, ["gate.py:1:", "'TestResult'"]),
        "bound in a branch": (
            {"gate.py": "if True:\n    from a import b as test_b\nelse:\n    test_c = 1\n"},
            ["gate.py:2:", "'test_b'", "gate.py:4:", "'test_c'"],
        ),
        "file and folder": (
            {"gate/test_gate.py": "", "test_data/a.py": ""},
            ["qgate/gate/test_gate.py: pytest would collect a file named 'test_gate'", "test_data"],
        ),
    },
    house.place_violations: {
        "a path or a URL": (
            {
                "gate/a.py": "from pathlib import Path\n\ndef f(x):\n    isinstance(x, str | Path)\n",
                "gate/b.py": "import pathlib\nisinstance(1, (str, pathlib.Path))\n",
                "gate/c.py": "from upath import UPath as U\n",
                "gate/e.py": "from qgate.storage.object_folders import ObjectFolder as O\n"
                "isinstance(1, O)\n",
                "gate/d.py": "from qgate.storage.locations import is_url\n",
            },
            [
                "qgate/gate/a.py:4",
                "qgate/gate/b.py:2",
                "c.py:1: imports upath",
                "d.py:1: imports",
                "e.py:2",
            ],
        ),
        "a folder with a path": (
            {
                "gate/a.py": "from qgate.storage.access import folder_of\n"
                "if folder_of('x').path:\n    ...\n",
                "gate/b.py": "from qgate.storage.folders import Folder\n"
                "def f(x: Folder):\n    return x.path is None\n",
            },
            ["qgate/gate/a.py:2: asks a folder", "qgate/gate/b.py:3: asks whether a folder"],
        ),
    },
    house.hidden_import_violations: {
        "in a function": (
            {"gate/a.py": "def f():\n    from qgate.metrics import b\n"},
            ["qgate/gate/a.py:2: imports qgate.metrics inside a function"],
        ),
        "fewer than are known": (
            {"engine/_backends.py": "import qgate.engine.journal\n"},
            ["qgate/engine/_backends.py: imports 0 parts of qgate inside functions, not 1"],
        ),
    },
    house.private_violations: {
        "a file and a name": (
            {
                "gate/a.py": "from qgate.metrics._table import x\n",
                "gate/b.py": "def f():\n    from qgate.text.wording import _cut\n",
            },
            [
                "qgate/gate/a.py:1: imports qgate.metrics._table.x",
                "qgate/gate/b.py:2: imports qgate.text.wording._cut",
            ],
        ),
    },
    house.class_name_violations: {
        "two classes": (
            {"gate/a.py": "class Plan: ...\n", "page/b.py": "x = 1\nclass Plan: ...\n"},
            ["qgate/gate/a.py:1, qgate/page/b.py:2: Plan stands for 2 classes"],
        ),
    },
    house.empty_name_violations: {
        "one of three": (
            {"gate/a.py": "limits = 1\nfor each in (found := ()): ...\n"},
            ["qgate/gate/a.py:2: each says nothing", "qgate/gate/a.py:2: found says nothing"],
        ),
    },
    house.docstring_violations: {
        "of a file, a class and a function": (
            {
                "gate/a.py": '"""What it is."""\n',
                "gate/b.py": 'class Plan:\n    """Whoever reads."""\n',
                "gate/c.py": 'def f():\n    """Return it."""\n    def g():\n        """Of it."""\n',
            },
            [
                "qgate/gate/a.py:1: a docstring begins with 'What'",
                "qgate/gate/b.py:1: a docstring begins with 'Whoever'",
                "qgate/gate/c.py:3: a docstring begins with 'Of'",
            ],
        ),
    },
    house.untyped_table_violations: {
        "one more than there were": (
            {"gate/a.py": "x: dict[str, Any]\n" * (house.MOST_UNTYPED_TABLES + 1)},
            ["dict[str, Any]: give the fields names"],
        ),
    },
    house.length_violations: {
        "a line too long": (
            {"formats/a.py": "x = 1\n" * 801},
            ["qgate/formats/a.py: 801 lines, 800 at most"],
        ),
    },
    house.removal_violations: {
        "by functions": (
            {
                "cli/a.py": "import os, shutil\nshutil.rmtree(x)\nos.remove(x)\n",
                "engine/c.py": "import tempfile\nwith tempfile.TemporaryDirectory() as x: f(x)\n",
                "plugin/b.py": "from shutil import rmtree as gone\ncall(gone, x)\n",
            },
            [
                "qgate/cli/a.py:2: shutil.rmtree follows links",
                "qgate/cli/a.py:3: os.remove follows links",
                "qgate/engine/c.py:2: tempfile.TemporaryDirectory follows links",
                "qgate/plugin/b.py:2: gone follows links",
            ],
        ),
        "by methods": (
            {
                "sweeps/a.py": "def f(path):\n    path.unlink(missing_ok=True)\n    undo(path.rmdir)\n"
            },
            [
                "qgate/sweeps/a.py:2: path.unlink follows links",
                "qgate/sweeps/a.py:3: path.rmdir follows links",
            ],
        ),
    },
    house.writing_violations: {
        "by its own name": (
            {
                "cli/a.py": "x.write_text(text)\n(x / 'a').write_bytes(data)\n",
                "dumps/b.py": "with path.open('wb') as file:\n    file.write(data)\n",
            },
            [
                "qgate/cli/a.py:2: writes to a file by its own name",
                "qgate/dumps/b.py:1: writes to a file by its own name",
            ],
        ),
    },
    house.foreign_violations: {
        "by itself": (
            {
                "cli/a.py": "x = path.read_text(encoding='utf-8')\n",
                "sweeps/b.py": "y = path.read_bytes()\nwith path.open('rb') as file: file.read()\n",
                "dumps/c.py": "with open(path) as file: file.read()\n",
            },
            [
                "qgate/cli/a.py:1: opens a file by itself",
                "qgate/dumps/c.py:1: opens a file by itself",
                "qgate/sweeps/b.py:2: opens a file by itself",
            ],
        ),
        "by a library": (
            {
                "dumps/a.py": "import numpy as np\ndef f(path):\n    return np.load(path)\n",
                "storage/b.py": "from safetensors import safe_open as opened\nx = opened(path)\n",
            },
            [
                "qgate/dumps/a.py:3: opens a file by itself",
                "qgate/storage/b.py:2: opens a file by itself",
            ],
        ),
        "a listed file that opens none": (
            {"results/rows.py": "x = 1\n"},
            ["qgate/results/rows.py: opens 0 files: lower its number"],
        ),
    },
    house.name_comparison_violations: {
        "scopes anywhere": (
            {
                "engines/a.py": "x = scope == 'local'\nx = row['scope'] in LOCAL\n",
                "gate/measuring/a.py": "x = 'local' != row.scope\nmatch scope:\n    case _: x\n",
            },
            [
                "qgate/engines/a.py:1: scope == 'local' asks for a name",
                "qgate/engines/a.py:2: row['scope'] in LOCAL asks",
                "qgate/gate/measuring/a.py:1: 'local' != row.scope asks",
                "qgate/gate/measuring/a.py:2: scope asks",
            ],
        ),
        "kinds of limits": (
            {
                "gate/a.py": "x = check.kind in ('a', *b)\n",
                "page/a.py": "x = check.get('kind', '') == KIND\n",
            },
            [
                "qgate/gate/a.py:1: check.kind in ('a', *b) asks",
                "qgate/page/a.py:1: check.get('kind', '') == KIND asks",
            ],
        ),
    },
    house.hook_violations: {
        "a tap of its own": (
            {
                "modes/a.py": "module.register_forward_hook(f)\nx = module.register_forward_pre_hook\n"
            },
            [
                "qgate/modes/a.py:1: register_forward_hook taps a module",
                "qgate/modes/a.py:2: register_forward_pre_hook taps",
            ],
        ),
    },
    house.print_violations: {
        "names as they are": (
            {"cli/a.py": "x = 1\nprint(x)\n"},
            ["qgate/cli/a.py:2: print() shows names as they are"],
        ),
        "an option": (
            {"plugin/a.py": "import pytest\nraise pytest.UsageError(x) from None\n"},
            ["qgate/plugin/a.py:2: raise option_error"],
        ),
    },
}

# Per rule: what looks like a violation and is none.
GOOD: dict[Rule, Files] = {
    house.division_violations: {
        "modes/a.py": "FOUR = 4\ny = x / 8 + x / -0.5 + x / FOUR + len(x) / 3 + x / y + divided(x, 127)\n",
        "charts/a.py": "y = x / 3\n",
        "modes/calibration.py": "reach / 127\n",
    },
    house.floor_violations: {
        "__init__.py": "from qgate.cli import main\nfrom qgate import formats\n",
        "__main__.py": "from qgate.cli import main\n",
        "cli/a.py": "from qgate import formats, page\nfrom . import b\nimport qgate.errors\n",
        "cli/b.py": "import importlib\n\nimportlib.import_module(f'qgate.cli.{input()}')\n",
        "page/a.py": "from ..sweeps.run import x\nfrom qgatelike.plugin import y\n",
        "formats/a.py": "from .b import x\nfrom ..registry import Registry\n",
        "registry.py": "from qgate.errors import unknown\n",
    },
    house.cycle_violations: {
        "__init__.py": "from qgate.stats.a import x\n",
        "stats/__init__.py": "from qgate.stats.a import x\nfrom qgate.stats import b\n",
        "stats/a.py": "from typing import TYPE_CHECKING\nimport qgate.stats.c\n"
        "if TYPE_CHECKING:\n    from qgate.stats.d import D\n",
        "stats/b.py": "from qgate.stats.a import x\n",
        "stats/c.py": "def f():\n    from qgate.stats import d\n    import torch\n",
        "stats/d.py": "",
    },
    house.torch_free_violations: {
        "formats/a.py": "import torch\nfrom torch import nn\n",
        "gate/measuring/a.py": "import torch\n",
        "page/a.py": "import qgate.formats.b\n\ndef f():\n    from qgate.formats import a\n",
        "formats/b.py": "def f():\n    import torch\n",
        "drawing/plots/a.py": "def f():\n    import matplotlib.pyplot\n",
        "page/b.py": "import torchtime\n",
        "plugin/a.py": "import pytest\nimport argparse\n",
        "__main__.py": "import argparse\n",
        "models/a.py": "def f():\n    import transformers, datasets\n",
    },
    house.name_clash_violations: {
        "__init__.py": "from qgate import formats\nimport qgate.gate as gate\n"
        "__all__ = ['formats', 'gate', 'quantize', 'stats']\n"
        "_HOME = {'quantize': 'qgate.formats.quantizer'}\n",
        "formats/__init__.py": "from . import mx\nfrom .quantizer import quantize\n",
        "formats/quantizer.py": "def quantizer(): ...\ndef mx(): ...\n",
        "formats/mx.py": "",
        "gate.py": "",
        "stats/__init__.py": "def formats(): ...\n",
    },
    house.numerics_env_violations: {
        "cli.py": "import os\nos.environ['X']\n",
        "engine.py": "import os\nos.getenv('X')\n",
        "formats/a.py": "import os\nenviron = {}\nenviron['X'] = os.sep\nself = 0\nself.environ\n",
    },
    house.portability_violations: {
        "gate/a.py": "import os\nfrom a import resource\np.write_text('x', newline='')\n"
        "p.open('wb')\nopen('w')\nwrite_text('x')\np.open('r')\n",
        "storage/locks.py": "import os\nos.open(p, 0)\n",
    },
    house.pickle_violations: {
        "dumps/a.py": "import json\nimport numpy as np\nimport torch\n"
        "torch.load('x', weights_only=True)\nnp.load('x')\nnp.load('x', allow_pickle=False)\n"
        "json.load('x', allow_pickle=True)\nload('x')\n",
    },
    house.test_name_violations: {
        "gate.py": "def testify(): ...\nclass Attested: ...\ndef f():\n    test_x = 1\n",
        "latest_gate.py": "",
    },
    house.place_violations: {
        "storage/a.py": "from pathlib import Path\nfrom upath import UPath\nisinstance(1, Path)\n",
        "gate/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from upath import UPath\nfrom qgate.storage.locations import location_of\n"
        "isinstance(1, str)\nx = f().path is None\n",
    },
    house.hidden_import_violations: {
        "cli/a.py": "def f():\n    from qgate.gate import b\n",
        "gate/a.py": "from qgate.text import b\n\ndef f():\n    import torch\n",
        "gate/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from qgate.text import b\n",
    },
    house.private_violations: {
        "gate/a.py": "from qgate.gate._b import _c\nfrom qgate._version import __version__\n",
        "gate/_b.py": "from torch import _dynamo\n",
    },
    house.class_name_violations: {
        "gate/a.py": "class Plan: ...\nclass _Part: ...\n",
        "page/b.py": "class Page:\n    class Plan: ...\nclass _Part: ...\n",
    },
    house.empty_name_violations: {
        "gate/a.py": "kept_rows = foundation = 1\nf(found=2)\nx.found = y[each] = 1\n"
    },
    house.docstring_violations: {
        "gate/a.py": 'def f():\n    """Offer it.\n\n    What follows.\n    """\nx = \'Of it\'\n'
    },
    house.untyped_table_violations: {
        "gate/a.py": "x: dict[str, Any]\n" * house.MOST_UNTYPED_TABLES
    },
    house.length_violations: {"formats/a.py": "x = 1\n" * 800},
    house.removal_violations: {
        "storage/removing.py": "import shutil\nshutil.rmtree(x)\nx.unlink()\n",
        "cli/a.py": "from qgate.storage.removing import remove_files\nremove_files(x, 'a')\nx.remove(y)\n",
    },
    house.writing_violations: {
        "storage/a.py": "path.write_bytes(data)\n",
        "cli/a.py": "with replacing(path) as part:\n    part.write_text(text)\n"
        "    (part / 'a').write_bytes(data)\npath.open('rb')\n",
    },
    house.foreign_violations: {
        "storage/foreign.py": "x = open(path, 'rb')\n",
        "dumps/a.py": "import numpy as np\ndef f(path):\n    with open_foreign(path, 'x', 1) as file:\n"
        "        return np.load(file)\ndef g(file: IO[bytes]):\n    return np.load(file)\n",
        "dumps/b.py": "path.open('wb')\nopen(path, 'w')\nDump.open(path)\nkind.open(run, model)\n",
    },
    house.name_comparison_violations: {
        "gate/a.py": "x = scope_of(row.scope).is_local\nx = row.scope == other.scope\n"
        "x = kind.name in kinds\nx = 'kind' in row\n",
        "gate/measuring/a.py": "x = site.kind == 'linear'\n",
        "formats/a.py": "x = fmt.kind == 'block'\n",
        "results/files.py": "x = header['kind'] == 'header'\n",
    },
    house.hook_violations: {
        "hooks/a.py": "module.register_forward_hook(f)\n",
        "modes/a.py": "hooks.add(module, f)\ntensor.register_hook(f)\n",
    },
    house.print_violations: {
        "cli/a.py": "from qgate.text.printing import print_line\nprint_line(x)\nraise option_error(x)\n",
        "cli/report.py": "print(x)\n",
    },
}


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule.__name__}: {case}")
        for rule, cases in BAD.items()
        for case in cases
    ],
)
def test_a_rule_names_what_breaks_it(rule: Rule, case: str, tmp_path: Path) -> None:
    files, expected = BAD[rule][case]
    violations = rule(plant(tmp_path, files))
    for words in expected:
        assert any(words in violation for violation in violations), (words, violations)
    for violation in violations:
        assert any(words in violation for words in expected), violation


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_leaves_a_clean_tree_alone(rule: Rule, tmp_path: Path) -> None:
    assert rule(plant(tmp_path, GOOD[rule])) == []


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_sees_no_files_is_an_error(rule: Rule, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing to check"):
        rule(tmp_path / "qgate")


def test_every_rule_is_shown_to_fail() -> None:
    assert set(BAD) == set(GOOD) == set(house.RULES)
    rules = {name for name in vars(house) if name.endswith("_violations")}
    separate_rules = {"export_violations", "name_violations", "text_violations"}
    assert rules == {rule.__name__ for rule in house.RULES} | separate_rules


# What `import qgate` offers -----------------------------------------------------------------------


def offering(**names: Any) -> types.ModuleType:
    """A module with these names."""
    module = types.ModuleType("planted")
    vars(module).update(names)
    return module


def test_the_package_offers_what_it_lists() -> None:
    assert house.export_violations(qgate) == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"__all__": ["b", "a"], "a": 1, "b": 2}, "not sorted; sorted: ['a', 'b']"),
        ({"__all__": ["a", "B"], "a": 1, "B": 2}, "not sorted; sorted: ['B', 'a']"),
        ({"__all__": ["a", "a"], "a": 1}, "lists 'a' twice"),
        ({"__all__": ["a", "gone"], "a": 1}, "lists 'gone', which is not there"),
        ({"__all__": ["a"], "a": 1, "Path": Path}, "planted.Path is visible but not in __all__"),
        ({"__all__": [], "Any": object()}, "planted.Any is visible"),
        (
            {"__all__": [f"n{i:02}" for i in range(26)], **{f"n{i:02}": i for i in range(26)}},
            "has 26 names, 25 at most",
        ),
    ],
    ids=["order", "plain order", "twice", "missing", "not listed", "not typing's", "too many"],
)
def test_an_offer_that_differs_from_its_list_is_named(names: Files, expected: str) -> None:
    violations = house.export_violations(offering(**names))
    assert len(violations) == 1
    assert expected in violations[0]


def test_modules_annotations_and_private_names_need_no_listing() -> None:
    names = {f"n{i:02}": i for i in range(25)}
    helpers = {"json": json, "Any": Any, "annotations": None, "_private": 1}
    assert house.export_violations(offering(__all__=sorted(names), **names, **helpers)) == []


# What an import loads -----------------------------------------------------------------------------


def loaded(statement: str, *watched: str) -> set[str]:
    """Which of the watched packages a fresh interpreter has loaded after a statement."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1])) & set(watched)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import qgate", HEAVY),
        ("import qgate.formats", ("torch", "pandas", "matplotlib", "pytest", "jinja2", "msgspec")),
        ("import qgate.cli", ("torch", "pandas", "matplotlib", "pytest", "jinja2", "msgspec")),
        ("import qgate.plugin", ("torch", "pandas", "matplotlib", "jinja2", "msgspec")),
        (
            "import qgate.activation_stats.compute, qgate.sweeps.compute, qgate.page.comparisons",
            ("pandas", "matplotlib", "jinja2"),
        ),
    ],
    ids=["qgate", "formats", "cli", "plugin", "results"],
)
def test_an_import_stays_light(statement: str, absent: tuple[str, ...]) -> None:
    assert loaded(statement, *absent) == set()


def test_a_heavy_import_is_seen() -> None:
    assert loaded("import qgate, matplotlib, pytest", *HEAVY) == {"matplotlib", "pytest"}


def test_a_statement_that_fails_is_no_light_import() -> None:
    with pytest.raises(AssertionError, match="no_such_package"):
        loaded("import no_such_package", *HEAVY)


# The repository's texts ---------------------------------------------------------------------------

# Put together here, so that this file keeps the rule it tests.
FOREIGN = {
    "absolute path": [
        "/".join(["", *parts])
        for parts in (["home", "me"], ["root", "x.py"], ["work", "main"], ["tmp", "out"])
    ]
    + ["file:" + "/".join(["", "", "", "Users", "me"])],
    "registry": [
        "https://" + ".".join(host)
        for host in (
            ["pypi", "org"],
            ["files", "pythonhosted", "org"],
            ["download", "pytorch", "org"],
            ["test", "pypi", "org"],
        )
    ],
}
FINE = """
> /dev/null and https://example.org/home/page, ./work/x, ~/tmp/x, $ROOT/home/x, a/tmp/b
and/or /path/to/x, #!/usr/bin/env bash, torch.download, pypi, pytorch.org
"""


def test_the_repository_names_no_machine() -> None:
    violations = house.text_violations(ROOT)
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("what", "text"), [(what, text) for what, texts in FOREIGN.items() for text in texts]
)
def test_a_text_that_names_a_machine_is_named(what: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "tour.md").write_text(f"Fine.\nsee `{text}`, or ({text})\n")
    violations = house.text_violations(tmp_path)
    assert len(violations) == 2
    assert all(violation.startswith(f"docs/tour.md:2: {what} ") for violation in violations)


def test_other_paths_and_hosts_are_fine(tmp_path: Path) -> None:
    (tmp_path / "tour.md").write_text(FINE)
    path = FOREIGN["absolute path"][0].encode()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\xff " + path)
    (tmp_path / "table.bin").write_bytes(b"\0 " + path)
    assert house.text_violations(tmp_path) == []


def test_generated_folders_are_not_read_without_git(tmp_path: Path) -> None:
    for folder in (".venv", "__pycache__", "x.egg-info", "build", ".ci"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(FOREIGN["absolute path"][0])
    assert [text.split(":")[0] for text in house.text_violations(tmp_path)] == [".ci/a.txt"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_in_a_checkout_only_tracked_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tracked.txt", "untracked.txt", "removed.txt"):
        (tmp_path / name).write_text(FOREIGN["absolute path"][0])
    git = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    for arguments in (["init", "-q"], ["add", "tracked.txt", "removed.txt"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, env=git, check=True)
    (tmp_path / "removed.txt").unlink()
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a.txt").write_text(FOREIGN["absolute path"][0])
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))  # as a commit hook of another repository
    assert [text.split(":")[0] for text in house.text_violations(tmp_path)] == ["tracked.txt"]
    inside = house.text_violations(tmp_path / "inside")  # a copy in somebody's checkout
    assert [text.split(":")[0] for text in inside] == ["a.txt"]


def test_the_longest_files_are_there() -> None:
    missing = [name for name in LONGEST_FIRST if not (ROOT / "tests" / name).is_file()]
    assert not missing


def test_one_worker_runs_all_that_uses_ray() -> None:
    using = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != "test_house.py"
        and any(name in path.read_text(encoding="utf-8") for name in ("no_ray", "ray_cluster"))
    }
    assert using
    assert [
        file
        for file in using
        if not any(file.startswith(n.partition("::")[0]) for n in TOGETHER["ray"])
    ] == []


def test_files_stand_where_they_belong() -> None:
    violations = house.name_violations(ROOT)
    assert not violations, "\n".join(violations)


def test_a_file_with_an_odd_name_or_place_is_named(tmp_path: Path) -> None:
    for name in ("qgate.stats <- qgate.gate…", "scratch.py", "README.md"):
        (tmp_path / name).write_text("x")
    assert house.name_violations(tmp_path) == [
        "'qgate.stats <- qgate.gate…' has a name that not every tool and system can take",
        "scratch.py does not belong at the top level",
    ]


def test_a_repository_without_texts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing to check"):
        house.text_violations(tmp_path)
