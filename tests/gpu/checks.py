"""The checks of ``tests/gpu.sh``, as one rank runs them. ``tests/gpu/__main__.py`` starts the ranks.

    RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29500 python -m tests.gpu.checks zero nccl cuda

Each check compares numbers with an independent reference: one process with all samples, DeepSpeed's own reduction, or
arithmetic. ``nccl`` and ``cuda`` may also be ``gloo`` and ``cuda`` (ranks that share a GPU), and in a rehearsal
``gloo`` or ``strict`` (the stand-in for NCCL) and ``cpu``. What CUDA alone can do is then left out.
"""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.pipe import LayerSpec
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.utils._triton import has_triton

from ds_topo import GradientReducer, PipelineModule, PipelineParallelGrid, checkpoint, init_distributed, initialize
from ds_topo.base.backends import TRAITS, SideStream, backend_of, order_after, synchronize, traits_of
from ds_topo.base.torch_names import COLLECTIVES_ASK
from ds_topo.reduction import exchange
from ds_topo.reduction.reductions import StepNotes
from tests.checkpoint.jobs import Kind, job
from tests.collectives import test_pairs as collective_cases
from tests.engine import test_arriving_parameters as arriving_programs
from tests.engine import test_zero_partitions as zero_cases
from tests.support import reduced_model, strict_backend, strict_calls
from tests.support.ports import free_port
from tests.support.small_engines import settings
from tests.support.training import destroy_engine

NOT_POSSIBLE = 77
"""The exit status of a check that cannot run here; the last line of the output says why."""
SECONDS = "DS_TOPO_CHECK_SECONDS"
"""The environment variable with the seconds after which a rank prints its stacks and ends."""
CYCLES = 1_500_000
"""The cycles of a GPU in about a millisecond."""


class NotPossible(Exception):
    """Raised by a check that cannot run here, with the reason."""


@dataclass(frozen=True)
class Place:
    """The backend and the device of a rank."""

    backend: str
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        """True unless this is a rehearsal."""
        return self.device.type == "cuda"

    def join(self, **options: Any) -> None:
        """Join the job on this device."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        init_distributed(120, self.backend, verbose=False, **options)
        torch.manual_seed(0)

    def sleep(self, milliseconds: float) -> None:
        """Queue a kernel on the current stream that takes about so long. No-op in a rehearsal."""
        if self.on_gpu:
            torch.cuda._sleep(int(milliseconds * CYCLES))


# -- joining -----------------------------------------------------------------------------------------------------------


def joining(place: Place) -> None:
    """Join under torchrun: the backend, the device, the groups of a grid and its mesh."""
    # the default backend of DeepSpeed's accelerator is NCCL on a GPU; gloo and the stand-in are asked for
    init_distributed(120, None if place.backend == "nccl" else place.backend, verbose=False)
    device, size = place.device, dist.get_world_size()
    assert os.environ["TORCHELASTIC_RUN_ID"], "started by torchrun"
    assert backend_of(dist.group.WORLD, device) == place.backend
    if place.backend == "nccl":
        assert torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
    traits = traits_of(dist.group.WORLD, device)
    assert traits.ordered_by_stream is (place.on_gpu or place.backend != "gloo")
    assert traits.averages is (place.backend != "gloo")
    inner = 2 if size % 2 == 0 else 1
    with PipelineParallelGrid(f"data=-1,model={inner}") as grid:
        for axis in ("data", "model"):
            total = torch.tensor(dist.get_rank(), device=device)
            dist.all_reduce(total, group=grid.get_group(axis))
            assert int(total) == sum(grid.get_ranks(axis)), axis
        mesh = grid.device_mesh()
        assert mesh.device_type == device.type
        assert mesh.shape == (size // inner, inner)
        assert dist.get_process_group_ranks(mesh["model"].get_group()) == grid.get_ranks("model")


# -- the reducer -------------------------------------------------------------------------------------------------------


def _model(place: Place) -> reduced_model.Model:
    return reduced_model.model().to(place.device)


def _tokens(place: Place, step: int, rank: int | None = None) -> torch.Tensor:
    return reduced_model.tokens(step, dist.get_rank() if rank is None else rank).to(place.device)


def _gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients on the CPU."""
    found = reduced_model.gradients(module)
    return {name: None if value is None else value.cpu() for name, value in found.items()}


