"""A checkpoint of one layout as one of another layout.

::

    plan        read the manifest; the wanted layout, or why it cannot be reached; is there room on the disk?
    room        every file of the new layout is written without the bytes of its tensors, into .<tag>.converting/<tag>
    fill        each file from beginning to end: pieces of parameters are read, put together, written to where they
                belong, digested; how far a file is stands in a journal; flushed when all of it is there
    finish      manifest, rename to <tag>, replace latest

What a kill has left is taken up again by the next conversion of the same checkpoint to the same layout.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path

from ds_topo.checkpoint_files import manifest as manifests
from ds_topo.checkpoint_files.durable import discard, flush, replace_text
from ds_topo.checkpoint_files.folder import LATEST, Checkpoint, check_tag, put_in_place, require_free
from ds_topo.checkpoint_files.manifest import Manifest, SavedFile, SavedParameter
from ds_topo.checkpoint_files.wholeness import told
from ds_topo.conversion.content import FileContent
from ds_topo.conversion.experts import expert_of
from ds_topo.conversion.files import Writer
from ds_topo.conversion.filling import Filling, Journal, filled, make_room
from ds_topo.conversion.model import model_of
from ds_topo.conversion.reading import Files, Source
from ds_topo.conversion.target import Target, target_of
from ds_topo.engine.checkpoints.facts import versions
from ds_topo.engine.checkpoints.safe_reading import refused_types
from ds_topo.engine.checkpoints.written_files import free_bytes
from ds_topo.errors import (
    CheckpointError,
    CheckpointLayoutError,
    CheckpointSpaceError,
    CheckpointVersionError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
)

_DRAFT = ".converting"
_PLAN = "plan.json"
_MARGIN = 1.02
_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Progress = Callable[[str, int, int], None]
"""Is told a step, how much of it is done, and of how much."""


def convert(
    checkpoint: Checkpoint,
    folder: Path,
    spec: str,
    *,
    zero: int | None = None,
    tag: str | None = None,
    method: str | None = None,
    bounds: Sequence[int] = (),
    experts: int | None = None,
    save_latest: bool = True,
    progress: Progress = lambda step, done, of: None,
) -> Path:
    """Write a checkpoint of another layout, which DeepSpeed loads as its own, with or without us.

    Weights, master weights and optimizer states keep their values bit by bit; so do steps, schedules and the program's
    own state. Random states stay where stages, slices and replicas do.

    Args:
        checkpoint: what is read, as :func:`ds_topo.checkpoint.look_at` finds it; it stays as it is.
        folder: of checkpoints, for the new one.
        spec: of the topology, with all degrees, such as ``"pipe=2,data=4"``.
        zero: the stage of ZeRO; as it was saved by default.
        tag: of the new one; the same by default. One that is there already is replaced.
        method: ``partition_method`` of the pipeline; as it was saved by default.
        bounds: the first layer of every stage and the number of layers, instead of a method.
        experts: ranks among which each layer deals its experts (``ep_size``); as it was saved by default.
        save_latest: whether it becomes the checkpoint that is loaded by default.
        progress: is told how far it is.

    Returns:
        The new checkpoint's own folder.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, UnsafeCheckpointError: it cannot be read.
        CheckpointLayoutError, TopologyError: the layout cannot be reached; says why.
        CheckpointSpaceError: too little room on the disk. In all of these cases nothing was written.
    """
    model = model_of(readable(checkpoint))
    target = target_of(model, spec, zero, method, bounds, experts)
    conversion = Conversion(checkpoint, target, folder, check_tag(checkpoint.tag if tag is None else tag))
    conversion.begin()
    conversion.make_room()
    files = conversion.fill(progress=progress)
    return conversion.commit(files, save_latest=save_latest)


def readable(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a whole checkpoint.

    Raises:
        DamagedCheckpointError, CheckpointVersionError, CheckpointLayoutError, UnsafeCheckpointError: it is none.
    """
    if checkpoint.needs:
        raise CheckpointVersionError(f"the checkpoint {checkpoint.tag!r}: {checkpoint.needs}")
    if checkpoint.problems:
        raise DamagedCheckpointError(f"{checkpoint.path} is damaged: {told(checkpoint.problems)}")
    if checkpoint.manifest is None:
        raise CheckpointLayoutError(
            f"{checkpoint.path} has no {manifests.NAME}: DeepSpeed alone saved it, and its layout is not known. Load "
            "it in the layout that it was saved in, and save it with ds_topo"
        )
    if refused := refused_types(sorted(checkpoint.path.glob("*.pt"))):
        raise UnsafeCheckpointError(f"{checkpoint.path}: {refused[0]}")
    return checkpoint.manifest


