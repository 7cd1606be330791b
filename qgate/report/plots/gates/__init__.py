"""What a record carries of its tensors, drawn as inline SVG: small, sharp, and light or dark."""
