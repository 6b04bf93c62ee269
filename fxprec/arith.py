"""Arithmetic at any precision: every product and every partial sum is rounded to a chosen format.

Definitions: docs/algorithms.md, "Arithmetic at any precision".

fxprec.arith.matmul(a, b, "1-4-3", accumulate="1-5-2", kahan=True)
"""

from fxprec.runtime.arith.functions import dot, matmul, sum

__all__ = ["dot", "matmul", "sum"]
