"""A transformer sharded by FSDP2, each layer compiled with 8-bit activations; a checkpoint of all ranks' states.

torchrun --nproc-per-node 2 examples/fsdp2.py    --small for a quick look
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fxprec.demo.data import VOCAB, load_text
from fxprec.demo.models import CharTransformer
from fxprec.integrations import RankStates, backends_in, compile_layers


def make(small: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = CharTransformer(vocab=VOCAB, width=16 if small else 128, layers=2 if small else 4)

    # By layer, before fully_shard: its hooks would cut a graph of the whole model at every layer.
    compile_layers(model, "_Block", {"recipe": "fp8", "lowering": "eager" if small else "auto"})
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, codes: torch.Tensor) -> float:
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        starts = torch.randint(len(codes) - 65, (16, 1))
        window = codes[starts + torch.arange(65)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main(small: bool = False) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    half, codes = (3, load_text(20_000).train) if small else (100, load_text().train)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)

    model, optimizer = make(small)
    first = train(model, optimizer, range(half), codes)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder[0])
    loss = train(model, optimizer, range(half, 2 * half), codes)

    again, optimizer = make(small)
    checkpoint.load(state := state_of(again, optimizer), checkpoint_id=folder[0])
    set_state_dict(again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    resumed = train(again, optimizer, range(half, 2 * half), codes)
    print(f"rank {dist.get_rank()}: loss {first:.3f} after {half} steps, {loss:.3f} after {2 * half}, "
          f"{resumed:.3f} resumed; the same: {loss == resumed}; {len(backends_in(model))} layers")  # fmt: skip


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    tensors, optimizer_state = get_state_dict(model, optimizer)
    return {"model": tensors, "optimizer": optimizer_state, "fxprec": RankStates(model)}


if __name__ == "__main__":
    main("--small" in sys.argv)
    dist.destroy_process_group()
