"""Save and load engines through ``torch.distributed.checkpoint``, to and from any program.

Saving offers an engine in the shape of torch's ``get_state_dict``. For loading, :class:`TorchFiles` presents what any
program has saved to the loader of all formats (``by_name``). torch's reader reads what each rank needs into the memory
of the engine.

torch flattens nested dictionaries and joins their keys by dots. An optimizer has one of two forms:

=============================================  ======================================================================
``optim.state.layer.weight.exp_avg``           states, in both forms
``optim.param_groups.0.lr``, ``...0.params``   by group, with the names of its parameters: ``get_state_dict()``
``optim.param_groups.layer.weight.lr``         by parameter: with ``flatten_optimizer_state_dict=True``; torchtitan
=============================================  ======================================================================

Source: torch, ``distributed/checkpoint/state_dict.py``, and the guide "Getting Started with Distributed Checkpoint".
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from ds_topo.base.marks import inner_optimizer
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.by_name import ReadRequest, Source, load_into, model_of_whole, single_value, why_layouts_differ
from ds_topo.checkpoint.engine_state import (
    SCHEDULER,
    Named,
    NamedBuffer,
    PartOfTensor,
    Rename,
    begin_states,
    named_buffers,
    named_parameters,
    part_of,
    progress_of,
    restore_hyperparameters,
    restore_progress,
    update_weights,
)
from ds_topo.checkpoint.folder import check_folder, is_checkpoint, other_kind, tags_in
from ds_topo.checkpoint.manifest import SavedLayout, SavedStructure, built_from, whole_structure, why_unreachable
from ds_topo.checkpoint.meeting import Meeting
from ds_topo.checkpoint.safe_reading import check_metadata, reading_checkpoint
from ds_topo.checkpoint.table import BUFFER, MASTER, WEIGHT, boxes_in
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointModelError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    listed,
    warn,
)
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import gathered
from ds_topo.topology.axes import PIPE

_STATE, _GROUPS, PARAMS = "state", "param_groups", "params"
"""torch's own keys of an optimizer, and of the parameters of one of its groups."""
_MODEL, _OPTIM, _PROGRESS = "model", "optim", "deepspeed"
"""Our keys; the first two are those of torch's guides."""
_LAYOUT, _ORDER = "layout", "order"
"""Keys of the layout that saved, in the progress, and of a digest of the optimizer's order of parameters."""
_SUBJECT = "the engine's state for torch.distributed.checkpoint"
_MODELS = ("app.model", "model", "")
"""Keys of weights in torch's guides, in other programs, and in torchtitan."""
_COUNTS_OF_SCHEDULERS = ("last_epoch", "last_batch_iteration")
"""The attributes in which torch's and DeepSpeed's schedulers count steps."""
_OPTIMIZERS = ("app.optim", "optim", "app.optimizer", "optimizer")
"""The same for optimizers."""


# -- saving, and loading in place --------------------------------------------------------------------------------------


