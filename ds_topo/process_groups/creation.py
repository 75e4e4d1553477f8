"""Create process groups from tables of ranks. This is the only module that calls ``torch.distributed.new_group``.

A rank takes part only in the creation of groups that it belongs to, in one global order. Equal rank sets share one
group, the set of all ranks is the world's own group, and all groups have one timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TypeAlias, cast

import torch.distributed as dist

from ds_topo.errors import GroupCreationError, StoreTimeoutError, listed
from ds_topo.process_groups.agreement import UNANSWERED_AFTER, agree, leave, within
from ds_topo.topology.rank_tables import RankGroup
from ds_topo.torch_names import (
    DESCRIPTION,
    default_store,
    destroy_group,
    is_known,
    job_timeout,
    key_of_address,
    next_group_named,
)

ProcessGroup: TypeAlias = dist.ProcessGroup


def require_initialized(what: str) -> None:
    """Raise ``RuntimeError`` unless ``torch.distributed`` is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{what} needs torch.distributed: call deepspeed.init_distributed() or "
            "torch.distributed.init_process_group() first"
        )


class ProcessGroups:
    """The process groups that one rank belongs to.

    Construction is collective over ``members``: all of them must pass the same ``description``, or all raise.
    :meth:`get` never communicates.

    Args:
        description: the groups that the members create, as the same text on all of them.
        groups: the groups of this rank, in the one order that all ranks follow.
        members: the global ranks of the job that take part, ascending.
        timeout: the timeout of the agreement and of every group; the job's own by default.

    Raises:
        DisagreementError: members passed different descriptions, or did not come.
    """

    def __init__(
        self, description: str, groups: Sequence[RankGroup], members: Sequence[int], timeout: timedelta | None = None
    ) -> None:
        self.timeout = timeout or job_timeout()
        self._token = agree(description, members, self.timeout)
        self._by_axes: dict[tuple[str, ...], ProcessGroup] = {}
        self._by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
        self._created: list[ProcessGroup] = []
        self._callbacks = ExitStack()
        self._destroyed = False
        self._default_group = dist.group.WORLD
        try:
            for group in groups:
                self._ensure(group)
        except BaseException:
            self.destroy()
            raise

    def get(self, axes: tuple[str, ...]) -> ProcessGroup | None:
        """Return the group over these axes if it exists."""
        self.check_alive()
        return self._by_axes.get(axes)

    def extend(self, group: RankGroup) -> ProcessGroup:
        """Create one more group; collective over its ranks.

        Raises:
            DisagreementError: ranks of the group did not call this within the timeout.
        """
        self.check_alive()
        if group.ranks not in self._by_ranks:
            agree(f"group {group.name}", group.ranks, self.timeout)
        return self._ensure(group)

    def extend_all(
        self, description: str, groups: Sequence[RankGroup], members: Sequence[int], failure: Exception | None = None
    ) -> list[ProcessGroup]:
        """Create several more groups; collective over ``members``.

        A rank that cannot take part passes its ``failure``. It raises that error, and the other ranks name it.

        Raises:
            DisagreementError: members passed different descriptions, failed, or did not come.
        """
        self.check_alive()
        agree(description, members, self.timeout, failure=failure)
        return [self._ensure(group) for group in groups]

    def destroy(self) -> None:
        """Destroy the groups created here, but not the world's own group. Idempotent."""
        if self._destroyed:
            return
        try:
            self._callbacks.close()
        finally:
            self._destroyed = True
            self._by_axes.clear()
            self._by_ranks.clear()
            while self._created:
                group = self._created.pop()
                if is_known(group):  # torch forgets all groups with the world's own
                    key, members = key_of_address(group), dist.get_process_group_ranks(group)
                    destroy_group(group)
                    if key is not None:  # other members may still be connecting to this rank's address
                        leave(default_store(), dist.get_rank(), members, [key])

    def on_destroy(self, callback: Callable[[], None]) -> None:
        """Register a function to call before the groups are destroyed; the last one registered is called first."""
        self._callbacks.callback(callback)

    @property
    def has_its_world(self) -> bool:
        """Return whether the world in which these groups were created still exists."""
        return self._default_group is not None and is_known(self._default_group)

    @property
    def is_alive(self) -> bool:
        """Return whether ``destroy()`` has not been called yet."""
        return not self._destroyed

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if the groups, or the world in which they were created, are destroyed."""
        if self._destroyed:
            raise RuntimeError("these process groups were destroyed; build a new grid")
        if not self.has_its_world:
            raise RuntimeError(
                "torch.distributed was destroyed after this grid was built, and these process groups with it: join the "
                "job again, and build a new grid"
            )

    def _ensure(self, group: RankGroup) -> ProcessGroup:
        known = self._by_axes.get(group.axes)
        if known is not None and (ranks := dist.get_process_group_ranks(known)) != list(group.ranks):
            raise ValueError(
                f"group {group.name!r} has ranks {listed(ranks)}, not {listed(group.ranks)}: use another name"
            )
        if group.ranks not in self._by_ranks:
            self._by_ranks[group.ranks] = self._create(group.ranks, group.name)
        return self._by_axes.setdefault(group.axes, self._by_ranks[group.ranks])

    def _create(self, ranks: tuple[int, ...], name: str) -> ProcessGroup:
        if len(ranks) == dist.get_world_size():
            return cast("ProcessGroup", dist.group.WORLD)
        digest = hashlib.sha1(",".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()[:16]

        def new_group() -> ProcessGroup:
            created: ProcessGroup = dist.new_group(
                list(ranks), timeout=self.timeout, use_local_synchronization=True, group_desc=f"{DESCRIPTION}{name}"
            )
            return created

        try:
            with next_group_named(f"{self._token}/{digest}"):
                created = within(self.timeout * UNANSWERED_AFTER, f"creation of the group {name!r}", new_group)
        except StoreTimeoutError:
            raise
        except RuntimeError as error:
            raise GroupCreationError(
                f"process group {name!r} of ranks {listed(ranks)}: all of them agreed to create it, but within "
                f"{self.timeout} one of them did not; it has died or stopped since, its host has, or its link is cut. "
                f"Its own output says more. Here: {error}"
            ) from error
        self._created.append(created)
        return created
