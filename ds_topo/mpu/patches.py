"""List what ds_topo patches in DeepSpeed, and the private names that it relies on, one row each.

The module that holds a replacement binds its row (see :mod:`ds_topo.ledger`). Most patches are bound to one engine, its
optimizer or its module. A row that changes a class or module for longer than one call says why in ``process_wide``.
``python -m ds_topo.engine`` prints all rows, and shows what another release of DeepSpeed changes about them.
"""

from __future__ import annotations

from textwrap import dedent
from types import ModuleType

import deepspeed
import torch
from deepspeed.inference.engine import InferenceEngine
from deepspeed.module_inject import auto_ep_folding
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe import module as pipe_module
from deepspeed.runtime.pipe import topology as pipe_topology
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups
from deepspeed.utils import mixed_precision_linkage, tensor_fragment
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_topo.ledger import ONE_CALL, Patch, Reliance

THE_GRID = "the grid of the engine exists"
REDUCER = "a GradientReducer is attached"
A_CONSTRUCTOR = f"{ONE_CALL} of an engine's constructor"
SAVING = f"{ONE_CALL} of save_checkpoint()"
LOADING = f"{ONE_CALL} of load_checkpoint()"
A_PIPELINE = f"{ONE_CALL} of PipelineModule's constructor"
USE = "ds_topo.use(grid) is active"
_OF_USE = "A call of ds_topo.use(grid) asks for it: programs call DeepSpeed by these names before any object exists."
_OUR_LAYOUT = "The reducer cuts every region evenly over the ranks, so that all ranks send and receive all the time."
_METHODS = f"""
    state_dict: The same for partitions that were moved back to DeepSpeed's layout.
    load_state_dict: The same in DeepSpeed's layout, from which everything is then moved to the reducer's.
        Checkpoints are in DeepSpeed's layout.
    _restore_from_bit16_weights: The same by slices.
        {_OUR_LAYOUT}
"""


def _patches(owner: type | ModuleType, during: str, table: str, process_wide: str = "") -> tuple[Patch, ...]:
    """Return the patches of a table, whose rows are ``name: what it becomes``.

    The reason is indented below a row, or below the last one of several rows that share it.
    """
    found: list[Patch] = []
    rows: list[tuple[str, str]] = []
    for line in filter(None, dedent(table).splitlines()):
        if line.startswith(" "):
            found += [Patch(owner, name, instead, line.strip(), during, process_wide) for name, instead in rows]
            rows.clear()
        else:
            name, _, instead = line.partition(": ")
            rows.append((name, instead))
    return tuple(found)


# -- engines and optimizers of a grid ---------------------------------------------------------------------------------

