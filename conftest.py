"""Shared by all tests: one thread, one Ray per session, one tiny model."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests download nothing

import signal
import string
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlframework.workers import processes

# A shell starts background jobs with SIGINT ignored, and the processes of the tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Imported once in the process that worker processes are forked from, as hundreds of tests start such workers. Engines
# look for GPUs when they are imported, and CUDA cannot be used in a process forked from one that did.
if not Path("/dev/nvidia0").exists():
    processes.PRELOADED = (
        "rlframework.conformance.inspected_worker",
        "rlframework.conformance.mutants",
        "rlframework.conformance.probe_worker",
        "rlframework.plugins.builtin",
        "rlframework_dtensor.worker",
        "rlframework_deepspeed.worker",
        "rlframework_megatron.worker",
        "rlframework_ddp.worker",
        *processes.PRELOADED,
    )

ALPHABET = string.digits + string.ascii_lowercase + " +-*=?.,:\n"

SAMPLED = {
    "plugins/deepspeed/tests/test_deepspeed_context.py::test_context_parallel_rows_equal_rows_one_by_one": 8,
    "plugins/deepspeed/tests/test_deepspeed_kinds.py::test_a_kind_is_equal_or_rejected_as_on_the_dtensor_backend": 40,
    "plugins/deepspeed/tests/test_deepspeed_layouts.py::test_a_step_of_several_workers_is_that_of_the_oracle": 9,
    "plugins/deepspeed/tests/test_deepspeed_layouts.py::test_a_step_with_heads_exchanged_is_that_of_the_oracle": 3,
    "plugins/deepspeed/tests/test_deepspeed_layouts.py::test_a_step_with_images_is_that_of_the_oracle": 2,
    "plugins/deepspeed/tests/test_deepspeed_native.py::test_training_goes_on_to_the_bit": 2,
    "plugins/deepspeed/tests/test_deepspeed_state_layout.py::test_the_estimate_is_what_exists": 6,
    "plugins/dtensor/tests/test_conformance.py::TestMutants::test_mutant_is_caught": 24,
    "plugins/dtensor/tests/test_kinds.py::test_a_kind_is_equal_to_its_rows_one_by_one_or_rejected": 48,
    "plugins/dtensor/tests/test_multimodal.py::test_logprobs_loss_and_gradients_match_each_row_alone": 3,
    "plugins/dtensor/tests/test_multimodal.py::test_two_ranks_match_the_loss_and_gradients_of_one": 9,
    "plugins/dtensor/tests/test_state_layout.py::test_the_estimate_is_what_exists": 16,
    "plugins/dtensor/tests/test_tensor_parallel.py::test_sequence_parallel_step_matches_the_oracle": 6,
    "plugins/dtensor/tests/test_tensor_parallel.py::test_tensor_parallel_step_matches_the_oracle": 3,
    "plugins/dtensor/tests/test_tensor_parallel_kinds.py::test_a_kind_over_two_ranks_equals_its_rows_one_by_one": 12,
    "plugins/megatron/tests/test_megatron_layouts.py::test_a_mixture_of_experts_computes_the_same_beside_other_axes": 3,
    "plugins/megatron/tests/test_megatron_layouts.py::test_several_axes_at_once_compute_the_same": 9,
    "plugins/megatron/tests/test_megatron_lora.py::test_steps_match_the_oracle": 4,
    "plugins/megatron/tests/test_megatron_native.py::test_one_worker_resumes_to_the_bit": 2,
    "plugins/megatron/tests/test_megatron_state_layout.py::test_the_estimate_is_what_exists": 3,
    "tests/algorithms/test_distillation_runs.py::test_the_divergence_falls": 9,
    "tests/algorithms/test_policy_gradient_runs.py::test_an_algorithm_trains": 2,
    "tests/algorithms/test_policy_gradient_runs.py::test_quantities_of_sequences_are_those_of_one_worker": 2,
    "tests/algorithms/test_ppo_runs.py::test_backends_and_batching_modes_agree": 4,
    "tests/batch/test_collectives.py::test_every_rank_gets_all_rows_in_rank_order": 10,
    "tests/conformance/test_environment.py::TestEpisodeMutants::test_mutant_is_caught": 6,
    "tests/conformance/test_generation.py::TestMutants::test_mutant_is_caught": 12,
    "tests/conformance/test_generation.py::test_a_plain_engine_passes": 6,
    "tests/conformance/test_parity.py::test_a_sound_backend_agrees_at_any_learning_rate": 3,
    "tests/conformance/test_worker_group.py::TestMutants::test_mutant_is_caught": 4,
    "tests/environments/test_mcp.py::test_the_server_ends_with_the_run": 2,
    "tests/environments/test_own_reward.py::test_accepted_functions": 3,
    "tests/estimates/test_model_size.py::test_activations_are_what_a_model_saves": 4,
    "tests/examples/test_plugins.py::test_each_part_conforms": 3,
    "tests/generation/test_decoding_on_a_device.py::test_it_waits_once_for_sixteen_tokens_and_allocates_once": 2,
    "tests/generation/test_kinds.py::test_rows_are_those_of_whole_forwards": 3,
    "tests/policy/head/test_head.py::test_compiled_chunks_match_the_formula": 2,
    "tests/rollout/test_training_on_episodes.py::test_grpo_learns_a_game_of_two_turns": 2,
    "tests/runner/test_lora.py::test_a_run_goes_on_from_adapters_and_ends_with_a_merged_model_and_the_adapters": 2,
    "tests/runner/test_own_parts.py::test_an_own_loss": 4,
    "tests/runner/test_reward_model_runs.py::test_a_reward_model_learns_held_out_pairs": 3,
    "tests/training/test_sharded_checkpoints.py::test_either_form_is_gone_on_from_without_being_told": 2,
    "tests/weight_sync/test_faults_in_runs.py::test_a_fault_is_caught_and_a_sound_refit_recovers": 15,
    "tests/weight_sync/test_faults_in_runs.py::test_an_adapter_that_is_not_delivered_is_caught_before_the_next_step": 3,
}
"""Tests with many or long cases, of which only every n-th runs without `--thorough`."""

_imported = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--thorough`."""
    parser.addoption("--thorough", action="store_true", help="run also what conftest.py leaves out of `make test`")


