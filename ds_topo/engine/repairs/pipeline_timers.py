"""Start the timers of the backward pass once on the stages of a pipeline.

DeepSpeed's hooks on outputs start them, too, where the pipeline has started them itself: on all stages but the last,
whose engine has the loss. A program with ``wall_clock_breakdown`` sees ``AssertionError: bwd_microstep timer has
already been started`` there, and the last stage waits.

Releases: all.
Reports: no public report found; deepspeedai/DeepSpeed#7665 has added the hooks.
"""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.base.patches import DualPipeVEngine
from ds_topo.engine.on_grid import EngineOnGrid


class TimedOnce(EngineOnGrid, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, whose timers of a backward pass two places start."""

    def complete(self) -> None:
        """Leave the timers to the pipeline."""
        super().complete()
        if not self.is_last_stage() and not isinstance(self, DualPipeVEngine):
            self.engine_timers.backward_timers.clear()
            self.engine_timers.backward_inner_timers.clear()