def _times(values: dict[str, torch.Tensor | None], factor: float) -> dict[str, torch.Tensor | None]:
    return {name: None if value is None else value * factor for name, value in values.items()}


def _assert_close(found: dict[str, Any], expected: dict[str, Any], rtol: float = 1e-4) -> None:
    """Compare with gradients that were computed on the CPU."""
    reduced_model.assert_equal_on_all_ranks(found)
    reduced_model.assert_close(found, expected, rtol)


def reducer(place: Place) -> None:
    """Gradients of a reducer alone, against one process on the CPU with all samples."""
    place.join()
    size = dist.get_world_size()
    mean = reduced_model.alone(0, 1, size)
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({}, 1.0, 1e-4),
        ({"op": "sum"}, float(size), 1e-4),
        ({"divisor": 4.0 * size}, 0.25, 1e-4),
        ({"predivide_factor": 4.0}, 1.0, 1e-4),
        ({"op": "sum", "predivide_factor": 2.0}, float(size), 1e-4),
        ({"overlap": False}, 1.0, 1e-4),
        ({"communication_dtype": torch.bfloat16}, 1.0, 4e-2),
    ]
    for options, factor, rtol in cases:
        module = _model(place)
        ours = GradientReducer(module, **reduced_model.SMALL | options)
        if traits_of(dist.group.WORLD, place.device).averages and not options and size > 1:
            assert ours._dense.op == dist.ReduceOp.AVG
        for _ in range(2):  # the second step has another layout of buckets
            module.zero_grad()
            module(_tokens(place, 0)).backward()
            ours.finish()
            _assert_close(_gradients(module), _times(mean, factor), rtol)
        ours.detach()
    _accumulated(place)
    _unused(place)
    _read_later(place)


def _accumulated(place: Place) -> None:
    module = _model(place)
    ours = GradientReducer(module, **reduced_model.SMALL)
    for step in range(3):
        module.zero_grad()
        for micro_batch in range(3):
            with ours.no_sync() if micro_batch < 2 else nullcontext():
                module(_tokens(place, 10 * step + micro_batch)).backward()
        ours.finish()
        _assert_close(_gradients(module), reduced_model.alone(step, 3, dist.get_world_size()))
    ours.detach()


def _unused(place: Place) -> None:
    """Parameters that some ranks or none have used."""
    size = dist.get_world_size()
    for options in ({"find_unused_parameters": True}, {"zero_unused_parameters": True}):
        module, alone = _model(place), reduced_model.model()
        ours = GradientReducer(module, **reduced_model.SMALL | options)
        for step in range(3):
            module.zero_grad()
            alone.zero_grad()
            module(_tokens(place, step), branch=dist.get_rank() % 2).backward()
            ours.finish()
            for rank in range(size):
                (alone(reduced_model.tokens(step, rank), branch=rank % 2) / size).backward()
            found, wanted = _gradients(module), reduced_model.gradients(alone)
            for name, value in wanted.items():
                if value is None and found[name] is not None:
                    assert options == {"zero_unused_parameters": True}, name
                    assert not found.pop(name).any(), name
                    found[name] = None
            _assert_close(found, wanted)
        ours.detach()
    module = _model(place)
    ours = GradientReducer(module, **reduced_model.SMALL)
    module(_tokens(place, 0), branch=0).backward()
    _assert_raises(RuntimeError, "branches.1.weight", ours.finish)
    ours.detach()


def _read_later(place: Place) -> None:
    """Check that ranks learn of a peer's unused parameters at the next step if streams order the collectives."""
    size, rank = dist.get_world_size(), dist.get_rank()
    module = _model(place)
    ours = GradientReducer(module, **reduced_model.SMALL)
    for step in range(2):  # the first step of a layout is read at once
        module.zero_grad()
        module(_tokens(place, step)).backward()
        ours.finish()
    module.zero_grad()
    module(_tokens(place, 2), branch=0 if rank == 0 else None).backward()
    is_later = traits_of(dist.group.WORLD, place.device).ordered_by_stream
    if rank == 0 or not is_later:
        _assert_raises(RuntimeError, "branches.1.weight" if rank == 0 else "", ours.finish)
    else:
        ours.finish()
        module.zero_grad()
        module(_tokens(place, 3)).backward()
        _assert_raises(RuntimeError, "", ours.finish)
    if rank == 0 and is_later and size > 1:  # take part in the step in which the others raise
        module.zero_grad()
        module(_tokens(place, 3)).backward()
        ours.finish()
    ours.detach()