CONSTRUCT_ENGINE = Patch(
    DeepSpeedEngine,
    "__init__",
    instead="The same constructor. It then patches the engine and its optimizer if the engine's mpu is a grid. For any "
    "other engine it refuses an mpu or a model that was meant for a grid.",
    why="DeepSpeed's engines assume an order of ranks that a grid may not have.",
    during="a PipelineParallelGrid exists",
    process_wide="deepspeed.initialize builds the engine itself, so there is no object to patch before the constructor "
    "runs.",
)
SOURCE_OF_SLICES = Patch(
    deepspeed_groups,
    "get_tensor_model_parallel_src_rank",
    instead="The first rank of the group along model.",
    why="DeepSpeed returns rank // n * n, which is in another group if the ranks along model are no neighbors.",
    during="a grid with slices exists",
    process_wide="Programs call it to broadcast the samples of AutoTP.",
)
SANITY_CHECK, EXPERT_PARALLEL, TENSOR_PARALLEL_STATES, CONFIGURE_MODEL, *_OF_SHARD = _patches(
    DeepSpeedEngine,
    A_CONSTRUCTOR,
    """
    _do_sanity_check: The same after checks of options and inputs. All ranks compare the results.
        hpZ, qgZ, AutoSP, ALST and the hybrid engine join neighboring ranks, whatever the mpu is.
    _configure_expert_parallel: The same after the expert groups of the grid were created.
        AutoEP would create groups of neighboring ranks, and refuses an mpu with slices even if AutoTP makes them.
    _configure_tensor_parallel_states: The same. The engine then has its grid as its mpu again.
        AutoTP makes the module deepspeed.utils.groups the mpu of the engine.
    _configure_distributed_model: The same after replicas have compared models, and all stages have expert groups.
        DeepSpeed broadcasts parameters here, which hides replicas that were built differently.
    _configure_zero_optimizer: The same with the group along the axis shard.
    _configure_bf16_optimizer: The same with the group along the axis shard.
        DeepSpeed partitions over all replicas.
    """,
)
CONFIGURE_PARTITIONS = tuple(_OF_SHARD)
FOLDING_TABLES = Patch(
    auto_ep_folding,
    "expected_folding_group_tables",
    instead="A function that returns the tables of the grid.",
    why="AutoEP with AutoTP compares its groups with tables of neighboring ranks.",
    during=A_CONSTRUCTOR,
)
FORWARD_ON_GRID, BACKWARD_ON_GRID, STEP_ON_GRID, BACKWARD_PROLOGUE, BACKWARD_EPILOGUE, AUTOSP_BACKEND = _patches(
    DeepSpeedEngine,
    THE_GRID,
    """
    forward: The same with the engine's own mpu, and a comparison of the first samples of model parallel peers.
    backward: The same with the engine's own mpu.
    step: The same with the engine's own mpu, and now and then a comparison of steps while a watch is on.
        DeepSpeed's functions ask one mpu for all engines of a process, the mpu of the engine that was built last.
    _backward_prologue: The same, and the engine's own mpu is current from here.
    _backward_epilogue: The same, and the engine's own mpu is current until here.
        A program may call loss.backward() itself, outside of the engine's methods.
    get_autosp_backend: The same, whose graphs use the groups along seq and the index along seq.
        AutoSP joins neighboring ranks, whatever the mpu is.
    """,
)
TRAIN_BATCH_ON_GRID, EVAL_BATCH_ON_GRID, NEXT_BATCH = _patches(
    PipelineEngine,
    THE_GRID,
    """
    train_batch: The same with the engine's own mpu. It starts on all ranks or on none.
    eval_batch: The same with the engine's own mpu. It starts on all ranks or on none.
        If one rank runs out of samples within a step, the others wait for its activations without end.
    _next_batch: The same. It also takes a digest of the first batches.
        First and last stages, and model parallel peers, read samples independently and must read the same.
    """,
)
AVERAGE_AND_SCATTER, PARTITION_GRADIENTS, END_OF_REDUCTION = _patches(
    DeepSpeedZeroOptimizer_Stage3,
    THE_GRID,
    """
    _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads: The same times the degree of the axis seq.
        ZeRO-3 averages gradients over seq here. Every other path of DeepSpeed sums them.
    partition_grads: With an axis shard, the last micro-batch also starts the sum over copies of the partition.
    independent_gradient_partition_epilogue: With an axis shard, the same and a wait for these sums.
        DeepSpeed does not sum over the ranks that hold the same partition.
    """,
)
STEP_ON_SUMS, OVERFLOW_OF_COPIES, ZERO_NORM = _patches(
    DeepSpeedZeroOptimizer,
    THE_GRID,
    """
    step: With an axis shard, the same after a sum over the copies of the partition.
        DeepSpeed does not sum over the ranks that hold the same partition.
    has_overflow: With an axis shard, the same over all replicas.
        Experts may overflow on any replica.
    scaled_global_norm: ds_topo.engine.norms.zero_gradient_norm.
        ZeRO-1 and 2 count the experts of the first slice only, and hang where stages differ in parameter groups.
    """,
)
LOSS_SCALER, CLIP_FP32 = _patches(
    DeepSpeedEngine,
    THE_GRID,
    """
    torch_autocast_z0_gradscaler: In fp16 without ZeRO, an object that multiplies losses by the loss scale.
        The optimizers divide gradients by it, but backward() multiplies losses for ZeRO only.
    clip_fp32_gradients: ds_topo.clip_grad_norm_.
        Without ZeRO, a pipeline does not keep its norm, and norms of ranks with different experts are averaged.
    """,
)
UNFUSED_CLIP = Patch(
    FP16_UnfusedOptimizer,
    "unscale_and_clip_grads",
    instead="The same by ds_topo.engine.norms.unfused_gradient_norm, on stages or slices and with experts.",
    why="Its norm omits experts. It is that of gradients, which lack the marks of slices and of tied copies.",
    during=THE_GRID,
)
BF16_GRADIENTS = Patch(
    BF16_Optimizer,
    "get_grads_for_norm",
    instead="The same, and a zero on ranks where no gradient counts.",
    why="Without tensor-parallel parameters only the first slice has gradients to count; it fails on others.",
    during=THE_GRID,
)
GATHERING_METHODS = tuple(
    Patch(
        owner,
        name,
        instead="The same with our all_gather_dp_groups in force.",
        why="These methods gather updated parameters.",
        during=f"{THE_GRID}, or {REDUCER}",
    )
    for owner, name in (
        (DeepSpeedZeroOptimizer, "step"),
        (DeepSpeedZeroOptimizer, "update_lp_params"),
        (BF16_Optimizer, "update_lp_params"),
    )
)
GATHERS = tuple(
    Patch(
        module,
        "all_gather_dp_groups",
        instead="A gather that sends slices point to point on gloo, and region by region in the reducer's layout.",
        why="gloo's all_gather uses a link in one direction at a time.",
        during=f"{ONE_CALL} of the optimizer's step() or update_lp_params()",
    )
    for module in (stage_1_and_2, bf16_optimizer)
)

# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVE_CHECKPOINT, LOAD_CHECKPOINT, SAVE_16_BIT, SAVE_PARTITIONS, LOAD_PARTITIONS, SAVE_EXPERTS = _patches(
    DeepSpeedEngine,
    THE_GRID,
    """
    save_checkpoint: ds_topo.checkpoint.save with the engine's own mpu.
        DeepSpeed writes 'latest' when rank 0 has written its own files; other ranks' files may be missing.
    load_checkpoint: ds_topo.checkpoint.load with the engine's own mpu.
        DeepSpeed loads incomplete files, fails on some ranks only, and runs code that a file contains.
    save_16bit_model: The same with whole weights where AutoTP has split them.
        With AutoTP, DeepSpeed writes the slice of rank 0 alone.
    _save_zero_checkpoint: With experts and an axis shard, the same on all replicas, each with a file of its own.
    _load_zero_checkpoint: With experts and an axis shard, the same from a file of each replica.
        Experts have other partitions than dense parameters, which several replicas share.
    _save_moe_checkpoint: The same with our _get_expert_data_parallel_rank in force.
        File names contain the writer's model parallel rank, so replicas on other slices would find no file.
    """,
)
MODULE_STATES = Patch(
    DeepSpeedEngine,
    "module_state_dict",
    instead="The same with whole weights.",
    why="With AutoTP, DeepSpeed writes the slice of rank 0 alone.",
    during=f"{ONE_CALL} of save_16bit_model()",
)
WRITE_FILE, MAKE_FOLDER = _patches(
    CheckpointEngine,
    SAVING,
    """
    save: The same. It records each written file, and keeps an exception until all ranks know of it.
        If one rank cannot write, the others would wait for it at the end of save_checkpoint().
    makedirs: The same. It keeps an exception until all ranks know of it.
        The others would wait at the start of save_checkpoint().
    """,
)
COPY_SCRIPTS = Patch(
    DeepSpeedEngine,
    "_copy_recovery_script",
    instead="The same. It keeps an exception until all ranks know of it.",
    why="Rank 0 copies zero_to_fp32.py while the others wait at the end of save_checkpoint().",
    during=SAVING,
)
STATES_TO_SAVE = {
    optimizer: Patch(
        optimizer,
        "state_dict",
        instead="The same without the partitions of dense parameters, on all replicas but the first of each partition.",
        why="Each partition is saved once.",
        during=SAVING,
    )
    for optimizer in (DeepSpeedZeroOptimizer, BF16_Optimizer)
}
WRITER_OF_EXPERTS, WRITER_OF_FOLDED_EXPERTS = _patches(
    deepspeed_groups,
    f"{ONE_CALL} of _save_moe_checkpoint()",
    """
    _get_expert_data_parallel_rank: A function that returns 0 on the writer of each slice and 1 on other ranks.
        In DeepSpeed only expert data parallel rank 0 writes.
    _get_data_parallel_rank: The same on the writer of each slice of experts, and a number above all ranks on others.
        With AutoEP and AutoTP, several replicas of an expert would write the same file.
    """,
)
TORCH_LOAD = Patch(
    torch,
    "load",
    instead="The same with weights_only=True, on the thread that loads a checkpoint, and for its files on all threads.",
    why="DeepSpeed passes weights_only=False, which runs any code that a file contains.",
    during=LOADING,
)
STATES_TO_LOAD = Patch(
    DeepSpeedEngine,
    "_get_all_zero_checkpoint_state_dicts",
    instead="The same. Partitions of dense parameters are from the file of the first replica that holds them.",
    why="The file of this replica has only those of experts.",
    during=LOADING,
)
WEIGHTS_OF_LATEST = Patch(
    deepspeed_engine,
    "get_fp32_state_dict_from_zero_checkpoint",
    instead="The same for the tag that is being loaded.",
    why="Without optimizer states, ZeRO-3 reads the checkpoint that 'latest' names, whatever tag was asked for.",
    during=LOADING,
)

