"""The reference of a worker: how weights are mixed, and which workers have none to mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.base.errors import NotSupported
from rlframework.policy.engine import Engine
from rlframework.policy.scoring import require_copy


def test_mixing_is_in_fp32_and_leaves_integers_to_the_policy() -> None:
    """The mean of 256 and 272 with the weights 0.875 and 0.125 is 258, the next number of bfloat16 after 256."""
    reference = {
        "float": torch.tensor([1.0, -2.0]),
        "half": torch.tensor([256.0], dtype=torch.bfloat16),
        "count": torch.tensor([3]),
    }
    policy = {
        "float": torch.tensor([3.0, 2.0]),
        "half": torch.tensor([272.0], dtype=torch.bfloat16),
        "count": torch.tensor([7]),
    }
    engine: Any = None
    Engine.mix(engine, reference, policy, 0.125)
    assert reference["float"].tolist() == [1.25, -1.5]
    assert reference["half"].tolist() == [258.0]
    assert reference["half"].dtype == torch.bfloat16
    assert reference["count"].tolist() == [7]


def test_a_worker_without_a_copy_says_so() -> None:
    with pytest.raises(NotSupported, match=r"sync_reference needs a reference policy .*init_reference_model=False"):
        require_copy(None, "sync_reference")
