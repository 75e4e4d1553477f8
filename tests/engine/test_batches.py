"""Steps start on all ranks or on none, and peers that read different samples are named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, repeat
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ds_topo import PipelineModule, PipelineParallelGrid, ProcessTopology, initialize
from ds_topo.engine import samples
from ds_topo.engine.config import check_sections_and_sizes
from ds_topo.engine.pipelines import batches
from ds_topo.engine.pipelines.batches import ReadAhead, remaining
from ds_topo.engine.samples import FirstSamples, digest
from ds_topo.errors import DisagreementError, EndOfSamplesError
from tests.support.fake_world import fake_world
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
}


def _loader(samples: int, **options: Any) -> DataLoader[Any]:
    values = torch.arange(samples).float().reshape(-1, 1)
    return DataLoader(TensorDataset(values, values), **options)


def _generated(samples: int) -> Iterator[Any]:
    yield from _loader(samples)


class RepeatedSampler(torch.utils.data.Sampler[Any]):
    """A sampler without a length, such as timm's ``RepeatAugSampler`` for batches."""

    def __iter__(self) -> Iterator[Any]:
        return iter([0, 0, 1])


class Stream(torch.utils.data.IterableDataset[int]):
    """A stream of two samples whose length is an estimate."""

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_first_batches_are_noted_and_the_first_of_all_is_compared_with_the_config() -> None:
    telling = torch.arange(8.0).view(4, 2)
    for rank in (0, 1):
        with fake_world(rank, 2), PipelineParallelGrid("data=2") as grid:
            for batch, noted, is_named in (
                (telling, True, False),
                (telling.view(2, 4), True, False),
                (telling.view(1, 2, 4), True, True),
                (telling[:3], False, True),
                (torch.ones(4, 2), False, False),
                (torch.tensor(3.0), False, False),
                ((telling, torch.arange(3)), True, False),  # of several tensors, one has the samples
            ):
                first = FirstSamples(grid, 4)
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    for number in (1, 2, 2):
                        first.look_at_inputs(batch)
                        assert len(first._digests) == number
                        assert len(said) == (is_named and rank == 0), "once, before the second batch"
                assert [*map(bool, first._digests)] == [noted] * 2


def test_batches_of_a_pipeline_are_digested_until_both_comparisons_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[object] = []
    monkeypatch.setattr(samples, "digest", lambda samples: digested.append(samples) or 1)
    engine: Any = SimpleNamespace(module=SimpleNamespace(training=True))
    with fake_world(0, 2), PipelineParallelGrid("pipe=2") as grid:
        first = FirstSamples(grid, 4)
        for are_compared, in_step, number in ((False, None, 2), (True, None, 2), (True, [], 4)):
            first.are_compared, first._in_step = are_compared, in_step
            first.look_at_batch(engine, (torch.ones(4), torch.zeros(4)))
            assert len(digested) == number
        assert first._in_step == [(1, 1)]


@pytest.mark.parametrize(
    ("spec", "checks", "is_said"),
    [
        ("data=2", True, True),
        ("data=2", False, False),
        ("model=2", True, False),
        ("seq=2", True, False),
        ("data=2,seq=2", True, True),
        ("data=2,shard=2,seq=2", True, False),
    ],
)
def test_replicas_are_compared_if_there_are_some_and_a_group_joins_them(spec: str, checks: bool, is_said: bool) -> None:
    for rank in range(2):
        with fake_world(rank, 2 ** spec.count("=")), PipelineParallelGrid(spec) as grid:
            first = FirstSamples(grid, 4)
            first.look_at_inputs(torch.arange(8.0).view(4, 2))
            grid.check_samples = checks
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                first._compare_replicas()  # the stand-in for the other ranks has read the same
            assert len(said) == (is_said and rank == 0)


