"""A stand-in for NCCL on CPUs. It enforces NCCL's rules, which gloo does not, so that tests see what a GPU would do.

``register()`` makes it known to torch as the backend ``strict``. ``strict_calls`` executes the calls, and ``rank_mesh``
moves bytes over Unix sockets, which unlike gloo's connections end at once and leave no thread.

- All ranks call the collectives of a communicator in one order, from one thread. Otherwise all ranks raise, and the
  error shows the calls and stacks of all ranks. Later calls of that communicator raise, too.
- A result appears when the caller waits for it. Until then outputs hold NaN, or 0xA5 in every byte of an integer.
- Inputs are read late. A write to an input or output before ``wait()`` raises.
- Sends and receives of a pair of ranks match in order; those of one batch match as a set.
- Tags, sparse and non-contiguous tensors, and types that NCCL lacks are refused.

It is stricter than NCCL in one point: a collective may not use the output of an earlier one that was not waited for,
although NCCL would run the two of one communicator in order.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Backend, ReduceOp

from ds_topo.base.backends import TRAITS
from tests.support.nccl_tensors import Reduction, check, overlap, real
from tests.support.rank_mesh import connect
from tests.support.strict_calls import Communicator, Plan, SeveralWorks, StrictWork, stack_here

NAME = "strict"


def register() -> None:
    """Make the backend known to torch and ds_topo, with NCCL's traits. Idempotent."""
    TRAITS[NAME] = TRAITS["nccl"]
    # torch 2.15 records the calls of other backends by a hook in C++, which needs a C++ backend
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(NAME)
    if NAME not in Backend.backend_list:
        Backend.register_backend(NAME, StrictProcessGroup, extended_api=True, devices=["cpu"])


@dataclass
class _Batch:
    """Sends and receives that are matched as a set."""

    work: StrictWork
    key: object
    """The frame of ``batch_isend_irecv``; None between ``_start_coalescing`` and ``_end_coalescing``."""
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)

    def plan(self, kind: str, numbers: dict[int, int]) -> Plan:
        def shown(tensors: list[tuple[int, Tensor]], peer: int) -> list[tuple[int, str]]:
            return [(tensor.numel(), str(tensor.dtype)) for rank, tensor in tensors if rank == peer]

        sends, receives = self.sends, self.receives
        takers = [rank for rank, _ in sends]
        givers = [rank for rank, _ in receives]

        def merge(parts: dict[int, list[bytes]]) -> list[bytes]:
            left = {rank: iter(chunks) for rank, chunks in parts.items()}
            return [next(left[rank]) for rank in givers]

        return Plan(
            kind,
            "",
            [tensor for _, tensor in sends],
            [tensor for _, tensor in receives],
            part=lambda contents, peer: [data for data, rank in zip(contents, takers, strict=True) if rank == peer],
            merge=merge,
            gives={peer: shown(sends, peer) for peer in numbers}.__getitem__,
            takes={peer: shown(receives, peer) for peer in numbers}.__getitem__,
            numbers=numbers,
        )


# -- what torch calls --------------------------------------------------------------------------------------------------


