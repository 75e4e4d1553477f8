"""The norm of all gradients, where DeepSpeed's optimizers lose sight of what is tensor parallel."""

from __future__ import annotations

from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn


def mark_tensor_parallel_gradients(module: nn.Module) -> None:
    """Let each gradient carry its parameter's ``model_parallel`` mark.

    For fp16 and bf16 without ZeRO and with an optimizer that is not fused, DeepSpeed's ``FP16_UnfusedOptimizer`` takes
    the norm of gradients, which unlike their parameters have no mark: the shards of all tensor-parallel ranks but the
    first are then missing from the norm, and clipping is too weak. Call this once before ``deepspeed.initialize``;
    elsewhere it changes nothing.

    Args:
        module: a module whose tensor-parallel parameters have ``tensor_model_parallel`` or ``model_parallel`` set, as
            Megatron's and DeepSpeed's have.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and is_model_parallel_parameter(parameter):
            parameter.register_post_accumulate_grad_hook(_mark)


def _mark(parameter: object) -> None:
    gradient = getattr(parameter, "grad", None)
    if gradient is not None:  # ZeRO has taken it already
        gradient.model_parallel = True
