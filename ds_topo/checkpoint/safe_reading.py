"""Read checkpoints without running code that they contain.

torch's restricted unpickler builds tensors, plain containers and the types in ``torch.serialization.add_safe_globals``.
The types of DeepSpeed's own files are added to these while a checkpoint is read. Programs add those of their
``client_state``.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import re
import sys
import threading
import uuid
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.distributed.checkpoint.metadata import Metadata
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_topo.errors import UnsafeCheckpointError, abridged
from ds_topo.ledger import ledger
from ds_topo.mpu import patches

_NUMBERS = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
ALLOWED: tuple[Any, ...] = (
    *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum),
    *(argparse.Namespace, np.ndarray, np.dtype, np.float64().__reduce__()[0], np.empty(0).__reduce__()[0], *_NUMBERS),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *_PATHS,
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, deque, range, slice, complex),
)
"""The types of DeepSpeed's own files, and common types of programs: parsed arguments, NumPy's numbers and arrays,
times, paths and numbers of the standard library. Building one runs no code of the file."""


_OF_METADATA = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("builtins", "set"), ("builtins", "frozenset"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")),
}
"""Names in the metadata of ``torch.distributed.checkpoint``, besides data types and the classes of its own module."""
_DEEPSPEEDS = {
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
    *("skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
}
"""Keys that ``DeepSpeedEngine.load_checkpoint`` reads from the file that also holds the program's ``client_state``."""


@contextmanager
def only_allowed_types() -> Iterator[None]:
    """Let ``torch.load`` build only allowed types on this thread, whatever its caller and arguments."""
    thread = threading.get_ident()

    def restricted(load: Any) -> Any:
        @wraps(load)
        def load_allowed(f: Any, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return load(f, *arguments, **options)
            try:
                return load(f, *arguments, **{**options, "weights_only": True})
            except pickle.UnpicklingError as error:
                raise UnsafeCheckpointError(_refusal(str(f), _refused_in(f) or [_named_in(error)])) from None

        return load_allowed

    with safe_globals(list(ALLOWED)), ledger.bound(patches.TORCH_LOAD, restricted):
        yield


class _MetadataUnpickler(pickle.Unpickler):
    """Builds only the types of which ``torch.distributed.checkpoint`` makes its metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type by name; nothing is imported for one that is not allowed."""
        found = getattr(sys.modules.get(module), name, None)
        is_of_torch = (module, name) in _OF_METADATA or (module == "torch" and isinstance(found, torch.dtype))
        is_record = module == Metadata.__module__ == getattr(found, "__module__", "") and isinstance(found, type)
        if is_of_torch or is_record or found in _PATHS:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(
            f"the metadata holds {module}.{name}, and building it may run code. If you trust the folder, call "
            "load_torch(..., trusted=True)"
        )


def check_metadata(path: Path) -> None:
    """Refuse a ``.metadata`` file of torch that would run code when torch reads it.

    Raises:
        UnsafeCheckpointError: the message names the first type that is not allowed.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            _MetadataUnpickler(file).load()
        except (UnsafeCheckpointError, OSError):
            raise
        except Exception:  # torch reads it next, and its error says that the file is damaged
            return


def check_client_state(state: object) -> None:
    """Refuse a ``client_state`` that could not be loaded again; warn on rank 0 about types that loading refuses.

    Raises:
        TypeError: it is not a mapping.
        ValueError: it has keys of DeepSpeed's own state, which is in the same file.
    """
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise TypeError(f"client_state={abridged(state)} is not a mapping: give a dict of names and values, or None")
    taken = sorted(_DEEPSPEEDS & state.keys())
    if taken:
        raise ValueError(
            f"client_state has keys {taken}, which are DeepSpeed's own in the same file, so the checkpoint could not "
            "be loaded: rename them"
        )
    with safe_globals(list(ALLOWED)):
        refused = {name: names for name, value in state.items() if (names := _refused_in(_saved(value)))}
    if refused and dist.get_rank() == 0:
        warnings.warn(
            f"client_state has values of types that load() will refuse, because building them may run code: {refused}. "
            "Save plain values, or call torch.serialization.add_safe_globals([...]) with these types before loading",
            RuntimeWarning,
            stacklevel=5,
        )


def _saved(value: object) -> io.BytesIO:
    """Return a value as torch saves it, without its tensors."""
    file = io.BytesIO()
    with suppress(Exception):  # the save itself will raise the error
        torch.save(_without_tensors(value), file)
    file.seek(0)
    return file


def _without_tensors(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return None
    if type(value) is dict:
        return {name: _without_tensors(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return [_without_tensors(each) for each in value]
    return value


def refused_types(paths: Sequence[Path]) -> list[str]:
    """Return a message for each of torch's files that holds types which are not allowed. No tensor is read."""
    with safe_globals(list(ALLOWED)):
        return [_refusal(path.name, names) for path in paths if (names := _refused_in(path))]


def _refused_in(file: Any) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # torch's older format, or another file: reading it raises the error
        return []


def _named_in(error: Exception) -> str:
    """Return the type that torch's message names, or else the first line of the message."""
    found = re.search(r"got <class '([^']+)'>|GLOBAL (\S+)", str(error))
    return next(filter(None, found.groups())) if found else str(error).splitlines()[0]


def _refusal(file: str, names: Sequence[str]) -> str:
    return (
        f"{file} holds {', '.join(names[:5])}, and building it may run code. If you trust the file, call "
        "torch.serialization.add_safe_globals([...]) with these types before loading, or load(..., trusted=True)"
    )
