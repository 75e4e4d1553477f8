"""Plan buckets of gradients, give them memory, and copy gradients into and out of them.

A plan says which parameters share a bucket (:func:`plan_parameters`). :class:`BucketLayout` builds the buckets of a
plan and learns a better one in the first step. Gradients are views of a bucket wherever possible;
:meth:`GradientBucket.accumulate` and :meth:`GradientBucket.copy_in` move them there, and :func:`hand_out` leaves the
results to parameters. The buckets of partitioned gradients are a subclass, in ``partitions.py``.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ds_topo.base.marks import expert_group_name
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.options import BucketSizes, ReductionOptions
from ds_topo.reduction.parameters import (
    COPIED,
    GRAD,
    NOT_YET,
    PARTITION,
    SUMMED,
    WIDER,
    Contribution,
    ParameterState,
    sparse_gradient,
)

if TYPE_CHECKING:
    from ds_topo.reduction.exchange import Pending


def plan_buckets(
    nbytes: Sequence[int],
    kinds: Sequence[Hashable],
    order: Sequence[int],
    sizes: BucketSizes,
    capacities: Mapping[Hashable, int] | None = None,
) -> list[tuple[int, ...]]:
    """Distribute parameters over buckets, as torch's ``compute_bucket_assignment_by_size`` does.

    Return their indices by bucket, the buckets in the order in which they are expected to be full.

    Args:
        nbytes: the size of every parameter's gradient.
        kinds: only parameters of the same kind share a bucket.
        order: indices in the order in which gradients are expected to be ready.
        sizes: the capacities.
        capacities: capacities in bytes of certain kinds, for all their buckets, the first and the last included.

    >>> sizes = BucketSizes(bucket_bytes=100, first_bytes=10, last_bytes=30)
    >>> plan_buckets([20, 60, 60, 60, 20, 10], ["float32", "bfloat16"] * 3, range(6), sizes)
    [(0,), (1, 3), (2, 4), (5,)]
    """
    capacities = capacities or {}
    last = () if kinds[order[-1]] in capacities else _last_bucket(nbytes, kinds, order, sizes.last_bytes)
    in_last = set(last)
    buckets: list[tuple[int, ...]] = []
    open_members: dict[Hashable, list[int]] = defaultdict(list)
    open_bytes: dict[Hashable, int] = defaultdict(int)
    for index in order:
        kind = kinds[index]
        if index in in_last:
            continue
        open_members[kind].append(index)
        open_bytes[kind] += nbytes[index]
        if open_bytes[kind] >= capacities.get(kind, sizes.bucket_bytes if buckets else sizes.first_bytes):
            buckets.append(tuple(open_members.pop(kind)))
            del open_bytes[kind]
    buckets += [tuple(members) for members in open_members.values()]
    buckets += [last] if last else []
    position = {index: place for place, index in enumerate(order)}
    return sorted(buckets, key=lambda members: max(position[index] for index in members))


def _last_bucket(
    nbytes: Sequence[int], kinds: Sequence[Hashable], order: Sequence[int], capacity: int
) -> tuple[int, ...]:
    """Return the last parameter and the ones of its kind before it that fit."""
    members: list[int] = []
    total = 0
    for index in reversed(order):
        if kinds[index] == kinds[order[-1]]:
            total += nbytes[index]
            if members and total > capacity:
                break
            members.append(index)
    return tuple(reversed(members))


def plan_parameters(
    states: Sequence[ParameterState], sizes: BucketSizes, order: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return indices by bucket, for gradients that are expected in this order.

    Parameters of a bucket have one data type, device and route. A region of a partition is one bucket. Buckets of
    experts are ordered by the index of their parameters, the highest first, and not by arrival: replicas of an expert
    may be in several data-parallel groups, each of which learns an order of its own. Only other buckets have a small
    first and last one.
    """
    if not states:
        return []
    kinds: list[Hashable] = []
    capacities: dict[Hashable, int] = {}
    without_order: dict[Hashable, list[ParameterState]] = defaultdict(list)
    for state in states:
        region = None if state.partition is None else state.partition.regions[state.parameter].index
        kind = (state.dtype, state.parameter.device, id(state.route), state.partition, region)
        kinds.append(kind)
        if state.partition is not None:
            capacities[kind] = capacities.get(kind, 0) + state.nbytes
        elif expert_group_name(state.parameter) is not None:
            without_order[kind].append(state)
            capacities[kind] = state.route.bucket_bytes
    downwards = {
        kind: iter(sorted(members, key=operator.attrgetter("index"), reverse=True))
        for kind, members in without_order.items()
    }
    order = [next(downwards[kinds[index]]).index if kinds[index] in downwards else index for index in order]
    return plan_buckets([state.nbytes for state in states], kinds, order, sizes, capacities)


