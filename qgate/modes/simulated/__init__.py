"""The quantized Mamba block: integer casts, exact integer products, the paths that modes change.

The parts exchange real numbers on integer grids, so that every site has the same units in every
mode and in the reference.
"""
