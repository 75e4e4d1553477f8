"""How the ranks that save or load a checkpoint come to one outcome: all go on, or all raise the same error, in time.

Whether all have done their part is an agreement (:mod:`ds_topo.process_groups.agreement`). What rank 0 decides or has
done for all of them, and what it needs to know for that, goes through the job's store: nothing is gathered by
collectives, which would pad every rank's part to the longest one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_topo import errors
from ds_topo.errors import CheckpointError, DisagreementError
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.deadline import UNANSWERED_AFTER, within
from ds_topo.process_groups.store_keys import leave
from ds_topo.process_groups.torch_names import default_store, get_several, job_timeout

_PART = 1 << 22
"""Characters of a value; the store's server refuses 8 MiB."""
_ALONE = timedelta(seconds=20)
"""How long a rank whose call of DeepSpeed failed waits for others, which may be dead or wait there for it."""
_AT_ONCE = 256
"""Values that are read by one request."""


@dataclass(frozen=True)
class Meeting:
    """All ranks of the job about one checkpoint, from the first agreement on.

    Args:
        subject: what is done, for messages.
        token: where in the store.
    """

    subject: str
    token: str
    timeout: timedelta

    @classmethod
    def begin(cls, subject: str, plan: str, failure: Exception | None = None) -> Meeting:
        """Check that all ranks are about to do the same.

        Raises:
            DisagreementError: they are not, or have not come.
            Exception: ``failure``, which the others hear of.
        """
        if failure is not None and not dist.is_initialized():
            raise failure
        timeout = job_timeout()
        token = agree(plan, range(dist.get_world_size()), timeout, failure=failure, subject=subject)
        return cls(subject, f"{token}/checkpoint", timeout)

    def all_or_none(self, done: str, failure: Exception | None, *, is_alone: bool = False) -> None:
        """Go on if no rank has failed.

        Args:
            done: what this rank has done.
            failure: why it has not.
            is_alone: it left a function early in which others may be or have died: they get some seconds to come.

        Raises:
            CheckpointError: some have, or did not come; with ranks, hosts and what they say, the same on every rank.
        """
        said = done if failure is None else _one_line(failure)
        try:
            timeout = min(self.timeout, _ALONE) if is_alone else self.timeout
            agree(said, range(dist.get_world_size()), timeout, subject=self.subject)
        except DisagreementError as error:
            raise CheckpointError(f"{error}".replace("-> plan: ", "-> ")) from failure or error
        if failure is not None:
            raise CheckpointError(f"{self.subject}, on every rank: {said}") from failure

    # -- every rank to rank 0 ------------------------------------------------------------------------------------------

    def post(self, name: str, content: Any) -> None:
        """Give rank 0 something, as JSON, to be read after the next agreement of all ranks."""
        self._put(f"{name}/{dist.get_rank()}", json.dumps(content))

    def posted(self, name: str) -> list[Any]:
        """On rank 0, what every rank has posted, by rank; it is deleted from the store."""
        keys = [f"{name}/{rank}" for rank in range(dist.get_world_size())]
        return [json.loads(text) for text in within(self.timeout, self.subject, lambda: self._taken(keys))]

    def _taken(self, keys: list[str]) -> list[str]:
        found: list[str] = []
        store = default_store()
        for start in range(0, len(keys), _AT_ONCE):
            some = keys[start : start + _AT_ONCE]
            counts = [int(count) for count in get_several(store, [f"{self.token}/{key}/parts" for key in some])]
            for key, count in zip(some, counts, strict=True):
                parts = self._keys_of_parts(key, count)
                found.append(b"".join(get_several(store, parts)).decode())
                for part in (*parts, f"{self.token}/{key}/parts"):
                    store.delete_key(part)
        return found

    # -- rank 0 to every rank ------------------------------------------------------------------------------------------

    def decided(self, name: str, decide: Callable[[], Any]) -> Any:
        """What ``decide()`` returned on rank 0, as JSON would have it, or the error that it raised, on every rank.

        Raises:
            CheckpointError: of the class that was raised, if that is one; or rank 0 does not answer.
        """
        if dist.get_rank() == 0:
            try:
                outcome = {"value": decide()}
            except Exception as error:  # whatever it is: the others hear of it
                outcome = {"error": type(error).__name__, "text": _one_line(error)}
            keys = self._put(name, json.dumps(outcome))
            leave(default_store(), 0, range(dist.get_world_size()), keys)
        else:
            outcome = json.loads(within(self.timeout * UNANSWERED_AFTER, self.subject, lambda: self._got(name)))
        if "error" not in outcome:
            return outcome["value"]
        kind = getattr(errors, outcome["error"], CheckpointError)
        is_known = isinstance(kind, type) and issubclass(kind, CheckpointError) and kind is not CheckpointError
        raise (kind if is_known else CheckpointError)(outcome["text"] if is_known else self._by_first(outcome["text"]))

    def _by_first(self, text: str) -> str:
        return f"{self.subject}: rank 0: {text}"

    def _got(self, name: str) -> str:
        store = default_store()
        try:
            store.wait([f"{self.token}/{name}/parts"], self.timeout)
            count = int(store.get(f"{self.token}/{name}/parts"))
            return b"".join(get_several(store, self._keys_of_parts(name, count))).decode()
        except RuntimeError as error:
            raise CheckpointError(
                self._by_first(f"it did not say how it went within {self.timeout}: {error}")
            ) from None

    def _put(self, name: str, text: str) -> list[str]:
        store = default_store()
        parts = [text[start : start + _PART] for start in range(0, max(1, len(text)), _PART)]
        keys = self._keys_of_parts(name, len(parts))
        for key, part in zip(keys, parts, strict=True):
            store.set(key, part)
        store.set(f"{self.token}/{name}/parts", str(len(parts)))
        return [*keys, f"{self.token}/{name}/parts"]

    def _keys_of_parts(self, name: str, count: int) -> list[str]:
        return [f"{self.token}/{name}/{part}" for part in range(count)]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def shared_out(items: Iterable[Any]) -> list[Any]:
    """This rank's share of something that all ranks list in the same order."""
    return list(items)[dist.get_rank() :: dist.get_world_size()]
