"""Run AutoTP, AutoEP and AutoSP, DeepSpeed's automatic parallelism, on the axes of a grid, in any order.

*AutoTP* splits a model along ``model``. DeepSpeed keeps its groups in ``deepspeed.utils.groups``. If there are none, it
joins neighboring ranks of the world, and it makes that module the mpu of the engine. For an engine of a grid, the
tables hold the grid's groups whenever the engine is current (:mod:`ds_topo.engine.current_mpu`), and the engine keeps
its grid as its mpu.

*AutoEP* replaces the MoE layers of a model of Hugging Face by layers whose experts are on different ranks. DeepSpeed
would create the groups from neighboring ranks of the world. For an engine of a grid, ``create_expert_groups`` creates
them before, where DeepSpeed's functions find them. Together with AutoTP, DeepSpeed also computes the tables of all
ranks, which it compares with these groups; they then come from the grid, too.

*AutoSP* splits sequences along ``seq`` in compiled graphs. They look their groups up in a table of the process, by
``rank // sequence_parallel_size``, and take their part of a sequence by ``rank % sequence_parallel_size``. Before an
engine compiles, the grid's groups are entered into that table. While a graph is compiled, the rank is the index along
``seq``. The samples of a rank are whole sequences, of which the graph takes its part, and the loss is that part's mean.
So gradients are averaged over ``seq``, too. (With other sequence parallelism they are summed: there a rank's loss is
its share.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_topo.base import patches
from ds_topo.base.ledger import Patch, always, find, ledger
from ds_topo.base.patches import FoldingGroupTables
from ds_topo.base.supported import SLICES_OF_PARTITIONED, require
from ds_topo.collectives import explain_whole_weights
from ds_topo.engine.config import Case, passes_of
from ds_topo.engine.expert_groups import create_expert_groups
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import EngineOptionError, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.topology.axes import EXPERT, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import ExpertPlan

_OF_TENSORS, _TENSOR_SIZE = "tensor_parallel", "autotp_size"
_OF_EXPERTS, _EXPERT_SIZE = "expert_parallel", "autoep_size"
_SEQUENCE_SIZE = "sequence_parallel_size"


class AutomaticParallelism(EngineOnGrid):
    """An engine whose config asks for AutoTP, AutoEP or AutoSP."""

    @classmethod
    def complete_config(cls, case: Case) -> None:
        """Set the sizes that the config leaves out to the degrees of the grid."""
        super().complete_config(case)
        complete_sizes(case.config, case.grid)

    def built_inside(self, undo: ExitStack, case: Case) -> None:
        """Let DeepSpeed take tables of ranks from the grid, and say what to do about a model that it does not know."""
        super().built_inside(undo, case)
        undo.enter_context(tables_of_grid(case.config, case.grid))
        undo.enter_context(_naming_patterns())

    def complete(self) -> None:
        """Average gradients over ``seq`` with AutoSP, instead of summing them."""
        super().complete()
        if "autosp" in passes_of(self._config):
            for reduces in (self, self.optimizer):
                if hasattr(reduces, _SEQUENCE_SIZE):
                    setattr(reduces, _SEQUENCE_SIZE, 1)

    def _configure_expert_parallel(self, *arguments: Any, **options: Any) -> Any:
        """Create the expert groups of the grid first, and hide the grid, whose slices AutoEP refuses."""
        grid = self.mpu
        if self._config.expert_parallel_config.enabled:
            plan = _plan_of(self._config, grid)
            create_expert_groups(grid, plan.expert_parallel_size, use_data_before_expert=plan.use_data_before_expert)
            self.mpu = None  # type: ignore[assignment]
        try:
            return super()._configure_expert_parallel(*arguments, **options)
        finally:
            self.mpu = grid

    def _configure_tensor_parallel_states(self, model: Any) -> None:
        """Keep the grid as the mpu: AutoTP makes the module ``deepspeed.utils.groups`` the mpu of the engine.

        Warn of patterns that match no layer.
        """
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            require(SLICES_OF_PARTITIONED)
        _warn_of_unmatched_patterns(self, model)
        grid = self.mpu
        super()._configure_tensor_parallel_states(model)
        self.mpu = grid
        grid.on_destroy(model.register_load_state_dict_pre_hook(explain_whole_weights).remove)

    def save_16bit_model(self, *arguments: Any, **options: Any) -> Any:
        """Save whole weights where AutoTP has split them; at ZeRO 0 to 2 DeepSpeed writes the slice of rank 0 alone.

        The file then has the names of ``module_state_dict()``, with the values that all slices have together.
        """
        if self.autotp_size() <= 1 or self.zero_optimization_partition_weights():
            return super().save_16bit_model(*arguments, **options)
        whole = self._consolidated_16bit_state_dict() or {}  # on rank 0

        def fill(module: nn.Module, states: dict[str, Any], *_: Any) -> None:
            states.update({name: whole[name] for name in states if name in whole})

        hook = self.module.register_state_dict_post_hook(fill)
        try:
            return super().save_16bit_model(*arguments, **options)
        finally:
            hook.remove()

    def get_autosp_backend(self, compile_kwargs: dict[str, Any]) -> Any:
        """Use the groups along ``seq``, and the index along ``seq``: AutoSP joins neighboring ranks."""
        backend = super().get_autosp_backend(compile_kwargs)
        if backend is None or SEQ not in self.mpu.topology().axes:
            return backend
        _enter_groups(self.mpu)
        index = self.mpu.get_axis_rank(SEQ)

        def compile_on_grid(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            with _ranks_along_seq(index):
                return backend(graph, inputs)

        return compile_on_grid


# -- the config -------------------------------------------------------------------------------------------------------


def complete_sizes(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Set the sizes that the config leaves out to the degrees of the grid."""
    section = config._param_dict.get(_OF_TENSORS)
    if section is not None and _TENSOR_SIZE not in section:
        config.tensor_parallel_config.autotp_size = grid.get_axis_size(MODEL)
        set_autotp_mode(training=True)
    if config.expert_parallel_config.enabled and _EXPERT_SIZE not in config._param_dict[_OF_EXPERTS]:
        config.expert_parallel_config.autoep_size = max(1, grid.topology().get_dim(EXPERT))
    if "autosp" in passes_of(config):
        config._param_dict.setdefault(_SEQUENCE_SIZE, max(1, grid.topology().get_dim(SEQ)))


