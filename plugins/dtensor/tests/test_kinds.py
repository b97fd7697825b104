"""Every kind of causal language model is computed as its rows one by one, or rejected: docs/reference/models.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from causal_kinds import KINDS
from kind_outcomes import outcomes
from kind_ranks import ContextRanks
from models_page import PAGE, TARGET, row_of, rows_of_page, version_of_page

from rlframework_dtensor.worker import DTensorPolicyWorker

TEXT = PAGE.read_text()
ROWS = rows_of_page(TEXT)
SAME_VERSION = transformers.__version__ == version_of_page(TEXT)
WHAT_TO_DO = "run `python docs/tools/models_page.py {kind}` and look at the difference in docs/reference/models.md"


@pytest.fixture(scope="module")
def ranks() -> Iterator[ContextRanks]:
    """Two ranks of context parallelism, for all kinds."""
    made = ContextRanks(TARGET, modes=["packed"])
    yield made
    made.close()


def test_the_page_has_every_kind_and_none_that_differs():
    if SAME_VERSION:
        assert ROWS.keys() == KINDS.keys(), WHAT_TO_DO.format(kind="")
    assert [row for row in ROWS.values() if "differs" in row] == []


@pytest.mark.slow
@pytest.mark.xdist_group("kinds")  # they share the two ranks
@pytest.mark.parametrize("kind", sorted(KINDS.keys() | ROWS.keys()))
def test_a_kind_is_equal_to_its_rows_one_by_one_or_rejected(kind: str, tmp_path: Path, ranks: ContextRanks):
    if kind not in KINDS:
        assert not SAME_VERSION, WHAT_TO_DO.format(kind="")
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    found = outcomes(KINDS[kind], tmp_path, DTensorPolicyWorker) | {"context": ranks.outcome(tmp_path)}
    assert {column: outcome for column, outcome in found.items() if outcome.startswith("differs")} == {}
    if SAME_VERSION:
        assert row_of(kind, found) == ROWS[kind], WHAT_TO_DO.format(kind=kind)
