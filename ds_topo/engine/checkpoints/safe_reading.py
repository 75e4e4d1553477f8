"""Reading checkpoints without running code that is in them: torch's restricted unpickler, and DeepSpeed's own types.

torch builds tensors and plain containers alone, and what ``torch.serialization.add_safe_globals`` lists. The few types
of DeepSpeed's own files are listed here while a checkpoint is read; programs list those of their ``client_state``.
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

from ds_topo.engine import changes
from ds_topo.errors import UnsafeCheckpointError
from ds_topo.ledger import Make, ledger

_NUMBERS = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
ALLOWED: tuple[Any, ...] = (
    *(fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum),
    *(argparse.Namespace, np.ndarray, np.dtype, np.float64().__reduce__()[0], np.empty(0).__reduce__()[0], *_NUMBERS),
)
"""What files of DeepSpeed hold besides tensors and plain containers; and what people add: parsed arguments, NumPy's
numbers and arrays of them."""


@contextmanager
def only_allowed_types() -> Iterator[None]:
    """``torch.load`` on this thread builds allowed types alone, whoever calls it and with whatever arguments."""
    with safe_globals(list(ALLOWED)), ledger.bound(changes.TORCH_LOAD, _restricted(threading.get_ident())):
        yield


def _restricted(thread: int) -> Make:
    def make(load: Any) -> Any:
        @wraps(load)
        def load_allowed(f: Any, *arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != thread:
                return load(f, *arguments, **options)
            try:
                return load(f, *arguments, **{**options, "weights_only": True})
            except pickle.UnpicklingError as error:
                raise UnsafeCheckpointError(_refusal(str(f), _refused_in(f) or [_named_in(error)])) from None

        return load_allowed

    return make


def _named_in(error: Exception) -> str:
    """The type that torch's message names far below its first line."""
    found = re.search(r"got <class '([^']+)'>|GLOBAL (\S+)", str(error))
    return next(filter(None, found.groups())) if found else str(error).splitlines()[0]


def refused_types(paths: Sequence[Path]) -> list[str]:
    """What in files of torch is not allowed, a message for each file; reads no tensor and builds nothing."""
    with safe_globals(list(ALLOWED)):
        return [_refusal(path.name, names) for path in paths if (names := _refused_in(path))]


def _refused_in(file: Any) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # torch's older format, or no file of torch: the reading itself says so
        return []


def _refusal(file: str, names: Sequence[str]) -> str:
    return (
        f"{file} holds {', '.join(names[:5])}, and building it may run code: if you trust where it comes from, call "
        "torch.serialization.add_safe_globals([...]) with these before, or load(..., trusted=True)"
    )
