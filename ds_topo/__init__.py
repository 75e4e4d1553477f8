"""Process topologies, process groups, expert groups and gradient reduction for DeepSpeed, in any axis order.

Importing this package is light: torch and DeepSpeed are imported when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_topo._moved import install as _install_moved_modules
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    CheckpointSpaceError,
    CheckpointVersionError,
    CoordinateError,
    DamagedCheckpointError,
    DisagreementError,
    EndOfSamplesError,
    EngineOptionError,
    ExpertGroupError,
    ExpertSizeError,
    GroupCreationError,
    HostError,
    LaunchError,
    MissingCheckpointError,
    MissingTopologyError,
    ReplicaError,
    StoreTimeoutError,
    TopologyError,
    UnknownAxisError,
    UnsafeCheckpointError,
    WorldSizeError,
)
from ds_topo.topology.process_topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

if TYPE_CHECKING:
    from ds_topo.engine.gradient_reducer import GradientReducer as GradientReducer
    from ds_topo.engine.grid import PipelineParallelGrid as PipelineParallelGrid
    from ds_topo.engine.initialize import initialize as initialize
    from ds_topo.engine.mpu import ModelParallelUnit as ModelParallelUnit
    from ds_topo.engine.norms import mark_tensor_parallel_gradients as mark_tensor_parallel_gradients
    from ds_topo.engine.pipeline import LayerSpec as LayerSpec
    from ds_topo.engine.pipeline import PipelineModule as PipelineModule
    from ds_topo.engine.pipeline import TiedLayerSpec as TiedLayerSpec
    from ds_topo.engine.replicas import check_replicas as check_replicas
    from ds_topo.engine.start import init_distributed as init_distributed
    from ds_topo.engine.use import use as use
    from ds_topo.process_groups.grid import ProcessGrid as ProcessGrid
    from ds_topo.watch.watch import Watch as Watch

__version__ = "0.1.0"

_install_moved_modules()

__all__ = [
    "CheckpointError",
    "CheckpointLayoutError",
    "CheckpointModelError",
    "CheckpointSpaceError",
    "CheckpointVersionError",
    "CoordinateError",
    "DamagedCheckpointError",
    "DisagreementError",
    "EndOfSamplesError",
    "EngineOptionError",
    "ExpertGroupError",
    "ExpertSizeError",
    "GradientReducer",
    "GroupCreationError",
    "HostError",
    "LaunchError",
    "LayerSpec",
    "MissingCheckpointError",
    "MissingTopologyError",
    "ModelParallelUnit",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessGrid",
    "ProcessTopology",
    "ReplicaError",
    "StoreTimeoutError",
    "TiedLayerSpec",
    "TopologyError",
    "UnknownAxisError",
    "UnsafeCheckpointError",
    "Watch",
    "WorldSizeError",
    "check_replicas",
    "checkpoint",
    "collectives",
    "distributed",
    "groups",
    "init_distributed",
    "initialize",
    "mark_tensor_parallel_gradients",
    "parallel_state",
    "use",
]

_LAZY = {
    "GradientReducer": "engine.gradient_reducer",
    "LayerSpec": "engine.pipeline",
    "ModelParallelUnit": "engine.mpu",
    "PipelineModule": "engine.pipeline",
    "PipelineParallelGrid": "engine.grid",
    "ProcessGrid": "process_groups.grid",
    "Watch": "watch.watch",
    "TiedLayerSpec": "engine.pipeline",
    "check_replicas": "engine.replicas",
    "init_distributed": "engine.start",
    "initialize": "engine.initialize",
    "mark_tensor_parallel_gradients": "engine.norms",
    "use": "engine.use",
}


_LAZY_MODULES = {"checkpoint", "collectives", "distributed", "groups", "parallel_state"}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})
