"""``check_replicas`` finds differences between replicas in every engine, and reports nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ds_topo import PipelineParallelGrid, check_replicas, initialize
from ds_topo.engine import replica_comparison as replicas
from ds_topo.errors import DisagreementError, ReplicaError
from tests.support import small_engines
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.gpt_training import pipeline, plain_engine, train
from tests.support.moe_training import Case, trainer
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

Engines = Iterator[tuple[Any, Callable[[int], object]]]
OVERLAPPED = {"gradient_reducer": {"overlap_parameters": True}}


@contextmanager
def _plain(topology: str, zero: int, **more: Any) -> Engines:
    with plain_engine(topology, {"zero_optimization": {"stage": zero}, **more}) as (engine, grid):
        yield engine, lambda step: train(engine, grid, [step])


@contextmanager
def _pipeline(topology: str, zero: int, **more: Any) -> Engines:
    with pipeline(topology, zero, **more) as (engine, grid):
        yield engine, lambda step: train(engine, grid, [step])


@contextmanager
def _experts(topology: str, zero: int, **options: Any) -> Engines:
    with trainer(Case(topology, (2, 0, 2), zero, **options)) as trained:
        yield trained.engine, lambda step: trained.train(range(step, step + 1))


KINDS = {
    "plain 0": lambda: _plain("data=2,model=2", 0),
    "plain 1": lambda: _plain("model=2,data=2", 1, **OVERLAPPED),
    "plain 2": lambda: _plain("data=2,model=2", 2, **OVERLAPPED),
    "bf16": lambda: _plain("data=2,model=2", 0, bf16={"enabled": True}),
    "bf16 1": lambda: _plain("data=4", 1, bf16={"enabled": True}),
    "pipeline 0": lambda: _pipeline("pipe=2,data=2", 0),
    "pipeline 1": lambda: _pipeline("data=2,pipe=2", 1, **OVERLAPPED),
    "pipeline of slices": lambda: _pipeline("pipe=2,model=2", 0),
    "bf16 pipeline": lambda: _pipeline("pipe=2,data=2", 0, bf16={"enabled": True}),
    "experts": lambda: _experts("data=4", 0, pipeline=False),
    "experts in a pipeline": lambda: _experts("pipe=2,data=2", 1),
}


def _agrees(kind: str) -> None:
    with KINDS[kind]() as (engine, step):
        for number in range(3):
            step(number)
            check_replicas(engine, slices=kind != "pipeline of slices")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", mark_exhaustive(KINDS, lambda number, _: number in (1, 2, 4, 6, 7, 10)))
def test_replicas_of_correct_engines_are_equal(world: Worlds, kind: str) -> None:
    world(4).run(_agrees, kind)


def _change_a_bit(parameter: torch.Tensor) -> None:
    """Change a bit that a step does not round off."""
    integers, bit = (torch.int16, 4) if parameter.itemsize == 2 else (torch.int32, 16)
    parameter.data.view(integers).view(-1)[0] ^= 1 << bit


def _a_parameter(engine: Any) -> str:
    name, parameter = list(engine.module.named_parameters())[-1]
    _change_a_bit(parameter)
    return name


def _a_state(engine: Any) -> str:
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    state = next(iter(inner.state.values()))
    key, value = next((key, value) for key, value in sorted(state.items()) if torch.is_tensor(value) and value.dim())
    value.view(-1)[0] += 1.0
    return key


def _a_tied_weight(engine: Any) -> str:
    """Change the last stage's copy of a tied weight."""
    weight, _ = engine.module.get_tied_weights_and_groups()[0]
    _change_a_bit(weight)
    return "tied weight 0"


def _an_expert(engine: Any) -> str:
    name, parameter = next((n, p) for n, p in engine.module.named_parameters() if not getattr(p, "allreduce", True))
    _change_a_bit(parameter)
    return name


