"""Trainer and accelerate on a grid do in every step what they do with stock DeepSpeed on one rank per replica.

Compared are the samples of each batch, losses, learning rates, norms, loss scales, steps and skipped steps, before and
after a resume, and metrics.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed.nn
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from ds_topo import PipelineParallelGrid, use
from ds_topo.engine.current_mpu import grid_in_use
from ds_topo.engine.samples import digest
from tests.programs.test_hugging_face import recorded_samples, recorded_steps
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.exhaustive
DEEPSPEEDS = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""DeepSpeed's own schedules, with the parameters that a framework fills in."""


@dataclass(frozen=True)
class Case:
    """A program: its schedule, the number of samples, ZeRO stage, micro-batches per step and place of a resume."""

    schedule: str
    samples: int = 16
    zero: int = 1
    accumulation: int = 1
    resume: tuple[int, int] | None = None
    """The epoch and the batch, or for Trainer the step, after which the program saves and a second one resumes."""
    seq: int = 1
    """The number of ranks that share a sequence (DeepSpeed's long sequence training).

    Not with a resume, where accelerate itself fails on DeepSpeed's loader of long sequences.
    """
    split: bool = False
    """Whether AutoTP splits the model along ``model``. Stock DeepSpeed trains it whole, on one rank per replica."""
    fp16: bool = False
    """Whether the loss has a scale, which starts so high that the first steps are skipped."""
    descent: bool = False
    """Train by SGD without clipping instead of AdamW: both of those hide the scale of gradients."""

    def __str__(self) -> str:
        """Return a name for ``pytest -k``."""
        words = [self.schedule, f"samples{self.samples}", f"zero{self.zero}", f"steps{self.accumulation}"]
        words += ["resumed"] if self.resume else []
        words += ["split"] if self.split else []
        words += ["fp16"] if self.fp16 else []
        words += ["SGD"] if self.descent else []
        return "-".join([*words, "seq"] if self.seq > 1 else words)


ACCELERATE = [
    Case("linear"),
    Case("cosine", samples=13),
    Case("warmup", samples=13, zero=2, accumulation=2),
    Case("warmup", samples=15, zero=0, accumulation=3),
    Case("one cycle"),
    Case("plateau"),
    Case("WarmupLR"),
    Case("WarmupDecayLR", samples=13, accumulation=2),
    Case("WarmupCosineLR", zero=3),
    Case("linear", resume=(0, 2)),
    Case("linear", samples=23, accumulation=2, resume=(1, 1)),
    Case("WarmupDecayLR", zero=3, resume=(0, 1)),
    Case("linear", seq=2),
    Case("cosine", samples=13, accumulation=2, seq=2),
    Case("WarmupDecayLR", zero=0, seq=2),
    Case("linear", zero=2, seq=2),
    Case("linear", split=True),
    Case("cosine", samples=13, zero=2, accumulation=2, split=True),
    Case("WarmupDecayLR", zero=3, split=True),
    Case("linear", zero=0, resume=(0, 2), split=True),
    *(Case("linear", zero=zero, seq=2, descent=True) for zero in range(4)),
    *(Case("linear", samples=13, zero=zero, accumulation=2, descent=True) for zero in (0, 3)),
    Case("linear", resume=(0, 2), fp16=True),
    Case("WarmupDecayLR", samples=13, zero=2, accumulation=2, fp16=True),
]
TRAINER = [
    Case("linear", samples=13, zero=2, accumulation=2),
    Case("cosine", samples=13),
    Case("constant_with_warmup", samples=13, zero=0, accumulation=3),
    Case("reduce_lr_on_plateau"),
    Case("reduce_lr_on_plateau", samples=13),
    Case("WarmupLR"),
    Case("WarmupDecayLR", samples=13, zero=3, accumulation=2),
    Case("linear", resume=(0, 3)),
    Case("linear", samples=23, accumulation=2, resume=(0, 2)),
    Case("cosine", zero=3, resume=(0, 5)),
    Case("linear", seq=2),
    Case("cosine", samples=13, zero=2, accumulation=2, seq=2),
    Case("reduce_lr_on_plateau", zero=0, seq=2),
    Case("linear", samples=13, zero=2, accumulation=2, split=True),
    Case("WarmupLR", zero=0, split=True),
    Case("cosine", zero=3, split=True),
    Case("linear", resume=(0, 3), split=True),
    *(Case("linear", zero=zero, seq=2, descent=True) for zero in range(4)),
    *(Case("linear", samples=13, zero=zero, accumulation=2, descent=True) for zero in (0, 3)),
    Case("linear", resume=(0, 3), fp16=True),
    Case("WarmupDecayLR", samples=13, zero=2, accumulation=2, fp16=True),
]


