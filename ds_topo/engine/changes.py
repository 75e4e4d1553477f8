"""What is changed in DeepSpeed, and the private names of it that are relied on: one page for a new release.

A row of ``CHANGES`` is bound by the module whose code stands there meanwhile (see :mod:`ds_topo.ledger`). To support a
new release of DeepSpeed, print the page with ``python -m ds_topo.engine``, run ``tests/engine/test_changes.py`` against
that release, and look up in its source what the failing rows name.
"""

from __future__ import annotations

import deepspeed
import torch
from deepspeed.moe import mappings
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
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ds_topo.ledger import Change, Reliance

A_GRID = "a PipelineParallelGrid exists"
THE_GRID = "the engine's grid exists"
EXPERTS = "expert groups exist"
REDUCER = "a GradientReducer is attached"
A_CALL = "one call"
USE = "ds_topo.use(grid)"
_OUR_LAYOUT = "every region is cut evenly over the ranks, so that they all send and receive all the time"

# -- grids ------------------------------------------------------------------------------------------------------------

SANITY_CHECK = Change(
    DeepSpeedEngine,
    "_do_sanity_check",
    instead="the same after checks of options and inputs, which the ranks compare",
    why="hpZ, qgZ, AutoTP, AutoSP, AutoEP, ALST and the hybrid engine lay groups over neighboring ranks, "
    "whatever the mpu",
    during=A_GRID,
)
CONFIGURE_ZERO = Change(
    DeepSpeedEngine,
    "_configure_zero_optimizer",
    instead="the same, then AVERAGE_AND_SCATTER",
    why="the engine knows the mpu, ZeRO-3's optimizer does not",
    during=A_GRID,
)
AVERAGE_AND_SCATTER = Change(
    DeepSpeedZeroOptimizer_Stage3,
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    instead="the same times the degree of seq, on each ZeRO-3 optimizer of an engine with a seq axis",
    why="it averages gradients over seq, which every other path sums",
    during=THE_GRID,
)
UNFUSED_STEP = Change(
    FP16_UnfusedOptimizer,
    "step",
    instead="the same with the parameters' marks on their gradients",
    why="it takes the norm of gradients, which have no marks: shards of all slices but the first are missing",
    during=A_GRID,
)
BF16_GRADIENTS = Change(
    BF16_Optimizer,
    "get_grads_for_norm",
    instead="the same, and a zero on ranks where nothing counts",
    why="without a tensor-parallel parameter all slices but the first have none, and it fails on those ranks alone",
    during=A_GRID,
)
CONFIGURE_MODEL = Change(
    DeepSpeedEngine,
    "_configure_distributed_model",
    instead="the same with the engine's own mpu, after checks of its model, which replicas compare",
    why="an engine without an mpu finds the one of the engine before",
    during=A_GRID,
)
ENTRIES_OF_ENGINES = tuple(
    Change(
        owner,
        name,
        instead="the same with the engine's own mpu",
        why="DeepSpeed's functions ask one mpu for all engines of a process, the last one's",
        during=A_GRID,
    )
    for owner, name in (
        (DeepSpeedEngine, "forward"),
        (DeepSpeedEngine, "backward"),
        (DeepSpeedEngine, "step"),
    )
)
SAVE_CHECKPOINT, LOAD_CHECKPOINT = (
    Change(
        DeepSpeedEngine,
        name,
        instead=f"ds_topo.checkpoint.{name.partition('_')[0]} with the engine's own mpu, on engines of a grid",
        why=why,
        during=A_GRID,
    )
    for name, why in (
        ("save_checkpoint", "latest is written, in place, when rank 0 has its own files, which may be the only ones"),
        ("load_checkpoint", "it loads what was half written, or fails on some ranks, and runs code that files bring"),
    )
)
STEPS_OF_PIPELINES = tuple(
    Change(
        PipelineEngine,
        name,
        instead="the same with the engine's own mpu, on all ranks or on none",
        why="where one rank's samples end within a step, the others wait for its activations",
        during=A_GRID,
    )
    for name in ("train_batch", "eval_batch")
)
NEXT_BATCH = Change(
    PipelineEngine,
    "_next_batch",
    instead="the same, and a digest of the first ones",
    why="first and last stage, and model parallel peers, read samples by themselves",
    during=A_GRID,
)
GATHERS = tuple(
    Change(
        module,
        "all_gather_dp_groups",
        instead="on gloo, slices sent point to point; in our layout, region by region",
        why="gloo's all_gather uses a link in one direction at a time",
        during=A_GRID,
    )
    for module in (stage_1_and_2, bf16_optimizer)
)
SECOND_PARTITION = Change(
    deepspeed_groups,
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
    instead="ranks of one data parallel group",
    why="DeepSpeed takes contiguous ranks of the world, which hold different parameters under tensor parallelism",
    during="the grid of create_zero_partition_groups() exists",
)

