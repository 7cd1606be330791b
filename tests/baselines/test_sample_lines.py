"""Figures of samples are one line of a file, and entries of their own in every comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qgate import QgateError
from qgate.baselines import Accepted, Key
from qgate.baselines.accepted import inspect_accepted, read_accepted
from qgate.baselines.checking import verify
from tests.baselines.building import recorded

BASE = Accepted("tiny", "int8", "w" * 64, "i" * 64, None, "cpu")


def key(metric: str) -> Key:
    return Key("task", "logits", "task", metric)


def of_samples(count: int, metric: str = "bits_per_byte") -> Accepted:
    figures = {key(f"{metric}@sample_{n}"): 1.0 + n / 7 for n in range(count)}
    return replace(BASE, values={key(metric): 1.5, **figures})


def entries(made: Accepted) -> list[str]:
    text = made.to_bytes().decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("count", [2, 12, 1200])
def test_samples_are_one_line_beside_that_of_the_mean(count: int) -> None:
    errors = of_samples(count)
    mean, samples = entries(errors)
    assert mean.split()[3] == "bits_per_byte"
    assert samples.split()[3] == "bits_per_byte@samples"
    assert len(samples.split()[4].split(",")) == count
    assert read_accepted(errors.to_bytes(), "f") == errors


def test_one_sample_and_samples_with_a_gap_have_lines_of_their_own() -> None:
    assert [line.split()[3] for line in entries(of_samples(1))] == [
        "bits_per_byte", "bits_per_byte@sample_0",
    ]  # fmt: skip
    errors = of_samples(4)
    del errors.values[key("bits_per_byte@sample_2")]
    assert len(entries(errors)) == 4
    assert read_accepted(errors.to_bytes(), "f") == errors


def test_a_line_of_samples_is_valid(tmp_path: Path) -> None:
    store = recorded(tmp_path)
    file = min((store.folder / "accepted").iterdir())
    own = read_accepted(file.read_bytes(), "f")
    own.values.update(of_samples(5).values)
    file.write_bytes(own.to_bytes())
    assert verify(store) == []
    file.write_bytes(own.to_bytes().replace(b"@samples", b"@sample_7"))
    assert verify(store)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1.0,", "1.1,", "bits_per_byte@sample_0 was edited"),
        ("1.0,", "1.0,1.0,", "bits_per_byte@sample_0 was edited"),
        ("1.0,", "1.0,,", "'' is no number"),
        ("1.0,", "nan,", "which is never accepted"),
        ("1.0,", "one,", "'one' is no number"),
    ],
)
def test_an_edited_line_of_samples_is_an_error(old: str, new: str, words: str) -> None:
    data = of_samples(3).to_bytes().decode().replace(old, new).encode()
    with pytest.raises(QgateError, match=words):
        read_accepted(data, "f")


def test_a_sample_is_there_once() -> None:
    errors = of_samples(3)
    with_a_gap = of_samples(3)
    del with_a_gap.values[key("bits_per_byte@sample_0")]
    line = next(x for x in entries(with_a_gap) if "sample_1 " in x)
    problems = inspect_accepted(errors.to_bytes() + f"{line}\n".encode(), "f")[1]
    assert any("bits_per_byte@sample_1 is there twice" in problem for problem in problems)
