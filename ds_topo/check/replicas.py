"""Whether tensors that ranks must have alike are alike, to the last bit.

Every rank makes two 64-bit sums of each tensor's bits, on its device; one all_reduce of these for each group says
whether any differs. Only then do ranks say who they are and what they have, of the first tensor that differs.
"""

from __future__ import annotations

import hashlib
import socket
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_topo.errors import ReplicaError, listed
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.torch_names import devices_of

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 1 << 20
"""Elements, which bounds the memory of a digest."""
_MIXERS = (-0x61C8864680B583EB, -0x4B47D0C5A1A6B4D9)
"""Odd numbers, by which places become weights that look random."""
_ALIKE = 1 << 31
"""In place of a rank that has something to say."""
_SHOWN_KINDS = 4


@dataclass(frozen=True)
class Replicated:
    """A tensor that all ranks of a group must have alike.

    Args:
        name: for messages.
        tensor: of any type, shape and device.
        group: its ranks.
        axes: what they are, for messages.
    """

    name: str
    tensor: torch.Tensor
    group: ProcessGroup
    axes: str


def compare(tensors: Sequence[Replicated], everyone: ProcessGroup, when: str) -> None:
    """Compare replicas; collective over ``everyone``, whose ranks bring the groups' tensors in the same order.

    Args:
        tensors: all that this rank has.
        everyone: all ranks that compare at this time, so that all of them raise.
        when: for messages.

    Raises:
        ReplicaError: on every rank; names the first tensor that differs, and which ranks on which hosts have the same.
    """
    by_group: dict[ProcessGroup, list[Replicated]] = defaultdict(list)
    for each in tensors:
        by_group[each.group].append(each)
    digests: dict[int, torch.Tensor] = {}
    found = [_difference(members, group, digests) for group, members in by_group.items()]
    text = next((difference for difference in found if difference), "")
    device = _device_of(everyone)
    rank = dist.get_rank(everyone)
    first = torch.tensor([rank if text else _ALIKE, -1 if text else 0], device=device)
    counted = first[1:].neg()
    dist.all_reduce(first[:1], dist.ReduceOp.MIN, group=everyone)
    if int(first[0]) == _ALIKE:
        return
    dist.all_reduce(counted, group=everyone)
    said = [text]
    dist.broadcast_object_list(said, src=dist.get_global_rank(everyone, int(first[0])), group=everyone, device=device)
    raise ReplicaError(
        f"replicas differ {when}, as {int(counted)} of {dist.get_world_size(everyone)} ranks see; {said[0]}\n"
        "A rank has left out or repeated a step, changed values by itself, or computed otherwise."
    )


def _difference(tensors: Sequence[Replicated], group: ProcessGroup, digests: dict[int, torch.Tensor]) -> str:
    """What differs in a group, the same text on all its ranks; collective over it."""
    if dist.get_world_size(group) == 1:
        return ""
    device = _device_of(group)
    names = hashlib.sha1("\n".join(each.name for each in tensors).encode(), usedforsecurity=False).digest()
    brought = torch.tensor([int.from_bytes(names[:7], "big")], device=device)
    if _differs(brought, group).any():
        return _who(f"what ranks along {tensors[0].axes} have to compare", str(len(tensors)), group)
    words = []
    for each in tensors:
        if id(each.tensor) not in digests:
            digests[id(each.tensor)] = digest(each.tensor)
        words.append(digests[id(each.tensor)].to(device))
    differs = _differs(torch.stack(words), group).any(1)
    if not differs.any():
        return ""
    first = tensors[int(differs.nonzero()[0])]
    own = " ".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in digests[id(first.tensor)].tolist())
    kind = f"{str(first.tensor.dtype).removeprefix('torch.')} {list(first.tensor.shape)}"
    what = f"{int(differs.sum())} of {len(tensors)} tensors along {first.axes}, first {first.name!r} ({kind})"
    return _who(what, own, group)


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two 64-bit sums, ``[2]``, of the bits of a tensor's elements, plain and weighted by their places.

    >>> one, other = digest(torch.tensor([1, 2, 3])), digest(torch.tensor([1, 3, 2]))
    >>> (one == other).tolist()
    [True, False]
    """
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    flat = (tensor if tensor.layout == torch.strided else tensor.to_dense()).contiguous().reshape(-1)
    bits = flat if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.itemsize])
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _AT_A_TIME):
        part = bits[start : start + _AT_A_TIME].to(torch.int64)
        weights = torch.arange(start + 1, start + 1 + len(part), device=bits.device).mul_(_MIXERS[0])
        weights.bitwise_xor_(weights >> 29).mul_(_MIXERS[1])
        sums += torch.stack([part.sum(), weights.mul_(part).sum()])
    return sums


def _differs(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Where values are not the same on all ranks of a group."""
    both = torch.stack([values, values.bitwise_not()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both[0], both[1].bitwise_not()
    return highest != lowest


def _who(what: str, own: str, group: ProcessGroup) -> str:
    """Which ranks have which value; collective over the group."""
    said: list[tuple[int, str, str]] = [(0, "", "")] * dist.get_world_size(group)
    dist.all_gather_object(said, (dist.get_rank(), socket.gethostname(), own), group=group)
    by_value: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, host, value in said:
        by_value[value].append((rank, host))
    lines = []
    for value, owners in sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1]))[:_SHOWN_KINDS]:
        hosts = list(dict.fromkeys(host for _, host in owners))
        lines.append(f"\n  ranks {listed([rank for rank, _ in owners])} on {listed(hosts, 4)} have {value}")
    more = f"\n  and {len(by_value) - _SHOWN_KINDS} further values" if len(by_value) > _SHOWN_KINDS else ""
    return f"{what}:{''.join(lines)}{more}"


def _device_of(group: ProcessGroup) -> torch.device:
    """Where a group's tensors must be."""
    devices = devices_of(group)
    return torch.device("cpu" if "cpu" in devices else devices[0])
