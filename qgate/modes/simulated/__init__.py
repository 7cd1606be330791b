"""The quantized Mamba block: integer casts, exact integer products, the paths that modes change.

Between parts flow real numbers on integer grids, so that every site reads in the same units in
every mode and in the reference.
"""
