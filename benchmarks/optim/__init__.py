"""Training with 16-bit weights, and arithmetic at any precision."""
