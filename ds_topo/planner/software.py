"""What the training program can do and hide: the same layout takes another time under another program."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum

from ds_topo.errors import TopologyError


class Recompute(Enum):
    """What backward computes again instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"
    """Attention's core where its scores are kept (Korthikanti et al.); else the outputs of norms and activations."""
    FULL = "full"
    """Every block, from its input (Chen et al., arXiv:1604.06174)."""


@dataclass(frozen=True)
class Software:
    """Abilities of a training program.

    Args:
        name: for tables.
        flash_attention: scores never reach memory (Dao et al., arXiv:2205.14135).
        recompute: the kinds that it offers.
        sequence_parallel: between tensor-parallel layers each rank may have some positions (Korthikanti et al.).
        virtual_stages: how many stages a rank may have at most (Narayanan et al., section 2.2).
        zero: stages of sharded states without a pipeline, in one in fp32, and in one in mixed precision.
        seq: whether attention may work on a split sequence, without and with a pipeline.
        seq_exchange: how attention sees a split sequence: ``ring`` sends keys and values around (Liu et al.,
            arXiv:2310.01889), ``all_to_all`` trades positions for heads (Jacobs et al., arXiv:2309.14509).
        accumulation_bytes: of an accumulated gradient in mixed precision.
        reduction_bytes: of a gradient on the wire in mixed precision.
        reduces_whole: ZeRO stages whose gradients every rank gets whole (an all_reduce in place of a reduce_scatter).
        sends_to_owners: ZeRO stages whose gradients go to their owners, and whose parameters come from them, as this
            package's reducer sends them.
        two_level: all_reduces may go inside hosts and across hosts apart.
        eager: buffers of DeepSpeed's engines: an fp32 copy of what ZeRO updates, outputs of micro-batches in flight,
            gradients in fp32 for the update, parameters that stay gathered up to a number.
        overlaps_gradients: gradients are reduced while backward goes on.
        overlaps_parameters: sharded parameters are gathered while the pass before is computed.
        overlaps_update: what the optimizer updated is gathered while the next forward is computed.
        overlaps_model: messages of sequence parallelism take turns with pieces of products.
        overlaps_model_backward: in backward they run beside products for the weights' gradients.
        balances_parameters: stages get layers by their parameters (DeepSpeed's default), not by their number.
        choice: how the degrees of its published runs were chosen.
        regathers: inputs that were split along the sequence are kept split, and gathered again for backward.
        agreements: small collectives of every step, about losses, norms and overflows.
        overlaps_pipe: activations travel while the next micro-batch is computed (with virtual stages).
        own_starts: what the program itself does in a step, in every micro-batch of a stage and in every collective of
            its layers, in starts of kernels. Processors that also compute the model have that to do, too; a GPU's
            work hides it.
    """

    name: str
    flash_attention: bool = True
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    sequence_parallel: bool = True
    virtual_stages: int = 1000
    zero: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] = ((0, 1, 2, 3), (0, 1), (0, 1))
    seq: tuple[bool, bool] = (True, True)
    seq_exchange: str = "ring"
    accumulation_bytes: int = 4
    reduction_bytes: int = 4
    reduces_whole: tuple[int, ...] = (0,)
    sends_to_owners: tuple[int, ...] = ()
    two_level: bool = False
    eager: bool = False
    overlaps_gradients: bool = True
    overlaps_parameters: bool = True
    overlaps_update: bool = True
    overlaps_pipe: bool = True
    overlaps_model: bool = False
    overlaps_model_backward: bool = True
    regathers: bool = True
    agreements: int = 3
    own_starts: tuple[int, int, int] = (0, 0, 0)
    balances_parameters: bool = False
    choice: str = "the source does not say how degrees were chosen"

    def zero_stages(self, pipe: int, *, mixed: bool) -> tuple[int, ...]:
        """The ZeRO stages that go with a pipeline of this degree, in fp32 or in mixed precision."""
        return self.zero[(2 if mixed else 1) if pipe > 1 else 0]

    def splits_sequences(self, pipe: int) -> bool:
        """Whether a ``seq`` axis goes with a pipeline of this degree."""
        return self.seq[pipe > 1]


DEEPSPEED = Software(
    "deepspeed",
    recompute=(Recompute.NONE, Recompute.FULL),
    virtual_stages=1,
    zero=((0, 1, 2, 3), (0, 1), (1,)),
    seq=(True, False),
    seq_exchange="all_to_all",
    accumulation_bytes=2,
    reduction_bytes=2,
    sends_to_owners=(1, 2),
    two_level=True,
    eager=True,
    overlaps_update=False,
    overlaps_pipe=False,
    overlaps_model_backward=False,
    regathers=False,
    agreements=5,
    own_starts=(1400, 430, 25),
    balances_parameters=True,
)
"""DeepSpeed's engines with this package's reducer. ``own_starts`` was measured on CPUs, with models of next to nothing.
(Its bf16 pipelines shard the optimizer without ZeRO, too; so stage 1, which is the same with fewer oddities, stands for
both.)"""

DEEPSPEED_PIPELINE = replace(DEEPSPEED, name="deepspeed-pipeline", zero=((0, 1), (0, 1), (1,)), seq=(False, False))
"""A program whose model is a ``PipelineModule`` whatever the topology, as in the examples."""

MEGATRON = Software(
    "megatron", zero=((0, 1, 3), (0, 1), (0, 1)), accumulation_bytes=2, reduction_bytes=2, overlaps_model=True
)
"""Megatron-LM since 2023: flash attention, distributed optimizer, overlap, context parallelism, FSDP."""

MEGATRON_2022 = Software(
    "megatron-2022",
    flash_attention=False,
    virtual_stages=3,
    seq=(False, False),
    zero=((0,), (0,), (0,)),
    reduction_bytes=2,
    overlaps_gradients=False,
    overlaps_pipe=False,
    choice="its authors compared recomputation at a layout that they did not vary (the paper's table 3)",
)
"""Megatron-LM of Korthikanti et al.: sequence parallelism and selective recomputation, attention with scores; the
paper's runs have up to 3 virtual stages."""

MEGATRON_2021 = Software(
    "megatron-2021",
    flash_attention=False,
    recompute=(Recompute.NONE, Recompute.FULL),
    sequence_parallel=False,
    virtual_stages=3,
    seq=(False, False),
    zero=((0,), (0,), (0,)),
    reduction_bytes=2,
    overlaps_gradients=False,
    overlaps_pipe=False,
    overlaps_model_backward=False,
    choice="its authors did not search; they took tensor parallelism up to a host's size by rule (section 3)",
)
"""Megatron-LM of Narayanan et al.; their runs, too, have up to 3 virtual stages (scripts of table 1)."""

SOFTWARE = {
    software.name: software for software in (DEEPSPEED, DEEPSPEED_PIPELINE, MEGATRON, MEGATRON_2022, MEGATRON_2021)
}


def software_of(name: str) -> Software:
    """The program of this name.

    Raises:
        TopologyError: an unknown one.
    """
    if name not in SOFTWARE:
        raise TopologyError(f"software {name!r} is not known: choose one of {list(SOFTWARE)}")
    return SOFTWARE[name]


def software_of_year(source: str) -> Software:
    """What a published run can have used, by the first year that its source names; today's without one.

    >>> software_of_year("Narayanan et al., SC 2021, table 1").name, software_of_year("container 25.11").name
    ('megatron-2021', 'megatron')
    """
    years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", source)]
    if years and years[0] <= 2021:
        return MEGATRON_2021
    return MEGATRON_2022 if years and years[0] == 2022 else MEGATRON
