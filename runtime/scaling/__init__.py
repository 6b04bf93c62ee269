"""Measure gradients, estimate their distributions, and solve their scales while training runs."""
