"""What of a source file differs, what its code can reach, and where that cannot be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from qgate.code_changes.reach import ProjectCode
from qgate.code_changes.sources import SourceFile
from qgate.errors import QgateError

FILE = '''"""Kernels."""
import torch
LEVELS = 127

def scale(x, levels=LEVELS):
    return x / levels

class Layer(torch.nn.Module):
    width = 4

    @torch.no_grad()
    def forward(self, x):
        return scale(x) + 1

@torch.compile
def compiled(x):
    return x + 2
'''
DIFFERENCES = {
    # another text, and the units whose bodies differ; None where what runs at import does
    "a comment": ("return x / levels", "return x / levels  # as it was", set()),
    "a body": ("x / levels", "x * levels", {"scale"}),
    "a method": ("scale(x) + 1", "scale(x)", {"Layer"}),
    "a default": ("levels=LEVELS", "levels=126", None),
    "a number of the module": ("LEVELS = 127", "LEVELS = 126", None),
    "a variable of a class": ("width = 4", "width = 5", None),
    "a base": ("torch.nn.Module", "torch.nn.Identity", None),
    "a decorator of a method": ("@torch.no_grad()", "@torch.enable_grad()", None),
    "a decorated function": ("x + 2", "x + 3", None),
    "a new function": ("LEVELS = 127", "LEVELS = 127\ndef more(): pass", None),
    "another name": ("class Layer", "class Other", None),
    "a second definition": ("@torch.compile", "def scale(x): return x\n@torch.compile", None),
}


@pytest.mark.parametrize(("old", "new", "units"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_bodies_are_told_from_what_runs_at_import(
    old: str, new: str, units: set[str] | None
) -> None:
    assert old in FILE
    before, now = (SourceFile.parse(text, "a.py") for text in (FILE, FILE.replace(old, new, 1)))
    if units is None:
        assert before.import_code != now.import_code
        return
    assert before.import_code == now.import_code
    changed = {name for name, unit in now.units.items() if unit.code != before.units[name].code}
    assert changed == units


UNTRACEABLE = {
    "eval": "eval('f()')",
    "exec": "exec('f()')",
    "a computed name": "getattr(module, name)()",
    "a computed attribute": "operator.attrgetter(name)(module)",
    "a module by name": "import importlib",
    "modules of Python": "sys.modules['a'].f()",
    "globals": "globals()['f']()",
    "a table of a module": "module.__dict__['f']()",
    "pickled code": "import pickle",
    "code of a checkpoint": "torch.load(path, weights_only=False)",
    "a process": "subprocess.run(['python', 'a.py'])",
    "classes of a base": "Base.__subclasses__()[0]()",
    "a registering base": "class A:\n    def __init_subclass__(cls): TABLE.append(cls)",
    "a metaclass": "class A(metaclass=Registry): pass",
    "attributes of a module": "def __getattr__(name): return f",
    "a Kernel of its own": "def Kernel(function): return function()",
}
TRACEABLE = (
    "model.eval()", "model.modules()", "getattr(module, 'weight')", "re.compile('a')",
    "setattr(module, name, f)", "module.named_modules()", "torch.load(path)", "from x import eval_all",
)  # fmt: skip


@pytest.mark.parametrize("line", UNTRACEABLE.values(), ids=UNTRACEABLE)
def test_code_that_runs_what_it_does_not_name_is_noticed(line: str) -> None:
    assert SourceFile.parse(f"x = 1\n{line}\n", "a.py").untraceable()


@pytest.mark.parametrize("line", TRACEABLE)
def test_other_code_is_traced(line: str) -> None:
    assert not SourceFile.parse(f"{line}\n", "a.py").untraceable()


PROJECT = {
    "build.py": """import qgate
import tools as t
from kernels import fast as quick
def build():
    table = {"named": "by_text"}
    return qgate.Model(inner(), modes={"a": quick, "b": qgate.modes.Kernel(slow, stands_for="int8")})
def inner():
    def nested(): return t.deep()
    return nested()
def unused(): return only_there()
""",
    "kernels.py": "from pkg.sub import far\ndef fast(x): return shared(x)\ndef slow(x): return far(x)\n"
    "def shared(x): return x\ndef by_text(): return 1\ndef only_there(): return 2\n",
    "tools.py": "def deep():\n    from lazily import late\n    return late()\n",
    "lazily.py": "def late(): return 3\nclass AtImport:\n    def __call__(self): return helper()\n"
    "def helper(): return 1\nVALUE = AtImport()()\n",
    "pkg/__init__.py": "",
    "pkg/sub.py": "from . import leaf\nclass Far:\n    def run(self, x): return leaf.last(x)\n"
    "def far(x): return Far().run(x)\n",
    "pkg/leaf.py": "def last(x): return x\n",
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_names_are_followed_through_files_aliases_and_late_imports(project: Path) -> None:
    code = ProjectCode([project / "build.py"], [project])
    assert {path.relative_to(project).as_posix() for path in code.files} == {*PROJECT}
    always = code.reached(["build"])
    assert {"inner", "deep", "late", "AtImport", "helper", "by_text"} <= always
    assert not {"fast", "slow", "shared", "far", "last", "unused", "only_there"} & always
    assert {*code.modes} == {"a", "b"}
    first, second = (code.reached(["build", *code.modes[name]]) for name in "ab")
    assert {"fast", "shared"} <= first
    assert {"slow", "far", "Far", "last"} <= second
    assert not {"slow", "far"} & first
    assert not {"fast", "shared"} & second


@pytest.mark.parametrize(
    "modes",
    ["modes=MODES", "modes={name: fast}", 'modes={"a": made(fast)}', 'modes={**{"a": fast}}'],
)
def test_modes_without_names_are_of_all_gates(project: Path, modes: str) -> None:
    """Also those made by a function of the project, which may run any of them."""
    text = f"import qgate\nfrom kernels import fast\nMODES = {{'a': fast}}\ndef build(): return qgate.Model({modes})\n"
    (project / "build.py").write_text(text)
    assert "fast" in ProjectCode([project / "build.py"], [project]).reached(["build"])


def test_another_model_than_that_of_qgate_has_no_modes(project: Path) -> None:
    (project / "build.py").write_text(
        "class Model: pass\ndef build(): return Model(modes={'a': fast})\n"
    )
    assert "fast" in ProjectCode([project / "build.py"], [project]).reached(["build"])


def test_code_that_cannot_be_traced_is_an_error_that_names_it(project: Path) -> None:
    (project / "tools.py").write_text("def deep(): return eval('late()')\n")
    with pytest.raises(
        QgateError, match=r"tools\.py may run code that it does not name: eval in line 1"
    ):
        ProjectCode([project / "build.py"], [project])
    (project / "tools.py").write_text("def deep(:\n")
    with pytest.raises(QgateError, match=r"tools\.py cannot be parsed"):
        ProjectCode([project / "build.py"], [project])
