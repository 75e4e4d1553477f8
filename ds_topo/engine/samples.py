"""Deal samples to an engine's ranks, and compare those that they read first.

*Shares.* Samples are divided into shares, one for all ranks that must read the same ones. ``training_data=`` and
``engine.deepspeed_io()`` build DeepSpeed's own loaders. In a pipeline they would give peers along ``seq`` different
samples.

*Comparisons.* The stages and slices of one replica read samples separately. If samples are divided over all ranks of
the job, as ``DistributedSampler`` does by default, the slices train on different samples and no error occurs. So the
ranks compare the first samples of an engine. Replicas that read the same samples, as with a plain ``DataLoader``, train
as one, without an error; engines warn about them, and about batches of another size than the config's, in the first
step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from math import nan
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DistributedSampler

from ds_topo.engine.config import passes_of
from ds_topo.engine.on_grid import EngineOnGrid, is_training_pass
from ds_topo.errors import DisagreementError, EngineOptionError, listed, warn
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import gathered, gathered_by_value, number_of
from ds_topo.process_groups.process_grid import FollowedSampler
from ds_topo.topology.axes import MODEL, PIPE, SEQ
from ds_topo.topology.rank_tables import sample_axes

# -- shares -----------------------------------------------------------------------------------------------------------


class DealtSamples(EngineOnGrid):
    """An engine whose loaders of ``training_data`` read this rank's share of the samples."""

    def deepspeed_io(self, *arguments: Any, **options: Any) -> Any:
        """Build a data loader for this rank's share of samples.

        DeepSpeed divides samples by a group that counts peers along ``seq``. Warn of a loader without a batch, and let
        a shuffled sampler begin a new epoch when the loader does.
        """
        with counting_shares(self):
            loader = super().deepspeed_io(*arguments, **options)
        sampler = loader.data_sampler
        if not len(loader):
            self.mpu.warn_of_no_batch(loader.dataset, f"a batch of {loader.batch_size} on each rank that reads others")
        if type(sampler) is DistributedSampler:
            sampler.__class__ = FollowedSampler  # the program may have given it, and kept it to call set_epoch
            loader.data_sampler.progress = self.mpu.progress
        return loader


@contextmanager
def counting_shares(engine: DeepSpeedEngine) -> Iterator[None]:
    """Let the mpu and the attributes of an engine count shares of samples; those of pipelines count replicas."""
    grid, replicas = engine.mpu, engine.dp_world_size
    engine.mpu, engine.dp_world_size = MpuGrid.over(grid), grid.get_sample_world_size()
    try:
        yield
    finally:
        engine.mpu, engine.dp_world_size = grid, replicas


# -- the same samples -------------------------------------------------------------------------------------------------

_COMPARED = 2
"""The number of micro-batches of a plain engine, or steps of a pipeline, that are compared."""
_TELLING = 8
"""The number of elements from which on equal tensors are no coincidence."""
_UNLIKE = 1e-3
"""The relative difference from which on losses are not those of the same operations."""
_UNKNOWN = -(1 << 62)
"""What a rank without a value brings to a comparison: less than all values."""
_ZERO = 1e-6
"""The difference of losses that may be rounding near zero."""


def require_equal(
    read: list[int], grid: MpuGrid, peers: tuple[str, ...], others: Sequence[str], what: str = "different samples"
) -> None:
    """Raise on all ranks along ``others`` if some ``peers`` have read different samples; 0 stands for none."""
    group = grid.get_group([axis for axis in peers if axis in grid.topology().axes])
    by_batch = zip(*gathered(read, group), strict=True)
    differ = any(len({*digests} - {0}) > 1 for digests in by_batch)
    device = get_accelerator().current_device_name()
    flag = torch.tensor(grid.world_size - grid.grid_rank if differ else 0, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=grid.get_group(others))
    if not int(flag):
        return
    names = " and ".join(repr(axis) for axis in peers if grid.get_axis_size(axis) > 1)
    raise DisagreementError(
        f"{described(grid, grid.world_size - int(flag))} and its peers along {names} read {what}, but all "
        f"ranks of one replica of {grid.topology().spec!r} must train on the same ones. Use grid.sampler(dataset) or "
        "grid.data_loader(dataset), or divide samples into grid.get_sample_world_size() shares; if the difference is "
        "intended, set grid.check_samples = False"
    )


