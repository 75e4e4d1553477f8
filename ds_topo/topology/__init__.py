"""Which rank sits where: named axes in any order, in closed form. Standard library only; no process, no torch."""

from ds_topo.topology.process_topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
    ProcessTopology,
)

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]
