"""Number formats of a training run, and how many bytes each kind of value takes."""

from __future__ import annotations

from dataclasses import dataclass

from ds_topo.errors import TopologyError


@dataclass(frozen=True)
class Precision:
    """Mixed precision as Micikevicius et al. (arXiv:1710.03740) and Rajbhandari et al. (arXiv:1910.02054) count it.

    Args:
        name: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        products: the format in which linear layers multiply.
        attention: the format in which attention and the output layer multiply.
        activation_bytes: of a value between layers; also of a weight.
        input_bytes: of a linear layer's input as it is kept for backward.
        master_bytes: of the optimizer's own copy of a parameter, 0 where the weights themselves are fp32.
    """

    name: str
    products: str
    attention: str
    activation_bytes: int
    input_bytes: int
    master_bytes: int


FP32 = Precision("fp32", "fp32", "fp32", 4, 4, 0)
BF16 = Precision("bf16", "bf16", "bf16", 2, 2, 4)
FP16 = Precision("fp16", "fp16", "fp16", 2, 2, 4)
FP8 = Precision("fp8", "fp8", "bf16", 2, 1, 4)

PRECISIONS = {precision.name: precision for precision in (FP32, BF16, FP16, FP8)}
ADAM_MOMENTS_BYTES = 8
"""Two fp32 moments per parameter (Kingma and Ba, arXiv:1412.6980)."""


def precision_of(text: str) -> Precision:
    """The precision that a word or a phrase names.

    >>> precision_of("fp8 (per-tensor scaling)").name, precision_of("MXFP8").name, precision_of("bfloat16").name
    ('fp8', 'fp8', 'bf16')

    Raises:
        TopologyError: a phrase that names none of them.
    """
    words = text.lower().replace("float", "fp").replace("bfp", "bf").replace("half", "fp16")
    for name in ("fp8", "bf16", "fp16", "fp32"):
        if name in words:
            return PRECISIONS[name]
    raise TopologyError(f"precision {text!r} is not known: choose one of {list(PRECISIONS)}")
