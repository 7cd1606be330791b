"""Which scale suits the tensors of a layer in a format, and what error is left at it.

Formats with a scale per tensor are swept over all powers of two near the largest magnitude, MX
formats over offsets to the scale of each block. Held against what was accepted are the recommended
exponent and the error at it. An accepted exponent stays recommended until it costs more than the
regression tolerance over what the sweep would choose now: then the test fails, and says how many
decibels it costs.
"""

import pytest


@pytest.mark.qgate_formats("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
def test_scaling(gate, fmt, layer):
    gate.scaling(fmt, layer)
