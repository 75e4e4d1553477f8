"""Record on each rank what an engine computes in its first steps, as files of plain tensors, and read them again.

The first engine that trains is recorded, from its first forward pass on::

    start.pt     whole-model places and values of this rank's weights; of a reference their names
    step_0.pt    activations, losses, gradients before and after reduction, norm, weights and optimizer states
    step_1.pt    ...

A gradient *before reduction* is summed here, by hooks on parameters, and so does not depend on the reduction. One
*after reduction* is what the optimizer gets: every part of it that this rank has, at its place in the whole parameter.
Places are those of checkpoints (:mod:`ds_topo.checkpoint.engine_state`). :class:`Run` reads the files of all ranks, and
assembles whole tensors from their parts.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.utils.serialization import config

from ds_topo.base import patches
from ds_topo.base.classes import RECORDED, Mixin, adopt
from ds_topo.base.ledger import ledger
from ds_topo.base.marks import inner_optimizer
from ds_topo.checkpoint.engine_state import Named, held_by_module, named_parameters, part_of
from ds_topo.checkpoint.table import Slice
from ds_topo.engine.grid import building_engines, when_built
from ds_topo.engine.replica_comparison import digest, replicated
from ds_topo.engine.samples import digest as digest_of
from ds_topo.engine.samples import tensors_of
from ds_topo.errors import warn
from ds_topo.mpu import MpuGrid
from ds_topo.topology.axes import MODEL, SEQ

Part = tuple[tuple[int, ...], list[tuple[tuple[int, ...], torch.Tensor]]]
"""The shape of a whole tensor, and this rank's boxes of it: offsets and values."""
Parts = dict[str, Part]
WEIGHT, MASTER = "weight", "master"
"""The keys of weights and master weights among the states."""
_SAMPLE, _BLOCKS = 1 << 16, 8
"""The number of elements of a tensor that measure its rounding, and of the blocks of rows that they are taken from."""
EPS_OF_CLIPPING = 1e-6
"""The error of a measured factor of clipping: factors nearer to 1 do not clip."""
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
    """The seed of artificial rounding errors; None: no artificial errors."""
    until_update: bool = False
    """True ends the run after its first update."""
    has_dropout: bool = True
    """False disables dropout in a program."""

    @property
    def is_reference(self) -> bool:
        """True if this run is compared with another one: what DeepSpeed reduces in it is not recorded."""
        return self.weights_from is not None

    def folder_of(self, rank: int) -> Path:
        """Return the folder of one rank."""
        return self.folder / f"rank_{rank}"


class Finished(BaseException):
    """All steps are recorded. It is no ``Exception``, so that programs do not catch it."""


@contextmanager
def recording(what: Recording, engine: DeepSpeedEngine | None = None) -> Iterator[Recorder]:
    """Record an engine, or the first one that trains inside the ``with`` statement, until :class:`Finished`."""
    recorder = Recorder(what)
    with recorder.hooks as undo:
        if engine is not None:
            recorder.follow(engine)
        else:
            when_built.append(recorder.follow)
            undo.callback(when_built.remove, recorder.follow)
            undo.callback(ledger.bind(patches.CONSTRUCT_ENGINE, building_engines))
        yield recorder


