"""Whether tensors that ranks must have alike are alike, to the last bit.

Every rank makes two 64-bit sums of each tensor's bits, on its device. Then the ranks agree through the store that all
of them compare, after the same step, so that no comparison meets another collective; one all_reduce for each group says
whether any of its tensors differs. Only then do ranks say who they are and what they have, of the first that does.
"""

from __future__ import annotations

import hashlib
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_topo.errors import ReplicaError, listed
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.torch_names import devices_of, job_timeout

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_AT_A_TIME = 1 << 20
"""Elements, which bounds the memory of digests."""
_MIXERS = (-0x61C8864680B583EB, -0x4B47D0C5A1A6B4D9)
"""Odd numbers, by which places become weights that look random."""
_NOBODY = 1 << 31
"""In place of the number of a rank that has something to say."""
_SHOWN_KINDS = 4


@dataclass(frozen=True)
class Replicated:
    """A tensor that all ranks of a group must have alike.

    Args:
        name: for messages.
        tensor: of any type, shape and device.
        group: its ranks.
        axes: what they are, for messages.
        is_slice: whether this rank says that it has a slice of its own: what all say so of is not compared.
    """

    name: str
    tensor: torch.Tensor
    group: ProcessGroup
    axes: str
    is_slice: bool = False

    @property
    def kind(self) -> str:
        """Data type and shape."""
        return f"{str(self.tensor.dtype).removeprefix('torch.')} {list(self.tensor.shape)}"


