"""``check_replicas``: whether what an engine's ranks must have alike is alike, now or every few steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo.check.replicas import Replicated, compare
from ds_topo.engine import changes
from ds_topo.engine.mpu import MpuGrid
from ds_topo.ledger import Change, ledger
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reducer.parameter_state import expert_group_name
from ds_topo.topology.axes import MODEL, PIPE


class check_replicas:  # noqa: N801 (a verb, and what takes it back)
    """Compare the replicas of an engine's parameters and optimizer states bit by bit: now, and every few steps.

    Compared are, over the ranks that average gradients: parameters, experts over the replicas of each; without ZeRO the
    optimizer's states and master weights, too, which otherwise are partitioned. Over the stages of a pipeline: tied
    weights. Over the ranks of a ``model`` axis, if ``slices`` is set: parameters that are not marked as a slice
    (``tensor_model_parallel``), and the random states, by which replicated dropout must draw alike. Buffers are each
    rank's own.

    Costs one pass over the tensors, and an all_reduce of 48 bytes for each. Every rank of the engine raises, whichever
    replicas differ.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        every: how many steps apart, counted by the engine; 0: only now, and whenever :meth:`now` is called.
        slices: whether to compare slices of a ``model`` axis, too.

    Raises:
        TypeError: not an engine, or ``every`` is no number.
        ValueError: ``every`` is negative; ``slices`` without a grid; or ZeRO stage 3, which keeps no replicas.
        RuntimeError: the engine compares every few steps already.
        DisagreementError: ranks compare after other steps, or with other arguments; names them.
        ReplicaError: replicas differ; names the first tensor that does, and the ranks on their hosts. From
            ``engine.step()`` or ``engine.train_batch()``, if it is found then.

    ::

        check = check_replicas(engine, every=100)
        ...
        check.remove()
    """

    def __init__(self, engine: DeepSpeedEngine, *, every: int = 0, slices: bool = False) -> None:
        if not isinstance(engine, DeepSpeedEngine):
            raise TypeError(f"check_replicas: {type(engine).__name__} is not what deepspeed.initialize returns")
        if isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every={every!r}: give a number of steps, or 0 to compare only now")
        if every < 0:
            raise ValueError(f"every={every!r}: give a number of steps, or 0 to compare only now")
        if int(engine.zero_optimization_stage()) == 3:
            raise ValueError(
                "check_replicas: ZeRO stage 3 partitions parameters, too: there are no replicas to compare"
            )
        if slices and not isinstance(engine.mpu, MpuGrid):
            raise ValueError("slices=True: only a grid knows the slices of a model; give the engine one as its mpu")
        self._engine, self._every, self._slices = engine, every, slices
        self._releases: list[Callable[[], None]] = []
        if every and getattr(vars(engine).get(self._row.name), "compares_replicas", False):
            raise RuntimeError("this engine compares its replicas every few steps already: remove() that check first")
        self.now()
        if every:
            self._releases += [
                ledger.bind(self._row, self._comparing, engine),
                ledger.bind(changes.DESTROY_ENGINE, self._before_destroy, engine),
            ]

    def now(self) -> None:
        """Compare; collective over the engine's ranks."""
        engine = self._engine
        how = f", every={self._every}, slices={self._slices}"
        compare(self._replicated(), _everyone(engine), f"after step {engine.global_steps}", how)

    def remove(self) -> None:
        """Compare no more. Idempotent."""
        while self._releases:
            self._releases.pop()()

    @property
    def _row(self) -> Change:
        return changes.TRAIN_BATCH if isinstance(self._engine, PipelineEngine) else changes.STEP

    def _comparing(self, take_step: Any) -> Any:
        @wraps(take_step)
        def step(*arguments: Any, **options: Any) -> Any:
            before = self._engine.global_steps
            result = take_step(*arguments, **options)
            is_due = self._engine.global_steps > before and self._engine.global_steps % self._every == 0
            if is_due and self._releases:  # a program's own wrapper may keep this one after remove()
                self.now()
            return result

        step.compares_replicas = True  # type: ignore[attr-defined]
        return step

    def _before_destroy(self, destroy: Any) -> Any:
        @wraps(destroy)
        def destroy_engine(*arguments: Any, **options: Any) -> None:
            self.remove()
            destroy(*arguments, **options)

        return destroy_engine

    # -- what is to be alike

    def _replicated(self) -> Iterator[Replicated]:
        engine, dense = self._engine, _dense_group(self._engine)
        names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        for name, parameter in engine.module.named_parameters():
            yield Replicated(name, parameter, *_group_of(parameter, dense))
        if _keeps_whole_states(engine):
            yield from _states(engine, names, dense)
        if isinstance(engine, PipelineEngine):
            numbers: Counter[ProcessGroup] = Counter()  # stages have other layers beside
            for weight, group in engine.module.get_tied_weights_and_groups():
                yield Replicated(f"tied weight {numbers[group]}", weight, group, "pipe")
                numbers[group] += 1
        if self._slices and isinstance(engine.mpu, MpuGrid) and engine.mpu.get_axis_size(MODEL) > 1:
            yield from _alike_on_slices(engine.module, engine.mpu.get_group(MODEL))


