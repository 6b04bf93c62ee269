"""Write equal Triton kernels for equal layers, which read other rows of the table of scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sympy import Expr, Symbol
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.virtualized import V

from fxprec.compat.patches import replaced

_PLACE = "i_seed_offset"
"""A name of Inductor's two kinds: ``i`` begins a symbol that has no range in the kernel, and a ``seed_offset`` is a
constant that is passed to a kernel so that kernels which differ in it are one."""


@contextmanager
def constant_places_are_arguments() -> Iterator[None]:
    """Patch Inductor to pass the constant place of a number that a Triton kernel reads from an input as an argument.

    Inductor writes the place into the kernel's text. So each layer had kernels of its own, and each was compiled.
    Places 0 and 1 stay in the text: Triton makes an argument of 1 a constant, which a kernel cannot broadcast.
    """
    lift = KernelArgs.seed_offset

    def make(load: Callable[..., object]) -> Callable[..., object]:
        def load_from_argument(self: TritonKernel, name: str, index: Expr, *args: object, **kwargs: object) -> object:
            if getattr(index, "is_Integer", False) and index > 1 and name in V.graph.graph_inputs:
                index = Symbol(lift(self.args, _PLACE, int(index)), integer=True, nonnegative=True)
            return load(self, name, index, *args, **kwargs)

        return load_from_argument

    with replaced(TritonKernel, "load", make):
        yield
