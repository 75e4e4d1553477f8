"""Keep weights that a program writes after ``deepspeed.initialize``: copy them to the master weights before a step.

Engines with bf16, fp16 or ZeRO train a copy of the parameters, the master weights, and overwrite the parameters with
the result. Whatever a program has written to the parameters since, as ``load_state_dict`` does, is lost at the next
step unless it calls ``engine.optimizer.refresh_fp32_params()``. So each step begins with a search for such writes:

- The version counters of all parameters show writes that autograd can see, such as those of ``load_state_dict``.
- Their addresses show that ``parameter.data`` was replaced.
- A sample of about a thousand elements of each partition shows writes to ``parameter.data``. On an accelerator the
  first steps wait for the comparison. Later ones read it a step later, so that nothing waits for the device; such
  weights are lost, and the warning says so.

All of this is local to a rank. Only elements that differ from the rounded master weights are copied.

Each step also looks for parameters that were frozen since: these optimizers step on zeros in place of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, getitem, itemgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_topo.base.classes import stock_class
from ds_topo.checkpoint.engine_facts import inner_optimizer
from ds_topo.engine.partitioned_optimizers import PartitionedOptimizer
from ds_topo.errors import listed, warn
from ds_topo.mpu import MpuGrid

_Parts: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of the same elements, of this rank's parameters and of its master weights."""
_version_of, _is_trained = attrgetter("_version"), attrgetter("requires_grad")
_SAMPLED = 1024
"""The number of elements of each partition that are compared in every step."""
_PARTS_AT_ONCE = 4
"""The number of partitions that are compared in one step, in turn if there are more."""
_STEPS_THAT_WAIT = 2
_AT_A_TIME = 1 << 24
"""The number of elements that are copied at once, which limits the memory of a copy."""


def written_weights_of(engine: DeepSpeedEngine) -> WrittenWeights | None:
    """Return the search for an engine that has master weights; None if it has none, or another thread writes them."""
    if stock_class(engine.optimizer) not in _PARTS or getattr(engine.optimizer, "zenflow", False):
        return None
    if inner_optimizer(engine) is None:  # bf16 without ZeRO, only to evaluate
        return None
    return WrittenWeights(engine.module, engine.optimizer, engine.mpu)


