"""Assign routes to parameters, reduce buckets over them, and sum the ranks' notes at the end of a step.

:func:`assign_routes` chooses process group, divisor, and flat or two-level reduction for every parameter when a reducer
is built. :class:`Reduction` is the reduction of one full bucket over its route. :class:`StepNotes` tells the ranks of a
route about each other's step.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.base.backends import synchronize, traits_of
from ds_topo.base.marks import expert_group_name
from ds_topo.base.torch_names import ReduceOp, premultiplied_sum
from ds_topo.errors import DisagreementError
from ds_topo.process_groups.creation import ProcessGroup, gathered, gathered_by_value
from ds_topo.reduction import EXCHANGE
from ds_topo.reduction.buckets import BucketTiming, GradientBucket
from ds_topo.reduction.options import MIB, ReductionOptions
from ds_topo.reduction.parameters import ParameterState, Route
from ds_topo.topology.rank_tables import has_two_levels

if TYPE_CHECKING:
    from ds_topo.reduction.exchange import Exchange, Pending
    from ds_topo.reduction.managed import ReplicaSums


def assign_routes(
    states: Sequence[ParameterState],
    options: ReductionOptions,
    group: ProcessGroup,
    device: torch.device,
    wider: ReplicaSums | None = None,
) -> Route:
    """Set the route of every parameter and return the dense route, over the data-parallel group; collective.

    Experts are summed over their expert-data group and divided by the size of the whole data-parallel group. Every
    group measures its own link, because an expert-data group may span several data-parallel groups. ``wider`` continues
    the sums of every route; None if they end in its group.
    """
    size = dist.get_world_size(group)

    def bucket_bytes(over: ProcessGroup) -> int:
        if options.bucket_bytes is not None:
            return options.bucket_bytes
        return suitable_bucket_bytes(over, device) if wider is None else LARGE_BUCKET_BYTES

    def route(label: str, over: ProcessGroup, nbytes: int, exchange: Exchange | None, in_one_sum: bool) -> Route:
        if wider is not None:
            exchange, in_one_sum = wider.exchange(over, exchange), False
        scale = scaling(options, size, over, device, in_one_sum)
        return Route(label, over, traits_of(over, device), *scale, options.communication_dtype, nbytes, exchange)

    nbytes = bucket_bytes(group)
    may_be_chosen = options.two_level or (options.two_level is None and wider is None)  # others may measure otherwise
    two_level = _chosen_two_level(states, options, group, device, nbytes) if may_be_chosen else None
    in_one_sum = two_level is None and not any(partition.copies for partition in options.partitions)
    dense = route("data", group, nbytes, two_level, in_one_sum)
    used = {expert_group_name(state.parameter) for state in states}
    experts = {
        name: route(f"experts of {name}", over, bucket_bytes(over), None, True)
        for name, over in options.expert_groups.items()
        if name in used
    }
    for state in states:
        name = expert_group_name(state.parameter)
        state.route = dense if name is None else experts[name]
    return dense


def scaling(
    options: ReductionOptions, data_parallel_size: int, group: ProcessGroup, device: torch.device, is_flat: bool = True
) -> tuple[float, float, ReduceOp]:
    """Return the factors before and after the sum over ``group``, and its ``ReduceOp``.

    NCCL averages by itself, and multiplies while it sums. On other backends, and in a group of one rank, which sums
    nothing, gradients are multiplied on their way into the bucket.
    """
    before, after = options.scales(data_parallel_size)
    traits, size = traits_of(group, device), dist.get_world_size(group)
    if is_flat and before != 1.0 and size > 1:
        if traits.averages and after == 1.0 and before * size == 1.0:
            return 1.0, 1.0, dist.ReduceOp.AVG
        if traits.premultiplies:
            return 1.0, after, premultiplied_sum(before)
    return before, after, dist.ReduceOp.SUM


def _chosen_two_level(
    states: Sequence[ParameterState],
    options: ReductionOptions,
    group: ProcessGroup,
    device: torch.device,
    bucket_bytes: int,
) -> Exchange | None:
    """Return two levels if asked for, or if the placement has them and they measure faster than a flat reduction."""
    hosts = dict(zip(dist.get_process_group_ranks(group), gathered(socket.gethostname(), group), strict=True))
    if not has_two_levels(hosts):
        if options.two_level:
            raise ValueError(
                "two_level=True: the group must span at least two hosts with equally many ranks, several each; leave "
                "it out to choose by placement"
            )
        return None
    if not states:
        return None
    two_level: Exchange = EXCHANGE.load().two_level_exchange(group, hosts, device)
    if options.two_level:
        return two_level
    dtype = states[0].dtype
    numel = max(1, bucket_bytes // dtype.itemsize // two_level.slices) * two_level.slices
    probe = torch.zeros(numel, dtype=dtype, device=device)
    ways = [lambda: dist.all_reduce(probe, group=group), lambda: two_level.all_reduce(probe).wait()]
    flat, levels = _best_seconds(ways, group, device)
    if levels < flat:
        return two_level
    two_level.rest()
    return None


_ROUNDS = 3
_SMALL_BUCKET_BYTES = 4 * MIB
LARGE_BUCKET_BYTES = 25 * MIB
_SLOW_LINK_SECONDS = 0.01
"""A link on which a small bucket takes longer than this is slow."""


def suitable_bucket_bytes(group: ProcessGroup, device: torch.device) -> int:
    """Measure the link and return a suitable capacity of buckets; collective over ``group``.

    On a slow link (below about 3 Gbit/s) communication dominates, and small buckets let it start early. On a fast link
    launches disturb backward, and large buckets, as in torch's DDP, are better.
    """
    if dist.get_world_size(group) == 1:
        return LARGE_BUCKET_BYTES
    bucket = torch.zeros(_SMALL_BUCKET_BYTES // 4, device=device)
    (seconds,) = _best_seconds([lambda: dist.all_reduce(bucket, group=group)], group, device)
    return _SMALL_BUCKET_BYTES if seconds > _SLOW_LINK_SECONDS else LARGE_BUCKET_BYTES


def _best_seconds(ways: Sequence[Callable[[], object]], group: ProcessGroup, device: torch.device) -> list[float]:
    """Return the slowest rank's best time of each way, alternating, after one warm-up round; collective."""
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(_ROUNDS):
        for way, taken in zip(ways, times, strict=True):
            dist.barrier(group=group)
            started = time.perf_counter()
            way()
            synchronize(device)
            taken.append(time.perf_counter() - started)
    best = torch.tensor([min(taken[1:]) for taken in times], device=device)
    dist.all_reduce(best, op=dist.ReduceOp.MAX, group=group)
    seconds: list[float] = best.tolist()
    return seconds


