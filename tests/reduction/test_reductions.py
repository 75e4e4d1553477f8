"""Routes and reductions: scaling, types, two levels, and notes at the end of a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_topo import GradientReducer
from ds_topo.base import backends
from ds_topo.reduction import exchange, reductions
from ds_topo.reduction.buckets import GradientBucket
from ds_topo.reduction.options import ReductionOptions
from ds_topo.reduction.parameters import ParameterState, Route
from ds_topo.reduction.partitions import PartitionedGradients, PartitionLayout
from ds_topo.reduction.reductions import Reduction, StepNotes, assign_routes, scaling
from ds_topo.topology.rank_tables import RankGroup
from tests.support.fake_world import fake_world
from tests.support.reduced_model import (
    SMALL,
    alone,
    assert_close,
    assert_equal_on_all_ranks,
    gradients,
    model,
    tokens,
)
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", "strict")

CPU = torch.device("cpu")


def _reduced(**options: Any) -> dict[str, torch.Tensor | None]:
    module = model()
    reducer = GradientReducer(module, **SMALL | options)
    module(tokens(0, dist.get_rank())).backward()
    reducer.finish()
    return gradients(module)


def _scaled() -> None:
    average = _reduced()
    for options, factor in (
        ({"op": "sum"}, 2.0),
        ({"predivide_factor": 4.0}, 1.0),
        ({"divisor": 8}, 0.25),
        ({"op": "sum", "predivide_factor": 2.0}, 2.0),
    ):
        expected = {name: None if value is None else value * factor for name, value in average.items()}
        assert_close(_reduced(**options), expected)
    rounded = _reduced(communication_dtype=torch.bfloat16)
    assert_close(rounded, average, rtol=2e-2)
    assert not all(torch.equal(rounded[name], value) for name, value in average.items() if value is not None)
    assert_equal_on_all_ranks(rounded)


def test_scaling_options_and_communication_dtype(world: Worlds) -> None:
    world(2).run(_scaled)


def _native_ops() -> None:
    group = dist.group.WORLD
    with (
        mock.patch.dict(backends.TRAITS, {dist.get_backend(): backends.TRAITS["nccl"]}),
        mock.patch.object(dist, "_make_nccl_premul_sum", lambda factor: ("premul", factor), create=True),
    ):
        assert scaling(ReductionOptions(), 2, group, CPU) == (1.0, 1.0, dist.ReduceOp.AVG)
        assert scaling(ReductionOptions(), 8, group, CPU) == (1.0, 1.0, ("premul", 0.125)), (
            "experts: a group of 2 out of 8"
        )
        assert scaling(ReductionOptions(predivide_factor=4.0), 2, group, CPU) == (1.0, 2.0, ("premul", 0.25))
        assert scaling(ReductionOptions(op="sum"), 2, group, CPU) == (1.0, 1.0, dist.ReduceOp.SUM)
        assert scaling(ReductionOptions(), 2, group, CPU, is_flat=False) == (0.5, 1.0, dist.ReduceOp.SUM)
    assert scaling(ReductionOptions(), 2, group, CPU) == (0.5, 1.0, dist.ReduceOp.SUM)


def _native_ops_of_one_rank() -> None:
    with mock.patch.dict(backends.TRAITS, {dist.get_backend(): backends.TRAITS["nccl"]}):
        expert = scaling(ReductionOptions(), 4, dist.group.WORLD, CPU)
    assert expert == (0.25, 1.0, dist.ReduceOp.SUM), "no collective multiplies in a group of one"


def test_scaling_in_a_group_of_one_rank_uses_no_native_operation(world: Worlds) -> None:
    world(1).run(_native_ops_of_one_rank)


@pytest.mark.backends("gloo")
def test_scaling_on_nccl_uses_native_operations(world: Worlds) -> None:
    world(2).run(_native_ops)


def _bf16_accumulated_wide() -> None:
    """Add many small bf16 gradients; in bf16 the sum would stop growing."""
    count = 300
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    reducer = GradientReducer(module, accumulation_dtype=torch.float32)
    for _ in range(2):
        for index in range(count):
            with reducer.no_sync() if index < count - 1 else nullcontext():
                module(torch.full((1, 4), 1.0 + dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
        reducer.finish()
        assert torch.equal(module.weight.main_grad, torch.full((4, 4), 1.5 * count))
        assert module.weight.grad.dtype == torch.bfloat16
        assert torch.equal(module.weight.grad, torch.full((4, 4), 1.5 * count, dtype=torch.bfloat16))
        module.zero_grad()


def test_bf16_gradients_accumulate_in_fp32(world: Worlds) -> None:
    world(2).run(_bf16_accumulated_wide)


def _two_level() -> None:
    """Pretend to run on two hosts with two ranks each."""
    rank = dist.get_rank()
    with mock.patch("socket.gethostname", return_value=f"host{rank // 2}"):
        module = model(seed=rank)
        reducer = GradientReducer(module, **SMALL | {"two_level": True})
        assert reducer.uses_two_levels
        for step in range(3):
            module.zero_grad()
            module(tokens(10 * step, rank)).backward()
            reducer.finish()
            assert_equal_on_all_ranks(gradients(module))
            assert_close(gradients(module), alone(step, 1, 4))
        report = reducer.report()
        reducer.detach()
        chosen = GradientReducer(model(), bucket_bytes=1000)  # measured: all ranks choose alike
        choices: list[bool] = [False] * 4
        dist.all_gather_object(choices, chosen.uses_two_levels)
        assert len(set(choices)) == 1
        chosen.detach()
        assert [step.buckets[0].index for step in report.steps] == [0, 0, 0]
    with pytest.raises(ValueError, match="two_level=True: the group must span at least two hosts"):
        GradientReducer(model(), two_level=True)


def test_two_level_gradients_equal_those_of_one_process(world: Worlds) -> None:
    world(4).run(_two_level)


def _bucket_bytes() -> list[int]:
    module = nn.Linear(2, 2)
    sizes = []
    for slow_link_seconds in (0.0, 1e9):
        with mock.patch.object(reductions, "_SLOW_LINK_SECONDS", slow_link_seconds):
            reducer = GradientReducer(module)
            sizes.append(reducer._dense.bucket_bytes)
            reducer.detach()
    return sizes


def test_bucket_bytes_follow_the_measured_link(world: Worlds) -> None:
    assert world(2).run(_bucket_bytes) == [[4 << 20, 25 << 20]] * 2


# -- reductions of one bucket, in one process ----------------------------------------------------------------------


def _state(index: int = 0, numel: int = 4, **marks: Any) -> ParameterState:
    parameter = nn.Parameter(torch.zeros(numel))
    for name, mark in marks.items():
        setattr(parameter, name, mark)
    return ParameterState(index, f"p{index}", parameter, torch.float32)


def _bucket(values: torch.Tensor, route: Route) -> GradientBucket:
    """Build a bucket with one gradient."""
    state = _state(numel=len(values))
    state.dtype, state.route = values.dtype, route
    bucket = GradientBucket(3, [state])
    bucket.install()
    bucket.flat[: len(values)] = values
    return bucket


def _route(after: float = 1.0, **more: Any) -> Route:
    given = {"op": dist.ReduceOp.SUM, "communication_dtype": None, "bucket_bytes": 1} | more
    return Route("data", dist.group.WORLD, backends.TRAITS["gloo"], 1.0, after, **given)


class _Sent:
    """A fake ``dist.Work``; its future is completed by the test."""

    def __init__(self) -> None:
        self.future: torch.futures.Future[None] = torch.futures.Future()
        self.wait, self.get_future = mock.Mock(), lambda: self.future


@contextmanager
def _recorded_sums(factor: float = 1.0) -> Iterator[list[tuple[torch.Tensor, Any, _Sent]]]:
    """Replace ``all_reduce`` by a multiplication, and record its calls."""
    sums: list[tuple[torch.Tensor, Any, _Sent]] = []

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Sent:
        assert async_op, "reductions are asynchronous"
        assert group is dist.group.WORLD
        sums.append((tensor, op, _Sent()))
        tensor.mul_(factor)
        return sums[-1][2]

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield sums


def _soon(happens: Callable[[], bool]) -> bool:
    """Wait up to ten seconds for another thread; return True if the condition becomes true."""
    end = time.monotonic() + 10
    while not happens() and time.monotonic() < end:
        time.sleep(0.001)
    return happens()


VALUES = torch.tensor([1.0, 2.0, 3.0, 5.0])


def test_bucket_is_summed_and_scaled_once() -> None:
    for after in (1.0, 0.25):
        with fake_world(0, 2), _recorded_sums(2.0) as sums:
            route = _route(after, op=dist.ReduceOp.AVG)
            bucket = _bucket(VALUES, route)
            reduction = Reduction(bucket)
            [(_, _, work)] = sums
            assert not work.wait.called, "the reduction is in flight"
            reduction.wait()
            assert work.wait.called
        assert torch.equal(bucket.flat, VALUES * 2 * after)
        assert sums[0][0] is bucket.flat, "no copy"
        assert sums[0][1] == dist.ReduceOp.AVG
    with fake_world(0, 1), _recorded_sums() as sums:
        bucket = _bucket(VALUES, _route(0.25))
        Reduction(bucket).wait()
        assert torch.equal(bucket.flat, VALUES * 0.25), "a single rank only scales"
        assert not sums


def test_communication_dtype_applies_to_real_gradients_only() -> None:
    with fake_world(0, 2), _recorded_sums() as sums:
        for values in (VALUES / 3, VALUES.to(torch.complex64) / 3):
            bucket = _bucket(values, _route(communication_dtype=torch.bfloat16))
            Reduction(bucket).wait()
            is_sent_narrow = sums[-1][0].dtype == torch.bfloat16
            assert is_sent_narrow is not values.is_complex()
            assert torch.equal(bucket.flat, values.bfloat16().float() if is_sent_narrow else values)


def test_bucket_is_timed_from_launch_to_end_of_sum() -> None:
    with fake_world(0, 2), _recorded_sums() as sums:
        early, late = Reduction(_bucket(VALUES, _route())), Reduction(_bucket(VALUES, _route()))
        sums[0][2].future.set_result(None)
        for reduction in (early, late):
            reduction.wait()
        for timing in (early.timing, late.timing):
            assert 0 < timing.launched_ns <= timing.wait_started_ns <= timing.wait_ended_ns
            assert (timing.index, timing.nbytes, timing.parameters, timing.label) == (3, 16, 1, "data")
        assert early.timing.launched_ns <= early.timing.done_ns <= early.timing.wait_started_ns
        assert late.timing.done_ns == late.timing.wait_ended_ns


@pytest.mark.parametrize(("device", "is_noticed"), [("cpu", True), ("cuda", False)])
def test_result_of_backend_that_counts_writes_is_no_write_of_the_program(device: str, is_noticed: bool) -> None:
    dist.init_process_group("cpu:gloo,cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    traits = backends.traits_of(dist.group.WORLD, torch.device(device))  # on GPUs gloo copies the result to the bucket
    dist.destroy_process_group()
    with fake_world(0, 2), _recorded_sums():
        bucket = _bucket(VALUES, replace(_route(), traits=traits))
        reduction = Reduction(bucket)
        bucket.flat.mul_(2)
        assert reduction.was_overwritten is is_noticed


def test_two_level_padding_is_sent_but_not_copied_back() -> None:
    def all_reduce(tensor: torch.Tensor) -> Any:
        sent.append(tensor)
        tensor.mul_(2)
        return mock.Mock(**{"wait.return_value": 1234})

    sent: list[torch.Tensor] = []
    levels: Any = SimpleNamespace(all_reduce=all_reduce, slices=1)
    for slices in (3, 4):
        with fake_world(0, 2):
            bucket = _bucket(VALUES, _route(exchange=levels))
            levels.slices = slices
            reduction = Reduction(bucket)
            reduction.wait()
        assert torch.equal(bucket.flat, VALUES * 2)
        assert reduction.timing.done_ns == 1234
        assert not reduction.was_overwritten
        levels.slices = 1
    assert torch.equal(sent[0], torch.cat([VALUES * 2, torch.zeros(2)]))
    assert sent[1] is bucket.flat


# -- routes, in one process ----------------------------------------------------------------------------------------


def test_experts_are_averaged_over_all_replicas_and_only_used_links_are_measured() -> None:
    with fake_world(0, 8):
        used, unused = dist.new_group([0, 1]), dist.new_group([0, 2])
        options = ReductionOptions(expert_groups={"used": used, "unused": unused}, communication_dtype=torch.bfloat16)
        states = [_state(0), _state(1, allreduce=False, group_name="used"), _state(2)]
        measured: list[object] = []

        def measure(group: object, device: torch.device) -> int:
            measured.append(group)
            return 1000 * len(measured)

        with mock.patch.object(reductions, "suitable_bucket_bytes", measure):
            dense = assign_routes(states, options, dist.group.WORLD, CPU)
        of_each = [state.route for state in states]
        assert [route.label for route in of_each] == ["data", "experts of used", "data"]
        assert of_each[0] is of_each[2] is dense
        assert [route.group for route in of_each[:2]] == measured == [dist.group.WORLD, used]
        assert [route.bucket_bytes for route in of_each[:2]] == [1000, 2000]
        assert [route.size for route in of_each[:2]] == [8, 2]
        assert {(route.before, route.after, route.communication_dtype) for route in of_each} == {
            (1 / 8, 1.0, torch.bfloat16)
        }
        with (
            mock.patch.dict(backends.TRAITS, {dist.get_backend(): backends.TRAITS["nccl"]}),
            mock.patch.object(reductions, "premultiplied_sum"),
        ):
            options = ReductionOptions(bucket_bytes=77)
            dense = assign_routes(states[::2], options, dist.group.WORLD, CPU)
        assert (dense.before, dense.after, dense.op, dense.bucket_bytes) == (1.0, 1.0, dist.ReduceOp.AVG, 77)


@pytest.mark.parametrize(
    ("wish", "is_faster", "uses", "measures"),
    [(True, False, True, False), (None, True, True, True), (None, False, False, True), (False, True, False, False)],
)
def test_two_levels_are_used_if_wanted_or_faster(
    wish: bool | None, is_faster: bool, uses: bool, measures: bool
) -> None:
    made = mock.Mock(slices=3)

    def measure(ways: Sequence[Callable[[], object]], *_: object) -> list[float]:
        ways[1]()
        return [1.0, 0.5 if is_faster else 2.0]

    hosts = ["a", "a", "a", "b", "b", "b"]
    with (
        fake_world(0, 6),
        mock.patch.object(reductions, "gathered", return_value=hosts) as asked,
        mock.patch.object(exchange, "two_level_exchange", return_value=made),
        mock.patch.object(reductions, "_best_seconds", measure),
    ):
        for bucket_bytes, numel in ((1000, 249), (1, 3)):
            options = ReductionOptions(two_level=wish, bucket_bytes=bucket_bytes)
            dense = assign_routes([_state()], options, dist.group.WORLD, CPU)
            assert (dense.exchange is made) is uses
            assert made.all_reduce.called is measures
            assert not measures or len(made.all_reduce.call_args.args[0]) == numel, "what fits a bucket, split evenly"
    assert asked.called is (wish is not False)
    assert made.rest.called is (measures and not is_faster)


def test_a_stage_without_trainable_parameters_measures_no_levels() -> None:
    with fake_world(0, 4), mock.patch.object(reductions, "gathered", return_value=["a", "a", "b", "b"]):
        assert assign_routes([], ReductionOptions(bucket_bytes=10), dist.group.WORLD, CPU).exchange is None


def test_two_levels_are_refused_if_the_placement_has_none() -> None:
    with fake_world(0, 4), mock.patch.object(reductions, "gathered", return_value=["a"] * 4):
        options = ReductionOptions(bucket_bytes=10)
        dense = assign_routes([_state()], options, dist.group.WORLD, CPU)
        assert dense.exchange is None
        options = ReductionOptions(bucket_bytes=10, two_level=True)
        with pytest.raises(ValueError, match="two_level=True: the group must span"):
            assign_routes([_state()], options, dist.group.WORLD, CPU)


# -- two levels, in one process ------------------------------------------------------------------------------------


HOSTS = {0: "a", 1: "b", 2: "a", 3: "b"}


def test_two_level_groups_do_not_depend_on_the_order_of_hosts() -> None:
    with (
        fake_world(2, 4),
        mock.patch.object(exchange, "ProcessGroups") as made,
        mock.patch.object(exchange, "CollectiveExchange"),
    ):
        for hosts in (HOSTS, dict(reversed(HOSTS.items()))):
            exchange.two_level_exchange(dist.group.WORLD, hosts, CPU)
    first, second = made.call_args_list
    assert first == second
    assert first.args[1:3] == (
        [RankGroup(("inside host",), (0, 2)), RankGroup(("across hosts",), (2, 3))],
        [0, 1, 2, 3],
    )


def test_two_levels_on_an_accelerator_use_a_side_stream() -> None:
    events = mock.Mock(spec=["query"])
    stream = mock.Mock(**{"after_current.return_value": nullcontext(), "mark.return_value": events})
    with (
        fake_world(0, 4),
        mock.patch.dict(backends.TRAITS, fake=replace(backends.TRAITS["nccl"], communicates=False)),
        mock.patch.object(exchange, "SideStream", return_value=stream) as made,
        mock.patch.object(exchange, "order_after") as ordered,
        mock.patch.object(dist, "reduce_scatter_tensor", lambda *_, group: order.append(("scatter", group))),
        mock.patch.object(dist, "all_reduce", lambda *_, group: order.append(("cross", group))),
        mock.patch.object(dist, "all_gather_into_tensor", lambda *_, group, **__: order.append(("gather", group))),
    ):
        order: list[tuple[str, dist.ProcessGroup]] = []
        levels = exchange.two_level_exchange(dist.group.WORLD, HOSTS, CPU)
        tensor = torch.ones(4)
        pending = levels.all_reduce(tensor)
        assert [name for name, _ in order] == ["scatter", "cross", "gather"]
        assert [dist.get_process_group_ranks(group) for _, group in order] == [[0, 2], [0, 1], [0, 2]]
        made.assert_called_once_with(CPU)
        stream.after_current.assert_called_once_with(tensor), "after what fills the bucket; its memory stays"
        events.query.return_value = False
        assert not pending.is_done()
        assert not ordered.called
        pending.wait()
        ordered.assert_called_once_with(events, CPU), "the stream that reads the sum waits for it"
        levels.rest()
        assert len(dist.distributed_c10d._world.pg_map) == 1, "its groups are destroyed"


# -- notes at the end of a step ------------------------------------------------------------------------------------


def _notes(
    of: Sequence[set[str]], late: Sequence[set[str]], *, failed: int = -1, ahead: int | None = None
) -> list[StepNotes]:
    """Make the notes of several ranks in turn."""
    members = [_state(10 - place) for place in range(5)]
    for state, name in zip(members, ("everywhere", "some", "nowhere", "late", "all late"), strict=True):
        state.name = name
    route = _route()
    return [
        StepNotes(
            members,
            route,
            {state.index for state in members if state.name in of[rank]},
            {state.index for state in members if state.name in late[rank]},
            failed=rank == failed,
            prefers_to_defer=rank > 0,
            step=255 + (rank == ahead),
        )
        for rank in range(len(of))
    ]


@contextmanager
def _summed_over(ranks: int) -> Iterator[list[list[torch.Tensor]]]:
    """Sum the vectors of several ranks that a test makes one after the other in this process.

    Yields the rounds: the first has the headers of all ranks, and so on.
    """
    calls: list[torch.Tensor] = []
    rounds: list[list[torch.Tensor]] = []

    def all_reduce(numbers: torch.Tensor, group: object, async_op: bool = False) -> Any:
        calls.append(numbers)
        if len(calls) == ranks:
            total = torch.stack(calls).sum(0)
            rounds.append([each.copy_(total) for each in calls])
            calls.clear()
        return mock.Mock()

    with fake_world(0, ranks), mock.patch.object(dist, "all_reduce", all_reduce):
        yield rounds


UNUSED = [{"some", "nowhere"}, {"nowhere"}, {"nowhere"}]
LATE = [{"late", "all late"}, {"all late"}, {"all late", "nowhere"}]


def _read(notes: Sequence[StepNotes], *, all_read: bool = True) -> Sequence[StepNotes]:
    """Read the notes of all ranks at once, each in a thread, because a sum ends when all have joined."""
    for note in notes:
        note.settle()
    together = threading.Barrier(len(notes))

    def all_reduce(numbers: torch.Tensor, group: object) -> None:
        vectors.append(numbers)
        together.wait(10)
        total = torch.stack(vectors[: len(notes)]).sum(0)
        together.wait(10)
        numbers.copy_(total)

    vectors: list[torch.Tensor] = []
    with mock.patch.object(dist, "all_reduce", all_reduce), ThreadPoolExecutor(len(notes)) as threads:
        list(threads.map(lambda note: note.read(all_read=all_read), notes))
    return notes


@pytest.mark.parametrize("ahead", [None, 0, 2], ids=["alike", "the first rank is ahead", "the last rank is ahead"])
def test_notes_count_unused_and_late_parameters_and_compare_steps(ahead: int | None) -> None:
    with _summed_over(3) as rounds:
        notes = _notes(UNUSED, LATE, ahead=ahead)
        assert all(note.are_unusual for note in notes)
        for counts in _read(notes):
            assert [state.name for state in counts.unused_anywhere] == ["some", "nowhere"]
            assert [state.name for state in counts.unused_everywhere] == ["nowhere"]
            assert [state.name for state in counts.late] == ["nowhere", "late", "all late"]
            assert (counts.unusual, counts.failed, counts.prefer_to_defer) == (3, 0, 2)
            assert counts.steps_differ == (ahead is not None)
        assert len(rounds[0][0]) == 5


def test_ordinary_notes_are_five_numbers() -> None:
    with _summed_over(3) as rounds:
        notes = _notes([set()] * 3, [set()] * 3, failed=1)
        (counts, *_) = _read(notes)
        assert [len(vector) for vector in rounds[0]] == [5] * 3
        assert len(rounds) == 1
    assert (counts.unusual, counts.failed, counts.are_named) == (0, 1, True)
    assert not counts.unused_anywhere
    assert not counts.late


@pytest.mark.parametrize(("failed", "all_read"), [(2, True), (-1, False)])
def test_parameters_are_not_summed_unless_all_ranks_join(failed: int, all_read: bool) -> None:
    """A rank that failed does not read the notes, and on a GPU most ranks read them in the next step."""
    with _summed_over(3) as rounds:
        notes = _notes([{"some"}, set(), set()], [set()] * 3, failed=failed)
        for counts in _read(notes, all_read=all_read):
            assert counts.unusual == 1
            assert counts.are_named == (failed >= 0)
            assert not counts.unused_anywhere
        assert len(rounds) == 1


def test_notes_of_30000_ranks_do_not_overflow() -> None:
    ranks, state = 30_000, _state()
    for late, unused in (((), ()), ((0,), ()), ((), (0,)), ((0,), (0,))):
        with fake_world(0, ranks), mock.patch.object(dist, "all_reduce", lambda counts, **_: counts.mul_(ranks)):
            counts = StepNotes([state], _route(), unused, late, failed=False, prefers_to_defer=False, step=255)
            counts.read(all_read=True)
        assert [*counts.late] == ([state] if late else [])
        assert [*counts.unused_everywhere] == [*counts.unused_anywhere] == ([state] if unused else [])
        assert (counts.failed, counts.prefer_to_defer, counts.steps_differ) == (0, 0, False)


@pytest.mark.parametrize("is_whole", [False, True])
def test_regions_that_every_rank_needs_whole_are_summed_whole(is_whole: bool) -> None:
    layout = PartitionLayout.balanced([4], [(0,)], 2)
    with fake_world(0, 2), _recorded_sums(2.0) as sums:
        parameter, world = nn.Parameter(torch.zeros(4)), dist.group.WORLD
        whole = [0] if is_whole else []
        gradients = PartitionedGradients([parameter], layout, world, torch.float32, whole=whole)
        state = ParameterState(0, "p0", parameter, torch.float32, partition=gradients)
        state.route, parameter.grad = _route(), VALUES.clone()
        bucket = gradients.bucket(0, [state])
        bucket.install()
        bucket.complete()
        with mock.patch.object(gradients, "start_sum") as start_sum:
            Reduction(bucket).wait()
        assert start_sum.call_count == (not is_whole)
        assert len(sums) == is_whole
        if is_whole:
            assert torch.equal(gradients.place_of(parameter), VALUES * 2)
