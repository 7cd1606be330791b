"""The machinery that drives formats over tensors; the only part of `formats` that loads torch.

job         checks a tensor, lays it out in groups (layout), finds its scales
quantizing  chunk by chunk through a format's exact `split` or its shortcut (fast_*)
codec       to codes and scales, and back
gradient    straight-through
census      counts of what happened
work        exact conversions between dtypes; parts, scratch: what they hand to each other
"""
