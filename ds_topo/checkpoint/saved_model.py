"""Describe the model of a checkpoint as a whole: its parameters, its pipeline stages and its experts.

:func:`model_of` returns every parameter once, whatever the layout that saved it, from the manifest alone. In names of
the whole model an expert has its number among all experts of its layer. In optimizer files and in the groups of a
structure names are *local*: an expert has its number among those of one rank. :class:`WholeModel` translates, and
says which ranks have what.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

from ds_topo.base.marks import PLACEHOLDERS
from ds_topo.checkpoint.manifest import Manifest, SavedLayout, SavedParameter, SavedSplit, SavedStructure, SavedTable
from ds_topo.checkpoint.table import Box, Elements, Slice, head_of, numbered, starred
from ds_topo.errors import CheckpointLayoutError, DamagedCheckpointError, listed
from ds_topo.topology.axes import MODEL


@dataclass(frozen=True)
class WholeParameter:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Shape of one slice, as it was saved."""
    dtype: torch.dtype
    is_trained: bool
    split: SavedSplit | None
    slices: int
    """Number of slices, as it was saved."""
    stage: int = 0
    """The first stage that holds it."""
    experts: int = 0
    """Number of experts in the layer; 0 if the parameter does not belong to an expert."""
    is_stacked: bool = False
    """True if AutoEP stacks the experts of a rank in this parameter. Its slices are then the parts of the experts."""
    padded: int | None = None
    """Size of the whole split dimension in the new layout, if its padding changes; None if the size stays."""

    @property
    def real(self) -> int | None:
        """Rows of the whole tensor that are no padding, if the padding changes."""
        return None if self.padded is None or self.split is None else self.split.real or 0

    def slice_of(self, place: int, slices: int) -> Slice:
        """Return one of ``slices`` slices."""
        return Slice.of(self.shape_of_slice(slices), self.split, place, slices)

    @property
    def size(self) -> int:
        """The size of the whole split dimension, as it was saved."""
        assert self.split is not None
        return self.shape[self.split.dim] * self.slices

    def shape_of_slice(self, slices: int) -> tuple[int, ...]:
        """Return the shape that a slice has among ``slices``.

        >>> WholeParameter("weight", (4, 2), torch.float32, True, SavedSplit(0), 2).shape_of_slice(4)
        (2, 2)
        """
        if self.split is None or (slices == self.slices and self.padded is None):
            return self.shape
        sizes = list(self.shape)
        sizes[self.split.dim] = (self.size if self.padded is None else self.padded) // slices
        return tuple(sizes)

    def numel_of_slice(self, slices: int) -> int:
        """Return the number of elements that a slice has among ``slices``."""
        return math.prod(self.shape_of_slice(slices))


