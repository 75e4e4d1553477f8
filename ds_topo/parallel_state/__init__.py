"""The parallel state of Megatron-like programs, answered from a grid, with the programs' own meanings.

GPT-NeoX, Megatron-DeepSpeed and Megatron-LM ask a module (``megatron.mpu``, ``megatron.core.parallel_state``) which
group and rank they are in, and they do not mean what DeepSpeed's mpu means: GPT-NeoX's ``get_model_parallel_group`` is
tensor parallel alone. ``of(grid, program)`` answers as that program's module would, in any order of axes;
``install(grid, module)`` lets the module itself answer so until the grid is destroyed. ``python -m
ds_topo.parallel_state`` prints which name is answered how.
"""

from __future__ import annotations

from ds_topo.parallel_state.installation import install, program_of
from ds_topo.parallel_state.megatron_deepspeed import MegatronDeepSpeedState
from ds_topo.parallel_state.megatron_lm import MegatronState
from ds_topo.parallel_state.neox import GPTNeoXState
from ds_topo.parallel_state.programs import PROGRAMS, of

__all__ = [
    "PROGRAMS",
    "GPTNeoXState",
    "MegatronDeepSpeedState",
    "MegatronState",
    "install",
    "of",
    "program_of",
]