class Reduction:
    """One full bucket in flight. All ranks of its route start the same buckets in the same order."""

    def __init__(self, bucket: GradientBucket) -> None:
        bucket.prepare()
        self.bucket, self.route = bucket, bucket.route
        self.timing = BucketTiming(
            bucket.index, bucket.nbytes, len(bucket.members), self.route.label, time.perf_counter_ns()
        )
        self._version: int | None = None
        """The version of the bucket's memory at the start, if only writes of the program change it until the wait."""
        self._pending: Pending | None = None
        """The exchange of a region, or one in two levels, which knows its end; None for torch's own all-reduce."""
        self._finish: Callable[[], object] | None = self._start_sum()
        """Waits for the sum and writes it to the bucket; None after the wait, so that memory is freed."""

    @property
    def was_overwritten(self) -> bool:
        """True if the program is known to have written to the bucket since it was launched."""
        return self._version is not None and self._version != self.bucket.flat._version

    def is_done(self) -> bool:
        """Return True if the sum of a region has arrived."""
        return self._pending is None or self._pending.is_done()

    def wait(self) -> int:
        """Wait until the gradients in the bucket are final, and return the time of the end. Idempotent."""
        timing, bucket = self.timing, self.bucket
        if self._finish is not None:
            timing.wait_started_ns = time.perf_counter_ns()
            self._finish()
            bucket.take_sum(self.route.after)
            self._finish = self._pending = None
            timing.wait_ended_ns = time.perf_counter_ns()
            timing.done_ns = timing.done_ns or timing.wait_ended_ns
        return timing.done_ns

    def _start_sum(self) -> Callable[[], object]:
        """Sum the bucket in the communication data type, for all ranks, or each part for its owner."""
        bucket, route = self.bucket, self.route
        if route.size == 1 and route.exchange is None and not bucket.is_scattered:
            return lambda: None
        payload, dtype = bucket.flat, route.communication_dtype
        if dtype is not None and payload.is_floating_point():  # a real type would lose half of complex gradients
            payload = payload.to(dtype)
        pending: Pending | dist.Work
        if (scatter := bucket.start_scatter(payload, self)) is not None:
            pending = self._pending = scatter
        elif route.exchange is not None:
            missing = -len(payload) % route.exchange.slices
            payload = nn.functional.pad(payload, (0, missing)) if missing else payload
            pending = self._pending = route.exchange.all_reduce(payload)
        else:
            pending = work = dist.all_reduce(payload, route.op, group=route.group, async_op=True)
            self._version = bucket.flat._version if route.traits.keeps_versions else None
            if not route.traits.ordered_by_stream:
                work.get_future().add_done_callback(self._note_done)

        def finish() -> None:
            done_ns = pending.wait()
            if self._pending is not None:
                self.timing.done_ns = done_ns
            if payload is not bucket.flat:
                own = bucket.own_part(bucket.flat)
                own.copy_(bucket.own_part(payload)[: len(own)])

        return finish

    def _note_done(self, _: object) -> None:
        self.timing.done_ns = time.perf_counter_ns()


