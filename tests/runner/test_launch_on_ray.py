"""The same run on two Ray workers: the same numbers as in one process."""

from __future__ import annotations

import pytest

from rlframework import run
from rlframework.base.errors import DataError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.slow,
]

RAY = ("worker_group.name=ray", "worker_group.num_workers=2")


def test_two_workers_give_the_losses_of_one(run_config, tmp_path):
    options = ("algorithm.loss.kl_coef=0.05", "algorithm.epochs_per_batch=2", "algorithm.num_steps=2")
    alone = run(run_config("grpo", f"output_dir={tmp_path}/one", *options))
    shared = run(run_config("grpo", f"output_dir={tmp_path}/two", *options, *RAY))
    for one, two in zip(alone.history[1:], shared.history[1:], strict=True):
        assert two["train/reward"] == one["train/reward"]
        for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()


def test_a_users_mistake_in_a_worker_is_the_users_error(run_config, tiny_llama):
    with pytest.raises(DataError, match=r"policy\.model_name='/no/such/model'"):
        run(run_config("grpo", *RAY, "policy.model_name=/no/such/model", f"policy.tokenizer_name={tiny_llama}"))
