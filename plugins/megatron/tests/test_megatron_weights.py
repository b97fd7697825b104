"""Loading weights from files into Megatron's parameters, gathering them, and moments, in many layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_ranks import complaints
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlframework.base.errors import DataError, NotSupported
from rlframework.policy.checkpoint.saved import SavedTensors
from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.gathering import Groups
from rlframework_megatron.main_params import MainParam, MainParams
from rlframework_megatron.names import EMBEDDING, HEAD, local_shards, weight_shapes
from rlframework_megatron.state import load_from_folder
from rlframework_megatron.weight_layout import extent
from rlframework_megatron.weights import LocalModel, gather_weights, restore, snapshot

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "vocab_size": 41,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 4}),
    "experts": ("Qwen3Moe", EXPERTS),
    "dense_between": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A model of each kind, as transformers writes it. Do not write to them."""
    import transformers
    from transformers import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("models")
    generator = torch.Generator().manual_seed(0)
    for kind, (family, own) in KINDS.items():
        model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**{**SIZES, **own}))
        for name, parameter in model.named_parameters():
            parameter.data.normal_(std=0.3, generator=generator).add_(1.0 if "norm" in name else 0.0)
        model.save_pretrained(path / kind)
    return path


def config_of(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


class Parameters(nn.Module):
    """A stand-in for a chunk: parameters with arbitrary values for some shards."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(torch.full(shape, torch.nan)) for name, shape in shapes.items()}

    def get_parameter(self, name: str) -> nn.Parameter:
        return self.held[name]

    def named_parameters(self, *arguments: Any, **more: Any) -> Any:
        return iter(self.held.items())


def holding_at(folder: Path, coordinates: Coordinates) -> LocalModel:
    config = config_of(folder)
    shapes: list[dict[str, list[int]]] = [{} for _ in range(coordinates.chunks)]
    for shard in local_shards(config, coordinates):
        shape = shapes[shard.chunk].setdefault(shard.parameter, [0] * len(shard.shape))
        for _, local_slices in shard.regions:
            shape[:] = [max(old, one.stop) for old, one in zip(shape, local_slices, strict=True)]
        if "word_embeddings" in shard.parameter or "output_layer" in shard.parameter:
            shape[0] = coordinates.vocabulary(config.vocab_size) // coordinates.tensor_size
    return LocalModel(config, coordinates, [Parameters(one) for one in shapes], Groups(CPU))


PLACES = {
    "all": Coordinates(),
    "padded": Coordinates(padded_vocabulary=64),
    "tensor": Coordinates(tensor_rank=1, tensor_size=2, expert_tensor_rank=1, expert_tensor_size=2),
    "half_groups": Coordinates(tensor_rank=5, tensor_size=8, expert_tensor_rank=1, expert_tensor_size=2),
    "stage": Coordinates(tensor_rank=1, tensor_size=2, pipeline_rank=1, pipeline_size=2, chunks=2, expert_size=2),
}


@pytest.mark.parametrize("coordinates", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_only_its_shards(folders, kind, coordinates, monkeypatch):
    """Each element is read once, from its position in the file; padding is 0."""
    local_model, read = holding_at(folders / kind, coordinates), []
    of_files = SavedTensors.read_slice

    def counted(self: SavedTensors, name: str, where: tuple[slice, ...]) -> Tensor:
        if extent(where) > 1:  # a single element tells the dtype
            read.append(extent(where))
        return of_files(self, name, where)

    monkeypatch.setattr(SavedTensors, "read_slice", counted)
    load_from_folder(local_model, folders / kind)
    assert sum(read) == sum(extent(whole) for shard in local_model.shards for whole, _ in shard.regions)
    files = load_file(folders / kind / "model.safetensors")
    padding = 0
    for parameter, shards in local_model.parameters():
        for shard in shards:
            for whole, local_slices in shard.regions:
                assert torch.equal(parameter[local_slices], files[shard.name][whole])
                parameter.data[local_slices] = 0
        assert not parameter.any()
        padding += parameter.numel() - sum(
            extent(local_slices) for shard in shards for _, local_slices in shard.regions
        )
    assert sum(read) + padding == sum(parameter.numel() for parameter, _ in local_model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_gathers_the_weights_of_the_files(folders, kind):
    local_model = holding_at(folders / kind, Coordinates(padded_vocabulary=64))
    load_from_folder(local_model, folders / kind)
    files = load_file(folders / kind / "model.safetensors")
    found = dict(gather_weights(local_model, local_model.weights))
    assert set(found) == set(files)
    assert all(torch.equal(found[name], files[name]) for name in files)
    owners = [weight.untyped_storage().data_ptr() for weight in found.values()]
    assert len(set(owners)) == len(owners)  # each can be kept without keeping the fused parameter


def test_a_snapshot_is_a_copy_and_can_be_restored(folders):
    local_model = holding_at(folders / "qwen2", PLACES["stage"])
    load_from_folder(local_model, folders / "qwen2")
    before = [parameter.detach().clone() for parameter, _ in local_model.parameters()]
    kept = snapshot(local_model)
    for parameter, _ in local_model.parameters():
        parameter.data.add_(1)
    restore(local_model, kept)
    assert all(torch.equal(one, old) for (one, _), old in zip(local_model.parameters(), before, strict=True))


# -- what files call weights ------------------------------------------------------------------------------------------


def rewritten(folder: Path, target: Path, change: Any) -> Path:
    """The model in `folder`, its tensors changed by `change`, in `target`."""
    target.mkdir()
    (target / "config.json").write_text((folder / "config.json").read_text())
    files = load_file(folder / "model.safetensors")
    save_file({name: weight.contiguous() for name, weight in change(files).items()}, target / "model.safetensors")
    return target


def stacked(files: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers holds them in memory."""
    found = {name: weight for name, weight in files.items() if ".experts." not in name}
    for layer in range(4):
        path = f"model.layers.{layer}.mlp.experts"
        one = {
            kind: torch.stack([files[f"{path}.{expert}.{kind}_proj.weight"] for expert in range(4)])
            for kind in ("gate", "up", "down")
        }
        found |= {f"{path}.gate_up_proj": torch.cat([one["gate"], one["up"]], 1), f"{path}.down_proj": one["down"]}
    return found


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", lambda files: {name.removeprefix("model."): weight for name, weight in files.items()}),
        ("tied", lambda files: {HEAD if name == EMBEDDING else name: weight for name, weight in files.items()}),
        ("experts", stacked),
        ("qwen3", lambda files: {name: weight.half() for name, weight in files.items()}),
    ],
    ids=["without_prefix", "under_the_head", "stacked_experts", "half_precision"],
)
def test_files_may_have_other_names_and_dtypes(folders, tmp_path, kind, change):
    folder = rewritten(folders / kind, tmp_path / "model", change)
    right = load_file(folders / kind / "model.safetensors")
    for rank in range(2):
        local_model = holding_at(folder, Coordinates(tensor_rank=rank, tensor_size=2, expert_rank=rank, expert_size=2))
        load_from_folder(local_model, folder)
        for parameter, shards in local_model.parameters():
            for shard in shards:
                for whole, local_slices in shard.regions:
                    wanted = right[shard.name][whole]
                    wanted = wanted.half().float() if kind == "qwen3" else wanted
                    assert torch.equal(parameter[local_slices], wanted), shard.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: {name: one for name, one in files.items() if "o_proj" not in name},
            "has no model.layers.0.self",
        ),
        (
            lambda files: {name: one[:1] for name, one in files.items()},
            r"shape \(1, 16\), but its config.json .* \(41,",
        ),
    ],
    ids=["missing", "shape"],
)
def test_files_of_another_model_are_rejected(folders, tmp_path, change, message):
    folder = rewritten(folders / "llama", tmp_path / "model", change)
    with pytest.raises(DataError, match=message):
        load_from_folder(holding_at(folder, Coordinates()), folder)


