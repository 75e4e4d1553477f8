"""``overlap_parameters``: whatever reads a parameter after the step gets its new value, or the option says why not."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils.checkpoint import checkpoint

from ds_topo import PipelineModule, PipelineParallelGrid, initialize
from ds_topo.base.backends import synchronize
from ds_topo.base.torch_names import COLLECTIVES_ASK
from ds_topo.errors import FailedRankError
from ds_topo.reduction import exchange
from ds_topo.reduction.arrivals import Arrival, Arrivals, InFlightParameter, hide, unaware_of_arrivals
from tests.support.exhaustive import mark_exhaustive
from tests.support.ranks import run_ranks
from tests.support.small_engines import settings, start
from tests.support.training import destroy_engine
from tests.support.world import Worlds

pytestmark = pytest.mark.backends("strict", exhaustive=("gloo",))

OVERLAPPED = {"bucket_bytes": 2000, "first_bucket_bytes": 500, "last_bucket_bytes": 300, "overlap_parameters": True}


@pytest.mark.thorough
def test_what_would_not_wait_for_parameters_is_named() -> None:
    class Optimized(nn.Linear):
        pass

    Optimized.__name__ = "OptimizedModule"
    compiled, other = nn.Linear(1, 1), nn.Linear(1, 1)
    compiled.compile()
    other.weight = type("Own", (nn.Parameter,), {})(torch.zeros(1, 1))
    said = f"a collective of torch {torch.__version__}"
    for part, expected in (
        (nn.Linear(1, 1, bias=False), None),
        (torch.jit.script(nn.Linear(1, 1)), "the scripted module '1'"),
        (compiled, "the compiled module '1'"),
        (Optimized(1, 1), "the compiled module '1'"),
        (other, "the module '1', whose parameters are of class Own,"),
    ):
        found = unaware_of_arrivals(nn.Sequential(nn.Linear(1, 1), part))
        assert found == (expected if COLLECTIVES_ASK else said)


class _Sending:
    """An exchange that ends with the first wait."""

    waits = 0

    def is_done(self) -> bool:
        return self.waits > 0

    def wait(self) -> int:
        self.waits += 1
        return 7


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_new_parameter_of_one_in_flight_waits_for_it(requires_grad: bool) -> None:
    sending, values = _Sending(), torch.arange(3.0)
    parameter = nn.Parameter(values, requires_grad)
    seats = [(parameter, values, torch.zeros(3))]
    hide(seats)
    before = time.perf_counter_ns()
    arrival = Arrival(sending, torch.device("cpu"), seats)  # type: ignore[arg-type]
    assert (type(parameter), arrival.is_over, sending.waits) == (InFlightParameter, False, 0)
    new = nn.Parameter(parameter, requires_grad)
    assert (type(new), new.requires_grad) == (nn.Parameter, requires_grad)
    assert new.tolist() == [0.0, 1.0, 2.0]
    assert (type(parameter), arrival.is_over, sending.waits) == (nn.Parameter, True, 1)
    assert arrival.done_ns == 7
    assert 0 < arrival.waited_ns <= time.perf_counter_ns() - before


def test_modules_wait_before_they_run_until_all_parameters_have_arrived() -> None:
    sent, layers, under_way = [_Sending(), _Sending()], [nn.Linear(2, 2, bias=False) for _ in range(2)], Arrivals()
    hooks = len(_global_forward_pre_hooks)
    under_way.expect([])
    assert len(_global_forward_pre_hooks) == hooks, "nothing is in flight"
    arriving = []
    for sending, layer in zip(sent, layers, strict=True):
        seats = [(layer.weight, layer.weight.detach(), torch.zeros(2, 2))]
        hide(seats)
        arriving.append(Arrival(sending, torch.device("cpu"), seats))  # type: ignore[arg-type]
    under_way.expect(arriving)
    assert len(_global_forward_pre_hooks) == hooks + 1
    seen: list[int] = []
    layers[0].register_forward_pre_hook(lambda *_: seen.append(sent[0].waits))
    for layer, waits, left in ((nn.Identity(), (0, 0), 1), (layers[0], (1, 0), 1), (layers[1], (1, 1), 0)):
        layer(torch.ones(1, 2))
        assert tuple(sending.waits for sending in sent) == waits
        assert len(_global_forward_pre_hooks) == hooks + left
    assert seen == [1], "the wait comes before the module's own hooks"


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 4))


def _engine(grid: PipelineParallelGrid, model: nn.Module, *, overlap: bool = True, stage: int = 1) -> Any:
    optimizer = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    reducer = {**OVERLAPPED, "overlap_parameters": overlap}
    config = settings(
        optimizer=optimizer, zero_optimization={"stage": stage}, gradient_reducer=reducer, gradient_accumulation_steps=1
    )
    engine, *_ = initialize(model=model, mpu=grid, config=config)
    return engine


@contextmanager
def _held() -> Iterator[threading.Event]:
    """Hold every gather back until the event is set, or for 0.03 s; a reader that does not wait reads old values."""
    gather, go_on = exchange._Worker._gather, threading.Event()

    def late(self: Any, *arguments: Any) -> Any:
        go_on.wait(0.03)
        return gather(self, *arguments)

    with mock.patch.object(exchange._Worker, "_gather", late):
        yield go_on


# -- programs that read parameters in unusual ways --------------------------------------------------------------------


class Layers(nn.Module):
    """Layers that a subclass uses in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _layers()
        self.passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.last(self.body[:4](inputs))

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body[4](hidden)

    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Take a step; return the loss."""
        loss = F.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss


class InAList(Layers):
    """Its last weight comes from a list, which no module looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.body[4].weight]

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, *self.kept)