class TorchState:
    """An engine for ``torch.distributed.checkpoint``: a ``Stateful``, as torch's guides make one of a model.

    All ranks of the job save it together. Its names and shapes are those of the whole model, whatever the degrees and
    the stage of ZeRO; FSDP2 programs, single processes, and engines of other degrees read it by torch's own functions.
    Weights are master weights, in fp32, if the engine has them.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        rename: from the module's names of parameters to those of the other program: a function, or a mapping that may
            omit names that stay. A pipeline's are ``"3.weight"``, and ``"tied_modules.<key>.weight"`` if tied.
        flatten_optimizer_state_dict: as in torch's ``StateDictOptions``.

    Saving and loading, if both have the same parameters::

        dcp.save({"app": TorchState(engine)}, checkpoint_id=folder)
        dcp.load({"app": TorchState(engine)}, checkpoint_id=folder)
        saving = dcp.async_save({"app": TorchState(engine)}, checkpoint_id=folder)

    :func:`ds_topo.checkpoint.load_torch` loads the checkpoints of other programs.
    """

    def __init__(
        self, engine: DeepSpeedEngine, rename: Rename = None, *, flatten_optimizer_state_dict: bool = False
    ) -> None:
        facts.require_engine(engine)
        self.engine, self.rename, self.is_flat = engine, rename, flatten_optimizer_state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save or to load into: views of the engine's memory. Collective.

        Optimizer states that do not exist yet are created.

        Raises:
            CheckpointError: this kind of engine cannot be saved; raised on every rank before anything is written.
        """
        meeting = Meeting.begin(_SUBJECT, f"save, flatten_optimizer_state_dict={self.is_flat}")
        found = meeting.step("described", lambda: EngineState(self.engine, self.rename))
        share = facts.share_of_structure(self.engine)
        order = meeting.decided_from("order", share, lambda posted: _order_of(whole_structure(posted)))
        meeting.end()
        optim: dict[str, Any]
        if self.is_flat:
            states = found.states.items()
            optim = {f"{_STATE}.{name}.{key}": value for name, one in states for key, value in one.items()}
            for group in found.groups:
                for name in group[PARAMS]:
                    optim.update((f"{_GROUPS}.{name}.{key}", group[key]) for key in group if key != PARAMS)
        else:
            optim = {_STATE: found.states, _GROUPS: _of_all_stages(self.engine, found.groups)}
        progress = {_LAYOUT: asdict(facts.layout_of(self.engine)), **progress_of(self.engine), _ORDER: order}
        # torch's checkpoints keep a tuple in one piece
        return {_MODEL: found.weights, _OPTIM: optim, _PROGRESS: tuple(progress.items())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Use the values that were loaded into the memory that :meth:`state_dict` returned. Collective."""
        optim = state_dict[_OPTIM]
        meeting = Meeting.begin(_SUBJECT, "load")
        found = meeting.step("described", lambda: EngineState(self.engine, self.rename))
        if self.is_flat:
            saved = {(name, key): optim.get(f"{_STATE}.{name}.{key}") for name, key in found.numbers}
            groups = _grouped(optim, f"{_GROUPS}.", is_by_group=False)
        else:
            saved = {(name, key): value for name, one in optim[_STATE].items() for key, value in one.items()}
            groups = optim[_GROUPS]
        numbers = meeting.step("numbers", lambda: _numbers(found, saved))
        share = facts.share_of_structure(self.engine)
        layout, progress = facts.layout_of(self.engine), dict(state_dict.get(_PROGRESS) or ())
        meeting.decided_from(
            "order", share, lambda posted: _require_same_training(layout, whole_structure(posted), progress)
        )
        meeting.end()
        inner = inner_optimizer(self.engine)
        for (master, key), value in numbers.items():
            assert inner is not None
            inner.state[master][key] = single_value(inner.state[master][key], torch.tensor(value))
        for number, group in enumerate(found.groups):
            same = next((one for one in groups if set(group[PARAMS]) & set(one.get(PARAMS, ()))), None)
            if same is not None and inner is not None:
                restore_hyperparameters(inner.param_groups[number], same)
        if progress:
            restore_progress(self.engine, progress)
        update_weights(self.engine, found.parameters)


