"""Give DeepSpeed process topologies, process groups, expert groups and gradient reduction in any order of axes.

Importing this package is fast: torch and DeepSpeed are imported when a name that needs them is first used.

- A job: ``init_distributed`` joins it, and ``Watch`` names ranks that die or stop.
- A layout: ``ProcessTopology``, and grids: ``PipelineParallelGrid``, an ``mpu``, and ``ProcessGrid``, for torch alone.
- DeepSpeed: ``initialize`` builds an engine on a grid, ``PipelineModule`` and ``DualPipeVModule`` (of ``LayerSpec`` and
  ``TiedLayerSpec``) a pipeline, and ``use`` serves programs that call DeepSpeed themselves.
- Training: ``GradientReducer``, ``clip_grad_norm_``, ``checkpoint``, ``groups`` of experts, ``layers``,
  ``collectives``.
- Checks: ``check_replicas`` while a job trains, ``verify`` against one process, and the exceptions in ``errors``.
- Names of others: ``PipeDataParallelTopology``, ``PipeModelDataParallelTopology``, ``parallel_state`` (Megatron's),
  ``distributed`` (torchshard's).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_topo.base import lazy_attributes
from ds_topo.topology.process_topology import PipeDataParallelTopology as PipeDataParallelTopology
from ds_topo.topology.process_topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from ds_topo.topology.process_topology import ProcessTopology as ProcessTopology

if TYPE_CHECKING:
    from ds_topo import checkpoint as checkpoint
    from ds_topo import collectives as collectives
    from ds_topo import distributed as distributed
    from ds_topo import errors as errors
    from ds_topo import groups as groups
    from ds_topo import layers as layers
    from ds_topo import parallel_state as parallel_state
    from ds_topo.engine.gradient_reducer import GradientReducer as GradientReducer
    from ds_topo.engine.grid import PipelineParallelGrid as PipelineParallelGrid
    from ds_topo.engine.norms import clip_grad_norm_ as clip_grad_norm_
    from ds_topo.engine.pipelines.pipeline import DualPipeVModule as DualPipeVModule
    from ds_topo.engine.pipelines.pipeline import LayerSpec as LayerSpec
    from ds_topo.engine.pipelines.pipeline import PipelineModule as PipelineModule
    from ds_topo.engine.pipelines.pipeline import TiedLayerSpec as TiedLayerSpec
    from ds_topo.engine.replica_comparison import check_replicas as check_replicas
    from ds_topo.engine.start import init_distributed as init_distributed
    from ds_topo.engine.start import initialize as initialize
    from ds_topo.engine.use import use as use
    from ds_topo.health.watch import Watch as Watch
    from ds_topo.process_groups.process_grid import ProcessGrid as ProcessGrid
    from ds_topo.verification.runs import verify as verify

__version__ = "0.1.0"

_MODULES = {
    "DualPipeVModule": "engine.pipelines.pipeline",
    "GradientReducer": "engine.gradient_reducer",
    "LayerSpec": "engine.pipelines.pipeline",
    "PipelineModule": "engine.pipelines.pipeline",
    "PipelineParallelGrid": "engine.grid",
    "ProcessGrid": "process_groups.process_grid",
    "TiedLayerSpec": "engine.pipelines.pipeline",
    "Watch": "health.watch",
    "check_replicas": "engine.replica_comparison",
    "clip_grad_norm_": "engine.norms",
    "init_distributed": "engine.start",
    "initialize": "engine.start",
    "use": "engine.use",
    "verify": "verification.runs",
    **dict.fromkeys(("checkpoint", "collectives", "distributed", "errors", "groups", "layers", "parallel_state")),
}
__all__ = sorted([*_MODULES, "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"])
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