def _finds(kind: str, changed_rank: int, change: Callable[[Any], str]) -> tuple[str, str]:
    """Return the name of the changed tensor, and the error of this rank."""
    with KINDS[kind]() as (engine, step):
        step(0)
        name = change(engine) if dist.get_rank() == changed_rank else ""
        with pytest.raises(ReplicaError) as caught:
            check_replicas(engine)
        return name, str(caught.value)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("kind", "changed_rank", "change", "alike"),
    [
        pytest.param("plain 0", 2, _a_parameter, ([0], [2]), marks=pytest.mark.exhaustive),
        ("pipeline 0", 3, _a_parameter, ([2], [3])),
        ("experts", 2, _an_expert, ([0], [2])),
        ("plain 0", 1, _a_state, ([1], [3])),
        ("bf16", 3, _a_state, ([1], [3])),
        ("pipeline 0", 1, _a_state, ([0], [1])),
        ("pipeline of slices", 2, _a_tied_weight, ([0], [2])),
        ("bf16 1", 1, _a_parameter, ([0, 2, 3], [1])),
    ],
)
def test_a_changed_bit_raises_on_every_rank(
    world: Worlds, kind: str, changed_rank: int, change: Callable[[Any], str], alike: tuple[list[int], list[int]]
) -> None:
    """The error has the name of the tensor, and the ranks that have each value.

    States differ before parameters do. At ZeRO 1, the next gather would overwrite a changed parameter.
    """
    found = world(4).run(_finds, kind, changed_rank, change)
    name = next(name for name, _ in found if name)
    (error,) = {error for _, error in found}
    assert name in error
    assert "replicas differ after step 1, on " in error
    assert all(f"ranks {ranks} on " in error for ranks in alike)


def _slices_differ(what: str) -> str:
    with KINDS["plain 0"]() as (engine, step):
        step(0)
        odd = dist.get_rank() % 2 == 1
        if what == "random" and odd:
            torch.rand(1)
        if what == "norm" and odd:
            _change_a_bit(next(p for n, p in engine.module.named_parameters() if "norm" in n))
        with pytest.raises(ReplicaError) as caught:
            check_replicas(engine, slices=True)
        return str(caught.value)


def _one_slice_has_more() -> str:
    with KINDS["plain 0"]() as (engine, step):
        step(0)
        if dist.get_rank() % 2 == 1:
            engine.module.register_parameter("more", torch.nn.Parameter(torch.zeros(3)))
        with pytest.raises(ReplicaError) as caught:
            check_replicas(engine, slices=True)
        return str(caught.value)


def test_slices_with_different_parameters_raise(world: Worlds) -> None:
    (error,) = set(world(4).run(_one_slice_has_more))
    assert "ranks along model do not have the same tensors" in error


def _other_arguments() -> None:
    with KINDS["plain 0"]() as (engine, step):
        is_last = dist.get_rank() == 3
        with pytest.raises(DisagreementError, match=r"ranks \[3\] on .* after step 0, slices=True"):
            check_replicas(engine, slices=is_last)
        step(0)


def test_different_arguments_raise_on_all_ranks(world: Worlds) -> None:
    world(4).run(_other_arguments)


def _cannot_be_read() -> None:
    with KINDS["plain 0"]() as (engine, _):
        if dist.get_rank() == 2:
            engine.module.register_parameter("absent", torch.nn.Parameter(torch.zeros(3, device="meta")))
        with pytest.raises((DisagreementError, ValueError), match="meta device has no values"):
            check_replicas(engine)


def test_an_unreadable_tensor_raises_on_all_ranks(world: Worlds) -> None:
    world(4).run(_cannot_be_read)


@pytest.mark.parametrize(("what", "named"), [("random", "random state of the CPU"), ("norm", "norm")])
def test_replicated_parameters_and_random_states_of_slices_are_compared(world: Worlds, what: str, named: str) -> None:
    (error,) = set(world(4).run(_slices_differ, what))
    assert named in error
    assert "along model" in error


def test_master_weights_and_states_are_compared_over_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=4") as grid:
        dense, of_experts = grid.get_data_parallel_group(), dist.new_group([0, 1])
        monkeypatch.setattr(replicas.deepspeed_groups, "_EXPERT_DATA_PARALLEL_GROUP", {"ep_size_2": of_experts})
        weight, master, expert = (nn.Parameter(torch.ones(2)) for _ in range(3))
        optimizer = torch.optim.SGD(
            [{"params": [weight, master]}, {"params": [expert], "moe": True, "name": "ep_size_2"}], lr=0.1
        )
        for each in (weight, master, expert):
            optimizer.state[each] = {"step": 1, "momentum": torch.zeros(2)}
        found = [(each.name, each.group) for each in replicas._states(optimizer, {id(weight): "weight"}, dense)]
        name, other = "master weight 1 of parameter group 0", "master weight 0 of parameter group 1"
        assert found == [
            ("momentum of weight", dense),
            (name, dense),
            (f"momentum of {name}", dense),
            (other, of_experts),
            (f"momentum of {other}", of_experts),
        ]


