"""Allocate pinned host memory once and reuse it: each block has exactly the bytes requested, in whole pages.

torch's own cache of pinned memory rounds each block up to a power of two.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fxprec.errors import LoweringError

_IDLE = 2  # rounds of loans after which an unused block is unpinned


@dataclass(eq=False)
class Block:
    """One piece of pinned memory and the tensor that it is lent to."""

    memory: mmap.mmap
    bytes: int
    address: int
    lent: StorageWeakRef | None = None
    loan: int = 0
    """The number of the block's latest loan, counted over all blocks of the pool."""
    copied: torch.cuda.Event | None = None
    """Event recorded after the latest copy into the block."""

    @property
    def is_free(self) -> bool:
        """Return whether no tensor uses the block's memory any more."""
        return self.lent is None or self.lent.expired()

    def lend(self, like: torch.Tensor, loan: int) -> torch.Tensor:
        """Return a tensor of ``like``'s shape, strides and dtype in this memory; ``like`` must have no gaps."""
        flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=self.bytes)
        self.lent, self.loan = StorageWeakRef(flat.untyped_storage()), loan
        return flat.view(like.dtype).as_strided(like.shape, like.stride())


@dataclass(eq=False)
class PinnedPool:
    """The blocks of one device. A block is lent again once no tensor of any step or graph uses it.

    The caller's copies run on one stream, so a copy into a reused block runs after the last copy out of the block.
    """

    device: torch.device
    stream: torch.cuda.Stream
    """The stream of the copies."""
    blocks: dict[int, Block] = field(default_factory=dict)  # by address
    loans: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lend(self, like: torch.Tensor) -> torch.Tensor:
        """Return a pinned tensor like ``like``. Raises `LoweringError` if the memory cannot be pinned."""
        with self._lock:
            self.loans += 1
            fitting = (block for block in self.blocks.values() if block.bytes == like.nbytes and block.is_free)
            block = next(fitting, None) or self._pin(like.nbytes)
            return block.lend(like, self.loans)

    def block_of(self, host: torch.Tensor) -> Block:
        """Return the block of a lent tensor."""
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
        """Unpin blocks of an earlier plan. A steady step lends each of n blocks once in n loans."""
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
