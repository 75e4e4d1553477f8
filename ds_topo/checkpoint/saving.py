"""Save a checkpoint atomically: it exists completely or not at all, whichever ranks are killed at any moment.

::

    all ranks   agree on tag and options
    rank 0      removes the drafts of killed saves, and checks the free space of the disk
    all ranks   DeepSpeed writes into .<tag>.saving/<tag>; each rank flushes and digests its own files
    all ranks   agree that all files are written
    rank 0      writes the manifest, flushes, renames to <tag>, flushes, replaces latest, removes old checkpoints
    all ranks   receive the result of rank 0, and continue
"""

from __future__ import annotations

import atexit
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial, wraps
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils._pytree import tree_leaves

from ds_topo.base import patches
from ds_topo.base.classes import stock_class
from ds_topo.base.ledger import ledger
from ds_topo.checkpoint import engine_facts as facts
from ds_topo.checkpoint import folder as folders
from ds_topo.checkpoint import manifest as manifests
from ds_topo.checkpoint.engine_state import recorder_of
from ds_topo.checkpoint.manifest import Manifest, Saved, SavedFile, SavedParameter, SavedStructure, SavedTable
from ds_topo.checkpoint.meeting import Meeting
from ds_topo.checkpoint.safe_reading import REPLICAS, check_client_state, entries_to_save
from ds_topo.checkpoint.table import FileRecorder, Partition, missing_elements
from ds_topo.errors import CheckpointError, abridged, tell, warn
from ds_topo.health import guard
from ds_topo.mpu import MpuGrid

_at_work: WeakSet[DeepSpeedEngine] = WeakSet()
"""Engines that DeepSpeed's own functions are saving or loading; our replacements of its methods call the originals."""
unfinished: list[BackgroundSave] = []
"""The saves in the background that are not in place yet, in the same order on all ranks."""
_ATTEMPTS = 5
"""Attempts to make a draft in a folder that other jobs tidy up."""
_THREADS = 2
"""Threads that compute digests."""
_LARGE = 1 << 20
"""The smallest size of memory that is reused, in bytes; allocating larger memory costs more than copying into it."""

# -- copies in host memory ---------------------------------------------------------------------------------------------


_memories: WeakKeyDictionary[DeepSpeedEngine, list[torch.Tensor]] = WeakKeyDictionary()
"""The large copies of each engine's last save in the background, flat, whose memory its next one reuses."""


class HostCopies:
    """Copies in host memory of what an engine saves, while training changes the originals.

    >>> weight = torch.zeros(2)
    >>> kept = HostCopies().of({"weight": weight, "again": [weight], "step": 3})
    >>> _ = weight.add_(1)
    >>> kept["weight"], kept["again"][0] is kept["weight"], kept["step"]
    (tensor([0., 0.]), True, 3)

    Args:
        former: flat tensors whose memory is reused.
    """

    def __init__(self, former: Iterable[torch.Tensor] = ()) -> None:
        self.large: list[torch.Tensor] = []
        """The copies whose memory can be reused, flat."""
        self.former = defaultdict[tuple[torch.dtype, int], list[torch.Tensor]](list)
        """The memory that was not reused yet, by type and number of elements."""
        for one in former:
            self.former[one.dtype, one.numel()].append(one)

    def of(self, value: Any) -> Any:
        """Copy the content of a file: one copy of each object, however often it occurs."""
        tensors = {id(one): one for one in tree_leaves(value) if torch.is_tensor(one)}
        return copy.deepcopy(value, {key: self._copied(one.detach()) for key, one in tensors.items()})

    def _copied(self, held: torch.Tensor) -> torch.Tensor:
        if held.layout != torch.strided or held.numel() * held.itemsize < _LARGE:
            return held.to("cpu", copy=True)
        former = self.former[held.dtype, held.numel()]
        flat = former.pop() if former else torch.empty(held.numel(), dtype=held.dtype)
        self.large.append(flat)
        return flat.view(held.shape).copy_(held)


# -- the files of this rank --------------------------------------------------------------------------------------------


