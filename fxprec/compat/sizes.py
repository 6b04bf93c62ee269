"""Give sizes a value: the traced one, or an assumed one where only the data decides the size."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# A size without a bound has a range that ends at least this far from 0.
_UNBOUNDED = 2**48


def traced_size(size: int | torch.SymInt) -> int:
    """Return the value that a size had when the graph was traced.

    A size that only the data decides, such as the number of rows that a mask selects, had none. Its value is then the
    largest that it may have, so that bytes counted with it suffice. Without a bound it is the value that Inductor
    assumes.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    hint = size.node.hint
    if hint is not None:
        return int(hint)
    environment: Any = size.node.shape_env  # in torch 2.14 None as well, by its type
    known, expr = environment.backed_var_to_val, size.node.expr
    return int(expr.xreplace({s: known[s] if s in known else _assumed(environment, s)[0] for s in expr.free_symbols}))


def guessed_sizes(size: int | torch.SymInt) -> dict[str, int]:
    """Return the symbols in a size that nothing bounds and the data decides, with the values assumed for them."""
    if not isinstance(size, torch.SymInt) or size.node.hint is not None:
        return {}
    environment: Any = size.node.shape_env
    unknown = size.node.expr.free_symbols - environment.backed_var_to_val.keys()
    found = {str(symbol): _assumed(environment, symbol) for symbol in unknown}
    return {name: int(value) for name, (value, is_bounded) in found.items() if not is_bounded}


def _assumed(environment: ShapeEnv, symbol: sympy.Symbol) -> tuple[sympy.Integer, bool]:
    """Return a value for a symbol, and whether the symbol's bound decides it."""
    bounds = environment.var_to_range[symbol]
    if bounds.upper < _UNBOUNDED:
        return sympy.Integer(int(bounds.upper)), True
    guess = config.unbacked_symint_fallback
    return sympy.Integer(max(guess, int(bounds.lower))), False
