"""What programs are made of: templates of one line, as data.

``{a}``, ``{b}``, ``{c}`` are float values, ``{i}`` an index, ``{m}`` a mask, ``{w}``, ``{u}`` parameters and ``{z}``,
``{r}`` buffers made for them (zeros, ones). Whatever does not fit is refused by eager PyTorch while generating.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """A statement's right side (or whole statement, where it makes nothing) and the shapes of what it needs."""

    text: str
    shapes: tuple[str, ...] = ()
    """Of ``{w}``, ``{u}``, ``{z}``, ``{r}`` in this order, those that are there: an expression of ``a`` and a size
    ``n``."""
    results: int = 1
    """How many values it makes; 0: it writes into one."""


def _plain(*texts: str) -> list[Template]:
    return [Template(text) for text in texts]


LAST = "(a.shape[-1],)"

POINTWISE = _plain(
    "torch.relu({a})", "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.gelu({a}, approximate='tanh')",
    "F.silu({a})", "F.softplus({a})", "F.elu({a})", "F.leaky_relu({a}, 0.1)", "F.hardswish({a})", "F.hardtanh({a})",
    "torch.exp(-{a}.abs())", "torch.sqrt({a}.abs() + 0.1)", "torch.log({a}.abs() + 0.5)", "torch.rsqrt({a}.square() + 1)",
    "-{a}", "{a} * 0.5", "{a} + 0.25", "1.0 - {a}", "{a} / 3", "{a} * {a}", "{a}.square()", "{a}.abs()", "{a}.sin()",
    "{a}.erf()", "{a}.clamp(-0.5, 0.5)", "{a}.clamp_min(0)", "1 / (1 + {a}.square())", "{a}.pow(3) * 0.1", "torch.log1p({a}.abs())",
    "{a} / (1 + {a}.abs())", "{a} * torch.sigmoid(1.702 * {a})", "{a} + {a}", "torch.atan({a})", "F.mish({a})",
    "F.relu6({a} * 4)", "torch.expm1({a} * 0.1)", "{a}.sign() * {a}", "F.logsigmoid({a})", "torch.nan_to_num({a})",
)  # fmt: skip
PAIRS = _plain(
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} + {b} * {c}", "torch.maximum({a}, {b})", "{a} / (1 + {b}.square())",
    "torch.lerp({a}, {b}, 0.3)", "torch.addcmul({a}, {b}, {c}, value=0.5)", "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "torch.where({m}, {a}, {b})", "{a} * ({b} > 0)", "torch.add({a}, {b}, alpha=2)", "torch.rsub({a}, {b})",
    "torch.sigmoid({a}) * {b}", "F.glu(torch.cat([{a}, {b}], -1), -1)", "torch.hypot({a} + 1, {b}.abs() + 1)",
    "F.mse_loss({a}, {b})", "F.smooth_l1_loss({a}, {b})", "F.cosine_similarity({a}, {b}, -1)", "torch.dist({a}, {b} + 1)",
    "{a} * {b}.mean()", "{a} * {b}.sum(-1, keepdim=True)", "{a} + {b}.amax()",
)  # fmt: skip
GEMMS = [
    Template("{a} @ {w}", ("(a.shape[-1], n)",)),
    Template("F.linear({a}, {w}, {u})", ("(n, a.shape[-1])", "(n,)")),
    Template("F.linear({a}, {w})", ("(a.shape[-1], a.shape[-1])",)),
    Template("F.linear(F.relu({a}), {w})", ("(a.shape[-1], a.shape[-1])",)),
    Template("torch.tanh({a} @ {w})", ("(a.shape[-1], a.shape[-1])",)),
    Template("{a} + ({a} @ {w}) @ {u}", ("(a.shape[-1], n)", "(n, a.shape[-1])")),
    Template("{a}.to(self.low) @ {w}.to(self.low)", ("(a.shape[-1], n)",)),
    Template("{a} @ {w}.to({a}.dtype)", ("(a.shape[-1], n)",)),
    Template("torch.einsum('...i,ij->...j', {a}, {w})", ("(a.shape[-1], n)",)),
    Template("torch.addmm({u}, {a}, {w})", ("(a.shape[-1], n)", "(n,)")),
    Template("({w} @ {a}.mT).mT", ("(n, a.shape[-1])",)),
    Template("F.bilinear({a}, {a}, {w})", ("(2, a.shape[-1], a.shape[-1])",)),
    Template("F.conv1d({a}, {w}, padding=1)", ("(n, a.shape[1], 3)",)),
    Template("F.conv2d({a}, {w}, {u}, padding=1)", ("(n, a.shape[1], 3, 3)", "(n,)")),
    Template("F.conv2d({a}, {w}, stride=2)", ("(n, a.shape[1], 2, 2)",)),
    Template("F.conv2d({a}, {w}, padding=1, groups={a}.shape[1])", ("(a.shape[1], 1, 3, 3)",)),
    Template("F.conv_transpose2d({a}, {w}, stride=2)", ("(a.shape[1], n, 2, 2)",)),
    Template("F.embedding({i}, {w})", ("(4, n)",)),
    Template("F.embedding({i}, {w})", ("(4, a.shape[-1])",)),
    Template("F.linear(F.embedding({i}, {w}), {w})", ("(4, n)",)),
    *_plain(
        "{a} @ {b}.mT", "{a}.mT @ {b}", "{a} @ {b}", "{a} @ {a}.mT", "torch.einsum('...i,...i->...', {a}, {b})",
        "torch.softmax({a} @ {b}.mT / 2, -1) @ {b}", "F.scaled_dot_product_attention({a}, {b}, {c})",
        "F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True)", "torch.outer({a}.flatten()[:6], {b}.flatten()[:5])",
        "torch.baddbmm({a} @ {a}.mT, {a}, {a}.mT)", "torch.cdist({a}, {b} + 2)", "torch.mv({a}, {b}.flatten()[:{a}.shape[1]])",
    ),
]  # fmt: skip
NORMS = [
    Template("F.layer_norm({a}, {a}.shape[-1:], {w}, {u})", (LAST, LAST)),
    Template("F.layer_norm({a}, {a}.shape[-1:])"),
    Template("F.rms_norm({a}, {a}.shape[-1:], {w})", (LAST,)),
    Template("{a} * torch.rsqrt({a}.square().mean(-1, keepdim=True) + 1e-2) * {w}", (LAST,)),
    Template("F.batch_norm({a}, {z}, {r}, {w}, {u}, training=True)", ("(a.shape[1],)",) * 4),
    Template("F.batch_norm({a}, {z}, {r}, training=False)", ("(a.shape[1],)",) * 2),
    Template("F.group_norm({a}, 1, {w}, {u})", ("(a.shape[1],)",) * 2),
    Template("F.instance_norm({a})"),
    *_plain(
        "torch.softmax({a}, -1)", "torch.softmax({a}, 0)", "F.log_softmax({a}, -1)", "F.normalize({a} + 1, dim=-1)",
        "({a} - {a}.mean(-1, keepdim=True)) / ({a}.std(-1, keepdim=True) + 0.5)", "torch.softmax({a}.masked_fill({m}, -1e9), -1)",
        "torch.softmax({a} + torch.zeros_like({a}).masked_fill(~{m}, float('-inf')), -1).nan_to_num()",
    ),
]  # fmt: skip
REDUCTIONS = _plain(
    "{a}.sum(-1)", "{a}.mean(0)", "{a}.mean()", "{a}.sum(0, keepdim=True)", "{a}.amax(-1, keepdim=True)", "{a}.max(0).values",
    "{a}.var(-1, keepdim=True)", "{a}.std(0)", "torch.logsumexp({a}, -1)", "{a}.cumsum(-1)", "{a}.norm(dim=-1)", "{a}.amin(0)",
    "torch.sort({a}, -1).values", "torch.topk({a}, 2, -1).values", "{a}.square().mean()", "torch.logcumsumexp({a}, 0)",
    "F.avg_pool2d({a}, 2)", "F.max_pool2d({a}, 2)", "F.adaptive_avg_pool2d({a}, 1)", "(1 + 0.1 * {a}).prod(-1)",
    "F.cross_entropy({a}, torch.zeros({a}.shape[0], dtype=torch.long))", "F.interpolate({a}, scale_factor=2)",
    "{a}.median(-1).values", "torch.trapezoid({a}, dim=-1)", "F.max_pool1d({a}, 2)", "F.cross_entropy({a}, {i})",
)  # fmt: skip
VIEWS = _plain(
    "{a}.reshape(-1)", "{a}.flatten(1)", "{a}.mT", "{a}.transpose(0, 1)", "{a}.t()", "{a}.movedim(0, -1)", "{a}[1:]", "{a}[:, ::2]",
    "{a}[..., 0]", "{a}[..., :2]", "{a}[-1]", "{a}.unsqueeze(0)", "{a}.unsqueeze(-1)", "{a}.squeeze(0)", "{a}.unsqueeze(0).expand(2, *{a}.shape)",
    "{a}.flip(0)", "{a}.roll(1, -1)", "F.pad({a}, (1, 1))", "{a}.repeat(2, *[1] * ({a}.dim() - 1))", "{a}.contiguous()", "{a}.clone()",
    "{a}.narrow(0, 0, 1)", "{a}.view(2, -1)", "{a}.view({a}.shape[::-1])", "torch.tril({a})", "{a}.diagonal()", "{a}.unfold(-1, 2, 1)",
    "{a}[{i}]", "{a}.index_select(0, {i})", "torch.gather({a}, 0, torch.zeros_like({a}, dtype=torch.long))", "{a}.masked_fill({m}, 0.0)",
    "{a}.as_strided((2, 2), (2, 1))", "{a}.permute(*reversed(range({a}.dim())))", "{a}.detach() * {a}", "{a}.swapaxes(0, -1).contiguous()",
    "{a}.reshape({a}.shape[0], -1)", "{a}.unflatten(-1, (2, -1))", "{a}.expand(2, *{a}.shape)", "{a}[torch.arange({a}.shape[0])]",
    "{a}.view_as({b})", "{a}.expand_as({b})", "{a}.take_along_dim(torch.argsort({a}, -1), -1)", "torch.view_as_real(torch.complex({a}, {a})).sum(-1)",
    "F.pad({a}, (-1, 0))", "{a}.repeat_interleave(2, 0)", "{a}.new_zeros({a}.shape) + {a}", "torch.cartesian_prod({a}.flatten()[:3], {a}.flatten()[:3])",
)  # fmt: skip
JOINS = _plain(
    "torch.cat([{a}, {b}], -1)", "torch.cat([{a}, {b}], 0)", "torch.stack([{a}, {b}])", "torch.cat([{a}, {b}, {a}], 0)",
    "torch.cat([{a}[:1], {b}[1:]], 0)", "torch.cat([{a}, {a}], -1)", "torch.cat([{a}.flatten(), {b}.flatten(), {c}.flatten()])",
    "torch.cat([{a}[:0], {b}], 0)", "torch.stack([{a}, {b}, {c}], -1).sum(-1)",
)  # fmt: skip
SPLITS = [
    Template("{a}.chunk(2, -1)", results=2),
    Template("{a}.chunk(2, 0)", results=2),
    Template("torch.split({a}, [1, {a}.shape[0] - 1])", results=2),
    Template("{a}.unbind(0)", results=2),
    Template("{a}.unbind(-1)", results=3),
    Template("torch.tensor_split({a}, 3, -1)", results=3),
    Template("torch.var_mean({a}, -1, keepdim=True)", results=2),
]
ZEROS = [
    *_plain(
        "{a} * 0.0", "{a} * 0", "{a} - {a}", "{a} * torch.zeros_like({b})", "torch.zeros_like({a}) + {b} * 0.1", "{a}[:0]",
        "torch.zeros_like({a})", "{a}.new_ones({a}.shape)", "torch.relu(-{a}.abs())", "{a} ** 0", "{a}.clamp(2, 2)", "{a}.sum() * 0 + {b}",
        "F.dropout({a}, 0.5, training=False)", "F.dropout({a}, 0.0)", "torch.full_like({a}, 0.5)", "{a} * 1e-30 * 1e30", "({a} * 0).detach() + {b}",
    ),
    Template("{a} * {z}", (LAST,)),
    Template("{a} @ {z}", ("(a.shape[-1], n)",)),
    Template("{a} + {z} @ {w}", ("(n, n)", "(n, a.shape[-1])")),
]  # fmt: skip
DTYPES = _plain(
    "{a}.to(self.low)", "{a}.to(self.half)", "{a}.to(self.wide)", "{a}.to(self.low).to(self.wide)", "({a} > 0).to({a}.dtype)",
    "{a}.to(self.low) + {b}", "torch.sigmoid({a}.to(self.half))", "{a} * {m}", "{a}.argmax(-1)", "{a} * {i}.to({a}.dtype).mean()",
    "{a}.to(self.low).to(self.half)", "F.one_hot({i}, 4).to(self.wide)", "({a} > 0).sum() * {a}", "{a}.to(self.low).sum(dtype=self.wide)",
)  # fmt: skip
IN_PLACE = [
    Template(text, results=0)
    for text in (
        "{a}.add_(0.5)", "{a}.mul_(0.5)", "{a}.relu_()", "{a}.tanh_()", "{a}.add_({b})", "{a}.mul_({b})", "{a}[..., 0] = 0", "{a}[:1] = 0.5",
        "{a}[:1] += {b}[:1]", "{a}.masked_fill_({m}, 0.0)", "{a}.copy_({b})", "{a}.zero_()", "{a}[:, 0].mul_(2)", "{a}.clamp_(-1, 1)", "{a}.view(-1)[0] = 1",
        "F.silu({a}, inplace=True)", "{a}.flatten()[1] = 0.0", "{a}.transpose_(0, 1)", "{a}.index_add_(0, torch.tensor([0, 0]), {b}[:2])",
        "{a}.index_fill_(0, torch.tensor([0]), 0.3)", "{a}[{a}.detach() > 1] = 1.0", "{a}.addcmul_({b}, {c})", "{a}.sub_({a}.detach() * 0.1)",
        "{a}.fill_(0.5)", "{a}.squeeze_(0)", "{a}.scatter_add_(0, torch.zeros_like({a}, dtype=torch.long), {b})",
    )
] + [Template("{z}.add_({a}.detach().mean())", (LAST,), results=0), Template("{z}.copy_({a}.detach()[0])", (LAST,), results=0)]  # fmt: skip
BREAKS = [
    Template("torch._dynamo.graph_break()", results=0),
    Template("{a} * float({a}.detach().abs().amax().item() > 0)"),
    Template("{a} + len(str({a}.detach().sum().item() > 1e9)) * 0.1"),
    Template("torch.cond({a}.sum() > -1e9, lambda t: torch.tanh(t @ t.mT), lambda t: t @ t.mT, ({a},))"),
    Template("{a} * {a}.shape[0]"),
    Template("torch.func.vmap(torch.tanh)({a})"),
]

MIX: dict[str, tuple[int, list[Template]]] = {
    "pointwise": (10, POINTWISE),
    "pairs": (10, PAIRS),
    "gemms": (16, GEMMS),
    "norms": (6, NORMS),
    "reductions": (4, REDUCTIONS),
    "views": (9, VIEWS),
    "joins": (5, JOINS),
    "splits": (4, SPLITS),
    "zeros": (3, ZEROS),
    "dtypes": (2, DTYPES),
    "in place": (4, IN_PLACE),
    "breaks": (1, BREAKS),
}
"""Templates by kind, and how often a kind is drawn."""
