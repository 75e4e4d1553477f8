"""AutoTP splits models along the axis ``model`` of a grid, in any order of the axes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import set_autotp_mode
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, SubParamLinearLayer
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.tensor_parallel import init_utils
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, checkpoint, groups, initialize, use
from ds_topo.checkpoint.engine_facts import split_of
from ds_topo.checkpoint.manifest import SavedSplit
from ds_topo.errors import EngineOptionError
from tests.support.autotp_training import (
    CUSTOM,
    SAMPLES,
    Gated,
    batches_of,
    engine_on,
    gated,
    llama,
    loss_of,
    start,
    train_alone,
    train_on,
    whole_parameters,
)
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.ranks import run_ranks
from tests.support.training import assert_trained_alike, destroy_engine, engine_config, train_engine
from tests.support.world import Worlds

STEPS = 3
CPU = {"device": "cpu"}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **options}}


@contextmanager
def _training_mode_undone() -> Iterator[None]:
    """Restore DeepSpeed's mode of AutoTP, which engines switch on for the rest of the process."""
    try:
        yield
    finally:
        set_autotp_mode(training=False)


def _tables() -> list[Any]:
    names = ("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
    return [getattr(deepspeed_groups, name) for name in names]


def _train_and_compare(
    topology: str, make: Callable[[], nn.Module], cases: list[dict[str, Any]], folder: str | None = None
) -> None:
    start()
    with _training_mode_undone(), PipelineParallelGrid(topology) as grid:
        alone = train_alone(make, STEPS)
        if "zero_hpz_partition_size" in str(cases):
            groups.create_zero_partition_groups(grid, 2)
        for case in cases:
            engine = engine_on(grid, make, grid.get_sample_world_size(), **case)
            assert engine.mpu is grid
            assert _tables()[0] is grid.get_tensor_model_parallel_group()
            run = train_on(grid, engine, batches_of(engine.module, STEPS))
            if "bf16" in case:
                assert_trained_alike(run, alone, losses=5e-3, norms=0.05)
            else:
                norms = 1e-6 if run.norms else None  # fp32 without ZeRO does not keep the norm
                assert_trained_alike(run, alone, losses=1e-6, norms=norms, elements=(1e-6, 1e-6))
            if folder is not None:
                _require_whole_weights(engine, run.parameters, folder)
            destroy_engine(engine)
    assert _tables() == [None] * 3


def _require_whole_weights(engine: Any, expected: dict[str, torch.Tensor], folder: str) -> None:
    engine.save_16bit_model(folder, "weights.bin")
    dist.barrier()
    found = torch.load(f"{folder}/weights.bin")
    assert found.keys() >= expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value), name


@pytest.mark.parametrize(
    "topology", mark_exhaustive(("model=2,data=2", "data=2,model=2"), lambda number, _: not number)
)
def test_training_equals_one_process(world: Worlds, tmp_path: Path, topology: str) -> None:
    gathered = zero(3, stage3_gather_16bit_weights_on_model_save=True)
    cases = [zero(0), {**zero(1), "gradient_reducer": True}, zero(2), gathered]
    world(4).run(_train_and_compare, topology, gated, [{**CUSTOM, **case} for case in cases], str(tmp_path))


def _build_with(pattern: str) -> list[str]:
    layers = [{"patterns": [pattern], "partition_type": "column"}]
    section = {"partition_config": {"use_default_specs": False, "layer_specs": layers}}
    start()
    with _training_mode_undone(), PipelineParallelGrid("model=2") as grid, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        destroy_engine(engine_on(grid, lambda: nn.Sequential(nn.Linear(8, 8)), 1, tensor_parallel=section))
    return [str(each.message) for each in said if "match no layer" in str(each.message)]


def test_pattern_that_matches_no_layer_is_named_once(world: Worlds) -> None:
    (text,), others = world(2).run(_build_with, r".*3\.weight$")
    assert r"the patterns ['.*3\\.weight$'] in" in text
    assert "names of the model are ['0.weight']" in text
    assert others == []
    assert world(2).run(_build_with, r".*0\.weight$") == [[], []]