class FirstSamples:
    """The samples that an engine reads first: its peers must read the same ones, and its replicas should not.

    ``check_samples`` of the grid switches errors and warnings off.
    """

    def __init__(self, grid: MpuGrid, micro_batch: int) -> None:
        self._grid, self._micro_batch = grid, micro_batch
        self.left = _COMPARED
        """The number of micro-batches of a plain engine, or steps of a pipeline, that peers have yet to compare."""
        self._in_step: list[tuple[int, int]] | None = None
        """The digests of inputs and labels that this rank has read, in a step that peers compare."""
        self._digests: list[tuple[int, ...]] = []
        """The digests of what was read before the first step. That of a batch of one value, such as ones, is empty."""
        self._loss: torch.Tensor | None = None
        """The loss of the first micro-batch of a plain engine."""
        self.are_compared = False
        """True from the first step on, before which replicas are compared."""
        self.types: set[torch.dtype] = set()
        """The floating-point types of the inputs in the first batch that this rank of a pipeline has read."""
        self._shapes: list[list[int]] = []
        """The shapes of the tensors in the first batch, but those of single numbers."""

    def look_at_inputs(self, inputs: Any) -> None:
        """Compare the inputs of a forward pass of a plain engine between slices, in the first micro-batches."""
        grid = self._grid
        if not self._is_due():
            return
        read = (digest(inputs, zeros_count=True),)
        # Later stages of a program's own pipeline get parts of activations.
        if grid.get_axis_size(MODEL) > 1 and grid.get_axis_rank(PIPE) == 0:
            require_equal([*read], grid, (MODEL,), (MODEL,))  # other replicas may run more or fewer micro-batches
        self._note(inputs, read)

    def look_at_batch(self, engine: PipelineEngine, batch: Any) -> None:
        """Take digests of a micro-batch that a pipeline engine has read, in the first steps."""
        if not self.types and isinstance(batch, (tuple, list)):
            self.types = types_of(batch[0])
        is_noted = is_training_pass(engine) and self._grid.check_samples and len(self._digests) < _COMPARED
        if self._in_step is not None or (is_noted and not self.are_compared):
            inputs, labels = batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, None)
            read = digest(inputs), digest(labels)
            if self._in_step is not None:
                self._in_step.append(read)
            if is_noted:
                self._note(batch, read)

    def note_loss(self, loss: torch.Tensor, **_: object) -> None:
        """Keep the first loss of a plain engine for :meth:`compare_losses`."""
        if self._loss is None:
            self._loss = loss.detach()

    @contextmanager
    def compared(self, engine: PipelineEngine) -> Iterator[None]:
        """Compare what stages and slices have read in a step of a pipeline, in the first steps."""
        grid = engine.grid
        if not self._is_due() or grid.get_model_parallel_world_size() == 1:
            yield
            return
        read: list[tuple[int, int]] = []
        self._in_step = read
        try:
            yield
        finally:
            self._in_step = None
        if not (engine.is_first_stage() or engine.is_last_stage()):
            read = []
        read = (read + [(0, 0)] * engine.micro_batches)[: engine.micro_batches]
        inputs, labels = ([pair[index] for pair in read] for index in (0, 1))
        everyone = grid.topology().axes
        # Stages are compared by labels: the last stage does not use inputs, and the first may change them at random.
        require_equal(labels, grid, (PIPE, MODEL), everyone)
        if grid.get_axis_size(MODEL) > 1:
            require_equal(inputs, grid, (MODEL,), everyone)

    def _is_due(self) -> bool:
        if not self.left or not self._grid.check_samples:
            return False
        self.left -= 1
        return True

    def _note(self, samples: Any, read: tuple[int, ...]) -> None:
        """Keep the digests of a batch for :meth:`compare`."""
        if self.are_compared:
            return
        tensors = list(tensors_of(samples))
        if not self._digests:
            self._shapes = [list(tensor.shape) for tensor in tensors if tensor.dim()]
            if self._grid.grid_rank == 0 and self._has_micro_batch() is False:
                self._warn_of_size()
        is_telling = any(
            tensor.numel() >= _TELLING and bool((tensor != tensor.reshape(-1)[0]).any()) for tensor in tensors
        )
        self._digests.append(read if is_telling else ())

    def _has_micro_batch(self) -> bool | None:
        """Tell whether a tensor of the first batch has the number of samples of the config; None without a tensor."""
        return any(self._micro_batch in shape[:2] for shape in self._shapes) if self._shapes else None

    def _warn_of_size(self, where: str = "") -> None:
        warn(
            f"a batch with tensors of shape {listed(self._shapes, 3)}{where}, but train_micro_batch_size_per_gpu is "
            f"{self._micro_batch}: DeepSpeed counts that many samples for each batch, in train_batch_size and in its "
            "logs. Give both the same size, or set grid.check_samples = False if it is intended"
        )

    def compare(self, engine: EngineOnGrid) -> None:
        """Warn if all replicas have read the same samples before the first step, or divide them in different ways.

        It is collective over them. Of a plain engine, compare losses, too.
        """
        self.are_compared = True
        self._compare_replicas()
        if not engine.is_pipeline:
            self.compare_losses(engine)

    def _compare_replicas(self) -> None:
        grid = self._grid
        axes = [axis for axis in sample_axes(grid.topology()) if grid.get_axis_size(axis) > 1]
        if not grid.check_samples or not axes:
            return
        if grid.get_sample_world_size() == dist.get_world_size(grid.get_data_parallel_group()):
            group = grid.get_data_parallel_group()
        elif len(axes) == 1:
            group = grid.get_group(axes)
        else:
            return  # there is no such group yet
        is_known = bool(self._digests) and all(self._digests)
        number = abs(hash(tuple(self._digests))) if is_known else -grid.grid_rank  # unlike those of all others
        dealt, fits = grid.progress.dealt, self._has_micro_batch()
        numbers = (number, number_of(dealt) if dealt else None, None if fits is None else int(fits))
        pairs = [(_UNKNOWN, _UNKNOWN) if each is None else (each, ~each) for each in numbers]
        bounds = torch.tensor(pairs, device=get_accelerator().current_device_name())
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
        are_same, is_one_order, is_one_size = (high == ~low or high == _UNKNOWN for high, low in bounds.tolist())
        if not is_one_order:
            said = gathered_by_value(dealt or "no samples", group)
            if grid.grid_rank == 0:
                warn(
                    f"replicas of {grid.topology().spec!r} divide samples in different orders, so they read some "
                    f"samples twice and others never:{said}\nGive grid.sampler or grid.data_loader the same dataset, "
                    "seed and epoch on all ranks, or set grid.check_samples = False if it is intended"
                )
        if not is_one_size and fits is False and grid.grid_rank:
            self._warn_of_size(f" on rank {dist.get_rank()}, unlike other ranks")
        if are_same and grid.grid_rank == 0:
            warn(
                f"all {grid.get_sample_world_size()} replicas of {grid.topology().spec!r} have read the same samples "
                "before the first step, so they compute the same gradients. Use grid.sampler(dataset) or "
                "grid.data_loader(dataset), or give each grid.get_sample_rank() other samples; if they are meant to be "
                "equal, set grid.check_samples = False"
            )

    def compare_losses(self, engine: DeepSpeedEngine) -> None:
        """Warn if slices compute different losses, or ranks along ``seq`` the same one of the same samples.

        It is collective over both, before the first step of a plain engine.
        """
        grid = self._grid
        if not grid.check_samples:
            return
        loss, limit = (nan, 0.0) if self._loss is None else (float(self._loss), torch.finfo(self._loss.dtype).eps)
        inputs = self._digests[0] if self._digests else ()
        read = loss, inputs, _random_state() if _draws(engine.module) else 0
        slices, sequence = (
            gathered(read, grid.get_group(axis)) if grid.topology().get_dim(axis) > 1 else [read]
            for axis in (MODEL, SEQ)
        )
        if grid.grid_rank:
            return
        losses, spec = [each for each, *_ in slices], grid.topology().spec
        if len({state for *_, state in slices}) > 1:
            warn(
                f"the slices of one replica of {spec!r} have different random states after their first passes, and the "
                "model has dropout. Slices that drop different activations outside of split layers train different "
                "models. Give all ranks along 'model' one seed, torch.manual_seed(seed + grid.get_sample_rank()); set "
                "grid.check_samples = False if it is intended"
            )
        # The same operations on the same samples; but kernels of accelerators may add in another order.
        if max(losses) - min(losses) > max(_UNLIKE, 4 * limit) * max(map(abs, losses)) + _ZERO:
            warn(
                f"the slices of one replica of {spec!r} compute different losses of the same samples, "
                f"{listed([float(f'{each:.6g}') for each in losses])}, but each must compute that of the whole model. "
                "If the last layer is split by columns, use ds_topo.layers.parallel_cross_entropy, or "
                "ds_topo.collectives.gather(outputs, group) before the loss; dropout of what is not split needs one "
                "seed for all slices. Set grid.check_samples = False if it is intended"
            )
        are_alike = len(sequence) > 1 and len({each[:2] for each in sequence}) == 1
        if inputs and are_alike and "autosp" not in passes_of(engine._config):
            warn(
                f"the {len(sequence)} ranks along 'seq' of {spec!r} have read the same inputs and computed the same "
                "loss, as if each had the whole sequence; but gradients are summed along 'seq', where each rank has a "
                "part. Give each rank a part of every sequence, by grid.get_axis_rank('seq'); set "
                "grid.check_samples = False if the model divides sequences itself"
            )


