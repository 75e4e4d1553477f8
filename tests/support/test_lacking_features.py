"""Only tests that fail by nothing but the error of a lacking feature are skipped with older releases."""

from __future__ import annotations

import pytest

from tests.support.lacking_features import lacking

LACKS = "DualPipeVModule needs DeepSpeed >= 0.19.8, but 0.19.7 is installed"
ERROR = f"RuntimeError: {LACKS}. Older releases do not have this schedule."
OF_RANKS = f"""E   tests.support.ranks.RankFailure: train on 2 ranks, every rank's report:
E   --- rank 0, 1: error: {ERROR}
E   Traceback (most recent call last):
E     File "a.py", line 1, in train
E   {ERROR}"""
OF_PROGRAM = f"""E   AssertionError: the program failed
[rank0]: Traceback (most recent call last):
[rank0]:   File "a.py", line 1, in main
[rank0]: {ERROR}
E   torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"""

OF_ASSERTION = f"""E   tests.support.ranks.RankFailure: train on 2 ranks, every rank's report:
E   --- rank 0, 1: error: {ERROR}
E   Traceback (most recent call last):
E     File "a.py", line 1, in train
E       assert losses(4) == expected
E   {ERROR}"""
EXPECTED_ANOTHER = """E   AssertionError: Regex pattern did not match.
E     Expected regex: 'a second backward pass'
E     Actual message: {}"""


@pytest.mark.parametrize(
    "report",
    [
        f"E   {ERROR}",
        OF_RANKS,
        OF_PROGRAM,
        OF_ASSERTION,
        EXPECTED_ANOTHER.format(f'"{LACKS}. Older releases do not."'),
        EXPECTED_ANOTHER.format(f"'train on 2 ranks:\\n--- rank 0, 1: error: {ERROR}\\nTraceback:\\n{ERROR}'"),
    ],
    ids=["test", "ranks", "program", "assertion", "expected", "expected-of-ranks"],
)
def test_report_of_lacking_feature_alone_has_its_error(report: str) -> None:
    assert lacking(report) == LACKS


@pytest.mark.parametrize(
    "report",
    [
        f"E   AssertionError: assert 0.3847 == 0.3772\n{ERROR} was a message of an earlier part",
        f"{OF_RANKS}\nE   --- rank 2: error: ValueError: shapes differ",
        f"{OF_RANKS}\nE   --- rank 2: missed the deadline",
        f"E   ValueError: 3\nE   During handling of the above exception:\nE   {ERROR}",
        f"the program printed: {ERROR}\nE   assert 1 == 2",
        "E   assert 1 == 2",
        f"E   RuntimeError: another error\nE   {ERROR}",
        EXPECTED_ANOTHER.format("'shapes differ'"),
        EXPECTED_ANOTHER.format(f"'--- rank 0: error: {ERROR}\\n--- rank 1: error: ValueError: shapes differ'"),
        f"{OF_ASSERTION}\nE   assert 1 == 2",
    ],
    ids=["assertion", "other-rank", "hang", "chained", "printed", "plain", "two", "expected", "ranks", "besides"],
)
def test_report_of_another_failure_has_none(report: str) -> None:
    assert lacking(report) is None
