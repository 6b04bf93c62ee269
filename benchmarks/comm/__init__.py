"""Benchmarks of gradients in 8 bits on a network (docs/aps.md)."""
