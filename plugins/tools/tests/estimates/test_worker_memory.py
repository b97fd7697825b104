"""The memory of a worker and of an engine in a process of its own, against sums written out by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from rlframework import load_config
from rlframework.config.policy import LoraConfig
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import GenerationEngineRecord
from rlframework_tools.estimates.engines import engines_of, gpus_taken
from rlframework_tools.estimates.estimate import layout_of
from rlframework_tools.estimates.model_size import BlockSize, LayerShape, ModelSize, model_size
from rlframework_tools.estimates.row_sizes import Rows
from rlframework_tools.estimates.state_layout import PlannedWorker
from rlframework_tools.estimates.worker_memory import CUDA_CONTEXT, MemoryUse, peak, worker_memory

SIZE = ModelSize(
    blocks=(BlockSize(300),) * 2,
    embedding=200,
    head=0,
    rest=200,
    trained=1000,
    vocabulary=10,
    layer=LayerShape(hidden=4, query=4, key_value=2, heads=1, intermediate=8),
)
ROWS = Rows(count=32, mean=10.0, longest=20, generated=96)


def memory_of(config, model, rows, device="cpu", *, reference=False, gpu=None):
    worker = PlannedWorker(device, model.trained, gpu)
    layout = layout_of(config, create_manager(()), worker)
    return worker_memory(config, layout, model, rows, worker, reference=reference)


def bytes_of(uses: list[MemoryUse]) -> dict[str, int]:
    return {use.name: use.bytes for use in uses}


def test_the_parts_of_a_worker_s_memory(run_config):
    config = run_config("grpo", "policy.batching.tokens=64")
    found = bytes_of(memory_of(config, SIZE, ROWS, reference=True))
    # two norms: 8 x 4 for the fp32 input and the result, 4 x 4 for the product's input; attention and MLP below
    layer = 2 * (8 * 4 + 4 * 4) + 4 * (2 * 4 + 2 * 2) + 4 + 4 * 8 * 4
    backward = 28 * 4  # the final norm's; the MLP's is 2 x 4 x (8 + 4)
    assert found == {
        "program": 400 << 20,
        "weights": 4000,
        "gradients": 4000,
        "moments": 8000,
        "reference": 4000,
        "copy of the weights": 4000,
        "weights and gradients of a unit": 8 * 300,
        "activations": 64 * (2 * layer + backward),
        "logits": 3 * 4 * 64 * 10,
        "keys and values": (2 + 2) * 2 * 32 * 20 * 2 * 4,
        "sampling": 3 * 4 * 32 * 10,
    }


@pytest.mark.parametrize(
    ("algorithm", "options", "size", "expected"),
    [
        (  # adapters alone have gradients and moments, and the base is no second copy
            "grpo",
            {"policy": {"lora": LoraConfig(rank=4, target_modules=("q_proj",))}},
            {"trained": 50},
            {"weights": 4000, "gradients": 200, "moments": 400, "reference": None, "copy of the weights": None,
             "weights and gradients of a unit": None},
        ),
        (  # workers shard states and 32 rows, and generate with a copy; the tied end stays gathered
            "grpo",
            {"worker_group": {"num_workers": 4}},
            {},
            {"weights": 1000, "gradients": 1000, "moments": 2000, "generation model": 4000,
             "weights and gradients of a unit": 16 * 300 + 2 * 4 * 200,
             "keys and values": (2 + 2) * 2 * 8 * 20 * 2 * 4},
        ),
        (  # full checkpointing keeps the inputs of layers; one layer is recomputed, and its gradients exist
            "sft",
            {"policy": {"activation_checkpointing": "full"}},
            {},
            {"activations": 64 * (2 * 4 * 4 + 276 + 2 * 4 * (8 + 4))},
        ),
        (  # selective checkpointing keeps the input, and the results of products and attention
            "sft",
            {"policy": {"activation_checkpointing": "selective"}},
            {},
            {"activations": 64 * (2 * (3 * 4 * 4 + 48 + 4 + 2 * 8 * 4) + 276 + 2 * 4 * (8 + 4))},
        ),
        (  # logits are held in chunks of 32 MiB: 64 x 200,000 x 4 bytes are 49 MiB
            "sft",
            {},
            {"vocabulary": 200_000},
            {"logits": 3 * (32 << 20)},
        ),
    ],
)  # fmt: skip
def test_memory_by_settings(run_config, algorithm, options, size, expected):
    config = run_config(algorithm, "policy.batching.tokens=64")
    for section, values in options.items():
        changed = getattr(config, section).model_copy(update=values)
        config = config.model_copy(update={section: changed})
    found = bytes_of(memory_of(config, replace(SIZE, **size), ROWS, reference="lora" in str(options)))
    assert {name: found.get(name) for name in expected} == expected


def test_workers_that_generate_elsewhere_hold_no_cache(run_config):
    config = run_config("grpo", "generation.workers={group: inline}")
    assert not {"keys and values", "sampling", "generation model"} & bytes_of(memory_of(config, SIZE, ROWS)).keys()


def test_on_a_gpu_the_reference_and_the_program_lie_in_host_memory(run_config):
    uses = memory_of(run_config("grpo"), SIZE, ROWS, "cuda", reference=True)
    assert {use.name for use in uses if use.place == "host"} == {"program", "reference", "copy of the weights"}


def test_the_peak_is_what_is_always_there_and_the_largest_phase():
    parts = [
        MemoryUse("a", 100, "host"),
        MemoryUse("b", 10, "host", ("training", "updating")),
        MemoryUse("c", 5, "host", ("training",)),
        MemoryUse("d", 12, "host", ("generating",)),
        MemoryUse("e", 1000, "device"),
    ]
    assert peak(parts, "host") == 115
    assert peak(parts, "device") == 1000
    assert peak([], "device") == 0


# -- three models on eight H100, by hand ------------------------------------------------------------------------------

QWEN3_8B = Qwen3Config(
    hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    intermediate_size=12288, vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_32B = Qwen3Config(
    hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    intermediate_size=25600, vocab_size=151936, tie_word_embeddings=False,
)  # fmt: skip
QWEN3_30B_A3B = Qwen3MoeConfig(
    hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
    tie_word_embeddings=False,
)  # fmt: skip

TOKENS = 16_384


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parameters", "activations", "unit"),
    [
        (
            QWEN3_8B,
            # q and o 4096x4096, k and v 4096x1024, three of 4096x12288, norms of 4096 and of 128 for heads: 192,946,432
            36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
            + 2 * 151936 * 4096  # embedding and head
            + 4096,
            # a layer's input in bf16, for 36; one recomputed: norms 2 x 8 x 4096, heads' norms 6 x 5120, attention
            # 2 x (2 x 4096 + 2 x 1024) + 4 x 32, MLP 4 x 12288 x 2; its gradients 4 x (12288 + 4096)
            36 * 2 * 4096 + (65_536 + 30_720 + 20_480 + 128 + 98_304) + 65_536,
            151936 * 4096,  # the head is larger than a block
        ),
        (
            QWEN3_32B,
            64 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600 + 2 * 5120 + 2 * 128) + 2 * 151936 * 5120 + 5120,
            64 * 2 * 5120
            + (2 * 8 * 5120 + 6 * 9216 + 2 * (2 * 8192 + 2 * 1024) + 4 * 64 + 8 * 25600)
            + 4 * (25600 + 5120),
            151936 * 5120,
        ),
        (
            QWEN3_30B_A3B,
            # 128 experts of three 2048x768 and a router
            48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 3 * 2048 * 768 + 128 * 2048 + 2 * 2048 + 2 * 128)
            + 2 * 151936 * 2048
            + 2048,
            48 * 2 * 2048
            # of each of 8 rows: in and out of 2048, gate, up, activation and product of 768, a weight, 4 indices
            + (2 * 8 * 2048 + 6 * 4608 + 2 * (2 * 4096 + 2 * 512) + 4 * 32 + 8 * (2 * (4096 + 3072 + 1) + 32) + 4 * 128)
            + 4 * (8 * (768 + 2048) + 2048),
            128 * 3 * 2048 * 768 + 2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 2 * 2048 + 2 * 128,  # a block
        ),
    ],
    ids=["8B", "32B", "30B-A3B"],
)
def test_models_on_eight_gpus_by_hand(shape, parameters, activations, unit, tmp_path):
    shape.save_pretrained(tmp_path)
    config = load_config(
        {
            "output_dir": "unused",
            "device": "cuda",
            "algorithm": {"name": "sft", "num_steps": 1},
            "environment": {"name": "addition"},
            "policy": {
                "model_name": str(tmp_path),
                "activation_checkpointing": "full",
                "batching": {"mode": "packed", "tokens": TOKENS},
            },
            "worker_group": {"name": "processes", "num_workers": 8},
        }
    )
    model = model_size(config.policy)
    assert model.parameters == parameters
    uses = memory_of(config, model, Rows(64, float(TOKENS), TOKENS), "cuda", gpu=79 << 30)
    expected = {
        "CUDA context": 600 << 20,
        "weights": 4 * parameters / 8,  # fp32, as all three
        "gradients": 4 * parameters / 8,
        "moments": 8 * parameters / 8,
        "weights and gradients of a unit": (3 * 2 + 4) * unit,
        "activations": TOKENS * activations,
        "logits": (4 + 2) * ((79 << 30) // 256),  # 1,766 tokens would be 2**28 logits, above a 256th of the memory
    }
    expected["logits"] = min(expected["logits"], 6 * 2**28)
    on_gpu = {use.name: use.bytes for use in uses if use.place == "device"}
    assert on_gpu == pytest.approx(expected, abs=1)
    assert peak(uses, "device") == pytest.approx(sum(expected.values()), abs=4)


GIB = 1 << 30
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28_672 + 2 * 8192
PARAMETERS = 2 * 128_256 * 8192 + 80 * LAYER + 8192  # 70,553,706,496
ROW = 82 * 2 * 1024 * 1024 * 2  # two layers more than 80, keys and values of 8 heads of 128, 1,024 tokens, bfloat16
SAMPLING = 3 * 4 * 128_256
H100 = PlannedWorker("cuda", PARAMETERS, 79 * GIB)


@pytest.fixture(scope="module")
def run_of_70b(tmp_path_factory):
    """`run_of_70b(trainer, engines, count)`: a run with 64 workers in the group `trainer`, and `count` engines."""
    folder = tmp_path_factory.mktemp("70b")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))

    def build(trainer: str, engines: str, count: int):
        policy = {"model_name": str(folder), "precision": "bfloat16", "train_global_batch_size": 64}
        generation = {"max_new_tokens": 1024, "workers": {"group": engines, "num_workers": count}}
        return load_config(
            {
                "algorithm": {"name": "grpo"},
                "environment": {"name": "addition"},
                "policy": policy,
                "generation": generation,
                "worker_group": {"name": trainer, "num_workers": 64},
            }
        )

    return build


def _engines(config, *, gpus=1, staged=False, beside=0):
    record = GenerationEngineRecord("own", "own:Engine", 2, gpus_per_engine=lambda _: gpus)
    rows = Rows(512, 1024.0, 1024, 512 * 1024)
    found = engines_of(config, record, staged, model_size(config.policy), rows, H100, beside=beside)
    assert found is not None
    return found


def test_an_engine_has_the_whole_model_and_a_row_on_its_gpu(run_of_70b):
    config = run_of_70b("ray", "ray", 8)
    found = _engines(config)
    assert found.device_bytes == CUDA_CONTEXT + 2 * PARAMETERS + ROW + SAMPLING  # 132.3 GiB
    assert found.device_bytes > 79 * GIB
    assert found.rows == 0
    assert not found.shares
    staged = _engines(config, staged=True)
    assert staged.device_bytes == CUDA_CONTEXT + 2 * 2 * PARAMETERS  # in an update, which the row is not in


def test_several_gpus_share_model_and_row(run_of_70b):
    found = _engines(run_of_70b("ray", "ray", 8), gpus=4)
    assert found.device_bytes == CUDA_CONTEXT + 2 * PARAMETERS // 4 + ROW // 4 + SAMPLING  # 33.5 GiB
    left = 79 * GIB - CUDA_CONTEXT - 2 * PARAMETERS // 4
    assert int(0.9 * left) // (ROW // 4 + SAMPLING) > 512 // 8  # so that all rows of an engine fit
    assert found.rows == 512 // 8
    assert _engines(run_of_70b("processes", "processes", 8), gpus=4, beside=left).rows == 0


@pytest.mark.parametrize(
    ("trainer", "engines", "gpus", "taken"),
    [
        ("ray", "ray", 1, 64 + 8),
        ("ray", "ray", 4, 64 + 32),
        ("processes", "processes", 1, 64),  # both begin at the first GPU
        ("processes", "processes", 9, 72),
        ("ray", "processes", 1, 64),
    ],
)
def test_gpus_are_counted_as_the_groups_are_placed(run_of_70b, trainer, engines, gpus, taken):
    config = run_of_70b(trainer, engines, 8)
    found = _engines(config, gpus=gpus)
    assert gpus_taken(config, [], found) == taken
    assert found.shares == (trainer != engines or trainer != "ray")


def test_ray_reserves_gpus_for_further_policies_too(run_of_70b):
    config = run_of_70b("ray", "ray", 8)
    assert gpus_taken(config, [config], _engines(config)) == 2 * 64 + 8
    others = run_of_70b("processes", "processes", 8)
    assert gpus_taken(others, [others], _engines(others)) == 64
