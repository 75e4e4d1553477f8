"""Correct DeepSpeed's engines where they handle experts on a grid wrongly."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.moe.utils import configure_moe_param_groups

from ds_topo.base import patches
from ds_topo.base.ledger import always, around, ledger
from ds_topo.engine.checks import in_one_order
from ds_topo.engine.current_mpu import current
from ds_topo.engine.expert_groups import create_expert_groups
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.errors import ExpertGroupError
from ds_topo.mpu import registry
from ds_topo.process_groups.creation import gathered
from ds_topo.topology.rank_tables import name_of_size


class EngineWithExperts(EngineOnGrid):
    """An engine that has experts, or a pipeline engine, of which another stage may have some."""

    def complete(self) -> None:
        """Refuse experts that DeepSpeed would train wrongly, and pad the capacity of gates."""
        super().complete()
        if not registry.of(self.mpu):
            return
        slices = self.mpu.get_slice_parallel_world_size()
        for name, module in self.module.named_modules() if slices > 1 else ():
            groups = registry.find(module.expert_group_name) if isinstance(module, MoE) else None
            if groups and module.enable_expert_tensor_parallelism != groups.plan.expert_tensor_parallel:
                raise ExpertGroupError(
                    f"MoE layer {name!r} has enable_expert_tensor_parallelism="
                    f"{module.enable_expert_tensor_parallelism}, but its groups were created with "
                    f"expert_tensor_parallel={groups.plan.expert_tensor_parallel}: give both the same value"
                )
        # DeepSpeed sums dense gradients over ``seq`` there, but averages those of experts.
        if self.sequence_parallel_size > 1 and self.has_moe_layers and not self.zero_optimization():
            raise ExpertGroupError(
                "experts with sequence parallelism and ZeRO stage 0: DeepSpeed would scale the gradients of experts by "
                f"1/{self.sequence_parallel_size} relative to all others; use ZeRO stage 1 or 2"
            )
        if slices > 1:  # model parallel peers split the slots of an expert evenly, which DeepSpeed asserts
            for gate in (each for each in self.module.modules() if isinstance(each, TopKGate)):
                self.mpu.on_destroy(gate.register_forward_hook(partial(_pad_capacity, slices)).remove)

    def _configure_distributed_model(self, model: Any) -> None:
        """Create the expert groups that the model needs and its user has not created.

        All stages of a pipeline create them together. DeepSpeed creates them in the MoE layers, which hangs if a stage
        has no such layer.
        """
        grid = self.mpu
        layers = [module for module in model.modules() if isinstance(module, MoE)]
        sizes = {(layer.ep_size, layer.enable_expert_tensor_parallelism) for layer in layers}
        if self.is_pipeline and grid.pipe_parallel_size > 1:
            sizes = set().union(*gathered(sizes, grid.get_pipe_parallel_group()))
        for size, sliced in sorted(sizes):
            known = registry.find(f"ep_size_{size}")
            if known is None or (self.is_pipeline and not known.grid.shares_groups_with(grid)):
                create_expert_groups(grid, size, sliced, self._config.use_data_before_expert_parallel_)
        current.set(grid)  # again, because experts may have got groups since
        super()._configure_distributed_model(model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Put groups of experts in one order on all ranks.

        DeepSpeed collects the names of expert groups in a set, whose order depends on the seed of each process's
        hashes. With several expert parallel sizes, ranks would then call collectives of different process groups, and
        hang.
        """
        if isinstance(client_optimizer, torch.optim.Optimizer):
            client_optimizer.param_groups[:] = in_one_order(client_optimizer.param_groups)
        else:
            if client_optimizer is None and self.has_moe_layers:
                model_parameters = configure_moe_param_groups(model_parameters)  # as DeepSpeed itself does next
            groups = list(model_parameters or ())
            if all(isinstance(group, dict) for group in groups):
                model_parameters = in_one_order(groups)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def save_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        """Let each slice write the files of experts that it will load."""
        is_needed = self.has_moe_layers and registry.of(self.mpu)
        with _saving_by_slice(self) if is_needed else nullcontext():
            return super().save_checkpoint(*arguments, **options)


def _pad_capacity(slices: int, _gate: object, _inputs: object, routes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the capacity in ``(auxiliary loss, capacity, experts, ...)`` up to a multiple of ``slices``."""
    loss, capacity, *rest = routes
    return (loss, torch.as_tensor(-(-int(capacity) // slices) * slices), *rest)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _saving_by_slice(engine: EngineOnGrid) -> AbstractContextManager[None]:
    """Return a context in which each slice writes the files that it will load, for a call that saves.

    File names contain the model parallel rank of the writer, and DeepSpeed writes on expert data parallel rank 0 only.
    If replicas of an expert are on several slices, the files of the other slices would be missing.
    """
    sizes = registry.sizes()
    others = sorted(size for size in sizes if max(sizes) % size)
    if others and not engine.zero_optimization():  # one file for each expert parallel rank of the greatest size
        raise ExpertGroupError(
            f"expert parallel sizes {others} do not divide the greatest, {max(sizes)}: without ZeRO, DeepSpeed would "
            "lose the optimizer states of some experts. Use ZeRO stage 1 or 2, or sizes that divide each other"
        )
    automatic = engine._config.expert_parallel_config
    if not automatic.enabled:
        return ledger.bound(patches.WRITER_OF_EXPERTS, _first_writes)
    own = registry.find(name_of_size(automatic.autoep_size))
    is_folded = engine.autotp_size() > 1 and not engine.zero_optimization_partition_weights()
    if not is_folded or own is None or own.writes_checkpoint:
        return nullcontext()
    return ledger.bound(patches.WRITER_OF_FOLDED_EXPERTS, always(dist.get_world_size))


@around
def _first_writes(place: Any, name: str) -> int:
    known = registry.find(name)
    return int(place(name)) if known is None else int(not known.writes_checkpoint)
