"""Operators that are kernels: lowering, or a pass, calls them as they are, and `fxprec.runtime` implements them."""
