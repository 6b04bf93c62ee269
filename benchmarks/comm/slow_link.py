"""Gradient all-reduce between hosts on a slow link: network namespaces, veth pairs and `tc tbf`, one rank each.

    python -m benchmarks.comm.slow_link --hosts 4 --rate 200mbit

Needs root and iproute2. Makes its own namespaces (fxh0, fxh1, ..., and fxsw with the bridge) and removes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine

HERE = Path(__file__).parent


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(space: str, *words: str) -> None:
    subprocess.run(["ip", "netns", "exec", space, *words], check=True)


def build(hosts: int, rate: str) -> None:
    """A bridge in its own namespace; each host's veth limited in both directions."""
    ip("netns", "add", "fxsw")
    inside("fxsw", "ip", "link", "add", "br0", "type", "bridge")
    inside("fxsw", "ip", "link", "set", "br0", "up")
    for k in range(hosts):
        space = f"fxh{k}"
        ip("netns", "add", space)
        ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"p{k}", "netns", "fxsw")
        inside(space, "ip", "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth0")
        inside(space, "ip", "link", "set", "lo", "up")
        inside(space, "ip", "link", "set", "eth0", "up")
        inside("fxsw", "ip", "link", "set", f"p{k}", "master", "br0")
        inside("fxsw", "ip", "link", "set", f"p{k}", "up")
        limit = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms")
        inside(space, "tc", "qdisc", "add", "dev", "eth0", *limit)
        inside("fxsw", "tc", "qdisc", "add", "dev", f"p{k}", *limit)


def tear_down(hosts: int) -> None:
    for space in [f"fxh{k}" for k in range(hosts)] + ["fxsw"]:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def launch(hosts: int, script: Path, words: Sequence[str]) -> None:
    """Run ``script`` as one rank in each namespace. Raises SystemExit where one fails."""
    ranks = []
    for k in range(hosts):
        own = ["--rank", str(k), "--world", str(hosts), "--master", "10.77.0.1", "--interface", "eth0", *words]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", f"fxh{k}", sys.executable, str(script), *own]
        ranks.append(subprocess.Popen(command, env=env))
    codes = [p.wait(900) for p in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def table(found: dict[str, dict[str, float]]) -> str:
    base = found["fp32 all-reduce"]
    half = found.get("fp16 hook", base)
    lines = ["| way | s | MB sent | time of fp32 / this | bytes / fp32 | bytes / fp16 |", "|---|---|---|---|---|---|"]
    for name, row in found.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error']} | | | | |")
            continue
        ratios = (base["seconds"] / row["seconds"], row["bytes_sent"] / base["bytes_sent"])
        lines.append(
            f"| {name} | {row['seconds']:.2f} | {row['bytes_sent'] / 1e6:.1f} | {ratios[0]:.2f} | {ratios[1]:.3f} | "
            f"{row['bytes_sent'] / half['bytes_sent']:.3f} |"
        )
    return "\n".join(lines)


def plot(found: dict[str, dict[str, float]], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [(name, row["seconds"]) for name, row in found.items() if "seconds" in row]
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.barh([name for name, _ in rows][::-1], [s for _, s in rows][::-1], color="#4c72b0")
    axes.set_xlabel("seconds for one all-reduce of 25 M gradients")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--bucket-mb", type=int, default=25, help="DistributedDataParallel's bucket size.")
    parser.add_argument("--only", default="", help="Comma-separated parts of names of the ways to run.")
    args = parser.parse_args()
    tear_down(args.hosts)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank0.json"
        try:
            build(args.hosts, args.rate)
            words = ["--repeats", str(args.repeats), "--out", str(out)]
            words += ["--bucket-mb", str(args.bucket_mb), "--only", args.only]
            launch(args.hosts, HERE / "slow_link_rank.py", words)
        finally:
            tear_down(args.hosts)
        found = json.loads(out.read_text())
    print(table(found))
    saved = machine.save(
        f"aps-slow-link-{args.bucket_mb}mb",
        {"hosts": args.hosts, "rate": args.rate, "parameters": 25_000_000, "bucket_mb": args.bucket_mb, "ways": found},
    )
    plot(found, saved.with_suffix(".png"), f"{args.hosts} hosts, {args.rate}")


if __name__ == "__main__":
    main()
