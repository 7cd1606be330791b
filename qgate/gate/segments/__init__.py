"""Code between quantized tensors: held against what FP32 code makes of the same tensors."""