def config_of(case: Case, spec: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0 if case.descent else 0.5,
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if case.schedule in DEEPSPEEDS:
        parameters: dict[str, Any] = dict.fromkeys(DEEPSPEEDS[case.schedule], "auto")
        config["scheduler"] = {"type": case.schedule, "params": parameters}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    if case.fp16:
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}
    if case.split and spec != "stock":
        config["tensor_parallel"] = {"autotp_size": 2}
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    return config


class _Gather(torch.autograd.Function):
    """The ``all_gather`` of ``torch.distributed.nn``, whose backward fails on gloo in groups without rank 0."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = torch.stack(gradients)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[torch.distributed.get_rank(ctx.group)], None


def _gather(tensor: torch.Tensor, group: Any) -> Any:
    return _Gather.apply(tensor, group)


@contextmanager
def layout(spec: str, case: Case) -> Iterator[int]:
    """Use a grid, except for ``stock``; yield the index of this rank's share of the samples."""
    import accelerate.accelerator
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=-1" if spec == "stock" else spec) as grid, ExitStack() as using:
        if spec != "stock":
            using.enter_context(use(grid))
        elif case.seq > 1:  # on a CPU accelerate assumes one process, and would give every rank all samples
            prepare = partial(accelerate.accelerator.prepare_data_loader, num_processes=grid.world_size)
            prepare.keywords["process_index"] = grid.grid_rank
            using.enter_context(patch.object(accelerate.accelerator, "prepare_data_loader", prepare))
        if case.seq > 1:
            using.enter_context(patch.object(torch.distributed.nn.functional, "all_gather", _gather))
            for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP"):
                using.callback(setattr, parallel_state_sp, name, None)
        is_sharded = case.seq > 1 and spec != "stock"
        yield grid.get_sample_rank() * case.seq + grid.get_axis_rank("seq") if is_sharded else grid.get_sample_rank()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _parallelism(case: Case) -> Any:
    """Return accelerate's layout for sequences that several ranks share; None for others."""
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    if case.seq == 1:
        return None
    sequences = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    replicas = torch.distributed.get_world_size() // case.seq
    return ParallelismConfig(sp_backend="deepspeed", sp_size=case.seq, dp_replicate_size=replicas, sp_handler=sequences)


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation="sdpa", **shape))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}


LENGTH = 8


# -- accelerate's own loop -------------------------------------------------------------------------------------------


