"""Compare two dumps tensor by tensor, or two captured modes layer by layer."""
