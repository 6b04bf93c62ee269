"""What a step holds at its peak, and which tensors to keep, narrow or compute again so that it fits."""
