"""Map ranks to coordinates along named axes in any order, in closed form. Standard library only.

Start with ``process_topology``: ``ProcessTopology`` is the public class, and ``Layout`` its arithmetic. ``axes`` parses
and checks specs, and ``rank_tables`` derives groups, those of experts too.
"""

from ds_topo.topology.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
