"""The stand-in for NCCL computes what gloo computes, and catches what NCCL does not forgive on every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.support.strict_calls import StrictError, StrictWork, spinning_waits
from tests.support.world import Worlds

SIZES = pytest.mark.parametrize("size", [2, 4])
pytestmark = [pytest.mark.thorough, pytest.mark.backends("strict")]


def _caught(program: Callable[[], Any]) -> str:
    """Return the message of the StrictError that a program raises; empty if it raises none."""
    try:
        program()
    except StrictError as error:
        return str(error)
    return ""


def _own(length: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return small numbers that differ between ranks, so that sums are exact in any order."""
    return (torch.arange(length) + 10 * dist.get_rank()).to(dtype)


def _next() -> int:
    return (dist.get_rank() + 1) % dist.get_world_size()


def _before() -> int:
    return (dist.get_rank() - 1) % dist.get_world_size()


# -- correct programs --------------------------------------------------------------------------------------------------


def _reduce_all(op: dist.ReduceOp.RedOpType, dtype: torch.dtype) -> Tensor:
    tensor = _own(3, dtype) + 1
    dist.all_reduce(tensor, op)
    return tensor


def _reduce_to_last() -> Tensor:
    tensor, root = _own(), dist.get_world_size() - 1
    dist.reduce(tensor, root)
    return tensor if dist.get_rank() == root else torch.zeros(0)


def _broadcast() -> Tensor:
    tensor = _own()
    dist.broadcast(tensor, 1)
    return tensor


def _gather_all() -> Tensor:
    parts = [torch.empty(3, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, _own())
    return torch.cat(parts)


def _gather_into_one() -> Tensor:
    whole = torch.empty(3 * dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(whole, _own())
    return whole


def _gather_and_scatter() -> Tensor:
    is_root = dist.get_rank() == 1
    parts = [torch.empty(3, dtype=torch.float64) for _ in range(dist.get_world_size())] if is_root else None
    dist.gather(_own(), parts, dst=1)
    received = torch.empty(3, dtype=torch.float64)
    dist.scatter(received, parts[::-1] if parts else None, src=1)
    return received


def _all_to_all_of_rows() -> Tensor:
    """Send rank + 1 rows of two elements to each rank."""
    size, rank = dist.get_world_size(), dist.get_rank()
    sent = _own(2 * sum(range(1, size + 1))).view(-1, 2)
    received = torch.empty(size * (rank + 1), 2, dtype=torch.float64)
    dist.all_to_all_single(received, sent, [rank + 1] * size, list(range(1, size + 1)))
    return received


def _pass_on_in_a_batch() -> Tensor:
    received = torch.empty(3, dtype=torch.float64)
    sending, receiving = dist.P2POp(dist.isend, _own(), _next()), dist.P2POp(dist.irecv, received, _before())
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    return received


def _pass_on_along_a_line() -> Tensor:
    rank, total = dist.get_rank(), _own()
    if rank > 0:
        received = torch.empty(3, dtype=torch.float64)
        dist.recv(received, rank - 1)
        total += received
    if rank < dist.get_world_size() - 1:
        dist.send(total, rank + 1)
    return total


def _exchange_objects() -> Tensor:
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    agreed = [objects if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(agreed)
    return torch.tensor([entry["rank"] for entry in agreed[0]])


def _train_with_ddp() -> Tensor:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)]).double())
    for _ in range(2):
        model(_own(8)).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def _mesh_and_groups() -> Tensor:
    mesh = dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("one", "two"))
    total = _own()
    for name in ("one", "two"):
        dist.all_reduce(total, group=mesh.get_group(name))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.all_reduce(total, group=alone)
    dist.destroy_process_group(alone)
    return total


def _deepspeed_and_functional() -> Tensor:
    deepspeed.init_distributed("gloo", dist_init_required=False)
    total = _own()
    deepspeed.comm.all_reduce(total)
    whole = functional.all_gather_tensor(total, 0, dist.group.WORLD)
    return functional.all_reduce(whole, "sum", dist.group.WORLD).clone()


