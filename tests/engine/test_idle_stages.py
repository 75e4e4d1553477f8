"""Options that concern some stages of a pipeline only train as one process does, or all ranks refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from packaging.version import Version
from torch import nn

from ds_topo import PipelineModule, PipelineParallelGrid, checkpoint, initialize
from ds_topo.base.marks import PLACEHOLDERS
from ds_topo.engine.pipelines.idle_stages import _connect, fill_groups
from ds_topo.errors import CheckpointLayoutError, DisagreementError, EngineOptionError, FailedRankError
from ds_topo.health import blocked_calls
from tests.support.exhaustive import mark_exhaustive
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

WIDTH, WORDS = 8, 16
SPEC, STAGES, REPLICAS = "pipe=2,data=2", 2, 2
STEPS, MICRO_BATCHES, SAMPLES = 3, 2, 2
CLIP = 0.1


class Dense(nn.Linear):
    """A layer whose weights depend on its number alone."""

    def __init__(self, number: int, is_frozen: bool = False, bias: bool = True) -> None:
        super().__init__(WIDTH, WIDTH, bias=bias)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        self.requires_grad_(not is_frozen)


class Tokens(nn.Embedding):
    """An embedding of token ids."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__(WORDS, WIDTH, sparse=sparse)
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(5)) / 4)


LAYERS: dict[str, list[Any]] = {
    "all": [LayerSpec(Dense, 0), LayerSpec(Dense, 1), LayerSpec(Dense, 2), LayerSpec(Dense, 3)],
    "first frozen": [LayerSpec(Dense, 0, True), LayerSpec(Dense, 1, True), LayerSpec(Dense, 2), LayerSpec(Dense, 3)],
    "last frozen": [LayerSpec(Dense, 0), LayerSpec(Dense, 1), LayerSpec(Dense, 2, True), LayerSpec(Dense, 3, True)],
    "first empty": [torch.tanh, torch.sin, LayerSpec(Dense, 2), LayerSpec(Dense, 3)],
    "no biases at last": [LayerSpec(Dense, 0), torch.tanh, LayerSpec(Dense, 2, bias=False), torch.tanh],
    "tokens": [LayerSpec(Tokens), LayerSpec(Dense, 1), LayerSpec(Dense, 2), LayerSpec(Dense, 3)],
    "sparse": [LayerSpec(Tokens, True), LayerSpec(Dense, 1), LayerSpec(Dense, 2), LayerSpec(Dense, 3)],
}


