"""Run AutoSP, DeepSpeed's compiled sequence parallelism, on the ``seq`` axis of a grid.

DeepSpeed's compiled graphs look their groups up in a table of the process, by ``rank // sequence_parallel_size``, and
take their part of a sequence by ``rank % sequence_parallel_size``. Before an engine compiles, the grid's groups are
entered into that table. While a graph is compiled, the rank is the index along ``seq``.

The samples of a rank are whole sequences, of which the graph takes its part, and the loss is that part's mean. So
gradients are averaged over ``seq``, too. (With other sequence parallelism they are summed: there a rank's loss is its
share.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.errors import EngineOptionError
from ds_topo.ledger import ONE_CALL, Patch, always, ledger
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import SEQ

OPTION = "sequence_parallel_size"


def uses_autosp(config: DeepSpeedConfig) -> bool:
    """Tell whether the config asks for AutoSP."""
    return "autosp" in (getattr(config.compile_config, "passes", None) or [])


def check_autosp(config: DeepSpeedConfig, grid: MpuGrid, is_pipeline: bool) -> None:
    """Refuse AutoSP where DeepSpeed would not split sequences, or by another number; fill in the degree of ``seq``.

    Raises:
        EngineOptionError: the message names the option and what to do.
    """
    spec, stage = grid.topology().spec, config.zero_config.stage
    size = grid.get_axis_size(SEQ) if SEQ in grid.topology().axes else 1
    given = config._param_dict.setdefault(OPTION, size)
    if given != size:
        raise EngineOptionError(
            f"{OPTION} {given} (AutoSP), but {spec!r} has seq={size}: name seq={given} in the topology, or leave "
            f"{OPTION} out"
        )
    if is_pipeline:
        raise EngineOptionError(
            "compile.passes 'autosp' (AutoSP) with a PipelineModule: DeepSpeed compiles the layers of a pipeline one "
            "by one and would not split sequences; use a model without a pipeline, or leave the pass out"
        )
    if size > 1 and stage > 1:
        raise EngineOptionError(
            f"compile.passes 'autosp' (AutoSP) at ZeRO stage {stage}: DeepSpeed would compile without splitting "
            "sequences; use stage 0 or 1, or DistributedAttention or UlyssesSPAttentionHF, which work at every stage"
        )


def average_over_seq(engine: DeepSpeedEngine) -> None:
    """Average gradients over ``seq`` instead of summing them."""
    for reduces in (engine, engine.optimizer):
        if hasattr(reduces, OPTION):
            setattr(reduces, OPTION, 1)


def with_groups_of_grid(get_backend: Any) -> Any:
    """Wrap ``get_autosp_backend`` so that graphs use the grid's groups, and this rank's index along ``seq``."""

    @wraps(get_backend)
    def get_autosp_backend(engine: DeepSpeedEngine, compile_kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        backend: Callable[..., Any] | None = get_backend(engine, compile_kwargs)
        if backend is None or SEQ not in engine.mpu.topology().axes:
            return backend
        _enter_groups(engine.mpu)
        compile_graph, index = backend, engine.mpu.get_axis_rank(SEQ)

        def compile_on_grid(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            with _ranks_along_seq(index):
                return compile_graph(graph, inputs)

        return compile_on_grid

    return get_autosp_backend


def _enter_groups(grid: MpuGrid) -> None:
    """Enter this rank's group along ``seq`` into the table of DeepSpeed's compiled graphs, until the grid is destroyed.

    Raises:
        EngineOptionError: graphs of this process use other groups.
    """
    from deepspeed.compile.custom_ops import sp_dp_registry  # imports sympy, which is slow

    table: dict[Any, Any] = sp_dp_registry.GROUP_REGISTRY
    group, size = grid.get_group(SEQ), grid.get_axis_size(SEQ)
    key = dist.get_rank() // size  # as the graphs compute it
    if table.get("is_reg"):
        if table.get(key) is not group:
            raise EngineOptionError(
                f"AutoSP has already compiled graphs of this process over other groups than those of "
                f"{grid.topology().spec!r}, and finds one group by name: destroy() the other grid first"
            )
        return
    entries = {key: group, "SP_SIZE": size, "DP_SIZE": dist.get_world_size() // size, "is_reg": True}
    table.update(entries)

    def leave() -> None:
        if table.get(key) is group:
            for name in entries:
                del table[name]

    grid.on_destroy(leave)


def _ranks_along_seq(index: int) -> ExitStack:
    """Let AutoSP's passes take this part of a sequence; for one compilation."""
    from deepspeed.compile import util
    from deepspeed.compile.passes import sp_compile

    answers = SimpleNamespace(**vars(comm))
    answers.get_rank = lambda group=None: index
    bound = ExitStack()
    for module in (util, sp_compile):
        row = Patch(
            module,
            "dist",
            instead="The same functions, with the index along seq as the rank.",
            why="AutoSP takes rank % sequence_parallel_size for the index of the rank's part of a sequence.",
            during=f"{ONE_CALL} of the compiler",
        )
        bound.enter_context(ledger.bound(row, always(answers)))
    return bound
