"""Run the ``pretrain`` of Megatron-DeepSpeed on CPUs, with stock DeepSpeed or on a grid, and record what it does.

``copy_of`` copies the program and makes the changes that its guide lists for this release of DeepSpeed.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch

from ds_topo import PipelineParallelGrid, parallel_state, use
from tests.programs.cases import MICRO_BATCH, MICRO_BATCHES, SAVED_STEP, SEQUENCE, STEPS, VOCABULARY, Case, Tokens, edit

CONTIGUOUS = "query_layer, key_layer, value_layer = (x.contiguous() for x in (query_layer, key_layer, value_layer))"
AS_PROPERTY = ("    def universal_checkpoint_info(self):", "    @property\n    def universal_checkpoint_info(self):")
DENSE = "if max(args.num_experts) == 1: "
EDITS = {
    # of examples/guides/program_megatron.md
    "megatron/training.py": [
        ("from deepspeed.compression.compress import init_compression, redundancy_clean\n", ""),
        (
            "from megatron.model.vision.knn_monitor import compute_feature_bank\n",
            "",
        ),  # for machines without torchvision
    ],
    "megatron/model/transformer.py": [
        (
            "                value_layer, attention_mask):\n",
            f"                value_layer, attention_mask):\n        {CONTIGUOUS}\n",
        ),
        (
            "self.dist_attn(query_layer, key_layer, value_layer, attention_mask)",
            "self.dist_attn(query_layer, key_layer, value_layer, 1, None, attention_mask).flatten(2)",
        ),
        (
            "        # [sq, b, np, hn] --> [sq, b, hp]\n",
            "        if parallel_state.get_sequence_parallel_world_size() > 1:\n            return context_layer\n",
        ),
    ],
    "megatron/model/module.py": [AS_PROPERTY],
    "megatron/model/gpt_model.py": [AS_PROPERTY],
    "megatron/checkpointing.py": [
        ("        state_dict[UNIVERSAL_CHECKPOINT_INFO] =", f"        {DENSE}state_dict[UNIVERSAL_CHECKPOINT_INFO] ="),
        ("model[0].universal_checkpoint_info()", "model[0].universal_checkpoint_info"),
    ],
    # for gloo, which gathers into tensors of the same shape only
    "megatron/core/sequence_parallel/cross_entropy.py": [
        ("all_gather_into_tensor(loss_all, loss,", "all_gather_into_tensor(loss_all.view(-1), loss,"),
    ],
    # for machines without nvcc and six
    "megatron/initialize.py": [("        _compile_dependencies()\n", "")],
    "megatron/tokenizer/bert_tokenization.py": [("import six\n", "")],
}
"""The changes of each file: what the program needs for DeepSpeed 0.19.8, and for a test on CPUs."""


def copy_of(source: Path, folder: Path) -> Path:
    """Copy the program, with the changes that it needs for this release of DeepSpeed and on CPUs."""
    for part in ("megatron", "tools"):
        shutil.copytree(source / part, folder / part)
    shutil.copy(source / "pretrain_gpt.py", folder)
    edit(folder, EDITS)
    return folder


def _arguments(case: Case, replicas: int, config: str, save: str | None, load: str | None) -> list[str]:
    given: dict[str, Any] = {
        "num-layers": 4,
        "hidden-size": 32,
        "num-attention-heads": 4,
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "micro-batch-size": MICRO_BATCH,
        "global-batch-size": MICRO_BATCH * MICRO_BATCHES * replicas,
        "train-iters": STEPS,
        "exit-interval": SAVED_STEP if save else None,
        "lr": 1e-2,
        "min-lr": 1e-4,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": 2,
        "lr-decay-iters": 8,
        "clip-grad": case.clip,
        "tensor-model-parallel-size": case.model,
        "pipeline-model-parallel-size": case.pipe,
        "ds-sequence-parallel-size": case.seq,
        "deepspeed_config": config,
        "zero-stage": case.zero,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "make-vocab-size-divisible-by": 4,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "log-interval": 1,
        "eval-interval": 2,
        "eval-iters": 1,
        "num-workers": 0,
        "save-interval": 1000,
        "save": save,
        "load": load,
    }
    switches = [
        "deepspeed",
        "no-masked-softmax-fusion",
        "no-bias-gelu-fusion",
        "no-bias-dropout-fusion",
        "no-gradient-accumulation-fusion",
        "no-async-tensor-model-parallel-allreduce",
        "use-cpu-initialization",
        "no-load-rng",
        "no-save-rng",
        *(() if case.pipe > 1 else ("no-pipeline-parallel",)),
        *(() if case.precision == "fp32" else (case.precision,)),
    ]
    values = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return ["pretrain_gpt.py", *values, *(f"--{name}" for name in switches), *case.options]


def _config(case: Case, replicas: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "train_batch_size": MICRO_BATCH * MICRO_BATCHES * replicas,
        "gradient_clipping": case.clip,
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if case.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 22, "loss_scale_window": 2, "hysteresis": 1}
    if case.precision == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def pretrain(
    program: str, spec: str, case: Case, folder: str, save: bool = False, load: bool = False
) -> tuple[tuple[int, ...], list[Any]]:
    """Run the program; return this rank's place in the program's own groups, and what it did in each step.

    Args:
        program: the folder of :func:`copy_of`.
        spec: the layout of a grid, or ``stock`` for DeepSpeed alone and the program's own groups.
        case: the options.
        folder: for the config, and for the checkpoint if the run saves or loads one.
        save: save a checkpoint after ``SAVED_STEP``, and end.
        load: load the checkpoint first.
    """
    warnings.simplefilter("ignore")
    deepspeed.init_distributed(verbose=False)
    deepspeed.utils.logger.setLevel(40)
    replicas = torch.distributed.get_world_size() // (case.pipe * case.model * case.seq)
    config = Path(folder, f"config-{spec}-{torch.distributed.get_rank()}.json")
    config.write_text(json.dumps(_config(case, replicas)))
    checkpoint = str(Path(folder, "checkpoint"))
    sys.argv = _arguments(case, replicas, str(config), checkpoint if save else None, checkpoint if load else None)
    sys.path.insert(0, program)
    from megatron.core import parallel_state as theirs
    from megatron.core.enums import ModelType

    grid = None
    if spec == "stock":  # its MoE layers gather into a flat tensor, which gloo refuses
        gather = deepspeed.comm.all_gather_into_tensor
        deepspeed.comm.all_gather_into_tensor = lambda output, given, *group, **options: gather(
            output, given.flatten() if output.dim() == 1 else given, *group, **options
        )
    else:
        grid = PipelineParallelGrid(spec)
        grid.correct_norms = False
        parallel_state.install(grid, theirs)
        use(grid)
        torch.serialization.add_safe_globals([ModelType])
    import pretrain_gpt
    from megatron import training

    found: list[Any] = []
    read: list[tuple[int, int]] = []
    log, evaluate = training.training_log, training.evaluate

    def recording_log(losses: Any, totals: Any, rate: float, step: int, scale: Any, *others: Any) -> Any:
        engine = others[-2][0]
        norm = engine.get_global_grad_norm()
        numbers = {name: float(loss) for name, loss in losses.items()}
        found.append((step, numbers, rate, scale, others[1], None if norm is None else float(norm), tuple(read)))
        read.clear()
        return log(losses, totals, rate, step, scale, *others)

    def recording_evaluate(*arguments: Any, **options: Any) -> Any:
        result = evaluate(*arguments, **options)
        found.append(({name: float(loss) for name, loss in result[0].items()}, tuple(read)))
        read.clear()
        return result

    training.training_log, training.evaluate = recording_log, recording_evaluate
    with suppress(SystemExit):  # of exit-interval
        training.pretrain(
            lambda counts: tuple(Tokens(count, seed, read) for seed, count in enumerate(counts)),
            pretrain_gpt.model_provider,
            ModelType.encoder_or_decoder,
            pretrain_gpt.forward_step,
            data_post_process=pretrain_gpt.data_post_process,
        )
    place = (
        theirs.get_pipeline_model_parallel_rank(),
        theirs.get_data_parallel_rank(),
        theirs.get_sequence_parallel_rank(),
        theirs.get_tensor_model_parallel_rank(),
    )
    if grid is not None:
        grid.destroy()
    return place, found