@pytest.mark.parametrize("changed", [{}, {"stages": 1}, {"batch_fn": print}, {"checks": False}, {"is_first": False}])
@pytest.mark.parametrize("only", ["", "slices", "curriculum"])
def test_shapes_are_read_where_a_step_needs_them(changed: dict[str, Any], only: str) -> None:
    case = {"stages": 2, "batch_fn": None, "checks": True, "is_first": True, **changed}
    grid = SimpleNamespace(get_axis_size=lambda axis: 1 + (only == "slices"), check_samples=case["checks"])
    engine: Any = SimpleNamespace(
        grid=grid,
        num_stages=case["stages"],
        batch_fn=case["batch_fn"],
        is_first_stage=lambda: case["is_first"],
        curriculum_learning_enabled=lambda: only == "curriculum",
    )
    assert batches._are_shapes_read(engine) == (not changed or (changed == {"is_first": False} and only != ""))


def test_remaining_counts_without_reading() -> None:
    assert remaining(iter([1, 2, 3])) == 3
    assert remaining(iter([])) == 0
    assert remaining(repeat(0, 5)) == 5
    assert remaining(iter(range(7))) == 7
    for endless in (repeat(0), cycle([1]), RepeatingLoader(_loader(1))):
        assert remaining(endless) > 10**9  # type: ignore[operator]
    loaders = (
        iter(_loader(10, batch_size=3)),
        iter(_loader(4, sampler=RepeatedSampler())),
        iter(_loader(4, batch_sampler=RepeatedSampler())),
        iter(DataLoader(Stream(), 2)),
    )
    for unknown in (_generated(2), zip([1], [2], strict=True), map(str, [1]), ReadAhead(_generated(2)), *loaders):
        assert remaining(unknown) is None
    ahead = ReadAhead(iter([1, 2, 3]))
    assert (ahead.first(), remaining(ahead)) == (1, 3)


def test_iterator_that_overwrites_earlier_micro_batches_is_refused() -> None:
    reused, label = torch.zeros(2), torch.ones(2)
    assert ReadAhead(iter([((reused,), label)] * 3)).fill(3) == 3
    ahead = ReadAhead(((reused.fill_(number),), label) for number in range(3))
    with pytest.raises(ValueError, match=r"yield new tensors, such as tensor\.clone\(\)"):
        ahead.fill(2)


def test_read_ahead_returns_every_element_once_in_order() -> None:
    ahead = ReadAhead(iter(range(5)))
    assert ahead.fill(2) == 2
    assert next(ahead) == 0
    assert ahead.fill(3) == 3
    assert ahead.fill(2) == 3
    assert list(ahead) == [1, 2, 3, 4]
    assert ahead.fill(1) == 0


def _engine() -> Any:
    torch.manual_seed(0)
    module = PipelineModule([nn.Linear(1, 1), nn.Linear(1, 1)], "pipe=2,data=2", loss_fn=_note_labels)
    return initialize(model=module, config=CONFIG)[0]


_labels: list[float] = []


