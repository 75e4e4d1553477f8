"""Read checkpoints without running code that they contain.

torch's restricted unpickler builds tensors, plain containers and the types in ``torch.serialization.add_safe_globals``.
The types of DeepSpeed's own files are added to these while a checkpoint is read. Programs add those of their
``client_state``.
"""

from __future__ import annotations

import argparse
import pickle
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ds_topo.errors import UnsafeCheckpointError
from ds_topo.ledger import ledger
from ds_topo.mpu import patches

_NUMBERS = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
ALLOWED: tuple[Any, ...] = (
    *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum),
    *(argparse.Namespace, np.ndarray, np.dtype, np.float64().__reduce__()[0], np.empty(0).__reduce__()[0], *_NUMBERS),
)
"""The types of DeepSpeed's own files, and common types of programs: parsed arguments, NumPy's numbers and arrays."""


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
