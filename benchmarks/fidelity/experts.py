"""Train mixtures of experts of transformers, made small: gradients against float64 and losses beside autocast's.

    python -m benchmarks.fidelity.experts
    python -m benchmarks.fidelity.experts --models mixtral --sides autocast fp8 --steps 20

Weights are float32, the experts are transformers' ``grouped_mm``, one graph a model. The task is to continue 32 numbers
that rise by a constant modulo 61. Same weights and batches for all sides. Gradients are those of the first step, of all
parameters together; of float64 the experts are transformers' ``batched_mm``, since ``grouped_mm`` has no float64.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fxprec
from benchmarks import machine

_SIZES = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": False, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 64, "sliding_window": 8},
}
SIDES: Mapping[str, dict[str, Any]] = {
    "autocast": {},
    "bf16": {"recipe": "bf16"},
    "fp8": {"recipe": "fp8", "low_ratio": 1.0},
    "mxfp8": {"recipe": "mxfp8"},
    "nvfp4": {"recipe": "nvfp4"},
}


def make(name: str) -> nn.Module:
    """Return a model with weights from a fixed seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **_SIZES, **MODELS[name])
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def batch(step: int) -> Tensor:
    """Return tokens (4, 32): each row rises by a constant of its own."""
    draw = torch.Generator().manual_seed(step)
    start, by = torch.randint(61, (4, 1), generator=draw), torch.randint(1, 5, (4, 1), generator=draw)
    return 3 + (start + by * torch.arange(32)) % 61


@dataclass
class Run:
    """One side of one model."""

    model: str
    side: str
    graphs: int
    grouped: int
    """GEMMs of the plan that are grouped products."""
    gradient_error: float
    """Relative L2 distance to float64's gradients, step 1."""
    first_loss: float
    last_loss: float
    """Mean of the last ten steps."""


def loss_of(model: Callable[..., Any], tokens: Tensor, *, autocast: bool = False) -> Tensor:
    """Return the mean cross entropy of the next token."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def exact_gradients(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return float64's gradients of all parameters, in one vector."""
    exact = copy.deepcopy(model).double()
    exact.config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    loss_of(exact, tokens).backward()
    return _gradients(exact)


def _gradients(model: nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.double().flatten() for grad in found])


def train(name: str, side: str, steps: int, *, lowering: str = "eager") -> Run:
    """Train one side of one model, and compare its first gradients."""
    torch._dynamo.reset()
    model = make(name)
    wanted = exact_gradients(model, batch(0))
    backend = fxprec.Backend(fxprec.Config(**{"lowering": lowering, **SIDES[side]})) if SIDES[side] else None
    step = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: list[float] = []
    error = 0.0
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(step, batch(i), autocast=backend is None)
        loss.backward()
        if i == 0:
            error = float((_gradients(model) - wanted).norm() / wanted.norm())
        optimizer.step()
        losses.append(loss.item())
    plans = [] if backend is None else backend.plans
    grouped = sum(gemm.op == "fxprec.grouped_mm" for plan in plans for gemm in plan.gemms)
    last = losses[-10:]
    return Run(name, side, len(plans), grouped, error, losses[0], sum(last) / len(last))


def main() -> None:
    """Print and keep one line for each side of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    args = parser.parse_args()
    warnings.simplefilter("ignore", fxprec.FxprecWarning)
    torch.set_num_threads(1)
    runs: list[Run] = []
    for name in args.models:
        for side in args.sides:
            runs.append(train(name, side, args.steps))
            print(*(f"{key} {value}" for key, value in asdict(runs[-1]).items()), sep="  ", flush=True)
    path = machine.save("experts", {"arguments": vars(args), "runs": [asdict(run) for run in runs]})
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
