"""The gate can fail: a quantizer that truncates is rejected, and quantizing nothing is exact."""


def test_canary(gate):
    gate.canary()
