"""Trainer and accelerate on a grid do in every step what they do with stock DeepSpeed on one rank per replica.

Compared are the samples of each batch, losses, learning rates, norms and steps, before and after a resume, and metrics.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from ds_topo import PipelineParallelGrid, use
from ds_topo.engine.batches import digest
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

    def __str__(self) -> str:
        """Return a name for ``pytest -k``."""
        words = [self.schedule, f"samples{self.samples}", f"zero{self.zero}", f"steps{self.accumulation}"]
        return "-".join([*words, "resumed"] if self.resume else words)


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
]


def config_of(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if case.schedule in DEEPSPEEDS:
        parameters: dict[str, Any] = dict.fromkeys(DEEPSPEEDS[case.schedule], "auto")
        config["scheduler"] = {"type": case.schedule, "params": parameters}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
    return config


@contextmanager
def layout(spec: str) -> Iterator[tuple[int, int]]:
    """Use a grid, except for ``stock``; yield the index of this rank's samples and the number of shares."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    with PipelineParallelGrid("data=-1" if spec == "stock" else spec) as grid, ExitStack() as using:
        if spec != "stock":
            using.enter_context(use(grid))
        yield grid.get_sample_rank(), grid.get_sample_world_size()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


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


def _prepared(case: Case) -> list[Any]:
    """Return an accelerator and what it has prepared: engine, optimizer, two loaders and a schedule."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    torch.manual_seed(0)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(case), gradient_accumulation_steps=case.accumulation),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if case.schedule in DEEPSPEEDS:
        optimizer: Any = DummyOptim(model.parameters(), lr=1e-2)
        schedule: Any = DummyScheduler(optimizer, total_num_steps=24, warmup_num_steps=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = _schedule(case, optimizer)
    inputs = torch.randn(case.samples, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    loaders = (torch.utils.data.DataLoader(data, batch_size=2, shuffle=shuffles) for shuffles in (True, False))
    return [accelerator, *accelerator.prepare(model, optimizer, *loaders, schedule)]


def _epochs(prepared: list[Any], case: Case, first: int, skipped: int, folder: str | None) -> list[Any]:
    accelerator, engine, optimizer, loader, _, schedule = prepared
    found: list[Any] = [(len(loader), engine.train_batch_size())]
    for epoch in range(first, 2):
        loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if epoch == first and skipped else loader
        for number, (inputs, targets) in enumerate(batches):
            with accelerator.accumulate(engine):
                loss = (engine(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                schedule.step(float(epoch)) if case.schedule == "plateau" else schedule.step()
                optimizer.zero_grad()
            rate, norm = engine.optimizer.param_groups[0]["lr"], engine.get_global_grad_norm() or 0.0
            found.append((digest(inputs), float(loss), rate, float(norm), engine.global_steps))
            if folder is not None and (epoch, number) == case.resume:
                accelerator.save_state(folder)
    return found


def _accelerated(spec: str, case: Case, folder: str) -> tuple[int, list[Any]]:
    """Return this rank's share of the samples, and what it did."""
    with layout(spec) as (share, _):
        prepared = _prepared(case)
        found = _epochs(prepared, case, 0, 0, folder)
        accelerator, engine, _, _, evaluated, _ = prepared
        engine.eval()
        for inputs, targets in evaluated:
            found.append(tuple(accelerator.gather_for_metrics((engine(inputs) - targets).detach()).flatten().tolist()))
            found.append(accelerator.gather_for_metrics([f"{digest(sample)}" for sample in inputs]))
    if case.resume is not None:
        with layout(spec):
            prepared = _prepared(case)
            prepared[0].load_state(folder)
            found += _epochs(prepared, case, case.resume[0], case.resume[1] + 1, None)
    return share, found


# -- Trainer ---------------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random sequences of 8 tokens."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def _trained(case: Case, folder: str, resumes: bool) -> list[Any]:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))
    options: dict[str, Any] = {"warmup_steps": 2}
    if case.schedule not in DEEPSPEEDS:
        options["lr_scheduler_type"] = case.schedule
    if case.schedule == "reduce_lr_on_plateau":
        options |= {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}, "metric_for_best_model": "eval_loss"}
    arguments = TrainingArguments(
        folder,
        deepspeed=config_of(case),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=case.accumulation,
        max_grad_norm=0.5,
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
    trainer.train(resume_from_checkpoint=checkpoint)
    known = ("loss", "learning_rate", "grad_norm", "eval_loss", "epoch")
    found += [tuple(float(row[name]) for name in known if name in row) for row in trainer.state.log_history]
    return [*found, trainer.state.global_step]


def _by_trainer(spec: str, case: Case, folder: str) -> tuple[int, list[Any]]:
    """Return this rank's share of the samples, and what it did."""
    found: list[Any] = []
    for resumes in (False, True) if case.resume else (False,):
        with layout(spec) as (share, _):
            found += _trained(case, folder, resumes)
    return share, found


def near(mine: Any, theirs: Any) -> bool:
    """Compare numbers with a tolerance, everything else exactly."""
    if isinstance(theirs, (tuple, list)):
        return len(mine) == len(theirs) and all(map(near, mine, theirs))
    return bool(mine == pytest.approx(theirs, rel=1e-4, abs=1e-6) if isinstance(theirs, float) else mine == theirs)


PROGRAMS = {"accelerate": _accelerated, "Trainer": _by_trainer}


@pytest.mark.parametrize("spec", ["model=2,data=2", "data=2,model=2"])
@pytest.mark.parametrize(
    ("program", "case"),
    [*(("accelerate", case) for case in ACCELERATE), *(("Trainer", case) for case in TRAINER)],
    ids=str,
)
def test_program_on_a_grid_does_what_it_does_with_stock_deepspeed(
    program: str, case: Case, spec: str, tmp_path: Path
) -> None:
    stock = dict(run_ranks(2, PROGRAMS[program], "stock", case, str(tmp_path / "stock"), deadline=240))
    for share, found in run_ranks(4, PROGRAMS[program], spec, case, str(tmp_path / "grid"), deadline=240):
        assert len(found) == len(stock[share])
        for mine, theirs in zip(found, stock[share], strict=True):
            assert near(mine, theirs), f"{mine} on the grid, {theirs} with stock DeepSpeed"
