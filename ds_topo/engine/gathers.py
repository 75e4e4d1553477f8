"""Gather updated parameters in slices on gloo, after a step of ZeRO 1 or 2 or of ``BF16_Optimizer``.

DeepSpeed gathers at the end of its step, by one collective for each flat tensor. On gloo, slices sent point to point
arrive in about half that time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base import patches
from ds_topo.base.backends import traits_of
from ds_topo.base.classes import Mixin
from ds_topo.base.ledger import around, ledger
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.exchange import exchange_of


class GatheredPointToPoint(EngineOnGrid):
    """An engine whose optimizer gathers parameters after a step, by collectives that use a link in one direction."""

    def complete(self) -> None:
        """Gather by messages in both directions."""
        super().complete()
        if self.give_optimizer(GatheredZero, GatheredBF16):
            groups = [group for group in {*self.optimizer.real_dp_process_group} if dist.get_world_size(group) > 1]
            device = torch.device(get_accelerator().current_device_name())
            is_on_gloo = bool(groups) and all(traits_of(group, device).tagged_messages for group in groups)
            in_slices = partial(ledger.bound, patches.GATHER_PARAMETERS, _in_slices)
            self.optimizer.gathering = in_slices if is_on_gloo else nullcontext


class GatheredZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    mixin_state = "gathering"
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

    mixin_state = "gathering"
    gathering: Callable[[], AbstractContextManager[None]]

    def update_lp_params(self) -> Any:
        """Gather point to point."""
        with self.gathering():
            return super().update_lp_params()


@around
def _in_slices(
    _: object,
    groups_flat: Sequence[torch.Tensor],
    partitioned_param_groups: object,
    dp_process_group: Sequence[ProcessGroup],
) -> None:
    for flat, group in zip(groups_flat, dp_process_group, strict=False):
        exchange_of(group, flat.device).gather_now(flat)
