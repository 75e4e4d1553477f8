"""How updated parameters get from their owners to all ranks: in the step, or during the next forward pass.

DeepSpeed gathers at the end of its step, by one collective for each flat tensor. On gloo slices sent point to point
arrive in about half that time, in DeepSpeed's layout as in ours. In ours they may arrive during the next forward pass:
:mod:`ds_topo.partition.arrivals`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ds_topo.engine import changes
from ds_topo.ledger import Make, ledger
from ds_topo.partition.arrivals import Arrival, Arrivals, AwaitingParameters, used_by_reference
from ds_topo.partition.exchange import exchange_of
from ds_topo.partition.gradients import PartitionedGradients
from ds_topo.partition.layout import Region
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.report import BucketTiming

_SECONDS_UNTIL_SENT = 0.1
"""What the stage before needs first has the link for itself so long at most."""


class InOurLayout(Protocol):
    """What must be known of a flat tensor of parameters."""

    parameters: list[nn.Parameter]
    gradients: PartitionedGradients

    @property
    def memory(self) -> torch.Tensor:
        """The flat tensor."""
        ...


class PartitionedParameters(list[torch.Tensor]):
    """The flat tensors of an optimizer in our layout, as DeepSpeed passes them to its gather.

    Args:
        groups: what they hold.
    """

    def __init__(self, groups: Sequence[InOurLayout]) -> None:
        super().__init__(group.memory for group in groups)
        self._groups = groups
        self._arrivals = Arrivals()
        self._regions = [(group, region) for group in groups for region in group.gradients.layout.regions]
        self._early: list[nn.Parameter] = []
        """Parameters that the program uses without looking them up in their module."""
        self._overlap = ExitStack()
        self.overlaps = False
        """Whether they arrive during the next forward pass."""
        self.waits_for_use = False
        """Whether they are sent only when the first of them is looked up: others need the link before that."""
        self._under_way: list[tuple[Arrival, BucketTiming]] = []

    def gather(self) -> None:
        """Let all ranks have what the owners have made; collective."""
        self.wait()
        if self.overlaps and self.waits_for_use:
            everything = [parameter for group in self._groups for parameter in group.parameters]
            self._arrivals.expect(everything, Arrival(OnDemand(self._launch_all)))
            return
        self._launch_all()
        if not self.overlaps:
            self.wait()

    def _launch_all(self) -> None:
        self._under_way = [self._launch(group, region) for group, region in self._regions]

    def wait(self) -> None:
        """Until all parameters are there."""
        self._arrivals.wait()

    def timings(self) -> list[BucketTiming]:
        """Of the last gather."""
        for arrival, timing in self._under_way:
            timing.done_ns = arrival.done_ns
            timing.wait_started_ns, timing.wait_ended_ns = arrival.done_ns - arrival.waited_ns, arrival.done_ns
        return [timing for _, timing in self._under_way]

    def _launch(self, group: InOurLayout, region: Region) -> tuple[Arrival, BucketTiming]:
        flat = group.memory[region.start : region.start + region.numel]
        timing = BucketTiming(
            region.index, flat.nbytes, len(region.members), "parameters from owners", time.perf_counter_ns()
        )
        arrival = Arrival(group.gradients.exchange.gather(flat))
        self._arrivals.expect(_parameters(group, region), arrival)
        return arrival, timing

    # -- during the next forward pass

    def start_overlapping(self, module: nn.Module) -> None:
        """From now on they arrive while the module is at work, which waits for each where it looks it up.

        What forward needs first is sent first: in the order of the module's parameters.
        """
        order = {parameter: place for place, parameter in enumerate(module.parameters())}
        self._regions.sort(key=lambda entry: min(order.get(found, 0) for found in _parameters(*entry)))
        served = {id(parameter) for group in self._groups for parameter in group.parameters}
        for part in module.modules():
            if any(id(parameter) in served for parameter in part._parameters.values()):
                self._overlap.callback(_await_parameters(part, self._arrivals))
        self.overlaps = True

    def stop_overlapping(self) -> None:
        """Put the modules' dictionaries back. Idempotent."""
        self.wait()
        self.overlaps = False
        self._overlap.close()

    def rest(self) -> None:
        """Let nothing work in the background."""
        self.stop_overlapping()
        for group in self._groups:
            group.gradients.exchange.rest()

    def before_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward pass that may use parameters which it does not look up: found out the first time."""
        is_first = True

        @wraps(forward)
        def with_parameters(*args: Any, **options: Any) -> Any:
            nonlocal is_first
            for parameter in self._early:
                self._arrivals.wait_for(parameter)
            if not is_first or not self.overlaps:
                return forward(*args, **options)
            everything = [parameter for group in self._groups for parameter in group.parameters]
            with used_by_reference(everything, self._arrivals) as self._early:
                result = forward(*args, **options)
            is_first = False
            return result

        return with_parameters


class OnDemand:
    """What is not on its way yet: sent when someone reads it, and soon in any case, since other ranks may."""

    def __init__(self, launch: Callable[[], None]) -> None:
        self._launch: Callable[[], None] | None = launch
        self._lock = threading.Lock()
        self._timer = threading.Timer(_SECONDS_UNTIL_SENT, self.wait)
        self._timer.daemon = True
        self._timer.start()

    def wait(self) -> int:
        """Send it: readers wait for their own parts of it then."""
        self._timer.cancel()
        with self._lock:
            if self._launch is not None:
                self._launch()
                self._launch = None
        return time.perf_counter_ns()


def _parameters(group: InOurLayout, region: Region) -> list[nn.Parameter]:
    return [group.parameters[member] for member in region.members]


def _await_parameters(module: nn.Module, arrivals: Arrivals) -> Callable[[], None]:
    """Let a module wait for the parameters that it looks up; return what takes that back."""
    plain = module._parameters
    release = ledger.bind(changes.PARAMETERS, lambda found: AwaitingParameters(found, arrivals), module)

    def put_back() -> None:
        current = dict(module._parameters)
        release()
        plain.clear()
        plain.update(current)

    return put_back


def _in_slices(gather: Any) -> Any:
    @wraps(gather)
    def all_gather_dp_groups(
        groups_flat: Sequence[torch.Tensor],
        partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
        dp_process_group: Sequence[ProcessGroup],
        *arguments: Any,
        **options: Any,
    ) -> None:
        if isinstance(groups_flat, PartitionedParameters):
            groups_flat.gather()
        elif all(_is_of_gloo(flat, dp_process_group[index]) for index, flat in enumerate(groups_flat)):
            for index, flat in enumerate(groups_flat):
                exchange_of(dp_process_group[index], flat.device).gather_now(flat)
        else:
            gather(groups_flat, partitioned_param_groups, dp_process_group, *arguments, **options)

    return all_gather_dp_groups


def _is_of_gloo(flat: torch.Tensor, group: ProcessGroup) -> bool:
    return flat.device.type == "cpu" and dist.get_backend(group) == "gloo"


WHILE_A_GRID_EXISTS: tuple[tuple[Any, Make], ...] = tuple((row, _in_slices) for row in changes.GATHERS)
