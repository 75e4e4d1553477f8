"""What a function may change in its process: noted before, put back after, and told where it cannot be."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.support.module_state import ModuleState

SEED = 0
THREAD_SECONDS = 2.0
"""How long a thread may take to end after the function has returned."""
LASTING_THREADS = {"tqdm_monitor"}
"""Of libraries that start them once for the process."""
TASKS = Path("/proc/self/task")
WORN = 64
"""Threads, those of C++ included, that a process may keep from the functions before."""


class ProcessState:
    """The state of this process at the last :meth:`note`.

    Put back are environment, folder, arguments, filters of warnings, torch's default type, gradient mode and linear
    function, which ZeRO 3 replaces for good by one that rounds otherwise, process groups, and the data of DeepSpeed's
    and ds_topo's modules. What cannot be put back from outside, and is told, are threads, functions that are still
    replaced by others, and what objects in ds_topo's modules hold.
    """

    def __init__(self) -> None:
        self._modules = ModuleState(("deepspeed", "ds_topo"), told="ds_topo")

    def note(self) -> None:
        """Note everything, and start all random numbers anew."""
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        self._environment, self._folder, self._arguments = dict(os.environ), os.getcwd(), list(sys.argv)
        self._filters = list(warnings.filters)
        self._dtype, self._makes_graphs = torch.get_default_dtype(), torch.is_grad_enabled()
        self._linear = functional.linear
        self._threads = _threads()
        self._modules.note()

    def put_back(self) -> list[str]:
        """Put back what can be; say what cannot."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:], warnings.filters[:] = self._arguments, self._filters
        warnings._filters_mutated()  # type: ignore[attr-defined]
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._makes_graphs)
        functional.linear = self._linear
        gc.collect()  # what nobody holds any more takes back what it bound
        left = self._modules.left()
        _destroy_process_groups()
        self._modules.put_back()
        gc.collect()
        return left + self._threads_that_stay()

    def is_worn(self) -> bool:
        """Whether what nobody can free keeps process groups alive, whose many threads slow all ranks down."""
        return TASKS.exists() and len(list(TASKS.iterdir())) > WORN

    def _threads_that_stay(self) -> list[str]:
        end = time.monotonic() + THREAD_SECONDS
        while (more := _threads() - self._threads) and time.monotonic() < end:
            time.sleep(0.01)
        return [f"thread {thread.name} still runs" for thread in more]


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name not in LASTING_THREADS}


def _destroy_process_groups() -> None:
    if not dist.is_initialized():
        return
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None and comm.cdb is not None:
        comm.destroy_process_group()  # also empties DeepSpeed's tables of groups
    else:
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        _forget_sharding()  # it holds meshes of the groups that are gone, which equal meshes would get


def _forget_sharding() -> None:
    from torch.distributed.tensor import DTensor, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # older torch has one cache, and no name for this
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()
