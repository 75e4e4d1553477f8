"""List what ds_topo patches in DeepSpeed, and the private names that it relies on, one row each.

The module that holds a replacement binds its row (see :mod:`ds_topo.ledger`). Most patches are bound to one engine, its
optimizer or its module. A row that changes a class or module for longer than one call says why in ``process_wide``.
``python -m ds_topo.engine`` prints all rows, and shows what another release of DeepSpeed changes about them.

:func:`~ds_topo.ledger.read_table` says how to read the tables.
"""

from __future__ import annotations

from ds_topo.ledger import Patch, Reliance, patches_of, read_table

USE = "ds_topo.use(grid) is active"


# -- engines and optimizers of a grid ---------------------------------------------------------------------------------

CONSTRUCT_ENGINE, SOURCE_OF_SLICES = patches_of("""
    while: a PipelineParallelGrid exists
    process-wide because: deepspeed.initialize builds the engine itself: no object exists before the constructor runs.
    deepspeed.runtime.engine.DeepSpeedEngine
      __init__: The same, and patches of an engine whose mpu is a grid. Others may not have an mpu or model for a grid.
        DeepSpeed's engines assume an order of ranks that a grid may not have.
    while: a grid with slices exists
    process-wide because: Programs call it to broadcast the samples of AutoTP.
    deepspeed.utils.groups
      get_tensor_model_parallel_src_rank: The first rank of the group along model.
        DeepSpeed returns rank // n * n, which is in another group if the ranks along model are no neighbors.
""")
(
    SANITY_CHECK,
    EXPERT_PARALLEL,
    TENSOR_PARALLEL_STATES,
    CONFIGURE_MODEL,
    CONFIGURE_OPTIMIZER,
    *CONFIGURE_PARTITIONS,
) = patches_of("""
    while: one call of an engine's constructor
    deepspeed.runtime.engine.DeepSpeedEngine
      _do_sanity_check: The same after checks of options and inputs. All ranks compare the results.
        hpZ, qgZ, AutoSP, ALST and the hybrid engine join neighboring ranks, whatever the mpu is.
      _configure_expert_parallel: The same after the expert groups of the grid were created.
        AutoEP would create groups of neighboring ranks, and refuses an mpu with slices even if AutoTP makes them.
      _configure_tensor_parallel_states: The same. The engine then has its grid as its mpu again.
        AutoTP makes the module deepspeed.utils.groups the mpu of the engine.
      _configure_distributed_model: The same after replicas have compared models, and all stages have expert groups.
        DeepSpeed broadcasts parameters here, which hides replicas that were built differently.
      _configure_optimizer: In a pipeline, the same with a placeholder in each group without a trainable parameter.
        A stage without trainable parameters, or without those of a group, fails alone.
      _configure_zero_optimizer: The same with the group along the axis shard.
      _configure_bf16_optimizer: The same with the group along the axis shard.
        DeepSpeed partitions over all replicas.
""")
FOLDING_TABLES, MODULE_STATES = patches_of("""
    while: one call of an engine's constructor
    deepspeed.module_inject.auto_ep_folding
      expected_folding_group_tables: A function that returns the tables of the grid.
        AutoEP with AutoTP compares its groups with tables of neighboring ranks.
    while: one call of save_16bit_model()
    deepspeed.runtime.engine.DeepSpeedEngine
      module_state_dict: The same with whole weights.
        With AutoTP, DeepSpeed writes the slice of rank 0 alone.
""")
FORWARD_ON_GRID, BACKWARD_ON_GRID, STEP_ON_GRID, BACKWARD_PROLOGUE, BACKWARD_EPILOGUE, AUTOSP_BACKEND = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.engine.DeepSpeedEngine
      forward: The same with the engine's own mpu, a comparison of the first samples, and hooks of the outputs.
      backward: The same with the engine's own mpu. It refuses gradients that the step cannot take any more.
      step: The same with the engine's own mpu, and now and then a comparison of steps while a watch is on.
        DeepSpeed's functions ask one mpu for all engines of a process, the mpu of the engine that was built last.
      _backward_prologue: The same once in each backward pass, and the engine's own mpu is current from here.
      _backward_epilogue: The same, and the engine's own mpu is current until here.
        A program may call loss.backward() itself, for several losses, or a loss of several forward passes.
      get_autosp_backend: The same, whose graphs use the groups along seq and the index along seq.
        AutoSP joins neighboring ranks, whatever the mpu is.