class ByKeyword(InAList):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(input=hidden, weight=self.kept[0])


class InANestedContainer(InAList):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.cat([self.kept[0], hidden.new_zeros(1, 17)])[:4].t()


class InAClosure(Layers):
    def __init__(self) -> None:
        super().__init__()
        weight = self.body[4].weight
        self.product = lambda hidden: hidden @ weight.t()

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.product(hidden)


class InALaterPass(InAList):
    """The first two passes look the weight up; later ones do not."""

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body[4](hidden) if self.passes < 3 else super().last(hidden)


class OfAnotherModule(Layers):
    """The first layer's pass reads the last layer's weight."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * self.body[4].weight.sum())


class InDictionaries(Layers):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self.body[4]._parameters
        return F.linear(hidden, {**found}["weight"], dict(found)["bias"]) + F.linear(hidden, found.copy()["weight"])


class WithoutTheEngine(Layers):
    """After a step it calls the module itself."""

    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        super().step(engine, inputs, targets)
        return F.mse_loss(self(inputs), targets)


class EvaluatedFirst(Layers):
    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        engine.eval()
        with torch.no_grad():
            before = F.mse_loss(engine(inputs), targets)
        engine.train()
        return super().step(engine, inputs, targets) + before


class TwoPassesAStep(Layers):
    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(engine(inputs) + engine(2 * inputs), targets)
        engine.backward(loss)
        engine.step()
        return loss


class Checkpointed(InAList):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=False)


class Shared(Layers):
    """A weight that two modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(17, 4, bias=False)
        self.again.weight = self.body[4].weight

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body[4](hidden) + self.again(hidden)


class InAFunction(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        hidden, weight = context.saved_tensors
        return gradient @ weight, gradient.t() @ hidden


class WithAFunction(InAList):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return InAFunction.apply(hidden, self.kept[0])


class Vectorized(InAList):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: self.kept[0] @ row)(hidden)


class CalledByFunction(Layers):
    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.body[4], dict(self.body[4].named_parameters()), hidden)


