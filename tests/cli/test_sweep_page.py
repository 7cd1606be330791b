"""The page of a run of `qgate sweep`: of this run, escaped, linked, and nobody else's is lost."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

from qgate.cli import main
from qgate.sweeps import running
from tests.shares import proof

Capsys = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("here")
HOSTILE = "<script>alert(1)<script> %20 'x' & \"y\" #1.pt"


def tensor(seed: int = 0) -> torch.Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def page(root: str = "out", name: str = "index.html") -> str:
    return Path(root, name).read_text(encoding="utf-8")


def links(text: str) -> list[str]:
    """Files that a browser asks for: a `#` that is not quoted ends a path."""
    urls = re.findall(r"(?:href|src)='([^']+)'", text)
    paths = [unescape(url).partition("#")[0] for url in urls]
    return [unquote(path) for path in paths if path]


def rows(text: str, table: int = 0) -> list[str]:
    """Rows of the table of recommendations, or, with 1, of the table of every metric."""
    start = text.index("<table class='sortable all-sweeps'")
    tables = re.findall(r"<table class='sortable[^>]*>.*?</table>", text[start:], re.S)
    return re.findall(r"<tr><th scope='row'.*?</tr>", tables[table], re.S)


def swept(*argv: str) -> int:
    return main(["sweep", *argv, "--output-dir", "out"])


def test_every_tensor_and_format_has_a_row_and_its_links_lead_somewhere(capsys: Capsys) -> None:
    torch.save(tensor(), "a.pt")
    torch.save(tensor(1), "b.pt")
    assert swept("a.pt", "b.pt", "--elem-format", "fp8_e4m3,fp4_e2m1", "--no-plots") == 0
    assert capsys.readouterr().out.endswith("\nout/index.html\n")
    text = page()
    assert len(rows(text)) == len(rows(text, 1)) == 8
    assert all(Path("out", link).exists() for link in links(text))
    assert text.count("<svg ") == 8
    assert text.count("<div class='figures small'>") == 2
    assert "2 tensors in fp8_e4m3, mxfp8_e4m3, fp4_e2m1, mxfp4_e2m1" in text


def test_what_failed_comes_first_and_is_named(capsys: Capsys) -> None:
    bad = tensor()
    bad[0, 0] = float("nan")
    torch.save(bad, "bad.pt")
    torch.save(tensor(), "good.pt")
    assert swept("good.pt", "bad.pt", "missing.pt", "--no-plots") == 1
    text = page()
    assert "2 tensors of 3 failed: " in text
    first = re.findall(r"<li class='fail'>.*?</li>", text)
    assert ["bad.pt: 1 NaN" in first[0], "missing.pt: there is no file" in first[1]] == [True, True]
    assert "bad.pt" in rows(text)[0]
    assert ".png" not in text
    capsys.readouterr()


def test_hostile_names_stay_text_and_their_links_lead_somewhere() -> None:
    torch.save(tensor(), HOSTILE)
    assert swept(HOSTILE, "--granularity", "block") == 0
    text = page()
    assert text.count("<script") == 1
    assert "&lt;script&gt;alert(1)&lt;script&gt;" in text
    assert sum(link.endswith(".png") for link in links(text)) == 1
    assert len(links(text)) > 4
    assert all(Path("out", link).exists() for link in links(text))


@proof
def test_a_second_run_keeps_the_tensors_of_the_first() -> None:
    for i in range(3):
        torch.save(tensor(i), f"t{i}.pt")
    assert swept("t0.pt", "t1.pt", "--elem-format", "fp8_e4m3") == 0
    before = rows(page().replace("<wbr>", ""))
    assert swept("t1.pt", "t2.pt", "--elem-format", "fp8_e4m3", "--no-plots") == 0
    assert swept("t2.pt", "--elem-format", "int8", "--no-plots") == 0
    text = page().replace("<wbr>", "")
    rows_text = "".join(rows(text))
    assert [rows_text.count(f">t{i}.pt</a>") for i in range(3)] == [2, 2, 4]
    assert {row for row in before if ">t0.pt</a>" in row} < set(rows(text)), "with all its files"
    assert "1 tensor in int8, mxint8; " in text
    assert "; with 3 tensors of earlier commands." in text
    heading = text[text.index("<h1>") : text.index("</h1>")]
    assert ">Use " in heading
    assert ", in t2.pt" in heading
    assert all(Path("out", link).exists() for link in links(text))


def test_records_that_cannot_be_read_are_linked() -> None:
    torch.save(tensor(), "a.pt")
    for number, content in enumerate(("{", "[]", "{}", '{"kind": "tensor", "levels": 3}')):
        folder = Path("out", f"old{number}")
        folder.mkdir(parents=True)
        (folder / "scaling_int8.json").write_text(content)
    assert swept("a.pt", "--no-plots") == 0
    text = page()
    others_section = text[text.index("<section id='others'>") :]
    assert others_section.count("scaling_int8.json'") == 4
    assert len(rows(text)) == 2


@proof
def test_a_resumed_run_shows_what_was_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"t{i}.pt" for i in range(2)]
    for i, name in enumerate(names):
        torch.save(tensor(i), name)
    options = (*names, "--granularity", "block")
    assert swept(*options) == 0
    whole = page()
    assert whole.count("<svg ") == 2
    real, calls, killing = running.sweep_part, [], True

    def killed(part: running.FilePart, request: object) -> object:
        calls.append(part.spec)
        if killing and len(calls) == 2:
            raise KeyboardInterrupt
        return real(part, request)

    monkeypatch.setattr(running, "sweep_part", killed)
    Path("out", "index.html").unlink()
    assert swept(*options) == 130
    assert not Path("out", "index.html").exists()
    killing = False
    assert swept(*options) == 0
    assert calls == [*names, "t1.pt"]
    assert page() == whole


def test_a_sweep_that_fails_leaves_the_page_of_one_that_passed() -> None:
    torch.save(tensor(), "a.pt")
    torch.save(tensor() * float("nan"), "b.pt")
    assert swept("a.pt", "--no-plots") == 0
    good = page()
    assert swept("a.pt", "gone.pt", "--no-plots") == 1
    assert page() == good
    assert "1 tensor of 2 failed" in page(name="index-failed.html")
    assert swept("b.pt", "--no-plots") == 1
    assert page() == good
    torch.save(tensor(1), "b.pt")
    assert swept("b.pt", "--no-plots") == 0
    assert page() != good
    assert not Path("out", "index-failed.html").exists()


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (["gone.pt", "no*.pt"], "none of the 2 inputs can be read: there is no file 'gone.pt'; check the spelling."),
        (["text.jsonl"], "'text.jsonl': cannot read .jsonl files; .pt, .pth, .safetensors, .npy, .npz can be."),
        (["."], "'.' is a folder; name its files, as in './**/*.safetensors'."),
    ],
)  # fmt: skip
def test_a_sweep_without_any_file_is_one_line_and_leaves_all_as_it_was(
    capsys: Capsys, files: list[str], error: str
) -> None:
    Path("text.jsonl").touch()
    assert swept(*files) == 2
    assert capsys.readouterr() == ("", f"qgate sweep: {error}\n")
    assert not Path("out").exists()


def test_the_page_of_a_sweep_that_failed_is_replaced() -> None:
    torch.save(tensor() * float("nan"), "b.pt")
    assert swept("b.pt", "--no-plots") == 1
    assert "1 tensor of 1 failed" in page()
    torch.save(tensor(), "a.pt")
    assert swept("a.pt", "gone.pt", "--no-plots") == 1
    assert "1 tensor of 2 failed" in page()
    assert not Path("out", "index-failed.html").exists()


def test_a_page_of_somebody_else_stays() -> None:
    Path("out").mkdir()
    Path("out", "index.html").write_text("mine")
    torch.save(tensor(), "a.pt")
    for _ in range(2):
        assert swept("a.pt", "--no-plots") == 0
    assert page() == "mine"
    assert len(rows(page(name="qgate-sweep.html"))) == 2


def test_a_tensor_of_the_name_of_the_page_gets_another_folder() -> None:
    torch.save(tensor(), "index.html.pt")
    assert swept("index.html.pt", "--no-plots") == 0
    assert Path("out", "index.html-2").is_dir()
    assert len(rows(page())) == 2


def test_a_page_that_cannot_be_written_is_told(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qgate.sweeps import page as pages

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "write_text", full)
    torch.save(tensor(), "a.pt")
    assert swept("a.pt", "--no-plots") == 1
    assert "cannot write the page of the results" in capsys.readouterr().out
