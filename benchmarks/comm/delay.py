"""A cable with latency between two network namespaces, for kernels whose `tc` has no netem.

Each end is a TAP device. A process passes every Ethernet frame from one to the other, a fixed time after it left.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000  # linux/if_tun.h
LONGEST_FRAME = 1 << 16


def cable(spaces: tuple[str, str], device: str, seconds: float) -> Any:
    """Put ``device`` into both namespaces and start to pass frames. Returns the process, to be killed at the end."""
    ends = []
    for number, space in enumerate(spaces):
        name = f"fxtap{number}"
        ends.append(_tap(name))
        subprocess.run(["ip", "link", "set", name, "netns", space, "name", device], check=True)
    process = multiprocessing.get_context("fork").Process(target=_pass_on, args=(*ends, seconds), daemon=True)
    process.start()
    for end in ends:
        os.close(end)
    return process


def _tap(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return end


def _pass_on(one: int, other: int, seconds: float) -> None:
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready = select.select([one, other], [], [], left)[0]
        now = time.monotonic()
        for end in ready:
            try:
                under_way.append((now + seconds, other if end == one else one, os.read(end, LONGEST_FRAME)))
            except BlockingIOError:
                continue
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            try:
                os.write(end, frame)
            except OSError:  # the device is down or its queue is full: a frame is lost, as on a cable
                continue
