"""Coordinate the ranks that save or load a checkpoint: all continue, or all raise the same error within a timeout.

An agreement (:mod:`ds_topo.launch.council`) determines whether all ranks begin the same operation. After it
rank 0 decides, as in every council (:mod:`ds_topo.launch.council`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from ds_topo.base.torch_names import default_store, job_timeout
from ds_topo.checkpoint.folder import told
from ds_topo.errors import CheckpointError, listed
from ds_topo.health import guard
from ds_topo.launch.council import GATHERING, Council, agree, class_of, one_line

T = TypeVar("T")
_ALONE = timedelta(seconds=20)
"""The timeout of a rank that left DeepSpeed's function early; the others may be dead or blocked in it."""


class Meeting(Council):
    """One operation on a checkpoint, in which all ranks of the job take part."""

    @classmethod
    def begin(cls, subject: str, plan: str, failure: Exception | None = None) -> Meeting:
        """Check that all ranks begin the same operation, or raise DisagreementError.

        A rank that cannot begin passes its ``failure``. It raises that error, and the other ranks name it.
        """
        if failure is not None and not dist.is_initialized():
            raise failure
        timeout, members = job_timeout(), range(dist.get_world_size())
        token = agree(plan, members, timeout, failure=failure, subject=subject)
        # keys go with the next agreement, and a rank alone makes none
        store = default_store() if len(members) > 1 else dist.HashStore()
        return cls(store, f"{token}/checkpoint", dist.get_rank(), members, subject, timeout, CheckpointError)

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
            CheckpointError: ranks failed or did not take part. It is of the class that the first of them raised. The
                message has ranks, hosts and errors, unless all raised the same one.
        """
        meeting, result, failure = self, None, None
        content: dict[str, Any] = {}
        try:
            result = work()
            content["result"] = result if decide is not None else None
        except Exception as error:  # of any class: the other ranks must receive it
            if is_alone:
                guard.report(error)
            failure, text = error, one_line(error, CheckpointError)
            said = f"ranks [{dist.get_rank()}] on {socket.gethostname()} -> {text}"
            content |= {"error": type(error).__name__, "text": text, "said": said}
            limit = min(self.timeout, _ALONE) if is_alone else self.timeout
            meeting = replace(self, subject=f"{self.subject}: {said}", timeout=limit)

        def judge(posted: list[dict[str, Any]]) -> None:
            failures = [one for one in posted if "error" in one]
            if failures:
                is_common = len(failures) == len(posted) and len({one["text"] for one in failures}) == 1
                told_of = failures[0]["text"] if is_common else told([one["said"] for one in failures])
                kind = class_of(failures[0]["error"], CheckpointError)
                raise kind(told_of if is_common and kind is not CheckpointError else f"{self.subject}: {told_of}")
            if decide is not None:
                decide([one["result"] for one in posted])

        try:
            meeting.decided_from(name, content, judge)
        except CheckpointError as outcome:
            raise outcome from (None if content.get("text") == str(outcome) else failure)
        return cast(T, result)

    def decided_from(self, name: str, content: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Return on every rank what ``decide`` returned on rank 0 for the contents of all ranks, or raise its error.

        This is :meth:`~ds_topo.launch.council.Council.decide`, except that CheckpointError names ranks that do not
        post.
        """

        def judge(posted: dict[int, Any]) -> Any:
            if missing := sorted(set(self.members).difference(posted)):
                waited = self.timeout * GATHERING
                raise CheckpointError(
                    f"{self.subject}: ranks {listed(missing)} did not come within {waited}: let every rank make this "
                    "call, or raise the timeout if some are slower"
                )
            return decide(list(posted.values()))

        return self.decide(name, content, judge)


def shared_out(items: Iterable[Any]) -> list[Any]:
    """Return this rank's share of items that all ranks list in the same order."""
    return list(items)[dist.get_rank() :: dist.get_world_size()]