# -- checkpoints ------------------------------------------------------------------------------------------------------

WRITE_FILE = Change(
    CheckpointEngine,
    "save",
    instead="the same, on an engine's own; who wrote what is noted, and a failure kept until all ranks hear of it",
    why="where one rank cannot write, the others wait for it at the end of save_checkpoint()",
    during=A_CALL,
)
MAKE_FOLDER = Change(
    CheckpointEngine,
    "makedirs",
    instead="the same, and a failure is kept until all ranks hear of it",
    why="the others wait at the start of save_checkpoint()",
    during=A_CALL,
)
COPY_SCRIPTS = Change(
    DeepSpeedEngine,
    "_copy_recovery_script",
    instead="the same, and a failure is kept until all ranks hear of it",
    why="rank 0 copies zero_to_fp32.py while the others wait at the end of save_checkpoint()",
    during=A_CALL,
)
TORCH_LOAD = Change(
    torch,
    "load",
    instead="the same with weights_only=True, on the thread that loads a checkpoint",
    why="DeepSpeed passes weights_only=False, which runs whatever code a file brings",
    during=A_CALL,
)
WEIGHTS_OF_LATEST = Change(
    deepspeed_engine,
    "get_fp32_state_dict_from_zero_checkpoint",
    instead="the same of the tag that is loaded",
    why="ZeRO 3 without optimizer states reads the checkpoint that latest names, whatever the tag",
    during=A_CALL,
)

# -- pipelines --------------------------------------------------------------------------------------------------------

PIPELINE_GRID = Change(
    pipe_module,
    "PipelineParallelGrid",
    instead="ours",
    why="PipelineModule has no argument for a grid, and creates groups of tied layers with the one it makes",
    during="the construction of a PipelineModule, or use()",
)
PIPELINE_WORLD = Change(
    deepspeed.comm,
    "new_group",
    instead="the world itself, for the first group that is wanted, if it is of all ranks in their order",
    why="PipelineModule clones the world, by connections between all ranks that nothing is ever sent over",
    during="the construction of a PipelineModule",
)

# -- a grid in use ----------------------------------------------------------------------------------------------------

INITIALIZE = Change(
    deepspeed,
    "initialize",
    instead="ours, with the grid in use as mpu",
    why="Trainer, accelerate and other programs call it themselves, and pass no mpu or their own",
    during=USE,
)
NAME_OF_PIPELINES = Change(
    deepspeed.pipe,
    "PipelineModule",
    instead="ours",
    why="programs import it from there",
    during=USE,
)
CONSTRUCT_PIPELINE = Change(
    pipe_module.PipelineModule,
    "__init__",
    instead="the same on the grid in use, after a comparison of the topologies",
    why="programs derive from it before there is a grid",
    during=USE,
)
TIED_MODULES = Change(
    pipe_module.PipelineModule,
    "_index_tied_modules",
    instead="groups of the stages that share a layer",
    why="DeepSpeed creates those of all ranks on every rank",
    during=USE,
)
SET_BOUNDS = Change(
    pipe_module.PipelineModule,
    "_set_bounds",
    instead="the same with plain integers",
    why="balanced partitions are NumPy's, which Python's random.seed() refuses under seed_layers=True",
    during=USE,
)
NAMES_OF_TOPOLOGIES = tuple(
    Change(pipe_topology, name, instead="ours", why="programs import it from there", during=USE)
    for name in (
        "ProcessTopology",
        "PipeDataParallelTopology",
        "PipeModelDataParallelTopology",
        "PipelineParallelGrid",
    )
)
ZERO_INIT = Change(
    partition_parameters.Init,
    "__init__",
    instead="the same over the data parallel group of the grid in use",
    why="without a group it partitions over all ranks, which hold different parameters; from_pretrained() passes none",
    during=USE,
)
MODIFIED = Change(
    partition_parameters.GatheredParameters,
    "__init__",
    instead="the same, which keeps modifier_rank",
    why="MODIFIED_BY_ONE needs the number that was given",
    during=USE,
)
MODIFIED_BY_ONE = Change(
    partition_parameters.GatheredParameters,
    "__exit__",
    instead="the same after the rank modifier_rank of the grid has sent what all slices hold alike",
    why="from_pretrained() fills them on rank 0 alone; DeepSpeed sends them to that rank's replicas, and the other "
    "slices would keep none",
    during=USE,
)
LONG_SEQUENCES = tuple(
    Change(parallel_state_sp, name, instead="the grid's", why="it takes neighboring ranks of the world", during=USE)
    for name in ("_SEQUENCE_PARALLEL_GROUP", "_SEQUENCE_DATA_PARALLEL_GROUP", "initialize_sequence_parallel")
)

