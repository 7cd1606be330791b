"""Triton kernels for what torch alone does slowly on CUDA: quantize, cast, count, compare.

They know neither formats nor statistics: they get plain numbers. Each stands beside a definition in
torch that its caller has, and is used only after it gave the same bits (`proving`).

shapes     how a tensor lies, what is asked of it; plain data
proving    a kernel proves itself once per process, device and way of use
cases      what it has to prove itself on
launching  starts a program on a tensor's bits
block_casts, element_casts, magnitudes, counting, comparing   one family each
programs   what runs on the device; the only part that imports triton
"""
