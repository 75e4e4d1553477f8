"""README's first example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.ranks import run_ranks

README = Path(__file__).parents[1] / "README.md"


def _run_source(source: str) -> None:
    exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})


def test_the_first_example_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert "PipelineModule" in blocks[0]
    run_ranks(4, _run_source, blocks[0])
