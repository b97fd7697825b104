"""Broken worker groups: each changes one thing of a sound one, so they work on any class that can have two workers.

None leaves a process: what it does not end, the bench of the suite ends.
"""

from __future__ import annotations

from rlframework.conformance.mutants.worker_group import calls, lifecycle, results

MUTANTS = (*calls.MUTANTS, *results.MUTANTS, *lifecycle.MUTANTS)
