"""The classes of DeepSpeed's engines on a grid: every method that differs from DeepSpeed's, in order, and why.

An engine whose mpu is a grid gets its class before its constructor runs (:mod:`ds_topo.base.classes`), and its own
one back when the grid is destroyed. What a method adds is written down here once, in the order in which it happens; the
modules that it calls hold one concept each. Its optimizer gets a class, too (:mod:`ds_topo.engine.optimizers_on_grid`).

A :class:`~ds_topo.GradientReducer` and ``check_replicas`` add classes of their own, also to engines without a grid.
Their methods run around those here: those of ``check_replicas`` outside, then those of ``ds-topo verify``, which
records, then those of the reducer, then these.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_topo.base.classes import Mixin, adopt
from ds_topo.base.differences import DualPipeVEngine
from ds_topo.base.ledger import always
from ds_topo.base.supported import SLICES_OF_PARTITIONED, require
from ds_topo.collectives import explain_whole_weights
from ds_topo.engine import (
    activation_shapes,
    autoparallel,
    backward_passes,
    batches,
    checks,
    experts,
    loss_scales,
    norms,
    reduction_order,
)
from ds_topo.engine.backward_passes import BackwardPasses, MicroBatches
from ds_topo.engine.batches import FirstSamples, Starts, run_with_enough
from ds_topo.engine.current_mpu import current
from ds_topo.engine.idle_stages import remove_unused_placeholders, with_placeholders
from ds_topo.engine.one_layout import agreement
from ds_topo.engine.optimizers_on_grid import keep_groups_of_adagrad, put_optimizer_on_grid, undo_step_of_zeros
from ds_topo.engine.parts import COMPARISON, LOADING, OVER_SHARD, SAVING
from ds_topo.engine.written_weights import written_weights_of
from ds_topo.errors import EngineOptionError
from ds_topo.health import guard, job_watch
from ds_topo.mpu import MpuGrid, has_shard, registry
from ds_topo.topology.axes import MODEL, PIPE

STEPS_BETWEEN = 100
"""The number of steps between two comparisons of the ranks' progress, while a watch is on."""
_GATHERING = "gathering the whole weights (save_16bit_model, or the state dict of an engine)"


class EngineParts:
    """Hold what the methods of an engine on a grid use, from the end of ``DeepSpeedEngine``'s constructor on."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        grid: MpuGrid = engine.mpu
        self.has_experts = bool(registry.of(grid))
        self.copies = OVER_SHARD.load().copies_of(grid) if has_shard(grid) else None
        """The ranks with copies of this rank's partition; None if there are no others."""
        self.written = written_weights_of(engine)
        """The search for parameters that the program has changed; None if there are no master weights."""
        self.samples = FirstSamples(grid, engine.train_micro_batch_size_per_gpu())
        """The comparison of what ranks read first."""
        self.starts = Starts()
        """Notices that all steps of a pipeline begin with the same batch."""
        self.direct_steps = checks.DirectSteps(engine)
        """Notices steps of the optimizer that the program takes itself."""
        group_counts_differ = False
        if self.has_experts:
            experts.check_engine_with_experts(engine)
        elif isinstance(engine, PipelineEngine):
            group_counts_differ = norms.group_counts_differ(engine)
        self.stock_scaler = engine.torch_autocast_z0_gradscaler
        """DeepSpeed's own loss scaler without ZeRO, if any."""
        loss_scales.share_scale(engine)
        self.corrects_norms = grid.settle_norms()
        if self.corrects_norms:
            loss_scales.scale_losses(engine)
            undo_step_of_zeros(engine.optimizer)
            if isinstance(engine, PipelineEngine):
                norms.log_clipping(engine)
        self.micro_batches = MicroBatches(engine.gradient_accumulation_steps())
        """The number of micro-batches in a step."""
        self.passes = BackwardPasses()
        """The backward passes of a step; a pipeline runs them itself."""
        self.adds_zeros = reduction_order.adds_zeros(engine)
        self.types: set[torch.dtype] = set()
        """The floating-point types of the inputs in the first batch that this rank of a pipeline has read."""
        self.instructions: dict[type, Any] | None = None
        """The instructions of a pipeline's schedule."""
        self.release_optimizer = put_optimizer_on_grid(
            engine,
            None if isinstance(engine, PipelineEngine) else self.passes,
            has_experts=self.has_experts,
            corrects_norms=self.corrects_norms,
            group_counts_differ=group_counts_differ,
        )


