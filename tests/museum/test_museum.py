from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from qgate.testing import CheckFailure
from tests.museum import exhibits, limits
from tests.museum.exhibit import KINDS, Exhibit, load_exhibits
from tests.museum.pictures import draw_exhibit
from tests.museum.tour import (
    PAGE,
    PICTURES,
    SEEDS,
    by_kind,
    check_right,
    choose_drawn,
    make_page,
    replace_made,
    visit,
)
from tests.shares import proof, share

EXHIBITS = load_exhibits()
EVERY_EXHIBIT = pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.name)
LONGEST = 60


@share(16)
@EVERY_EXHIBIT
def test_the_faulty_implementation_is_red_with_its_cause_in_the_first_line(
    exhibit: Exhibit,
) -> None:
    for seed in range(3):
        with pytest.raises(CheckFailure) as failure:
            exhibit.check(exhibit.faulty, seed)
        assert re.search(exhibit.cause, failure.value.cause), failure.value.cause


@share(16)
@EVERY_EXHIBIT
def test_the_right_implementation_is_green(exhibit: Exhibit) -> None:
    assert list(check_right(exhibit, SEEDS)) == []


@EVERY_EXHIBIT
def test_an_exhibit_is_short_and_says_where_it_was_published(exhibit: Exhibit) -> None:
    path = Path(exhibits.__path__[0]) / f"{exhibit.name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", exhibit.source)
    assert exhibit.source.endswith(f"#{exhibit.name.rpartition('_')[2]}")
    assert exhibit.defect.endswith(".")
    assert exhibit.published


def test_there_are_exhibits_of_every_kind() -> None:
    assert len(EXHIBITS) >= 24
    assert {exhibit.kind for exhibit in EXHIBITS} == set(KINDS)
    assert len({exhibit.source for exhibit in EXHIBITS}) == len(EXHIBITS)


# The page ----------------------------------------------------------------------------------------


@proof
def test_page_and_pictures_are_what_a_run_makes() -> None:
    outcomes = [visit(exhibit, seeds=1) for exhibit in EXHIBITS]
    page = PAGE.read_text(encoding="utf-8")
    new_page = replace_made(page, make_page(outcomes))
    assert _without_figures(new_page) == _without_figures(page), (
        "docs/museum.md is stale; run `python -m tests.museum.tour --write`"
    )
    title = "{http://www.w3.org/2000/svg}title"
    for kind, its in by_kind(outcomes).items():
        stored = ElementTree.fromstring((PICTURES / f"{kind}.svg").read_text(encoding="utf-8"))
        picture = ElementTree.fromstring(draw_exhibit(choose_drawn(its).exhibit))
        assert stored.findtext(title) == picture.findtext(title), "run tests.museum.tour --write"
        assert len(picture.findall("{http://www.w3.org/2000/svg}rect")) > 20
    loosest = [outcome for outcome in outcomes if outcome.passed["cos > 0.97"]]
    assert len(loosest) > 1, "the museum shows nothing that a published limit lets through"
    assert all(outcome.first_line for outcome in loosest)


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_other_pages_count_what_the_page_counts(name: str) -> None:
    root = PAGE.parents[1]
    (counted,) = re.findall(
        r"^\| cos > 0.95 \| (\d+) of (\d+) ", PAGE.read_text(encoding="utf-8"), re.M
    )
    text = (root / name).read_text(encoding="utf-8")
    claim = r"\[(?P<of>\d+) published bugs\]\(docs/museum.md\), (?P<pass>\d+) of which pass a cosine of 0.95"
    match = re.search(claim, text) or re.search(
        r"\[(?P<pass>\d+) of (?P<of>\d+) published bugs\]\(museum.md\) pass a cosine of 0.95", text
    )
    assert match
    assert (match["pass"], match["of"]) == counted


def _without_figures(text: str) -> str:
    """Leave out what differs between processors: the size of an error, how many values have it."""
    text = re.sub(r" {2,}|-{3,}", " ", re.sub(r"[\d.]+(e-\d+)? (dB|of the RMS)", r"# \2", text))
    return re.sub(r"\d+( of \d+ values)", r"#\1", text)


# Limits ------------------------------------------------------------------------------------------


def test_limits_agree_with_numpy() -> None:
    x, y = np.random.default_rng(3).normal(size=(2, 40))
    actual, reference = torch.from_numpy(x), torch.from_numpy(y)
    assert limits.cosine(actual, reference) == pytest.approx(
        np.dot(x, y) / np.linalg.norm(x) / np.linalg.norm(y)
    )
    assert limits.pearson(actual, reference) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert limits.calc_diff(actual, reference) == pytest.approx(
        1 - 2 * np.dot(x, y) / (np.dot(x, x) + np.dot(y, y))
    )
    assert limits.sqnr_db(actual, reference) == pytest.approx(
        10 * np.log10(np.square(y).sum() / np.square(x - y).sum())
    )
    assert limits.matched_share(actual, reference, 0.1, 0.85) == pytest.approx(
        np.isclose(x, y, rtol=0.85, atol=0.1).mean()
    )


@pytest.mark.parametrize(
    ("formats", "passes"),
    [(["mxfp8_e4m3"] * 2, False), (["mxfp8_e4m3", "nvfp4"], True), (["mxfp4_e2m1"] * 2, True)],
)
def test_deepgemm_allows_more_the_fewer_bits_there_are(formats: list[str], passes: bool) -> None:
    reference = torch.linspace(1, 2, 100)
    actual = reference + 0.12 * torch.tensor([1.0, -1.0]).repeat(50)
    assert 0.001 < limits.calc_diff(actual, reference) < 0.01
    assert limits.deepgemm_passes(actual, reference, formats) is passes


def test_llama_limits_have_the_scale_of_the_values() -> None:
    reference = torch.linspace(-1, 1, 4096)
    for size in (1.0, 100.0):
        sizes = (float(reference.square().mean().sqrt()) * size, 1.0)
        assert limits.llama_passes(reference * size * 1.01, reference * size, 0, sizes)
        assert not limits.llama_passes(reference * size * 1.3, reference * size, 0, sizes)


@pytest.mark.parametrize("limit", limits.LIMITS, ids=lambda limit: limit.name)
def test_nan_passes_no_limit(limit: limits.Limit) -> None:
    reference = torch.linspace(1, 2, 100)
    assert limit.passes(reference, reference)
    assert not limit.passes(torch.full_like(reference, torch.nan), reference)
