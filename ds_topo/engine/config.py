"""Describe what an engine is asked for by its config and its grid (:class:`Case`), and check the config.

The options that assume ranks have a table of their own, :mod:`ds_topo.engine.config_options`. It is loaded for configs
that may have one: those with a key that is not in :data:`_WITHOUT_RANKS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import groups as deepspeed_groups

from ds_topo.errors import EngineOptionError, abridged, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.topology.axes import MODEL, PIPE, SEQ, whole_number
from ds_topo.topology.rank_tables import gradient_axes


@dataclass(frozen=True)
class Case:
    """The facts that choose the parts of an engine: its config, its grid and its kind."""

    config: DeepSpeedConfig
    grid: MpuGrid
    is_pipeline: bool = False
    is_dualpipe: bool = False
    optimizer: object = None
    """The program's optimizer, the function that builds it, or the name of one in the config; None if there is none."""
    has_experts: bool = False
    """True if the grid has expert groups, or the model or the config of this rank asks for some."""

    @property
    def spec(self) -> str:
        """The spec of the grid."""
        return self.grid.topology().spec

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.config.zero_config.stage)

    @property
    def slices(self) -> int:
        """The number of slices that AutoTP makes; 1 without it."""
        return max(1, int(self.config.tensor_parallel_config.autotp_size))  # 0 switches it off, too

    @property
    def has_master_weights(self) -> bool:
        """True if DeepSpeed puts an optimizer of its own, with master weights, around the program's."""
        return bool(self.stage or self.is_fp16 or self.is_bf16)

    @property
    def is_fp16(self) -> bool:
        """True if fp16 is enabled."""
        return bool(self.config.float16_config.enabled)

    @property
    def is_bf16(self) -> bool:
        """True if bf16 is enabled."""
        return bool(self.config.bfloat16_config.enabled)

    @property
    def splits_automatically(self) -> bool:
        """True if the config asks for AutoTP, AutoEP or AutoSP."""
        experts = self.config.expert_parallel_config.enabled
        return "tensor_parallel" in self.config._param_dict or experts or "autosp" in passes_of(self.config)

    def degree(self, axis: str) -> int:
        """Return the degree of an axis, 1 if the grid does not have it."""
        return max(1, self.grid.topology().get_dim(axis))


def passes_of(config: DeepSpeedConfig) -> set[str]:
    """Return the compiler passes that a config names."""
    return set(getattr(config.compile_config, "passes", None) or ())


def splits_models(grid: MpuGrid) -> bool:
    """Tell whether ranks of a grid hold different parts of a model."""
    return any(grid.get_axis_size(axis) > 1 for axis in (PIPE, MODEL))


TOPOLOGY_SECTION = "topology"
REDUCER_SECTION = "gradient_reducer"
REPLICAS_SECTION = "replicas"
_WITHOUT_RANKS = frozenset(
    [
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer"),
        *("scheduler", "gradient_clipping", "prescale_gradients", "gradient_predivide_factor"),
        *("communication_data_type", "fp16", "bf16", "bfloat16", "torch_autocast", "data_types"),
        *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "steps_per_print"),
        *("wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "wandb", "csv_monitor", "comet"),
        REDUCER_SECTION,
    ]
)
"""The keys of a config that no option in the table reads."""


def may_assume_ranks(case: Case) -> bool:
    """Tell whether the table may have a row for a case: of an option, of DualPipeV, or of what the process has set."""
    has_groups = deepspeed_groups.mesh_device is not None or parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None
    return has_groups or case.is_dualpipe or may_have_options(case.config)


def may_have_options(config: DeepSpeedConfig) -> bool:
    """Tell whether the table may have a row for an option of a config."""
    return not _WITHOUT_RANKS.issuperset(config._param_dict)


def check_config(case: Case) -> None:
    """Refuse misspelt keys, and ``"auto"`` and other text in place of numbers; warn of keys that have no effect."""
    config = case.config._param_dict
    unknown = check_top_level(config)
    clipping = config.get("gradient_clipping", 0)
    unfilled = {} if isinstance(clipping, (int, float)) else {"gradient_clipping": clipping}
    for section in ("optimizer", "scheduler"):
        parameters = (config.get(section) or {}).get("params") or {}
        unfilled |= {f"{section}.params.{name}": value for name, value in parameters.items() if value == "auto"}
    for name, value in unfilled.items():
        raise EngineOptionError(f"config: {name} is {abridged(value)}: give a number{_AUTO * (value == 'auto')}")
    refuse_elasticity(config)
    if unknown and dist.get_rank() == 0:
        warn(f"config keys {listed(unknown)} have no effect: neither DeepSpeed nor ds_topo reads them")


