"""A torch ``DeviceMesh`` over a grid's own process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh

from ds_topo.process_groups.creation import ProcessGroup

if TYPE_CHECKING:
    from ds_topo.topology.process_topology import ProcessTopology


def mesh_over(
    topology: ProcessTopology, members: Sequence[int], groups: Sequence[ProcessGroup], device_type: str | None = None
) -> DeviceMesh:
    """A mesh with one dimension per axis of ``topology``, in its order, whose groups are ``groups``.

    Args:
        members: the global rank of each rank of the topology.
        groups: this rank's group over each axis.
        device_type: ``"cpu"``, ``"cuda"``, ...; the accelerator that the groups serve, else the CPU, by default.
    """
    device_type = device_type or _device_type(groups[0])
    if len(groups) == 1:  # torch wants no list here
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(topology.axes))
    ranks = [members[rank] for rank in topology.layout.offsets(range(len(groups)))]
    mesh = torch.tensor(ranks, dtype=torch.int).view(topology.dims)
    return DeviceMesh.from_group(list(groups), device_type, mesh=mesh, mesh_dim_names=tuple(topology.axes))


def _device_type(group: ProcessGroup) -> str:
    """The accelerator that is there and that the group's backend serves, else ``cpu``."""
    for device in group._device_types:
        if device.type != "cpu" and torch.get_device_module(device.type).is_available():
            return str(device.type)
    return "cpu"