def compare(tensors: Iterable[Replicated], everyone: ProcessGroup, when: str, how: str = "") -> None:
    """Compare replicas; collective over ``everyone``.

    Args:
        tensors: all that this rank has; ranks of a group bring its tensors in the same order.
        everyone: all ranks that compare at this time, so that all of them raise.
        when: the same on all of them; for messages.
        how: what else must be the same on all of them, as arguments that decide what is compared.

    Raises:
        ReplicaError: on every rank; names the first tensor that differs, and which ranks on which hosts have the same.
        DisagreementError: ranks compare at other times, do not come, or cannot make a digest; names them.
    """
    by_group: dict[ProcessGroup, list[Replicated]] = defaultdict(list)
    sums: dict[int, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        for each in tensors:
            by_group[each.group].append(each)
        unique = {id(each.tensor): each.tensor for members in by_group.values() for each in members}
        sums = dict(zip(unique, digests(list(unique.values())), strict=True))
    except Exception as error:  # whatever it is: the others hear of it
        failure = error
    members = dist.get_process_group_ranks(everyone)
    agree(f"{when}{how}", members, job_timeout(), failure=failure, subject="a comparison of replicas")
    found = [_difference(brought, group, sums) for group, brought in by_group.items()]
    text = next((difference for difference in found if difference), "")
    first = torch.tensor([dist.get_rank(everyone) if text else _NOBODY], device=_device_of(everyone))
    dist.all_reduce(first, dist.ReduceOp.MIN, group=everyone)
    if int(first) == _NOBODY:
        return
    counted = torch.tensor([int(bool(text))], device=_device_of(everyone))
    dist.all_reduce(counted, group=everyone)
    said = [text]
    dist.broadcast_object_list(said, src=dist.get_global_rank(everyone, int(first)), group=everyone)
    raise ReplicaError(
        f"replicas differ {when}, as {int(counted)} of {len(members)} ranks see; {said[0]}\n"
        "A rank has left out or repeated a step, changed values by itself, or computed otherwise."
    )


def _difference(tensors: Sequence[Replicated], group: ProcessGroup, sums: dict[int, torch.Tensor]) -> str:
    """What differs in a group, the same text on all its ranks; collective over it."""
    if dist.get_world_size(group) == 1:
        return ""
    device = _device_of(group)
    kinds = "\n".join(f"{each.name} {each.kind}" for each in tensors)
    names = hashlib.sha1(kinds.encode(), usedforsecurity=False)
    highest, lowest = _extremes(torch.tensor([int.from_bytes(names.digest()[:7], "big")], device=device), group)
    if bool(highest != lowest):
        own = f"{len(tensors)} tensors, from {tensors[0].name!r} on; names, types and shapes {names.hexdigest()[:8]}"
        return _who(f"ranks along {tensors[0].axes} have not the same tensors", own, group)
    words = torch.stack([sums[id(each.tensor)].to(device) for each in tensors])
    slices = torch.tensor([[int(each.is_slice)] for each in tensors], device=device)
    highest, lowest = _extremes(torch.cat([words, slices], 1), group)
    differs = (highest != lowest)[:, :2].any(1) & (lowest[:, 2] == 0)
    if not differs.any():
        return ""
    first = tensors[int(differs.nonzero()[0])]
    own = " ".join(f"{word & 0xFFFFFFFFFFFFFFFF:016x}" for word in sums[id(first.tensor)].tolist())
    compared = len(tensors) - int(lowest[:, 2].sum())
    what = f"{int(differs.sum())} of {compared} tensors along {first.axes}, first {first.name!r} ({first.kind})"
    return _who(what, own, group)


def digests(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of each tensor two 64-bit sums, ``[2]``, of the bits of its elements: plain, and weighted by their places.

    >>> one, other = digests([torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2])])
    >>> (one == other).tolist()
    [True, False]
    """
    result: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
    waiting: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = defaultdict(list)
    elements: dict[tuple[torch.device, torch.dtype], int] = defaultdict(int)

    def finish(kind: tuple[torch.device, torch.dtype]) -> None:
        together = waiting.pop(kind)
        for (index, _), sums in zip(together, _sums_of([bits for _, bits in together]), strict=True):
            result[index] = sums
        elements[kind] = 0

    for index, tensor in enumerate(tensors):
        bits = _bits_of(tensor)
        if len(bits) >= _AT_A_TIME:
            parts = [_sums_of([bits[start : start + _AT_A_TIME]], start) for start in range(0, len(bits), _AT_A_TIME)]
            result[index] = torch.cat(parts).sum(0)
            continue
        kind = bits.device, bits.dtype
        waiting[kind].append((index, bits))
        elements[kind] += len(bits)
        if elements[kind] >= _AT_A_TIME:
            finish(kind)
    for kind in list(waiting):
        finish(kind)
    return result


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as integers, ``[n]``; those of eight bytes as two."""
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device has no values to compare")
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    dense = (tensor if tensor.layout == torch.strided else tensor.to_dense()).contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element may have any stride
    return flat.to(torch.int8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.itemsize])


def _sums_of(parts: Sequence[torch.Tensor], start: int = 0) -> torch.Tensor:
    """Both sums of each of some parts, ``[len(parts), 2]``, whose places begin with ``start``."""
    device = parts[0].device
    if len(parts) == 1:
        values = parts[0].to(torch.int64)
        weights = _weights(torch.arange(start + 1, start + 1 + len(values), device=device))
        return torch.stack([values.sum(), weights.mul_(values).sum()])[None]
    values = torch.cat(list(parts)).to(torch.int64)
    numels = torch.tensor([len(part) for part in parts], device=device)
    owners = torch.repeat_interleave(torch.arange(len(parts), device=device), numels)
    places = torch.arange(start + 1, start + 1 + len(values), device=device) - (numels.cumsum(0) - numels)[owners]
    both = torch.stack([values, _weights(places).mul_(values)], 1)
    return torch.zeros(len(parts), 2, dtype=torch.int64, device=device).index_add_(0, owners, both)


def _weights(places: torch.Tensor) -> torch.Tensor:
    """Of places from 1 on, in their memory."""
    mixed = places.mul_(_MIXERS[0])
    return mixed.bitwise_xor_(mixed >> 29).mul_(_MIXERS[1])


def _extremes(values: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest and the lowest of each number over the ranks of a group."""
    both = torch.stack([values, values.bitwise_not()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[0], both[1].bitwise_not()


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
