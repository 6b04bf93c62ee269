"""The sets of operators that passes ask for, each a question to the table (`fxprec.ir.operators`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxprec import compat
from fxprec.ir.operators import Moves, Trait, column, having, moving_as
from fxprec.ir.operators import Terms as Terms

aten = torch.ops.aten
prims = torch.ops.prims
CONVERT = prims.convert_element_type.default

ATTENTION = having(Trait.ATTENTION | Trait.GEMM)
ATTENTION_BACKWARD = having(Trait.ATTENTION | Trait.GEMM_BACKWARD)
ATTENTION_ON_GPU = ATTENTION - having(Trait.ON_CPU)
ATTENTION_BACKWARD_ON_GPU = ATTENTION_BACKWARD - having(Trait.ON_CPU)
GEMMS = having(Trait.GEMM)
GEMMS_BACKWARD = having(Trait.GEMM_BACKWARD)

# Positions of the tensor operands that a GEMM multiplies; the rest (bias, statistics) is not an operand.
GEMM_OPERANDS: Mapping[object, tuple[int, ...]] = column("factors")

# Ops that move or alias data in its own dtype: not counted, they follow their producer's precision.
VIEWS = moving_as()
ALIASES = moving_as(Moves.ALIAS)
COPIES = moving_as(Moves.COPY)

# How a scaled gradient goes through an operator, and which it is unscaled before on its way out of the graph: they
# move or add up, so before is as cheap as after, once, and GEMMs can take the scale off themselves.
TERMS: Mapping[object, Terms] = column("terms")
PASSING = having(Trait.PASSES_SCALE)

# Where the value stands that an operator fills in, everywhere or in places.
CONSTANTS: Mapping[object, int] = column("constant_at")
FILLS: Mapping[object, int] = {**CONSTANTS, **column("fills_at")}
ZEROS = having(Trait.ZERO)

# Operators whose backward is the identity towards an input that was not broadcast; ``sub`` towards its first.
LINEAR_SUMS = frozenset({"aten.add", "aten.sub"})

CASTS = having(Trait.CAST)

# What hands out a collective's result once it is there (tensor parallel layers).
WAITS = compat.waits_for_collectives()

# Writes of functionalised mutations back to their inputs; never part of an operator.
MUTATIONS = having(Trait.MUTATES)

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
