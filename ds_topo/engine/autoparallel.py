"""Run AutoTP, AutoEP and AutoSP, DeepSpeed's automatic parallelism, on the axes of a grid, in any order.

*AutoTP* splits a model along ``model``. DeepSpeed keeps its groups in ``deepspeed.utils.groups``. If there are none, it
joins neighboring ranks of the world, and it makes that module the mpu of the engine. For an engine of a grid, the
tables hold the grid's groups whenever the engine is current (:mod:`ds_topo.engine.grid`), and the engine keeps its grid
as its mpu.

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

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.experts import create_expert_groups
from ds_topo.engine.one_layout import grid_in_use
from ds_topo.errors import EngineOptionError
from ds_topo.ledger import always, around, ledger, patches_of
from ds_topo.mpu import patches
from ds_topo.mpu.differences import FoldingGroupTables, validate_autoep_config
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.mpu.supported import SEQUENCES_ON_CPU, SLICES_OF_PARTITIONED, SLICES_WITH_EXPERTS, require
from ds_topo.topology.axes import EXPERT, MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import ExpertPlan

_OF_TENSORS, _TENSOR_SIZE = "tensor_parallel", "autotp_size"
_OF_EXPERTS, _EXPERT_SIZE = "expert_parallel", "autoep_size"
_SEQUENCE_SIZE = "sequence_parallel_size"

# -- the config -------------------------------------------------------------------------------------------------------


def complete_sizes(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Set the sizes that the config leaves out to the degrees of the grid."""
    section = config._param_dict.get(_OF_TENSORS)
    if section is not None and _TENSOR_SIZE not in section:
        config.tensor_parallel_config.autotp_size = grid.get_axis_size(MODEL)
        set_autotp_mode(training=True)
    if config.expert_parallel_config.enabled and _EXPERT_SIZE not in config._param_dict[_OF_EXPERTS]:
        config.expert_parallel_config.autoep_size = max(1, grid.topology().get_dim(EXPERT))
    if uses_autosp(config):
        config._param_dict.setdefault(_SEQUENCE_SIZE, max(1, grid.topology().get_dim(SEQ)))


def check(config: DeepSpeedConfig, grid: MpuGrid, is_pipeline: bool) -> None:
    """Refuse what AutoTP, AutoEP and AutoSP cannot do, before any group exists.

    Raises:
        EngineOptionError: the message names the option, the axis or the check of DeepSpeed, and what to do.
        ExpertSizeError: ``autoep_size`` does not divide the ranks that share experts.
    """
    slices = config.tensor_parallel_config.autotp_size
    if slices > 1:  # 0 and 1 switch AutoTP off
        _require_degree(f"{_OF_TENSORS}.{_TENSOR_SIZE}", slices, grid)
    passes = getattr(config.compile_config, "passes", None) or []
    others = sorted({"autosp", "z1", "z3"} & set(passes))
    if "autotp" in passes and others:  # DeepSpeed refuses it only when the engine compiles
        raise EngineOptionError(
            f"compile.passes 'autotp' with {others}: DeepSpeed cannot combine them (check DeepSpeedEngine.compile); "
            "leave one out. AutoTP works without its pass, too"
        )
    if config.expert_parallel_config.enabled:
        if problem := next(_problems_of_experts(config, grid, max(1, slices)), ""):
            raise EngineOptionError(f"{_OF_EXPERTS} (AutoEP) on {grid.topology().spec!r}: {problem}")
        _plan_of(config, grid)
    if uses_autosp(config):
        _check_autosp(config, grid, is_pipeline)


def _require_degree(option: str, size: int, grid: MpuGrid) -> None:
    if size != (degree := grid.get_axis_size(MODEL)):
        here, remedy = "no axis 'model'", f"remove {option}"
        if degree > 1:
            here, remedy = f"model={degree}", f"set {option} to {degree}"
        raise EngineOptionError(
            f"{option} {size} (AutoTP), but {grid.topology().spec!r} has {here}, along which AutoTP splits a model: "
            f"{remedy}, or create the grid with model={size}"
        )