def test_quantised_files_are_rejected(folders):
    local_model = holding_at(folders / "llama", Coordinates())
    local_model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(DataError, match="are quantised"):
        load_from_folder(local_model, folders / "llama")


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_optimizers_with_internal_state_are_rejected():
    hidden = SimpleNamespace(
        is_stub_optimizer=False,
        optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(1))]),
        config=SimpleNamespace(use_precision_aware_optimizer=True),
    )
    with pytest.raises(NotSupported, match="megatron-core's AdamW stores it in an internal form"):
        MainParams(SimpleNamespace(chained_optimizers=[hidden]), CPU)


def test_optimizers_that_count_steps_by_group():
    """Like the FusedAdam of Apex and Transformer Engine, which are not installed."""
    values, group, optimizer = torch.zeros(3), {}, SimpleNamespace(state={})
    main = MainParam(values, 0, 3, optimizer, group)
    assert main.steps() == 0
    main.set_moments(5, torch.ones(3), torch.full((3,), 2.0))
    assert main.steps() == group["step"] == 5
    assert set(optimizer.state[values]) == {"exp_avg", "exp_avg_sq"}


# -- with megatron-core -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_transformers(folders, kind):
    from transformers import AutoModelForCausalLM

    from rlframework.config.policy import PolicyConfig
    from rlframework.interfaces.worker_group import WorkerContext
    from rlframework_megatron import cpu
    from rlframework_megatron.config import MegatronConfig
    from rlframework_megatron.gathering import local_coordinates
    from rlframework_megatron.model import build_chunks
    from rlframework_megatron.parallel import Groups as Ranks
    from rlframework_megatron.parallel import Sizes
    from rlframework_megatron.upstream import quiet

    folder = folders / kind
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.randint(0, 41, (3, 9), generator=torch.Generator().manual_seed(1))
    ranks = Ranks(WorkerContext(), CPU, Sizes())
    try:
        with quiet(), cpu.on(CPU), torch.no_grad():
            coordinates = replace(local_coordinates(), padded_vocabulary=48)
            policy = PolicyConfig(model_name=str(folder))
            (chunk,) = build_chunks(config_of(folder), policy, MegatronConfig(), ranks, coordinates)
            local_model = LocalModel(config_of(folder), coordinates, [chunk], Groups.current(CPU))
            load_from_folder(local_model, folder)
            chunk.post_process = False
            hidden = chunk(tokens, torch.arange(9).expand(3, 9)).transpose(0, 1)
            head = chunk.shared_embedding_or_output_weight() if kind in ("tied", "qwen3") else chunk.output_layer.weight
            found = hidden @ head.T
    finally:
        Ranks.leave()
    with torch.no_grad():
        wanted = model(tokens).logits
    assert not found[..., 41:].any()
    assert (found[..., :41] - wanted).norm() < 1e-5 * wanted.norm()
    assert wanted.std() > 0.5
    assert set(local_model.weights) == set(weight_shapes(config_of(folder)))
    assert {name for name, _ in chunk.named_parameters()} == {shard.parameter for shard in local_model.shards}


CASES = (
    "dense_between:pipeline=2,virtual=2:bf16:plain",
    "qwen3:tensor=4:fp32:distributed",
    "experts:expert=2,pipeline=2:bf16:distributed",
    "experts:expert=2,tensor=2,sequence=1:bf16:distributed",
)
"""Each optimizer, precision and layout at least once; `megatron_ranks.py` accepts any other."""


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_four_ranks_agree_with_the_whole_model(folders):
    """Loading, gathering, shards, snapshots, steps and resuming from moments: see `megatron_ranks.py`."""
    program = Path(__file__).with_name("megatron_ranks.py")
    # megatron-core's distributed optimizer calls what torch 2.13 says is deprecated
    told = complaints(program, str(folders), *CASES, warnings=("ignore::FutureWarning",), seconds=540)
    assert told == {case: {} for case in CASES}
