"""The sum of the gradients of microbatches, in half precision and in fp32, and the reductions of a step."""

from __future__ import annotations

import json

import pytest
import torch
from probe_forked import run_forked
from probe_reductions import count

from rlframework.algorithms.losses import NLLLoss
from rlframework.interfaces.worker_group import WorkerContext
from rlframework_conformance import cases
from rlframework_deepspeed.worker import DeepSpeedPolicyWorker


@pytest.fixture
def worker(tmp_path):
    """`worker(rows, world_size, precision, **section)`: a worker that takes microbatches of `rows` rows."""
    made = []

    def make(rows, world_size=1, precision="bfloat16", **section):
        path = cases.model("untied", tmp_path)
        made.append(
            DeepSpeedPolicyWorker(
                {
                    "model_name": str(path),
                    "train_global_batch_size": 8 * world_size,
                    "train_micro_batch_size": rows,
                    "batching": {"mode": "padded"},
                    "precision": precision,
                },
                cases.tokenizer(),
                init_reference_model=False,
                context=WorkerContext(world_size=world_size),
                backend_config=section,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(("bucket", "reduced"), [(None, None), (500, "fp32")])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_microbatches_are_added_in_fp32(worker, monkeypatch, stage, bucket, reduced):
    """Each is of half precision, as backward computes it; buckets smaller than a parameter change nothing."""
    zero = {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": True}
    opened = worker(2, zero_optimization=zero, data_types={"grad_accum_dtype": "fp32"}, communication_data_type=reduced)
    primitive, sums = opened.engine.forward_backward, []

    def gradients(microbatches, *args, **keys):
        primitive(microbatches, *args, **keys)
        return {id(parameter): one.clone() for parameter, one in opened.engine._shards.gradients()}

    def forward_backward(microbatches, *args, **keys):
        assert len(microbatches) == 4
        sums.append([gradients([one], *args, **keys) for one in microbatches])
        results = primitive(microbatches, *args, **keys)
        sums.append({id(parameter): one.clone() for parameter, one in opened.engine._shards.gradients()})
        return results

    monkeypatch.setattr(opened.engine, "forward_backward", forward_backward)
    opened.train(cases.batch(), NLLLoss())
    each, found = sums
    assert found
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        expected = sum(one[name] for one in each)
        assert torch.equal(each[0][name], each[0][name].bfloat16().float())
        assert torch.equal(gradient.view(-1), expected.view(-1))


@pytest.mark.slow
def test_stages_0_and_1_reduce_gradients_once_per_step(tmp_path):
    """Stages 2 and 3 reduce them, here in one bucket, in the backward of each of the four microbatches."""
    done = run_forked(count, cases.model("untied", tmp_path), (8, 2))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    for one, four in found[:2]:
        assert one == four
    one, four = found[2]
    assert four["allreduce_"] - one["allreduce_"] == 3
    one, four = found[3]
    assert (one["_reduce_scatter_base_"], four["_reduce_scatter_base_"]) == (1, 4)