def _schedule(case: Case, optimizer: Any) -> Any:
    from torch.optim import lr_scheduler

    if case.schedule == "linear":
        return lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 40))
    if case.schedule == "warmup":
        return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7))
    if case.schedule == "cosine":
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    if case.schedule == "one cycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=60)
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def _prepared(case: Case, spec: str) -> list[Any]:
    """Return an accelerator and what it has prepared: engine, optimizer, two loaders and a schedule."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    torch.manual_seed(0)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(
            hf_ds_config=config_of(case, spec), gradient_accumulation_steps=case.accumulation
        ),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        mixed_precision="fp16" if case.fp16 else "no",
        parallelism_config=_parallelism(case),
    )
    layers = (torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    has_tokens = case.seq > 1 or case.split or case.fp16
    model = _llama() if has_tokens else torch.nn.Sequential(*layers)
    if case.schedule in DEEPSPEEDS:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        schedule: Any = DummyScheduler(optimizer, total_num_steps=24, warmup_num_steps=4)
    else:
        optimizer = (torch.optim.SGD if case.descent else torch.optim.AdamW)(model.parameters(), lr=1e-2)
        schedule = _schedule(case, optimizer)
    inputs = torch.randn(case.samples, 4)
    data: Any = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    if has_tokens:
        data = Tokens(case.samples)
    loaders = (torch.utils.data.DataLoader(data, batch_size=2, shuffle=shuffles) for shuffles in (True, False))
    return [accelerator, *accelerator.prepare(model, optimizer, *loaders, schedule)]


def _epochs(prepared: list[Any], case: Case, first: int, skipped: int, folder: str | None) -> list[Any]:
    accelerator, engine, optimizer, loader, _, schedule = prepared
    found: list[Any] = [(len(loader), engine.train_batch_size())]
    for epoch in range(first, 2):
        if case.seq == 1:  # the loader of long sequences has no epochs
            loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for number, batch in enumerate(batches):
            with accelerator.accumulate(engine):
                inputs, loss = _loss(engine, batch)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step(float(epoch)) if case.schedule == "plateau" else schedule.step()
                optimizer.zero_grad()
            found.append((digest(inputs), float(loss), engine.optimizer.param_groups[0]["lr"], engine.global_steps))
            if folder is not None and (epoch, number) == case.resume:
                accelerator.save_state(folder)
    return found


def _loss(engine: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of a batch, and its mean loss on this rank."""
    if "shift_labels" not in batch and isinstance(batch, dict):
        return batch["input_ids"], engine(**batch).loss
    if isinstance(batch, dict):
        logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits.flatten(0, 1)
        labels = batch["shift_labels"].flatten()
        return batch["input_ids"], torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    inputs, targets = batch
    return inputs, (engine(inputs) - targets).square().mean()


def _accelerated(spec: str, case: Case, folder: str) -> tuple[int, list[Any]]:
    """Return this rank's share of the samples, and what it did."""
    with layout(spec, case) as share, recorded_steps() as steps:
        prepared = _prepared(case, spec)
        found = _epochs(prepared, case, 0, 0, folder)
        accelerator, engine, _, _, evaluated, _ = prepared
        engine.eval()
        for batch in evaluated:
            if isinstance(batch, dict):
                with torch.no_grad():
                    inputs, loss = _loss(engine, batch)
                found.append((digest(inputs), float(loss)))
                continue
            inputs, targets = batch
            found.append(tuple(accelerator.gather_for_metrics((engine(inputs) - targets).detach()).flatten().tolist()))
            found.append(accelerator.gather_for_metrics([f"{digest(sample)}" for sample in inputs]))
    if case.resume is not None:
        with layout(spec, case), recorded_steps() as more:
            prepared = _prepared(case, spec)
            prepared[0].load_state(folder)
            found += _epochs(prepared, case, case.resume[0], case.resume[1] + 1, None)
        steps += more
    assert not case.fp16 or any(skipped for *_, skipped in steps)
    return share, [*found, *steps]


# -- Trainer ---------------------------------------------------------------------------------------------------------


def _trained(case: Case, spec: str, folder: str, resumes: bool) -> list[Any]:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = _llama()
    options: dict[str, Any] = {"warmup_steps": 2, "max_grad_norm": 0.5}
    if case.descent:
        options |= {"optim": "sgd", "max_grad_norm": 0.0}
    if case.schedule not in DEEPSPEEDS:
        options["lr_scheduler_type"] = case.schedule
    if case.schedule == "reduce_lr_on_plateau":
        options |= {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}, "metric_for_best_model": "eval_loss"}
    arguments = TrainingArguments(
        folder,
        deepspeed=config_of(case, spec),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=case.accumulation,
        num_train_epochs=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps" if case.resume else "no",
        save_steps=case.resume[1] if case.resume else 1,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
        fp16=case.fp16,
        parallelism_config=_parallelism(case),
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(case.samples), eval_dataset=Tokens(case.samples))
    found: list[Any] = []
    forward = model.forward

    def recording(*args: Any, **given: Any) -> Any:
        found.append((model.training, digest(given["input_ids"])))
        return forward(*args, **given)

    recording.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.forward = recording
    checkpoint = f"{folder}/checkpoint-{case.resume[1]}" if case.resume and resumes else None
    with recorded_steps() as steps:
        trainer.train(resume_from_checkpoint=checkpoint)
    assert not case.fp16 or any(skipped for *_, skipped in steps)
    norm = ("grad_norm",) if case.zero else ()  # stock DeepSpeed keeps none without ZeRO
    known = ("loss", "learning_rate", *norm, "eval_loss", "epoch")
    found += [tuple(float(row[name]) for name in known if name in row) for row in trainer.state.log_history]
    return [*found, *steps, trainer.state.global_step]


