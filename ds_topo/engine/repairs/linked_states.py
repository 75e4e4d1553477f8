"""Link states to the parameters of all groups of ZeRO 1 and 2.

After its first step ZeRO links the states of the inner optimizer to parameters, for ``safe_get_full_optimizer_state``
and universal checkpoints. It does so after the step of the first group, when other groups have no states yet. A program
sees ``ValueError: exp_avg not found in optimizer state fragment`` for their parameters.

Releases: all.
Reports: no public report found; deepspeedai/DeepSpeed#5104 has added the links after the first step.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import Mixin
from ds_topo.engine.on_grid import EngineOnGrid


class LinkedStates(EngineOnGrid):
    """An engine at ZeRO 1 or 2, which links the states of the first group alone."""

    def complete(self) -> None:
        """Link all states after the first step."""
        super().complete()
        self.give_optimizer(LinkedZero)


class LinkedZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``."""

    _hp_optimizer_states_linked: bool

    def step(self, closure: object = None) -> Any:
        """Link again after the step of the last group."""
        before, result = self._hp_optimizer_states_linked, super().step(closure)
        if before != self._hp_optimizer_states_linked:
            self._hp_optimizer_states_linked = False
            self._lazy_init_hp_params_optimizer_state()
        return result