class GradientBucket:
    """Contiguous memory for the gradients of parameters of one data type, device and route, which are reduced together.

    It is full when no member is pending (:meth:`complete`), and is launched after those of a lower index. After the
    wait the sum is in it (:meth:`take_sum`). At the end of the step all members are pending again (:meth:`reset`).
    """

    is_scattered = False
    """True if a rank needs the sum of a part alone."""

    def __init__(self, index: int, members: Sequence[ParameterState]) -> None:
        self.index = index
        self.members = list(members)
        first = self.members[0]
        self.route = first.route
        numels = [member.parameter.numel() for member in self.members]
        self.offsets = self._offsets(numels)
        self.numel = self.offsets[-1] + numels[-1]
        self.nbytes = self.numel * first.dtype.itemsize

        # -- the step
        self.pending = set(self.members)
        """The members whose contribution is not complete; hooks remove them, :meth:`reset` restores them."""
        self.flat = self._first_memory()
        """The gradients, one after the other: ``[numel]``, then padding."""

    def _offsets(self, numels: Sequence[int]) -> list[int]:
        return [end - numel for end, numel in zip(accumulate(numels), numels, strict=True)]

    def _first_memory(self) -> torch.Tensor:
        """Return new memory."""
        first = self.members[0]
        multiple = 1 if self.route.exchange is None else self.route.exchange.slices
        size = -(-self.numel // multiple) * multiple
        flat = torch.empty(size, dtype=first.dtype, device=first.parameter.device)
        flat[self.numel :].zero_()
        return flat

    def install(self) -> None:
        """Point the members at this bucket; gradients that they hold move along."""
        for member in self.members:
            member.bucket = self
        self.set_views()

    def set_views(self) -> None:
        """Give each member its part of the memory; gradients that it still needs move along."""
        for member, offset in zip(self.members, self.offsets, strict=True):
            parameter = member.parameter
            # Strides are those of autograd's gradients, except where memory is somebody else's, and plain.
            if member.partition is not None:
                stride = torch.empty(parameter.shape, device="meta").stride()
            elif parameter.is_contiguous():
                stride = parameter.stride()
            else:
                stride = torch.empty_like(parameter, device="meta").stride()
            view = self.flat.as_strided(parameter.shape, stride, self.flat.storage_offset() + offset)
            if member.holds_live_view:
                view.copy_(member.view)
                parameter.grad = view if member.home is GRAD else parameter.grad
            member.view = view

    def release(self) -> None:
        """Free the memory; gradients that are views of it keep it alive."""
        self.flat = self.flat.new_empty(0)
        for member in self.members:
            if not member.holds_live_view:
                del member.view

    def reset(self) -> None:
        """Expect every gradient anew."""
        self.pending.update(self.members)
        for member in self.members:  # no calls: this runs for every parameter in every step
            member.contribution = NOT_YET
            member.arrived = 0

    # -- gradients arrive

    def accumulate(self, state: ParameterState) -> None:
        """Move a gradient of an earlier micro-batch into the bucket."""
        gradient = state.parameter.grad
        if gradient is None or gradient is state.view:
            return
        if state.home is GRAD:
            state.view.copy_(_dense(gradient, state))
            state.parameter.grad = state.view
            return
        _sum(gradient, state, state.contribution)
        state.contribution, state.parameter.grad = SUMMED, None

    def copy_in(self, members: Sequence[ParameterState], in_one_pass: bool = False) -> list[ParameterState]:
        """Write this rank's scaled contributions to the views, except those of members that were copied in already.

        ``in_one_pass`` copies and scales each gradient by one operation, for large ones, not all of them by two. Return
        the members without a gradient, whose views are now zero.
        """
        scale = self.route.before
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        in_place: list[torch.Tensor] = []
        without: list[ParameterState] = []
        for state in members:
            before = state.contribution
            if before is COPIED:
                continue
            state.contribution = COPIED  # even if this raises: it must not raise again in reset()
            parameter = state.parameter
            gradient = parameter.grad
            if state.home is not GRAD:
                if gradient is None:
                    in_place.append(state.view if before is SUMMED else state.view.zero_())
                elif in_one_pass and before is NOT_YET and gradient.dtype == state.dtype:
                    torch.mul(_dense(gradient, state), scale, out=state.view)
                else:
                    _sum(gradient, state, before)
                    in_place.append(state.view)
                parameter.grad = None
            elif gradient is None:
                state.view.zero_()
                without.append(state)
            elif gradient is (view := state.view):
                in_place.append(gradient)
            elif in_one_pass:
                torch.mul(_dense(gradient, state), scale, out=view)
                parameter.grad = view
            else:
                if gradient.requires_grad or gradient.layout is not _STRIDED:
                    gradient = _dense(gradient, state)
                views.append(view)
                gradients.append(gradient)
                parameter.grad = view
            if state.repeats:
                parameter.grad = None  # a further gradient must not be added to a bucket in flight
        if views:
            torch._foreach_copy_(views, gradients)
        if scale != 1.0 and (views or in_place):
            torch._foreach_mul_(views + in_place, scale)
        return without

    def complete(self) -> list[ParameterState]:
        """Copy in what is still missing, when all gradients have arrived; return the members without a gradient."""
        return self.copy_in(self.members)

    # -- gradients that arrive after the copy

    def late_gradient(self, state: ParameterState) -> torch.Tensor:
        """Return such a gradient in the view's type and layout; zeros if there is none."""
        gradient = state.parameter.grad
        if gradient is None:
            return torch.zeros_like(state.parameter, dtype=state.dtype)
        return torch.empty_like(state.parameter, dtype=state.dtype).copy_(_dense(gradient, state))

    def add_late(self, state: ParameterState, before: float, after: float) -> None:
        """Reduce such a gradient, scaled before and after, and add it to the sum; collective over the route's group."""
        gradient = self.late_gradient(state) * before
        dist.all_reduce(gradient, group=self.route.group)
        self.add(state, gradient.mul_(after))

    def add(self, state: ParameterState, gradient: torch.Tensor) -> None:
        """Add a reduced gradient to the sum."""
        state.view.add_(gradient)

    # -- the reduction

    def prepare(self) -> None:
        """Complete the memory before the reduction starts."""

    def start_scatter(self, payload: torch.Tensor, reduction: Pending) -> Pending | None:
        """Start to sum this rank's part of ``payload``, the bucket as it travels; None if all ranks need all of it."""
        return None

    def own_part(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the part of the bucket, or its payload, of which this rank gets the sum."""
        return flat

    def take_sum(self, after: float) -> None:
        """Scale the sum, which has arrived."""
        if after != 1.0:
            self.flat.mul_(after)


class BucketLayout:
    """The buckets of a reducer.

    In the first step they follow the parameters of the module in reverse. From the second step on they follow the order
    in which the first rank's gradients became ready.
    """

    def __init__(self, states: Sequence[ParameterState], sizes: BucketSizes) -> None:
        self._states, self._sizes = states, sizes
        self.buckets: list[GradientBucket] = []
        """The buckets, in the order of reduction."""
        self.arrivals: list[int] | None = []
        """Parameters as their gradients became ready in the first step; None from then on."""
        self._plan = plan_parameters(states, sizes, range(len(states) - 1, -1, -1))
        """Indices of parameters by bucket."""
        self._next_plan: list[tuple[int, ...]] | None = None
        """The plan that was learned and differs, until :meth:`renew` builds its buckets."""
        self._lay_out()

    def learn(self, group: ProcessGroup, *, keeps_order: bool) -> None:
        """Plan the buckets of all later steps after the first, equal on the ranks of ``group``; collective over it."""
        if self.arrivals is None or not self._states:
            return
        last_arrivals = list(dict.fromkeys(reversed(self.arrivals)))[::-1]
        arrived = set(last_arrivals)
        order = last_arrivals + [state.index for state in reversed(self._states) if state.index not in arrived]
        for state in self._states:
            if state.expected is None:
                state.expected = max(1, state.arrived)
        if keeps_order:
            self.arrivals = None
            return
        agreed = torch.tensor(order, device=self._states[0].parameter.device)
        dist.broadcast(agreed, group_src=0, group=group)
        self.arrivals = None
        plan = plan_parameters(self._states, self._sizes, agreed.tolist())
        if plan != self._plan:
            self._next_plan = plan

    def absent(self) -> list[ParameterState]:
        """Return the parameters without a gradient in the last micro-batch."""
        found = [state for bucket in self.buckets for state in bucket.pending if not state.arrived]
        return sorted(found, key=operator.attrgetter("index"))

    def renew(self) -> None:
        """Build the buckets that were learned; called before the first gradient of a step or of its accumulation."""
        if self._next_plan is not None:
            self._plan, self._next_plan = self._next_plan, None
            self._lay_out()

    def _lay_out(self) -> None:
        """Build the buckets of the plan; gradients that are still needed move along."""
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []
        for index, members in enumerate(self._plan):
            states = [self._states[member] for member in members]
            partition = states[0].partition
            bucket = GradientBucket(index, states) if partition is None else partition.bucket(index, states)
            bucket.install()  # frees the old memory of its members before the next bucket gets memory
            self.buckets.append(bucket)


_STRIDED = torch.strided
_LARGE_NUMEL = 1 << 14
"""From this size on a gradient is scaled into its bucket alone, while caches hold it, not together with others."""


def is_copied_at_once(state: ParameterState) -> bool:
    """Return True if this parameter is copied in as soon as its gradient is complete."""
    is_dense = state.home is GRAD or state.home is PARTITION
    return is_dense and not state.waits_for_bucket and state.parameter.numel() >= _LARGE_NUMEL


def _sum(gradient: torch.Tensor, state: ParameterState, before: Contribution) -> None:
    """Add a gradient to the sum of earlier ones in a view apart from ``parameter.grad``, or start the sum."""
    if before is SUMMED:
        state.view.add_(_dense(gradient, state))
    else:
        state.view.copy_(_dense(gradient, state))


def _dense(gradient: torch.Tensor, state: ParameterState) -> torch.Tensor:
    """Return the gradient without the graph of ``backward(create_graph=True)``; raise if it is sparse."""
    if gradient.layout is not _STRIDED:
        raise sparse_gradient(state.name)
    return gradient.detach() if gradient.requires_grad else gradient


def hand_out(
    states: Sequence[ParameterState],
    options: ReductionOptions,
    without: Sequence[ParameterState],
    unused: Sequence[ParameterState],
) -> None:
    """Set ``parameter.grad`` where it is not yet the reduced gradient.

    Parameters ``without`` a gradient on this rank get it, too; those ``unused`` on all ranks keep their ``grad``.
    """
    keep = {state.index for state in unused}
    for state in states if options.allow_late_gradients else without:
        if state.index not in keep and state.home is GRAD and state.parameter.requires_grad:
            state.parameter.grad = state.view
    for state in states:
        parameter, home = state.parameter, state.home
        if home is PARTITION:
            parameter.grad = None
        elif home is WIDER and state.index not in keep:
            setattr(parameter, "main_grad", state.view)  # noqa: B010
            parameter.grad = state.view.to(parameter.dtype)


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BucketTiming:
    """One reduction of one bucket; times in nanoseconds of ``time.perf_counter_ns``."""

    index: int
    nbytes: int
    parameters: int
    label: str
    """The process group that reduced it."""
    launched_ns: int
    done_ns: int = 0
    """The end of communication for CPU tensors; elsewhere, the time at which the wait for it returned."""
    wait_started_ns: int = 0
    wait_ended_ns: int = 0

    @property
    def waited_ns(self) -> int:
        """The time spent in the wait for it."""
        return self.wait_ended_ns - self.wait_started_ns


@dataclass(slots=True)
class StepTiming:
    """The times of one step: gradients arrive from ``started_ns`` on; ``finish()`` runs until ``ended_ns``."""

    step: int
    started_ns: int
    finish_ns: int = 0
    ended_ns: int = 0
    buckets: list[BucketTiming] = field(default_factory=list)
    gathers: list[BucketTiming] = field(default_factory=list)
    """The gathers of parameters from their owners before this step's gradients (ZeRO 1 and 2)."""

    @property
    def communication_ns(self) -> int:
        """The time during which at least one bucket was in flight."""
        return sum(end - start for start, end in union(self.buckets))

    @property
    def exposed_ns(self) -> int:
        """The part of ``communication_ns`` that ``finish()`` waited for."""
        return sum(max(0, end - max(start, self.finish_ns)) for start, end in union(self.buckets))


def union(buckets: Sequence[BucketTiming]) -> list[tuple[int, int]]:
    """Return the times at which at least one bucket was in flight, as disjoint intervals."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted((bucket.launched_ns, bucket.done_ns) for bucket in buckets):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
