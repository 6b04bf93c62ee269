"""ReLUs and clamps as comparisons: the same numbers, NaN among them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fxprec.passes.lowering.clamps import compare_to_clamp

aten = torch.ops.aten
CLAMPS = {
    "relu": torch.relu,
    "clamp_min": lambda x: aten.clamp_min(x, 0.5),
    "clamp_max": lambda x: aten.clamp_max(x, -0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CLAMPS)
def test_numbers_are_torchs_and_no_clamp_is_left(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([-torch.inf, -2, -0.5, -0.1, -0.0, 0, 1e-7, 0.5, 3, torch.inf, torch.nan], dtype=dtype)
    gm = make_fx(CLAMPS[name], tracing_mode="fake")(x)
    compare_to_clamp(gm.graph)
    gm.recompile()
    targets = {n.target for n in gm.graph.nodes}
    assert aten.where.self in targets
    assert not targets & {aten.relu.default, aten.clamp_min.default, aten.clamp_max.default}
    made: Tensor = gm(x)
    torch.testing.assert_close(made, CLAMPS[name](x), rtol=0, atol=0, equal_nan=True)
    assert made.dtype == dtype
    where = gm.graph.find_nodes(op="call_function", target=aten.where.self)[0]
    assert (where.meta["val"].dtype, where.meta["val"].shape) == (dtype, x.shape)
