"""Copy the weights and optimizer states of a checkpoint into a live engine of any layout, by name.

Both sides are tables of the whole model: :mod:`~ds_topo.checkpoint.engine_state` says which elements of which parameter
each piece of the engine's memory holds, and a source reads any elements of any parameter. Every rank reads its own
elements. Nothing is written to the disk.

:class:`EngineFilling` first compares the two, so that all ranks refuse before the engine changes, and then copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint.deepspeed_reader import FLAT_OPTIMIZER, DeepSpeedFiles, differing
from ds_topo.checkpoint.engine_state import (
    Named,
    Rename,
    named_buffers,
    named_parameters,
    renaming,
    restore_hyperparameters,
    update_weights,
)
from ds_topo.checkpoint.manifest import BF16_OPTIMIZER, SavedLayout, SavedStructure, built_from
from ds_topo.checkpoint.rank_zero import Meeting
from ds_topo.checkpoint.saved_model import (
    Parameter,
    WholeModel,
    has_placeholders,
    model_of,
    require_splits,
    starred,
)
from ds_topo.checkpoint.table import MASTER, WEIGHT
from ds_topo.checkpoint.without_manifest import WeightFiles, layout_of_files, manifest_of_files
from ds_topo.errors import CheckpointError, CheckpointLayoutError, CheckpointModelError, listed, warn

_ADAMS = {"Adam", "AdamW", "DeepSpeedCPUAdam"}
"""Optimizers that keep the same states in the same way."""
_HALF_OPTIMIZERS = (FLAT_OPTIMIZER, "FP16_UnfusedOptimizer")
"""DeepSpeed's optimizers for half precision without ZeRO, fp16 and bf16."""
_OPTIMIZERS = {
    0: (BF16_OPTIMIZER, *_HALF_OPTIMIZERS),
    1: ("DeepSpeedZeroOptimizer", BF16_OPTIMIZER),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}
"""DeepSpeed's optimizers by ZeRO stage; without ZeRO in fp32 it is the program's own."""
_BUILD_ALIKE = "Build the model and freeze its parameters as when it was saved"


@dataclass(frozen=True, eq=False)
class Row:
    """A parameter of this rank that the checkpoint has."""

    saved: Parameter
    named: Named
    has_states: bool
    """True if the optimizer has trained it in both jobs."""


