"""What a lowered half is estimated to launch and to move: closed forms, GEMMs left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes.analysis.gemm_costs import costs_of, known_gpus
from fxprec.passes.analysis.traffic.estimate import Traffic, traffic_of

ROWS, WIDTH = 512, 256
N = ROWS * WIDTH
X, Y, W = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH), torch.zeros(WIDTH, WIDTH)


def estimated(function: Callable[..., object], *inputs: Tensor) -> tuple[int, int]:
    """Return launches and bytes."""
    found = traffic_of(make_fx(function, tracing_mode="fake")(*inputs).graph)
    return found.launches, found.bytes


def test_pointwise_nodes_are_one_kernel_that_reads_and_writes_once() -> None:
    assert estimated(lambda x, y: (x * 2 + y).relu(), X, Y) == (1, 3 * 4 * N)
    assert estimated(lambda x: (x * 2).to(torch.float8_e4m3fn), X) == (1, 5 * N)


def test_kernels_over_the_same_elements_that_share_what_they_read_are_one() -> None:
    assert estimated(lambda x, y: (x + 1, x + y), X, Y) == (1, 4 * 4 * N)
    assert estimated(lambda x, y: (x + 1, y + 1), X, Y) == (2, 4 * 4 * N)


def test_a_reduction_over_rows_is_part_of_the_kernel_that_reads_its_result() -> None:
    assert estimated(lambda x: x - x.amax(-1, keepdim=True), X) == (1, 2 * 4 * N)
    assert estimated(lambda x: (x.exp(), x.exp().sum(-1)), X) == (1, 2 * 4 * N + 4 * ROWS)


def test_a_gemm_is_left_out_but_what_it_reads_and_gives_passes_through_memory() -> None:
    assert estimated(lambda x, w: x @ w, X, W) == (0, 0)
    assert estimated(lambda x, w: (x * 2) @ w * 2, X, W) == (2, 4 * 4 * N)


def test_no_kernel_waits_in_its_middle_for_a_gemm() -> None:
    """Both read ``x``, and the second what a GEMM makes of the first."""
    assert estimated(lambda x, w: (x * 2) @ w + x, X, W) == (2, 5 * 4 * N)


def test_pieces_count_as_pieces_and_together_not_more_than_the_whole() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return gate * up

    assert estimated(gated, X) == (1, 4 * N + 4 * N // 2)
    assert estimated(lambda x: x[:, : WIDTH // 2] * 2, X) == (1, 2 * 4 * N // 2)


def test_a_library_gets_each_piece_of_what_is_computed_for_it_from_a_kernel_of_its_own() -> None:
    def heads(x: Tensor, w: Tensor) -> list[Tensor]:
        return [part @ w for part in (x * 2).chunk(2, 0)]

    assert estimated(heads, X, W) == (2, 2 * 4 * N)
    assert estimated(lambda x, w: (x * 2) @ w, X, W) == (1, 2 * 4 * N)


def test_a_sum_over_columns_is_two_kernels() -> None:
    long = torch.zeros(1 << 14, 64)
    assert estimated(lambda x: x.sum(0), long) == (2, long.numel() * 4 + 64 * 4)
    assert estimated(lambda x: x.sum(0), X) == (1, 4 * N + 4 * WIDTH)


def test_seconds_are_launches_and_bytes_at_the_devices_rates() -> None:
    costs = costs_of(known_gpus()["h100"])
    assert Traffic(10, 6_000_000).seconds(costs) == pytest.approx(10 * costs.launch_s + 6e6 / costs.bytes_per_s)
