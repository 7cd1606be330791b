"""Whether what is in a folder is old or new, whole, by bytes alone."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

Tree = dict[str, bytes]
Judge = Callable[[Tree, Tree, Tree], str]
_TIMES = re.compile(
    rb"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([.]\d+)?(Z|[+-]\d\d:\d\d| UTC)?"
    rb'|"(seconds|pid|mtime_ns)": ?[0-9.e+-]+|"(run|session)": ?"[^"]*"|"host": ?"[^"]*"'
    rb'|"seconds": ?\{[^}]*\}|seconds of [^<]*(<[^>]*>)+[0-9.]+'
    rb'|"missing_count":\d+,"digest":"[^"]*"'  # of an index, which has times
)


def scrubbed(data: bytes) -> bytes:
    """Without what says when, how long and by which process: the rest is the same every time."""
    return _TIMES.sub(b"#", data)


def tree(folder: Path) -> Tree:
    """All files below a folder, hidden ones too."""
    return {
        path.relative_to(folder).as_posix(): scrubbed(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def shown(found: Tree) -> Tree:
    return {name: data for name, data in found.items() if not is_hidden(name)}


def torn(
    now: Tree, old: Tree, new: Tree, growing: Mapping[str, Callable[[bytes, bytes], str]]
) -> list[str]:
    """A sentence per file that is neither that of before nor that of after."""
    bad = []
    for name in sorted({*shown(now), *shown(old), *shown(new)}):
        contents = [files.get(name) for files in (old, new)]
        if now.get(name) in contents:
            continue
        checks = [check for pattern, check in growing.items() if fnmatch.fnmatch(name, pattern)]
        if name not in now:
            if not checks:
                bad.append(f"{name} is gone")
        elif checks:
            problem = checks[0](now[name], new.get(name, b""))
            bad += [f"{name}: {problem}"] if problem else []
        elif contents == [None, None]:
            bad.append(f"{name} belongs to nothing ({len(now[name])} bytes)")
        else:
            sizes = " and ".join(
                "none" if content is None else f"{len(content)}" for content in contents
            )
            bad.append(f"{name} is neither old nor new: {len(now[name])} bytes for {sizes}")
    return bad


def strays(now: Tree, expected: Tree) -> list[str]:
    """Files that a finished run leaves and an undisturbed one does not."""
    return sorted(now.keys() - expected.keys())


def differing(now: Tree, expected: Tree) -> list[str]:
    """What a run after a fault made otherwise than an undisturbed one."""
    names = sorted(name for name in expected if now.get(name) != expected[name])
    return [f"{name} is {'gone' if name not in now else 'another'}" for name in names]


# Files that belong together ---------------------------------------------------------------------


def updated_as_one(folder: str) -> Judge:
    """All old or all new, where a file `.update` that is whole has the new ones."""

    def judge(now: Tree, old: Tree, new: Tree) -> str:
        states = [shown(_below(tree, folder)) for tree in (old, new)]
        state = _promised(_below(now, folder), *states)
        return "" if state in states else f"{folder} is a mixture: {', '.join(sorted(state))}"

    return judge


def _below(found: Tree, folder: str) -> Tree:
    start = f"{folder}/"
    return {n.removeprefix(start): data for n, data in found.items() if n.startswith(start)}


def _promised(found: Tree, old: Tree, new: Tree) -> Tree:
    """Return the files that a reader sees: those of an update first, which names all it changes."""
    visible, update = shown(found), found.get(".update", b"")
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    if all(name.encode() in update and new.get(name, b"") in update for name in changed):
        visible = {name: data for name, data in visible.items() if name not in changed}
        visible |= {name: new[name] for name in changed if name in new}
    return visible


def dumped(now: Tree, _: Tree, __: Tree) -> str:
    """What an index of a dump names is there; shards are whole, or they have no name."""
    for name, data in now.items():
        folder, _, file = name.rpartition("/")
        if file != "index.jsonl" or is_hidden(name):
            continue
        for text in data.splitlines(keepends=True):
            if b'"tensor":{' not in text or not text.endswith(b"\n"):
                continue
            shard = f"{folder}/{json.loads(text)['tensor']['file']}"
            if shard not in now:
                return f"{name} names {shard}, which is not there"
    return ""


def captured(now: Tree, old: Tree, new: Tree) -> str:
    """Statistics are there only beside the layers they are of."""
    for name in now:
        if not name.endswith("_stats.json") or is_hidden(name):
            continue
        start = name.removesuffix("stats.json")
        mode = {n: data for n, data in now.items() if n.startswith(start)}
        kinds = [{n: d for n, d in files.items() if n.startswith(start)} for files in (old, new)]
        if mode not in kinds:
            return f"{name} is beside layers of another run"
    return ""


# Files that grow ----------------------------------------------------------------------------------


def lines_of_results(now: bytes, after: bytes) -> str:
    """A header, and records of the run, each whole; the last may be cut where it was written."""
    lines = now.splitlines(keepends=True)
    if not lines or not lines[0].endswith(b"\n"):
        return "it has no header"
    whole = [text for text in lines[1:] if text.endswith(b"\n")]
    if len(lines) - 1 - len(whole) > 1:
        return "more than its last line is torn"
    accepted_gists = {_gist(text) for text in after.splitlines(keepends=True)[1:]}
    foreign = [text for text in whole if _gist(text) not in accepted_gists]
    return f"{len(foreign)} records are none of the run" if foreign else ""


def _gist(text: bytes) -> str:
    row = json.loads(re.sub(rb"(?<=[,{ ])#", b'"#":0', text))
    return json.dumps([row.get(name) for name in ("site", "scope", "metric", "mode", "rows")])


def dump_index(now: bytes, after: bytes) -> str:
    """Whole lines but for the last, and every record as the whole run has it."""
    lines = now.splitlines(keepends=True)
    whole = [text for text in lines if text.endswith(b"\n")]
    if len(lines) - len(whole) > 1:
        return "more than its last line is torn"
    accepted_lines = set(after.splitlines(keepends=True))
    foreign = [text for text in whole if text not in accepted_lines and b'"event"' not in text]
    return f"{len(foreign)} records are none of the run" if foreign else ""


def may_be_missing(_: bytes, __: bytes) -> str:
    """Not there while it is made; never half."""
    return "it is neither old nor new"


def any_json(now: bytes, _: bytes) -> str:
    """A list of what may be there, wider while it is written."""
    return "" if json.loads(now) and now.endswith(b"\n") else "it is torn"


def any_page(now: bytes, _: bytes) -> str:
    """A page of what could be done, to its end."""
    return "" if now.rstrip().endswith(b"</html>") else "it is torn"


def whole_file(now: bytes, _: bytes) -> str:
    """A page or lines, to the end."""
    return "" if now.endswith((b"\n", b"</html>")) else "it is torn"