# -- experts ----------------------------------------------------------------------------------------------------------

CREATE_EXPERT_GROUPS = Change(
    deepspeed_groups,
    "_create_expert_and_data_parallel",
    instead="a refusal for engines on a grid",
    why="it assumes contiguous stages, and hangs the stages that have no such layer",
    during=EXPERTS,
)
CREATE_TENSOR_PARALLEL_EXPERT_GROUPS = Change(
    deepspeed_groups,
    "_create_expert_data_and_model_parallel",
    instead="a refusal for engines on a grid",
    why="it assumes pipe outermost and model innermost, and hangs the stages that have no such layer",
    during=EXPERTS,
)
EXPERT_SLICES = Change(
    deepspeed_groups,
    "_get_expert_model_parallel_world_size",
    instead="the slices of the experts of the current mpu's grid",
    why="DeepSpeed keeps one number for all engines of a process",
    during=EXPERTS,
)
GATHER_TOKENS = Change(
    mappings,
    "_gather_tokens",
    instead="all_gather into a list, for a grid",
    why="DeepSpeed's flat buffer is refused by gloo",
    during=EXPERTS,
)
CONFIGURE_CHECKPOINTING = Change(
    DeepSpeedEngine,
    "_configure_checkpointing",
    instead="the same, then checks of experts and PAD_CAPACITY",
    why="it is the end of an engine's construction, before the first step",
    during=EXPERTS,
)
PAD_CAPACITY = Change(
    TopKGate,
    "_forward_hooks",
    instead="with one more, on each gate of an engine on a grid with slices",
    why="model peers split the slots of an expert evenly, and DeepSpeed asserts that they can",
    during=THE_GRID,
)
SAVE_EXPERTS = Change(
    DeepSpeedEngine,
    "_save_moe_checkpoint",
    instead="the same with WRITER_OF_EXPERTS",
    why="file names carry the writer's model parallel rank: replicas on other slices would find no file",
    during=EXPERTS,
)
WRITER_OF_EXPERTS = Change(
    deepspeed_groups,
    "_get_expert_data_parallel_rank",
    instead="0 on each slice's writer, 1 elsewhere",
    why="DeepSpeed lets expert data parallel rank 0 write, alone",
    during=A_CALL,
)
CLIP_FP32 = Change(
    DeepSpeedEngine,
    "clip_fp32_gradients",
    instead="clip_gradients() for a grid with experts",
    why="without ZeRO the norms of ranks with different experts are averaged",
    during=EXPERTS,
)
ZERO_NORM = Change(
    DeepSpeedZeroOptimizer,
    "scaled_global_norm",
    instead="zero_gradient_norm() for a grid with experts",
    why="ZeRO 1 and 2 miss experts of all slices but the first, and hang where stages have unequal parameter groups",
    during=EXPERTS,
)

# -- the reducer ------------------------------------------------------------------------------------------------------