class WrittenFiles:
    """The files that this rank writes below a folder: recorded, flushed and digested while the next one is written.

    A failure does not leave DeepSpeed's function, in which the other ranks would wait for this one. It is kept until
    all ranks can receive it, and nothing more is written. With ``copied_for``, an engine that saves in the background,
    a call that writes only copies the content.
    """

    def __init__(self, root: Path, copied_for: DeepSpeedEngine | None = None) -> None:
        self._root = root
        self.describe: Callable[[Any, str], object] = lambda content, file: None
        """Called with the content of a file of torch, and its path, before it is written."""
        self._copies: HostCopies | None = None
        if copied_for is not None:  # its last save is finished, so nothing reads the memory of that any more
            self._copies = HostCopies(_memories.get(copied_for, ()))
            _memories[copied_for] = self._copies.large
        self._pool = ThreadPoolExecutor(_THREADS, "ds_topo checkpoint")
        self._later: dict[Path, Callable[[], object]] = {}
        """The function that writes each file that is finished later; it does nothing if the file is written already."""
        self._started: dict[Path, Future[SavedFile]] = {}
        self.failure: Exception | None = None
        """The first failure."""

    @contextmanager
    def of(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """Record the files that DeepSpeed writes while it saves this engine."""
        writer = engine.checkpoint_engine
        at_once = isinstance(writer, TorchCheckpointEngine)  # others may continue to write after the call
        with (
            ledger.bound(patches.WRITE_FILE, lambda save: self._recorded(save, at_once=at_once), writer),
            ledger.bound(patches.MAKE_FOLDER, self._without_failure, writer),
            ledger.bound(patches.COPY_SCRIPTS, self._without_failure, engine),
        ):
            yield

    def write(self, content: Any, path: Path, save: Callable[[Any, str], object] | None = None) -> None:
        """Write a file of our own, by default with ``torch.save``."""
        self._recorded(save or torch.save, at_once=True)(content, str(path))

    def start(self) -> None:
        """Start the work that is left, after all copies were made: threads that write would slow copying down."""
        if self._copies is not None:
            self._copies.former.clear()
        self._started |= {path: self._pool.submit(self._finish, path, write) for path, write in self._later.items()}
        self._later.clear()

    def finish(self) -> list[SavedFile]:
        """Wait until every file of this rank is on the disk; return them, sorted by path, or raise the first failure.

        A failure to write names the path and the free space of its disk.
        """
        wait(self._started.values())
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self.failure is not None:
            raise self.failure
        return sorted((future.result() for future in self._started.values()), key=lambda file: file.path)

    @property
    def is_done(self) -> bool:
        """True if :meth:`finish` has nothing to wait for."""
        return all(future.done() for future in self._started.values())

    def _do(self, path: Path, work: Callable[[], Any]) -> None:
        """Do some work, unless this rank has already failed, and keep its failure."""
        try:
            if self.failure is None:
                work()
        except Exception as error:
            self.fail(folders.failure_to_write(path, error))

    def fail(self, failure: Exception) -> None:
        """Keep the first failure. If nobody waits for the files, say it at once: the next save may be hours away."""
        if self.failure is None:
            self.failure = failure
            if self._copies is not None:
                tell(
                    f"ds_topo: a checkpoint in the background has failed: {str(failure) or type(failure).__name__}. It "
                    "is not put in place: finish(), or the next save or load, raises this error on every rank"
                )

    def _recorded(self, save: Callable[..., Any], *, at_once: bool) -> Callable[..., None]:
        @wraps(save)
        def save_and_record(state_dict: Any, path: Any, *arguments: Any, **options: Any) -> None:
            file = Path(path)

            def record() -> None:
                if file.suffix == ".pt":
                    self.describe(state_dict, file.relative_to(self._root).as_posix())
                if self._copies is not None:
                    self._later[file] = partial(save, self._copies.of(state_dict), path, *arguments, **options)
                    return
                save(state_dict, path, *arguments, **options)
                if at_once:
                    self._started[file] = self._pool.submit(self._finish, file)
                else:
                    self._later[file] = lambda: None

            self._do(file, record)

        return save_and_record

    def _without_failure(self, work: Callable[..., Any]) -> Callable[..., None]:
        @wraps(work)
        def work_without_failure(path: Any, *arguments: Any, **options: Any) -> None:
            self._do(Path(path), partial(work, path, *arguments, **options))

        return work_without_failure

    def _finish(self, path: Path, write: Callable[[], object] = lambda: None) -> SavedFile:
        try:
            write()
            return finished(path, self._root, dist.get_rank())
        except Exception as error:
            self.fail(folders.failure_to_write(path, error))
            raise


def finished(path: Path, root: Path, rank: int) -> SavedFile:
    """Flush a written file to the disk, and compute its digest meanwhile."""
    with ThreadPoolExecutor(1, "ds_topo flush") as flushing:
        flushed = flushing.submit(folders.flush, path)
        digest = folders.digest_of(path)
        flushed.result()
    return SavedFile(path.relative_to(root).as_posix(), path.stat().st_size, digest, rank)


# -- saving ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveOptions:
    """The options of a save, which all ranks must share."""

    keep_last: int | None
    save_latest: bool
    exclude_frozen_parameters: bool
    keep_random_states: bool


@guard.over("save")
def save(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    *,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    keep_random_states: bool = True,
) -> Path:
    """Save an engine so that a complete checkpoint exists at every moment; collective over all ranks of the job.

    The files are DeepSpeed's own, under its names, including ``latest``. A manifest beside them has every file with
    its size, digest and writer, the layout, the parameters, and the releases. When this returns, on any rank, the
    checkpoint is in place on the disk. If a rank fails or is killed before, the folder is as it was.

    Args:
        engine: the engine that ``deepspeed.initialize`` returned.
        folder: the folder of all checkpoints, on a file system that all hosts share.
        tag: the name of this one; ``global_step<N>`` by default. An existing checkpoint of that name is replaced.
        client_state: further state that the program needs to continue; :func:`load` returns it.
        keep_last: the number of complete checkpoints to keep; older ones are removed. All are kept by default.
        save_latest: whether this becomes the checkpoint that is loaded by default.
        exclude_frozen_parameters: as in ``engine.save_checkpoint``.
        keep_random_states: whether to save every rank's random states, too.

    Returns:
        The checkpoint's own folder.

    Raises:
        TypeError, ValueError: the engine, the tag, a number or the ``client_state`` is invalid.
        DisagreementError: ranks pass different arguments, or a rank does not call the function.
        CheckpointSpaceError: the disk has too little free space; nothing was written.
        CheckpointError: a rank could not write its files. The message is the same on every rank and has ranks, hosts
            and paths. Earlier checkpoints are unchanged.
    """
    options = SaveOptions(keep_last, save_latest, exclude_frozen_parameters, keep_random_states)
    return BackgroundSave(engine, folder, tag, client_state, options, copies=False)._put_in_place()


@guard.over("save_in_background")
def save_in_background(
    engine: DeepSpeedEngine,
    folder: str | PathLike[str],
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    *,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    keep_random_states: bool = True,
) -> BackgroundSave:
    """Save as :func:`save` does, but return when this rank's part is copied to host memory; threads write it.

    ``finish()`` of the result puts the checkpoint in place: some steps later, or at the end of the job. The next call
    that saves or loads finishes it, too. If the program ends before, the earlier checkpoints remain. The arguments are
    those of :func:`save`.

    Raises:
        CheckpointError: as in :func:`save`; ``finish()`` raises failures to write files.
    """
    options = SaveOptions(keep_last, save_latest, exclude_frozen_parameters, keep_random_states)
    unfinished.append(started := BackgroundSave(engine, folder, tag, client_state, options, copies=True))
    return started


@dataclass(frozen=True)
class WrittenShare(Saved):
    """The share of a checkpoint that one rank has written."""

    files: list[SavedFile]
    parameters: list[SavedParameter]
    """The rows of its parameters, if it is the first of the ranks with the same ones."""
    table: SavedTable | None
    stage: int
    partitions: list[Partition] | None
    """Its partitions of the optimizer's tensors; None if they are unknown."""


class BackgroundSave:
    """A checkpoint that is being written, as :func:`save_in_background` returns it."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        folder: str | PathLike[str],
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        options: SaveOptions,
        *,
        copies: bool,
    ) -> None:
        problem: Exception | None = None
        self._tag, self._root, self._options = "", Path(), options
        try:
            self._root = folders.check_folder(folder)
            self._tag = _checked_tag(engine, tag, options.keep_last)
            check_client_state(client_state)
        except (TypeError, ValueError, CheckpointError) as error:
            problem = error
        finish_what_is_unfinished()
        root = self._root
        self._held: BinaryIO | None = None
        """Rank 0's mark of the draft as in use."""
        subject = f"saving the checkpoint {self._tag!r} in {root}"
        self._meeting = Meeting.begin(subject, f"tag {self._tag!r} {options}", problem)
        self._draft = folders.draft_of(root, self._tag)
        self._structure = SavedStructure(None, ())
        """The structure of the whole model, on rank 0."""
        self._universal: dict[str, Any] = {}
        """What DeepSpeed's ``ds_to_universal`` needs to know of the whole model, on rank 0."""
        share = partial(facts.share_of_structure, engine)
        self._meeting.step("room", share, decide=lambda shares: self._make_room(engine, shares), is_alone=False)
        self._step, self._layout = int(engine.global_steps), facts.layout_of(engine)
        _warn_of_partial_step(engine)
        self._recorder: FileRecorder | None = None
        """The description of this rank's files, if the optimizer's memory can be described."""
        self._files = WrittenFiles(self._draft / self._tag, engine if copies else None)
        self._rows: list[SavedParameter] = []
        """This rank's parameters."""
        self._replica, self._model_rank = facts.replica_of(engine), int(engine.checkpoint_mp_rank)
        self._stage = facts.stage_and_slice(engine)[0]
        self._left_early = False
        self._path: Path | None = None
        try:
            self._write(engine, client_state)
        except Exception as error:  # WrittenFiles keeps failures to write
            guard.report(error)  # others may wait for this rank in DeepSpeed's function
            self._left_early = True
            self._files.fail(error)

    @property
    def is_written(self) -> bool:
        """True if this rank has written its files, so that ``finish()`` need not wait for it."""
        return self._files.is_done

    @guard.over("finish")
    def finish(self) -> Path:
        """Wait for the files of all ranks, and put the checkpoint in place; collective, once. Return its folder.

        Raises:
            CheckpointError: a rank could not write its files; the same on every rank.
        """
        if self in unfinished:
            unfinished.remove(self)
            self._path = self._put_in_place()
        if self._path is None:
            raise CheckpointError(
                f"the checkpoint {self._tag!r} was not saved, because the first finish() raised an error: save again"
            )
        return self._path

    def _make_room(self, engine: DeepSpeedEngine, shares: Sequence[Mapping[str, Any] | None]) -> None:
        self._structure = manifests.whole_structure(shares)
        known = sorted((share for share in shares if share is not None), key=lambda share: int(share["stage"]))
        self._universal = facts.universal_info_of(known, self._structure, facts.stage_and_slice(engine)[2])
        _require_room(engine, self._root, self._tag)
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError):  # another job has tidied up before the draft was held
                (self._draft / self._tag).mkdir(parents=True, exist_ok=True)
                self._held = folders.hold(self._draft)
                if (self._draft / self._tag).is_dir():
                    return
        raise CheckpointError(f"other jobs remove {self._draft} again and again: give each job another folder")

    def _write(self, engine: DeepSpeedEngine, client_state: Mapping[str, Any] | None) -> None:
        """Let DeepSpeed write this rank's files, or copy their content."""
        if self._options.keep_random_states:  # first, so that they are flushed while DeepSpeed writes
            path = self._draft / self._tag / facts.name_of_states(engine)
            with suppress(OSError):  # the write fails, too, and names the path
                path.parent.mkdir(parents=True, exist_ok=True)
            self._files.write(facts.random_states(engine), path)
        with suppress(CheckpointError):  # such checkpoints load in the layout that saved them
            self._recorder = recorder_of(engine)
            self._files.describe = self._recorder.describe
        state = entries_to_save(client_state or {})
        if hasattr(engine, "replicas"):
            state[REPLICAS] = engine.replicas.manager.state_dict()
        with deepspeeds_part(engine), self._files.of(engine), _with_universal_info(engine, self._universal):
            engine.save_checkpoint(
                str(self._draft),
                tag=self._tag,
                client_state=state,
                save_latest=False,
                exclude_frozen_parameters=self._options.exclude_frozen_parameters,
            )
        has_frozen = not self._options.exclude_frozen_parameters
        self._rows = [row for row in facts.parameters_of(engine) if row.is_trained or has_frozen]
        self._files.start()

    def _put_in_place(self) -> Path:
        try:
            self._meeting.step("written", self._written, decide=self._commit, is_alone=self._left_early)
            self._meeting.end()
        except CheckpointError:
            if dist.get_rank() == 0:
                with suppress(OSError):
                    folders.discard(self._draft)
            raise
        finally:
            if self._held is not None:
                self._held.close()
        return self._root / self._tag

    def _written(self) -> WrittenShare:
        """Write the table, and wait for this rank's files; return its part of the manifest."""
        recorder, described = self._recorder if self._files.failure is None else None, None
        if recorder is not None and (table := recorder.table()).vectors:
            name = f"table_replica_{self._replica}_mp_rank_{self._model_rank:02d}.json"
            path = self._draft / self._tag / name
            self._files.write(table.to_text(), path, lambda text, _: path.write_text(text))
            self._files.start()
            described = table.described(name, (row.name for row in self._rows), recorder.partition)
        rows = self._rows if self._replica == 0 else []
        partitions = None if recorder is None else recorder.partitions()
        return WrittenShare(self._files.finish(), rows, described, self._stage, partitions)

    def _commit(self, posted: Sequence[Any]) -> None:
        """Give the checkpoint its name and remove old ones; on rank 0."""
        draft, root, tag, keep_last = self._draft, self._root, self._tag, self._options.keep_last
        shares: list[WrittenShare] = manifests.built_from(list[WrittenShare], posted)
        _require_partitions(shares)
        folders.replace_text(draft / tag / manifests.NAME, manifests.to_text(self._manifest(shares)))
        for script in (path for path in draft.iterdir() if path.is_file() and not path.name.startswith(".")):
            place = root / script.name  # DeepSpeed's, for all checkpoints
            if not place.is_file() or place.read_bytes() != script.read_bytes():
                folders.flush(script)
                script.replace(place)
        folders.put_in_place(draft / tag, root, tag)
        if self._options.save_latest:
            folders.replace_text(root / folders.LATEST, tag)  # flushes the entries of the folder
        else:
            folders.flush(root)
        folders.discard(draft)
        if keep_last is not None:
            try:
                folders.remove_old(root, keep_last, tag)
            except OSError as error:  # the new checkpoint is saved nevertheless
                warn(f"an older checkpoint in {root} could not be removed: {error}")

    def _manifest(self, shares: Sequence[WrittenShare]) -> Manifest:
        """Return the manifest of all ranks' files, on rank 0, which must see all of them."""
        path = self._draft / self._tag
        files = [file for one in shares for file in one.files]
        known = {file.path for file in files}
        unknown = [name for name in sorted(folders.sizes_in(path)) if name not in known]
        files += [finished(path / name, path, 0) for name in unknown]  # DeepSpeed itself copies swapped states
        files.sort(key=lambda file: file.path)
        rows = manifests.merged(row for one in shares for row in one.parameters)
        time, versions = datetime.now(timezone.utc).isoformat(timespec="milliseconds"), facts.versions()
        tables = tuple(one.table for one in shares if one.table is not None)
        manifest = Manifest(
            self._tag, self._step, time, self._layout, tuple(files), rows, versions, self._structure, tables
        )
        if problems := folders.wrong_sizes(path, manifest):
            ranks = sorted({file.rank for file in files if any(problem.startswith(file.path) for problem in problems)})
            raise CheckpointError(
                f"rank 0 does not see the files of ranks {ranks[:8]} ({folders.told(problems)}): {self._root} must be "
                "one folder of a file system that all hosts share"
            )
        return manifest


