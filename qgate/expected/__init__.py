"""Expected results: ideally quantized tensors, what correct code makes of them, and float noise."""
