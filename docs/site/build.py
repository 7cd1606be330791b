"""Build the site: README, pages, API, gallery and comparisons, without network.

    pip install -c constraints.txt -e '.[docs]'
    python docs/site/build.py SITE [--no-gallery]

Every warning is an error. Afterwards each link and anchor of the pages is followed, and nothing may
be loaded from elsewhere. A page without text, a directive or role that stayed text, and a public
name or a word of the glossary that the search does not know are errors, too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from qgate.cli import GROUPS, parser
from qgate.project.options import OPTIONS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONCEPTS = ROOT / "docs" / "concepts.md"
# The contents by what a reader needs, in the order in which people need the pages.
CONTENTS = {
    "Tutorials": (
        "concepts", "tutorials/first-gate", "tutorials/first-kernel-check", "tutorials/first-dump",
        "tutorials/first-checkpoint", "notebook",
    ),
    "How to": (
        "start", "failures", "adopting", "ci", "baselines", "reports", "kernels",
        "kernel-repositories", "checkpoints", "collecting", "drawing", "activations", "sweep",
        "capture", "engines", "relations", "audit", "recipes", "engine-kernels", "gpu", "scale",
        "agents/SKILL", "agents/json",
    ),
    "Coming from": (
        "migrate/assert-close", "migrate/pytest-regressions", "migrate/msprobe",
        "migrate/megatron-tensor-saver", "migrate/quant-smooth-ana", "seeds",
    ),
    "Reference": (
        "commands", "gates", "held", "measured", "other-gates", "models", "modes", "formats",
        "dumps", "files", "support", "threats",
    ),
    "Explanation": (
        "limits", "numbers", "which-format", "cost", "museum", "real-kernels", "finds", "faults",
    ),
}  # fmt: skip
GENERATED = {
    "Reference": ("options", "api", "changelog"),
    "Explanation": ("comparison", "gallery"),
}
API = (
    "qgate", "qgate.formats", "qgate.stats", "qgate.analysis", "qgate.models", "qgate.modes",
    "qgate.capture", "qgate.dumps", "qgate.checkpoints", "qgate.gate", "qgate.baselines",
    "qgate.results", "qgate.engine",
)  # fmt: skip
# Where a page of the site takes the place of a file.
MOVED = {
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "comparison.md",
    "CHANGELOG.md": "changelog.md",
}
TREE = """
```{{toctree}}
:hidden:
:caption: {caption}
{pages}
```
"""
COMPARISON = """# Comparison

Figures beside those of other libraries and of plain code, measured in turn in one process. To
repeat them, in a checkout:

```text
python -m pip install -c constraints.txt -e '.[all,test]'
```

