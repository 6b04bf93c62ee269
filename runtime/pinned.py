"""Pinned host memory that is allocated once and lent out again: exactly the bytes asked for, in whole pages.

torch's own cache of pinned memory rounds each block to a power of two.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxprec.errors import LoweringError

_IDLE = 2  # rounds of loans after which a block that nobody asks for is given back


@dataclass(eq=False)
class Block:
    """One piece of pinned memory, and the tensor that it is lent to."""

    memory: mmap.mmap
    bytes: int
    address: int
    lent: StorageWeakRef | None = None
    loan: int = 0
    """The number of its latest loan, counted over all blocks of the pool."""
    copied: torch.cuda.Event | None = None
    """Recorded behind the latest copy into it."""

    @property
    def is_free(self) -> bool:
        """Say whether no tensor shows the block's memory any more."""
        return self.lent is None or self.lent.expired()

    def lend(self, like: torch.Tensor, loan: int) -> torch.Tensor:
        """Return a tensor of ``like``'s shape, strides and dtype in this memory; ``like`` lies densely."""
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.bytes)
        self.lent, self.loan = StorageWeakRef(flat.untyped_storage()), loan
        return flat.view(like.dtype).as_strided(like.shape, like.stride())


@dataclass(eq=False)
class PinnedPool:
    """The blocks of one device. A block is lent again once no tensor shows it, in whatever step or graph that is.

    The caller's copies run on one stream, so a copy into a block that is lent again comes after the last one out of it.
    """

    device: torch.device
    stream: torch.cuda.Stream
    """The stream of the copies."""
    blocks: dict[int, Block] = field(default_factory=dict)  # by address
    loans: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        """Return a pinned tensor like another. Raises `LoweringError` where the memory cannot be pinned."""
        with self._lock:
            self.loans += 1
            fitting = (block for block in self.blocks.values() if block.bytes == like.nbytes and block.is_free)
            block = next(fitting, None) or self._pin(like.nbytes)
            return block.lend(like, self.loans)

    def block_of(self, host: torch.Tensor) -> Block:
        """Return the block that a lent tensor shows."""
        return self.blocks[host.data_ptr()]

    @property
    def bytes(self) -> int:
        """Return the pinned bytes, lent or free."""
        return sum(block.bytes for block in self.blocks.values())

    def _pin(self, size: int) -> Block:
        self._give_back_idle()
        memory = mmap.mmap(-1, size)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        _register(address, size, self.device)
        self.blocks[address] = block = Block(memory, size, address)
        return block

    def _give_back_idle(self) -> None:
        """Unpin blocks of an earlier plan: in a steady step each block is lent once in as many loans as there are."""
        oldest = self.loans - _IDLE * len(self.blocks)
        idle = [block for block in self.blocks.values() if block.is_free and block.loan < oldest]
        if idle:
            self.stream.synchronize()
        for block in idle:
            _unregister(block.address, self.device)
            del self.blocks[block.address]


def _register(address: int, size: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    if int(error):
        raise LoweringError(
            f"ways has 'offload', and {size} bytes of host memory cannot be pinned (cudaHostRegister: error "
            f"{int(error)}); raise the limit of locked memory (ulimit -l), or leave 'offload' out"
        )


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)
