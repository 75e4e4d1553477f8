"""DeepSpeed's pipeline engine on our grid trains as one process does, in every layout."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.runtime.pipe.module as deepspeed_module
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid
from ds_topo.engine.pipelines import pipeline
from ds_topo.engine.pipelines.pipeline import check_stages
from ds_topo.errors import DisagreementError, TopologyError
from ds_topo.launch.launchers import TOPOLOGY_OVERRIDE
from tests.support.exhaustive import mark_exhaustive
from tests.support.fake_world import fake_world
from tests.support.gpt_training import train_pipeline
from tests.support.process_groups import number_of_groups
from tests.support.small_engines import settings, start
from tests.support.training import Reference, Run, assert_trained_alike, destroy_engine, engine_config
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("gloo", exhaustive=("strict",))

STEPS = 3
TOPOLOGIES = ["data=4", "pipe=2,data=2", "data=2,pipe=2", "pipe=4", "pipe=2,seq=2", "seq=2,pipe=2"]


def _train_and_compare(topology: str, zero: int, expected: Run) -> None:
    run = train_pipeline(topology, STEPS, zero=zero)
    assert_trained_alike(run, expected, losses=1e-4, norms=1e-4, elements=(1e-4, 1e-5))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("topology", "zero"),
    mark_exhaustive(product(TOPOLOGIES, (0, 1)), default=lambda number, _: number % 4 in (0, 3)),  # each topology once
)
def test_training_equals_one_process(world: Worlds, layers_alone: Reference, topology: str, zero: int) -> None:
    world(4).run(_train_and_compare, topology, zero, layers_alone(STEPS))


def _tied_layers() -> list[Any]:
    """Six layers, the first and last of them the same."""
    ends = partial(TiedLayerSpec, "embedding", nn.Linear, 8, 8)
    return [ends(), *(LayerSpec(nn.Linear, 8, 8) for _ in range(4)), ends()]


def _inspect_construction() -> None:
    rank = dist.get_rank()
    stage, base = rank % 4, rank - rank % 4
    before = {id(value) for value in vars(deepspeed_module).values()}
    on_every_rank = AssertionError("DeepSpeed's function creates groups on every rank")
    with mock.patch.object(deepspeed.comm, "new_group", side_effect=on_every_rank):
        module = PipelineModule(_tied_layers(), topology="seq=2,pipe=4")
    assert before == {id(value) for value in vars(deepspeed_module).values()}
    assert module.topology().spec == "seq=2,pipe=4"
    with module.mpu() as grid:
        assert isinstance(grid, PipelineParallelGrid)
        tied = {"embedding": [base, base + 3]} if stage in (0, 3) else {}
        assert {key: comm["ranks"] for key, comm in module.tied_comms.items()} == tied
        groups = {key: dist.get_process_group_ranks(comm["group"]) for key, comm in module.tied_comms.items()}
        assert groups == tied
        assert [name for name in dir(grid) if name.startswith("get_sequence")] == []
        # the world, pipe, seq; the ends also share their tied layers
        assert number_of_groups() == (4 if stage in (0, 3) else 3)


def test_construction_leaves_no_patches_and_ties_first_and_last_stage(world: Worlds) -> None:
    world(8).run(_inspect_construction)


def _name_of_layer_file() -> str:
    module = PipelineModule(_tied_layers(), topology="model=2,seq=2")
    with module.mpu():
        return Path(module.ckpt_layer_path("", 0)).name


def test_checkpoint_names_contain_only_the_model_axis(world: Worlds) -> None:
    names = [f"layer_00-model_{rank // 2:02d}-model_states.pt" for rank in range(4)]
    assert world(4).run(_name_of_layer_file) == names


@pytest.mark.parametrize(
    "config",
    [{"train_batch_size": 8, "topology": "data=-1,pipe=2"}, {"topology": {"data": 2, "pipe": 2}}],
    ids=["file", "mapping"],
)
def test_topology_comes_from_the_config(world: Worlds, config: dict[str, Any], tmp_path: Path) -> None:
    source: Any = config
    if "train_batch_size" in config:
        source = tmp_path / "ds_config.json"
        source.write_text(json.dumps(config))
    assert world(4).run(_topology_of_config, source) == ["data=2,pipe=2"] * 4


def _topology_of_config(source: Any) -> str:
    module = PipelineModule(_tied_layers(), config=source)
    with module.mpu():
        return module.topology().spec


def _raise_before_any_group_exists(error: type[TopologyError], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        PipelineModule(_tied_layers(), **options)
    assert number_of_groups() == 1, "the world"


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("needs a topology", {}),
        ("does not divide the world size 4", {"num_stages": 3}),
        ("topology and config are given", {"topology": "pipe=2", "config": {"topology": "pipe=2"}}),
    ],
    ids=["nothing", "indivisible", "both"],
)
def test_invalid_arguments_raise_on_every_rank_before_any_group_exists(
    world: Worlds, message: str, options: dict[str, Any]
) -> None:
    world(4).run(_raise_before_any_group_exists, TopologyError, message, options)


def _disagree() -> None:
    topology = "pipe=2,data=2" if dist.get_rank() else "data=2,pipe=2"
    message = r"(?s)ranks \[0\].*ranks \[1, 2, 3\]"
    _raise_before_any_group_exists(DisagreementError, message, {"topology": topology})


def test_different_topologies_raise_on_every_rank_before_any_group_exists(world: Worlds) -> None:
    world(4).run(_disagree)


def _clip(topology: str, settings: dict[str, Any]) -> tuple[list[str], float | None]:
    """Return what a pipeline logs about clipping when it is built, and its norm of a step whose gradients are ones."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    deepspeed.utils.logger.addHandler(handler)
    try:
        module = PipelineModule([LayerSpec(nn.Linear, 1, 1) for _ in range(4)], topology=topology, loss_fn=_sum)
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=engine_config(1) | settings)
    finally:
        deepspeed.utils.logger.removeHandler(handler)
    with module.mpu():
        engine.train_batch(iter([(torch.zeros(1, 1), torch.zeros(1, 1))]))
        norm = engine.get_global_grad_norm()
        engine.destroy()
    return [line for line in logged if "gradient_clipping" in line], None if norm is None else float(norm)


