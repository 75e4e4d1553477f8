"""Let AutoTP split models along the grid's ``model`` axis, in any order of the axes.

DeepSpeed keeps the groups of AutoTP in ``deepspeed.utils.groups``. If there are none, it joins neighboring ranks of the
world, and it makes that module the mpu of the engine. For an engine of a grid, the tables hold the grid's groups
whenever the engine is current (:mod:`ds_topo.engine.engine_patches`), and the engine keeps its grid as its mpu.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NamedTuple

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.one_layout import grid_in_use
from ds_topo.errors import EngineOptionError
from ds_topo.ledger import ledger
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import MODEL

SECTION, SIZE = "tensor_parallel", "autotp_size"


class TensorParallelGroups(NamedTuple):
    """The groups of AutoTP that DeepSpeed's functions look up; None if there are none."""

    tensor: Any = None
    model: Any = None
    data: Any = None

    @classmethod
    def of(cls, mpu: Any) -> TensorParallelGroups:
        """Return the groups for engines with this mpu. Only a grid with a ``model`` axis has any."""
        if not isinstance(mpu, MpuGrid) or mpu.get_axis_size(MODEL) == 1:
            return cls()
        tensor = mpu.get_tensor_model_parallel_group()
        return cls(tensor, tensor, mpu.get_data_parallel_group())  # DeepSpeed, too, has one for tensor and model

    @classmethod
    def in_force(cls) -> TensorParallelGroups:
        """Return the groups that DeepSpeed's functions look up now."""
        return cls(
            deepspeed_groups._TENSOR_MODEL_PARALLEL_GROUP,
            deepspeed_groups._MODEL_PARALLEL_GROUP,
            deepspeed_groups._DATA_PARALLEL_GROUP,
        )

    def put_in_force(self) -> None:
        """Let DeepSpeed's functions look up these groups."""
        deepspeed_groups._TENSOR_MODEL_PARALLEL_GROUP = self.tensor
        deepspeed_groups._MODEL_PARALLEL_GROUP = self.model
        deepspeed_groups._DATA_PARALLEL_GROUP = self.data


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first global rank of the tensor model parallel group, the current mpu's or DeepSpeed's own."""
    if isinstance(deepspeed_groups.mpu, MpuGrid):
        return deepspeed_groups.mpu.get_tensor_model_parallel_src_rank()
    return min(dist.get_process_group_ranks(deepspeed_groups.get_tensor_model_parallel_group()))


def complete_size(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Set ``autotp_size`` to the degree of ``model`` if the config has a section without it."""
    section = config._param_dict.get(SECTION)
    if section is not None and SIZE not in section:
        config.tensor_parallel_config.autotp_size = grid.get_axis_size(MODEL)
        set_autotp_mode(training=True)


def check_size(config: DeepSpeedConfig, grid: MpuGrid) -> None:
    """Refuse an ``autotp_size`` that is not the degree of ``model``.

    Raises:
        EngineOptionError: the sizes differ.
    """
    if config.tensor_parallel_config.autotp_size > 1:  # 0 and 1 switch AutoTP off
        _require_degree(f"{SECTION}.{SIZE}", config.tensor_parallel_config.autotp_size, grid)


def _require_degree(option: str, size: int, grid: MpuGrid) -> None:
    if size != (degree := grid.get_axis_size(MODEL)):
        here, remedy = "no axis 'model'", f"remove {option}"
        if degree > 1:
            here, remedy = f"model={degree}", f"set {option} to {degree}"
        raise EngineOptionError(
            f"{option} {size} (AutoTP), but {grid.topology().spec!r} has {here}, along which AutoTP splits a model: "
            f"{remedy}, or create the grid with model={size}"
        )


def check_compiler_pass(config: DeepSpeedConfig) -> None:
    """Refuse the compiler pass of AutoTP beside others, as DeepSpeed does only when the engine compiles.

    Raises:
        EngineOptionError: the message names the other passes.
    """
    passes = getattr(config.compile_config, "passes", None) or []
    others = sorted({"autosp", "z1", "z3"} & set(passes))
    if "autotp" in passes and others:
        raise EngineOptionError(
            f"compile.passes 'autotp' with {others}: DeepSpeed cannot combine them (check DeepSpeedEngine.compile); "
            "leave one out. AutoTP works without its pass, too"
        )


def keeping_grid(configure_states: Any) -> Any:
    """Wrap ``_configure_tensor_parallel_states``, which replaces the engine's mpu by DeepSpeed's module."""

    @wraps(configure_states)
    def configure_tensor_parallel_states(engine: DeepSpeedEngine, model: Any) -> None:
        grid = engine.mpu
        configure_states(engine, model)
        engine.mpu = grid

    return configure_tensor_parallel_states


def saving_whole_weights(save_model: Any) -> Any:
    """Wrap ``save_16bit_model``, which with AutoTP and ZeRO 0 to 2 writes the slice of rank 0 alone.

    The file then has the names of ``module_state_dict()``, with the values that all slices have together.
    """

    @wraps(save_model)
    def save_16bit_model(engine: DeepSpeedEngine, *arguments: Any, **options: Any) -> Any:
        if engine.autotp_size() <= 1 or engine.zero_optimization_partition_weights():
            return save_model(engine, *arguments, **options)
        whole = engine._consolidated_16bit_state_dict() or {}  # on rank 0

        def with_whole(state_dict: Any) -> Any:
            @wraps(state_dict)
            def module_state_dict(*given: Any, **more: Any) -> dict[str, Any]:
                return {name: whole.get(name, value) for name, value in state_dict(*given, **more).items()}

            return module_state_dict

        with ledger.bound(patches.MODULE_STATES, with_whole, engine):
            return save_model(engine, *arguments, **options)

    return save_16bit_model


# -- inference --------------------------------------------------------------------------------------------------------


def with_group_of_grid_in_use(create_group: Any) -> Any:
    """Build the replacement of ``InferenceEngine._create_model_parallel_group`` while a grid is in use.

    Raises:
        EngineOptionError: the size is not the degree of ``model``, or DeepSpeed would sum over all ranks.
    """

    @wraps(create_group)
    def create_model_parallel_group(engine: InferenceEngine, config: DeepSpeedInferenceConfig) -> None:
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

    return create_model_parallel_group
