"""Calls that return in time, even where the store's server has stopped.

torch's store waits for an answer without limit: a timeout of its own does not run out against a server whose process
is stopped, or whose host is cut off. So such calls run in a thread that the caller leaves behind when its time is over;
the job cannot go on then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import TypeVar

import torch

from ds_topo.errors import StoreTimeoutError
from ds_topo.process_groups.torch_names import address_of_store

Result = TypeVar("Result")

UNANSWERED_AFTER = 1.2
"""The share of a timeout after which the store's own limits, where they work, have run out."""


def within(limit: timedelta, what: str, call: Callable[[], Result]) -> Result:
    """What ``call()`` returns or raises, in a thread of its own on this thread's device.

    Args:
        limit: for the whole call.
        what: what cannot be done without an answer, for the message.
        call: what asks the store.

    Raises:
        StoreTimeoutError: the limit is over; names the process that serves the store.

    >>> within(timedelta(seconds=5), "a sum", lambda: 1 + 1)
    2
    """
    result: Future[Result] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            result.set_result(call())
        except BaseException as error:  # raised where it was called for
            result.set_exception(error)

    threading.Thread(target=run, name=f"ds_topo {what}", daemon=True).start()
    try:
        return result.result(limit.total_seconds())
    except TimeoutError:
        if result.done():  # at the last moment, or the error is the call's own
            return result.result()
        raise StoreTimeoutError(
            f"{what}: the store of the job{address_of_store()} did not answer within {limit}. The process that serves "
            "it (rank 0, or the launcher on its host) has stopped, its host has, or the link to it is cut"
        ) from None
