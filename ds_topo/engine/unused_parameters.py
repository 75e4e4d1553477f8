"""Keep the gradients of parameters that only some micro-batches of a step use, or none.

ZeRO 3, and every stage with an offloaded optimizer, keep each gradient in memory that is never cleared. The first
micro-batch overwrites it, later ones add to it, and the last one hands it to an offloaded optimizer. A parameter that a
micro-batch does not use takes no part in that:

    unused in the first    its gradient is added to that of an earlier step
    unused in the last     an offloaded optimizer does not get its gradient
    unused in all          the optimizer gets its gradient of an earlier step again

Here its memory is cleared before its first gradient of a step, and what the last micro-batch left out is done before
the step. Only parameters that a micro-batch did not use cost time.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import stock_class

# -- ZeRO 1 and 2 with an offloaded optimizer -------------------------------------------------------------------------


def clear_earlier_offloaded(optimizer: DeepSpeedZeroOptimizer, parameter: torch.nn.Parameter) -> None:
    """Clear the memory of a parameter's gradient before its first one of a step is added."""
    number = optimizer.get_param_id(parameter)
    if optimizer.micro_step_id > 0 and number not in optimizer._offload_accumulated_param_ids:
        earlier = optimizer.accumulated_grads_in_cpu.get(number)
        if earlier is not None:
            earlier.zero_()


def hand_over_missing_offloaded(optimizer: DeepSpeedZeroOptimizer) -> None:
    """Hand gradients that the last micro-batch left out over to the optimizer, before its step."""
    used = optimizer._offload_accumulated_param_ids
    handed_over = optimizer.norm_for_param_grads
    if used or handed_over:  # else a compiled graph has reduced the gradients
        missing = set()
        for parameter in chain.from_iterable(optimizer.params_in_partition):
            number = optimizer.get_param_id(parameter)
            if number in handed_over or not parameter.requires_grad:
                continue
            missing.add(number)
            if number not in used:
                group, _, start, numel = optimizer.grad_position[number]
                (master,) = optimizer.param_groups[group]["params"]
                master.grad.view(-1)[start : start + numel].zero_()
        if missing & used:
            optimizer._offload_accumulated_param_ids = missing & used
            optimizer._finalize_cpu_offload_gradient_accumulation()


# -- ZeRO 3 -----------------------------------------------------------------------------------------------------------


def _clear(optimizer: DeepSpeedZeroOptimizer_Stage3, parameter: Any) -> None:
    optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()


def clear_earlier_partitions(optimizer: DeepSpeedZeroOptimizer_Stage3, parameters: list[Any]) -> None:
    """Clear the memory of parameters' gradients before their first ones of a step are added."""
    for parameter in parameters:
        if parameter.ds_id not in optimizer._offload_boundary_param_ids:
            _clear(optimizer, parameter)


def hand_over_missing_partitions(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
    """Clear the gradients of unused parameters, and hand them over to an offloaded optimizer, before its step."""
    used = optimizer._offload_boundary_param_ids
    if used:  # else a compiled graph has reduced the gradients
        trained = [each for each in chain.from_iterable(optimizer.fp16_groups) if each.requires_grad]
        for parameter in trained:
            if parameter.ds_id not in used:
                _clear(optimizer, parameter)
        if optimizer.offload_optimizer:
            handed_over = optimizer.norm_for_param_grads
            missing = {each.ds_id for each in trained if optimizer.get_param_id(each) not in handed_over}
            if missing:
                optimizer._offload_boundary_param_ids = missing
                optimizer._finalize_offload_gradient_accumulation()


def keeps_gradients(optimizer: Any) -> bool:
    """Tell whether an optimizer keeps gradients in memory that it never clears."""
    kind = stock_class(optimizer)
    is_offloaded = kind is DeepSpeedZeroOptimizer and optimizer.cpu_offload and not optimizer.zenflow
    return kind is DeepSpeedZeroOptimizer_Stage3 or bool(is_offloaded)
