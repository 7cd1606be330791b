"""Find the best scale of a format for the tensors of a layer, and the error at that scale.

Formats with a scale per tensor are swept over all powers of two near the largest magnitude, MX
formats over offsets to the scale of each block. The recommended exponent and the error at it are
compared with the accepted ones. An accepted exponent stays recommended until it costs more than the
regression tolerance over what the sweep would choose now: then the test fails, and says how many
decibels it costs.
"""

import pytest


@pytest.mark.qgate_formats("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
def test_scaling(gate, fmt, layer):
    gate.scaling(fmt, layer)