class EngineFilling:
    """A copy from a checkpoint into an engine.

    Args:
        engine: the engine.
        source: the open checkpoint.
        rename: from the engine's names to those of the checkpoint, if it is of another program.
        has_states: copy the optimizer's states, too, and not weights alone.
    """

    def __init__(
        self, engine: DeepSpeedEngine, source: DeepSpeedFiles, rename: Rename = None, *, has_states: bool = False
    ) -> None:
        self._engine, self._source = engine, source
        _, self._place, self._slices = facts.stage_and_slice(engine)
        self._inner = facts.inner_optimizer(engine)
        self._has_states = has_states and self._inner is not None
        self._named = named_parameters(engine, rename)
        self._buffers = named_buffers(engine, rename)
        self._rows: list[Row] = []

    def compare(self) -> tuple[list[str], dict[str, str]]:
        """Compare this rank's parameters, buffers and states with the checkpoint.

        Returns:
            The names, in the checkpoint, of what it will copy; and what strict loading refuses, by name: parameters and
            buffers without a value, or without states.

        Raises:
            CheckpointModelError: something differs that cannot be loaded.
            CheckpointLayoutError: this engine cannot hold the checkpoint's states.
        """
        names: list[str] = []
        added: dict[str, str] = {}
        parameters, aliases = self._source.model.parameters, self._source.model.structure.aliases
        experts = facts.experts_of(self._engine.module)
        for named in self._named:
            first, shape = named.names[0], facts.shape_of(named.parameter)
            wanted = dict.fromkeys(aliases.get(name, name) for name in named.names)
            found = [parameters[name] for name in wanted if name in parameters]
            if not found:
                added[first] = f"it has no parameter {first!r} {list(shape)}"
                continue
            count = int(experts[named.local].num_experts) if named.is_expert else 0
            self._require_equal(named, found, shape, count)
            names += [one.name for one in found]
            saved, is_trained = found[0], named.held.group is not None and named.parameter.requires_grad
            self._rows.append(Row(saved, named, is_trained and saved.is_trained))
            if self._has_states and is_trained and not saved.is_trained:
                added[saved.name] = f"{saved.name!r} is trained here and was frozen there, so it has no states"
        there = self._saved_buffers()
        for name, (buffer, *_) in self._buffers.items():
            if name not in there:
                added[name] = f"it has no buffer {name!r} {list(buffer.shape)}"
                continue
            names.append(name)
            self._require_shape(f"buffer {name!r}", there[name].shape, buffer.shape)
        if self._has_states:
            self._require_states_that_fit()
        return names, added

    def _require_equal(self, named: Named, found: Sequence[Parameter], shape: tuple[int, ...], experts: int) -> None:
        """Raise CheckpointModelError unless a parameter has the shape of those in the checkpoint, which are equal."""
        saved, slices = found[0], named.slice.slices if found[0].is_stacked else self._slices
        if saved.experts != experts:
            raise self._of_another_model(
                f"{saved.name!r} has {saved.experts} experts in the checkpoint, and {experts} in the model"
            )
        self._require_shape(f"parameter {saved.name!r}", saved.shape_of_slice(slices), shape)
        for other in found[1:]:
            if saved.shape != other.shape or not torch.equal(*map(self._weight_of_slice, (saved, other))):
                raise self._of_another_model(
                    f"{saved.name!r} and {other.name!r} differ, and are one parameter in the model"
                )

    def _require_shape(self, what: str, saved: Sequence[int], own: Sequence[int]) -> None:
        if tuple(saved) != tuple(own):
            raise self._of_another_model(
                f"{what} is {list(saved)} in the checkpoint ({self._slices} slices), not {list(own)}"
            )

    def _of_another_model(self, problem: str) -> CheckpointModelError:
        return CheckpointModelError(f"{_name_of(self._source)} is of another model: {problem}. {_BUILD_ALIKE}")

    def _weight_of_slice(self, one: Parameter) -> torch.Tensor:
        return self._source.elements(one.name, WEIGHT, self._place, self._slices, 0, one.numel_of_slice(self._slices))

    def _saved_buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._source.buffers(self._slices, self._place))

    def _vectors(self) -> list[list[Row]]:
        """Return the rows that share a tensor of the optimizer."""
        found: dict[int, list[Row]] = {}
        for row in self._rows:
            if row.named.held.group is not None:
                found.setdefault(id(row.named.held.master), []).append(row)
        return list(found.values())

    def _states_of(self, rows: Sequence[Row]) -> dict[str, Any]:
        return self._source.states_of(row.saved.name for row in rows if row.has_states)

    def _require_states_that_fit(self) -> None:
        """Raise CheckpointLayoutError if this optimizer cannot hold the saved states."""
        saved, own = self._source.model.structure.optimizer, type(self._inner).__name__
        if saved != own and not {saved, own} <= _ADAMS:
            raise CheckpointLayoutError(
                f"{_name_of(self._source)} was trained by {saved}, and this job has {own}, whose states differ: use "
                f"{saved}, or load the weights alone (load_optimizer_states=False)"
            )
        for rows in self._vectors():
            self._states_of(rows)

    def copy(self) -> None:
        """Copy this rank's part of everything into the optimizer's memory and, what is not trained, into the module."""
        with torch.no_grad():
            for row in self._rows:
                # a master weight also of what is frozen here: it may be more precise
                self._read(row, MASTER if self._has_states else WEIGHT, row.named.held.master)
            for rows in self._vectors() if self._has_states else ():
                self._copy_states(rows)
            saved = self._saved_buffers()
            for name, (buffer, *_) in self._buffers.items():
                if name in saved:
                    buffer.copy_(saved[name])
        if self._has_states:
            self._restore_groups()

    def finish(self) -> None:
        """Copy the optimizer's weights into the module; collective over the ranks of the engine."""
        update_weights(self._engine, self._named)

    def _read(self, row: Row, key: str, tensor: torch.Tensor) -> None:
        """Read this rank's elements of a weight or state into a tensor with the layout of the parameter's values."""
        own, held = row.named.slice, row.named.held
        place, slices = (own.place, own.slices) if row.saved.is_stacked else (self._place, self._slices)
        if held.numel:
            into, stop = held.part_of(tensor), held.start + held.numel
            into.copy_(self._source.elements(row.saved.name, key, place, slices, held.start, stop).view(into.shape))

    def _copy_states(self, rows: Sequence[Row]) -> None:
        assert self._inner is not None
        master, states = rows[0].named.held.master, self._states_of(rows)
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
                if row.has_states:
                    self._read(row, key, own[key])

    def _restore_groups(self) -> None:
        """Restore hyperparameters: those that groups of this engine share with the saved groups of their parameters.

        If one saved group has become several, they keep what distinguishes them.
        """
        assert self._inner is not None
        own = [dict(group) for group in self._inner.param_groups]
        sources: list[dict[int, dict[str, Any]]] = [{} for _ in own]
        for row in self._rows:
            number = row.named.held.group
            if number is not None and row.has_states:
                group, _ = self._source.of_parameter(row.saved.name)
                sources[number][id(group)] = group
        for group, found in zip(self._inner.param_groups, sources, strict=True):
            beside = [other for other, there in zip(own, sources, strict=True) if found.keys() & there.keys()]
            for saved in list(found.values())[:1]:
                are_alike = {key: _agree(key, beside) and _agree(key, [*found.values()]) for key in saved}
                restore_hyperparameters(group, {key: value for key, value in saved.items() if are_alike[key]})