class ComparedSamples(EngineOnGrid):
    """An engine that compares the first samples of its ranks."""

    mixin_state = "first_samples"
    first_samples: FirstSamples

    def complete(self) -> None:
        """Compare the samples of the first steps."""
        super().complete()
        self.first_samples = FirstSamples(self.mpu, self.train_micro_batch_size_per_gpu())

    def _take_model_step(self, *arguments: Any) -> None:
        """Compare samples once: equal samples of replicas give equal gradients."""
        if not self.first_samples.are_compared:
            self.first_samples.compare(self)
        super()._take_model_step(*arguments)


class ComparedSamplesOfPlain(ComparedSamples):
    """A plain engine, whose slices read samples separately."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compare the first samples of slices. Explain an error of inputs of another type than the parameters."""
        if self.first_samples.left and is_training_pass(self):
            self.first_samples.look_at_inputs((inputs, named))
        try:
            return super().forward(*inputs, **named)
        except RuntimeError as error:
            explain_types(self, types_of((inputs, named)), error)
            raise

    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Keep the first loss, which slices compare before the first step."""
        if not self.first_samples.are_compared:
            self.first_samples.note_loss(*arguments[:1], **options)
        return super().backward(*arguments, **options)


class ComparedSamplesOfPipeline(ComparedSamples, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, whose stages and slices read samples separately."""

    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Compare the first samples of stages and slices."""
        with self.first_samples.compared(self), self._explaining_types():
            return super().train_batch(*arguments, **options)

    def eval_batch(self, *arguments: Any, **options: Any) -> Any:
        """Explain an error of inputs of another type than the parameters."""
        with self._explaining_types():
            return super().eval_batch(*arguments, **options)

    @contextmanager
    def _explaining_types(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.is_first_stage():
                explain_types(self, self.first_samples.types, error)
            raise

    def _next_batch(self) -> Any:
        """Take a digest of the first batches: peers read samples independently, and must read the same."""
        batch = super()._next_batch()
        self.first_samples.look_at_batch(self, batch)
        return batch


def digest(samples: Any, zeros_count: bool = False) -> int:
    """Return a positive digest of all tensors in samples, or 0 if there is none.

    Without ``zeros_count`` it is also 0 if all tensors are zeros, which pipeline stages get if they do not use samples.
    """
    hashed = hashlib.blake2b()
    found = False
    for tensor in tensors_of(samples):
        found = found or zeros_count or bool(tensor.detach().any())
        content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        hashed.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        hashed.update(content.reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(hashed.digest(), "big") if found else 0


def _draws(module: nn.Module) -> bool:
    """Tell whether a module has dropout that is on."""
    return any(getattr(each, "p", 0) for each in module.modules() if isinstance(each, _DropoutNd))


def _random_state() -> int:
    """Return a digest of the random states that dropout draws from: of the device, and of the CPU."""
    return digest([torch.get_rng_state(), get_accelerator().get_rng_state()], zeros_count=True)


def types_of(samples: Any) -> set[torch.dtype]:
    """Return the floating-point types of all tensors in samples."""
    return {tensor.dtype for tensor in tensors_of(samples) if tensor.is_floating_point()}


def tensors_of(samples: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in samples whose values can be read."""
    if isinstance(samples, torch.Tensor):
        is_wrapper = samples.is_nested or hasattr(samples, "__tensor_flatten__")  # such as a DTensor
        if samples.layout is torch.strided and not samples.is_meta and not is_wrapper:
            yield samples
    elif isinstance(samples, (Mapping, tuple, list)):
        for value in samples.values() if isinstance(samples, Mapping) else samples:
            yield from tensors_of(value)


