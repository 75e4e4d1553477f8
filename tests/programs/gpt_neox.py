"""Run the ``pretrain`` of GPT-NeoX on CPUs, with stock DeepSpeed or on a grid, and record what it does.

``copy_of`` copies the program and makes the changes that its guide lists for this release of DeepSpeed. GPT-NeoX calls
``torch.cuda`` itself: ``_answer_for_cuda`` answers on a machine without it.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch

from ds_topo import PipelineParallelGrid, parallel_state, use
from tests.programs.cases import MICRO_BATCH, MICRO_BATCHES, SAVED_STEP, SEQUENCE, STEPS, Case, Tokens, edit

EDITS = {
    "megatron/training.py": [
        (
            "return model.eval_batch(data_iterator, return_logits=return_logits)",
            "return model.eval_batch(data_iterator, return_logits=return_logits), {}",
        ),
    ],
}
"""The change of ``examples/guides/program_gpt_neox.md``."""
UNUSED = (
    *("pkg_resources", "lm_dataformat", "ftfy", "shortuuid", "best_download", "sentencepiece", "tiktoken", "nltk"),
    "requests",
)
"""Packages that the program imports, and that this run does not use."""


def copy_of(source: Path, folder: Path) -> Path:
    """Copy the program, with the change that it needs for this release of DeepSpeed."""
    shutil.copytree(source / "megatron", folder / "megatron")
    edit(folder, EDITS)
    return folder


class _Absent(ModuleType):
    """A stand-in for a package that is imported and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Anything:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


def _answer_for_cuda() -> None:
    def same(value: Any, *args: Any, **options: Any) -> Any:
        return value

    torch.Tensor.cuda = torch.nn.Module.cuda = same  # type: ignore[assignment]
    answers: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "LongTensor": torch.LongTensor,
        "ByteTensor": torch.ByteTensor,
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "get_device_capability": lambda *args: (8, 0),
        "nvtx": _Anything(),
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), lambda *args: None),
        **dict.fromkeys(
            ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), lambda *args: 0
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)

    def adam(parameters: Any, **options: Any) -> Any:
        return torch.optim.AdamW(parameters, **{"weight_decay": 0.0, **options})

    deepspeed.ops.adam.FusedAdam = adam


def _config(case: Case, save: str | None, load: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {
        "pipe_parallel_size": 0 if case.zero > 1 else case.pipe,
        "model_parallel_size": case.model,
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": SEQUENCE,
        "max_position_embeddings": SEQUENCE,
        "norm": "layernorm",
        "pos_emb": "learned",
        "no_weight_tying": True,
        "attention_config": [[["global"], 4]],
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8}},
        "min_lr": 1e-4,
        "global_num_gpus": torch.distributed.get_world_size(),
        "zero_optimization": {"stage": case.zero},
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": case.clip,
        "weight_decay": 0.1,
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "train_iters": SAVED_STEP if save else STEPS,
        "lr_decay_iters": 8,
        "lr_decay_style": "cosine",
        "warmup": 0.25,
        "distributed_backend": "gloo",
        "checkpoint_factor": 1000,
        "eval_interval": 2,
        "eval_iters": 1,
        "data_path": "none",
        "tokenizer_type": "CharLevelTokenizer",
        "vocab_file": "none",
        "num_workers": 0,
        "make_vocab_size_divisible_by": 4,
        "use_wandb": False,
        "partition_activations": False,
        "log_interval": 1,
        "steps_per_print": 10**9,
        **dict.fromkeys(
            ("scaled_upper_triang_masked_softmax_fusion", "bias_gelu_fusion", "rope_fusion", "layernorm_fusion"), False
        ),
    }
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1}
    else:
        config["precision"] = "fp32"
    return config | {name: folder for name, folder in (("save", save), ("load", load)) if folder}


def pretrain(
    program: str, spec: str, case: Case, folder: str, save: bool = False, load: bool = False
) -> tuple[tuple[int, ...], list[Any]]:
    """Run the program; return this rank's place in the program's own groups, and what it did in each step.

    The arguments are those of ``megatron_deepspeed.pretrain``.
    """
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    deepspeed.utils.logger.setLevel(40)
    _answer_for_cuda()
    importlib.import_module("transformers.models.gpt2")  # looks for some of them itself
    sys.modules.update({name: _Absent(name) for name in UNUSED if importlib.util.find_spec(name) is None})
    sys.path.insert(0, program)
    import megatron.mpu

    grid = None
    if spec != "stock":
        grid = PipelineParallelGrid(spec)
        grid.correct_norms = False
        parallel_state.install(grid, megatron.mpu)
        use(grid)
    from megatron import training
    from megatron.data import data_utils
    from megatron.neox_arguments import NeoXArgs

    found: list[Any] = []
    read: list[tuple[int, int]] = []
    log, evaluate = training.training_log, training.evaluate

    def recording_log(**given: Any) -> Any:
        norm = given["model"].get_global_grad_norm()
        numbers = {name: float(loss) for name, loss in given["loss_dict"].items()}
        step = (given["iteration"], given["learning_rate"], given["loss_scale"], given["skipped_iter"])
        found.append((step, numbers, None if norm is None else float(norm), tuple(read)))
        read.clear()
        return log(**given)

    def recording_evaluate(**given: Any) -> Any:
        result = evaluate(**given)
        found.append((result, tuple(read)))
        read.clear()
        return result

    def datasets(train_valid_test_num_samples: Any, **options: Any) -> tuple[Tokens, ...]:
        return tuple(Tokens(count, seed, read) for seed, count in enumerate(train_valid_test_num_samples))

    training.training_log, training.evaluate = recording_log, recording_evaluate
    data_utils.build_train_valid_test_datasets = datasets
    data_utils.compile_helper = lambda: None
    checkpoint = str(Path(folder, "checkpoint"))
    arguments = NeoXArgs.from_dict(_config(case, checkpoint if save else None, checkpoint if load else None))
    arguments.user_script = "train.py"
    arguments.configure_distributed_args()
    arguments.build_tokenizer()
    training.pretrain(neox_args=arguments)
    mpu = megatron.mpu
    place = (mpu.get_pipe_parallel_rank(), mpu.get_data_parallel_rank(), mpu.get_model_parallel_rank())
    if grid is not None:
        grid.destroy()
    return place, found