class WrittenWeights:
    """The search for parameters of one engine that were written since its last step.

    Args:
        module: the engine's module.
        optimizer: the engine's optimizer, of a class in ``_PARTS``.
        grid: the engine's grid, whose ``check_weights`` switches the search off.
    """

    def __init__(self, module: nn.Module, optimizer: Any, grid: MpuGrid) -> None:
        self._grid = grid
        self._optimizer, self._pairs_of = optimizer, _PARTS[stock_class(optimizer)]
        self._named = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._parameters = [each for _, each in self._named]
        self._placed: list[nn.Parameter]
        self._addresses: list[int]
        self._versions = [*map(_version_of, self._parameters)]
        self._places = self._find_places()
        self._are_frozen = False
        """True once the program was warned that it has frozen parameters."""
        self._steps = 0
        self._late: tuple[torch.Event, torch.Tensor] | None = None
        """The comparison of an earlier step that nothing has waited for."""

    def keep(self) -> None:
        """Copy written weights to the master weights, and warn about them; local to this rank."""
        if not self._grid.check_weights:
            return
        if not self._are_frozen and not all(map(_is_trained, self._parameters)):
            self._warn_of_frozen()
        parts = self._parts()  # first of all, because it waits for parameters in flight
        versions, names, replaced = [*map(_version_of, self._parameters)], [], []
        if versions != self._versions:
            found_now = zip(self._named, self._versions, versions, strict=True)
            names = [name for (name, _), old, new in found_now if old != new]
            self._versions = versions
        addresses = [*map(torch.Tensor.data_ptr, self._placed)]
        if addresses != self._addresses:
            replaced = self._put_back(parts, addresses)
        found = bool(replaced)
        if names or replaced or self._sample_differs(parts):
            for own, master in parts:
                found = _copy_changed(own, master) or found
        self._steps += 1
        if found:
            names = replaced or names
            self._warn(f"parameters{f' such as {listed(names)}' if names else ''}", "they were copied to these first")

    def _warn(self, which: str, result: str) -> None:
        warn(
            f"{which} were written after deepspeed.initialize or between steps, but step {self._steps} overwrites them "
            f"by the master weights: {result}. Call engine.optimizer.refresh_fp32_params() after you write parameters, "
            "or set grid.check_weights = False if that is intended"
        )

    def _warn_of_frozen(self) -> None:
        self._are_frozen = True
        names = [name for name, parameter in self._named if not parameter.requires_grad]
        warn(
            f"parameters {listed(names)} were frozen after deepspeed.initialize, but an optimizer with master weights "
            "(ZeRO, bf16, fp16) steps on zeros in place of their gradients, so momentum and weight decay go on moving "
            "them. Freeze them before deepspeed.initialize, or give them a parameter group of their own and set its "
            "lr to 0; set grid.check_weights = False if that is intended"
        )

    def _parts(self) -> _Parts:
        """Return pairs of the same elements, of this rank's parameters and of its master weights."""
        optimizer = self._optimizer
        is_ours = isinstance(optimizer, PartitionedOptimizer)
        return [
            (own.detach(), master.detach())
            for own, master in (optimizer.own_parts() if is_ours else self._pairs_of(optimizer))
            if own is not None and master is not None and own.shape == master.shape and own.numel()  # not on NVMe
        ]

    def _find_places(self) -> list[_Place]:
        """Return the places of the parameters that are parts of flat tensors, and keep their addresses."""
        flats = {own.untyped_storage().data_ptr() for own, _ in self._parts()}
        if isinstance(self._optimizer, _NOT_FLAT):
            flats.clear()
        places = [
            _Place(name, each, start, int(each.storage_offset()), each.shape)
            for name, each in self._named
            if flats and (start := each.untyped_storage().data_ptr()) in flats
        ]
        self._placed = [place.parameter for place in places]
        self._addresses = [*map(torch.Tensor.data_ptr, self._placed)]
        return places

    def _put_back(self, parts: _Parts, addresses: list[int]) -> list[str]:
        """Copy what a program has set as ``parameter.data`` to the flat tensors; return the names of what differs."""
        flats = {own.untyped_storage().data_ptr(): own for own, _ in parts}
        replaced = []
        for place, old, new in zip(self._places, self._addresses, addresses, strict=True):
            parameter = place.parameter
            if new == old or not parameter.numel() or parameter.is_meta or place.start not in flats:
                continue
            if parameter.untyped_storage().data_ptr() not in flats:
                if parameter.shape != place.shape:
                    raise ValueError(
                        f"{place.name}.data was replaced by a tensor of shape {tuple(parameter.shape)}, but the engine "
                        f"trains one of shape {tuple(place.shape)}, which is a part of a larger tensor: assign one of "
                        "that shape, or build another engine for the changed model"
                    )
                flat = flats[place.start]
                view = flat.new_empty(0).set_(flat.untyped_storage(), place.offset, place.shape)  # type: ignore[call-overload]
                if not torch.equal(view, parameter.detach().to(view)):
                    view.copy_(parameter.detach())
                    replaced.append(place.name)
                parameter.data = view
        self._places = self._find_places()
        return replaced

    def _sample_differs(self, parts: _Parts) -> bool:
        """Compare a sample of each partition with the master weights, to within the rounding."""
        stride, flags = max(1, -(-len(parts) // _PARTS_AT_ONCE)), []
        for own, master in parts[self._steps % stride :: stride]:
            sampled = slice(None, None, -(-own.numel() // _SAMPLED))
            ours, theirs = own.reshape(-1)[sampled], master.reshape(-1)[sampled]
            if not _are_equal(ours, theirs):
                flags.append(_differ(ours, theirs))
        if not flags:
            return False
        found = torch.stack(flags).any()
        if found.device.type == "cpu" or self._steps < _STEPS_THAT_WAIT:
            return bool(found)
        if self._late is not None and self._late[0].query() and bool(self._late[1]):
            self._warn("parameters", "they were lost, because they were written to parameter.data on an accelerator")
        if self._late is None or self._late[0].query():
            on_host = found.to("cpu", non_blocking=True)
            self._late = (torch.accelerator.current_stream().record_event(), on_host)
        return False


@dataclass(frozen=True)
class _Place:
    """The place of a parameter: the address of its flat tensor's memory, its offset there, and its shape."""

    name: str
    parameter: nn.Parameter
    start: int
    offset: int
    shape: torch.Size


def _are_equal(own: torch.Tensor, master: torch.Tensor) -> bool:
    """Tell whether the elements are those of ``master``, rounded; always False on an accelerator, where it waits."""
    return own.is_cpu and master.is_cpu and torch.equal(own, master.to(own.dtype))


def _differ(own: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """Tell whether the elements differ from those of ``master`` by more than an optimizer may round them."""
    ours, theirs, limits = own.float(), master.to(own.device, non_blocking=True).float(), torch.finfo(own.dtype)
    return ((ours - theirs).abs() > 2 * limits.eps * (theirs.abs() + limits.tiny)).any()


def _copy_changed(own: torch.Tensor, master: torch.Tensor) -> bool:
    """Copy the elements of ``own`` that are not those of ``master``, rounded; return True if there are any."""
    found = False
    for ours, theirs in zip(own.reshape(-1).split(_AT_A_TIME), master.view(-1).split(_AT_A_TIME), strict=True):
        here = ours.to(theirs.device)
        changed = (here != theirs.to(here.dtype)) & ~here.isnan()
        if bool(changed.any()):
            theirs.copy_(torch.where(changed, here.to(theirs.dtype), theirs))
            found = True
    return found


# -- where each optimizer keeps them ----------------------------------------------------------------------------------

_Pairs: TypeAlias = Iterable[tuple[Any, Any]]


def _masters_of(optimizer: Any) -> Iterable[torch.Tensor]:
    """Return the tensors that a wrapped optimizer steps on."""
    return chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))


def _of_zero(optimizer: DeepSpeedZeroOptimizer) -> _Pairs:
    return zip(
        _own_partitions(optimizer, optimizer.parallel_partitioned_bit16_groups), _masters_of(optimizer), strict=True
    )


def _of_bf16(optimizer: BF16_Optimizer) -> _Pairs:
    return zip(_own_partitions(optimizer, optimizer.bf16_partitioned_groups), _masters_of(optimizer), strict=True)


def _own_partitions(optimizer: Any, partitioned: list[list[torch.Tensor]]) -> Iterable[torch.Tensor]:
    """Return this rank's partition of each group of parameters."""
    return map(getitem, partitioned, map(dist.get_rank, optimizer.real_dp_process_group))


def _of_zero_3(optimizer: DeepSpeedZeroOptimizer_Stage3) -> _Pairs:
    return zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)


def _of_fused(optimizer: FP16_Optimizer) -> _Pairs:
    return zip(optimizer.fp16_groups_flat, _masters_of(optimizer), strict=True)


def _of_unfused(optimizer: FP16_UnfusedOptimizer) -> _Pairs:
    return zip(chain.from_iterable(optimizer.fp16_groups), _masters_of(optimizer), strict=True)


_PARTS: dict[type, Callable[[Any], _Pairs]] = {
    DeepSpeedZeroOptimizer: _of_zero,
    BF16_Optimizer: _of_bf16,
    DeepSpeedZeroOptimizer_Stage3: _of_zero_3,
    FP16_Optimizer: _of_fused,
    FP16_UnfusedOptimizer: _of_unfused,
}
_NOT_FLAT = (DeepSpeedZeroOptimizer_Stage3, FP16_UnfusedOptimizer)
"""Optimizers whose parameters are not parts of a flat tensor all the time."""
