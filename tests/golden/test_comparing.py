"""Planted changes are seen and named, noise is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.golden import running
from tests.golden.comparing import differences, same_number
from tests.golden.files import golden_text, steady
from tests.golden.pages import page_lines
from tests.golden.pictures import figure_lines
from tests.golden.summaries import array_text, column_text, json_lines

TEXT = "sweep of act\nSQNR  31.3993727 dB, 1.25e-05 of 4096\nlevels: 21\n"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("sweep of act", "sweeps of act", 1),
        ("31.3993727", "31.3994355", 2),  # 2e-6
        ("31.3993727", "-31.3993727", 2),
        ("31.3993727", "nan", 2),
        ("31.3993727", "31", 2),
        ("1.25e-05", "1.26e-05", 2),
        ("1.25e-05", "1.250e-05", 2),
        ("4096", "4097", 2),
        ("31.3993727 dB", "31.3993727  dB", 2),
        ("SQNR  ", "SQNR ", 2),
        ("levels: 21\n", "", 3),
        ("sweep of act\n", "sweep of act\nand more\n", 2),
    ],
)
def test_a_change_is_seen_in_its_line(old: str, new: str, line: int) -> None:
    assert old in TEXT
    line_changes = differences(TEXT, TEXT.replace(old, new))
    assert [change.line for change in line_changes] == [line]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("31.3993727", "31.3993730"),  # 1e-8
        ("31.3993727", "31.39937270001"),
        ("31.3993727 dB", "31.399373  dB"),
    ],
)
def test_noise_is_not_seen(old: str, new: str) -> None:
    assert old in TEXT
    assert not differences(TEXT, TEXT.replace(old, new))


def test_lines_after_an_inserted_one_are_compared_with_their_own() -> None:
    before = [f"row {i}: {i + 0.123456789}" for i in range(20)]
    after = [*before[:5], "a new row", *before[5:]]
    after[12] = after[12].replace(".123456789", ".123556789")
    line_changes = differences("\n".join(before), "\n".join(after))
    assert [(change.old, change.new) for change in line_changes] == [
        (None, "a new row"),
        (before[11], after[12]),
    ]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("1.000000", "1.0000005", True),
        ("1.000000", "1.000002", False),
        ("1.0", "1", False),
        ("0.1", "0.10000000000000002", True),
        ("0.000000000", "1.00000000e-30", False),
        ("1234.5678", "1234.5690", True),
    ],
)
def test_numbers_are_compared_to_a_millionth(old: str, new: str, same: bool) -> None:
    assert same_number(old, new) is same
    assert same_number(new, old) is same


def test_a_difference_names_file_line_old_and_new() -> None:
    by_file = running.text_differences(
        {"console.txt": TEXT, "a.csv": "a\n", "same.md": "x\n"},
        {"console.txt": TEXT.replace("levels: 21", "levels: 22"), "b.csv": "b\n", "same.md": "x\n"},
    )
    report = running.shown("sweep", by_file)
    assert report.splitlines() == [
        "sweep/a.csv: 1 line differs",
        "  line 1",
        "    - the file is no longer written",
        "sweep/b.csv: 1 line differs",
        "  line 1",
        "    + the file is new",
        "sweep/console.txt: 1 line differs",
        "  line 3",
        "    - levels: 21",
        "    + levels: 22",
    ]


def test_of_a_long_line_the_change_is_shown() -> None:
    long = ", ".join(f"value{i}" for i in range(500))
    (difference,) = differences(long, long.replace("value321", "value9"))
    assert "value321" in str(difference)
    assert "value9" in str(difference)
    assert len(str(difference)) < 700


# What outputs become ---------------------------------------------------------------------------


def test_a_run_leaves_no_traces() -> None:
    texts = [
        "written 2026-11-22T10:02:57+00:00 by qgate 0.1.0 with torch 2.13.0+cpu in 1.25s",
        "written 2027-01-02 03:04:05 by qgate 0.2.0 with torch 2.14.0+cpu in 10.5s",
    ]
    assert len({steady(text) for text in texts}) == 1


@pytest.mark.parametrize("change", [lambda x: x * (1 + 2e-5), lambda x: x[::-1], lambda x: -x])
def test_a_change_of_a_long_array_shows(change) -> None:  # type: ignore[no-untyped-def]
    values = np.arange(1.0, 101.0)
    assert differences(array_text(values), array_text(change(values)))
    assert not differences(array_text(values), array_text(values * (1 + 1e-8)))


def test_a_swap_in_the_middle_of_an_array_shows() -> None:
    values = np.arange(1.0, 101.0)
    swapped = values.copy()
    swapped[[40, 60]] = swapped[[60, 40]]
    assert differences(array_text(values), array_text(swapped))


def test_long_lists_of_records_keep_every_column() -> None:
    rows = [{"name": f"layer{i % 2}", "mse": i / 7, "ok": True} for i in range(50)]
    before = "\n".join(json_lines({"rows": rows}))
    rows[25]["ok"] = False
    assert differences(before, "\n".join(json_lines({"rows": rows})))
    assert column_text(["a", "a", 1.5]) == '[1.5]; "a" ×2'


def test_a_page_is_its_words_and_the_data_of_its_pictures() -> None:
    html = (
        "<style>p {color: red}</style><script>let hidden = 1</script><h1>A &amp; B</h1>"
        "<table><tr><td>x</td><td>1.5</td></tr></table>"
        '<svg width="10"><rect x="1" y="2" width="3" height="4"/><text x="1">label</text></svg>'
    )
    assert list(page_lines(html)) == [
        "A & B",
        "x | 1.5",
        "label",
        "  svg rect: [1.0, 2.0, 3.0, 4.0]",
    ]
    assert list(page_lines(html.replace('y="2"', 'y="2.5"'))) != list(page_lines(html))


def test_a_figure_is_the_data_drawn() -> None:
    from matplotlib.figure import Figure

    def drawn(last: float = 3.0, color: str = "#ff0000", label: str = "mse") -> str:
        figure = Figure()
        axes = figure.subplots()
        axes.plot([1, 2, 3], [1, 2, last], color=color, label=label)
        axes.bar([1, 2], [last, 2])
        axes.scatter([1, 2], [3, last])
        axes.imshow([[1, 2], [3, last]])
        axes.set_title("errors")
        axes.legend()
        return "\n".join(figure_lines(figure))

    assert 'line #ff0000 "mse": x [1, 2, 3], y [1.0, 2.0, 3.0]' in drawn()
    assert drawn() == drawn()
    for other in (drawn(last=3.5), drawn(color="#00ff00"), drawn(label="mae")):
        assert differences(drawn(), other)


def test_a_json_file_of_another_run_is_the_same(tmp_path: Path) -> None:
    golden_texts = []
    for seconds, folder in ((1, tmp_path), (2, tmp_path / ("long" * 40))):
        folder.mkdir(exist_ok=True)
        path = folder / "a.json"
        path.write_text(f'{{"seconds": {seconds}.5, "folder": "{folder}/x", "mse": 0.5}}')
        golden_texts.append(golden_text(path, {}, folder))
    assert golden_texts[0] == golden_texts[1] == '{seconds: 0.0, folder: "<folder>/x", mse: 0.5}\n'