def _coalesced() -> Tensor:
    tensors = [_own(), _own(5)]
    with dist._coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    return torch.cat(tensors)


PROGRAMS: list[Callable[[], Tensor]] = [
    *(
        partial(_reduce_all, op, dtype)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT)
        for dtype in (torch.float32, torch.int64, torch.uint8)
    ),
    *(
        _gather_all,
        _reduce_to_last,
        _broadcast,
        _gather_into_one,
        _gather_and_scatter,
        _all_to_all_of_rows,
        _pass_on_in_a_batch,
    ),
    *(_pass_on_along_a_line, _exchange_objects, _train_with_ddp, _mesh_and_groups, _deepspeed_and_functional),
    _coalesced,
]


def _run_all() -> list[Tensor]:
    return [program() for program in PROGRAMS]


@SIZES
def test_programs_compute_what_they_compute_on_gloo(world: Worlds, size: int) -> None:
    on_gloo, on_strict = (world(size).run(_run_all, backend=backend) for backend in ("gloo", "strict"))
    for rank in range(size):
        for program, wanted, found in zip(PROGRAMS, on_gloo[rank], on_strict[rank], strict=True):
            torch.testing.assert_close(found, wanted, msg=lambda text, program=program: f"{program}: {text}")


def _scale() -> tuple[Tensor, ...]:
    """Average and premultiply, out of place and in place, in 32 and 16 bits."""
    size, rank = dist.get_world_size(), dist.get_rank()
    average, premultiplied = _own(), _own(3, torch.float32)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    dist.all_reduce(premultiplied, dist._make_nccl_premul_sum(0.5))
    apart, whole = torch.empty(2, dtype=torch.bfloat16), _own(2 * size, torch.bfloat16)
    dist.reduce_scatter_tensor(apart, whole, dist._make_nccl_premul_sum(0.5))
    within = _own(2 * size)
    own = within[2 * rank : 2 * rank + 2]
    dist.reduce_scatter_tensor(own, within, dist.ReduceOp.AVG)
    scattered = own.clone()
    dist.all_gather_into_tensor(within, own)
    return average, premultiplied, apart, scattered, within


@SIZES
def test_averages_and_premultiplied_sums_scale(world: Worlds, size: int) -> None:
    mean = 10 * (size - 1) / 2
    for rank, (average, premultiplied, apart, scattered, within) in enumerate(world(size).run(_scale)):
        every, own = torch.arange(2 * size).double() + mean, slice(2 * rank, 2 * rank + 2)
        torch.testing.assert_close(average, every[:3] if size > 1 else average)
        torch.testing.assert_close(premultiplied, (every[:3] * size / 2).float())
        torch.testing.assert_close(apart, (every[own] * size / 2).bfloat16())
        torch.testing.assert_close(scattered, every[own])
        torch.testing.assert_close(within, every)


def _sum_and_average() -> list[float]:
    totals = [torch.ones(1), torch.ones(1)]
    dist.all_reduce(totals[0])
    dist.all_reduce(totals[1], dist.ReduceOp.AVG)
    return [float(total) for total in totals]


def test_sum_where_an_average_was_wanted_is_visible(world: Worlds) -> None:
    assert world(4).run(_sum_and_average) == [[4.0, 1.0]] * 4


def _uneven_half_and_bool() -> tuple[list[int], float, list[int]]:
    rank = dist.get_rank()
    parts = [torch.empty(1 + other) for other in range(dist.get_world_size())]
    dist.all_gather(parts, torch.full((1 + rank,), rank, dtype=torch.float32))
    small = torch.full((1,), 1.0 if rank == 0 else 2.0**-11, dtype=torch.float16)
    dist.all_reduce(small)
    either = torch.tensor([rank == 0, False])
    dist.all_reduce(either)
    return torch.cat(parts).int().tolist(), float(small), either.tolist()


def test_nccl_gathers_uneven_tensors_adds_halves_in_32_bits_and_joins_bools(world: Worlds) -> None:
    """Added one by one in 16 bits, the three small numbers would vanish."""
    wanted = ([0, 1, 1, 2, 2, 2, 3, 3, 3, 3], 1.0 + 2.0**-9, [True, False])
    assert world(4).run(_uneven_half_and_bool) == [wanted] * 4


