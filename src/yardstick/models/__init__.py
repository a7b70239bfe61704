"""The forward pass that every candidate goes through."""
