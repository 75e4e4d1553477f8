"""Register expert groups in the tables in which DeepSpeed's MoE layers look them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.utils import groups as deepspeed_groups

from ds_topo.errors import ExpertGroupError
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.rank_tables import ExpertPlan


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """The expert groups of one size as one rank sees them, registered with DeepSpeed until ``destroy()``."""

    grid: MpuGrid
    plan: ExpertPlan
    expert_group: ProcessGroup
    expert_data_group: ProcessGroup

    @property
    def expert_ranks(self) -> list[int]:
        """The global ranks, ascending, that together hold every expert once."""
        return list(self.grid.to_global(self.plan.expert_ranks(self.grid.grid_rank)))

    @property
    def expert_data_ranks(self) -> list[int]:
        """The global ranks, ascending, that hold the same experts as this rank."""
        return list(self.grid.to_global(self.plan.expert_data_ranks(self.grid.grid_rank)))

    @property
    def writes_checkpoint(self) -> bool:
        """True if this rank writes the files of its experts for its slice."""
        return self.plan.writes_checkpoint(self.grid.grid_rank)

    def destroy(self) -> None:
        """Remove the registration; the process groups themselves live as long as the grid. Idempotent."""
        registry.remove(self)


class ExpertRegistry:
    """The one owner of DeepSpeed's tables of expert groups."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[ExpertGroups, Callable[[], None]]] = {}

    def find(self, name: str) -> ExpertGroups | None:
        """Return the groups registered under a name, if any."""
        return self._by_name[name][0] if name in self._by_name else None

    def forget_former_worlds(self) -> None:
        """Drop the entries of grids whose process groups torch has destroyed together with the world."""
        for groups, _ in list(self._by_name.values()):
            if not groups.grid.has_its_world:
                groups.grid.destroy()

    def names(self) -> list[str]:
        """Return the names in use, in order of registration."""
        return list(self._by_name)

    def sizes(self) -> set[int]:
        """Return the expert parallel sizes in use."""
        return {groups.plan.expert_parallel_size for groups, _ in self._by_name.values()}

    def of(self, mpu: object) -> list[ExpertGroups]:
        """Return the expert groups of a grid; an empty list for an mpu that is not a grid."""
        if not isinstance(mpu, MpuGrid):
            return []
        return [groups for groups, _ in self._by_name.values() if groups.grid.shares_groups_with(mpu)]

    def check(self, grid: MpuGrid, plan: ExpertPlan) -> None:
        """Raise ``ExpertGroupError`` if this plan conflicts with a registered one."""
        known = self.find(plan.name)
        if known is not None and (known.plan != plan or not known.grid.shares_groups_with(grid)):
            raise ExpertGroupError(
                f"expert groups {plan.name!r} are already registered, for {known.grid} with {known.plan}: DeepSpeed "
                "keeps one table per name; call destroy() on those groups, or on their grid, first"
            )
        if known is None and plan.name in deepspeed_groups._EXPERT_PARALLEL_GROUP:
            raise ExpertGroupError(
                f"DeepSpeed has already created its own groups {plan.name!r}, of neighboring ranks: call "
                "create_expert_groups() before deepspeed.initialize()"
            )
        for other, _ in self._by_name.values():
            if other.plan.expert_tensor_parallel != plan.expert_tensor_parallel:
                raise ExpertGroupError(
                    f"expert_tensor_parallel={plan.expert_tensor_parallel} for {plan.name!r}, but "
                    f"{other.plan.expert_tensor_parallel} for {other.plan.name!r}: DeepSpeed keeps one setting for all "
                    "MoE layers of a process; choose one"
                )

    def add(self, groups: ExpertGroups, on_remove: Callable[[], None]) -> None:
        """Add groups to DeepSpeed's tables."""
        name = groups.plan.name
        self._by_name[name] = (groups, on_remove)
        deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = groups.expert_group
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = groups.expert_ranks
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_data_group
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups.expert_data_ranks
        groups.grid.on_destroy(groups.destroy)

    def remove(self, groups: ExpertGroups) -> None:
        """Remove groups from DeepSpeed's tables. Idempotent."""
        name = groups.plan.name
        if self.find(name) is not groups:
            return
        _, on_remove = self._by_name.pop(name)
        for table in (
            deepspeed_groups._EXPERT_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP,
            deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ):
            table.pop(name, None)  # DeepSpeed empties its tables itself when the world is destroyed
        on_remove()


registry = ExpertRegistry()
