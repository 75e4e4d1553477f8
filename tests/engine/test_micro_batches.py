"""Pipelines start a step on all ranks or on none, ask seldom whether they can, and lose no sample by asking."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, repeat
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import RepeatingLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ds_topo import EndOfSamplesError, PipelineModule, initialize
from ds_topo.engine import micro_batches
from ds_topo.engine.micro_batches import ReadAhead, remaining
from tests.support.world import Worlds

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


def test_what_is_left_is_known_without_reading() -> None:
    loader = iter(_loader(10, batch_size=3))
    next(loader)
    assert remaining(loader) == 3
    assert remaining(iter([1, 2, 3])) == 3
    assert remaining(repeat(0, 5)) == 5
    assert remaining(iter(range(7))) == 7
    for endless in (repeat(0), cycle([1]), RepeatingLoader(_loader(1))):
        assert remaining(endless) > 10**9  # type: ignore[operator]
    for unknown in (_generated(2), zip([1], [2], strict=True), map(str, [1]), ReadAhead(iter([1]))):
        assert remaining(unknown) is None


def test_what_was_read_ahead_comes_first_and_once() -> None:
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
    """Steps that asked all ranks, for every kind of iterator."""
    asked: list[Any] = []
    ask, micro_batches._fewest = micro_batches._fewest, lambda *args: asked.append(args) or ask(*args)
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
        micro_batches._fewest = ask
    return counts


def test_ranks_are_asked_when_what_they_had_is_used_up(world: Worlds) -> None:
    assert world(4).run(_count_questions) == [[1, 1, 1, 4]] * 4


def _change_iterators() -> None:
    """Nobody asks on for ever after an endless iterator: a program may go on with another."""
    engine = _engine()
    before, micro_batches._MOST_STEPS = micro_batches._MOST_STEPS, 3
    try:
        engine.train_batch(data_iter=iter(RepeatingLoader(_loader(2))))
        assert micro_batches._steps_promised[engine] == 2
        for _ in range(2):
            engine.train_batch(data_iter=_generated(2))
        with pytest.raises(EndOfSamplesError, match="has 1 of the 2"):
            engine.train_batch(data_iter=_generated(1))
    finally:
        micro_batches._MOST_STEPS = before
    engine.module.mpu().destroy()
    engine.destroy()


def test_another_iterator_is_asked_about(world: Worlds) -> None:
    world(4).run(_change_iterators)


def _count_until(end: type[Exception], step: Callable[[], Any]) -> int:
    done = 0
    with suppress(end):
        while True:
            step()
            done += 1
    return done


def _train_to_the_end() -> tuple[int, int]:
    """Steps of training and of evaluation that were made before samples ended; another iterator goes on."""
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


def test_samples_that_end_are_noticed_by_all_ranks_and_training_goes_on(world: Worlds) -> None:
    assert world(4).run(_train_to_the_end) == [(2, 2)] * 4
