"""A saved model's parameters as a whole, whatever the layout that saved them: values, from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from ds_topo.checkpoint_files.manifest import Manifest, SavedLayout, SavedParameter
from ds_topo.checkpoint_files.structure import SavedSplit, SavedStructure
from ds_topo.conversion.experts import expert_of, head_of
from ds_topo.errors import CheckpointLayoutError, listed

TIED = "tied_modules."
"""How the names of what layers of a pipeline share begin."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model, with all of its slices, once."""

    name: str
    shape: tuple[int, ...]
    """Of one slice, as it was saved."""
    dtype: str
    is_trained: bool
    split: SavedSplit | None
    slices: int
    """As it was saved."""
    experts: int = 0
    """How many the layer has whose expert's it is; 0 of every other parameter."""

    def shape_of_slice(self, slices: int) -> tuple[int, ...]:
        """Of a slice among so many.

        >>> Parameter("weight", (4, 2), "float32", True, SavedSplit(0), 2).shape_of_slice(4)
        (2, 2)
        """
        if self.split is None or slices == self.slices:
            return self.shape
        sizes = list(self.shape)
        sizes[self.split.dim] = sizes[self.split.dim] * self.slices // slices
        return tuple(sizes)

    def numel_of_slice(self, slices: int) -> int:
        """Elements of a slice among so many."""
        return math.prod(self.shape_of_slice(slices))


