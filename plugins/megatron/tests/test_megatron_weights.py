"""Weights out of files into Megatron's parameters and back, and the optimizer's moments, in many layouts."""

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

from rlframework.errors import DataError, NotSupported
from rlframework.policy.checkpoint.reader import SavedTensors
from rlframework_megatron.coordinates import Place
from rlframework_megatron.gathering import Groups
from rlframework_megatron.main_params import Main, Mains
from rlframework_megatron.names import EMBEDDING, HEAD, local_parts, weight_shapes
from rlframework_megatron.state import load_from_folder
from rlframework_megatron.weight_layout import extent
from rlframework_megatron.weights import Holding, gather_weights, restore, snapshot

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
    """Stands for a chunk: the parameters that some parts lie in, full of nonsense."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        self.held = {name: nn.Parameter(torch.full(shape, torch.nan)) for name, shape in shapes.items()}

    def get_parameter(self, name: str) -> nn.Parameter:
        return self.held[name]

    def named_parameters(self, *arguments: Any, **more: Any) -> Any:
        return iter(self.held.items())


def holding_at(folder: Path, place: Place) -> Holding:
    config = config_of(folder)
    shapes: list[dict[str, list[int]]] = [{} for _ in range(place.chunks)]
    for part in local_parts(config, place):
        shape = shapes[part.chunk].setdefault(part.parameter, [0] * len(part.shape))
        for _, here in part.regions:
            shape[:] = [max(old, one.stop) for old, one in zip(shape, here, strict=True)]
        if "word_embeddings" in part.parameter or "output_layer" in part.parameter:
            shape[0] = place.vocabulary(config.vocab_size) // place.tensor_size
    return Holding(config, place, [Parameters(one) for one in shapes], Groups(CPU))


PLACES = {
    "all": Place(),
    "padded": Place(padded_vocabulary=64),
    "tensor": Place(tensor_rank=1, tensor_size=2, expert_tensor_rank=1, expert_tensor_size=2),
    "half_groups": Place(tensor_rank=5, tensor_size=8, expert_tensor_rank=1, expert_tensor_size=2),
    "stage": Place(tensor_rank=1, tensor_size=2, pipeline_rank=1, pipeline_size=2, chunks=2, expert_size=2),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_reads_its_parts_and_no_more(folders, kind, place, monkeypatch):
    """Each element of its parameters once, from the place where it is in the file; padding is 0."""
    holding, read = holding_at(folders / kind, place), []
    of_files = SavedTensors.part

    def counted(self: SavedTensors, name: str, where: tuple[slice, ...]) -> Tensor:
        read.append(extent(where))
        return of_files(self, name, where)

    monkeypatch.setattr(SavedTensors, "part", counted)
    load_from_folder(holding, folders / kind)
    assert sum(read) == sum(extent(whole) for part in holding.parts for whole, _ in part.regions)
    files = load_file(folders / kind / "model.safetensors")
    padding = 0
    for parameter, parts in holding.parameters():
        for part in parts:
            for whole, here in part.regions:
                assert torch.equal(parameter[here], files[part.name][whole])
                parameter.data[here] = 0
        assert not parameter.any()
        padding += parameter.numel() - sum(extent(here) for part in parts for _, here in part.regions)
    assert sum(read) + padding == sum(parameter.numel() for parameter, _ in holding.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_tells_what_the_files_have(folders, kind):
    holding = holding_at(folders / kind, Place(padded_vocabulary=64))
    load_from_folder(holding, folders / kind)
    files = load_file(folders / kind / "model.safetensors")
    found = dict(gather_weights(holding, holding.weights))
    assert set(found) == set(files)
    assert all(torch.equal(found[name], files[name]) for name in files)
    owners = [weight.untyped_storage().data_ptr() for weight in found.values()]
    assert len(set(owners)) == len(owners)  # each may be kept without keeping what it was fused with


def test_a_snapshot_is_a_copy_and_comes_back(folders):
    holding = holding_at(folders / "qwen2", PLACES["stage"])
    load_from_folder(holding, folders / "qwen2")
    before = [parameter.detach().clone() for parameter, _ in holding.parameters()]
    kept = snapshot(holding)
    for parameter, _ in holding.parameters():
        parameter.data.add_(1)
    restore(holding, kept)
    assert all(torch.equal(one, old) for (one, _), old in zip(holding.parameters(), before, strict=True))


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
        holding = holding_at(folder, Place(tensor_rank=rank, tensor_size=2, expert_rank=rank, expert_size=2))
        load_from_folder(holding, folder)
        for parameter, parts in holding.parameters():
            for part in parts:
                for whole, here in part.regions:
                    wanted = right[part.name][whole]
                    wanted = wanted.half().float() if kind == "qwen3" else wanted
                    assert torch.equal(parameter[here], wanted), part.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: {name: one for name, one in files.items() if "o_proj" not in name},
            "has no model.layers.0.self",
        ),
        (
            lambda files: {name: one[:1] for name, one in files.items()},
            r"shape \(1, 16\), and its config.json .* \(41,",
        ),
    ],
    ids=["missing", "shape"],
)
def test_files_of_another_model_are_refused(folders, tmp_path, change, message):
    folder = rewritten(folders / "llama", tmp_path / "model", change)
    with pytest.raises(DataError, match=message):
        load_from_folder(holding_at(folder, Place()), folder)


def test_quantised_files_are_refused(folders):
    holding = holding_at(folders / "llama", Place())
    holding.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(DataError, match="are quantised"):
        load_from_folder(holding, folders / "llama")


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_optimizers_that_hide_their_state_are_refused():
    hidden = SimpleNamespace(
        is_stub_optimizer=False,
        optimizer=torch.optim.AdamW([nn.Parameter(torch.zeros(1))]),
        config=SimpleNamespace(use_precision_aware_optimizer=True),
    )
    with pytest.raises(NotSupported, match="AdamW of megatron-core holds it in a form of its own"):
        Mains(SimpleNamespace(chained_optimizers=[hidden]), CPU)


def test_optimizers_that_count_steps_by_group():
    """As Apex's and Transformer Engine's FusedAdam do, which are not here."""
    values, group, optimizer = torch.zeros(3), {}, SimpleNamespace(state={})
    main = Main(values, 0, 3, optimizer, group)
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
    from rlframework_megatron.gathering import place_here
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
            place = replace(place_here(), padded_vocabulary=48)
            policy = PolicyConfig(model_name=str(folder))
            (chunk,) = build_chunks(config_of(folder), policy, MegatronConfig(), ranks, place)
            holding = Holding(config_of(folder), place, [chunk], Groups.current(CPU))
            load_from_folder(holding, folder)
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
    assert set(holding.weights) == set(weight_shapes(config_of(folder)))
    assert {name for name, _ in chunk.named_parameters()} == {part.parameter for part in holding.parts}


CASES = (
    "dense_between:pipeline=2,virtual=2:bf16:plain",
    "qwen3:tensor=4:fp32:distributed",
    "experts:expert=2,pipeline=2:bf16:distributed",
)
"""Each optimizer, precision and way to split at least once; `megatron_ranks.py` takes any other."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_agree_with_the_whole_model(folders):
    """Loading, telling, pieces, snapshots, steps and going on from moments: see `megatron_ranks.py`."""
    program = Path(__file__).with_name("megatron_ranks.py")
    # megatron-core's distributed optimizer calls what torch 2.13 says is deprecated
    told = complaints(program, str(folders), *CASES, warnings=("ignore::FutureWarning",), seconds=540)
    assert told == {case: {} for case in CASES}
