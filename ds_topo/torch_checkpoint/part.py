"""A tensor of which this process has some boxes only, in whatever memory they lie.

``torch.distributed.checkpoint`` writes and reads it as it does a ``DTensor``, by three methods that it looks for on
tensors: nothing is gathered and nothing copied, and whoever reads gets the boxes that it wants.

Source: torch, ``distributed/_checkpointable.py`` (the methods) and ``distributed/tensor/_shards_wrapper.py``
(a tensor in several boxes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ds_topo.torch_checkpoint.boxes import Slice

_ATEN = torch.ops.aten


class PartOfTensor(torch.Tensor):
    """The part of a tensor that this process has: it looks like the whole one, and can be saved and loaded.

    Args:
        shape: of the whole tensor.
        boxes: memory of the parts that are here, by their offsets in the whole; views, to be read and written in place.
        like: a tensor with the data type and the device of all of them.
        is_written: whether this process saves them; another one that has them does, else.

    >>> memory = torch.arange(5.0)
    >>> part = part_of(memory, Slice((3, 4)), 2, 7)
    >>> part.shape, part.boxes
    (torch.Size([3, 4]), {(0, 2): tensor([[0., 1.]]), (1, 0): tensor([[2., 3., 4.]])})
    """

    boxes: dict[tuple[int, ...], torch.Tensor]
    is_written: bool

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        boxes: Mapping[tuple[int, ...], torch.Tensor],
        like: torch.Tensor,
        is_written: bool = True,
    ) -> PartOfTensor:
        self: PartOfTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=like.dtype, device=like.device
        )
        self.boxes, self.is_written = dict(boxes), is_written
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartOfTensor({list(self.shape)}, {len(self.boxes)} boxes here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return PartOfTensor, (tuple(self.shape), self.boxes, torch.empty(0, dtype=self.dtype), self.is_written)

    # -- what torch.distributed.checkpoint asks

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        if not self.is_written:
            return []
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), memory.shape),
                    properties=TensorProperties.create_from_tensor(memory),
                    size=self.shape,
                ),
            )
            for offsets, memory in self.boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), memory.shape) for offsets, memory in self.boxes.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]

    # -- what torch's stagers ask, which copy it to host memory while training goes on

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        part = next(value for value in args if isinstance(value, PartOfTensor))
        if function is _ATEN.new_empty.default:  # its boxes follow, as attributes
            like = torch.empty(0, dtype=part.dtype, device=options.get("device") or part.device)
            return cls(part.shape, {}, like, part.is_written)
        if function in (_ATEN.zeros_like.default, _ATEN.empty_like.default):
            device = options.get("device") or part.device
            return part._each(lambda memory: torch.empty_like(memory, device=device))
        if function in (_ATEN.detach.default, _ATEN.clone.default):
            return part._each(function)
        if function is _ATEN.copy_.default:
            return _copied(*args[:2])
        raise NotImplementedError(
            f"{function}: {part!r} can be saved and loaded by torch.distributed.checkpoint, and not computed with"
        )

    def _each(self, function: Any) -> PartOfTensor:
        boxes = {offsets: function(memory) for offsets, memory in self.boxes.items()}
        like = next(iter(boxes.values()), torch.empty(0, dtype=self.dtype, device=self.device))
        return PartOfTensor(self.shape, boxes, like, self.is_written)


def _copied(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """One part into another one of the same boxes; or into a plain tensor, a single number."""
    into = target.boxes if isinstance(target, PartOfTensor) else {(0,) * target.dim(): target}
    assert isinstance(source, PartOfTensor)
    assert into.keys() == source.boxes.keys()
    for offsets, memory in source.boxes.items():
        into[offsets].copy_(memory)
    return target


def part_of(memory: torch.Tensor, of: Slice, start: int, stop: int, is_written: bool = True) -> PartOfTensor:
    """The tensor whose slice ``of`` this process has the elements ``start:stop`` of.

    Args:
        memory: them, ``[stop - start]``; or all of the slice, in its shape.
        of: the slice.
        start: the first element, of the slice as one vector.
        stop: the first one that is not here.
        is_written: whether this process saves them.
    """
    boxes: dict[tuple[int, ...], torch.Tensor] = {}
    for box, begin, held, first in of.pieces(start, stop):
        block = memory if memory.shape == held else memory[begin : begin + math.prod(held)].view(held)
        boxes[box.offsets] = block if of.dim is None else block.narrow(of.dim, first, box.sizes[of.dim])
    return PartOfTensor(of.whole_shape, boxes, memory, is_written)
