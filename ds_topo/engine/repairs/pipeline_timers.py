"""Start the timers of the backward pass once on the stages of a pipeline.

DeepSpeed's hooks on outputs start them, too, where the pipeline has started them itself: on all stages but the last,
whose engine has the loss.

Releases: all.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.on_grid import EngineOnGrid


class TimedOnce(EngineOnGrid, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine."""

    def complete(self) -> None:
        """Leave the timers to the pipeline."""
        super().complete()
        if not self.is_last_stage() and not isinstance(self, DualPipeVEngine):
            self.engine_timers.backward_timers.clear()
            self.engine_timers.backward_inner_timers.clear()