# -- pipelines --------------------------------------------------------------------------------------------------------

PIPELINE_GRID = Patch(
    pipe_module,
    "PipelineParallelGrid",
    instead="A function that returns our grid.",
    why="PipelineModule has no argument for a grid, and creates the groups of tied layers with the one it makes.",
    during=A_PIPELINE,
)
PIPELINE_WORLD = Patch(
    deepspeed.comm,
    "new_group",
    instead="The world's own group, for the first group if it is of all ranks in ascending order.",
    why="PipelineModule clones the world's group, which opens connections between all ranks and never uses them.",
    during=A_PIPELINE,
)

# -- ds_topo.use(grid) ------------------------------------------------------------------------------------------------

INITIALIZE = Patch(
    deepspeed,
    "initialize",
    instead="ds_topo.initialize, with the grid in use as mpu.",
    why="Trainer, accelerate and other programs call it themselves, without an mpu or with their own.",
    during=USE,
    process_wide=_OF_USE,
)
NAME_OF_PIPELINES = Patch(
    deepspeed.pipe,
    "PipelineModule",
    instead="ds_topo.PipelineModule.",
    why="Programs import it from there.",
    during=USE,
    process_wide=_OF_USE,
)
CONSTRUCT_PIPELINE, TIED_MODULES, SET_BOUNDS = _patches(
    pipe_module.PipelineModule,
    USE,
    """
    __init__: The same on the grid in use, after a comparison of the topologies.
        Programs derive from PipelineModule before a grid exists.
    _index_tied_modules: A method that creates groups of the stages that share a layer, on these stages.
        DeepSpeed creates the groups of all ranks on every rank.
    _set_bounds: The same with Python's integers.
        Balanced partitions have NumPy's integers, which Python's random.seed() refuses under seed_layers=True.
    """,
    _OF_USE,
)
NAMES_OF_TOPOLOGIES = _patches(
    pipe_topology,
    USE,
    """
    ProcessTopology: ds_topo.ProcessTopology.
    PipeDataParallelTopology: ds_topo.PipeDataParallelTopology.
    PipeModelDataParallelTopology: ds_topo.PipeModelDataParallelTopology.
    PipelineParallelGrid: ds_topo.PipelineParallelGrid.
        Programs import them from there.
    """,
    _OF_USE,
)
ZERO_INIT = Patch(
    partition_parameters.Init,
    "__init__",
    instead="The same over the data parallel group of the grid in use.",
    why="Without a group, as from_pretrained() calls it, it partitions over all ranks of the world.",
    during=USE,
    process_wide=_OF_USE,
)
MODIFIED, MODIFIED_BY_ONE = _patches(
    partition_parameters.GatheredParameters,
    USE,
    """
    __init__: The same. It also stores modifier_rank.
        The replacement of __exit__ needs the number that was given.
    __exit__: The same after the rank modifier_rank of the grid has broadcast to all slices what they hold alike.
        from_pretrained() fills parameters on rank 0 alone. DeepSpeed sends them to the replicas of rank 0 only.
    """,
    _OF_USE,
)
INFERENCE_GROUP = Patch(
    InferenceEngine,
    "_create_model_parallel_group",
    instead="A method that sets the group along model of the grid in use.",
    why="DeepSpeed joins the first ranks of the job; other ranks are in no group.",
    during=USE,
    process_wide=_OF_USE,
)
LONG_SEQUENCES = _patches(
    parallel_state_sp,
    USE,
    """
    _SEQUENCE_PARALLEL_GROUP: The group of the grid along seq.
    _SEQUENCE_DATA_PARALLEL_GROUP: The data parallel group of the grid.
    initialize_sequence_parallel: A function that finds the groups already there.
        DeepSpeed joins neighboring ranks of the world.
    """,
    _OF_USE,
)

