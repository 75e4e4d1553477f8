"""The programs whose parallel state a grid can answer."""

from __future__ import annotations

from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.inputs import require_grid
from ds_topo.errors import abridged
from ds_topo.parallel_state.megatron_deepspeed import MegatronDeepSpeedState
from ds_topo.parallel_state.megatron_lm import MegatronState
from ds_topo.parallel_state.neox import GPTNeoXState
from ds_topo.parallel_state.questions import ParallelState

PROGRAMS: dict[str, type[ParallelState]] = {
    "gpt-neox": GPTNeoXState,
    "megatron-deepspeed": MegatronDeepSpeedState,
    "megatron-lm": MegatronState,
}
"""The programs whose parallel state a grid can answer."""


def of(grid: PipelineParallelGrid, program: str = "megatron-lm") -> ParallelState:
    """An object with the functions of a program's parallel state, with that program's meanings.

    Args:
        grid: whose layout it is.
        program: ``"gpt-neox"``, ``"megatron-deepspeed"`` or ``"megatron-lm"``.

    Raises:
        ValueError: another program.
        TypeError: no grid.

    >>> import torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    >>> with PipelineParallelGrid("model=2,pipe=2,data=2") as grid:
    ...     neox, megatron = of(grid, "gpt-neox"), of(grid)
    ...     neox.get_model_parallel_world_size(), dist.get_process_group_ranks(megatron.get_model_parallel_group())
    ...     neox.get_model_parallel_src_rank(), megatron.get_context_parallel_world_size()
    (2, [1, 3, 5, 7])
    (1, 1)
    >>> dist.destroy_process_group()
    """
    require_grid("grid", grid)
    if program not in PROGRAMS:
        raise ValueError(f"program={abridged(program)}: choose one of {list(PROGRAMS)}")
    return PROGRAMS[program](grid)