def _note_labels(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    _labels.append(float(labels))
    return (outputs - labels).square().sum()


def _count_questions() -> list[int]:
    """Count the steps before which ranks agree, for every kind of iterator."""
    asked: list[Any] = []
    ask, batches._fewest = batches._fewest, lambda *args: asked.append(args) or ask(*args)
    counts = []
    try:
        for samples in (
            lambda: iter(_loader(8)),
            lambda: iter(list(_loader(8))),
            lambda: iter(RepeatingLoader(_loader(3))),
            lambda: _generated(8),
        ):
            engine, before, iterator = _engine(), len(asked), samples()
            _labels.clear()
            for _ in range(4):
                engine.train_batch(data_iter=iterator)
            if engine.is_last_stage():
                expected = [0, 1, 2, 0, 1, 2, 0, 1] if isinstance(iterator, RepeatingLoader) else list(range(8))
                assert _labels == expected
            counts.append(len(asked) - before)
            engine.module.mpu().destroy()
            engine.destroy()
    finally:
        batches._fewest = ask
    return counts


def test_ranks_agree_before_each_step(world: Worlds) -> None:
    assert world(4).run(_count_questions) == [[4, 4, 4, 4]] * 4


def _change_iterators() -> None:
    """After an endless iterator, a program may continue with one that ends; but all ranks make the same call."""
    engine = _engine()
    engine.train_batch(data_iter=iter(RepeatingLoader(_loader(2))))
    engine.train_batch(data_iter=_generated(2))
    with pytest.raises(EndOfSamplesError, match=r"has 1 of the 2.*no rank starts it"):
        engine.train_batch(data_iter=_generated(1))
    call, other = ("eval_batch", "train_batch") if engine.is_last_stage() else ("train_batch", "eval_batch")
    with pytest.raises(DisagreementError, match=rf"called {call}\(\), but other ranks of the pipeline {other}\(\)"):
        batches._require(engine, call, _generated(2), 2)
    engine.module.mpu().destroy()
    engine.destroy()


def test_an_iterator_that_ends_after_an_endless_one_is_noticed(world: Worlds) -> None:
    world(4).run(_change_iterators)


def _shorter_iterator_on_one_rank() -> int:
    """Leave a loader before its end, and continue with one that is too short on the last rank; count the steps."""
    engine = _engine()
    left_early, rank = iter(_loader(20)), dist.get_rank()
    for _ in range(2):
        engine.train_batch(data_iter=left_early)
    shorter = iter(_loader(4 if rank < 3 else 3))
    steps = _count_until(EndOfSamplesError, lambda: engine.train_batch(data_iter=shorter))
    engine.module.mpu().destroy()
    engine.destroy()
    return steps


def test_every_rank_raises_where_one_continues_with_a_shorter_iterator(world: Worlds) -> None:
    assert world(4).run(_shorter_iterator_on_one_rank) == [1] * 4


def _count_until(end: type[Exception], step: Callable[[], Any]) -> int:
    done = 0
    with suppress(end):
        while True:
            step()
            done += 1
    return done


def _train_to_the_end() -> tuple[int, int]:
    """Count the steps of training and of evaluation until samples end; then continue with another iterator."""
    engine = _engine()
    generated, given = _generated(5), iter(_loader(5))
    steps = _count_until(StopIteration, lambda: engine.train_batch(data_iter=given))
    evaluations = _count_until(EndOfSamplesError, lambda: engine.eval_batch(generated))
    engine.eval_batch(_generated(1), num_micro_batches=1)
    engine.set_dataiterator(_generated(4))
    for _ in range(2):
        engine.train_batch()
    with pytest.raises(EndOfSamplesError, match=r"rank 0 \(pipe=0, data=0\) has 0 of the 2"):
        engine.train_batch()
    engine.train_batch(data_iter=_generated(2))
    total = torch.ones(1)
    dist.all_reduce(total)
    engine.module.mpu().destroy()
    engine.destroy()
    return steps, evaluations


def test_end_of_samples_raises_on_all_ranks_and_training_continues(world: Worlds) -> None:
    assert world(4).run(_train_to_the_end) == [(2, 2)] * 4


# -- samples ---------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), float(index)), torch.full((4,), index / 32)


def _train_on_samples(kind: str, dealt_by: str) -> str | list[float]:
    start()
    grid = PipelineParallelGrid("data=2,model=2" if kind == "plain" else "pipe=2,data=2")
    data = Numbers()
    if dealt_by == "torch":
        loader: DataLoader[Any] = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    else:
        loader = grid.data_loader(data, 2, drop_last=True)
    grid.check_samples = dealt_by != "torch, meant"
    if dealt_by == "torch, meant":
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
    batches = iter(loader)
    found: list[float] = []
    try:
        if kind == "plain":
            engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings())
            for _ in range(4):
                inputs, labels = next(batches)
                loss = F.mse_loss(engine(inputs), labels)
                engine.backward(loss)
                engine.step()
                found.append(inputs[0, 0].item())
        else:
            module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
            engine, *_ = deepspeed.initialize(model=module, config=settings())
            found = [engine.train_batch(batches).item() for _ in range(2)]
    except DisagreementError as error:
        return str(error)
    finally:
        grid.destroy()
    return found