def _sum(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


@pytest.mark.parametrize("topology", ["pipe=2,data=2", "data=2,pipe=2"])
def test_pipeline_logs_and_returns_the_norm_of_all_stages(world: Worlds, topology: str) -> None:
    # With weights and biases of 1 and an input of 0, the layers get the inputs 0, 1, 2, 3; each bias has gradient 1.
    expected = (0 + 1 + 4 + 9 + 4) ** 0.5
    logs, norms = zip(*world(4).run(_clip, topology, {"gradient_clipping": 1.0}), strict=True)
    assert norms == (pytest.approx(expected, rel=1e-6),) * 4
    assert [len(lines) for lines in logs] == [1, 0, 0, 0]
    assert "norm of all 2 pipeline stages" in logs[0][0]


@pytest.mark.parametrize(
    ("topology", "settings"),
    [
        ("pipe=2,data=2", {"gradient_clipping": 0}),
        ("pipe=2,data=2", {"gradient_clipping": 1.0, "zero_optimization": {"stage": 1}}),
        ("pipe=1,data=4", {"gradient_clipping": 1.0}),
    ],
    ids=["no clipping", "ZeRO 1", "one stage"],
)
def test_pipeline_that_clips_as_deepspeeds_own_logs_nothing(
    world: Worlds, topology: str, settings: dict[str, Any]
) -> None:
    assert [lines for lines, _ in world(4).run(_clip, topology, settings)] == [[]] * 4


def _clipped_pipeline(corrects: bool | None) -> tuple[list[float], list[torch.Tensor], bool]:
    """Train a pipeline that clips, on DeepSpeed's own grid (``None``) or ours; say whether it reports a norm."""
    start()
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "partition_method": "uniform"}
    if corrects is None:
        grid = None
        module: Any = DeepSpeedPipelineModule(layers, num_stages=2, **options)
    else:
        grid = PipelineParallelGrid("pipe=2,data=2")
        grid.correct_norms = corrects
        module = PipelineModule(layers, grid=grid, **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    config = {name: value for name, value in settings(gradient_clipping=0.1).items() if name != "optimizer"}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    if grid is not None:
        with pytest.raises(RuntimeError, match="set it right after the grid is created"):
            grid.correct_norms = True
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank() % 2)
        micro_batches = [(torch.randn(2, 8, generator=generator), torch.ones(2, 8)) for _ in range(2)]
        losses.append(float(engine.train_batch(iter(micro_batches))))
    found = losses, [parameter.detach().clone() for parameter in module.parameters()]
    has_norm = engine.get_global_grad_norm() is not None
    destroy_engine(engine)
    if grid is not None:
        grid.destroy()
    return *found, has_norm