def _call(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method a call of the program to an engine.

    If one rank alone raises in it, all others raise, too. DeepSpeed's functions query the mpu of this engine in it;
    otherwise it is that of the engine that was built last.
    """

    @wraps(method)
    def call(engine: EngineOnGrid, *arguments: Any, **options: Any) -> Any:
        before = current.set(engine.mpu, begins_call=True)
        try:
            guarded = guard.begin(method.__name__, engine.mpu.members, engine.global_steps)
            try:
                result = method(engine, *arguments, **options)
            except BaseException as error:
                guard.end(guarded, error)
                raise
            guard.end(guarded, None)
            return result
        finally:
            current.end_call(before)

    return call


class EngineOnGrid(Mixin, DeepSpeedEngine):  # type: ignore[misc]
    """The methods that all kinds of engines on a grid share."""

    mixin_suffix, mixin_state = "OnGrid", "on_grid"
    mpu: MpuGrid
    on_grid: EngineParts

    # -- construction

    def _configure_expert_parallel(self, *arguments: Any, **options: Any) -> Any:
        """Create the expert groups of the grid first.

        AutoEP would create groups of neighboring ranks, and refuses an mpu with slices even if AutoTP makes them.
        """
        with autoparallel.over_groups_of_grid(self):
            return super()._configure_expert_parallel(*arguments, **options)

    def _configure_tensor_parallel_states(self, model: Any) -> None:
        """Keep the grid as the mpu: AutoTP makes the module ``deepspeed.utils.groups`` the mpu of the engine.

        Warn of patterns that match no layer.
        """
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            require(SLICES_OF_PARTITIONED)
        autoparallel.warn_of_unmatched_patterns(self, model)
        grid = self.mpu
        super()._configure_tensor_parallel_states(model)
        self.mpu = grid
        grid.on_destroy(model.register_load_state_dict_pre_hook(explain_whole_weights).remove)

    def _configure_distributed_model(self, model: Any) -> None:
        """Compare the models of replicas first, and create expert groups on all stages.

        DeepSpeed broadcasts parameters here, which hides replicas that were built differently.
        """
        remove_unused_placeholders(self, model)
        checks.agree_on_model(self, model, self.mpu)
        checks.create_missing_expert_groups(self, model, self.mpu)
        current.set(self.mpu)  # again, because experts may have got groups since
        super()._configure_distributed_model(model)
        if self.mpu.get_axis_size(MODEL) > 1:
            COMPARISON.load().compare_slices(self, model)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Partition over the axis ``shard`` if there is one; DeepSpeed partitions over all replicas.

        Add a placeholder to each group of a pipeline without a trainable parameter: a stage without trainable
        parameters, or without those of a group, fails alone. Put groups of experts in one order on all ranks.
        """
        if isinstance(self, PipelineEngine):
            model_parameters = with_placeholders(self, client_optimizer, model_parameters)
        model_parameters = experts.with_groups_in_one_order(self, client_optimizer, model_parameters)
        if client_optimizer is not None and not hasattr(client_optimizer, "param_groups"):  # a function builds it
            built = checks.built_alike(self, client_optimizer, model_parameters)
            experts.with_groups_in_one_order(self, built, model_parameters)
            client_optimizer = always(built)
        with self._partitioned_over_shard():
            super()._configure_optimizer(client_optimizer, model_parameters)
        keep_groups_of_adagrad(self)
        checks.warn_of_tied_weights(self)

    def _configure_bf16_optimizer(self, optimizer: Any) -> Any:
        """Let Muon have an mpu whose ranks hold whole matrices: DeepSpeed refuses it with any mpu."""
        grid = self.mpu
        if "muon" in type(optimizer).__name__.lower() and (slices := grid.get_model_parallel_world_size()) > 1:
            raise EngineOptionError(
                f"Muon with bf16 and gradients in fp32 on {grid.topology().spec!r}: DeepSpeed's optimizer for that "
                f"needs whole models on each rank, but here {slices} ranks share one. Use ZeRO 2, or 0 or 1 without "
                '"grad_accum_dtype": "fp32", or an optimizer such as AdamW'
            )
        self.mpu = None  # type: ignore[assignment]
        try:
            wrapper = super()._configure_bf16_optimizer(optimizer)
        finally:
            self.mpu = grid
        wrapper.mpu = grid
        return wrapper

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        """Partition over ``shard`` for ZeRO without an optimizer, too. DeepSpeed then calls only this method."""
        with self._partitioned_over_shard() if optimizer is None else nullcontext():
            return super()._configure_zero_optimizer(optimizer)

    def _partitioned_over_shard(self) -> AbstractContextManager[None]:
        if not has_shard(self.mpu):
            return nullcontext()
        over_shard: AbstractContextManager[None] = OVER_SHARD.load().partitioned_over_shard(self)
        return over_shard

    def deepspeed_io(self, *arguments: Any, **options: Any) -> Any:
        """Build a data loader for this rank's share of samples.

        DeepSpeed divides samples by a group that counts peers along ``seq``. Its sampler for data efficiency sends them
        from rank 0 to a group that may lack it.
        """
        with batches.counting_shares(self):
            loader = super().deepspeed_io(*arguments, **options)
        batches.complete_loader(self, loader)
        return loader

    # -- a step

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Refuse sizes that do not fit; the count of micro-batches starts with the next step.

        In DeepSpeed a step ends where the count of all micro-batches is a multiple of the new number.
        """
        self.on_grid.micro_batches.check_batch_size(self, train_batch_size)
        super().set_train_batch_size(train_batch_size)
        self.on_grid.micro_batches.settle(self)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Refuse it with a loader of ``training_data``, which keeps its size."""
        backward_passes.check_micro_batch_size(self, micro_batch_size)
        super().set_train_micro_batch_size(micro_batch_size)

    def _take_model_step(self, *arguments: Any) -> None:
        """Compare samples and losses once, and warn of parameters that the program has changed.

        Equal samples of replicas give equal gradients. The optimizer overwrites parameters by its own copy.
        """
        parts = self.on_grid
        with parts.direct_steps.of_engine(self):
            if not parts.samples.are_compared:
                parts.samples.compare()
                if not isinstance(self, PipelineEngine):
                    parts.samples.compare_losses(self)
            if parts.written is not None:
                parts.written.look()
            super()._take_model_step(*arguments)
        self.mpu.progress.steps += 1

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over the grid, by a few kernels, and keep it.

        DeepSpeed's norm without ZeRO is not kept, counts one stage, and is averaged over ranks with different experts.
        It starts several kernels for each parameter. A step that ``torch_autocast`` skips has the norm inf, as in ZeRO.
        """
        scaler = self.torch_autocast_z0_gradscaler
        if isinstance(scaler, loss_scales.AutocastScaler) and scaler.has_overflow:
            self._global_grad_norm = torch.tensor(math.inf)
        elif self.on_grid.corrects_norms:
            limit = self.gradient_clipping()
            self._global_grad_norm = norms.clip_grad_norm_(self.module.parameters(), limit, self.mpu)
        else:
            super().clip_fp32_gradients()

    def destroy(self) -> None:
        """Take back what the loss scaler has set on the program's optimizer."""
        _release_scaler(vars(self).get("torch_autocast_z0_gradscaler"))
        super().destroy()

    # -- checkpoints

    @_call
    def save_checkpoint(self, save_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Save by :func:`ds_topo.checkpoint.save`.

        DeepSpeed writes ``latest`` when rank 0 has written its own files; other ranks' files may be missing.
        """
        save = self._in_files_of_experts(saves=True)(super().save_checkpoint)
        return SAVING.load().save_as_a_whole(save, self, save_dir, *arguments, **options)

    @_call
    def load_checkpoint(self, load_dir: Any, *arguments: Any, **options: Any) -> Any:
        """Load by :func:`ds_topo.checkpoint.load`.

        DeepSpeed loads incomplete files, fails on some ranks only, and runs code that a file contains.
        """
        load = self._in_files_of_experts(saves=False)(super().load_checkpoint)
        return LOADING.load().load_as_a_whole(load, self, load_dir, *arguments, **options)

    @_call
    def save_16bit_model(self, *arguments: Any, **options: Any) -> Any:
        """Save whole weights where AutoTP has split them, or refuse; DeepSpeed writes the slice of rank 0 alone."""
        autoparallel.require_whole_weights(self)
        with autoparallel.saving_whole_weights(self):
            return super().save_16bit_model(*arguments, **options)

    @_call
    def _zero3_consolidated_16bit_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none: programs often gather weights on the rank alone that writes them."""
        with agreement(self.mpu.members, _GATHERING):
            autoparallel.require_whole_weights(self)
        return super()._zero3_consolidated_16bit_state_dict(*arguments, **options)

    @_call
    def _replace_module_consolidated_state_dict(self) -> Any:
        """Start to gather on all ranks or on none, where AutoTP has split the weights."""
        with agreement(self.mpu.members, _GATHERING):
            pass
        return super()._replace_module_consolidated_state_dict()

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names: list[str]) -> Any:
        """Take dense partitions from the file of their first replica; that of this one has only those of experts."""
        states = super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        copies = self.on_grid.copies
        if copies is not None and (shard := OVER_SHARD.load()).is_later_copy(self, copies):
            shard.add_states_of_dense(self, copies, states, zero_ckpt_names)
        return states

    @contextmanager
    def _in_files_of_experts(self, *, saves: bool) -> Iterator[None]:
        """Give experts files of their own, in a call that saves or loads a checkpoint.

        With an axis ``shard``, each replica has a file: experts have other partitions than dense parameters, which
        several replicas share. Each slice writes the files of experts that it will load: their names contain the
        writer's model parallel rank, so replicas on other slices would find no file.
        """
        with ExitStack() as undo:
            if self.has_moe_layers and self.on_grid.copies is not None:
                undo.enter_context(OVER_SHARD.load().file_of_replica(self, self.on_grid.copies))
            if self.has_moe_layers and self.on_grid.has_experts and saves:
                undo.enter_context(experts.saving_by_slice(self))
            yield


class PlainEngineOnGrid(EngineOnGrid):
    """An engine that is no pipeline, on a grid."""

    @_call
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Compare the first samples of slices, and return outputs by which gradients enter the engine once."""
        parts = self.on_grid
        if self.gradient_accumulation_steps() > 1:
            inputs, named = parts.passes.of_inputs(self, (inputs, named))
        if self.training:
            parts.micro_batches.settle(self)
            parts.micro_batches.forwards += 1
            if parts.samples.left:
                parts.samples.look_at_inputs((inputs, named))
        try:
            outputs = super().forward(*inputs, **named)
        except RuntimeError as error:
            checks.explain_types(self, batches.types_of((inputs, named)), error)
            raise
        return parts.passes.of_outputs(self, outputs)

    @_call
    def backward(self, *arguments: Any, **options: Any) -> Any:
        """Refuse what is no loss, and gradients that the step cannot take any more."""
        backward_passes.check_loss(*arguments[:1], **options)
        parts, outer = self.on_grid, self.on_grid.passes.is_of_engine
        if not parts.samples.are_compared:
            parts.samples.note_loss(*arguments[:1], **options)
        if parts.passes.are_reduced:
            parts.passes.require_unreduced(self)
        if self.training:
            parts.micro_batches.settle(self)
        parts.micro_batches.backwards += 1
        parts.passes.is_of_engine = True
        try:
            return super().backward(*arguments, **options)
        finally:
            parts.passes.is_of_engine = outer

    @_call
    def step(self, *arguments: Any, **options: Any) -> Any:
        """Notice a step without gradients. Compare the steps of replicas now and then while a watch is on."""
        if not self.on_grid.passes.have_run:
            backward_passes.refuse_step(self)
        is_last, before = self.is_gradient_accumulation_boundary(), self.global_steps
        if is_last and self.on_grid.passes.is_local and not self.on_grid.passes.are_reduced:
            self.on_grid.passes.check_reduced(self)
        result = super().step(*arguments, **options)
        taken = self.global_steps
        is_due = taken != before and not taken % STEPS_BETWEEN
        if is_due and getattr(self, "gradient_reducer", None) is None:  # which compares steps itself
            job_watch.compare_steps(self.mpu.get_data_parallel_group(), taken)
        passes = self.on_grid.passes
        passes.is_penalized, passes.are_reduced = False, passes.are_reduced and not is_last
        passes.have_run = not is_last
        self.on_grid.micro_batches.note_step(self)
        return result

    def __getattr__(self, name: str) -> Any:
        """Say what an engine without a pipeline has in place of the methods of one."""
        if name in ("train_batch", "eval_batch"):
            raise AttributeError(
                f"{name}() of an engine without a pipeline: call loss = engine(inputs), engine.backward(loss) and "
                f"engine.step(), or build a PipelineModule(layers, grid=grid) for {name}()"
            )
        return super().__getattr__(name)

    def zero_grad(self) -> None:
        """Discard the partitions of ZeRO 3, too. The step may then have another backward pass.

        ZeRO keeps the gradients of a second backward pass alone, or adds them to discarded ones, which is refused.
        """
        super().zero_grad()
        if self.zero_optimization_partition_weights():
            self.optimizer.zero_grad()
        if not isinstance(self.optimizer, BF16_Optimizer):  # it keeps its sums
            self.on_grid.passes.are_discarded = True

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Refuse a second one in a step: ZeRO 1 and 2 would keep the gradients of the last one alone.

        Add gradients of zeros where this rank has none. DeepSpeed leaves them out, so ranks that use other parameters
        sum gradients of different ones, or fail.
        """
        with self.on_grid.passes.coalesced(self), super().coalesce_grad_reduction():
            try:
                yield
            finally:  # gradients are reduced after an error, too
                if self.on_grid.adds_zeros:
                    reduction_order.fill_missing(self.optimizer)

    # A program may call loss.backward() itself, for several losses, or a loss of several forward passes.

    def _backward_prologue(self) -> None:
        """Prepare once in each backward pass; the engine's own mpu is current from here."""
        parts = self.on_grid
        if not parts.passes.must_be_prepared(self):
            return
        parts.passes.warn_of_discarded(self, parts.micro_batches.done_before(self))
        current.begin_backward(self)
        try:
            super()._backward_prologue()
        except BaseException:
            current.end_backward(self)
            raise

    def _backward_epilogue(self) -> None:
        """Note that gradients are reduced; the engine's own mpu is current until here."""
        current.set(self.mpu)
        try:
            super()._backward_epilogue()
        finally:
            current.end_backward(self)
        self.on_grid.passes.end_backward(self)

    def allreduce_gradients(self, *arguments: Any, **options: Any) -> None:
        """Note it: a program may call it after the backward passes of ``no_sync()``."""
        super().allreduce_gradients(*arguments, **options)
        self.on_grid.passes.is_local = False

    def _backward_prologue_per_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient itself: hooks of the outputs divide it.

        An output that depends on another output, or on one of another engine, would be divided twice.
        """
        return grad

    def get_autosp_backend(self, compile_kwargs: dict[str, Any]) -> Any:
        """Use the groups along ``seq``, and the index along ``seq``: AutoSP joins neighboring ranks."""
        return autoparallel.with_groups_of_grid(self, super().get_autosp_backend(compile_kwargs))


class PipelineEngineOnGrid(EngineOnGrid, PipelineEngine):  # type: ignore[misc]
    """A pipeline engine, on a grid."""

    @property
    def using_bf16_optimizer(self) -> bool:
        """True if gradients accumulate in ``BF16_Optimizer``: DeepSpeed compares its class, which is ours on a grid."""
        return isinstance(self.optimizer, BF16_Optimizer)

    @using_bf16_optimizer.setter
    def using_bf16_optimizer(self, value: bool) -> None:
        self.__dict__["using_bf16_optimizer"] = isinstance(self.optimizer, BF16_Optimizer)  # for when the grid is gone

    def _build_data_iter(self, dataset: Any) -> None:
        """Read this rank's share of samples, on stages that read samples.

        The mpu of a pipeline counts peers along ``seq``, which would read different samples.
        """
        if batches.reads_samples(self):  # others must not take part in the sampler's collectives
            with batches.counting_shares(self):
                super()._build_data_iter(dataset)

    @_call
    def train_batch(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none, and compare the first samples of stages and slices.

        If one rank runs out of samples within a step, the others wait for its activations without end.
        """
        with self.on_grid.samples.compared(self), self._explaining_types():
            backward_passes.check_number(self)
            return run_with_enough(super().train_batch, self, *arguments, **options)

    @_call
    def eval_batch(self, *arguments: Any, **options: Any) -> Any:
        """Start on all ranks or on none."""
        with self._explaining_types():
            return run_with_enough(super().eval_batch, self, *arguments, **options)

    @contextmanager
    def _explaining_types(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.is_first_stage():
                checks.explain_types(self, self.on_grid.types, error)
            raise

    def _bcast_pipe_scalar(self, data: Any, *arguments: Any, **options: Any) -> Any:
        """Refuse a result that is no scalar: other stages would receive it in memory for one number, and crash."""
        if torch.is_tensor(data):
            self.require_scalar(data)
        return super()._bcast_pipe_scalar(data, *arguments, **options)

    def require_scalar(self, loss: Any) -> None:
        """Refuse a loss of the last stage that is no tensor of one value."""
        if not torch.is_tensor(loss) or loss.numel() != 1:
            cause = "The module has no loss_fn: give PipelineModule(..., loss_fn=), or let"
            what = f"{list(loss.shape)} values" if torch.is_tensor(loss) else f"a {type(loss).__name__}"
            raise EngineOptionError(
                f"the last stage returns {what} instead of a loss. "
                f"{cause if self.module.loss_fn is None else 'Let'} the last layer or loss_fn return a scalar. For "
                "outputs without a loss, call engine.eval_batch(data_iter, compute_loss=False, reduce_output=None)"
            )

    def _refuse(self, *_: object, **__: object) -> Any:
        """Say what a pipeline has in place of the methods of other engines."""
        raise RuntimeError(
            "a pipeline engine runs the forward and backward passes and the step of all its micro-batches itself: call "
            "loss = engine.train_batch(data_iter) or engine.eval_batch(data_iter), with an iterator of (inputs, labels)"
        )

    forward = backward = step = _refuse

    def reset_activation_shape(self) -> None:
        """Forget which shapes of activations were announced to the next stage."""
        activation_shapes.forget_announced(self)
        super().reset_activation_shape()

    def _next_batch(self) -> Any:
        """Take a digest of the first batches: peers read samples independently, and must read the same."""
        batch = super()._next_batch()
        self.on_grid.samples.look_at_batch(self, batch)
        if not self.on_grid.types and isinstance(batch, (tuple, list)):
            self.on_grid.types = batches.types_of(batch[0])
        return batch

    @property
    def _INSTRUCTION_MAP(self) -> dict[type, Any]:  # noqa: N802
        """Return the same map, with checks of what a stage sends and of the loss."""
        if self.on_grid.instructions is None:
            self.on_grid.instructions = activation_shapes.with_checked_sends(super()._INSTRUCTION_MAP)
        return self.on_grid.instructions

    def _allocate_or_extend_buffers(self, idx: int, shape: Any, dtype: torch.dtype) -> Any:
        """Return a new buffer in place of one of another type: DeepSpeed returns any that is large enough."""
        buffer = super()._allocate_or_extend_buffers(idx, shape, dtype)
        return buffer if buffer.dtype == dtype else torch.empty(shape, dtype=dtype, device=self.device)


def put_engine_on_grid(engine: DeepSpeedEngine) -> Callable[[], None]:
    """Give an engine the class of its kind, before its constructor runs; return the function that gives it its own."""
    return adopt(engine, PipelineEngineOnGrid if isinstance(engine, PipelineEngine) else PlainEngineOnGrid)


def complete(engine: DeepSpeedEngine) -> None:
    """Prepare the methods of an engine on a grid, at the end of ``DeepSpeedEngine``'s constructor; collective."""
    batches.deal_dynamic_batches(engine)
    if has_shard(engine.mpu):
        OVER_SHARD.load().save_each_partition_once(engine)
    if isinstance(engine, PipelineEngine):
        _time_backward_once(engine)
        engine.mpu.on_destroy(partial(_end_pipeline, weakref.ref(engine)))
    if autoparallel.uses_autosp(engine._config):
        autoparallel.average_over_seq(engine)
    engine.on_grid = EngineParts(engine)
    engine.mpu.on_destroy(engine.on_grid.release_optimizer)
    engine.mpu.on_destroy(partial(_restore_scaler, weakref.ref(engine), engine.on_grid.stock_scaler))


def _restore_scaler(engine: weakref.ref[DeepSpeedEngine], scaler: Any) -> None:
    living = engine()
    if living is not None and "on_grid" in vars(living):  # it was not destroyed
        _release_scaler(living.torch_autocast_z0_gradscaler)
        living.torch_autocast_z0_gradscaler = scaler


def _release_scaler(scaler: Any) -> None:
    if isinstance(scaler, loss_scales.AutocastScaler):
        scaler.release()


def _end_pipeline(engine: weakref.ref[PipelineEngine]) -> None:
    """Let later steps raise on every rank: otherwise one stage fails, and the others wait for it without end."""
    living = engine()
    if living is not None and "mpu" in vars(living):  # it was not destroyed
        grid = living.mpu
        vars(living)["_exec_schedule"] = lambda _: grid.get_group(PIPE)


def _time_backward_once(engine: PipelineEngine) -> None:
    """Leave the timers of the backward pass to the pipeline on all stages but the last, whose engine has the loss.

    The pipeline starts and stops them there itself, and DeepSpeed's hooks on outputs would start them a second time.
    """
    if not engine.is_last_stage() and not isinstance(engine, DualPipeVEngine):
        engine.engine_timers.backward_timers.clear()
        engine.engine_timers.backward_inner_timers.clear()
