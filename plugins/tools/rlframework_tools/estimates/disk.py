"""The disk that a run takes, and sizes as text."""

from __future__ import annotations

from rlframework.config.further_policies import FurtherPolicyConfig
from rlframework.config.sections import RunConfig

CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weight and two moments in fp32."""
REFERENCE_BYTES = 4
"""Bytes per parameter of a reference that `algorithm.reference_sync` moves, which checkpoints have too."""


def disk(config: RunConfig, parameters: int, trained: int) -> dict[str, int]:
    """The most bytes that the run has on disk at once, by purpose.

    Includes the checkpoint being written, besides those that are kept. `trained` is the number of parameters in a
    checkpoint.
    """
    steps, section, every = config.algorithm.num_steps, config.checkpoints, config.recording.every
    most = section.keep_last + section.keep_best + 1
    written = -(-steps // section.every) if steps and section.every else most  # 0 steps: of epochs, not known
    kept = min(most, written) if section.every else 0
    recorded = len({*config.recording.steps, *(range(every, steps + 1, every) if every else ())})
    recorded *= not isinstance(config.policy, FurtherPolicyConfig)
    moved = getattr(config.algorithm, "reference_sync", None) and not isinstance(config.policy, FurtherPolicyConfig)
    each = CHECKPOINT_BYTES + (REFERENCE_BYTES if moved else 0)
    if not getattr(config.policy, "trained", True):
        return {}
    found = {
        "trained model": 4 * parameters,
        "1 checkpoint" if kept == 1 else f"{kept} checkpoints": kept * each * trained,
        "1 recorded step" if recorded == 1 else f"{recorded} recorded steps": recorded * 4 * parameters,
    }
    return {name: size for name, size in found.items() if size}


def gib(size: int | None) -> str:
    """Format bytes in GiB with two or three significant digits, "<0.001" for less than a MiB, "?" if unknown."""
    if size is None:
        return "?"
    value = size / 2**30
    if 0 < value < 0.001:
        return "<0.001"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