""")
TRAIN_BATCH_ON_GRID, EVAL_BATCH_ON_GRID, NEXT_BATCH, CHECKED_SENDS, BUFFERS_BY_TYPE = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.pipe.engine.PipelineEngine
      train_batch: The same with the engine's own mpu. It starts on all ranks or on none.
      eval_batch: The same with the engine's own mpu. It starts on all ranks or on none.
        If one rank runs out of samples within a step, the others wait for its activations without end.
      _next_batch: The same. It also takes a digest of the first batches.
        First and last stages, and model parallel peers, read samples independently and must read the same.
      _INSTRUCTION_MAP: The same map with a SendActivation that raises if shapes differ from those that it has sent.
        The next stage has allocated its buffers for these. It would use old rows of a larger one.
      _allocate_or_extend_buffers: The same, and a buffer of another type is replaced.
        DeepSpeed returns a buffer of any type that is large enough.
""")
LOADER_OF_SHARES, OWN_SAMPLES = patches_of("""
    while: an engine's constructor runs, and then while the grid of the engine exists
    deepspeed.runtime.engine.DeepSpeedEngine
      deepspeed_io: The same for this rank's share of samples. A sampler for data efficiency sends them to all ranks.
        It divides samples by a group that counts peers along seq, and sends from rank 0 to a group that may lack it.
    deepspeed.runtime.pipe.engine.PipelineEngine
      _build_data_iter: The same for this rank's share of samples, on stages that read samples.
        The mpu of a pipeline counts peers along seq, which would read different samples.
""")
SET_BATCH_SIZE, SET_MICRO_BATCH_SIZE, GRADIENT_OF_OUTPUT, COALESCE_ONCE, *ZERO_GRAD_OF_STEP = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.engine.DeepSpeedEngine
      set_train_batch_size: The same. The count of micro-batches then starts with the next step.
        A step ends where the count of all micro-batches is a multiple of the new number.
      set_train_micro_batch_size: The same without a loader of training_data, which it refuses.
        The loader keeps its size.
      _backward_prologue_per_tensor: The gradient itself, which hooks of the outputs divide.
        An output that depends on another output, or on one of another engine, would be divided twice.
      coalesce_grad_reduction: The same, once in a step at ZeRO 1 and 2.
        They would keep the gradients of the last one alone.
      zero_grad: The same, also of the partitions of ZeRO 3. The step may then have another backward pass.
        ZeRO keeps the gradients of a second backward pass alone, or adds them to discarded ones, which is refused.
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      zero_grad: The same. The step may then have another backward pass.
        Programs discard gradients by the optimizer's method, too.
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
      zero_grad: The same. The step may then have another backward pass.
        Programs discard gradients by the optimizer's method, too.
""")
AVERAGE_AND_SCATTER, PARTITION_GRADIENTS, END_OF_REDUCTION, STEP_ON_SUMS, OVERFLOW_OF_COPIES = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
      _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads: The same times the degree of the axis seq.
        ZeRO-3 averages gradients over seq here. Every other path of DeepSpeed sums them.
      partition_grads: The same. It clears gradients of an earlier step, and with an axis shard sums over copies.
      independent_gradient_partition_epilogue: With an axis shard, the same and a wait for these sums.
        DeepSpeed does not sum over the ranks that hold the same partition.
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      step: The same after gradients left out were handed over with offload, and with an axis shard summed over copies.
        DeepSpeed does not sum over the ranks that hold the same partition.
      has_overflow: With an axis shard, the same over all replicas.
        Experts may overflow on any replica.
""")
ACCUMULATE_OFFLOADED, STEP_ON_USED_PARTITIONS = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      async_accumulate_grad_in_cpu_via_gpu: With offload, the same after its memory was cleared, once per step.
        Memory of gradients still has those of an earlier step if a micro-batch does not use a parameter.
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
      step: The same after gradients of unused parameters were cleared, or handed to an offloaded optimizer.
        Memory of gradients still has those of an earlier step if a micro-batch does not use a parameter.