def _keeps_whole_states(engine: DeepSpeedEngine) -> bool:
    """Whether every replica has all of the optimizer's states, and the same."""
    if isinstance(engine.optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        return False
    is_pipeline = isinstance(engine, PipelineEngine)
    return bool(engine.pipeline_enable_backward_allreduce if is_pipeline else engine.enable_backward_allreduce)


def _group_of(parameter: torch.Tensor, dense: ProcessGroup) -> tuple[ProcessGroup, str]:
    name = expert_group_name(parameter)
    return (dense, "data") if name is None else _expert_group(name)


def _expert_group(name: str) -> tuple[ProcessGroup, str]:
    return deepspeed_groups._get_expert_data_parallel_group_dict()[name], f"expert data of {name}"


def _dense_group(engine: DeepSpeedEngine) -> ProcessGroup:
    """All replicas of a dense parameter."""
    if isinstance(engine, PipelineEngine):
        group: ProcessGroup = engine.mpu.get_data_parallel_group()
    else:
        group = engine.seq_data_parallel_group
    return group


def _everyone(engine: DeepSpeedEngine) -> ProcessGroup:
    """All ranks that step together."""
    world = dist.group.WORLD
    assert world is not None
    if not isinstance(engine.mpu, MpuGrid):
        return world
    axes = [axis for axis in engine.mpu.topology().axes if axis != PIPE or isinstance(engine, PipelineEngine)]
    return engine.mpu.get_group(axes)


def _states(engine: DeepSpeedEngine, names: dict[int, str], dense: ProcessGroup) -> Iterator[Replicated]:
    """Of the innermost optimizer: its own states, and master weights that are not the module's parameters."""
    optimizer = engine.optimizer
    while getattr(optimizer, "optimizer", optimizer) is not optimizer:
        optimizer = optimizer.optimizer
    for number, group in enumerate(getattr(optimizer, "param_groups", [])):
        for index, parameter in enumerate(group["params"]):
            known = names.get(id(parameter))
            label = known or f"master weight {index} of parameter group {number}"
            place = _group_of(parameter, dense)
            if group.get("moe") and known is None:
                place = _expert_group(group["name"])
            if known is None:
                yield Replicated(label, parameter, *place)
            for key, value in sorted(optimizer.state.get(parameter, {}).items(), key=str):
                if torch.is_tensor(value):
                    yield Replicated(f"{key} of {label}", value, *place)


def _alike_on_slices(module: nn.Module, group: ProcessGroup) -> Iterator[Replicated]:
    for name, parameter in module.named_parameters():
        if _may_be_alike(parameter):  # and what is whole may be marked on one slice, to count once
            yield Replicated(name, parameter, group, "model", is_slice=bool(is_model_parallel_parameter(parameter)))
    yield Replicated("random state of the CPU", torch.get_rng_state(), group, "model")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield Replicated("random state of the GPU", torch.cuda.get_rng_state(), group, "model")


def _may_be_alike(parameter: torch.Tensor) -> bool:
    """Copies of tied weights have no marks that tell; experts are one to a slice unless they are marked."""
    return not getattr(parameter, "ds_pipe_replicated", False) and expert_group_name(parameter) is None