class Averaged(Layers):
    """An exponential moving average is updated after each step, and is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [torch.zeros(4, 17)]

    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().step(engine, inputs, targets)
        self.average[0] = self.average[0].to(loss.device).lerp_(self.body[4].weight.data, 0.5)
        return loss + self.average[0].sum()


class HeldAsData(Layers):
    """It keeps ``weight.data`` of an earlier step, which shares the weight's memory."""

    slower = "share their memory"

    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().step(engine, inputs, targets)
        if self.passes == 1:
            self.kept = [self.body[4].weight.data]
        return loss + self.kept[0].sum()


class Scripted(Layers):
    """Scripted code reads parameters without torch's Python functions."""

    slower = "the scripted module 'body.2'"

    def __init__(self) -> None:
        super().__init__()
        self.body[2] = torch.jit.script(self.body[2])


class Compiled(Layers):
    slower = "the compiled module 'body.2'"

    def __init__(self) -> None:
        super().__init__()
        self.body[2].compile(backend="eager")


class CompiledLater(Layers):
    """A part that is compiled after the first step, while parameters may be in flight."""

    def step(self, engine: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().step(engine, inputs, targets)
        if self.passes == 1:
            self.body[2].compile(backend="eager")
        return loss


class WithACompiledFunction(InAList):
    """Compiled code gets a parameter of another module as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.product = torch.compile(F.linear, backend="eager")

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.product(hidden, self.kept[0])


PROGRAMS = [
    *(Layers, InAList, ByKeyword, InAClosure, InALaterPass, OfAnotherModule, WithoutTheEngine, Checkpointed, Shared),
    *(WithAFunction, CalledByFunction, Averaged, HeldAsData, Scripted, Compiled, WithACompiledFunction),
    *(InANestedContainer, InDictionaries, EvaluatedFirst, TwoPassesAStep, Vectorized, CompiledLater),
]
DEFAULT = 16
"""The first programs, which the default set trains."""


def _run(grid: PipelineParallelGrid, program: type[Layers], **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Train for four steps; return the losses, and all parameters and optimizer states."""
    model = program()
    engine = _engine(grid, model, **options)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs, targets = (torch.randn(2, width, generator=generator).to(engine.device) for width in (8, 4))
        losses.append(float(model.step(engine, inputs, targets)))
    parameters = list(engine.module.parameters())
    states = [parameter.detach().clone() for parameter in parameters]
    states += [safe_get_full_fp32_param(parameter) for parameter in parameters]
    states += [safe_get_full_optimizer_state(parameter, "exp_avg_sq") for parameter in parameters]
    engine.destroy()
    return losses, states


def _trains_alike(program: type[Layers], stage: int) -> None:
    start()
    with PipelineParallelGrid("data=-1") as grid, _held(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wanted, wanted_states = _run(grid, program, stage=stage, overlap=False)
        losses, states = _run(grid, program, stage=stage)
    # on a GPU, libraries may choose other kernels for the same product
    exact = {"rtol": 0, "atol": 0} if states[0].device.type == "cpu" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close((losses, states), (wanted, wanted_states), **exact)
    told = [str(each.message) for each in caught if "overlap_parameters" in str(each.message)]
    expected = getattr(program, "slower", None) if COLLECTIVES_ASK else "a collective of torch"
    assert len(told) == (expected is not None), told
    assert expected is None or expected in told[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.exhaustive)], ids="zero{}".format)
@pytest.mark.parametrize("program", mark_exhaustive(PROGRAMS, lambda number, _: number < DEFAULT))
@pytest.mark.backends("strict", exhaustive=("gloo",))
def test_programs_train_as_without_the_option(world: Worlds, program: type[Layers], stage: int) -> None:
    world(2).run(_trains_alike, program, stage)


# -- readers between steps --------------------------------------------------------------------------------------------


def _saved(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)["2.weight"]
    return loaded


def _copied(model: nn.Module) -> torch.Tensor:
    copied = copy.deepcopy(model)[2].weight
    assert type(copied) is nn.Parameter
    return copied


