"""Looks and sorting of pages, under the name they had before all pages came to share them."""

from __future__ import annotations

from qgate.report.pages._script import SCRIPT
from qgate.report.pages._style import STYLE

__all__ = ["SCRIPT", "STYLE"]
