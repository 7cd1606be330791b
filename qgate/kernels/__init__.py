"""Triton kernels for what torch alone does slowly on CUDA: quantize, cast, count, compare.

They know neither formats nor statistics: they get plain numbers. The caller of each has a
definition in torch, and a kernel is used only after it gave the same bits (`proving`).

shapes     the memory layout of a tensor and the grid to round to; plain data
proving    the proof of a kernel, once per process, device and way of use
cases      the tensors of that proof
launching  starts a program on a tensor's bits
casts, reductions, comparing   one family each
programs   the code that runs on the device; the only part that imports triton
"""
