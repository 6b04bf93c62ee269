"""Predict what a step holds at its peak, and choose which tensors to keep, narrow or compute again so that it fits."""