@pytest.mark.parametrize("kind", ["plain", "pipeline"])
def test_peers_that_read_different_samples_raise(world: Worlds, kind: str) -> None:
    for rank, message in enumerate(world(4).run(_train_on_samples, kind, "torch")):
        assert isinstance(message, str), "accepted in silence"
        assert f"rank {rank // 2 * 2 if kind == 'plain' else 0} (" in message
        assert "read different samples" in message
        assert "grid.sampler(dataset)" in message
    for losses in world(4).run(_train_on_samples, kind, "torch, meant"):
        assert isinstance(losses, list)
    for losses in world(4).run(_train_on_samples, kind, "the grid"):
        assert isinstance(losses, list)


def _first_warnings(spec: str, case: str, is_pipeline: bool) -> list[str]:
    """Train two steps; return what is said about samples and steps."""
    start()
    with PipelineParallelGrid(spec) as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        grid.check_samples = grid.check_weights = "meant" not in case
        module: nn.Module = nn.Linear(8, 8)
        if is_pipeline:
            module = PipelineModule([LayerSpec(nn.Linear, 8, 8)] * 2, grid=grid, loss_fn=F.mse_loss)
        engine, optimizer, *_ = initialize(model=module, mpu=None if is_pipeline else grid, config=settings())
        if "again" in case:  # with another engine's optimizer
            engine.destroy()
            config = {name: value for name, value in settings().items() if name != "optimizer"}
            engine, *_ = initialize(model=module, mpu=grid, config=config, optimizer=engine.basic_optimizer)
        for step in range(2):
            part = grid.get_axis_rank("seq") if "seq" in spec else 0
            seed = 100 * step + 10 * part + ("same" not in case) * grid.get_sample_rank()
            generator = torch.Generator().manual_seed(seed)
            inputs = [torch.randn(3 if "size" in case else 2, 8, generator=generator) for _ in range(2)]
            if "ones" in case:
                inputs = [torch.ones(2, 8) for _ in range(2)]
            if is_pipeline:
                engine.train_batch(iter([(each, each) for each in inputs]))
                continue
            for each in inputs:
                engine.backward(engine(each).square().mean())
                if "direct" in case:
                    optimizer.step()
                else:
                    engine.step()
        engine.destroy()
        ours = ("check_samples", "check_weights")
        return [str(each.message) for each in said if any(name in str(each.message) for name in ours)]


@pytest.mark.parametrize(("spec", "is_pipeline"), [("data=2", False), ("pipe=2,data=2", True), ("data=2,seq=2", False)])
def test_replicas_that_read_the_same_samples_are_named(world: Worlds, spec: str, is_pipeline: bool) -> None:
    size = 2 * spec.count("2")
    first, *others = world(size).run(_first_warnings, spec, "same samples", is_pipeline)
    assert ["all 2 replicas of" in text and "grid.sampler(dataset)" in text for text in first] == [True]
    assert not any(others), "the first rank says it"
    for case in ("other samples", "same samples, meant", "same ones"):
        assert not any(world(size).run(_first_warnings, spec, case, is_pipeline)), case


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_a_batch_of_another_size_is_named(world: Worlds, is_pipeline: bool) -> None:
    first, other = world(2).run(_first_warnings, "data=2", "another size", is_pipeline)
    assert ["[3, 8]" in text and "train_micro_batch_size_per_gpu is 2" in text for text in first] == [True]
    assert not other
    assert not any(world(2).run(_first_warnings, "data=2", "another size, meant", is_pipeline))


def test_a_step_of_the_optimizer_alone_is_named(world: Worlds) -> None:
    for said in world(2).run(_first_warnings, "data=2", "a direct step", False):
        assert ["optimizer.step() was called without engine.step()" in text for text in said] == [True]
    for case in ("a direct step, meant", "an optimizer, again"):
        assert not any(world(2).run(_first_warnings, "data=2", case, False)), case