def test_message_counts_the_tensors_that_are_a_whole_on_some_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[int] = []

    def extremes(values: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
        highest = values.clone()
        if values.dim() == 2:
            highest[changed, 1] += 1
        return highest, values

    monkeypatch.setattr(replicas, "extremes", extremes)
    monkeypatch.setattr(replicas, "gathered_by_value", lambda own, group: "")
    with fake_world(0, 2):
        group = dist.group.WORLD
        values = [torch.full((number + 1,), 1.0) for number in range(4)]
        tensors = [
            replicas.Replicated(name, each, group, "data", name == "b")
            for name, each in zip("abcd", values, strict=True)
        ]
        sums = {id(each): replicas.digest(each) for each in values}
        for places, expected in (
            ([], ""),
            ([1], ""),
            ([1, 2], "1 of 3 tensors along data, first 'c' (float32 [3])"),
            ([0, 3], "2 of 3 tensors along data, first 'a' (float32 [1])"),
        ):
            changed[:] = places
            assert replicas._difference(tensors, group, sums) == (expected and f"{expected}:")


def test_slices_are_compared_by_their_values_if_these_tell_something(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []

    def compare(*values: torch.Tensor, is_slice: bool = True, other: int = 0) -> tuple[bool, list[int]]:
        def extremes(content: torch.Tensor, _: object) -> tuple[torch.Tensor, torch.Tensor]:
            sent.append(content.tolist())
            return content, content + other

        monkeypatch.setattr(replicas, "extremes", extremes)
        group = dist.group.WORLD
        samples = [replicas.Replicated("weight", each, group, "model", is_slice) for each in values]
        sums = {id(each): replicas.digest(each) for each in values}
        return replicas._slices_are_equal(samples, group, sums), sent[-1]

    with fake_world(0, 2):
        one, another = torch.arange(3.0), torch.arange(1.0, 4.0)
        assert compare(one) == compare(one.clone())
        assert compare(one)[0]
        assert not compare(one, other=1)[0]
        contents = [compare(*values)[1] for values in ((one,), (another,), (one, another), (one, one))]
        assert len({*map(tuple, contents)}) == 4
        assert [count for _, _, count in contents] == [1, 1, 2, 2]
        for nothing in (compare(torch.ones(3)), compare(one, is_slice=False), compare()):
            assert nothing == (False, [0, 0, 0])


@pytest.mark.parametrize(
    ("difference", "are_equal", "may_be_split", "checks", "said"),
    [
        ("first 'a'", True, False, True, "start with different parameters; first 'a'"),
        ("first 'a'", False, True, False, "start with different parameters; first 'a'"),
        ("", True, True, True, "start with the same slices"),
        ("", True, True, False, ""),
        ("", False, False, True, "train copies of the whole model"),
        ("", False, False, False, ""),
        ("", False, True, True, ""),
    ],
)
def test_first_slice_warns_of_wrong_parameters(
    difference: str, are_equal: bool, may_be_split: bool, checks: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "_difference", lambda *_: difference)
    monkeypatch.setattr(replicas, "_slices_are_equal", lambda *_: are_equal)
    monkeypatch.setattr(replicas, "_may_be_split", lambda *_: may_be_split)
    for rank in range(8):
        with fake_world(rank, 8), PipelineParallelGrid("pipe=2,data=2,model=2") as grid:
            grid.check_weights = checks
            engine: Any = SimpleNamespace(mpu=grid)
            for module in (nn.Linear(2, 2), nn.Module()):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    replicas.compare_slices(engine, module)
                # A model without parameters is no copy of anything, and a model is a copy on its first stage alone.
                has_copies = rank == 0 and len(list(module.parameters())) > 0
                is_said = rank in (0, 4) and (has_copies or "copies" not in said)
                assert len(caught) == (is_said and bool(said))
                assert all(said in str(each.message) for each in caught)


def _refusals() -> None:
    small_engines.start()
    with PipelineParallelGrid("data=2") as grid:
        config = small_engines.settings(zero_optimization={"stage": 3})
        engine, *_ = initialize(model=torch.nn.Linear(4, 2), mpu=grid, config=config)
        with pytest.raises(ValueError, match="ZeRO stage 3 partitions parameters"):
            check_replicas(engine)
        destroy_engine(engine)
    with pytest.raises(TypeError, match="Linear is not an engine"):
        check_replicas(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_check_replicas_refuses_zero_3_and_other_objects(world: Worlds) -> None:
    world(2).run(_refusals)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.complex128, torch.bool]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(DTYPES[:-1]), st.integers(1, 40), st.data())
def test_any_single_bit_changes_a_digest(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    tensor = torch.randint(0, 100, (numel, 2)).to(dtype)[:, 0]
    changed = torch.empty(numel, dtype=dtype).copy_(tensor)
    bits = changed.view(torch.uint8)
    byte, bit = data.draw(st.integers(0, len(bits) - 1)), data.draw(st.integers(0, 7))
    bits[byte] ^= 1 << bit
    one, same, other = (replicas.digest(each).tolist() for each in (tensor, tensor.contiguous(), changed))
    assert one == same != other


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:3] + DTYPES[5:6], ids=str)
def test_signs_and_positions_change_a_digest(dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, dtype=dtype)
    for other in (-tensor, tensor.flip(0), tensor.roll(2), torch.cat([-tensor[:2], tensor[2:]])):
        assert not torch.equal(replicas.digest(tensor), replicas.digest(other))


