"""Two dumps or two modes compared, tensor by tensor and layer by layer."""
