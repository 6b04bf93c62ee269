"""Optimizers whose weights and state are 16 bits, or any format (Zamirai et al. 2020).

Definitions: docs/algorithms.md, "16-bit training".

    opt = fxprec.optim.AdamW(model.bfloat16().parameters(), lr=1e-3, betas=(0.9, 0.997), update="kahan")

torch.optim's signatures and state, and how the new weight is rounded: see `SGD` and `Own`. `Lion` is not one of
torch.optim's. `Muon` steps matrices alone; the other parameters go to an optimizer beside it.
"""

from fxprec.runtime.optim.cancelled import CancelledRow, CancelledSteps
from fxprec.runtime.optim.optimizers import SGD, AdamW, Lion, Muon
from fxprec.runtime.optim.options import Own

__all__ = ["SGD", "AdamW", "CancelledRow", "CancelledSteps", "Lion", "Muon", "Own"]
