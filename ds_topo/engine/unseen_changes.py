"""Warn of changes that a program makes and that its engine does not see.

These are steps of the engine's optimizer and of its scheduler that the program takes itself, and weights and learning
rates that it sets on one replica alone. Replicas compare both in an all-reduce of a few numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.base.marks import expert_group_name, inner_optimizer
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import by_value, warn
from ds_topo.process_groups.creation import ProcessGroup, gathered

_HOOK = "_ds_topo_direct_steps"
"""The attribute of an optimizer with the hook of its last engine."""


class DirectSteps:
    """Notice steps of an engine's optimizer and of its scheduler that the program takes itself.

    Args:
        engine: an engine of a grid, whose ``check_weights`` switches the warning off.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._grid = engine.mpu
        self._has_warned = self._is_of_engine = False
        """``_is_of_engine`` is True while the engine takes a step."""
        self._scheduled: Any = None
        """The scheduler's count of steps at the end of the engine's last one."""
        self._further = 0
        """How often the scheduler was one step ahead of that when the engine took the next one."""
        optimizer = inner_optimizer(engine)
        if isinstance(optimizer, torch.optim.Optimizer):
            hook = optimizer.register_step_pre_hook(self._before_step)
            former = vars(optimizer).get(_HOOK)
            if former is not None:  # of an engine that had this optimizer before
                former.remove()
            setattr(optimizer, _HOOK, hook)
            self._grid.on_destroy(hook.remove)

    @contextmanager
    def of_engine(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Take a step of the engine in the block. Warn once if the program steps the engine's scheduler, too.

        A checkpoint that is loaded may put the scheduler one step ahead, but not a second time.
        """
        if self._scheduled is not None and _count_of(engine.lr_scheduler) == self._scheduled + 1:
            self._further += 1
            if self._further == 2 and self._grid.check_weights:
                warn(
                    f"{type(engine.lr_scheduler).__name__}.step() was called beside engine.step(), which steps the "
                    "engine's scheduler itself, so the learning rate is ahead of its schedule: call engine.step() "
                    "alone, or pass no lr_scheduler= to initialize() if the program steps it; set grid.check_weights = "
                    "False if it is intended"
                )
        self._is_of_engine = True
        try:
            yield
        finally:
            self._is_of_engine = False
            self._scheduled = _count_of(engine.lr_scheduler)

    def _before_step(self, *_: object) -> None:
        if self._is_of_engine or self._has_warned or not self._grid.check_weights:
            return
        self._has_warned = True
        warn(
            "optimizer.step() was called without engine.step(): the engine counts no micro-batch, so with gradient "
            "accumulation it never reduces gradients, and its schedule and counters stay behind. Call engine.step() "
            "after every engine.backward(loss), and no step of the optimizer; set grid.check_weights = False if it is "
            "intended"
        )


class NoticedSteps(EngineOnGrid):
    """An engine that notices steps which the program takes itself."""

    mixin_state = "direct_steps"
    direct_steps: DirectSteps

    def complete(self) -> None:
        """Look from here."""
        super().complete()
        self.direct_steps = DirectSteps(self)

    def _take_model_step(self, *arguments: Any) -> None:
        """Tell the engine's own step from others."""
        with self.direct_steps.of_engine(self):
            super()._take_model_step(*arguments)


def _count_of(scheduler: Any) -> Any:
    """Return how many steps a scheduler of torch or of DeepSpeed has taken; None if it does not say so."""
    return getattr(scheduler, "last_epoch", getattr(scheduler, "last_batch_iteration", None))


# -- changes on one replica -------------------------------------------------------------------------------------------

_OPTIONS = ("lr", "weight_decay", "momentum", "betas")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers as which elements are read, by their size."""


class LoneChanges:
    """The search for weights and options of the optimizer that a program has set on some replicas alone.

    Replicas compare options before steps 1, 2, 4, 8, ..., and weights before the first one. Optimizers with master
    weights overwrite what a program has written, so there weights are not compared
    (:mod:`ds_topo.engine.written_weights`).

    Args:
        engine: an engine of a grid, whose ``check_weights`` switches the comparison off.
        has_masters: the engine's optimizer has master weights.
    """

    def __init__(self, engine: DeepSpeedEngine, has_masters: bool) -> None:
        self._engine, self._has_masters = engine, has_masters
        self._steps = 0
        self._has_warned = False

    def look(self) -> None:
        """Warn of what differs, at the beginning of a step; collective over the replicas of a parameter."""
        self._steps += 1
        grid = self._engine.mpu
        group = grid.get_data_parallel_group()
        if self._steps & (self._steps - 1) or not grid.check_weights or dist.get_world_size(group) == 1:
            return
        options = ", ".join(_options_of(self._engine.optimizer))
        weights = self._weights() if self._steps == 1 and not self._has_masters else {}
        sums = [int(each) for each in weights.values()]
        same_options, same_names, same_weights = _are_equal(map(_number_of, (options, [*weights], sums)), group)
        if not same_names:
            self._warn("start with different parameters", f"{len(weights)} parameters", group)
        elif not same_weights:
            are_equal = _are_equal(sums, group)
            names = [name for name, is_equal in zip(weights, are_equal, strict=True) if not is_equal]
            own = f"a sum {int(weights[names[0]]) & 0xFFFFFFFF:08x} of its bits"
            what = f"start with different weights, {len(names)} of {len(sums)} parameters, first {names[0]!r}"
            self._warn(f"{what}, and without ZeRO, bf16 and fp16 nothing makes them equal again", own, group)
        if not same_options and not self._has_warned:
            self._has_warned = True
            self._warn(f"take step {self._steps} with different options of the optimizer", options, group)

    def _warn(self, what: str, own: str, group: ProcessGroup) -> None:
        said = gathered((dist.get_rank(), own), group)
        if dist.get_rank(group) == 0:
            warn(
                f"replicas {what}: {by_value(said)}. They train different models. deepspeed.initialize has made them "
                "equal; what a program loads, writes or sets afterwards it must do on all ranks. Set "
                "grid.check_weights = False if it is intended"
            )

    def _weights(self) -> dict[str, torch.Tensor]:
        """Return a sum of the bits of each parameter of which all replicas have the same values."""
        return {
            name: parameter.detach().contiguous().view(-1).view(_INTEGERS[parameter.itemsize]).sum(dtype=torch.int64)
            for name, parameter in self._engine.module.named_parameters()
            if expert_group_name(parameter) is None
            and parameter.layout == torch.strided
            and not (parameter.is_meta or parameter.is_complex() or hasattr(parameter, "__tensor_flatten__"))
        }


class NoticedLoneChanges(EngineOnGrid):
    """An engine whose replicas compare what a program may have set on one of them alone."""

    mixin_state = "lone_changes"
    lone_changes: LoneChanges

    def complete(self) -> None:
        """Look from here."""
        super().complete()
        has_masters = bool(self.zero_optimization_stage() or self.fp16_enabled() or self.bfloat16_enabled())
        self.lone_changes = LoneChanges(self, has_masters)

    def _take_model_step(self, *arguments: Any) -> None:
        """Compare replicas before some steps."""
        self.lone_changes.look()
        super()._take_model_step(*arguments)


def _are_equal(numbers: Iterable[int], group: ProcessGroup) -> list[bool]:
    """Tell of each number whether all ranks of a group have the same; collective over it."""
    own = torch.tensor([*numbers], device=get_accelerator().current_device_name())
    extremes = torch.stack([own, ~own])
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    return [highest == ~lowest for highest, lowest in zip(*extremes.tolist(), strict=True)]


def _options_of(optimizer: Any) -> list[str]:
    """Return the different options of the parameter groups of an optimizer, as text."""
    found: dict[str, None] = {}
    for group in getattr(optimizer, "param_groups", ()):
        values = {name: group[name] for name in _OPTIONS if isinstance(group.get(name), (float, int, list, tuple))}
        values |= {name: float(group[name]) for name in _OPTIONS if isinstance(group.get(name), torch.Tensor)}
        found[" ".join(f"{name}={value}" for name, value in values.items())] = None
    return list(found)


def _number_of(values: object) -> int:
    """Return a positive number that tells values apart."""
    return int.from_bytes(hashlib.sha1(repr(values).encode(), usedforsecurity=False).digest()[:7], "big")
