"""The table of operators: one row per overload, with everything that passes know about the operator.

Passes query the table by condition (`having`, `those`, `moving_as`) or read one column of all rows (`column`).
`passes/analysis/ops.py` names the sets that several passes need. A new operator is one row here and nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fxprec.ir.operators import arithmetic, derivatives, models, moving, own, products
from fxprec.ir.operators.names import collected
from fxprec.ir.operators.spec import Cost as Cost
from fxprec.ir.operators.spec import HighReason as HighReason
from fxprec.ir.operators.spec import Moves as Moves
from fxprec.ir.operators.spec import Spec as Spec
from fxprec.ir.operators.spec import Terms as Terms
from fxprec.ir.operators.spec import Trait as Trait

TABLE: Mapping[object, Spec] = MappingProxyType(
    collected(moving.ROWS, arithmetic.ROWS, products.ROWS, derivatives.ROWS, models.ROWS, own.ROWS)
)


def those(holds: Callable[[Spec], bool]) -> frozenset[object]:
    """Return the operators whose row meets the condition ``holds``."""
    return frozenset(operator for operator, spec in TABLE.items() if holds(spec))


def having(traits: Trait) -> frozenset[object]:
    """Return the operators that have all of ``traits``."""
    return those(lambda spec: traits in spec.traits)


def moving_as(*ways: Moves) -> frozenset[object]:
    """Return the operators that move data in one of these ways; without arguments, in any way."""
    return those(lambda spec: spec.moves in ways if ways else spec.moves is not None)


def column(name: str) -> dict[object, Any]:
    """Return one column's non-empty entries, by operator."""
    found = {operator: getattr(spec, name) for operator, spec in TABLE.items()}
    return {operator: entry for operator, entry in found.items() if entry is not None and entry != ()}
