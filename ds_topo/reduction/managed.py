"""Average reduced gradients over the replicas of a torchft ``Manager``, bucket by bucket, while backward goes on.

Each replica is a job of its own, whose ranks reduce a bucket among themselves first. Ranks with the same number in
every replica then average their result over the group that torchft manages, which shrinks and grows from step to step.
All replicas start these sums in the same order, that of the buckets.

An error in such a sum raises nothing: torchft notes it, skips the rest of the step's sums, and the step is not
committed. What a bucket holds is undefined then.

Source: torchft, ``Manager.allreduce`` and ``ddp.DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from ds_topo.base.backends import SideStream, order_after
from ds_topo.base.torch_names import ReduceOp
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.reduction.exchange import Exchange, Pending, Started

if TYPE_CHECKING:
    from torchft import Manager


class ReplicaSums:
    """Averages over the replicas of a ``torchft.Manager``, in flight one after the other.

    On a CPU a thread waits for the sum inside the replica and starts the one over replicas, so that neither holds up
    backward. On an accelerator a stream of its own does.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._streams: dict[torch.device, SideStream] = {}
        self._thread = _new_thread()

    def start(self, after: Callable[[], object], tensor: torch.Tensor, op: ReduceOp = dist.ReduceOp.AVG) -> Pending:
        """Start to reduce ``tensor`` over the replicas, in place, when ``after()`` has returned.

        ``after`` waits for the sum inside the replica. The tensors of all ranks of this number have one size.
        """
        manager = self.manager
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor

        def reduce() -> Any:
            after()
            return manager.allreduce(tensor, reduce_op=op)

        if tensor.device.type == "cpu":
            started = self._thread.submit(reduce)
            return Started(lambda: False, lambda: started.result().wait())  # torchft completes its sums in wait()
        stream = self._streams.setdefault(tensor.device, SideStream(tensor.device))
        with stream.after_current(tensor):
            reduce().wait()
        end = stream.mark()
        return Started(lambda: end is None or end.query(), lambda: order_after(end, tensor.device))

    def exchange(self, group: ProcessGroup, inside: Exchange | None) -> Exchange:
        """Return the exchange of a group whose sums go on over the replicas."""
        return ManagedExchange(self, group, inside)

    def refuse_late(self, names: str) -> RuntimeError:
        """Return the error for parameters that got a gradient after their bucket was launched."""
        return RuntimeError(
            f"parameters {names} got more gradients than in the first step, which replicas of a Manager cannot know of "
            "each other: let every step reach the same parameters equally often"
        )

    def rest(self) -> None:
        """End the thread. Idempotent; the next sum starts another one."""
        self._thread.shutdown()
        self._thread = _new_thread()


def _new_thread() -> ThreadPoolExecutor:
    """Return a thread that starts with the first sum."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="ds_topo sums over replicas")


class ManagedExchange(Exchange):
    """An exchange whose sums go on over the replicas of a manager.

    Inside a replica, ``group`` shares the gradients by the exchange ``inside``, or by torch's all-reduce if it is None.
    """

    def __init__(self, sums: ReplicaSums, group: ProcessGroup, inside: Exchange | None) -> None:
        self._sums, self._group, self._by_torch = sums, group, inside is None
        self._inside = inside or Exchange()
        self._rank, self.slices = dist.get_rank(group), self._inside.slices

    def reduce_scatter(
        self, flat: torch.Tensor, op: ReduceOp = dist.ReduceOp.SUM, *, over_copies: bool = True
    ) -> Pending:
        pending = self._inside.reduce_scatter(flat, op, over_copies=over_copies)
        own = flat.view(self.slices, -1)[self._rank]
        return self._sums.start(pending.wait, own) if over_copies else pending

    def gather(self, flat: torch.Tensor) -> Pending:
        return self._inside.gather(flat)

    def gather_now(self, flat: torch.Tensor) -> None:
        self._inside.gather_now(flat)

    def all_reduce(self, flat: torch.Tensor) -> Pending:
        if not self._by_torch:
            return self._sums.start(self._inside.all_reduce(flat).wait, flat)
        if dist.get_world_size(self._group) == 1:
            return self._sums.start(lambda: None, flat)
        work = cast("dist.Work", dist.all_reduce(flat, group=self._group, async_op=True))
        return self._sums.start(work.wait, flat)

    def rest(self) -> None:
        self._inside.rest()
