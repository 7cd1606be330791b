"""The packages that qgate needs: their licenses are read, and listed in a bill of materials.

    python -m tests.dependencies [--extras all] [--output dist/bom.cdx.json]

Reads what is installed, with all that these packages need themselves. Exit status 1: a package
states no license, or one that ALLOWED does not list. The bill is CycloneDX 1.5; known
vulnerabilities are looked up by pip-audit, from the same bill's packages, in the workflow.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = "pytest-qgate"
# What may be used beside and shipped with code under the license of this project.
ALLOWED = re.compile(
    r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|MPL|Mozilla|HPND|Historical Permission|"
    r"Unlicense|Zlib|zlib|CC0|LLVM|MIT-0|CNRI|BSL|Boost)\b"
)
VENDOR = re.compile(r"(nvidia|cuda)-.+")
"""Libraries of a device under the license of its vendor, which torch brings and qgate does not ship."""


@dataclass(frozen=True)
class Package:
    """An installed package, and the license that its metadata state."""

    name: str
    version: str
    license: str

    @property
    def url(self) -> str:
        return f"pkg:pypi/{canonicalize_name(self.name)}@{self.version}"


def needed(project: str, extras: Collection[str]) -> Iterator[Package]:
    """Yield the installed packages that a project needs, each once; others are for other systems."""
    waiting = [(project, frozenset(extras))]
    visited: set[tuple[str, frozenset[str]]] = set()
    listed = {canonicalize_name(project)}
    while waiting:
        name, extra_names = waiting.pop()
        if (name, extra_names) in visited:
            continue
        visited.add((name, extra_names))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if canonicalize_name(name) not in listed:
            listed.add(canonicalize_name(name))
            yield Package(distribution.name, distribution.version, license_of(distribution))
        for text in distribution.requires or ():
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in (*extra_names, "")]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                waiting.append((requirement.name, frozenset(requirement.extras)))


def license_of(distribution: metadata.Distribution) -> str:
    """Return the license in the metadata: its expression, else its classifiers, else its text."""
    stated = distribution.metadata
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in stated.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    expression = stated.get("License-Expression") or ", ".join(classifiers)
    return expression or (stated.get("License") or "").partition("\n")[0]


def license_problems(packages: Collection[Package]) -> list[str]:
    """List the packages whose license is missing or not one of those allowed."""
    return [
        f"{package.name} {package.version}: its license is {package.license or 'not stated'!r}; "
        "leave it out, or say in tests/dependencies.py why it may stay"
        for package in packages
        if not VENDOR.fullmatch(package.name) and not ALLOWED.search(package.license)
    ]


def bill(version: str, packages: Collection[Package]) -> dict[str, object]:
    """Return the bill of materials of a version, in the order of names."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": PROJECT, "version": version}},
        "components": [
            {
                "type": "library", "name": package.name, "version": package.version,
                "purl": package.url, "licenses": [{"license": {"name": package.license}}],
            }
            for package in sorted(packages, key=lambda package: package.url)
        ],
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read the licenses of what qgate needs.")
    parser.add_argument("--extras", default="all", help="extras of the project, with commas")
    parser.add_argument("--output", type=Path, help="write a bill of materials there")
    options = parser.parse_args(arguments)
    packages = list(needed(PROJECT, options.extras.split(",")))
    if not packages:
        print(f"{PROJECT} is not installed: there is nothing to read", file=sys.stderr)
        return 2
    if options.output:
        text = json.dumps(bill(metadata.version(PROJECT), packages), indent=1) + "\n"
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8", newline="\n")
    problems = license_problems(packages)
    print(*problems, f"{len(packages)} packages, {len(problems)} with a problem", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