def _of_all_stages(engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the names of all stages of a pipeline to the groups."""
    grid = engine.mpu
    if not isinstance(grid, MpuGrid) or grid.get_pipe_parallel_world_size() == 1:
        return groups
    stages = gathered(groups, grid.get_group(PIPE))
    merged: list[dict[str, Any]] = []
    for number in range(max(map(len, stages))):
        rows = [stage[number] for stage in stages if number < len(stage)]
        merged.append({**rows[0], PARAMS: list(dict.fromkeys(name for row in rows for name in row[PARAMS]))})
    return merged


def _grouped(values: Mapping[str, Any], prefix: str, *, is_by_group: bool) -> list[dict[str, Any]]:
    """Return hyperparameters with the names of their parameters, from flattened ones with a prefix."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(prefix):
            group, _, name = key.removeprefix(prefix).rpartition(".")
            groups.setdefault(group, {} if is_by_group else {PARAMS: [group]})[name] = value
    return list(groups.values())


# -- an engine in torch's terms ----------------------------------------------------------------------------------------
# What a rank holds of a tensor is a ``PartOfTensor``, a view of the engine's own memory: saving copies and gathers
# nothing, and loading writes into that memory. Of equal boxes on several ranks torch writes one.


class EngineState:
    """The weights and optimizer states of an engine on this rank, under names that do not depend on its layout.

    Optimizer states that do not exist yet are created.
    """

    def __init__(self, engine: DeepSpeedEngine, rename: Rename) -> None:
        self.parameters = named_parameters(engine, rename)
        self.weights: dict[str, torch.Tensor] = {}
        """Parameters and buffers."""
        self.states: dict[str, dict[str, torch.Tensor]] = {}
        """Optimizer states by parameter. Those that are one number are copies."""
        self.numbers: dict[tuple[str, str], torch.Tensor] = {}
        """The tensor that the optimizer steps on, for each state that is one number, by parameter and key."""
        self.groups: list[dict[str, Any]] = []
        """Hyperparameters, with the names of this stage's parameters."""
        is_first = facts.replica_of(engine) == 0 and facts.stage_and_slice(engine)[1] == 0
        inner = inner_optimizer(engine)
        if inner is not None:
            begin_states(inner, (one.held for one in self.parameters))
        names_in_groups = defaultdict[int | None, list[str]](list)
        for one in self.parameters:
            if one.held.numel:
                weight = one.part_of(one.held.master, one.held)
                self.weights.update(dict.fromkeys(one.names, weight))
            names_in_groups[one.held.group] += one.everywhere
            if one.held.group is not None and inner is not None:
                self._add_states(one, inner.state.get(one.held.master, {}))
        for name, (buffer, own, is_expert) in named_buffers(engine, rename).items():
            is_written = is_expert or (is_first if own.dim is None else facts.replica_of(engine) == 0)
            self.weights[name] = part_of(buffer.detach(), own, 0, buffer.numel(), is_written)
        for number, group in enumerate(inner.param_groups if inner is not None else ()):
            found = {key: group[key] for key in group if key not in (PARAMS, "param_names") and _is_plain(group[key])}
            if {"betas", "eps"} <= found.keys() and not type(inner).__module__.startswith("torch."):
                found = {**torch.optim.AdamW([torch.zeros(1)]).defaults, **found}  # FSDP2 programs ask for all of them
            self.groups.append({**found, PARAMS: names_in_groups[number]})

    def _add_states(self, one: Named, states: Mapping[str, Any]) -> None:
        name, own = one.names[0], dict[str, torch.Tensor]()
        for key, value in states.items():
            if value is None:
                continue
            if _is_by_element(value, one.held.master):
                if one.held.numel:
                    own[key] = one.part_of(value, one.held)
            else:
                number = value.detach().clone() if torch.is_tensor(value) else torch.tensor(float(value))
                own[key] = number.reshape(())
                self.numbers[name, key] = one.held.master
        if own:
            self.states[name] = own


def _is_by_element(value: Any, master: torch.Tensor) -> bool:
    """Return True if a state has a value for each element, and False if it is one number, such as the step.

    If it is neither, CheckpointError is raised.
    """
    if torch.is_tensor(value) and value.shape == master.shape and master.dim():
        return True
    if (torch.is_tensor(value) and value.numel() == 1) or isinstance(value, (int, float)):
        return False
    shape = f" {list(value.shape)}" if torch.is_tensor(value) else ""
    raise CheckpointError(
        f"an optimizer state is a {type(value).__name__}{shape}, neither a value for each element nor a number: it is "
        "unknown what another layout would hold. Save with checkpoint.save()"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or torch.is_tensor(value) or isinstance(value, (bool, int, float, str))


# -- loading what any program has saved --------------------------------------------------------------------------------


def load_torch(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    *,
    rename: Rename = None,
    model: str | None = None,
    optimizer: str | None = None,
    load_optimizer_states: bool = True,
    trusted: bool = False,
) -> None:
    """Load a checkpoint that any program has saved by ``torch.distributed.checkpoint``; collective over all ranks.

    Each rank reads its own parts. Weights are loaded into master weights, if the engine has them, and copied into the
    module. Optimizer states and hyperparameters are loaded into any stage of ZeRO. Steps, the learning-rate scheduler
    and the loss scale are restored if an engine has saved them, and stay as they are otherwise; rank 0 warns if the
    scheduler is at its start. Torch unpickles what it reads, so only allowed types are built, see
    :mod:`~ds_topo.checkpoint.safe_reading`.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: the folder with ``.metadata`` and the files that it names.
        rename: from the module's names of parameters to those in the checkpoint: a function, or a mapping that may
            omit names that stay.
        model: the key of weights; by default the first of ``"app.model"``, ``"model"`` and none (torchtitan) that is
            there.
        optimizer: the key of the optimizer; by default the first of ``"app.optim"``, ``"optim"``, ``"app.optimizer"``
            and ``"optimizer"``.
        load_optimizer_states: load optimizer states and hyperparameters, too, and not weights alone.
        trusted: also read types that may run code when they are built.

    Raises:
        MissingCheckpointError: there is no such checkpoint.
        UnsafeCheckpointError: it holds types that are not allowed; nothing was changed.
        DamagedCheckpointError: its metadata cannot be read.
        CheckpointModelError: it is of another model. The message names the first parameter that differs; nothing was
            changed.
        CheckpointLayoutError: its states cannot be those of this layout; nothing was changed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then. All errors are the same on
            every rank.
    """
    options = f"{model=} {optimizer=} {load_optimizer_states=} {trusted=}"
    root, failure = Path(), None
    try:
        facts.require_engine(engine)
        root = check_folder(folder)
    except (TypeError, ValueError) as error:
        failure = error
    meeting = Meeting.begin(f"loading {folder}", options, failure)
    inner = inner_optimizer(engine) if load_optimizer_states else None

    def open_source(structure: SavedStructure, named: list[Named], buffers: dict[str, NamedBuffer]) -> TorchFiles:
        return TorchFiles(root, named, buffers, inner, model=model, optimizer=optimizer, trusted=trusted)

    source, loader = load_into(engine, meeting, open_source, rename=rename, has_states=load_optimizer_states)

    def copy() -> None:
        loader.copy()
        if source.progress:
            restore_progress(engine, source.progress)

    meeting.step("copied", copy)
    meeting.step("weights updated", loader.finish)
    meeting.end()
    if inner is not None and SCHEDULER not in source.progress and dist.get_rank() == 0:
        _warn_of_new_scheduler(engine)


def _warn_of_new_scheduler(engine: DeepSpeedEngine) -> None:
    """Warn that a scheduler is at its start, although the optimizer goes on."""
    count = next((name for name in _COUNTS_OF_SCHEDULERS if hasattr(engine.lr_scheduler, name)), None)
    if count is not None and getattr(engine.lr_scheduler, count) <= 0:
        warn(
            "the checkpoint has optimizer states but no learning-rate scheduler that load_torch() reads, so this "
            f"engine's {type(engine.lr_scheduler).__name__} begins again, with its warm-up if it has one. To continue "
            "it, load its own state dict (scheduler.load_state_dict), or, if none was saved, set "
            f"engine.lr_scheduler.{count} to the number of steps; before load_torch(), this does not warn"
        )


class TorchFiles(Source):
    """A checkpoint of torch in a folder, whose parameters are whole; arguments and errors are those of ``load_torch``.

    The initial states of ``inner``, this rank's optimizer, are created; it is None to read weights alone.
    """

    in_part = ""

    def __init__(
        self,
        folder: Path,
        named: Sequence[Named],
        buffers: Mapping[str, NamedBuffer],
        inner: torch.optim.Optimizer | None,
        *,
        model: str | None,
        optimizer: str | None,
        trusted: bool,
    ) -> None:
        self._folder, self._is_trusted, self._buffers = folder, trusted, buffers
        self._there = there = _metadata_of(folder, trusted=trusted)
        self._keys = keys = Keys.of(there, model, optimizer)
        self._shapes = {
            name: tuple(there[key].size)
            for name in (*(name for one in named for name in one.names), *buffers)
            if isinstance(there.get(key := keys.weights + name), TensorStorageMetadata)
        }
        shapes = {name: (size, there[keys.weights + name].properties.dtype) for name, size in self._shapes.items()}
        super().__init__(model_of_whole(shapes, named, buffers), f"the checkpoint in {folder}")
        self._first_names: dict[str, str] = {}
        """The name, of all names of a parameter, under which its states are kept."""
        self._states: dict[str, dict[str, torch.dtype | None]] = {}
        """The states that the optimizer has of each parameter: their types, or None for a single value."""
        if inner is not None:
            begin_states(inner, (one.held for one in named))
            self._expect_states(named, inner)
        numbers = [
            keys.state(self._first_names[name], key)
            for name, states in self._states.items()
            for key, kind in states.items()
            if kind is None
        ]
        names = {*self._first_names, *self._first_names.values()}
        small = [*numbers, *keys.hyperparameters(there, names), keys.progress] if inner is not None else []
        self._values: dict[str, Any] = {}
        for key in (key for key in small if key in there):
            is_tensor = isinstance(there[key], TensorStorageMetadata)  # torch puts other values in the place of None
            self._values[key] = torch.zeros(there[key].size, dtype=there[key].properties.dtype) if is_tensor else None
        self._read_values(self._values)
        self._groups: dict[str, dict[str, Any]] = {}
        """The hyperparameters of each parameter's group: one object for all parameters of the group."""
        for group in _grouped(self._values, keys.groups, is_by_group=keys.is_by_group):
            self._groups.update(dict.fromkeys(group.pop(PARAMS, ()), group))
        self.progress: dict[str, Any] = dict(self._values.get(keys.progress) or ())
        """Counters and options that an engine saved; empty if another program saved the checkpoint."""

    def _read_values(self, values: dict[str, Any]) -> None:
        """Read values into tensors, and into the places of what is no tensor. Not collective."""
        try:
            with reading_checkpoint(self._folder, trusted=self._is_trusted), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank plans for itself
                load(values, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except CheckpointException as error:  # not an Exception
            for failure, _ in error.failures.values():
                if isinstance(failure, UnsafeCheckpointError):
                    raise UnsafeCheckpointError(f"{self._folder}: {failure}") from error
            raise CheckpointError(
                f"torch could not read {self._folder}: {' '.join(str(error).split())[-500:]}"
            ) from error

    def _expect_states(self, named: Iterable[Named], inner: torch.optim.Optimizer) -> None:
        with_states = {key.removeprefix(self._keys.states).rpartition(".")[0] for key in self._there}
        for one in named:
            if one.held.group is None:
                continue
            master, states = one.held.master, inner.state.get(one.held.master, {})
            kinds = {
                key: value.dtype if _is_by_element(value, master) else None
                for key, value in states.items()
                if value is not None
            }
            for name in one.names:
                first = next((name for name in (name, *one.names) if name in with_states), name)
                self._first_names[name], self._states[name] = first, kinds

    @override
    def tensors(self) -> dict[str, Sequence[int]]:
        prefix = self._keys.weights  # without one, nothing tells weights from other tensors
        return {
            key.removeprefix(prefix): value.size
            for key, value in self._there.items()
            if prefix and key.startswith(prefix) and isinstance(value, TensorStorageMetadata)
        }

    @override
    def called(self, name: str) -> str:
        return repr(self._keys.weights + name)

    @override
    def shape_of_buffer(self, name: str, place: int, slices: int) -> Sequence[int] | None:
        own, shape = self._buffers[name].slice, self._shapes.get(name)
        if shape is None or own.dim is None:
            return shape
        return own.shape if shape == own.whole_shape else shape

    @override
    def of_parameter(self, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        states, first, there = dict[str, Any](), self._first_names[name], self._there
        for key, kind in self._states[name].items():
            place, prefix = self._keys.state(first, key), self._keys.state(first, "")
            if place not in there:
                has = listed(sorted(one.removeprefix(prefix) for one in there if one.startswith(prefix)))
                raise CheckpointModelError(
                    f"{self.where} is of another model: it has no optimizer state {place!r}; its parameter has {has}"
                )
            size = tuple(there[place].size) if isinstance(there[place], TensorStorageMetadata) else None
            if kind is not None and size != self._shapes[name]:
                raise CheckpointModelError(
                    f"{self.where} is of another model: {place!r} is {size} there, and its parameter "
                    f"{list(self._shapes[name])}"
                )
            states[key] = self._values[place] if kind is None else kind
        return self._groups.get(first, self._groups.get(name, {})), states

    @override
    def read(self, wanted: Sequence[ReadRequest]) -> None:
        tensors: dict[str, Any] = {}
        for one in wanted:
            if one.key == BUFFER:
                own, real = self._buffers[one.name].slice, None
                shape = own.whole_shape
            else:
                saved = self.model.parameters[one.name]
                own, real, shape = saved.slice_of(one.place, one.slices), saved.real, saved.shape
            boxes = boxes_in(one.into, own, one.start, one.start + one.into.numel(), rows=real)
            if real is not None:
                one.into.zero_()
            is_weight = one.key in (WEIGHT, MASTER, BUFFER)
            key = self._keys.weights + one.name
            if not is_weight:
                key = self._keys.state(self._first_names[one.name], one.key)
            tensors[key] = PartOfTensor(shape, boxes, one.into)
        self._read_values(tensors)

    @override
    def require_reachable(self, layout: SavedLayout, structure: SavedStructure, *, has_states: bool) -> None:
        if has_states:
            _require_same_training(layout, structure, self.progress)


@dataclass(frozen=True)
class Keys:
    """The keys under which a program has put weights, optimizer states and hyperparameters.

    >>> keys = Keys.of(["app.model.weight", "app.optim.state.weight.step", "app.optim.param_groups.0.params"])
    >>> keys.weights + "weight", keys.state("weight", "step"), keys.progress, keys.is_by_group
    ('app.model.weight', 'app.optim.state.weight.step', 'app.deepspeed', True)
    """

    weights: str
    """The prefix of all weights and buffers."""
    states: str
    """The prefix of all optimizer states."""
    groups: str
    """The prefix of all hyperparameters."""
    progress: str
    """The key of an engine's progress, beside that of the weights."""
    is_by_group: bool
    """True if hyperparameters are kept by group, and not by parameter."""

    @classmethod
    def of(cls, found: Collection[str], model: str | None = None, optimizer: str | None = None) -> Keys:
        """Find the given keys, or the first of the usual ones, among all keys of a checkpoint."""

        def first(places: Sequence[str], below: str) -> str:
            prefixes = [f"{place}." if place else "" for place in places]
            return next((one for one in prefixes if any(key.startswith(one + below) for key in found)), prefixes[-1])

        weights = first(_MODELS if model is None else (model,), "")
        states = first(_OPTIMIZERS if optimizer is None else (optimizer,), f"{_STATE}.")
        parent = weights.removesuffix(".").rpartition(".")[0]
        return cls(
            weights,
            f"{states}{_STATE}.",
            f"{states}{_GROUPS}.",
            f"{parent}.{_PROGRESS}" if parent else _PROGRESS,
            f"{states}{_GROUPS}.0.{PARAMS}" in found,
        )

    def state(self, name: str, key: str) -> str:
        """Return the key of a parameter's optimizer state, such as ``exp_avg``."""
        return f"{self.states}{name}.{key}"

    def hyperparameters(self, found: Collection[str], names: Collection[str]) -> list[str]:
        """Return the keys of all hyperparameters of these parameters."""
        every = (key for key in found if key.startswith(self.groups))
        return [key for key in every if self.is_by_group or key.removeprefix(self.groups).rpartition(".")[0] in names]


def _metadata_of(folder: Path, *, trusted: bool) -> Mapping[str, Any]:
    """Return what a folder of torch holds, by key; errors are of the classes that :func:`load_torch` documents."""
    try:
        check_metadata(folder, trusted=trusted)
        found: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingCheckpointError(
            f"no checkpoint of torch.distributed.checkpoint in {folder}, as rank {dist.get_rank()} sees it: "
            f"{_kind_of(folder) or error}"
        ) from error
    except UnsafeCheckpointError as error:
        raise UnsafeCheckpointError(f"{folder}: {error}") from error
    except Exception as error:  # of any class: the file may hold anything
        raise DamagedCheckpointError(
            f"the metadata in {folder}: rank {dist.get_rank()}: {type(error).__name__}: {error}"
        ) from error
    return found


def _kind_of(path: Path) -> str:
    """Say how to load what is there instead of a checkpoint of torch; empty if it is unknown."""
    if is_checkpoint(path):
        return f"it is one of DeepSpeed: load it with load(engine, {str(path.parent)!r}, {path.name!r})"
    if tags := tags_in(path):
        return f"it has checkpoints of DeepSpeed, {listed(tags)}: load one with load(engine, {str(path)!r})"
    return other_kind(path)


# -- after tensors were loaded in place --------------------------------------------------------------------------------


def _numbers(found: EngineState, saved: Mapping[tuple[str, str], Any]) -> dict[tuple[torch.Tensor, str], float]:
    """Return the new values of the optimizer's numbers, such as steps, by the tensor that it steps on and their keys.

    Those not in ``saved`` stay. If parameters that share one number here have different ones there,
    CheckpointModelError is raised.
    """
    result: dict[tuple[torch.Tensor, str], float] = {}
    names: dict[tuple[torch.Tensor, str], str] = {}
    for (name, key), master in found.numbers.items():
        if (value := saved.get((name, key))) is None:
            continue
        first, known = names.setdefault((master, key), name), result.setdefault((master, key), float(value))
        if known != float(value):
            raise CheckpointModelError(
                f"{key!r} is {known:g} of {first!r} and {float(value):g} of {name!r}: this engine has one for both"
            )
    return result


def _order_of(structure: SavedStructure) -> str:
    """Return a digest of what decides which elements an optimizer has beside each other; empty if that is no matter."""
    text = json.dumps([structure.groups, asdict(structure.options)])
    return "" if structure.is_by_element else hashlib.sha256(text.encode()).hexdigest()


def _require_same_training(layout: SavedLayout, structure: SavedStructure, progress: Mapping[str, Any]) -> None:
    """Refuse states of an optimizer that depends on the layout, unless they were saved in the same one.

    ``progress`` is what an engine saved of itself. It is empty if another program saved the checkpoint, with whole
    parameters.
    """
    saved = progress.get(_LAYOUT)
    was = built_from(SavedLayout, saved) if saved else SavedLayout("data=1", 1, 1, 1, 0, None, "fp32")
    is_same = bool(saved) and progress.get(_ORDER) == _order_of(structure) and not why_unreachable(was, layout)
    if not is_same and (problem := why_layouts_differ(was, layout, structure)):
        raise CheckpointLayoutError(f"the checkpoint of {was if saved else 'an unknown layout'}: {problem}")
