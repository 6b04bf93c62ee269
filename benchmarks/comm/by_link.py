"""Step time of bits by link beside fixed widths and torch's hooks: 4 ranks on 2 "nodes", the link between them slow.

    python -m benchmarks.comm.by_link --rates 50,100,200,500,2000 --rounds 15
    python -m benchmarks.comm.by_link --ways row --repeats 3 --rounds 9
    python -m benchmarks.comm.by_link --ways row --rates 50,200 --latencies 0.2,1,5

Needs root and iproute2. Each rank has a network namespace (fxl0 to fxl3) and a link of 2 Gbit/s to the bridge of its node
(fxn0, fxn1); `tc` limits what leaves a node for the other. Steps of all ways are interleaved in one process a rank,
medians reported. Bytes are those of the ranks' interfaces, by the kernel's counters. Repeats build the network and
start the ranks anew; the median repeat of each way counts. A latency is added by a process that passes frames on
(`benchmarks.comm.delay`); it takes time of the machine's processors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.comm import delay
from benchmarks.comm.by_link_rank import WAYS
from benchmarks.comm.slow_link import inside, ip

RANKS, NODES, INNER = 4, 2, "2gbit"
MTU = "9000"
"""Bytes of a frame: headers of smaller ones, which `tc` makes of large segments, are 5 % of what is counted."""
BURST = ("burst", "64kb", "latency", "200ms")
ROW = ("fp32", "16 bits", "8 bits", "4 bits", "PowerSGD hook, rank 4", "by link")
"""The ways that the mix, the last one, is compared with."""
SPACES = [f"fxl{k}" for k in range(RANKS)] + [f"fxn{n}" for n in range(NODES)]
RANK = Path(__file__).with_name("by_link_rank.py")


def build(outer: str, latency: float) -> Any:
    """A bridge for each node in a namespace of its own, its ranks' links, and the link between the bridges.

    Returns the process that adds ``latency`` seconds to that link, None where it is 0.
    """
    for space in SPACES:
        ip("netns", "add", space)
    for node in range(NODES):
        inside(f"fxn{node}", "ip", "link", "add", "br0", "type", "bridge")
        inside(f"fxn{node}", "ip", "link", "set", "br0", "up")
    cable = None
    if latency:
        cable = delay.cable(("fxn0", "fxn1"), "eth1", latency)
    else:
        ip("link", "add", "eth1", "netns", "fxn0", "type", "veth", "peer", "name", "eth1", "netns", "fxn1")
    for node in range(NODES):
        _limit(f"fxn{node}", "eth1", outer)
        inside(f"fxn{node}", "ip", "link", "set", "eth1", "master", "br0")
        inside(f"fxn{node}", "ip", "link", "set", "eth1", "mtu", MTU, "up")
    for k in range(RANKS):
        space, node = f"fxl{k}", f"fxn{k * NODES // RANKS}"
        ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"p{k}", "netns", node)
        inside(space, "ip", "addr", "add", f"10.78.0.{k + 1}/24", "dev", "eth0")
        inside(space, "ip", "link", "set", "lo", "up")
        inside(space, "ip", "link", "set", "eth0", "mtu", MTU, "up")
        inside(node, "ip", "link", "set", f"p{k}", "master", "br0")
        inside(node, "ip", "link", "set", f"p{k}", "mtu", MTU, "up")
        _limit(space, "eth0", INNER)
    return cable


def _limit(space: str, device: str, rate: str) -> None:
    inside(space, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, *BURST)


def tear_down() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def run(rate: int, latency: float, rounds: int, ways: Sequence[str]) -> dict[str, Any]:
    """Return what rank 0 measured at an outer rate in Mbit/s and latency in ms. Raises SystemExit where a rank fails."""
    tear_down()
    cable = None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rank0.json")
        try:
            cable = build(f"{rate}mbit", latency / 1e3)
            ranks = []
            for k in range(RANKS):
                words = [str(RANK), "--rank", str(k), "--world", str(RANKS), "--rounds", str(rounds), "--out", str(out)]
                words += ["--ways", ";".join(ways)]
                env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                ranks.append(subprocess.Popen(["ip", "netns", "exec", f"fxl{k}", sys.executable, *words], env=env))
            codes = [p.wait(1200) for p in ranks]
        finally:
            tear_down()
            if cable is not None:
                cable.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def table(link: str, found: dict[str, Any]) -> str:
    rows = found["ways"]
    mix = rows["by link"]["seconds"]
    plan = found["plan"]
    lines = [
        f"{link} between nodes, probed {plan['bytes_per_second'] * 8e-6:.0f} Mbit/s, {plan['latency'] * 1e3:.2g} ms; plan: "
        f"{found['shares']}",
        "| way | ms a step | mix is faster by | ms of exchange | predicted | ms of processor a rank | MB sent | error |",
    ]
    for name, row in rows.items():
        times = (row["seconds"] * 1e3, row["seconds"] / mix, row["processor_seconds"] * 1e3)
        exchange = (row.get("exchange", math.nan) * 1e3, row.get("predicted", math.nan) * 1e3)
        lines.append(
            "| {} | {:.1f} | {:.2f}x | {:.0f} | {:.0f} | {:.1f} | {:.2f} | {:.1e} |".format(
                name, *times[:2], *exchange, times[2], row["bytes_sent"] / 1e6, row["error"]
            )
        )
    sent, planned = rows["by link"]["bytes_sent"], plan["bytes_sent"]
    return "\n".join([*lines, f"bytes of the mix: {sent / planned - 1:+.1%} of the plan's {planned / 1e6:.3f} MB"])


def verdict(link: str, runs: Sequence[dict[str, Any]]) -> str:
    """The mix beside the fastest other way, by the median of the repeats' medians."""
    seconds = {n: statistics.median(found["ways"][n]["seconds"] for found in runs) for n in runs[0]["ways"]}
    sent = statistics.median(r["ways"]["by link"]["bytes_sent"] / r["plan"]["bytes_sent"] - 1 for r in runs)
    mix = seconds.pop("by link")
    best = min(seconds, key=seconds.__getitem__)
    rows = ", ".join(f"{name} {1e3 * s:.0f}" for name, s in seconds.items())
    return f"{link}: by link {1e3 * mix:.0f} ms, {mix / seconds[best] - 1:+.1%} of {best}'s; {rows}; bytes {sent:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="50,100,200,500,2000", help="Mbit/s between the nodes.")
    parser.add_argument("--latencies", default="0", help="ms that the link between the nodes adds, each way.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ways", choices=["all", "row"], default="all")
    args = parser.parse_args()
    rates, latencies = [int(rate) for rate in args.rates.split(",")], [float(ms) for ms in args.latencies.split(",")]
    ways = ROW if args.ways == "row" else tuple(WAYS)
    links = {
        f"{rate} Mbit/s" + (f", {latency:g} ms" if latency else ""): (rate, latency)
        for rate, latency in itertools.product(rates, latencies)
    }
    rows: dict[str, list[dict[str, Any]]] = {link: [] for link in links}
    for _, (link, (rate, latency)) in itertools.product(range(args.repeats), links.items()):
        rows[link].append(run(rate, latency, args.rounds, ways))
        print(table(link, rows[link][-1]), flush=True)
    for link, runs in rows.items():
        print(verdict(link, runs))
    print(machine.save("aps-by-link", {"ranks": RANKS, "nodes": NODES, "inner": INNER, "links": rows}))


if __name__ == "__main__":
    main()
