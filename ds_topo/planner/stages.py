"""Which layers a pipeline's stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from ds_topo.planner.layers import AnyBlock
from ds_topo.planner.model import Model


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds: numbers of blocks by chunk (one chunk per virtual stage), and the ends."""

    chunks: tuple[tuple[AnyBlock, ...], ...]
    has_embedding: bool
    has_head: bool

    @property
    def blocks(self) -> tuple[AnyBlock, ...]:
        """All its blocks."""
        return tuple(block for chunk in self.chunks for block in chunk)


def even_stages(model: Model, pipe: int, virtual: int = 1) -> list[Stage]:
    """As many blocks for every chunk; where that does not go up, the ends have one fewer, since they hold the
    embedding and the output layer (Llama Team, arXiv:2407.21783, section 3.3.2). Chunk ``c`` is on rank ``c % pipe``.

    >>> from ds_topo.planner.model import transformer
    >>> model = transformer(layers=6, hidden=64, heads=4, vocabulary=256, sequence=16)
    >>> [len(stage.blocks) for stage in even_stages(model, pipe=4)]
    [1, 2, 2, 1]
    """
    chunks = pipe * virtual
    base, more = divmod(model.layers, chunks)
    first_longer = (chunks - more) // 2
    lengths = [base + (first_longer <= chunk < first_longer + more) for chunk in range(chunks)]
    ends = list(accumulate(lengths))
    return [
        Stage(
            tuple(model.blocks[ends[chunk] - lengths[chunk] : ends[chunk]] for chunk in range(rank, chunks, pipe)),
            rank == 0,
            rank == pipe - 1,
        )
        for rank in range(pipe)
    ]


def parameter_stages(model: Model, pipe: int) -> list[Stage]:
    """DeepSpeed's ``partition_method="parameters"`` over the layers that the examples have: embedding, positions,
    blocks, norm, output (a tied one weighs as much again).

    >>> from ds_topo.planner.model import transformer
    >>> model = transformer(layers=4, hidden=128, heads=4, vocabulary=256, sequence=128)
    >>> [len(stage.blocks) for stage in parameter_stages(model, pipe=2)]
    [2, 2]
    """
    if model.is_measured:
        bounds = balanced_parts([block.parameters() for block in model.blocks], pipe)
        return [Stage((model.blocks[start:end],), start == 0 < end, False) for start, end in pairwise(bounds)]
    before = [model.vocabulary * model.hidden] + ([model.positions * model.hidden] if model.positions else [])
    blocks = [block.parameters() + block.expert_parameters for block in model.blocks]
    after = [model.final_norm_parameters, model.vocabulary * model.hidden]
    bounds = balanced_parts((*before, *blocks, *after), pipe)
    first = len(before)
    return [
        Stage(
            (model.blocks[max(0, start - first) : max(0, min(end - first, model.layers))],),
            start == 0 < end,
            end == bounds[-1] > start,
        )
        for start, end in pairwise(bounds)
    ]


def balanced_parts(weights: Sequence[int], parts: int) -> list[int]:
    """Bounds of ``parts`` consecutive parts of nearly equal weight, the same as
    ``deepspeed.runtime.utils.partition_balanced`` finds.

    >>> balanced_parts([1, 1, 4, 1, 1], 2)
    [0, 3, 5]
    """
    count = len(weights)
    if count <= parts:
        return [min(part, count) for part in range(parts + 1)]
    starts = _last_starts(tuple(weights), parts)
    bounds = [count]
    for part in range(parts, 0, -1):
        bounds.append(starts[part][bounds[-1]])
    return bounds[::-1]


@lru_cache(maxsize=16)
def _table(weights: tuple[int, ...]) -> list[_Row]:
    """Rows of the table of partitions, one for each number of parts so far; it grows when more are asked for."""
    first = _Row([0.0] + [inf] * len(weights), [inf] * (len(weights) + 1), [0] * (len(weights) + 1))
    return [first]


@dataclass(frozen=True)
class _Row:
    """For every end of a prefix: heaviest and lightest part of its partition, and where the last part starts."""

    heaviest: list[float]
    lightest: list[float]
    start: list[int]


def _last_starts(weights: tuple[int, ...], parts: int) -> list[list[int]]:
    """``[part][end]``: where the last of ``part`` parts starts, with the least difference of weights; the last such."""
    rows, sums = _table(weights), list(accumulate(weights, initial=0))
    while len(rows) <= parts:
        before = rows[-1]
        row = _Row([inf] * len(sums), [inf] * len(sums), [0] * len(sums))
        for end in range(len(rows), len(sums)):
            best = inf
            for start in range(end):
                weight = sums[end] - sums[start]
                heaviest, lightest = max(before.heaviest[start], weight), min(before.lightest[start], weight)
                if heaviest - lightest <= best:
                    best = heaviest - lightest
                    row.heaviest[end], row.lightest[end], row.start[end] = heaviest, lightest, start
        rows.append(row)
    return [row.start for row in rows]
