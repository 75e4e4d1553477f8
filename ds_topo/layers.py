"""Split layers over any process group, under torchshard's names: linear, embedding, and cross entropy.

Shapes: h features in, g features out, c classes; n ranks in the group. A *column-parallel* layer computes some outputs
on each rank, a *row-parallel* one uses some inputs. A pair of them communicates twice per pass (Megatron-LM,
arXiv:1909.08053). With *sequence parallelism* (arXiv:2205.05198) activations between the pairs are split along the
sequence, ``[b, s/n, h]``; otherwise every rank has all of them.

Every layer first creates its full weight and then keeps its part, so that any n starts from the same model. In a group
of one rank these are plain layers. torchshard marks activations that are split by an attribute, which most operations
drop. Here a row-parallel layer knows by the width of its input, and the loss by its argument ``dim``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ds_topo import collectives, distributed
from ds_topo.base.torch_names import ignore_in_ddp
from ds_topo.errors import abridged

__all__ = [
    "Parallel",
    "ParallelCrossEntropyLoss",
    "ParallelEmbedding",
    "ParallelLinear",
    "own_rows",
    "parallel_cross_entropy",
]

SEQUENCE = 1
"""The dimension of positions in ``[b, s, h]``."""
COLUMNS, ROWS = (1, -1), (0,)
"""The values of ``dim``, as in torchshard."""


@dataclass(frozen=True)
class Parallel:
    """The group over which layers are split, and whether sequences are split, too."""

    group: dist.ProcessGroup
    sequence: bool = False

    def __post_init__(self) -> None:
        collectives.require_group("a parallel layer", self.group)

    def enter(self, hidden: Tensor) -> Tensor:
        """Prepare the input of a column-parallel layer: keep ``[b, s, h]``, or gather ``[b, s/n, h]``."""
        if self.sequence:
            return collectives.all_gather(hidden, self.group, SEQUENCE)
        return collectives.copy(hidden, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """Sum the outputs ``[b, s, g]`` of a row-parallel layer; return all of it, or this rank's ``[b, s/n, g]``."""
        if self.sequence:
            return collectives.reduce_scatter(hidden, self.group, SEQUENCE)
        return collectives.reduce(hidden, self.group)

    def whole(self, parameter: Tensor) -> Tensor:
        """Use a parameter that is not split. If the sequence is split, sum its gradient over the ranks."""
        return collectives.copy(parameter, self.group) if self.sequence else parameter

    def own(self, full: Tensor, dim: int) -> nn.Parameter:
        """Return this rank's part of a full weight, marked for the gradient norm and for checkpoints."""
        part = nn.Parameter(collectives.own_part(full, self.group, dim))
        _mark(part, dim)
        return part

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        """Share the group with a copy of a layer, such as a teacher or a moving average."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a layer over the process group of ranks {dist.get_process_group_ranks(self.group)} cannot be pickled, "
            "because process groups belong to one process: save model.state_dict(), and build the layers again to "
            "load it, or call engine.save_checkpoint(); copy.deepcopy(model) shares the group"
        )


Group: TypeAlias = "Parallel | dist.ProcessGroup | None"
"""How to split: a group, also with split sequences; None is the group of ``ds_topo.distributed``."""


def _mark(parameter: Any, dim: int | None) -> None:
    """Mark a parameter as split along a dimension; None: as equal on all slices, which experts need."""
    parameter.tensor_model_parallel = dim is not None
    if dim is not None:
        parameter.partition_dim = dim


class _Split(nn.Module):
    """A layer whose copies have the marks of its parameters: torch copies parameters without attributes."""

    marks: dict[str, int | None]
    """What parameters are marked with, by name."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, dim in self.marks.items():
            if (parameter := getattr(self, name)) is not None:
                _mark(parameter, dim)


