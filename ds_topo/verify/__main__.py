"""Run a program as one rank of a recorded run: ``python -m ds_topo.verify OPTIONS PROGRAM [ARGUMENT ...]``.

:mod:`ds_topo.verify.runs` starts it. ``OPTIONS`` is a JSON object with the fields of :class:`RankOptions`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_topo.launch.launchers import REFERENCE, TOPOLOGY_OVERRIDE
from ds_topo.ledger import always, ledger
from ds_topo.mpu import patches
from ds_topo.verify.recorder import Finished, Recording, recording

_USES_DS_TOPO = re.compile(r"^\s*(from|import)\s+ds_topo\b", re.MULTILINE)


@dataclass(frozen=True)
class RankOptions:
    """The options of one rank."""

    folder: str
    steps: int
    weights_from: str | None = None
    noise: int | None = None
    has_dropout: bool = True


def main(words: list[str]) -> None:
    """Record a program's steps, then end this process at once, so that the program does not go on."""
    options, program = RankOptions(**json.loads(words[0])), words[1]
    sys.argv = words[1:]
    sys.path[0] = str(Path(program).resolve().parent)
    what = Recording(
        Path(options.folder),
        options.steps,
        None if options.weights_from is None else Path(options.weights_from),
        options.noise,
    )
    with ExitStack() as undo:
        if REFERENCE in os.environ:
            undo.callback(ledger.bind(patches.CONFIGURE, without_partitions))
        if not options.has_dropout:
            undo.callback(ledger.bind(patches.DROPOUT, always(lambda input, *_, **__: input)))
        if not _USES_DS_TOPO.search(Path(program).read_text(encoding="utf-8")):
            _use_grid()
        undo.enter_context(recording(what))
        try:
            runpy.run_path(program, run_name="__main__")
        except Finished:
            dist.barrier()  # no rank ends while another one may still receive from it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def without_partitions(construct: Any) -> Any:
    """Build the replacement of DeepSpeed's config that omits ZeRO 1 and 2."""

    @wraps(construct)
    def configure(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        content = config
        if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
            content = json.loads(Path(config).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            section = content.get("zero_optimization")
            if not isinstance(section, dict) or section.get("stage") != 3:
                content = {name: value for name, value in content.items() if name != "zero_optimization"}
        construct(self, content, *arguments, **named)

    return configure


def _use_grid() -> None:
    """Put a grid in use for a program that knows DeepSpeed alone."""
    from ds_topo import PipelineParallelGrid, init_distributed, use

    for name in ("transformers", "accelerate"):  # use() patches them where they are imported
        try:
            __import__(name)
        except ImportError:
            break
    init_distributed(verbose=False)
    use(PipelineParallelGrid(os.environ[TOPOLOGY_OVERRIDE]))


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main(sys.argv[1:])
