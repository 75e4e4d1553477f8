"""Gather updated parameters point to point on gloo, after a step of ZeRO 1 or 2 or of ``BF16_Optimizer``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import Mixin
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.parameter_gathers import gathering_of


class GatheredPointToPoint(EngineOnGrid):
    """An engine whose optimizer gathers parameters after a step, by collectives that use a link in one direction."""

    def complete(self) -> None:
        """Gather by messages in both directions."""
        super().complete()
        if self.give_optimizer(GatheredZero, GatheredBF16):
            self.optimizer.gathering = gathering_of(self.optimizer)


class GatheredZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_suffix, mixin_state = "OnGrid", "gathering"
    gathering: Callable[[], AbstractContextManager[None]]
    """The context in which DeepSpeed's own gather runs."""

    def step(self, closure: object = None) -> Any:
        """Gather point to point after the step."""
        with self.gathering():
            return super().step(closure)

    def update_lp_params(self) -> Any:
        """Gather point to point."""
        with self.gathering():
            return super().update_lp_params()


class GatheredBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``."""

    mixin_suffix, mixin_state = "OnGrid", "gathering"
    gathering: Callable[[], AbstractContextManager[None]]

    def update_lp_params(self) -> Any:
        """Gather point to point."""
        with self.gathering():
            return super().update_lp_params()
