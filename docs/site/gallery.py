"""Reports and pictures for the site, made by the commands of qgate.

    python docs/site/gallery.py FOLDER

All commands run in one process, which has imported torch and matplotlib once.
"""

from __future__ import annotations

import contextlib
import html
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import qgate
from qgate.cli import main

KERNEL = ("clamp(min=1e-12) / 127", "clamp(min=1e-12) / 63")
INTRO = """# Gallery

Pages and pictures as qgate makes them, from the example of `qgate init` and from small tensors.
Each page is one file that opens without network.
"""


def write(source: Path) -> None:
    """Write `gallery.md` among the sources of the site, and its files beside it."""
    folder = source / "_extra" / "gallery"
    sections = []
    for name, make in (
        ("gates", _gates),
        ("sweeps", _sweeps),
        ("activations", _activations),
        ("dumps", _dumps),
    ):
        (folder / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
            sections.append(make(folder / name))
    (source / "gallery.md").write_text("\n".join([INTRO, *sections]), encoding="utf-8")


def _run_qgate(*words: str) -> None:
    """Run a command of qgate, and print its output only if it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(list(words))
    if status:
        raise SystemExit(f"qgate {' '.join(words)} ended with {status}\n{output.getvalue()}")


def _run_suites(*words: str, status: int = 0) -> None:
    few = ("--samples", "2", "--seqlen", "32", "-p", "no:cacheprovider", "-q")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        ended_with = pytest.main(["suites", *few, *words])
    sys.modules.pop("qgate_model", None)
    if ended_with != status:
        raise SystemExit(f"pytest {' '.join(words)} ended with {ended_with}\n{output.getvalue()}")


def worsened_example(page: Path) -> None:
    """Run the example of `qgate init` with a kernel that got worse, and keep its page."""
    with tempfile.TemporaryDirectory() as work, contextlib.chdir(work):
        _run_qgate("init", "--suites", "layer_outputs")
        _run_suites("--update-baselines")
        example = Path("suites", "qgate_model.py")
        example.write_text(example.read_text().replace(*KERNEL))
        _run_suites("--plots", "all", status=1)
        shutil.copyfile("qgate-out/report.html", page)


def _gates(folder: Path) -> str:
    worsened_example(folder / "report.html")
    about = "The report of a change that lets the kernel of the example use half of its grid: "
    section = _section(
        "A kernel that got worse", about + "`pytest suites`.", folder / "report.html"
    )
    link = "gallery/gates/report.html"
    return f'{section}<iframe src="{link}" title="Report of the run" loading="lazy"></iframe>\n'


def _sweeps(folder: Path) -> str:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[:, 7] *= 30
    torch.save(x, "act.pt")
    _run_qgate("sweep", "act.pt", "--output-dir", str(folder), "--elem-format", "fp8_e4m3")
    about = "One channel of 256 is 30 times the others: `qgate sweep act.pt`."
    pictures = sorted(path for path in folder.rglob("*.png") if "test" not in path.stem)
    return _section("Scales", about, folder / "index.html", pictures)


def _activations(folder: Path) -> str:
    few = ("--data.num_samples", "2", "--data.seq_len", "64")
    _run_qgate("activations", "--model", "tiny-llama", *few, "--save_dir", str(folder))
    about = "Magnitudes, outliers and losses of formats: `qgate activations --model tiny-llama`."
    pictures = sorted(folder.rglob("*.png"))
    return _section("Activations of a model", about, folder / "analysis_report.html", pictures)


def _dumps(folder: Path) -> str:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with qgate.collect(model, "dump", sites="linear", iterations=1, quant_type="mxfp8"):
        model(torch.randn(64, 64)).square().mean().backward()
    _run_qgate("dumps", "draw", "dump", "--output-dir", str(folder))
    about = "Collected forward and backward: `qgate dumps draw dump`."
    pictures = [folder / name for name in _OF_DUMPS]
    return _section("Tensors of a training step", about, folder / "index.html", pictures)


_OF_DUMPS = (
    "quick_analysis.png",
    "distributions/magnitudes.png",
    "fp8_analysis/fits.png",
    "heatmaps/amax.png",
    "backward_analysis/gradients.png",
    "layer_analysis/depth.png",
)


def _section(title: str, about: str, page: Path, pictures: Sequence[Path] = ()) -> str:
    top = page.parents[1].parent
    lines = [f"## {title}", "", about, ""]
    lines.append(f'<p><a href="{page.relative_to(top).as_posix()}">Open the page</a></p>')
    captions = _Captions(page.read_text(encoding="utf-8")).captions
    grid = [
        line
        for path in pictures
        for line in _figure(path.relative_to(top).as_posix(), captions[path.name])
    ]
    return "\n".join([*lines, *(['<div class="gallery">', *grid, "</div>"] if grid else []), ""])


class _Captions(HTMLParser):
    """Read the first words that a page writes under each picture, by the name of its file."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.captions: dict[str, str] = {}
        self._files: list[str] = []
        self._words = ""
        self._is_open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "figure":
            self._files, self._words = [], ""
        self._is_open |= tag == "figcaption"
        self._files += [
            Path(unquote(value)).name for _, value in attrs if value and value.endswith(".png")
        ]

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self._words = self._words or data.strip()
            self._files += [word for word in data.split() if word.endswith(".png")]

    def handle_endtag(self, tag: str) -> None:
        self._is_open &= tag != "figcaption"
        if tag == "figure":
            self.captions |= dict.fromkeys(self._files, self._words)


def _figure(link: str, caption: str) -> Iterator[str]:
    caption = html.escape(caption)
    yield f'<figure><a href="{link}"><img src="{link}" alt="{caption}" loading="lazy"></a>'
    yield f"<figcaption>{caption}</figcaption></figure>"


if __name__ == "__main__":
    for name in ("CI", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        os.environ.pop(name, None)  # its red run is no failure of the job that builds it
    write(Path(sys.argv[1]).resolve())