# -- keys and sizes ---------------------------------------------------------------------------------------------------


_KEYS = _WITHOUT_RANKS.union(
    f"""
    {TOPOLOGY_SECTION} {REPLICAS_SECTION} managed_gradient_accumulation gradient_allreduce_op
    seq_parallel_communication_data_type sparse_gradients disable_allgather amp zero_optimization
    activation_checkpointing pipeline hybrid_engine use_data_before_expert_parallelism
    tensor_parallel expert_parallel sequence_parallel_size data_parallel_size inference
    compile compression_training weight_quantization quantize_training progressive_layer_drop eigenvalue
    sparse_attention data_efficiency curriculum_learning checkpoint datastates_ckpt nebula aio elasticity autotuning
    vocabulary_size
    comms_logger flops_profiler timers model_info allgather_size disable_python_gc log_level
    """.split()
)
"""The top-level keys of a config that DeepSpeed and ds_topo read."""


def wants_reducer(config: DeepSpeedConfig) -> bool:
    """Tell whether a config has a section that switches the reducer on."""
    section = config._param_dict.get(REDUCER_SECTION, False)
    return bool(section.get("enabled", True) if isinstance(section, Mapping) else section)


def check_top_level(config: Mapping[str, Any]) -> list[str]:
    """Check the keys and counts at the top level of a config; return the keys that nothing reads."""
    unknown = [str(name) for name in config if name not in _KEYS]
    for name in unknown:
        text = name.lower()
        near = difflib.get_close_matches(text, (REDUCER_SECTION, TOPOLOGY_SECTION, REPLICAS_SECTION), cutoff=0.77)
        near = near or difflib.get_close_matches(text, _KEYS, cutoff=0.86)
        if near:
            raise EngineOptionError(
                f"config section {abridged(name)}: did you mean {near[0]!r}? DeepSpeed ignores keys that it does not "
                "know, so rename or remove it"
            )
    for name in _SIZES:
        count = config.get(name, 1)
        if isinstance(count, bool) or (isinstance(count, float) and not count.is_integer()):
            raise EngineOptionError(f"config: {name} is {count}: give a whole number of samples or steps, at least 1")
    for name, section in config.items():
        if name not in _SECTIONS_WITHOUT_SWITCH:
            _check_switches(name, section)
    pipeline = config.get("pipeline")
    if isinstance(pipeline, Mapping) and TOPOLOGY_SECTION in pipeline:
        raise EngineOptionError(
            f'config section "pipeline" contains "{TOPOLOGY_SECTION}", where nothing reads it: move it to the top level'
        )
    if isinstance(pipeline, Mapping) and "schedule" in pipeline:
        raise EngineOptionError(
            f'config section "pipeline": "schedule" {abridged(pipeline["schedule"])} has no effect, because the class '
            "of the module has the schedule, and divides the layers before a config is read: build DualPipeVModule for "
            "DualPipeV, or PipelineModule for 1F1B, and remove the key"
        )
    return unknown


_ZERO_KEYS = frozenset(
    key for name, field in DeepSpeedZeroConfig.model_fields.items() for key in (name, field.alias) if key
)
_SECTIONS_WITHOUT_SWITCH = ("optimizer", "scheduler", TOPOLOGY_SECTION, REDUCER_SECTION, REPLICAS_SECTION)
_SWITCH = "enabled"


def _check_switches(path: str, section: object) -> None:
    """Refuse ``"enable": true`` and the like: older sections of DeepSpeed ignore it, and stay off."""
    for name, value in section.items() if isinstance(section, Mapping) else ():
        if name != _SWITCH and difflib.get_close_matches(str(name).lower(), [_SWITCH], cutoff=0.85):
            raise EngineOptionError(f'config section "{path}": {abridged(name)} switches nothing on: write "{_SWITCH}"')
        _check_switches(f"{path}.{name}", value)


