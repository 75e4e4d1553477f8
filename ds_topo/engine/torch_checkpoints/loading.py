"""Load into an engine what another program has saved by ``torch.distributed.checkpoint``.

::

    all ranks   what this rank has of each parameter and state, and where
    all ranks   the checkpoint's metadata: is everything there, in its shape?
    rank 0      says how that went, and whether it has parameters that the model has not
    all ranks   torch reads what each rank needs into the engine's memory
    all ranks   numbers, hyperparameters, progress; the module's weights from master weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from ds_topo.engine.checkpoints.meeting import Meeting
from ds_topo.engine.torch_checkpoints.description import Described, described
from ds_topo.engine.torch_checkpoints.naming import Rename
from ds_topo.engine.torch_checkpoints.taking_over import agreed_numbers, take_over
from ds_topo.errors import CheckpointError, CheckpointModelError, DamagedCheckpointError, MissingCheckpointError, listed
from ds_topo.torch_checkpoint.keys import PARAMS, Keys


def load_torch(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    *,
    rename: Rename = None,
    model: str | None = None,
    optimizer: str | None = None,
    load_optimizer_states: bool = True,
    storage_reader: StorageReader | None = None,
) -> None:
    """Load what any program has saved by ``torch.distributed.checkpoint``; collective over all ranks of the job.

    Each rank reads its own parts. Weights go into master weights, where the engine has them, and from there into the
    module; optimizer states and hyperparameters go into any stage of ZeRO. Steps, the learning-rate scheduler and the
    loss scale are restored if an engine has saved them, and stay as they are else. Only read what you trust: torch
    unpickles whatever the folder holds.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        folder: with ``.metadata`` and the files that it names.
        rename: from the module's names of parameters to those in the checkpoint: a function, or a mapping that may
            leave some out.
        model: the key of weights; by default the first of ``"app.model"``, ``"model"`` and none (torchtitan) that is
            there.
        optimizer: the key of the optimizer; by default the first of ``"app.optim"``, ``"optim"``, ``"app.optimizer"``
            and ``"optimizer"``.
        load_optimizer_states: and hyperparameters; else weights alone.
        storage_reader: of torch's, where it is no folder.

    Raises:
        MissingCheckpointError: there is no such checkpoint.
        DamagedCheckpointError: its metadata cannot be read.
        CheckpointModelError: it is another model's: names the first parameter that differs; nothing was changed.
        CheckpointError: a rank failed while it loaded; the engine cannot be used then. All of them on every rank.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(f"engine: {type(engine).__name__} is not what deepspeed.initialize returns")
    options = f"{model=} {optimizer=} {load_optimizer_states=}"
    found = described(engine, rename, f"load {options}", has_states=load_optimizer_states)
    meeting = Meeting.begin(f"loading {folder}", options)
    reader = storage_reader or FileSystemReader(folder)
    request = _Request(found, meeting, reader, str(folder), model, optimizer, load_optimizer_states)
    values = request.values()
    _read(values, reader, folder)
    numbers = agreed_numbers(meeting, found, request.numbers(values))
    _read(request.tensors(), reader, folder)
    take_over(engine, found, numbers, request.keys.groups(values), values.get(request.keys.progress))


def _read(values: dict[str, Any], reader: StorageReader, folder: str | PathLike[str]) -> None:
    try:
        load(values, storage_reader=reader)
    except CheckpointException as error:  # no Exception; every rank has it
        raise CheckpointError(f"torch could not read {folder}: {' '.join(str(error).split())[-500:]}") from error


