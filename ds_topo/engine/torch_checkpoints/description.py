"""Weights and optimizer states of this rank, as tensors of the whole model that torch's checkpoints understand.

What a rank has whole is a ``DTensor`` on the grid's mesh: replicated, or a shard along ``model`` where slices split it.
A part of a partition, and a slice in several pieces, is a ``PartOfTensor``. All of them are views of the engine's own
memory: nothing is copied or gathered when they are saved, and what is loaded is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ds_topo.engine.checkpoints.facts import replica_of
from ds_topo.engine.checkpoints.meeting import Meeting
from ds_topo.engine.mpu import MpuGrid
from ds_topo.engine.torch_checkpoints.memory import Trained, inner_optimizer, span_of_zero_3, trained
from ds_topo.engine.torch_checkpoints.naming import Named, Rename, named_buffers, named_parameters, slices_of
from ds_topo.engine.torch_checkpoints.states import begin_states, hyperparameters, is_by_element
from ds_topo.topology.axes import MODEL, PIPE
from ds_topo.torch_checkpoint.boxes import Slice
from ds_topo.torch_checkpoint.keys import GROUPS, PARAMS
from ds_topo.torch_checkpoint.part import part_of


@dataclass(frozen=True)
class Described:
    """An engine under names that do not depend on its layout."""

    weights: dict[str, torch.Tensor]
    """Of this rank, and buffers."""
    aliases: dict[str, tuple[str, ...]]
    """All names of a weight that has several, by each of them."""
    states: dict[str, dict[str, torch.Tensor]]
    """Optimizer states of this rank; numbers are copies."""
    numbers: dict[tuple[str, str], torch.Tensor]
    """By parameter and key, of each state that is a number, the tensor that the optimizer steps on."""
    groups: list[dict[str, Any]]
    """Hyperparameters, with the names of the parameters of this stage."""
    trained: list[Trained]
    names: list[str]
    """Of everything that this stage has; one rank of each tells them."""

    def groups_from(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Hyperparameters that were flattened by parameter."""
        result = []
        for group in self.groups:
            for name in group[PARAMS][:1]:
                before = f"{GROUPS}.{name}."
                own = {key.removeprefix(before): value for key, value in values.items() if key.startswith(before)}
                result.append({**own, PARAMS: [name]})
        return result


def described(engine: DeepSpeedEngine, rename: Rename, plan: str, *, has_states: bool = True) -> Described:
    """Everything of an engine that torch's checkpoints have a place for. Collective: all ranks succeed, or none.

    Args:
        engine: to be described.
        rename: its names.
        plan: what for, the same on all ranks.
        has_states: optimizer states, too, which are begun if they are not there yet; else weights alone.

    Raises:
        CheckpointError: a rank cannot; the same on every rank.
        DisagreementError: ranks do not do the same.
    """
    failure: Exception | None = None
    found: Described | None = None
    try:
        found = _described(engine, rename, has_states)
    except Exception as error:  # whatever it is: the others hear of it
        failure = error
    meeting = Meeting.begin("the engine's state for torch.distributed.checkpoint", plan)
    meeting.all_or_none("described", failure)
    assert found is not None
    return found


def _described(engine: DeepSpeedEngine, rename: Rename, has_states: bool) -> Described:
    inner, masters = inner_optimizer(engine), {id(one.parameter): one for one in trained(engine)}
    if inner is not None and has_states:
        begin_states(inner, masters.values())
    builder, result = _Tensors(engine), Described({}, {}, {}, {}, [], list(masters.values()), [])
    names_in_groups: dict[int, list[str]] = {}
    for one in named_parameters(engine, rename):
        master = masters.get(id(one.parameter))
        result.names.extend((*one.names, *one.everywhere) if builder.speaks else ())
        for name in one.names:
            if (weight := builder.weight(one, master)) is not None:
                result.weights[name] = weight
                result.aliases[name] = one.names
        if master is not None and inner is not None and has_states:
            names_in_groups.setdefault(master.group, []).extend(one.everywhere)
            _add_states(result, builder, one, master, inner.state.get(master.master, {}))
    for name, value in named_buffers(engine, rename):
        result.weights[name] = builder.buffer(value)
        result.names.extend([name] if builder.speaks else [])
    for number in range(len(inner.param_groups) if inner is not None else 0):
        assert inner is not None
        result.groups.append({**hyperparameters(inner, number), PARAMS: names_in_groups.get(number, [])})
    return result


def _add_states(result: Described, builder: _Tensors, one: Named, master: Trained, states: Mapping[str, Any]) -> None:
    name, own = one.names[0], {}
    for key, value in states.items():
        if value is None:
            continue
        if is_by_element(value, master.master):
            if master.numel:
                own[key] = builder.of_master(one, master, value)
        else:
            number = value.detach().clone() if torch.is_tensor(value) else torch.tensor(float(value))
            own[key] = number.reshape(())
            result.numbers[name, key] = master.master
    if own:
        result.states[name] = own


class _Tensors:
    """What a rank has of each tensor, as torch's checkpoints understand it."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._grid = engine.mpu if isinstance(engine.mpu, MpuGrid) else None
        self.speaks = replica_of(engine) == 0 and slices_of(engine)[1] == 0
        self._meshes: dict[str, DeviceMesh | None] = {}

    def weight(self, one: Named, master: Trained | None) -> torch.Tensor | None:
        """A parameter's; None where this rank has nothing of it."""
        if master is not None:
            return self.of_master(one, master, master.master) if master.numel else None
        held: Any = one.parameter
        if not hasattr(held, "ds_tensor"):
            return self._whole(held.detach(), one)
        start, numel = span_of_zero_3(held)
        memory = held.ds_tensor.detach().view(-1)[:numel]
        return part_of(memory, one.slice, start, start + numel, one.is_first) if numel else None

    def of_master(self, one: Named, master: Trained, tensor: torch.Tensor) -> torch.Tensor:
        """Of a tensor in the layout of master weights: these, or a state."""
        memory = master.part_of(tensor)
        if master.is_whole:
            return self._whole(memory, one)
        return part_of(memory, one.slice, master.start, master.start + master.numel, one.is_first)

    def buffer(self, value: torch.Tensor) -> torch.Tensor:
        """The first replica's counts."""
        return part_of(value.detach(), Slice(tuple(value.shape)), 0, value.numel(), self.speaks)

    def _whole(self, memory: torch.Tensor, one: Named) -> torch.Tensor:
        mesh = None if one.is_expert or one.slice.stride > 1 else self._mesh(memory.device.type)
        if mesh is not None:
            axes = mesh.mesh_dim_names or ()
            split = Shard(one.slice.dim) if one.slice.dim is not None else Replicate()
            placements = [split if axis == MODEL else Replicate() for axis in axes]
            return DTensor.from_local(memory, mesh, placements, run_check=False)
        if one.slice.dim is None:
            return memory
        return part_of(memory, one.slice, 0, memory.numel(), one.is_first)

    def _mesh(self, device_type: str) -> DeviceMesh | None:
        """Of this rank's stage, if it is one of these devices."""
        if device_type not in self._meshes:
            self._meshes[device_type] = self._made_mesh(device_type)
        return self._meshes[device_type]

    def _made_mesh(self, device_type: str) -> DeviceMesh | None:
        if self._grid is None:
            return None
        mesh, axes = self._grid.device_mesh(), tuple(axis for axis in self._grid.topology().axes if axis != PIPE)
        if mesh.device_type != device_type or not axes:
            return None
        return mesh if len(axes) == len(self._grid.topology().axes) else mesh[axes]