def _require_partitions(shares: Sequence[WrittenShare]) -> None:
    """Require that each partition of the optimizers of a stage is in a file, if all ranks could describe theirs."""
    of_stages = defaultdict[int, list[Partition]](list)  # tied layers have the same names in several
    for one in shares:
        if one.partitions is None:
            return
        of_stages[one.stage] += one.partitions
    if missing := [row for of_stage in of_stages.values() for row in missing_elements(of_stage).items()]:
        name, (numel, total) = missing[0]
        raise CheckpointError(
            f"no rank has written {numel:,} of the {total:,} elements of the optimizer's tensor with {name!r}, so the "
            "checkpoint could not be loaded, and is not put in place. This is a defect of ds_topo or of the optimizer: "
            "report it with the config and the axes of the grid, and save at another ZeRO stage until then"
        )


def finish_what_is_unfinished() -> None:
    """Finish all saves in the background, before anything else is saved or loaded."""
    while unfinished:
        unfinished[0].finish()


@atexit.register
def name_what_is_unfinished() -> None:
    """Name the checkpoints that the program leaves without ``finish()``, on rank 0, at the end of the process."""
    for save in unfinished:
        if save._meeting.rank == 0:
            tell(
                f"ds_topo: the program ended without finish() of the checkpoint {save._tag!r}, which "
                f"save_in_background was writing into {save._root}, so it is not in place and cannot be loaded. Call "
                "finish() of what save_in_background returns, on every rank, before the program ends"
            )