# -- experts ----------------------------------------------------------------------------------------------------------

GATHER_TOKENS = Patch(
    mappings,
    "_gather_tokens",
    instead="An all_gather into a list, if the current mpu is a grid.",
    why="gloo refuses DeepSpeed's flat buffer.",
    during="expert groups exist",
    process_wide="The autograd functions of MoE layers look it up in their module, also in a backward pass that no "
    "engine has started.",
)
PAD_CAPACITY = Patch(
    TopKGate,
    "_forward_hooks",
    instead="The same hooks and one that rounds the capacity up, on each gate of an engine on a grid with slices.",
    why="Model parallel peers split the slots of an expert evenly, and DeepSpeed asserts that they can.",
    during=THE_GRID,
)

# -- the reducer ------------------------------------------------------------------------------------------------------

DESTROY_ENGINE, COALESCE, REDUCE_FALLBACK, TAKE_STEP, FORWARD, OWN_BACKWARD, OWN_STEP, _ZERO_GRAD = _patches(
    DeepSpeedEngine,
    REDUCER,
    """
    destroy: The same after detach() of the reducer.
        The reducer ends with its engine.
    coalesce_grad_reduction: A method that raises RuntimeError.
        It would reduce again what the reducer has reduced.
    buffered_allreduce_fallback: A wait for the reducer.
        At stage 0 and with BF16_Optimizer the engine reduces gradients here, after the last backward pass.
    _take_model_step: The same if the reducer has finished. Otherwise it raises RuntimeError.
        A release whose engine no longer calls the patched names would step on this rank's own gradients.
    forward: The same after the reducer has discarded a step that an exception has ended.
        An exception in backward leaves a step unfinished, and training may go on with the same engine.
    _backward_prologue: The same after a note that the gradients that follow are of this engine's output.
        Gradients of another engine's loss through this module belong to no step of this engine.
    step: The same after a note that this engine's backward pass is over.
        The note ends with the micro-batch.
    zero_grad: The same. The reducer also discards what it has accumulated.
        Gradients of earlier micro-batches are not in parameter.grad.
    """,
)
INSTRUCTIONS, EXECUTE_SCHEDULE = _patches(
    PipelineEngine,
    REDUCER,
    """
    _INSTRUCTION_MAP: The same map with BackwardPass and ReduceTiedGrads that also call the reducer.
        Only the schedule knows the last micro-batch, and the map holds functions, which cannot be overridden.
    _exec_schedule: The same after the reducer has discarded a step that an exception has ended.
        An exception in backward leaves a step unfinished, and training may go on with the same engine.
    """,
)
(
    REDUCE_ZERO,
    ZERO_OVERLAP,
    ZERO_PROCESS,
    ZERO_REDUCE_REST,
    ZERO_EPILOGUE,
    OFFLOAD_STATES,
    ZERO_SET_VIEWS,
    _ZERO_GRAD_OF_ZERO,
    *_METHODS_OF_ZERO,
) = _patches(
    DeepSpeedZeroOptimizer,
    REDUCER,
    """
    reduce_gradients: A wait for the reducer.
        At stage 1 the optimizer reduces gradients here, after the last backward pass.
    overlap_comm: False.
        The epilogue would wait for a stream that runs nothing.
    process_gradients: A no-op.
        The hooks of stage 1 would reduce gradients during backward, too.
    reduce_ipg_grads: A no-op.
        The epilogue of stage 1 would reduce what its hooks have collected.
    overlapping_partition_gradients_reduce_epilogue: A wait for the reducer.
        At stage 2 the optimizer ends its own reduction here, after every backward pass.
    offload_states: A method that raises RuntimeError.
        It cuts flat tensors anew, in DeepSpeed's layout.
    _update_model_bit16_weights: No-op.
        It sets each parameter's data to the view that it is already, which would wait for parameters in flight.
    zero_grad: The same. The reducer also discards what it has accumulated.
        Gradients of earlier micro-batches are not in parameter.grad.
    """
    + _METHODS,
)
BF16_HOOKS, HP_GRADIENTS, HP_GRADIENT, BF16_NORM, _CLEAR_GRADIENTS, *_METHODS_OF_BF16 = _patches(
    BF16_Optimizer,
    REDUCER,
    """
    _grad_acc_hooks: No hooks.
        With immediate_grad_update the optimizer's hooks would accumulate each gradient a second time.
    update_hp_grads: A no-op.
        After backward it would accumulate the gradients of incomplete buckets a second time.
    _hp_grad: Each parameter's part of the optimizer's buffer, set on the parameter.
        The pipeline engine sums it over the stages of a tied layer.
    get_grads_for_norm: The norm over the ranks that share gradients.
        Each of these ranks has only its own partition.
    clear_hp_grads: The same. The reducer also discards what it has accumulated.
        Gradients of earlier micro-batches are not in parameter.grad.
    """
    + _METHODS,
)
ZERO_GRADS = (_ZERO_GRAD, _ZERO_GRAD_OF_ZERO, _CLEAR_GRADIENTS)
METHODS_OF_PARTITIONS = {DeepSpeedZeroOptimizer: _METHODS_OF_ZERO, BF16_Optimizer: _METHODS_OF_BF16}
ZERO_FLATS, ZERO_PARTITIONS, ZERO_PARTITION_SIZE, ZERO_OWNED, ZERO_OFFSETS = _OF_ZERO = _patches(
    DeepSpeedZeroOptimizer,
    REDUCER,
    f"""
    bit16_groups_flat: The same memory, gathered by regions.
    parallel_partitioned_bit16_groups: An object that writes this rank's slices.
    partition_size: The size with the padding of regions.
    params_in_partition: The parameters of which this rank owns a part.
    round_robin_bit16_offsets: The offsets of parameters in the reducer's layout.
        {_OUR_LAYOUT}
    """,
)
BF16_FLATS, BF16_PARTITIONS, BF16_PARTITION_OF_GRADIENTS, BF16_ALL_GRADIENTS = _OF_BF16 = _patches(
    BF16_Optimizer,
    REDUCER,
    f"""
    bf16_groups_flat: The same memory, gathered by regions.
    bf16_partitioned_groups: An object that writes this rank's slices.
    fp32_groups_gradient_flat_partition: This rank's slices, moved together.
    fp32_groups_gradients_flat: An empty list, because no gradient needs to be zeroed there.
        {_OUR_LAYOUT}
    """,
)
ADDRESSES = (*_OF_ZERO, *_OF_BF16)
COMPILE = Patch(
    DeepSpeedEngine,
    "compile",
    instead="The same after overlap_parameters is switched off, so that parameters arrive in the step.",
    why="Compiled code reads memory without asking whether it has arrived.",
    during="overlap_parameters is on",
)

