"""The parameters that a reducer serves: found, compared between ranks, and made equal at the start."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_topo.errors import listed
from ds_topo.process_groups.agreement import agree
from ds_topo.process_groups.creation import ProcessGroup
from ds_topo.process_groups.torch_names import job_timeout
from ds_topo.reducer.options import ReductionOptions
from ds_topo.reducer.parameter_state import ParameterState, expert_group_name
from ds_topo.reducer.torch_names import broadcast_coalesced

owners: MutableMapping[nn.Parameter, weakref.ref[object]] = WeakIdKeyDictionary()
"""Which parameters have a reducer; the entry goes with either of them, or with ``detach()``."""


def find_parameters(module: nn.Module, options: ReductionOptions, may_be_empty: bool = False) -> list[ParameterState]:
    """The trainable parameters of a module, each once, without those to ignore.

    Raises:
        ValueError: nothing to train, an unknown name to ignore, an expert without a group, a sparse embedding whose
            weight is used elsewhere.
        RuntimeError: a parameter already has a reducer.
    """
    ignored = ignored_identities(module, options)
    sparse = sparse_parameters(module)
    states = [
        ParameterState(
            index=-1,
            name=name,
            parameter=parameter,
            dtype=options.accumulation_dtype_of(parameter),
            is_sparse=id(parameter) in sparse and options.region_of(parameter) is None,
            repeats=options.allow_late_gradients,
            grad_buffer=options.grad_buffers.get(parameter),
            region=options.region_of(parameter),
            expected=0 if options.static_graph else 1,
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in ignored
    ]
    for index, state in enumerate(states):
        state.index = index
        if not state.accumulates:
            state.expected = 1  # to count first would need memory for all gradients
    if not states and not may_be_empty:
        raise ValueError("module: no parameter requires a gradient, so there is nothing to reduce")
    _check_sparse(module, [state for state in states if state.is_sparse])
    taken = [state.name for state in states if has_reducer(state.parameter)]
    if taken:
        raise RuntimeError(
            f"parameters {listed(taken)} already have a GradientReducer: detach() that one first, or use it for both"
        )
    for state in states:
        name = state.expert_group_name
        if name is not None and name not in options.expert_groups:
            raise ValueError(
                f"expert_groups: parameter {state.name!r} is an expert of group {name!r}, which is not among "
                f"{sorted(options.expert_groups)}; pass its expert-data group, expert_groups={{{name!r}: group}}"
            )
    return states


def has_reducer(parameter: nn.Parameter) -> bool:
    """Whether a reducer serves the parameter already."""
    owner = owners.get(parameter)
    return owner is not None and owner() is not None


def sparse_parameters(module: nn.Module) -> set[int]:
    """Identities of the parameters whose gradients are sparse: embeddings with ``sparse=True``."""
    embeddings = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag))]
    return {id(part.weight) for part in embeddings if part.sparse}


def _check_sparse(module: nn.Module, sparse: Sequence[ParameterState]) -> None:
    """Raise if a sparse embedding's weight is another layer's, too: the gradients of both make a dense one."""
    for state in sparse:
        for prefix, part in module.named_modules():
            is_embedding = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
            for name, parameter in part._parameters.items():
                if parameter is state.parameter and not is_embedding:
                    other = f"{prefix}.{name}".lstrip(".")
                    raise ValueError(
                        f"parameter {state.name!r} is the weight of an nn.Embedding(sparse=True) and of another layer, "
                        f"as {other!r}, whose gradient is dense: give the embedding sparse=False"
                    )


def ignored_identities(module: nn.Module, options: ReductionOptions) -> set[int]:
    """Identities of the parameters to leave alone.

    Raises:
        ValueError: a name that no parameter has.
    """
    if not options.ignored_parameters:
        return set()
    named = dict(module.named_parameters(remove_duplicate=False))
    ignored = set()
    for entry in options.ignored_parameters:
        if isinstance(entry, str) and entry not in named:
            raise ValueError(
                f"ignored_parameters: no parameter is named {entry!r}; names look like {next(iter(named), '')!r}"
            )
        ignored.add(id(named[entry] if isinstance(entry, str) else entry))
    return ignored


def agree_on_parameters(
    states: Sequence[ParameterState], options: ReductionOptions, group: ProcessGroup, failure: Exception | None
) -> None:
    """Check that all ranks of the group reduce the same parameters in the same way; collective.

    Raises:
        DisagreementError: they do not; the message names the parameters and options that differ, on every rank.
        Exception: ``failure``, which this rank has had before.
    """
    lines = options.summary() + [_description(state) for state in states]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    agree(
        f"{len(states)} parameters and options of digest {digest}",
        sorted(dist.get_process_group_ranks(group)),
        job_timeout(),
        failure=failure,
        subject="what to reduce",
        lines=lambda: lines,
    )


def _description(state: ParameterState) -> str:
    expert = state.expert_group_name
    details = [str(list(state.parameter.shape)), str(state.parameter.dtype), *(["sparse"] if state.is_sparse else [])]
    return f"{state.name} {' '.join(details)}" + (f" expert of {expert}" if expert is not None else "")


def broadcast(tensors: Iterable[torch.Tensor], group: ProcessGroup) -> None:
    """Give every rank of the group its first rank's values, in place; collective."""
    broadcast_coalesced([tensor.detach() for tensor in tensors], group)


def make_equal(module: nn.Module, options: ReductionOptions, group: ProcessGroup) -> None:
    """Give every rank the parameters and buffers of the group's first rank, frozen ones too, but for those to ignore.

    Experts get those of the first rank of their own group. Collective.
    """
    ignored = ignored_identities(module, options)
    by_name: dict[str | None, list[torch.Tensor]] = {None: list(module.buffers())}
    for parameter in module.parameters():
        if id(parameter) not in ignored:
            by_name.setdefault(expert_group_name(parameter), []).append(parameter)
    for name, tensors in by_name.items():
        replicas = group if name is None else options.expert_groups.get(name)
        if replicas is not None:
            broadcast(tensors, replicas)
