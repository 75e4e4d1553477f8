"""Give DeepSpeed process topologies, process groups, expert groups and gradient reduction in any order of axes.

Importing this package is fast: torch and DeepSpeed are imported when a name that needs them is first used. Exceptions
are in :mod:`ds_topo.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_topo._lazy import lazy_attributes
from ds_topo.topology.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

if TYPE_CHECKING:
    from ds_topo import checkpoint, collectives, distributed, errors, groups, layers, parallel_state
    from ds_topo.engine.grid import PipelineParallelGrid
    from ds_topo.engine.norms import clip_grad_norm_, mark_tensor_parallel_gradients
    from ds_topo.engine.pipeline import DualPipeVModule, LayerSpec, PipelineModule, TiedLayerSpec
    from ds_topo.engine.reducer_drivers import GradientReducer
    from ds_topo.engine.replicas import check_replicas
    from ds_topo.engine.start import init_distributed, initialize
    from ds_topo.engine.use import use
    from ds_topo.process_groups.process_grid import ProcessGrid
    from ds_topo.verification.runs import verify
    from ds_topo.watch.watch import Watch

__version__ = "0.1.0"

__all__ = [
    "DualPipeVModule",
    "GradientReducer",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessGrid",
    "ProcessTopology",
    "TiedLayerSpec",
    "Watch",
    "check_replicas",
    "checkpoint",
    "clip_grad_norm_",
    "collectives",
    "distributed",
    "errors",
    "groups",
    "init_distributed",
    "initialize",
    "layers",
    "mark_tensor_parallel_gradients",
    "parallel_state",
    "use",
    "verify",
]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "DualPipeVModule": "engine.pipeline",
        "GradientReducer": "engine.reducer_drivers",
        "LayerSpec": "engine.pipeline",
        "PipelineModule": "engine.pipeline",
        "PipelineParallelGrid": "engine.grid",
        "ProcessGrid": "process_groups.process_grid",
        "TiedLayerSpec": "engine.pipeline",
        "Watch": "watch.watch",
        "check_replicas": "engine.replicas",
        "clip_grad_norm_": "engine.norms",
        "init_distributed": "engine.start",
        "initialize": "engine.start",
        "mark_tensor_parallel_gradients": "engine.norms",
        "use": "engine.use",
        "verify": "verification.runs",
        **dict.fromkeys(("checkpoint", "collectives", "distributed", "errors", "groups", "layers", "parallel_state")),
    },
)
