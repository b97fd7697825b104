"""The worker of the deepspeed backend: it refuses to be made, and says that it comes in a later release."""

from __future__ import annotations

from typing import Any, NoReturn

from rlframework.errors import NotSupported
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework_deepspeed.config import INSTEAD, NOT_YET


class DeepSpeedPolicyWorker(PolicyWorker):
    """Not written yet: making one raises `NotSupported`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `NotSupported`, before Python complains about the methods that are missing."""
        raise NotSupported(f"{NOT_YET} {INSTEAD}")
