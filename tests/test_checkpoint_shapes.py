"""Shapes that a checkpointed region has in PyTorch programs: its gradients are those of the uncompiled model.

PyTorch's tests of checkpointing have most of them; `benchmarks/yardsticks/pytorch_tests.py` runs those as they are.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from backend_helpers import compare, eager_backend
from checkpointed import SIDE, Region, region, seeded, selective
from models import Parts
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten


def two_products(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w @ w) * w


class Product(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Squashed(torch.autograd.Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Tensor
    w: Tensor


pytree.register_dataclass(Pair)


def a_function_of_the_users(x: Tensor, w: Tensor) -> Tensor:
    return region(Product.apply, x, w)  # type: ignore[no-any-return]


def a_function_of_the_users_by_a_policy(x: Tensor, w: Tensor) -> Tensor:
    return selective(set())(lambda a, b: Squashed.apply(Product.apply(a, b)) @ b, x, w)  # type: ignore[no-any-return]


def one_result_twice(x: Tensor, w: Tensor) -> Tensor:
    def twice(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.sin(x @ w)
        return y, y

    one, other = checkpoint(twice, x, use_reentrant=True)
    return one + other.cos()  # type: ignore[no-any-return]


def an_input_and_views(x: Tensor, w: Tensor) -> Tensor:
    def views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x @ w).tanh()
        return x, y.t(), y[: SIDE // 2], w.t()

    same, turned, part, weight = region(views, x.cos(), w)
    return same * turned @ weight + part.repeat(2, 1)  # type: ignore[no-any-return]


def a_list_that_grows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    def grown(x: Tensor, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
        y = (x @ w).sigmoid()
        kept.append(x.sin())
        return y @ w, y.cos()

    kept: list[Tensor] = []
    found = region(grown, x, kept)
    return found[0] + found[-1], kept[0]


def a_counter(x: Tensor, w: Tensor) -> Tensor:
    count = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.sin(x @ w) @ w

    return checkpoint(counted, x, use_reentrant=True)  # type: ignore[no-any-return]


def dataclasses_in_and_out(x: Tensor, w: Tensor) -> Tensor:
    def both(pair: Pair) -> Pair:
        return Pair(F.silu(pair.x @ pair.w), pair.w.t())

    found = region(both, Pair(x, w))
    return found.x @ found.w  # type: ignore[no-any-return]


def a_profiled_part(x: Tensor, w: Tensor) -> Tensor:
    def profiled(x: Tensor, w: Tensor) -> Tensor:
        with torch.profiler.record_function("part"):
            return torch.sigmoid(x @ w)

    return region(profiled, x.sin(), w)  # type: ignore[no-any-return]


def detached_and_saved(x: Tensor, w: Tensor) -> Tensor:
    def detached(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).sin()
        return (y.detach() + y).cos()

    return selective({aten.sin.default, aten.add.Tensor})(detached, x, w)  # type: ignore[no-any-return]


def saved_by_the_name_before_decomposition(x: Tensor, w: Tensor) -> Tensor:
    return selective({aten.silu.default})(lambda a, b: F.silu((a @ b).sin()).cos(), x, w)  # type: ignore[no-any-return]


def two_results_saved(x: Tensor, w: Tensor) -> Tensor:
    def largest(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        values, places = torch.topk((x @ w).tanh(), 3)
        return values.sum(1).cos(), places

    values, places = selective({aten.topk.default})(largest, x, w)
    return values * places.sum(1)  # type: ignore[no-any-return]


def regions_in_a_region(x: Tensor, w: Tensor) -> Tensor:
    inner = selective({aten.mm.default})

    def outer(x: Tensor, w: Tensor) -> Tensor:
        return inner(lambda a, b: (a @ b).tanh(), x, w).relu() @ w  # type: ignore[no-any-return]

    return region(outer, region(outer, x, w), w)  # type: ignore[no-any-return]


def all_but_the_second_product() -> Any:
    products = {False: 0, True: 0}

    def chosen(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        products[ctx.is_recompute] += op is aten.mm.default
        return op is aten.mm.default and products[ctx.is_recompute] != 2

    return create_selective_checkpoint_contexts(chosen)


def the_second_product_again(x: Tensor, w: Tensor) -> Tensor:
    return region(two_products, x, w, context_fn=all_but_the_second_product)  # type: ignore[no-any-return]


def products_again_and_the_rest_saved(x: Tensor, w: Tensor) -> Tensor:
    def chosen(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_RECOMPUTE if op is aten.mm.default else CheckpointPolicy.MUST_SAVE

    return region(two_products, x, w, context_fn=partial(create_selective_checkpoint_contexts, chosen))  # type: ignore[no-any-return]


def operators_in_a_list(x: Tensor, w: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [aten.mm.default])
    return region(two_products, x, w, context_fn=contexts)  # type: ignore[no-any-return]


def nothing_saved_of_a_cat(x: Tensor, w: Tensor) -> Tensor:
    return selective(set())(lambda a, b: torch.cat([a, b]).sin(), x, w) @ w  # type: ignore[no-any-return]


def dropout_in_and_around(x: Tensor, w: Tensor) -> Tensor:
    for dropped in (region, selective({aten.mm.default})):
        x = dropped(lambda a, b: F.dropout((a @ b).relu(), 0.2), F.dropout(x, 0.2), w)
    return x


def attention_with_dropout(x: Tensor, w: Tensor) -> Tensor:
    def attention(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (t.view(1, 2, 8, SIDE) for t in (x @ w, x.sin(), x.cos()))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)

    return region(attention, x, w)  # type: ignore[no-any-return]


def attention_saved(x: Tensor, w: Tensor) -> Tensor:
    def attention(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (t.view(1, 2, 8, SIDE) for t in (x @ w, x.sin(), x.cos()))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) @ w

    return selective({aten._scaled_dot_product_flash_attention_for_cpu.default})(attention, x, w)  # type: ignore[no-any-return]


def places_out(x: Tensor, w: Tensor) -> Tensor:
    places, y = region(lambda a, b: ((a @ b).argmax(1), (a @ b).sin()), x, w)
    return y.gather(1, places[:, None]).exp()  # type: ignore[no-any-return]


def a_result_that_nothing_reads(x: Tensor, w: Tensor) -> Tensor:
    return region(lambda a, b: ((a @ b).sin(), (a @ b).exp()), x, w)[0]  # type: ignore[no-any-return]


def a_hook_inside(x: Tensor, w: Tensor) -> Tensor:
    def hooked(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).tanh()
        y.register_hook(lambda grad: grad * 2)
        return (y * y).sin()

    return region(hooked, x, w) @ w  # type: ignore[no-any-return]


def a_part_without_gradients(x: Tensor, w: Tensor) -> Tensor:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            largest = (x @ w).abs().amax()
        return (x @ w / largest).sin()

    return region(scaled, x, w)  # type: ignore[no-any-return]


def a_loss_and_no_argument(x: Tensor, w: Tensor) -> Tensor:
    def loss(x: Tensor, none: None, *, weight: Tensor, times: float) -> Tensor:
        return F.cross_entropy(x @ weight, torch.arange(SIDE)) * times

    return region(loss, x.sin(), None, weight=w, times=3.0)  # type: ignore[no-any-return]


REGIONS: tuple[Region, ...] = (
    a_function_of_the_users,
    a_function_of_the_users_by_a_policy,
    one_result_twice,
    an_input_and_views,
    a_list_that_grows,
    a_counter,
    dataclasses_in_and_out,
    a_profiled_part,
    detached_and_saved,
    saved_by_the_name_before_decomposition,
    two_results_saved,
    regions_in_a_region,
    the_second_product_again,
    products_again_and_the_rest_saved,
    operators_in_a_list,
    nothing_saved_of_a_cat,
    dropout_in_and_around,
    attention_with_dropout,
    attention_saved,
    places_out,
    a_result_that_nothing_reads,
    a_hook_inside,
    a_part_without_gradients,
    a_loss_and_no_argument,
)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")  # Dynamo does
@pytest.mark.parametrize("made", REGIONS, ids=lambda made: made.__name__)
def test_gradients_of_a_checkpointed_region_are_those_of_the_uncompiled_model(made: Region) -> None:
    flags = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True, "capture_profiler_record_function": True}
    backend = eager_backend("packed", low_ratio=1.0)

    def model() -> nn.Module:
        """A region between two products."""
        layers = {"first": nn.Linear(SIDE, SIDE), "weight": nn.Parameter(torch.randn(SIDE, SIDE) / 4)}
        return Parts(lambda m, x: made(m.first(x), m.weight), **layers)

    batches = [(torch.randn(SIDE, SIDE),)] * 2
    with torch._dynamo.config.patch(**flags), torch._inductor.config.patch(fallback_random=True):
        compare(model, batches, backend, call=seeded, input_gradients=True, fullgraph=True)
    assert backend.plans
