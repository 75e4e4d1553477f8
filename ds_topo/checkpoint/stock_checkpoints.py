"""Describe checkpoints that DeepSpeed alone saved, without a manifest, as a manifest does.

Files of ZeRO 1 to 3 name the parameters of each group of the optimizer. Without ZeRO, the files have positions and no
names. The groups are therefore taken from the job that loads, and each stage of a pipeline gets as many layers as match
its files. What no file says comes from that job, too: the optimizer's class, how slices split parameters, and which
layers of a pipeline are tied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ds_topo.checkpoint.deepspeed_reader import (
    config_in,
    name_of_model_states,
    name_of_partition,
    names_of_vectors,
    opened,
)
from ds_topo.checkpoint.manifest import (
    BF16_OPTIMIZER,
    Manifest,
    SavedLayout,
    SavedParameter,
    SavedPlace,
    SavedStructure,
    merged,
)
from ds_topo.checkpoint.table import COPIED_MASTERS, FLAT_MASTERS, name_of_type
from ds_topo.errors import CheckpointError, CheckpointLayoutError
from ds_topo.topology.axes import MODEL

_PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def layout_of_files(path: Path, optimizer: str | None) -> SavedLayout | None:
    """Return the layout of the job that saved a checkpoint; None if its files do not say it.

    ``optimizer`` is the class of the program's optimizer, which files without ZeRO do not name.
    """
    names = sorted(os.listdir(path))
    first = next((name for name in names if name.endswith("mp_rank_00_model_states.pt") and "layer" not in name), None)
    if first is None or any(name.startswith("expp_rank") or "_expert_" in name for name in names):
        return None
    states = opened(path / first)
    model_ranks, replicas = states.get("mp_world_size"), states.get("dp_world_size")
    slices = (states.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1 if model_ranks == 1 else None)
    if not isinstance(model_ranks, int) or not isinstance(replicas, int):
        return None
    partition = next((name for name in names if name.endswith("mp_rank_00_optim_states.pt")), None)
    saved: Any = opened(path / partition)["optimizer_state_dict"] if partition else states.get("optimizer")
    if first.startswith("zero_pp_rank"):
        stage, kind = 3, "DeepSpeedZeroOptimizer_Stage3"
    elif partition is not None:
        section = config_in(states).get("zero_optimization") or {}
        stage = int(saved.get("zero_stage", section.get("stage", 1)))
        kind = "DeepSpeedZeroOptimizer" if "zero_stage" in saved else BF16_OPTIMIZER
    elif saved is None:
        stage, kind = 0, None
    else:
        stage = 0
        kind = "FP16_Optimizer" if FLAT_MASTERS in saved else "FP16_UnfusedOptimizer" if COPIED_MASTERS in saved else ""
    is_pipeline = states.get("module") is None
    weights = opened(next(iter(sorted(path.glob("layer_*"))))) if is_pipeline else states["module"]
    types = [one.dtype for one in weights.values() if torch.is_tensor(one) and one.is_floating_point()]
    degrees = {"pipe": model_ranks // (slices or 1), "data": replicas, "model": slices}
    return SavedLayout(
        ",".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree != 1 or axis == "data")
        if slices
        else None,
        model_ranks * replicas,
        model_ranks,
        replicas,
        stage,
        optimizer if kind == "" else kind,
        _PRECISIONS.get(types[0], "fp32") if types else "fp32",
        is_pipeline,
    )


def manifest_of_files(path: Path, layout: SavedLayout | None, structure: SavedStructure) -> Manifest:
    """Describe a checkpoint of a known layout; ``structure`` is that of the job that loads it, if there is one.

    If its files do not say enough, CheckpointLayoutError is raised.
    """
    if layout is None or (layout.is_pipeline and not structure.layers):
        cause, remedy = "a model with experts, or of an early DeepSpeed, do not describe the model", "Load"
        if layout is not None:
            cause = "a pipeline do not say which layers are tied"
            remedy = "Load it into an engine, by ds_topo.checkpoint.load(engine, folder); or load"
        raise CheckpointLayoutError(
            f"{path} was saved by DeepSpeed alone, and the files of {cause}. {remedy} it in the layout that saved it, "
            "and save it with ds_topo"
        )
    ranks = [opened(path / name_of_model_states(layout, rank)) for rank in range(layout.model_ranks)]
    aliases = dict(structure.aliases)
    for one in ranks:
        aliases.update(one.get("shared_params") or {})
    names_of_buffers = {name for one in ranks for name in one.get("buffer_names") or ()}
    tensors: list[tuple[int, str, torch.Tensor]] = []
    shapes_of_slices, buffers = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]]()
    for rank, name, tensor in _tensors(path, layout, structure, ranks):
        if name in names_of_buffers:
            buffers.setdefault(name, tuple(tensor.shape))
        elif name not in aliases:
            shapes_of_slices.setdefault(name, tuple(tensor.shape))
            tensors.append((rank, name, tensor))
    slices = layout.degree(MODEL)
    firsts = range(0, layout.model_ranks, slices)
    if layout.has_partitions:
        groups = tuple(groups_of_partitions(path, layout, SavedPlace(first, 0), ranks[first]) for first in firsts)
    elif ranks[0].get("optimizer") is None or not structure.groups:  # or no job: weights need no groups
        groups = tuple(() for _ in firsts)
    else:
        saved = [ranks[first]["optimizer"] for first in firsts]
        groups = _groups_by_position(path, saved, shapes_of_slices, structure)
    of_stages = [set(chain.from_iterable(of_stage)) for of_stage in groups]
    trained = set[str]().union(*of_stages)
    shapes = [_shapes(one) for one in ranks]
    rows: list[SavedParameter] = []
    for rank, name, tensor in tensors:
        place = rank % slices
        held_by = zip(firsts, of_stages, strict=True)
        holders = [first + place for first, own in held_by if name in own or name in shapes[first]]
        shape = tuple(next((known[name] for known in shapes[rank:] if name in known), tensor.shape))
        kind, model_ranks = name_of_type(tensor.dtype), tuple(holders) or (place,)
        rows.append(SavedParameter(name, shape, kind, model_ranks, is_trained=not trained or name in trained))
    found = replace(structure, groups=groups, aliases=aliases, buffers=buffers)
    return Manifest(path.name, int(ranks[0]["global_steps"]), "", layout, (), merged(rows), {}, found)


def _shapes(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes that a rank's file has of parameters: all of them at ZeRO 3."""
    frozen = states.get("frozen_param_shapes") or {}
    return {name: shape for vector in (*(states.get("param_shapes") or ()), frozen) for name, shape in vector.items()}