def _describe(timeout: float) -> None:
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    assert dist.get_backend(group) == group.name() == "strict"
    assert backend.options._timeout.total_seconds() == timeout
    assert [device.type for device in group._device_types] == ["cpu"]
    assert group.group_name == dist.distributed_c10d._world.pg_names[group]
    calls = group._get_sequence_number_for_group()
    dist.barrier()
    assert group._get_sequence_number_for_group() == calls + 1
    with pytest.raises(RuntimeError, match="cuda"):
        group._get_backend(torch.device("cuda"))


def test_group_describes_itself(world: Worlds) -> None:
    world(2).run(_describe, 17.0, timeout=17.0)


# -- one order of calls ------------------------------------------------------------------------------------------------


def _call_in_another_order() -> list[str]:
    dist.barrier()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    tensor = torch.ones(3)

    def wander() -> None:
        dist.broadcast(tensor, 0)

    first = _caught(wander if is_last else lambda: dist.all_reduce(tensor))
    return [first, _caught(dist.barrier)]


@SIZES
def test_another_collective_on_one_rank_raises_on_all(world: Worlds, size: int) -> None:
    answers = world(size).run(_call_in_another_order)
    assert answers[0][0] == answers[-1][0], "the same text on all ranks"
    for first, later in answers:
        assert "rank 0: call 2, all_reduce(((3, 'torch.float32'),), ('op', 'SUM'))" in first
        assert f"rank {size - 1}: call 2, broadcast" in first
        assert "in wander" in first
        assert "barrier on group '0', which has failed" in later


def _call_with(shape: list[int], op: list[dist.ReduceOp.RedOpType], dtype: list[torch.dtype], root: list[int]) -> str:
    rank = dist.get_rank()
    tensor = torch.ones(shape[rank], dtype=dtype[rank])
    return _caught(lambda: dist.reduce(tensor, root[rank], op[rank]))


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"shape": [3, 4]}, "((4, 'torch.float32'),)"),
        ({"op": [dist.ReduceOp.SUM, dist.ReduceOp.MAX]}, "('op', 'MAX')"),
        ({"dtype": [torch.float32, torch.int32]}, "'torch.int32'"),
        ({"root": [0, 1]}, "('root', 1)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_different_arguments_raise_on_all(world: Worlds, changed: dict[str, Any], shown: str) -> None:
    same = {"shape": [3, 3], "op": [dist.ReduceOp.SUM] * 2, "dtype": [torch.float32] * 2, "root": [0, 0]}
    for message in world(2).run(_call_with, *{**same, **changed}.values()):
        assert shown in message
        assert "call different operations" in message


def _split_unevenly() -> str:
    sizes = [1, 3] if dist.get_rank() == 0 else [2, 2]
    return _caught(lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), sizes, sizes))


def test_splits_of_a_pair_that_differ_raise_on_both(world: Worlds) -> None:
    for message in world(2).run(_split_unevenly):
        assert "gives 3 and takes 3" in message
        assert "gives 2 and takes 2" in message


def _call_from_second_thread(uses_timer: bool) -> tuple[str, str]:
    dist.barrier()
    found: list[str] = []
    if dist.get_rank() == 0:

        def help_out() -> None:
            found.append(_caught(lambda: dist.all_reduce(torch.ones(1))))

        helper = threading.Timer(0.0, help_out) if uses_timer else threading.Thread(target=help_out)
        helper.name = "helper"
        helper.start()
        helper.join()
    else:
        found.append(_caught(lambda: dist.all_reduce(torch.ones(1))))
    return found[0], _caught(dist.barrier)


@SIZES
@pytest.mark.parametrize("uses_timer", [False, True], ids=["thread", "timer"])
def test_call_from_second_thread_raises_on_all(world: Worlds, size: int, uses_timer: bool) -> None:
    for answers in world(size).run(_call_from_second_thread, uses_timer):
        for message in answers:
            assert "Thread MainThread called from" in message
            assert "thread helper calls all_reduce from" in message
            assert "help_out" in message