def _checked_tag(engine: Any, tag: object, keep_last: object) -> str:
    """Check the arguments of this rank; return the checkpoint's tag."""
    facts.require_engine(engine)
    if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
        raise ValueError(f"keep_last={abridged(keep_last)}: give a number of checkpoints >= 1, or None for all")
    if reason := why_not_ours(engine):
        raise CheckpointError(f"{reason}, so ds_topo cannot save it atomically: call engine.save_checkpoint() instead")
    return folders.check_tag(f"global_step{engine.global_steps}" if tag is None else tag)


@contextmanager
def _with_universal_info(engine: DeepSpeedEngine, info: dict[str, Any]) -> Iterator[None]:
    """Let DeepSpeed save ``universal_checkpoint_info``, unless the model has its own. Its command reads rank 0's."""
    is_ours = bool(info) and facts.layout_of(engine).has_partitions
    if not is_ours or hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO):
        yield
        return
    setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, info)
    try:
        yield
    finally:
        delattr(engine.module, UNIVERSAL_CHECKPOINT_INFO)


def _warn_of_partial_step(engine: DeepSpeedEngine) -> None:
    """Warn on rank 0 that DeepSpeed does not save the gradients of an unfinished step."""
    done = 0 if isinstance(engine, PipelineEngine) else engine.micro_steps % engine.gradient_accumulation_steps()
    if done and dist.get_rank() == 0:
        warn(
            f"saving after {done} of {engine.gradient_accumulation_steps()} micro-batches of a step: DeepSpeed does "
            "not save their gradients, so the step starts again after loading. Save at the end of a step"
        )


