"""List what ds_topo patches in DeepSpeed, and the private names that it relies on.

Methods of engines and optimizers are no patches: objects get classes with other ones (:mod:`ds_topo.base.classes`).
What is listed here are names of classes and modules that DeepSpeed looks up itself, and methods of single objects
during one call. The module that holds a replacement binds it by the name of its row (see :mod:`ds_topo.base.ledger`). A
row that changes a class or module for longer than one call says why in ``process_wide``. ``python -m tests.names``
prints all rows and overridden methods, and shows what another release of DeepSpeed changes about them. Modules that are
imported late have their rows where they are bound: AutoSP's in ``engine/autoparallel.py``, accelerate's in
``engine/use.py``. Names that some supported releases lack are found here, and imported from here by all other modules.
"""

from __future__ import annotations

from dataclasses import replace

from ds_topo.base.ledger import Patch, Reliance, find, is_absent, read_table

USE = "ds_topo.use(grid) is active"


# -- names that some supported releases lack: an absent class has no objects -------------------------------------------

DualPipeVEngine = find("deepspeed.runtime.pipe.dualpipev.DualPipeVEngine")
StockDualPipeVModule = find("deepspeed.runtime.pipe.dualpipev.DualPipeVModule")
FoldingGroupTables = find("deepspeed.module_inject.auto_ep_folding.FoldingGroupTables")
validate_autoep_config = find("deepspeed.module_inject.auto_ep_config.validate_autoep_config")
is_functorch_transforming = find("deepspeed.utils.torch.is_functorch_transforming")
BF16_DISCARDS_INFINITIES = not is_absent(find("deepspeed.runtime.utils.is_invalid_grad_norm"))
"""True if ``BF16_Optimizer`` discards gradients that are not finite, as it does from DeepSpeed 0.19.8 on."""


# -- engines of a grid -------------------------------------------------------------------------------------------------

CONSTRUCT_ENGINE = Patch(
    find("deepspeed.runtime.engine.DeepSpeedEngine"),
    "__init__",
    instead="The same. An engine whose mpu is a grid has a class of ours. An engine without a grid is refused if its "
    "model was made for one.",
    why="DeepSpeed's engines assume an order of ranks that a grid may not have.",
    during="a PipelineParallelGrid exists, or ds-topo verify records a run",
    process_wide="deepspeed.initialize builds the engine itself: no object exists before the constructor runs.",
)
READ_CONFIG = Patch(
    find("deepspeed.runtime.config.DeepSpeedConfig"),
    "__init__",
    instead="The same, after a check of the batch sizes and sections of a config whose mpu is a grid.",
    why="DeepSpeed does not say which axes the ranks of its batch sizes are along, and fails on values of other types "
    "without naming them.",
    during="a PipelineParallelGrid exists",
    process_wide="deepspeed.initialize reads the config before it builds the engine.",
)
SOURCE_OF_SLICES = Patch(
    find("deepspeed.utils.groups"),
    "get_tensor_model_parallel_src_rank",
    instead="The first rank of the group along model.",
    why="DeepSpeed returns rank // n * n, which is in another group if the ranks along model are no neighbors.",
    during="a grid with slices exists",
    process_wide="Programs call it to broadcast the samples of AutoTP.",
)

# -- one call of an engine ---------------------------------------------------------------------------------------------

FOLDING_TABLES = Patch(
    find("deepspeed.module_inject.auto_ep_folding"),
    "expected_folding_group_tables",
    instead="A function that returns the tables of the grid.",
    why="AutoEP with AutoTP compares its groups with tables of neighboring ranks.",
    during="one call of an engine's constructor",
)

# -- optimizers --------------------------------------------------------------------------------------------------------

GATHER_PARAMETERS = Patch(
    find("deepspeed.runtime.utils"),
    "all_gather_into_tensor_dp_groups",
    instead="A gather that sends slices point to point on gloo.",
    why="gloo's all_gather uses a link in one direction at a time.",
    during="one call of the optimizer's step() or update_lp_params()",
)

# -- checkpoints -------------------------------------------------------------------------------------------------------