def _use_a_group_in_its_own_thread() -> list[float]:
    group, totals = dist.new_group(), []

    def add() -> None:
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        totals.append(float(total))

    for _ in range(2):
        helper = threading.Thread(target=add)
        helper.start()
        dist.barrier()
        helper.join()
    return totals


def test_each_thread_may_have_its_own_group(world: Worlds) -> None:
    assert world(2).run(_use_a_group_in_its_own_thread) == [[2.0, 2.0]] * 2


def _call_in_backward() -> float:
    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return hidden.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            total = gradient.clone()
            dist.all_reduce(total)
            return total

    dist.barrier()
    weight = torch.ones(1, requires_grad=True)
    Add.apply(weight).backward()
    dist.barrier()
    assert weight.grad is not None
    return float(weight.grad)


def test_backward_may_call(world: Worlds) -> None:
    assert world(2).run(_call_in_backward) == [2.0, 2.0]


# -- results appear late, inputs are read late -------------------------------------------------------------------------


def _read_early() -> tuple[bool, int, list[float], list[int]]:
    floats, numbers = torch.ones(2), torch.ones(2, dtype=torch.int32)
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (floats, numbers)]
    time.sleep(0.05)  # the calls are executed without a wait, and still do not appear
    early = bool(floats.isnan().all()), int(numbers[0]) & 0xFFFFFFFF
    for work in works:
        work.wait()
    return *early, floats.tolist(), numbers.tolist()


@SIZES
def test_result_appears_after_the_wait(world: Worlds, size: int) -> None:
    assert world(size).run(_read_early) == [(True, 0xA5A5A5A5, [size] * 2, [size] * 2)] * size


def _ask_until_complete(way: str) -> float:
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True)
    if way == "is_completed":
        while not work.is_completed():
            time.sleep(0.001)
        return float(total)
    future = work.get_future()
    if way == "then":
        return float(future.then(lambda done: done.value()[0].clone()).wait())
    if way == "callback":
        future.add_done_callback(lambda done: done.wait())
        return float(total)
    if way == "value":
        future.wait()
        return float(future.value()[0])
    del work
    future.wait()
    return float(total)


@pytest.mark.parametrize("way", ["is_completed", "then", "callback", "value", "wait"])
def test_result_appears_for_who_asks(world: Worlds, way: str) -> None:
    assert world(2).run(_ask_until_complete, way) == [2.0, 2.0]


def _drop_the_work() -> tuple[bool, float]:
    lost, total = torch.ones(2), torch.ones(1)
    if dist.get_rank() == 0:
        dist.all_reduce(lost, async_op=True)
    else:
        dist.all_reduce(lost)
    dist.all_reduce(total)
    return bool(lost.isnan().all()), float(total)


@SIZES
def test_result_of_a_dropped_work_never_appears(world: Worlds, size: int) -> None:
    assert world(size).run(_drop_the_work) == [(True, size)] + [(False, size)] * (size - 1)


def _write_early(place: str) -> list[str]:
    dist.barrier()
    size, rank = dist.get_world_size(), dist.get_rank()
    given, taken = torch.ones(3), torch.empty(3 * size)
    if place == "in-place buffer":
        work = dist.all_reduce(given, async_op=True)
    else:
        work = dist.all_gather_into_tensor(taken, given, async_op=True)
    assert work is not None
    if rank == 0:
        {"output": taken, "input": given, "in-place buffer": given}[place][0] = 7.0
    return [_caught(work.wait), _caught(dist.barrier)]


@SIZES
@pytest.mark.parametrize("place", ["input", "output", "in-place buffer"])
def test_write_before_the_wait_raises_on_all(world: Worlds, size: int, place: str) -> None:
    for number, messages in enumerate(world(size).run(_write_early, place)):
        for message in messages if number == 0 else messages[1:]:
            assert "on rank 0 was written while the call was in flight" in message
            assert "_write_early" in message, "the stack of the launch"


