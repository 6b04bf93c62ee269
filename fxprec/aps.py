"""APS: exchange gradients in 8 bits (Han et al. 2020; docs/algorithms.md, "Communication in 8 bits").

    state = fxprec.aps.APSState(format="e5m2")
    ddp.register_comm_hook(state, fxprec.aps.aps_hook)

With ``bits="by link"`` a `LinkPlan` chooses 32, 16, 8 or 4 bits for each layer, by the speed of the link.

`use_aps` does the same for FSDP2, and also gathers its parameters in few bits. `all_gather`, `all_reduce`,
`all_to_all`, `copy_to_group` and `reduce_from_group` send the activations of model parallelism in Dettmers' 8-bit
types. `sub_batches` overlaps the exchange of one sub-batch with the computation of another.
"""

from fxprec.runtime.aps.fsdp import APSReduceScatter, use_aps
from fxprec.runtime.aps.hook import aps_hook
from fxprec.runtime.aps.link_plan import GatheredBits, LayerBits, LinkPlan
from fxprec.runtime.aps.options import APSOptions
from fxprec.runtime.aps.parallel import (
    all_gather,
    all_reduce,
    all_to_all,
    copy_to_group,
    reduce_from_group,
    sub_batches,
)
from fxprec.runtime.aps.state import APSState

__all__ = [
    "APSOptions",
    "APSReduceScatter",
    "APSState",
    "GatheredBits",
    "LayerBits",
    "LinkPlan",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "aps_hook",
    "copy_to_group",
    "reduce_from_group",
    "sub_batches",
    "use_aps",
]
