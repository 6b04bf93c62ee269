"""The causal character transformer of ``fxprec demo``, and the 6-layer one the benchmarks use."""

from fxprec.demo.models import CharTransformer

__all__ = ["CharTransformer", "six_layer"]


def six_layer(vocab: int = 97, context: int = 128, *, tied: bool = False) -> CharTransformer:
    """Six layers of width 128 with 4 heads: about 1.2 million parameters."""
    return CharTransformer(vocab=vocab, context=context, layers=6, width=128, heads=4, tied=tied)
