"""Sum gradients over ``seq`` at ZeRO 3, as every other stage does."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_topo.base.classes import Mixin
from ds_topo.engine.on_grid import EngineOnGrid


class SummedOverSequence(EngineOnGrid):
    """An engine at ZeRO 3, which averages over ``seq`` where every other stage sums."""

    def complete(self) -> None:
        """Scale the optimizer's averages."""
        super().complete()
        self.give_optimizer(SummedZero3)


class SummedZero3(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``."""

    mixin_state = "keeps_scale"
    keeps_scale = False
    """True if the program has an mpu of its own, whose loss fits DeepSpeed's own scale.

    The loss of transformers, which DeepSpeed's guide to long sequences has, too, is that of the whole sequence on each
    rank. Its gradient is the whole one times the degree of ``seq`` where gradients are summed, at ZeRO 0 to 2.
    """

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(self, *arguments: Any) -> list[torch.Tensor]:  # noqa: N802
        """Scale averages by the degree of ``seq``, so that they are sums over ``seq``.

        Every other stage sums gradients over ``seq`` and averages them over ``data``. ZeRO 3 does the same except where
        it uses reduce-scatter, which divides by all ranks: with ``reduce_scatter`` true (the default), without
        ``contiguous_gradients``, and for parameters larger than ``reduce_bucket_size``.
        """
        partitions: list[torch.Tensor] = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(*arguments)
        factor = 1 if self.keeps_scale else self.sequence_parallel_size
        return [partition.mul(factor) for partition in partitions] if factor > 1 else partitions
