"""Load a checkpoint of any layout, in any format, into a live engine of any layout, by name.

Both sides are tables of the whole model: :mod:`~ds_topo.checkpoint.engine_state` says which elements of which parameter
each piece of the engine's memory holds, and a :class:`Source` reads any elements of any parameter: DeepSpeed's files
(``deepspeed_reader``), plain weights (``plain_weights``), or torch's format (``torch_format``). Every rank reads its
own elements. Nothing is written to the disk.

:func:`load_into` first compares the two, so that all ranks refuse before the engine changes. :class:`Loader` then
copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.base.marks import inner_optimizer
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.engine_state import (
    Named,
    NamedBuffer,
    Rename,
    named_buffers,
    named_parameters,
    restore_hyperparameters,
    update_weights,
)
from ds_topo.checkpoint.manifest import (
    BF16_OPTIMIZER,
    FLAT_OPTIMIZER,
    SavedLayout,
    SavedSplit,
    SavedStructure,
    built_from,
    whole_structure,
)
from ds_topo.checkpoint.meeting import Meeting
from ds_topo.checkpoint.saved_model import WholeModel, WholeParameter, has_placeholders, require_split, require_splits
from ds_topo.checkpoint.table import BUFFER, MASTER, WEIGHT, head_of, starred
from ds_topo.errors import CheckpointLayoutError, CheckpointModelError, abridged, listed, warn
from ds_topo.topology.axes import MODEL

_ADAMS = {"Adam", "AdamW", "DeepSpeedCPUAdam"}
"""Optimizers that keep the same states in the same way."""
_OPTIMIZERS = {
    0: (BF16_OPTIMIZER, FLAT_OPTIMIZER, "FP16_UnfusedOptimizer"),
    1: ("DeepSpeedZeroOptimizer", BF16_OPTIMIZER),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}
"""DeepSpeed's optimizers by ZeRO stage; without ZeRO in fp32 it is the program's own."""
_BUILD_ALIKE = "Build the model and freeze its parameters as when it was saved"


# -- where elements come from ------------------------------------------------------------------------------------------


class ReadRequest(NamedTuple):
    """Elements of a slice of a parameter's weight or state, or a buffer, and the memory that gets them."""

    name: str
    """The name in the checkpoint."""
    key: str
    """:data:`WEIGHT`, :data:`MASTER`, :data:`BUFFER` or the key of a state."""
    place: int
    """The number of the slice."""
    slices: int
    start: int
    """The first element of the flattened slice."""
    into: torch.Tensor


