"""The house rules, checked on source text alone.

Each rule takes the folder of a package and returns one sentence per violation, so an empty list is
a clean house. Nothing is imported: a rule must also hold for code that cannot run on this machine.
A folder without Python files is an error, because a rule that looked at nothing must not pass.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import math
import os
import re
import subprocess
import types
import typing
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path

FLOORS = {
    room: floor
    for floor, rooms in {
        10: "plugin cli audit",
        9: "page analysis testing",
        8: "gate",
        7: "drawing engines",
        6: "comparing collecting sweeps activation_stats kernel_checks checkpoints audits relations",
        5: "summaries modes causes",
        4: "capture scales dumps expected project",
        3: "arithmetics formats stats models results baselines engine",
        2.5: "charts",
        2: "hooks storage devices kernels metrics",
        1.5: "settings",
        1: "probe arithmetic registry hashing records text documents tensor_inputs device_errors",
        0.5: "exports",
        0.25: "loading",
        0: "errors interruptions _version",
    }.items()
    for room in rooms.split()
}
BRINGING = ("kind", "gate", "gate_sites", "run_gates")
"""Files of any room above the gate that bring a kind of gate: they stand on a floor above the gate's,
and nothing of their room imports them."""
BRINGING_FLOOR = 8.5
TORCH_FREE = ("gate", "results", "charts", "page", "records", "text")
"""Rooms that work without torch."""
MEASURING = ("gate.measuring", "gate.modules", "gate.segments", "gate.serving")
"""Folders of such rooms that measure, and so use torch; the files beside them do not."""
_WITHIN_MEASURING = tuple(f"{folder}." for folder in MEASURING)
SHOWING = ("findings", "page", "plots", "record", "tables", "texts")
"""Files of any room that work without torch: what shows a record reads nothing else."""
NO_ENVIRONMENT = (
    "formats", "stats", "hooks", "models", "modes", "capture", "scales", "summaries", "sweeps",
    "arithmetics",
)  # fmt: skip
ENTRY_POINTS = ("__main__", "models.train")
LOADED_ON_DEMAND = ("transformers", "datasets")
PRINTING = {
    "qgate/text/printing.py": 3, "qgate/cli/_capture.py": 1, "qgate/cli/collect.py": 1,
    "qgate/cli/report.py": 1, "qgate/models/train.py": 5,
}  # fmt: skip
"""Files that call print(), and how often: texts that are escaped before, and exits of programs."""
PICKLERS = ("pickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve")
POSIX_ONLY = (
    "crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty",
)  # fmt: skip
# Where handles are opened for bytes.
HANDLES = ("qgate/storage/locks.py",)
REMOVERS = (
    "shutil.rmtree", "os.remove", "os.unlink", "os.rmdir", "os.removedirs", "shutil.move",
    "tempfile.TemporaryDirectory",
)  # fmt: skip
ENTRY = "qgate/storage/foreign.py"
"""The one file that opens files of others."""
ENTERING = (
    "open_foreign",
    "open_foreign_text",
    "read_foreign",
    "foreign_path",
    "check_foreign_files",
)
LIBRARY_READERS = (
    "numpy.load", "numpy.memmap", "numpy.fromfile", "torch.load", "zipfile.ZipFile",
    "zipfile.is_zipfile", "tarfile.open", "gzip.open", "bz2.open", "lzma.open", "mmap.mmap",
    "sqlite3.connect", "safetensors.safe_open", "safetensors.torch.load_file",
)  # fmt: skip
LIBRARY_METHODS = ("ParquetFile", "read_schema", "from_pretrained", "load_from_disk")
OWN_FILES = {
    "qgate/cli/_base_gates.py": 1, "qgate/cli/_ci_files.py": 1, "qgate/cli/_receipts.py": 1,
    "qgate/cli/init.py": 2, "qgate/cli/report.py": 1, "qgate/drawing/files.py": 2,
    "qgate/engine/_backends.py": 1,
    "qgate/kernel_checks/by_name.py": 2, "qgate/kernel_checks/kernel_process.py": 1,
    "qgate/kernel_checks/starting.py": 1, "qgate/kernels/compiling.py": 1,
    "qgate/models/huggingface.py": 1, "qgate/models/tiny.py": 1, "qgate/plugin/dealing.py": 1,
    "qgate/plugin/gate_collection.py": 1, "qgate/plugin/shipped.py": 1,
    "qgate/project/gate_kinds.py": 1, "qgate/results/rows.py": 2, "qgate/storage/access.py": 1,
    "qgate/storage/files.py": 1, "qgate/sweeps/files.py": 1,
}  # fmt: skip
"""Files that open what this run or this package wrote, or code that the user named, and how often."""
IN_PLACE = {
    "qgate/cli/report.py": 1, "qgate/comparing/layer_files.py": 2, "qgate/engine/_backends.py": 1,
    "qgate/plugin/dealing.py": 1, "qgate/plugin/gate_listing.py": 1, "qgate/plugin/reports.py": 1,
    "qgate/plugin/summary.py": 1, "qgate/probe.py": 1,
}  # fmt: skip
"""Files that write to a part, a scratch folder or a file of CI by its name, and how often."""
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb")
PLACE_KINDS = {
    "pathlib.Path",
    "upath.UPath",
    "qgate.storage.folders.LocalFolder",
    "qgate.storage.object_folders.ObjectFolder",
}
# Files outside the shells that import parts of qgate inside functions, and how often: what draws is
# loaded when there is something to draw, and Ray when it is asked for. The numbers only fall.
HIDDEN_IMPORTS = {
    "qgate/activation_stats/files.py": 1,
    "qgate/drawing/files.py": 1,
    "qgate/engine/_backends.py": 1,
}
NUMERIC = (
    "formats", "stats", "modes", "models", "scales", "arithmetics", "expected", "kernel_checks",
    "relations", "causes", "capture", "hooks", "kernels", "gate.measuring", "gate.modules",
    "gate.segments", "gate.serving",
)  # fmt: skip
"""Rooms whose tensors are on any device: torch divides by a number otherwise than by a tensor."""
DIVISIONS = {
    "qgate/expected/structure.py: SPREAD / FIGURE": "two bounds, numbers of Python",
    "qgate/stats/direct_values.py: q / 100": "a percentile, a number of Python",
    "qgate/stats/summary.py: q / 100": "a percentile, a number of Python",
    "qgate/stats/_error_pass.py: Fraction(str(q)) * total / 100": "a fraction of Python",
    "qgate/modes/calibration.py: reach / 127": "the largest magnitude, a number of Python",
    "qgate/expected/mixtures.py: right / 3": "a distance, a number of Python",
    "qgate/models/training.py: done / _WARM_UP": "steps of a training, numbers of Python",
}
"""Divisions by numbers in them that divide no tensor, with the reason."""
OF_LIMITS = ("gate", "results", "page")
"""Rooms in which `kind` is that of a limit or of a row."""
FILE_KINDS = {"qgate/results/files.py": 1}
"""Files of these rooms that read which kind of file another one is, and how often."""
LONGEST = 800
ALONE = {"probe": 805}
"""Files that are copied without the package, and so are whole: how long they may be."""
MOST_EXPORTS = 25
# How much of the package a newcomer cannot read. The numbers only fall.
EMPTY_NAMES_PERCENT = 0.3
INVERTED_DOCSTRINGS_PERCENT = 0.0
MOST_UNTYPED_TABLES = 28
EMPTY_NAMES = frozenset(
    re.findall(
        r"\w+",
        "found each told made said there known kept rest place shown given seen wanted held drawn "
        "taken asked left here whose how what once again apart both others look looked stuff thing "
        "things data2 tmp obj val res ret",
    )
)
INVERSIONS = (
    "What ", "Whether ", "Of ", "That ", "Those ", "Who ", "Whoever ", "Where ", "How ",
)  # fmt: skip


When = typing.Literal["import", "call", "typing"]


# Reading a package -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One imported name; `from a import b` reads `a.b`, whether b is a module or not."""

    name: str
    line: int
    when: When