""")
(
    REDUCE_COALESCED,
    REDUCE_IN_ORDER,
    REDUCE_BUCKET,
    STEP_AFTER_COMPARISON,
    REDUCE_PARTITIONED_BUCKET,
    REDUCE_LAST_BUCKETS,
) = patches_of("""
    while: the grid of an engine exists that reduces gradients in buckets
    deepspeed.runtime.engine.DeepSpeedEngine
      _flush_coalesced_reduction_zero12: The same with gradients of zeros where this rank has none.
        DeepSpeed leaves them out, so ranks that use other parameters sum gradients of different ones, or fail.
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      reduce_gradients: At stage 1, the same with gradients of zeros where this rank has none.
        DeepSpeed leaves them out, so ranks that use other parameters sum gradients of different ones, or fail.
      reduce_ipg_grads: The same after a comparison of the bucket's parameters.
      step: The same after the comparisons of this step were read.
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
      _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads: The same after a comparison of the parameters.
      independent_gradient_partition_epilogue: The same. Comparisons are read here, where it waits for the device.
        Ranks reduce a bucket by places. Those that use other parameters, or another order, would mix them up.
""")
(MODEL_STEP,) = patches_of("""
    while: the grid of the engine exists, for warnings of the first step and of steps of the optimizer
    deepspeed.runtime.engine.DeepSpeedEngine
      _take_model_step: The same. The first one compares the samples of replicas. It tells its steps from others.
        Equal samples give equal gradients. optimizer.step() without engine.step() counts no micro-batches.
""")
(STEP_ON_WRITTEN,) = patches_of("""
    while: the grid of an engine with master weights exists
    deepspeed.runtime.engine.DeepSpeedEngine
      _take_model_step: The same after parameters that the program has written were copied to the master weights.
        The optimizer overwrites parameters by its own copy, so what was written since the last step would be lost.
""")
ZERO_NORM, LOSS_SCALER, CLIP_FP32, UNFUSED_CLIP, FUSED_CLIP, BF16_GRADIENTS = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      scaled_global_norm: ds_topo.engine.norms.zero_gradient_norm.
        ZeRO-1 and 2 count the experts of the first slice only, and hang where stages differ in parameter groups.
    deepspeed.runtime.engine.DeepSpeedEngine
      torch_autocast_z0_gradscaler: In fp16 without ZeRO, an object that multiplies losses by the loss scale.
        The optimizers divide gradients by it, but backward() multiplies losses for ZeRO only.
      clip_fp32_gradients: ds_topo.clip_grad_norm_.
        Without ZeRO, the norm is not kept, counts one stage, and is averaged over ranks with different experts.
    deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer
      unscale_and_clip_grads: The same by our unfused_gradient_norm, on stages or slices and with experts.
        Its norm omits experts. It is that of gradients, which lack the marks of slices and of tied copies.
    deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer
      unscale_and_clip_grads: With experts, the same by our fused_gradient_norm.
        What slices of an expert replicate counts on each slice.
    deepspeed.runtime.bf16_optimizer.BF16_Optimizer
      get_grads_for_norm: With experts, our norm as the only gradient. Otherwise the same, with a zero if none counts.
        What slices of an expert replicate counts on each slice. It fails on slices where no gradient counts.
""")
GATHERING_METHODS = patches_of("""
    while: the grid of the engine exists, and no GradientReducer is attached
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
      step: The same with our all_gather_dp_groups in force.
      update_lp_params: The same with our all_gather_dp_groups in force.
    deepspeed.runtime.bf16_optimizer.BF16_Optimizer
      update_lp_params: The same with our all_gather_dp_groups in force.
        These methods gather updated parameters.
""")
GATHERS = patches_of("""
    while: one call of the optimizer's step() or update_lp_params()
    deepspeed.runtime.zero.stage_1_and_2 deepspeed.runtime.bf16_optimizer
      all_gather_dp_groups: A gather that sends slices point to point on gloo.
        gloo's all_gather uses a link in one direction at a time.
""")

# -- checkpoints ------------------------------------------------------------------------------------------------------

