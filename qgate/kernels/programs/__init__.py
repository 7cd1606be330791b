"""Code for the device. Importing a file of this folder loads triton.

Each operation is IEEE's, rounded to nearest even and written so that nothing may be fused or
flushed: products are by powers of two or exact, and divisions ask for the rounded kind. What has to
be in order is a tree of pairs.
"""