def _assert_raises(kind: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        call()


# -- engines -----------------------------------------------------------------------------------------------------------


def zero(place: Place) -> None:
    """Stages 0, 1 and 2 with our reducer train as with DeepSpeed's own reduction; stage 3 trains as stage 0."""
    place.join()
    clipped = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.5}
    for more in ({}, clipped, zero_cases.BF16):
        _stage_0(more)
    for stage, more in [*zero_cases.CASES, (1, {**zero_cases.BF16, **clipped})]:
        zero_cases._trains_alike(stage, more)
    CPU_Accelerator.is_fp16_supported = lambda _: True  # for a rehearsal, as in tests/support/fork_server.py
    for stage in (1, 2):
        zero_cases._in_fp16(stage)
    _stage_3()


def _stage_0(more: dict[str, Any]) -> None:
    """Train without ZeRO, on the whole world."""
    found = []
    with PipelineParallelGrid("data=-1") as grid:
        for reducer_options in (False, zero_cases.SMALL):
            engine = zero_cases._engine(grid, 0, reducer=reducer_options, **more)
            seen = zero_cases._train(engine)
            found.append(([loss for loss, _ in seen], [value.detach().float() for value in engine.module.parameters()]))
            engine.destroy()
    tolerance = 2e-2 if "bf16" in more else 1e-4
    torch.testing.assert_close(found[1], found[0], rtol=tolerance, atol=tolerance)


def _stage_3() -> None:
    found = []
    with PipelineParallelGrid("data=-1") as grid:
        for stage in (0, 3):
            engine = zero_cases._engine(grid, stage, reducer=False)
            found.append([loss for loss, _ in zero_cases._train(engine, steps=6)])
            engine.destroy()
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


# -- parameters in flight ----------------------------------------------------------------------------------------------


@contextmanager
def _slow_gathers(place: Place, milliseconds: float) -> Iterator[None]:
    """Delay gathers of parameters on a stream of their own, so that readers who do not wait read old values."""
    gather = exchange.CollectiveExchange.gather
    slow = torch.Stream(place.device) if place.on_gpu else None

    def late(self: exchange.CollectiveExchange, flat: torch.Tensor) -> exchange.Pending:
        if slow is None:
            return gather(self, flat)
        slow.wait_stream(torch.accelerator.current_stream(place.device))
        with slow:
            place.sleep(milliseconds)
            return gather(self, flat)

    with mock.patch.object(exchange.CollectiveExchange, "gather", late):
        yield


def arriving(place: Place) -> None:
    """Programs that read parameters in unusual ways after the step, readers between steps, and another stream."""
    place.join()
    with _slow_gathers(place, 10.0):
        for number, program in enumerate(arriving_programs.PROGRAMS):
            arriving_programs._trains_alike(program, 1 + number % 2)
    with _slow_gathers(place, 100.0):
        for reader in arriving_programs.READERS if COLLECTIVES_ASK else ():
            arriving_programs._reads(reader)
        found = arriving_programs._read_without_waiting() if COLLECTIVES_ASK else {}
        assert not [reader for reader, outcome in found.items() if outcome.startswith("wrong")], found
        _read_on_another_stream(place)


def _read_on_another_stream(place: Place) -> None:
    """Right after the step, a second stream reads what the first one has not waited for, and then the first one."""
    with PipelineParallelGrid("data=-1") as grid:
        engine = arriving_programs._engine(grid, arriving_programs._layers())
        weight = engine.module[2].weight
        inputs = torch.ones(2, 8, device=place.device)
        second = torch.Stream(place.device) if place.on_gpu else None
        for step in range(3):
            engine.backward(engine(inputs).sum())
            before = weight.detach().clone()
            engine.step()
            context: AbstractContextManager[Any] = nullcontext() if second is None else second
            with context:
                on_second = weight.detach().clone()
            on_first = weight.detach().clone()
            synchronize(place.device)
            engine.gradient_reducer.wait()
            assert type(weight) is nn.Parameter
            master = safe_get_full_fp32_param(weight)
            assert not torch.equal(weight, before), "the step changes the weight"
            for seen in (on_second, on_first, weight):
                assert torch.equal(seen, master), f"step {step}"
        engine.destroy()