class Source(ABC):
    """An open checkpoint of a whole model, from which a :class:`Loader` reads; ``where`` is its name in messages."""

    in_part = ", or load what both have (load_module_strict=False)"
    """The call that loads a checkpoint of which only a part fits, for messages."""

    def __init__(self, model: WholeModel, where: str) -> None:
        self.model, self.where = model, where

    @abstractmethod
    def tensors(self) -> Mapping[str, Sequence[int]]:
        """Return the shape of each parameter and buffer; used on rank 0."""

    def called(self, name: str) -> str:
        """Return how messages call a parameter."""
        return f"parameter {name!r}"

    @abstractmethod
    def shape_of_buffer(self, name: str, place: int, slices: int) -> Sequence[int] | None:
        """Return the shape of one of ``slices`` slices of a buffer; None if there is no such buffer."""

    @abstractmethod
    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the hyperparameters of a parameter's group, and its states.

        A state of every element is given by its data type. The states of a parameter without gradients are empty.

        Raises:
            CheckpointModelError, CheckpointLayoutError: a state is missing, or has a shape that cannot be loaded.
        """

    def group_of(self, name: str) -> dict[str, Any]:
        """Return the hyperparameters of a parameter's group: one object for all parameters of the group."""
        return self.of_parameter(name)[0]

    @abstractmethod
    def read(self, wanted: Sequence[ReadRequest]) -> None:
        """Read elements. Nothing else is read."""

    @abstractmethod
    def require_reachable(self, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
        """Raise CheckpointLayoutError unless a new layout can be reached, in which the model has a given structure."""


def model_of_whole(
    shapes: Mapping[str, tuple[Sequence[int], torch.dtype]],
    named: Iterable[Named],
    buffers: Mapping[str, NamedBuffer],
) -> WholeModel:
    """Return the model of a checkpoint of whole parameters by name, as far as this rank needs them.

    ``shapes`` has the shape and the type of each tensor in the checkpoint.
    """
    parameters: dict[str, WholeParameter] = {}
    for one in named:
        is_stacked = one.is_expert and not head_of(one.local)
        split = SavedSplit(0) if is_stacked else one.split
        for name in (name for name in one.names if name in shapes):
            shape, dtype = tuple(shapes[name][0]), shapes[name][1]
            own = split if split is not None and split.dim < len(shape) else None
            found = WholeParameter(name, shape, dtype, True, own, 1, experts=one.experts, is_stacked=is_stacked)
            padded = own.padded if own is not None and own.padded not in (None, found.size) else None
            parameters[name] = replace(found, padded=padded)
    slices = ((name, one.slice) for name, one in buffers.items())
    splits = {name: SavedSplit(one.dim, one.stride) for name, one in slices if one.dim is not None}
    structure = SavedStructure(None, (), splits)
    return WholeModel(parameters, structure, SavedLayout("data=1", 1, 1, 1, 0, None, "fp32"))


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first key whose values differ, abridged for a message; an empty string if none does."""
    for key in {**one, **other}:
        value, there = one.get(key), other.get(key)
        alike = torch.equal(value, there) if torch.is_tensor(value) and torch.is_tensor(there) else value == there
        if not alike or (key in one) != (key in other):
            return abridged(key)
    return ""


# -- the loader --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MatchedParameter:
    """A parameter of this rank that the checkpoint has."""

    saved: WholeParameter
    named: Named
    place: int
    slices: int
    has_states: bool
    """True if the optimizer has trained it in both jobs."""

    def wanted(self, key: str, tensor: torch.Tensor) -> Iterator[ReadRequest]:
        """Yield this rank's elements of a weight or state, for a tensor with the layout of the parameter's values."""
        held = self.named.held
        if held.numel:
            yield ReadRequest(self.saved.name, key, self.place, self.slices, held.start, held.part_of(tensor))


class Loader:
    """A copy from a checkpoint into an engine, whose parameters and buffers have their names in the checkpoint."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        source: Source,
        named: Sequence[Named],
        buffers: Mapping[str, NamedBuffer],
        *,
        has_states: bool,
    ) -> None:
        self._engine, self.source, self._named, self._buffers = engine, source, named, buffers
        _, self._place, self._slices = facts.stage_and_slice(engine)
        self._inner = inner_optimizer(engine)
        self._has_states = has_states and self._inner is not None
        self._rows: list[MatchedParameter] = []

    def compare(self) -> tuple[list[str], dict[str, str]]:
        """Compare this rank's parameters, buffers and states with the checkpoint; raise if they cannot be loaded.

        Returns:
            The names of the model that this rank reports (slices and replicas share this work); and what strict loading
            refuses, by name: parameters and buffers that the checkpoint does not have, or that it has no states for.
        """
        names: list[str] = []
        added: dict[str, str] = {}
        parameters, aliases = self.source.model.parameters, self.source.model.structure.aliases
        is_first = facts.replica_of(self._engine) == 0 and self._place == 0
        for named in self._named:
            first, shape = named.names[0], facts.shape_of(named.parameter)
            wanted = dict.fromkeys(aliases.get(name, name) for name in named.names)
            names += wanted if is_first or named.is_expert else ()
            found = [parameters[name] for name in wanted if name in parameters]
            if not found:
                added[first] = f"it has no {self.source.called(first)} {list(shape)}"
                continue
            saved, is_trained = found[0], named.held.group is not None and named.parameter.requires_grad
            own = named.slice
            place, slices = (own.place, own.slices) if saved.is_stacked else (self._place, self._slices)
            row = MatchedParameter(saved, named, place, slices, is_trained and saved.is_trained)
            self._require_equal(row, found, shape)
            self._rows.append(row)
            if self._has_states and is_trained and not saved.is_trained:
                added[saved.name] = f"{saved.name!r} is trained here and was frozen there, so it has no states"
        for name, (buffer, _, is_expert) in self._buffers.items():
            names += [name] if is_first or is_expert else []
            there = self.source.shape_of_buffer(name, self._place, self._slices)
            if there is None:
                added[name] = f"it has no buffer {name!r} {list(buffer.shape)}"
            else:
                self._require_shape(f"buffer {name!r}", there, buffer.shape)
        if self._has_states:
            self._require_states_that_fit()
        return names, added

    def _require_equal(self, row: MatchedParameter, found: Sequence[WholeParameter], shape: tuple[int, ...]) -> None:
        """Raise CheckpointModelError unless a parameter has the shape of those in the checkpoint, which are equal."""
        saved = row.saved
        if row.named.experts != saved.experts:
            raise self._of_another_model(
                f"{saved.name!r} has {saved.experts} experts in the checkpoint, and {row.named.experts} in the model"
            )
        require_split(saved, row.slices)
        self._require_shape(self.source.called(saved.name), saved.shape_of_slice(row.slices), shape, saved.shape)
        held = row.named.held
        for other in found[1:]:
            weights = [torch.empty(held.numel, dtype=saved.dtype) for _ in range(2)]
            names = (saved.name, other.name)
            if saved.shape == other.shape and held.numel:
                rows = zip(names, weights, strict=True)
                self.source.read(
                    [ReadRequest(name, WEIGHT, row.place, row.slices, held.start, one) for name, one in rows]
                )
            if saved.shape != other.shape or not torch.equal(*weights):
                raise self._of_another_model(
                    f"{saved.name!r} and {other.name!r} differ, and are one parameter in the model"
                )

    def _require_shape(
        self, what: str, saved: Sequence[int], own: Sequence[int], whole: Sequence[int] | None = None
    ) -> None:
        """Raise CheckpointModelError if this rank's shape is not the saved one, which may be a slice of a whole one."""
        if tuple(saved) != tuple(own):
            there, here = list(saved if whole is None else whole), list(own)
            cut = f", which {self._slices} slices hold as {list(saved)} each," if there != list(saved) else ""
            raise self._of_another_model(f"{what} is {there} in the checkpoint{cut} and {here} in the model")

    def _of_another_model(self, problem: str) -> CheckpointModelError:
        return CheckpointModelError(f"{self.source.where} is of another model: {problem}. {_BUILD_ALIKE}")

    def _vectors(self) -> list[list[MatchedParameter]]:
        """Return the rows that share a tensor of the optimizer."""
        found: dict[int, list[MatchedParameter]] = {}
        for row in self._rows:
            if row.named.held.group is not None:
                found.setdefault(id(row.named.held.master), []).append(row)
        return list(found.values())

    def _states_of(self, rows: Sequence[MatchedParameter]) -> dict[str, Any]:
        """Return the states that one tensor of the optimizer will have: those of the parameters that it has here.

        A state of every element is given by its data type. Parameters without states count as any others. If the states
        differ, CheckpointLayoutError is raised.
        """
        found, first = dict[str, Any](), ""
        own = [row for row in rows if row.named.held.numel] or rows
        for name in (row.saved.name for row in own if row.has_states):
            _, states = self.source.of_parameter(name)
            if found and states and states is not found and (key := differing(found, states)):
                raise CheckpointLayoutError(
                    f"{self.source.where}: {first!r} and {name!r} have different values or types of {key} in the "
                    "optimizer, which has one for both in this layout. Put the two into different groups of the "
                    "optimizer, or load the checkpoint in the layout that saved it"
                )
            if states and not found:
                found, first = states, name
        return found

    def _require_states_that_fit(self) -> None:
        saved, own = self.source.model.structure.optimizer, type(self._inner).__name__
        if saved not in (own, None) and not {saved, own} <= _ADAMS:
            raise CheckpointLayoutError(
                f"{self.source.where} was trained by {saved}, and this job has {own}, whose states differ: use "
                f"{saved}, or load the weights alone (load_optimizer_states=False)"
            )
        for rows in self._vectors():
            self._states_of(rows)

    def copy(self) -> None:
        """Copy this rank's part into the optimizer's memory, and parameters that are not trained into the module."""
        # a master weight also of what is frozen here: it may be more precise
        key = MASTER if self._has_states else WEIGHT
        wanted = [one for row in self._rows for one in row.wanted(key, row.named.held.master)]
        with torch.no_grad():
            for rows in self._vectors() if self._has_states else ():
                wanted += self._prepared_states(rows)
            for name, (buffer, *_) in self._buffers.items():
                if self.source.shape_of_buffer(name, self._place, self._slices) is not None:
                    wanted.append(ReadRequest(name, BUFFER, self._place, self._slices, 0, buffer.detach()))
            self.source.read(wanted)
        if self._has_states:
            self._restore_groups()

    def finish(self) -> None:
        """Copy the optimizer's weights into the module; collective over the ranks of the engine."""
        update_weights(self._engine, self._named)

    def _prepared_states(self, rows: Sequence[MatchedParameter]) -> Iterator[ReadRequest]:
        """Give a tensor of the optimizer its single values, and memory for its other states, which are then wanted."""
        assert self._inner is not None
        master, states = rows[0].named.held.master, self._states_of(rows)
        own = self._inner.state[master] if states else self._inner.state.get(master, {})
        for key in own.keys() - states.keys():
            del own[key]
        for key, kind in states.items():
            if not isinstance(kind, torch.dtype):
                own[key] = single_value(own.get(key), kind)
                continue
            known = own.get(key)
            if not torch.is_tensor(known) or (known.shape, known.dtype) != (master.shape, kind):
                own[key] = torch.zeros_like(master, dtype=kind, requires_grad=False)
            else:
                known.zero_()  # what no parameter fills is padding, or new
            for row in rows:
                if row.has_states:
                    yield from row.wanted(key, own[key])

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
                group = self.source.group_of(row.saved.name)
                sources[number].update({id(group): group} if group else {})
        for group, found in zip(self._inner.param_groups, sources, strict=True):
            beside = [other for other, there in zip(own, sources, strict=True) if found.keys() & there.keys()]
            for saved in list(found.values())[:1]:
                are_alike = {key: _agree(key, beside) and _agree(key, [*found.values()]) for key in saved}
                restore_hyperparameters(group, {key: value for key, value in saved.items() if are_alike[key]})