def _use_memory_in_flight() -> tuple[str, str]:
    group = dist.new_group()
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    message = _caught(lambda: dist.all_reduce(tensor[1:2], group=group))
    assert work is not None
    work.wait()
    return message, _caught(lambda: dist.barrier(group))


def test_memory_in_flight_cannot_be_passed_to_another_call(world: Worlds) -> None:
    for message, later in world(2).run(_use_memory_in_flight):
        assert "group '0' has in flight" in message
        assert message in later


# -- what NCCL lacks ---------------------------------------------------------------------------------------------------


def _refused() -> list[str]:
    size, rank, peer = dist.get_world_size(), dist.get_rank(), _next()
    sparse, whole = torch.eye(2).to_sparse(), torch.ones(size)
    complex_numbers = torch.ones(2, dtype=torch.complex64)
    calls: list[Callable[[], Any]] = [
        lambda: dist.send(torch.ones(1), peer, tag=1),
        lambda: dist.recv(torch.ones(1)),
        lambda: dist.all_reduce(sparse),
        lambda: dist.all_reduce(torch.ones(2, 3).t()),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int16)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint8), dist.ReduceOp.BOR),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)),
        lambda: dist.reduce_scatter_tensor(complex_numbers, torch.ones(2 * size, dtype=torch.complex64)),
        lambda: dist.all_gather_into_tensor(whole, whole[(1 + rank) % size :][:1]),
        lambda: dist.all_to_all_single(whole, whole),
        dist.monitored_barrier,
    ]
    messages = []
    for call in calls:
        with pytest.raises((ValueError, TypeError, RuntimeError)) as refusal:
            call()
        messages.append(str(refusal.value))
    dist.all_reduce(complex_numbers)  # which torch views as real
    assert complex_numbers.tolist() == [size] * 2
    return messages


def test_what_nccl_lacks_is_refused(world: Worlds) -> None:
    words = "tag=1,any source,sparse,contiguous,int16,BOR,boolean,PreMulSum,complex,at its place,all-to-all,monitored"
    for messages in world(2).run(_refused):
        for word, message in zip(words.split(","), messages, strict=True):
            assert word in message


# -- point to point ----------------------------------------------------------------------------------------------------


def _cross_sends(length: int) -> str:
    def cross() -> None:
        dist.isend(torch.ones(length), 1 - dist.get_rank()).wait()  # type: ignore[union-attr]

    return _caught(cross)


def test_sends_that_cross_outside_a_batch_raise_on_both(world: Worlds) -> None:
    first, second = world(2).run(_cross_sends, 3)
    assert first == second
    assert first.count("gives [(3, 'torch.float32')] and takes []") == 2
    assert "in cross" in first


def _send_to_a_receiver_of(length: int) -> str:
    if dist.get_rank() == 0:
        return _caught(lambda: dist.send(torch.ones(2), 1))
    return _caught(lambda: dist.recv(torch.ones(length), 0))


def test_receive_of_another_size_raises_on_both(world: Worlds) -> None:
    for message in world(2).run(_send_to_a_receiver_of, 3):
        assert "gives [(2, 'torch.float32')] and takes []" in message
        assert "gives [] and takes [(3, 'torch.float32')]" in message


def _batches_of(orders: list[str]) -> list[float]:
    """Exchange 1 and 2 in both directions in one batch, in an order of each rank's own."""
    peer = 1 - dist.get_rank()
    sent, received = [torch.ones(1), torch.ones(1) * 2], [torch.zeros(1), torch.zeros(1)]
    operations = {
        **{f"s{n}": dist.P2POp(dist.isend, sent[n], peer) for n in (0, 1)},
        **{f"r{n}": dist.P2POp(dist.irecv, received[n], peer) for n in (0, 1)},
    }
    for work in dist.batch_isend_irecv([operations[name] for name in orders[dist.get_rank()].split()]):
        work.wait()
    return [float(tensor) for tensor in received]


def test_operations_of_a_batch_match_as_a_set(world: Worlds) -> None:
    assert world(2).run(_batches_of, ["s0 s1 r0 r1", "r0 s0 r1 s1"]) == [[1.0, 2.0]] * 2


