"""Which scale suits the tensors of a layer in a format, and what error is left at it.

Formats with a scale per tensor are swept over powers of two, MX formats over offsets to the scale
of each block. The recommended exponents are in the records.
"""

import pytest


@pytest.mark.qgate_formats("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
def test_scaling(gate, fmt, layer):
    gate.scaling(fmt, layer)
