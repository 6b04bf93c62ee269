"""Triton kernels around GEMMs whose operands are stored in a few bits."""
