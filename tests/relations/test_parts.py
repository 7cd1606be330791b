"""Linear layers in parts, as ranks of tensor parallelism compute them."""

from __future__ import annotations

from typing import Any

import pytest

from qgate.relations import parts
from qgate.testing import RelationFailure, check_relations
from tests.relations.decoders import small_model

SPLIT = ("split K", "split N")


def test_parts_add_up_and_blocks_quantize_alike() -> None:
    report = check_relations(small_model(), mode="mxfp4", relations=SPLIT)
    assert {*report.agreed} == {*SPLIT}
    # Parts of 16 terms are no whole blocks of 32; those of 32 and of 64 are.
    assert "no whole blocks of 32" in report.left_out["split K, ranks that quantize parts of 16"]
    assert report.agreed["split K"] > report.agreed["split N"] / 2


def test_a_scale_of_all_terms_is_left_out_by_name() -> None:
    report = check_relations(small_model(), mode="int8", relations=SPLIT)
    words = report.left_out["split K, ranks that quantize the weight themselves"]
    assert words == "a scale of int8 is of more than their part"


def test_ranks_that_make_other_scales_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format that promises what it does not keep: a scale per channel is one of all terms."""
    monkeypatch.setattr(parts, "mixes", lambda *_: False)
    words = r"split K: .*:weight is other bits .* where each of 2 ranks quantizes its part"
    with pytest.raises(RelationFailure, match=words):
        check_relations(small_model(), mode="int8", relations=["split K"])


def test_a_layer_whose_parts_are_computed_otherwise_is_red() -> None:
    """The whole rounds its input to bfloat16, as its parts do not."""
    model = small_model()

    def rounded(_module: Any, args: Any) -> Any:
        return tuple(x.bfloat16().float() for x in args)

    model.module.layers[1].up.register_forward_pre_hook(rounded)
    words = r"split K: layers\.1\.up:output is 0\.00\d+ off .* as the sum of 2 parts of K = 32"
    with pytest.raises(RelationFailure, match=words):
        check_relations(model, mode="fp32", relations=SPLIT)