| figures | command |
|---|---|
{rows}
"""


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("site", type=Path, help="the folder to write")
    reader.add_argument("--no-gallery", action="store_true", help="leave out what has to be run")
    args = reader.parse_args()
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "source"
        stage(source, gallery=not args.no_gallery)
        shutil.rmtree(args.site, ignore_errors=True)
        words = ["-q", "-W", "--keep-going", "-b", "html", "-d", f"{work}/doctrees"]
        build = subprocess.run(
            [sys.executable, "-m", "sphinx", *words, str(source), str(args.site)], check=False
        )
        if build.returncode:
            return build.returncode
    wrong = [*broken(args.site), *unfinished(args.site), *unfindable(args.site)]
    print("\n".join(wrong) or f"{len(list(args.site.rglob('*.html')))} pages in {args.site}")
    return int(bool(wrong))


# Sources -----------------------------------------------------------------------------------------


def stage(source: Path, *, gallery: bool) -> None:
    """Write all pages into one folder, with links that work there."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("site", "pictures"))
    for name in ("conf.py",):
        shutil.copyfile(HERE / name, source / name)
    for name in ("_static", "_extra"):
        (source / name).mkdir()
    shutil.copyfile(HERE / "qgate.css", source / "_static" / "qgate.css")
    for name in pages(source):
        page = source / f"{name}.md"
        folder = Path("docs", name).parent.as_posix()
        page.write_text(relinked(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
    missing = pages(source) ^ {name for names in CONTENTS.values() for name in names}
    if missing:
        raise SystemExit(f"docs/ and the contents of the site differ in {sorted(missing)}")
    readme = relinked((ROOT / "README.md").read_text(encoding="utf-8"), "")
    readme = readme.replace('"docs/pictures/', '"pictures/')
    shutil.copytree(ROOT / "docs" / "pictures", source / "_extra" / "pictures")
    trees = []
    for caption, names in CONTENTS.items():
        added = [name for name in GENERATED.get(caption, ()) if gallery or name != "gallery"]
        trees.append(TREE.format(caption=caption, pages="\n".join([*names, *added])))
    (source / "index.md").write_text(readme + "".join(trees), encoding="utf-8")
    (source / "changelog.md").write_text(
        relinked((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), ""), encoding="utf-8"
    )
    (source / "comparison.md").write_text(comparison(), encoding="utf-8")
    concepts = source / "concepts.md"
    concepts.write_text(with_glossary(concepts.read_text(encoding="utf-8")), encoding="utf-8")
    for folder, made in (("options", options()), ("api", api())):
        (source / folder).mkdir()
        names = [name for name in made if name != folder]
        tree = TREE.format(caption=folder, pages="\n".join(f"{folder}/{name}" for name in names))
        (source / f"{folder}.md").write_text(made.pop(folder) + tree, encoding="utf-8")
        for name, text in made.items():
            (source / folder / f"{name}.md").write_text(text, encoding="utf-8")
    if gallery:
        subprocess.run([sys.executable, str(HERE / "gallery.py"), str(source)], check=True)


def pages(docs: Path) -> set[str]:
    """List the pages of a folder by their path without the ending."""
    return {page.relative_to(docs).with_suffix("").as_posix() for page in docs.rglob("*.md")}


def relinked(text: str, folder: str) -> str:
    """Turn links between files of the repository into links between pages of the site.

    `folder` is that of the file in the repository. A file on no page keeps its name as text.
    """
    here = folder.removeprefix("docs").strip("/") or "."

    def moved(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        if not path or "://" in path:
            return link[0]
        target = os.path.normpath(Path(folder, path))
        if target not in MOVED and not target.startswith("docs/") and (ROOT / target).exists():
            return link[1]
        target = os.path.relpath(MOVED.get(target, target.removeprefix("docs/")), here)
        return f"[{link[1]}]({target}{mark}{anchor})"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", moved, text)


def comparison() -> str:
    """Return the figures of the benchmarks, with the command of each."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    _, _, body = text.partition("\n")
    sections = re.findall(r"^## ([^:\n]+): (.*)$", body, re.MULTILINE)
    rows = "\n".join(f"| [{name}](#{slug(name)}) | {command} |" for name, command in sections)
    return COMPARISON.format(rows=rows) + re.sub(
        r"^## ([^:\n]+): (.*)$", r"## \1\n\n\2", body, flags=re.MULTILINE
    )


def slug(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def options() -> dict[str, str]:
    """Return a page for each group of commands, and one that lists them."""
    suites = argparse.ArgumentParser("pytest suites", add_help=False)
    for name, option in OPTIONS.items():
        suites.add_argument(f"--{name}", f"--qgate-{name}", **option.argparse)
    commands = verbs(parser())
    grouped = {name for names in GROUPS.values() for name in names}
    groups = {**GROUPS, "others": tuple(name for name in commands if name not in grouped)}
    pages = {"suites": f"# pytest suites\n\n{help_of(suites)}"}
    rows = ["| [pytest suites](options/suites.md) | the gates |"]
    for group, names in groups.items():
        listed = [commands[name] for name in names if name in commands]
        if listed:
            pages[group] = f"# Commands: {group}\n\n" + "\n".join(map(help_with_verbs, listed))
            shown = ", ".join(f"`{command.prog}`" for command in listed)
            rows.append(f"| [{group}](options/{group}.md) | {shown} |")
    table = "\n".join(["| options | of |", "|---|---|", *rows])
    pages["options"] = (
        "# Options of every command\n\n`qgate COMMAND --help` and `pytest --help` print the same.\n"
        f"\n{table}\n"
    )
    return pages


def verbs(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the commands of a command."""
    return {
        name: verb
        for action in command._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, verb in action.choices.items()
    }


def help_with_verbs(command: argparse.ArgumentParser) -> str:
    return "\n".join(
        [f"## {command.prog}\n\n{help_of(command)}", *map(help_with_verbs, verbs(command).values())]
    )


def help_of(command: argparse.ArgumentParser) -> str:
    return f"```text\n{command.format_help().rstrip()}\n```\n"


def api() -> dict[str, str]:
    """Return a page for each package, from its `__all__`, and one that lists them.

    What several packages export is described where it comes first.
    """
    pages, described, rows = {}, dict[int, str](), []
    for name in API:
        lines = [f"# {name}\n", about(name), "```{eval-rst}"]
        for member, value in members(name):
            full = f"{name}.{member}"
            if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
                first = described.setdefault(id(value), full)
                kind = "class" if isinstance(value, type) else "function"
                fields = "   :members:\n" if kind == "class" else ""
                entry = f".. auto{kind}:: {full}\n{fields}"
                if first != full:
                    entry = f".. py:data:: {full}\n\n   The same as :py:obj:`{first}`.\n"
                lines.append(entry)
            else:
                lines.append(f".. autodata:: {full}\n   :no-value:\n")
        pages[name] = "\n".join([*lines, "```\n"])
        rows.append(f"| [{name}](api/{name}.md) | {about(name)} |")
    table = "\n".join(["| package | has |", "|---|---|", *rows])
    pages["api"] = f"# API\n\nWhat `import` gives; the text is that of `help()`.\n\n{table}\n"
    return pages


def about(name: str) -> str:
    """Return the first line of a package's docstring."""
    return (importlib.import_module(name).__doc__ or "").strip().partition("\n")[0]


def members(name: str) -> Iterator[tuple[str, object]]:
    """Yield what a package exports, without modules."""
    module = importlib.import_module(name)
    for member in module.__all__:
        value = getattr(module, member)
        if not (member.startswith("__") or isinstance(value, type(importlib))):
            yield member, value


def glossary(text: str) -> list[tuple[list[str], str]]:
    """Return the words of each row of a glossary's table, and what they mean."""
    rows = re.findall(r"^\| (\*\*.+?) \| (.+) \|$", text, re.MULTILINE)
    return [(re.findall(r"\*\*(.+?)\*\*", words), meaning) for words, meaning in rows]


def with_glossary(text: str) -> str:
    """Turn the table of words into terms, which the search lists by themselves."""
    head, mark, rest = text.partition("| word | means |\n")
    table, _, after = rest.partition("\n\n")
    terms = [
        "\n".join([*words, f"  {meaning}"]) for words, meaning in glossary(table.rstrip() + "\n")
    ]
    if not (mark and terms):
        raise SystemExit("docs/concepts.md has no table of words")
    return head + "\n\n".join(["```{glossary}", *terms]) + f"\n```\n\n{after}"


# Links -------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """A page: its anchors, its links, the files that it loads, and the text of its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.marked: list[str] = []
        self._text: list[str] = []
        self._open = 0
        self.feed(text)

    @property
    def text(self) -> str:
        return " ".join("".join(self._text).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "link" and "href" in attributes:
            self.loaded.append(attributes["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in attributes:
            self.loaded.append(attributes["src"])
        if {"problematic", "system-message"} & set(attributes.get("class", "").split()):
            self.marked.append(attributes["class"])
        self._open += tag == "article"

    def handle_endtag(self, tag: str) -> None:
        self._open -= tag == "article"

    def handle_data(self, data: str) -> None:
        if self._open:
            self._text.append(data)


def broken(site: Path) -> Iterator[str]:
    """Yield a line for each link that leads nowhere, and for each file loaded from elsewhere."""
    pages = {
        path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme and link in page.links):
                continue
            if parts.scheme or parts.netloc:
                yield f"{name}: loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{name}: {link} leads nowhere"
            elif (
                parts.fragment
                and not parts.fragment.startswith("show&")  # what a page filters by
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{name}: {link} has no such anchor"
    for sheet in site.rglob("*.css"):
        for link in re.findall(
            r"(?:@import|url\()\s*[\"']?(https?://[^\"')\s]+)", sheet.read_text(encoding="utf-8")
        ):
            yield f"{sheet.relative_to(site)}: loads {link}"


# What a page has to have --------------------------------------------------------------------------

RAW = re.compile(
    r"\.\. [\w:-]+::|[`:]{3,}\{[\w:-]+\}|\{(?:ref|doc|term|py:\w+|eval-rst)\}|:py:\w+:"
)
BY_SPHINX = ("search.html", "genindex.html", "py-modindex.html")
FEW_WORDS = 12


def unfinished(site: Path) -> Iterator[str]:
    """Yield a line for each page without text, and for each directive or name left as text."""
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site)
        page = _Page(path.read_text(encoding="utf-8"))
        if raw := RAW.search(page.text):
            yield f"{name}: {raw[0]!r} stayed text"
        if page.marked:
            yield f"{name}: a name that nothing resolves ({page.marked[0]})"
        if path.name not in BY_SPHINX and len(page.text.split()) < FEW_WORDS:
            yield f"{name}: a page of {len(page.text.split())} words"


def unfindable(site: Path) -> Iterator[str]:
    """Yield a line for each public name and each word of the glossary that the search lacks."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    found = json.loads(index[index.index("{") : index.rindex("}") + 1])
    known = {
        f"{prefix}.{entry[4]}" for prefix, entries in found["objects"].items() for entry in entries
    }
    words_of_rows = [words for words, _ in glossary(CONCEPTS.read_text(encoding="utf-8"))]
    terms = [word for words in words_of_rows for word in words]
    names = [f"{name}.{member}" for name in API for member, _ in members(name)]
    for word in terms:
        if word.lower() not in found["indexentries"]:
            yield f"the search does not find {word!r}"
    for name in names:
        if name not in known:
            yield f"the search does not find {name!r}"


if __name__ == "__main__":
    sys.exit(main())
