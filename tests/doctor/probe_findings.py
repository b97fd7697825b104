"""What the tests of checks read of findings."""

from __future__ import annotations

GIB = 2**30


def levels(findings):
    return [finding.level for finding in findings]