def _keep_imports() -> None:
    """Exempt imported modules from garbage collection, which would otherwise scan them in thousands of tests."""
    global _imported
    if len(sys.modules) >= _imported + 50:
        gc.collect()
        gc.freeze()
        _imported = len(sys.modules)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `--thorough`, and allow for the compilation of kernels on a GPU."""
    if not config.getoption("thorough"):
        _sample(config, items)
    # kernels are compiled first, which takes minutes, and compilers and NCCL warn; show it, and go on
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(600))


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        out = seen[test] % SAMPLED.get(test, 1) or item.get_closest_marker("thorough")
        (left_out if out else kept).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Most modules are imported after collection."""
    _keep_imports()


def pytest_runtest_logfinish() -> None:
    """Some engines are imported by the first test with a worker."""
    _keep_imports()


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """The session's Ray. Mark tests that use it `@pytest.mark.xdist_group("ray")`, so that one process runs them."""
    from rlframework.workers.ray import runtime

    runtime.acquire(0)
    yield
    runtime.release(0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only directory of a random Llama (2 layers, hidden size 32, fp32, tied) with a character tokenizer."""
    from rlframework.huggingface.model_directories import make_llama
    from rlframework.huggingface.tokenizer import character_tokenizer

    path = tmp_path_factory.mktemp("models") / "tiny_llama"
    return make_llama(path, character_tokenizer(ALPHABET), hidden=32, layers=2, heads=4, kv_heads=2, max_positions=128)
