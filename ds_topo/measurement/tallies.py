"""What is counted while a module runs, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_topo.planner.layers import MeasuredProduct

BEFORE, AFTER = "before the layers", "after the layers"


@dataclass
class Tally:
    """What is counted for one layer while it runs."""

    products: list[MeasuredProduct] = field(default_factory=list)
    core_flops: float = 0.0
    core_width: int = 1
    values: float = 0.0
    """Values that operators other than products read and write."""
    operators: int = 0
    kept: dict[int, float] = field(default_factory=dict)
    """Values kept for backward, by storage."""
    indices: float = 0.0
    """Bytes kept that are not floating point."""
    output: float = 0.0


class Progress:
    """Which layer runs, and what was counted so far."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self.stack: list[str] = []
        self.passed = False
        """Whether a layer has run."""
        self.used_before: set[int] = set()
        """Parameters that were used before the first layer."""

    @property
    def current(self) -> Tally:
        """Of the layer that runs."""
        name = self.stack[-1] if self.stack else AFTER if self.passed else BEFORE
        return self.tallies.setdefault(name, Tally())
