"""Arithmetic at any precision (ALGORITHMS.md section 7; Han et al. 2020, section 5: CPD)."""
