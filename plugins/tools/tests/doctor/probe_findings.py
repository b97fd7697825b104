"""Helpers that read findings for the tests of checks."""

from __future__ import annotations

GIB = 2**30


def levels(findings):
    return [finding.level for finding in findings]
