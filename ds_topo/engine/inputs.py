"""What a person hands to an engine that would train something else than meant, hang, or fail in obscure words.

Checked while a grid exists, at the start of every engine, on all its ranks: those that differ are named, and where one
rank fails all raise.
"""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule as DeepSpeedPipelineModule
from torch import nn

from ds_topo.engine.expert_groups import create_expert_groups
from ds_topo.engine.expert_registry import registry
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.one_layout import check_programs, in_use
from ds_topo.errors import DisagreementError, EngineOptionError, TopologyError, abridged
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.torch_names import job_timeout
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.topology.process_topology import ProcessTopology
from ds_topo.topology.rank_tables import gradient_axes

TOPOLOGY_SECTION = "topology"
REDUCER_SECTION = "gradient_reducer"
_readers: list[str] = []
"""Calls of ``ds_topo.initialize`` at work, which reads both sections."""

grids: WeakSet[MpuGrid] = WeakSet()
"""Those that exist; an engine without an mpu may have forgotten one of them."""
_warned: WeakSet[MpuGrid] = WeakSet()


def check_mpu(mpu: Any) -> None:
    """Refuse what is no mpu but was meant as one.

    Raises:
        TypeError: a topology, a spec or a class.
    """
    if isinstance(mpu, (ProcessTopology, str, Mapping, type)) or (hasattr(mpu, "axes") and hasattr(mpu, "dims")):
        raise TypeError(
            f"mpu={abridged(mpu)}: DeepSpeed takes a live grid, such as PipelineParallelGrid('data=2,model=2')"
        )


def check_engine_without_mpu(engine: DeepSpeedEngine) -> None:
    """An engine of the whole world beside a grid whose ranks hold different parameters: most likely a forgotten mpu.

    Raises:
        EngineOptionError: its model has tensor-parallel parameters, or its config a topology.
    """
    if in_use:
        raise EngineOptionError(
            f"an engine without mpu while {in_use[-1].topology().spec!r} is in use: deepspeed.initialize was imported "
            "by name before ds_topo.use(grid); call it as deepspeed.initialize, or call use() before that import"
        )
    for grid in [grid for grid in grids if grid.is_alive and _splits_models(grid)]:
        remedy = f"pass mpu=grid ({grid.topology().spec!r}), or mpu=PipelineParallelGrid('data=-1') for a model that"
        remedy += " all ranks replicate"
        if TOPOLOGY_SECTION in engine._config._param_dict:
            raise EngineOptionError(
                f'config section "{TOPOLOGY_SECTION}" is not read by deepspeed.initialize, which got no mpu: {remedy}; '
                "ds_topo.initialize reads it"
            )
        if grid not in _warned:
            _warned.add(grid)
            warnings.warn(
                f"deepspeed.initialize without mpu= while {grid.topology().spec!r} exists gives every rank the first "
                f"one's parameters: {remedy}",
                RuntimeWarning,
                stacklevel=6,
            )


def check_model_without_mpu(model: nn.Module) -> None:
    """Refuse slices of a model in an engine that makes all ranks equal.

    Raises:
        EngineOptionError: a parameter is marked as tensor parallel, as Megatron and DeepSpeed mark them.
    """
    if not any(grid.is_alive and _splits_models(grid) for grid in grids):
        return
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False):
            raise EngineOptionError(
                f"parameter {name!r} is a slice (tensor_model_parallel), but deepspeed.initialize got no mpu= and "
                "would give every rank the first one's: pass mpu=grid"
            )


@contextmanager
def reading_sections() -> Iterator[None]:
    """While the sections of the config are read, by ``ds_topo.initialize``."""
    _readers.append(REDUCER_SECTION)
    try:
        yield
    finally:
        _readers.pop()


def check_engine_inputs(engine: DeepSpeedEngine, grid: MpuGrid) -> None:
    """Raise for a topology that the engine would not follow, or a reducer that nobody would attach.

    Raises:
        TopologyError: the config's topology is another one.
        EngineOptionError: ``deepspeed.initialize`` itself does not read the reducer's section.
    """
    reducer = engine._config._param_dict.get(REDUCER_SECTION, False)
    is_wanted = reducer.get("enabled", True) if isinstance(reducer, Mapping) else reducer
    if is_wanted and not _readers:
        raise EngineOptionError(
            f'config section "{REDUCER_SECTION}" is not read by deepspeed.initialize itself: call '
            "ds_topo.initialize, or ds_topo.use(grid) before"
        )
    section = engine._config._param_dict.get(TOPOLOGY_SECTION)
    if section is not None:
        wanted = ProcessTopology.from_spec(section, world_size=grid.world_size)
        if wanted != grid.topology():
            raise TopologyError(
                f'config section "{TOPOLOGY_SECTION}" says {wanted.spec!r}, but the mpu is {grid.topology().spec!r}: '
                "give one of them, or equal ones"
            )


