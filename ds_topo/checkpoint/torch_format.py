"""Save and load engines through ``torch.distributed.checkpoint``, to and from any program.

Saving offers an engine in the shape of torch's ``get_state_dict``. Loading takes these steps::

    all ranks   collect this rank's part of each parameter and state
    all ranks   compare the checkpoint's metadata with the names and shapes of the engine
    rank 0      decides from all ranks' findings, and refuses parameters that the model does not have
    all ranks   torch reads what each rank needs into the engine's memory
    all ranks   set numbers, hyperparameters and progress; copy master weights into the module

torch flattens nested dictionaries and joins their keys by dots. An optimizer has one of two forms:

=============================================  ======================================================================
``optim.state.layer.weight.exp_avg``           states, in both forms
``optim.param_groups.0.lr``, ``...0.params``   by group, with the names of its parameters: ``get_state_dict()``
``optim.param_groups.layer.weight.lr``         by parameter: with ``flatten_optimizer_state_dict=True``; torchtitan
=============================================  ======================================================================

Source: torch, ``distributed/checkpoint/state_dict.py``, and the guide "Getting Started with Distributed Checkpoint".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from ds_topo.checkpoint.disk import check_folder
from ds_topo.checkpoint.engine_facts import inner_optimizer, require_engine
from ds_topo.checkpoint.engine_state import (
    COUNTS,
    OF_LOSS_SCALE,
    PARAMS,
    SCHEDULER,
    EngineState,
    Rename,
    loss_scaler_of,
    restore_hyperparameters,
    restore_progress,
    state_of_engine,
    update_weights,
)
from ds_topo.checkpoint.folder import is_checkpoint, other_kind, tags_in
from ds_topo.checkpoint.rank_zero import Meeting
from ds_topo.checkpoint.safe_reading import check_metadata, reading_checkpoint
from ds_topo.errors import (
    CheckpointError,
    CheckpointModelError,
    DamagedCheckpointError,
    MissingCheckpointError,
    UnsafeCheckpointError,
    listed,
)
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.process_groups.creation import gathered
from ds_topo.topology.axes import PIPE

_STATE, _GROUPS = "state", "param_groups"
"""torch's own keys of an optimizer."""
_MODEL, _OPTIM, _PROGRESS = "model", "optim", "deepspeed"
"""Our keys; the first two are those of torch's guides."""
_MODELS = ("app.model", "model", "")
"""Keys of weights in torch's guides, in other programs, and in torchtitan."""
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

    Raises:
        CheckpointError: see :meth:`state_dict`.

    Saving and loading, if both have the same parameters::

        dcp.save({"app": TorchState(engine)}, checkpoint_id=folder)
        dcp.load({"app": TorchState(engine)}, checkpoint_id=folder)
        saving = dcp.async_save({"app": TorchState(engine)}, checkpoint_id=folder)

    :func:`ds_topo.checkpoint.load_torch` loads the checkpoints of other programs.
    """

    def __init__(
        self, engine: DeepSpeedEngine, rename: Rename = None, *, flatten_optimizer_state_dict: bool = False
    ) -> None:
        require_engine(engine)
        self.engine, self.rename, self.is_flat = engine, rename, flatten_optimizer_state_dict

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save or to load into: views of the engine's memory. Collective.

        Optimizer states that do not exist yet are created.

        Raises:
            CheckpointError: this kind of engine cannot be saved; raised on every rank before anything is written.
        """
        found = state_of_engine(self.engine, self.rename, f"flatten_optimizer_state_dict={self.is_flat}")
        optim: dict[str, Any]
        if self.is_flat:
            states = found.states.items()
            optim = {f"{_STATE}.{name}.{key}": value for name, one in states for key, value in one.items()}
            for group in found.groups:
                for name in group[PARAMS]:
                    optim.update((f"{_GROUPS}.{name}.{key}", group[key]) for key in group if key != PARAMS)
        else:
            optim = {_STATE: found.states, _GROUPS: _of_all_stages(self.engine, found.groups)}
        return {_MODEL: found.weights, _OPTIM: optim, _PROGRESS: _progress_of(self.engine)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Use the values that were loaded into the memory that :meth:`state_dict` returned. Collective."""
        optim = state_dict[_OPTIM]
        found = state_of_engine(self.engine, self.rename, "loaded")
        if self.is_flat:
            saved = {(name, key): optim.get(f"{_STATE}.{name}.{key}") for name, key in found.numbers}
            groups = _grouped(optim, f"{_GROUPS}.", is_by_group=False)
        else:
            saved = {(name, key): value for name, one in optim[_STATE].items() for key, value in one.items()}
            groups = optim[_GROUPS]
        meeting = Meeting.begin("loading by torch.distributed.checkpoint", "")
        _finish_loading(self.engine, found, _numbers(meeting, found, saved), groups, state_dict.get(_PROGRESS))


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


# -- loading what any program has saved --------------------------------------------------------------------------------


def load_torch(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    *,
    rename: Rename = None,
    model: str | None = None,
    optimizer: str | None = None,
    load_optimizer_states: bool = True,
    storage_reader: StorageReader | None = None,
    trusted: bool = False,
) -> None:
    """Load a checkpoint that any program has saved by ``torch.distributed.checkpoint``; collective over all ranks.

    Each rank reads its own parts. Weights are loaded into master weights, if the engine has them, and copied into the
    module. Optimizer states and hyperparameters are loaded into any stage of ZeRO. Steps, the learning-rate scheduler
    and the loss scale are restored if an engine has saved them, and stay as they are otherwise. Torch unpickles what it
    reads, so only allowed types are built, see :mod:`~ds_topo.checkpoint.safe_reading`.

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
        storage_reader: torch's reader, if the checkpoint is not in a folder. The metadata that it reads is trusted.
        trusted: also read types that may run code when they are built.

    Raises:
        MissingCheckpointError: there is no such checkpoint.
        UnsafeCheckpointError: it holds types that are not allowed; nothing was changed.
        DamagedCheckpointError: its metadata cannot be read.
        CheckpointModelError: it is of another model. The message names the first parameter that differs; nothing was
            changed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then. All errors are the same on
            every rank.
    """
    options = f"{model=} {optimizer=} {load_optimizer_states=} {trusted=}"
    root: Path | None = None
    failure: Exception | None = None
    try:
        require_engine(engine)
        root = check_folder(folder) if storage_reader is None else None
    except (TypeError, ValueError) as error:
        failure = error
    meeting = Meeting.begin(f"loading {folder}", options, failure)
    found = state_of_engine(engine, rename, f"load {options}", has_states=load_optimizer_states)
    reader = storage_reader or FileSystemReader(folder)
    there, keys = _checked_metadata(found, meeting, reader, folder, (model, optimizer), root, trusted=trusted)
    keys_of_numbers = {place: keys.state(*place) for place in found.numbers}
    names = [name for group in found.groups for name in group[PARAMS]]
    small = [*keys_of_numbers.values(), *keys.hyperparameters(there, names), keys.progress]
    values: dict[str, Any] = {key: _placeholder(there[key]) for key in small if found.has_states and key in there}
    with reading_checkpoint(root, trusted=trusted):
        _read(values, reader, folder)
    numbers = _numbers(meeting, found, {place: values[key] for place, key in keys_of_numbers.items()})
    tensors = {keys.weights + name: value for name, value in found.weights.items() if keys.weights + name in there}
    for name, states in found.states.items():
        own = ((key, value) for key, value in states.items() if (name, key) not in found.numbers)
        tensors.update((keys.state(name, key), value) for key, value in own)
    with reading_checkpoint(root, trusted=trusted):
        _read(tensors, reader, folder)
    groups = _grouped(values, keys.groups, is_by_group=keys.is_by_group)
    _finish_loading(engine, found, numbers, groups, values.get(keys.progress))


def _read(values: dict[str, Any], reader: StorageReader, folder: str | PathLike[str]) -> None:
    try:
        load(values, storage_reader=reader)
    except CheckpointException as error:  # not an Exception; every rank raises it
        for failure, _ in error.failures.values():
            if isinstance(failure, UnsafeCheckpointError):
                raise UnsafeCheckpointError(f"{folder}: {failure}") from error
        raise CheckpointError(f"torch could not read {folder}: {' '.join(str(error).split())[-500:]}") from error


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
        wanted = self.groups if self.is_by_group else tuple(f"{self.groups}{name}." for name in names)
        return [key for key in found if key.startswith(wanted)]


def _placeholder(there: Any) -> torch.Tensor | None:
    """Return memory to read a small value into; None for a value that is not a tensor."""
    return torch.zeros(there.size, dtype=there.properties.dtype) if _size(there) is not None else None


def _checked_metadata(
    found: EngineState,
    meeting: Meeting,
    reader: StorageReader,
    folder: str | PathLike[str],
    places: tuple[str | None, str | None],
    root: Path | None,
    *,
    trusted: bool,
) -> tuple[Mapping[str, Any], Keys]:
    """Return the checkpoint's metadata by key, and its keys, after all ranks have compared it with the engine.

    Raises:
        CheckpointError: it cannot be loaded; of the class that :func:`load_torch` documents.
    """
    there: Mapping[str, Any] = {}
    missing = damaged = unsafe = ""
    try:
        if root is not None:
            check_metadata(root, trusted=trusted)
        there = reader.read_metadata().state_dict_metadata
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = _kind_of(Path(folder)) or str(error)
    except UnsafeCheckpointError as error:
        unsafe = str(error)
    except Exception as error:  # of any class: the file may hold anything
        damaged = f"{type(error).__name__}: {error}"
    keys = Keys.of(there, *places)
    difference = next(_differences(found, there, keys), "") if there else ""

    def judge(posted: list[tuple[str, str, str, str, list[str]]]) -> None:
        for rank, (missing, damaged, unsafe, _, _) in enumerate(posted):
            if unsafe:
                raise UnsafeCheckpointError(f"{folder}: {unsafe}")
            if missing:
                raise MissingCheckpointError(
                    f"no checkpoint of torch.distributed.checkpoint in {folder}, as rank {rank} sees it: {missing}"
                )
            if damaged:
                raise DamagedCheckpointError(f"the metadata in {folder}: rank {rank}: {damaged}")
        where = f"the checkpoint in {folder} is of another model: "
        if problem := next((difference for *_, difference, _ in posted if difference), ""):
            raise CheckpointModelError(where + problem)
        known = {keys.weights + name for *_, names in posted for name in names}
        for key, value in there.items() if keys.weights else ():
            if key.startswith(keys.weights) and key not in known and isinstance(value, TensorStorageMetadata):
                raise CheckpointModelError(f"{where}it has {key!r} {list(value.size)}, which the model does not have")

    meeting.decided_from("metadata", (missing, damaged, unsafe, difference, found.names), judge)
    return there, keys


def _kind_of(path: Path) -> str:
    """Say how to load what is there instead of a checkpoint of torch; empty if it is unknown."""
    if is_checkpoint(path):
        return f"it is one of DeepSpeed: load it with load(engine, {str(path.parent)!r}, {path.name!r})"
    if tags := tags_in(path):
        return f"it has checkpoints of DeepSpeed, {listed(tags)}: load one with load(engine, {str(path)!r})"
    return other_kind(path)


def _differences(found: EngineState, there: Mapping[str, Any], keys: Keys) -> Iterator[str]:
    """Yield the differences between this rank's part of the model and the checkpoint."""
    for name, value in found.weights.items():
        aliases = [keys.weights + alias for alias in found.aliases.get(name, (name,))]
        key = next((key for key in aliases if key in there), None)
        if key is None:
            yield f"it has no {keys.weights + name!r} {list(value.shape)}"
        elif (size := _size(there[key])) != list(value.shape):
            yield f"{key!r} is {size} there and {list(value.shape)} in the model"
    for name, states in found.states.items():
        for state, value in states.items():
            key, prefix = keys.state(name, state), keys.state(name, "")
            if key not in there:
                has = listed(sorted(one.removeprefix(prefix) for one in there if one.startswith(prefix)))
                yield f"it has no optimizer state {key!r}; its parameter has {has}"
            elif (name, state) not in found.numbers and (size := _size(there[key])) != list(value.shape):
                yield f"{key!r} is {size} there and {list(value.shape)} in the model"


def _size(there: Any) -> list[int] | None:
    return list(there.size) if isinstance(there, TensorStorageMetadata) else None


# -- after tensors were loaded in place --------------------------------------------------------------------------------

_Numbers = dict[tuple[torch.Tensor, str], float]
"""The states that are one number, by the tensor that the optimizer steps on and the state's key."""


def _numbers(meeting: Meeting, found: EngineState, saved: Mapping[tuple[str, str], Any]) -> _Numbers:
    """Return the new values of the optimizer's numbers, such as steps. Those not in ``saved`` stay. Collective.

    Raises:
        CheckpointModelError: parameters that share one number here have different ones there; the same on every rank.
    """
    problem, result = "", _Numbers()
    names: dict[tuple[torch.Tensor, str], str] = {}
    for (name, key), master in found.numbers.items():
        if (value := saved.get((name, key))) is None:
            continue
        first, known = names.setdefault((master, key), name), result.setdefault((master, key), float(value))
        if known != float(value) and not problem:
            problem = (
                f"{key!r} is {known:g} of {first!r} and {float(value):g} of {name!r}: this engine has one for both"
            )

    def judge(posted: list[str]) -> None:
        if different := next(filter(None, posted), ""):
            raise CheckpointModelError(different)

    meeting.decided_from("numbers", problem, judge)
    meeting.end()
    return result


def _finish_loading(
    engine: DeepSpeedEngine,
    found: EngineState,
    numbers: _Numbers,
    groups: Sequence[Mapping[str, Any]],
    progress: tuple[tuple[str, Any], ...] | None,
) -> None:
    """Restore everything else after weights and states were loaded, and update the module's weights. Collective.

    Args:
        engine: the engine.
        found: its state.
        numbers: its optimizer's numbers.
        groups: the checkpoint's hyperparameters, with names of parameters.
        progress: the progress that an engine saved; None if another program saved the checkpoint.
    """
    inner = inner_optimizer(engine)
    for (master, key), value in numbers.items():
        assert inner is not None
        state = inner.state[master]
        if torch.is_tensor(state[key]):
            state[key].fill_(value)
        else:
            state[key] = type(state[key])(value)
    for number, group in enumerate(found.groups):
        saved = next((one for one in groups if set(group[PARAMS]) & set(one.get(PARAMS, ()))), None)
        if saved is not None and inner is not None:
            restore_hyperparameters(inner.param_groups[number], saved)
    if progress is not None:
        restore_progress(engine, dict(progress))
    update_weights(engine, found.trained)


def _progress_of(engine: DeepSpeedEngine) -> tuple[tuple[str, Any], ...]:
    """Return steps, loss scale and learning-rate scheduler: in a tuple, which torch's checkpoints keep in one piece."""
    found: dict[str, Any] = {name: int(getattr(engine, name)) for name in COUNTS}
    scaler = loss_scaler_of(engine)
    found.update((name, getattr(scaler, name)) for name in OF_LOSS_SCALE if hasattr(scaler, name))
    if hasattr(engine.lr_scheduler, "state_dict"):
        found[SCHEDULER] = engine.lr_scheduler.state_dict()
    return tuple(found.items())