# -- comparisons and recorded runs ------------------------------------------------------------------------------------

STEP, TRAIN_BATCH = (
    Patch(
        engine,
        name,
        instead="The same. Every N steps it then compares the replicas.",
        why="It finds the step after which replicas differ.",
        during="check_replicas(engine, every=N) is in force",
    )
    for engine, name in ((DeepSpeedEngine, "step"), (PipelineEngine, "train_batch"))
)
RECORDED_FORWARD, RECORDED_BACKWARD, RECORDED_STEP, RECORDED_BATCH = (
    Patch(
        engine,
        name,
        instead=f"The same. Of the first engine that trains, verify records {what}.",
        why="Two runs of one program can only be compared by what they compute.",
        during="ds-topo verify records a run",
        process_wide="The program builds its engine itself, after its process was started for the recording.",
    )
    for engine, name, what in (
        (DeepSpeedEngine, "forward", "the outputs of modules"),
        (DeepSpeedEngine, "backward", "the loss"),
        (DeepSpeedEngine, "step", "gradients, weights and states"),
        (PipelineEngine, "train_batch", "the same of a pipeline"),
    )
)
DROPOUT, ATTENTION_DROPOUT = _patches(
    torch.nn.functional,
    "ds-topo verify --no-dropout runs a program",
    """
    dropout: The input itself.
    scaled_dot_product_attention: The same function without dropout of attention weights.
        Ranks of another layout draw other random numbers, so results with dropout differ.
    """,
    "Modules and programs call it by name.",
)
CONFIGURE = Patch(
    DeepSpeedConfig,
    "__init__",
    instead="The same for a config without AutoTP, without ZeRO 1 and 2 in fp32, and with autoep_size 1.",
    why="A reference must not depend on the slices, partitions and groups that it checks.",
    during="ds-topo verify runs a reference",
    process_wide="DeepSpeed reads the config before the engine exists.",
)
LOCAL_EXPERTS = Patch(
    MoE,
    "__init__",
    instead="The same with ep_size 1, so that each process has all experts.",
    why=CONFIGURE.why,
    during=CONFIGURE.during,
    process_wide="Programs create layers by this name.",
)