def described(grid: MpuGrid, grid_rank: int) -> str:
    where = ", ".join(f"{axis}={index}" for axis, index in grid.topology().get_coord(grid_rank)._asdict().items())
    return f"rank {grid.to_global([grid_rank])[0]} ({where})"


def explain_types(engine: DeepSpeedEngine, types: AbstractSet[torch.dtype], error: RuntimeError) -> None:
    """Raise for an error of a forward pass whose cause are inputs of another type than that of the parameters."""
    own = {each.dtype for each in engine.module.parameters() if each.is_floating_point()}
    if "type" not in str(error) or not own or types <= own:
        return
    kind, given = str(next(iter(own))), listed(sorted(map(str, types - own)))
    if engine.bfloat16_enabled():
        why = '"bf16" is enabled in the config'
        remedy = 'or have "torch_autocast": {"enabled": true} in its place, with which parameters stay float32'
    elif engine.fp16_enabled():
        why, remedy = '"fp16" is enabled in the config', 'or set "fp16": {"auto_cast": true}'
    elif kind == "torch.float32":
        why, remedy = "the config enables neither bf16 nor fp16", 'or enable "bf16" or "fp16"'
    else:
        why = "the program has converted the model, and the config enables neither bf16 nor fp16"
        remedy = 'or leave .half() or .bfloat16() out and enable "bf16" or "fp16", by which master weights are float32'
    raise EngineOptionError(
        f"inputs of type {given}, but parameters of the engine have the type {kind} ({why}), and the model does not "
        f"convert them ({error}): convert inputs by .to({kind}), {remedy}"
    ) from error
