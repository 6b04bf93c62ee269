"""Rows of operators that are GEMMs or contain some, forward and backward."""

from __future__ import annotations

from fxprec.ir import grouped as grouped  # declares the operator
from fxprec.ir.operators.names import row
from fxprec.ir.operators.spec import FIRST, Terms, Trait

_PRODUCT: Terms = ((0, 1),)
_ADDED_TO: Terms = ((0,), (1, 2))
_WITH_BIAS: Terms = ((0, 1), (2,))
_BOTH = Trait.GEMM | Trait.GEMM_BACKWARD | Trait.WIDE
# Scaled-dot-product attention contains GEMMs and is one operator (docs/algorithms.md, "Operators, tensors, groups").
_ATTENTION = Trait.GEMM | Trait.ATTENTION
_ATTENTION_BACKWARD = Trait.GEMM_BACKWARD | Trait.ATTENTION
_ON_CPU = Trait.ON_CPU | Trait.WIDE

ROWS = (
    row("mm bmm mv dot", factors=(0, 1), terms=_PRODUCT, traits=_BOTH),
    row("addmm baddbmm addmv", factors=(1, 2), terms=_ADDED_TO, traits=_BOTH),
    row("fxprec.grouped_mm", factors=(0, 1), terms=_PRODUCT, traits=Trait.GEMM | Trait.GEMM_BACKWARD),
    row("convolution", factors=(0, 1), terms=_WITH_BIAS, traits=Trait.GEMM | Trait.WIDE),
    row("convolution_backward", factors=(0, 1, 2), terms=FIRST, traits=Trait.GEMM_BACKWARD | Trait.WIDE),
    row("linear", factors=(0, 1), terms=_WITH_BIAS, traits=Trait.GEMM),
    row("_scaled_mm", factors=(0, 1), traits=Trait.GEMM),
    # Backward recomputes the probabilities, exp(q k - logsumexp). It exponentiates an error of q or k, and rows no
    # longer add up to 1.
    row(
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable",
        factors=(0, 1, 2),
        exponentiates=(0, 1),
        traits=_ATTENTION,
    ),
    row(
        "_scaled_dot_product_flash_attention_for_cpu",
        factors=(0, 1, 2),
        exponentiates=(0, 1),
        traits=_ATTENTION | _ON_CPU,
    ),
    row(
        "_scaled_dot_product_flash_attention_backward _scaled_dot_product_efficient_attention_backward"
        " _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_fused_attention_overrideable_backward",
        factors=(0, 1, 2, 3),
        terms=FIRST,
        traits=_ATTENTION_BACKWARD,
    ),
    row(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        factors=(0, 1, 2, 3),
        terms=FIRST,
        traits=_ATTENTION_BACKWARD | _ON_CPU,
    ),
)
