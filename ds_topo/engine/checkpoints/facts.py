"""What a checkpoint has to say of the engine that writes it, and what an engine needs of one that it reads."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ds_topo.checkpoint_files.manifest import Manifest, SavedExperts, SavedLayout, SavedParameter
from ds_topo.checkpoint_files.wholeness import Places
from ds_topo.engine.expert_registry import registry
from ds_topo.engine.mpu import MpuGrid
from ds_topo.topology.rank_tables import gradient_axes

_LOCAL_EXPERT = re.compile(r"deepspeed_experts\.\d+\.")


def layout_of(engine: DeepSpeedEngine) -> SavedLayout:
    """How the engine's ranks share its model out."""
    grid = engine.mpu if isinstance(engine.mpu, MpuGrid) else None
    plans = [groups.plan for groups in registry.of(engine.mpu)] if engine.has_moe_layers else []
    automatic = engine._config.expert_parallel_config
    experts = (
        [SavedExperts(int(automatic.autoep_size))]
        if automatic.enabled
        else [
            SavedExperts(plan.expert_parallel_size, plan.expert_tensor_parallel, plan.use_data_before_expert)
            for plan in sorted(plans, key=lambda plan: plan.expert_parallel_size)
        ]
    )
    spec = grid.topology().spec if grid else f"data={dist.get_world_size()}" if engine.mpu is None else None
    return SavedLayout(
        spec,
        dist.get_world_size(),
        int(engine.mp_world_size),
        int(engine.seq_dp_world_size),
        int(engine.zero_optimization_stage()),
        type(engine.optimizer).__name__ if engine.optimizer is not None else None,
        "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        isinstance(engine, PipelineEngine),
        tuple(experts),
        getattr(engine, "gradient_reducer", None) is not None and int(engine.zero_optimization_stage()) in (1, 2),
        grid.to_global([0])[0] if grid else 0,
    )


def places_of(engine: DeepSpeedEngine) -> Places:
    """What DeepSpeed's file names count."""
    return Places(int(engine.mp_world_size), int(engine.seq_dp_world_size))


def replica_of(engine: DeepSpeedEngine) -> int:
    """Which of the ranks with the same parameters this one is."""
    if isinstance(engine.mpu, MpuGrid):
        topology = engine.mpu.topology()
        return topology.get_axis_index(gradient_axes(topology), engine.mpu.grid_rank)
    return int(dist.get_rank(engine.seq_data_parallel_group))


def parameters_of(engine: DeepSpeedEngine) -> list[SavedParameter]:
    """This rank's parameters, in the module's order; of each kind of expert one for all of them."""
    rank, experts = int(engine.checkpoint_mp_rank), dict(_numbers_of_experts(engine.module))
    found: dict[SavedParameter, None] = {}
    for name, parameter in engine.module.named_parameters():
        layer = next((layer for layer in experts if name.startswith(layer)), None)
        is_expert = layer is not None and _LOCAL_EXPERT.search(name) is not None
        row = SavedParameter(
            _LOCAL_EXPERT.sub("deepspeed_experts.*.", name) if is_expert else name,
            tuple(getattr(parameter, "ds_shape", parameter.shape)),
            str(parameter.dtype).removeprefix("torch."),
            (rank,),
            int(getattr(parameter, "partition_dim", -1)) if is_model_parallel_parameter(parameter) else None,
            experts[layer] if is_expert and layer is not None else None,
            parameter.requires_grad,
        )
        found[row] = None
    return list(found)


def _numbers_of_experts(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, layer in module.named_modules():
        if isinstance(layer, MoE):
            yield f"{name}." if name else "", int(layer.num_experts)


def difference_of_models(engine: DeepSpeedEngine, manifest: Manifest) -> str:
    """The first parameter of this rank's that the checkpoint does not have, or the reverse; empty if all are there."""
    own, rank = parameters_of(engine), int(engine.checkpoint_mp_rank)
    saved = {row.name: row for row in manifest.parameters if rank in row.model_ranks}
    for row in own:
        if row.name not in saved:
            names = {row.name for row in own}
            other = next((f", but {name!r}, which the model has not" for name in saved if name not in names), "")
            return f"it has no parameter {row.name!r} {list(row.shape)}{other}"
        if saved[row.name].shape != row.shape:
            return f"parameter {row.name!r} is {list(saved[row.name].shape)} there and {list(row.shape)} in the model"
    names = {row.name for row in own}
    missing = [name for name in saved if name not in names]
    return (
        f"it has a parameter {missing[0]!r} {list(saved[missing[0]].shape)} that the model has not" if missing else ""
    )


def versions() -> dict[str, str]:
    """Releases of what writes a checkpoint."""
    return {
        "ds_topo": sys.modules["ds_topo"].__version__,
        "deepspeed": str(deepspeed.__version__),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def bytes_of_checkpoint(engine: DeepSpeedEngine) -> int:
    """About what a checkpoint of the whole job takes, from this rank's part: parameters and optimizer states."""
    layout = layout_of(engine)
    parameters = sum(_bytes(getattr(parameter, "ds_tensor", parameter)) for parameter in engine.module.parameters())
    states = _bytes_of_states(engine.optimizer)
    if layout.zero_stage == 3:
        return (parameters + states) * layout.world_size
    partitioned = layout.zero_stage or layout.optimizer == "BF16_Optimizer"
    return parameters * layout.model_ranks + states * (layout.world_size if partitioned else layout.model_ranks)


def _bytes_of_states(optimizer: Any) -> int:
    """Of the innermost optimizer: states, and master weights where the parameters are not the model's own."""
    wrappers = 0
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer, wrappers = optimizer.optimizer, wrappers + 1
    if optimizer is None:
        return 0
    states = [value for state in getattr(optimizer, "state", {}).values() for value in _tensors_of(state)]
    groups = getattr(optimizer, "param_groups", []) if wrappers else []
    return sum(map(_bytes, states)) + sum(_bytes(parameter) for group in groups for parameter in group["params"])


def _tensors_of(state: Any) -> list[torch.Tensor]:
    return [value for value in state.values() if torch.is_tensor(value)] if isinstance(state, dict) else []


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
