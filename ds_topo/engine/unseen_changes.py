"""Warn of changes that a program makes and that its engine does not see.

These are steps of the engine's optimizer and of its scheduler that the program takes itself, and weights and learning
rates that it sets, and parameters that it freezes, on one replica alone.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.base.marks import expert_group_name, inner_optimizer
from ds_topo.base.torch_names import default_store, job_timeout
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import DisagreementError, by_value, listed, warn
from ds_topo.launch.council import leave, within
from ds_topo.process_groups.creation import ProcessGroup, extremes, gathered_by_value, number_of

_HOOK = "_ds_topo_direct_steps"
"""The attribute of an optimizer with the hook of its last engine."""


class DirectSteps:
    """Notice steps of an engine's optimizer and of its scheduler that the program takes itself.

    ``check_weights`` of the engine's grid switches the warnings off.
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
_PATIENCE = timedelta(seconds=5)
FREEZING = timedelta(seconds=60)
"""The longest time by which a replica may come later than another to a step in which parameters were frozen."""
_OTHER_OPTIONS = "take step {} with different options of the optimizer"
_LONE = (
    "replicas {}:{}\nThey train different models. deepspeed.initialize made them equal: apply each later change on all "
    "ranks. If it is intended, set grid.check_weights = False before the engine is built"
)


