"""Describe a live engine as a manifest does: layout, parameters, structure, expected size; and its random states.

Loading compares these descriptions with those of a checkpoint. DeepSpeed saves optimizer states by position, and does
not detect that the parameters of a program have another order.
"""

from __future__ import annotations

import hashlib
import platform
import random
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import constants
from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.pipe import TiedLayerSpec as DeepSpeedTiedLayerSpec
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ds_topo.base.backends import accelerator, device_in_use
from ds_topo.base.classes import stock_class
from ds_topo.base.marks import inner_optimizer, is_element_by_element
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.table import head_of, name_of_type, starred
from ds_topo.mpu import MpuGrid, registry
from ds_topo.topology.axes import MODEL
from ds_topo.topology.rank_tables import gradient_axes

_KEEP_ORDER = "give the optimizer its parameters in the order in which they were saved"

# -- layout ------------------------------------------------------------------------------------------------------------


def require_engine(engine: object) -> None:
    """Raise TypeError unless the argument is an engine."""
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine: {type(engine).__name__} is not an engine: pass what deepspeed.initialize returns")


def layout_of(engine: DeepSpeedEngine) -> manifests.SavedLayout:
    """Return the layout of the engine's job."""
    grid = engine.mpu if isinstance(engine.mpu, MpuGrid) else None
    zero, automatic = int(engine.zero_optimization_stage()), engine._config.expert_parallel_config
    if automatic.enabled:
        is_data_first = bool(engine._config.use_data_before_expert_parallel_)
        experts = [manifests.SavedExperts(int(automatic.autoep_size), data_first=is_data_first)]
    else:
        may_have = engine.has_moe_layers or isinstance(engine, PipelineEngine)  # on another stage than this rank's
        plans = [groups.plan for groups in registry.of(engine.mpu)] if may_have else []
        experts = [
            manifests.SavedExperts(plan.expert_parallel_size, plan.expert_tensor_parallel, plan.use_data_before_expert)
            for plan in plans
        ]
    return manifests.SavedLayout(
        grid.topology().spec if grid else f"data={dist.get_world_size()}" if engine.mpu is None else None,
        dist.get_world_size(),
        int(engine.mp_world_size),
        int(engine.seq_dp_world_size),
        zero,
        stock_class(engine.optimizer).__name__ if engine.optimizer is not None else None,
        "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        isinstance(engine, PipelineEngine),
        tuple(sorted(experts, key=lambda one: one.size)),
    )


def replica_of(engine: DeepSpeedEngine) -> int:
    """Return the index of this rank among the ranks with the same parameters."""
    if isinstance(engine.mpu, MpuGrid):
        topology = engine.mpu.topology()
        return topology.get_axis_index(gradient_axes(topology), engine.mpu.grid_rank)
    return int(dist.get_rank(engine.seq_data_parallel_group))


def stage_and_slice(engine: DeepSpeedEngine) -> tuple[int, int, int]:
    """Return this rank's stage, its slice and the number of slices. Without a grid, each model rank is a stage."""
    slices = max(1, engine.mpu.topology().get_dim(MODEL)) if isinstance(engine.mpu, MpuGrid) else 1
    return *divmod(int(engine.checkpoint_mp_rank), slices), slices


def name_of_optimizer(engine: DeepSpeedEngine) -> str | None:
    """Return the class of the optimizer that steps; None if the engine has none."""
    inner = inner_optimizer(engine)
    return type(inner).__name__ if inner is not None else None


def bytes_of_checkpoint(engine: DeepSpeedEngine) -> int:
    """Estimate the bytes of the whole job's checkpoint from this rank's parameters and optimizer states."""
    layout, inner = layout_of(engine), inner_optimizer(engine)
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    states = [value for state in inner.state.values() for value in state.values()] if inner is not None else []
    if inner is not None and inner is not engine.optimizer:  # its parameters are master weights
        states += [parameter for group in inner.param_groups for parameter in group["params"]]
    parameter_bytes, state_bytes = (
        sum(one.nbytes for one in tensors if torch.is_tensor(one)) for tensors in (held, states)
    )
    parameter_copies = layout.world_size if layout.zero_stage == 3 else layout.model_ranks
    state_copies = layout.world_size if layout.has_partitions else layout.model_ranks
    return parameter_bytes * parameter_copies + state_bytes * state_copies


