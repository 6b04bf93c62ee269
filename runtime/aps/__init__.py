"""APS: gradient exchange in 8 bits with one power-of-two scale per layer (ALGORITHMS.md section 5)."""