def _leave_a_send_alone() -> tuple[str, str]:
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.isend(torch.ones(5), 1, group)
    return _caught(lambda: dist.destroy_process_group(group)), _caught(dist.barrier)


def test_unpaired_send_is_named_when_the_group_is_destroyed(world: Worlds) -> None:
    (message, later), *others = world(2).run(_leave_a_send_alone, timeout=5.0)
    assert "point to point" in message
    assert "_leave_a_send_alone" in message
    assert later == ""
    assert others == [("", "")]


# -- the life of a communicator ----------------------------------------------------------------------------------------


def _use_after(end: str) -> str:
    group = dist.new_group()
    dist.barrier(group)
    if end == "destroy":
        dist.destroy_process_group(group)
    else:
        group.abort()
    opts = dist.AllreduceOptions()
    return _caught(lambda: group.allreduce([torch.ones(1)], opts))


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_group_cannot_be_used_after(world: Worlds, end: str) -> None:
    for message in world(2).run(_use_after, end):
        assert "was destroyed" in message


def _abort_in_flight() -> str:
    group = dist.new_group()
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True) if dist.get_rank() == 0 else None
    if work is None:
        dist.barrier()
        return ""
    waiting = threading.Timer(0.2, group.abort)
    waiting.start()
    message = _caught(work.wait)
    waiting.join()
    dist.barrier()
    return message


def test_abort_ends_a_call_in_flight(world: Worlds) -> None:
    assert "all_reduce" in world(2).run(_abort_in_flight)[0]


def _stay_away() -> list[str]:
    dist.barrier()
    is_away = dist.get_rank() == dist.get_world_size() - 1
    messages = [] if is_away else [_caught(dist.barrier)]
    store = dist.distributed_c10d._get_default_store()
    store.add("came", 1)
    while is_away and store.add("came", 0) < dist.get_world_size():
        time.sleep(0.05)
    return messages


@SIZES
def test_rank_that_stays_away_is_named_after_the_timeout(world: Worlds, size: int) -> None:
    for messages in world(size).run(_stay_away, timeout=2.0)[:-1]:
        assert f"rank(s) [{size - 1}] of group '0' did not come within 2 s to barrier" in messages[0]


def _state() -> tuple[int, set[str], int]:
    threads = {thread.name for thread in threading.enumerate()}
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    return len(list(Path("/proc/self/fd").iterdir())), threads, keys


def _create_and_destroy() -> None:
    before, peer = _state(), 1 - dist.get_rank()
    for _ in range(3):
        group = dist.new_group()
        dist.all_reduce(torch.ones(1), group=group)
        work = dist.isend(torch.ones(1), peer, group) if peer else dist.irecv(torch.ones(1), peer, group)
        assert isinstance(work, StrictWork)
        work.wait()
        assert _state() != before
        dist.destroy_process_group(group)
    assert _state() == before


def test_destroyed_group_leaves_no_thread_or_file_or_key(world: Worlds) -> None:
    world(2).run(_create_and_destroy)


# -- waits that spin ---------------------------------------------------------------------------------------------------


def _spin() -> bool:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.get("busy")
        dist.all_reduce(torch.ones(1))
        return True
    seen: list[bool] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append(work.is_success()))

    def watch() -> None:
        start = time.process_time()
        while time.process_time() < start + 0.2:  # only the wait uses the processor
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGUSR2)
        store.set("busy", "")

    watcher = threading.Thread(target=watch)
    with spinning_waits():
        work = dist.all_reduce(torch.ones(1), async_op=True)
        watcher.start()
        assert isinstance(work, StrictWork)
        work.wait()
    watcher.join()
    signal.signal(signal.SIGUSR2, before)
    return seen == [True]  # the handler was not reached during the wait


def test_waits_can_spin_in_c(world: Worlds) -> None:
    assert world(2).run(_spin) == [True, True]


# -- backends of tests -------------------------------------------------------------------------------------------------


@pytest.mark.backends("gloo", "strict")
def test_a_test_runs_on_the_backends_of_its_marker(world: Worlds, backend: str) -> None:
    assert world(2).run(dist.get_backend) == [backend] * 2
