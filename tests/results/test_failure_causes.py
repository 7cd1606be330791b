"""Causes of failed runs: the place named first, and what is said to follow from it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from qgate.results import Tally, github_annotations, markdown_summary, merge, read
from qgate.results.failure_causes import EarlierCause, KnownCauses, origin_of
from qgate.text import for_markdown
from tests.results.making import header, record, write

INT8 = "int8 per channel"


def failing(
    site: str, scope: str = "local", kind: str = "budget", order: int = 0, **more: Any
) -> dict[str, Any]:
    """A failed comparison at a site; what is diagnosed is said in `fault`."""
    layer = ".".join(site.partition(":")[0].split(".")[:2]) if site.startswith("layers.") else ""
    fault, quantizer = more.pop("fault", ""), more.pop("quantizer", INT8)
    failure = record(site, 1.0, scope=scope, order=order, layer=layer, **more)
    failure["node"] = more.get("node") or f"{scope}[{failure['model']}-{failure['mode']}-{layer}]"
    failure["checks"] = [{**failure["checks"][0], "kind": kind, "quantizer": quantizer}]
    words = fault or "is not what correct int8 gives"
    failure["finding"] = {"fault": words, "figures": "1 > 0.1", "diagnosed": bool(fault)}
    return failure


def causes(*records: dict[str, Any]) -> list[tuple[str, int, int]]:
    shuffled = list(records)
    random.Random(len(shuffled)).shuffle(shuffled)
    return [(c.place, c.same, c.followers) for c in Tally(shuffled).causes]


FAULT = failing("layers.3.up:weight", order=40)
FOLLOWING = [
    failing("layers.3.up:output", order=41),
    failing("layers.3:output", kind="regression", order=45),
    *(failing(f"layers.{n}:output", "carried", "regression", order=15 * n) for n in range(3, 8)),
    failing("logits", "task", "regression"),
    failing("layers.3:input", "backward", "regression", order=39),
]


def test_all_that_comes_after_a_local_error_follows_from_it() -> None:
    assert causes(FAULT, *FOLLOWING) == [("layers.3.up:weight", 0, 7)]


def test_a_limit_without_accepted_value_comes_before_a_regression() -> None:
    """Innocent layers whose accepted errors moved a little do not stand before the fault."""
    early = failing("layers.0.q:output", kind="regression", order=2, fault="is worse than accepted")
    cause_list = causes(early, FAULT, *FOLLOWING)
    assert [site for site, _, _ in cause_list] == ["layers.3.up:weight", "layers.0.q:output"]


def test_one_fault_in_shared_code_is_one_cause() -> None:
    words = "is truncated, not rounded to the nearest"
    faults = [
        failing(f"layers.{n}.{name}:weight", order=10 * n + index, fault=words)
        for n in range(8)
        for index, name in enumerate(("q", "k", "up"))
    ]
    unexplained = [failing(f"layers.{n}.down:weight", order=10 * n + 5) for n in range(8)]
    ((site, same, followers),) = causes(*faults, *unexplained)
    assert (site, followers) == ("layers.0.q:weight", 7)
    assert same >= 23


def test_the_fault_of_most_sites_comes_first() -> None:
    one = failing("layers.0.q:output", order=1, fault="its bias is not used")
    words = "its weight is quantized with 2.02 times the right scales"
    faults = [failing(f"layers.{n}.up:output", order=10 * n + 5, fault=words) for n in range(1, 5)]
    assert causes(one, *faults) == [("layers.1.up:output", 3, 3), ("layers.0.q:output", 0, 0)]


def test_two_faults_are_two_causes() -> None:
    other = failing("lm_head:weight", order=900, fault="is transposed", quantizer="fp8_e4m3")
    cause_list = causes(FAULT, *FOLLOWING, other)
    assert [site for site, _, _ in cause_list] == ["layers.3.up:weight", "lm_head:weight"]


def test_a_carried_error_enters_at_its_first_place() -> None:
    rows = [failing(f"layers.{n}:output", "carried", "regression", order=n) for n in range(2, 6)]
    assert causes(*rows) == [("layers.2:output", 0, 3)]


def test_one_fault_in_several_modes_is_said_once() -> None:
    doubled = [{**entry, "mode": mode, "node": entry["node"] + mode}
            for mode in ("int8", "mxfp4") for entry in (FAULT, *FOLLOWING)]  # fmt: skip
    (cause,) = Tally(doubled).causes
    assert "modes int8, mxfp4" in cause.text()
    assert cause.followers == 15


def test_a_wrong_reference_explains_its_model() -> None:
    reference = failing("lm_head:output", mode="fp32", node="reference", quantizer="fp32", order=99)
    assert causes(FAULT, *FOLLOWING, reference) == [("lm_head:output", 0, 8)]


def test_a_gate_without_accepted_errors_is_no_cause() -> None:
    assert causes(record("new", accepted={})) == []
    assert causes(record("good")) == []


def test_every_failed_gate_follows_from_a_cause() -> None:
    chance = random.Random(0)
    rows = [
        failing(
            f"layers.{chance.randrange(4)}.m{chance.randrange(3)}:output",
            chance.choice(("local", "carried", "backward", "task", "sweep")),
            chance.choice(("budget", "regression", "nonfinite", "absent", "nothing")),
            order=chance.randrange(30),
            node=f"test{chance.randrange(12)}",
            mode=chance.choice(("a", "b")),
        )
        for _ in range(300)
    ]
    tally = Tally(rows)
    nodes = set().union(*(cause.gates for cause in tally.causes))
    assert nodes == {row["node"] for row in rows}


def test_shards_have_the_cause_of_the_whole(tmp_path: Path) -> None:
    rows = [FAULT, *FOLLOWING]
    parts = [write(tmp_path / f"{n}.jsonl", *rows[n::2]) for n in range(2)]
    merge(parts, tmp_path / "all.jsonl")
    _, merged = read(tmp_path / "all.jsonl")
    assert [c.text() for c in Tally(merged).causes] == [c.text() for c in Tally(rows).causes]


def test_the_same_words_everywhere() -> None:
    rows = [FAULT, *FOLLOWING]
    (cause,) = Tally(rows).causes
    assert cause.text() == (
        "layers.3.up:weight (tiny, mode 2-1) is not what correct int8 gives: 1 > 0.1; follow "
        "from it: 5 layers, 1 gradient, the task"
    )
    assert markdown_summary(rows, header=header()).splitlines()[2] == (
        f"**cause: {for_markdown(cause.text())}**"
    )
    first, *other_lines = github_annotations(rows)
    assert first.endswith(f"::cause: {cause.text()}")
    assert len(other_lines) == 7
    assert all(line.endswith("; follows from layers.3.up:weight") for line in other_lines)


def test_a_test_says_what_it_follows_from_once_that_is_known() -> None:
    earlier = KnownCauses()
    assert (
        earlier.add([failing("layers.5:output", "carried", "regression", order=75)])
        == EarlierCause()
    )
    assert earlier.add([FAULT]) == EarlierCause()
    later = failing("layers.6:output", "carried", "regression", order=90)
    assert earlier.add([later]) == ("follows from layers.3.up:weight", False)
    assert (
        earlier.add([failing("layers.9.up:weight", order=140)]).words
        == "the same as at layers.3.up:weight"
    )
    other = failing("layers.10.up:weight", order=155, fault="is transposed")
    assert earlier.add([other]).words == ""
    assert earlier.add([{**later, "mode": "another"}]).words == ""


def test_what_comes_after_two_faults_follows_from_both() -> None:
    late = failing("layers.9.up:weight", order=140, fault="is transposed")
    between = failing("layers.5:output", "carried", "regression", order=75)
    task = failing("logits", "task", "regression")
    rows = [FAULT, late, between, task, failing("logits", "carried", "regression", order=200)]
    first, second = Tally(rows).causes
    assert first.followers_text == "follow from it: 1 layer, the logits, the task"
    assert second.followers_text == "follow from it: the logits, the task"
    origin = f"follows from {first.place} and {second.place}"
    assert origin_of([first, second], task["node"]) == origin
    assert origin_of([first, second], between["node"]) == f"follows from {first.place}"
    earlier = KnownCauses()
    earlier.add([FAULT])
    earlier.add([late])
    assert earlier.add([task]) == (origin, False)


def test_gates_with_the_same_fault_do_not_follow() -> None:
    words = "is truncated, not rounded to the nearest"
    faults = [failing(f"layers.{n}.up:weight", order=9 * n, fault=words) for n in range(3)]
    gradients = [
        failing(f"layers.{n}:input", "backward", "regression", order=9 * n) for n in range(2)
    ]
    (cause,) = Tally([*faults, *gradients]).causes
    assert (cause.same, cause.followers_text) == (2, "follow from it: 2 gradients")


def test_a_cause_says_where_its_code_is_and_what_to_do_about_it() -> None:
    failure = failing("layers.3.up:weight", code="kernels.py:7 Int8.forward", reproduction="one")
    (cause,) = Tally([failure]).causes
    assert cause.suspect.code == "kernels.py:7 Int8.forward"
    assert cause.suspect.script == "one"
    assert cause.suspect.advice == "fix the quantizer or raise budget_db (default)"
