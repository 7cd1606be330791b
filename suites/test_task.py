"""What a mode costs the model's own work: bits per byte, next-token accuracy, KL to FP32."""


def test_task(gate, mode):
    gate.task(mode)
