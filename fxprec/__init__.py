"""fxprec: mixed precision for ``torch.compile``, decided tensor by tensor.

``torch.compile(model, backend="fxprec", options={"recipe": "fp8", "low_ratio": 0.6})``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxprec import aps as aps
    from fxprec import arith as arith
    from fxprec import formats as formats
    from fxprec import optim as optim
    from fxprec import testing as testing
    from fxprec.config import Config as Config
    from fxprec.config.accumulator import Accumulator as Accumulator
    from fxprec.config.grad_scaling import GradScaling as GradScaling
    from fxprec.config.grad_scaling import LossScaling as LossScaling
    from fxprec.config.operands import Operands as Operands
    from fxprec.config.recipes import Recipe as Recipe
    from fxprec.diagnosis.choose import Choice as Choice
    from fxprec.diagnosis.choose import choose as choose
    from fxprec.diagnosis.compare import compare as compare
    from fxprec.diagnosis.diagnosis import Diagnosis as Diagnosis
    from fxprec.diagnosis.doctor import doctor as doctor
    from fxprec.driver.backend import Backend as Backend
    from fxprec.driver.named import backend_of as backend_of
    from fxprec.errors import BudgetError as BudgetError
    from fxprec.errors import ConfigError as ConfigError
    from fxprec.errors import DoubleBackwardError as DoubleBackwardError
    from fxprec.errors import FallbackError as FallbackError
    from fxprec.errors import FormatError as FormatError
    from fxprec.errors import FxprecError as FxprecError
    from fxprec.errors import FxprecWarning as FxprecWarning
    from fxprec.errors import GoldenError as GoldenError
    from fxprec.errors import GradientError as GradientError
    from fxprec.errors import LoweringError as LoweringError
    from fxprec.errors import ModifiedInPlaceError as ModifiedInPlaceError
    from fxprec.errors import NonfiniteError as NonfiniteError
    from fxprec.errors import NumericsError as NumericsError
    from fxprec.errors import PassError as PassError
    from fxprec.errors import PlanError as PlanError
    from fxprec.errors import ReferenceRunError as ReferenceRunError
    from fxprec.integrations.log_to import log_to as log_to
    from fxprec.numerics.block_rounding import BlockCodes as BlockCodes
    from fxprec.numerics.blocks import BlockFormat as BlockFormat
    from fxprec.numerics.formats import Format as Format
    from fxprec.numerics.rounding import decode as decode
    from fxprec.numerics.rounding import encode as encode
    from fxprec.numerics.rounding import quantize as quantize
    from fxprec.plan import Plan as Plan
    from fxprec.runtime.events import Event as Event

    __version__: str

_HOMES = {
    name: module
    for module, names in {
        "config": "Config",
        "config.accumulator": "Accumulator",
        "config.grad_scaling": "GradScaling LossScaling",
        "config.operands": "Operands",
        "config.recipes": "Recipe",
        "diagnosis.choose": "Choice choose",
        "diagnosis.compare": "compare",
        "diagnosis.diagnosis": "Diagnosis",
        "diagnosis.doctor": "doctor",
        "driver.backend": "Backend",
        "driver.named": "backend_of",
        "errors": "BudgetError ConfigError DoubleBackwardError FallbackError FormatError FxprecError FxprecWarning "
        "GoldenError GradientError LoweringError ModifiedInPlaceError NonfiniteError NumericsError PassError PlanError "
        "ReferenceRunError",
        "integrations.log_to": "log_to",
        "numerics.block_rounding": "BlockCodes",
        "numerics.blocks": "BlockFormat",
        "numerics.formats": "Format",
        "numerics.rounding": "decode encode quantize",
        "plan": "Plan",
        "runtime.events": "Event",
    }.items()
    for name in names.split()
}
_MODULES = ("aps", "arith", "formats", "optim", "testing")

__all__ = ["__version__", *sorted(_HOMES), *_MODULES]


def __getattr__(name: str) -> object:
    """Import on first use: ``import fxprec`` (and ``fxprec --help``) does not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"fxprec.{_HOMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"fxprec.{name}")
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("fxprec")
    raise AttributeError(f"module 'fxprec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
