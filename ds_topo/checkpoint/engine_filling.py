"""Copy the weights and optimizer states of a checkpoint into a live engine of any layout, by name.

Both sides are tables of the whole model: :mod:`~ds_topo.checkpoint.engine_state` says which elements of which parameter
each piece of the engine's memory holds, and a source reads any elements of any parameter. Every rank reads its own
elements. Nothing is written to the disk.

:class:`EngineFilling` first compares the two, so that all ranks refuse before the engine changes, and then copies.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.deepspeed_reader import MASTER, WEIGHT, Source, differing
from ds_topo.checkpoint.engine_state import (
    Named,
    Rename,
    Trained,
    named_parameters,
    names_of_buffers,
    renaming,
    restore_hyperparameters,
    span_of_zero_3,
    trained,
    update_weights,
)
from ds_topo.checkpoint.manifest import SavedStructure, structure_from
from ds_topo.checkpoint.rank_zero import Meeting
from ds_topo.checkpoint.saved_model import Parameter, model_of, require_splits
from ds_topo.checkpoint.target import require_loadable
from ds_topo.checkpoint.without_manifest import WeightFiles, layout_of_files, manifest_of_files
from ds_topo.errors import CheckpointError, CheckpointLayoutError, CheckpointModelError

_ADAMS = {"Adam", "AdamW", "DeepSpeedCPUAdam"}
"""Optimizers that keep the same states in the same way."""
_NAMES_OF_GROUPS = {"params": None, "param_names": None, "name": None}


@dataclass(frozen=True, eq=False)
class Row:
    """A parameter of this rank that the checkpoint has."""

    saved: Parameter
    named: Named
    trained: Trained | None
    """Its place in the optimizer's memory; None if the engine has no optimizer, or leaves the parameter out."""
    has_states: bool
    """True if the optimizer has trained it in both jobs."""


@dataclass
class Comparison:
    """The result of comparing the checkpoint with this rank's engine; sent to rank 0 as JSON."""

    names: list[str] = field(default_factory=list)
    """Names, in the checkpoint, of the parameters and buffers that it will copy."""
    added: dict[str, str] = field(default_factory=dict)
    """What strict loading refuses, by name: parameters and buffers without a value, or without states."""
    problem: str = ""
    """The first difference that cannot be loaded."""
    conflict: str = ""
    """The first reason why this engine cannot hold the checkpoint's states."""