def versions() -> dict[str, str]:
    """Return the releases of the software that writes a checkpoint."""
    found = {name: str(sys.modules[name].__version__) for name in ("ds_topo", "deepspeed", "torch")}
    return {**found, "python": platform.python_version()}


# -- parameters --------------------------------------------------------------------------------------------------------


def experts_of(module: nn.Module) -> dict[str, Any]:
    """Return the MoE layer of each parameter and buffer that is part of its experts, by name.

    A rank numbers the experts of DeepSpeed's ``MoE`` in their names. AutoEP stacks them, ``[experts, ...]``.
    """
    found: dict[str, Any] = {}
    stacking: Any = sys.modules.get("deepspeed.module_inject.auto_ep_layer")  # slow to import, and only AutoEP needs it
    for prefix, layer in module.named_modules():
        is_stacked = stacking is not None and isinstance(layer, stacking.AutoEPMoELayer)
        if is_stacked or isinstance(layer, MoE):
            for name, _ in (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()):
                if name.startswith("experts.") if is_stacked else head_of(name):
                    found[f"{prefix}.{name}" if prefix else name] = layer
    return found


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of a parameter of this rank's slice, whether or not ZeRO has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def split_of(tensor: torch.Tensor) -> manifests.SavedSplit | None:
    """Return how slices split a parameter or buffer; None if they do not, or if it is unknown.

    Megatron's layers declare it by attributes, and the layers of DeepSpeed's AutoTP in a mapping. AutoTP can also split
    into unequal parts, which a :class:`~ds_topo.checkpoint.manifest.SavedSplit` cannot describe. ``unpadded_size`` is
    our own attribute, for a dimension with padding.
    """
    if (dim := int(getattr(tensor, "partition_dim", -1))) >= 0:
        real = getattr(tensor, "unpadded_size", None)
        return manifests.SavedSplit(
            dim, int(getattr(tensor, "partition_stride", 1)), None if real is None else int(real)
        )
    automatic = getattr(tensor, DS_AUTOTP_UC_META, None) or {}
    at, sizes = automatic.get("partition_dim"), automatic.get("sub_param_sizes") or (1,)
    is_unknown = automatic.get("conversion", {}).get("unsupported_reason")
    widths = automatic.get("sub_param_shard_widths") or [automatic.get("partition_sizes") or ()]
    if at is None or is_unknown or len({*sizes}) > 1 or any(len({*each}) != 1 for each in widths):
        return None
    return manifests.SavedSplit(int(at), len(sizes))


def parameters_of(engine: DeepSpeedEngine) -> list[manifests.SavedParameter]:
    """Return this rank's parameters in the module's order. One row stands for all experts of a layer."""
    experts, rank = experts_of(engine.module), (int(engine.checkpoint_mp_rank),)
    found: dict[str, manifests.SavedParameter] = {}
    for name, parameter in engine.module.named_parameters():
        layer = experts.get(name)
        own_name = starred(name) if layer is not None else name
        if own_name in found:
            continue
        found[own_name] = manifests.SavedParameter(
            own_name,
            shape_of(parameter),
            name_of_type(parameter.dtype),
            rank,
            (split.dim if (split := split_of(parameter)) else -1) if is_model_parallel_parameter(parameter) else None,
            int(layer.num_experts) if layer is not None else None,
            parameter.requires_grad,
        )
    return [*found.values()]


def difference_of_models(engine: DeepSpeedEngine, manifest: manifests.Manifest) -> str:
    """Return the first difference between this rank's part of the model and a checkpoint's; empty if there is none."""
    rank = int(engine.checkpoint_mp_rank)
    own = {row.name: row.shape for row in parameters_of(engine)}
    saved = {row.name: row.shape for row in manifest.parameters if rank in row.model_ranks}
    if found := _difference("parameter", own, saved):
        return found
    there = manifest.structure.buffers
    own = {name: tuple(buffer.shape) for name, buffer in saved_buffers(engine.module).items()}
    if stage_and_slice(engine)[1] > 0:  # the shapes are those of slice 0
        own = {name: there.get(name, shape) for name, shape in own.items()}
    if isinstance(engine.module, DeepSpeedPipelineModule):  # other stages have the buffers of their layers
        layers = tuple(f"{name}." for name, _ in engine.module.named_children() if name.isdecimal())
        there = {name: shape for name, shape in there.items() if name in own or name.startswith(layers)}
    return _difference("buffer", own, there)