def _summed_by_a_thread(model: nn.Module) -> torch.Tensor:
    result: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: result.append(model[2].weight.clone()))
    thread.start()
    thread.join()
    return result[0]


in_flight_after_the_step = pytest.mark.skipif(
    not COLLECTIVES_ASK, reason="with this torch parameters arrive within the step"
)
READERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "a_method": lambda model: model[2].weight.clone(),
    "data": lambda model: model[2].weight.data.clone(),
    "an_index": lambda model: torch.stack([row.clone() for row in model[2].weight]),
    "numpy": lambda model: torch.from_numpy(model[2].weight.detach().cpu().numpy().copy()),
    "all_parameters": lambda model: dict(model.named_parameters())["2.weight"] + 0,
    "a_state_dict": lambda model: model.state_dict()["2.weight"].clone(),
    "variables_of_a_state_dict": lambda model: model.state_dict(keep_vars=True)["2.weight"] * 1,
    "a_copy": _copied,
    "a_file": _saved,
    "another_thread": _summed_by_a_thread,
    "a_broadcast": lambda model: _sent(model[2].weight),
    "foreach": lambda model: torch._foreach_add([model[2].weight], 0)[0],
    "an_operator": lambda model: torch.ops.aten.add(model[2].weight, 0),
    "a_vector": lambda model: nn.utils.parameters_to_vector([model[2].weight]).view(17, 33),
    "a_compiled_function": lambda model: torch.compile(lambda weight: weight * 1, backend="eager")(model[2].weight),
    "DeepSpeeds_functions": lambda model: safe_get_full_fp32_param(model[2].weight),
}