def _agree(key: str, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if groups of an optimizer have the same value of a hyperparameter."""
    return not any(differing({key: one.get(key)}, {key: groups[0].get(key)}) for one in groups[1:])


def single_value(known: Any, value: Any) -> Any:
    """Return a single value of a state, such as the step, as this optimizer keeps it: a number or a tensor.

    >>> single_value(torch.tensor(2.0), torch.tensor([5.0])), single_value(2, torch.tensor(5.0))
    (tensor(5.), 5)
    """
    if torch.is_tensor(known) and torch.is_tensor(value) and known.numel() == value.numel() == 1:
        return known.fill_(value.item())
    if type(known) in (int, float) and torch.is_tensor(value):
        return type(known)(value)
    return value.clone() if torch.is_tensor(value) else value


def load_into(
    engine: DeepSpeedEngine,
    meeting: Meeting,
    open_source: Callable[[SavedStructure, list[Named], dict[str, NamedBuffer]], Source],
    *,
    rename: Rename = None,
    has_states: bool,
    is_strict: bool = True,
) -> tuple[Any, Loader]:
    """Open a checkpoint and compare it with the engines of all ranks; nothing is changed. Collective.

    The loader that is returned copies. Errors are the same on every rank.

    Args:
        engine: the engine.
        meeting: the operation of all ranks.
        open_source: opens the checkpoint, for the structure of the whole model in this job, and for this rank's
            parameters and buffers.
        rename: from the engine's names to those of the checkpoint, if it is of another program.
        has_states: whether the optimizer's states are to be loaded, too.
        is_strict: refuse parameters and buffers that only one of them has; otherwise rank 0 warns.
    """
    layout, (stage, _, slices) = facts.layout_of(engine), facts.stage_and_slice(engine)
    shares = facts.share_of_structure(engine)
    decided = meeting.decided_from("structure", shares, lambda posted: asdict(whole_structure(posted)))
    structure: SavedStructure = built_from(SavedStructure, decided)

    def opened() -> Loader:
        named, buffers = named_parameters(engine, rename), named_buffers(engine, rename)
        source = open_source(structure, named, buffers)
        source.require_reachable(layout, structure, has_states=has_states)
        return Loader(engine, source, named, buffers, has_states=has_states)

    loader = meeting.step("opened", opened)
    source = loader.source

    def compared() -> tuple[Any, ...]:
        names, added = loader.compare()
        return names, added, stage, facts.digests_of_buffers(engine) if slices != source.model.slices else {}

    meeting.step("compared", compared, decide=partial(_judge, source, is_strict=is_strict))
    return source, loader


def _judge(source: Source, posted: list[Any], *, is_strict: bool) -> None:
    """Warn on rank 0 of differences between the checkpoint and all ranks that are tolerated, and raise for others."""
    known_names = {name for names, *_ in posted for name in names}
    differences = {name: text for _, added, *_ in posted for name, text in added.items()} | {
        name: f"it has {source.called(name).removeprefix('parameter ')} {list(shape)}, which the model does not have"
        for name, shape in source.tensors().items()
        if name not in known_names
    }
    if is_strict and differences:
        raise CheckpointModelError(
            f"{source.where} is of another model: {next(iter(differences.values()))}. {_BUILD_ALIKE}{source.in_part}"
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
    if differences:
        warn(f"{source.where} was loaded although {'; '.join(differences.values())}")


# -- what cannot be loaded ---------------------------------------------------------------------------------------------


def require_reachable(model: WholeModel, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
    """Raise CheckpointLayoutError unless a layout can be reached from that of a checkpoint's model."""
    if problem := next(_problems(model, layout, structure, has_states), ""):
        raise CheckpointLayoutError(f"the checkpoint of {model.layout} cannot be loaded into this layout: {problem}")
    require_splits(model, layout.degree(MODEL))


def _problems(model: WholeModel, layout: SavedLayout, structure: SavedStructure, has_states: bool) -> Iterator[str]:
    """Yield why a layout cannot be reached."""
    saved, was = model.layout, model.structure
    kinds = {True: "a PipelineModule", False: "a plain engine"}
    if has_placeholders(structure):
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
    if structure.is_by_element or (not uses_partitions and saved.degree(MODEL) == layout.degree(MODEL)):
        return ""
    own = structure.optimizer or "the program's optimizer"
    return (
        f"{own} is not known to update each element by its own gradient and states alone. Its updates may depend on "
        "the partitions of ZeRO and on the shapes of slices, so that a job of another layout would train differently. "
        "Load the checkpoint in the layout that saved it, or its weights alone (load_optimizer_states=False). If it "
        "does update each element alone, set is_element_by_element = True on its class"
    )
