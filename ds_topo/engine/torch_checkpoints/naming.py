"""The parameters of an engine as another program names them, and what of each whole parameter this rank's slice is.

Experts are counted over all ranks of their layer; a parameter that several places of the model share has all of their
names, and the first one for its optimizer states, as torch's ``get_state_dict`` gives them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo.checkpoint_files.structure import SavedSplit
from ds_topo.engine.checkpoints.structure import structure_of
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.torch_checkpoints.memory import shape_of
from ds_topo.errors import CheckpointLayoutError, abridged, listed
from ds_topo.topology.axes import MODEL
from ds_topo.torch_checkpoint.boxes import Slice

NewNames: TypeAlias = "str | tuple[str, ...]"
"""One, or all that the other program has for a weight that it shares between several places."""
Rename: TypeAlias = "Callable[[str], NewNames] | Mapping[str, NewNames] | None"
"""From the names that the engine's module has to those of another program; a mapping may leave some out."""
_LOCAL_EXPERT = re.compile(r"(deepspeed_experts\.)(\d+)(?=\.)")


@dataclass(frozen=True, eq=False)
class Named:
    """A parameter of this rank."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """Of all places that have it."""
    everywhere: tuple[str, ...]
    """The first name; of an expert's parameter that of its like in all experts of the layer that are first, second, ...
    on their ranks."""
    slice: Slice
    is_expert: bool
    is_first: bool
    """Whether, of several stages and slices that have the same, this is the one to speak for it."""


def named_parameters(engine: DeepSpeedEngine, rename: Rename = None) -> list[Named]:
    """All parameters of this rank, in the module's order.

    Raises:
        CheckpointLayoutError: it is not known how slices are to be put together.
        ValueError: two of them get the same name.
    """
    if engine._config.expert_parallel_config.enabled:
        raise CheckpointLayoutError(
            "expert_parallel (AutoEP) of the config holds experts in a way of its own: torch's format takes those of "
            "deepspeed.moe.layer.MoE"
        )
    slices, place = slices_of(engine)
    structure = structure_of(engine)
    if structure.undeclared and slices > 1:
        raise CheckpointLayoutError(
            f"{listed(structure.undeclared, 3)} are marked as slices (tensor_model_parallel) and do not say along "
            "which dimension: set partition_dim on these parameters where they are made, as Megatron's layers do"
        )
    new_names, experts = _renaming(rename), dict(_expert_layers(engine.module))
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    result = []
    for parameter, names in found.values():
        layer = next((layer for prefix, layer in experts.items() if names[0].startswith(prefix)), None)
        is_expert = layer is not None and _LOCAL_EXPERT.search(names[0]) is not None
        of = _slice(names[0], shape_of(parameter), structure.splits.get(names[0]), slices, place)
        is_copy = getattr(parameter, "ds_pipe_replicated", False) or not (is_expert or of.dim is not None or place == 0)
        ranks = range(int(layer.ep_size)) if is_expert and layer is not None else range(1)
        here = _place_of_experts(layer) if is_expert and layer is not None else 0
        numbered = [[_numbered(name, layer if is_expert else None, rank) for name in names] for rank in ranks]
        result.append(
            Named(
                parameter,
                tuple(dict.fromkeys(name for old in numbered[here] for name in new_names(old))),
                tuple(new_names(names_there[0])[0] for names_there in numbered),
                of,
                is_expert,
                not is_copy,
            )
        )
    _require_different(result)
    _require_declared_experts(result, experts, slices)
    return result


def named_buffers(engine: DeepSpeedEngine, rename: Rename = None) -> Iterator[tuple[str, Any]]:
    """All buffers that a state dict has."""
    saved = engine.module.state_dict(keep_vars=True)
    new_names = _renaming(rename)
    for name, buffer in engine.module.named_buffers():
        if name in saved:
            yield new_names(name)[0], buffer


def slices_of(engine: DeepSpeedEngine) -> tuple[int, int]:
    """The degree of ``model``, and this rank's place there.

    Raises:
        CheckpointLayoutError: the engine's mpu is no grid, and has several model ranks.
    """
    if isinstance(engine.mpu, MpuGrid):
        slices = max(1, engine.mpu.topology().get_dim(MODEL))
        return slices, engine.mpu.get_axis_rank(MODEL) if slices > 1 else 0
    if int(engine.mp_world_size) > 1:
        raise CheckpointLayoutError(
            f"the engine's mpu is no grid of ds_topo and has {engine.mp_world_size} model ranks: which of them are "
            "stages and which are slices is not known. Give it a grid"
        )
    return 1, 0


def _slice(name: str, shape: tuple[int, ...], split: SavedSplit | None, slices: int, place: int) -> Slice:
    if split is None or slices == 1:
        return Slice(shape)
    if split.dim >= len(shape) or shape[split.dim] % split.stride:
        raise CheckpointLayoutError(
            f"{name!r} {list(shape)} declares partition_dim={split.dim}, partition_stride={split.stride}: there must "
            "be such a dimension, and its size a multiple of the stride"
        )
    return Slice(shape, split.dim, slices, place, split.stride)


def _renaming(rename: Rename) -> Callable[[str], tuple[str, ...]]:
    def new_names(name: str) -> tuple[str, ...]:
        new = name if rename is None else rename(name) if callable(rename) else rename.get(name, name)
        names = new if isinstance(new, tuple) else (new,)
        if not names or not all(isinstance(one, str) and one for one in names):
            raise ValueError(f"rename gives {abridged(new)} for {name!r}: give a name, or a tuple of names")
        return names

    return new_names


def _require_different(found: list[Named]) -> None:
    known: dict[str, Named] = {}
    for one in found:
        for name in one.names:
            if known.setdefault(name, one) is not one:
                raise ValueError(f"rename gives two parameters the same name, {name!r}")


# -- experts -----------------------------------------------------------------------------------------------------------


def _expert_layers(module: nn.Module) -> Iterator[tuple[str, MoE]]:
    for name, layer in module.named_modules():
        if isinstance(layer, MoE):
            yield f"{name}." if name else "", layer


def _require_declared_experts(found: list[Named], experts: Mapping[str, MoE], slices: int) -> None:
    split = [layer for layer in experts.values() if layer.enable_expert_tensor_parallelism]
    if slices > 1 and split and not any(one.is_expert and one.slice.dim is not None for one in found):
        raise CheckpointLayoutError(
            "experts are split over slices (enable_expert_tensor_parallelism) and none of their parameters says along "
            "which dimension: set partition_dim on them where they are made, as Megatron's layers do"
        )


def _place_of_experts(layer: MoE) -> int:
    """Of this rank, among those that share the experts of a layer."""
    return dist.get_rank(deepspeed_groups._get_expert_parallel_group(layer.expert_group_name))


def _numbered(name: str, layer: MoE | None, rank: int) -> str:
    """With the number that an expert of a rank has in the whole layer."""
    if layer is None:
        return name
    first = rank * int(layer.num_local_experts)
    return _LOCAL_EXPERT.sub(lambda match: f"{match[1]}{first + int(match[2])}", name)
