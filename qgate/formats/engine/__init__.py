"""The machinery that `Quantizer` drives formats with; it loads torch, and the formats do not.

job         checks a tensor, lays it out in groups, finds its scales
fast_*      float32 arithmetic and tables that give the bits of a format's exact `split`
on_device   by a kernel, where there is one for the device
effects     counts of what happened
dtypes      the bits of torch's dtypes, and the exact cast to them
"""
