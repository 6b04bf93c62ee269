"""Optimizers whose weights and state are numbers of any format (ALGORITHMS.md section 6; Zamirai et al. 2020)."""
