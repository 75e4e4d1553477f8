"""Tensors as bytes in memory, and NCCL's rules about their types and reductions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp

REDUCIBLE = {
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""NCCL has no 16-bit integers."""
TYPES = REDUCIBLE | {torch.float8_e4m3fn, torch.float8_e5m2}


def read(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def write(tensor: Tensor, data: bytes) -> None:
    """Write to memory past torch, which neither counts a version nor records an operation, as NCCL."""
    assert len(data) == tensor.nbytes, (len(data), tensor.shape, tensor.dtype)
    ctypes.memmove(tensor.data_ptr(), data, len(data))


def poison(tensor: Tensor) -> None:
    if tensor.nbytes:
        ctypes.memset(tensor.data_ptr(), 0xFF if tensor.dtype.is_floating_point else 0xA5, tensor.nbytes)


def overlap(one: Tensor, other: Tensor) -> bool:
    start, begin = one.data_ptr(), other.data_ptr()
    return bool(one.nbytes and other.nbytes) and start < begin + other.nbytes and begin < start + one.nbytes


def check(tensor: Tensor, is_reduced: bool) -> None:
    """Raise as ProcessGroupNCCL does for tensors that it cannot send."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"NCCL sends dense tensors only, and this one is {tensor.layout}: send its parts")
    if tensor.dtype not in (REDUCIBLE if is_reduced else TYPES):
        raise TypeError(f"NCCL does not support {tensor.dtype}: convert the tensor, or view it as another type")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not tensor.is_contiguous() and not tensor.is_contiguous(
        memory_format=formats.get(tensor.dim(), torch.contiguous_format)
    ):
        raise ValueError(f"NCCL needs contiguous tensors, and this one has strides {tensor.stride()}: copy it")


def real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]


class Reduction:
    """A ``ReduceOp`` for tensors of one type, with NCCL's arithmetic: it scales inputs and then adds them."""

    def __init__(self, op: Any, dtype: torch.dtype, size: int) -> None:
        self.kind, factor = ReduceOp(op).__getstate__() if not isinstance(op, ReduceOp) else op.__getstate__()
        self.name, self._dtype, self._size = str(self.kind).rpartition(".")[2], dtype, size
        if self.name not in ("SUM", "AVG", "PREMUL_SUM", "MIN", "MAX", "PRODUCT"):
            raise ValueError(f"Cannot use ReduceOp.{self.name} with NCCL")
        if dtype is torch.bool and self.name == "AVG":
            raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
        if self.name == "PREMUL_SUM" and not dtype.is_floating_point:
            raise TypeError("PreMulSum Data type must be half, float, bfloat16 or double")
        is_average = self.name == "AVG" and dtype.is_floating_point
        self._factor = 1.0 / size if is_average else None if factor is None else float(factor)

    def scaled(self, data: bytes) -> bytes:
        """Scale what this rank contributes."""
        if self._factor is None or not data:
            return data
        return read(torch.frombuffer(bytearray(data), dtype=self._dtype).mul_(self._factor))

    def merged(self, parts: Sequence[bytes]) -> bytes:
        """Reduce the contributions of all ranks in the order of ranks; half precision accumulates in 32 bits."""
        if not parts[0]:
            return b""
        dtype = torch.uint8 if self._dtype is torch.bool else self._dtype
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total, *others = (torch.frombuffer(bytearray(part), dtype=dtype).to(wide) for part in parts)
        for other in others:
            if self.name == "MIN" or (self.name == "PRODUCT" and self._dtype is torch.bool):
                total = torch.minimum(total, other)
            elif self.name == "MAX" or self._dtype is torch.bool:
                total = torch.maximum(total, other)
            elif self.name == "PRODUCT":
                total.mul_(other)
            else:
                total.add_(other)
        if self.name == "AVG" and not dtype.is_floating_point:
            total = torch.div(total, self._size, rounding_mode="trunc").to(dtype)
        return read(total.to(dtype))
