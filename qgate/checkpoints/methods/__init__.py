"""Methods that change weights on purpose, told from faults: GPTQ, AWQ, SmoothQuant, rotations."""
