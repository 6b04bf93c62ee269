"""Sets of operators that several passes need, each read from the table of operators (`fxprec.ir.operators`)."""

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

# Positions of the tensor operands that a GEMM multiplies; bias and statistics are not among them.
GEMM_OPERANDS: Mapping[object, tuple[int, ...]] = column("factors")

# Operators that move or alias data in its own dtype. They are not counted: they have their producer's precision.
VIEWS = moving_as()
ALIASES = moving_as(Moves.ALIAS)
COPIES = moving_as(Moves.COPY)

# TERMS: the sum of products that an operator computes, through which a scaled gradient keeps its scale. PASSING:
# operators that only move or add. A gradient that leaves the graph is unscaled before them, where the GEMM that
# computes it can take the scale off itself.
TERMS: Mapping[object, Terms] = column("terms")
PASSING = having(Trait.PASSES_SCALE)

# Positions of the argument that an operator fills its result with, everywhere or in places.
CONSTANTS: Mapping[object, int] = column("constant_at")
FILLS: Mapping[object, int] = {**CONSTANTS, **column("fills_at")}
ZEROS = having(Trait.ZERO)

# Operators whose backward is the identity for each input that was not broadcast; for ``sub``, for its first input.
LINEAR_SUMS = frozenset({"aten.add", "aten.sub"})

PRODUCTS = having(Trait.SCALES)
DIFFERENCES = frozenset({aten.sub.Tensor, aten.rsub.Tensor})

CASTS = having(Trait.CAST)

# Operators that wait for a collective and return its result (tensor parallel layers).
WAITS = compat.waits_for_collectives()

# Operators that write functionalised mutations back to inputs; they are never part of an operator of the model.
MUTATIONS = having(Trait.MUTATES)

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
