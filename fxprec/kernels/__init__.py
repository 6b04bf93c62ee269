"""Operators that are kernels. Lowering or a pass inserts their calls, and `fxprec.runtime` implements them."""