SAVE_CHECKPOINT, LOAD_CHECKPOINT, SAVE_16_BIT, SAVE_PARTITIONS, LOAD_PARTITIONS, SAVE_EXPERTS = patches_of("""
    while: the grid of the engine exists
    deepspeed.runtime.engine.DeepSpeedEngine
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
""")
WRITE_FILE, MAKE_FOLDER, COPY_SCRIPTS, *STATES_TO_SAVE = patches_of("""
    while: one call of save_checkpoint()
    deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine
      save: The same. It records each written file, and keeps an exception until all ranks know of it.
        If one rank cannot write, the others would wait for it at the end of save_checkpoint().
      makedirs: The same. It keeps an exception until all ranks know of it.
        The others would wait at the start of save_checkpoint().
    deepspeed.runtime.engine.DeepSpeedEngine
      _copy_recovery_script: The same. It keeps an exception until all ranks know of it.
        Rank 0 copies zero_to_fp32.py while the others wait at the end of save_checkpoint().
    deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer deepspeed.runtime.bf16_optimizer.BF16_Optimizer
      state_dict: The same without partitions of dense parameters, except on the first replica of each partition.
        Each partition is saved once.
""")
WRITER_OF_EXPERTS, WRITER_OF_FOLDED_EXPERTS = patches_of("""
    while: one call of _save_moe_checkpoint()
    deepspeed.utils.groups
      _get_expert_data_parallel_rank: A function that returns 0 on the writer of each slice and 1 on other ranks.
        In DeepSpeed only expert data parallel rank 0 writes.
      _get_data_parallel_rank: The same on the writer of each slice of experts, and a number above all ranks on others.
        With AutoEP and AutoTP, several replicas of an expert would write the same file.
""")
TORCH_LOAD, STATES_TO_LOAD, WEIGHTS_OF_LATEST = patches_of("""
    while: one call of load_checkpoint()
    torch
      load: The same with weights_only=True, on the thread that loads a checkpoint, and for its files on all threads.
        DeepSpeed passes weights_only=False, which runs any code that a file contains.
    deepspeed.runtime.engine.DeepSpeedEngine
      _get_all_zero_checkpoint_state_dicts: The same. Dense partitions are from the file of their first replica.
        The file of this replica has only those of experts.
    deepspeed.runtime.engine
      get_fp32_state_dict_from_zero_checkpoint: The same for the tag that is being loaded.
        Without optimizer states, ZeRO-3 reads the checkpoint that 'latest' names, whatever tag was asked for.
""")

# -- pipelines --------------------------------------------------------------------------------------------------------

PIPELINE_GRID, PIPELINE_WORLD = patches_of("""
    while: one call of PipelineModule's constructor
    deepspeed.runtime.pipe.module
      PipelineParallelGrid: A function that returns our grid.
        PipelineModule has no argument for a grid, and creates the groups of tied layers with the one it makes.
    deepspeed.comm
      new_group: The world's own group, for the first group if it is of all ranks in ascending order.
        PipelineModule clones the world's group, which opens connections between all ranks and never uses them.
""")

# -- ds_topo.use(grid) ------------------------------------------------------------------------------------------------