def _agree(key: str, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if groups of an optimizer have the same value of a hyperparameter."""
    return not any(differing({key: one.get(key)}, {key: groups[0].get(key)}) for one in groups[1:])


def opened_for(
    engine: DeepSpeedEngine,
    meeting: Meeting,
    path: Path,
    rename: Rename = None,
    *,
    is_plain: bool = False,
    has_states: bool,
    is_strict: bool,
) -> tuple[DeepSpeedFiles, EngineFilling]:
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

    sources: list[DeepSpeedFiles] = []  # on rank 0, which opens it to plan

    def plan(posted: Sequence[Mapping[str, Any] | None]) -> Mapping[str, Any]:
        structure = facts.whole_structure(posted)
        sources.append(source := opened_source(structure))
        if is_plain:
            require_splits(source.model, slices)
        else:
            require_reachable(source.model, layout, structure, has_states=has_states)
        source.require_equal_copies(slices, has_states=has_states)
        return asdict(structure)

    def opened_source(structure: SavedStructure) -> DeepSpeedFiles:
        if is_plain:
            return _plain_weights(engine, path, rename, structure)
        if (manifest := folders.manifest_of(path)) is None:
            saved = layout_of_files(path, facts.name_of_optimizer(engine))
            manifest = manifest_of_files(path, saved, structure)
        return DeepSpeedFiles(model_of(manifest, structure.splits), path)

    decided = meeting.decided_from("plan", facts.share_of_structure(engine), plan)
    structure: SavedStructure = built_from(SavedStructure, decided)

    def compare() -> tuple[DeepSpeedFiles, EngineFilling, tuple[list[str], dict[str, str]]]:
        if not path.exists():
            raise CheckpointError(f"{path} is not visible here, but all ranks must share its file system")
        source = sources[0] if sources else opened_source(structure)
        filling = EngineFilling(engine, source, rename, has_states=has_states)
        return source, filling, filling.compare()

    source, filling, (names, added) = meeting.step("compared", compare)
    digests = facts.digests_of_buffers(engine) if slices != source.model.slices else {}
    judge = partial(_judged, source, is_strict=is_strict)
    said = meeting.decided_from("difference", (names, added, stage, digests), judge)
    if said and dist.get_rank() == 0:
        warn(f"{_name_of(source)} was loaded although {said}")
    return source, filling


def _name_of(source: DeepSpeedFiles) -> str:
    return f"the checkpoint {source.folder.name!r} of {source.folder.parent}"


def _judged(source: DeepSpeedFiles, posted: list[Any], *, is_strict: bool) -> str:
    """Judge the comparisons of all ranks on rank 0; return the differences that are tolerated.

    Raises:
        CheckpointModelError, CheckpointLayoutError: the checkpoint does not fit.
    """
    where, copied = _name_of(source), {name for names, *_ in posted for name in names}
    there: dict[str, Any] = {**source.model.parameters, **dict(source.buffers())}
    differences = {name: text for _, added, *_ in posted for name, text in added.items()} | {
        name: f"it has {name!r} {list(one.shape)}, which the model does not have"
        for name, one in there.items()
        if name not in copied
    }
    if is_strict and differences:
        raise CheckpointModelError(
            f"{where} is of another model: {next(iter(differences.values()))}. {_BUILD_ALIKE}, or load what both have "
            "(load_module_strict=False)"
        )
    known: dict[tuple[int, str], str] = {}
    for *_, stage, digests in posted:
        for name, digest in digests.items():
            if known.setdefault((stage, name), digest) != digest:
                raise CheckpointLayoutError(
                    f"the buffer {name!r} differs between slices of this job, and the checkpoint of "
                    f"model={source.model.slices} has one value for all of its slices: set partition_dim on it, after "
                    "deepspeed.initialize, if slices split it. Register one that follows from the slice itself with "
                    "persistent=False"
                )
    return "; ".join(differences.values())


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
    return WeightFiles(path, renamed, named_buffers(engine, rename).keys())


# -- what cannot be loaded ---------------------------------------------------------------------------------------------


def require_reachable(model: WholeModel, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
    """Check that a layout can be reached.

    Args:
        model: model of the checkpoint.
        layout: the new layout.
        structure: structure of the model there.
        has_states: whether the optimizer's states are converted, too.

    Raises:
        CheckpointLayoutError: the message says why not, and what to do.
    """
    if problem := next(_problems(model, layout, structure, has_states), ""):
        raise CheckpointLayoutError(f"the checkpoint of {model.layout} cannot be converted: {problem}")
    require_splits(model, layout.degrees().get("model", 1))


def _problems(model: WholeModel, layout: SavedLayout, structure: SavedStructure, has_states: bool) -> Iterator[str]:
    """Yield why a layout cannot be reached."""
    saved, was = model.layout, model.structure
    kinds = {True: "a PipelineModule", False: "a plain engine"}
    if any(has_placeholders(groups) for groups in structure.groups):
        yield (
            "a stage here has no trainable parameter in a group of the optimizer. Give each stage one, or load the "
            "checkpoint in the layout that saved it"
        )
    if layout.is_pipeline != saved.is_pipeline:
        yield (
            f"{kinds[saved.is_pipeline]} became {kinds[layout.is_pipeline]}, whose parameters have other names. Save "
            "it by TorchState(engine, rename=...), and load it by load_torch"
        )
    if len(structure.layers) != len(was.layers):
        yield (
            f"its pipeline has {len(was.layers)} layers, and this one has {len(structure.layers)}: only the same model "
            "can continue from it. Build the model with as many layers"
        )
    if structure.experts.keys() != was.experts.keys():
        yield (
            f"it has experts {listed(sorted(was.experts), 2)}, and this job {listed(sorted(structure.experts), 2)}: "
            "only the same model can continue from it"
        )
    if saved.zero_stage == 3 and any(one.is_stacked for one in model.parameters.values()):
        yield (
            "the experts of AutoEP are in partitions of ZeRO 3, which only the topology that saved them can read. Save "
            "and load in torch's format (TorchState), or convert it by python -m deepspeed.checkpoint.ds_to_universal"
        )
    are_split = [{groups.tensor_parallel for groups in one.experts} for one in (saved, layout)]
    if model.experts and are_split[0] != are_split[1]:
        yield (
            "experts are tensor parallel either in the checkpoint or in this job, and not in the other: both must "
            "agree. Set enable_expert_tensor_parallelism as it was when the checkpoint was saved"
        )
    if has_states:
        yield from _problems_of_states(model, layout, structure)


def _problems_of_states(model: WholeModel, layout: SavedLayout, structure: SavedStructure) -> Iterator[str]:
    """Yield why the saved states of the optimizer are unknown, or meaningless in a layout."""
    saved, was = model.layout, model.structure
    known = [*([was.optimizer] if not saved.zero_stage else []), *_OPTIMIZERS[saved.zero_stage]]
    if saved.optimizer is None:
        yield "it was saved without an optimizer. Load its weights alone (load_optimizer_states=False)"
    elif saved.optimizer not in known:
        yield (
            f"the format of {saved.optimizer} at ZeRO {saved.zero_stage} is not known; that of "
            f"{' and '.join(map(str, known))} is"
        )
    names = set(map(starred, model.parameters))
    in_optimizer = dict.fromkeys(name for stage in was.groups for group in stage for name in group)
    if left_out := [name for name in in_optimizer if starred(name) not in names]:
        yield (
            f"{listed(left_out, 3)} are in the optimizer and were left out of the checkpoint "
            "(exclude_frozen_parameters): freeze parameters before deepspeed.initialize, or save them, too"
        )
    if problem := why_layouts_differ(saved, layout, structure):
        yield problem


def why_layouts_differ(saved: SavedLayout, layout: SavedLayout, structure: SavedStructure) -> str:
    """Say why the optimizer of a job would train differently than in the layout that saved its states; empty if not."""
    uses_partitions = layout.has_partitions or saved.has_partitions
    degrees = [one.degrees().get("model", 1) for one in (saved, layout)]
    if structure.is_by_element or (not uses_partitions and degrees[0] == degrees[1]):
        return ""
    own = structure.optimizer or "the program's optimizer"
    return (
        f"{own} is not known to update each element by its own gradient and states alone. Its updates may depend on "
        "the partitions of ZeRO and on the shapes of slices, so that a job of another layout would train differently. "
        "Load the checkpoint in the layout that saved it, or its weights alone (load_optimizer_states=False). If it "
        "does update each element alone, set is_element_by_element = True on its class"
    )
