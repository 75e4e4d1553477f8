"""Keep replicas of an engine together by torchft: if one fails, the others continue.

Each replica is a job of its own, with its own launcher, grid and watch. torchft's lighthouse counts who is alive. A
step of an engine then goes like this:

    begin        ``Manager.start_quorum()``, before the first forward pass or the first sample of a step, says who takes
                 part. A replica that is behind takes weights, states and counts from the memory of another one, each
                 rank from the rank of its number
    backward     gradients are averaged inside the replica, then over replicas (:mod:`ds_topo.reduction.managed`): by a
                 reducer at ZeRO 0 to 2, by ZeRO 3's own sums over copies
    commit       ``Manager.should_commit()``, in place of the optimizer's step: the step is taken if every sum has
                 succeeded on every rank of the replica. Otherwise gradients are discarded; weights, loss scale,
                 learning rate and ``global_steps`` stay

A replica that does not commit a step which others have committed is behind, and is healed before the next one. So all
replicas are equal to the last bit after each step that they have committed. torchft relies on that: it heals each rank
from another replica, and heals no replica that is at the same step. So replicas must begin alike, which they compare at
each change of the quorum.

Source: torchft, ``manager.py`` and ``optim.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sized
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod, finalize, ref

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils.data import DataLoader, Sampler

from ds_topo.base.backends import traits_of
from ds_topo.base.classes import REPLICATED, adopt
from ds_topo.base.marks import inner_optimizer
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint.engine_state import (
    begin_states,
    named_parameters,
    progress_of,
    restore_hyperparameters,
    restore_progress,
)
from ds_topo.engine.gradient_reducer import GradientReducer
from ds_topo.engine.on_grid import EngineOnGrid
from ds_topo.engine.partition_sums import SummedPartitions, SumsOfStep
from ds_topo.engine.replica_comparison import digest
from ds_topo.errors import (
    CheckpointLayoutError,
    EngineOptionError,
    QuorumError,
    ReplicaError,
    abridged,
    listed,
    require_switches,
    warn,
)
from ds_topo.health import guard
from ds_topo.mpu import MpuGrid
from ds_topo.process_groups.creation import ProcessGroup, gathered
from ds_topo.reduction.managed import ReplicaSums

if TYPE_CHECKING:
    from torchft import Manager

_BUFFER = "buffer "
"""The start of the names of buffers among the tensors of a state."""
_RANGE = 1 << 56
"""The number of different digests that replicas compare; spares take part with zeros."""
_ALIKE = (
    "give all replicas the same initial weights, by the same seed before the model is built, or load the same "
    "checkpoint in all of them"
)


@dataclasses.dataclass(frozen=True)
class ReplicaOptions:
    """The section ``"replicas"`` of a config; names and defaults are those of ``torchft.Manager``, times in seconds.

    Attributes:
        min_replica_size: the smallest number of replicas that may commit a step.
        timeout: for each sum over replicas, commit and healing. A replica that is stopped or cut off holds up the
            others this long.
        quorum_timeout: for finding ``min_replica_size`` replicas before a step.
        lighthouse_addr: the address of the lighthouse, ``"http://host:29510"``; by default ``$TORCHFT_LIGHTHOUSE``.
        replica_id: the name of this replica in logs.
        hostname: the name under which other replicas reach the host of the first rank; by default the host's own.
        world_size_mode: ``"dynamic"``, or ``"fixed_with_spares"``: only ``min_replica_size`` replicas take part, so
            that a step always has as many samples, and the others are spares.
        max_retries: the number of steps in a row that may fail to commit before an error; by default any.

    Raises:
        EngineOptionError: a value is invalid, or a name is no option.
    """

    min_replica_size: int = 1
    timeout: float = 60.0
    quorum_timeout: float = 600.0
    lighthouse_addr: str | None = None
    replica_id: str | None = None
    hostname: str | None = None
    world_size_mode: Literal["dynamic", "fixed_with_spares"] = "dynamic"
    max_retries: int | None = None

    @classmethod
    def of_section(cls, section: object) -> ReplicaOptions:
        """Return the options of a section of the config."""
        names = [one.name for one in dataclasses.fields(cls)]
        if not isinstance(section, Mapping):
            raise EngineOptionError(f'config section "replicas": {abridged(section)} is no mapping of {listed(names)}')
        if unknown := [name for name in section if name not in names]:
            raise EngineOptionError(
                f'config section "replicas": {listed(unknown)} is no option: choose among {", ".join(names)}'
            )
        return cls(**section)

    def __post_init__(self) -> None:
        for name, least in (("min_replica_size", 1), ("max_retries", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                self._refuse(name, f"give a whole number, at least {least}")
        for name in ("timeout", "quorum_timeout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                self._refuse(name, "give seconds, more than 0")
        for name in ("lighthouse_addr", "replica_id", "hostname"):
            if not isinstance(getattr(self, name), (str, type(None))):
                self._refuse(name, "give a text")
        if self.world_size_mode not in ("dynamic", "fixed_with_spares"):
            self._refuse("world_size_mode", "choose 'dynamic' or 'fixed_with_spares'")

    def _refuse(self, name: str, remedy: str) -> None:
        raise EngineOptionError(f'config section "replicas": {name}={abridged(getattr(self, name))}: {remedy}')


class _Changes:
    """Counts how often the group over replicas was made anew, which torchft does when the quorum has changed."""

    def __init__(self, group: Any) -> None:
        self.number = 0
        self._configure, group.configure = group.configure, self

    def __call__(self, *arguments: Any, **options: Any) -> None:
        self.number += 1
        self._configure(*arguments, **options)


def _manager(grid: MpuGrid, device: torch.device, options: ReplicaOptions) -> tuple[Manager, _Changes]:
    """Return this rank's manager, and the count of its groups, whose backend is gloo or NCCL; collective over the grid.

    The store that the ranks of a replica share is new: that of a launcher would still have the addresses of an earlier
    start. Other replicas use it, too.
    """
    try:
        import torchft
        from torchft.manager import WorldSizeMode
    except ImportError as error:
        raise EngineOptionError(
            'config section "replicas" needs torchft, which cannot be imported: pip install "ds_topo[torchft]"'
        ) from error
    host = options.hostname or socket.gethostname()
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if grid.grid_rank == 0 else None
    everyone = grid.get_group(grid.topology().axes)
    address, port = gathered((host, store.port if store is not None else 0), everyone)[0]
    timeout = timedelta(seconds=options.timeout)
    by_gloo = device.type == "cpu" or traits_of(everyone, device).uses_sockets
    group = torchft.ProcessGroupGloo(timeout) if by_gloo else torchft.ProcessGroupNCCL(timeout)
    changes = _Changes(group)
    manager = torchft.Manager(
        pg=group,
        load_state_dict=None,
        state_dict=None,
        min_replica_size=options.min_replica_size,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=options.quorum_timeout),
        connect_timeout=timeout,
        rank=grid.grid_rank,
        world_size=grid.world_size,
        world_size_mode=WorldSizeMode[options.world_size_mode.upper()],
        store_addr=address,
        store_port=port,
        lighthouse_addr=options.lighthouse_addr,
        replica_id=options.replica_id,
        hostname=host,
        max_retries=options.max_retries,
    )
    manager.store_of_replica = store  # it ends with the manager
    return manager, changes


class Replicas:
    """The replicas of an engine's job, as one of them sees the others: ``engine.replicas``.

    ``initialize`` creates it right after the engine. ``reduction`` has the arguments of the reducer at ZeRO 0 to 2.
    """

    def __init__(self, engine: DeepSpeedEngine, options: ReplicaOptions, reduction: Mapping[str, Any]) -> None:
        if not isinstance(engine.mpu, MpuGrid):
            raise EngineOptionError('config section "replicas": the engine has no grid; pass mpu=grid')
        if (inner := inner_optimizer(engine)) is None:
            raise EngineOptionError('config section "replicas": the engine has no optimizer, so there are no steps')
        self.engine, self._inner = engine, inner
        self.manager, self._changes = _manager(engine.mpu, engine.device, options)
        """The ``torchft.Manager`` of this rank."""
        self.has_committed = True
        """False if the last step was not committed: then nothing has changed, and the program may repeat it."""
        self._has_begun = False
        """True from the quorum of a step to its commit."""
        self.attempts = 0
        """The number of steps that began."""
        self._settled = self._compared = 0
        """The changes of the quorum of which all ranks of this replica know, and after which replicas were compared."""
        self._is_healed = False
        """True from the healing of this rank until all ranks of this replica know of it."""
        self._initial: bytes | None = None
        """A digest of what all ranks of this replica held before the first step, if it has seen that."""
        self._began_otherwise = False
        """True if this rank was healed before the first step by a replica that began with other values; then of all."""
        self._shut_down = finalize(self, self.manager.shutdown)
        """Ends torchft's servers, at the latest before the interpreter ends their threads, which it would wait for."""
        if engine.zero_optimization_partition_weights():
            self._sums = ReplicaSums(self.manager)
            if not isinstance(engine.optimizer, SummedPartitions):  # of the axis shard
                adopt(engine.optimizer, SummedPartitions)
                engine.optimizer.sums = SumsOfStep(None)
            engine.optimizer.sums.replicas = self._sums
        else:
            GradientReducer.attach(engine, **reduction, manager=self.manager)
            self._sums = engine.gradient_reducer.driver.wider
        load, state = WeakMethod(self._load), WeakMethod(self._state)
        self.manager.register_state_dict_fn("ds_topo", lambda saved: load()(saved), lambda: state()())  # type: ignore[misc]
        engine.replicas = self
        self._release: Callable[[], None] = adopt(engine, ReplicatedEngine)
        close = WeakMethod(self.close)
        engine.mpu.on_destroy(lambda: (method := close()) and method())

    # -- a step

    def begin_step(self) -> None:
        """Find out who takes part in this step, and be healed if this replica is behind. No-op within a step.

        Raises:
            QuorumError: too few replicas within the timeout, or the lighthouse cannot be reached.
            CheckpointLayoutError: the replica that would heal this one has another layout.
            ReplicaError: replicas differ that must be equal.
        """
        if self._has_begun:
            return
        engine = self.engine
        with guard.over("quorum", engine.mpu.members):
            if engine.gradient_reducer is not None:
                engine.gradient_reducer.driver.wait_for_parameters()
            if self.manager.current_step() == 0 and self._initial is None:
                self._initial = b"".join(gathered(self._digest(), self._everyone))
            before = self.manager.num_participants()
            try:
                self.manager.start_quorum()
            except CheckpointLayoutError:
                raise
            except (TimeoutError, RuntimeError) as error:
                raise QuorumError(
                    f"no quorum before step {engine.global_steps + 1}: {abridged(error)}. The lighthouse must run, and "
                    "at least min_replica_size replicas must be there within quorum_timeout"
                ) from error
            if self._changes.number != self._settled:
                self._settle()
            self._compare()
        self._has_begun = True
        self.attempts += 1
        if self.size != before and engine.mpu.grid_rank == 0:
            print(f"ds_topo: {self.size} replicas from step {engine.global_steps + 1} on (was {before})", flush=True)

    def _settle(self) -> None:
        """Let all ranks of this replica know which of them were healed, after a change of the quorum; collective.

        Before the first step torchft heals some ranks of a replica from the others; later all of one that is behind.
        """
        self._settled = self._changes.number
        mine = (self.manager.current_step(), self._is_healed, self._began_otherwise)
        steps, healed, differing = zip(*gathered(mine, self._everyone), strict=True)
        self._is_healed, self._began_otherwise = False, any(differing)
        if len(set(steps)) > 1:
            raise QuorumError(
                f"ranks of this replica are at the steps {listed(sorted(set(steps)))}, because the replica that healed "
                "it was lost meanwhile: start this replica again"
            )
        if any(healed) and self.engine.zero_optimization_partition_weights():  # small parameters are gathered
            self.engine.optimizer.checkpoint_event_prologue()
            self.engine.optimizer.checkpoint_event_epilogue()

    def _compare(self) -> None:
        """Compare this rank's state, and what it began with, in all replicas if the quorum has changed; all raise."""
        change = self._changes.number
        if change == self._compared or self.manager.errored() is not None:
            return
        number = int.from_bytes(self._digest()[:7], "big")
        greatest = torch.tensor([self._began_otherwise, number, _RANGE - number], device=self.engine.device)
        self._sums.start(lambda: None, greatest, dist.ReduceOp.MAX).wait()
        if self.manager.errored() is not None:
            return  # the step will not be committed
        self._compared = change
        began_otherwise, most, rest = greatest.tolist()
        if began_otherwise:  # raised here, because the replicas that heal others must be there until then
            raise ReplicaError(f"replicas differ before the first step: {_ALIKE}")
        if most + rest != _RANGE:
            raise ReplicaError(
                f"replicas differ after step {self.engine.global_steps}, although all have committed as many steps: "
                f"{_ALIKE}"
            )

    def commits(self) -> bool:
        """Return True if the step is to be taken, on every rank of this replica alike; ends the step."""
        self._has_begun = False
        self.has_committed = self.manager.should_commit()
        if not self.has_committed and self.engine.mpu.grid_rank == 0:
            cause = self.manager.errored()
            why = abridged(cause.original_exception) if cause is not None else "another rank has the cause"
            warn(f"step {self.engine.global_steps + 1} is not committed, and its gradients are discarded: {why}")
        return self.has_committed

    def discard_gradients(self) -> None:
        """Discard the gradients of a step that is not taken."""
        engine, optimizer = self.engine, self.engine.optimizer
        if hasattr(optimizer, "discard_gradients"):  # in the layout of a reducer
            optimizer.discard_gradients()
        elif engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled():
            optimizer.zero_grad()
            if hasattr(optimizer, "averaged_gradients"):
                optimizer.averaged_gradients = {}
        for parameter in engine.module.parameters():
            parameter.grad = None

    # -- who is there

    @property
    def size(self) -> int:
        """The number of replicas that take part in this step."""
        return int(self.manager.num_participants())

    @property
    def rank(self) -> int | None:
        """The index of this replica among those that take part in this step; None for a spare."""
        found: int | None = self.manager.participating_rank()
        return found

    @property
    def writes_checkpoints(self) -> bool:
        """True on the replica that saves checkpoints: exactly one of those that take part in this step."""
        self.begin_step()
        return self.rank == 0

    # -- samples

    def data_loader(self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, **options: Any) -> DataLoader[Any]:
        """Return a loader of this rank's samples, without end. Each step of all replicas has other samples.

        The samples of a step are adjacent in one order over all epochs, which only ``seed`` decides. They begin where
        the committed steps end: those of a step that is not committed are read again, by the replicas that are there
        then, and none is read twice.

        Args:
            dataset: a dataset with a length.
            shuffle: shuffle by ``seed`` and epoch.
            seed: the seed, equal in all replicas.
            options: of torch's ``DataLoader``. With ``num_workers``, samples would be drawn before it is known who
                takes part, which is refused.

        Raises:
            ValueError: a loader with workers.
        """
        if options.get("num_workers"):
            raise ValueError(
                "num_workers: a worker draws samples of later steps before it is known which replicas take part; leave "
                "it out, and let the dataset itself read ahead"
            )
        size = self.engine.train_micro_batch_size_per_gpu()
        return DataLoader(dataset, batch_size=size, sampler=_Samples(self, dataset, shuffle, seed), **options)  # type: ignore[arg-type]

    # -- healing

    @cached_property
    def _everyone(self) -> ProcessGroup:
        """All ranks of this replica."""
        grid: MpuGrid = self.engine.mpu
        return grid.get_group(grid.topology().axes)

    def _digest(self) -> bytes:
        """Return a digest of this rank's weights and states; buffers such as running means differ between replicas."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in self.tensors().items():
            if not name.startswith(_BUFFER):
                found.update(f"{name} {digest(tensor).tolist()}".encode())
        return found.digest()

    @cached_property
    def _masters(self) -> dict[int, torch.Tensor]:
        """The tensors that the optimizer steps on, by their index; their states exist from now on."""
        held = [one.held for one in named_parameters(self.engine)]
        begin_states(self._inner, held)
        masters = {id(one.master): one.master for one in held if one.group is not None}
        return dict(enumerate(masters.values()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights, master weights, states and buffers: its own memory."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self.engine.module.named_parameters():  # at ZeRO 3 this rank's partition
            found[f"weight {name}"] = getattr(parameter, "ds_tensor", parameter).data
        found |= {f"{_BUFFER}{name}": buffer for name, buffer in self.engine.module.named_buffers()}
        for number, master in self._masters.items():
            found[f"master {number}"] = master.data
            states = self._inner.state.get(master, {}).items()
            found |= {f"{key} {number}": value for key, value in states if torch.is_tensor(value)}
        return found

    def _layout(self) -> dict[str, Any]:
        return {"topology": self.engine.mpu.topology().spec, "zero": int(self.engine.zero_optimization_stage())}

    def _state(self) -> dict[str, Any]:
        """Return this rank's state for the same rank of another replica; torchft calls it in a thread."""
        # a forward pass may change buffers while they travel
        tensors = {name: one.clone() if name.startswith(_BUFFER) else one for name, one in self.tensors().items()}
        states = (self._inner.state.get(master, {}) for master in self._masters.values())
        return {
            "layout": self._layout(),
            "tensors": tensors,
            "numbers": [{key: one for key, one in row.items() if isinstance(one, (int, float))} for row in states],
            "groups": [{key: group[key] for key in group if key != "params"} for group in self._inner.param_groups],
            "progress": progress_of(self.engine),
            "initial": self._initial,
            "random": facts.random_states(self.engine),
        }

    @torch.no_grad()
    def _load(self, saved: Mapping[str, Any]) -> None:
        """Take the state of this rank in another replica. Other ranks of this replica may not, so this is local."""
        engine, inner = self.engine, self._inner
        own = self.tensors()
        mine, theirs = (
            {name: (one.shape, one.dtype) for name, one in all_.items()} for all_ in (own, saved["tensors"])
        )
        differ = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        if differ or self._layout() != saved["layout"]:
            raise CheckpointLayoutError(
                f"this replica is {self._layout()}, and the replica that would heal it is {saved['layout']}, which "
                f"holds other tensors such as {listed(sorted(differ), 3) or 'none'}: all replicas must have one "
                "topology, one stage of ZeRO, and the same model and optimizer"
            )
        is_first = self._initial is not None and not saved["progress"]["global_steps"]
        self._began_otherwise = is_first and self._initial != saved["initial"]
        self._is_healed = True
        for name, tensor in own.items():
            tensor.copy_(saved["tensors"][name])
        for master, numbers in zip(self._masters.values(), saved["numbers"], strict=True):
            inner.state[master].update(numbers)
        for group, row in zip(inner.param_groups, saved["groups"], strict=True):
            restore_hyperparameters(group, row)
        restore_progress(engine, saved["progress"])
        facts.restore_random_states(engine, saved["random"])
        if engine.mpu.grid_rank == 0:
            print(f"ds_topo: healed from another replica; goes on after step {engine.global_steps}", flush=True)

    def close(self) -> None:
        """Leave the other replicas, who go on. Idempotent."""
        self._release()
        self._sums.rest()
        self._shut_down()