class ParallelLinear(_Split):
    """A linear layer ``[..., h]`` -> ``[..., g]`` whose weight is split over a group.

    Like ``torchshard.nn.ParallelLinear``. Without an engine, clip by :func:`ds_topo.clip_grad_norm_`: torch's function
    takes the norm of this rank's slices alone.

    Args:
        in_features: h.
        out_features: g.
        bias: add a bias, which is split with the outputs.
        dim: None: not split. 1 or -1 (columns): the output is this rank's ``[..., g/n]``. 0 (rows): the input is this
            rank's ``[..., h/n]``, or all of it, of which it then takes its part; the output is summed.
        group: the group, or ``Parallel(group, sequence=True)`` to split sequences, too; that of
            ``ds_topo.distributed.init_process_group`` by default.
        pieces: with columns, the number of equal outputs, such as query, key and value, that are each split. If there
            are several, the weight is ``[pieces, g/pieces/n, h]`` instead of ``[g/n, h]``.

    Raises:
        ValueError: ``dim`` is something else, or n does not divide the split features.

    >>> import torch, torch.distributed as dist
    >>> from torch.testing._internal.distributed.fake_pg import FakeStore
    >>> dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    >>> layer = ParallelLinear(20, 30, dim=-1, group=dist.group.WORLD)
    >>> layer(torch.randn(128, 20)).shape, layer.weight.shape
    (torch.Size([128, 15]), torch.Size([15, 20]))
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        *,
        group: Group = None,
        pieces: int = 1,
    ) -> None:
        super().__init__()
        self._split(nn.Linear(in_features, out_features, bias), dim, group, pieces)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dim: int | None = None, *, group: Group = None, pieces: int = 1) -> Self:
        """Return a layer with this rank's part of the weights of an existing one; arguments as of the class."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._split(linear, dim, group, pieces)
        return layer

    @classmethod
    def convert_parallel_linear(cls, module: nn.Module, dim: int | None = None, *, group: Group = None) -> nn.Module:
        """Replace every ``nn.Linear`` in a module by a ``ParallelLinear`` with its weights; return the module.

        torch's DDP then leaves the split parameters alone.
        """
        if isinstance(module, nn.Linear):
            return cls.from_linear(module, dim, group=group)
        ignored = []
        for name, child in list(module.named_children()):
            converted = cls.convert_parallel_linear(child, dim, group=group)
            setattr(module, name, converted)
            for inner, parameter in converted.named_parameters():
                if getattr(parameter, "tensor_model_parallel", False):
                    ignored.append(f"{name}.{inner}")
        ignore_in_ddp(module, ignored)
        return module

    def _split(self, full: nn.Linear, dim: int | None, group: Group, pieces: int) -> None:
        self.in_features, self.out_features, self.dim = full.in_features, full.out_features, _checked_dim(dim)
        weight, bias = full.weight, full.bias
        if self.dim is not None:
            self.parallel = _parallel(group)
        self.marks = {}
        if self.dim in ROWS:
            weight = self.parallel.own(weight, 1)
            self.marks = {"weight": 1, "bias": None}
            if bias is not None:  # norms count parameters of experts on every slice unless they say so
                _mark(bias, None)
        elif self.dim in COLUMNS:
            shape = (pieces, -1) if pieces > 1 else (-1,)
            split = len(shape) - 1
            weight = self.parallel.own(weight.view(*shape, full.in_features), split)
            bias = None if bias is None else self.parallel.own(bias.view(shape), split)
            self.marks = {"weight": split, "bias": split}
        self.weight = weight
        self.bias: nn.Parameter | None = bias
        self.register_load_state_dict_pre_hook(collectives.explain_whole_weights)  # type: ignore[no-untyped-call]

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the layer: ``[..., h]`` or ``[..., h/n]`` -> ``[..., g]`` or ``[..., g/n]``."""
        if self.dim is None:
            return F.linear(hidden, self.weight, self.bias)
        width, whole = hidden.shape[-1], self.in_features
        if width != whole and (self.dim in COLUMNS or width != self.weight.shape[-1]):
            raise ValueError(
                f"ParallelLinear({self.extra_repr()}): an input of shape {list(hidden.shape)} is not [..., {whole}]: "
                "after a layer with dim=-1, whose output is this rank's part, use one with dim=0, or "
                "ds_topo.collectives.gather(output, group)"
            )
        if self.dim in COLUMNS:
            bias = None if self.bias is None else self.bias.flatten()
            return F.linear(self.parallel.enter(hidden), self.weight.flatten(0, -2), bias)
        if hidden.shape[-1] == self.in_features:
            hidden = collectives.scatter(hidden, self.parallel.group)
        hidden = self.parallel.leave(F.linear(hidden, self.weight))
        return hidden if self.bias is None else hidden + self.parallel.whole(self.bias)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, dim={self.dim}"


class ParallelEmbedding(_Split):
    """An embedding ``[...]`` -> ``[..., h]`` whose weight ``[v, h]`` is split over a group.

    Like ``torchshard.nn.ParallelEmbedding``.

    Args:
        num_embeddings: v.
        embedding_dim: h.
        padding_idx: a row that begins with zeros and gets no gradient.
        dim: None: not split. 0: this rank has v/n rows, and outputs are summed. 1 or -1: it has h/n columns, and
            outputs are gathered.
        group: as of :class:`ParallelLinear`.

    Raises:
        ValueError: ``dim`` is something else, or n does not divide the split size.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dim: int | None = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        full = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
        self.num_embeddings, self.embedding_dim, self.dim = num_embeddings, embedding_dim, _checked_dim(dim)
        self.weight, self.padding_idx, self.marks = full.weight, full.padding_idx, {}
        if self.dim is not None:
            split = 0 if self.dim in ROWS else 1
            self.parallel, self.marks = _parallel(group), {"weight": split}
            self.weight = self.parallel.own(full.weight, split)
            self.register_load_state_dict_pre_hook(collectives.explain_whole_weights)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor) -> Tensor:
        """Look tokens up: ``[...]`` -> ``[..., h]``; with sequence parallelism ``[b, s]`` -> ``[b, s/n, h]``."""
        if self.dim is None:
            return F.embedding(tokens, self.weight, self.padding_idx)
        group, held = self.parallel.group, len(self.weight)
        if self.dim in COLUMNS:
            whole = collectives.gather(F.embedding(tokens, self.weight, self.padding_idx), group)
            return collectives.scatter(whole, group, SEQUENCE) if self.parallel.sequence else whole
        _require_in_range("token", tokens, self.num_embeddings)
        rows, is_own = own_rows(tokens, held, group)
        padding = -1 if self.padding_idx is None else self.padding_idx - group.rank() * held
        found = F.embedding(rows, self.weight, padding if 0 <= padding < held else None)
        return self.parallel.leave(found * is_own.unsqueeze(-1))

    def extra_repr(self) -> str:
        """Return the arguments."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dim={self.dim}"


class ParallelCrossEntropyLoss(nn.Module):
    """The cross entropy of logits whose classes are split over a group, ``[..., c/n]`` and targets ``[...]``.

    Like ``torchshard.nn.ParallelCrossEntropyLoss``, but weights and ``ignore_index`` have an effect. Arguments are
    those of :func:`parallel_cross_entropy`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        *,
        dim: int | None = -1,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.weight: Tensor | None
        self.ignore_index, self.reduction, self.dim = ignore_index, reduction, dim
        self.group = None if group is None else _parallel(group)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss, in nats."""
        return parallel_cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, dim=self.dim, group=self.group
        )


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    *,
    dim: int | None = -1,
    group: Group = None,
) -> Tensor:
    """Return the cross entropy in nats, without gathering the classes. The largest tensors are of the logits' size.

    Args:
        input: this rank's logits, ``[..., c/n]``, such as the output of a ``ParallelLinear(..., dim=-1)``. Half
            precision is computed in fp32.
        target: classes, ``[...]``, equal on all ranks of the group.
        weight: a factor for each class, ``[c]``.
        ignore_index: targets of this value do not count.
        reduction: ``"mean"`` (weighted, as in torch), ``"sum"`` or ``"none"``.
        dim: -1 (or 1): the classes are split. None: every rank has all of them, ``[..., c]``.
        group: as of :class:`ParallelLinear`.

    Raises:
        ValueError: ``dim`` or ``reduction`` is something else, or the shapes do not match. On CPUs, all ranks have the
            same logits, those of all classes.
        IndexError: on CPUs, a target is no class.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={abridged(reduction)}: give 'mean', 'sum' or 'none'")
    if input.shape[:-1] != target.shape:
        raise ValueError(
            f"input {list(input.shape)} and target {list(target.shape)}: give logits [..., classes] and targets [...]"
        )
    if _checked_dim(dim, (None, *COLUMNS)) is None:
        flat = F.cross_entropy(
            input.flatten(0, -2), target.flatten(), weight, ignore_index=ignore_index, reduction=reduction
        )
        return flat.view_as(target) if reduction == "none" else flat
    members = _parallel(group).group
    logits = input if input.dtype == torch.float64 else input.float()
    own_largest = logits.detach().amax(-1)
    largest = own_largest.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=members)
    shifted = logits - largest.unsqueeze(-1)
    counted = target != ignore_index
    _require_in_range("target", target, logits.shape[-1] * members.size(), counted)
    rows, is_own = own_rows(target, logits.shape[-1], members)
    of_target = shifted.gather(-1, rows.unsqueeze(-1)).squeeze(-1) * is_own
    sums = shifted.exp().sum(-1)
    total, of_target = collectives.reduce(torch.stack([sums, of_target]), members).unbind()
    has_all_largest = input.device.type == "cpu" and torch.equal(own_largest, largest)
    if has_all_largest and members.size() > 1:
        _require_parts(logits.detach(), largest, sums.detach(), total.detach(), members.size())
    losses = total.log() - of_target
    factors = counted.to(losses.dtype) if weight is None else weight[target.clamp(min=0)] * counted
    losses = torch.where(counted, losses * factors, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / factors.sum() if reduction == "mean" else losses.sum()


def _require_parts(logits: Tensor, largest: Tensor, sums: Tensor, total: Tensor, size: int) -> None:
    """Refuse whole logits, which all ranks have alike: each class would count several times.

    All ranks decide alike, without a message: of whole logits every rank has the largest one of all tokens, which is
    known before the call, and the same sum. Not on accelerators, as in :func:`_require_in_range`.
    """
    are_alike = sums.numel() > 1 and torch.allclose(sums * size, total, rtol=1e-5, atol=0.0)
    if are_alike and bool((logits.amin(-1) < largest).any()):  # constant logits say nothing
        raise ValueError(
            f"input {list(logits.shape)}: all {size} ranks of the group have the same logits, so these are those of "
            "all classes, of which each would count several times: give this rank's part, such as the output of "
            "ParallelLinear(..., dim=-1), or set dim=None"
        )


def _require_in_range(what: str, indices: Tensor, size: int, counted: Tensor | None = None) -> None:
    """Refuse indices that no rank holds, of which each rank would compute zeros.

    Not on accelerators: there the check would make the host wait for the device in every call.
    """
    if indices.device.type != "cpu":
        return
    wrong = (indices < 0) | (indices >= size) if counted is None else ((indices < 0) | (indices >= size)) & counted
    if wrong.any():
        raise IndexError(f"a {what} is {int(indices[wrong][0])}: give 0 to {size - 1}")


def own_rows(tokens: Tensor, rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return each token's row among the ``rows`` of this rank, or 0, and a mask of the tokens that have one."""
    local = tokens - group.rank() * rows
    is_own = (local >= 0) & (local < rows)
    return local * is_own, is_own


def _parallel(group: Group) -> Parallel:
    if isinstance(group, Parallel):
        return group
    return Parallel(distributed.get_group() if group is None else group)


def _checked_dim(dim: int | None, valid: tuple[int | None, ...] = (None, *ROWS, *COLUMNS)) -> int | None:
    if dim not in valid or isinstance(dim, bool):
        raise ValueError(f"dim={abridged(dim)}: give one of {', '.join(map(str, valid))}")
    return dim