@dataclass(frozen=True)
class Conversion:
    """One checkpoint on its way to another layout, by as many workers as take a share of every step.

    Between two steps all workers must have come to the end of the first one.

    Args:
        checkpoint: what is read.
        target: the layout.
        folder: for the new one.
        tag: of it.
    """

    checkpoint: Checkpoint
    target: Target
    folder: Path
    tag: str

    @cached_property
    def source(self) -> Source:
        """The checkpoint, open."""
        assert self.checkpoint.manifest is not None
        declared = self.target.structure.splits
        return Source(model_of(self.checkpoint.manifest, declared), Files(self.checkpoint.path))

    @cached_property
    def contents(self) -> list[FileContent]:
        """Of the new files."""
        return list(Writer(self.source, self.target).files())

    @property
    def draft(self) -> Path:
        """Where it is written."""
        return self.folder / f".{self.tag}{_DRAFT}"

    @property
    def _files(self) -> Path:
        return self.draft / self.tag

    # -- one worker ----------------------------------------------------------------------------------------------------

    def begin(self, workers: int = 1) -> None:
        """Prepare the folder, or find what a killed conversion of as many workers has left there.

        Raises:
            CheckpointError: the new checkpoint would take the place of the old one.
            CheckpointSpaceError: too little room on the disk.
        """
        if (self.folder / self.tag).resolve() == self.checkpoint.path.resolve():
            raise CheckpointError(
                f"{self.checkpoint.path} would be replaced by what is made of it: give another folder or another tag"
            )
        require_free(self.folder, self.tag)
        plan = self._plan(workers)
        if not self._is_begun(plan):
            discard(self.draft)
        there = sum(path.stat().st_size for path in self._files.glob("*")) if self._files.exists() else 0
        needed = Writer(self.source, self.target).bytes() - there
        if (free := free_bytes(self.folder)) < needed * _MARGIN:
            raise CheckpointSpaceError(
                f"the checkpoint {self.tag!r} of {self.target.layout} takes {needed:,} bytes, and the disk of "
                f"{self.folder} has {free:,}: make room, or convert elsewhere. Nothing was written"
            )
        self._files.mkdir(parents=True, exist_ok=True)
        replace_text(self.draft / _PLAN, plan)

    def _plan(self, workers: int) -> str:
        """What is converted, to what, by how many, since when this computer runs: what caches had is not done."""
        manifest = (self.checkpoint.path / manifests.NAME).read_bytes()
        return json.dumps(
            {
                "from": hashlib.sha256(manifest).hexdigest(),
                "layout": asdict(self.target.layout),
                "structure": asdict(self.target.structure),
                "workers": workers,
                "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",
            },
            sort_keys=True,
        )

    def _is_begun(self, plan: str) -> bool:
        path = self.draft / _PLAN
        return path.exists() and path.read_text() == plan

    # -- all workers ---------------------------------------------------------------------------------------------------

    def make_room(self, worker: int = 0, workers: int = 1) -> None:
        """Write this worker's share of files without the bytes of their tensors."""
        make_room(self.contents[worker::workers], self._files)

    def fill(
        self, worker: int = 0, workers: int = 1, progress: Progress = lambda step, done, of: None
    ) -> list[SavedFile]:
        """Write what belongs into this worker's share of files; return them, on the disk."""
        share = self.contents[worker::workers]
        fillings = [Filling(self.source, self.target.slices, file, self._files) for file in share]
        digests = filled(fillings, Journal(self.draft, worker), progress)
        return [
            SavedFile(one.path.relative_to(self._files).as_posix(), one.bytes, digest, worker)
            for one, digest in zip(fillings, digests, strict=True)
        ]

    # -- one worker ----------------------------------------------------------------------------------------------------

    def commit(self, files: Iterable[SavedFile], *, save_latest: bool = True) -> Path:
        """Give the new checkpoint its name."""
        assert self.checkpoint.manifest is not None
        manifest = Manifest(
            self.tag,
            self.checkpoint.manifest.step,
            datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            self.target.layout,
            tuple(sorted(files, key=lambda file: file.path)),
            tuple(self._rows()),
            versions(),
            self.target.structure,
        )
        replace_text(self._files / manifests.NAME, manifests.to_text(manifest))
        for name in _SCRIPTS:
            script, place = self.checkpoint.path.parent / name, self.folder / name
            if script.exists() and not place.exists():
                shutil.copy(script, place)
        put_in_place(self._files, self.folder, self.tag)
        if save_latest:
            replace_text(self.folder / LATEST, self.tag)
        discard(self.draft)
        flush(self.folder)
        return self.folder / self.tag

    def _rows(self) -> list[SavedParameter]:
        slices = self.target.slices
        found = []
        for one in self.source.model.parameters.values():
            expert = expert_of(one.name) if one.experts else None
            if expert is not None and expert.number:
                continue  # the first one stands for all
            name = one.name if expert is None else expert.numbered("*")
            stages = [stage for stage, names in enumerate(self.target.names) if one.name in names]
            ranks = tuple(stage * slices + place for stage in stages for place in range(slices))
            dim = one.split.dim if one.split is not None else None
            found.append(
                SavedParameter(
                    name, one.shape_of_slice(slices), one.dtype, ranks, dim, one.experts or None, one.is_trained
                )
            )
        return sorted(found, key=lambda row: row.model_ranks[0])
