"""Build the site: README, pages, API, gallery and comparisons, without network.

    pip install -c constraints.txt -e '.[docs]'
    python docs/site/build.py SITE [--no-gallery]

Every warning is an error. Afterwards each link and anchor of the pages is followed, and nothing may
be loaded from elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
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

from qgate.cli import parser
from qgate.project.options import OPTIONS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The contents by what a reader needs, in the order in which people need the pages.
CONTENTS = {
    "Tutorials": (
        "tutorials/first-gate", "tutorials/first-kernel-check", "tutorials/first-dump",
        "tutorials/first-checkpoint", "notebook",
    ),
    "How to": (
        "failures", "adopting", "ci", "baselines", "reports", "kernels", "kernel-repositories",
        "checkpoints",
        "collecting", "drawing", "activations", "sweep", "capture", "engines", "relations",
        "audit", "recipes", "engine-kernels", "gpu", "scale",
    ),
    "Coming from": (
        "migrate/assert-close", "migrate/pytest-regressions", "migrate/msprobe",
        "migrate/megatron-tensor-saver", "migrate/quant-smooth-ana", "seeds",
    ),
    "Reference": (
        "commands", "gates", "held", "measured", "other-gates", "models", "modes", "formats",
        "dumps", "files", "support", "threats", "agents/SKILL", "agents/json",
    ),
    "Explanation": (
        "limits", "numbers", "which-format", "cost", "museum", "real-kernels", "faults",
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
    wrong = list(broken(args.site))
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
    (source / "options.md").write_text("\n".join(options()), encoding="utf-8")
    (source / "changelog.md").write_text(
        relinked((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), ""), encoding="utf-8"
    )
    (source / "comparison.md").write_text(comparison(), encoding="utf-8")
    (source / "api.md").write_text("\n".join(api()), encoding="utf-8")
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


def options() -> Iterator[str]:
    """Yield the help of each command, and the options that pytest gets."""
    yield "# Options of every command\n"
    yield "`qgate COMMAND --help` and `pytest --help` print the same.\n"
    suites = argparse.ArgumentParser("pytest suites", add_help=False)
    for name, option in OPTIONS.items():
        suites.add_argument(f"--{name}", f"--qgate-{name}", **option.argparse)
    pending = [suites, parser()]
    while pending:
        command = pending.pop(0)
        yield f"## {command.prog}\n\n```text\n{command.format_help().rstrip()}\n```\n"
        for action in command._actions:
            if isinstance(action, argparse._SubParsersAction):
                pending[:0] = action.choices.values()


def api() -> Iterator[str]:
    """Yield the public names of each package, from its `__all__`."""
    yield "# API\n\nWhat `import` gives; the text is that of `help()`.\n"
    for name in API:
        module = importlib.import_module(name)
        for member in module.__all__:
            value = getattr(module, member)
            if member.startswith("__") or isinstance(value, type(importlib)):
                continue
            if isinstance(value, type):
                yield f".. autoclass:: {name}.{member}\n   :members:\n   :no-index:\n"
            elif callable(value) and hasattr(value, "__qualname__"):
                yield f".. autofunction:: {name}.{member}\n   :no-index:\n"
            else:
                yield f".. autodata:: {name}.{member}\n   :no-value:\n   :no-index:\n"
        yield "```"


# Links -------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """A page: its anchors, its links, and the files that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
        if tag == "link" and "href" in attributes:
            self.loaded.append(attributes["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in attributes:
            self.loaded.append(attributes["src"])


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


if __name__ == "__main__":
    sys.exit(main())
