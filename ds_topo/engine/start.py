"""Join the job under any launcher (``init_distributed``), and create engines on a grid (``initialize``)."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule as DeepSpeedPipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from typing_extensions import Never

from ds_topo.base.ledger import ledger
from ds_topo.engine.checks import check_is_module, check_mpu, reading_sections
from ds_topo.engine.config import REDUCER_SECTION, REPLICAS_SECTION, TOPOLOGY_SECTION, check_top_level
from ds_topo.engine.current_mpu import grid_in_use
from ds_topo.engine.grid import PipelineParallelGrid
from ds_topo.errors import EngineOptionError, abridged, refuse_others, warn
from ds_topo.health import guard, job_watch, watch_limit
from ds_topo.launch.build_locks import remove_abandoned_locks
from ds_topo.launch.joining import as_timeout, join
from ds_topo.launch.launchers import REFERENCE, Launch
from ds_topo.mpu import MpuGrid

Config: TypeAlias = "str | Path | dict[str, Any] | None"

INITIALIZE = "initialize"
_deepspeed_initialize = deepspeed.initialize
"""DeepSpeed's own function, also while ``deepspeed.initialize`` is replaced by ours."""


def init_distributed(
    timeout: float | timedelta | None = None,
    backend: str | None = None,
    *,
    end_with_launcher: bool = True,
    verbose: bool = True,
    watch: float | None = None,
    **others: Never,
) -> Launch:
    """Join the job; replaces ``deepspeed.init_distributed`` and ``torch.distributed.init_process_group``.

    The same program then runs under ``deepspeed`` (pdsh, openmpi, mpich, impi, slurm, ``--no_ssh``), ``torchrun``,
    ``srun`` and ``mpirun``: rank, world size, local rank and master address come from the launcher. Groups that are
    created later without a timeout of their own, DeepSpeed's included, inherit this one. Without a launcher, as in
    ``python train.py``, this process is a job of one rank.
    :func:`ds_topo.launch.joining.join` does the same without DeepSpeed.

    Args:
        timeout: seconds or a ``timedelta``, for joining and for every group. By default 10 minutes, or the minutes in
            ``DEEPSPEED_TIMEOUT``.
        backend: the backend of torch; by default that of DeepSpeed's accelerator.
        end_with_launcher: end this rank when its launcher has ended, so that no rank outlives a killed launcher.
        verbose: rank 0 writes to standard error which launcher it found. If it found none, it always says so.
        others: none; arguments of DeepSpeed's and torch's functions are refused, with the one to use instead.
        watch: start a :class:`~ds_topo.health.watch.Watch` until the end of the process. If a rank shows no sign of
            life for this many seconds, the other ranks print its name, and ranks that wait for it end. None: no watch.
            The environment variable ``DS_TOPO_WATCH`` (``60``, ``off``) takes precedence.

    Returns:
        The launcher's description of this rank, with ``rank``, ``world_size``, ``local_rank``, ...

    Raises:
        LaunchError: a launcher's variables are missing or contradictory, or the master is unreachable.
        DisagreementError: some ranks did not join within the timeout; the message names them.
        TypeError: the timeout or the seconds of the watch are not numbers, or an argument does not exist.
        ValueError: they are not positive, or torch does not know the backend.
    """
    refuse_others("init_distributed() takes timeout, backend, end_with_launcher, verbose and watch.", others, _INSTEAD)
    limit = watch_limit(watch)
    backend = backend or get_accelerator().communication_backend_name()
    launch = join(timeout, backend, end_with_launcher=end_with_launcher, verbose=verbose)
    remove_abandoned_locks()
    # torch is already initialised here, so DeepSpeed uses torch's groups
    with _naming_builds():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, timeout=as_timeout(timeout))
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed never unlinks its shared buffers, 66 MiB per rank. Ranks keep those that they have open, and the
        # memory is freed when the last rank ends, however it ends.
        dist.barrier()
        name = f"deepspeed_allreduce_buffer_{os.getuid()}_{launch.master_addr}_{launch.master_port}_*"
        for leftover in Path("/dev/shm").glob(name):
            leftover.unlink(missing_ok=True)
        dist.barrier()
    if limit is not None:
        job_watch.start(limit)
    else:
        guard.join()
    return launch