INITIALIZE, NAME_OF_PIPELINES, CONSTRUCT_PIPELINE, TIED_MODULES, SET_BOUNDS, *NAMES_OF_TOPOLOGIES = patches_of("""
    while: ds_topo.use(grid) is active
    process-wide because: ds_topo.use(grid) asks for it: programs call these names before any object exists.
    deepspeed
      initialize: ds_topo.initialize, with the grid in use as mpu.
        Trainer, accelerate and other programs call it themselves, without an mpu or with their own.
    deepspeed.pipe
      PipelineModule: ds_topo.PipelineModule.
        Programs import it from there.
    deepspeed.runtime.pipe.module.PipelineModule
      __init__: The same on the grid in use, after a comparison of the topologies.
        Programs derive from PipelineModule before a grid exists.
      _index_tied_modules: A method that creates groups of the stages that share a layer, on these stages.
        DeepSpeed creates the groups of all ranks on every rank.
      _set_bounds: The same with Python's integers.
        Balanced partitions have NumPy's integers, which Python's random.seed() refuses under seed_layers=True.
    deepspeed.runtime.pipe.topology
      ProcessTopology: ds_topo.ProcessTopology.
      PipeDataParallelTopology: ds_topo.PipeDataParallelTopology.
      PipeModelDataParallelTopology: ds_topo.PipeModelDataParallelTopology.
      PipelineParallelGrid: ds_topo.PipelineParallelGrid.
        Programs import them from there.
""")
ZERO_INIT, MODIFIED, MODIFIED_BY_ONE, INFERENCE_GROUP, *LONG_SEQUENCES = patches_of("""
    while: ds_topo.use(grid) is active
    process-wide because: ds_topo.use(grid) asks for it: programs call these names before any object exists.
    deepspeed.runtime.zero.partition_parameters.Init
      __init__: The same over the data parallel group of the grid in use.
        Without a group, as from_pretrained() calls it, it partitions over all ranks of the world.
    deepspeed.runtime.zero.partition_parameters.GatheredParameters
      __init__: The same. It also stores modifier_rank.
        The replacement of __exit__ needs the number that was given.
      __exit__: The same after the rank modifier_rank of the grid has broadcast to all slices what they hold alike.
        from_pretrained() fills parameters on rank 0 alone. DeepSpeed sends them to the replicas of rank 0 only.
    deepspeed.inference.engine.InferenceEngine
      _create_model_parallel_group: A method that sets the group along model of the grid in use.
        DeepSpeed joins the first ranks of the job; other ranks are in no group.
    deepspeed.runtime.sequence_parallel.parallel_state_sp
      _SEQUENCE_PARALLEL_GROUP: The group of the grid along seq.
      _SEQUENCE_DATA_PARALLEL_GROUP: The data parallel group of the grid.
      initialize_sequence_parallel: A function that finds the groups already there.
        DeepSpeed joins neighboring ranks of the world.
""")

# -- experts ----------------------------------------------------------------------------------------------------------

GATHER_TOKENS, PAD_CAPACITY = patches_of("""
    while: expert groups exist
    process-wide because: MoE layers look it up in their module, also in a backward pass that no engine has started.
    deepspeed.moe.mappings
      _gather_tokens: An all_gather into a list, if the current mpu is a grid.
        gloo refuses DeepSpeed's flat buffer.
    while: the grid of the engine exists
    deepspeed.moe.sharded_moe.TopKGate
      _forward_hooks: The same hooks and one that rounds the capacity up, on each gate of an engine with slices.
        Model parallel peers split the slots of an expert evenly, and DeepSpeed asserts that they can.
""")

# -- the reducer ------------------------------------------------------------------------------------------------------

DESTROY_ENGINE, COALESCE, REDUCE_FALLBACK, TAKE_STEP, FORWARD, OWN_BACKWARD, OWN_STEP = patches_of("""
    while: a GradientReducer is attached
    deepspeed.runtime.engine.DeepSpeedEngine
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
""")
INSTRUCTIONS, EXECUTE_SCHEDULE = patches_of("""
    while: a GradientReducer is attached
    deepspeed.runtime.pipe.engine.PipelineEngine
      _INSTRUCTION_MAP: The same map with BackwardPass and ReduceTiedGrads that also call the reducer.
        Only the schedule knows the last micro-batch, and the map holds functions, which cannot be overridden.
      _exec_schedule: The same after the reducer has discarded a step that an exception has ended.
        An exception in backward leaves a step unfinished, and training may go on with the same engine.
""")
ZERO_GRAD, HP_GRADIENT = patches_of("""
    while: a GradientReducer is attached
    deepspeed.runtime.engine.DeepSpeedEngine
      zero_grad: The same. The reducer also discards what it has accumulated.
        Gradients of earlier micro-batches are not in parameter.grad.
    deepspeed.runtime.bf16_optimizer.BF16_Optimizer
      _hp_grad: Each parameter's part of the optimizer's buffer, set on the parameter.
        The pipeline engine sums it over the stages of a tied layer.
""")
(COMPILE,) = patches_of("""
    while: overlap_parameters is on
    deepspeed.runtime.engine.DeepSpeedEngine
      compile: The same after overlap_parameters is switched off, so that parameters arrive in the step.
        Compiled code reads memory without asking whether it has arrived.
""")

