"""Gather updated parameters in slices on gloo, after a step of ZeRO 1 or 2 or of ``BF16_Optimizer``.

DeepSpeed gathers at the end of its step, by one collective for each flat tensor. On gloo, slices sent point to point
arrive in about half that time.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        groups = {*getattr(self.optimizer, "real_dp_process_group", ())}
        groups = {group for group in groups if dist.get_world_size(group) > 1}
        device = torch.device(get_accelerator().current_device_name())
        if groups and all(traits_of(group, device).tagged_messages for group in groups):  # gloo
            self.give_optimizer(GatheredZero, GatheredBF16)


class GatheredZero(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2."""

    def step(self, closure: object = None) -> Any:
        """Gather point to point after the step."""
        with ledger.bound(patches.GATHER_PARAMETERS, _in_slices):
            return super().step(closure)

    def update_lp_params(self) -> Any:
        """Gather point to point."""
        with ledger.bound(patches.GATHER_PARAMETERS, _in_slices):
            return super().update_lp_params()


class GatheredBF16(Mixin, BF16_Optimizer):  # type: ignore[misc]
    """``BF16_Optimizer``."""

    def update_lp_params(self) -> Any:
        """Gather point to point."""
        with ledger.bound(patches.GATHER_PARAMETERS, _in_slices):
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
