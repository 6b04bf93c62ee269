"""The paper's Table 4 in small: two models on the digits data set, 8 ranks over Gloo, with and without APS.

    python -m benchmarks.comm.accuracy --model cnn --seeds 3

Every rank is a process; all of them run every configuration in one process group. Without APS, gradients divided by
the number of ranks are rounded to the format as they are, which is what the paper compares with. Beside the test
accuracy stands the loss on the training set, which tells small damage from noise.
Source: Han et al. 2020, Table 4 (CIFAR-10, 8 nodes).
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from statistics import fmean

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks import machine
from fxprec.aps import APSState, aps_hook

CONFIGURATIONS: dict[str, dict[str, str] | None] = {
    "fp32": None,
    "1-5-2 APS": {"format": "1-5-2"},
    "1-5-2": {"format": "1-5-2", "scaling": "none"},
    "1-4-3 APS": {"format": "1-4-3"},
    "1-4-3": {"format": "1-4-3", "scaling": "none"},
    "1-3-0 APS": {"format": "1-3-0"},
    "1-3-0": {"format": "1-3-0", "scaling": "none"},
}


class Block(nn.Module):
    """A residual block of two 3x3 convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.body(x))


def make_model(name: str) -> nn.Module:
    if name == "cnn":  # no normalisation: gradients are small at the start, which no format without a scale survives
        wide = [layer for _ in range(2) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), *wide, nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1)]
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10))
    stem = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16), nn.Conv2d(16, 32, 2, stride=2), Block(32)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (n, 1, 8, 8) and labels: a fixed fifth is the test set."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.3
    y = torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1437], y[:1437], x[1437:], y[1437:]


def train(
    rank: int, world: int, args: argparse.Namespace, options: dict[str, str] | None, seed: int
) -> tuple[float, float]:
    """Test accuracy in percent, and the loss on the training set."""
    torch.manual_seed(seed)
    model = make_model(args.model)
    ddp = DistributedDataParallel(model)
    if options is not None:
        ddp.register_comm_hook(APSState(**options), aps_hook)
    x, y, test_x, test_y = digits()
    batch = args.batch * world
    steps = args.epochs * (len(y) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(args.epochs):
        order = torch.randperm(len(y), generator=shuffle)
        for start in range(0, len(y) - batch + 1, batch):
            mine = order[start + rank * args.batch :][: args.batch]
            optimizer.zero_grad()
            functional.cross_entropy(ddp(x[mine]), y[mine]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        accuracy = float((model(test_x).argmax(1) == test_y).float().mean() * 100)
        return round(accuracy, 2), round(float(functional.cross_entropy(model(x), y)), 4)


def work(rank: int, world: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    rows = []
    for name, options in CONFIGURATIONS.items():
        start = time.perf_counter()
        accuracies, losses = zip(*(train(rank, world, args, options, seed) for seed in range(args.seeds)), strict=True)
        means = {"mean": round(fmean(accuracies), 2), "mean_train_loss": round(fmean(losses), 4)}
        rows.append({"configuration": name, "accuracy": accuracies, "train_loss": losses, **means})
        if rank == 0:
            print(f"{name:10} {means}  {accuracies}  {time.perf_counter() - start:.0f} s", flush=True)
    if rank == 0:
        title = {"model": args.model, "ranks": world, "batch_per_rank": args.batch, "epochs": args.epochs}
        print(machine.save(f"aps-accuracy-{args.model}", {**title, "configurations": rows}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["cnn", "resnet"], default="cnn")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=16, help="Images per rank and step.")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(work, (args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