# -- comparisons and recorded runs ------------------------------------------------------------------------------------

STEP, TRAIN_BATCH = patches_of("""
    while: check_replicas(engine, every=N) is in force
    deepspeed.runtime.engine.DeepSpeedEngine
      step: The same. Every N steps it then compares the replicas.
    deepspeed.runtime.pipe.engine.PipelineEngine
      train_batch: The same. Every N steps it then compares the replicas.
        It finds the step after which replicas differ.
""")
RECORDED_FORWARD, RECORDED_BACKWARD, RECORDED_STEP, RECORDED_CLIP, RECORDED_BATCH = patches_of("""
    while: ds-topo verify records a run
    process-wide because: The program builds its engine itself, after its process was started for the recording.
    deepspeed.runtime.engine.DeepSpeedEngine
      forward: The same. Of the first engine that trains, verify records the outputs of modules.
      backward: The same. Of the first engine that trains, verify records the loss.
      step: The same. Of the first engine that trains, verify records gradients, weights and states.
      clip_fp32_gradients: The same, of the engine that is recorded: verify records the factor by which it clips.
    deepspeed.runtime.pipe.engine.PipelineEngine
      train_batch: The same. Of the first engine that trains, verify records the same of a pipeline.
        Two runs of one program can only be compared by what they compute.
""")
DROPOUT, ATTENTION_DROPOUT = patches_of("""
    while: ds-topo verify --no-dropout runs a program
    process-wide because: Modules and programs call it by name.
    torch.nn.functional
      dropout: The input itself.
      scaled_dot_product_attention: The same function without dropout of attention weights.
        Ranks of another layout draw other random numbers, so results with dropout differ.
""")
CONFIGURE, LOCAL_EXPERTS = patches_of("""
    while: ds-topo verify runs a reference
    process-wide because: DeepSpeed reads the config before the engine exists, and programs create layers by this name.
    deepspeed.runtime.config.DeepSpeedConfig
      __init__: The same for a config without AutoTP, without ZeRO 1 and 2 in fp32, and with autoep_size 1.
    deepspeed.moe.layer.MoE
      __init__: The same with ep_size 1, so that each process has all experts.
        A reference must not depend on the slices, partitions and groups that it checks.
""")

# -- private names ----------------------------------------------------------------------------------------------------

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
  _get_expert_parallel_group_dict: returns the sizes that have groups
  _get_expert_parallel_group: returns the group of a name
  _get_expert_data_parallel_group_dict: returns the groups over which experts are reduced
  _ZERO_PARAM_INTRA_PARALLEL_GROUP: is set to a group inside the data parallel group
  _get_zero_param_intra_parallel_group: tells whether a second partition exists
  _create_zero_param_parallel_group: is called for an mpu that is not a grid
  _get_local_all_to_all_group: is called for topologies of data alone
deepspeed.runtime.engine.DeepSpeedEngine
  _config: holds the engine's options
  _consolidated_16bit_state_dict: gathers what AutoTP has split
  _get_ckpt_name: returns the path that load_checkpoint() returns
  _global_grad_norm: is what get_global_grad_norm() returns
  inside_no_sync_ctxt: tells which backward pass is the last one
  _is_gradient_accumulation_boundary: tells whether the program says which micro-batch is the last one
  _unmanaged_backward_count: is the number of micro-batches since the last step of a program that ends steps
  _running_engine_backward: tells whether a backward pass is of the engine's own loss
  gate_modules: lists the gates whose capacity is padded
deepspeed.runtime.base_optimizer.ZeROOptimizer
  _backward_hook_state: tells which backward pass has been prepared
  _backward_active_depth: tells whether a backward pass is running
  _backward_seen_this_step: tells whether there was one since the last forward pass
deepspeed.runtime.config.DeepSpeedConfig
  _param_dict: holds sections and options that DeepSpeed itself does not read
deepspeed.runtime.pipe.module.PipelineModule
  _grid: is the grid that a module was built on
  _layer_specs: tells which layers are tied
  _synchronize_tied_weights: is overridden to suppress a warning
deepspeed.runtime.pipe.engine.PipelineEngine
  _grad_layer_buf: lists the buffers of activations and gradients
