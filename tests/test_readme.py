"""What the README shows is what happens, and a README that lies fails."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import qgate
from tests import readme
from tests.shares import share

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"
BLOCKS = readme.blocks(README.read_text(encoding="utf-8")) if README.is_file() else []


PAGES = {
    page.relative_to(DOCS).as_posix(): readme.blocks(page.read_text(encoding="utf-8"))
    for page in sorted(DOCS.rglob("*.md"))
}
TUTORIALS = {name: page for name, page in PAGES.items() if name.startswith("tutorials/")}


def in_language(language: str) -> list[object]:
    """Blocks of the README and of the pages in docs."""
    return [
        pytest.param(block, id=f"{page} line {block.line}: {block.first_line[:40]}")
        for page, blocks in {"README.md": BLOCKS, **PAGES}.items()
        if page not in TUTORIALS
        for block in blocks
        if block.language == language
    ]


def test_the_readme_can_be_run() -> None:
    assert README.is_file(), "README.md is missing"
    assert readme.violations(BLOCKS) == []
    assert PAGES


def test_the_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    assert 200 < len(readme.prose(text)) < 600, "code and tables apart"
    assert readme.prose("a [b c](d e)\n" + fenced("text", "x y") + "| f |\ng") == [
        "a",
        "[b",
        "c]",
        "g",
    ]


def test_the_readme_has_few_links() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(re.findall(r"\]\((?!#)", text)) <= 12, "docs/start.md has them all"


def test_the_failure_that_the_readme_shows_is_that_of_the_tutorial() -> None:
    (cause,) = [b.text for b in BLOCKS if b.first_line.startswith("cause: ")]
    page = "".join(b.text for b in PAGES["tutorials/first-gate.md"] if b.language == "console")
    fault = re.search(r"is wrong: .*? codes are used", page)
    assert fault, page
    assert fault[0] in " ".join(cause.split())


def test_a_cosine_limit_passes_the_kernel_of_the_readme(tmp_path: Path) -> None:
    (block,) = [b for b in BLOCKS if b.language == "python"]
    (tmp_path / "shown.py").write_text(block.text)
    names = runpy.run_path(str(tmp_path / "shown.py"))
    passed = 0
    for seed in range(200):
        torch.manual_seed(seed)
        tensors = torch.randn(24, 64), torch.randn(16, 64)
        encoded = [qgate.encode(x, "fp8_e4m3", granularity="channel", axis=0) for x in tensors]
        packed = [part for x in encoded for part in names["codes_and_scales"](x)]
        actual, right = names["my_gemm"](*packed), torch.nn.functional.linear(*tensors)
        vectors = actual.flatten().float(), right.flatten()
        passed += bool(torch.nn.functional.cosine_similarity(*vectors, dim=0) >= 0.98)
    assert passed / 200 == pytest.approx(19 / 20, abs=0.025), passed


@pytest.mark.parametrize("block", in_language("python"))
def test_python(block: readme.Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme.run_python(block)


@pytest.mark.parametrize("block", in_language("console"))
def test_console(block: readme.Block, tmp_path: Path) -> None:
    (page,) = [
        page_blocks
        for page_blocks in (BLOCKS, *PAGES.values())
        if any(it is block for it in page_blocks)
    ]
    for name, text in readme.files(page, block).items():
        (tmp_path / name).write_text(text)
    readme.run_console(block, tmp_path)


@share(8)
@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_from_its_page_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.chdir(tmp_path)
    readme.follow(TUTORIALS[name], tmp_path)


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_each_result(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    results = readme.run_notebook(path.read_text(encoding="utf-8"))
    assert results
    assert all(repr(result) for result in results)
    assert "argument 0 has blocks of 16, not of 32" in results[-1]


# Planted READMEs ----------------------------------------------------------------------------------


def fenced(language: str, *lines: str) -> str:
    return "\n".join([f"```{language}", *lines, "```", ""])


def only(text: str) -> readme.Block:
    """The one block of a text."""
    (block,) = readme.blocks(text)
    return block


SET_UP = (
    "# qgate\n\n## Set up\n\n" + fenced("sh", "make a") + "\nThen:\n\n" + fenced("sh", "make b")
)


def test_blocks_are_found_with_language_heading_and_line() -> None:
    text = "\n".join(
        [
            "## One",
            "```Python title",
            "## a comment",
            "```",
            "### Below",
            "````text",
            "```sh",
            "```",
            "````",
            "## Two ##",
            "* a list",
            "  ~~~yaml",
            "  a:",
            "    b",
            "  ~~~",
            "use ```x``` inline",
            "```",
            "```",
        ]
    )
    assert readme.blocks(text) == [
        readme.Block("python", "One", 2, "## a comment\n"),
        readme.Block("text", "One", 6, "```sh\n```\n"),
        readme.Block("yaml", "Two", 12, "a:\n  b\n"),
        readme.Block("", "Two", 17, ""),
    ]


def test_a_block_without_an_end_is_refused() -> None:
    with pytest.raises(readme.ReadmeError, match="line 2: the block ```python has no end"):
        readme.blocks("text\n```python\nx = 1\n``\n")


def test_a_good_readme_has_no_violations() -> None:
    examples = fenced("python", "x = 1") + fenced("console", "$ qgate --version", "…")
    other = fenced("text", "$ rm") + fenced("yaml", "a: b") + fenced("toml", "a = 1") + fenced("")
    blocks = readme.blocks(SET_UP + "## More\n" + examples + other)
    assert readme.violations(blocks) == []
    assert readme.set_up_commands(blocks) == ("make a", "make b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "0 sh blocks under '## Set up' (lines: none) instead of two."),
        (fenced("sh", "make a"), "0 sh blocks under"),
        ("## Set up\n" + fenced("sh", "make a"), "1 sh blocks under '## Set up' (lines: 2)"),
        (SET_UP + fenced("sh", "make c"), "3 sh blocks under '## Set up' (lines: 5, 11, 14)"),
        (SET_UP + "### Below\n" + fenced("sh", "make c"), "3 sh blocks under"),
        (SET_UP.replace("make b", "make b\nmake c"), "line 11: a set-up command is one line"),
        (SET_UP.replace("make b", "make b \\\n  c"), "line 11: a set-up command is one line"),
        (SET_UP.replace("make a", ""), "line 5: a set-up command is one line"),
        (SET_UP.replace("make a\n", ""), "line 5: a set-up command is one line"),
        (SET_UP + "## More\n" + fenced("sh", "make c"), "line 15: sh outside 'Set up' is not run"),
        (SET_UP + fenced("bash", "make c"), "line 14: bash is not run: use console"),
        (SET_UP + fenced("py", "x = 1"), "line 14: py is not run: use python"),
        (SET_UP + fenced("console", "qgate"), "line 15: a console block starts with '$ '"),
        (SET_UP + fenced("console"), "line 14: a console block without a command"),
        (
            SET_UP + fenced("console", "$ rm -r x"),
            "line 15: rm -r x: commands are qgate, pytest, python",
        ),
        (SET_UP + fenced("console", "$ qgatex"), "line 15: qgatex: commands are"),
        (SET_UP + fenced("console", "$ "), "line 15: : commands are qgate, pytest, python"),
        (
            SET_UP + fenced("console", "$ qgate x; rm y"),
            "line 15: qgate x; rm y: ';' needs a shell",
        ),
        (SET_UP + fenced("console", "$ qgate|head"), "'|' needs a shell"),
        (SET_UP + fenced("console", "$ qgate 'x"), "line 15: qgate 'x: No closing quotation"),
        (SET_UP + fenced("console", "$ qgate", "$ ls"), "line 16: ls: commands are"),
    ],
)
def test_a_readme_that_cannot_be_run_is_refused(text: str, expected: str) -> None:
    violations = readme.violations(readme.blocks(text))
    assert any(expected in violation for violation in violations), violations


def test_output_may_start_with_a_dollar() -> None:
    (command,) = readme.console_commands(only(fenced("console", "$ qgate a 'b c'", "$5", "", "$")))
    assert command == readme.Command(("qgate", "a", "b c"), ("$5", "", "$"), 2)


def test_python_blocks_share_nothing() -> None:
    first, second = readme.blocks(fenced("python", "x = 1") + fenced("python", "x += 1"))
    readme.run_python(first)
    with pytest.raises(NameError):
        readme.run_python(second)


def test_python_blocks_with_a_name_are_files_for_the_commands_below() -> None:
    text = fenced("python", "# test_a.py", "x = 1") + fenced("python", "# as it is", "x = 2")
    console = fenced("console", "$ pytest test_a.py")
    blocks = readme.blocks(text + console + fenced("python", "# test_b.py", "x = 3"))
    assert readme.files(blocks, blocks[2]) == {"test_a.py": "# test_a.py\nx = 1\n"}
    assert readme.files(blocks, blocks[0]) == {}


def test_a_tutorial_that_lies_fails(tmp_path: Path) -> None:
    test = fenced("python", "# test_a.py", "def test_a():", "    assert 1 == 2")
    run = fenced("console", "$ pytest -q test_a.py", "…", "1 passed in …")
    change = ("--- test_a.py", "+++ test_a.py", "-    assert 1 == 2", "+    assert 1 == 1")
    readme.follow(readme.blocks(test + fenced("diff", *change) + run), tmp_path)
    with pytest.raises(AssertionError, match="prints something else"):
        readme.follow(readme.blocks(test + run), tmp_path)
    with pytest.raises(AssertionError, match="does not have the lines to change"):
        readme.follow(readme.blocks(fenced("diff", "--- test_a.py", "-    x = 1")), tmp_path)


def test_a_notebook_shares_names_and_gives_what_its_cells_end_with() -> None:
    cells = ["x = 1\n", "x + 1", "y = x\nif y:\n    pass"]
    kinds = [{"cell_type": "code", "source": [cell]} for cell in cells]
    text = json.dumps({"cells": [{"cell_type": "markdown", "source": ["1 +"]}, *kinds]})
    assert readme.run_notebook(text) == [2]
    with pytest.raises(NameError):
        readme.run_notebook(json.dumps({"cells": kinds[1:]}))


def test_a_failing_python_block_fails_at_its_line() -> None:
    with pytest.raises(AssertionError) as caught:
        readme.run_python(only("text\n\n" + fenced("python", "x = 1", "assert x == 2")))
    last = caught.traceback[-1]
    assert (Path(last.path).name, last.lineno + 1) == ("README.md", 5)


def test_python_that_does_not_parse_fails() -> None:
    with pytest.raises(SyntaxError):
        readme.run_python(only(fenced("python", ">>> x = 1")))


def test_annotations_in_a_python_block_are_not_postponed() -> None:
    readme.run_python(
        only(fenced("python", "def f(x: int): ...", "assert f.__annotations__['x'] is int"))
    )


VERSION = ("$ pytest --version", f"pytest {pytest.__version__}")


@pytest.mark.parametrize(
    "lines",
    [
        VERSION,
        (*VERSION, "", *VERSION, ""),
        ("$ pytest --version", "pyt…t …"),
        ("$ pytest --version", "…"),
        ("$ pytest --version", "…", f"pytest {pytest.__version__}", "…"),
        ("$ pytest 'not here'", "…", "ERROR: file or directory not found: not here", "…"),
    ],
)
def test_a_console_block_that_tells_the_truth_passes(
    lines: tuple[str, ...], tmp_path: Path
) -> None:
    readme.run_console(only(fenced("console", *lines)), tmp_path)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("$ pytest --version", "pytest 0.1"), "README.md:2: $ pytest --version prints something"),
        (("$ pytest --version",), "prints something else"),
        ((*VERSION, "and more"), "prints something else"),
        ((*VERSION, *VERSION, "and more"), "README.md:4:"),
        (("$ pytest --no-such-option", "…"), "ends with exit status 4"),
    ],
)
def test_a_console_block_that_lies_fails(
    lines: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as caught:
        readme.run_console(only(fenced("console", *lines)), tmp_path)
    assert expected in str(caught.value)
    assert "it printed:\n" in str(caught.value)


def test_a_program_that_is_not_installed_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "COMMANDS", ("no-such-program",))
    with pytest.raises(AssertionError, match="no program 'no-such-program'"):
        readme.run_console(only(fenced("console", "$ no-such-program", "…")), tmp_path)


def test_console_commands_run_one_after_the_other_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_a():\n    open('made', 'x').close()\n")
    (tmp_path / "test_b.py").write_text("def test_b():\n    open('made').close()\n")
    lines = ["$ pytest -q test_a.py", "…", "1 passed in …", "$ pytest -q test_b.py"]
    readme.run_console(only(fenced("console", *lines, *lines[1:3])), tmp_path)
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("", "", True),
        ("a b", "a b", True),
        ("a b", "a", False),
        ("a", "a b", False),
        ("…", "", True),
        ("…", "a b c", True),
        ("a … c", "a c", True),
        ("a … c", "a b b c", True),
        ("a … c", "a b c d", False),
        ("… b … b", "a b b", True),
        ("… b … b", "a b a", False),
        ("… … a", "b a", True),
        ("… a b", "a c a b", True),
        ("x…z", "xyz", True),
        ("x…z", "xz", True),
        ("x…z", "xyza", False),
        ("x.z", "xyz", False),
        ("…a…", "cat", True),
    ],
)
def test_an_ellipsis_matches_lines_or_text(expected: str, printed: str, same: bool) -> None:
    assert readme.matches(expected.split(), printed.split()) is same
