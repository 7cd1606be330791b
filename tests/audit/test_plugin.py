"""Runs of pytest under the audit: places, exit status, workers, and tests left as they were."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch

from qgate.audits import assertions, callers, session
from qgate.audits.record import AuditRecord
from qgate.audits.watching import listening
from qgate.records.validating import json_schema
from tests.audit.conftest import Audit
from tests.plugin.conftest import run_alone
from tests.shares import proof, share

WEAK = """
def test_weak():
    torch.testing.assert_close(tensor() + 1e-6, tensor(), rtol=0.5, atol=0.5)
"""
STRONG = """
def test_strong():
    torch.testing.assert_close(tensor() + 1e-7, tensor())
"""


def test_a_weak_place_is_one_line_with_a_limit(audit: Audit) -> None:
    run = audit(WEAK)
    run.result.assert_outcomes(passed=1)
    line = 1 + (Path("test_it.py").read_text().splitlines()).index(
        "    torch.testing.assert_close(tensor() + 1e-6, tensor(), rtol=0.5, atol=0.5)"
    )
    assert (
        run.summary[0] == "1 comparison at 1 place, 1 of them judged: 1 place accepts wrong values"
    )
    start = f"test_it.py:{line}: assert_close, rtol=0.5, atol=0.5, accepts +10 %, 5 % noise, "
    assert run.summary[1].startswith(start)
    assert run.summary[1].endswith("bfloat16 precision; rtol=0, atol=8e-5 would not")
    assert run.place["test"] == "test_it.py::test_weak"


def test_a_tight_place_has_no_line(audit: Audit) -> None:
    run = audit(STRONG)
    assert run.place["accepts"] == []
    assert {"zeros", "noise", "coarser"} <= {*run.place["refuses"]}
    assert len([line for line in run.summary if "test_it.py:" in line]) == 0


@share(6)
@pytest.mark.parametrize(
    ("tests", "options", "status"),
    [
        (WEAK, [], 0),
        (WEAK, ["--audit-strict"], 1),
        (STRONG, ["--audit-strict"], 0),
        (WEAK + "\ndef test_fails(): assert False\n", [], 1),
        ("def test_nothing(): pass", ["--audit-strict"], 0),
        ("", ["--audit-strict"], 5),
        ("def broken(:", ["--audit-strict"], 2),
    ],
    ids=["weak", "strict", "strong", "failed", "nothing", "no tests", "broken"],
)
def test_only_strict_changes_the_exit_status(
    tests: str, options: list[str], status: int, audit: Audit
) -> None:
    assert audit(tests, *options).result.ret == status


def test_a_run_without_comparisons_says_so(audit: Audit) -> None:
    run = audit("def test_nothing(): pass")
    assert run.summary[0].startswith("no comparison of tensors passed")
    assert run.places == []


FAILING = """
def test_close():
    torch.testing.assert_close(tensor(), tensor() + 1)

def test_inside():
    torch.testing.assert_close({"a": [tensor(), tensor() + 1]}, {"a": [tensor(), tensor()]})

def test_truth():
    assert torch.allclose(tensor(), tensor() + 1), "not close"

def test_method():
    assert tensor().allclose(tensor() + 1)

def test_cosine():
    assert F.cosine_similarity(tensor().flatten(), -tensor().flatten(), dim=0) > 0.9

def test_numpy():
    np.testing.assert_allclose(tensor().numpy(), tensor().numpy() + 1)

def test_decimals():
    np.testing.assert_array_almost_equal(tensor().numpy(), tensor().numpy() + 1)

def test_shapes():
    torch.testing.assert_close(tensor(), tensor(3))

def test_arguments():
    torch.allclose(tensor())

class TestUnit(unittest.TestCase):
    def test_true(self):
        self.assertTrue(torch.equal(tensor(), tensor() + 1))
"""


def failures(result: pytest.RunResult) -> list[str]:
    lines = [line for line in result.outlines if line.startswith(("E  ", ">", "test_it.py"))]
    return [re.sub(r"0x[0-9a-f]+", "0x", line) for line in lines]


@proof
def test_failing_tests_fail_with_the_same_messages(audit: Audit, pytester: pytest.Pytester) -> None:
    run = audit(FAILING)
    plain = run_alone(pytester, "-p", "no:cacheprovider", "-p", "no:qgate.plugin", "test_it.py")
    run.result.assert_outcomes(failed=10)
    assert failures(run.result) == failures(plain)
    assert len(failures(plain)) > 30
    assert run.record["errors"] == {}


UNACCUSED = """
def loose(x, y):
    torch.testing.assert_close(x, y, rtol=9.0, atol=9.0)