def refuse_elasticity(config: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed's section for elastic jobs on a grid, and say what serves them.

    DeepSpeed up to 0.19.7 chooses the samples of a step by it. Version 0.2 of the section divides the number of
    replicas, which an mpu gives, by the number of slices once more. DeepSpeed 0.19.8 has removed it.
    """
    section = config.get("elasticity")
    if isinstance(section, Mapping) and section.get("enabled"):
        raise EngineOptionError(
            'config section "elasticity" on a grid: DeepSpeed 0.19.8 has removed it, and earlier releases do not count '
            "the replicas of a topology. Remove it, and give train_batch_size and train_micro_batch_size_per_gpu "
            "without gradient_accumulation_steps, which then follows from the replicas; config |= "
            "grid.batch_sizes(samples, most) also makes micro-batches smaller where that is needed"
        )


_SECTIONS = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 0.001}}',
    "scheduler": '{"type": "WarmupLR", "params": {}}',
    "zero_optimization": '{"stage": 1}',
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), '{"enabled": true}'),
}
"""Sections of a config that are often given as a single value, with an example of each."""
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_AUTO = '; Trainer and accelerate replace "auto" themselves, deepspeed.initialize does not'


def check_sections_and_sizes(config: Mapping[str, Any], grid: MpuGrid) -> None:
    """Refuse sections and batch sizes on which DeepSpeed's constructor of a config fails."""
    refuse_elasticity(config)
    for name, example in _SECTIONS.items():
        section = config.get(name)
        is_switch = name == "zero_optimization" and isinstance(section, bool)
        if not (is_switch or isinstance(section, (Mapping, NoneType))):
            raise EngineOptionError(
                f'config section "{name}" is {abridged(section)}: give a mapping, such as {example}'
            )
    zero = config.get("zero_optimization")
    for name in zero if isinstance(zero, Mapping) else ():
        if name not in _ZERO_KEYS:
            near = difflib.get_close_matches(str(name).lower(), _ZERO_KEYS)
            hint = f"did you mean {near[0]!r}?" if near else f"choose among {', '.join(sorted(_ZERO_KEYS))}"
            raise EngineOptionError(f'config section "zero_optimization" has no key {abridged(name)}: {hint}')
    if isinstance(zero, Mapping) and str(zero.get("stage", 0)) not in ("0", "1", "2", "3", "auto"):
        raise EngineOptionError(
            f'config section "zero_optimization": "stage" is {abridged(zero["stage"])}: ZeRO has the stages 0, 1, 2, 3'
        )
    precisions = [name for name in ("fp16", "bf16", "bfloat16") if (config.get(name) or {}).get("enabled") is True]
    if "fp16" in precisions and len(precisions) > 1:
        raise EngineOptionError(f"config sections {precisions} are both enabled: choose one of them")
    for name in _SIZES:
        value = config.get(name)
        if value is not None and (whole_number(value) or 0) < 1:
            raise EngineOptionError(
                f"config: {name} is {abridged(value)}: give a whole number of samples or steps, at least 1"
                f"{_AUTO * (value == 'auto')}"
            )
    if config.get(_SIZES[0]) is None and config.get(_SIZES[1]) is None:
        raise EngineOptionError(
            'config: neither "train_batch_size" (the samples of a step, over all replicas) nor '
            '"train_micro_batch_size_per_gpu" (those of a rank in a forward pass) is given: give one of them'
        )
    batch, micro, steps = (None if config.get(name) is None else whole_number(config[name]) for name in _SIZES)
    if batch is None:
        return  # it follows from the others
    replicas = grid.get_data_parallel_world_size()
    parts = (micro or 1) * (steps or 1) * replicas
    is_multiple = None in (micro, steps)
    if batch % parts == 0 if is_multiple else batch == parts:
        return
    factors = [f"{size} ({name})" for name, size in zip(_SIZES[1:], (micro, steps), strict=True) if size is not None]
    factors.append(f"{replicas} (replicas with samples of their own)")
    counted = [
        axis for axis in gradient_axes(grid.topology()) if axis != SEQ or replicas > grid.get_sample_world_size()
    ]
    spec, axes = grid.topology().spec, [f"{axis}={grid.get_axis_size(axis)}" for axis in counted]
    raise EngineOptionError(
        f"train_batch_size {batch} is not {'a multiple of ' * is_multiple}{' x '.join(factors)}. In {spec!r} they are "
        f"along {listed(axes) if axes else 'no axis'}; ranks along other axes read the same samples. Set "
        f"train_batch_size to {f'a multiple of {parts}' if is_multiple else f'{parts}, or omit it'}"
    )