UNLIKE: dict[str, tuple[Any, Any]] = {
    "values": (torch.arange(3), torch.arange(1, 4)),
    "shapes": (torch.ones(3), torch.ones(1, 3)),
    "types": (torch.ones(3), torch.ones(3, dtype=torch.bfloat16)),
    "one of several": ({"a": torch.ones(1), "b": [torch.ones(2)]}, {"a": torch.ones(1), "b": [torch.zeros(2)]}),
    "an order": ((torch.ones(1), torch.zeros(1)), (torch.zeros(1), torch.ones(1))),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_different_samples_have_different_digests(what: str) -> None:
    one, other = UNLIKE[what]
    assert digest(one) != digest(other)
    assert digest(one) == digest(copy.deepcopy(one)) > 0


@pytest.mark.parametrize(
    "nothing", [None, (), {"a": None}, "words", 3.0, torch.zeros(2, 3), (torch.zeros(1), torch.empty(0))], ids=repr
)
def test_unused_samples_have_no_digest(nothing: Any) -> None:
    assert digest(nothing) == 0


@pytest.mark.parametrize(
    "lawful",
    [
        torch.tensor(3.0),
        torch.ones(4, 4).t(),
        torch.ones(2).bfloat16(),
        torch.ones(1) > 0,
        torch._neg_view(torch.ones(2)),
        torch.full((2,), 1 + 2j).conj(),
    ],
)
def test_digest_ignores_layout_and_nesting(lawful: torch.Tensor) -> None:
    assert digest(lawful) == digest((lawful.clone().contiguous(),)) > 0


def _changed_at_random(labels: str) -> None:
    """Train on inputs that differ between stages."""
    start()
    with PipelineParallelGrid("pipe=2,data=2") as grid:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 2, grid=grid, loss_fn=F.mse_loss)
        engine, *_ = deepspeed.initialize(model=module, config=settings())
        noise = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            label = torch.ones(2, 4) if labels == "equal" or engine.is_first_stage() else torch.zeros(2, 4)
            label = torch.zeros(2, 4) if labels == "zero" else label
            engine.train_batch(iter([(torch.randn(2, 4, generator=noise), label)] * 2))
        engine.destroy()


@pytest.mark.parametrize("labels", ["equal", "zero", "on the first stage alone"])
def test_inputs_changed_on_the_first_stage_are_accepted(world: Worlds, labels: str) -> None:
    world(4).run(_changed_at_random, labels)


def _other_kinds_of_samples() -> None:
    start()
    with PipelineParallelGrid("pipe=2,model=2") as grid:
        module = nn.Linear(4, 4)
        module.is_pipeline_stage = True  # type: ignore[assignment]
        engine, *_ = deepspeed.initialize(model=module, mpu=grid, config=settings())
        stage, slice_ = grid.get_axis_rank("pipe"), grid.get_axis_rank("model")
        for _ in range(2):  # later stages get parts of sequences
            engine(torch.full((2, 4), float(stage * slice_)))
        engine.destroy()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine, *_ = deepspeed.initialize(model=TakesAnything(), mpu=grid, config=settings())
        engine(torch.ones(3, dtype=torch.cfloat).conj(), [nested, torch.eye(2).to_sparse(), torch.empty(0, 3), None])
        with pytest.raises(DisagreementError, match="read different samples"):
            engine({"phase": torch.full((3,), complex(0, grid.get_axis_rank("model"))).conj()})
        engine.destroy()


def _one_replica_alone() -> None:
    start()
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine, *_ = deepspeed.initialize(model=nn.Linear(4, 4), mpu=grid, config=settings())
        for _ in range(grid.get_sample_rank() + 1):  # such as a program that shows a first result without engine.eval()
            engine(torch.ones(2, 4))
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.destroy()


