"""Compare a quantized checkpoint with its recipe and with the one that it was made from.

It needs `--checkpoint CHILD`, and `--parent PARENT` to measure errors; no model is run. Tensors
that are not as declared fail, and no update accepts them. Errors may be neither larger nor smaller
than accepted: the same weights, quantized in the same way, have the same error.
"""


def test_checkpoint_weights(checkpoint_gate, checkpoint_layer):
    checkpoint_gate.weights(checkpoint_layer)


def test_checkpoint_accounting(checkpoint_gate):
    checkpoint_gate.accounting()


def test_checkpoint_recipe(checkpoint_gate):
    checkpoint_gate.recipe()
