"""Known arithmetics of hardware: matrix products and attention, emulated bit for bit.

A device that cuts sums short is no wrong kernel. An arithmetic here gives the bits that it gives,
so that a result can be compared for equality.

tensor_core, float32   the steps that the arithmetics are made of
products               a matrix product and the cuts of K that it may have
attention              fused attention and its gradients
known                  all arithmetics by name: `PRODUCTS`, `ATTENTIONS`

Every other file is one arithmetic: it lists what it knows in `KNOWN`, and `known` takes it from
there. What a device returned is in tests/arithmetics/recorded.
"""
