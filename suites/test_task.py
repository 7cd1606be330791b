"""Compare a mode on the model's own task with FP32: bits per byte, next-token accuracy, KL."""


def test_task(gate, mode):
    gate.task(mode)
