"""The files that this rank writes into a checkpoint: noted, flushed and digested while DeepSpeed writes the next one.

A failure does not leave DeepSpeed's function, whose other ranks would wait for this one: it is kept until all of them
can hear of it, and nothing more is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_topo.checkpoint_files.durable import flush
from ds_topo.checkpoint_files.manifest import SavedFile
from ds_topo.checkpoint_files.wholeness import digest_of
from ds_topo.engine import changes
from ds_topo.engine.checkpoints.host_copies import Copies, HostMemory
from ds_topo.errors import CheckpointError
from ds_topo.ledger import ledger

_THREADS = 2
"""That compute digests."""


class WrittenFiles:
    """What this rank writes below a folder, from the first file until :meth:`finish`.

    With ``memory`` a call that writes returns when what is to be written has been copied there.
    """

    def __init__(self, root: Path, memory: HostMemory | None = None) -> None:
        self._root, self._memory = root, memory
        self._pool = ThreadPoolExecutor(_THREADS, "ds_topo checkpoint")
        self._waiting: list[tuple[Callable[[], Any], Copies, Path]] = []
        self._paths: dict[Path, Future[SavedFile] | None] = {}
        self.failure: Exception | None = None
        """The first one."""

    @contextmanager
    def of(self, engine: DeepSpeedEngine) -> Iterator[None]:
        """While DeepSpeed saves this engine."""
        at_once = isinstance(engine.checkpoint_engine, TorchCheckpointEngine)  # others may go on writing
        with ExitStack() as bindings:
            for change, make in (
                (changes.WRITE_FILE, lambda save: self._noting(save, at_once=at_once)),
                (changes.MAKE_FOLDER, self._keeping),
            ):
                bindings.callback(ledger.bind(change, make, engine.checkpoint_engine))
            bindings.callback(ledger.bind(changes.COPY_SCRIPTS, self._keeping, engine))
            yield

    def write(self, content: Any, path: Path) -> None:
        """A file of torch of our own beside DeepSpeed's."""
        self._noting(torch.save, at_once=True)(content, str(path))

    def write_copies(self) -> None:
        """Begin to write what was copied: before, threads that write would slow down those that copy, or start."""
        all_threads_run = Event()
        for work, copies, path in self._waiting:
            self._paths[path] = self._pool.submit(self._written, all_threads_run, work, copies, path)
        self._waiting.clear()
        all_threads_run.set()

    def finish(self) -> list[SavedFile]:
        """Every file that this rank has written, when all of it is on the disk.

        Raises:
            Exception: the first failure; OSError and the like have the path and the room on its disk.
        """
        waiting = {path: future or self._pool.submit(self._finished, path) for path, future in self._paths.items()}
        for path, future in waiting.items():
            if (error := future.exception()) is not None:
                self.failure = self.failure or _told(path, error)
        self.close()
        if self.failure is not None:
            raise self.failure
        return sorted((future.result() for future in waiting.values()), key=lambda file: file.path)

    @property
    def is_done(self) -> bool:
        """Whether :meth:`finish` has nothing to wait for."""
        return all(future is None or future.done() for future in self._paths.values())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _noting(self, save: Callable[..., Any], *, at_once: bool) -> Callable[..., None]:
        @wraps(save)
        def save_and_note(state_dict: Any, path: Any, *arguments: Any, **options: Any) -> None:
            if self.failure is not None:
                return
            try:
                if self._memory is not None:
                    copies = Copies(self._memory)
                    work = partial(save, copies.of(state_dict), path, *arguments, **options)
                    self._waiting.append((work, copies, Path(path)))
                    return
                save(state_dict, path, *arguments, **options)
            except Exception as error:
                self.failure = _told(Path(path), error)
            else:
                self._paths[Path(path)] = self._pool.submit(self._finished, Path(path)) if at_once else None

        return save_and_note

    def _keeping(self, work: Callable[..., Any]) -> Callable[..., None]:
        @wraps(work)
        def work_and_keep(path: Any, *arguments: Any, **options: Any) -> None:
            try:
                if self.failure is None:
                    work(path, *arguments, **options)
            except Exception as error:
                self.failure = _told(Path(path), error)

        return work_and_keep

    def _written(self, begin: Event, work: Callable[[], Any], copies: Copies, path: Path) -> SavedFile:
        begin.wait()
        work()
        copies.give_back()
        return self._finished(path)

    def _finished(self, path: Path) -> SavedFile:
        return finished(path, self._root, dist.get_rank())


def finished(path: Path, root: Path, rank: int) -> SavedFile:
    """A file that has been written, when it is on the disk; its digest is computed meanwhile."""
    with ThreadPoolExecutor(1, "ds_topo flush") as disk:
        flushed = disk.submit(flush, path)
        digest = digest_of(path)
        flushed.result()
    return SavedFile(path.relative_to(root).as_posix(), path.stat().st_size, digest, rank)


def _told(path: Path, error: BaseException) -> Exception:
    """With the path, and the room on its disk: torch says neither where a write fails."""
    reason = (getattr(error, "strerror", None) if isinstance(error, OSError) else None) or str(error).partition("\n")[0]
    is_gone = isinstance(error, FileNotFoundError) or "does not exist" in reason  # as torch says it
    if path.parent.exists() and not is_gone:
        free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free there"
    else:
        free = "; its folder was removed meanwhile, as a second job does that saves into the same place"
    code = f" (errno {error.errno})" if isinstance(error, OSError) and error.errno else ""
    told = CheckpointError(f"{path} could not be written: {type(error).__name__}: {reason}{code}{free}")
    told.__cause__ = error
    return told


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder, or of its nearest parent that exists."""
    while not folder.exists():
        folder = folder.parent
    usage = os.statvfs(folder)
    return usage.f_bavail * usage.f_frsize
