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
import os
import pathlib
import pickle
import re
import shlex
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime import state_dict_factory
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils._pytree import tree_map_only

from ds_topo.base import patches
from ds_topo.base.ledger import ledger
from ds_topo.checkpoint.folder import entries_in, open_file, told
from ds_topo.errors import DamagedCheckpointError, UnsafeCheckpointError, abridged, warn

_NUMBERS = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
_PATHS = (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
ALLOWED: tuple[Any, ...] = (
    *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum),
    *(argparse.Namespace, np.ndarray, np.dtype, np.float64().__reduce__()[0], np.empty(0).__reduce__()[0], *_NUMBERS),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *_PATHS,
    *(decimal.Decimal, fractions.Fraction, uuid.UUID, deque, range, slice, complex),
)
"""The types of DeepSpeed's own files, and common types of programs. Building one runs no code of the file."""
_METADATA = "torch.distributed.checkpoint.metadata"
"""The module of torch's metadata. It is imported by readers of torch's format only, see ``engine_state``."""
_OF_METADATA = {
    *(("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict")),
    *(("builtins", "set"), ("builtins", "frozenset"), ("torch.distributed.checkpoint.filesystem", "_StorageInfo")),
}
"""Names in the metadata of ``torch.distributed.checkpoint``, besides data types and the classes of its own module."""
OF_DEEPSPEED = {
    *("module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd"),
    *("skipped_steps", "global_steps", "dp_world_size", "mp_world_size"),
    "sparse_tensor_module_names",  # in files of DeepSpeed before 0.19.8
}
"""Keys that ``DeepSpeedEngine.load_checkpoint`` reads from the file that also holds the program's ``client_state``."""
_RETURNED = {
    *("buffer_names", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"),
    *("global_samples", "ds_config", "ds_version", "num_experts", "autoep_layers", "ds_autoep_layers"),
    *("checkpoint_parallel_dimensions", UNIVERSAL_CHECKPOINT_INFO, "folding"),
}
"""DeepSpeed's further keys in that file. Its ``load_checkpoint`` returns them beside the program's own."""
_ALWAYS_RETURNED = {"buffer_names", "ds_config", "ds_version"}
REPLICAS, _REPLACED = "ds_topo_replicas", "ds_topo_replaced"
"""Our entries: the counts of a manager of replicas, and the names of DeepSpeed's entries that the program replaced."""
_adding = threading.RLock()
"""Held while the allowed types are among torch's, so that one thread does not remove them while another reads."""


@contextmanager
def allowed_types() -> Iterator[None]:
    """Add the allowed types to those that torch builds with ``weights_only=True``. A program's own additions stay."""
    with _adding:
        known = get_safe_globals()
        with safe_globals([one for one in ALLOWED if one not in known]):
            yield


@contextmanager
def reading_checkpoint(folder: Path, *, trusted: bool = False) -> Iterator[None]:
    """Let ``torch.load`` build only allowed types, unless ``trusted``, and name a file that it cannot read.

    This holds for everything that this thread loads and, on all threads, for the files below ``folder``, whatever the
    caller and its arguments. Other threads load other files as they wish.

    DeepSpeed's loader of state dicts reads its first file twice, to count files and to load it. Here the second call
    returns what the first one has read.
    """
    thread, root = threading.get_ident(), os.path.join(os.path.realpath(folder), "")
    read: dict[Any, Any] = {}
    """The content that DeepSpeed's loader has read last, by file, until any other file is read."""

    def restricted(load: Any) -> Any:
        @wraps(load)
        def load_allowed(f: Any, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != thread and not _path_of(f).startswith(root):
                return load(f, *arguments, **options)
            is_loader = getattr(options.get("map_location"), "__module__", "") == state_dict_factory.__name__
            if is_loader and f in read:
                return read.pop(f)
            read.clear()  # before other content needs memory
            limits = {} if trusted else {"weights_only": True}
            try:
                content = load(f, *arguments, **{**options, **limits})
            except pickle.UnpicklingError as error:
                if names := _refused_in(f) or _named_in(error):
                    raise UnsafeCheckpointError(_refusal(str(f), names)) from None
                raise damaged(f, error, folder) from error
            except Exception as error:  # of any class: torch raises whatever a changed byte leads to
                raise damaged(f, error, folder) from error
            if is_loader:
                read[f] = content
            return content

        return load_allowed

    with nullcontext() if trusted else allowed_types(), ledger.bound(patches.TORCH_LOAD, restricted):
        yield
    read.clear()


def _path_of(file: Any) -> str:
    """Return the real path of what a program passes to ``torch.load``; empty if it has none."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) else ""


def damaged(file: object, error: Exception, folder: Path) -> DamagedCheckpointError:
    """Return the error of a file of a checkpoint that torch cannot read."""
    reason = str(error).partition("\n")[0][:200]
    name = file if isinstance(file, (str, os.PathLike)) else f"a file of {folder}"
    return DamagedCheckpointError(
        f"{name} cannot be read ({type(error).__name__}: {reason}): it is damaged, was changed after it was written, "
        "or another job with keep_last removed it. Give each job a folder of its own, or load another checkpoint, by "
        f"its tag, and find all such files by {how_to_verify(folder)}"
    )


def how_to_verify(checkpoint: Path) -> str:
    """Return how a user compares the digests of all files of a checkpoint."""
    return f'{shlex.join(["ds-topo", "checkpoint", str(checkpoint), "--verify"])}, or load(..., verify="digests")'


class _MetadataUnpickler(pickle.Unpickler):
    """Builds only the types of which ``torch.distributed.checkpoint`` makes its metadata."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a type by name; nothing is imported for one that is not allowed."""
        found = getattr(sys.modules.get(module), name, None)
        is_of_torch = (module, name) in _OF_METADATA or (module == "torch" and isinstance(found, torch.dtype))
        is_record = module == _METADATA == getattr(found, "__module__", "") and isinstance(found, type)
        if is_of_torch or is_record or found in _PATHS:
            return super().find_class(module, name)
        raise UnsafeCheckpointError(
            f"the metadata holds {module}.{name}, and building it may run code. If you trust the folder, call "
            "load_torch(..., trusted=True)"
        )


def check_metadata(folder: Path, *, trusted: bool) -> None:
    """Refuse a folder of torch whose ``.metadata`` would run code when torch reads it, or whose files would block it.

    Raises UnsafeCheckpointError, or OSError if a file cannot be read.
    """
    found = entries_in(folder).items()
    if problems := [f"{name} {size}" for name, size in found if isinstance(size, str) and name != "."]:
        raise OSError(told(problems))
    if trusted:
        return
    with open_file(folder / ".metadata") as file:
        try:
            _MetadataUnpickler(file).load()
        except (UnsafeCheckpointError, OSError):
            raise
        except Exception:  # torch reads it next, and its error says that the file is damaged
            return


def entries_of_program(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a loaded ``client_state`` that the program has saved, without those of DeepSpeed."""
    left_out = (OF_DEEPSPEED | _RETURNED | {REPLICAS, _REPLACED}) - set(state.get(_REPLACED, ()))
    return {key: value for key, value in state.items() if key not in left_out}


def entries_to_save(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a ``client_state`` to save, with a note of those that replace DeepSpeed's.

    A state that stock DeepSpeed has loaded also holds DeepSpeed's own entries of that time; these are left out.
    """
    own = entries_of_program(state) if state.keys() >= _ALWAYS_RETURNED else dict(state)
    replaced = sorted(own.keys() & _RETURNED)
    return {**own, _REPLACED: replaced} if replaced else own


def check_client_state(state: object) -> None:
    """Refuse a ``client_state`` that could not be loaded again; warn on rank 0 about types that loading refuses."""
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise TypeError(f"client_state={abridged(state)} is not a mapping: give a dict of names and values, or None")
    state = entries_to_save(state)
    taken = sorted(OF_DEEPSPEED & state.keys())
    if taken:
        raise ValueError(
            f"client_state has keys {taken}, which are DeepSpeed's own in the same file, so the checkpoint could not "
            "be loaded: rename them"
        )
    with allowed_types():
        refused = {name: names for name, value in state.items() if (names := _refused_in(_saved(name, value)))}
    if refused and dist.get_rank() == 0:
        warn(
            f"client_state has values of types that load() will refuse, because building them may run code: {refused}. "
            "Save plain values, or call torch.serialization.add_safe_globals([...]) with these types before loading"
        )


def _saved(name: object, value: object) -> io.BytesIO:
    """Return a value of the ``client_state`` as torch saves it, without its tensors."""
    file = io.BytesIO()
    try:
        torch.save(tree_map_only((torch.Tensor, np.ndarray), lambda _: None, value), file)
    except Exception as error:  # of any class: the value's own methods may raise
        reason = re.sub(r" at 0x\w+", "", str(error))  # equal on all ranks
        raise TypeError(
            f"client_state[{name!r}] cannot be pickled ({reason}): save plain values, and build such objects again "
            "after loading"
        ) from None
    file.seek(0)
    return file


def refused_types(paths: Sequence[Path]) -> list[str]:
    """Return a message for each of torch's files that holds types which are not allowed. No tensor is read."""
    with allowed_types():
        return [_refusal(path.name, names) for path in paths if (names := _refused_in(path))]


def _refused_in(file: Any) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # torch's older format, or another file: reading it raises the error
        return []


def _named_in(error: Exception) -> list[str]:
    """Return the type that torch's message names, if it names one."""
    found = re.search(r"got <class '([^']+)'>|GLOBAL (\S+)", str(error))
    return [next(filter(None, found.groups()))] if found else []


def _refusal(file: str, names: Sequence[str]) -> str:
    return (
        f"{file} holds {', '.join(names[:5])}, and building it may run code. If you trust the file, call "
        "torch.serialization.add_safe_globals([...]) with these types before loading, or load(..., trusted=True)"
    )