@dataclass(frozen=True)
class Module:
    """One source file, with what it imports and the names those imports are bound to."""

    name: str
    path: Path
    shown: str
    text: str
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """List all nodes of the tree: a walk takes ten times as long as what a rule asks of them."""
        return [*ast.walk(self.tree)]

    @property
    def is_package(self) -> bool:
        return self.path.stem == "__init__"

    @property
    def room(self) -> str:
        """The first component under the package, the empty text for the package's own file."""
        return _room(self.name)

    @property
    def torch_free(self) -> str:
        """The room or the name because of which a file works without torch, or the empty text."""
        inside = f"{self.name.partition('.')[2]}."
        if self.room in TORCH_FREE and not inside.startswith(
            tuple(f"{name}." for name in MEASURING)
        ):
            return self.room
        return next((part for part in self.name.split(".")[2:] if part in SHOWING), "")

    @functools.cached_property
    def imports(self) -> list[Import]:
        reader = _ImportReader(self)
        reader.visit(self.tree)
        return reader.found

    def absolute(self, name: str, level: int) -> str:
        """The full name of a relative import."""
        if not level:
            return name
        parts = self.name.split(".")
        parts = parts if self.is_package else parts[:-1]
        return ".".join([*parts[: len(parts) - level + 1], *filter(None, [name])])

    def at(self, line: int) -> str:
        return f"{self.shown}:{line}"

    def parts_under(self, folder: Path) -> tuple[str, ...]:
        return self.path.relative_to(folder).with_suffix("").parts


class _ImportReader(ast.NodeVisitor):
    """Collects imports and notes when they run; `import_module("name")` is an import too."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.found: list[Import] = []
        self.when: When = "import"

    def _add(self, name: str, line: int) -> None:
        self.found.append(Import(name, line, self.when))

    def _visit_all(self, nodes: list[ast.stmt], when: When) -> None:
        before, self.when = self.when, when
        for node in nodes:
            self.visit(node)
        self.when = before

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.module.absolute(node.module or "", node.level)
        for alias in node.names:
            self._add(f"{base}.{alias.name}", node.lineno)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_all(node.body, "call")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_all(node.body, "call")

    def visit_If(self, node: ast.If) -> None:
        negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if (_dotted(test) or "").rpartition(".")[2] != "TYPE_CHECKING":
            self.generic_visit(node)
            return
        self._visit_all(node.body, self.when if negated else "typing")
        self._visit_all(node.orelse, "typing" if negated else self.when)

    def visit_Call(self, node: ast.Call) -> None:
        called = (_dotted(node.func) or "").rpartition(".")[2]
        if called in ("import_module", "__import__") and node.args:
            name = _literal_start(node.args[0])
            level = len(name) - len(name.lstrip("."))
            self._add(self.module.absolute(name.lstrip("."), level), node.lineno)
        self.generic_visit(node)


def _literal_start(node: ast.expr) -> str:
    """The module named by a literal, or the package that a name is put together under."""
    if isinstance(node, ast.JoinedStr) and node.values:
        return _literal_start(node.values[0]).rpartition(".")[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def modules(package_dir: Path) -> list[Module]:
    """Every source file of a package, read and parsed."""
    parsed = []
    for path in sorted(package_dir.rglob("*.py")):
        inside = path.relative_to(package_dir.parent)
        parts = inside.with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        stat = path.stat()
        parsed.append(_parsed(name, path, inside.as_posix(), stat.st_mtime_ns, stat.st_size))
    if not parsed:
        raise FileNotFoundError(f"no Python files under {package_dir}: there is nothing to check.")
    return parsed


@functools.lru_cache(maxsize=4096)
def _parsed(name: str, path: Path, shown: str, _written: int, _size: int) -> Module:
    """Once for all rules, and again when it was written anew."""
    text = path.read_text(encoding="utf-8")
    return Module(name, path, shown, text, ast.parse(text, filename=shown))


def _room(name: str) -> str:
    first = name.split(".")[1:2]
    return "cli" if name.partition(".")[2] in ENTRY_POINTS else "".join(first)


def _dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an expression that is only names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        value = _dotted(node.value)
        return None if value is None else f"{value}.{node.attr}"
    return None


def _aliases(module: Module) -> dict[str, str]:
    """What the names bound by a file's imports stand for, wherever they are bound."""
    full_names: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                full_names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom):
            base = module.absolute(node.module or "", node.level)
            for alias in node.names:
                full_names[alias.asname or alias.name] = f"{base}.{alias.name}"
    return full_names


