"""Records of a run besides its metrics: times of all phases, the run id of samples, and its environment."""

from __future__ import annotations

import json
from pathlib import Path

from rlframework import run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_phases_environment_and_samples_of_a_run(run_config, tmp_path):
    out = tmp_path / "run"
    run(run_config("grpo"))
    rows = lines(out / "metrics.jsonl")
    assert [row["step"] for row in rows if "time/validation" in row] == [0, 2, 3]
    assert all(("time/validation" in row) == ("validation/accuracy" in row) for row in rows)
    for row in rows[1:]:
        phases = row["time/generate"] + row["time/logprobs"] + row["time/train"]
        assert 0.0 < phases <= row["time/step"]
    environment = json.loads((out / "environment.json").read_text())
    samples = lines(out / "samples.jsonl")
    assert {sample["run"] for sample in samples} == {environment["run_id"]}
    assert {sample["kind"] for sample in samples} == {"train", "validation"}
    assert "probe_tasks" in {plugin["distribution"].split(" ")[-1] for plugin in environment["plugins"]}
