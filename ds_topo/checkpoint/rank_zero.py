"""Coordinate the ranks that save or load a checkpoint: all continue, or all raise the same error within a timeout.

An agreement (:mod:`ds_topo.launch.agreement`) determines whether all ranks begin the same operation. After it
rank 0 decides. Its decisions, and the values and failures that it needs for them, go through the job's store.
Collectives are not used: they would pad every rank's value to the longest one.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ds_topo import errors
from ds_topo.base.torch_names import default_store, get_several, job_timeout
from ds_topo.checkpoint.folder import told
from ds_topo.errors import CheckpointError, listed, unanswered
from ds_topo.health import guard
from ds_topo.launch.agreement import UNANSWERED_AFTER, agree, leave, within
from ds_topo.launch.joining import GATHERING, MOMENT, ranks_that_came

T = TypeVar("T")
_PART = 1 << 22
"""Characters of a value in one key; the store's server refuses 8 MiB."""
_ALONE = timedelta(seconds=20)
"""The timeout of a rank that left DeepSpeed's function early; the others may be dead or blocked in it."""
_AT_ONCE = 256
"""Values that one request reads."""


@dataclass(frozen=True)
class Meeting:
    """One operation on a checkpoint, in which all ranks of the job take part."""

    subject: str
    """The operation, for messages."""
    token: str
    """The prefix of this operation's keys in the store."""
    timeout: timedelta

    @classmethod
    def begin(cls, subject: str, plan: str, failure: Exception | None = None) -> Meeting:
        """Check that all ranks begin the same operation.

        Raises:
            DisagreementError: their plans differ, or a rank did not take part.
            Exception: ``failure``, which the other ranks receive as part of their error.
        """
        if failure is not None and not dist.is_initialized():
            raise failure
        timeout = job_timeout()
        token = agree(plan, range(dist.get_world_size()), timeout, failure=failure, subject=subject)
        return cls(subject, f"{token}/checkpoint", timeout)

    def step(
        self,
        name: str,
        work: Callable[[], T],
        *,
        decide: Callable[[list[Any]], Any] | None = None,
        is_alone: bool = True,
    ) -> T:
        """Do this rank's part of the work, and return its result if no rank has failed.

        Args:
            name: the step, different from all others of this operation.
            work: the work.
            decide: called on rank 0 with the results of all ranks, as JSON, if none has failed.
            is_alone: a rank that fails leaves a function in which others may be blocked, and waits a short time only.

        Raises:
            CheckpointError: ranks failed or did not take part. It is of the class that the first of them raised, if
                that is a checkpoint error. The message has ranks, hosts and errors, unless all raised the same one.
        """
        meeting, result, failure = self, None, None
        content: dict[str, Any] = {}
        try:
            result = work()
            content["result"] = result if decide is not None else None
        except Exception as error:  # of any class: the other ranks must receive it
            if is_alone:
                guard.report(error)
            failure, text = error, _one_line(error)
            said = f"ranks [{dist.get_rank()}] on {socket.gethostname()} -> {text}"
            content |= {"error": type(error).__name__, "text": text, "said": said}
            limit = min(self.timeout, _ALONE) if is_alone else self.timeout
            meeting = replace(self, subject=f"{self.subject}: {said}", timeout=limit)

        def judge(posted: list[dict[str, Any]]) -> None:
            failures = [one for one in posted if "error" in one]
            if failures:
                is_common = len(failures) == len(posted) and len({one["text"] for one in failures}) == 1
                told_of = failures[0]["text"] if is_common else told([one["said"] for one in failures])
                kind = _class_of(failures[0])
                raise kind(told_of if is_common and kind is not CheckpointError else f"{self.subject}: {told_of}")
            if decide is not None:
                decide([one["result"] for one in posted])

        try:
            meeting.decided_from(name, content, judge)
        except CheckpointError as outcome:
            raise outcome from failure
        return cast(T, result)

    def decided(self, name: str, decide: Callable[[], Any]) -> Any:
        """Return on every rank what ``decide()`` returned on rank 0, as JSON, or raise its error on every rank.

        Raises:
            CheckpointError: of the class that was raised, if that is a checkpoint error; or rank 0 does not answer.
        """
        if dist.get_rank() == 0:
            try:
                outcome = {"value": decide()}
            except Exception as error:  # of any class: the other ranks must receive it
                said = "" if isinstance(error, CheckpointError) else f"{self.subject}: rank 0: "
                outcome = {"error": type(error).__name__, "text": f"{said}{_one_line(error)}"}
            if dist.get_world_size() > 1:
                self._write(name, json.dumps(outcome))
        else:
            outcome = json.loads(within(self.timeout * UNANSWERED_AFTER, self.subject, lambda: self._await(name)))
        if "error" not in outcome:
            return outcome["value"]
        self.end()
        raise _class_of(outcome)(outcome["text"])

    def decided_from(self, name: str, content: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what ``decide`` returned on rank 0 for the contents of all ranks, or raise its error.

        The contents are JSON values. Dataclasses in them are read as dicts.
        """
        text = json.dumps(content, default=vars)
        if dist.get_world_size() == 1:
            return self.decided(name, lambda: decide([json.loads(text)]))
        self._write(f"{name}/{dist.get_rank()}", text)
        return self.decided(f"{name} decided", lambda: decide(self._posted(name)))

    def _posted(self, name: str) -> list[Any]:
        """Return on rank 0 the values that all ranks have posted, by rank.

        Raises:
            CheckpointError: some ranks do not post. The message names them.
        """
        names = [f"{name}/{rank}" for rank in range(dist.get_world_size())]

        def read() -> list[str]:
            limit, keys = self.timeout * GATHERING, [f"{self.token}/{one}/0" for one in names]
            try:
                missing = sorted({*range(len(keys))}.difference(ranks_that_came(default_store(), keys, limit)))
            except RuntimeError as error:  # the store is lost
                raise CheckpointError(f"{self.subject}: {unanswered(error, limit)}") from None
            if missing:
                raise CheckpointError(f"{self.subject}: ranks {listed(missing)} did not come within {limit}")
            return self._read(names)

        return [json.loads(text) for text in within(self.timeout, self.subject, read)]

    def end(self) -> None:
        """Let rank 0, which may serve the store and end right afterwards, wait a moment until the others come here.

        Call it after the last agreement or decision. Those that raise an error have called it.
        """
        store, others, key = default_store(), dist.get_world_size() - 1, f"{self.token}/read"
        if not others:
            return

        def count() -> None:
            if dist.get_rank() == 0:
                leave(store, 0, range(others + 1), [key, f"{key}/all"])
                store.wait([f"{key}/all"], min(timedelta(seconds=MOMENT), self.timeout / 4))
            elif store.add(key, 1) == others:
                store.set(f"{key}/all", "")

        with suppress(RuntimeError):  # this rank knows the outcome
            within(self.timeout * UNANSWERED_AFTER, self.subject, count)

    def _await(self, name: str) -> str:
        try:
            default_store().wait([f"{self.token}/{name}/0"], self.timeout)
            return self._read([name])[0]
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.subject}: rank 0 did not report its result, {unanswered(error, self.timeout)}"
            ) from None

    def _write(self, name: str, text: str) -> None:
        """Store a text in parts until the next agreement. The first part, with their number before it, comes last."""
        store, parts = default_store(), [text[start : start + _PART] for start in range(0, max(1, len(text)), _PART)]
        keys = [f"{self.token}/{name}/{number}" for number in range(len(parts))]
        for key, part in zip(keys[1:], parts[1:], strict=True):
            store.set(key, part)
        store.set(keys[0], f"{len(parts)} {parts[0]}")
        leave(store, dist.get_rank(), range(dist.get_world_size()), keys)

    def _read(self, names: Sequence[str]) -> list[str]:
        store, found = default_store(), []
        for start in range(0, len(names), _AT_ONCE):
            keys = [f"{self.token}/{name}" for name in names[start : start + _AT_ONCE]]
            for key, first in zip(keys, get_several(store, [f"{key}/0" for key in keys]), strict=True):
                count, _, text = first.partition(b" ")
                more = [f"{key}/{number}" for number in range(1, int(count))]
                found.append(b"".join((text, *(get_several(store, more) if more else ()))).decode())
        return found


def _class_of(outcome: Mapping[str, Any]) -> type[CheckpointError]:
    """Return the class of an error that another rank raised: itself, if it is one of checkpoints."""
    kind = getattr(errors, outcome["error"], None)
    return kind if isinstance(kind, type) and issubclass(kind, CheckpointError) else CheckpointError


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def shared_out(items: Iterable[Any]) -> list[Any]:
    """Return this rank's share of items that all ranks list in the same order."""
    return list(items)[dist.get_rank() :: dist.get_world_size()]
