"""Which limits win, and what a table or a marker may not say."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
import torch

import qgate
from qgate.errors import QgateError
from qgate.gate import Limits, Policy
from qgate.gate import policy as policy_file
from qgate.gate.policy import SWITCHED_OFF

TABLE = tomllib.loads(r"""
budget_db = 1.0
regression = 0.03
absolute = ["relative_mse<1e-2", "correlation>0.99"]

[[rules]]
sites = 'layers\.1\.'
budget_db = 2.0
absolute = ["relative_mse<1e-1"]

[[rules]]
sites = 'mixer'
modes = "2-*"
scopes = ["carried", "local"]
budget_db = 3.0
reason = "measured"
""")


def limits(
    site: str = "x:output", mode: str = "1", scope: str = "carried", marker: Any = None
) -> Limits:
    policy = Policy.from_table(TABLE)
    return (policy.with_marker(marker) if marker else policy).limits_for(site, mode, scope)


def test_without_a_table_the_defaults_hold() -> None:
    assert Policy().limits_for("x", scope="carried") == Limits()
    assert (Limits().budget_db, Limits().regression, Limits().regression_other_device) == (
        0.5,
        0.02,
        0.05,
    )


@pytest.mark.parametrize(
    ("site", "mode", "scope", "budget"),
    [
        ("layers.0.norm", "2-1", "carried", 1.0),
        ("layers.1.norm", "2-1", "carried", 2.0),
        ("layers.1.mixer", "2-1", "carried", 3.0),
        ("layers.1.mixer", "mxfp8", "carried", 2.0),
        ("layers.1.mixer", "2-1", "backward", 2.0),
        ("layers.0.mixer", "2-1", "local", 3.0),
    ],
)
def test_the_last_rule_that_fits_wins(site: str, mode: str, scope: str, budget: float) -> None:
    assert limits(site, mode, scope).budget_db == budget
    assert limits(site, mode, scope, {"budget_db": 4}).budget_db == 4
    assert limits(site, mode, scope).regression == 0.03


def test_every_limit_knows_where_it_was_set() -> None:
    site_limits = limits("layers.1.mixer", "2-1", "carried", {"regression": 0.5})
    assert site_limits.source("budget_db") == "rule 2 of [tool.qgate.limits]"
    assert site_limits.source("regression") == "limits marker"
    assert site_limits.source("regression_other_device") == "default"
    assert site_limits.absolute["relative_mse"].source == "rule 1 of [tool.qgate.limits]"
    assert site_limits.absolute["correlation"].source == "[tool.qgate.limits]"


def test_absolute_bounds_are_overridden_metric_by_metric() -> None:
    site_limits = limits("layers.1.mixer", marker={"absolute": "correlation>0.5", "reason": "why"})
    assert {name: bound.value for name, bound in site_limits.absolute.items()} == {
        "relative_mse": 0.1,
        "correlation": 0.5,
    }
    assert site_limits.absolute["correlation"].reason == "why"


@pytest.mark.parametrize(
    ("scope", "marker", "metrics"),
    [
        ("carried", {"absolute": "relative_mse<1,bits_per_byte<2"}, {"relative_mse"}),
        ("task", {"absolute": "relative_mse<1,bits_per_byte<2"}, {"bits_per_byte"}),
        ("local", {"absolute": "relative_mse<1"}, set()),
        ("local", {"absolute": "relative_mse<1", "scopes": "local"}, {"relative_mse"}),
        ("carried", {"absolute": "relative_mse<1", "scopes": "local"}, set()),
    ],
)
def test_an_absolute_bound_is_about_the_carried_error_or_the_task(
    scope: str, marker: dict[str, Any], metrics: set[str]
) -> None:
    assert set(Policy().with_marker(marker).limits_for("x", "m", scope).absolute) == metrics


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"budget": 1}, ["'budget'", "Did you mean budget_db"]),
        ({"regression": "2%"}, ["[tool.qgate.limits]", "regression = '2%'"]),
        ({"absolute": ["relative_msee<1"]}, ["[tool.qgate.limits]", "Did you mean relative_mse"]),
        ({"absolute": []}, ["absolute = []", "leave it out"]),
        ({"absolute": [1]}, ["absolute = [1]"]),
        ({"missing": "skip"}, ["'skip'"]),
        ({"sites": "x"}, ["'sites'"]),
        ({"rules": {"sites": "x"}}, ["[[tool.qgate.limits.rules]]"]),
        ({"rules": [{"budget_db": 1}]}, ["rule 1", "says nothing of sites"]),
        ({"rules": [{"sites": "("}]}, ["rule 1", "'('", "no regular expression"]),
        ({"rules": [{"sites": "x", "scopes": ["carrid"]}]}, ["'carrid'", "Did you mean carried"]),
        ({"rules": [{"sites": "x", "modes": []}]}, ["modes = []"]),
        ({"rules": [{"sites": "x", "models": []}]}, ["models = []"]),
        ({"rules": [{"sites": "x", "models": 3}]}, ["models = 3"]),
        (
            {"rules": [{"sites": "x", "model": "a"}]},
            ["rule 1", "'model'", "Did you mean mode", "models"],
        ),
        ({"rules": [{"sites": "x"}, {"site": "x"}]}, ["rule 2", "'site'", "Did you mean sites"]),
    ],
)
def test_a_bad_table_is_repeated_with_what_is_allowed(
    table: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(QgateError) as caught:
        Policy.from_table(table)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_bad_marker_names_the_marker() -> None:
    with pytest.raises(QgateError, match=r"argument of the limits marker 'budgetdb'.*budget_db"):
        Policy().with_marker({"budgetdb": 1})
    with pytest.raises(QgateError, match="limits marker: limit budget_db = -1"):
        Policy().with_marker({"budget_db": -1})


MODELS = [
    {"sites": "x", "regression": 0.1, "models": "tiny-*"},
    {"sites": "x", "regression": 0.2, "models": ["tiny-llama", "mine"]},
    {"sites": "x", "budget_db": 3.0},
]


@pytest.mark.parametrize(
    ("model", "regression", "settings"),
    [
        ("tiny-mamba", 0.1, 3),
        ("tiny-llama", 0.2, 4),
        ("mine", 0.2, 3),
        ("Tiny-mamba", 0.02, 2),
        ("a-tiny-model", 0.02, 2),
        ("", 0.02, 2),
    ],
)
def test_a_rule_may_be_for_some_models(model: str, regression: float, settings: int) -> None:
    policy = Policy.from_table({"rules": MODELS}).for_model(model)
    assert policy.limits_for("x").regression == regression
    assert policy.limits_for("x").budget_db == 3.0
    assert len(policy.settings) == len(policy.to_dict()) == settings


def test_a_rule_for_some_models_holds_for_none_before_one_is_named() -> None:
    policy = Policy.from_table({"rules": MODELS})
    assert policy.limits_for("x").regression == 0.02
    assert [rule["models"] for rule in policy.to_dict()] == [
        [],
        ["tiny-*"],
        ["tiny-llama", "mine"],
        [],
    ]
    marked = policy.with_marker({"regression": 0.3, "models": "tiny-*"})
    assert marked.limits_for("x").regression == 0.02
    assert marked.for_model("tiny-mamba").limits_for("x").regression == 0.3


def test_a_marker_on_the_policy_of_a_model_may_be_for_others() -> None:
    policy = Policy().for_model("tiny-mamba")
    marked = policy.with_marker({"regression": 0.3, "models": "mine"})
    assert marked.limits_for("x", scope="carried") == Limits()
    assert policy.with_marker({"regression": 0.3}).limits_for("x").regression == 0.3


def test_an_expression_of_another_model_need_not_find_a_site_here() -> None:
    rules = [{"sites": "attn", "models": "llama"}, {"sites": "mixer", "models": "mamba"}]
    policy = Policy.from_table({"rules": rules})
    policy.for_model("mamba").check_sites(["mixer"])
    with pytest.raises(QgateError, match="'attn' matches no site"):
        policy.for_model("llama").check_sites(["mixer"])


def test_an_expression_that_finds_no_site_is_an_error() -> None:
    policy = Policy.from_table(TABLE)
    policy.check_sites(["layers.1.mixer"])
    with pytest.raises(QgateError, match=r"rule 1 .*matches no site\. There are layers\.0\.mixer"):
        policy.check_sites(["layers.0.mixer"])
    with pytest.raises(QgateError, match="There are none"):
        policy.check_sites([])


def test_unknown_scope() -> None:
    with pytest.raises(QgateError, match=r"'lokal'.*Did you mean local"):
        Policy().limits_for("x", "m", "lokal")


def test_the_example_in_the_documentation_is_a_policy() -> None:
    text = (policy_file.__doc__ or "").split("order.", 1)[1]
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    table = tomllib.loads("\n".join(lines))["tool"]["qgate"]["limits"]
    policy = Policy.from_table(table).for_model("tiny-mamba")
    assert policy.limits_for("layers.0.mixer", "2-1", "carried").regression == 0.1
    assert policy.limits_for("layers.0.mixer", "1", "carried").regression == 0.02


def test_the_policy_as_plain_data_says_what_was_set() -> None:
    plain = Policy.from_table(TABLE).to_dict()
    assert [rule["budget_db"] for rule in plain] == [1.0, 2.0, 3.0]
    assert plain[0]["absolute"] == ["relative_mse <= 0.01", "correlation >= 0.99"]
    assert plain[2]["modes"] == ["2-*"]


# Looser limits -----------------------------------------------------------------------------------


def test_limits_that_are_looser_than_the_default_are_listed() -> None:
    table = tomllib.loads(r"""