# -- streams -----------------------------------------------------------------------------------------------------------

NUMEL = 1 << 20


def streams(place: Place) -> None:
    """Side streams with long kernels, memory that is freed early, and notes that travel through pinned memory."""
    place.join()
    device = place.device
    side = SideStream(device)
    source = torch.zeros(NUMEL, device=device)
    for step in range(3):
        place.sleep(20)  # the side stream must wait for the current one
        source.fill_(float(step))
        with side.after_current(source):
            place.sleep(20)
            result = source * 3
        order_after(side.mark(), device)  # and the current one for the side stream
        assert torch.equal(result + 1, torch.full_like(result, 3.0 * step + 1)), step
    given = torch.full((NUMEL,), 5.0, device=device)
    address = given.data_ptr()
    synchronize(device)
    with side.after_current(given):
        place.sleep(50)
        copied = given.clone()
    end = side.mark()
    del given  # its memory is still read on the side stream
    overwriting = [torch.full((NUMEL,), -1.0, device=device) for _ in range(4)]
    if place.on_gpu:
        assert address not in [each.data_ptr() for each in overwriting], "the memory was used again too early"
    order_after(end, device)
    assert torch.equal(copied, torch.full_like(copied, 5.0))
    assert side.mark() is None or place.on_gpu
    _notes(place)


def _notes(place: Place) -> None:
    """Notes of several steps are in flight at once; each has its own numbers, although their memory is used again."""
    module = _model(place)
    ours = GradientReducer(module, **reduced_model.SMALL)
    ((route, members),) = ours._members.items()
    size = dist.get_world_size()
    place.sleep(100)
    notes = []
    for step in range(20):
        each = StepNotes(members, route, (), (), failed=step % 3 == 0, prefers_to_defer=step % 2 == 0, step=step)
        each.settle()
        notes.append(each)
    for step, each in enumerate(notes):
        each.read(all_read=True)
        assert (each.failed, each.prefer_to_defer) == (size * (step % 3 == 0), size * (step % 2 == 0)), step
        assert not each.steps_differ
    for step in range(6):
        module.zero_grad()
        module(_tokens(place, step)).backward()
        place.sleep(200)
        ours.finish()
        if place.backend == "nccl" and step > 3:  # earlier steps allocate memory, which may wait for the device
            assert not torch.cuda.current_stream().query(), "finish() does not wait for the device"
        _assert_close(_gradients(module), _mean_of(step, size))
    ours.detach()


def _mean_of(step: int, size: int) -> dict[str, torch.Tensor | None]:
    """Compute the mean of the gradients of a step in one process on the CPU."""
    module = reduced_model.model()
    for rank in range(size):
        (module(reduced_model.tokens(step, rank)) / size).backward()
    return reduced_model.gradients(module)