_FROM_LAUNCHER = "omit it, because it comes from the launcher"
_INSTEAD = {
    "dist_backend": "write backend=",
    "rank": _FROM_LAUNCHER,
    "world_size": _FROM_LAUNCHER,
    "local_rank": _FROM_LAUNCHER,
    "init_method": "omit it, or set MASTER_ADDR and MASTER_PORT in the environment",
    "distributed_port": "set MASTER_PORT in the environment",
    "auto_mpi_discovery": "omit it, because mpirun is always detected",
    "dist_init_required": "omit it; a job that has been joined already stays as it is",
    "config": "omit it; pass the config to initialize()",
}
"""Arguments of ``deepspeed.init_distributed`` and torch's ``init_process_group``, and what to write instead."""
_CONFIGS = ("deepspeed_config", "deepscale_config")
"""Attributes of ``args`` in which DeepSpeed finds a config."""
_INSTEAD_IN_INITIALIZE = {
    "grid": "write mpu=grid",
    "topology": 'write it in the config ("topology": "data=2,model=2"), or pass mpu=PipelineParallelGrid(topology)',
}


@contextmanager
def _naming_builds() -> Iterator[None]:
    """Say so if this process compiles an extension of DeepSpeed inside the block. The ranks that wait are silent."""
    named: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            for name in set(_builds()) - named:
                named.add(name)
                where = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
                print(
                    f"ds_topo: {where} compiles {name}, an extension of DeepSpeed. This takes half a minute or more, "
                    "and happens once for each installation of DeepSpeed",
                    file=sys.stderr,
                    flush=True,
                )

    thread = threading.Thread(target=watch, name="ds_topo-builds", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_POLL_SECONDS = 0.5


def _builds() -> list[str]:
    """Return the names of the extensions that this process compiles: torch starts ninja in the folder of each."""
    pids: list[str] = []
    found = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            pids += children.read_text().split()
    for pid in pids:
        with suppress(OSError):  # the process has just ended
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if "-v" in words and "ninja" in map(os.path.basename, words[:2]):  # others ask for ninja's version
                found.append(Path(f"/proc/{pid}/cwd").readlink().name)
    return found


@guard.over(INITIALIZE)
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: torch.utils.data.Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
    **others: Never,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Call ``deepspeed.initialize`` with more sections: ``"topology"``, ``"gradient_reducer"`` and ``"replicas"``.

    ``"topology"`` (a spec or a mapping) creates the engine's grid if neither ``mpu`` nor a ``PipelineModule`` has one.
    ``engine.mpu`` is that grid; destroy it with ``engine.mpu.destroy()``. If an mpu is given too, both must agree.

    ``"gradient_reducer"`` attaches a reducer. Its value is ``true``, or a mapping of arguments of
    :meth:`~ds_topo.GradientReducer.attach`, with data types as ``"fp32"``, ``"bf16"`` or ``"fp16"``.
    ``"enabled": false`` switches it off. The reducer is ``engine.gradient_reducer``, which is None without one.

    ``"replicas"`` keeps this job together with others that are replicas of it; it is
    :class:`~ds_topo.engine.quorum.ReplicaOptions`, and the engine has :class:`~ds_topo.engine.quorum.Replicas` as
    ``engine.replicas``. The engine needs a grid, and gets a reducer at ZeRO 0 to 2.

    The arguments are those of ``deepspeed.initialize``.

    Raises:
        TypeError: the model or the mpu is of another kind.
        ValueError: a section, an argument or a value is invalid; the message lists valid ones.
        TopologyError: the topology does not fit the job, or is not the mpu's.
        LaunchError: the config has a topology, and the job cannot be joined.
    """
    given = dict(locals())  # the arguments by name
    if given.pop("others"):
        refuse_others("initialize():", others, _INSTEAD_IN_INITIALIZE)
    if isinstance(args, nn.Module):
        raise TypeError("initialize(model, ...): the first argument is args, as in DeepSpeed; write model=")
    check_is_module(model)
    check_mpu(mpu)
    if mpu is not None and isinstance(model, DeepSpeedPipelineModule):
        raise EngineOptionError(
            f"mpu={abridged(mpu)} with a PipelineModule, which has its own grid: omit mpu=, or build the module with "
            "PipelineModule(layers, grid=grid)"
        )
    if all(each is None for each in (config, config_params, *(getattr(args, name, None) for name in _CONFIGS))):
        raise ValueError(
            "initialize() got no config: pass config=, a dict or the path of a JSON file, with at least "
            '"train_micro_batch_size_per_gpu"; or args with deepspeed_config, from --deepspeed_config of the launcher'
        )
    remove_abandoned_locks()
    content = _content_of(config if config is not None else config_params, args)
    check_top_level(content)
    reduction = None if REFERENCE in os.environ else _reduction_of(content)
    replicas = None if REFERENCE in os.environ else content.get(REPLICAS_SECTION)
    options = None
    if replicas is not None:
        from ds_topo.engine.quorum import ReplicaOptions  # what a section asks for

        options = ReplicaOptions.of_section(replicas)
    used = grid_in_use()
    is_own_mpu = used is not None and mpu is not None and not isinstance(mpu, MpuGrid)
    if used is not None:
        from ds_topo.engine.one_layout import mpu_in_use

        mpu = mpu_in_use(mpu, model, used)
        warn_of_undealt_samples(used)
        if not isinstance(model, DeepSpeedPipelineModule):
            config, config_params = with_samples_of(used, config or config_params), None
    elif mpu is None and TOPOLOGY_SECTION in content and not isinstance(model, DeepSpeedPipelineModule):
        if not torch.distributed.is_initialized():
            init_distributed(verbose=False)
        mpu = PipelineParallelGrid(content[TOPOLOGY_SECTION])
    own_grid = model.mpu() if isinstance(model, DeepSpeedPipelineModule) else mpu
    if isinstance(own_grid, MpuGrid):
        guard.narrow(INITIALIZE, own_grid.members)
    given |= {"mpu": mpu, "config": str(config) if isinstance(config, Path) else config, "config_params": config_params}
    with reading_sections(), _naming_builds():
        engine, *others = _deepspeed_initialize(**{name: value for name, value in given.items() if value is not None})
    engine.gradient_reducer = None
    if is_own_mpu and hasattr(engine.optimizer, "keeps_scale"):  # the program's loss fits DeepSpeed's own scale
        engine.optimizer.keeps_scale = True
    if options is not None:
        from ds_topo.engine.quorum import Replicas

        Replicas(engine, options, reduction or {})  # attaches a reducer itself
    elif reduction is not None:
        from ds_topo.engine.gradient_reducer import GradientReducer

        GradientReducer.attach(engine, **reduction)
    return (engine, *others)


def _content_of(config: str | Path | Mapping[str, Any] | None, args: Any) -> Mapping[str, Any]:
    """Return the content of a config; an empty mapping if only DeepSpeed can read it."""
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)) or (not Path(config).suffix and not Path(config).exists()):
        return {}  # no config, or another form that DeepSpeed accepts
    try:
        content = json.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config {str(config)!r} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        return {}  # DeepSpeed also reads hjson, and reports errors in other files
    return content if isinstance(content, Mapping) else {}


def _reduction_of(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of the reducer that the config asks for, or None."""
    section = content.get(REDUCER_SECTION, False)
    if isinstance(section, bool):
        return {} if section else None
    if not isinstance(section, Mapping):
        raise ValueError(
            f'config section "{REDUCER_SECTION}": {abridged(section)} is neither true, false nor a mapping of options, '
            'such as {"bucket_bytes": 4194304}'
        )
    options = dict(section)
    enabled = options.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f'config section "{REDUCER_SECTION}": "enabled" is {abridged(enabled)}: give true or false')
    try:
        from ds_topo.reduction.options import arguments_from_config

        arguments: dict[str, Any] = arguments_from_config(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f'config section "{REDUCER_SECTION}": {error}') from error
    return arguments if enabled else None


