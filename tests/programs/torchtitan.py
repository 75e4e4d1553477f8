"""Run torchtitan's ``Trainer`` on CPUs, on its own mesh or on that of a grid, and record what it does.

torchtitan 0.2 makes its mesh with ``init_device_mesh``. The grid's ``device_mesh`` takes the place of that call.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from ds_topo import ProcessGrid
from tests.programs.cases import MICRO_BATCH, MICRO_BATCHES, SAVED_STEP, SEQUENCE, STEPS, VOCABULARY, Case, Tokens

NAMES = {"pipe": "pp", "data": "dp_replicate", "shard": "dp_shard", "model": "tp"}
"""The program's names of axes, in its own order. Its ``cp`` needs CUDA: torch has no such attention for CPUs."""
UNUSED = {"datasets": "datasets.distributed", "tensorboard": "torch.utils.tensorboard"}
"""Packages that the program imports and does not use here, each with the module of it that it imports."""


class Batches:
    """Random batches of one replica; notes the index of each sample."""

    def __init__(self, replica: int, replicas: int, read: list[tuple[int, int]]) -> None:
        self.tokens = Tokens(10**6, 0, read)
        self.replica, self.replicas, self.batch = replica, replicas, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.batch * self.replicas + self.replica) * MICRO_BATCH
            self.batch += 1
            text = torch.stack([self.tokens[first + number]["text"] for number in range(MICRO_BATCH)])
            yield {"input": text[:, :-1].contiguous()}, text[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.batch = state["batch"]


def copy_of(source: Path, folder: Path) -> Path:
    """Return the source itself: the program needs no changes."""
    return source


def pretrain(
    program: str, spec: str, case: Case, folder: str, save: bool = False, load: bool = False
) -> tuple[tuple[int, ...], list[Any]]:
    """Train a small Llama; return this rank's place in the program's mesh, and what it did in each step.

    The arguments are those of ``megatron_deepspeed.pretrain``. The option ``replicate`` gives two copies of the shards.
    """
    data = 2 if "replicate" in case.options else 1
    shard = torch.distributed.get_world_size() // (case.pipe * data * case.model)
    degrees = dict(zip(NAMES, (case.pipe, data, shard, case.model), strict=True))
    warnings.simplefilter("ignore")
    sys.path.insert(0, program)
    for name in UNUSED:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__path__=[], __spec__=None)
            sys.modules[UNUSED[name]] = MagicMock()
    no_device = SimpleNamespace(set_device=lambda device: None, current_device=lambda: 0, synchronize=lambda: None)
    with (  # the program looks for an accelerator when it is imported, and assumes CUDA without one
        patch.object(torch._utils, "_get_available_device_type", lambda: "cpu"),
        patch.object(torch._utils, "_get_device_module", lambda device: no_device),
    ):
        from torchtitan import train
    from torchtitan.config import JobConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import register_train_spec

    found: list[Any] = []
    read: list[tuple[int, int]] = []

    class Metrics(MagicMock):
        def should_log(self, step: int) -> bool:
            return True

        def log(self, step: int, mean: float, highest: float, norm: float, extra_metrics: dict[str, Any]) -> None:
            found.append((step, mean, highest, norm, extra_metrics["lr"], extra_metrics["n_tokens_seen"], tuple(read)))
            read.clear()

    peak = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    memory = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: peak)
    register_train_spec(
        "small",
        train.train_spec_module.TrainSpec(
            model_cls=llama3.Transformer,
            model_args={"small": llama3.TransformerModelArgs(dim=32, n_layers=4, n_heads=4, vocab_size=VOCABULARY + 1)},
            parallelize_fn=llama3.parallelize_llama,
            pipelining_fn=llama3.pipeline_llm,
            build_optimizers_fn=llama3.build_optimizers,
            build_lr_schedulers_fn=llama3.build_lr_schedulers,
            build_dataloader_fn=lambda dp_rank, dp_world_size, **_: Batches(dp_rank, dp_world_size, read),
            build_tokenizer_fn=None,
            build_loss_fn=llama3.build_cross_entropy_loss,
            build_metrics_processor_fn=lambda *_: Metrics(ntokens_since_last_log=0, device_memory_monitor=memory),
        ),
    )
    config = JobConfig()
    config.model.name, config.model.flavor = "small", "small"
    config.optimizer.lr, config.optimizer.implementation = 1e-2, "for-loop"
    config.lr_scheduler.warmup_steps = 2
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps = MICRO_BATCH, SEQUENCE, STEPS
    training.mixed_precision_param, training.seed = "float32", 1
    training.global_batch_size = MICRO_BATCHES * MICRO_BATCH * data * shard
    parallelism.pipeline_parallel_degree, parallelism.tensor_parallel_degree = case.pipe, case.model
    parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = data, shard
    config.job.dump_folder = folder
    config.checkpoint.enable, config.checkpoint.interval = save or load, SAVED_STEP
    config.checkpoint.last_save_model_only = False
    config.activation_checkpoint.mode = "none"
    tools = train.dist_utils
    tools.init_distributed = lambda *_, **__: None  # the ranks of tests have joined already
    tools.set_pg_timeouts = lambda **_: None  # gloo's barrier refuses its argument
    tools.dist_mean = lambda value, mesh, group: tools.dist_sum(value, mesh, group) / mesh.size()  # gloo has no mean
    grid = None
    if spec != "stock":
        grid = ProcessGrid(spec)
        mesh = grid.device_mesh("cpu", names={axis: NAMES[axis] for axis in grid.topology().axes})
        parallel_dims.init_device_mesh = lambda *_, **__: mesh
    trainer = train.Trainer(config)
    if save:
        trainer.should_continue_training = lambda: trainer.step < SAVED_STEP
    trainer.train()
    trainer.close()
    world = trainer.parallel_dims.world_mesh
    place = tuple(world[NAMES[axis]].get_local_rank() if degree > 1 else 0 for axis, degree in degrees.items())
    weights = [
        getattr(parameter, "full_tensor", lambda parameter=parameter: parameter)().detach().double().abs().sum().item()
        for part in trainer.model_parts
        for parameter in part.parameters()
    ]
    if grid is not None:
        grid.destroy()
    return place, [*found, weights]