class _Samples(Sampler[int]):
    """The samples of one rank, step by step, without end."""

    def __init__(self, replicas: Replicas, dataset: Sized, shuffle: bool, seed: int) -> None:
        require_switches(shuffle=shuffle)
        self._replicas, self._length, self._shuffle, self._seed = ref(replicas), len(dataset), shuffle, seed
        self._epoch, self._order = -1, list[int]()
        """The order of the last epoch that was asked for."""

    def __iter__(self) -> Iterator[int]:
        last = 0
        while (replicas := self._replicas()) is not None:
            replicas.begin_step()
            if replicas.attempts == last:
                raise RuntimeError(
                    "a step's samples were all drawn, and the next one has not begun: draw the next batch after "
                    "engine.step(), without reading ahead"
                )
            last, grid = replicas.attempts, replicas.engine.mpu
            batch = replicas.engine.train_batch_size()
            first = replicas.manager.batches_committed() * batch + (replicas.rank or 0) * batch
            for index in range(first + grid.get_sample_rank(), first + batch, grid.get_sample_world_size()):
                yield self._sample(index)

    def _sample(self, index: int) -> int:
        epoch, place = divmod(index, self._length)
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._length, generator=generator).tolist()
        return self._order[place]


class ReplicatedEngine(EngineOnGrid):
    """The methods of an engine that torchft keeps together with those of other replicas."""

    mixin_order, mixin_state = REPLICATED, "replicas"
    replicas: Replicas

    def begin_training(self) -> None:
        """Begin a step, if its samples have not."""
        self.replicas.begin_step()
        super().begin_training()

    def _take_model_step(self, *arguments: Any) -> None:
        """Step if all ranks of this replica commit; otherwise discard the gradients."""
        if self.replicas.commits():
            super()._take_model_step(*arguments)
        else:
            self.replicas.discard_gradients()
            self._step_applied = False  # as was_step_applied() tells the program

    def destroy(self) -> None:
        """Leave the other replicas first."""
        self.replicas.close()
        self.destroy()  # of the class that the engine has now
