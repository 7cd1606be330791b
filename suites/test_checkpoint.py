"""Whether a quantized checkpoint is what its recipe says, beside the one that it was made from.

Needs `--checkpoint CHILD`, and `--parent PARENT` to measure errors; no model is run. What is not as
declared fails and is never accepted by an update. Errors are held on both sides of accepted ones:
the same weights, quantized in the same way, have the same error.
"""


def test_checkpoint_weights(checkpoint_gate, checkpoint_layer):
    checkpoint_gate.weights(checkpoint_layer)


def test_checkpoint_accounting(checkpoint_gate):
    checkpoint_gate.accounting()


def test_checkpoint_recipe(checkpoint_gate):
    checkpoint_gate.recipe()
