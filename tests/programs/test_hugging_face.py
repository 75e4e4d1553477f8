"""Hugging Face's Trainer and accelerate have the same samples, losses, rates and norms on a grid as without one."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo import PipelineParallelGrid, use
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STEPS = 4


def start() -> None:
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)


def _forget_frameworks() -> None:
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _without_reducer(make_config: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in make_config(*arguments).items() if name != "gradient_reducer"}


@contextmanager
def recorded_steps() -> Iterator[list[tuple[float, ...]]]:
    """Record the learning rate, norm, loss scale and number of skipped steps after every step of an engine.

    Stock DeepSpeed keeps no norm without ZeRO.
    """
    found: list[tuple[float, ...]] = []
    take = DeepSpeedEngine._take_model_step

    def recording(engine: Any, *args: Any, **options: Any) -> None:
        take(engine, *args, **options)
        norm = engine.get_global_grad_norm() if engine.zero_optimization() else None
        scale = getattr(engine.optimizer, "cur_scale", 1.0)
        found.append((engine.get_lr()[0], float(norm or 0.0), float(scale), engine.skipped_steps))

    with patch.object(DeepSpeedEngine, "_take_model_step", recording):
        yield found


@contextmanager
def recorded_samples(data: type) -> Iterator[list[int]]:
    """Record the index of each sample of a data set that this rank reads."""
    found: list[int] = []
    read = data.__getitem__  # type: ignore[attr-defined]

    def recording(samples: Any, index: int) -> Any:
        found.append(index)
        return read(samples, index)

    with patch.object(data, "__getitem__", recording):
        yield found


def in_order(read: list[int], share: int, batches: int, samples: int) -> list[int]:
    """Return the samples of the first batches of all ranks, ``samples`` of each share and batch, by batch and share."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (share, read))
    by_share = dict(sorted(each for each in everyone if each[1]))  # the middle of a pipeline reads nothing
    assert all(len(own) >= batches * samples for own in by_share.values())
    starts = range(0, batches * samples, samples)
    return [index for start in starts for own in by_share.values() for index in own[start : start + samples]]


Steps = tuple[list[float], list[tuple[float, ...]], list[int]]
"""The loss of each step, and what :func:`recorded_steps` and :func:`in_order` return."""


def assert_alike(found: Steps, expected: Steps) -> None:
    assert len(expected[0]) == len(expected[1]) == STEPS
    assert found[2] == expected[2]
    assert len(set(found[2])) == len(found[2]) > STEPS
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert found[1] == [pytest.approx(step, rel=1e-4) for step in expected[1]]


# -- Trainer, and the example ----------------------------------------------------------------------------------------


