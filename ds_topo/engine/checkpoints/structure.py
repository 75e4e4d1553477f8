"""How an engine's model and optimizer are put together, as a manifest says it (``checkpoint_files.structure``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_topo.checkpoint_files.manifest import Manifest
from ds_topo.checkpoint_files.structure import (
    SavedLayer,
    SavedSplit,
    SavedStructure,
    merged_structures,
    structure_from,
)
from ds_topo.engine.checkpoints.facts import replica_of
from ds_topo.engine.mpu import MpuGrid


def structure_of(engine: DeepSpeedEngine) -> SavedStructure:
    """What this rank's stage sees of it."""
    module: Any = engine.module
    is_pipeline = isinstance(module, DeepSpeedPipelineModule)
    splits, undeclared = {}, []
    for name, parameter in module.named_parameters():
        if (dim := int(getattr(parameter, "partition_dim", -1))) >= 0:
            splits[name] = SavedSplit(dim, int(getattr(parameter, "partition_stride", 1)))
        elif getattr(parameter, "tensor_model_parallel", False):
            undeclared.append(name)
    return SavedStructure(
        type(_innermost(engine.optimizer)).__name__ if engine.optimizer is not None else None,
        (tuple(_names_of_groups(engine)),),
        splits,
        tuple(undeclared),
        dict(_aliases(module)),
        tuple(map(_layer, module._layer_specs)) if is_pipeline else (),
        tuple(map(int, module.parts)) if is_pipeline else (),
        str(getattr(module, "partition_method", "")) if is_pipeline else "",
        dict(_sizes_of_experts(module)),
    )


def difference_of_orders(engine: DeepSpeedEngine, manifest: Manifest) -> str:
    """The first parameter of this stage's optimizer that has another place in a checkpoint; empty if none has.

    DeepSpeed saves the optimizer's states by places: of parameters of equal sizes it would exchange them unnoticed.
    """
    stage, _ = _stage_and_slice(engine)
    saved = manifest.structure.groups if manifest.structure is not None else ()
    if engine.optimizer is None or stage >= len(saved):
        return ""
    own = tuple(_names_of_groups(engine))
    if len(own) != len(saved[stage]):
        return f"{len(saved[stage])} groups of parameters there are {len(own)} in this job"
    for group, (now, before) in enumerate(zip(own, saved[stage], strict=True)):
        for place, (name, former) in enumerate(zip_longest(now, before)):
            if name != former:
                here, there = (f"parameter {one!r}" if one else "nothing more" for one in (name, former))
                return f"place {place} of group {group} is of {there} there, and of {here} in this job"
    return ""


def _stage_and_slice(engine: DeepSpeedEngine) -> tuple[int, int]:
    slices = max(1, engine.mpu.topology().get_dim("model")) if isinstance(engine.mpu, MpuGrid) else 1
    return divmod(int(engine.checkpoint_mp_rank), slices)


def share_of_structure(engine: DeepSpeedEngine) -> dict[str, Any] | None:
    """What this rank has to tell of it, as JSON has it: the first replica of the first slice speaks for its stage."""
    stage, place = _stage_and_slice(engine)
    return {"stage": stage, **asdict(structure_of(engine))} if place == 0 and replica_of(engine) == 0 else None


def whole_structure(shares: Iterable[Mapping[str, Any] | None]) -> SavedStructure | None:
    """Of the whole model, from the shares of all ranks."""
    told = sorted((share for share in shares if share is not None), key=lambda share: int(share["stage"]))
    stages = [structure for share in told if (structure := structure_from(share)) is not None]
    return merged_structures(stages) if stages else None


def _innermost(optimizer: Any) -> Any:
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer = optimizer.optimizer
    return optimizer


def _names_of_groups(engine: DeepSpeedEngine) -> Iterator[tuple[str, ...]]:
    """As the optimizer has them, before ZeRO deals them out in another order."""
    optimizer = engine.optimizer
    if optimizer is None:
        return
    for group in _groups(optimizer):
        yield tuple(str(engine.param_names[parameter]) for parameter in group)


def _groups(optimizer: Any) -> list[list[nn.Parameter]]:
    if hasattr(optimizer, "sub_group_to_group_id"):  # ZeRO 3: groups in parts
        groups: dict[int, list[nn.Parameter]] = {}
        for part, parameters in enumerate(optimizer.fp16_groups):
            groups.setdefault(optimizer.sub_group_to_group_id[part], []).extend(parameters)
        return list(groups.values())
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in optimizer.param_groups]


def _sizes_of_experts(module: nn.Module) -> Iterator[tuple[str, int]]:
    for name, layer in module.named_modules():
        if isinstance(layer, MoE):
            inner = (own for own, part in layer.named_modules() if isinstance(part, Experts))
            yield from ((f"{name}.{own}.deepspeed_experts".lstrip("."), int(layer.ep_size)) for own in inner)


def _aliases(module: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            yield name, known


def _layer(layer: Any) -> SavedLayer:
    tied = str(layer.key) if isinstance(layer, TiedLayerSpec) else ""
    if isinstance(layer, LayerSpec):
        return SavedLayer(str(layer.typename.__name__), tied)
    kind = type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", type(layer).__name__)
    return SavedLayer(str(kind))
