"""ONNX files: heads of the graph and its tensors, patterns of nodes, and their weights."""
