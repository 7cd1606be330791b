"""What flows through the layers of a model, captured, stored and compared."""
