"""`Processor`: the facts of a CPU that passes use, as data, so that a plan can be made for another machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from fxprec import compat
from fxprec.errors import ConfigError, did_you_mean

PORTABLE = "portable"
"""No specific processor: operands and results of GEMMs stay float32, so every CPU gives the same numbers."""

VECTORS = ("default", "avx2", "avx512", "sve256", "vsx", "zvector", PORTABLE)
"""Instruction sets of torch's CPU kernels; ``"default"`` is the compiler's baseline."""

GEMMS: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Processor:
    """A CPU: its instruction set, the 16-bit dtypes that it has GEMM instructions for, and the threads in use."""

    vectors: str
    gemms: frozenset[torch.dtype] = frozenset()
    threads: int = 1
    """Number of threads; library kernels allocate workspace in each thread, which is part of the peak."""

    @classmethod
    def here(cls) -> Self:
        """Return the processor of this process, as torch uses it."""
        gemms = frozenset(t for t in GEMMS.values() if compat.has_cpu_gemm(t))
        return cls(compat.cpu_vectors(), gemms, torch.get_num_threads())

    @classmethod
    def parse(cls, text: object) -> Self:
        """Return the processor of a text such as ``"avx2"`` or ``"avx512+bf16:8"``. Raises `ConfigError`."""
        if not isinstance(text, str):
            raise ConfigError(f"cpu is {text!r}; give it a string such as {EXAMPLES}, or None for this machine's CPU")
        text, colon, threads = text.partition(":")
        if colon and not (threads.isascii() and threads.isdigit() and 0 < int(threads[:5]) <= MOST_THREADS):
            raise ConfigError(
                f"cpu has {threads!r} for its threads; give a number from 1 to {MOST_THREADS}, such as {EXAMPLES}"
            )
        vectors, *gemms = text.split("+")
        for word, known in ((vectors, VECTORS), *((gemm, tuple(GEMMS)) for gemm in gemms)):
            if word not in known:
                raise ConfigError(
                    f"cpu is {text!r}, and {word!r} is none of {', '.join(known)}{did_you_mean(word, known)}; give an "
                    f"instruction set and the 16-bit formats whose GEMMs it has, such as {EXAMPLES}"
                )
        return cls(vectors, frozenset(GEMMS[gemm] for gemm in gemms), int(threads or 1))

    def __str__(self) -> str:
        """Return a text that `parse` reads; a single thread is omitted."""
        text = "+".join((self.vectors, *(name for name, dtype in GEMMS.items() if dtype in self.gemms)))
        return text if self.threads == 1 else f"{text}:{self.threads}"


MOST_THREADS = 4096
EXAMPLES = "'avx2', 'avx512+bf16' or, with 8 threads, 'avx2:8'"
