"""Free the module of a ZeRO 3 engine that was destroyed.

DeepSpeed has the module of each engine in a list, ``FWD_MODULE_STACK``, until the process ends, and with it all states.
A program that builds one engine after another sees its memory grow.

Releases: all.
Reports: deepspeedai/DeepSpeed#7204 reports memory that grows with each new engine, without the cause.
"""

from __future__ import annotations

from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ds_topo.base.classes import Mixin
from ds_topo.engine.on_grid import EngineOnGrid


class FreedModule(EngineOnGrid):
    """An engine at ZeRO 3, which keeps destroyed modules."""

    def complete(self) -> None:
        """Free the module when the optimizer is destroyed."""
        super().complete()
        self.give_optimizer(FreedZero3)


class FreedZero3(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``."""

    def destroy(self) -> None:
        """Take the module out of the list."""
        super().destroy()
        places = [place for place, module in enumerate(FWD_MODULE_STACK) if module is self.module]
        if places:
            del FWD_MODULE_STACK[places[0]]
