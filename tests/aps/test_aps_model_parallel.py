"""Differentiable collectives of codes: tensor-parallel layers and each collective alone, on three ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from aps_ranks import run_ranks, several
from torch import Tensor

from fxprec import aps
from fxprec.errors import ConfigError
from fxprec.runtime.aps import parallel
from fxprec.runtime.aps.codec_tables import TABLES

WORLD = 3


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def tensor_parallel(rank: int, world: int) -> dict[str, dict[str, float]]:
    """By data type, relative errors of a column- then row-parallel pair of layers, forward and backward."""
    g = torch.Generator().manual_seed(5)
    x, w1, w2 = (torch.randn(s, generator=g) for s in ((8, 12), (12, 4 * world), (4 * world, 6)))
    full = [t.clone().requires_grad_() for t in (x, w1, w2)]
    wanted = torch.relu(full[0] @ full[1]) @ full[2]
    wanted.square().sum().backward()
    mine = slice(4 * rank, 4 * rank + 4)
    found = {}
    for name in TABLES:
        part = [t.clone().requires_grad_() for t in (x, w1[:, mine], w2[mine])]
        hidden = torch.relu(aps.copy_to_group(part[0], data_type=name) @ part[1])
        y = aps.reduce_from_group(hidden @ part[2], data_type=name)
        y.square().sum().backward()
        grads = [full[0].grad, full[1].grad[:, mine], full[2].grad[mine]]
        pairs = zip(("x", "w1", "w2"), part, grads, strict=True)
        found[name] = {"forward": error(y, wanted)} | {n: error(p.grad, wanted) for n, p, wanted in pairs}
    return found


def collectives(rank: int, world: int) -> dict[str, float]:
    """Relative errors of each collective and its gradient against what plain torch gives."""
    tensors = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    gathered, summed = torch.cat(tensors, 1), sum(tensors)
    found = {}

    leaf = tensors[rank].clone().requires_grad_()
    y = aps.all_gather(leaf, dim=1)
    (y * gathered).sum().backward()  # every rank's gradient for this part is this part
    found["gather"], found["gather backward"] = error(y, gathered), error(leaf.grad, world * tensors[rank])

    leaf = tensors[rank].clone().requires_grad_()
    y = aps.all_reduce(leaf)
    (y * (rank + 1)).sum().backward()
    found["reduce"] = error(y, summed)
    found["reduce backward"] = error(leaf.grad, torch.full_like(leaf, world * (world + 1) / 2))

    sent = [torch.randn(2 * world, 3, generator=torch.Generator().manual_seed(9 + r)) for r in range(world)]
    leaf = sent[rank].clone().requires_grad_()
    y = aps.all_to_all(leaf)
    y.backward(torch.ones_like(y) * (rank + 1))
    found["swap"] = error(y, torch.cat([t[2 * rank : 2 * rank + 2] for t in sent]))
    found["swap backward"] = error(leaf.grad, torch.arange(1.0, world + 1).repeat_interleave(2)[:, None].expand(-1, 3))

    half = aps.all_reduce(tensors[rank].bfloat16())
    found["bf16"] = error(half.float(), summed)
    assert half.dtype == torch.bfloat16
    return found


def odd(rank: int, world: int) -> dict[str, Any]:
    bad = torch.ones(4)
    if rank == 1:
        bad[0] = torch.nan
    rows = aps.all_gather(bad).view(world, 4)
    try:
        aps.all_to_all(torch.ones(4, 2))
        refusal = "no error"
    except ConfigError as problem:
        refusal = str(problem)
    return {
        "zeros": float(aps.all_reduce(torch.zeros(5)).abs().max()),
        "empty": tuple(aps.all_gather(torch.empty(0)).shape),
        "finite": rows.isfinite().all(1).tolist(),
        "sum": aps.all_reduce(bad).tolist(),
        "refusal": refusal,
        "bits": aps.all_reduce(torch.randn(7, generator=torch.Generator().manual_seed(rank))),
    }


def in_sub_batches(rank: int, world: int) -> dict[str, Any]:
    """Split layers behind samples of this rank's own: errors against the whole batch on one rank, exact numbers, order."""
    g = torch.Generator().manual_seed(5)
    x, w1, w2 = (torch.randn(s, generator=g) for s in ((world, 6, 12), (12, 4 * world), (4 * world, 5)))
    full = [t.clone().requires_grad_() for t in (x, w1, w2)]
    wanted = torch.tanh(full[0] @ full[1]) @ full[2]
    wanted.square().mean().backward()  # the mean of all ranks' losses
    mine = slice(4 * rank, 4 * rank + 4)
    part = [t.clone().requires_grad_() for t in (x[rank], w1[:, mine], w2[mine])]
    order: list[str] = []

    def layers(h: Tensor) -> Tensor:
        order.append(f"compute {tuple(h.shape)}")
        return aps.reduce_from_group(torch.tanh(h @ part[1]) @ part[2])

    class Noted(parallel._Gather):
        def __init__(self, *arguments: Any) -> None:
            order.append("send")
            super().__init__(*arguments)

    with mock.patch.object(parallel, "_Gather", Noted):
        y = aps.sub_batches(layers, part[0], 2)
    y.square().mean().backward()
    grads = [world * full[0].grad[rank], full[1].grad[:, mine], full[2].grad[mine]]
    pairs = zip(("x", "w1", "w2"), part, grads, strict=True)
    found: dict[str, Any] = {"errors": [error(y, wanted[rank]), *(error(p.grad, w) for _, p, w in pairs)]}

    g = torch.Generator().manual_seed(6)
    signs, grad = (torch.randint(-1, 2, (world, 6, 8), generator=g).float() for _ in range(2))  # exact in 8 bits
    leaf, weight = signs[rank].clone().requires_grad_(), torch.eye(8)[torch.randperm(8, generator=g)].requires_grad_()
    y = aps.sub_batches(lambda h: h @ weight, leaf)  # every rank has the whole layer, and a share of its gradient
    y.backward(grad[rank])
    found["exact"] = [
        torch.equal(y, signs[rank] @ weight),
        torch.allclose(leaf.grad, world * (grad[rank] @ weight.T), rtol=1e-6),
        torch.allclose(weight.grad, signs.flatten(0, 1).T @ grad.flatten(0, 1) / world, atol=1e-6),
    ]
    try:
        aps.sub_batches(layers, part[0], 4)
        refusal = "no error"
    except ConfigError as problem:
        refusal = str(problem)
    return {**found, "order": order, "refusal": refusal}


