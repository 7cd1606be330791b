"""Words of a command of pytest, and what they say of the run; no pytest is loaded for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

RECEIPT = "QGATE_RECEIPT"
"""Variable by which `qgate run` names the file that the settled exit status is written to."""

RUN_NOTHING: Mapping[str, tuple[str, ...]] = {
    "collectonly": ("--collect-only", "--co", "--collectonly"),
    "setupplan": ("--setup-plan", "--setupplan"),
    "setuponly": ("--setup-only", "--setuponly"),
    "help": ("--help", "-h"),
    "version": ("--version", "-V"),
    "markers": ("--markers",),
    "showfixtures": ("--fixtures", "--funcargs"),
    "show_fixtures_per_test": ("--fixtures-per-test",),
    "cacheshow": ("--cache-show",),
}
"""Options of pytest that list something, or set up tests, and run none: how they are typed."""


def has_option(words: Iterable[str], names: Iterable[str]) -> bool:
    """Tell if a command has an option under one of its names."""
    typed = {word.partition("=")[0] for word in words}
    return not typed.isdisjoint(names)


def runs_nothing(words: Iterable[str]) -> bool:
    """Tell if a command asks pytest to run no test."""
    return has_option(words, [name for names in RUN_NOTHING.values() for name in names])