_LATE = 1 << 16
"""A rank adds this to a parameter's count of ranks if its gradient came late; the limit is 32,767 ranks."""
_STEPS = 256
"""Step numbers are sent modulo this, so that their squares fit; ranks exactly so many steps apart go unnoticed."""


class StepNotes:
    """The notes that the ranks of one route's group exchange at the end of a step.

    Five numbers tell whether anything unusual has happened. Only then are notes on single parameters summed as well,
    as in DDP's map of globally used parameters.

    Args:
        members: the parameters of the route.
        route: the route.
        unused: those of them without a gradient on this rank, if the other ranks need to know them.
        late: indices of parameters whose gradient came late on this rank.
        failed: True if this rank failed in ``finish()``.
        prefers_to_defer: True if this rank prefers to launch the next step's reductions after its backward.
        step: the number of optimizer steps taken on this rank.
    """

    def __init__(
        self,
        members: Sequence[ParameterState],
        route: Route,
        unused: Collection[int],
        late: Collection[int],
        *,
        failed: bool,
        prefers_to_defer: bool,
        step: int,
    ) -> None:
        self.route, self._members = route, members
        self._unused, self._late = unused, late
        unusual = {*unused, *late}
        self.are_unusual = bool(unusual) and any(state.index in unusual for state in members)
        """True if this rank has notes on single parameters."""
        number = step % _STEPS
        self._sums = self._on_device([self.are_unusual, failed, prefers_to_defer, number, number * number])
        """This rank's numbers, then the sums over all ranks; on the host after :meth:`settle`."""
        alone = route.size == 1  # its notes are the sums
        self._work = None if alone else dist.all_reduce(self._sums, group=route.group, async_op=True)
        self._event: torch.Event | None = None
        """The end of the copy to the host, if the sums were on an accelerator."""

        # -- the sums over all ranks of the group, set by read()
        self.unusual = self.failed = self.prefer_to_defer = 0
        """The numbers of ranks with unused parameters or late gradients, that failed, and that prefer to defer."""
        self.steps_differ = False
        """True if the ranks are not at the same step of the optimizer."""
        self.are_named = True
        """False if single parameters were not summed, because not all ranks read these notes in the same step."""
        self.unused_anywhere: list[ParameterState] = []
        """Parameters for which at least one rank has no gradient."""
        self.unused_everywhere: list[ParameterState] = []
        """Parameters for which no rank has a gradient."""
        self.late: list[ParameterState] = []
        """Parameters that got a gradient after they were copied in, on at least one rank."""

    def settle(self) -> None:
        """Wait for the sum; on an accelerator queue its copy to the host and return."""
        if self._work is not None:
            self._work.wait()
        if self._sums.device.type != "cpu":
            self._sums = self._sums.to("cpu", non_blocking=True)
            self._event = torch.accelerator.current_stream().record_event()

    def read(self, *, all_read: bool) -> None:
        """Read the sums, collective if they are unusual; ``all_read`` if all ranks of the group read these now."""
        if self._event is not None:
            self._event.synchronize()
        self.unusual, self.failed, self.prefer_to_defer, steps, squares = self._sums.tolist()
        size = self.route.size
        self.steps_differ = steps * steps != size * squares  # the step numbers have a variance
        self.are_named = not self.unusual or bool(self.failed) or all_read or self.unusual == size
        if not self.unusual or self.failed or not self.are_named:
            return
        notes = [(state.index not in self._unused) + _LATE * (state.index in self._late) for state in self._members]
        sums = self._on_device(notes)
        dist.all_reduce(sums, group=self.route.group)
        ranks = [(state, each % _LATE, each // _LATE) for state, each in zip(self._members, sums.tolist(), strict=True)]
        self.unused_anywhere = [state for state, used, _ in ranks if used < size]
        self.unused_everywhere = [state for state, used, _ in ranks if not used]
        self.late = [state for state, _, late in ranks if late]

    def _on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        device = self._members[0].parameter.device
        on_host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type != "cpu")
        return on_host.to(device, non_blocking=True)


def different_steps(steps: int, group: dist.ProcessGroup) -> DisagreementError:
    """Return the error for ranks at different steps; collective over the group, so that every rank names them."""
    said = gathered_by_value(f"taken {steps}", group)
    return DisagreementError(
        f"ranks that share gradients are at different steps:{said}\nA rank has skipped or repeated step(), so its "
        "parameters are no longer those of the others: let every rank call step() equally often, and resume from a "
        "checkpoint"
    )
