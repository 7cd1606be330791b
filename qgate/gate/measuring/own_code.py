"""Places of code of one's own: what a person opens who reads that a site is wrong."""

from __future__ import annotations

import inspect
import sysconfig
from pathlib import Path

from torch import nn

_QGATE = Path(__file__).parents[2]
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib"))


def own_code(root: nn.Module, site: str, *, is_before: bool) -> str:
    """Return `FILE:LINE NAME` of the code at a site, nothing where a library has it.

    With `is_before` it is the code that makes the input of the site's module: the forward of the
    first module around it that is one's own.
    """
    name, _, port = site.rpartition(":")
    modules = dict(root.named_modules())
    if not (is_before and port == "input"):
        return _forward_of(modules[name]) if name in modules else ""
    while name:
        name = name.rpartition(".")[0]
        if code := _forward_of(modules[name]) if name in modules else "":
            return code
    return ""


def _forward_of(module: nn.Module) -> str:
    forward = inspect.unwrap(module.forward)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    if code is None:
        return ""
    file, project = Path(code.co_filename), Path.cwd()
    if not (file.is_file() and file.is_relative_to(project)):
        return ""
    if any(file.is_relative_to(folder) for folder in (_QGATE, *_LIBRARIES)):
        return ""
    name = code.co_qualname.rpartition("<locals>.")[2]
    return f"{file.relative_to(project).as_posix()}:{code.co_firstlineno} {name}"