# -- AutoEP -----------------------------------------------------------------------------------------------------------


def _plan_of(config: DeepSpeedConfig, grid: MpuGrid) -> ExpertPlan:
    """Return the distribution of the experts of AutoEP."""
    size, is_data_first = config.expert_parallel_config.autoep_size, config.use_data_before_expert_parallel_
    return ExpertPlan(grid.topology(), size, use_data_before_expert=is_data_first)


def tables_of_grid(config: DeepSpeedConfig, grid: MpuGrid) -> AbstractContextManager[None]:
    """Return a context in which DeepSpeed takes the tables of ranks of AutoEP with AutoTP from the grid."""
    if not config.expert_parallel_config.enabled:
        return nullcontext()

    def expected_folding_group_tables(_: object) -> FoldingGroupTables:
        plan = _plan_of(config, grid)
        tables = (grid.model_groups, grid.dp_groups, plan.expert_tables(), plan.expert_data_tables())
        return FoldingGroupTables(*(tuple(tuple(grid.to_global(ranks)) for ranks in table) for table in tables))

    return ledger.bound(patches.FOLDING_TABLES, always(expected_folding_group_tables))


def _warn_of_unmatched_patterns(engine: DeepSpeedEngine, model: nn.Module) -> None:
    """Warn about each entry of ``layer_specs`` that matches no layer, which AutoTP leaves whole without a word.

    A stage of a pipeline has other layers than the rest, and an entry for other models is not read.
    """
    grid, section = engine.mpu, engine._config._param_dict.get(_OF_TENSORS) or {}
    if grid.get_axis_size(PIPE) > 1 or grid.get_axis_rank(MODEL) or grid.get_sample_rank():
        return
    names = [f"{name}.weight" for name, layer in model.named_modules() if hasattr(layer, "weight")]
    specs = (section.get("partition_config") or {}).get("layer_specs") or []
    unmatched = [
        pattern
        for spec in specs
        if not spec.get("model_types")
        and not any(re.match(each, name) for each in spec.get("patterns", []) for name in names)
        for pattern in spec.get("patterns", [])
    ]
    if unmatched:
        warn(
            f'config section "tensor_parallel": the patterns {listed(unmatched)} in "layer_specs" match no layer, so '
            f"AutoTP splits none by them. The names of the model are {listed(names)}: correct the patterns, or remove "
            "them"
        )


@contextmanager
def _naming_patterns() -> Iterator[None]:
    """Say what to do about a model that AutoTP does not know, of which DeepSpeed asks for a policy."""
    try:
        yield
    except AssertionError as error:
        if "provide policy" not in str(error):
            raise
        raise EngineOptionError(
            'config section "tensor_parallel" (AutoTP) with a model that it does not know: name its parameters, '
            'such as "tensor_parallel": {"partition_config": {"use_default_specs": false, "layer_specs": [{"patterns": '
            '[".*up\\\\.weight$"], "partition_type": "column"}, {"patterns": [".*down\\\\.weight$"], "partition_type": '
            '"row"}]}}, or a "preset_model" such as "llama". Only models of Hugging Face have a plan of their own'
        ) from error


# -- AutoSP -----------------------------------------------------------------------------------------------------------


def _enter_groups(grid: MpuGrid) -> None:
    """Enter this rank's group along ``seq`` into the table of DeepSpeed's compiled graphs, until the grid's end."""
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


@contextmanager
def _ranks_along_seq(index: int) -> Iterator[None]:
    """Let AutoSP's passes take this part of a sequence; for one compilation."""
    answers = SimpleNamespace(**vars(comm))
    answers.get_rank = lambda group=None: index
    of_util = Patch(
        find("deepspeed.compile.util"),
        "dist",
        instead="The same functions, with the index along seq as the rank.",
        why="AutoSP takes rank % sequence_parallel_size for the index of the rank's part of a sequence.",
        during="one call of the compiler",
    )
    of_passes = replace(of_util, owner=find("deepspeed.compile.passes.sp_compile"))
    with ledger.bound(of_util, always(answers)), ledger.bound(of_passes, always(answers)):
        yield