def two_level(place: Place) -> None:
    """Reduction in two levels on what the ranks take for two hosts, with long kernels and memory freed early."""
    place.join()
    size, rank, device = dist.get_world_size(), dist.get_rank(), place.device
    hosts = {each: f"host{2 * each // size}" for each in range(size)}
    assert dist.group.WORLD is not None
    levels = exchange.two_level_exchange(dist.group.WORLD, hosts, device)
    pending, sums = [], []
    for number in range(8):
        place.sleep(5)
        tensor = torch.full((-(-4099 // levels.slices) * levels.slices,), float(number + rank), device=device)
        sums.append(tensor)
        pending.append(levels.all_reduce(tensor))
        del tensor
        torch.full((NUMEL,), -1.0, device=device)
    for number, (each, total) in enumerate(zip(pending, sums, strict=True)):
        each.wait()
        expected = float(sum(number + other for other in range(size)))
        assert torch.equal(total, torch.full_like(total, expected)), number
    levels.rest()
    with mock.patch("socket.gethostname", return_value=hosts[rank]):
        module = _model(place)
        ours = GradientReducer(module, **reduced_model.SMALL | {"two_level": True})
        assert ours.uses_two_levels
        for step in range(3):
            module.zero_grad()
            place.sleep(10)
            module(_tokens(place, step)).backward()
            ours.finish()
            _assert_close(_gradients(module), _mean_of(step, size))
        ours.detach()


# -- collectives -------------------------------------------------------------------------------------------------------


def collectives(place: Place) -> None:
    """Every differentiable collective, forward and backward, against one process that has all ranks' tensors."""
    place.join()
    size = dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        collective_cases._compare_with_one_process(f"data=-1,model={min(size, 4)}", dtype, place.device)
    if size <= 4:
        for mode in collective_cases.MODES:
            collective_cases._in_torchs_mode(mode, place.device)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoints(place: Place) -> None:
    """Save, save in the background and load: bit-equal, with the random states; and load at another ZeRO stage."""
    place.join()
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    size = dist.get_world_size()
    topology = f"data={size}"
    kinds = [Kind(topology, 0, reduced=True), Kind(topology, 1), Kind(topology, 2, reduced=True), Kind(topology, 3)]
    for kind in kinds:
        folder = Path(str(folders[0]), str(kind))
        with job(kind) as here:
            here.train(range(2))
            state = here.state()
            checkpoint.save(here.engine, folder, "at once")
            in_background = checkpoint.save_in_background(here.engine, folder, "in background")
            losses = here.train(range(2, 4))
            in_background.finish()
        for tag in ("at once", "in background"):
            with job(kind) as here:
                here.train(range(9, 10))  # states that are overwritten
                checkpoint.load(here.engine, folder, tag, verify="digests")
                assert here.state() == state, (kind, tag)
                torch.testing.assert_close(here.train(range(2, 4)), losses, rtol=1e-5, atol=1e-6)
    for first, then in ((1, 2), (2, 0), (1, 3)):
        folder = Path(str(folders[0]), f"{first} to {then}")
        with job(Kind(topology, first)) as here:
            here.train(range(2))
            saved = _weights(here.engine)
            checkpoint.save(here.engine, folder, "one")
            torch.manual_seed(7)  # for dropout
            here.train(range(2, 4))
            trained = _weights(here.engine)
        with job(Kind(topology, then)) as here:
            checkpoint.load(here.engine, folder)
            assert all(map(torch.equal, _weights(here.engine), saved)), (first, then)
            torch.manual_seed(7)
            here.train(range(2, 4))  # shows the states of the optimizer
            torch.testing.assert_close(_weights(here.engine), trained, rtol=1e-4, atol=1e-5)


def _weights(engine: Any) -> list[torch.Tensor]:
    """Return all parameters in fp32 on the CPU, also where ZeRO divides them; collective."""
    is_whole = engine.zero_optimization_stage() == 0
    values = [each if is_whole else safe_get_full_fp32_param(each) for each in engine.module.parameters()]
    return [value.detach().float().cpu().clone() for value in values]


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled(place: Place) -> None:
    """``engine.compile()``, and a compiled module with a reducer, train as without compilation."""
    if place.on_gpu and not has_triton():
        raise NotPossible("torch.compile needs triton on a GPU, and torch does not find it")
    place.join()
    backend = "inductor" if place.on_gpu else "aot_eager"
    for stage in (0, 1):
        found = []
        for is_compiled in (False, True):
            with PipelineParallelGrid("data=-1") as grid, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reducer_options = {**zero_cases.SMALL, **({"overlap_parameters": True} if stage else {})}
                engine = zero_cases._engine(grid, stage, reducer=reducer_options)
                if is_compiled:
                    engine.compile(backend=backend)
                found.append([loss for loss, _ in zero_cases._train(engine)])
                engine.destroy()
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    module = _model(place)
    ours = GradientReducer(module, **reduced_model.SMALL)
    fast = torch.compile(module, backend=backend)
    for step in range(3):
        module.zero_grad()
        fast(_tokens(place, step)).backward()
        ours.finish()
        _assert_close(_gradients(module), _mean_of(step, dist.get_world_size()))
    ours.detach()


# -- pipelines ---------------------------------------------------------------------------------------------------------


@contextmanager
def _messages_through_the_host(place: Place) -> Iterator[None]:
    """Let a pipeline's messages travel as CPU tensors: gloo sends no tensor of a GPU point to point."""
    if not place.on_gpu or place.backend != "gloo":
        yield
        return
    send, receive = deepspeed.comm.send, deepspeed.comm.recv

    def send_copy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        return send(tensor.cpu(), *args, **options)

    def receive_copy(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        received = torch.empty_like(tensor, device="cpu")
        result = receive(received, *args, **options)
        tensor.copy_(received)
        return result

    with mock.patch.multiple(deepspeed.comm, send=send_copy, recv=receive_copy):
        yield


def pipeline(place: Place) -> None:
    """Two stages at ZeRO 0 and 1 with our reducer, against the same layers in one process on the CPU."""
    place.join()
    for stage in (0, 1):
        with PipelineParallelGrid("data=-1,pipe=2") as grid, _messages_through_the_host(place):
            layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
            module = PipelineModule(layers, grid=grid, loss_fn=F.mse_loss, partition_method="uniform")
            adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
            config = settings(optimizer=adam, zero_optimization={"stage": stage}, gradient_reducer=zero_cases.SMALL)
            engine, *_ = initialize(model=module, config=config)
            start = _values_of_all_stages(module)
            alone = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            alone.load_state_dict(start)
            optimizer = torch.optim.Adam(alone.parameters(), lr=1e-2)
            data = grid.get_sample_world_size()
            losses, wanted = [], []
            for step in range(3):
                batches = [
                    [
                        torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro))
                        for micro in range(2)
                    ]
                    for rank in range(data)
                ]
                mine = [
                    (pair[0].to(place.device), pair[1].to(place.device)) for pair in batches[grid.get_sample_rank()]
                ]
                losses.append(float(engine.train_batch(iter(mine))))
                optimizer.zero_grad()
                every = [pair for batch in batches for pair in batch]
                loss = sum(F.mse_loss(alone(inputs), targets) for inputs, targets in every) / len(every)
                loss.backward()
                optimizer.step()
                wanted.append(float(loss))
            torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-6)
            engine.gradient_reducer.wait()
            torch.testing.assert_close(_values_of_all_stages(module), alone.state_dict(), rtol=1e-3, atol=1e-4)
            dist.barrier()
            destroy_engine(engine)


def _values_of_all_stages(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of all stages by layer and name, on the CPU; collective."""
    own = {name: value.detach().cpu().clone() for name, value in module.named_parameters()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: value for each in everyone for name, value in each.items()}


# -- replicas ----------------------------------------------------------------------------------------------------------

REPLICA_STEPS = 60


def replicas(place: Place) -> None:
    """Each rank is a replica; the last one leaves, and is healed when it comes back."""
    try:
        from torchft.coordination import LighthouseServer
    except ImportError as error:
        raise NotPossible("needs torchft") from error
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if number == 0:
        server = LighthouseServer("[::]:0", 1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
        _leave_for_others("lighthouse", server.address())
    address = _left_by_others("lighthouse")
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_PORT=str(free_port()), TORCHFT_LIGHTHOUSE=address)
    place.join()
    leaves = number == size - 1 > 0
    for stage in (0, 1, 3):
        sizes = [0] * REPLICA_STEPS
        with PipelineParallelGrid("data=1") as grid:
            for last in (3, REPLICA_STEPS) if leaves else (REPLICA_STEPS,):
                weights = _train_replica(place, grid, stage, last, sizes)
                time.sleep(3.0 if last == 3 else 0.0)  # the others go on without it
        _leave_for_others(f"weights-{stage}-{number}", weights)
        for other in range(size):
            theirs = _left_by_others(f"weights-{stage}-{other}")
            assert all(torch.equal(*pair) for pair in zip(weights, theirs, strict=True)), other
        if number == 0:
            assert {*sizes} == {1, size}, f"the last replica did not leave and come back: {sizes}"
            _assert_trained_by_replicas(place, weights, sizes)


def _replica_model(place: Place) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).to(place.device)


def _replica_loss(place: Place, model: nn.Module, step: int, replica: int) -> torch.Tensor:
    batch = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * step + replica)).to(place.device)
    return F.mse_loss(model(batch), batch.sin())


def _train_replica(
    place: Place, grid: PipelineParallelGrid, stage: int, last: int, sizes: list[int]
) -> list[torch.Tensor]:
    """Train until a step, and note the number of replicas in each; return the weights, on the CPU."""
    config = settings(
        gradient_accumulation_steps=1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "eps": 1e-3}},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        replicas={"timeout": 30, "hostname": "localhost"},
    )
    engine, *_ = initialize(model=_replica_model(place), mpu=grid, config=config)
    while engine.global_steps < last:
        engine.replicas.begin_step()  # which may heal, so that global_steps changes
        sizes[engine.global_steps] = engine.replicas.size
        engine.backward(_replica_loss(place, engine, engine.global_steps, engine.replicas.rank))
        engine.step()
        time.sleep(0.1)
    if engine.gradient_reducer is not None:
        engine.gradient_reducer.wait()
    weights = [getattr(one, "ds_tensor", one).detach().flatten().cpu() for one in engine.module.parameters()]
    destroy_engine(engine)
    return weights


def _assert_trained_by_replicas(place: Place, weights: list[torch.Tensor], sizes: list[int]) -> None:
    """Compare with one process that trains on the samples of so many replicas in each step."""
    model = _replica_model(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step, size in enumerate(sizes):
        optimizer.zero_grad()
        (sum(_replica_loss(place, model, step, replica) for replica in range(size)) / size).backward()
        optimizer.step()
    expected = [one.detach().flatten().cpu() for one in model.parameters()]
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


def _leave_for_others(name: str, value: object) -> None:
    file = Path(tempfile.gettempdir(), name)
    torch.save(value, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def _left_by_others(name: str) -> Any:
    file = Path(tempfile.gettempdir(), name)
    while not file.exists():
        time.sleep(0.1)
    return torch.load(file)


# -- the watch ---------------------------------------------------------------------------------------------------------


def watch_synchronize(place: Place) -> None:
    """Rank 0 raises while the others wait for the device in ``torch.cuda.synchronize()``."""
    _raise_while_others_block(place, lambda: torch.cuda.synchronize())


def watch_item(place: Place) -> None:
    """Rank 0 raises while the others wait for the device in ``loss.item()``."""
    _raise_while_others_block(place, lambda: torch.ones(1, device=place.device).item())


def _raise_while_others_block(place: Place, wait: Callable[[], object]) -> None:
    """Never return: the parent process checks exit codes and seconds."""
    place.join(watch=float(os.environ["DS_TOPO_CHECK_LIMIT"]))
    dist.all_reduce(torch.ones(1, device=place.device))
    synchronize(place.device)
    if dist.get_rank() == 0:
        time.sleep(3.0)  # until the others are blocked
        print(f"raises at {time.time()}", flush=True)
        raise ValueError("a sample that cannot be read")
    place.sleep(20 * 60 * 1000.0)
    print("blocks", flush=True)
    if place.on_gpu:
        wait()
    else:
        with strict_calls.spinning_waits():
            dist.all_reduce(torch.ones(1))
    raise AssertionError("the wait has ended")


# -- one rank ----------------------------------------------------------------------------------------------------------

CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (
        *(joining, reducer, zero, arriving, streams, two_level, collectives, checkpoints, compiled, pipeline),
        replicas,
        *(watch_synchronize, watch_item),
    )
}


def main(name: str, backend: str, kind: str) -> int:
    """Run a check as the rank that the environment names; return its exit status."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(os.environ.get(SECONDS, "600")), exit=True)
    warnings.simplefilter("ignore")
    if backend == strict_backend.NAME:
        strict_backend.register()
        TRAITS[backend] = TRAITS["nccl"]
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, int(os.environ["LOCAL_RANK"]))
    if backend == "gloo" and kind == "cuda":
        device = torch.device(kind, 0)  # ranks share a GPU
    try:
        CHECKS[name](Place(backend, device))
        dist.barrier()
    except NotPossible as error:
        print(f"not possible here: {error}", flush=True)
        return NOT_POSSIBLE
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:4])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # destructors of a backend may wait for other ranks
