"""Answer the parallel state of Megatron-like programs from a grid.

GPT-NeoX, Megatron-DeepSpeed and Megatron-LM ask a module (``megatron.mpu``, ``megatron.core.parallel_state``) for their
groups and ranks. Its names do not always mean what DeepSpeed's mpu means by them: the ``get_model_parallel_group`` of
GPT-NeoX is tensor parallel alone. ``of(grid, program)`` returns an object that answers as that program's module would,
for any order of axes. ``install(grid, module)`` makes the module itself answer so until the grid is destroyed.
``python -m ds_topo.parallel_state`` prints how each name is answered.

Start with :mod:`~ds_topo.parallel_state.installation`; ``program_state`` has the answers that all programs share.
"""

from __future__ import annotations

from ds_topo.parallel_state.installation import PROGRAMS, install, of, program_of
from ds_topo.parallel_state.programs import GPTNeoXState, MegatronDeepSpeedState, MegatronState

__all__ = [
    "PROGRAMS",
    "GPTNeoXState",
    "MegatronDeepSpeedState",
    "MegatronState",
    "install",
    "of",
    "program_of",
]
