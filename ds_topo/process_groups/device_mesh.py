"""A torch ``DeviceMesh`` over a grid's own process groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.torch_names import devices_of
from ds_topo.topology import ProcessTopology


def mesh_over(
    topology: ProcessTopology,
    members: Sequence[int],
    groups: Sequence[ProcessGroup],
    device_type: str,
    names: Sequence[str],
) -> DeviceMesh:
    """A mesh with one dimension per axis of ``topology``, in its order, whose groups are ``groups``.

    Args:
        members: the global rank of each rank of the topology.
        groups: this rank's group over each axis.
        device_type: ``"cpu"``, ``"cuda"``, ...
        names: of its dimensions.
    """
    if len(groups) == 1:  # torch wants no list here
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=tuple(names))
    ranks = [members[rank] for rank in topology.layout.offsets(range(len(groups)))]
    mesh = torch.tensor(ranks, dtype=torch.int).view(topology.dims)
    return DeviceMesh.from_group(list(groups), device_type, mesh=mesh, mesh_dim_names=tuple(names))


def default_device_type(group: ProcessGroup) -> str:
    """The accelerator that is there and that the group's backend serves, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None and accelerator.type in devices_of(group) else "cpu"