DESTROY_ENGINE = Change(
    DeepSpeedEngine,
    "destroy",
    instead="detach() of the reducer, then the same",
    why="the reducer goes with its engine",
    during=REDUCER,
)
COALESCE = Change(
    DeepSpeedEngine,
    "coalesce_grad_reduction",
    instead="a refusal",
    why="it would reduce once more what the reducer has reduced",
    during=REDUCER,
)
REDUCE_FALLBACK = Change(
    DeepSpeedEngine,
    "buffered_allreduce_fallback",
    instead="a wait for the reducer",
    why="stage 0 and BF16_Optimizer: the engine's own reduction after the last backward",
    during=REDUCER,
)
REDUCE_ZERO = Change(
    DeepSpeedZeroOptimizer,
    "reduce_gradients",
    instead="a wait for the reducer",
    why="stage 1: the optimizer's own reduction after the last backward",
    during=REDUCER,
)
ZERO_OVERLAP = Change(
    DeepSpeedZeroOptimizer,
    "overlap_comm",
    instead="False",
    why="the epilogue would wait for a stream that nothing runs on",
    during=REDUCER,
)
ZERO_PROCESS = Change(
    DeepSpeedZeroOptimizer,
    "process_gradients",
    instead="nothing",
    why="stage 1's hooks would reduce during backward, too",
    during=REDUCER,
)
ZERO_REDUCE_REST = Change(
    DeepSpeedZeroOptimizer,
    "reduce_ipg_grads",
    instead="nothing",
    why="stage 1's epilogue would reduce what its hooks collected",
    during=REDUCER,
)
BF16_HOOKS = Change(
    BF16_Optimizer,
    "_grad_acc_hooks",
    instead="none",
    why="immediate_grad_update: its hooks would accumulate each gradient a second time",
    during=REDUCER,
)
HP_GRADIENTS = Change(
    BF16_Optimizer,
    "update_hp_grads",
    instead="nothing",
    why="after backward it would add gradients a second time that wait for the rest of their bucket",
    during=REDUCER,
)
HP_GRADIENT = Change(
    BF16_Optimizer,
    "_hp_grad",
    instead="on each parameter, its part of the optimizer's buffer",
    why="the pipeline engine sums it over the stages of a tied layer",
    during=REDUCER,
)
ZERO_GRADS = tuple(
    Change(
        owner,
        name,
        instead="the same, and the reducer forgets what it has accumulated",
        why="gradients of earlier micro-batches are not in parameter.grad",
        during=REDUCER,
    )
    for owner, name in (
        (DeepSpeedEngine, "zero_grad"),
        (DeepSpeedZeroOptimizer, "zero_grad"),
        (BF16_Optimizer, "clear_hp_grads"),
    )
)
ZERO_EPILOGUE = Change(
    DeepSpeedZeroOptimizer,
    "overlapping_partition_gradients_reduce_epilogue",
    instead="a wait for the reducer",
    why="stage 2: the end of the optimizer's own reduction, after every backward",
    during=REDUCER,
)
ADDRESSES = ZERO_FLATS, ZERO_PARTITIONS, ZERO_PARTITION_SIZE, ZERO_OWNED, ZERO_OFFSETS, *_OF_BF16 = tuple(
    Change(optimizer, name, instead=instead, why=_OUR_LAYOUT, during=REDUCER)
    for optimizer, name, instead in (
        (DeepSpeedZeroOptimizer, "bit16_groups_flat", "the same memory, gathered by regions"),
        (DeepSpeedZeroOptimizer, "parallel_partitioned_bit16_groups", "what writes this rank's slices"),
        (DeepSpeedZeroOptimizer, "partition_size", "with the padding of regions"),
        (DeepSpeedZeroOptimizer, "params_in_partition", "parameters that this rank owns a part of"),
        (DeepSpeedZeroOptimizer, "round_robin_bit16_offsets", "where parameters are"),
        (BF16_Optimizer, "bf16_groups_flat", "the same memory, gathered by regions"),
        (BF16_Optimizer, "bf16_partitioned_groups", "what writes this rank's slices"),
        (BF16_Optimizer, "fp32_groups_gradient_flat_partition", "this rank's slices, moved together"),
        (BF16_Optimizer, "fp32_groups_gradients_flat", "none: nothing needs zeros there"),
    )
)
BF16_FLATS, BF16_PARTITIONS, BF16_PARTITION_OF_GRADIENTS, BF16_ALL_GRADIENTS = _OF_BF16
BF16_NORM = Change(
    BF16_Optimizer,
    "get_grads_for_norm",
    instead="the norm over the ranks that share gradients",
    why="each of them has its partition alone",
    during=REDUCER,
)
METHODS_OF_PARTITIONS = {
    optimizer: (
        Change(
            optimizer,
            "state_dict",
            instead="the same of partitions moved back",
            why="checkpoints are in DeepSpeed's layout",
            during=REDUCER,
        ),
        Change(
            optimizer,
            "load_state_dict",
            instead="the same between moving everything back and here",
            why="checkpoints are in DeepSpeed's layout",
            during=REDUCER,
        ),
        Change(
            optimizer,
            "_restore_from_bit16_weights",
            instead="the same by slices",
            why=_OUR_LAYOUT,
            during=REDUCER,
        ),
    )
    for optimizer in (DeepSpeedZeroOptimizer, BF16_Optimizer)
}
OFFLOAD_STATES = Change(
    DeepSpeedZeroOptimizer,
    "offload_states",
    instead="a refusal",
    why="it cuts flat tensors anew, in DeepSpeed's layout",
    during=REDUCER,
)
PARAMETERS = Change(
    nn.Module,
    "_parameters",
    instead="on each module, a dictionary that waits for what is on its way",
    why="parameters arrive during the next forward pass",
    during="overlap_parameters",
)
COMPILE = Change(
    DeepSpeedEngine,
    "compile",
    instead="the same after parameters arrive in the step again",
    why="compiled code does not look parameters up",
    during="overlap_parameters",
)
TAKE_STEP = Change(
    DeepSpeedEngine,
    "_take_model_step",
    instead="the same if the reducer has finished",
    why="a release whose engine no longer calls the names above would step on this rank's own gradients",
    during=REDUCER,
)
STEP, TRAIN_BATCH = (
    Change(
        engine,
        name,
        instead="the same, then, every so many steps, a comparison of replicas",
        why="to find the step after which replicas differ",
        during="check_replicas(engine, every=N) is in force",
    )
    for engine, name in ((DeepSpeedEngine, "step"), (PipelineEngine, "train_batch"))
)
FORWARD = Change(
    DeepSpeedEngine,
    "forward",
    instead="the same after the reducer has given up a step that an exception ended",
    why="an exception in backward leaves a step unfinished, and the engine trains on",
    during=REDUCER,
)
EXECUTE_SCHEDULE = Change(
    PipelineEngine,
    "_exec_schedule",
    instead="the same after the reducer has given up a step that an exception ended",
    why="an exception in backward leaves a step unfinished, and the engine trains on",
    during=REDUCER,
)
INSTRUCTIONS = Change(
    PipelineEngine,
    "_INSTRUCTION_MAP",
    instead="BackwardPass and ReduceTiedGrads that tell the reducer",
    why="only the schedule knows the last micro-batch, and function objects in the map cannot be overridden",
    during=REDUCER,
)

