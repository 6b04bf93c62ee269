"""Optimizers whose weights and state are numbers of any format (Zamirai et al. 2020).

Definitions: docs/algorithms.md, "16-bit training".
"""