class Recorder:
    """Writes the steps of one engine."""

    def __init__(self, what: Recording) -> None:
        self.what = what
        self.engine: DeepSpeedEngine | None = None
        self._number = 0
        """The number of the present step."""
        self.hooks = ExitStack()
        """Removes all hooks at its end."""
        self._named: list[Named] = []
        self._slices: dict[str, Slice] = {}
        """The places of all parameters in whole ones."""
        self._is_in_forward = False
        self._random_state: torch.Tensor | None = None
        """The state of the random generator before a forward pass that is recorded."""
        self._of_others: set[int] = set()
        """The ids of parameters of a reference whose weights another rank records."""
        self._begin_step()

    # -- the calls of an engine --------------------------------------------------------------------------------------

    def follow(self, engine: DeepSpeedEngine) -> None:
        """Give an engine the class of recorded engines, until the end of the recording."""
        engine.recorder = self
        is_pipeline = isinstance(engine, PipelineEngine)
        self.hooks.callback(adopt(engine, RecordedPipelineEngine if is_pipeline else RecordedEngine))
        begin, end = partial(self._begin_forward, weakref.ref(engine)), partial(self._end_forward, weakref.ref(engine))
        hooks = engine.module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
        self.hooks.callback(hooks.remove)
        self.hooks.callback(engine.module.register_forward_hook(end, always_call=True).remove)

    def _begin_forward(
        self, engine: weakref.ref[DeepSpeedEngine], module: nn.Module, inputs: Any, named: Mapping[str, Any]
    ) -> None:
        """Begin to record a forward pass: the outputs of modules, in the first micro-batch of each step."""
        recorded = engine()
        if recorded is None or not (module.training and torch.is_grad_enabled()) or not self._attach(recorded):
            return
        self._is_in_forward = self._micro_batch == 0
        if not self.what.is_reference:
            self._record["samples"].append(digest_of_samples((inputs, named)))
        self._random_state = torch.get_rng_state()

    def _end_forward(self, engine: weakref.ref[DeepSpeedEngine], module: nn.Module, *_: Any) -> None:
        """End the record of a forward pass."""
        if self._random_state is None or engine() is not self.engine:
            return
        # a pipeline with seed_layers seeds before each layer
        reseeds = bool(getattr(module, "seed_layers", False))
        self._record["is_random"] |= not (reseeds or torch.equal(self._random_state, torch.get_rng_state()))
        self._micro_batch += 1
        self._is_in_forward, self._random_state = False, None

    def note_loss(self, engine: DeepSpeedEngine, loss: Any) -> None:
        """Record the loss of a micro-batch of a plain engine, or of a batch of a pipeline."""
        if engine is self.engine and torch.is_tensor(loss):
            self._record["losses"].append(float(loss.detach().float().mean()))

    @contextmanager
    def step(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Record a step, or a whole batch of a pipeline, at its end."""
        is_recorded, before = self._attach(engine), engine.global_steps
        yield
        if is_recorded and engine.global_steps > before:
            self._end_step(engine)

    @contextmanager
    def clip(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Record the factor by which an engine clips gradients in fp32 without ZeRO: it may report no norm."""
        is_recorded = engine is self.engine and not self.what.is_reference
        before = _size_of_gradients(engine.module) if is_recorded else 0.0
        yield
        if 0 < before < math.inf:
            self._record["clipped"] = _size_of_gradients(engine.module) / before

    # -- attaching ---------------------------------------------------------------------------------------------------

    def _attach(self, engine: DeepSpeedEngine) -> bool:
        """Start to record an engine, unless another one is recorded; return whether it is recorded."""
        if self.engine is not None:
            return engine is self.engine
        self.engine, began = engine, time.time()
        unused = _unused_copies(engine)
        self._named = [one for one in named_parameters(engine) if id(one.parameter) not in unused]
        self._watch(engine.module, {one.names[0]: (one.parameter, one.slice) for one in self._named})
        inner = inner_optimizer(engine)
        if inner is not None and not self.what.is_reference:
            self.hooks.callback(inner.register_step_pre_hook(self._before_update).remove)
        self._skipped, self._scale = int(engine.skipped_steps), scale_of(engine)
        folder = self.what.folder_of(dist.get_rank())
        folder.mkdir(parents=True, exist_ok=True)
        start: dict[str, Any] = {"about": {**about(engine), "began": began}, "replicas": self._replicas(engine)}
        if self.what.weights_from is None:
            states = self._states(engine)
            start["states"] = {key: states[key] for key in (WEIGHT, MASTER) if key in states}
        else:
            named = [one for one in self._named if not one.is_expert and not hasattr(one.parameter, "ds_tensor")]
            copies = [id(one.parameter) for one in named]
            self._of_others = set(copies) - set(copies[dist.get_rank() :: dist.get_world_size()])
            start["names"] = list(self._slices)
            self._load(self.what.weights_from)
        _save(start, folder / "start.pt")
        return True

    def _watch(self, model: nn.Module, parameters: Mapping[str, tuple[nn.Parameter, Slice]]) -> None:
        """Record outputs and gradients of a module, whose parameters are slices of whole ones."""
        for name, module in model.named_modules():
            if name:
                self.hooks.callback(module.register_forward_hook(partial(self._output, name)).remove)
        for name, (parameter, of_whole) in parameters.items():
            self._slices[name] = of_whole
            if parameter.requires_grad:
                self.hooks.callback(parameter.register_hook(partial(self._gradient, name)).remove)
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
        """Record a whole model without an engine, and without an optimizer.

        ``steps`` has for each step the whole weights by name, and the micro-batches. ``described`` is what
        :func:`about` says of the rank whose samples these are.
        """
        parameters = dict(model.named_parameters())
        self._watch(model, {name: (one, Slice(tuple(one.shape))) for name, one in parameters.items()})
        folder = self.what.folder_of(int(described["share"]))
        folder.mkdir(parents=True)
        _save({"about": dict(described), "names": list(parameters), "replicas": []}, folder / "start.pt")
        with self.hooks, suppress(Finished):
            for weights, micro_batches in steps:
                with torch.no_grad():
                    for name, parameter in parameters.items():
                        parameter.copy_(weights[name])
                model.zero_grad()
                for micro_batch in micro_batches:
                    self._is_in_forward, state = micro_batch is micro_batches[0], torch.get_rng_state()
                    loss = loss_of(model, *micro_batch)
                    self._record["is_random"] |= not torch.equal(state, torch.get_rng_state())
                    self._record["losses"].append(float(loss.detach()))
                    (loss / len(micro_batches)).backward()
                self._write(folder)

    def _load(self, folder: Path) -> None:
        """Start with the weights and master weights that another run has started with.

        Some of DeepSpeed's optimizers step without gradients when they are built, so that master weights have decayed.
        """
        starts = [torch.load(path, mmap=True) for path in sorted(folder.glob("rank_*/start.pt"))]
        weights, masters = (whole_tensors(one["states"].get(key, {}) for one in starts) for key in (WEIGHT, MASTER))
        with torch.no_grad():
            for one in self._named:
                name, in_module = one.names[0], held_by_module(one.parameter)
                if name not in weights:
                    warn(f"{name} is not in the wanted layout, and keeps its own values")
                    continue
                if name in masters:
                    _overwrite(one.part_of(one.held.master, one.held), masters[name])
                _overwrite(one.part_of(in_module.master, in_module), weights[name])

    # -- what is recorded --------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._micro_batch = 0
        """The number of forward passes of this step so far."""
        self._before: dict[str, torch.Tensor] = {}
        """Gradients before reduction, in the order in which they arrive."""
        self._record: dict[str, Any] = {
            **{"samples": [], "outputs": {}, "losses": [], "after": {}, "states": {}, "replicas": [], "rates": []},
            **{"norm": None, "clip": 0.0, "clipped": None, "scale": 1.0, "is_skipped": False, "is_random": False},
        }
        self._noisy = torch.empty(0)
        """The last output with artificial rounding errors."""

    def _output(self, name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Record a module's output; with artificial rounding errors, return another one."""
        if self._is_in_forward:
            for number, tensor in enumerate(output if isinstance(output, (tuple, list)) else [output]):
                key = name if number == 0 else f"{name}[{number}]"
                if torch.is_tensor(tensor) and tensor.is_floating_point() and key not in self._record["outputs"]:
                    self._record["outputs"][key] = _copied(tensor)
        if self.what.noise is None:
            return None
        if type(output) in (tuple, list):
            return type(output)(map(self._rounded, output))
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
        own = gradient.detach().to_dense()
        if not own.numel():
            return
        if name in self._before:
            self._before[name] += own.float()
        else:
            self._before[name] = own.to(torch.float32, copy=True)

    def _before_update(self, *_: Any) -> None:
        """Record the gradients that the optimizer gets. ZeRO 3 steps several times."""
        for one in self._named:
            if one.held.group is not None and one.held.numel and one.held.master.grad is not None:
                part = one.part_of(one.held.master.grad.to_dense(), one.held)
                self._record["after"][one.names[0]] = _plain(part, _copied)

    def _end_step(self, engine: DeepSpeedEngine) -> None:
        scale, skipped, norm = scale_of(engine), int(engine.skipped_steps), engine.get_global_grad_norm()
        inner = inner_optimizer(engine)
        self._record |= {
            "norm": None if norm is None else float(norm),
            "clip": float(engine.gradient_clipping() or 0.0),
            "scale": self._scale,
            "is_skipped": skipped > self._skipped,
            "rates": [] if inner is None else [float(group["lr"]) for group in inner.param_groups],
            "states": self._states(engine),
            "replicas": self._replicas(engine),
            "memory": memory_of("/proc/self/status", "VmHWM"),
        }
        self._skipped, self._scale = skipped, scale
        self._write(self.what.folder_of(dist.get_rank()))

    def _write(self, folder: Path) -> None:
        """Write the record of a step, and begin the next one; raise ``Finished`` after the last one."""
        record = self._record
        record["before"] = {
            name: self._recorded(part_of(gradient, self._slices[name], 0, gradient.numel()))
            for name, gradient in self._before.items()
        }
        _save(record, folder / f"step_{self._number}.pt")
        self._number += 1
        self._begin_step()
        if self._number == self.what.steps or (self.what.until_update and not record["is_skipped"]):
            raise Finished

    def _recorded(self, part: Any) -> Part:
        """Return a part of a tensor; a sample of it if the run only measures rounding."""
        shape, boxes = _plain(part)
        return shape, boxes if self.what.noise is None else [piece for box in boxes for piece in _sampled(*box)]

    def _states(self, engine: DeepSpeedEngine) -> dict[str, Parts]:
        """Return weights, master weights and optimizer states with a value for each element, by key and parameter."""
        inner = inner_optimizer(engine)
        found: defaultdict[str, Parts] = defaultdict(dict)
        for one in self._named:
            held, states = one.held, {}
            if id(one.parameter) not in self._of_others:
                in_module = held_by_module(one.parameter)
                found[WEIGHT][one.names[0]] = self._recorded(one.part_of(in_module.master, in_module))
            elif held.master is one.parameter:
                continue
            if inner is not None and held.group is not None and held.numel:
                states = {MASTER: held.master, **inner.state.get(held.master, {})}
            for key, value in states.items():
                if torch.is_tensor(value) and value.shape == held.master.shape and value.dim():
                    found[key][one.names[0]] = self._recorded(one.part_of(value, held))
        return dict(found)

    def _replicas(self, engine: DeepSpeedEngine) -> list[tuple[str, str, list[int], bool, list[int]]]:
        """Return a digest of each tensor that must be equal on several ranks: name, axes, ranks, is slice, digest."""
        if self.what.is_reference or int(engine.zero_optimization_stage()) == 3:
            return []
        slices = isinstance(engine.mpu, MpuGrid) and engine.mpu.get_axis_size(MODEL) > 1
        return [
            (row.name, row.axes, dist.get_process_group_ranks(row.group), row.is_slice, digest(row.tensor).tolist())
            for row in replicated(engine, slices)
            if not row.name.startswith("random state")
        ]


class Recorded(Mixin, DeepSpeedEngine):  # type: ignore[misc]
    """An engine of which a recorder writes what it computes."""

    mixin_order, mixin_state = RECORDED, "recorder"
    recorder: Recorder

    def clip_fp32_gradients(self) -> None:
        """Record the factor by which gradients are clipped."""
        with self.recorder.clip(self):
            super().clip_fp32_gradients()


class RecordedEngine(Recorded):
    """A plain engine that is recorded."""

    def backward(self, loss: Any, *arguments: Any, **options: Any) -> Any:
        """Record the loss."""
        self.recorder.note_loss(self, loss)
        return super().backward(loss, *arguments, **options)

    def step(self, *arguments: Any, **options: Any) -> Any:
        """Record the step."""
        with self.recorder.step(self):
            return super().step(*arguments, **options)


class RecordedPipelineEngine(Recorded, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine that is recorded."""

    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Record the step, with its loss."""
        with self.recorder.step(self):
            loss = super().train_batch(*arguments, **options)
            self.recorder.note_loss(self, loss)
            return loss


def _size_of_gradients(model: nn.Module) -> float:
    return math.sqrt(sum(square(each.grad) for each in model.parameters() if each.grad is not None))


def digest_of_samples(samples: Any) -> int:
    """Return a digest of the arguments of a forward pass; 0 if each of their tensors has one value only."""
    varies = (tensor.numel() > 0 and (tensor != tensor.reshape(-1)[0]).any() for tensor in tensors_of(samples))
    return digest_of(samples) if any(varies) else 0


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


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _overwrite(part: Any, whole: torch.Tensor) -> None:
    """Copy a whole tensor into this rank's part of it."""
    for offsets, memory in part.boxes.items():
        memory.copy_(box_of(whole, offsets, memory))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has a storage for itself, since a file has whole storages."""
    held = tensor.detach().to_dense().cpu().contiguous()  # momentum of a sparse embedding is sparse
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


def _plain(part: Any, values_of: Callable[[torch.Tensor], torch.Tensor] = _alone) -> Part:
    return tuple(part.shape), [(offsets, values_of(memory)) for offsets, memory in part.boxes.items()]


def box_of(whole: torch.Tensor, offsets: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that lies where a rank's values do."""
    return whole[tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))]


def whole_tensors(ranks: Iterable[Parts]) -> dict[str, torch.Tensor]:
    """Assemble whole tensors from the parts of all ranks; of equal places the last one stays."""
    result: dict[str, torch.Tensor] = {}
    for parts in ranks:
        for name, (shape, boxes) in parts.items():
            for offsets, values in boxes:
                if name not in result:
                    result[name] = torch.zeros(shape, dtype=values.dtype)
                box_of(result[name], offsets, values).copy_(values)
    return result


def places(part: Part) -> tuple[tuple[int, ...], ...]:
    """Return where in the whole tensor a part is."""
    return tuple(offsets for offsets, _ in part[1])


def flat(part: Part) -> torch.Tensor:
    """Return the values of a part as one vector."""
    return torch.cat([torch.empty(0, dtype=torch.float64), *(values.double().reshape(-1) for _, values in part[1])])


def at(part: Part, whole: torch.Tensor) -> torch.Tensor:
    """Return the values of a whole tensor at the places of a part, as one vector."""
    return flat((part[0], [(offsets, box_of(whole, offsets, values)) for offsets, values in part[1]]))


def square(tensor: torch.Tensor) -> float:
    """Return the sum of the squares of all elements."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(values.double().square().sum())


# -- recorded runs -----------------------------------------------------------------------------------------------------


class Run:
    """A recorded run of all ranks; a reference has started with the weights of the ``wanted`` run."""

    def __init__(self, folder: Path, wanted: Run | None = None) -> None:
        self._wanted = wanted
        count = len(list(folder.glob("rank_*/start.pt")))
        self.folders = [folder / f"rank_{rank}" for rank in range(count)]
        starts = [torch.load(one / "start.pt", mmap=True) for one in self.folders]
        self.about: list[Mapping[str, Any]] = [one["about"] for one in starts]
        self.coordinates: list[Mapping[str, int]] = [one["coordinate"] for one in self.about]
        self.share_of: list[int] = [one["share"] for one in self.about]
        self.shares = int(self.about[0]["shares"])
        self.starts = [one.get("states", {}).get(WEIGHT, {}) for one in starts]
        self.names = {name for one in starts for name in one.get("names", ())}
        """The names of the parameters of a reference."""
        self.replicas = [one["replicas"] for one in starts]
        self.steps = min(len(list(one.glob("step_*.pt"))) for one in self.folders)

    @cached_property
    def start(self) -> dict[str, torch.Tensor]:
        """The whole first weights."""
        return whole_tensors(self.starts) if self._wanted is None else self._wanted.start

    def step(self, number: int) -> RecordedStep:
        """Return the records of one step."""
        return RecordedStep(self, number, [torch.load(one / f"step_{number}.pt", mmap=True) for one in self.folders])

    def degree(self, axis: str) -> int:
        """Return the degree of an axis."""
        return 1 + max(coordinate.get(axis, 0) for coordinate in self.coordinates)

    def axes_between(self, rank: int, other: int) -> set[str]:
        """Return the axes along which two ranks have different coordinates."""
        here, there = self.coordinates[rank], self.coordinates[other]
        return {axis for axis in here if here[axis] != there[axis]}


class RecordedStep:
    """The records of all ranks in one step."""

    def __init__(self, run: Run, number: int, ranks: list[dict[str, Any]]) -> None:
        self.run, self.number, self.ranks = run, number, ranks
        self.uncertain: dict[str, torch.Tensor] = {}
        """True for elements of whole weights whose update may have either sign, so that they are not compared."""

    def holders(self, kind: str, name: str) -> list[int]:
        """Return the ranks that have recorded a tensor."""
        return [rank for rank, record in enumerate(self.ranks) if name in record[kind]]

    @cached_property
    def sums(self) -> dict[str, torch.Tensor]:
        """The mean, over the shares of the samples, of whole gradients before reduction."""
        found: dict[str, torch.Tensor] = {}
        for record in self.ranks:
            for name, (shape, boxes) in record["before"].items():
                total = found.setdefault(name, torch.zeros(shape))
                for offsets, values in boxes:
                    box_of(total, offsets, values).add_(values, alpha=1 / record["scale"] / self.run.shares)
        return found

    @cached_property
    def norm(self) -> float:
        """The norm of ``sums``."""
        return math.sqrt(sum(map(square, self.sums.values())))

    def whole_states(self, key: str) -> dict[str, torch.Tensor]:
        """Return whole weights or optimizer states after the step."""
        return whole_tensors(record["states"].get(key, {}) for record in self.ranks)

    @cached_property
    def whole_weights(self) -> dict[str, torch.Tensor]:
        """The whole weights after the step."""
        return self.whole_states(WEIGHT)

    @cached_property
    def previous(self) -> dict[str, torch.Tensor]:
        """The whole weights before the step."""
        return self.run.start if self.number == 0 else self.run.step(self.number - 1).whole_weights

    def before(self, ranks: Iterable[int], name: str) -> torch.Tensor:
        """Return the gradient of some ranks before reduction: the sum over stages, and the mean over ``seq``.

        It is at its place in the whole, with zeros elsewhere.
        """
        total, pieces = torch.zeros(()), set()
        for rank in ranks:
            record = self.ranks[rank]
            total = total + whole_tensors([{name: record["before"][name]}])[name].float() / float(record["scale"])
            pieces.add(self.run.coordinates[rank].get(SEQ, 0))
        return total / len(pieces)

    def peers(self, name: str) -> list[list[int]]:
        """Return the ranks whose gradients before reduction are parts of one: stages that share it, and ``seq``."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for rank in self.holders("before", name):
            groups[self.run.share_of[rank], self.run.coordinates[rank].get(MODEL, 0)].append(rank)
        return list(groups.values())

    def clipping(self, rank: int, reference: RecordedStep) -> tuple[float, float | None]:
        """Return the factor by which a rank's gradients were clipped, and the norm that it reports or clips by.

        DeepSpeed clips by the norm of scaled or of unscaled gradients, and does not report every norm. The factor is
        the median over all parameters, so that one wrong gradient does not change it.
        """
        record, expected = self.ranks[rank], reference.sums
        if (clipped := record["clipped"]) is not None:
            return clipped, record["norm"] or (record["clip"] / clipped if clipped < 1 - EPS_OF_CLIPPING else None)
        factors = []
        for name, part in record["after"].items():
            own, there = square(flat(part)), square(at(part, expected[name])) if name in expected else 0.0
            if own > 0 and there > 0 and math.isfinite(own):
                factors.append(math.sqrt(own / there))
        found = median(factors) if factors else 1.0
        clip, scale, norm = record["clip"], record["scale"], record["norm"]
        if not norm and 0 < clip < reference.norm and factors:
            return found, clip / found
        right = norm or reference.norm
        reasons = [1.0, *(clip / (each + 1e-6) for each in {right, right / scale} if 0 < clip < each < math.inf)]
        return min(reasons, key=lambda reason: abs(math.log(found / reason))), norm


def error_of(own: torch.Tensor, part: Part, whole: torch.Tensor, least: float = 0.0) -> float:
    """Return the relative error of a rank's values of a part; elements have at least the norm ``least``."""
    there = at(part, whole)
    typical = float(whole.double().square().mean()) if whole.numel() else 0.0
    return ratio(square(own - there), max(square(there), there.numel() * typical, there.numel() * least**2))


def ratio(own: float, reference: float) -> float:
    if math.isnan(own) or math.isinf(own):
        return math.inf
    return math.sqrt(own / reference) if reference > 0 else math.inf if own > 0 else 0.0


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a whole tensor."""
    found, expected = found.double(), expected.double()
    return ratio(square(found - expected), square(expected))
