"""Measure how much of activations, weights and gradients a format saturates or flushes to zero.

Formats without a scale of their own are plain casts; the others use their scales.
"""

import pytest


# Another number of threads moves an element of 32,768 across an edge (3e-5); what matters
# to training is far above that.
@pytest.mark.limits(atol=1e-4, reason="a share is a count of few elements")
@pytest.mark.qgate_formats("fp8_e4m3", "hif8", "mxfp8_e4m3", "mxfp4_e2m1")
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_overflow(gate, fmt, layer, phase):
    gate.overflow(fmt, layer, phase)