class EngineFilling:
    """A copy from a checkpoint into an engine.

    Args:
        engine: the engine.
        source: the open checkpoint.
        rename: from the engine's names to those of the checkpoint, if it is of another program.
        has_states: copy the optimizer's states, too, and not weights alone.
    """

    def __init__(
        self, engine: DeepSpeedEngine, source: Source, rename: Rename = None, *, has_states: bool = False
    ) -> None:
        self._engine, self._source = engine, source
        self._stage, self._place, self._slices = facts.stage_and_slice(engine)
        self._inner = facts.inner_optimizer(engine)
        self._has_states = has_states and self._inner is not None
        self._trained = list(trained(engine))
        self._named = named_parameters(engine, rename)
        self._buffer_names = names_of_buffers(engine, rename)
        self._layers, self._stacked = facts.moe_layers(engine.module), facts.stacked_experts(engine.module)
        self._rows: list[Row] = []

    def compare(self) -> Comparison:
        """Compare this rank's parameters, buffers and states with the checkpoint."""
        found, parameters = Comparison(), self._source.model.parameters
        aliases = self._source.model.structure.aliases
        places = {id(one.parameter): one for one in self._trained}
        for named in self._named:
            own, shape = named.parameter, list(facts.shape_of(named.parameter))
            names = dict.fromkeys(aliases.get(name, name) for name in named.names)
            found_here = [parameters[name] for name in names if name in parameters]
            if not found_here:
                found.added[named.names[0]] = f"it has no parameter {named.names[0]!r} {shape}"
                continue
            saved, others = found_here[0], found_here[1:]
            found.names += [one.name for one in found_here]
            layer = facts.moe_layer_of(named.local, self._layers)
            layer = layer or self._stacked.get(named.local)
            pieces = named.slice.slices if saved.is_stacked else self._slices
            experts, size = int(layer.num_experts) if layer is not None else 0, saved.shape_of_slice(pieces)
            if saved.experts != experts:
                problem = f"{saved.name!r} has {saved.experts} experts in the checkpoint, and {experts} in the model"
                found.problem = found.problem or problem
            elif list(size) != shape:
                found.problem = found.problem or (
                    f"parameter {saved.name!r} is {list(size)} in the checkpoint ({self._slices} slices), not {shape}"
                )
            elif unlike := next((one.name for one in others if not self._are_equal(saved, one)), None):
                found.problem = found.problem or (
                    f"{saved.name!r} and {unlike!r} differ, and are one parameter in the model"
                )
            place = places.get(id(own))
            is_trained = place is not None and own.requires_grad
            self._rows.append(Row(saved, named, place, is_trained and saved.is_trained))
            if self._has_states and is_trained and not saved.is_trained:
                found.added[saved.name] = f"{saved.name!r} is trained here and was frozen there, so it has no states"
        self._compare_buffers(found)
        if self._has_states and not found.problem:
            try:
                self._require_states_that_fit()
            except CheckpointLayoutError as error:
                found.conflict = str(error)
        return found

    def _are_equal(self, one: Parameter, other: Parameter) -> bool:
        if one.shape != other.shape:
            return False
        left, right = (
            self._source.elements(each.name, WEIGHT, self._place, self._slices, 0, each.numel_of_slice(self._slices))
            for each in (one, other)
        )
        return torch.equal(left, right)

    def _compare_buffers(self, found: Comparison) -> None:
        saved, kept = self._buffers(), self._engine.module.state_dict(keep_vars=True)
        for local, buffer in self._engine.module.named_buffers():
            if local not in kept:
                continue
            name, shape = self._buffer_names[local], list(buffer.shape)
            if name not in saved:
                found.added[name] = f"it has no buffer {name!r} {shape}"
                continue
            found.names.append(name)
            if (there := list(saved[name].shape)) != shape and not found.problem:
                found.problem = f"buffer {name!r} is {there} in the checkpoint ({self._slices} slices), not {shape}"

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._source.buffers(self._slices, self._place))

    def _vectors(self) -> list[list[Row]]:
        """Return the rows that share a tensor of the optimizer."""
        found: dict[int, list[Row]] = {}
        for row in self._rows:
            if row.trained is not None:
                found.setdefault(id(row.trained.master), []).append(row)
        return list(found.values())

    def _states_of(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return the states that some parameters have in common: by data type if they have one for each element.

        Raises:
            CheckpointLayoutError: they differ.
        """
        found: dict[str, Any] = {}
        first = ""
        for row in rows:
            _, states = self._source.of_parameter(row.saved.name) if row.has_states else ({}, {})
            if found and states and (key := differing(found, states)):
                raise CheckpointLayoutError(
                    f"{first!r} and {row.saved.name!r} have different values or types of {key} in the optimizer, and "
                    "this engine keeps one for both. Put the two into different groups of the optimizer"
                )
            if states and not found:
                found, first = states, row.saved.name
        return found

    def _require_states_that_fit(self) -> None:
        """Raise CheckpointLayoutError if this optimizer cannot hold the saved states."""
        saved, own = self._source.model.structure.optimizer, type(self._inner).__name__
        if saved != own and not {saved, own} <= _ADAMS:
            raise CheckpointLayoutError(
                f"it was trained by {saved}, and this job has {own}, whose states differ: use {saved}, or load the "
                "weights alone (load_optimizer_states=False)"
            )
        for rows in self._vectors():
            self._states_of(rows)

    def copy(self) -> None:
        """Copy this rank's part of everything into the optimizer's memory and, what is not trained, into the module."""
        with torch.no_grad():
            for row in self._rows:
                self._copy_weight(row)
            for rows in self._vectors() if self._has_states else ():
                self._copy_states(rows)
            saved = self._buffers()
            for local, buffer in self._engine.module.named_buffers():
                if (value := saved.get(self._buffer_names[local])) is not None:
                    buffer.copy_(value)
        if self._has_states:
            self._restore_groups()

    def finish(self) -> None:
        """Copy the optimizer's weights into the module; collective over the ranks of the engine."""
        update_weights(self._engine, self._trained)

    def _read(self, row: Row, key: str, start: int, stop: int) -> torch.Tensor:
        own = row.named.slice
        place, slices = (own.place, own.slices) if row.saved.is_stacked else (self._place, self._slices)
        return self._source.elements(row.saved.name, key, place, slices, start, stop)

    def _copy_weight(self, row: Row) -> None:
        parameter: Any = row.named.parameter
        key = MASTER if self._has_states else WEIGHT  # also for what is frozen here, and may be more precise
        if row.trained is not None:
            place = row.trained
            if place.numel:
                into = place.part_of(place.master)
                into.copy_(self._read(row, key, place.start, place.start + place.numel).view(into.shape))
        elif hasattr(parameter, "ds_tensor"):
            start, numel = span_of_zero_3(parameter)
            parameter.ds_tensor.view(-1)[:numel].copy_(self._read(row, key, start, start + numel))
        else:
            parameter.copy_(self._read(row, key, 0, parameter.numel()).view(parameter.shape))

    def _copy_states(self, rows: Sequence[Row]) -> None:
        assert self._inner is not None
        assert rows[0].trained is not None
        master, states = rows[0].trained.master, self._states_of(rows)
        own = self._inner.state[master] if states else self._inner.state.get(master, {})
        for key in own.keys() - states.keys():
            del own[key]
        for key, kind in states.items():
            if not isinstance(kind, torch.dtype):
                own[key] = kind.clone() if torch.is_tensor(kind) else kind
                continue
            known = own.get(key)
            if not torch.is_tensor(known) or (known.shape, known.dtype) != (master.shape, kind):
                own[key] = torch.zeros_like(master, dtype=kind, requires_grad=False)
            else:
                known.zero_()  # what no parameter fills is padding, or new
            for row in rows:
                place = row.trained
                if row.has_states and place is not None and place.numel:
                    into = place.part_of(own[key])
                    into.copy_(self._read(row, key, place.start, place.start + place.numel).view(into.shape))

    def _restore_groups(self) -> None:
        """Restore hyperparameters: those that groups of this engine share with the saved groups of their parameters.

        If one saved group has become several, they keep what distinguishes them.
        """
        assert self._inner is not None
        sources: list[list[dict[str, Any]]] = [[] for _ in self._inner.param_groups]
        for row in self._rows:
            if row.trained is not None and row.has_states:
                group, _ = self._source.of_parameter(row.saved.name)
                if not any(group is known for known in sources[row.trained.group]):
                    sources[row.trained.group].append(group)
        own = [{**group, **_NAMES_OF_GROUPS} for group in self._inner.param_groups]
        for number, (group, found) in enumerate(zip(self._inner.param_groups, sources, strict=True)):
            related = [own[other] for other, there in enumerate(sources) if _share(there, found) and other != number]
            kept = {
                key
                for other in related
                for key in own[number]
                if differing({key: own[number][key]}, {key: other.get(key)})
            }
            for saved in found[:1]:
                differ = {
                    key for other in found for key in saved if differing({key: saved[key]}, {key: other.get(key)})
                }
                restore_hyperparameters(group, {key: value for key, value in saved.items() if key not in kept | differ})


def opened_for(
    engine: DeepSpeedEngine,
    meeting: Meeting,
    path: Path,
    rename: Rename = None,
    *,
    is_plain: bool = False,
    has_states: bool,
    is_strict: bool,
) -> tuple[Source, EngineFilling]:
    """Open a checkpoint and compare it with the engines of all ranks; nothing is changed. Collective.

    Args:
        engine: the engine.
        meeting: the operation of all ranks.
        path: the checkpoint's own folder; or plain weights.
        rename: from the engine's names to those of plain weights.
        is_plain: the path has plain weights.
        has_states: whether the optimizer's states are to be loaded, too.
        is_strict: refuse parameters and buffers that only one of them has; otherwise rank 0 warns.

    Raises:
        CheckpointLayoutError: the layout cannot be reached; the same on every rank, like the following ones.
        CheckpointModelError: it is of another model.
        CheckpointError: the folder is not visible here.
    """
    layout, (stage, _, slices) = facts.layout_of(engine), facts.stage_and_slice(engine)

    sources: list[Source] = []  # on rank 0, which opens it to plan

    def plan(posted: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any]:
        structure = facts.whole_structure(posted)
        if structure is None:
            raise CheckpointLayoutError(
                "no rank of this job describes the structure of its model. Convert the checkpoint by "
                "ds-topo convert, and load the new one"
            )
        sources.append(source := opened_source(structure))
        if is_plain:
            require_splits(source.model, slices)
        else:
            require_loadable(source.model, layout, structure, slices, has_states=has_states)
        source.require_equal_copies(slices, has_states=has_states)
        return asdict(structure)

    def opened_source(structure: SavedStructure) -> Source:
        if is_plain:
            return _plain_weights(engine, path, rename, structure)
        if (manifest := folders.manifest_of(path)) is None:
            saved = layout_of_files(path, facts.name_of_optimizer(engine))
            manifest = manifest_of_files(path, saved, structure)
        return Source(model_of(manifest, structure.splits), path)

    structure = structure_from(meeting.decided_from("plan", facts.share_of_structure(engine), plan))

    def compare() -> tuple[Source, EngineFilling, Comparison]:
        _require_visible(path)
        source = sources[0] if sources else opened_source(structure)
        filling = EngineFilling(engine, source, rename, has_states=has_states)
        return source, filling, filling.compare()

    source: Source
    filling: EngineFilling
    source, filling, comparison = meeting.step("compared", compare)
    digests = facts.digests_of_buffers(engine) if slices != source.model.slices else {}

    where = f"the checkpoint {path.name!r} of {path.parent}"
    judge = partial(_judged, source, where, is_strict=is_strict)
    said = meeting.decided_from("difference", (asdict(comparison), stage, digests), judge)
    if said and dist.get_rank() == 0:
        warnings.warn(f"{where} was loaded although {said}", RuntimeWarning, stacklevel=4)
    return source, filling


def _judged(source: Source, where: str, posted: list[Any], *, is_strict: bool) -> str:
    """Judge the comparisons of all ranks on rank 0; return the differences that are tolerated.

    Raises:
        CheckpointModelError, CheckpointLayoutError: the checkpoint does not fit.
    """
    rows = [Comparison(**row) for row, _, _ in posted]
    names = {name for row in rows for name in row.names}
    added = {name: said for row in rows for name, said in row.added.items()}
    there: dict[str, Any] = {**source.model.parameters, **dict(source.buffers())}
    left_out = [
        f"it has {name!r} {list(one.shape)}, which the model does not have"
        for name, one in there.items()
        if name not in names
    ]
    unlike = next((row.problem for row in rows if row.problem), "")
    if unlike or (is_strict and (added or left_out)):
        problem = unlike or next(iter(added.values()), "") or left_out[0]
        raise CheckpointModelError(
            f"{where} is of another model: {problem}. Build the model and freeze its parameters as when it was saved"
            + ("" if unlike else ", or load what both have (load_module_strict=False)")
        )
    if conflict := next((row.conflict for row in rows if row.conflict), ""):
        raise CheckpointLayoutError(f"{where}: {conflict}")
    known: dict[tuple[int, str], str] = {}
    for _, stage, digests in posted:
        for name, digest in digests.items():
            if known.setdefault((stage, name), digest) != digest:
                raise CheckpointLayoutError(
                    f"the buffer {name!r} differs between slices of this job, and the checkpoint of "
                    f"model={source.model.slices} has one value for all of its slices: set partition_dim on it, after "
                    "deepspeed.initialize, if slices split it. Register one that follows from the slice itself with "
                    "persistent=False"
                )
    return "; ".join([*added.values(), *left_out])


def _plain_weights(engine: DeepSpeedEngine, path: Path, rename: Rename, structure: SavedStructure) -> WeightFiles:
    """Open plain weights, with the structure of this job under the names of the files."""
    new_names, splits = renaming(rename), structure.splits
    splits = {**splits, **{alias: splits[name] for alias, name in structure.aliases.items() if name in splits}}
    renamed = replace(
        structure,
        splits={new: split for name, split in splits.items() for new in new_names(name)},
        undeclared=tuple(new for name in structure.undeclared for new in new_names(name)),
        aliases={},
    )
    return WeightFiles(path, renamed, set(names_of_buffers(engine, rename).values()))


def _require_visible(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is not visible here, but all ranks must share its file system")


def _share(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    return any(left is right for left in one for right in other)