def _tensors(
    path: Path, layout: SavedLayout, structure: SavedStructure, ranks: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield a model rank, the name and the tensor of each entry of the module's state dict."""
    if not layout.is_pipeline:
        for rank, states in enumerate(ranks):
            yield from ((rank, name, one) for name, one in states["module"].items() if torch.is_tensor(one))
        return
    for number, layer in enumerate(structure.layers):
        prefix = layer.prefix(number)
        for place, file in enumerate(sorted(path.glob(f"layer_{number:02d}-*model_states.pt"))):
            yield from ((place, f"{prefix}{key}", one) for key, one in opened(file).items() if torch.is_tensor(one))


def groups_of_partitions(
    path: Path, layout: SavedLayout, place: SavedPlace, states: Mapping[str, Any]
) -> tuple[tuple[str, ...], ...]:
    """Return the names in each group of an optimizer with partitions: a group has one vector, or at stage 3 several.

    ``place`` is a rank that saved a partition, and ``states`` its file of weights.
    """
    if "param_shapes" not in states:
        raise CheckpointError(
            f"{path}: the file of weights of model rank {place.model_rank} has no 'param_shapes', so DeepSpeed did not "
            "write it: restore it, or load another checkpoint"
        )

    def partition(of: SavedPlace) -> Any:
        return opened(path / name_of_partition(layout, of))["optimizer_state_dict"]

    inner = partition(place).get("optimizer_state_dict" if layout.zero_stage == 3 else "base_optimizer_state")
    vectors = names_of_vectors(layout, place.model_rank, states, partition)
    numbers = [one["params"] for one in inner["param_groups"]] if isinstance(inner, dict) else [[*range(len(vectors))]]
    return tuple(tuple(name for number in of_group for name in vectors[number]) for of_group in numbers)


def _groups_by_position(
    path: Path, saved: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], structure: SavedStructure
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the names in each group of optimizers without ZeRO, by stage.

    The files have positions only, so the groups are those of the job that loads, as ``structure`` says. A stage has as
    many of its layers, from the end of the stage before, as fill the groups in its files, ``saved``. A plain engine is
    like one layer. ``shapes`` are those of one slice.
    """
    tied_first = sorted(shapes, key=lambda name: not (structure.layers and name.startswith("tied_modules.")))
    of_job = {name: number for stage in structure.groups for number, names in enumerate(stage) for name in names}
    problem = "the groups of this job's stages have different numbers"
    # An optimizer of all parameters in one group has the frozen ones, too, which those of ZeRO in this job omit.
    for group_of in (of_job, dict.fromkeys(tied_first, 0)) if len({*map(len, structure.groups)}) == 1 else ():
        in_order = [name for name in (tied_first if structure.layers else group_of) if name in group_of]
        found, reason = _fitted(saved, shapes, structure, {name: group_of[name] for name in in_order})
        if not reason:
            return found
        problem = problem if group_of is not of_job else reason
    raise CheckpointLayoutError(
        f"{path} was saved by DeepSpeed alone and without ZeRO, so that its optimizers have positions instead of "
        f"names, and {problem}. Give the optimizer its groups and parameters as when it was saved, in the same order, "
        "or load the checkpoint in the layout that saved it"
    )


def _fitted(
    saved: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], structure: SavedStructure, group_of: Mapping[str, int]
) -> tuple[tuple[tuple[tuple[str, ...], ...], ...], str]:
    """Return the names in each group by stage, and why they do not fill those in the files; empty if they do."""
    prefixes = [layer.prefix(number) for number, layer in enumerate(structure.layers)] or [""]
    found: list[tuple[tuple[str, ...], ...]] = []
    problem, start, stop = "", 0, 0
    for stage, own in enumerate(saved):
        is_last = stage == len(saved) - 1
        for stop in range(len(prefixes) if is_last else start + 1, len(prefixes) + 1):
            names = [name for name in group_of if name.startswith(tuple(prefixes[start:stop]))]
            numbers = sorted({group_of[name] for name in names})
            groups = tuple(tuple(name for name in names if group_of[name] == number) for number in numbers)
            if not (problem := _misfit(own, groups, shapes)):
                break
        if problem:
            return (), f"in stage {stage} {problem}" if structure.layers else problem
        found.append(groups)
        start = stop
    return tuple(found), ""


def counts_of_groups(saved: Any) -> list[int] | None:
    """Return the numbers of parameters in the groups of an optimizer without ZeRO; None if its state has none."""
    if saved is None or FLAT_MASTERS in saved:  # one vector for each group
        return None
    return [len(group["params"]) for group in saved.get("optimizer_state_dict", saved)["param_groups"]]


def _misfit(saved: Mapping[str, Any], groups: Sequence[Sequence[str]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Say why a state of an optimizer without ZeRO cannot be that of these groups; empty if it can."""
    counts, own, what = counts_of_groups(saved), [*map(len, groups)], "parameters"
    if counts is None:
        counts, what = [one.numel() for one in saved[FLAT_MASTERS]], "elements"
        own = [sum(math.prod(shapes.get(name, ())) for name in names) for names in groups]
    if counts != own:
        return f"groups of {counts} {what} are groups of {own} in this job"
    states = saved.get("optimizer_state_dict", saved)["state"] if FLAT_MASTERS not in saved else {}
    for number, name in enumerate(name for names in groups for name in names):
        for key, value in states.get(number, {}).items():
            if torch.is_tensor(value) and value.dim() and tuple(value.shape) != shapes.get(name):
                return (
                    f"{key} in position {number}, of {name!r} here, has the shape {list(value.shape)} instead of "
                    f"{list(shapes.get(name, ()))}"
                )
    return ""
