"""Rows of a model's operators, all overloads of each: whether their backward tolerates 8 bits in what it reads.

Backward reads a saved value through one formula. Where the formula is not linear in the value, the table gives the
reason why the value stays above 8 bits. Most rows are measured (``measured``). A row by hand says what random samples
do not show. It may give a reason from the formula (tests/passes/test_sensitive.py measures each reason). Or it lists an
operator that does not work on single numbers but whose backward is linear in what it reads, or bounded. If an operator
has no row, what its backward reads keeps its own dtype.
"""

from __future__ import annotations

from fxprec.ir.operators import measured
from fxprec.ir.operators.names import row
from fxprec.ir.operators.spec import HighReason, Trait

_PROBABILITY = "a probability below 2^-10 would be 0 in e4m3fn, and over 1,000 keys most are"
_ANGLE = "an angle's error counts in radians, and from 16 to 32 e4m3fn rounds by up to 1"
_POSITION = "a position: near the border e4m3fn rounds it by 1/32 of half the image, bf16 by 1/512, which may be pixels"
_GROWS = "its gradient grows as e^x: an error of 0.5 in x is a factor of 1.6"
_NEAR_1 = "its gradient divides by the root of 1 - x^2, which is 0 where x is rounded to 1"

RESULTS = (
    row("_softmax.* _safe_softmax.*", result=HighReason(_PROBABILITY), traits=Trait.SOFTMAX),
    row("_log_softmax.*", traits=Trait.SOFTMAX),
    row(
        "tanh.*", result=HighReason("its gradient is 1 - y^2: near 1 an error of 2^-5 in y is as large as the gradient")
    ),
    row(
        "sigmoid.*",
        result=HighReason("its gradient is y (1 - y): near 1 an error of 2^-5 in y is as large as the gradient"),
    ),
    row(
        "logcumsumexp.*",
        result=HighReason("backward exponentiates it, in a sum: an error of 0.5 in the exponent is a factor of 1.6"),
    ),
    row(
        "expm1.*", result=HighReason("its gradient is y + 1: near -1 an error of 2^-5 in y is as large as the gradient")
    ),
    row(
        "cumprod.*",
        result=HighReason(
            "backward divides it by a factor: after a small factor it is 0 in e4m3fn, and the gradient with it"
        ),
    ),
    row(
        "rsqrt.*", result=HighReason("its gradient is y^3 / 2, and for an operand below 5e-6 y is beyond e4m3fn's 448")
    ),
    row(
        "reciprocal.*",
        result=HighReason("its gradient is y^2, and for an operand below 1/448 y is beyond e4m3fn's 448"),
    ),
    row("exp.*", result=HighReason("its range is as wide as the exponent's: it overflows, or most of it is 0")),
)

OPERANDS = (
    row("sin.* cos.*", operands=HighReason(_ANGLE)),
    row("asin.* acos.*", operands=HighReason(_NEAR_1, as_it_is=True)),
    row(
        "atanh.*",
        operands=HighReason("its gradient divides by 1 - x^2, which is 0 where x is rounded to 1", as_it_is=True),
    ),
    row("erfinv.*", operands=HighReason("its gradient is infinite where x is rounded to 1", as_it_is=True)),
    row("grid_sampler_2d.*", operands=HighReason(_POSITION, as_it_is=True, last_size=2)),
    row("grid_sampler_3d.*", operands=HighReason(_POSITION, as_it_is=True, last_size=3)),
    row("sinh.* cosh.*", operands=HighReason(_GROWS)),
)

BY_HAND = RESULTS + OPERANDS

HARMLESS = (
    row("silu.* gelu.* mish.* softplus.*", traits=Trait.BEARS_ROUNDING | Trait.GENTLE),
    # Where backward compares a copy with a bound, the copy stays on its side (`passes.keep_signs`). A product that
    # Inductor makes of a GEMM, for instance of one row, is linear in its factors.
    row(
        "mul.* div.* abs.* square.* pow.Tensor_Scalar addcmul.* addcdiv.* lerp.* clamp.* clamp_min.*"
        " clamp_max.* maximum.* minimum.* var.* var_mean.* std.* std_mean.* linalg_vector_norm.* norm.*"
        " dropout.* native_dropout.* relu.* relu6.* leaky_relu.* rrelu_with_noise.* prelu.* _prelu_kernel.*"
        " hardtanh.* hardsigmoid.* hardswish.* selu.* log_sigmoid.* glu.* native_layer_norm.*"
        " native_group_norm.* native_batch_norm.* _native_batch_norm_legit.* rms_norm.* _fused_rms_norm.*"
        " _native_batch_norm_legit_functional.* cudnn_batch_norm.* avg_pool1d.* avg_pool2d.* avg_pool3d.*"
        " _adaptive_avg_pool2d.* _adaptive_avg_pool3d.* max_pool3d_with_indices.* adaptive_max_pool2d.*"
        " adaptive_max_pool3d.* upsample_nearest2d.* upsample_bilinear2d.* replication_pad1d.*"
        " replication_pad2d.* replication_pad3d.* linalg_cross.* _trilinear.* mse_loss.* smooth_l1_loss.*"
        " huber_loss.* l1_loss.* nll_loss_forward.* binary_cross_entropy_with_logits.* _grouped_mm.* mm.*"
        " bmm.* mv.* dot.* addmm.* addmv.* baddbmm.* addbmm.*",
        traits=Trait.BEARS_ROUNDING,
    ),
)

_SAID = frozenset(name.partition(".")[0] for one in BY_HAND + HARMLESS for name in one.names.split())
ROWS = BY_HAND + HARMLESS + tuple(measured.rows(by_hand=_SAID))
