"""Check that the stored FP32 reference is that of the model as it is now, and is unquantized.

Every linear layer of the live reference is multiplied again in float64, from its parameters: a
reference that runs through a quantizer anywhere cannot pass.
"""


def test_reference(gate):
    gate.reference()
