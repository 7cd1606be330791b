"""The machinery that drives formats over tensors; it loads torch, and the formats do not.

job         checks a tensor, lays it out in groups, finds its scales
quantizing  chunk by chunk through a shortcut (fast_*) or a format's exact `split`; the gradient
on_device   by a kernel, where there is one for the device
effects     counts of what happened
dtypes      the bits of torch's dtypes, and the exact cast to them
"""
