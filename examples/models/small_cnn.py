"""The residual CNN of ``fxprec demo``, for 8x8 digits."""

from fxprec.demo.models import SmallCNN

__all__ = ["SmallCNN"]