def _difference(kind: str, own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> str:
    extra = next((name for name in saved if name not in own), None)
    for name, shape in own.items():
        if name not in saved:
            other = f", but {extra!r}, which the model does not have" if extra is not None else ""
            return f"it has no {kind} {name!r} {list(shape)}{other}"
        if saved[name] != shape:
            return f"{kind} {name!r} is {list(saved[name])} in the checkpoint and {list(shape)} in the model"
    return f"it has a {kind} {extra!r} {list(saved[extra])} that the model does not have" if extra is not None else ""


def saved_buffers(module: nn.Module, *, of_experts: bool = False) -> dict[str, torch.Tensor]:
    """Return the buffers that checkpoints hold, with or without those of experts."""
    if next(module.buffers(), None) is None:
        return {}  # at once: a state dict of many parameters takes long
    saved = module.state_dict(keep_vars=True)
    return {name: one for name, one in module.named_buffers() if name in saved and (of_experts or not head_of(name))}


# -- structure ---------------------------------------------------------------------------------------------------------


def splits_of(
    engine: DeepSpeedEngine, of_experts: Mapping[str, Any]
) -> tuple[dict[str, manifests.SavedSplit], list[str], dict[str, str]]:
    """Return how slices split this rank's parameters and buffers, which slices are undeclared, and all aliases."""
    first_names: dict[int, str] = {}
    splits, undeclared, aliases = {}, [], {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        is_local = name in of_experts and head_of(name)
        if (first := first_names.setdefault(id(parameter), name)) != name:
            aliases[name] = first
        elif is_local and not of_experts[name].enable_expert_tensor_parallelism:
            continue  # a whole expert may be made of layers that declare a split over a group of one rank
        elif (split := split_of(parameter)) is not None:
            padded = shape_of(parameter)[split.dim] * stage_and_slice(engine)[2] if split.real is not None else None
            splits[name] = replace(split, padded=padded)
        elif getattr(parameter, "tensor_model_parallel", False):
            undeclared.append(name)
    buffers = engine.module.named_buffers()
    splits |= {name: split for name, buffer in buffers if (split := split_of(buffer)) is not None}
    return splits, undeclared, aliases


def structure_of(engine: DeepSpeedEngine, of_experts: Mapping[str, Any]) -> manifests.SavedStructure:
    """Return the structure of the model and the optimizer, as this rank's stage sees it."""
    module, inner = engine.module, inner_optimizer(engine)
    splits, undeclared, aliases = splits_of(engine, of_experts)
    # by the prefix of a layer's experts, or by the name of a parameter that stacks them
    experts = {head_of(name) or name: int(layer.ep_size) for name, layer in of_experts.items()}
    structure = manifests.SavedStructure(
        name_of_optimizer(engine),
        (names_of_groups(engine),),
        splits,
        tuple(undeclared),
        aliases,
        experts=experts,
        options=zero_options_of(engine),
        is_by_element=inner is None or is_element_by_element(inner),
        buffers={name: tuple(buffer.shape) for name, buffer in saved_buffers(module).items()},
    )
    if not isinstance(module, DeepSpeedPipelineModule):
        return structure
    return replace(structure, layers=layers_of(module), bounds=tuple(map(int, module.parts)))


def layers_of(module: nn.Module) -> tuple[manifests.SavedLayer, ...]:
    """Describe the layers of a pipeline; other modules have none."""
    return tuple(map(saved_layer, getattr(module, "_layer_specs", ())))


def saved_layer(layer: Any) -> manifests.SavedLayer:
    """Describe a layer of a pipeline."""
    if isinstance(layer, DeepSpeedLayerSpec):
        tied = str(layer.key) if isinstance(layer, DeepSpeedTiedLayerSpec) else ""
        return manifests.SavedLayer(str(layer.typename.__name__), tied)
    kind = type(layer).__name__
    return manifests.SavedLayer(kind if isinstance(layer, nn.Module) else str(getattr(layer, "__name__", kind)))


def names_of_groups(engine: DeepSpeedEngine) -> tuple[tuple[str, ...], ...]:
    """Return the parameters' names in each of the optimizer's groups, in the order before ZeRO reorders them."""
    optimizer: Any = engine.optimizer
    if optimizer is None:
        return ()
    kept = next((name for name in ("bit16_groups", "bf16_groups", "fp16_groups") if hasattr(optimizer, name)), None)
    if hasattr(optimizer, "sub_group_to_group_id"):  # ZeRO 3 splits groups into sub-groups
        merged: dict[int, list[nn.Parameter]] = {}
        for number, parameters in enumerate(optimizer.fp16_groups):
            merged.setdefault(optimizer.sub_group_to_group_id[number], []).extend(parameters)
        groups: Any = merged.values()
    else:
        groups = getattr(optimizer, kept) if kept else [group["params"] for group in optimizer.param_groups]
    return tuple(tuple(str(engine.param_names[parameter]) for parameter in group) for group in groups)


def zero_options_of(engine: DeepSpeedEngine) -> manifests.SavedOptions:
    """Return the engine's options of ZeRO."""
    config, defaults = engine._config.zero_config, asdict(manifests.SavedOptions())
    return manifests.SavedOptions(**{key: type(value)(getattr(config, key, value)) for key, value in defaults.items()})


def difference_of_orders(engine: DeepSpeedEngine, manifest: manifests.Manifest) -> str:
    """Return how the optimizer's order of this stage differs from a checkpoint's, and what to do; empty if it does not.

    DeepSpeed saves optimizer states by position, and would silently exchange the states of parameters of equal sizes.
    """
    stage, *_ = stage_and_slice(engine)
    saved = manifest.structure.groups
    if engine.optimizer is None or stage >= len(saved):
        return ""
    own = names_of_groups(engine)
    if len(own) != len(saved[stage]):
        return f"{len(saved[stage])} groups of parameters in the checkpoint are {len(own)} in this job: {_KEEP_ORDER}"
    for group, (now, before) in enumerate(zip(own, saved[stage], strict=True)):
        for place, (name, former) in enumerate(zip_longest(now, before)):
            if name != former:
                here, there = (f"parameter {one!r}" if one else "nothing more" for one in (name, former))
                where = f"position {place} of group {group}"
                return f"{where} is {there} in the checkpoint, and {here} in this job: {_KEEP_ORDER}"
    return difference_of_options(engine, manifest.structure.options)


def difference_of_options(engine: DeepSpeedEngine, saved: manifests.SavedOptions) -> str:
    """Say which option of ZeRO differs in a checkpoint and orders its files in another way; empty if none."""
    own, stage = asdict(zero_options_of(engine)), int(engine.zero_optimization_stage())
    keys = {3: ["sub_group_size"]}.get(stage, ["round_robin_gradients", "parameter_alignment"] if stage else [])
    for key in keys:
        if (before := getattr(saved, key)) != own[key]:
            return (
                f"zero_optimization.{key} is {before} in the checkpoint and {own[key]} in this job, which gives them "
                "other positions: set it as it was"
            )
    return ""


def digests_of_buffers(engine: DeepSpeedEngine) -> dict[str, str]:
    """Return a digest of every buffer that this rank saves and that does not declare how slices split it."""
    found = {}
    for name, buffer in saved_buffers(engine.module).items():
        if int(getattr(buffer, "partition_dim", -1)) < 0:
            content = buffer.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found[name] = hashlib.sha256(content.numpy().data).hexdigest()
    return found


def share_of_structure(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """Return this stage's structure, and the shapes of its trained parameters, on its first rank; None on all others.

    DeepSpeed's ``ds_to_universal`` treats experts apart, so they are left out of the shapes.
    """
    stage, place, _ = stage_and_slice(engine)
    if place or replica_of(engine):
        return None
    of_experts = experts_of(engine.module)
    structure = structure_of(engine, of_experts)
    in_groups = {name for names in structure.groups[0] for name in names}
    dense = {
        name: (shape_of(one), getattr(one, "ds_pipe_replicated", False))  # a copy of an earlier stage's
        for name, one in engine.module.named_parameters()
        if name in in_groups and one.requires_grad and name not in of_experts
    }
    return {"stage": stage, "structure": structure, "dense": dense}


# -- universal checkpoints ---------------------------------------------------------------------------------------------
# DeepSpeed's ``ds_to_universal`` asks which parameters slices split, and how. Its patterns are names here.

_VOCABULARY = "original_vocab_size"


def universal_info_of(
    shares: Iterable[Mapping[str, Any]], structure: manifests.SavedStructure, slices: int
) -> dict[str, Any]:
    """Return ``universal_checkpoint_info``, from the shares of the stages, first to last, and their whole structure.

    Source: ``deepspeed/checkpoint/constants.py``.
    """
    unsupported: dict[str, str] = {}
    found: dict[str, Any] = {
        constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE,
        "tp_replicated_parameter_patterns": [],
        "parameter_with_row_parallelism_patterns": [],
        "parameter_with_sub_params": [],
        "sub_param_shard_widths": {},
        "vocabulary_parameter_patterns": [],
        "pipeline_replicated_parameter_patterns": [],
        "autotp_unsupported_parameter_patterns": unsupported,
    }
    on_first = {name for names in structure.groups[0] for name in names} if structure.groups else set()
    known: set[str] = set()
    for name, (shape, is_copy) in (row for share in shares for row in share["dense"].items()):
        pattern, split = f"^{re.escape(name)}$", structure.splits.get(name)
        if is_copy and pattern not in found["pipeline_replicated_parameter_patterns"]:
            found["pipeline_replicated_parameter_patterns"].append(pattern)
            if name not in on_first:  # the command keeps the copy of stage 0 alone
                unsupported[pattern] = "it is tied between stages, and the first stage does not have it"
        if name in known:
            continue
        known.add(name)
        if name in structure.undeclared and slices > 1:
            unsupported[pattern] = "it is marked as a slice, and does not declare partition_dim"
        if split is None:
            found["tp_replicated_parameter_patterns"].append(pattern)
        elif split.stride > 1 or split.dim > 1:
            width = shape[split.dim] // split.stride
            sizes: list[Any] = list(shape)
            sizes[split.dim] = (width * slices,) * split.stride
            sub = {"patterns": [pattern], "shape": sizes, "partition_dim": split.dim}
            found["parameter_with_sub_params"].append(sub)
            found["sub_param_shard_widths"][pattern] = [[width] * slices] * split.stride
        elif split.dim == 1:
            found["parameter_with_row_parallelism_patterns"].append(pattern)
        elif split.real is not None and len(shape) == 2 and found.setdefault(_VOCABULARY, split.real) == split.real:
            found["vocabulary_parameter_patterns"].append(pattern)
    return found


# -- random states -----------------------------------------------------------------------------------------------------


def name_of_states(engine: DeepSpeedEngine) -> str:
    """Return the name of the file of this rank's random states, in the pattern of DeepSpeed's names."""
    return f"random_states_replica_{replica_of(engine)}_mp_rank_{int(engine.checkpoint_mp_rank):02d}.pt"


def random_states(engine: DeepSpeedEngine) -> dict[str, Any]:
    """Return the random states of Python, NumPy, torch, the accelerator and DeepSpeed's model parallel layers.

    torch reads their types safely. With ``seed_layers`` a pipeline seeds by the number of micro-batches it has seen,
    which DeepSpeed does not save.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers), next_gauss),  # torch reads a tuple of 625 numbers slowly
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
        "micro_offset": getattr(engine.module, "micro_offset", None),
    }
    if (device := device_in_use()) is not None:
        states[device.type] = get_accelerator().get_rng_state()
    return states


def restore_random_states(engine: DeepSpeedEngine, states: dict[str, Any]) -> None:
    """Restore the random states that :func:`random_states` returned."""
    version, numbers, next_gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), next_gauss))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["tracker"]:
        get_cuda_rng_tracker().set_states(states["tracker"])
    if states["micro_offset"] is not None:
        engine.module.micro_offset = states["micro_offset"]
    device = accelerator()
    if device is not None and device.type in states:
        get_accelerator().set_rng_state(states[device.type])
