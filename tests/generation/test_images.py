"""Generation from images: tiny vision-language models against plain forwards, and places of images in prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_vlms
import torch

from rlframework.base.errors import RequestError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.generation.media import Media, image_places
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework_transformers.engine import TransformersEngine
from rlframework_transformers.plugin import TransformersGenerationConfig

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz+=?")
IMAGES = [1, 0, 2, 1, 3]
GREEDY, SAMPLED = SamplingParams(0.0), SamplingParams(1.0, top_p=0.9)


@pytest.fixture(scope="module", params=tiny_vlms.FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model(family):
    return tiny_vlms.make_model(family)


@pytest.fixture(scope="module")
def rows(family):
    return tiny_vlms.make_rows(family, IMAGES, seed=3)


def engine_of(model: Any, **keys: Any) -> TransformersEngine:
    config = TransformersGenerationConfig(max_new_tokens=8, **keys)
    engine = TransformersEngine(config, TOKENIZER, model_name="-", device="cpu", precision="float32")
    engine.attach(model, 1)
    return engine


def requests_of(
    rows: BatchedDataDict[Any], sampling: SamplingParams, new: int = 8, copies: int = 1
) -> list[GenerationRequest]:
    found = []
    for row, length in enumerate(rows["input_lengths"].tolist()):
        media = {name: rows[name].tensors[row] for name in ("pixel_values", "image_grid_thw") if name in rows}
        media = {name: value for name, value in media.items() if value is not None}
        for copy in range(copies):
            ids = rows["input_ids"][row, :length]
            found.append(GenerationRequest(f"{row}:{copy}", ids, 7 * row + copy, new - row % 3, sampling, media=media))
    return found


def served(engine: TransformersEngine) -> dict[str, GenerationResult]:
    found: dict[str, GenerationResult] = {}
    while results := engine.poll(None):
        found |= {result.request_id: result for result in results}
    return found


def finished(rows: BatchedDataDict[Any], results: dict[str, GenerationResult], family: str) -> BatchedDataDict[Any]:
    """The rows with their completions, as `tiny_vlms.alone` takes them."""
    ids, lengths = [], rows["input_lengths"].tolist()
    for row, length in enumerate(lengths):
        ids.append(torch.cat((rows["input_ids"][row, :length], results[f"{row}:0"].token_ids)))
    longer: BatchedDataDict[Any] = BatchedDataDict(rows)
    longer["input_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    longer["input_lengths"] = torch.tensor([len(row) for row in ids])
    if family in tiny_vlms.TOKEN_TYPES:
        longer[tiny_vlms.TOKEN_TYPES[family]] = (longer["input_ids"] == tiny_vlms.IMAGE).int()
    return longer


def require_logprobs(model: Any, rows: BatchedDataDict[Any], results: dict[str, GenerationResult], family: str) -> None:
    """The log-probabilities of `results` are those of plain forwards of the finished rows, from version 2 on if any."""
    with torch.no_grad():
        expected = tiny_vlms.alone(model, finished(rows, results, family))
    for row, length in enumerate(rows["input_lengths"].tolist()):
        result = results[f"{row}:0"]
        first = result.spans[-1].start
        got = result.logprobs[first:]
        wanted = expected[row, length + first : length + len(result.logprobs)]
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [2, 8])
def test_logprobs_are_those_of_the_trainer(family, model, rows, batch_size):
    """With room for two rows, others join later; lengths and numbers of images differ."""
    engine = engine_of(model, batch_size=batch_size)
    engine.submit(requests_of(rows, SAMPLED))
    results = served(engine)
    require_logprobs(model, rows, results, family)


@pytest.mark.slow
def test_each_image_is_encoded_once_per_group(family, model, rows):
    """Groups of four share their images, also where only three rows are decoded at a time."""
    engine = engine_of(model, batch_size=3)
    engine.submit(requests_of(rows, SamplingParams(), copies=4))
    results = served(engine)
    whole = family == "smolvlm"  # whose pictures are padded together
    assert engine._encoder.encoded == sum(count > 0 if whole else count for count in IMAGES)
    for copy in range(4):
        require_logprobs(model, rows, {f"{row}:0": results[f"{row}:{copy}"] for row in range(len(IMAGES))}, family)


def test_turns_with_all_images_so_far_encode_each_once(family, model):
    """The prompts of an episode of three turns, each of which sees one more image."""
    (row,) = requests_of(tiny_vlms.make_rows(family, [3], seed=4), GREEDY)
    engine = engine_of(model)
    images = Media.of(row.media).each
    for turn in range(1, len(images) + 1):
        seen = {name: torch.cat([one.inputs[name] for one in images[:turn]]) for name in row.media}
        engine._encoder.use(model, 1)
        joined = engine._encoder.features(model, Media.of(seen), torch.device("cpu"))
    assert engine._encoder.encoded == len(images) == (1 if family == "smolvlm" else 3)
    accepted = {name: value for name, value in row.media.items() if name != "pixel_attention_mask"}
    with torch.no_grad():
        whole = model.base_model.get_image_features(**accepted, return_dict=True)
    for got, wanted in zip(_tensors(joined), _tensors(whole), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def _tensors(output: Any) -> list[torch.Tensor]:
    """The features of an encoder's output, and those of its layers if it has them."""
    layers = getattr(output, "deepstack_features", None) or []
    return [torch.cat([each.flatten(0, -2) for each in part]) for part in (output.pooler_output, *layers)]


