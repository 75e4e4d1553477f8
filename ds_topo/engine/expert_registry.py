"""Expert groups as one rank sees them, in the tables where DeepSpeed's MoE layers look for groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.utils import groups as deepspeed_groups

from ds_topo.engine.mpu import MpuGrid
from ds_topo.errors import ExpertGroupError
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.topology.expert_tables import ExpertPlan


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """The expert groups of one size as one rank sees them, registered with DeepSpeed until ``destroy()``."""

    grid: MpuGrid
    plan: ExpertPlan
    expert_group: ProcessGroup
    expert_data_group: ProcessGroup

    @property
    def expert_ranks(self) -> list[int]:
        """Global ranks, ascending, that hold every expert once."""
        return list(self.grid.to_global(self.plan.expert_ranks(self.grid.grid_rank)))

    @property
    def expert_data_ranks(self) -> list[int]:
        """Global ranks, ascending, that hold the same experts as this one."""
        return list(self.grid.to_global(self.plan.expert_data_ranks(self.grid.grid_rank)))

    @property
    def writes_checkpoint(self) -> bool:
        """Whether this rank writes the files of its experts that its slice reads."""
        return self.plan.writes_checkpoint(self.grid.grid_rank)

    def destroy(self) -> None:
        """Take the registration back; the process groups themselves live as long as the grid. Idempotent."""
        registry.remove(self)


class ExpertRegistry:
    """The one owner of DeepSpeed's tables of expert groups."""

    def __init__(self) -> None:
        self._by_name: dict[str, tuple[ExpertGroups, Callable[[], None]]] = {}
        self.serves_current_engine = True
        """False while an engine is built whose mpu is no grid: its MoE layers get groups from DeepSpeed."""

    def find(self, name: str) -> ExpertGroups | None:
        """The groups registered under a name."""
        return self._by_name[name][0] if name in self._by_name else None

    def forget_former_worlds(self) -> None:
        """Drop the entries of grids whose process groups torch has destroyed with the world's own."""
        for groups, _ in list(self._by_name.values()):
            if not groups.grid.has_its_world:
                groups.grid.destroy()

    def names(self) -> list[str]:
        """Names in use, in order of registration."""
        return list(self._by_name)

    def sizes(self) -> set[int]:
        """Expert parallel sizes in use."""
        return {groups.plan.expert_parallel_size for groups, _ in self._by_name.values()}

    def of(self, mpu: object) -> list[ExpertGroups]:
        """The expert groups of this mpu's grid."""
        if not isinstance(mpu, MpuGrid):
            return []
        return [groups for groups, _ in self._by_name.values() if groups.grid.shares_groups_with(mpu)]

    def check(self, grid: MpuGrid, plan: ExpertPlan) -> None:
        """Raise ``ExpertGroupError`` if this plan cannot be registered beside what is."""
        known = self.find(plan.name)
        if known is not None and (known.plan != plan or not known.grid.shares_groups_with(grid)):
            raise ExpertGroupError(
                f"expert groups {plan.name!r} are already registered, for {known.grid} with {known.plan}: DeepSpeed "
                "keeps one table per name; call destroy() on those groups, or on their grid, first"
            )
        if known is None and plan.name in deepspeed_groups._EXPERT_PARALLEL_GROUP:
            raise ExpertGroupError(
                f"DeepSpeed already created groups {plan.name!r} of its own, from rank arithmetic: call "
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
        """Show DeepSpeed these groups."""
        name = groups.plan.name
        self._by_name[name] = (groups, on_remove)
        deepspeed_groups._EXPERT_PARALLEL_GROUP[name] = groups.expert_group
        deepspeed_groups._EXPERT_PARALLEL_GROUP_RANKS[name] = groups.expert_ranks
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP[name] = groups.expert_data_group
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = groups.expert_data_ranks
        groups.grid.on_destroy(groups.destroy)

    def remove(self, groups: ExpertGroups) -> None:
        """Hide them again."""
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
