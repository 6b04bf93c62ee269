"""Arithmetic at any precision (Han et al. 2020, section 5: CPD; docs/algorithms.md, "Arithmetic at any precision")."""
