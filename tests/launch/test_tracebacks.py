"""An error of several ranks is printed once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_topo.launch.tracebacks import digest_of
from tests.support.ports import free_port

PROGRAM = """
import sys
import torch.distributed as dist
from ds_topo.launch.joining import join

join(30, "gloo", end_with_launcher=False, verbose=False)
rank = dist.get_rank()
if sys.argv[1] == "restored":
    hook = sys.excepthook
    dist.barrier()
    dist.destroy_process_group()
    assert type(hook).__name__ == "SharedTraceback" and sys.excepthook is not hook
    sys.exit(0)
raise ValueError("of rank 2" if rank == 2 else "of the others")
"""


def _outputs(what: str, folder: Path) -> list[str]:
    """Return what each of three ranks has written to standard error."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    port, ranks = str(free_port()), []
    for rank in range(3):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
        environment = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, str(program), what]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    return [each.communicate(timeout=120)[1] for each in ranks]


def test_each_different_error_is_printed_once(tmp_path: Path) -> None:
    outputs = _outputs("failed", tmp_path)
    assert "ValueError: of rank 2" in outputs[2]
    assert ["Traceback" in output for output in sorted(outputs[:2], key=len)] == [False, True], outputs
    [short] = [line for output in outputs for line in output.splitlines() if "ends by the same error as rank" in line]
    assert "which has printed it in full: ValueError: of the others" in short


@pytest.mark.thorough
def test_former_hook_is_back_after_the_job(tmp_path: Path) -> None:
    assert not any("Traceback" in output for output in _outputs("restored", tmp_path))


def test_causes_that_the_message_contains_do_not_count() -> None:
    def raised(cause: Exception | None) -> str:
        try:
            raise ValueError("all: disk full") from cause
        except ValueError as error:
            return digest_of(error, error.__traceback__)

    assert raised(None) == raised(OSError("disk full")) != raised(OSError("another cause"))


def test_causes_in_a_circle_end() -> None:
    first, second = ValueError("no"), ValueError("no")
    first.__cause__, second.__cause__ = second, first
    assert digest_of(first, None) == digest_of(second, None)
