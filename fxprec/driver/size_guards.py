"""Check the sizes that code compiled outside of Dynamo assumes.

Inductor adds guards on dynamic sizes while it compiles. Dynamo checks the guards of the first compilation, which it
called for. A later compilation (a promotion, a solved calibration) uses the same symbols, but Dynamo has already built
its checks. So fxprec checks the guards that came later by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import sympy

from fxprec import compat
from fxprec.driver.capture import Captured


@dataclass(frozen=True)
class SizeGuards:
    """Conditions on the sizes among a graph's inputs."""

    symbols: tuple[tuple[int, sympy.Symbol], ...]
    """The position of each input that is a size, and its symbol."""
    conditions: tuple[sympy.Basic, ...]
    _known: dict[tuple[int, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, captured: Captured) -> SizeGuards | None:
        """Return the guards that were added since Dynamo called the backend, or None."""
        conditions = captured.guards_since_dynamo()
        if not conditions:
            return None
        inputs = enumerate(captured.fake_examples)
        return cls(tuple((i, s) for i, x in inputs if (s := compat.symbol_of(x)) is not None), conditions)

    def broken_by(self, args: Sequence[object]) -> str:
        """Return the first condition that the arguments break, or ``""``. A condition that is undecided is broken."""
        sizes = tuple(int(args[i]) for i, _ in self.symbols)  # type: ignore[call-overload]
        if sizes not in self._known:
            values = {symbol: sympy.Integer(size) for (_, symbol), size in zip(self.symbols, sizes, strict=True)}
            broken = (str(c) for c in self.conditions if c.xreplace(values) != sympy.true)
            self._known[sizes] = next(broken, "")
        return self._known[sizes]
