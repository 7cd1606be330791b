"""Modes that quantize recurrent states: what a Mamba keeps of earlier tokens while it decodes."""
