"""Modules of a quantized model, each held alone: its casts, its shapes, hard inputs, relations."""