def _train_from_zero_init(topology: str) -> None:
    start()
    with _training_mode_undone(), PipelineParallelGrid(topology) as grid:
        case = {**CUSTOM, **zero(3, stage3_param_persistence_threshold=0)}
        samples = grid.get_sample_world_size()
        with deepspeed.zero.Init(config_dict_or_path=engine_config(SAMPLES // samples, **zero(3)), mpu=grid):
            model = gated()
        engine = engine_on(grid, lambda: model, samples, **case)
        run = train_on(grid, engine, batches_of(Gated(), STEPS))
        assert_trained_alike(run, train_alone(gated, STEPS), losses=1e-6, norms=1e-6, elements=(1e-6, 1e-6))
        destroy_engine(engine)


@pytest.mark.parametrize(
    "topology", mark_exhaustive(("model=2,data=2", "data=2,model=2"), lambda number, _: not number)
)
def test_whole_layers_may_stay_partitioned_over_all_ranks(world: Worlds, topology: str) -> None:
    world(4).run(_train_from_zero_init, topology)


TIED = {"tie_word_embeddings": True}
SECTIONS: dict[str, dict[str, Any]] = {
    "plan": {},
    "size": {"autotp_size": 2},
    "preset": {"preset_model": "llama"},
    "head": {"vocab_parallel_lm_head": True},
    "overlap": {"tp_overlap_comm": True},
}
REDUCED = {"gradient_reducer": True}
OFFLOADED = [zero(1, offload_optimizer=CPU), zero(2, offload_optimizer=CPU), zero(3, offload_optimizer=CPU)]
OFFLOADED += [zero(3, offload_param=CPU, offload_optimizer=CPU)]


def tied_llama() -> nn.Module:
    return llama(**TIED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [llama, tied_llama])
@pytest.mark.parametrize("topology", ["model=2,data=2", "data=2,model=2", "model=4"])
def test_llama_trains_as_in_one_process(topology: str, make: Callable[[], nn.Module]) -> None:
    sections = [each for name, each in SECTIONS.items() if topology != "model=4" or name != "size"]
    cases = [{"tensor_parallel": section, **zero(number % 4)} for number, section in enumerate(sections)]
    ways = [*map(zero, range(4)), *({**zero(stage), **REDUCED} for stage in range(3)), *OFFLOADED]
    ways += [{**zero(stage), **BF16} for stage in range(4)] + [{**zero(2), **BF16, **REDUCED}]
    cases += [{"tensor_parallel": {}, **way} for way in ways]
    run_ranks(4, _train_and_compare, topology, make, cases, deadline=300)


@pytest.mark.exhaustive
@pytest.mark.parametrize("topology", ["model=2,data=4", "data=4,model=2"])
def test_second_partitions_of_zero_3_train_as_one_process(topology: str) -> None:
    cases = [{**CUSTOM, **zero(3, zero_hpz_partition_size=2)}]
    run_ranks(8, _train_and_compare, topology, gated, cases, deadline=200)


# -- against stock ----------------------------------------------------------------------------------------------------


class _NeighboringRanks:
    """The samples of stock DeepSpeed's ranks."""

    def get_sample_world_size(self) -> int:
        return 2

    def get_sample_rank(self) -> int:
        return dist.get_rank() // 2

    def get_data_parallel_group(self) -> Any:
        return deepspeed_groups.get_data_parallel_group()

    def get_data_parallel_world_size(self) -> int:
        return 2


def _train_as_stock(make: Callable[[], nn.Module], ways: list[dict[str, Any]]) -> None:
    start()
    section = {"tensor_parallel": {"autotp_size": 2}}
    stock_ranks: Any = _NeighboringRanks()
    for way in ways:
        runs = []
        for spec in ("", "data=2,model=2"):
            grid = PipelineParallelGrid(spec) if spec else None
            engine = engine_on(grid, make, 2, **section, **way)
            runs.append(train_on(grid or stock_ranks, engine, batches_of(engine.module, STEPS)))
            destroy_engine(engine)
            if grid is not None:
                grid.destroy()
        stock, on_grid = runs
        assert on_grid.losses == stock.losses
        assert on_grid.norms == stock.norms
        for name, value in stock.parameters.items():
            assert torch.equal(on_grid.parameters[name], value), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [llama, tied_llama])
def test_neighboring_slices_train_bit_for_bit_as_stock(make: Callable[[], nn.Module]) -> None:
    ways = [
        *map(zero, range(4)),
        *({**zero(stage), **BF16} for stage in (1, 2, 3)),
    ]  # bf16 alone: stock's norm is wrong
    run_ranks(4, _train_as_stock, make, ways, deadline=200)


# -- pipelines --------------------------------------------------------------------------------------------------------

AXES = ("pipe", "data", "model")


def _train_pipeline(topology: str, cases: list[dict[str, Any]]) -> None:
    start()
    torch.manual_seed(0)
    whole = nn.Sequential(*(Gated() for _ in range(4)))
    given = {name: value.clone() for name, value in whole.state_dict().items()}
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)
    batches = batches_of(Gated(), STEPS)
    losses, norms = [], []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(whole(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 0.1)))
        optimizer.step()
        losses.append(loss.item())
    with _training_mode_undone(), PipelineParallelGrid(topology) as grid:
        samples = grid.get_sample_world_size()
        for case in cases:
            module: Any = PipelineModule(
                [LayerSpec(Gated) for _ in range(4)], grid=grid, loss_fn=nn.MSELoss(), partition_method="uniform"
            )
            own = {name: given[name] for name in module.state_dict()}
            module.load_state_dict(own)
            config = engine_config(SAMPLES // samples // 2, accumulation=2, clip=0.1, **CUSTOM, **case)
            engine, *_ = initialize(model=module, optimizer=optimizer_of_pipeline, config=config)
            mine = [tuple(part.chunk(samples)[grid.get_sample_rank()] for part in batch) for batch in batches]
            run = train_engine(engine, grid, mine)  # type: ignore[arg-type]
            assert run.losses == pytest.approx(losses, rel=1e-6)
            assert run.norms == pytest.approx(norms, rel=1e-6)
            assert module.state_dict()[next(iter(own))].numel()
            destroy_engine(engine)


def optimizer_of_pipeline(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [*permutations(AXES), ("pipe", "model"), ("model", "pipe")])
def test_pipelines_of_split_layers_train_as_one_process(world: Worlds, order: tuple[str, ...]) -> None:
    cases = [zero(0), zero(1), {**zero(1), **REDUCED}]
    world(2 ** len(order)).run(_train_pipeline, ",".join(f"{axis}=2" for axis in order), cases)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_splits_of_automatic_layers_are_known() -> None:
    linear = nn.Linear(12, 8)
    assert split_of(linear.weight) is None
    assert split_of(mock.Mock(spec=["partition_dim"], partition_dim=0)) == SavedSplit(0), "as Megatron declares it"
    assert split_of(LinearLayer(linear).weight) == SavedSplit(0)
    assert split_of(LinearLayer(linear).bias) == SavedSplit(0)
    rows: Any = LinearAllreduce(linear, None)
    assert (split_of(rows.weight), split_of(rows.bias)) == (SavedSplit(1), None)
    fused: Any = SubParamLinearLayer(nn.Linear(12, 8, bias=False), None, shape=(2, -1), partition_dim=0)
    assert split_of(fused.weight) == SavedSplit(0, 2)
    unequal: Any = SubParamLinearLayer(nn.Linear(12, 8, bias=False), None, shape=((4, 2, 2), -1), partition_dim=0)
    assert split_of(unequal.weight) is None


TARGETS: dict[str, tuple[str, int]] = {
    "same": ("model=2,data=2", -1),
    "order": ("data=2,model=2", -1),
    "more slices": ("model=4", -1),
    "no slices": ("data=4", -1),
    "other ZeRO": ("data=2,model=2", 1),
}


def _resume(folder: str, make: Callable[[], nn.Module], section: dict[str, Any], stages: list[int]) -> None:
    start()
    with _training_mode_undone():
        for stage in stages:
            where, batches = f"{folder}/{stage}", batches_of(make(), STEPS + 1)
            expected = train_alone(make, STEPS + 1)
            with PipelineParallelGrid("model=2,data=2") as grid:
                engine = engine_on(grid, make, 2, tensor_parallel=section, **zero(stage))
                train_on(grid, engine, batches[:2], gather=False)
                engine.save_checkpoint(where, "saved")
                destroy_engine(engine)
            for topology, other in TARGETS.values():
                wanted = stage if other < 0 else (1 if stage == 0 else 0)
                with PipelineParallelGrid(topology) as grid:
                    split = section if grid.slice_parallel_size > 1 else None
                    engine = engine_on(grid, make, grid.get_sample_world_size(), tensor_parallel=split, **zero(wanted))
                    checkpoint.load(engine, where)
                    run = train_on(grid, engine, batches[2:])
                    assert run.losses == pytest.approx(expected.losses[2:], rel=1e-6), (stage, topology)
                    for name, value in run.parameters.items():
                        torch.testing.assert_close(value, expected.parameters[name], rtol=1e-6, atol=2e-6)
                    destroy_engine(engine)


@pytest.mark.thorough
@pytest.mark.parametrize("stages", mark_exhaustive(([1], [0, 2, 3]), lambda number, _: not number))
def test_checkpoints_load_in_other_orders_degrees_and_stages(world: Worlds, tmp_path: Path, stages: list[int]) -> None:
    world(4).run(_resume, str(tmp_path), gated, CUSTOM["tensor_parallel"], stages)


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [llama, tied_llama])
def test_checkpoints_of_llama_load_everywhere(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    run_ranks(4, _resume, str(tmp_path), make, {}, [0, 1, 3], deadline=300)


def _load_universal(folder: str, stage: int) -> None:
    start()
    batches = batches_of(gated(), STEPS)
    expected = train_alone(gated, STEPS)
    with PipelineParallelGrid("model=2,data=2") as grid:
        engine = engine_on(grid, gated, 2, **CUSTOM, **zero(stage))
        train_on(grid, engine, batches[:2], gather=False)
        engine.save_checkpoint(folder, "saved")
        destroy_engine(engine)
    if dist.get_rank() == 0:
        command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
        command += ["--num_merge_workers", "1", "--input_folder", f"{folder}/saved", "--output_folder"]
        subprocess.run([*command, f"{folder}/universal"], check=True, capture_output=True)
        Path(folder, "latest_universal").write_text("universal")
    dist.barrier()
    for topology in ("model=2,data=2", "data=2,model=2", "model=4"):
        with PipelineParallelGrid(topology) as grid:
            loading = {"checkpoint": {"load_universal": True}}
            engine = engine_on(grid, gated, grid.get_sample_world_size(), **CUSTOM, **zero(stage), **loading)
            engine.load_checkpoint(folder, tag="universal")
            run = train_on(grid, engine, batches[2:])
            assert run.losses == pytest.approx(expected.losses[2:], rel=1e-6)
            destroy_engine(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoints_load_in_other_orders(tmp_path: Path, stage: int) -> None:
    run_ranks(4, _load_universal, str(tmp_path), stage, deadline=200)


# -- other ways in ----------------------------------------------------------------------------------------------------


def _initialize_by_tp_model_init() -> None:
    start()
    alone = train_alone(llama, STEPS)
    try:
        with _training_mode_undone(), PipelineParallelGrid("model=2,data=2") as grid, use(grid):
            model = deepspeed.tp_model_init(llama(), tp_size=2, dtype=torch.float32)
            engine = engine_on(None, lambda: model, 2, tensor_parallel=None)
            assert engine.mpu is grid
            assert_trained_alike(
                train_on(grid, engine, batches_of(model, STEPS)), alone, losses=1e-6, elements=(1e-6, 1e-6)
            )
            destroy_engine(engine)
    finally:
        init_utils._TP_MODEL_INIT_ARGS = None


@pytest.mark.exhaustive
def test_tp_model_init_splits_along_the_grid_in_use() -> None:
    run_ranks(4, _initialize_by_tp_model_init)


def _train_by_accelerate(topology: str) -> list[float]:
    """Return the losses of a loop of accelerate, whose config splits the model."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    start()
    with _training_mode_undone(), PipelineParallelGrid(topology) as grid, use(grid):
        section = {"tensor_parallel": {"autotp_size": 2}} if grid.slice_parallel_size > 1 else {}
        config = engine_config(4, clip=0.1, **zero(1), **section)
        model: Any = llama()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        tokens = torch.randint(64, (24, 12), generator=torch.Generator().manual_seed(0))
        loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=4)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert model.mpu is grid
        losses = []
        for (inputs,) in loader:
            loss = model(input_ids=inputs, labels=inputs).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        destroy_engine(model)
        return losses


@pytest.mark.exhaustive
def test_accelerate_trains_slices_as_without_them() -> None:
    [expected, *_] = run_ranks(2, _train_by_accelerate, "data=2")
    assert len(expected) == 3
    [found, *_] = run_ranks(4, _train_by_accelerate, "model=2,data=2")
    assert found == pytest.approx(expected, rel=1e-6)


def _infer() -> None:
    start()
    tokens, _ = batches_of(llama(), 1)[0]
    expected = llama()(input_ids=tokens).logits
    with PipelineParallelGrid("data=1,model=2") as grid, use(grid):
        engine = deepspeed.init_inference(
            llama(), tensor_parallel={"tp_size": 2, "tp_grain_size": 1}, dtype=torch.float32
        )
        assert engine.module.model.layers[0].mlp.up_proj.weight.shape == (32, 32)
        torch.testing.assert_close(engine(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_inference_splits_along_the_grid_in_use() -> None:
    run_ranks(2, _infer)


def test_inference_on_some_ranks_of_a_cpu_is_refused() -> None:
    with fake_world(0, 4), PipelineParallelGrid("data=2,model=2") as grid, use(grid):
        for size, message in ((4, "set tensor_parallel.tp_size to 2"), (2, "sums over all ranks of the job")):
            options: Any = SimpleNamespace(tensor_parallel=SimpleNamespace(tp_size=size))
            engine: Any = SimpleNamespace()
            with pytest.raises(EngineOptionError, match=message):
                InferenceEngine._create_model_parallel_group(engine, options)


def _evaluate_other_samples() -> None:
    """Slices that read different samples are refused by DeepSpeed's own check, whose ranks come from the grid."""
    start()
    with _training_mode_undone(), PipelineParallelGrid("model=2,data=2") as grid:
        engine = engine_on(grid, gated, 2, **CUSTOM)
        with pytest.raises((AssertionError, Exception), match=r"Data inconsistency|different samples|differ"):
            loss_of(engine, torch.full((4, 8), float(grid.get_slice_parallel_rank())), torch.zeros(4, 8))
        assert whole_parameters(engine)
        destroy_engine(engine)


def test_slices_with_different_samples_are_refused(world: Worlds) -> None:
    world(4).run(_evaluate_other_samples)
