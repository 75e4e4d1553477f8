"""A saved model's parameters as a whole, whatever the layout that saved them: values, from the manifest alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ds_topo.checkpoint_files.manifest import Manifest, SavedLayout, SavedParameter
from ds_topo.checkpoint_files.structure import SavedSplit, SavedStructure
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

    def group_of(self) -> dict[str, int]:
        """The optimizer's group of every parameter that it has."""
        return {
            name: number for groups in self.structure.groups for number, names in enumerate(groups) for name in names
        }


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
    if any(row.experts is not None for row in manifest.parameters):
        raise CheckpointLayoutError(
            f"{manifest.tag!r} has experts, which cannot be converted: load it in the layout that it has"
        )
    slices = slices_of(layout)
    splits = {**(declared or {}), **structure.splits}
    found: dict[str, Parameter] = {}
    stages: dict[str, int] = {}
    for row in manifest.parameters:
        split = splits.get(row.name)
        parameter = Parameter(row.name, row.shape, row.dtype, row.is_trained, split, slices)
        known = found.setdefault(row.name, parameter)
        stages[row.name] = min(stages.get(row.name, layout.model_ranks), min(row.model_ranks) // slices)
        if known.shape != row.shape:
            raise CheckpointLayoutError(
                f"slices of {row.name!r} have different shapes, {list(known.shape)} and {list(row.shape)}: they can be "
                "put together only where slices are equal"
            )
    for name, split in splits.items():
        if name in found and split.dim >= len(found[name].shape):
            raise CheckpointLayoutError(
                f"{name!r} {list(found[name].shape)} declares partition_dim={split.dim}, which it does not have"
            )
    return SavedModel(_in_order(found, manifest.parameters, slices), structure, layout, slices, stages)


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
