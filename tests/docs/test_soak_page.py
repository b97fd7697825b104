"""docs/results/soak.md: what `make soak` recorded becomes a row for each attack."""

from __future__ import annotations

import json

import soak_page


def test_the_last_line_of_an_attack_counts_and_one_that_did_not_end_is_shown():
    began = {"file": "test_a.py", "seed": 3, "outcome": "did not end", "seconds": None}
    ended = {"file": "test_a.py", "seed": 3, "outcome": "passed", "seconds": 1.25, "inputs": 1000, "largest_growth": 2}
    lines = [began | {"attack": "test_this[x]"}, began | {"attack": "test_that"}, ended | {"attack": "test_this[x]"}]
    report = soak_page.report_of(map(json.dumps, lines))
    assert [soak_page._row(attack) for attack in report["attacks"]] == [
        ("that", "did not end", "-", "-", "3", ""),
        ("this (`x`)", "passed", "1,000", "1", "3", "largest growth 2"),
    ]
    assert soak_page._total(report["attacks"]).startswith("2 attacks (1 did not end, 1 passed) with 1,000 inputs")


def test_an_attack_that_was_run_alone_replaces_itself_with_its_date_and_commit():
    old = {"file": "test_a.py", "attack": "test_b", "outcome": "failed", "figures": {}}
    report = {"date": "2026-01-01", "commit": "aaa", "attacks": [old | {"attack": "test_c"}, old]}
    new = {"date": "2026-01-02", "commit": "bbb", "attacks": [old | {"outcome": "passed", "figures": {"steps": 9}}]}
    found = soak_page.added(report, new, None)
    assert (found["date"], found["commit"]) == ("2026-01-01", "aaa")
    assert [attack["outcome"] for attack in found["attacks"]] == ["passed", "failed"]
    assert found["attacks"][0]["figures"] == {"steps": 9, "date": "2026-01-02", "commit": "bbb"}
    assert found["attacks"][1]["figures"] == {}
    assert soak_page.added(report, new, "ccc")["attacks"][0]["figures"]["commit"] == "ccc"