def _by_trainer(spec: str, case: Case, folder: str) -> tuple[int, list[Any]]:
    """Return this rank's share of the samples, and what it did."""
    found: list[Any] = []
    for resumes in (False, True) if case.resume else (False,):
        with layout(spec, case) as share:
            found += _trained(case, spec, folder, resumes)
    return share, found


def near(mine: Any, theirs: Any) -> bool:
    """Compare numbers with a tolerance, everything else exactly."""
    if isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    return bool(
        mine == pytest.approx(theirs, rel=1e-4, abs=1e-6, nan_ok=True) if isinstance(theirs, float) else mine == theirs
    )


PROGRAMS = {"accelerate": _accelerated, "Trainer": _by_trainer}


def _in_layouts(program: str, case: Case, specs: tuple[str, ...], folder: str) -> list[tuple[int, list[Any]]]:
    """Run the program in each layout, one after the other."""
    return [PROGRAMS[program](spec, case, f"{folder}/{spec}") for spec in specs]


@pytest.mark.parametrize(
    ("program", "case"),
    [*(("accelerate", case) for case in ACCELERATE), *(("Trainer", case) for case in TRAINER)],
    ids=str,
)
def test_program_on_a_grid_does_what_it_does_with_stock_deepspeed(program: str, case: Case, tmp_path: Path) -> None:
    def run(ranks: int, *specs: str) -> list[list[tuple[int, list[Any]]]]:
        return run_ranks(ranks, _in_layouts, program, case, specs, str(tmp_path), deadline=240)

    ranks, axis = 2 * case.seq, "seq" if case.seq > 1 else "model"
    stock = dict(found for [found] in run(ranks, "stock"))
    assert len(stock) == ranks
    specs = (f"{axis}=2,data=2", f"data=2,{axis}=2")
    # DeepSpeed wraps transformers' attention for good: each layout of long sequences has ranks of its own
    runs = [run(4, spec) for spec in specs] if case.seq > 1 else [run(4, *specs)]
    for share, found in chain(*chain(*runs)):
        assert len(found) == len(stock[share])
        for mine, theirs in zip(found, stock[share], strict=True):
            assert near(mine, theirs), f"{mine} on the grid, {theirs} with stock DeepSpeed"


# -- at another number of replicas -----------------------------------------------------------------------------------

STEP, MOST = 8, 2
"""The samples of a step, and the most of a rank in a forward pass."""


def _elastic_config(zero: int) -> dict[str, Any]:
    config = config_of(Case("linear", zero=zero), "data=-1")
    return {**config, "gradient_accumulation_steps": "auto"}


