"""Print an error that ends several ranks alike once: one rank prints its traceback, each of the others a line.

``sys.excepthook`` of a joined job, :class:`~ds_topo.launch.joining.SharedTraceback`, imports this. The rank that is
first to claim an error in the job's store prints it, and says so in the store. The others wait a moment for that, so
that no launcher ends the first rank before it has printed. Errors are alike if their class, message, lines of code and
causes are equal. A rank with another error prints that, and so does every rank if the store does not answer.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TypeAlias

from ds_topo.base.torch_names import Store
from ds_topo.errors import printable, tell
from ds_topo.launch.council import apart

_LIMIT = timedelta(seconds=3)
"""The longest time for the requests of one rank to the store, and for the traceback of another rank."""
_SHOWN = 200
Hook: TypeAlias = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def print_once(
    store: Store, rank: int, before: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print the error by the hook that was there before, or a line if another rank prints the same one."""
    key, me = f"ds_topo/traceback/{digest_of(error, trace)}", [rank, socket.gethostname()]
    try:
        first = json.loads(apart(store, _LIMIT, "an error", lambda other: other.compare_set(key, "", json.dumps(me))))
        if first != me:
            apart(store, 2 * _LIMIT, "an error", lambda other: other.wait([f"{key}/printed"], _LIMIT))
    except Exception:  # of any kind: an error must be printed
        before(kind, error, trace)
        return
    if first == me:
        before(kind, error, trace)
        sys.stderr.flush()
        with suppress(Exception):  # the other ranks print it, too
            apart(store, _LIMIT, "an error", lambda other: other.set(f"{key}/printed", ""))
    else:
        text = printable(str(error).partition("\n")[0][:_SHOWN])
        tell(
            f"ds_topo: rank {me[0]} on {me[1]} ends by the same error as rank {first[0]} on {first[1]}, which has "
            f"printed it in full: {kind.__name__}: {text}"
        )


def digest_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return a text that is the same for errors that are alike.

    Causes whose message is a part of the error's own do not count: where one rank decides for all, it alone has them.
    """
    own = str(error)
    causes: list[list[str]] = []
    each = error
    for _ in range(10):  # causes may form a circle
        cause = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        if cause is None:
            break
        if str(cause) not in own:
            causes.append([type(cause).__qualname__, str(cause)])
        each = cause
    places = [[frame.filename, frame.lineno] for frame in traceback.extract_tb(trace)]
    content = json.dumps([type(error).__qualname__, own, causes, places])
    return hashlib.sha1(content.encode(errors="replace"), usedforsecurity=False).hexdigest()[:16]