def _fine_tuned(folder: str, layouts: tuple[tuple[str, int], ...]) -> dict[str, Steps]:
    """Return the steps of the example's model with stock Trainer and on grids."""
    import finetune_hugging_face as example

    start()
    found: dict[str, Steps] = {}
    for spec, zero in (("stock", 1), *layouts):
        arguments = argparse.Namespace(
            model=None, steps=STEPS, batch_size=8, context=32, learning_rate=1e-2, zero=zero, seed=0, out=Path(folder)
        )
        torch.manual_seed(0)
        model, tokens = example.model_and_tokens(arguments)
        data = example.Sequences(tokens, arguments.context, arguments.seed)
        with (
            PipelineParallelGrid("data=4" if spec == "stock" else spec) as grid,
            recorded_steps() as steps,
            recorded_samples(example.Sequences) as read,
        ):
            if spec == "stock":
                with patch.object(example, "deepspeed_config", partial(_without_reducer, example.deepspeed_config)):
                    losses = example.train_with_trainer(model, data, grid, arguments)
            else:
                example.split_blocks(model, grid)
                train = example.train_pipeline if "pipe" in spec else example.train_with_trainer
                with use(grid):
                    losses = train(model, data, grid, arguments)
            replicas = grid.get_sample_world_size()
            order = in_order(read, grid.get_sample_rank(), 2 * STEPS, arguments.batch_size // replicas // 2)
            found[f"{spec} {zero}"] = losses, steps, order
        _forget_frameworks()
    return found


@pytest.mark.parametrize(
    "layouts",
    [
        (("model=2,data=2", 1),),
        pytest.param((("data=2,model=2", 3), ("model=2,pipe=2", 0)), marks=pytest.mark.exhaustive),
        pytest.param((("data=4", 1),), marks=pytest.mark.exhaustive),
    ],
    ids=["ZeRO 1", "ZeRO 3 and pipeline", "data alone"],
)
def test_trainer_on_a_grid_trains_as_stock_trainer(layouts: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    runs = run_ranks(4, _fine_tuned, str(tmp_path), layouts, deadline=240)[0]
    stock = runs.pop("stock 1")
    assert stock[0][-1] < stock[0][0] - 0.1
    assert len(runs) == len(layouts)
    for found in runs.values():
        assert_alike(found, stock)


def _warnings_of_a_split_model(folder: str, more: dict[str, Any]) -> list[str]:
    """Train a model that AutoTP splits with Trainer; return what is said about saving it."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    start()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "tensor_parallel": {"autotp_size": 2},
        "zero_optimization": {"stage": 1, **more},
    }
    options = {"max_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    with use(PipelineParallelGrid("model=2")), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
        trainer = Trainer(model, TrainingArguments(folder, deepspeed=config, **options), train_dataset=Sequences())
        trainer.train()
        trainer.save_model(folder)
    _forget_frameworks()
    dist.barrier()
    is_written = Path(folder, "model.safetensors").exists()
    said = [str(one.message) for one in caught if "will write no model.safetensors" in str(one.message)]
    return [*said, f"written: {is_written}"]


@pytest.mark.thorough
@pytest.mark.parametrize("is_gathered", [False, True])
def test_trainer_warns_that_it_will_not_save_a_split_model(is_gathered: bool, tmp_path: Path) -> None:
    more = {"stage3_gather_16bit_weights_on_model_save": is_gathered}
    first, other = run_ranks(2, _warnings_of_a_split_model, str(tmp_path), more, deadline=120)
    assert other == [f"written: {is_gathered}"]
    assert len(first) == (1 if is_gathered else 2)


# -- accelerate, and long sequences ----------------------------------------------------------------------------------

LENGTH = 16


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.arange(LENGTH)}


def _long_sequences(spec: str) -> Steps:
    """Return the mean losses and the steps of a loop whose sequences accelerate and DeepSpeed split."""
    with recorded_steps() as steps, recorded_samples(Sequences) as read:
        losses, share = _losses_of_long_sequences(spec)
        return losses, steps, in_order(read, share, STEPS // 2, 1)


def _share(grid: PipelineParallelGrid | None) -> int:
    """Return which of four samples this rank reads; the ranks of a sequence train on each other's."""
    return dist.get_rank() if grid is None else 2 * grid.get_axis_rank("data") + grid.get_axis_rank("seq")


def _losses_of_long_sequences(spec: str) -> tuple[list[float], int]:
    import accelerate.accelerator
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    start()
    grid = None if spec == "stock" else PipelineParallelGrid(spec)
    if grid is None:  # on a CPU accelerate assumes one process, and would give every rank all samples
        stock_prepare = accelerate.accelerator.prepare_data_loader
        accelerate.accelerator.prepare_data_loader = partial(_prepare_for_all_ranks, stock_prepare)
    else:
        use(grid)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation="sdpa", **shape, **heads))
    sequences = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(
            sp_backend="deepspeed", sp_size=2, dp_replicate_size=2, sp_handler=sequences
        ),
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: Any = torch.utils.data.DataLoader(Sequences(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, share = [], _share(grid)
    for _, samples in zip(range(STEPS), loader, strict=False):
        labels = samples.pop("shift_labels")
        assert samples["input_ids"].shape == (1, LENGTH // 2)
        logits = model(input_ids=samples["input_ids"], position_ids=samples["position_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / 4)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if grid is not None:
        assert model.mpu is grid
        grid.destroy()
    return losses, share


def _prepare_for_all_ranks(prepare: Any, *args: Any, **options: Any) -> Any:
    options |= {"num_processes": dist.get_world_size(), "process_index": dist.get_rank()}
    return prepare(*args, **options)


@pytest.mark.exhaustive
def test_long_sequences_on_a_grid_train_as_without_it() -> None:
    [stock, *_] = run_ranks(4, _long_sequences, "stock")
    [in_stock_order, *_] = run_ranks(4, _long_sequences, "data=2,seq=2")
    [found, *_] = run_ranks(4, _long_sequences, "seq=2,data=2")
    assert in_stock_order == stock
    assert_alike(found, stock)


def _exchange(ctx: Any, group: Any, received: list[torch.Tensor], *sent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Do what torch's ``_AlltoAll`` does; on gloo that takes numbers within a group for ranks of the job."""
    ctx.group, ctx.input_tensor_size_list = group, [one.shape for one in sent]
    for index, one in enumerate(received):
        parts = [part.contiguous() for part in sent] if index == dist.get_rank(group) else None
        dist.scatter(one, parts, group_src=index, group=group)
    return tuple(received)


def _trainer_of_sequences(spec: str, folder: str) -> Steps:
    """Return the losses, the steps and the samples of a Trainer that splits sequences."""
    import accelerate.accelerator
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from torch.distributed.nn.functional import _AlltoAll
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    start()
    _AlltoAll.forward = staticmethod(_exchange)
    grid = None if spec == "stock" else PipelineParallelGrid(spec)
    if grid is None:
        stock_prepare = accelerate.accelerator.prepare_data_loader
        accelerate.accelerator.prepare_data_loader = partial(_prepare_for_all_ranks, stock_prepare)
    else:
        use(grid)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation="sdpa", **shape, **heads))
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    }
    sequences = DeepSpeedSequenceParallelConfig(
        sp_seq_length=LENGTH, sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    arguments = TrainingArguments(
        folder,
        deepspeed=config,
        parallelism_config=ParallelismConfig(
            sp_backend="deepspeed", sp_size=2, dp_replicate_size=2, sp_handler=sequences
        ),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences())
    share = _share(grid)
    with recorded_steps() as steps, recorded_samples(Sequences) as read:
        trainer.train()
    assert trainer.model_wrapped.train_batch_size() == 2
    if grid is not None:
        assert trainer.model_wrapped.mpu is grid
        grid.destroy()
    losses = [step["loss"] for step in trainer.state.log_history if "grad_norm" in step]
    return losses, steps, in_order(read, share, STEPS // 2, 1)


@pytest.mark.exhaustive
def test_trainer_splits_sequences_along_seq_in_any_order(tmp_path: Path) -> None:
    stock, in_stock_order, found = (
        run_ranks(4, _trainer_of_sequences, spec, str(tmp_path))[0]
        for spec in ("stock", "data=2,seq=2", "seq=2,data=2")
    )
    assert in_stock_order == stock
    assert_alike(found, stock)


def _attention_of_a_grid(spec: str) -> list[tuple[float, float]]:
    """Return the mean loss and the norm of each step of a loop that uses DeepSpeed's long sequences by itself."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from transformers import LlamaConfig, LlamaForCausalLM

    start()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=64, attn_implementation="sdpa", **shape, **heads))
    samples = [Sequences()[index] for index in range(4 * STEPS)]
    losses = []
    if spec == "alone":  # every step trains on the samples of two replicas
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(STEPS):
            # the ranks of a group along seq train on each other's samples, one after the other
            own = [samples[4 * (step // 2) + 2 * replica + step % 2] for replica in range(2)]
            inputs = {name: torch.stack([sample[name] for sample in own]) for name in own[0]}
            labels = F.pad(inputs.pop("labels"), (0, 1), value=-100)[:, 1:]
            loss = F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / labels.numel()
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.item(), norm.item()))
        return losses
    with PipelineParallelGrid(spec) as grid, use(grid):
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1, seq_length_is_variable=True)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        engine, *_ = deepspeed.initialize(model=model, mpu=mpu, config=config, model_parameters=model.parameters())
        assert engine.mpu is grid
        loader: Any = torch.utils.data.DataLoader(samples[_share(grid) :: 4], batch_size=1)  # type: ignore[arg-type]
        place, group = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()
        batches = UlyssesSPDataLoaderAdapter(loader, place, group, grid.get_axis_size("seq"), engine.device)
        for _, batch in zip(range(STEPS), batches, strict=False):
            labels = batch.pop("shift_labels")
            logits = engine(**batch).logits
            # the mean over this rank's positions: as in DeepSpeed alone, ZeRO 3 averages over the ranks of a sequence
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()
            total = loss.detach().clone()
            dist.all_reduce(total)
            engine.backward(loss)
            engine.step()
            losses.append((total.item() / 4, float(engine.get_global_grad_norm())))
        engine.destroy()
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize("spec", ["data=2,seq=2", "seq=2,data=2"])
def test_attention_and_batches_of_a_grid_equal_one_process(spec: str) -> None:
    [alone] = run_ranks(1, _attention_of_a_grid, "alone")
    found = run_ranks(4, _attention_of_a_grid, spec)[0]
    assert found == [pytest.approx(step, rel=1e-5) for step in alone]


# -- accelerate's schedulers -----------------------------------------------------------------------------------------


def _learning_rates(spec: str, uses_dummy: bool) -> list[float]:
    """Return the learning rate after each step of a loop of accelerate's own, whose schedule has an end."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    start()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if uses_dummy:
        config |= {
            "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
            "scheduler": {
                "type": "WarmupDecayLR",
                "params": {f"{name}": "auto" for name in ("warmup_max_lr", "warmup_num_steps", "total_num_steps")}
                | {"warmup_min_lr": "auto"},
            },
        }
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 4)
    optimizer: Any
    scheduler: Any
    if uses_dummy:
        optimizer = DummyOptim(model.parameters(), lr=1e-2)
        scheduler = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 16))
    loader: Any = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), batch_size=2)
    with PipelineParallelGrid(spec if spec != "stock" else "data=2") as grid, ExitStack() as using:
        if spec != "stock":
            using.enter_context(use(grid))
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[InitProcessGroupKwargs("gloo")]
        )
        assert accelerator.num_processes == dist.get_world_size()
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        rates = []
        for _, [inputs] in zip(range(STEPS), loader, strict=False):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(model.optimizer.param_groups[0]["lr"])
        assert model.train_batch_size() == 4
        _gather_metrics(accelerator)
        if spec != "stock":
            _read_what_is_dealt(accelerator, grid)
    assert accelerator.num_processes == dist.get_world_size()
    return rates