def _meant(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The full name an expression stands for: `np.load` reads `numpy.load`."""
    dotted = _dotted(node)
    if dotted is None:
        return None
    first, dot, attributes = dotted.partition(".")
    return aliases.get(first, first) + dot + attributes


def _bound(module: Module, nodes: list[ast.stmt]) -> Iterator[tuple[str, str | None, int]]:
    """Names a file binds at module level: name, what it is imported from, line."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, None, node.lineno
            case ast.ImportFrom():
                base = module.absolute(node.module or "", node.level)
                for alias in node.names:
                    yield alias.asname or alias.name, f"{base}.{alias.name}", node.lineno
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                            yield name.id, None, node.lineno
            case ast.If() | ast.For() | ast.While():
                yield from _bound(module, [*node.body, *node.orelse])
            case ast.With():
                yield from _bound(module, node.body)
            case ast.Try():
                handled = [child for handler in node.handlers for child in handler.body]
                last_statements = [*node.orelse, *node.finalbody]
                yield from _bound(module, [*node.body, *handled, *last_statements])


def _import_graph(found: list[Module]) -> dict[str, list[str]]:
    """Which files run because a file is imported.

    Importing `a.b.c` also runs the packages above it, except those that are running already because
    the importing file lives in them.
    """
    names = {module.name for module in found}
    graph: dict[str, list[str]] = {}
    for module in found:
        reached: dict[str, None] = {}
        for imported in module.imports:
            parts = imported.name.split(".") if imported.when == "import" else []
            ways = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
            own_modules = [way for way in ways if way in names]
            reached.update(dict.fromkeys(own_modules[:1]))
            inside = [way for way in own_modules[1:] if not f"{module.name}.".startswith(f"{way}.")]
            reached.update(dict.fromkeys(inside))
        graph[module.name] = list(reached)
    return graph


def _file_of(name: str, files: Container[str]) -> str:
    """The file that an imported name is in, the empty text if it is none of the package's."""
    while name and name not in files:
        name = name.rpartition(".")[0]
    return name


def _shortest(graph: dict[str, list[str]], start: str, goals: set[str]) -> list[str] | None:
    """The shortest way along at least one import from a file to one of the goals."""
    waiting = deque([[start]])
    visited: set[str] = set()
    while waiting:
        way = waiting.popleft()
        for following in graph[way[-1]]:
            if following in goals:
                return [*way, following]
            if following not in visited:
                visited.add(following)
                waiting.append([*way, following])
    return None


# The rules about a package ---------------------------------------------------------------------


def floor_violations(package_dir: Path) -> list[str]:
    """Imports point down, wherever they stand; rooms of one floor do not know each other."""
    package_modules = modules(package_dir)
    package = package_dir.name
    bad = [
        f"{package}/{room}: the room {room!r} has no floor: add it to FLOORS in tests/house.py "
        f"and to the floors in DESIGN."
        for room in sorted({module.room for module in package_modules} - {""} - set(FLOORS))
    ]
    for module in package_modules:
        if module.room not in FLOORS:
            continue
        floor = _floor(module.name)
        for imported in module.imports:
            room = _room(imported.name)
            if imported.name.split(".")[0] != package:
                continue
            if room == module.room and (room not in FLOORS or _floor(imported.name) <= floor):
                continue
            where = f"{module.at(imported.line)}: {module.room} (floor {floor}) imports"
            if room not in FLOORS:
                bad.append(
                    f"{where} {imported.name}, which is no room: import a name from the module that "
                    f"defines it, not from {package}."
                )
            elif _floor(imported.name) == floor:
                bad.append(f"{where} its sibling {room}: rooms of one floor do not meet.")
            elif _floor(imported.name) > floor:
                at = _floor(imported.name)
                bad.append(f"{where} {room} (floor {at}): imports point down only.")
    return _once(bad)


def _floor(name: str) -> float:
    """Return the floor of a module or a name in it; files that bring a kind of gate have their own."""
    file = [*name.split("."), "", ""][2]
    room = _room(name)
    brings = file in BRINGING and FLOORS[room] < BRINGING_FLOOR and room != "gate"
    return BRINGING_FLOOR if brings else FLOORS[room]


def cycle_violations(package_dir: Path) -> list[str]:
    """No file needs itself, wherever imports stand: in functions and under TYPE_CHECKING too."""
    package_modules = modules(package_dir)
    graph = _import_graph(package_modules)
    for module in package_modules:
        later = (imported.name for imported in module.imports if imported.when != "import")
        targets = (_file_of(name, graph) for name in later)
        graph[module.name] += [target for target in targets if target not in ("", module.name)]
    cycles: dict[frozenset[str], list[str]] = {}
    for name in sorted(graph):
        way = _shortest(graph, name, {name})
        if way:
            cycles.setdefault(frozenset(way), way)
    return [f"import cycle: {' -> '.join(way)}" for way in cycles.values()]


def torch_free_violations(package_dir: Path) -> list[str]:
    """Heavy and foreign packages are known only where they belong."""
    package_modules = modules(package_dir)
    bad = []
    users: dict[str, set[str]] = defaultdict(set)
    for module in package_modules:
        for imported in module.imports:
            problem = _misplaced(module, imported)
            if problem:
                bad.append(f"{module.at(imported.line)}: imports {imported.name}: {problem}.")
            users[imported.name.split(".")[0]].add(module.shown)
    for top in LOADED_ON_DEMAND:
        if len(users[top]) > 1:
            bad.append(f"{top} is loaded in {', '.join(sorted(users[top]))}: one file loads it.")
    return _once([*bad, *_torch_reached(package_modules)])


def _misplaced(module: Module, imported: Import) -> str:
    """Why a file may not import something, the empty text where it may."""
    top = imported.name.split(".")[0]
    if _is_torch(imported.name) and module.torch_free:
        return f"{module.torch_free} works without torch"
    if top.strip("_").split("_")[0] == "pytest" and module.room not in ("plugin", "audit"):
        return "only plugin and audit know pytest"
    if top == "matplotlib" and module.room != "charts" and "plots" not in module.name.split("."):
        return "only charts and the plots of features draw"
    if top == "argparse" and module.room not in ("cli", "plugin", "settings"):
        return "only cli, plugin and settings read a command line"
    if top in LOADED_ON_DEMAND and imported.when != "call":
        return "import it inside the function that needs it"
    return ""


def _is_torch(name: str) -> bool:
    """Torch itself or a bridge to it, such as `safetensors.torch`."""
    return "torch" in name.split(".")[:2]


def _torch_reached(found: list[Module]) -> list[str]:
    """Torch-free rooms that load torch because a file they import does."""
    graph = _import_graph(found)
    loads_torch = {
        module.name
        for module in found
        if any(
            imported.when == "import" and _is_torch(imported.name) for imported in module.imports
        )
    }
    ways = {
        module: _shortest(graph, module.name, loads_torch) for module in found if module.torch_free
    }
    return [
        f"{module.shown}: {module.torch_free} works without torch, but loads it through "
        f"{' -> '.join(way[1:])}."
        for module, way in ways.items()
        if way
    ]


def name_clash_violations(package_dir: Path) -> list[str]:
    """A name a package offers does not hide a file of that package; no drawer files."""
    package_modules = modules(package_dir)
    bad = []
    for module in package_modules:
        bad += [
            f"{module.shown}: name it after what is in it, not {part!r}."
            for part in module.parts_under(package_dir)
            if part.strip("_") in ("utils", "helpers")
        ]
        inside = {
            other.name.removeprefix(f"{module.name}.").split(".")[0]
            for other in package_modules
            if other.name.startswith(f"{module.name}.")
        }
        bad += [
            f"{module.at(line)}: {name!r} is a name here and a file of {module.name}: one hides "
            f"the other, rename one."
            for name, origin, line in _offered(module)
            if name in inside and origin != f"{module.name}.{name}"
        ]
    return _once(bad)


def _offered(module: Module) -> Iterator[tuple[str, str | None, int]]:
    """Names bound in a file, with the keys of its tables: names that it may look up lazily."""
    yield from _bound(module, module.tree.body)
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            for key in node.value.keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, None, key.lineno


def numerics_env_violations(package_dir: Path) -> list[str]:
    """No environment variable changes a number: two runs of one plan are the same run."""
    bad = []
    for module in modules(package_dir):
        aliases = _aliases(module)
        bad += [
            f"{module.at(node.lineno)}: reads {_meant(node, aliases)}: {module.room} takes what "
            f"it needs as arguments."
            for node in module.nodes
            if module.room in NO_ENVIRONMENT
            and isinstance(node, ast.Attribute | ast.Name)
            and _meant(node, aliases) in ENVIRONMENT
        ]
    return _once(bad)


def pickle_violations(package_dir: Path) -> list[str]:
    """No file the package reads can run code."""
    bad = []
    for module in modules(package_dir):
        bad += [
            f"{module.at(imported.line)}: imports {imported.name}: it runs what it loads."
            for imported in module.imports
            if imported.name.split(".")[0] in PICKLERS
        ]
        aliases = _aliases(module)
        for node in module.nodes:
            if isinstance(node, ast.Call) and (problem := _unsafe_load(node, aliases)):
                bad.append(f"{module.at(node.lineno)}: {problem}.")
    return _once(bad)


def portability_violations(package_dir: Path) -> list[str]:
    """The package runs on Windows: no module of POSIX alone, and files with the same bytes there."""
    bad = []
    for module in modules(package_dir):
        bad += [
            f"{module.at(imported.line)}: imports {imported.name}, which Windows lacks: see storage/locks.py."
            for imported in module.imports
            if imported.name.split(".")[0] in POSIX_ONLY
        ]
        aliases = _aliases(module)
        for node in module.nodes:
            if not isinstance(node, ast.Call):
                continue
            if _meant(node.func, aliases) == "os.open" and module.shown not in HANDLES:
                bad.append(
                    f"{module.at(node.lineno)}: os.open writes text on Windows: open_handle."
                )
            if _writes_text(node) and not any(
                keyword.arg == "newline" for keyword in node.keywords
            ):
                bad.append(
                    f"{module.at(node.lineno)}: text without newline= has others on Windows."
                )
    return _once(bad)


def _writes_text(call: ast.Call) -> bool:
    """Return True for `x.write_text(…)` and for `x.open("w")`, not for functions of these names."""
    if not isinstance(call.func, ast.Attribute):
        return False
    mode = call.args[0] if call.args else None
    starts = isinstance(mode, ast.Constant) and str(mode.value) in ("w", "x", "w+")
    return call.func.attr == "write_text" or (call.func.attr == "open" and starts)


def _unsafe_load(call: ast.Call, aliases: dict[str, str]) -> str:
    """How a call can run what is in a file, the empty text where it cannot."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    meant = _meant(call.func, aliases)
    if meant in ("torch.load", "torch.serialization.load"):
        safe = _is_constant(keywords.get("weights_only"), True)
        return "" if safe else "torch.load without weights_only=True"
    if meant == "numpy.load":
        allowed = keywords.get("allow_pickle", call.args[2] if len(call.args) > 2 else None)
        safe = allowed is None or _is_constant(allowed, False)
        return "" if safe else "np.load with allow_pickle"
    return "pandas.read_pickle runs what it loads" if meant == "pandas.read_pickle" else ""


def _is_constant(node: ast.expr | None, value: bool | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_name_violations(package_dir: Path) -> list[str]:
    """Nothing a user imports into a test file is collected as a test."""
    bad = []
    for module in modules(package_dir):
        bad += [
            f"{module.shown}: pytest would collect a file named {part!r}."
            for part in module.parts_under(package_dir)
            if part.startswith("test_")
        ]
        bad += [
            f"{module.at(line)}: pytest would collect {name!r} where it is imported."
            for name, _, line in _bound(module, module.tree.body)
            if name.startswith(("test_", "Test"))
        ]
    return _once(bad)


def place_violations(package_dir: Path) -> list[str]:
    """Whether a place is a path or a URL is asked in storage, and the others need not know."""
    bad = []
    for module in modules(package_dir):
        if module.room == "storage":
            continue
        bad += [
            f"{module.at(line)}: {question}: call a function of storage that works for both."
            for line, question in sorted(_place_questions(module))
        ]
    return bad


def _place_questions(module: Module) -> Iterator[tuple[int, str]]:
    aliases = _aliases(module)
    has_folders = any(
        imported.name.startswith(("qgate.storage.folders.", "qgate.storage.access."))
        for imported in module.imports
    )
    for import_ in module.imports:
        if import_.when != "typing" and import_.name.split(".")[0] in ("fsspec", "upath"):
            yield import_.line, f"imports {import_.name}"
        if import_.name == "qgate.storage.locations.is_url":
            yield import_.line, "imports is_url"
    for node in module.nodes:
        if isinstance(node, ast.Call) and _dotted(node.func) == "isinstance":
            kinds = {_meant(kind, aliases) for kind in ast.walk(node.args[1]) if _is_name(kind)}
            if kinds & PLACE_KINDS:
                yield node.lineno, "asks whether a place is a path"
        if isinstance(node, ast.Attribute) and node.attr == "path" and has_folders:
            of_call = isinstance(node.value, ast.Call) and _dotted(node.value.func) == "folder_of"
            if of_call:
                yield node.lineno, "asks a folder for its path"
        if (
            has_folders
            and isinstance(node, ast.Compare)
            and isinstance(node.left, ast.Attribute)
            and node.left.attr == "path"
            and _is_constant(node.comparators[0], None)
        ):
            yield node.lineno, "asks whether a folder has a path"


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def hidden_import_violations(package_dir: Path) -> list[str]:
    """Outside the shells, parts of the package are imported at the top of a file."""
    bad = []
    for module in modules(package_dir):
        if module.room in ("cli", "plugin", ""):
            continue
        hidden = {
            (node.lineno, node.module)
            for function in module.nodes
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == package_dir.name
        }
        violations = [
            f"{module.at(line)}: imports {name} inside a function: import it at the top."
            for line, name in sorted(hidden)
        ]
        allowed_count = HIDDEN_IMPORTS.get(module.shown, 0)
        if len(violations) > allowed_count:
            bad += violations
        elif len(violations) < allowed_count:
            bad.append(
                f"{module.shown}: imports {len(violations)} parts of qgate inside functions, not "
                f"{allowed_count}: lower its number in HIDDEN_IMPORTS in tests/house.py."
            )
    return bad


def private_violations(package_dir: Path) -> list[str]:
    """No room reaches into the private files and names of another."""
    return _once(
        [
            f"{module.at(imported.line)}: imports {imported.name}: what begins with an underscore is for its "
            "own room; take the underscore away, or use what the room offers."
            for module in modules(package_dir)
            for imported in module.imports
            if imported.name.split(".")[0] == package_dir.name
            and _room(imported.name) not in (module.room, "_version")
            and any(part.startswith("_") for part in imported.name.split("."))
            and not imported.name.endswith("__")
        ]
    )


def class_name_violations(package_dir: Path) -> list[str]:
    """A public class has a name of its own in the whole package."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules(package_dir):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module.at(node.lineno))
    return [
        f"{', '.join(where)}: {name} stands for {len(where)} classes: give each a name of its own."
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def empty_name_violations(package_dir: Path) -> list[str]:
    """An assigned name says what it holds: a noun of the glossary."""
    names = [
        (module.at(node.lineno), node.id)
        for module in modules(package_dir)
        for node in module.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    bad = [(location, name) for location, name in names if name in EMPTY_NAMES]
    return _above(
        EMPTY_NAMES_PERCENT * len(names) / 100,
        [f"{position}: {name} says nothing: name what it holds." for position, name in bad],
    )


def docstring_violations(package_dir: Path) -> list[str]:
    """A docstring begins with a verb, that of a class with a noun."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts = [
        (module.at(getattr(node, "lineno", 1)), text)
        for module in modules(package_dir)
        for node in module.nodes
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]
    return _above(
        INVERTED_DOCSTRINGS_PERCENT * len(texts) / 100,
        [
            f"{location}: a docstring begins with {text.split()[0]!r}: say first what it does or is."
            for location, text in texts
            if text.startswith(INVERSIONS)
        ],
    )


def untyped_table_violations(package_dir: Path) -> list[str]:
    """A table with fixed fields is a struct or a `TypedDict`."""
    return _above(
        MOST_UNTYPED_TABLES,
        [
            f"{module.at(number)}: dict[str, Any]: give the fields names and types."
            for module in modules(package_dir)
            for number, line in enumerate(module.text.splitlines(), 1)
            for _ in range(line.count("dict[str, Any]"))
        ],
    )


def _above(limit: float, sentences: list[str]) -> list[str]:
    """Return the sentences where there are more of them than the package had."""
    return sentences if len(sentences) > limit else []


def length_violations(package_dir: Path) -> list[str]:
    """A file that nobody reads to its end misses a word in the glossary."""
    lengths = [(module.shown, len(module.text.splitlines())) for module in modules(package_dir)]
    return [
        f"{file}: {length} lines, {LONGEST} at most: which word is missing from the glossary?"
        for file, length in lengths
        if length > ALONE.get(Path(file).stem, LONGEST)
    ]


def print_violations(package_dir: Path) -> list[str]:
    """Texts reach the console through qgate.text.printing, and options fail by option_error.

    Both escape names of data, which a terminal or a log of CI would obey.
    """
    bad = []
    for module in modules(package_dir):
        prints = [
            node
            for node in module.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ]
        if len(prints) > PRINTING.get(module.shown, 0):
            bad.append(
                f"{module.shown}:{prints[-1].lineno}: print() shows names as they are: use "
                "print_line or print_text of qgate.text.printing"
            )
        bad += [
            f"{module.shown}:{node.lineno}: raise option_error, which escapes names"
            for node in module.nodes
            if isinstance(node, ast.Raise) and "UsageError" in ast.unparse(node.exc or node)
        ]
    return bad


def removal_violations(package_dir: Path) -> list[str]:
    """Only storage removes files and folders: by name, and never through a link."""
    bad = []
    for module in modules(package_dir):
        if module.shown.startswith("qgate/storage/"):
            continue
        aliases = _aliases(module)
        for node in module.nodes:
            if not isinstance(node, ast.Attribute | ast.Name):
                continue
            meant = _meant(node, aliases) or ""
            of_path = isinstance(node, ast.Attribute) and node.attr in ("unlink", "rmdir")
            if meant in REMOVERS or of_path:
                bad.append(
                    f"{module.at(node.lineno)}: {ast.unparse(node)} follows links on its way: use "
                    "qgate.storage.removing."
                )
    return _once(bad)


def foreign_violations(package_dir: Path) -> list[str]:
    """Files of others are opened by one function, which refuses what never ends.

    A library reads by a handle of it, or a path that it has checked in the same function.
    """
    bad = []
    for module in modules(package_dir):
        lines = sorted(_unchecked_opening(module))
        if module.shown != ENTRY and len(lines) > OWN_FILES.get(module.shown, 0):
            bad.append(
                f"{module.at(lines[-1])}: opens a file by itself: use open_foreign of "
                f"qgate.storage.foreign, or, for files of this run, OWN_FILES in tests/house.py."
            )
        elif len(lines) < OWN_FILES.get(module.shown, 0):
            bad.append(f"{module.shown}: opens {len(lines)} files: lower its number in OWN_FILES.")
    return bad


def _unchecked_opening(module: Module) -> Iterator[int]:
    """The lines on which a file is opened for reading, but not through the entry."""
    aliases = _aliases(module)
    functions = [node for node in module.nodes if isinstance(node, ast.FunctionDef)]
    entering = [node for node in functions if _enters(node)]
    handles = {
        (function, argument.arg)
        for function in functions
        for argument in function.args.args
        if argument.annotation and "IO[bytes]" in ast.unparse(argument.annotation)
    }
    calls = {id(node.func): node for node in module.nodes if isinstance(node, ast.Call)}
    for node in module.nodes:
        if isinstance(node, ast.Call) and _opens_to_read(node):
            yield node.lineno
        if not isinstance(node, ast.Attribute | ast.Name):
            continue
        is_method = isinstance(node, ast.Attribute) and node.attr in LIBRARY_METHODS
        if not (is_method or _meant(node, aliases) in LIBRARY_READERS):
            continue
        call = calls.get(id(node))
        texts = [_literal(argument) for argument in call.args] if call else []
        of_handle = call and any(
            _within(node, function)
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id == name
            for function, name in handles
        )
        if "w" not in texts and not of_handle and not any(_within(node, at) for at in entering):
            yield node.lineno


def _enters(function: ast.FunctionDef) -> bool:
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any((_dotted(called) or "").rpartition(".")[2] in ENTERING for called in calls)


def _within(node: ast.expr, function: ast.FunctionDef) -> bool:
    return function.lineno <= node.lineno <= (function.end_lineno or function.lineno)


def _literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _opens_to_read(call: ast.Call) -> bool:
    """Return True for `x.read_text(…)`, `x.read_bytes()`, `x.open("rb")`, `x.open(encoding=…)`."""
    if isinstance(call.func, ast.Name):
        mode = _literal(call.args[1]) if len(call.args) > 1 else "r"
        return call.func.id == "open" and not mode.startswith(("w", "x", "a"))
    if not isinstance(call.func, ast.Attribute):
        return False
    mode = _literal(call.args[0]) if call.args else "r" if call.keywords else ""
    is_open = call.func.attr == "open" and re.fullmatch(r"r\+?[bt]?\+?", mode) is not None
    return is_open or call.func.attr in ("read_text", "read_bytes")


def writing_violations(package_dir: Path) -> list[str]:
    """A file gets its name when it is complete: who writes has a neighbor from storage."""
    bad = []
    for module in modules(package_dir):
        lines = [] if module.shown.startswith("qgate/storage/") else sorted(_written(module))
        if len(lines) > IN_PLACE.get(module.shown, 0):
            bad.append(
                f"{module.at(lines[-1])}: writes to a file by its own name, which a kill would "
                "leave half: use replacing() of qgate.storage.files."
            )
        elif len(lines) < IN_PLACE.get(module.shown, 0):
            bad.append(f"{module.shown}: writes {len(lines)} files: lower its number in IN_PLACE.")
    return bad


def _written(module: Module) -> Iterator[int]:
    """The lines on which a file is written that no `with` has given a name."""
    neighbors = {
        node.optional_vars.id
        for node in module.nodes
        if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name)
    }
    for node in module.nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        mode = _literal(node.args[0]) if node.args else ""
        is_open = node.func.attr == "open" and re.fullmatch(r"[wxa][bt]?", mode) is not None
        if is_open or node.func.attr in ("write_text", "write_bytes"):
            target = node.func.value
            while isinstance(target, ast.BinOp):
                target = target.left
            if not (isinstance(target, ast.Name) and target.id in neighbors):
                yield node.lineno


def name_comparison_violations(package_dir: Path) -> list[str]:
    """No code asks by name which scope an error has, or of which kind a limit or a row is.

    `Scope` and `LimitKind` have what it wants to know as fields, so that a new one is one literal.
    """
    bad = []
    for module in modules(package_dir):
        if len(comparisons := _name_comparisons(module)) > FILE_KINDS.get(module.shown, 0):
            bad += [
                f"{module.at(node.lineno)}: {ast.unparse(node)} asks for a name: read a field of "
                "the scope or of the kind (qgate.results.kinds)."
                for node in comparisons
            ]
    return bad


def _name_comparisons(module: Module) -> list[ast.expr]:
    """Comparisons of a scope, or in the rooms of limits of a kind, with texts or constants."""
    inside = module.name.partition(".")[2]
    has_limits = module.room in OF_LIMITS and not f"{inside}.".startswith(_WITHIN_MEASURING)
    names = ("scope", "kind") if has_limits else ("scope",)
    matched = [node.subject for node in module.nodes if isinstance(node, ast.Match)]
    return [subject for subject in matched if _named(subject) in names] + [
        node
        for node in module.nodes
        if isinstance(node, ast.Compare)
        and any(_named(side) in names for side in (node.left, *node.comparators))
        and any(_is_text(side) for side in (node.left, *node.comparators))
    ]


def _named(node: ast.expr) -> str:
    """The name that a value is read by: `kind` of `kind`, `x.kind`, `x["kind"]`, `x.get("kind")`."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript(slice=ast.Constant(value=str() as name)):
            return name
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str() as name), *_]):
            return name
    return ""


