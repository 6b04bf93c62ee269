"""APS: gradient exchange in 8 bits with one power-of-two scale per layer (Han et al. 2020).

Definitions: docs/algorithms.md, "Communication in 8 bits".
"""