ROWS: tuple[Change | Reliance, ...] = (
    *(row for row in list(globals().values()) if isinstance(row, Change)),
    *ENTRIES_OF_ENGINES,
    *STEPS_OF_PIPELINES,
    *NAMES_OF_TOPOLOGIES,
    *LONG_SEQUENCES,
    *GATHERS,
    *ZERO_GRADS,
    *(row for rows in METHODS_OF_PARTITIONS.values() for row in rows),
    Reliance(deepspeed_groups, "_EXPERT_PARALLEL_GROUP", "where MoE layers find groups; entries by name"),
    Reliance(deepspeed_groups, "_EXPERT_PARALLEL_GROUP_RANKS", "entries by name"),
    Reliance(deepspeed_groups, "_EXPERT_DATA_PARALLEL_GROUP", "entries by name"),
    Reliance(deepspeed_groups, "_EXPERT_DATA_PARALLEL_GROUP_RANKS", "entries by name"),
    Reliance(deepspeed_groups, "_get_expert_parallel_group_dict", "the sizes that have groups"),
    Reliance(deepspeed_groups, "_get_expert_parallel_group", "the group of a name"),
    Reliance(deepspeed_groups, "_get_expert_data_parallel_group_dict", "the reducer's groups of experts"),
    Reliance(deepspeed_groups, "_get_sequence_data_parallel_group", "the reducer's group in a plain engine"),
    Reliance(deepspeed_groups, "_get_zero_param_intra_parallel_group", "whether there is a second partition"),
    Reliance(deepspeed_groups, "_create_zero_param_parallel_group", "for an mpu that is no grid"),
    Reliance(deepspeed_groups, "_get_local_all_to_all_group", "for topologies of data alone"),
    Reliance(DeepSpeedEngine, "_config", "the engine's options"),
    Reliance(DeepSpeedEngine, "_get_ckpt_name", "the path that load_checkpoint() returns"),
    Reliance(DeepSpeedConfig, "_param_dict", "sections and options that DeepSpeed itself does not read"),
    Reliance(DeepSpeedEngine, "_global_grad_norm", "what get_global_grad_norm() answers"),
    Reliance(pipe_module.PipelineModule, "_grid", "the grid that a module was built on"),
    Reliance(pipe_module.PipelineModule, "_layer_specs", "which layers are tied"),
    Reliance(pipe_module.PipelineModule, "_synchronize_tied_weights", "overridden: without a warning"),
    Reliance(_BaseDataLoaderIter, "_dataset", "whether its length is known"),
    Reliance(_BaseDataLoaderIter, "_num_yielded", "how many batches it has left"),
    Reliance(DeepSpeedZeroOptimizer_Stage3, "_z3_optimizer", "whether a partitioned parameter belongs to an engine"),
    Reliance(
        DeepSpeedZeroOptimizer_Stage3,
        "_reassign_or_swap_out_partitioned_parameters",
        "gives a sub-group's parameters their master weights",
    ),
    Reliance(DeepSpeedEngine, "inside_no_sync_ctxt", "which backward is the last one"),
    Reliance(DeepSpeedEngine, "gate_modules", "gates that get PAD_CAPACITY"),
    Reliance(BF16_Optimizer, "bf16_groups", "the parameters behind the buffers"),
    Reliance(BF16_Optimizer, "fp32_groups_gradients", "the buffers that gradients accumulate in"),
    Reliance(BF16_Optimizer, "fp32_groups_has_gradients", "flags of filled buffers"),
    Reliance(BF16_Optimizer, "create_grad_acc_hooks", "to give its hooks back"),
    *(
        Reliance(optimizer, name, use)
        for optimizer in (BF16_Optimizer, DeepSpeedZeroOptimizer)
        for name, use in (
            ("_link_all_hp_params", "links parameters and partitions when DeepSpeed's layout is back"),
            ("_lazy_init_hp_params_optimizer_state", "the same of optimizer states"),
            ("_hp_optimizer_states_linked", "whether these are linked"),
            ("real_dp_process_group", "the ranks that share each flat tensor"),
        )
    ),
    Reliance(BF16_Optimizer, "fp32_groups_flat_partition", "master weights"),
    Reliance(BF16_Optimizer, "grad_acc_dtype", "what gradients accumulate in"),
    Reliance(BF16_Optimizer, "_uses_muon", "whether it needs whole gradients"),
    Reliance(DeepSpeedZeroOptimizer, "single_partition_of_fp32_groups", "master weights"),
    Reliance(DeepSpeedZeroOptimizer, "bit16_groups", "the parameters behind the flat tensors"),
    Reliance(DeepSpeedZeroOptimizer, "round_robin_bit16_groups", "their order there"),
    Reliance(DeepSpeedZeroOptimizer, "_is_muon_group", "whether it needs whole gradients"),
    Reliance(tensor_fragment, "hp_fragment_address", "what safe_get_full_fp32_param and its like look up"),
    Reliance(mixed_precision_linkage, "link_hp_params", "sets _hp_mapping and _index_in_param_group on parameters"),
    Reliance(FP16_UnfusedOptimizer, "fp16_groups", "the parameters whose marks its gradients get"),
    Reliance(DeepSpeedZeroOptimizer, "overlapping_partition_gradients_reduce_epilogue", "collects the partition"),
    Reliance(DeepSpeedZeroOptimizer, "use_separate_grad_accum", "whether stage 1 accumulates in a second data type"),
    Reliance(DeepSpeedZeroOptimizer, "averaged_gradients", "the partition of gradients, for their norm"),
    Reliance(DeepSpeedZeroOptimizer, "params_in_partition", "their parameters"),
    Reliance(DeepSpeedZeroOptimizer, "norm_for_param_grads", "norms of offloaded gradients"),
    Reliance(DeepSpeedZeroOptimizer, "get_param_id", "the key of those norms"),
    Reliance(DeepSpeedZeroOptimizer, "_zero_padding", "what of the partition is no gradient", releases=">=0.19.7"),
)
