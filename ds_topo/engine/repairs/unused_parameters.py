"""Clear the gradients of unused parameters where DeepSpeed would step with those of an earlier step.

ZeRO 3, and every stage with an offloaded optimizer, keep each gradient in memory that is never cleared. The first
micro-batch overwrites it, later ones add to it, and the last one hands it to an offloaded optimizer. A parameter that a
micro-batch does not use takes no part in that, and a program sees no error, but other parameters:

    unused in the first    its gradient is added to that of an earlier step
    unused in the last     an offloaded optimizer does not get its gradient
    unused in all          the optimizer gets its gradient of an earlier step again

ZeRO 1 has the last of these alone, because it reduces gradients once in a step.

Here its memory is cleared before its first gradient of a step, and what the last micro-batch left out is done before
the step. Only parameters that a micro-batch did not use cost time.

Releases: all.
Reports: no public report found; deepspeedai/DeepSpeed#7981 has mended several backward passes with an offloaded one.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.base.classes import Mixin, stock_class
from ds_topo.engine.on_grid import EngineOnGrid


class UnusedParameters(EngineOnGrid):
    """An engine whose optimizer keeps gradients in memory that it never clears."""

    def complete(self) -> None:
        """Clear it here. Optimizers that DeepSpeed derives from ZeRO's keep gradients elsewhere."""
        super().complete()
        optimizer, kind = self.optimizer, stock_class(self.optimizer)
        is_offloaded = kind is DeepSpeedZeroOptimizer and optimizer.cpu_offload and not optimizer.zenflow
        if kind is DeepSpeedZeroOptimizer_Stage3 or is_offloaded:
            self.give_optimizer(ClearedOffload, ClearedZero3)


class ClearedOffload(Mixin, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer``, of ZeRO 1 and 2, with an offloaded optimizer."""

    _offload_accumulated_param_ids: set[int]

    def async_accumulate_grad_in_cpu_via_gpu(self, param: torch.nn.Parameter) -> Any:
        """Clear the memory of a gradient before the first one of a step is added."""
        if self.micro_step_id > 0:
            number = self.get_param_id(param)
            earlier = self.accumulated_grads_in_cpu.get(number)
            if earlier is not None and number not in self._offload_accumulated_param_ids:
                earlier.zero_()
        return super().async_accumulate_grad_in_cpu_via_gpu(param)

    def step(self, closure: object = None) -> Any:
        """Hand over what the last micro-batch left out first."""
        used, handed_over = self._offload_accumulated_param_ids, self.norm_for_param_grads
        if used or handed_over:  # else a compiled graph has reduced the gradients
            missing = set()
            for parameter in chain.from_iterable(self.params_in_partition):
                number = self.get_param_id(parameter)
                if number in handed_over or not parameter.requires_grad:
                    continue
                missing.add(number)
                if number not in used:
                    group, _, start, numel = self.grad_position[number]
                    (master,) = self.param_groups[group]["params"]
                    master.grad.view(-1)[start : start + numel].zero_()
            if missing & used:
                self._offload_accumulated_param_ids = missing & used
                self._finalize_cpu_offload_gradient_accumulation()
        return super().step(closure)


class ClearedZero3(Mixin, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """``DeepSpeedZeroOptimizer_Stage3``."""

    _offload_boundary_param_ids: set[int]

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[torch.Tensor]) -> Any:
        """Clear gradients of an earlier step, to which DeepSpeed adds if the first micro-batch does not use one."""
        if self.micro_step_id > 0:
            self._clear_unless(self._offload_boundary_param_ids, params_to_release)
        return super().partition_grads(params_to_release, grad_partitions)

    def step(self, closure: object = None) -> Any:
        """Clear the gradients of parameters that no micro-batch used first, and hand over those left out."""
        if used := self._offload_boundary_param_ids:  # else a compiled graph has reduced the gradients
            trained = [each for each in chain.from_iterable(self.fp16_groups) if each.requires_grad]
            self._clear_unless(used, trained)
            if self.offload_optimizer:
                handed_over = self.norm_for_param_grads
                missing = {each.ds_id for each in trained if self.get_param_id(each) not in handed_over}
                if missing:
                    self._offload_boundary_param_ids = missing
                    self._finalize_offload_gradient_accumulation()
        return super().step(closure)

    def _clear_unless(self, used: set[int], parameters: list[Any]) -> None:
        for parameter in parameters:
            if parameter.ds_id not in used:
                self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[parameter.ds_id].zero_()
