"""An engine's state in the shape of torch's ``get_state_dict``, for ``torch.distributed.checkpoint``.

Source: torch, ``distributed/checkpoint/state_dict.py``, and the guide "Getting Started with Distributed Checkpoint".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.engine.checkpoints.meeting import Meeting
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.torch_checkpoints.description import described
from ds_topo.engine.torch_checkpoints.naming import Rename
from ds_topo.engine.torch_checkpoints.progress import progress_of
from ds_topo.engine.torch_checkpoints.taking_over import agreed_numbers, take_over
from ds_topo.topology.axes import PIPE
from ds_topo.torch_checkpoint.keys import GROUPS, MODEL, OPTIM, PARAMS, PROGRESS, STATE, in_groups


class TorchState:
    """An engine for ``torch.distributed.checkpoint``: a ``Stateful``, as torch's guides make one of a model.

    All ranks of the job save it together. Its names and shapes are those of the whole model, whatever the degrees and
    the stage of ZeRO; FSDP2 programs, single processes, and engines of other degrees read it by torch's own functions.
    Weights are master weights, in fp32, where the engine has them.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        rename: from the module's names of parameters to those of the other program: a function, or a mapping that may
            leave some out. A pipeline's are ``"3.weight"``, and ``"tied_modules.<key>.weight"`` of what is tied.
        flatten_optimizer_state_dict: as in torch's ``StateDictOptions``.

    Raises:
        CheckpointError: see :meth:`state_dict`.

    Saving and loading, where both have the same parameters::

        dcp.save({"app": TorchState(engine)}, checkpoint_id=folder)
        dcp.load({"app": TorchState(engine)}, checkpoint_id=folder)
        saving = dcp.async_save({"app": TorchState(engine)}, checkpoint_id=folder)

    What other programs have saved, :func:`ds_topo.checkpoint.load_torch` loads.
    """

    def __init__(
        self, engine: DeepSpeedEngine, rename: Rename = None, *, flatten_optimizer_state_dict: bool = False
    ) -> None:
        if not isinstance(engine, DeepSpeedEngine):
            raise TypeError(f"engine: {type(engine).__name__} is not what deepspeed.initialize returns")
        self.engine, self.rename, self.is_flat = engine, rename, flatten_optimizer_state_dict

    def state_dict(self) -> dict[str, Any]:
        """What is to be saved, or loaded into: views of the engine's memory. Collective.

        Optimizer states that do not exist yet are begun.

        Raises:
            CheckpointError: this kind of engine cannot; the same on every rank, before anything is written.
        """
        found = described(self.engine, self.rename, f"flatten_optimizer_state_dict={self.is_flat}")
        groups = in_groups(_of_all_stages(self.engine, found.groups, gathers=not self.is_flat), self.is_flat)
        states = {f"{STATE}.{name}.{key}": value for name, one in found.states.items() for key, value in one.items()}
        optim = {**states, **groups} if self.is_flat else {STATE: found.states, **groups}
        return {MODEL: found.weights, OPTIM: optim, PROGRESS: progress_of(self.engine)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what was loaded into the memory that :meth:`state_dict` showed. Collective."""
        optim = state_dict[OPTIM]
        found = described(self.engine, self.rename, "loaded")
        if not self.is_flat:
            saved = {(name, key): value for name, one in optim[STATE].items() for key, value in one.items()}
            groups = list(optim[GROUPS])
        else:
            saved = {(name, key): optim.get(f"{STATE}.{name}.{key}") for name, key in found.numbers}
            groups = found.groups_from({key: value for key, value in optim.items() if key.startswith(f"{GROUPS}.")})
        meeting = Meeting.begin("taking over what torch.distributed.checkpoint has loaded", "")
        numbers = agreed_numbers(meeting, found, saved)
        take_over(self.engine, found, numbers, groups, state_dict.get(PROGRESS))


def _of_all_stages(engine: DeepSpeedEngine, groups: list[dict[str, Any]], *, gathers: bool) -> list[dict[str, Any]]:
    """Groups with the names of all stages of a pipeline."""
    grid = engine.mpu
    if not gathers or not isinstance(grid, MpuGrid) or grid.get_pipe_parallel_world_size() == 1:
        return groups
    everyone: list[Any] = [None] * grid.get_pipe_parallel_world_size()
    dist.all_gather_object(everyone, groups, group=grid.get_group(PIPE))
    merged: list[dict[str, Any]] = []
    for number in range(max(map(len, everyone))):
        rows = [of_stage[number] for of_stage in everyone if number < len(of_stage)]
        names = dict.fromkeys(name for row in rows for name in row[PARAMS])
        merged.append({**rows[0], PARAMS: list(names)})
    return merged