def with_samples_of(grid: MpuGrid, config: Config) -> Config:
    """Correct a ``train_batch_size`` that a framework has computed from the number of all ranks.

    Frameworks replace ``"auto"`` by that number. DeepSpeed would refuse it, because with a grid fewer ranks work on
    different samples.
    """
    if not isinstance(config, dict):
        return config
    micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps", 1)
    samples, ranks = grid.get_sample_world_size(), dist.get_world_size()
    if samples == ranks or not isinstance(micro, int) or not isinstance(steps, int):
        return config
    if config.get("train_batch_size") != micro * steps * ranks:
        return config
    batch = micro * steps * samples
    if dist.get_rank() == 0:
        warn(
            f"train_batch_size {config['train_batch_size']} counts {micro} x {steps} samples on each of {ranks} ranks, "
            f"but {grid.topology().spec!r} works on {samples} at a time: {batch} is used instead"
        )
    return {**config, "train_batch_size": batch}


def warn_of_undealt_samples(grid: MpuGrid) -> None:
    """Warn if accelerate was imported after ``use(grid)``, which then could not patch its data loaders."""
    is_dealt = any(patch.name == "prepare_data_loader" for patch in ledger.in_force())
    if "accelerate" in sys.modules and not is_dealt and grid.get_sample_world_size() < grid.world_size:
        warn(
            "accelerate was imported after ds_topo.use(grid), so it distributes samples over all ranks: import "
            "accelerate or transformers before the call"
        )
