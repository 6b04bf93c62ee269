"""APS: exchange gradients in 8 bits (Han et al. 2020; docs/algorithms.md, "Communication in 8 bits").

    state = fxprec.aps.APSState(format="e5m2")
    ddp.register_comm_hook(state, fxprec.aps.aps_hook)

With ``bits="by link"`` a `LinkPlan` chooses 32, 16, 8 or 4 bits for each layer, by the speed of the link.

`use_aps` does the same for FSDP2, and also gathers its parameters in few bits. `all_gather`, `all_reduce`,
`all_to_all`, `copy_to_group` and `reduce_from_group` send the activations of model parallelism in Dettmers' 8-bit
types. `sub_batches` overlaps the exchange of one sub-batch with the computation of another.
"""

from fxprec.runtime.aps.fsdp import APSReduceScatter as APSReduceScatter
from fxprec.runtime.aps.fsdp import use_aps as use_aps
from fxprec.runtime.aps.hook import aps_hook as aps_hook
from fxprec.runtime.aps.link_plan import GatheredBits as GatheredBits
from fxprec.runtime.aps.link_plan import LayerBits as LayerBits
from fxprec.runtime.aps.link_plan import LinkPlan as LinkPlan
from fxprec.runtime.aps.options import APSOptions as APSOptions
from fxprec.runtime.aps.parallel import all_gather as all_gather
from fxprec.runtime.aps.parallel import all_reduce as all_reduce
from fxprec.runtime.aps.parallel import all_to_all as all_to_all
from fxprec.runtime.aps.parallel import copy_to_group as copy_to_group
from fxprec.runtime.aps.parallel import reduce_from_group as reduce_from_group
from fxprec.runtime.aps.parallel import sub_batches as sub_batches
from fxprec.runtime.aps.state import APSState as APSState
