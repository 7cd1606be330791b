"""How far every layer of a quantized model is from the FP32 one.

Each test is one mode and one layer. The error carried here by the model running free and the
error made in this layer alone are held against what was accepted; inside the layer, every quantized
tensor may be at most half a decibel worse than an ideal quantizer of its format.
"""

import pytest


# The worst mode that still predicts (MXFP4 of tiny-llama) carries 0.4; unrelated tensors are at 2.
@pytest.mark.limits(
    absolute=["relative_mse<0.6", "correlation>0.7"], reason="nothing useful is left"
)
def test_layer_outputs(gate, mode, layer):
    gate.layer(mode, layer)