def _compare_with_deepspeeds_norm() -> None:
    stock, as_stock, corrected = map(_clipped_pipeline, (None, False, True))
    assert as_stock[0] == stock[0]
    assert all(map(torch.equal, as_stock[1], stock[1]))
    assert corrected[0] != stock[0]
    assert [run[2] for run in (stock, as_stock, corrected)] == [False, False, True]


def test_pipeline_without_corrected_norms_trains_bit_for_bit_as_deepspeeds_own(world: Worlds) -> None:
    world(4).run(_compare_with_deepspeeds_norm)


def _differ_in_switches() -> None:
    for switch in ("correct_norms", "check_weights", "check_samples"):
        with PipelineParallelGrid("data=2") as grid:
            setattr(grid, switch, dist.get_rank() == 0)
            name = switch.replace("_", " ")
            with pytest.raises(DisagreementError, match=rf"(?s){name}=True.*{name}=False"):
                deepspeed.initialize(model=nn.Linear(2, 2), mpu=grid, config=settings())
            with pytest.raises(TypeError, match=f"{switch}=1: give True or False"):
                setattr(grid, switch, 1)


def test_ranks_with_other_switches_raise(world: Worlds) -> None:
    world(2).run(_differ_in_switches)


@pytest.mark.parametrize(
    ("num_stages", "spec", "layers", "parts", "message"),
    [
        (None, "pipe=2,data=2", 2, 1, ""),
        (2, "pipe=2,data=2", 4, 2, ""),
        (1, "data=4", 1, 1, ""),
        (4, "pipe=2,data=2", 8, 1, "num_stages=4, but 'pipe=2,data=2' has 2: give only one"),
        (2, "pipe=2,data=2", 1, 1, "1 layers for the 2 stages of 'pipe=2,data=2': give every stage at least one"),
        (2, "pipe=2,data=2", 3, 2, r"3 layers for the 2 stages .* at least 2 \(DualPipeV\)"),
    ],
)
def test_stages_and_layers_must_fit_the_topology(
    num_stages: int | None, spec: str, layers: int, parts: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_world(0, 4):
        with pytest.raises(TopologyError, match=message) if message else nullcontext():
            check_stages(num_stages, spec, layers, parts)
        if "num_stages" in message:
            monkeypatch.setenv(TOPOLOGY_OVERRIDE, spec)
            check_stages(num_stages, spec, layers, parts)


@pytest.mark.parametrize(("interval", "device", "needed"), [(0, "cpu", 0), (1, "cpu", 1), (1, "cuda", 0)])
def test_checkpointing_on_a_cpu_needs_a_release(
    interval: int, device: str, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(pipeline, "require", asked.append)
    monkeypatch.setattr(pipeline, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    for function in (deepspeed.checkpointing.checkpoint, print):
        module: Any = SimpleNamespace(activation_checkpoint_func=function, activation_checkpoint_interval=interval)
        pipeline._checkpoint_all_segments(module)
        assert (module.activation_checkpoint_func is function) == (function is print), "a function of the user stays"
    assert len(asked) == needed


def _warnings_about_tied_weights(optimizer: str, zero: int) -> list[str]:
    start()
    with PipelineParallelGrid("pipe=2") as grid, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = PipelineModule(_tied_layers(), grid=grid, loss_fn=nn.functional.mse_loss)
        own = getattr(torch.optim, optimizer)(module.parameters(), lr=0.01)
        config = engine_config(1, zero_optimization={"stage": zero}, zero_allow_untested_optimizer=True)
        engine, *_ = deepspeed.initialize(model=module, optimizer=own, config=config)
        destroy_engine(engine)
    return [str(one.message) for one in caught if "tied weights" in str(one.message)]


@pytest.mark.parametrize(
    ("optimizer", "zero", "warns"), [("Adafactor", 1, True), ("Adafactor", 0, False), ("AdamW", 1, False)]
)
def test_optimizers_of_vectors_warn_of_tied_weights(world: Worlds, optimizer: str, zero: int, warns: bool) -> None:
    """Stages have other vectors around their copies, so that an optimizer with norms updates the copies differently."""
    first, second = world(2).run(_warnings_about_tied_weights, optimizer, zero)
    assert second == []
    assert len(first) == warns
    assert all("Adafactor is not known to update each element by itself" in one for one in first)
