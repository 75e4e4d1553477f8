"""Create process groups from tables of ranks. This is the only module that calls ``torch.distributed.new_group``.

A rank takes part only in the creation of groups that it belongs to, in one global order. Equal rank sets share one
group, the set of all ranks is the world's own group, and all groups have one timeout.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ds_topo.base import torch_names
from ds_topo.errors import GroupCreationError, StoreTimeoutError, by_value, listed
from ds_topo.launch.council import UNANSWERED_AFTER, agree, leave, within
from ds_topo.topology.rank_tables import RankGroup

ProcessGroup: TypeAlias = dist.ProcessGroup
T = TypeVar("T")
_LONGEST_WAIT = timedelta(seconds=10)
"""The longest time that ``destroy()`` waits for members that are still connecting."""
_BETWEEN_LOOKS = 0.005
"""The time between two looks at the number of members that have connected, in seconds."""

destroyed: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()
"""What destroyed groups belonged to, such as ``"grid data=2,model=2"``, while a program keeps them."""


def require_initialized(what: str) -> None:
    """Raise ``RuntimeError`` unless ``torch.distributed`` is initialised."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{what} needs torch.distributed: call ds_topo.init_distributed() first (or deepspeed.init_distributed(), "
            "or torch.distributed.init_process_group())"
        )


def gathered(value: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank of a group, by default of the world, in the order of its ranks; collective."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gathered_by_value(value: str, group: ProcessGroup) -> str:
    """Describe which ranks of a group, on which hosts, have which value; collective over the group."""
    return by_value(gathered((dist.get_rank(), socket.gethostname(), value), group))


def extremes(values: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the highest and the lowest of each integer over the ranks of a group; collective over it."""
    both = torch.stack([values, ~values])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0], ~both[1]


def number_of(value: object) -> int:
    """Return a positive integer that tells values apart by what ``repr`` says of them, such as for :func:`extremes`."""
    return int.from_bytes(hashlib.sha1(repr(value).encode(), usedforsecurity=False).digest()[:7], "big")


class ProcessGroups:
    """The process groups that one rank belongs to.

    Construction is collective over ``members``, global ranks of the job, ascending: all of them must pass the same
    ``description``, or all raise ``DisagreementError``. :meth:`get` never communicates.

    Args:
        description: the groups that the members create, as the same text on all of them.
        groups: the groups of this rank, in the one order that all ranks follow.
        timeout: the timeout of the agreement and of every group; the job's own by default.
    """

    def __init__(
        self, description: str, groups: Sequence[RankGroup], members: Sequence[int], timeout: timedelta | None = None
    ) -> None:
        self.timeout = timeout or torch_names.job_timeout()
        self._owner = description.partition(", ")[0]
        self._token = agree(description, members, self.timeout)
        self._by_axes: dict[tuple[str, ...], ProcessGroup] = {}
        self._by_ranks: dict[tuple[int, ...], ProcessGroup] = {}
        self._created: list[ProcessGroup] = []
        self._connecting: dict[ProcessGroup, str] = {}
        """The groups to which other members may still be connecting, each with the key that counts those who have."""
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
        """Create one more group; collective over its ranks."""
        self.check_alive()
        if group.ranks not in self._by_ranks:
            agree(f"group {group.name}", group.ranks, self.timeout)
        return self._ensure(group)

    def extend_all(
        self, description: str, groups: Sequence[RankGroup], members: Sequence[int], failure: Exception | None = None
    ) -> list[ProcessGroup]:
        """Create several more groups; collective over ``members``. Errors are those of the construction.

        A rank that cannot take part passes its ``failure``. It raises that error, and the other ranks name it.
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
            self._await_connections()
            while self._created:
                group = self._created.pop()
                destroyed[group] = self._owner
                if torch_names.is_known(group):  # torch forgets all groups with the world's own
                    key, members = torch_names.key_of_address(group), dist.get_process_group_ranks(group)
                    torch_names.destroy_group(group)
                    if key is not None:  # members may still be reading it
                        counter = [self._counter(members)] if dist.get_rank() == members[0] else []
                        leave(torch_names.default_store(), dist.get_rank(), members, [key, *counter])
            self._connecting.clear()

    def on_destroy(self, callback: Callable[[], None]) -> None:
        """Register a function to call before the groups are destroyed; the last one registered is called first."""
        self._callbacks.callback(callback)

    @property
    def has_its_world(self) -> bool:
        """Return whether the world in which these groups were created still exists."""
        return dist.group.WORLD is self._default_group

    @property
    def is_alive(self) -> bool:
        """Return whether ``destroy()`` has not been called yet."""
        return not self._destroyed

    def check_alive(self) -> None:
        """Raise ``RuntimeError`` if the groups, or the world in which they were created, are destroyed."""
        if self._destroyed:
            raise RuntimeError("these process groups were destroyed; build a new grid")
        if dist.group.WORLD is not self._default_group:
            raise RuntimeError(
                "torch.distributed was destroyed after this grid was built, and these process groups with it: join the "
                "job again, and build a new grid"
            )

    def _await_connections(self) -> None:
        """Wait until the other members of each group have connected to this rank, because its sockets will close.

        gloo's members connect one by one, and a member fails if another one closes its sockets meanwhile. Groups whose
        members have communicated are not asked about. The wait ends after a moment if a member or the store is gone.
        """
        waiting = {
            counter: dist.get_world_size(group)
            for group, counter in self._connecting.items()
            if torch_names.is_known(group) and not torch_names.calls_of(group)
        }
        if not waiting:
            return
        store, ended = torch_names.default_store(), threading.Event()

        def wait() -> None:
            for counter, size in waiting.items():
                while store.add(counter, 0) < size and not ended.wait(_BETWEEN_LOOKS):
                    pass

        limit = min(_LONGEST_WAIT, self.timeout / 4)
        with suppress(RuntimeError):  # the store is gone, or does not answer
            try:
                within(limit, "connections of process groups", wait)
            finally:
                ended.set()

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

        def new_group() -> Any:
            return dist.new_group(
                list(ranks),
                timeout=self.timeout,
                use_local_synchronization=True,
                group_desc=f"{torch_names.DESCRIPTION}{name}",
                device_id=device,
            )

        try:
            with (
                torch_names.next_group_named(self._name(ranks)) as device,
                torch_names.without_store() if len(ranks) == 1 else nullcontext(),
            ):
                limit = self.timeout * UNANSWERED_AFTER
                created: ProcessGroup = within(limit, f"creation of the group {name!r}", new_group)
        except StoreTimeoutError:
            raise
        except RuntimeError as error:
            raise GroupCreationError(
                f"process group {name!r} of ranks {listed(ranks)}: all of them agreed to create it, but within "
                f"{self.timeout} one of them did not; it has died or stopped since, its host has, or its link is cut. "
                f"Its own output says more. Here: {error}"
            ) from error
        self._created.append(created)
        if len(ranks) > 1 and torch_names.is_known(created) and torch_names.key_of_address(created) is not None:
            with suppress(RuntimeError):  # the store is gone since
                if torch_names.default_store().add(self._counter(ranks), 1) < len(ranks):
                    self._connecting[created] = self._counter(ranks)
        return created

    def _name(self, ranks: Sequence[int]) -> str:
        digest = hashlib.sha1(",".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()[:16]
        return f"{self._token}/{digest}"

    def _counter(self, ranks: Sequence[int]) -> str:
        """Return the key that counts the members of a group that have connected to all others."""
        return f"{self._name(ranks)}/connected"