_OF_OPTIMIZERS = {
    "_link_all_hp_params": "links parameters and partitions when DeepSpeed's layout is back",
    "_lazy_init_hp_params_optimizer_state": "links them to optimizer states",
    "_hp_optimizer_states_linked": "tells whether these are linked",
    "real_dp_process_group": "lists the group that shares each flat tensor",
}
_RELIANCES: dict[type | ModuleType, dict[str, str]] = {
    deepspeed_groups: {
        "mpu": "is set to the mpu of the engine that is running",
        "expert_tensor_parallel_world_size": "is set to the degree of slicing of that engine's experts",
        "_TENSOR_MODEL_PARALLEL_GROUP": "is set to the group along model of that engine's grid, for AutoTP",
        "_MODEL_PARALLEL_GROUP": "is set to the same group",
        "_DATA_PARALLEL_GROUP": "is set to the data parallel group of that engine's grid",
        "_WORLD_GROUP": "exists if there has been an engine without an mpu",
        "_EXPERT_PARALLEL_GROUP": "gets an entry per name, which MoE layers look up",
        "_EXPERT_PARALLEL_GROUP_RANKS": "gets an entry per name",
        "_EXPERT_DATA_PARALLEL_GROUP": "gets an entry per name",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS": "gets an entry per name",
        "_get_expert_parallel_group_dict": "returns the sizes that have groups",
        "_get_expert_parallel_group": "returns the group of a name",
        "_get_expert_data_parallel_group_dict": "returns the groups over which experts are reduced",
        "_ZERO_PARAM_INTRA_PARALLEL_GROUP": "is set to a group inside the data parallel group",
        "_get_zero_param_intra_parallel_group": "tells whether a second partition exists",
        "_create_zero_param_parallel_group": "is called for an mpu that is not a grid",
        "_get_local_all_to_all_group": "is called for topologies of data alone",
    },
    DeepSpeedEngine: {
        "_config": "holds the engine's options",
        "_consolidated_16bit_state_dict": "gathers what AutoTP has split",
        "_get_ckpt_name": "returns the path that load_checkpoint() returns",
        "_global_grad_norm": "is what get_global_grad_norm() returns",
        "inside_no_sync_ctxt": "tells which backward pass is the last one",
        "_running_engine_backward": "tells whether a backward pass is of the engine's own loss",
        "gate_modules": "lists the gates whose capacity is padded",
    },
    DeepSpeedConfig: {"_param_dict": "holds sections and options that DeepSpeed itself does not read"},
    pipe_module.PipelineModule: {
        "_grid": "is the grid that a module was built on",
        "_layer_specs": "tells which layers are tied",
        "_synchronize_tied_weights": "is overridden to suppress a warning",
    },
    _BaseDataLoaderIter: {
        "_dataset_kind": "tells whether samples have indices",
        "_index_sampler": "tells who chooses the samples",
        "_num_yielded": "tells how many batches are left",
    },
    DeepSpeedZeroOptimizer_Stage3: {
        "_z3_optimizer": "tells whether a partitioned parameter belongs to an engine",
        "_reassign_or_swap_out_partitioned_parameters": "copies master weights to a group's parameters",
        "_finalize_offload_gradient_accumulation": "hands gradients to an offloaded optimizer after their sum",
    },
    BF16_Optimizer: _OF_OPTIMIZERS
    | {
        "bf16_groups": "lists the parameters of each flat tensor",
        "fp32_groups_gradients": "lists the buffers in which gradients accumulate",
        "fp32_groups_has_gradients": "marks buffers that are filled",
        "create_grad_acc_hooks": "registers the optimizer's hooks again",
        "fp32_groups_flat_partition": "holds master weights",
        "grad_acc_dtype": "is the data type in which gradients accumulate",
        "_uses_muon": "tells whether the optimizer needs whole gradients",
    },
    DeepSpeedZeroOptimizer: _OF_OPTIMIZERS
    | {
        "single_partition_of_fp32_groups": "holds master weights",
        "bit16_groups": "lists the parameters of each flat tensor",
        "round_robin_bit16_groups": "lists them in the order of the flat tensor",
        "_is_muon_group": "tells whether a group needs whole gradients",
        "overlapping_partition_gradients_reduce_epilogue": "collects the partition",
        "use_separate_grad_accum": "tells whether stage 1 accumulates in a second data type",
        "averaged_gradients": "holds the partition of gradients, for their norm",
        "params_in_partition": "lists the parameters of that partition",
        "norm_for_param_grads": "holds the norms of offloaded gradients",
        "get_param_id": "returns the key of those norms",
    },
    tensor_fragment: {"hp_fragment_address": "is what safe_get_full_fp32_param and similar functions look up"},
    mixed_precision_linkage: {"link_hp_params": "sets _hp_mapping and _index_in_param_group on parameters"},
    FP16_UnfusedOptimizer: {
        "fp16_groups": "lists the parameters whose marks gradients get",
        "loss_scale_config": "holds the loss scale",
        "_global_grad_norm": "is the norm that the engine reports",
    },
}
_ALL = [value if isinstance(value, (tuple, list)) else (value,) for value in list(globals().values())]
ROWS: tuple[Patch | Reliance, ...] = (
    *dict.fromkeys(row for rows in _ALL for row in rows if isinstance(row, Patch)),
    *STATES_TO_SAVE.values(),
    *(Reliance(owner, name, f"It {use}.") for owner, uses in _RELIANCES.items() for name, use in uses.items()),
    Reliance(DeepSpeedZeroOptimizer, "_zero_padding", "It marks gradients that are padding."),
)
