"""The forms in which a value is kept for backward, one in each file. `FORMS` lists them in the order of offers."""

from __future__ import annotations

from fxprec.passes.analysis.ways import Form
from fxprec.passes.forms.bits import Bits
from fxprec.passes.forms.blocks import Blocks
from fxprec.passes.forms.host import OnHost
from fxprec.passes.forms.low import Low
from fxprec.passes.forms.own import Own

FORMS: tuple[type[Form], ...] = (Bits, Own, Low, OnHost, Blocks)
