"""All targets by name; and what opens or parses in the house without being one, with the reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.fuzzing import (
    checkpoint_targets,
    engine_targets,
    record_targets,
    tensor_targets,
    text_targets,
)
from tests.campaigns.fuzzing.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for part in (tensor_targets, checkpoint_targets, engine_targets, record_targets, text_targets)
    for target in part.TARGETS
}

# What reads, by the name it is called by.
READS = (
    "loads", "load", "safe_load", "read_text", "read_bytes", "open", "safe_open", "ZipFile", "read_array",
    "reader", "DictReader", "load_file", "from_pretrained", "load_from_disk", "load_dataset", "ParquetFile",
    "CompressedInputStream", "fromfile", "memmap", "exec_module", "decompress", "read_parquet", "read_csv",
    "get_single_node", "cat_file", "read_string", "raw_decode", "pread",
    "open_foreign", "open_foreign_text", "read_foreign", "read_foreign_text", "foreign_path", "check_foreign_files",
)  # fmt: skip
_OURS = "what this very run, or this package, wrote"
_ENTRY = "bytes of a file; who asked for them parses them"
_CODE = "code that the user named"
NOT_READERS: dict[str, str] = {
    "qgate.cli._receipts:settled_status": _OURS,
    "qgate.cli._vectors:run": _OURS,
    "qgate.kernel_checks.by_name:_digest": "bytes to make a digest of, not parsed",
    "qgate.kernel_checks.by_name:asks_for_tests": _CODE,
    "qgate.kernel_checks.kernel_process:load_function": _CODE,
    "qgate.kernel_checks.kernel_process:read": _OURS,
    "qgate.kernel_checks.kernel_process:serve": _OURS,
    "qgate.kernel_checks.starting:start_process": _OURS,
    "qgate.project.gate_kinds:_is_offered": "looked for a name in, and not parsed",
    "qgate.kernel_checks.isolation:_run": "what a process of this check sent to it",
    "qgate.drawing.files:draw_analysis": "pictures that it has just drawn, to copy them",
    "qgate.cli._base_gates:_planned": _OURS,
    "qgate.cli.doctor:_plugins": "looked for a name in, and not parsed",
    "qgate.sweeps.page:_is_marked": "looked for a mark in, and not parsed",
    "qgate.engine._backends:_start_process": _OURS,
    "qgate.engine.sharing:value": _OURS,
    "qgate.results.rows:_write": "written, and not read",
    "qgate.results.merging:_read_lines": "lines that it has read and checked, to copy them",
    "qgate.results.rows:read": _OURS,
    "qgate.sweeps.files:draw_pictures": _OURS,
    "qgate.drawing.files:_draw_elsewhere": _OURS,
    "qgate.storage.access:local_files": _OURS,
    "qgate.storage.files:_holder": "a text that is only shown, cut and printable",
    "qgate.models.tiny:load": _OURS,
    "qgate.cli.report:_write": "opens what it writes",
    "qgate.plugin.dealing:_written": _OURS,
    "qgate.plugin.gate_collection:_has_gates": "looks for a word in a test file of the project",
    "qgate.plugin.shipped:shipped_markers": _OURS,
    "qgate.cli.report:_report": "calls reports.load, which reads through targets",
    "qgate.models.loading:_from_file": _CODE,
    "qgate.cli._ci_files:_starter": _OURS,
    "qgate.cli.init:starter": _OURS,
    "qgate.cli.init:_write": "bytes to put back where writing fails; not parsed",
    "qgate.cli._ci_files:ci_note": "looked for a name in, and not parsed",
    "qgate.baselines.candidates:_is_zip": "asks whether a file is an archive",
    "qgate.storage.foreign:foreign_path": _ENTRY,
    "qgate.storage.foreign:foreign_size": _ENTRY,
    "qgate.storage.foreign:open_foreign": _ENTRY,
    "qgate.storage.foreign:open_foreign_text": _ENTRY,
    "qgate.storage.foreign:read_foreign": _ENTRY,
    "qgate.storage.foreign:read_foreign_text": _ENTRY,
    "qgate.storage.folders:read": _ENTRY,
    "qgate.storage.folders:_opened": "bytes of a file; who asked for them parses them",
    "qgate.plugin.sessions:of": "makes the session of a kind of gate, and opens no file",
    "qgate.checkpoints.stored:read": "calls the reader of the file, which is a target",
    "qgate.storage.folders:open": "bytes of a folder; the index and shards parse them",
    "qgate.storage.object_folders:put": _OURS,
    "qgate.models.huggingface_checks:read_settings": "a name, a flag and two numbers, which are checked",
    "qgate.models.samples.hub:from_hub": "the datasets library, by the name of a data set",
}
# Rooms that read nothing of others: kernels are compiled from this package.
_ROOMS = ("kernels",)


def scopes(package: Path) -> Iterator[tuple[str, ast.Call]]:
    """`module:function` of every call in a package, functions inside of others by the outer one."""
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        if module.split(".")[1] in _ROOMS:
            continue
        yield from _calls(
            ast.parse(path.read_text(encoding="utf-8")), module.removesuffix(".__init__"), ""
        )


def _calls(node: ast.AST, module: str, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        scope = child.name if isinstance(child, ast.FunctionDef) and not function else function
        if isinstance(child, ast.Call):
            yield f"{module}:{scope or '<module>'}", child
        yield from _calls(child, module, scope)


def reads(call: ast.Call) -> bool:
    """Whether a call opens a file to read it, or parses what is in one."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in READS:
        return False
    if isinstance(function, ast.Name) and name in ("reader", "read_text", "read_bytes", "load"):
        return False  # a function of the house, which is seen where it reads
    texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    if name == "open":
        of = (
            function.value.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
            else ""
        )
        writes = any(isinstance(text, str) and text[:1] in "wxa" for text in texts)
        return (
            not writes
            and of not in ("os", "Dump", "self", "cls")
            and "_recorder" not in ast.dump(call)
        )
    # `self.setup.load()` and the like load what a user named, through readers that are targets.
    return name != "load" or bool(call.args)


def readers(package: Path) -> set[str]:
    """Every function that opens a file to read it, or parses what is in one."""
    return {where for where, call in scopes(package) if reads(call)}