class StrictProcessGroup(dist.ProcessGroup):
    """A process group of the backend ``strict``.

    torch's C++ code (DDP, functional collectives) finds the methods by their names; the second names at the end of the
    class are those of older releases.
    """

    def __init__(self, creation: Any, _: Any = None) -> None:
        rank, size, timeout = creation.group_rank, creation.group_size, creation.timeout
        super().__init__(rank, size)  # the constructor with a store is not for subclasses
        self._store, self._name, self._description = creation.store, str(creation.group_id), "undefined"
        connections = connect(creation.store, rank, size, timeout, 2)
        self._communicator = Communicator(str(creation.group_id), rank, size, timeout, connections)
        ranks = list(creation.global_ranks_in_group)
        self._options = SimpleNamespace(_timeout=timeout, backend=NAME, global_ranks_in_group=ranks)
        self._batch: _Batch | None = None
        self._coalesced: list[StrictWork] | None = None

    def __del__(self) -> None:
        if hasattr(self, "_communicator"):
            self._communicator.destroy(0.0)

    # what a group says about itself; torch would ask a C++ backend for its name and description

    def getGroupName(self) -> str:
        """Return the name that torch has given."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description."""
        self._description = description

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> StrictProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"No backend type associated with device type {device}")
        return self

    @property
    def options(self) -> SimpleNamespace:
        """Return the options, as those of a backend."""
        return self._options

    def get_group_store(self) -> dist.Store:
        """Return the store with which the group was created."""
        return self._store

    supports_coalescing = True
    supports_splitting = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later calls."""
        self._options._timeout, self._communicator.seconds = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """No-op: all ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        return self._communicator.number

    def shutdown(self) -> None:
        """Execute what was called, and end the threads."""
        self._communicator.destroy(self._communicator.seconds)

    def abort(self) -> None:
        """End the threads at once; calls in flight fail."""
        self._communicator.destroy(0.0)

    # collectives

    def _launch(self, *plan_of: Any, **more: Any) -> StrictWork:
        plan, communicator, stack = Plan(*plan_of, **more), self._communicator, stack_here()
        communicator.enter(plan.kind, stack)
        work = communicator.launch(StrictWork(communicator, stack), plan, communicator.main)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reductions(self, op: Any, tensors: Sequence[Tensor]) -> list[Reduction]:
        return [Reduction(op, tensor.dtype, self._communicator.size) for tensor in tensors]

    def broadcast(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        tensors, root, own = real(tensors), opts.rootRank, self._communicator.rank
        is_root = own == root
        return self._launch(
            "broadcast",
            _terms(tensors, root=root),
            tensors if is_root else [],
            [] if is_root else tensors,
            part=lambda contents, peer: contents,
            merge=lambda parts: [] if is_root else parts[root],
        )

    def allreduce(self, tensors: list[Tensor], opts: Any = None, kind: str = "all_reduce") -> StrictWork:
        opts = opts if opts is not None else dist.AllreduceOptions()
        tensors = _real_if_sum(tensors, opts.reduceOp)
        reductions = self._reductions(opts.reduceOp, tensors)
        return self._launch(
            kind,
            _terms(tensors, op=reductions[0].name),
            tensors,
            tensors,
            part=lambda contents, _: [how.scaled(data) for how, data in zip(reductions, contents, strict=True)],
            merge=lambda parts: _merged(reductions, parts),
            is_reduced=True,
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        return self.allreduce(tensors, opts, "all_reduce_coalesced")

    def reduce(self, tensors: list[Tensor], opts: Any) -> StrictWork:
        tensors, root, own = _real_if_sum(tensors, opts.reduceOp), opts.rootRank, self._communicator.rank
        reductions = self._reductions(opts.reduceOp, tensors)
        return self._launch(
            "reduce",
            _terms(tensors, op=reductions[0].name, root=root),
            tensors,
            outputs=tensors if own == root else [],
            part=lambda contents, peer: (
                [how.scaled(data) for how, data in zip(reductions, contents, strict=True)] if peer == root else []
            ),
            merge=lambda parts: _merged(reductions, parts) if own == root else [],
            is_reduced=True,
        )

    def allgather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> StrictWork:
        (outputs,), (tensor,) = output_lists, inputs
        self._check_sizes(outputs, tensor)
        return self._launch(
            "all_gather",
            _terms(outputs),
            inputs,
            outputs,
            part=lambda contents, peer: contents,
            merge=lambda parts: [parts[rank][0] for rank in sorted(parts)],
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> StrictWork:
        return self.all_gather_single_coalesced([output], [tensor], opts, "all_gather_into_tensor")

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, kind: str = "all_gather_coalesced"
    ) -> StrictWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_ratio(output, tensor)
        return self._launch(
            kind,
            _terms(inputs),
            inputs,
            outputs,
            part=lambda contents, peer: contents,
            merge=lambda parts: [b"".join(of_ranks) for of_ranks in _by_tensor(parts)],
        )

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> StrictWork:
        raise RuntimeError("NCCL does not support allgather_coalesced: use _coalescing_manager")

    def gather(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> StrictWork:
        root, own, (tensor,) = opts.rootRank, self._communicator.rank, inputs
        outputs = output_lists[0] if own == root else []
        if own == root:
            self._check_sizes(outputs, tensor, is_even=True)
        return self._launch(
            "gather",
            _terms(inputs, root=root),
            inputs,
            outputs,
            part=lambda contents, peer: contents if peer == root else [],
            merge=lambda parts: [parts[rank][0] for rank in sorted(parts)] if own == root else [],
        )

    def scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> StrictWork:
        root, own = opts.rootRank, self._communicator.rank
        inputs = input_lists[0] if own == root else []
        if own == root:
            self._check_sizes(inputs, outputs[0], is_even=True)
        return self._launch(
            "scatter",
            _terms(outputs, root=root),
            inputs,
            outputs,
            part=lambda contents, peer: [contents[peer]] if contents else [],
            merge=lambda parts: parts[root],
        )

    def reduce_scatter(self, outputs: list[Tensor], input_lists: list[list[Tensor]], opts: Any) -> StrictWork:
        (inputs,), (output,) = input_lists, outputs
        self._check_sizes(inputs, output)
        (how,) = self._reductions(opts.reduceOp, outputs)
        return self._launch(
            "reduce_scatter",
            _terms(inputs, op=how.name),
            inputs,
            outputs,
            part=lambda contents, peer: [how.scaled(contents[peer])],
            merge=lambda parts: _merged([how], parts),
            is_reduced=True,
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> StrictWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts, "reduce_scatter_tensor")

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, kind: str = "reduce_scatter_coalesced"
    ) -> StrictWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_ratio(tensor, output)
        reductions = self._reductions(opts.reduceOp, outputs)
        lengths = [output.nbytes for output in outputs]

        def part(contents: list[bytes], peer: int) -> list[bytes]:
            return [
                how.scaled(data[peer * length : (peer + 1) * length])
                for how, data, length in zip(reductions, contents, lengths, strict=True)
            ]

        return self._launch(
            kind,
            _terms(outputs, op=reductions[0].name),
            inputs,
            outputs,
            part,
            merge=lambda parts: _merged(reductions, parts),
            is_reduced=True,
        )

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> StrictWork:
        sent, received = self._bounds(tensor, input_splits), self._bounds(output, output_splits)
        own = self._communicator.rank
        self._check_apart([output], [tensor])

        def part(contents: list[bytes], peer: int) -> list[bytes]:
            first, last = sent[peer]
            return [contents[0][first * tensor.itemsize : last * tensor.itemsize]]

        sizes_sent, sizes_received = ([last - first for first, last in bounds] for bounds in (sent, received))
        if sizes_sent[own] != sizes_received[own]:
            raise ValueError(f"all_to_all_single: this rank sends {sizes_sent} elements and receives {sizes_received}")
        return self._launch(
            "all_to_all_single",
            (str(tensor.dtype),),
            [tensor],
            [output],
            part,
            merge=lambda parts: [b"".join(parts[rank][0] for rank in sorted(parts))],
            gives=sizes_sent.__getitem__,
            takes=sizes_received.__getitem__,
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> StrictWork:
        self._check_apart(outputs, inputs)
        sizes_sent, sizes_received = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        return self._launch(
            "all_to_all",
            (str(inputs[0].dtype),),
            inputs,
            outputs,
            part=lambda contents, peer: [contents[peer]],
            merge=lambda parts: [parts[rank][0] for rank in sorted(parts)],
            gives=sizes_sent.__getitem__,
            takes=sizes_received.__getitem__,
        )

    def barrier(self, opts: Any = None) -> StrictWork:
        work = self._launch("barrier", "", [], [], lambda contents, peer: [], lambda parts: [])
        work.wait(getattr(opts, "timeout", None))  # NCCL blocks the caller, too
        return work

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("NCCL does not support monitored_barrier")

    # point to point

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        return self._exchange("send", tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        return self._exchange("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> StrictWork:
        raise RuntimeError("NCCL does not receive from any source: name the rank")

    def _exchange(self, kind: str, tensors: list[Tensor], peer: int, tag: int) -> StrictWork:
        if tag != 0:
            raise ValueError(f"NCCL has no tags, and {kind} got tag={tag}: rely on the order of calls")
        communicator, stack = self._communicator, stack_here()
        communicator.enter(kind, stack)
        (tensor,) = tensors
        check(tensor, is_reduced=False)
        key, count = _batch_call()
        batch = self._batch
        if self._coalesced is not None:  # between _start_coalescing and _end_coalescing
            batch, count = batch or _Batch(StrictWork(communicator, stack), None), 0
        elif batch is None or batch.key is not key:
            batch = _Batch(StrictWork(communicator, stack), key)
        (batch.sends if kind == "send" else batch.receives).append((peer, tensor))
        self._batch = batch
        if self._coalesced is None and len(batch.sends) + len(batch.receives) == count:
            self._launch_batch(kind if key is None else "batch")
        return batch.work

    def _launch_batch(self, kind: str) -> StrictWork:
        communicator, batch = self._communicator, self._batch
        assert batch is not None
        self._batch = None
        numbers = {}
        for peer in sorted({rank for rank, _ in (*batch.sends, *batch.receives)}):
            communicator.pairs[peer] += 1
            numbers[peer] = communicator.pairs[peer]
        (peer, *_) = numbers
        lane = communicator.main if kind == "batch" else communicator.direct[peer]
        name = kind if kind == "batch" else "point to point"
        return communicator.launch(batch.work, batch.plan(name, numbers), lane)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        if self._batch is not None:
            works.append(self._launch_batch("batch"))
        return works[0] if len(works) == 1 else SeveralWorks(works)

    # checks of sizes

    def _check_sizes(self, tensors: Sequence[Tensor], own: Tensor, is_even: bool = False) -> None:
        """Check a list with one tensor for each rank, of which this rank's has the size of ``own``."""
        size, rank = self._communicator.size, self._communicator.rank
        if len(tensors) != size or tensors[rank].numel() != own.numel() or len({t.dtype for t in (own, *tensors)}) > 1:
            raise ValueError(f"{[tuple(t.shape) for t in tensors]} do not fit {size} ranks and {tuple(own.shape)}")
        if is_even and len({tensor.numel() for tensor in tensors}) > 1:
            raise ValueError(f"tensors of different sizes, {[tuple(tensor.shape) for tensor in tensors]}")

    def _check_ratio(self, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._communicator.size or whole.dtype != part.dtype:
            raise ValueError(f"{whole.shape} of {whole.dtype} is not one {part.shape} of {part.dtype} for each rank")
        place = whole.data_ptr() + self._communicator.rank * part.nbytes
        if overlap(whole, part) and part.data_ptr() != place:
            raise ValueError("in place, NCCL needs the part of this rank at its place in the whole")

    def _check_apart(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if any(overlap(*pair) for pair in itertools.product(outputs, inputs)):
            raise ValueError("NCCL has no all-to-all in place: use other outputs")

    def _bounds(self, tensor: Tensor, splits: list[int]) -> list[tuple[int, int]]:
        """Return the first and last element for each rank; an empty list of splits means equal ones."""
        size, rows = self._communicator.size, tensor.shape[0]
        if not splits and rows % size:
            raise RuntimeError(f"Tensor's dim 0 does not divide equally across group size: {rows} among {size}")
        splits = list(splits) or [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise RuntimeError(f"Split sizes {splits} do not match the group of {size} and dim 0 of {rows}")
        ends = [end * (tensor.numel() // rows if rows else 0) for end in itertools.accumulate(splits, initial=0)]
        return list(itertools.pairwise(ends))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _terms(tensors: Sequence[Tensor], **more: Any) -> tuple[Any, ...]:
    """Return what must be equal on all ranks, for which NCCL counts elements and does not know shapes."""
    return tuple((tensor.numel(), str(tensor.dtype)) for tensor in tensors), *sorted(more.items())


def _real_if_sum(tensors: Sequence[Tensor], op: Any) -> list[Tensor]:
    is_sum = str((op if isinstance(op, ReduceOp) else ReduceOp(op)).__getstate__()[0]).endswith(("SUM", "AVG"))
    return real(tensors) if is_sum else list(tensors)


def _by_tensor(parts: dict[int, list[bytes]]) -> list[tuple[bytes, ...]]:
    return list(zip(*(parts[rank] for rank in sorted(parts)), strict=True))


def _merged(reductions: Sequence[Reduction], parts: dict[int, list[bytes]]) -> list[bytes]:
    return [how.merged(of_ranks) for how, of_ranks in zip(reductions, _by_tensor(parts), strict=True)]


def _batch_call() -> tuple[object, int]:
    """Return the frame of the surrounding ``batch_isend_irecv`` and the number of its operations; (None, 1) outside.

    torch begins and ends a batch only for groups whose type is exactly ``ProcessGroup``.
    """
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code is dist.batch_isend_irecv.__code__:
            return frame, len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return None, 1