def test_digests_do_not_depend_on_the_number_of_elements_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randint(0, 2, (numel,)).to(dtype) for dtype in DTYPES for numel in (0, 1, 5, 16, 17, 40)]
    whole = [replicas.digest(tensor) for tensor in tensors]
    monkeypatch.setattr(replicas, "_AT_A_TIME", 16)
    assert all(map(torch.equal, map(replicas.digest, tensors), whole))


# -- the start of an engine -------------------------------------------------------------------------------------------


def _started_from(seeds: str, spec: str) -> list[str]:
    small_engines.start()
    with PipelineParallelGrid(spec) as grid, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grid.check_weights = seeds != "of samples, meant"
        torch.manual_seed(dist.get_rank() if seeds == "of ranks" else grid.get_sample_rank())
        model = nn.Linear(10, 30)
        if "marked" in seeds:
            torch.manual_seed(dist.get_rank() if seeds == "marked" else 0)
            model = nn.Linear(10, 30)
            for parameter in model.parameters():
                parameter.tensor_model_parallel = True
        if seeds == "of samples, with a group":
            model.group = grid.get_group("model")
        engine, *_ = deepspeed.initialize(model=model, mpu=grid, config=small_engines.settings())
        engine.destroy()
        return [str(warning.message) for warning in caught if "ranks along 'model'" in str(warning.message)]


def _started() -> dict[str, list[str]]:
    of_samples = ["of samples", "of samples, meant", "of samples, with a group"]
    cases = [
        ("of ranks", "data=2,model=2"),
        ("of ranks", "data=2,seq=2"),
        *((each, "model=2,data=2") for each in of_samples),
    ]
    cases += [("marked", "data=2,model=2"), ("marked alike", "data=2,model=2")]
    return {f"{seeds}, {spec}": _started_from(seeds, spec) for seeds, spec in cases}


def test_engine_warns_of_different_weights_on_slices(world: Worlds) -> None:
    first, *others = world(4).run(_started)
    (warning,) = first.pop("of ranks, data=2,model=2")
    assert "2 of 2 tensors along model, first 'weight' (float32 [30, 10])" in warning
    assert "torch.manual_seed(0)" in warning
    (warning,) = first.pop("of samples, model=2,data=2")
    assert "2 ranks along 'model' train copies of the whole model" in warning
    (warning,) = first.pop("marked alike, data=2,model=2")
    assert "all ranks along 'model' start with the same slices" in warning
    assert not any(map(any, first.values())), first
    assert not any(any(map(any, other.values())) for other in others), "the first rank says it"


def test_automatic_slices_that_match_no_layer_split_nothing() -> None:
    with fake_world(0, 2), PipelineParallelGrid("model=2") as grid:
        options = SimpleNamespace(hybrid_engine=SimpleNamespace(enabled=False))
        engine: Any = SimpleNamespace(has_moe_layers=False, autotp_size=lambda: 2, mpu=grid, _config=options)
        assert not replicas._may_be_split(engine, nn.Linear(2, 2))
