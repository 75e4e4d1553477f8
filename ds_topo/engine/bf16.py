"""Build ``BF16_Optimizer``, which accumulates gradients of bf16 in fp32, with the mpu of a grid."""

from __future__ import annotations

from typing import Any

from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError


class EngineWithBF16(EngineOnGrid):
    """An engine in bf16, in which DeepSpeed refuses Muon with any mpu."""

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        """Let Muon have an mpu whose ranks hold whole matrices: DeepSpeed refuses it with any mpu."""
        grid = self.mpu
        if "muon" in type(optimizer).__name__.lower() and (slices := grid.get_model_parallel_world_size()) > 1:
            raise EngineOptionError(
                f"Muon with bf16 and gradients in fp32 on {grid.topology().spec!r}: DeepSpeed's optimizer for that "
                f"needs whole models on each rank, but here {slices} ranks share one. Use ZeRO 2, or 0 or 1 without "
                '"grad_accum_dtype": "fp32", or an optimizer such as AdamW'
            )
        self.mpu = None  # type: ignore[assignment]
        try:
            wrapper = super()._configure_bf16_optimizer(optimizer)
        finally:
            self.mpu = grid
        wrapper.mpu = grid
        return wrapper
