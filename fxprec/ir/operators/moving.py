"""Rows of operators that view, move, join, choose or write data, and of those that make constants."""

from __future__ import annotations

from fxprec.ir.operators.names import Row, row
from fxprec.ir.operators.spec import FIRST, Cost, Moves, Terms, Trait

_FOLLOWS = Trait.COMBINES | Trait.HANDS_ON_DIVISOR
# The terms of an operator that writes into its first argument, by the position of the argument that is written.
_WRITES_1: Terms = ((0,), (1,))
_WRITES_2: Terms = ((0,), (2,))
_WRITES_3: Terms = ((0,), (3,))
_FILLS = Trait.PASSES_SCALE | Trait.MASKS


def _view(names: str, moves: Moves | None, traits: Trait = Trait.PASSES_SCALE, cost: Cost | None = None) -> Row:
    """Return a row of operators whose result is a view, a copy or a cast of their first argument."""
    return row(names, moves=moves, terms=FIRST, hands_on="first", traits=_FOLLOWS | traits, cost=cost)


VIEWS = (
    _view("alias detach", Moves.ALIAS),
    _view("view _unsafe_view", Moves.SHAPE),
    _view("squeeze squeeze.dim squeeze.dims unsqueeze", Moves.RANK),
    _view("permute transpose.int t", Moves.ORDER),
    _view("expand", Moves.SPREAD, Trait.NONE, Cost.LIGHT),
    _view("slice.Tensor select.int", Moves.PART),
    _view("split.Tensor split_with_sizes unbind.int", Moves.PARTS),
    _view("as_strided", Moves.STRIDED),
    _view("clone contiguous", Moves.COPY, cost=Cost.LIGHT),
    _view(
        "reshape _reshape_alias lift_fresh_copy lift_fresh diagonal unfold narrow chunk flatten.using_ints"
        " unflatten.int movedim.int swapaxes expand_as view_as ravel swapdims numpy_T matrix_H mT mH",
        Moves.OTHER,
    ),
    _view("_to_copy prims.convert_element_type", None, Trait.CAST | Trait.PASSES_SCALE, Cost.LIGHT),
)

MOVED = (
    row(
        "view_copy expand_copy permute_copy transpose_copy.int as_strided_copy diagonal_copy unbind_copy.int"
        " split_copy.Tensor prims.broadcast_in_dim prims.transpose prims.view_of"
        " take im2col col2im pixel_shuffle pixel_unshuffle",
        terms=FIRST,
    ),
    row("flip roll repeat gather index.Tensor index_select", terms=FIRST, hands_on="first", cost=Cost.FUSED),
    row("_unsafe_index.Tensor prims.rev slice_backward select_backward", terms=FIRST, cost=Cost.FUSED),
    row("tril triu", terms=FIRST, hands_on="first"),
    row("embedding prims._low_memory_max_pool_offsets_to_indices", cost=Cost.FUSED),
    row("constant_pad_nd", terms=FIRST, fills_at=2, hands_on="first", traits=Trait.PASSES_SCALE, cost=Cost.FUSED),
    # The first argument is the list of parts.
    row("cat stack", terms=FIRST, hands_on="any", traits=Trait.PASSES_SCALE, cost=Cost.REDUCED),
    row("copy", terms=((1,),), hands_on="any", traits=Trait.PASSES_SCALE),
    row("copy_ set_.source_Tensor prims.copy_to", traits=Trait.MUTATES),
)

WRITTEN = (
    row("select_scatter slice_scatter", terms=_WRITES_1, hands_on="any", traits=Trait.PASSES_SCALE, cost=Cost.FUSED),
    row("as_strided_scatter diagonal_scatter", terms=_WRITES_1, traits=Trait.PASSES_SCALE),
    row("index_put", terms=_WRITES_2, hands_on="any", traits=Trait.PASSES_SCALE, cost=Cost.REDUCED),
    row("_unsafe_index_put", terms=_WRITES_2, traits=Trait.PASSES_SCALE, cost=Cost.REDUCED),
    row("masked_scatter", terms=_WRITES_2, traits=Trait.PASSES_SCALE),
    row("scatter.src", terms=_WRITES_3, hands_on="any", traits=Trait.PASSES_SCALE),
    row("scatter.value", terms=_WRITES_3, fills_at=3, hands_on="first", traits=Trait.PASSES_SCALE),
    row(
        "scatter_add index_add _unsafe_masked_index _unsafe_masked_index_put_accumulate",
        terms=_WRITES_3,
        traits=Trait.PASSES_SCALE,
    ),
    row("index_fill.int_Scalar", fills_at=3, hands_on="first"),
    row("masked_fill.Scalar", terms=_WRITES_2, fills_at=2, hands_on="any", traits=_FILLS, cost=Cost.LIGHT),
    row("masked_fill.Tensor", terms=_WRITES_2, hands_on="any", traits=_FILLS, cost=Cost.LIGHT),
)

_CHOICE: Terms = ((1,), (2,))
_CHOOSES = Trait.PASSES_SCALE | Trait.SELECTS
_WHERE = _CHOOSES | Trait.WRITES_NEW | Trait.MASKS

CHOSEN = (
    row("where.self", terms=_CHOICE, hands_on="any", traits=_WHERE, cost=Cost.LIGHT),
    row("where.ScalarSelf", terms=_CHOICE, fills_at=1, hands_on="any", traits=_CHOOSES, cost=Cost.LIGHT),
    row("where.ScalarOther", terms=_CHOICE, fills_at=2, hands_on="any", traits=_CHOOSES, cost=Cost.LIGHT),
    row("where.Scalar", terms=_CHOICE, traits=Trait.PASSES_SCALE, cost=Cost.LIGHT),
)

CONSTANT = (
    row("full full_like", constant_at=1, cost=Cost.FUSED),
    row("new_full", constant_at=2),
    row("scalar_tensor", constant_at=0, cost=Cost.FUSED),
    row("zeros new_zeros", traits=Trait.ZERO),
    row("zeros_like", traits=Trait.ZERO, cost=Cost.FUSED),
    row("ones_like arange empty.memory_format empty_like prims.iota", cost=Cost.FUSED),
)

ROWS = VIEWS + MOVED + WRITTEN + CHOSEN + CONSTANT