def _is_text(node: ast.expr) -> bool:
    """Tell if an operand is a text, a constant by its name, or several of them."""
    match node:
        case ast.Constant():
            return isinstance(node.value, str)
        case ast.Tuple() | ast.List() | ast.Set():
            return any(_is_text(part) for part in node.elts)
        case ast.Starred():
            return _is_text(node.value)
    return (_dotted(node) or "a").rpartition(".")[2].isupper()


def hook_violations(package_dir: Path) -> list[str]:
    """Modules are tapped by `qgate.hooks` and files that are copied alone, which remove it again."""
    return [
        f"{module.at(node.lineno)}: {node.attr} taps a module: use qgate.hooks.ModuleHooks."
        for module in modules(package_dir)
        if module.room not in ("hooks", *ALONE)
        for node in module.nodes
        if isinstance(node, ast.Attribute) and _TAP.fullmatch(node.attr)
    ]


_TAP = re.compile(r"register_(forward|full_backward)_(pre_)?hook")


def division_violations(package_dir: Path) -> list[str]:
    """No tensor is divided by a number: CUDA multiplies by its reciprocal, one bit off.

    A power of two has an exact one. `qgate.arithmetic.divided` gives the same bits everywhere.
    """
    package_modules = modules(package_dir)
    constants = {
        f"{module.name}.{name.id}": node.value
        for module in package_modules
        for node in module.tree.body
        if isinstance(node, ast.Assign)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    bad = []
    for module in package_modules:
        inside = f"{module.name.partition('.')[2]}."
        if not inside.startswith(tuple(f"{room}." for room in NUMERIC)):
            continue
        aliases, unmet = (
            _aliases(module),
            {division for division in DIVISIONS if division.startswith(f"{module.shown}: ")},
        )
        for node in module.nodes:
            value, by = _division(node)
            if isinstance(by, ast.Name | ast.Attribute):
                name = _meant(by, aliases) or ""
                by = constants.get(name, constants.get(f"{module.name}.{name}"))
            if value is None or not _has_inexact_reciprocal(by) or _is_number(value):
                continue
            text = f"{module.shown}: {ast.unparse(node)}"
            if text in DIVISIONS:
                unmet.discard(text)
            else:
                bad.append(
                    f"{module.at(node.lineno)}: {ast.unparse(node)} divides by a number, which "  # type: ignore[attr-defined]
                    "CUDA does not: use qgate.arithmetic.divided, or name it in DIVISIONS."
                )
        bad += [
            f"{unmet_division}: is there no more: remove it from DIVISIONS."
            for unmet_division in sorted(unmet)
        ]
    return bad


def _division(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """Return what a node divides, and by what."""
    match node:
        case ast.BinOp(left, ast.Div(), right):
            return left, right
        case ast.AugAssign(target, ast.Div(), value):
            return target, value
        case ast.Call(ast.Attribute(ast.Name("torch"), "div" | "true_divide"), [value, by, *_]):
            return value, by
        case ast.Call(ast.Attribute(value, "div" | "div_" | "true_divide"), [by, *_]):
            return value, by
    return None, None


def _has_inexact_reciprocal(node: ast.expr | None) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return False
    return node.value != 0 and abs(math.frexp(node.value)[0]) != 0.5


def _is_number(node: ast.expr) -> bool:
    """Tell if an expression is a number of Python for certain."""
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    called = _dotted(node.func) or "" if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Constant) or (
        called in ("len", "float", "int") or called.startswith("math.")
    )


def _once(sentences: list[str]) -> list[str]:
    return list(dict.fromkeys(sentences))


RULES: tuple[Callable[[Path], list[str]], ...] = (
    floor_violations,
    cycle_violations,
    torch_free_violations,
    name_clash_violations,
    numerics_env_violations,
    pickle_violations,
    portability_violations,
    test_name_violations,
    place_violations,
    hidden_import_violations,
    private_violations,
    class_name_violations,
    empty_name_violations,
    docstring_violations,
    untyped_table_violations,
    length_violations,
    print_violations,
    removal_violations,
    foreign_violations,
    writing_violations,
    name_comparison_violations,
    hook_violations,
    division_violations,
)


# The rules about exported names and about the repository ---------------------------------------


def export_violations(module: types.ModuleType) -> list[str]:
    """`__all__` is the whole offer of a module: sorted, short, and every name is there."""
    names = list(module.__all__)
    bad = []
    if names != sorted(names):
        bad.append(f"{module.__name__}.__all__ is not sorted; sorted: {sorted(names)}")
    if len(names) > MOST_EXPORTS:
        bad.append(f"{module.__name__}.__all__ has {len(names)} names, {MOST_EXPORTS} at most.")
    bad += [
        f"{module.__name__}.__all__ lists {name!r} twice."
        for name in sorted(set(names))
        if names.count(name) > 1
    ]
    bad += [
        f"{module.__name__}.__all__ lists {name!r}, which is not there."
        for name in names
        if not hasattr(module, name)
    ]
    bad += [
        f"{module.__name__}.{name} is visible but not in __all__."
        for name, value in sorted(vars(module).items())
        if not name.startswith("_")
        and name not in names
        and not isinstance(value, types.ModuleType)
        and not _is_syntax(name, value)
    ]
    return bad


def _is_syntax(name: str, value: object) -> bool:
    """Whether a name is only there for annotations, as in `from typing import Any`."""
    if name == "annotations":
        return True
    return any(
        hasattr(home, name) and getattr(home, name) is value for home in (typing, collections.abc)
    )


TOP_LEVEL = {
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "action.yml",
    "baselines", "benchmarks", "conftest.py", "constraints.txt", "docs", "pyproject.toml",
    "qgate", "suites", "tests",
}  # fmt: skip
_PLAIN_NAME = re.compile(r"[\w./+=@,-]+", re.ASCII)

_MACHINE_PATH = re.compile(
    r"(?:file:/{2}|(?<![\w./~$}>-]))/(?:home|root|work|tmp|Users|mnt|scratch)/[\w.{$<*-][^\s'\"`)]*"
)
_REGISTRY = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi\.(?:org|python\.org|nvidia\.com)|pythonhosted\.org|"
    r"download\.pytorch\.org|anaconda\.(?:org|com)|npmjs\.(?:org|com)|crates\.io|"
    r"docker\.io|ghcr\.io)\b"
)