def _groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Return parameters in two groups, of weights and of biases."""
    is_bias = {name: name.endswith("bias") for name in parameters}
    return [{"params": [each for name, each in parameters.items() if is_bias[name] == kind]} for kind in (False, True)]


def _rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a scheduler that needs both groups."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1.0])


def _samples(layers: str, replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    while True:
        inputs = torch.randn(SAMPLES, WIDTH, generator=generator) / 4  # no overflow in fp16
        if layers in ("tokens", "sparse"):
            inputs = torch.randint(0, WORDS, (SAMPLES,), generator=generator)
        yield inputs, torch.zeros(SAMPLES, WIDTH)


def _alone(layers: str, has_groups: bool) -> list[float]:
    """Train in plain torch on the samples of all replicas; return the losses."""
    built = [layer.build() if isinstance(layer, LayerSpec) else layer for layer in LAYERS[layers]]
    named = dict(nn.ModuleList(layer for layer in built if isinstance(layer, nn.Module)).named_parameters())
    trained = {name: each for name, each in named.items() if each.requires_grad}
    optimizer = torch.optim.SGD(_groups(trained) if has_groups else [*trained.values()], lr=0.1, momentum=0.9)
    scheduler = _rates(optimizer) if has_groups else None
    batches, found = [_samples(layers, replica) for replica in range(REPLICAS)], []
    for _ in range(STEPS):
        losses = []
        for _, batch in product(range(MICRO_BATCHES), batches):
            outputs, labels = next(batch)
            for layer in built:
                outputs = layer(outputs)
            losses.append(F.mse_loss(outputs, labels) / (MICRO_BATCHES * REPLICAS))
        total = torch.stack(losses).sum()
        total.backward()
        nn.utils.clip_grad_norm_([*trained.values()], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        found.append(total.item())
    return found


def _engine(grid: PipelineParallelGrid, layers: str, options: dict[str, Any], config: dict[str, Any]) -> Any:
    """Build a pipeline with an optimizer of the config, or of the program.

    With the option ``groups``, it has two groups and a scheduler; with ``filtered``, what the stage itself trains.
    """
    has_groups, is_filtered = options.pop("groups", False), options.pop("filtered", False)
    module = PipelineModule(LAYERS[layers], grid=grid, loss_fn=F.mse_loss, partition_method="uniform", **options)
    config = settings(gradient_clipping=CLIP, **config)
    if is_filtered:
        module.load_state_dict({name: each for name, each in module.state_dict().items() if PLACEHOLDERS not in name})
        optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1, momentum=0.9)
        return initialize(model=module, config=config, optimizer=optimizer)[0]
    if not has_groups:
        return initialize(model=module, config=config)[0]
    optimizer = torch.optim.SGD(_groups(dict(module.named_parameters())), lr=0.1, momentum=0.9)
    return initialize(model=module, config=config, optimizer=optimizer, lr_scheduler=_rates(optimizer))[0]


def _train(layers: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    start()
    expected = _alone(layers, has_groups=options.get("groups", False))
    with PipelineParallelGrid(SPEC) as grid:
        engine = _engine(grid, layers, options, config)
        samples = _samples(layers, grid.get_sample_rank())
        found = [engine.train_batch(samples).item() for _ in range(STEPS)]
        engine.eval_batch(samples)
        assert engine.skipped_steps == 0
        destroy_engine(engine)
    tolerance = 3e-3 if "torch_autocast" in config or "bf16" in config else 1e-5
    assert found == pytest.approx(expected, rel=tolerance)


ZERO_1: dict[str, Any] = {"zero_optimization": {"stage": 1}}
FP16: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
TIMERS: dict[str, Any] = {"wall_clock_breakdown": True, "steps_per_print": 1}
FLOPS: dict[str, Any] = {"flops_profiler": {"enabled": True, "profile_step": 1}}
REDUCER: dict[str, Any] = {"gradient_reducer": True}
INTERVAL: dict[str, Any] = {"activation_checkpoint_interval": 1}
DEFAULT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("first frozen", {}, {**ZERO_1, **FP16}),
    ("last frozen", {}, ZERO_1),
    ("first empty", {}, TIMERS),
    ("no biases at last", {"groups": True}, ZERO_1),
    ("tokens", INTERVAL, FP16),
    ("all", {}, FLOPS),
    ("first empty", {"filtered": True}, ZERO_1),
]
FURTHER = (
    [
        (layers, {"groups": True} if "biases" in layers else {}, {**zero, **more})
        for layers, zero, more in product(
            ("first frozen", "last frozen", "first empty", "no biases at last", "all"),
            ({}, ZERO_1),
            ({}, FP16, TIMERS, FLOPS, REDUCER),
        )
    ]
    + [("last frozen", {"filtered": True}, zero) for zero in ({}, ZERO_1)]
    + [("tokens", {"activation_checkpoint_interval": interval}, zero) for interval in (1, 2) for zero in ({}, ZERO_1)]
)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layers", "options", "config"), mark_exhaustive([*DEFAULT, *FURTHER], lambda number, _: number < len(DEFAULT))
)
def test_training_equals_one_process(
    world: Worlds, layers: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    if "torch_autocast" in config and Version(torch.__version__) < Version("2.9"):
        pytest.skip("this torch cannot differentiate mse_loss of fp16 outputs and fp32 labels")
    world(4).run(_train, layers, options, config)


def test_first_output_that_can_have_a_gradient_is_connected_to_the_placeholders() -> None:
    module = nn.Module()
    placeholder = nn.Parameter(torch.zeros(1))
    setattr(module, PLACEHOLDERS, nn.ParameterList([placeholder]))
    tokens, first, second = torch.arange(3), torch.ones(2), torch.ones(2)
    for outputs in ((tokens, first, second), [tokens, first, second]):
        found = _connect(module, None, outputs)
        assert type(found) is type(outputs)
        assert len(found) == 3
        assert found[0] is tokens
        assert found[2] is second
        found[1].sum().backward()
        assert placeholder.grad is not None
        assert placeholder.grad.tolist() == [0.0]
        placeholder.grad = None
    assert _connect(module, None, first).requires_grad
    assert not first.requires_grad
    assert _connect(module, None, (tokens,)) == (tokens,)
    with torch.no_grad():
        assert _connect(module, None, first) is first


@pytest.mark.parametrize("kind", ["parameters", "groups", "optimizer"])
@pytest.mark.parametrize(("frozen", "some", "made"), [("ab", False, 2), ("a", False, 0), ("a", True, 1), ("", True, 0)])
def test_each_group_without_trainable_parameters_gets_a_placeholder(
    kind: str, frozen: str, some: bool, made: int
) -> None:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(2), name not in frozen) for name in "ab"})
    groups = [{"params": module["a"]}, {"params": [module["b"]]}]
    optimizer = torch.optim.SGD(groups) if kind == "optimizer" else None
    if kind == "parameters":
        made = int(frozen == "ab")
    parameters = {"parameters": [*module.values()], "groups": groups, "optimizer": []}[kind]
    found = fill_groups(module, optimizer, parameters, torch.device("cpu"), some=some)
    placeholders = [*getattr(module, PLACEHOLDERS, ())]
    assert len(placeholders) == made
    assert all(each.tolist() == [0.0] and each.requires_grad for each in placeholders)
    if kind == "parameters":
        assert [id(each) for each in found] == [id(each) for each in [*parameters, *placeholders]]
    else:
        filled = optimizer.param_groups if optimizer else found
        added = iter(placeholders)
        for name, group in zip("ab", filled, strict=True):
            expected = [module[name], *([next(added)] if name in frozen and made else [])]
            given = group["params"]
            assert [id(each) for each in ([given] if torch.is_tensor(given) else given)] == [*map(id, expected)]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _save_and_load(folder: str) -> None:
    start()
    with PipelineParallelGrid(SPEC) as grid, PipelineParallelGrid("data=4") as flat:
        engine = _engine(grid, "first frozen", {}, ZERO_1)
        samples = _samples("all", grid.get_sample_rank())
        engine.train_batch(samples)
        assert (grid.stage_id == 0) == any(PLACEHOLDERS in name for name, _ in engine.module.named_parameters())
        checkpoint.save(engine, folder, "one")
        inputs = [next(samples) for _ in range(MICRO_BATCHES)]
        expected = engine.train_batch(iter(inputs)).item()
        destroy_engine(engine)
        engine = _engine(grid, "first frozen", {}, ZERO_1)
        checkpoint.load(engine, folder, "one")
        assert engine.train_batch(iter(inputs)).item() == expected
        destroy_engine(engine)
        engine = _engine(flat, "first frozen", {}, ZERO_1)
        with pytest.raises(CheckpointLayoutError, match="a stage without trainable parameters"):
            checkpoint.load(engine, folder, "one")
        destroy_engine(engine)


def test_frozen_stage_is_saved_and_loaded_in_its_layout(world: Worlds, tmp_path: Any) -> None:
    world(4).run(_save_and_load, str(tmp_path))


# -- what cannot work --------------------------------------------------------------------------------------------------


def _refuse(layers: str, config: dict[str, Any], message: str) -> None:
    start()
    blocked_calls.GRACE = 1.0
    with PipelineParallelGrid(SPEC) as grid:
        kinds = (EngineOptionError, DisagreementError, FailedRankError)
        with pytest.raises(kinds, match=message):
            _engine(grid, layers, {}, config)


@pytest.mark.parametrize("config", mark_exhaustive([ZERO_1, {"bf16": {"enabled": True}}, {}], lambda n, _: n == 0))
def test_sparse_gradients_are_refused_on_all_ranks(world: Worlds, config: dict[str, Any]) -> None:
    world(4).run(_refuse, "sparse", config, r"whose gradients are sparse \(sparse=True\)")