@pytest.mark.slow
def test_rows_go_on_with_new_weights(family, rows):
    """After an update, rows with images begin again with the new encoder's features."""
    model = tiny_vlms.make_model(family)
    engine = engine_of(model)
    requests = requests_of(rows, GREEDY)
    engine.submit(requests)
    engine.poll(0.0)
    with torch.no_grad():
        for weight in _tower(model):
            weight.mul_(1.5)
    engine.attach(model, 2)
    results = served(engine)
    assert all(result.spans[-1].version == 2 for result in results.values())
    require_logprobs(model, rows, results, family)


def _tower(model: Any) -> list[torch.Tensor]:
    return [weight for name, weight in model.named_parameters() if "vision" in name or "visual" in name]


@pytest.mark.slow
def test_image_tokens_are_never_chosen(model, rows):
    """A row with more image tokens than features cannot be trained on."""
    engine = engine_of(model)
    engine.submit(requests_of(rows, SamplingParams(50.0), new=60))
    sampled = torch.cat([result.token_ids for result in served(engine).values()])
    assert len(sampled) > 250
    assert not torch.isin(sampled, torch.tensor(tiny_vlms.IMAGE)).any()


def test_a_text_model_rejects_images(text_model):
    engine = engine_of(text_model)
    request = GenerationRequest(
        "a", torch.tensor([3, 4]), 0, 2, GREEDY, media={"pixel_values": torch.zeros(1, 3, 8, 8)}
    )
    with pytest.raises(RequestError, match="request 'a' has media; LlamaForCausalLM takes text only"):
        engine.submit([request])


@pytest.fixture
def text_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**tiny_vlms.TEXT)).eval()


IMAGE = 9
CONFIG = SimpleNamespace(
    model_type="qwen2_vl", image_token_id=IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2)
)


def asked(ids: list[int], *grids: tuple[int, int]) -> GenerationRequest:
    media = {}
    if grids:
        media["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
        media["pixel_values"] = torch.arange(4.0 * sum(high * wide for high, wide in grids)).view(-1, 4)
    return GenerationRequest("r", torch.tensor(ids), 0, 1, media=media)


def test_each_image_has_its_tokens_and_its_own_tensors():
    first, second = image_places(asked([1, IMAGE, 2, IMAGE, IMAGE, 3], (2, 2), (2, 4)), CONFIG)
    assert (first.start, first.tokens, second.start, second.tokens) == (1, 1, 3, 2)
    assert second.media.inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert second.media.inputs["pixel_values"].flatten().tolist() == [float(number) for number in range(16, 48)]
    assert image_places(asked([1, 2]), CONFIG) == []


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, IMAGE, 2], [], "1 image tokens, but the model makes 0 features"),
        ([1, IMAGE, 2], [(2, 4)], "1 image tokens, but the model makes 2 features"),
        ([1, IMAGE, IMAGE, IMAGE], [(2, 4)], "3 image tokens, but the model makes 2 features"),
        ([IMAGE, 1, IMAGE], [(2, 4)], "other tokens among those of an image"),
    ],
)
def test_tokens_that_do_not_fit_the_images_are_rejected(ids, grids, message):
    with pytest.raises(RequestError, match=message):
        image_places(asked(ids, *grids), CONFIG)


def test_images_whose_features_cannot_be_counted_are_rejected():
    unknown = SimpleNamespace(model_type="other", image_token_id=IMAGE)
    sound = GenerationRequest("r", torch.tensor([IMAGE]), 0, 1, media={"sound": torch.zeros(2)})
    with pytest.raises(RequestError, match="media sound, of which the number of features of a other model"):
        image_places(sound, unknown)
