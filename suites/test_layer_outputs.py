"""Compare every layer of a quantized model with the FP32 one.

Each test is one mode and one layer. Two errors are compared with the accepted ones: the error that
arrives here when the whole model is quantized, and the error that this layer alone makes. Inside
the layer, every quantized tensor may be at most 0.5 dB worse than an ideal quantizer of its format.
"""

import pytest


# The worst mode that still predicts (MXFP4 of tiny-llama) carries 0.4; unrelated tensors are at 2.
@pytest.mark.limits(
    absolute=["relative_mse<0.6", "correlation>0.7"], reason="nothing useful is left"
)
# One element of a massive channel on the other side of a border: 1.9, and 2.4 of the worst token.
@pytest.mark.limits(
    modes="5-4,5-6,5-7",
    scopes=["local"],
    regression_other_device=4.0,
    reason="an element at the border of two zones takes a step of another size",
)
# A code that tips over hands its error on: 0.07 of errors of 3e-8, 0.47 of the worst channel.
@pytest.mark.limits(
    modes="state-*-feedback",
    scopes=["carried"],
    regression_other_device=0.2,
    reason="error feedback hands on what a code that tips over leaves",
)
def test_layer_outputs(gate, mode, layer):
    gate.layer(mode, layer)