def why_not_ours(engine: DeepSpeedEngine) -> str:
    """Return why rank 0 cannot put an engine's files in place when all are written; empty if it can."""
    if engine.use_node_local_storage():
        return 'the config has "use_node_local_storage", with which each host keeps its own files'
    if engine.checkpoint_engine.is_decoupled():
        return f"{type(engine.checkpoint_engine).__name__} continues to write after the call"
    return ""


# -- DeepSpeed's method ------------------------------------------------------------------------------------------------


@contextmanager
def deepspeeds_part(engine: DeepSpeedEngine) -> Iterator[None]:
    """Make the engine's methods that save and load call DeepSpeed's own inside this context."""
    _at_work.add(engine)
    try:
        yield
    finally:
        _at_work.discard(engine)


def is_ours(engine: DeepSpeedEngine) -> bool:
    """Return True if a call of an engine's method is the program's, on a grid, and not part of our own functions."""
    return isinstance(engine.mpu, MpuGrid) and engine not in _at_work


def options_of(method: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return the options of a call of an engine's bound method, by name as in DeepSpeed, without the folder."""
    stock = getattr(stock_class(method.__self__), method.__name__)
    bound = inspect.signature(stock).bind(method.__self__, *arguments, **options).arguments
    return dict(list(bound.items())[2:])


def save_as_a_whole(
    save_checkpoint: Any, engine: DeepSpeedEngine, save_dir: Any, *arguments: Any, **options: Any
) -> Any:
    """Save an engine of a grid, with the arguments and the result of ``save_checkpoint``, DeepSpeed's bound method."""
    given = options_of(save_checkpoint, save_dir, *arguments, **options)
    if given.get("client_state", {}) is None:
        del given["client_state"]
    if not is_ours(engine):
        return save_checkpoint(save_dir, **given)
    if reason := why_not_ours(engine):
        warn(
            f"{reason}, so ds_topo cannot save it atomically: a job that is killed while it saves may leave a "
            "damaged checkpoint that 'latest' names"
        )
        return save_checkpoint(save_dir, **{**given, "client_state": entries_to_save(given.get("client_state", {}))})
    save(engine, save_dir, keep_random_states=False, **given)
    return True


# -- rank 0's preparations ---------------------------------------------------------------------------------------------


def _require_room(engine: DeepSpeedEngine, root: Path, tag: str) -> None:
    """Tidy the folder up, and check that a checkpoint can be written there; on rank 0.

    If it cannot, nothing has changed, except that drafts of killed saves are removed.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(f"{root} is a file, or below one: give a folder of checkpoints") from None
    except OSError as error:
        raise CheckpointError(
            f"the folder {root} cannot be created: {folders.reason_of(error)}. Give one that this user can write"
        ) from error
    folders.tidy(root)
    folders.require_free(root, tag)
    if folders.is_held(folders.draft_of(root, tag)):
        raise CheckpointError(
            f"another job is saving the checkpoint {tag!r} in {root} at this moment: give each job another folder, or "
            "other tags"
        )
    folders.require_space(root, f"the checkpoint {tag!r}", facts.bytes_of_checkpoint(engine))