class _Request:
    """What this rank needs of a checkpoint, by the checkpoint's keys."""

    def __init__(
        self,
        found: Described,
        meeting: Meeting,
        reader: StorageReader,
        folder: str,
        model: str | None,
        optimizer: str | None,
        has_states: bool,
    ) -> None:
        self._found, self._folder, self._has_states = found, folder, has_states
        self._there: Mapping[str, Any] = {}
        share: dict[str, Any] = {"names": found.names, "missing": "", "damaged": "", "model": ""}
        try:
            self._there = reader.read_metadata().state_dict_metadata
        except FileNotFoundError as error:
            share["missing"] = str(error)
        except Exception as error:  # whatever a file holds that is no metadata
            share["damaged"] = f"{type(error).__name__}: {error}"
        self.keys = Keys.of(self._there, model, optimizer)
        if self._there:
            share["model"] = next(self._differences(), "")
        meeting.post("found", share)
        meeting.all_or_none("the metadata was read", None)
        meeting.decided("verdict", lambda: self._judge(meeting.posted("found")))

    def tensors(self) -> dict[str, Any]:
        """By key, the memory that is to be read into."""
        weights = ((self.keys.weight(name), value) for name, value in self._found.weights.items())
        result = {key: value for key, value in weights if key in self._there}
        for name, states in self._found.states.items() if self._has_states else ():
            for key, value in states.items():
                if (name, key) not in self._found.numbers:
                    result[self.keys.state(name, key)] = value
        return result

    def values(self) -> dict[str, Any]:
        """By key, everything that is small: numbers, hyperparameters, progress; to be filled in."""
        if not self._has_states:
            return {}
        names = [name for group in self._found.groups for name in group[PARAMS]]
        keys = [*self._keys_of_numbers().values(), *self.keys.hyperparameters(self._there, names)]
        keys += [self.keys.progress] if self.keys.progress in self._there else []
        return {key: self._placeholder(key) for key in keys}

    def numbers(self, values: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
        """Those of the values that are states, by parameter and key."""
        return {place: values[key] for place, key in self._keys_of_numbers().items()}

    def _keys_of_numbers(self) -> dict[tuple[str, str], str]:
        if not self._has_states:
            return {}
        return {(name, key): self.keys.state(name, key) for name, key in self._found.numbers}

    def _placeholder(self, key: str) -> torch.Tensor | None:
        there = self._there[key]
        return torch.zeros(there.size, dtype=there.properties.dtype) if _is_tensor(there) else None

    # -- whether it is the same model

    def _differences(self) -> Iterator[str]:
        """What is wrong with the parameters of this rank."""
        for name, value in self._found.weights.items():
            names = self._found.aliases.get(name, (name,))
            key = next((key for key in map(self.keys.weight, names) if key in self._there), None)
            if key is None:
                yield f"it has no {self.keys.weight(name)!r} {list(value.shape)}"
            elif (size := _size(self._there[key])) != list(value.shape):
                yield f"{key!r} is {size} there and {list(value.shape)} in the model"
        if self._has_states:
            yield from self._differences_of_states()

    def _differences_of_states(self) -> Iterator[str]:
        for name, states in self._found.states.items():
            for state, value in states.items():
                key, is_number = self.keys.state(name, state), (name, state) in self._found.numbers
                if key not in self._there:
                    has = listed(self.keys.states_of(name, self._there))
                    yield f"it has no optimizer state {key!r}; of that parameter there are {has}"
                elif not is_number and (size := _size(self._there[key])) != list(value.shape):
                    yield f"{key!r} is {size} there and {list(value.shape)} in the model"

    def _judge(self, posted: list[dict[str, Any]]) -> None:
        """On rank 0, from what all ranks have found.

        Raises:
            MissingCheckpointError, DamagedCheckpointError, CheckpointModelError: it cannot be loaded.
        """
        for rank, share in enumerate(posted):
            if share["missing"]:
                raise MissingCheckpointError(
                    f"no checkpoint of torch.distributed.checkpoint in {self._folder}, as rank {rank} sees it: "
                    f"{share['missing']}"
                )
            if share["damaged"]:
                raise DamagedCheckpointError(f"the metadata in {self._folder}: rank {rank}: {share['damaged']}")
        where = f"the checkpoint in {self._folder} is of another model: "
        for share in posted:
            if share["model"]:
                raise CheckpointModelError(where + share["model"])
        known = {self.keys.weight(name) for share in posted for name in share["names"]}
        for key, value in self._there.items() if self.keys.model else ():
            if key.startswith(f"{self.keys.model}.") and key not in known and _is_tensor(value):
                raise CheckpointModelError(f"{where}it has {key!r} {list(value.size)}, which the model has not")


def _is_tensor(there: Any) -> bool:
    return isinstance(there, TensorStorageMetadata)


def _size(there: Any) -> list[int] | None:
    """Of a tensor; None for other values."""
    return list(there.size) if _is_tensor(there) else None