def test_constant():
    loose(torch.ones(4, 4), torch.ones(4, 4))
    loose(torch.zeros(4, 4), torch.full((4, 4), 1e-9))

def test_empty():
    loose(torch.empty(0, 4), torch.empty(0, 4))

def test_itself():
    x = tensor()
    loose(x, x)
    np.testing.assert_allclose(x.numpy(), x.numpy(), rtol=9)

def test_integers():
    loose(torch.arange(9), torch.arange(9))
    loose(torch.arange(9) > 3, torch.arange(9) > 3)

def test_numbers():
    torch.testing.assert_close(1.0, 1.0, rtol=9.0, atol=9.0)
    assert np.allclose(1.0, 1.1, atol=9)
    loose(torch.tensor(1.0), torch.tensor(1.1))

def test_expected_failure():
    with pytest.raises(AssertionError):
        torch.testing.assert_close(tensor(), tensor() + 1)

def test_negative():
    x = tensor()
    assert not torch.allclose(x, x + 1, atol=0.1)
    assert torch.allclose(x, x + 0.1, atol=9) or True
    assert torch.allclose(x, x + 0.1, atol=9) is not False
    if torch.allclose(x, x + 0.1, atol=9):
        x = x + 1
    torch.allclose(x, x + 0.1, atol=9)
    close = torch.allclose(x, x + 0.1, atol=9)
    cosine = F.cosine_similarity(x, x + 0.1, dim=0)

def test_exact():
    assert torch.equal(tensor(), tensor())
"""


def test_places_that_cannot_be_accused_are_not(audit: Audit) -> None:
    run = audit(UNACCUSED, "--audit-strict")
    run.result.assert_outcomes(passed=8)
    assert run.result.ret == 0, run.summary
    assert [entry for entry in run.places if entry["accepts"]] == []
    assert run.record["errors"] == {}


def test_a_place_is_weak_where_it_is_weak_in_every_call(audit: Audit) -> None:
    run = audit(
        """
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 1e-7), (1e-7, 0), (0.0, 0)])
def test_scales(scale, shift):
    torch.testing.assert_close(tensor(scale=scale) + shift, tensor(scale=scale))

@pytest.mark.parametrize("scale", [1e-7, 1e-8, 0.0])
def test_small(scale):
    torch.testing.assert_close(tensor(scale=scale) + 0, tensor(scale=scale))
"""
    )
    strong, weak = run.places
    assert (strong["calls"], strong["judged"], strong["accepts"]) == (3, 1, [])
    assert (weak["calls"], weak["judged"]) == (3, 2)
    assert "zeros" in weak["accepts"]
    assert weak["left_out"] == {"constant tensors": 1}


def test_a_helper_in_another_file_counts_at_the_line_of_the_test(
    audit: Audit, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        helpers="import torch\n\ndef close(x, y):\n    torch.testing.assert_close(x, y, rtol=9, atol=9)\n"
    )
    pytester.syspathinsert()
    run = audit(
        """
def test_through():
    from helpers import close
    close(tensor(), tensor() + 1)
    close(tensor(), tensor() + 2)
"""
    )
    assert [record["through"] for record in run.places] == ["helpers.py:4"] * 2
    first, second = (entry["line"] for entry in run.places)
    assert second == first + 1
    assert f"test_it.py:{first} (through helpers.py:4): assert_close" in run.summary[1]


@proof
def test_names_that_a_conftest_bound_are_watched(audit: Audit, pytester: pytest.Pytester) -> None:
    """In a process of its own, where nothing has imported torch or numpy before."""
    pytester.makeconftest(
        "from numpy.testing import assert_allclose\nfrom torch.testing import assert_close\n"
        "from torch import allclose\nimport sys\nsys.modules['bound'] = sys.modules[__name__]\n"
    )
    run = audit(
        """
def test_bound():
    from bound import allclose, assert_allclose, assert_close
    assert_close(tensor() + 0, tensor(), rtol=1, atol=1)
    assert_allclose(tensor().numpy() + 0, tensor().numpy(), rtol=1)
    assert allclose(tensor() + 0, tensor(), rtol=1)
    assert_script = torch.jit.script(script)(tensor(), tensor())