class LoneChanges:
    """The search for weights and options of the optimizer that a program has set on some replicas alone.

    Replicas compare both before the first step, by an all-reduce. Before steps 2, 4, 8, ... they compare options
    through the job's store, where nobody waits: a rank that has left out a step would join another collective instead.
    If ``requires_grad`` of a parameter changes on a rank, the rank waits until it has changed on all replicas, because
    gradients of different parameters would be reduced together. Optimizers with master weights overwrite what a program
    has written, so there weights are not compared (:mod:`ds_topo.engine.written_weights`). ``check_weights`` of the
    engine's grid switches the comparison off if it is set before.
    """

    def __init__(self, engine: DeepSpeedEngine, has_masters: bool) -> None:
        self._engine, self._has_masters = engine, has_masters
        self._steps, self.begins_step, self._has_warned = 0, True, False
        """``begins_step`` is True until the first forward pass of a step."""
        self._named = [*engine.module.named_parameters()]
        self._trained = [each.requires_grad for _, each in self._named]
        self._key = 0
        """A random number that marks the keys of these replicas in the store; 0 if they compare nothing."""
        group = engine.mpu.get_data_parallel_group()
        if engine.mpu.check_weights and dist.get_world_size(group) > 1:
            _, (self._key,) = _extremes([secrets.randbits(62)], group)

    def look(self) -> None:
        """Warn of what differs, at the beginning of a step; the first step is collective over the replicas."""
        self._steps += 1
        self.begins_step = True
        if self._steps & (self._steps - 1) or not self._key:
            return
        group = self._engine.mpu.get_data_parallel_group()
        options = ", ".join(_options_of(self._engine.optimizer))
        if self._steps > 1:
            if not self._has_warned and (other := self._other_options(options, group)):
                self._has_warned = True
                said = by_value([other, (dist.get_rank(), socket.gethostname(), options)])
                warn(_LONE.format(_OTHER_OPTIONS.format(self._steps), said))
            return
        weights = {} if self._has_masters else self._weights()
        sums = [int(each) for each in weights.values()]
        (same_options, same_names, same_weights), _ = _extremes([*map(number_of, (options, [*weights], sums))], group)
        if not same_names:
            self._warn("start with different parameters", f"{len(weights)} parameters", group)
        elif not same_weights:
            are_equal, _ = _extremes(sums, group)
            names = [name for name, is_equal in zip(weights, are_equal, strict=True) if not is_equal]
            own = f"a sum {int(weights[names[0]]) & 0xFFFFFFFF:08x} of its bits"
            what = f"start with different weights, {len(names)} of {len(sums)} parameters, first {names[0]!r}"
            self._warn(f"{what}, and without ZeRO, bf16 and fp16 nothing makes them equal again", own, group)
        if not same_options:
            self._has_warned = True
            self._warn(_OTHER_OPTIONS.format(1), options, group)

    def look_at_frozen(self) -> None:
        """Wait for all replicas if other parameters are trained than before, in the first forward pass of a step."""
        self.begins_step = False
        trained = [each.requires_grad for _, each in self._named]
        if trained == self._trained:
            return
        pairs = zip(self._named, self._trained, trained, strict=True)
        names = [name for (name, _), before, now in pairs if before != now]
        self._trained = trained
        if not self._key:
            return
        group, store = self._engine.mpu.get_data_parallel_group(), default_store()
        key, size = f"ds_topo/frozen/{self._key:x}/{self._steps}/{number_of(names):x}", dist.get_world_size(group)
        limit = min(FREEZING, job_timeout() / 4)

        def meet() -> int:
            if store.add(key, 1) == size:
                store.set(f"{key}/all", "")
            with suppress(RuntimeError):  # some did not come
                store.wait([f"{key}/all"], limit)
            return int(store.add(key, 0))

        try:
            came = within(limit + _PATIENCE, "parameters that were frozen", meet)
        except RuntimeError:  # the store does not answer: what needs it says so
            return
        if came < size:
            raise DisagreementError(
                f"rank {dist.get_rank()} on {socket.gethostname()}: requires_grad of {listed(names)} has changed since "
                f"step {self._steps}, but within {limit} on {came} of {size} replicas alone. Gradients of different "
                "parameters would be reduced together: freeze parameters on all ranks in the same step. If it is "
                "intended, set grid.check_weights = False before the engine is built"
            )
        if dist.get_rank(group) == 0:
            leave(store, dist.get_rank(), dist.get_process_group_ranks(group), [key, f"{key}/all"])

    def _other_options(self, own: str, group: ProcessGroup) -> tuple[int, str, str] | None:
        """Return rank, host and options of the first rank that came; None if they are equal, or another rank warns."""
        store, rank = default_store(), dist.get_rank()
        key = f"ds_topo/options/{self._key:x}/{self._steps}"

        def compare() -> tuple[int, str, str, bool]:
            first, host, theirs = json.loads(store.compare_set(key, "", json.dumps([rank, socket.gethostname(), own])))
            return first, host, theirs, theirs != own and store.add(f"{key}/told", 1) == 1

        try:
            first, host, theirs, warns = within(_PATIENCE, "a comparison of options", compare)
        except RuntimeError:  # the store does not answer: what needs it says so
            return None
        leave(store, rank, dist.get_process_group_ranks(group), [key] * (first == rank) + [f"{key}/told"] * warns)
        return (first, host, theirs) if warns else None

    def _warn(self, what: str, own: str, group: ProcessGroup) -> None:
        said = gathered_by_value(own, group)
        if dist.get_rank(group) == 0:
            warn(_LONE.format(what, said))

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

    def begin_training(self) -> None:
        """Look at what is frozen in the first forward pass of a step."""
        super().begin_training()
        if self.lone_changes.begins_step:
            self.lone_changes.look_at_frozen()


def _extremes(numbers: Sequence[int], group: ProcessGroup) -> tuple[list[bool], list[int]]:
    """Tell of each number whether all ranks of a group have the same, and the highest; collective over it."""
    own = torch.tensor(numbers, device=get_accelerator().current_device_name())
    highest, lowest = extremes(own, group)
    return (highest == lowest).tolist(), highest.tolist()


def _options_of(optimizer: Any) -> list[str]:
    """Return the different options of the parameter groups of an optimizer, as text."""
    found: dict[str, None] = {}
    for group in getattr(optimizer, "param_groups", ()):
        values = {name: group[name] for name in _OPTIONS if isinstance(group.get(name), (float, int, list, tuple))}
        values |= {name: float(group[name]) for name in _OPTIONS if isinstance(group.get(name), torch.Tensor)}
        found[" ".join(f"{name}={value}" for name, value in values.items())] = None
    return list(found)