def _read_in_steps(read: list[int], steps: int, share: int) -> list[list[int]]:
    """Return the samples of each step, over all replicas."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (share, read))
    by_share = dict(everyone)
    number = STEP // len(by_share)
    return [
        sorted(index for own in by_share.values() for index in own[step * number : (step + 1) * number])
        for step in range(steps)
    ]


def _trainer_on(spec: str, zero: int, folder: str, checkpoint: str | None) -> tuple[list[Any], ...]:
    """Train with Trainer; return samples by step, the records of Trainer's log, and rates and norms of the steps."""
    from transformers import Trainer, TrainingArguments

    with layout(spec, Case("linear")) as share, recorded_samples(Tokens) as read, recorded_steps() as steps:
        grid = grid_in_use()
        assert grid is not None
        sizes = grid.batch_sizes(STEP, MOST)
        torch.manual_seed(0)
        arguments = TrainingArguments(
            folder,
            deepspeed=_elastic_config(zero),
            per_device_train_batch_size=sizes["train_micro_batch_size_per_gpu"],
            gradient_accumulation_steps=sizes["gradient_accumulation_steps"],
            max_grad_norm=0.5,
            num_train_epochs=2,
            learning_rate=1e-2,
            warmup_steps=2,
            save_strategy="steps",
            save_steps=2,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        trainer = Trainer(_llama(), arguments, train_dataset=Tokens(24))
        trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.model_wrapped.train_batch_size() == STEP
        known = ("step", "epoch", "loss", "learning_rate", "grad_norm")
        rows = [tuple(float(row[name]) for name in known) for row in trainer.state.log_history if "loss" in row]
        return _read_in_steps(read, len(steps), share), rows, steps


def _accelerate_on(spec: str, zero: int, folder: str, checkpoint: str | None) -> tuple[list[Any], ...]:
    """Train with a loop of accelerate; return samples by step, losses and rates, and rates and norms of the steps."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DataLoaderConfiguration, DeepSpeedPlugin

    with layout(spec, Case("linear")) as share, recorded_samples(Tokens) as read, recorded_steps() as steps:
        grid = grid_in_use()
        assert grid is not None
        sizes = grid.batch_sizes(STEP, MOST)
        count, size = sizes["gradient_accumulation_steps"], sizes["train_micro_batch_size_per_gpu"]
        torch.manual_seed(0)
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_elastic_config(zero), gradient_accumulation_steps=count),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            step_scheduler_with_optimizer=False,  # accelerate would advance it once for each replica
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # one order for each epoch
        )
        model = _llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rate = _schedule(Case("linear"), optimizer)
        loader = torch.utils.data.DataLoader(Tokens(24), batch_size=size, shuffle=True)
        engine, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
        first = 0
        if checkpoint is not None:
            accelerator.load_state(checkpoint)
            first = int(checkpoint.rpartition("-")[2])
        losses, rows = list[float](), list[Any]()
        for epoch in range(first * STEP // 24, 2):
            loader.set_epoch(epoch)
            skipped = (first - epoch * 24 // STEP) * count if epoch == first * STEP // 24 else 0
            for batch in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
                with accelerator.accumulate(engine):
                    loss = engine(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    if accelerator.sync_gradients:
                        rate.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
                if len(losses) == count:
                    rows.append((sum(losses) / count, engine.optimizer.param_groups[0]["lr"]))
                    losses.clear()
                    if len(rows) == 2:
                        accelerator.save_state(f"{folder}/checkpoint-{first + 2}")
        return _read_in_steps(read, len(steps), share), rows, steps


ELASTIC = {"Trainer": _trainer_on, "accelerate": _accelerate_on}


def _elastic(program: str, zero: int, spec: str, folder: str, checkpoint: str | None) -> tuple[list[Any], ...]:
    return ELASTIC[program](spec, zero, folder, checkpoint)


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("program", ELASTIC)
def test_program_resumes_on_other_numbers_of_replicas(program: str, zero: int, tmp_path: Path) -> None:
    """Samples, losses, rates and norms are those of an undisturbed job, also from the middle of an epoch on."""

    def run(ranks: int, spec: str, checkpoint: str | None = None) -> tuple[list[Any], ...]:
        arguments = (program, zero, spec, str(tmp_path / spec), checkpoint)
        found: tuple[list[Any], ...] = run_ranks(ranks, _elastic, *arguments, deadline=240)[0]
        return found

    whole = run(4, "data=4")
    assert [len(part) for part in whole] == [6, 6, 6]
    assert sorted(whole[0][0] + whole[0][1] + whole[0][2]) == [*range(24)]
    kept = ("data=4/checkpoint-2", "data=4/checkpoint-2", "data=2/checkpoint-4")
    for ranks, spec, checkpoint in zip((2, 4, 4), ("data=2", "model=2,data=2", "data=-1"), kept, strict=True):
        resumed = run(ranks, spec, str(tmp_path / checkpoint))
        for mine, theirs in zip(resumed, whole, strict=True):
            expected = theirs if len(mine) == 6 else theirs[int(checkpoint[-1]) :]  # Trainer's log has earlier steps
            assert near(mine, expected), f"{spec}: {mine} instead of {expected}"