def _problems_of_experts(config: DeepSpeedConfig, grid: MpuGrid, slices: int) -> Iterator[str]:
    options, zero, sequences = config.expert_parallel_config, config.zero_config, max(1, grid.topology().get_dim(SEQ))
    if grid.get_axis_size(PIPE) > 1:
        yield (
            "it finds MoE layers by their names in a model of Hugging Face, which a PipelineModule does not have. Use "
            "deepspeed.moe.layer.MoE in the layers, or a grid without 'pipe'"
        )
    if grid.world_size != dist.get_world_size():
        yield "it needs all ranks of the job: create the grid of all of them"
    if grid.get_axis_size(MODEL) != slices:
        yield (
            "its layers can share an axis 'model' with AutoTP only (check bwc_tensor_model_parallel_world_size of "
            'DeepSpeed). Add a section "tensor_parallel": {} if AutoTP shall split the model, or use '
            "deepspeed.moe.layer.MoE in a model that is split already"
        )
    try:
        validate_autoep_config(
            options,
            grid.world_size,
            1,
            slices,
            sequences,
            zero_stage=int(zero.stage),
            deepcompile_enabled=bool(config.compile_config.deepcompile),
            tp_preset_model=config.tensor_parallel_config.preset_model,
            use_data_before_expert_parallel=config.use_data_before_expert_parallel_,
            zero_offload_optimizer=zero.offload_optimizer is not None,
            zero_offload_param=zero.offload_param is not None,
        )
    except ValueError as error:
        yield f"{error} (check validate_autoep_config of DeepSpeed)"
    of_zero_3 = {
        f"an axis 'seq' of {sequences}": sequences > 1,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
    }
    if zero.stage == 3 and (given := [name for name, is_given in of_zero_3.items() if is_given]):
        yield f"ZeRO stage 3 with {given[0]} (check _validate_zero3_moe_compatibility of DeepSpeed). Use stage 1 or 2"
    if slices > 1:
        require(SLICES_WITH_EXPERTS)


def check_reducer(config: DeepSpeedConfig) -> None:
    """Refuse our reducer for AutoEP with AutoTP: DeepSpeed then corrects gradients after its own reduction.

    Raises:
        EngineOptionError: the config switches both on.
    """
    if config.expert_parallel_config.enabled and config.tensor_parallel_config.autotp_size > 1:
        raise EngineOptionError(
            "a GradientReducer with AutoEP and AutoTP together: DeepSpeed corrects gradients of slices in its own "
            "reduction, which the reducer replaces. Leave out the reducer, expert_parallel or tensor_parallel"
        )


def uses_autosp(config: DeepSpeedConfig) -> bool:
    """Tell whether the config asks for AutoSP."""
    return "autosp" in (getattr(config.compile_config, "passes", None) or [])


def _check_autosp(config: DeepSpeedConfig, grid: MpuGrid, is_pipeline: bool) -> None:
    """Refuse AutoSP where DeepSpeed would not split sequences, or by another number."""
    spec, stage, size = grid.topology().spec, config.zero_config.stage, max(1, grid.topology().get_dim(SEQ))
    given = config._param_dict.get(_SEQUENCE_SIZE, size)
    if given != size:
        raise EngineOptionError(
            f"{_SEQUENCE_SIZE} {given} (AutoSP), but {spec!r} has seq={size}: name seq={given} in the topology, or "
            f"leave {_SEQUENCE_SIZE} out"
        )
    if is_pipeline:
        raise EngineOptionError(
            "compile.passes 'autosp' (AutoSP) with a PipelineModule: DeepSpeed compiles the layers of a pipeline one "
            "by one and would not split sequences; use a model without a pipeline, or leave the pass out"
        )
    if config.tensor_parallel_config.autotp_size > 1:
        raise EngineOptionError(
            "compile.passes 'autosp' (AutoSP) with tensor_parallel (AutoTP): AutoSP compiles the model as one graph "
            "(fullgraph of get_autosp_backend), which the layers of AutoTP break, because they communicate; use "
            "DistributedAttention, which works with AutoTP, or slices of your own"
        )
    if size > 1 and stage > 1:
        raise EngineOptionError(
            f"compile.passes 'autosp' (AutoSP) at ZeRO stage {stage}: DeepSpeed would compile without splitting "
            "sequences; use stage 0 or 1, or DistributedAttention or UlyssesSPAttentionHF, which work at every stage"
        )
    if get_accelerator().device_name() == "cpu":
        require(SEQUENCES_ON_CPU)


# -- AutoTP -----------------------------------------------------------------------------------------------------------


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor model parallel group, the current mpu's or DeepSpeed's own."""
    if isinstance(deepspeed_groups.mpu, MpuGrid):
        return deepspeed_groups.mpu.get_tensor_model_parallel_src_rank()
    return min(dist.get_process_group_ranks(deepspeed_groups.get_tensor_model_parallel_group()))


@around
def keeping_grid(configure_states: Any, engine: DeepSpeedEngine, model: Any) -> None:
    """Keep the engine's mpu in ``_configure_tensor_parallel_states``, which replaces it by DeepSpeed's module."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        require(SLICES_OF_PARTITIONED)
    grid = engine.mpu
    configure_states(engine, model)
    engine.mpu = grid


