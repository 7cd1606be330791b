"""The gradients of a quantized model, straight through, against those of FP32.

At the output of every block and for every weight, of the next-token loss on two samples.
"""


def test_gradients(gate, mode, layer):
    gate.gradients(mode, layer)