deepspeed.runtime.pipe.dualpipev.DualPipeVEngine
  _first_send: tells whether a stage sends the shapes of activations next
torch.utils.data.dataloader._BaseDataLoaderIter
  _dataset_kind: tells whether samples have indices
  _index_sampler: tells who chooses the samples
  _num_yielded: tells how many batches are left
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
  _z3_optimizer: tells whether a partitioned parameter belongs to an engine
  _reassign_or_swap_out_partitioned_parameters: copies master weights to a group's parameters
  _finalize_offload_gradient_accumulation: hands gradients to an offloaded optimizer after their sum, or those left out
  _offload_boundary_param_ids: has the parameters that got a gradient in this step
  _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: holds the gradients of this rank's partition
  micro_step_id: tells whether gradients are added to earlier ones
  fp16_partitioned_groups_flat: holds this rank's parameters
  fp32_partitioned_groups_flat: holds master weights
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer deepspeed.runtime.bf16_optimizer.BF16_Optimizer
  _link_all_hp_params: links parameters and partitions when DeepSpeed's layout is back
  _lazy_init_hp_params_optimizer_state: links them to optimizer states
  _hp_optimizer_states_linked: tells whether these are linked
  real_dp_process_group: lists the group that shares each flat tensor
deepspeed.runtime.bf16_optimizer.BF16_Optimizer
  bf16_groups: lists the parameters of each flat tensor
  fp32_groups_gradients: lists the buffers in which gradients accumulate
  fp32_groups_has_gradients: marks buffers that are filled
  fp32_groups_flat_partition: holds master weights
  grad_acc_dtype: is the data type in which gradients accumulate
  _uses_muon: tells whether the optimizer needs whole gradients
deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
  single_partition_of_fp32_groups: holds master weights
  ipg_buckets: lists the gradients that are reduced next
  use_grad_accum_attribute: tells which attribute of a parameter holds its gradient
  bit16_groups: lists the parameters of each flat tensor
  round_robin_bit16_groups: lists them in the order of the flat tensor
  _is_muon_group: tells whether a group needs whole gradients
  independent_gradient_partition_epilogue: collects the partition of an optimizer that needs whole matrices
  _optimizer_step: steps on one group, in the step of our own
  use_separate_grad_accum: tells whether stage 1 accumulates in a second data type
  averaged_gradients: holds the partition of gradients, for their norm
  params_in_partition: lists the parameters of that partition
  norm_for_param_grads: holds the norms of offloaded gradients
  _offload_accumulated_param_ids: has the parameters with offloaded gradients of this step
  _finalize_cpu_offload_gradient_accumulation: hands gradients to an offloaded optimizer
  accumulated_grads_in_cpu: holds the sum of the gradients of earlier micro-batches
  grad_position: tells where gradients are in the partition
  micro_step_id: tells whether gradients are added to earlier ones
  get_param_id: returns the key of those norms
  _zero_padding: marks gradients that are padding
deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator
  _PartitionedParameterCoordinator__step_id: counts the modules that have gathered their parameters
  _PartitionedParameterCoordinator__submodule_order: lists them while ZeRO 3 learns their order
deepspeed.runtime.zero.partition_parameters
  _init_external_params: sets _external_params on modules that read parameters of others
deepspeed.utils.tensor_fragment.tensor_fragment
  hp_fragment_address: is what safe_get_full_fp32_param and similar functions look up
deepspeed.utils.mixed_precision_linkage
  link_hp_params: sets _hp_mapping and _index_in_param_group on parameters
deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer
  fp16_groups: lists the parameters of each flat gradient
  fp16_groups_flat: holds the parameters
  fp32_groups_flat: holds their master weights
deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer
  fp16_groups: lists the parameters whose marks gradients get
  fp32_groups: lists their master weights
  loss_scale_config: holds the loss scale
  _global_grad_norm: is the norm that the engine reports
"""
_ALL = [value if isinstance(value, (tuple, list)) else (value,) for value in list(globals().values())]
ROWS: tuple[Patch | Reliance, ...] = (
    *dict.fromkeys(row for rows in _ALL for row in rows if isinstance(row, Patch)),
    *(Reliance(owner, name, f"It {use}.") for owner, name, use, *_ in read_table(_RELIANCES)),
)