def test_a_replica_may_run_more_forward_passes_than_others(world: Worlds) -> None:
    world(4).run(_one_replica_alone)


class TakesAnything(nn.Module):
    """A module that accepts any arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *_: Any) -> torch.Tensor:
        return self.weight.sum()


def test_samples_of_all_types_are_compared_on_the_first_stage(world: Worlds) -> None:
    world(4).run(_other_kinds_of_samples)


@pytest.mark.parametrize("spec", ["pipe=2,data=3,seq=2", "model=2,data=3,pipe=2", "seq=3,data=2,+copies=2"])
def test_every_sample_is_distributed_once_and_to_all_peers(spec: str) -> None:
    world_size = ProcessTopology.from_spec(spec).world_size()
    shares: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(world_size):
        with fake_world(rank, world_size), PipelineParallelGrid(spec) as grid:
            count = grid.get_sample_world_size()
            sampler = grid.sampler(range(12 * count), seed=3)
            sampler.set_epoch(1)
            shares.setdefault(grid.get_sample_rank(), set()).add(tuple(sampler))
            loader = grid.data_loader(range(12 * count), 5, drop_last=True)
            assert [len(batch) for batch in loader] == [5, 5]
    assert all(len(orders) == 1 for orders in shares.values())
    dealt = [index for orders in shares.values() for index in next(iter(orders))]
    assert sorted(dealt) == list(range(len(dealt)))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6])
def test_steps_have_the_same_samples_at_any_number_of_replicas(replicas: int) -> None:
    size, start, steps = 12, 24, dict[int, set[int]]()
    for rank in range(replicas):
        with fake_world(rank, replicas), PipelineParallelGrid(f"data={replicas}") as grid:
            for first in (0, start):
                loader = grid.data_loader(range(60), size // replicas, shuffle=True, seed=3, start=first)
                loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
                assert len(loader) == (60 - first) // size
                for step, batch in enumerate(loader, first // size):
                    steps.setdefault(first * 100 + step, set()).update(batch.tolist())
                assert len([*loader]) == 5, "the next epoch is whole"
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4)).split(size)
    assert [steps[step] for step in range(5)] == [set(part.tolist()) for part in order]
    assert [steps[start * 100 + step] for step in range(2, 5)] == [steps[step] for step in range(2, 5)]


@pytest.mark.parametrize(
    ("spec", "arguments", "expected"),
    [
        ("data=4", {"train_batch_size": 32, "micro_batch_size": 8}, (8, 1)),
        ("data=2,model=2", {"train_batch_size": 32, "micro_batch_size": 8}, (8, 2)),
        ("data=2,pipe=2", {"train_batch_size": 20, "micro_batch_size": 4}, (2, 5)),
        ("data=2,shard=2", {"train_batch_size": 32, "micro_batch_size": 100}, (8, 1)),
        ("seq=4", {"train_batch_size": 14, "micro_batch_size": 4}, (2, 7)),
        ("data=4", {"train_batch_size": 32}, (8, 1)),
        ("data=4", {"train_batch_size": 32, "accumulation": 4}, (2, 4)),
        ("data=3", {"train_batch_size": 32, "micro_batch_size": 8}, "30 or 33 samples, or start 2 or 4 replicas"),
        ("data=3", {"train_batch_size": 32, "accumulation": 4}, "24 or 36 samples, or start 2 or 4 replicas"),
        ("data=4", {"train_batch_size": 2, "accumulation": 2}, "give 8 samples, or start 1 replicas"),
        ("data=4", {"train_batch_size": 3, "accumulation": 2}, "give 8 samples$"),
        ("data=4", {"train_batch_size": 0}, "train_batch_size=0: give a whole number, at least 1"),
        ("data=4", {"train_batch_size": 8, "micro_batch_size": 2.5}, "micro_batch_size=2.5: give a whole"),
    ],
)
def test_the_samples_of_a_step_are_divided_among_the_replicas(
    spec: str, arguments: dict[str, Any], expected: tuple[int, int] | str
) -> None:
    world_size = ProcessTopology.from_spec(spec).world_size()
    with fake_world(0, world_size), PipelineParallelGrid(spec) as grid:
        if isinstance(expected, str):
            with pytest.raises(ValueError, match=expected):
                grid.batch_sizes(**arguments)
        else:
            sizes = grid.batch_sizes(**arguments)
            assert (sizes["train_micro_batch_size_per_gpu"], sizes["gradient_accumulation_steps"]) == expected
            assert sizes["train_batch_size"] == arguments["train_batch_size"]
            check_sections_and_sizes(sizes, grid)


def _sizes_of_engine(spec: str) -> tuple[int, list[int]]:
    """Return the number of replicas, and the micro-batches of a step of an engine whose config leaves them out."""
    start()
    with PipelineParallelGrid(spec) as grid:
        grid.check_weights = False
        found = []
        for sizes in ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, grid.batch_sizes(16, 2)):
            config = {name: value for name, value in settings().items() if name != "gradient_accumulation_steps"}
            engine, *_ = initialize(model=nn.Linear(2, 2), mpu=grid, config={**config, **sizes})
            assert engine.train_batch_size() == 16
            found.append(engine.gradient_accumulation_steps())
            destroy_engine(engine)
        return grid.get_sample_world_size(), found


def test_accumulation_that_is_left_out_follows_from_the_replicas(world: Worlds) -> None:
    for spec in ("data=4", "data=2,model=2", "model=4"):
        for replicas, found in world(4).run(_sizes_of_engine, spec):
            assert found == [8 // replicas] * 2


def test_sampler_and_data_loader_refuse_invalid_arguments() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class StreamOfKnownLength(Stream):
        def __len__(self) -> int:
            return 3

    with fake_world(0, 4), PipelineParallelGrid("data=4") as grid:
        assert [len(batch) for batch in grid.data_loader(range(12), 2)] == [2, 1]
        for dataset in (Stream(), StreamOfKnownLength(), iter([1, 2])):
            with pytest.raises(TypeError, match="has no length"):
                grid.sampler(dataset)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the grid provides the sampler"):
            grid.data_loader(range(8), sampler=[0, 1])
        for start in (2, -4, 12, True, 4.0):
            with pytest.raises(ValueError, match="a multiple of 4 from 0 to 8"):
                grid.sampler(range(8), start=start)  # type: ignore[arg-type]


def _lists(count: int) -> list[Any]:
    return [(torch.full((1, 1), float(index)), torch.full((1, 1), float(index))) for index in range(count)]


def _of_one(source: Any) -> list[Any]:
    return [iter(source) for _ in range(6)]


STARTS: dict[str, tuple[bool, Callable[[], list[Any]]]] = {
    "a loader": (True, lambda: _of_one(_loader(9))),
    "a generator": (True, lambda: [_generated(9) for _ in range(6)]),
    "a list": (True, lambda: _of_one(_lists(9))),
    "a repeating loader": (True, lambda: [RepeatingLoader(_loader(9)) for _ in range(6)]),
    "other samples": (False, lambda: _of_one(_loader(9, shuffle=True))),
    "a loader of one step": (False, lambda: _of_one(_loader(2))),
    "a list of one step": (False, lambda: _of_one(_lists(2))),
    "a repeated step": (False, lambda: [RepeatingLoader(_loader(2)) for _ in range(6)]),
    "one batch": (False, lambda: _of_one(_lists(1) * 9)),
    "one loader": (False, lambda: _of_one(RepeatingLoader(_loader(9)))),
    "one iterator": (False, lambda: _of_one(iter(_loader(99)))),
    "one in each epoch": (False, lambda: [each for _ in range(3) for each in _of_one(iter(_loader(9)))[:2]]),
    "one after three": (True, lambda: [*_of_one(_lists(9))[:2], *_of_one(_generated(9))[:4]]),
}
"""Whether it is a mistake, and the iterators of six steps of two batches each."""


def _start_in_each_step() -> dict[str, tuple[list[str], list[float]]]:
    """Return the warnings, and the labels on the last stage, of each kind."""
    start()
    found = {}
    for kind, (_, passed) in STARTS.items():
        with PipelineParallelGrid("pipe=2") as grid, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            layers = [nn.Identity(), nn.Linear(1, 1)]
            engine, *_ = initialize(model=PipelineModule(layers, grid=grid, loss_fn=_note_labels), config=CONFIG)
            _labels.clear()
            for iterator in passed():
                engine.train_batch(iterator)
                engine.eval_batch(iter(_lists(3)), num_micro_batches=1)
            destroy_engine(engine)
        found[kind] = [str(each.message) for each in said if "new iterator" in str(each.message)], [*_labels]
    return found


@pytest.mark.thorough
def test_a_new_iterator_in_each_step_is_named_if_later_samples_are_never_read(world: Worlds) -> None:
    first, last = world(2).run(_start_in_each_step)
    assert {kind: len(said) for kind, (said, _) in first.items()} == {
        kind: int(each[0]) for kind, each in STARTS.items()
    }
    assert not any(said for said, _ in last.values())
    trained = {
        kind: [label for index, label in enumerate(labels) if index % 3 < 2] for kind, (_, labels) in last.items()
    }
    assert trained["one iterator"] == list(range(12)), "none is lost"
    assert trained["one loader"] == [index % 9 for index in range(12)]
    assert trained["one in each epoch"] == [0, 1, 2, 3] * 3
    assert trained["one after three"] == [0, 1, 0, 1, *range(8)]


def _epochs() -> dict[str, int]:
    """Train for three epochs while the samples of another loader are evaluated in each; count the warnings."""
    start()
    samples, found = TensorDataset(torch.randn(8, 1), torch.randn(8, 1)), {}
    for kind in ("shuffled", "own", "own, set", "set", "unshuffled", "evaluated"):
        with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine, _, own, _ = initialize(model=nn.Linear(1, 1), config=CONFIG, mpu=grid, training_data=samples)
            own.num_local_io_workers = 0
            loader = own if "own" in kind else grid.data_loader(samples, shuffle=kind != "unshuffled")
            evaluated = grid.data_loader(samples, shuffle=True)
            sampler = own.data_sampler if loader is own else loader.sampler
            for epoch in range(3):
                if "set" in kind:
                    sampler.set_epoch(epoch)
                batches_of_epoch = iter(loader)
                for _ in range(0 if kind == "evaluated" else len(loader)):
                    engine.backward(engine(next(batches_of_epoch)[0]).sum())
                    engine.step()
                assert len([*evaluated]) == 4
            destroy_engine(engine)
        found[kind] = len([each for each in said if "another epoch" in str(each.message)])
    return found


def test_a_forgotten_set_epoch_is_named(world: Worlds) -> None:
    none = dict.fromkeys(("shuffled", "own", "own, set", "set", "unshuffled", "evaluated"), 0)
    assert world(2).run(_epochs) == [{**none, "shuffled": 1, "own": 1}, none]


@pytest.mark.parametrize(
    ("samples", "options", "number"),
    [
        (7, {"batch_size": 4, "drop_last": True}, 1),
        (8, {"batch_size": 4, "drop_last": True}, 0),
        (7, {"batch_size": 4}, 0),
        (1, {"batch_size": 1, "drop_last": True}, 1),
        (0, {"batch_size": 1}, 0),
        (6, {"batch_size": 1, "start": 6}, 0),
    ],
)
def test_a_loader_without_a_batch_is_named(samples: int, options: dict[str, Any], number: int) -> None:
    for rank in range(2):
        with fake_world(rank, 2), PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = grid.data_loader(range(samples), **options)
            assert len([each for each in said if "too few" in str(each.message)]) == (number if rank == 0 else 0)
            assert (len(loader) == 0) == (number > 0 or samples in (0, 6))