def text_violations(root: Path) -> list[str]:
    """No text in the repository names one machine's folders or a package registry."""
    bad = []
    read = 0
    for path in _tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if "\0" in text:
            continue
        read += 1
        relative_path = path.relative_to(root).as_posix()
        for kind, pattern in (("absolute path", _MACHINE_PATH), ("registry", _REGISTRY)):
            lines = text.splitlines() if pattern.search(text) else []
            for number, line in enumerate(lines, 1):
                bad += [
                    f"{relative_path}:{number}: {kind} {hit[0]}" for hit in pattern.finditer(line)
                ]
    if not read:
        raise FileNotFoundError(f"no text files under {root}: there is nothing to check.")
    return bad


def name_violations(root: Path) -> list[str]:
    """The top level holds what it is fixed to hold, and file names are plain everywhere."""
    bad = []
    for path in _tracked(root):
        name = path.relative_to(root)
        if not _PLAIN_NAME.fullmatch(name.as_posix()):
            bad.append(f"{name.as_posix()!r} has a name that not every tool and system can take")
        elif name.parts[0] not in TOP_LEVEL and not name.parts[0].startswith("."):
            bad.append(f"{name.parts[0]} does not belong at the top level")
    return bad


def _tracked(root: Path) -> list[Path]:
    """The files git tracks; where the root is no checkout, all that do not look generated."""
    names = _git(root, "ls-files", "-z")
    top = _git(root, "rev-parse", "--show-toplevel")
    if names is not None and top is not None and Path(top.strip()).resolve() == root.resolve():
        paths = [root / name for name in names.split("\0") if name]
    else:
        paths = [path for path in sorted(root.rglob("*")) if not _generated(path, root)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _generated(path: Path, root: Path) -> bool:
    return any(
        part in ("__pycache__", "build", "dist")
        or part.endswith(".egg-info")
        or (part.startswith(".") and part not in (".ci", ".github"))
        for part in path.relative_to(root).parts[:-1]
    )


def _git(root: Path, *arguments: str) -> str | None:
    """What git says about a folder, None where it says nothing; a hook's settings do not count."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            env=settings,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
