"""Take the pictures of the README: the page of a run whose kernel got worse, light and dark.

    python docs/site/pictures.py

It needs chromium and `pip install -e '.[all,test]'`, and replaces docs/pictures/verdict-*.png.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from gallery import worsened_example
from PIL import Image
from playwright.sync_api import sync_playwright

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SIZE = {"width": 900, "height": 366}
COLORS = 256


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work, sync_playwright() as playwright:
        page = Path(work) / "report.html"
        worsened_example(page)
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for scheme in SCHEMES:
            tab = browser.new_page(viewport=SIZE, color_scheme=scheme)
            tab.goto(page.as_uri())
            picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
            # Text in few colors takes a third of the bytes.
            few = picture.quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(PICTURES / f"verdict-{scheme}.png", optimize=True)
        browser.close()


if __name__ == "__main__":
    for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        os.environ.pop(name, None)
    main()
