"""Bridge the differences between the supported releases of DeepSpeed.

Names that some releases lack are imported here, and by all other modules from here. ``ds_topo.base.ledger.is_absent``
tells whether the installed release lacks one. No object is an instance of an absent class.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from deepspeed.accelerator import get_accelerator

from ds_topo.base.ledger import find, is_absent
from ds_topo.base.supported import ENGINES, PARTITIONED_PARAMETERS_ON_CPU, SEPARATE_GRADIENTS_ON_CPU, require

DualPipeVEngine = find("deepspeed.runtime.pipe.dualpipev.DualPipeVEngine")
StockDualPipeVModule = find("deepspeed.runtime.pipe.dualpipev.DualPipeVModule")
FoldingGroupTables = find("deepspeed.module_inject.auto_ep_folding.FoldingGroupTables")
validate_autoep_config = find("deepspeed.module_inject.auto_ep_config.validate_autoep_config")
is_functorch_transforming = find("deepspeed.utils.torch.is_functorch_transforming")
BF16_DISCARDS_INFINITIES = not is_absent(find("deepspeed.runtime.utils.is_invalid_grad_norm"))
"""True if ``BF16_Optimizer`` discards gradients that are not finite, as it does from DeepSpeed 0.19.8 on."""


def offsets_in_flat_groups(optimizer: Any) -> list[list[int]]:
    """Return the offsets of the parameters in each flat tensor of ``DeepSpeedZeroOptimizer``, in its own order.

    Before DeepSpeed 0.19.7 parameters are adjacent, and the optimizer does not store their offsets.
    """
    stored: list[list[int]] | None = getattr(optimizer, "round_robin_bit16_offsets", None)
    if stored is not None:
        return stored
    sizes = [[parameter.numel() for parameter in parameters] for parameters in optimizer.round_robin_bit16_groups]
    return [list(accumulate(each, initial=0))[:-1] for each in sizes]


def check_release(config: Any) -> None:
    """Raise RuntimeError for an engine, or options for it, that the installed release cannot train with."""
    require(ENGINES)
    if config is None or get_accelerator().device_name() != "cpu":  # DeepSpeed refuses an engine without a config
        return
    if config.zero_config.stage in (1, 2) and not config.zero_config.contiguous_gradients:
        require(SEPARATE_GRADIENTS_ON_CPU)
    if config.zero_config.stage == 3:
        require(PARTITIONED_PARAMETERS_ON_CPU)
