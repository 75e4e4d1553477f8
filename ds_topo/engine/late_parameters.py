"""Let updated parameters arrive during the next forward pass (the option ``overlap_parameters``).

Whatever reads a parameter then waits for it (:mod:`ds_topo.reduction.arrivals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import gt

from torch import nn

from ds_topo.engine.parameter_gathers import FlatGroup, PartitionedParameters, launched
from ds_topo.errors import warn
from ds_topo.reduction.arrivals import Arrival, Arrivals, Seat, hide, seats_of, show, unaware_of_arrivals, users_of
from ds_topo.reduction.buckets import BucketTiming
from ds_topo.reduction.partitions import Region


@dataclass(eq=False)
class _RegionOfParameters:
    """A region of a flat tensor."""

    group: FlatGroup
    region: Region
    seats: Sequence[Seat] = ()
    """The parameters of the region, since they were laid out."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the region."""
        return [self.group.parameters[member] for member in self.region.members]


class LateParameters(PartitionedParameters):
    """Parameters that may arrive after the step."""

    def __init__(self, groups: Sequence[FlatGroup]) -> None:
        super().__init__(groups)
        self._flats = [group.memory for group in groups]
        self._regions = [_RegionOfParameters(group, region) for group in groups for region in group.ours.regions]
        self._in_flight: list[tuple[Arrival, BucketTiming]] = []
        """The regions of the last gather."""
        self._arrivals = Arrivals()
        self._users: list[int] | None = None
        """The tensors that may share each flat tensor's memory, while parameters may arrive after the step."""
        self._has_warned = False

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """True if parameters may arrive during the next forward pass."""
        return self._users is not None

    def gather(self) -> None:
        """Send the updated parameters from their owners to all ranks; collective."""
        self._arrivals.end()
        self._in_flight = []  # it shares the parameters' memory
        is_hidden = self._users is not None
        if is_hidden:
            hide(self._seats())
        arrives_later = self._users is not None and not self._is_shared(self._users)
        try:
            for entry in self._regions:
                pending, timing = launched(entry.group, entry.region)
                arrival = Arrival(pending, entry.group.memory.device, entry.seats if is_hidden else ())
                self._in_flight.append((arrival, timing))
        finally:
            self._arrivals.expect(arrival for arrival, _ in self._in_flight)
        if not arrives_later:
            self.wait()
        if is_hidden and self._users is None:  # they stopped arriving later meanwhile
            show(self._seats())

    def wait(self) -> None:
        self._arrivals.wait()

    def timings(self) -> list[BucketTiming]:
        for arrival, timing in self._in_flight:
            arrival.wait()  # nothing may have read this region
            timing.done_ns = arrival.done_ns
            timing.wait_started_ns, timing.wait_ended_ns = arrival.done_ns - arrival.waited_ns, arrival.done_ns
        return [timing for _, timing in self._in_flight]

    def start_overlapping(self, module: nn.Module) -> None:
        """Receive parameters while the program goes on; see Note [Readers] in :mod:`ds_topo.reduction.arrivals`.

        They are sent in the order of the module's parameters, which is the order in which forward needs them.
        """
        part = unaware_of_arrivals(module)
        if part is not None:
            self._warn(f"{part} may read parameters without waiting for them")
            return
        order = {parameter: place for place, parameter in enumerate(module.parameters())}
        # regions in the order of their first use
        self._regions.sort(key=lambda entry: min(order.get(parameter, 0) for parameter in entry.parameters))
        self._users = self._count_users()

    def renew(self) -> None:
        """Accept the places of parameters, and the tensors that share their memory now, after a new layout."""
        for entry in self._regions:
            entry.seats = seats_of(entry.parameters)
        if self._users is not None:
            self._users = self._count_users()

    def _count_users(self) -> list[int]:
        hide(self._seats())  # what parameters show now is none of the flat tensors at any later look
        users = users_of(self._flats)
        show(self._seats())
        return users

    def _seats(self) -> Iterator[Seat]:
        return (seat for entry in self._regions for seat in entry.seats)

    def stop_overlapping(self) -> None:
        self._users = None
        self._arrivals.end()

    def _is_shared(self, known: Sequence[int]) -> bool:
        """Tell whether other tensors share the parameters' memory, such as ``parameter.data`` that a program keeps."""
        shared = any(map(gt, users_of(self._flats), known))
        if shared and not self._has_warned:
            self._warn("tensors such as parameter.data, or a graph of an earlier step, share their memory")
        return shared

    def _warn(self, reason: str) -> None:
        self._has_warned = True
        warn(f"overlap_parameters: {reason}, so parameters arrive within step(); correct, but slower")
