"""``check_replicas``: whether what an engine's ranks must have alike is alike, now or every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter
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

    Compared are, over the ranks that average gradients: parameters and buffers of integers, experts over the replicas
    of each; at ZeRO stage 0 the optimizer's states and master weights, too. At stages 1 and 2 these are partitioned, so
    there are no replicas of them. Over the ranks of a ``model`` axis, if ``slices`` is set: parameters that are not
    marked as a slice (``tensor_model_parallel``), and the random states, by which replicated dropout must draw alike.

    Costs one pass over the tensors, and an all_reduce of 32 bytes for each. Every rank of the engine raises, whichever
    replicas differ.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        every: how many steps apart, counted by the engine; 0: only now, and whenever :meth:`now` is called.
        slices: whether to compare slices of a ``model`` axis, too.

    Raises:
        TypeError: not an engine, or ``every`` is no number.
        ValueError: ``every`` is negative; or ZeRO stage 3, which keeps no replicas.
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
        self._engine, self._every, self._slices = engine, every, slices
        self.now()
        self._releases: list[Callable[[], None]] = []
        if every:
            self._releases += [
                ledger.bind(self._row, self._comparing, engine),
                ledger.bind(changes.DESTROY_ENGINE, self._before_destroy, engine),
            ]

    def now(self) -> None:
        """Compare; collective over the engine's ranks."""
        engine = self._engine
        compare(list(self._replicated()), _everyone(engine), f"after step {engine.global_steps}")

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
            if self._engine.global_steps > before and self._engine.global_steps % self._every == 0:
                self.now()
            return result

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
        for name, buffer in engine.module.named_buffers():
            if not buffer.is_floating_point():  # running averages of samples are each rank's own
                yield Replicated(f"buffer {name}", buffer, dense, "data")
        if int(engine.zero_optimization_stage()) == 0 and engine.enable_backward_allreduce:
            yield from _states(engine, names, dense)
        if self._slices and isinstance(engine.mpu, MpuGrid) and engine.mpu.get_axis_size(MODEL) > 1:
            yield from _alike_on_slices(engine.module, engine.mpu.get_group(MODEL))


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
        group = deepspeed_groups._get_sequence_data_parallel_group()
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
    while hasattr(optimizer, "optimizer"):
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
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if torch.is_tensor(value):
                    yield Replicated(f"{key} of {label}", value, *place)


def _alike_on_slices(module: nn.Module, group: ProcessGroup) -> Iterator[Replicated]:
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if _may_be_alike(parameter)]
    if parameters:
        marked = [int(is_model_parallel_parameter(parameter)) for _, parameter in parameters]
        marks = torch.tensor(marked, device=parameters[0][1].device)
        dist.all_reduce(marks, dist.ReduceOp.MIN, group=group)  # what is whole may be marked on one, to count once
        for (name, parameter), is_slice in zip(parameters, marks.tolist(), strict=True):
            if not is_slice:
                yield Replicated(name, parameter, group, "model")
    yield Replicated("random state of the CPU", torch.get_rng_state(), group, "model")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield Replicated("random state of the GPU", torch.cuda.get_rng_state(), group, "model")


def _may_be_alike(parameter: torch.Tensor) -> bool:
    """Copies of tied weights have no marks that tell; experts are one to a slice unless they are marked."""
    return not getattr(parameter, "ds_pipe_replicated", False) and expert_group_name(parameter) is None