@pytest.fixture(scope="module")
def results(once: Callable[..., Any]) -> list[dict[str, Any]]:
    return once(
        "model_parallel",
        lambda: run_ranks(
            WORLD, several, [(check, ()) for check in (tensor_parallel, collectives, odd, in_sub_batches)]
        ),
    )


@pytest.mark.parametrize("name", list(TABLES))
def test_tensor_parallel_layers_in_codes(results: list[dict[str, Any]], name: str) -> None:
    bound = 0.05 if "dynamic" in name or name == "linear" else 0.2  # four bits of mantissa
    for found in (r["tensor_parallel"][name] for r in results):
        assert set(found) == {"forward", "x", "w1", "w2"}
        assert all(0 < e < bound for e in found.values()), found


def test_each_collective_and_its_gradient(results: list[dict[str, Any]]) -> None:
    for found in (r["collectives"] for r in results):
        assert found.pop("reduce backward") < 1e-6  # equal numbers are exact
        assert found.pop("swap backward") < 0.02
        assert all(0 < e < 0.03 for e in found.values()), found


def test_sub_batches_compute_one_while_the_next_is_sent(results: list[dict[str, Any]]) -> None:
    for found in (r["in_sub_batches"] for r in results):
        assert all(0 < e < 0.05 for e in found["errors"]), found
        assert found["exact"] == [True, True, True]
        computed = ["compute (9, 12)", "send"]  # the sum that the layers end in
        assert found["order"] == ["send", "send", *computed, *computed]
        assert "choose a count that divides it" in found["refusal"]


def test_zeros_empties_and_nan(results: list[dict[str, Any]]) -> None:
    for found in (r["odd"] for r in results):
        assert found["zeros"] == 0
        assert found["empty"] == (0,)
        assert found["finite"] == [True, False, True]  # the rank's tensor, and only it
        assert [value == 3 for value in found["sum"]] == [False, False, True, True]  # lost with its owner's chunk
        assert all(math.isnan(value) for value in found["sum"][:2])
        assert "pad it to a multiple of the ranks" in found["refusal"]


def test_all_ranks_get_the_same_bits(results: list[dict[str, Any]]) -> None:
    first, *others = (r["odd"]["bits"] for r in results)
    assert all(torch.equal(first, other) for other in others)
