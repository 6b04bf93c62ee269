"""Data-parallel training whose activations and gradient exchange are in 8 bits.

torchrun --nproc-per-node 2 examples/ddp_aps.py    --small for a quick look
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import fxprec
from fxprec.demo.data import load_digits
from fxprec.demo.models import SmallCNN


def main(small: bool = False) -> float:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    epochs, batch = (1, 256) if small else (8, 64)
    torch.manual_seed(0)
    digits, model = load_digits(), SmallCNN(width=4 if small else 16)
    model.compile(backend="fxprec", options={"recipe": "fp8", "lowering": "eager" if small else "auto"})
    ddp = DistributedDataParallel(model)
    state = fxprec.aps.APSState(format="e5m2", keep_high=[model.classifier])
    ddp.register_comm_hook(state, fxprec.aps.aps_hook)

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(digits.train_labels))[rank::world]  # the same permutation on every rank
        for chosen in order.split(batch // world)[:-1]:  # whole batches: one shape, one compilation
            loss = F.cross_entropy(ddp(digits.train_images[chosen]), digits.train_labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    accuracy = right.float().mean()
    replicas = [torch.empty_like(model.classifier.weight) for _ in range(world)]
    dist.all_gather(replicas, model.classifier.weight.detach())
    if rank == 0:
        low = fxprec.backend_of(model).plans[0].achieved_low_ratio
        print(f"{world} ranks, {low:.0%} of the elements low, gradients in e5m2: test accuracy {accuracy:.2%}")
        print("replicas are bit-identical:", all(torch.equal(replicas[0], other) for other in replicas))
    return accuracy.item()


if __name__ == "__main__":
    main("--small" in sys.argv)
    dist.destroy_process_group()
