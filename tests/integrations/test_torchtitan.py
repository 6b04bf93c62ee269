"""torchtitan: its Llama, converted, trained on a CPU; by itself, and parallelized by torchtitan over two ranks.

Its language models use FlexAttention, which has no backward on CPUs; plain attention takes its place here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import fxprec
from fxprec.integrations import RankStates, backends_in
from tests.aps.aps_ranks import run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # their own deprecations

import torchtitan.distributed.parallel_dims
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry, parallelize_llama

from fxprec.integrations.torchtitan import FxprecConverter

OPTIONS: dict[str, Any] = {
    "recipe": "hfp8",
    "low_ratio": 0.8,
    "storage": "simulate",
    "lowering": "eager",
}
NEAR: dict[str, Any] = {
    "recipe": fxprec.Recipe(hi="1-8-22", lo_forward="1-8-18", lo_backward="1-8-18", name="near"),
    "low_ratio": 1.0,
    "storage": "simulate",
    "lowering": "eager",
}
STEPS, SAVED = 20, 10


def config_of(converters: list[Any] | None) -> Any:
    spec = model_registry("debugmodel", converters=converters)
    config = spec.model
    del config.layers[1:]
    for _, _, parent, name in list(config.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return spec


def llama(options: dict[str, Any] | None) -> nn.Module:
    """One block with a norm whose result overflows 8 bits, so that there is a promotion to save."""
    converters = None if options is None else [FxprecConverter.Config(options=options)]
    model = config_of(converters).model.build()
    torch.manual_seed(0)
    model.init_states()
    model.layers["0"].ffn_norm.weight.data *= 3000
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 2048, (2, 9), generator=torch.Generator().manual_seed(step % 4))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens, wanted = batch(step)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), wanted.flatten())


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    model = llama(OPTIONS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = train(model, range(SAVED), optimizer)
    dcp.save({"model": model.state_dict(), "fxprec": RankStates(model)}, checkpoint_id=tmp_path)
    after = train(model, range(SAVED, STEPS), optimizer)
    assert after[-1] < before[0]
    again = llama(OPTIONS)
    state = {"model": again.state_dict(), "fxprec": RankStates(again)}
    dcp.load(state, checkpoint_id=tmp_path)
    again.load_state_dict(state["model"])
    assert train(again, range(SAVED, STEPS), torch.optim.SGD(again.parameters(), 0.1)) == after
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        assert loss_of(model.eval(), 0) == loss_of(again.eval(), 0)
    ((name, backend),) = backends_in(model).items()
    assert name == "layers.0"
    assert backend.plans[0].promoted


def ranks(rank: int, world: int) -> tuple[list[str], dict[str, float]]:
    """Return which modules are compiled, and each parameter's gradient's norm, over all ranks.

    torchtitan's mesh is one of GPUs where it sees no accelerator; here it is told of the CPU, and FSDP that Gloo has no
    sum with a factor.
    """
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=1, world_size=world, spmd_backend="partial_dtensor"
    )
    model = parallelize_llama(
        llama(NEAR),
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)
    loss_of(model, rank).backward()
    norms = {name: float(p.grad.full_tensor().norm()) for name, p in model.named_parameters()}
    return list(backends_in(model)), norms


def test_parallelized_over_ranks_gradients_are_those_of_one_process() -> None:
    model = llama(None)
    (loss_of(model, 0) + loss_of(model, 1)).backward()  # torchtitan has FSDP sum, and divides the loss itself
    for found, norms in run_ranks(2, ranks):
        assert found == ["layers.0"]
        assert norms == pytest.approx({name: float(p.grad.norm()) for name, p in model.named_parameters()}, rel=5e-5)


def test_wrong_options_are_one_line_before_anything_is_built() -> None:
    with pytest.raises(fxprec.ConfigError, match="recipe"):
        model_registry("debugmodel", converters=[FxprecConverter.Config(options={"recipe": "fp9"})])
