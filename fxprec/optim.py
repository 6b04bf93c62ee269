"""Optimizers that keep weights and state in 16 bits, or in any format (Zamirai et al. 2020).

Definitions: docs/algorithms.md, "16-bit training".

    opt = fxprec.optim.AdamW(model.bfloat16().parameters(), lr=1e-3, betas=(0.9, 0.997), update="kahan")

Signatures and state are those of torch.optim, which has no `Lion`. `SGD` and `Own` describe how the new weight is
rounded. `Muon` steps matrices only; give the other parameters to a second optimizer.
"""

from fxprec.runtime.optim.cancelled import CancelledRow, CancelledSteps
from fxprec.runtime.optim.optimizers import SGD, AdamW, Lion, Muon
from fxprec.runtime.optim.options import Own

__all__ = ["SGD", "AdamW", "CancelledRow", "CancelledSteps", "Lion", "Muon", "Own"]