@dataclass(frozen=True)
class SavedModel:
    """All parameters, and where the layout that saved them has put them."""

    parameters: Mapping[str, Parameter]
    """By name, in the module's order, stage after stage."""
    structure: SavedStructure
    layout: SavedLayout
    slices: int
    stage_of: Mapping[str, int]
    """The first stage that has a parameter."""

    @cached_property
    def experts(self) -> dict[str, int]:
        """How many experts each layer has, by how their names begin."""
        return {head_of(name): one.experts for name, one in self.parameters.items() if one.experts}

    def local_experts(self, structure: SavedStructure) -> dict[str, int]:
        """How many of them a rank has."""
        return {head: count // structure.experts[head] for head, count in self.experts.items()}

    def whole_name(self, local: str, structure: SavedStructure, part: int) -> str:
        """The name in the whole model of what a rank with this part of the layer's experts calls by a local name."""
        expert = expert_of(local)
        if expert is None:
            return local
        return expert.numbered(part * (self.experts[expert.head] // structure.experts[expert.head]) + expert.number)

    def local_name(self, name: str, structure: SavedStructure) -> str:
        """What a rank that has a parameter calls it."""
        expert = expert_of(name)
        if expert is None:
            return name
        return expert.numbered(expert.number % (self.experts[expert.head] // structure.experts[expert.head]))

    def part_of(self, name: str, structure: SavedStructure) -> int:
        """In which part of the layer's experts an expert is."""
        expert = expert_of(name)
        if expert is None:
            return 0
        return expert.number // (self.experts[expert.head] // structure.experts[expert.head])

    def group_of(self) -> dict[str, int]:
        """The optimizer's group of every parameter that it has, by local names."""
        return {
            name: number for groups in self.structure.groups for number, names in enumerate(groups) for name in names
        }

    def numels(self, slices: int) -> Callable[[str], int]:
        """Elements of a slice of a parameter, by its name."""
        return lambda name: self.parameters[name].numel_of_slice(slices)


def slices_of(layout: SavedLayout) -> int:
    """The degree of ``model``.

    Raises:
        CheckpointLayoutError: stages and slices cannot be told apart.
    """
    if layout.topology is None and layout.model_ranks > 1:
        raise CheckpointLayoutError(
            f"the checkpoint was saved with an mpu that is no grid of ds_topo, over {layout.model_ranks} model ranks: "
            "which of them are stages and which are slices is not known. Save it with a grid"
        )
    return layout.degrees().get("model", 1)


def model_of(manifest: Manifest, declared: Mapping[str, SavedSplit] | None = None) -> SavedModel:
    """The model of a checkpoint.

    Args:
        manifest: of it.
        declared: splits that whoever reads it knows beside those that it has.

    Raises:
        CheckpointLayoutError: the manifest does not say enough, or slices differ in shape.
    """
    structure, layout = manifest.structure, manifest.layout
    if structure is None:
        raise CheckpointLayoutError(
            f'the manifest of {manifest.tag!r} does not say how the model is put together (no "structure"): '
            "load the checkpoint in its own layout and save it with this release"
        )
    structure = _with_experts(manifest, structure)
    slices = slices_of(layout)
    splits = {**(declared or {}), **structure.splits}
    found: dict[str, Parameter] = {}
    stages: dict[str, int] = {}
    for row in manifest.parameters:
        split = splits.get(row.name.replace("*", "0") if row.experts else row.name)
        parameter = Parameter(row.name, row.shape, row.dtype, row.is_trained, split, slices, row.experts or 0)
        known = found.setdefault(row.name, parameter)
        stages[row.name] = min(stages.get(row.name, layout.model_ranks), min(row.model_ranks) // slices)
        if known.shape != row.shape:
            raise CheckpointLayoutError(
                f"slices of {row.name!r} have different shapes, {list(known.shape)} and {list(row.shape)}: they can be "
                "put together only where slices are equal"
            )
    parameters = _with_each_expert(_in_order(found, manifest.parameters, slices))
    for name, split in splits.items():
        if name in parameters and split.dim >= len(parameters[name].shape):
            raise CheckpointLayoutError(
                f"{name!r} {list(parameters[name].shape)} declares partition_dim={split.dim}, which it does not have"
            )
    stages = {name: stages[_starred(one, name)] for name, one in parameters.items()}
    return SavedModel(parameters, structure, layout, slices, stages)


def _starred(parameter: Parameter, name: str) -> str:
    expert = expert_of(name) if parameter.experts else None
    return name if expert is None else expert.numbered("*")


def _with_experts(manifest: Manifest, structure: SavedStructure) -> SavedStructure:
    """With the size of every layer's expert groups, also where an earlier release has saved it.

    Raises:
        CheckpointLayoutError: experts that cannot be converted.
    """
    heads = {head_of(row.name): None for row in manifest.parameters if row.experts is not None}
    layout, tag = manifest.layout, manifest.tag
    if bool(heads) != bool(layout.experts) or "" in heads:
        raise CheckpointLayoutError(
            f"{tag!r} has experts that are not of deepspeed.moe.layer.MoE, which cannot be converted: load it in the "
            "layout that it has"
        )
    if heads and layout.is_pipeline:
        raise CheckpointLayoutError(
            f"{tag!r} has experts in a PipelineModule, which cannot be converted: load it in the layout that it has"
        )
    if unknown := [head for head in heads if head not in structure.experts]:
        if len(layout.experts) > 1:
            raise CheckpointLayoutError(
                f"{tag!r} has expert groups of several sizes and does not say which {listed(unknown, 3)} have: load it "
                "in the layout that it has, and save it with this release"
            )
        structure = replace(structure, experts=dict.fromkeys(heads, layout.experts[0].size))
    return structure


def _with_each_expert(rows: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """One expert of a layer after the other, in place of one that stands for all."""
    found: dict[str, Parameter] = {}
    for _, run in groupby(rows.values(), key=lambda one: head_of(one.name) if one.experts else one.name):
        of_all = list(run)
        for number in range(max(1, of_all[0].experts)):
            for one in of_all:
                expert = expert_of(one.name) if one.experts else None
                name = one.name if expert is None else expert.numbered(number)
                found[name] = replace(one, name=name)
    return found


def _in_order(found: Mapping[str, Parameter], rows: tuple[SavedParameter, ...], slices: int) -> dict[str, Parameter]:
    """Stage after stage, each in the module's order: rows that differ in their marks alone may be apart."""
    names = dict.fromkeys(row.name for row in sorted(rows, key=lambda row: row.model_ranks[0] // slices))
    return {name: found[name] for name in names}


def require_splits(model: SavedModel, slices: int) -> None:
    """Check that every parameter can be cut into so many slices.

    Raises:
        CheckpointLayoutError: one does not say how, or its size is no multiple.
    """
    if slices == model.slices:
        return
    undeclared = [name for name in model.structure.undeclared if model.parameters[name].split is None]
    if undeclared:
        raise CheckpointLayoutError(
            f"model={model.slices} cannot become model={slices}: {listed(undeclared, 3)} are marked as slices "
            "(tensor_model_parallel) and do not say along which dimension. Set partition_dim on these parameters "
            "where they are made, as Megatron's layers do, and save once more"
        )
    for one in model.parameters.values():
        if one.split is None:
            continue
        full, pieces = one.shape[one.split.dim] * model.slices, one.split.stride * slices
        if full % pieces:
            raise CheckpointLayoutError(
                f"model={slices}: {one.name!r} has {full} elements along dimension {one.split.dim}, which must be a "
                f"multiple of {pieces}{f' (stride {one.split.stride} x slices)' if one.split.stride > 1 else ''}"
            )
