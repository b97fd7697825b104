"""Every kind of causal language model is computed as its rows one by one, or rejected before any work; docs/models.md.

After an update of transformers, `python docs/tools/models_page.py` writes the page again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from causal_kinds import KINDS, NO_TEXT_MODEL
from kind_outcomes import outcomes
from models_page import PAGE, row_of, rows_of_page

from rlframework_dtensor.worker import DTensorPolicyWorker

ROWS = rows_of_page(PAGE.read_text())


def test_the_page_has_every_kind_of_the_installed_transformers():
    assert ROWS.keys() == KINDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - NO_TEXT_MODEL.keys()))
def test_a_kind_is_equal_to_its_rows_one_by_one_or_rejected(kind: str, tmp_path: Path):
    assert row_of(kind, outcomes(KINDS[kind], tmp_path, DTensorPolicyWorker)) == ROWS[kind]
