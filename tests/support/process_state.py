"""Note the state of a process before a function, restore it afterwards, and report what cannot be restored."""

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
"""Time that a thread has to end after the function has returned."""
LASTING_THREADS = {"tqdm_monitor"}
"""Threads that a library starts once per process."""
TASKS = Path("/proc/self/task")
WORN = 64
"""Threads, including those of C++, that a process may keep from earlier functions."""


class ProcessState:
    """The state of this process at the last :meth:`note`.

    :meth:`put_back` restores the environment, the working directory, arguments, warning filters, torch's default type,
    gradient mode and linear function, process groups, and the data of the modules of DeepSpeed and ds_topo. (ZeRO 3
    replaces the linear function permanently by one with other rounding.) It reports what it cannot restore: running
    threads, functions that are still replaced, and changed attributes of objects in ds_topo's modules.
    """

    def __init__(self) -> None:
        self._modules = ModuleState(("deepspeed", "ds_topo"), strict="ds_topo")

    def note(self) -> None:
        """Note the state, and seed all random number generators."""
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        self._environment, self._folder, self._arguments = dict(os.environ), os.getcwd(), list(sys.argv)
        self._filters = list(warnings.filters)
        self._dtype, self._makes_graphs = torch.get_default_dtype(), torch.is_grad_enabled()
        self._linear = functional.linear
        self._threads = _threads()
        self._modules.note()
        gc.freeze()  # the collections of the function and after it need not look at what was there before

    def put_back(self) -> list[str]:
        """Restore the state; return one message for each change that cannot be restored."""
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.argv[:], warnings.filters[:] = self._arguments, self._filters
        warnings._filters_mutated()  # type: ignore[attr-defined]
        torch.set_default_dtype(self._dtype)
        torch.set_grad_enabled(self._makes_graphs)
        functional.linear = self._linear
        gc.collect()  # unreachable objects undo their changes when they are freed
        changes = self._modules.changes()
        left = self._modules.left(changes)
        _destroy_process_groups()
        self._modules.put_back(changes)
        gc.collect()
        return left + self._threads_that_stay()

    def is_worn(self) -> bool:
        """Check for many threads. They belong to process groups that cannot be freed, and slow all ranks down."""
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
