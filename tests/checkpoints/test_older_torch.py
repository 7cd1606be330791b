"""Checkpoints with E8M0 scales where torch has no such dtype, as before 2.7."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.campaigns.forked import ran


def test_e8m0_scales_are_read_without_their_dtype(tmp_path: Path) -> None:
    def verb() -> int:
        for name in [name for name in sys.modules if name.split(".")[0] == "qgate"]:
            del sys.modules[name]
        del torch.float8_e8m0fnu
        from qgate.checkpoints import tensor_types
        from qgate.checkpoints.grids import decode_e8m0

        assert tensor_types.DTYPES["F8_E8M0"] is torch.uint8
        codes = torch.tensor([126, 127, 130], dtype=tensor_types.DTYPES["F8_E8M0"])
        assert decode_e8m0(codes).tolist() == [0.5, 1.0, 8.0]
        return 0

    ended = ran(verb, tmp_path)
    assert ended.status == 0, ended.said
