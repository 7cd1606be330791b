"""Run Python code or a module where only some distributions can be imported, with what they bring.

python alone.py torch,numpy -c CODE
python alone.py torch,numpy -m pytest ARGUMENTS
"""

import importlib.metadata
import re
import runpy
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

SITE = sysconfig.get_path("purelib")


def brought(names: list[str]) -> set[str]:
    """Return the importable names of distributions and of all that they need."""
    visited: set[str] = set()
    modules: set[str] = set()
    while names:
        name = names.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        modules |= {
            Path(str(file)).parts[0].removesuffix(".py") for file in distribution.files or ()
        }
        needs = (need for need in distribution.requires or () if "extra ==" not in need)
        names += [re.match(r"[\w.-]+", need)[0].lower() for need in needs]  # type: ignore[index]
    return modules


class Alone:
    """Finds modules as Python does, but for those of other distributions."""

    find_distributions = staticmethod(PathFinder.find_distributions)
    invalidate_caches = staticmethod(PathFinder.invalidate_caches)

    def __init__(self, names: list[str]) -> None:
        self._modules = brought(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)  # type: ignore[arg-type]
        is_installed = spec is not None and str(spec.origin).startswith(SITE)
        return None if is_installed and name.partition(".")[0] not in self._modules else spec


if __name__ == "__main__":
    _, _names, _kind, _what, *_arguments = sys.argv
    sys.meta_path[sys.meta_path.index(PathFinder)] = Alone(_names.split(","))  # type: ignore[call-overload]
    sys.argv = [_what, *_arguments]
    if _kind == "-c":
        exec(_what, {"__name__": "__main__"})
    else:
        runpy.run_module(_what, run_name="__main__", alter_sys=True)
