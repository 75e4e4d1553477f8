"""``deepspeed.initialize`` with what the config says of ds_topo."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from ds_topo.engine.frameworks import warn_of_undealt_samples, with_samples_of
from ds_topo.engine.gradient_reducer import GradientReducer
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.engine.inputs import REDUCER_SECTION, TOPOLOGY_SECTION, check_mpu, reading_sections
from ds_topo.engine.mpu import ModelParallelUnit
from ds_topo.engine.one_layout import grid_in_use, mpu_in_use
from ds_topo.engine.start import init_distributed
from ds_topo.errors import abridged
from ds_topo.launch.extension_locks import remove_abandoned_locks
from ds_topo.reducer.options import arguments_from_config

_deepspeed_initialize = deepspeed.initialize
"""Its own, even where a program puts ours in its place."""
_SECTIONS = (REDUCER_SECTION, TOPOLOGY_SECTION)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: ModelParallelUnit | ModuleType | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """``deepspeed.initialize``, which reads two more sections of the config.

    ``"topology"`` (a spec or a mapping) becomes the engine's grid where neither ``mpu`` nor a ``PipelineModule`` brings
    one; ``engine.mpu`` is that grid, and is destroyed with ``engine.mpu.destroy()``. Where both are given they must
    agree.

    ``"gradient_reducer"`` attaches a reducer: ``true``, or a mapping of arguments of
    :meth:`~ds_topo.GradientReducer.attach` that JSON can express, data types as ``"fp32"``, ``"bf16"``, ``"fp16"``;
    ``"enabled": false`` switches it off. The engine has it as ``engine.gradient_reducer`` (None without).

    Arguments are those of ``deepspeed.initialize``.

    Raises:
        ValueError: a section, an argument or a value that cannot be; the message lists those that can.
        TopologyError: a topology that does not fit, or is not the mpu's.
        LaunchError: a topology is to be built, and nothing has started this rank.
    """
    check_mpu(mpu)
    remove_abandoned_locks()
    content = _content_of(config if config is not None else config_params, args)
    _check_names_of_sections(content)
    reduction = _reduction_of(content)
    used = grid_in_use()
    if used is not None:
        mpu = mpu_in_use(mpu, model, used)
        warn_of_undealt_samples(used)
        if not isinstance(model, DeepSpeedPipelineModule):
            config, config_params = with_samples_of(used, config or config_params), None
    elif mpu is None and TOPOLOGY_SECTION in content and not isinstance(model, DeepSpeedPipelineModule):
        if not torch.distributed.is_initialized():
            init_distributed(verbose=False)
        mpu = PipelineParallelGrid(content[TOPOLOGY_SECTION])
    given = {
        "args": args,
        "model": model,
        "optimizer": optimizer,
        "model_parameters": model_parameters,
        "training_data": training_data,
        "lr_scheduler": lr_scheduler,
        "distributed_port": distributed_port,
        "mpu": mpu,
        "dist_init_required": dist_init_required,
        "collate_fn": collate_fn,
        "config": str(config) if isinstance(config, Path) else config,
        "mesh_param": mesh_param,
        "config_params": config_params,
    }
    with reading_sections():
        engine, *others = _deepspeed_initialize(**{name: value for name, value in given.items() if value is not None})
    engine.gradient_reducer = None if reduction is None else GradientReducer.attach(engine, **reduction)
    return (engine, *others)


def _content_of(config: str | Path | Mapping[str, Any] | None, args: Any) -> Mapping[str, Any]:
    """What the config says, empty where only DeepSpeed can read it.

    Raises:
        ValueError: a file that is not there, or is not a JSON object.
    """
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)) or (not Path(config).suffix and not Path(config).exists()):
        return {}  # none, or one of DeepSpeed's other forms
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {str(config)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        return {}  # DeepSpeed also takes hjson, and says what is wrong with others
    return content if isinstance(content, Mapping) else {}


def _check_names_of_sections(content: Mapping[str, Any]) -> None:
    for name in content:
        near = difflib.get_close_matches(str(name).lower(), _SECTIONS, n=1, cutoff=0.8)
        if near and name not in _SECTIONS:
            raise ValueError(f"config section {abridged(name)}: did you mean {near[0]!r}?")


def _reduction_of(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Arguments of the reducer, None without one."""
    section = content.get(REDUCER_SECTION, False)
    if isinstance(section, bool):
        return {} if section else None
    if not isinstance(section, Mapping):
        raise ValueError(
            f'config section "{REDUCER_SECTION}": {abridged(section)} is neither true, false nor a mapping of options, '
            'such as {"bucket_bytes": 4194304}'
        )
    options = dict(section)
    enabled = options.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(
            f'config section "{REDUCER_SECTION}": "enabled" is {abridged(enabled)}, neither true nor false'
        )
    try:
        arguments = arguments_from_config(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f'config section "{REDUCER_SECTION}": {error}') from error
    return arguments if enabled else None