def _sent(weight: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        dist.broadcast(weight, 0)
    return weight.detach().clone()


def _reads(reader: str) -> None:
    start()
    with PipelineParallelGrid("data=-1") as grid, _held() as go_on:
        engine = _engine(grid, _layers())
        model, kept = engine.module, engine.module[2].weight
        engine.backward(engine(torch.ones(2, 8, device=engine.device)).sum())
        engine.step()
        assert isinstance(kept, InFlightParameter), "step() does not wait"
        model.zero_grad()
        assert (kept.shape, kept.numel(), kept.requires_grad, kept.grad, kept.dtype, kept.dim(), len(kept)) == (
            *((17, 33), 561, True, None, torch.float32, 2, 17),
        )
        assert kept in set(model.parameters())
        assert isinstance(kept, InFlightParameter), "who reads no values does not wait"
        seen = READERS[reader](model).detach()
        synchronize(engine.device)  # on a GPU a wait orders the reader's stream only
        engine.gradient_reducer.wait()
        assert type(kept) is nn.Parameter
        assert torch.equal(seen.to(kept.device), kept)
        assert torch.equal(seen.to(kept.device), safe_get_full_fp32_param(kept))
        go_on.set()
        engine.destroy()


@pytest.mark.thorough
@in_flight_after_the_step
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.backends("strict", exhaustive=("gloo",))
def test_every_reader_of_a_parameter_waits_for_it(world: Worlds, reader: str) -> None:
    world(2).run(_reads, reader)


# -- readers that torch does not ask to wait --------------------------------------------------------------------------


@torch.jit.script
def _scripted(weight: torch.Tensor) -> torch.Tensor:
    return weight * 1


@torch.jit.script
def _scripted_write(weight: torch.Tensor) -> torch.Tensor:
    return weight.zero_()


def _from_a_call(model: Any, transform: Callable[..., Any]) -> torch.Tensor:
    """Return the weight, by a transform of a functional call of its layer."""
    weights = {name: value for name, value in model[2].named_parameters() if name == "weight"}

    def called(inputs: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        bias = {"bias": torch.zeros(17, device=inputs.device)}
        called: torch.Tensor = torch.func.functional_call(model[2], {**weights, **bias}, inputs)
        return called

    result: torch.Tensor = transform(called)(torch.eye(33, device=model[2].weight.device), weights)
    return result


def _half_of_squares(weight: torch.Tensor) -> torch.Tensor:
    return weight.square().sum() / 2  # its gradient is the weight


def _columns(weight: torch.Tensor) -> torch.Tensor:
    return torch.arange(33, device=weight.device).repeat(17)


def _part_of_flat(weight: torch.Tensor, engine: Any) -> torch.Tensor:
    flat = engine.optimizer.bit16_groups_flat[0].clone()
    return flat[weight.storage_offset() :][: weight.numel()].view(weight.shape)


def _read_by_a_child(weight: torch.Tensor) -> torch.Tensor:
    """Read a parameter in a forked process, as a worker of a data loader does."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(20)
        try:
            result: object = weight.tolist()
        except BaseException as error:
            result = error
        os.write(writing, pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pickle.load(pipe)
    os.waitpid(process, 0)
    if isinstance(result, BaseException):
        raise result
    return torch.tensor(result)


UNASKED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "tensor": lambda weight, _: torch.tensor(weight),
    "as_tensor": lambda weight, _: torch.as_tensor(weight),
    "as_tensor_of_a_type": lambda weight, _: torch.as_tensor(weight, dtype=torch.float64).float(),
    "asarray": lambda weight, _: torch.asarray(weight),
    "a_copy_by_asarray": lambda weight, _: torch.asarray(weight, copy=True),
    "Tensor": lambda weight, _: torch.Tensor(weight),
    "FloatTensor": lambda weight, _: torch.FloatTensor(weight),
    "new_tensor": lambda weight, _: torch.ones(1).new_tensor(weight),
    "as_subclass": lambda weight, _: weight.as_subclass(torch.Tensor),
    "make_subclass": lambda weight, _: torch.Tensor._make_subclass(torch.Tensor, weight),
    "a_new_parameter": lambda weight, _: nn.Parameter(weight),
    "a_frozen_parameter": lambda weight, _: nn.Parameter(weight, requires_grad=False),
    "a_new_buffer": lambda weight, _: nn.Buffer(weight),
    "a_shallow_copy": lambda weight, _: copy.copy(weight),
    "to_dlpack": lambda weight, _: torch.from_dlpack(torch._C._to_dlpack(weight)),
    "from_dlpack": lambda weight, _: torch.from_dlpack(weight.detach()),
    "an_array": lambda weight, _: torch.from_numpy(np.array(weight.detach().cpu())),
    "a_list": lambda weight, _: torch.tensor(weight.tolist()),
    "sparse_coo": lambda weight, _: torch.sparse_coo_tensor(torch.arange(17)[None], weight).to_dense(),
    "sparse_csr": lambda weight, _: torch.sparse_csr_tensor(
        torch.arange(0, 562, 33), _columns(weight), weight.as_subclass(torch.Tensor).reshape(-1)
    ).to_dense(),
    "nested": lambda weight, _: torch.nested.nested_tensor([weight])[0],
    "as_nested": lambda weight, _: torch.nested.as_nested_tensor([weight])[0],
    "jagged": lambda weight, _: torch.nested.as_nested_tensor([weight], layout=torch.jagged)[0],
    "grad": lambda weight, _: torch.func.grad(_half_of_squares)(weight),
    "grad_of_a_closure": lambda weight, _: torch.func.grad(lambda one: (weight * one).sum())(torch.ones_like(weight)),
    "vmap": lambda weight, _: torch.vmap(lambda row: row * 1)(weight),
    "jacrev": lambda weight, _: torch.func.jacrev(_half_of_squares)(weight),
    "jacfwd": lambda weight, _: torch.func.jacfwd(_half_of_squares)(weight),
    "vjp": lambda weight, _: torch.func.vjp(lambda value: value * 1, weight)[0],
    "jvp": lambda weight, _: torch.func.jvp(lambda value: value * 1, (weight,), (torch.ones(17, 33),))[0],
    "linearize": lambda weight, _: torch.func.linearize(lambda value: value * 1, weight)[0],
    "functionalize": lambda weight, _: torch.func.functionalize(lambda value: value * 1)(weight),
    "jacrev_of_a_call": lambda _, engine: _from_a_call(engine.module, torch.func.jacrev)[0, :, 0, :],
    "vmap_of_a_call": lambda _, engine: _from_a_call(engine.module, lambda call: torch.vmap(call, (0, None))).T,
    "functionalize_of_a_call": lambda _, engine: _from_a_call(engine.module, torch.func.functionalize).T,
    "a_scripted_function": lambda weight, _: _scripted(weight),
    "a_scripted_write": lambda weight, _: _scripted_write(weight.as_subclass(torch.Tensor)),
    "a_compiled_function": lambda weight, _: torch.compile(lambda value: value * 1, backend="aot_eager")(weight),
    "an_averaged_model": lambda _, engine: torch.optim.swa_utils.AveragedModel(engine.module).module[2].weight,
    "a_flat_tensor_of_DeepSpeed": _part_of_flat,
    "a_forked_process": lambda weight, _: _read_by_a_child(weight),
}
"""Each returns the weight, or something like it. Most do not wait."""


def _read_without_waiting() -> dict[str, str]:
    """Return what each reader got: the right value, NaN or an error."""
    start()
    found = {}
    with PipelineParallelGrid("data=-1") as grid, _held(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = _engine(grid, _layers())
        weight = engine.module[2].weight
        address = weight.data_ptr()
        gc.freeze()
        for name, read in UNASKED.items():
            engine.backward(engine(torch.ones(2, 8, device=engine.device)).square().sum())
            before = weight.detach().clone()
            gc.collect()  # the last reader may have left a tensor that shares the weight's memory
            engine.step()
            assert isinstance(weight, InFlightParameter), name
            try:
                seen = read(weight, engine).detach().clone()
            except Exception as error:
                found[name] = f"error: {type(error).__name__}"
            synchronize(engine.device)
            engine.gradient_reducer.wait()
            if name not in found:
                is_right = torch.equal(seen.to(weight.device), weight)
                found[name] = "right" if is_right else "NaN" if seen.isnan().all() else f"wrong: {seen}"
            assert type(weight) is nn.Parameter
            assert (weight.data_ptr(), weight.stride()) == (address, (33, 1))
            assert not torch.equal(weight, before)
            assert torch.equal(weight, safe_get_full_fp32_param(weight))
        gc.unfreeze()
        engine.destroy()
    return found


@pytest.mark.thorough
@in_flight_after_the_step
@pytest.mark.backends("gloo", exhaustive=("strict",))
def test_readers_that_do_not_wait_get_no_old_values(world: Worlds) -> None:
    for found in world(2).run(_read_without_waiting):
        assert not [reader for reader, outcome in found.items() if outcome.startswith("wrong")], found
        assert Counter(found.values())["right"] >= len(found) / 3, "a reader that waits is right"


def _writes(overlap: bool) -> None:
    """Check that a value written after the step stays when the parameter arrives, until the next step."""
    start()
    with PipelineParallelGrid("data=2") as grid, _held():
        engine = _engine(grid, _layers(), overlap=overlap)
        weight = engine.module[2].weight
        writes: dict[str, Callable[[], object]] = {
            "in place": lambda: weight.data.fill_(3.0),
            "by other memory": lambda: setattr(weight, "data", torch.full_like(weight, 3.0)),
        }
        for way, write in writes.items():
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            with torch.no_grad():
                write()
            engine.gradient_reducer.wait()
            assert torch.equal(weight, torch.full_like(weight, 3.0)), way
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            if way == "in place":  # with other memory the step writes to the former one, as in stock
                assert torch.equal(weight, safe_get_full_fp32_param(weight)), "after the next step"
        engine.destroy()


@pytest.mark.parametrize("overlap", [True, False])
def test_values_written_after_the_step_stay_until_the_next(world: Worlds, overlap: bool) -> None:
    world(2).run(_writes, overlap)


def _one_rank_reads() -> None:
    """A rank reads parameters of its stage between steps, others do not: no collective depends on readers."""
    start()
    with PipelineParallelGrid("data=2,pipe=2") as grid:
        module = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 4, grid=grid, loss_fn=F.mse_loss)
        config = settings(zero_optimization={"stage": 1}, gradient_reducer={"overlap_parameters": True})
        engine, *_ = initialize(model=module, config=config)
        for _ in range(2):
            engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 2))
            dist.barrier()  # a collective of the program's own, while parameters are in flight
        if grid.get_data_parallel_rank() == 0:
            seen = {name: value.clone() for name, value in module.state_dict().items()}
        dist.barrier()
        if grid.get_data_parallel_rank() == 0:
            assert all(torch.equal(value, seen[name]) for name, value in module.state_dict().items())
        destroy_engine(engine)


def test_one_rank_may_read_parameters_while_others_do_not(world: Worlds) -> None:
    world(4).run(_one_rank_reads)


def _is_hidden(weight: torch.Tensor) -> bool:
    try:
        return bool(torch.tensor(weight).isnan().all())
    except RuntimeError as error:  # in a build for CUDA
        return "arriving from other ranks" in str(error)


def _after_an_error() -> None:
    """A region that never arrives is not treated as arrived, in this process and in its children."""
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, _layers())
        weight = engine.module[2].weight
        broken = mock.patch.object(exchange._Worker, "_gather", side_effect=RuntimeError("connection closed"))
        with broken:
            engine.backward(engine(torch.ones(2, 8)).sum())
            engine.step()
            for _ in range(2):
                with pytest.raises(RuntimeError, match="connection closed"):
                    weight.clone()
            with pytest.raises(FailedRankError, match="this rank cannot finish forward") as raised:
                engine(torch.ones(2, 8))
            assert "connection closed" in str(raised.value.__cause__)
            with pytest.raises(RuntimeError, match=r"forked while parameters .* in flight .*call wait\(\)"):
                _read_by_a_child(weight)
            assert _is_hidden(weight)
        with pytest.raises(RuntimeError, match="connection closed"):
            engine.destroy()
        assert type(weight) is nn.Parameter
        assert _is_hidden(weight), "half of its values may be new"


@pytest.mark.thorough
@in_flight_after_the_step
def test_every_reader_gets_the_error_of_a_failed_gather() -> None:
    run_ranks(2, _after_an_error, deadline=60)


def _with_a_gather_that_does_not_start() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid:
        engine = _engine(grid, _layers())
        first, *_, last = engine.module.parameters()
        engine.backward(engine(torch.ones(2, 8)).sum())
        calls = iter(range(9))

        def fails(self: Any, flat: torch.Tensor) -> Any:
            if next(calls):
                raise RuntimeError("no memory")
            return gather(self, flat)

        kind = type(engine.gradient_reducer.driver.gradients.groups[0].gradients.exchange)
        gather = kind.gather
        with mock.patch.object(kind, "gather", fails), pytest.raises(RuntimeError, match="no memory"):
            engine.step()
        assert torch.equal(first, safe_get_full_fp32_param(first))
        assert _is_hidden(last), "it was not sent"
        engine.destroy()


@in_flight_after_the_step
def test_parameters_whose_gather_does_not_start_have_no_values(world: Worlds) -> None:
    world(2).run(_with_a_gather_that_does_not_start)


def _compiles() -> None:
    start()
    with PipelineParallelGrid("data=2") as grid, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = _engine(grid, _layers())
        parameters = engine.gradient_reducer.driver.gradients.parameters
        assert parameters.overlaps
        engine.compile(backend="eager")
        assert not parameters.overlaps
        assert any("compiled code does not wait" in str(each.message) for each in caught)
        engine.destroy()


@in_flight_after_the_step
def test_engine_compile_ends_the_overlap(world: Worlds) -> None:
    world(2).run(_compiles)
