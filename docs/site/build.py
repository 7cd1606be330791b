"""Builds the site: README, pages, API, gallery and comparisons, without network.

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

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# In the order in which people need them.
GUIDES = (
    "adopting", "ci", "gates", "reports", "models", "modes", "formats", "sweep", "capture",
    "collecting", "dumps", "drawing", "activations", "scale", "files", "threats",
)  # fmt: skip
API = (
    "qgate", "qgate.formats", "qgate.stats", "qgate.analysis", "qgate.models", "qgate.modes",
    "qgate.capture", "qgate.dumps", "qgate.gate", "qgate.baselines", "qgate.results",
    "qgate.engine",
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
python -m pip install -c constraints.txt -e '.[test]'
```

| figures | command |
|---|---|
{rows}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path, help="the folder to write")
    parser.add_argument("--no-gallery", action="store_true", help="leave out what has to be run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        source = Path(made) / "source"
        stage(source, gallery=not args.no_gallery)
        shutil.rmtree(args.site, ignore_errors=True)
        words = ["-q", "-W", "--keep-going", "-b", "html", "-d", f"{made}/doctrees"]
        done = subprocess.run(
            [sys.executable, "-m", "sphinx", *words, str(source), str(args.site)], check=False
        )
        if done.returncode:
            return done.returncode
    wrong = list(broken(args.site))
    print("\n".join(wrong) or f"{len(list(args.site.rglob('*.html')))} pages in {args.site}")
    return int(bool(wrong))


# Sources -----------------------------------------------------------------------------------------


def stage(source: Path, *, gallery: bool) -> None:
    """All pages in one folder, with links that hold there."""
    shutil.copytree(ROOT / "docs", source, ignore=shutil.ignore_patterns("site"))
    for name in ("conf.py",):
        shutil.copyfile(HERE / name, source / name)
    for name in ("_static", "_extra"):
        (source / name).mkdir()
    shutil.copyfile(HERE / "qgate.css", source / "_static" / "qgate.css")
    for page in source.glob("*.md"):
        page.write_text(relinked(page.read_text(encoding="utf-8"), "docs"), encoding="utf-8")
    missing = {page.stem for page in source.glob("*.md")} ^ set(GUIDES)
    if missing:
        raise SystemExit(f"docs/ and the contents of the site differ in {sorted(missing)}")
    about = [
        page
        for page in ("gallery", "comparison", "api", "changelog")
        if gallery or page != "gallery"
    ]
    readme = relinked((ROOT / "README.md").read_text(encoding="utf-8"), "")
    trees = TREE.format(caption="Guides", pages="\n".join(GUIDES))
    trees += TREE.format(caption="Reference", pages="\n".join(about))
    (source / "index.md").write_text(readme + trees, encoding="utf-8")
    (source / "changelog.md").write_text(
        relinked((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), ""), encoding="utf-8"
    )
    (source / "comparison.md").write_text(comparison(), encoding="utf-8")
    (source / "api.md").write_text("\n".join(api()), encoding="utf-8")
    if gallery:
        subprocess.run([sys.executable, str(HERE / "gallery.py"), str(source)], check=True)


def relinked(text: str, folder: str) -> str:
    """Links between files of the repository as links between pages of the site; of a file that is
    on no page its name remains."""

    def moved(found: re.Match[str]) -> str:
        path, mark, anchor = found[2].partition("#")
        if not path or "://" in path:
            return found[0]
        target = os.path.normpath(Path(folder, path))
        if target not in MOVED and not target.startswith("docs/") and (ROOT / target).exists():
            return found[1]
        target = MOVED.get(target, target.removeprefix("docs/"))
        return f"[{found[1]}]({target}{mark}{anchor})"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", moved, text)


def comparison() -> str:
    """The figures of the benchmarks, with what repeats each of them."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    _, _, body = text.partition("\n")
    found = re.findall(r"^## ([^:\n]+): (.*)$", body, re.MULTILINE)
    rows = "\n".join(f"| [{name}](#{slug(name)}) | {command} |" for name, command in found)
    return COMPARISON.format(rows=rows) + re.sub(
        r"^## ([^:\n]+): (.*)$", r"## \1\n\n\2", body, flags=re.MULTILINE
    )


def slug(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def api() -> Iterator[str]:
    """What each package offers, by the list that it gives itself."""
    yield "# API\n\nWhat `import` gives; the text is that of `help()`.\n"
    for name in API:
        module = importlib.import_module(name)
        offered = [each for each in module.__all__ if not each.startswith("__")]
        yield f"\n## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :no-members:\n"
        for each in offered:
            thing = getattr(module, each)
            if isinstance(thing, type(importlib)):
                continue
            if isinstance(thing, type):
                yield f".. autoclass:: {name}.{each}\n   :members:\n   :no-index:\n"
            elif callable(thing) and hasattr(thing, "__qualname__"):
                yield f".. autofunction:: {name}.{each}\n   :no-index:\n"
            else:
                yield f".. autodata:: {name}.{each}\n   :no-value:\n   :no-index:\n"
        yield "```"


# Links -------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.anchors |= {known[name] for name in ("id", "name") if name in known}
        if tag == "a" and "href" in known:
            self.links.append(known["href"])
        if tag == "link" and "href" in known:
            self.loaded.append(known["href"])
        if tag in ("img", "script", "iframe", "source") and "src" in known:
            self.loaded.append(known["src"])


def broken(site: Path) -> Iterator[str]:
    """A line for each link that leads nowhere, and for each thing that is loaded from elsewhere."""
    pages = {
        path.resolve(): _Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")
    }
    for path, page in pages.items():
        shown = path.relative_to(site.resolve())
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme == "data" or (parts.scheme and link in page.links):
                continue
            if parts.scheme or parts.netloc:
                yield f"{shown}: loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists():
                yield f"{shown}: {link} leads nowhere"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{shown}: {link} has no such anchor"
    for sheet in site.rglob("*.css"):
        for link in re.findall(
            r"(?:@import|url\()\s*[\"']?(https?://[^\"')\s]+)", sheet.read_text(encoding="utf-8")
        ):
            yield f"{sheet.relative_to(site)}: loads {link}"


if __name__ == "__main__":
    sys.exit(main())
