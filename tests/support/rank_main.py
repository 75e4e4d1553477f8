"""The main loop of a rank: wait for a function, call it in a fresh ``torch.distributed``, report, tidy up."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.process_state import ProcessState

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
PR_SET_PDEATHSIG = 1
STATE = ProcessState()
"""The state of this process. The fork server notes what it has imported, so that its ranks need not."""


@dataclass(frozen=True)
class Call:
    """The order to call a function."""

    number: int
    """The number of this call in its world; each call has its own keys in the store."""
    function: bytes
    """The pickled function and its arguments."""
    timeout: float
    """The timeout of the process group, in seconds."""
    backend: str
    """``gloo``, or ``strict`` for the stand-in for NCCL."""
    test: str = ""
    """The test that calls it, as pytest's environment variable names it."""


@dataclass(frozen=True)
class Tidy:
    """The order to restore what the function changed."""


@dataclass(frozen=True)
class Report:
    """The outcome of an order on one rank."""

    kind: str
    """``ok``, ``error`` or ``left something behind``; without a report, ``died`` or ``missed the deadline``."""
    pickled: bytes = b""
    """The pickled result of the function, or its exception."""
    account: str = ""
    """More text for the reader of the failure."""

    def value(self) -> Any:
        """Return the result or exception."""
        return pickle.loads(self.pickled)


def serve(rank: int, world_size: int, port: int, folder: str, pipe: Connection) -> None:
    """Follow the orders from the other end of the pipe until that end closes."""
    _die_with_parent()
    with open(Path(folder, f"stack{rank}"), "w") as stack, open(Path(folder, f"output{rank}"), "a") as output:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        os.environ.update(RANK_ENVIRONMENT)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        import torch

        torch.set_num_threads(1)
        for device in (
            torch.cuda,
            torch.xpu,
            torch.mtia,
        ):  # else each seed formats a stack for a device that is not there
            device._is_in_bad_fork = lambda: True
        while True:
            try:
                order: Call | Tidy = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                break
            if isinstance(order, Call):
                os.truncate(output.fileno(), 0)
                report = _call(order, rank, world_size, port)
            else:
                left = STATE.put_back()
                report = Report("left something behind", account="".join(f"\n{what}" for what in left))
                report = report if left else Report("ok", pickle.dumps(STATE.is_worn()))
            sys.stdout.flush()
            sys.stderr.flush()
            pipe.send_bytes(pickle.dumps(report))
    # Leave without running destructors: a failed peer must not make this rank wait for it.
    os._exit(0)


def _call(order: Call, rank: int, world_size: int, port: int) -> Report:
    import torch.distributed as dist

    from tests.support import strict_backend

    limit = timedelta(seconds=order.timeout)
    try:
        os.environ["PYTEST_CURRENT_TEST"] = order.test
        function, args = pickle.loads(order.function)  # imports their modules before the state is noted
        STATE.note()
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=limit)
        store = dist.PrefixStore(f"call{order.number}", store)
        if order.backend == strict_backend.NAME:
            strict_backend.register()
        dist.init_process_group(order.backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        # send() would share tensors instead of copying them
        return Report("ok", pickle.dumps(function(*args)))
    except BaseException as error:
        return Report("error", _pickled(error), _account_of(error))


def _account_of(error: BaseException) -> str:
    """Return the exception's first line, then the traceback from the function on."""
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)
    summary = "".join(traceback.format_exception_only(error)).splitlines()[0]
    return f": {summary}\n{''.join(traceback.format_exception(error))}"


def _pickled(error: BaseException) -> bytes:
    """Pickle the exception, or its text if the exception cannot be pickled."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RuntimeError(repr(error)))
    return pickled


def _die_with_parent() -> None:
    """End this rank with its parent, even while it hangs in a collective."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