WRITE_FILE = Patch(
    find("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"),
    "save",
    instead="The same. It records each written file, and keeps an exception until all ranks know of it.",
    why="If one rank cannot write, the others would wait for it at the end of save_checkpoint().",
    during="one call of save_checkpoint()",
)
MAKE_FOLDER = Patch(
    find("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine"),
    "makedirs",
    instead="The same. It keeps an exception until all ranks know of it.",
    why="The others would wait at the start of save_checkpoint().",
    during="one call of save_checkpoint()",
)
COPY_SCRIPTS = Patch(
    find("deepspeed.runtime.engine.DeepSpeedEngine"),
    "_copy_recovery_script",
    instead="The same. It keeps an exception until all ranks know of it.",
    why="Rank 0 copies zero_to_fp32.py while the others wait at the end of save_checkpoint().",
    during="one call of save_checkpoint()",
)
WRITER_OF_EXPERTS = Patch(
    find("deepspeed.utils.groups"),
    "_get_expert_data_parallel_rank",
    instead="A function that returns 0 on the writer of each slice and 1 on other ranks.",
    why="In DeepSpeed only expert data parallel rank 0 writes.",
    during="one call of save_checkpoint()",
)
WRITER_OF_FOLDED_EXPERTS = Patch(
    find("deepspeed.utils.groups"),
    "_get_data_parallel_rank",
    instead="The same on the writer of each slice of experts, and a number above all ranks on others.",
    why="With AutoEP and AutoTP, several replicas of an expert would write the same file.",
    during="one call of save_checkpoint()",
)
TORCH_LOAD = Patch(
    find("torch"),
    "load",
    instead=(
        "The same with weights_only=True, on the thread that loads a checkpoint, and for its files on all threads."
    ),
    why="DeepSpeed passes weights_only=False, which runs any code that a file contains.",
    during="one call of load_checkpoint()",
)
WEIGHTS_OF_LATEST = Patch(
    find("deepspeed.runtime.engine"),
    "get_fp32_state_dict_from_zero_checkpoint",
    instead="The same for the tag that is being loaded.",
    why="Without optimizer states, ZeRO-3 reads the checkpoint that 'latest' names, whatever tag was asked for.",
    during="one call of load_checkpoint()",
)

# -- pipelines ---------------------------------------------------------------------------------------------------------

PIPELINE_GRID = Patch(
    find("deepspeed.runtime.pipe.module"),
    "PipelineParallelGrid",
    instead="A function that returns our grid.",
    why="PipelineModule has no argument for a grid, and creates the groups of tied layers with the one it makes.",
    during="one call of PipelineModule's constructor",
)
PIPELINE_GROUPS = Patch(
    find("deepspeed.comm"),
    "new_group",
    instead=(
        "The world's own group, for the first group if it is of all ranks in ascending order. Groups of stages are "
        "created by their members alone."
    ),
    why=(
        "PipelineModule clones the world's group, which opens connections between all ranks and never uses them. It "
        "creates the groups of all tied layers on every rank."
    ),
    during="one call of PipelineModule's constructor",
)

# -- ds_topo.use(grid) -------------------------------------------------------------------------------------------------


def _in_use(owner: str, name: str, instead: str, why: str) -> Patch:
    asked_for = "ds_topo.use(grid) asks for it: programs call these names before any object exists."
    return Patch(find(owner), name, instead, why, during=USE, process_wide=asked_for)


def _renamed(name: str) -> Patch:
    """Return the row of a class of DeepSpeed for which ds_topo has one of the same name."""
    return _in_use("deepspeed.runtime.pipe.topology", name, f"ds_topo.{name}.", "Programs import them from there.")