def _gather_metrics(accelerator: Any) -> None:
    """Gather five samples, which do not fill the batches of two replicas."""
    numbers: Any = torch.utils.data.TensorDataset(torch.arange(5))
    for [batch] in accelerator.prepare(torch.utils.data.DataLoader(numbers, batch_size=2)):
        expected = [4] if accelerator.gradient_state.end_of_dataloader else [0, 1, 2, 3]
        assert accelerator.gather_for_metrics(batch).tolist() == expected
        assert accelerator.gather_for_metrics([f"{int(number)}" for number in batch]) == [*map(str, expected)]


def _read_what_is_dealt(accelerator: Any, grid: PipelineParallelGrid) -> None:
    """Read 21 samples by a loader of the grid, of which one replica has 11, and gather each of them once."""
    numbers: Any = torch.utils.data.TensorDataset(torch.arange(21))
    own, whole = [], []
    for [batch] in accelerator.prepare(grid.data_loader(numbers, 4)):
        own += batch.tolist()
        whole += accelerator.gather_for_metrics(batch).tolist()
    assert own == [*range(grid.get_sample_rank(), 21, 2), *[0] * grid.get_sample_rank()]
    assert sorted(whole) == list(range(21))


def _learning_rates_of_both(spec: str) -> list[list[float]]:
    """Return the rates of a scheduler of torch and of a DummyScheduler."""
    found = []
    for uses_dummy in (False, True):
        found.append(_learning_rates(spec, uses_dummy))
        _forget_frameworks()
    return found


@pytest.mark.thorough
def test_schedules_and_metrics_on_a_grid_are_those_of_its_replicas() -> None:
    stock = run_ranks(2, _learning_rates_of_both, "stock")[0]
    assert all(rates[0] != rates[-1] for rates in stock)
    assert run_ranks(4, _learning_rates_of_both, "model=2,data=2") == [stock] * 4