budget_db = 1.5
regression = 0.01
absolute = ["relative_mse<1e-3"]
[[rules]]
sites = 'layers'
regression = 1.0
scopes = ["carried"]
reason = "measured"
[[rules]]
sites = 'layers\.0\.'
regression_other_device = 0.1
scopes = ["task"]
[[rules]]
sites = 'layers\.0\.'
models = "other-*"
atol = 0.1
[[rules]]
sites = 'layers\.1\.'
absolute = ["relative_mse<1e-2", "correlation>0.9"]
""")
    limits = Policy.from_table(table).for_model("mine").looser()
    assert [(limit["limit"], limit["factor"], limit["reason"]) for limit in limits] == [
        ("budget_db", 3.0, ""),
        ("regression", pytest.approx(50.0), "measured"),
        ("absolute relative_mse", pytest.approx(10.0), ""),
    ]
    assert limits[1]["source"] == "rule 1 of [tool.qgate.limits]"
    assert (limits[1]["sites"], limits[1]["scopes"]) == ("layers", ["carried"])
    assert not any(limit["shipped"] for limit in limits)
    assert Policy().looser() == []


@pytest.mark.parametrize(
    ("marker", "limits"),
    [
        ({"atol": 0.5, "regression": 0, "reason": "x"}, [("atol", True)]),
        ({"atol": 0.6, "regression": 0, "reason": "x"}, [("atol", False)]),
        ({"atol": 0.4, "regression": 0, "reason": "x"}, []),
    ],
)
def test_markers_of_shipped_suites_are_told_from_changed_ones(
    marker: dict[str, Any], limits: list[tuple[str, bool]]
) -> None:
    shipped = {"atol": 0.5, "regression": 0, "reason": "x"}
    policy = Policy().with_marker(marker, standard=shipped)
    assert [(limit["limit"], limit["shipped"]) for limit in policy.looser()] == limits
    if limits == [("atol", False)]:
        assert policy.looser()[0]["factor"] == pytest.approx(1.2)


def test_a_bound_that_the_shipped_suite_has_and_a_copy_lacks_is_listed() -> None:
    shipped = {"absolute": ["relative_mse<0.6", "correlation>0.7"], "reason": "x"}
    copy = {"absolute": ["relative_mse<60"], "reason": "x"}
    limits = Policy().with_marker(copy, standard=shipped).looser()
    assert [(limit["limit"], limit["value"], limit["factor"]) for limit in limits] == [
        ("absolute relative_mse", 60.0, pytest.approx(100.0)),
        ("absolute correlation", None, math.inf),
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regression", 1.0),
        ("regression_other_device", 1),
        ("regression_across_weights", 1.0),
        ("budget_db", 14.0),
        ("atol", 1),
    ],
)
def test_switching_a_kind_of_limit_off_needs_a_reason(name: str, value: float) -> None:
    for table in ({name: value}, {"rules": [{"sites": "x", name: value, "reason": " "}]}):
        with pytest.raises(QgateError) as error:
            Policy.from_table(table)
        for part in (f"limit {name} = {value!r}", "switches that kind of limit off", "reason ="):
            assert part in str(error.value)
    with pytest.raises(QgateError, match=r"limits marker: limit .* switches"):
        Policy().with_marker({name: value})
    Policy.from_table({name: value, "reason": "a new kernel"})
    Policy.from_table({name: 0.99 * value})


def test_at_the_least_switched_off_budget_zeros_pass_as_int4() -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    error = (qgate.quantize(x, "int4") - x).square().sum() / x.square().sum()
    over_the_ideal = -10 * math.log10(float(error))
    assert 0 < over_the_ideal - SWITCHED_OFF["budget_db"][0] < 1


def test_bounds_of_other_modes_and_scopes_are_not_compared() -> None:
    policy = Policy().with_marker({"absolute": "relative_mse<1e-3", "modes": "fp8_*,hif8"})
    other = {"absolute": "relative_mse<0.3", "modes": "mx*"}
    assert policy.with_marker(other).looser() == []
    assert policy.with_marker({**other, "modes": "*"}).looser()[0]["usual"] == 1e-3
    scoped = Policy().with_marker({"absolute": "relative_mse<1e-3", "scopes": "local"})
    assert scoped.with_marker({**other, "scopes": "backward"}).looser() == []
    assert scoped.with_marker({**other, "scopes": "local,backward"}).looser() != []
