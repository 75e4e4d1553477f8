"""Keep the groups of an Adagrad in ZeRO, whose constructor builds another one, of one group.

A program with several groups sees an IndexError in its first backward pass or step. With one, the group's own settings,
a scheduler of the program and a subclass have no effect, and nothing says so.

Releases: all.
Reports: no public report found; deepspeedai/DeepSpeed#3401 has added the second Adagrad.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_topo.engine.on_grid import EngineOnGrid


class GroupsOfAdagrad(EngineOnGrid):
    """An engine with ZeRO, which replaces an Adagrad by another one, of one group."""

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Put the engine's Adagrad back into ZeRO, with the states of the one that ZeRO's constructor has built."""
        super()._configure_optimizer(client_optimizer, model_parameters)
        kinds = DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
        optimizer, basic = self.optimizer, self.basic_optimizer
        if (
            not isinstance(basic, torch.optim.Adagrad)
            or not isinstance(optimizer, kinds)
            or optimizer.optimizer is basic
        ):
            return
        states, optimizer.optimizer = optimizer.optimizer.state, basic
        basic.state.clear()
        basic.state.update(states)  # that of each partition, which torch's Adagrad creates in its constructor
        for group in basic.param_groups:
            for master in group["params"]:
                if master in states:
                    states[master]["sum"].fill_(group["initial_accumulator_value"])
        if isinstance(optimizer, DeepSpeedZeroOptimizer):  # which has done this for the first group alone
            optimizer._link_all_hp_params()
            optimizer._param_slice_mappings = optimizer._create_param_mapping()
            if optimizer.cpu_offload:
                optimizer._create_optimizer_mapping()