@around
def saving_whole_weights(save_model: Any, engine: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
    """Save whole weights in ``save_16bit_model``, which with AutoTP and ZeRO 0 to 2 writes the slice of rank 0 alone.

    The file then has the names of ``module_state_dict()``, with the values that all slices have together.
    """
    if engine.autotp_size() <= 1 or engine.zero_optimization_partition_weights():
        return save_model(engine, *arguments, **options)
    whole = engine._consolidated_16bit_state_dict() or {}  # on rank 0

    @around
    def with_whole(state_dict: Any, *given: Any, **more: Any) -> dict[str, Any]:
        return {name: whole.get(name, value) for name, value in state_dict(*given, **more).items()}

    with ledger.bound(patches.MODULE_STATES, with_whole, engine):
        return save_model(engine, *arguments, **options)


@around
def with_group_of_grid_in_use(create_group: Any, engine: InferenceEngine, config: DeepSpeedInferenceConfig) -> None:
    """Set the group along ``model`` in ``InferenceEngine._create_model_parallel_group`` while a grid is in use.

    Raises:
        EngineOptionError: the size is not the degree of ``model``, or DeepSpeed would sum over all ranks.
    """
    grid = grid_in_use()
    if grid is None:
        create_group(engine, config)
        return
    _require_degree("tensor_parallel.tp_size", int(config.tensor_parallel.tp_size), grid)
    if get_accelerator().device_name() == "cpu" and grid.get_axis_size(MODEL) < dist.get_world_size():
        raise EngineOptionError(
            f"init_inference with tensor_parallel.tp_size {grid.get_axis_size(MODEL)} on {dist.get_world_size()} "
            "ranks: on CPUs DeepSpeed's inference_all_reduce sums over all ranks of the job, whatever the group. "
            f"Use as many ranks as slices (model={grid.get_axis_size(MODEL)} alone), a GPU, or an engine of "
            "deepspeed.initialize in eval mode"
        )
    engine.mp_group = grid.get_tensor_model_parallel_group()


# -- AutoEP -----------------------------------------------------------------------------------------------------------


def _plan_of(config: DeepSpeedConfig, grid: MpuGrid) -> ExpertPlan:
    """Return the distribution of the experts of AutoEP."""
    size, is_data_first = config.expert_parallel_config.autoep_size, config.use_data_before_expert_parallel_
    return ExpertPlan(grid.topology(), size, use_data_before_expert=is_data_first)


@around
def over_groups_of_grid(configure: Any, engine: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
    """Create the grid's groups before ``_configure_expert_parallel``.

    DeepSpeed refuses an mpu with slices there, because AutoTP replaces it only later. All sizes are in the config.
    """
    if not engine._config.expert_parallel_config.enabled:
        return configure(engine, *arguments, **options)
    grid = engine.mpu
    plan = _plan_of(engine._config, grid)
    create_expert_groups(grid, plan.expert_parallel_size, use_data_before_expert=plan.use_data_before_expert)
    engine.mpu = None
    try:
        return configure(engine, *arguments, **options)
    finally:
        engine.mpu = grid


@contextmanager
def tables_of_grid(config: DeepSpeedConfig | None, grid: MpuGrid) -> Iterator[None]:
    """Let DeepSpeed take the tables of ranks of AutoEP with AutoTP from the grid."""
    if config is None or not config.expert_parallel_config.enabled:
        yield
        return

    def expected_folding_group_tables(_: object) -> FoldingGroupTables:
        plan = _plan_of(config, grid)
        tables = (grid.model_groups, grid.dp_groups, plan.expert_tables(), plan.expert_data_tables())
        return FoldingGroupTables(*(tuple(tuple(grid.to_global(ranks)) for ranks in table) for table in tables))

    with ledger.bound(patches.FOLDING_TABLES, always(expected_folding_group_tables)):
        yield


# -- AutoSP -----------------------------------------------------------------------------------------------------------


def average_over_seq(engine: DeepSpeedEngine) -> None:
    """Average gradients over ``seq`` instead of summing them."""
    for reduces in (engine, engine.optimizer):
        if hasattr(reduces, _SEQUENCE_SIZE):
            setattr(reduces, _SEQUENCE_SIZE, 1)


@around
def with_groups_of_grid(get_backend: Any, engine: DeepSpeedEngine, compile_kwargs: dict[str, Any]) -> Any:
    """Use the grid's groups, and this rank's index along ``seq``, in the graphs of ``get_autosp_backend``."""
    backend = get_backend(engine, compile_kwargs)
    if backend is None or SEQ not in engine.mpu.topology().axes:
        return backend
    _enter_groups(engine.mpu)
    index = engine.mpu.get_axis_rank(SEQ)

    def compile_on_grid(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with _ranks_along_seq(index):
            return backend(graph, inputs)

    return compile_on_grid


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


@contextmanager
def _ranks_along_seq(index: int) -> Iterator[None]:
    """Let AutoSP's passes take this part of a sequence; for one compilation."""
    answers = SimpleNamespace(**vars(comm))
    answers.get_rank = lambda group=None: index
    of_util, of_passes = patches_of("""
        while: one call of the compiler
        deepspeed.compile.util deepspeed.compile.passes.sp_compile
          dist: The same functions, with the index along seq as the rank.
            AutoSP takes rank % sequence_parallel_size for the index of the rank's part of a sequence.
    """)
    with ledger.bound(of_util, always(answers)), ledger.bound(of_passes, always(answers)):
        yield
