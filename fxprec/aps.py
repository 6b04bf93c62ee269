"""APS: gradients cross the network in 8 bits (ALGORITHMS.md section 5; Han et al. 2020).

state = fxprec.aps.APSState(format="e5m2")
ddp.register_comm_hook(state, fxprec.aps.aps_hook)
"""

from fxprec.runtime.aps.hook import aps_hook
from fxprec.runtime.aps.options import APSOptions
from fxprec.runtime.aps.state import APSState

__all__ = ["APSOptions", "APSState", "aps_hook"]