def check_model(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Raise for a model that the topology does not fit.

    Raises:
        EngineOptionError: one module on all stages of a pipeline.
    """
    stages = grid.get_axis_size(PIPE)
    if stages > 1 and not isinstance(engine, PipelineEngine) and not getattr(model, "is_pipeline_stage", False):
        raise EngineOptionError(
            f"a plain engine on {grid.topology().spec!r}: its {stages} stages would train {stages} models that drift "
            "apart. Build a PipelineModule(layers, grid=grid), take the axis 'pipe' away, or set "
            "model.is_pipeline_stage = True where your own program passes activations between stages"
        )


def create_missing_expert_groups(engine: DeepSpeedEngine, model: nn.Module, grid: MpuGrid) -> None:
    """Groups for a model's mixtures of experts that its user has not created.

    A pipeline's are created by all stages: DeepSpeed creates them in the layers, which hangs the stages without any.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    sizes = {(layer.ep_size, layer.enable_expert_tensor_parallelism) for layer in layers}
    if isinstance(engine, PipelineEngine) and grid.pipe_parallel_size > 1:
        gathered: list[Any] = [sizes] * grid.pipe_parallel_size
        dist.all_gather_object(gathered, sizes, group=grid.get_pipe_parallel_group())
        sizes = set().union(*gathered)
    for size, sliced in sorted(sizes):
        known = registry.find(f"ep_size_{size}")
        if known is None or (isinstance(engine, PipelineEngine) and not known.grid.shares_groups_with(grid)):
            create_expert_groups(grid, size, sliced, engine._config.use_data_before_expert_parallel_)


def agree_on_settings(engine: DeepSpeedEngine, grid: MpuGrid, failure: Exception | None) -> None:
    """Compare what all ranks of an engine must have alike; collective over them.

    Raises:
        DisagreementError: they have not; the message names the settings, ranks and hosts.
        Exception: ``failure``, which this rank has had before, and which the others hear of.
    """
    axes = [axis for axis in grid.topology().axes if axis != PIPE or isinstance(engine, PipelineEngine)]
    _agree([] if failure else _settings(engine), grid.get_ranks(axes), "the settings of the engine", failure)


def agree_on_model(model: nn.Module, grid: MpuGrid) -> None:
    """Compare the parameters of replicas, and whom layers ask for groups; collective over the engine's ranks.

    Raises:
        DisagreementError: replicas differ; the message names parameters, ranks and hosts. Or another rank failed.
        TopologyError: layers ask a parallel state of another layout.
    """
    lines = [
        f"{name} {list(getattr(p, 'ds_shape', p.shape))} {p.dtype}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]
    if isinstance(model, DeepSpeedPipelineModule) and model.stage_id == model.num_stages - 1:
        lines.append(f"loss function={'none' if model.loss_fn is None else 'given'}")
    replicas, is_pipeline = gradient_axes(grid.topology()), isinstance(model, DeepSpeedPipelineModule)
    everyone = [axis for axis in grid.topology().axes if axis != PIPE or is_pipeline]
    failure: Exception | None = None
    try:
        check_programs(model, grid)
        _agree(lines, grid.get_ranks(replicas), f"the parameters of replicas along {replicas}", None)
    except TopologyError as error:
        failure = error
        with suppress(DisagreementError, TopologyError):
            _agree([], grid.get_ranks(replicas), f"the parameters of replicas along {replicas}", error)
    except DisagreementError as error:
        failure = error
    if grid.get_ranks(everyone) != grid.get_ranks(replicas):
        _agree([], grid.get_ranks(everyone), "stages and slices", failure)
    elif failure is not None:
        raise failure


def _agree(lines: Sequence[str], members: Sequence[int], subject: str, failure: Exception | None) -> None:
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    text = f"{len(lines)} lines of digest {digest}"
    agree(text, members, job_timeout(), failure=failure, subject=subject, lines=lambda: lines)


def _settings(engine: DeepSpeedEngine) -> list[str]:
    config = engine._config
    optimizer = type(engine.client_optimizer).__name__ if engine.client_optimizer else config.optimizer_name
    module = engine.module if hasattr(engine, "module") else None
    return [
        *(f"{name}={getattr(config, name)}" for name in _COMPARED_SETTINGS if hasattr(config, name)),
        f"optimizer={optimizer}",
        f"zero stage={config.zero_config.stage}",
        f"engine={type(engine).__name__}",
        f"micro batches of={getattr(module, 'micro_batches', None)}",
        f"torch {torch.__version__}",
        f"deepspeed {deepspeed.__version__}",
        f"ds_topo {sys.modules['ds_topo'].__version__}",
    ]


_COMPARED_SETTINGS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "prescale_gradients",
    "communication_data_type",
    "optimizer_params",
    "scheduler_name",
)
"""Of ``DeepSpeedConfig``: those that decide what ranks do together."""


def _splits_models(grid: MpuGrid) -> bool:
    return any(grid.get_axis_size(axis) > 1 for axis in (PIPE, MODEL))


def require_grid(name: str, value: Any) -> None:
    """Refuse what was meant as a grid but is a layout alone, or a pipeline that has one.

    Raises:
        TypeError: the message says what to pass.
    """
    if isinstance(value, MpuGrid):
        return
    if isinstance(getattr(value, "mpu", None), MpuGrid) or callable(getattr(value, "mpu", None)):
        raise TypeError(f"{name}: a {type(value).__name__} is not a grid: pass its grid, module.mpu()")
    raise TypeError(f"{name}={abridged(value)}: pass a live grid, such as PipelineParallelGrid('pipe=2,data=2')")