INITIALIZE = _in_use(
    "deepspeed",
    "initialize",
    "ds_topo.initialize, with the grid in use as mpu.",
    "Trainer, accelerate and other programs call it themselves, without an mpu or with their own.",
)
CONSTRUCT_PIPELINE = _in_use(
    "deepspeed.runtime.pipe.module.PipelineModule",
    "__init__",
    "The same on the grid in use, after a comparison of the topologies.",
    "Programs derive from PipelineModule before a grid exists.",
)
PROCESS_TOPOLOGY = _renamed("ProcessTopology")
PIPE_DATA_TOPOLOGY = _renamed("PipeDataParallelTopology")
PIPE_MODEL_DATA_TOPOLOGY = _renamed("PipeModelDataParallelTopology")
GRID = _renamed("PipelineParallelGrid")
ZERO_INIT = _in_use(
    "deepspeed.runtime.zero.partition_parameters.Init",
    "__init__",
    "The same over the data parallel group of the grid in use.",
    "Without a group, as from_pretrained() calls it, it partitions over all ranks of the world.",
)
MODIFIED_BY_ONE = _in_use(
    "deepspeed.runtime.zero.partition_parameters.GatheredParameters",
    "__exit__",
    "The same, but first the rank modifier_rank of the grid sends parameters that are equal on all slices to them.",
    "from_pretrained() fills parameters on rank 0 alone. DeepSpeed sends them to the replicas of rank 0 only.",
)
INFERENCE_GROUP = _in_use(
    "deepspeed.inference.engine.InferenceEngine",
    "_create_model_parallel_group",
    "A method that sets the group along model of the grid in use.",
    "DeepSpeed joins the first ranks of the job; other ranks are in no group.",
)
SEQUENCE_GROUP = _in_use(
    "deepspeed.runtime.sequence_parallel.parallel_state_sp",
    "_SEQUENCE_PARALLEL_GROUP",
    "The group of the grid along seq.",
    "DeepSpeed joins neighboring ranks of the world.",
)
SEQUENCE_DATA_GROUP = replace(
    SEQUENCE_GROUP, name="_SEQUENCE_DATA_PARALLEL_GROUP", instead="The data parallel group of the grid."
)
INITIALIZE_SEQUENCES = replace(
    SEQUENCE_GROUP, name="initialize_sequence_parallel", instead="A function that finds the groups already there."
)

# -- experts -----------------------------------------------------------------------------------------------------------

GATHER_TOKENS = Patch(
    find("deepspeed.moe.mappings"),
    "_gather_tokens",
    instead="An all_gather into a list, if the current mpu is a grid.",
    why="gloo refuses DeepSpeed's flat buffer.",
    during="expert groups exist",
    process_wide="MoE layers look it up in their module, also in a backward pass that no engine has started.",
)

# -- recorded runs -----------------------------------------------------------------------------------------------------

DROPOUT = Patch(
    find("torch.nn.functional"),
    "dropout",
    instead="The input itself.",
    why="Ranks of another layout draw other random numbers, so results with dropout differ.",
    during="ds-topo verify --no-dropout runs a program",
    process_wide="Modules and programs call it by name.",
)
ATTENTION_DROPOUT = replace(
    DROPOUT, name="scaled_dot_product_attention", instead="The same function without dropout of attention weights."
)
CONFIGURE = Patch(
    find("deepspeed.runtime.config.DeepSpeedConfig"),
    "__init__",
    instead="The same. AutoTP, and ZeRO 1 and 2 in fp32, are removed from the config, and autoep_size is 1.",
    why="A reference must not depend on the slices, partitions and groups that it checks.",
    during="ds-topo verify runs a reference",
    process_wide="DeepSpeed reads the config before the engine exists, and programs create layers by this name.",
)
LOCAL_EXPERTS = replace(
    CONFIGURE,
    owner=find("deepspeed.moe.layer.MoE"),
    instead="The same with ep_size 1, so that each process has all experts.",
)

# -- private names ---------------------------------------------------------------------------------------------------

