"""Print an error that ends several ranks alike once: one rank prints its traceback, each of the others a line.

``sys.excepthook`` of a joined job is :class:`SharedTraceback`. The rank that is first to claim an error in the job's
store prints it, and says so in the store. The others wait a moment for that, so that no launcher ends the first rank
before it has printed. Errors are alike if their class, message, lines of code and causes are equal. A rank with another
error prints that, and so does every rank if the store does not answer.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import traceback
import weakref
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from ds_topo.base.torch_names import Store, default_store, served_at
from ds_topo.errors import printable, tell
from ds_topo.launch.council import apart

_LIMIT = timedelta(seconds=3)
"""The longest time for the requests of one rank to the store, and for the traceback of another rank."""
_SHOWN = 200


class SharedTraceback:
    """A ``sys.excepthook`` that prints what another rank has printed already in one line.

    It calls the former hook, and that one is back once the store's job is over.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._rank, self._before = weakref.ref(store), dist.get_rank(), sys.excepthook
        sys.excepthook = self
        weakref.finalize(store, self.remove).atexit = False

    def remove(self) -> None:
        """Put the former hook back, unless another one was set since, which may call this one."""
        if sys.excepthook is self:
            sys.excepthook = self._before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Print the error, or a line if another rank prints the same one."""
        store = self._store()
        if store is None or not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        key, me = f"ds_topo/traceback/{digest_of(error, trace)}", [self._rank, socket.gethostname()]
        try:
            first = json.loads(
                apart(store, _LIMIT, "an error", lambda other: other.compare_set(key, "", json.dumps(me)))
            )
            if first != me:
                apart(store, 2 * _LIMIT, "an error", lambda other: other.wait([f"{key}/printed"], _LIMIT))
        except Exception:  # of any kind: an error must be printed
            self._before(kind, error, trace)
            return
        if first == me:
            self._before(kind, error, trace)
            sys.stderr.flush()
            try:
                apart(store, _LIMIT, "an error", lambda other: other.set(f"{key}/printed", ""))
            except Exception:  # the other ranks print it, too
                return
        else:
            text = printable(str(error).partition("\n")[0][:_SHOWN])
            tell(
                f"ds_topo: rank {me[0]} on {me[1]} ends by the same error as rank {first[0]} on {first[1]}, which has "
                f"printed it in full: {kind.__name__}: {text}"
            )


def share_tracebacks() -> None:
    """Set the hook for the present job, once, if it has several ranks."""
    store = default_store()
    if dist.get_world_size() > 1 and served_at(store) is not None:
        present = sys.excepthook
        if not (isinstance(present, SharedTraceback) and present._store() is store):
            SharedTraceback(store)


def digest_of(error: BaseException, trace: TracebackType | None) -> str:
    """Return a text that is the same for errors that are alike.

    Causes whose message is a part of the error's own do not count: where one rank decides for all, it alone has them.
    """
    own = str(error)
    causes: list[list[str]] = []
    each = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while each is not None and len(causes) < 10:
        if str(each) not in own:
            causes.append([type(each).__qualname__, str(each)])
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    places = [[frame.filename, frame.lineno] for frame in traceback.extract_tb(trace)]
    content = json.dumps([type(error).__qualname__, own, causes, places])
    return hashlib.sha1(content.encode(errors="replace"), usedforsecurity=False).hexdigest()[:16]