def script(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.allclose(x, y) and bool(F.cosine_similarity(x, y, dim=0).mean() > 0.9)
""",
        alone=True,
    )
    run.result.assert_outcomes(passed=1)
    assert [entry["function"] for entry in run.places] == [
        "assert_close", "assert_allclose", "torch.allclose",
    ]  # fmt: skip
    assert all(record["accepts"] for record in run.places)


NUMPY_ONLY = """
import sys
import numpy as np
import pytest

@pytest.mark.parametrize("seed", range(6))
def test_numpy(seed):
    x = np.random.default_rng(seed).standard_normal((8, 64))
    np.testing.assert_allclose(x + 1e-9, x, rtol=0.3)
    assert np.allclose(x + 1e-9, x, rtol=0, atol=0.3 if seed else 1e-12)
    assert "torch" not in sys.modules
"""


@proof
def test_a_project_without_torch_stays_without_it(audit: Audit) -> None:
    run = audit(NUMPY_ONLY, alone=True, head="")
    run.result.assert_outcomes(passed=5, failed=1)  # seed 0: a comparison that fails
    assert [bool(entry["accepts"]) for entry in run.places] == [True, True]
    assert "float32" in run.places[0]["coarser"]


@proof
def test_workers_of_xdist_send_their_places(audit: Audit) -> None:
    alone = audit(NUMPY_ONLY, alone=True, head="")
    spread = audit(NUMPY_ONLY, "-n", "2", "--audit-strict", alone=True, head="")
    spread.result.assert_outcomes(passed=5, failed=1)
    assert spread.result.ret == 1
    assert [entry["calls"] for entry in spread.places] == [6, 5]
    for one, other in zip(alone.places, spread.places, strict=True):
        assert {**one, "limits": sorted(one["limits"])} == {
            **other, "limits": sorted(other["limits"])
        }  # fmt: skip
    assert spread.summary[:3] == alone.summary[:3]


def test_unittest_and_containers_are_seen(audit: Audit) -> None:
    run = audit(
        """
import sys, types

class TestUnit(unittest.TestCase):
    def test_true(self):
        self.assertTrue(torch.allclose(tensor() + 0, tensor(), atol=5))
        self.assertGreater(F.cosine_similarity(tensor().view(-1), tensor().view(-1) + 0, dim=0), 0.9)

    def test_containers(self):
        torch.testing.assert_close({"a": [tensor() + 0]}, {"a": [tensor()]}, rtol=1, atol=1)

    def test_internal(self):
        sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
        from torch.testing._internal.common_utils import TestCase
        TestCase().assertEqual(tensor() + 0, tensor(), rtol=1, atol=1)
"""
    )
    run.result.assert_outcomes(passed=3)
    assert [entry["function"] for entry in run.places] == [
        "torch.allclose", "cosine_similarity", "assert_close", "assertEqual",
    ]  # fmt: skip
    assert all("larger" in record["accepts"] for record in run.places)


def test_what_a_test_patches_is_as_it_was(audit: Audit) -> None:
    run = audit(
        """
import torch.testing
from torch.testing import assert_close

def test_patched(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.testing, "assert_close", lambda *args: calls.append(args))
    monkeypatch.setattr(torch, "allclose", lambda *args: 7)
    torch.testing.assert_close(1, 2)
    assert torch.allclose(3, 4) == 7
    assert calls == [(1, 2)]

def test_afterwards():
    assert_close(tensor() + 0, tensor(), rtol=1, atol=1)
    assert torch.allclose(tensor() + 0, tensor(), rtol=1)
"""
    )
    run.result.assert_outcomes(passed=2)
    assert len(run.places) == 2


def test_the_libraries_are_as_they_were_afterwards() -> None:
    def functions() -> list[object]:
        pair = torch.testing._comparison.TensorLikePair
        return [
            torch.allclose, torch.equal, torch.cosine_similarity,
            torch.nn.functional.cosine_similarity, np.allclose, np.testing.assert_allclose,
            pair.compare, vars(torch.Tensor).get("allclose"), *sys.meta_path,
        ]  # fmt: skip

    before = functions()
    with listening(lambda _comparison: None):
        during = functions()
        with listening(lambda _comparison: None):
            assert len(functions()) == len(during) + 1
        assert all(one is other for one, other in zip(during, functions(), strict=True))
    after = functions()
    assert all(one is not other for one, other in zip(before[:8], during[:8], strict=True))
    assert all(one is other for one, other in zip(before, after, strict=True))


@proof
def test_compiled_and_transformed_code_runs_as_before(audit: Audit) -> None:
    run = audit(
        """
def similar(x, y):
    return F.cosine_similarity(x, y, dim=1).sum()

def test_compiled():
    compiled = torch.compile(similar, fullgraph=True, backend="eager")
    assert compiled(tensor(), tensor()) > 0

def test_traced():
    assert torch.fx.symbolic_trace(similar)(tensor(), tensor()) > 0

def test_mapped():
    assert torch.vmap(lambda x, y: F.cosine_similarity(x, y, dim=0))(tensor(), tensor()).sum() > 0

def test_overridden():
    handled = {torch.allclose: 1}
    class Mine(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return handled[function]
    assert torch.allclose(torch.ones(3).as_subclass(Mine), torch.ones(3)) == 1
"""
    )
    run.result.assert_outcomes(passed=4)
    assert run.record["errors"] == {}


def test_the_checks_of_a_trace_are_its_own(audit: Audit) -> None:
    run = audit(
        """
def test_traced():
    layer = torch.nn.Linear(64, 8)
    torch.testing.assert_close(torch.jit.trace(layer, tensor())(tensor()), layer(tensor()))
"""
    )
    run.result.assert_outcomes(passed=1)
    assert [entry["function"] for entry in run.places] == ["assert_close"]


@share(8)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (session, "judge_closeness"), (session, "caller_of"), (session, "add_judgment"),
        (callers.ProjectFiles, "contains"), (session, "assertion_on"), (assertions, "call_at"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_error_inside_the_audit_is_named_and_changes_no_test(
    owner: object, name: str, audit: Audit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(owner, name, broken)
    run = audit(
        WEAK + STRONG + "\ndef test_truth(): assert torch.allclose(tensor() + 0, tensor())\n"
    )
    run.result.assert_outcomes(passed=3)
    if name != "contains":  # asked only where a helper compares
        ((text, count),) = run.record["errors"].items()
        assert text == "ZeroDivisionError: planted"
        assert run.summary[-2].startswith(f"{count} error") or any(
            "inside the audit; the tests are not affected: ZeroDivisionError: planted" in line
            for line in run.summary
        )


def test_calc_diff_of_a_project_is_seen_and_something_else_of_that_name_is_not(
    audit: Audit,
) -> None:
    run = audit(
        """
def calc_diff(x, y):
    x, y = x.double(), y.double()
    return 1 - 2 * (x * y).sum() / (x * x + y * y).sum()

def cos_sim(x, y):
    return (x - y).abs().sum() + 0.5

def test_it():
    x = tensor()
    assert calc_diff(x + 1e-3, x) < 0.01
    assert cos_sim(x, x + 0) < 0.9
"""
    )
    diff, other = run.places
    assert diff["limits"] == ["assert calc_diff(x + 0.001, x) < 0.01"]
    assert "noise" in diff["accepts"]
    assert "larger" in diff["accepts"]
    assert "zeros" in diff["refuses"]
    assert other["left_out"] == {"another formula than its name says": 1}


def test_many_calls_are_counted_and_a_hundred_judged(audit: Audit) -> None:
    run = audit(
        """
def test_loop():
    for _ in range(150):
        torch.testing.assert_close(tensor() + 0, tensor(), rtol=1, atol=1)
"""
    )
    assert (run.place["calls"], run.place["judged"]) == (150, session.MOST_CALLS)


def test_the_record_follows_its_schema(audit: Audit) -> None:
    run = audit(WEAK + STRONG + UNACCUSED)
    definitions = json_schema({"AuditRecord": AuditRecord})
    schema = {"$ref": "#/$defs/AuditRecord", "$defs": definitions}
    jsonschema.validate(run.record, schema)
    assert run.record["kind"] == "qgate.audit/1"
    places = [(entry["file"], entry["line"]) for entry in run.places]
    assert places == sorted(places)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            json.loads(json.dumps(run.record).replace('"calls"', '"cells"')), schema
        )


def test_a_file_that_cannot_be_written_is_an_error(audit: Audit, pytester: pytest.Pytester) -> None:
    (pytester.path / "audit.json").mkdir()
    with pytest.raises(IsADirectoryError):  # the record, which the fixture reads
        audit(STRONG)
