"""Warn of steps of an engine's optimizer and of its scheduler that the program takes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.base.marks import inner_optimizer
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import warn

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