@dataclass(frozen=True)
class WholeModel:
    """The whole model of a checkpoint: all its parameters, and what each rank that saved it held of them.

    The experts of a layer are divided into equal *parts*. Their number is the layer's expert parallel size, and the
    ranks of one expert data parallel group hold each part.
    """

    parameters: Mapping[str, WholeParameter]
    """Parameters by name, in the order of the module that saved them, stage after stage."""
    structure: SavedStructure
    """The model's structure in the layout that saved it."""
    layout: SavedLayout
    tables: tuple[SavedTable, ...] = ()
    """The tables of the checkpoint; empty if it has none."""
    _rows: tuple[SavedParameter, ...] = ()
    """The parameters as the manifest lists them."""

    @cached_property
    def slices(self) -> int:
        """The degree of ``model``."""
        return self.layout.degree(MODEL)

    @cached_property
    def experts(self) -> dict[str, int]:
        """Number of experts of each MoE layer, by its entry among the structure's experts."""
        layers = (one for one in self.parameters.values() if one.experts)
        return {one.name if one.is_stacked else head_of(one.name): one.experts for one in layers}

    def names_on(self, model_rank: int) -> list[str]:
        """Return the names of a model rank's parameters, in its module's order, with all experts of its layers."""
        rows = {row.name for row in self._rows if model_rank in row.model_ranks}
        return [name for name in self.parameters if name in rows or starred(name) in rows]

    @cached_property
    def _positions(self) -> dict[int, dict[str, int]]:
        """The position of each parameter's name among the sorted ones of its model rank."""
        names: dict[int, set[str]] = {}
        for row in self._rows:
            for rank in row.model_ranks:
                names.setdefault(rank, set()).add(row.name)
        alike = {own: {name: at for at, name in enumerate(sorted(own))} for own in {*map(frozenset, names.values())}}
        return {rank: alike[frozenset(own)] for rank, own in names.items()}

    @cached_property
    def _tables_of_ranks(self) -> dict[int, tuple[list[SavedTable], dict[int, dict[int, SavedTable]]]]:
        """The tables of each model rank that may have any elements, and the others by partitions and partition."""
        found: dict[int, tuple[list[SavedTable], dict[int, dict[int, SavedTable]]]] = {}
        for table in self.tables:
            whole, cut = found.setdefault(table.model_rank, ([], {}))
            if table.partitions == 1:
                whole.append(table)
            else:
                cut.setdefault(table.partitions, {})[table.partition] = table
        return found

    def tables_of(self, name: str, wanted: Elements | None = None) -> Iterator[str]:
        """Yield the files of the tables with elements of a parameter; of a buffer, of all that have buffers.

        At ZeRO 3 tables are left out that have none of the wanted elements.
        """
        row = starred(name) if head_of(name) in self.experts else name
        held = [(rank, at) for rank, positions in self._positions.items() if (at := positions.get(row)) is not None]
        if not held:  # a buffer, of which each partition of ZeRO 3 has a copy
            yield from (table.path for table in self.tables if table.has_buffers and table.partition == 0)
        one = self.parameters.get(name)
        is_equal_on_slices = wanted is not None and one is not None and one.split is None and not one.experts
        boxes = None if wanted is None else list(wanted.boxes())
        for rank, at in held:
            if is_equal_on_slices and rank % self.slices:
                continue
            whole, cut = self._tables_of_ranks.get(rank, ([], {}))
            yield from (table.path for table in whole if table.holds_row(at))
            first, end = self._span_on(name, rank, boxes) if cut else (0, 0)
            for partitions, tables in cut.items() if first < end else ():
                size = -(-math.prod(self.parameters[name].shape) // partitions)
                own = (tables.get(number) for number in range(first // size, (end - 1) // size + 1))
                yield from (table.path for table in own if table is not None and table.holds_row(at))

    def _span_on(self, name: str, rank: int, boxes: Sequence[Box] | None) -> tuple[int, int]:
        """Return a span of the slice that a model rank saved that has all that it has of boxes; None for all."""
        one = self.parameters[name]
        if boxes is None or one.is_stacked:
            return 0, math.prod(one.shape)
        saved = Slice.of(one.shape, one.split, rank % self.slices, self.slices)
        found = [span for box in boxes if (span := saved.span_of(box)) is not None]
        return min((first for first, _ in found), default=0), max((end for _, end in found), default=0)


def model_of(manifest: Manifest, declared: Mapping[str, SavedSplit] | None = None) -> WholeModel:
    """Return the model of a checkpoint, or raise CheckpointLayoutError if its manifest does not say enough.

    ``declared`` has splits of parameters for which the manifest has none, and the padded sizes of the new layout.
    """
    structure, layout, slices = manifest.structure, manifest.layout, manifest.layout.degree(MODEL)
    if layout.topology is None and layout.model_ranks > 1:
        raise CheckpointLayoutError(
            f"the checkpoint was saved over {layout.model_ranks} model ranks with an mpu that is not a grid of "
            "ds_topo: it is unknown which of them are stages and which are slices. Load it in the layout that saved "
            "it, and save it with a grid"
        )
    heads = {row.name if _is_stacked(row) else head_of(row.name) for row in manifest.parameters if row.experts}
    is_other_kind = not layout.experts if heads else bool(layout.experts) and not layout.is_pipeline
    if is_other_kind or heads - structure.experts.keys():
        raise CheckpointLayoutError(
            f"{manifest.tag!r} has experts that are not of deepspeed.moe.layer.MoE or AutoEP, so no other layout can "
            "load it: load it in the layout that saved it"
        )
    declared, known_splits = declared or {}, structure.splits
    padded = {
        name: _padded_anew(name, known_splits.get(name, new), new)
        for name, new in declared.items()
        if new.padded is not None
    }
    splits = {**declared, **known_splits, **padded}
    if has_placeholders(structure):
        raise CheckpointLayoutError(
            f"{manifest.tag!r} has a stage without trainable parameters in a group of the optimizer ({PLACEHOLDERS}), "
            "so no other layout can load it: load it in the layout that saved it, or give each stage such a parameter"
        )
    parameters = _parameters_of(manifest, structure, slices, splits, padded)
    structure = replace(structure, splits={**known_splits, **padded})
    has_experts = any(one.experts for one in parameters.values())  # a pipeline may have groups for nothing
    layout = layout if has_experts else replace(layout, experts=())
    return WholeModel(parameters, structure, layout, manifest.tables, manifest.parameters)


def _parameters_of(
    manifest: Manifest,
    structure: SavedStructure,
    slices: int,
    splits: Mapping[str, SavedSplit],
    padded: Mapping[str, SavedSplit],
) -> dict[str, WholeParameter]:
    """Return the parameters of a manifest by name, each expert of a layer after the other."""
    rows: dict[str, SavedParameter] = {}
    for row in sorted(manifest.parameters, key=lambda row: row.model_ranks[0] // slices):
        known = rows.setdefault(row.name, row)
        if known.shape != row.shape:
            raise CheckpointLayoutError(
                f"slices of {row.name!r} have different shapes, {list(known.shape)} and {list(row.shape)}: only equal "
                "slices can be put together. Load the checkpoint in the layout that saved it"
            )
    parameters: dict[str, WholeParameter] = {}
    for _, run in groupby(rows.values(), key=lambda row: head_of(row.name) or row.name):
        of_layer = list(run)  # rows of an expert stand for all experts of the layer
        for number in range((of_layer[0].experts or 1) if head_of(of_layer[0].name) else 1):
            for row in of_layer:
                name, first = numbered(row.name, number), numbered(row.name, 0)
                split, dtype = splits.get(first), getattr(torch, row.dtype, None)
                if not isinstance(dtype, torch.dtype):
                    raise DamagedCheckpointError(
                        f"the manifest of {manifest.tag!r}: {row.dtype!r} of {name!r} is no data type of torch"
                    )
                if split is not None and split.dim >= len(row.shape):
                    raise CheckpointLayoutError(
                        f"{name!r} {list(row.shape)} declares partition_dim={split.dim}, but the parameter has only "
                        f"{len(row.shape)} dimensions. Set partition_dim to one of them and save once more"
                    )
                stage = row.model_ranks[0] // slices
                one = WholeParameter(name, row.shape, dtype, row.is_trained, split, slices, stage, row.experts or 0)
                if _is_stacked(row):
                    one = replace(one, split=SavedSplit(0), slices=structure.experts[name], is_stacked=True)
                elif first in padded and padded[first].padded != one.size:
                    one = replace(one, padded=padded[first].padded)
                parameters[name] = one
    return parameters


def has_placeholders(structure: SavedStructure) -> bool:
    """Return True if the groups of a stage have placeholders for parameters that it does not have."""
    return any(name.startswith(PLACEHOLDERS) for groups in structure.groups for group in groups for name in group)


def _is_stacked(row: SavedParameter) -> bool:
    return row.experts is not None and not head_of(row.name)


def _padded_anew(name: str, saved: SavedSplit, new: SavedSplit) -> SavedSplit:
    """Return the split of a parameter whose padding the new layout gives; refuse one whose real size is unknown."""
    real = saved.real if saved.real is not None else new.real
    if real is None:
        raise CheckpointLayoutError(
            f"{name!r}: the checkpoint does not say how many rows are padding. Give the rows without it as well: set "
            "unpadded_size on the parameter"
        )
    if new.real not in (None, real):
        raise CheckpointLayoutError(
            f"{name!r} has {real} rows without padding in the checkpoint, and {new.real} here: only the padding can "
            "change. Give it as many"
        )
    return replace(saved, real=real, padded=new.padded)


def require_splits(model: WholeModel, slices: int) -> None:
    """Raise CheckpointLayoutError unless every parameter can be cut into so many slices."""
    known = model.parameters
    undeclared = [name for name in model.structure.undeclared if name in known and known[name].split is None]
    if undeclared and slices != model.slices:
        raise CheckpointLayoutError(
            f"model={model.slices} cannot become model={slices}: {listed(undeclared, 3)} are marked as slices "
            "(tensor_model_parallel) and do not declare along which dimension. Set partition_dim on these parameters "
            "where they are made, as Megatron's layers do, and save once more. What AutoTP has cut into unequal parts "
            f"can be loaded with model={model.slices} only"
        )
    for one in model.parameters.values():
        if not one.is_stacked:
            require_split(one, slices)


def require_split(one: WholeParameter, slices: int) -> None:
    """Raise CheckpointLayoutError unless a parameter can be cut into so many slices, with the new padding."""
    if one.split is None or (slices == one.slices and one.padded is None):
        return
    full, pieces = one.size if one.padded is None else one.padded, one.split.stride * slices
    if one.padded is not None and (one.split.dim, one.split.stride) != (0, 1):
        raise CheckpointLayoutError(
            f"{one.name!r}: slices split dimension {one.split.dim} with stride {one.split.stride}, and the padding can "
            "change along dimension 0 with stride 1 only. Keep its size"
        )
    if one.padded is not None and (one.split.real or 0) > min(full, one.size):
        raise CheckpointLayoutError(
            f"{one.name!r} has {one.size} rows in the checkpoint and {full} in the new layout, but {one.split.real} "
            "rows are no padding. Correct that number (unpadded_size), or give the parameter more rows"
        )
    if full % pieces:
        raise CheckpointLayoutError(
            f"model={slices}: {one.name!r} has {full} elements along dimension {one.split.dim}, which must be a "
            f"multiple of {pieces}{f' (stride {one.split.stride} x slices)' if one.split.stride > 1 else ''}. Choose "
            "another degree"
        )