_RELIANCES = """
deepspeed.utils.groups
  mpu: is set to the mpu of the engine that is running
  expert_tensor_parallel_world_size: is set to the degree of slicing of that engine's experts
  _TENSOR_MODEL_PARALLEL_GROUP: is set to the group along model of that engine's grid, for AutoTP
  _MODEL_PARALLEL_GROUP: is set to the same group
  _DATA_PARALLEL_GROUP: is set to the data parallel group of that engine's grid
  _WORLD_GROUP: exists if there has been an engine without an mpu
  _EXPERT_PARALLEL_GROUP: gets an entry per name, which MoE layers look up
  _EXPERT_PARALLEL_GROUP_RANKS: gets an entry per name
  _EXPERT_DATA_PARALLEL_GROUP: gets an entry per name
  _EXPERT_DATA_PARALLEL_GROUP_RANKS: gets an entry per name
  _ZERO_PARAM_INTRA_PARALLEL_GROUP: is set to a group inside the data parallel group
deepspeed.runtime.engine.DeepSpeedEngine
  _config: holds the engine's options
  _consolidated_16bit_state_dict: gathers what AutoTP has split
  _get_ckpt_name: returns the path that load_checkpoint() returns
  _global_grad_norm: is what get_global_grad_norm() returns
  inside_no_sync_ctxt: tells which backward pass is the last one
  _is_gradient_accumulation_boundary: tells whether the program says which micro-batch is the last one
deepspeed.runtime.base_optimizer.ZeROOptimizer
  _backward_hook_state: tells which backward pass has been prepared, and whether one is running
deepspeed.runtime.torch_autocast
  TORCH_AUTOCAST_INITIALIZED: is False while an engine is built, until its own config sets it
  TORCH_AUTOCAST_DTYPE: has the value of before when the engine is built
deepspeed.runtime.config.DeepSpeedConfig
  _param_dict: holds sections and options that DeepSpeed itself does not read
deepspeed.runtime.pipe.module.PipelineModule
  _layer_specs: tells which layers are tied
  _synchronize_tied_weights: compares weights first, and suppresses a warning
  _local_start: is the first layer of a stage, for messages
  _local_stop: tells whether a stage sends its outputs
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
  _z3_optimizer: tells whether a partitioned parameter belongs to an engine
  _finalize_offload_gradient_accumulation: hands gradients to an offloaded optimizer after their sum, or those left out
  _offload_boundary_param_ids: has the parameters that got a gradient in this step
  _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: holds the gradients of this rank's partition
  micro_step_id: tells whether gradients are added to earlier ones
  fp16_partitioned_groups_flat: holds this rank's parameters
  fp32_partitioned_groups_flat: holds master weights
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer deepspeed.runtime.bf16_optimizer.BF16_Optimizer
  _link_all_hp_params: links parameters and partitions when DeepSpeed's layout is back
  real_dp_process_group: lists the group that shares each flat tensor
deepspeed.runtime.bf16_optimizer.BF16_Optimizer
  bf16_groups: lists the parameters of each flat tensor
  fp32_groups_gradients: lists the buffers in which gradients accumulate
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
  ipg_buckets: lists the gradients that are reduced next
  use_grad_accum_attribute: tells which attribute of a parameter holds its gradient
  bit16_groups: lists the parameters of each flat tensor
  round_robin_bit16_groups: lists them in the order of the flat tensor
  averaged_gradients: holds the partition of gradients, for their norm
  params_in_partition: lists the parameters of that partition
  independent_gradient_partition_epilogue: collects the partition of an optimizer that needs whole matrices
  _hp_optimizer_states_linked: tells whether states are linked to parameters
  _lazy_init_hp_params_optimizer_state: links them
  _optimizer_step: steps on one group, in the step of our own
  norm_for_param_grads: holds the norms of offloaded gradients
  _offload_accumulated_param_ids: has the parameters with offloaded gradients of this step
  _finalize_cpu_offload_gradient_accumulation: hands gradients to an offloaded optimizer
  accumulated_grads_in_cpu: holds the sum of the gradients of earlier micro-batches
  grad_position: tells where gradients are in the partition
  micro_step_id: tells whether gradients are added to earlier ones
  get_param_id: returns the key of those norms
  all_grad_tensors: holds the whole gradients of which Muon makes updates
  _create_param_mapping: tells for checkpoints where parameters are in partitions
  _param_slice_mappings: holds that
  _create_optimizer_mapping: links parameters to an offloaded optimizer
  _zero_padding >=0.19.7: marks gradients that are padding
deepspeed.runtime.zero.parameter_offload
  FWD_MODULE_STACK: keeps the module of each engine, which destroy() removes
deepspeed.runtime.zero.partition_parameters.GatheredParameters
  src_rank: is the rank whose changes of parameters count
deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator
  _PartitionedParameterCoordinator__step_id: counts the modules that have gathered their parameters
  _PartitionedParameterCoordinator__submodule_order: lists them while ZeRO 3 learns their order
deepspeed.utils.tensor_fragment.tensor_fragment
  hp_fragment_address: is what safe_get_full_fp32_param and similar functions look up
deepspeed.utils.mixed_precision_linkage
  link_hp_params: sets _hp_mapping and _index_in_param_group on parameters
  lazy_init_hp_params_optimizer_state: links parameters to optimizer states
deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer
  fp16_groups: lists the parameters of each flat gradient
  fp16_groups_flat: holds the parameters
deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer
  fp16_groups: lists the parameters whose marks gradients get
  loss_scale_config: holds the loss scale
  _global_grad_norm: is the norm that the engine reports
"""
PATCHES = tuple(value for value in list(globals().values()) if isinstance(value, Patch))
ROWS: tuple[Patch | Reliance, ...] = (
    *PATCHES,
    *(Reliance(owner, name, f"It {use}.", releases=releases) for owner, name, use, releases in read_table(_RELIANCES)),
)
