"""Record on each rank what an engine computes in its first steps, as files of plain tensors.

The first engine that trains is recorded, from its first forward pass on::

    start.pt     whole-model places and values of this rank's weights; of a reference their digests
    step_0.pt    activations, losses, gradients before and after reduction, norm, weights and optimizer states
    step_1.pt    ...

A gradient *before reduction* is summed here, by hooks on parameters, and so does not depend on the reduction. One
*after reduction* is what the optimizer gets: every part of it that this rank has, at its place in the whole parameter.
Places are those of checkpoints (:mod:`ds_topo.checkpoint.engine_state`).
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils.serialization import config

from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.engine_state import Named, held_by_module, named_parameters
from ds_topo.checkpoint.shards import Slice, part_of
from ds_topo.engine.replicas import replicated
from ds_topo.ledger import ledger
from ds_topo.mpu import patches
from ds_topo.mpu.mpu import MpuGrid
from ds_topo.topology.axes import MODEL

Part = tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]
"""The shape of a whole tensor, and this rank's boxes of it: offsets and values."""
Parts = dict[str, Part]
MASTER = "master"
"""The key of master weights among the optimizer's states."""
_SAMPLE, _BLOCKS = 1 << 16, 8
"""The number of elements of a tensor that measure its rounding, and of the blocks of rows that they are taken from."""
_EPS_OF_LONG_TYPES = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Recording:
    """The options of a recording."""

    folder: Path
    """The folder of this run; each rank writes into ``rank_<n>``."""
    steps: int
    weights_from: Path | None = None
    """The folder of the wanted run with whose first weights a reference starts."""
    noise: int | None = None
    """The seed of artificial rounding errors; None: none."""
    until_update: bool = False
    """True ends the run after its first update."""

    @property
    def is_reference(self) -> bool:
        """True if this run is compared with another one: what DeepSpeed reduces in it is not recorded."""
        return self.weights_from is not None

    def is_last(self, done: int, is_skipped: bool) -> bool:
        """Tell whether the recording ends after a step; ``done`` counts it."""
        return done == self.steps or (self.until_update and not is_skipped)

    def folder_of(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.folder / f"rank_{rank}"


class Finished(BaseException):
    """All steps are recorded. It is no ``Exception``, so that programs do not catch it."""


@contextmanager
def recording(what: Recording, engine: DeepSpeedEngine | None = None) -> Iterator[Recorder]:
    """Record an engine, or the first one that trains inside the ``with`` statement, until :class:`Finished`."""
    recorder = Recorder(what)
    with ExitStack() as undo:
        undo.callback(recorder.detach)
        for row, method in (
            (patches.RECORDED_FORWARD, recorder.forward),
            (patches.RECORDED_BACKWARD, recorder.backward),
            (patches.RECORDED_STEP, recorder.step),
            (patches.RECORDED_BATCH, recorder.train_batch),
        ):
            if engine is None:
                undo.callback(ledger.bind(row, partial(_around, method)))
            elif isinstance(engine, row.owner):  # type: ignore[arg-type]
                undo.callback(ledger.bind(row, partial(_around_bound, method, engine), engine))
        yield recorder


def _around(method: Callable[..., Any], original: Any) -> Any:
    @wraps(original)
    def call(engine: Any, *arguments: Any, **named: Any) -> Any:
        return method(partial(original, engine), engine, *arguments, **named)

    return call


def _around_bound(method: Callable[..., Any], engine: DeepSpeedEngine, original: Any) -> Any:
    return wraps(original)(partial(method, original, engine))


class Recorder:
    """Writes the steps of one engine."""

    def __init__(self, what: Recording) -> None:
        self.what = what
        self.engine: DeepSpeedEngine | None = None
        self.step_number = 0
        self._hooks = ExitStack()
        self._named: list[Named] = []
        self._is_in_forward = False
        self._micro_batch = 0
        """The number of forward passes of this step so far."""
        self._of_others: set[int] = set()
        """The ids of parameters of a reference, of which another rank records the same weights."""
        self._begin_step()

    # -- the engine's methods, while it is recorded ------------------------------------------------------------------

    def forward(self, original: Any, engine: DeepSpeedEngine, *inputs: Any, **named: Any) -> Any:
        """Record the outputs of modules in the first micro-batch of each step."""
        if not (engine.module.training and torch.is_grad_enabled()) or not self._attach(engine):
            return original(*inputs, **named)
        self._is_in_forward = self._micro_batch == 0
        state = torch.get_rng_state()
        try:
            return original(*inputs, **named)
        finally:
            # a pipeline with seed_layers seeds before each layer
            reseeds = bool(getattr(engine.module, "seed_layers", False))
            self._is_random |= not (reseeds or torch.equal(state, torch.get_rng_state()))
            self._micro_batch += 1
            self._is_in_forward = False

    def backward(self, original: Any, engine: DeepSpeedEngine, loss: Any, *arguments: Any, **named: Any) -> Any:
        """Record the loss of a plain engine."""
        if engine is self.engine and not isinstance(engine, PipelineEngine) and torch.is_tensor(loss):
            self._losses.append(float(loss.detach().float().mean()))
        return original(loss, *arguments, **named)

    def step(self, original: Any, engine: DeepSpeedEngine, *arguments: Any, **named: Any) -> Any:
        """Record a step of a plain engine at its end."""
        if self.engine is None or engine is not self.engine or isinstance(engine, PipelineEngine):
            return original(*arguments, **named)
        before = engine.global_steps
        result = original(*arguments, **named)
        if engine.global_steps > before:
            self._end_step()
        return result

    def train_batch(self, original: Any, engine: PipelineEngine, *arguments: Any, **named: Any) -> Any:
        """Record a step of a pipeline."""
        if not self._attach(engine):
            return original(*arguments, **named)
        result = original(*arguments, **named)
        self._losses.append(float(result))
        self._end_step()
        return result

    # -- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self, engine: DeepSpeedEngine) -> bool:
        """Start to record an engine, unless another one is recorded; return whether it is recorded."""
        if self.engine is not None:
            return engine is self.engine
        self.engine, began = engine, time.time()
        unused = _unused_copies(engine)
        self._named = [one for one in named_parameters(engine) if id(one.parameter) not in unused]
        self._watch(engine.module, {one.names[0]: one.parameter for one in self._named})
        inner = facts.inner_optimizer(engine)
        if inner is not None and not self.what.is_reference:
            self._hooks.callback(inner.register_step_pre_hook(self._before_update).remove)
        self._skipped, self._scale = int(engine.skipped_steps), scale_of(engine)
        folder = self.what.folder_of(dist.get_rank())
        folder.mkdir(parents=True, exist_ok=True)
        described = {"about": {**about(engine), "began": began}, "replicas": self._replicas()}
        if self.what.is_reference:
            whole = [one for one in self._named if not hasattr(one.parameter, "ds_tensor")]
            copies = [id(one.parameter) for one in whole if not one.is_expert]
            self._of_others = set(copies) - set(copies[dist.get_rank() :: dist.get_world_size()])
            digests = {one.names[0]: digest_of(one.parameter) for one in whole}
            _save({**described, "digests": digests}, folder / "start.pt")
        else:
            weights = {"weights": self._weights(), "masters": self._states().get(MASTER, {})}
            _save({**described, **weights}, folder / "start.pt")
        if self.what.weights_from is not None:
            self._load(self.what.weights_from)
        return True

    def _watch(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """Record outputs and gradients of a module."""
        for name, module in model.named_modules():
            if name:
                self._hooks.callback(module.register_forward_hook(partial(self._output, name)).remove)
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                self._hooks.callback(parameter.register_hook(partial(self._gradient, name)).remove)
        if self.what.noise is not None:
            device = next(model.parameters()).device
            self._generator = torch.Generator(device=device).manual_seed(self.what.noise + dist.get_rank())

    def record_whole(
        self,
        model: nn.Module,
        steps: Iterable[tuple[Mapping[str, torch.Tensor], Sequence[Any]]],
        loss_of: Callable[..., torch.Tensor],
        described: Mapping[str, Any],
    ) -> None:
        """Record a whole model without an engine: each step's weights are given, and no optimizer updates them.

        Args:
            model: the model of one process.
            steps: for each step the whole weights by name, and the micro-batches.
            loss_of: ``loss_of(model, *micro_batch)``.
            described: what :func:`about` says of the rank whose samples these are.
        """
        parameters = dict(model.named_parameters())
        self._watch(model, parameters)
        folder = self.what.folder_of(int(described["share"]))
        folder.mkdir(parents=True)
        for number, (weights, micro_batches) in enumerate(steps):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(weights[name])
            if number == 0:
                digests = {name: digest_of(parameter) for name, parameter in parameters.items()}
                _save({"about": dict(described), "digests": digests, "replicas": []}, folder / "start.pt")
            model.zero_grad()
            for micro_batch in micro_batches:
                self._is_in_forward, state = micro_batch is micro_batches[0], torch.get_rng_state()
                loss = loss_of(model, *micro_batch)
                self._is_random |= not torch.equal(state, torch.get_rng_state())
                self._losses.append(float(loss.detach()))
                (loss / len(micro_batches)).backward()
            _save(
                {
                    **{"outputs": self._outputs, "losses": self._losses, "order": list(self._before)},
                    "before": {name: self._recorded(_whole(gradient)) for name, gradient in self._before.items()},
                    **{"arrivals": self._arrivals, "after": {}, "norm": None, "clip": 0.0, "scale": 1.0},
                    **{"is_skipped": False, "is_random": self._is_random, "rates": []},
                    **{"weights": {}, "states": {}, "replicas": []},
                },
                folder / f"step_{number}.pt",
            )
            self._begin_step()
            if self.what.is_last(number + 1, is_skipped=False):
                return

    def detach(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def _load(self, folder: Path) -> None:
        """Start with the weights and master weights that another run has started with.

        Some of DeepSpeed's optimizers step without gradients when they are built, so that master weights have decayed.
        """
        starts = [torch.load(path, mmap=True) for path in sorted(folder.glob("rank_*/start.pt"))]
        weights, masters = (whole_tensors(one[kind] for one in starts) for kind in ("weights", "masters"))
        with torch.no_grad():
            for one in self._named:
                name, in_module = one.names[0], held_by_module(one.parameter)
                if name not in weights:
                    warnings.warn(f"{name} is not in the wanted layout, and keeps its own values", stacklevel=2)
                    continue
                for whole, held in ((masters.get(name), one.held), (weights[name], in_module)):
                    if whole is not None:
                        for offsets, memory in one.part_of(held.master, held).boxes.items():
                            memory.copy_(_box(whole, offsets, memory.shape))

    # -- what is recorded --------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._micro_batch = 0
        self._losses: list[float] = []
        self._outputs: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._arrivals: dict[str, int] = {}
        self._after: Parts = {}
        self._is_random = False
        self._noisy = torch.empty(0)
        """The last output with artificial rounding errors."""

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Record a module's output; with artificial rounding errors, return another one."""
        if not self._is_in_forward and self.what.noise is None:
            return None
        tensors = output if isinstance(output, (tuple, list)) else [output]
        for number, tensor in enumerate(tensors):
            if self._is_in_forward and torch.is_tensor(tensor) and tensor.is_floating_point():
                key = name if number == 0 else f"{name}[{number}]"
                if key not in self._outputs:
                    self._outputs[key] = _copied(tensor)
        if self.what.noise is None:
            return None
        if isinstance(output, (tuple, list)):
            return type(output)([self._rounded(one) for one in output]) if type(output) in (tuple, list) else None
        return self._rounded(output)

    def _rounded(self, tensor: Any) -> Any:
        """Return a tensor with artificial rounding errors, whose gradient gets others."""
        if not torch.is_tensor(tensor) or not tensor.is_floating_point():
            return tensor
        if tensor is not self._noisy:  # a container may return what a module in it has returned
            self._noisy = with_rounding_errors(tensor, self._generator)
            if self._noisy.requires_grad:
                self._noisy.register_hook(partial(with_rounding_errors, generator=self._generator))
        return self._noisy

    def _gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient of one micro-batch."""
        own = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        if not own.numel():
            return
        self._arrivals[name] = self._arrivals.get(name, 0) + 1
        if name in self._before:
            self._before[name] += own.float()
        else:
            self._before[name] = own.to(torch.float32, copy=True)

    def _before_update(self, *_: Any) -> None:
        """Record the gradients that the optimizer gets. ZeRO 3 steps several times."""
        for one in self._named:
            if one.held.group is not None and one.held.numel and one.held.master.grad is not None:
                gradient = one.held.master.grad
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                self._after[one.names[0]] = _plain(one.part_of(dense, one.held), _copied)

    def _end_step(self) -> None:
        engine = self.engine
        assert engine is not None
        scale, skipped, norm = scale_of(engine), int(engine.skipped_steps), engine.get_global_grad_norm()
        inner, is_skipped = facts.inner_optimizer(engine), skipped > self._skipped
        record = {
            "outputs": self._outputs,
            "losses": self._losses,
            "before": {
                one.names[0]: self._recorded(
                    part_of(self._before[one.names[0]], one.slice, 0, self._before[one.names[0]].numel())
                )
                for one in self._named
                if one.names[0] in self._before
            },
            "order": list(self._before),
            "arrivals": self._arrivals,
            "after": self._after,
            "norm": None if norm is None else float(norm),
            "clip": float(engine.gradient_clipping() or 0.0),
            "scale": self._scale,
            "is_skipped": is_skipped,
            "is_random": self._is_random,
            "rates": [] if inner is None else [float(group["lr"]) for group in inner.param_groups],
            "weights": self._weights(),
            "states": self._states(),
            "replicas": self._replicas(),
            "memory": memory_of("/proc/self/status", "VmHWM"),
        }
        _save(record, self.what.folder_of(dist.get_rank()) / f"step_{self.step_number}.pt")
        self._skipped, self._scale = skipped, scale
        self.step_number += 1
        self._begin_step()
        if self.what.is_last(self.step_number, is_skipped):
            raise Finished

    def _recorded(self, part: Any) -> Part:
        """Return a part of a tensor; a sample of it if the run only measures rounding."""
        shape, boxes = _plain(part)
        return shape, boxes if self.what.noise is None else [piece for box in boxes for piece in _sampled(*box)]

    def _weights(self) -> Parts:
        named = (one for one in self._named if id(one.parameter) not in self._of_others)
        held = ((one, held_by_module(one.parameter)) for one in named)
        return {one.names[0]: self._recorded(one.part_of(place.master, place)) for one, place in held}

    def _states(self) -> dict[str, Parts]:
        """Return master weights and optimizer states with a value for each element, by key and parameter."""
        assert self.engine is not None
        inner, found = facts.inner_optimizer(self.engine), dict[str, Parts]()
        for one in self._named:
            master = one.held.master
            if one.held.group is None or inner is None or not one.held.numel:
                continue
            if master is one.parameter and id(one.parameter) in self._of_others:
                continue
            states = {MASTER: master, **inner.state.get(master, {})}
            for key, value in states.items():
                if torch.is_tensor(value) and value.shape == master.shape and value.dim():
                    found.setdefault(key, {})[one.names[0]] = self._recorded(one.part_of(value, one.held))
        return found

    def _replicas(self) -> list[tuple[str, str, list[int], bool, int]]:
        """Return a digest of each tensor that must be equal on several ranks: name, axes, ranks, is slice, digest."""
        engine = self.engine
        assert engine is not None
        if self.what.is_reference or int(engine.zero_optimization_stage()) == 3:
            return []
        slices = isinstance(engine.mpu, MpuGrid) and engine.mpu.get_axis_size(MODEL) > 1
        rows = [row for row in replicated(engine, slices) if not row.name.startswith("random state")]
        digests = {number: digest_of(one) for number, one in {id(row.tensor): row.tensor for row in rows}.items()}
        return [
            (row.name, row.axes, dist.get_process_group_ranks(row.group), row.is_slice, digests[id(row.tensor)])
            for row in rows
        ]


def _unused_copies(engine: DeepSpeedEngine) -> set[int]:
    """Return the ids of parameters of tied modules on later stages, without the tied weights themselves.

    Such a module is often an embedding with positions, of which the last stage uses the tied weight alone.
    """
    if not isinstance(engine, PipelineEngine):
        return set()
    tied = {id(weight) for weight, _ in type(engine.module).get_tied_weights_and_groups(engine.module)}
    copies = (one for one in engine.module.parameters() if getattr(one, "ds_pipe_replicated", False))
    return {id(one) for one in copies if id(one) not in tied}


def scale_of(engine: DeepSpeedEngine) -> float:
    """Return the present loss scale; 1 without one."""
    for name in ("cur_scale", "loss_scale"):
        value = getattr(engine.optimizer, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    return 1.0


def about(engine: DeepSpeedEngine) -> Mapping[str, Any]:
    """Describe this rank and its engine."""
    rank, world = dist.get_rank(), dist.get_world_size()
    coordinate, share, shares, spec = {"data": rank}, rank, world, f"data={world}"
    if isinstance(engine.mpu, MpuGrid):
        topology, place = engine.mpu.topology(), engine.mpu.grid_rank
        coordinate = dict(topology.get_coord(place)._asdict())
        share, shares, spec = engine.mpu.get_sample_rank(), engine.mpu.get_sample_world_size(), topology.spec
    return {
        "rank": rank,
        "coordinate": coordinate,
        "share": share,
        "shares": shares,
        "spec": spec,
        "zero": int(engine.zero_optimization_stage()),
        "dtype": str(next(engine.module.parameters(), torch.empty(0)).dtype).removeprefix("torch."),
    }


def memory_of(file: str, field: str) -> int:
    """Return bytes in a file of Linux, such as the peak of this process; 0 if there is no such file."""
    with suppress(OSError):
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    return 0


def with_rounding_errors(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Multiply each element by 1 plus or minus half of the precision of its type."""
    eps = max(torch.finfo(tensor.dtype).eps, _EPS_OF_LONG_TYPES)
    words = torch.empty(tensor.numel() // 8 + 1, dtype=torch.int64, device=tensor.device)
    bits = words.random_(generator=generator).view(torch.int8)[: tensor.numel()].view(tensor.shape)
    signs = bits.bitwise_and_(2).sub_(1).to(tensor.dtype)
    return torch.addcmul(tensor, tensor, signs, value=eps / 2)


# -- plain tensors -----------------------------------------------------------------------------------------------------


def _save(record: Mapping[str, Any], path: Path) -> None:
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # it would take half of the time
        torch.save(record, path)


def digest_of(tensor: torch.Tensor) -> int:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has a storage for itself, since a file has whole storages."""
    held = tensor.detach().cpu().contiguous()
    return held if held.untyped_storage().nbytes() == held.nbytes else held.clone()


def _sampled(offsets: tuple[int, ...], values: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Yield blocks of rows of a box.

    >>> [offsets for offsets, _ in _sampled((4, 0), torch.zeros(1 << 10, 1 << 10))]
    [(4, 0), (132, 0), (260, 0), (388, 0), (516, 0), (644, 0), (772, 0), (900, 0)]
    """
    if values.numel() <= _SAMPLE:
        yield offsets, values
        return
    rows = len(values)
    height = max(1, _SAMPLE * rows // values.numel() // _BLOCKS)
    for start in range(0, rows, max(height, -(-rows // _BLOCKS))):
        block = values[start : start + height]
        yield (offsets[0] + start, *offsets[1:]), block.clone()


def _whole(tensor: torch.Tensor) -> Any:
    return part_of(tensor.detach(), Slice(tuple(tensor.shape)), 0, tensor.numel())


def _plain(part: Any, values_of: Callable[[torch.Tensor], torch.Tensor] = _alone) -> Part:
    return tuple(part.shape), [(offsets, values_of(memory)) for offsets, memory in part.boxes.items()]


def _box(whole: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, shape, strict=True))]


def whole_tensors(ranks: Any) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the parts of all ranks; of equal places the last one stays."""
    result: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for name, (shape, boxes) in parts.items():
            for offsets, values in boxes:
                if name not in result:
                    result[name] = torch.zeros(shape, dtype=values.dtype)
                _box(result[name], offsets, values.shape).copy_(values)
    return result


def box_of(whole: torch.Tensor, offsets: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that lies where a rank's values do."""
    return _box(whole, offsets, tuple(values.shape))
