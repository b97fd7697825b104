"""Prompts with images, with tiny models, against transformers. Runs in the environment of vLLM only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import tiny_vlms
import torch

from rlframework.base.errors import RefitError, RequestError
from rlframework.huggingface.model_directories import quiet_transformers
from rlframework.huggingface.vision_models import image_tokens
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework_vllm.checks import KINDS
from rlframework_vllm.config import VllmGenerationConfig

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment: make vllm"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # vLLM's and those of what it imports
]

IMAGES = (1, 2, 0, 1, 0, 2)
GREEDY = SamplingParams(temperature=0.0)
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 2}  # heads of 32, the fewest dimensions on a CPU


class Vision:
    """A model of one kind, its module in transformers, its engine, and prompts of which some have images."""

    def __init__(self, kind: str, folder: Any) -> None:
        from rlframework_vllm.engine import VllmEngine

        with pytest.MonkeyPatch.context() as patch, quiet_transformers():
            patch.setattr(tiny_vlms, "TEXT", tiny_vlms.TEXT | WIDE)
            patch.setattr(tiny_vlms, "MROPE", tiny_vlms.MROPE | {"mrope_section": [4, 6, 6]})
            self.kind, self.module = kind, tiny_vlms.make_model(kind)
            self.module.save_pretrained(folder)
        config = VllmGenerationConfig(name="vllm", batch_size=16, vllm={"kv_cache_memory_bytes": 64 << 20})
        self.engine = VllmEngine(config, tiny_vlms.TOKENIZER, model_name=str(folder), device="cpu", precision="float32")
        self.rows, self.version = tiny_vlms.make_rows(kind, IMAGES), 0
        self.first = {name: weight.clone() for name, weight in self.module.state_dict().items()}

    def refit(self, scales: dict[str, float] | None = None) -> None:
        """Give module and engine the first weights, those whose names have a key of `scales` multiplied by it."""
        from rlframework.models.file_weights import by_file_names

        for name, weight in self.module.state_dict().items():
            scale = next((scale for part, scale in (scales or {}).items() if part in name), 1.0)
            weight.copy_(self.first[name] * scale)
        self.version += 1
        weights = by_file_names(self.module, self.module.state_dict())
        specs = {name: (tuple(weight.shape), weight.dtype) for name, weight in weights.items()}
        self.engine.begin_weight_update(self.version, specs)
        self.engine.load_weights(weights.items())
        self.engine.finish_weight_update()

    def requests(self, sampling: SamplingParams = GREEDY, tokens: int = 8) -> list[GenerationRequest]:
        rows = self.rows
        made = []
        for row, length in enumerate(rows["input_lengths"].tolist()):
            media = {name: rows[name].tensors[row] for name in ("pixel_values", "image_grid_thw")}
            media = {name: tensor for name, tensor in media.items() if tensor is not None}
            made.append(
                GenerationRequest(str(row), rows["input_ids"][row, :length], row, tokens, sampling, media=media)
            )
        return made

    def serve(self, requests: list[GenerationRequest]) -> dict[str, GenerationResult]:
        self.engine.submit(requests)
        return self.collect(len(requests))

    def serve_all(self) -> Iterator[tuple[GenerationRequest, GenerationResult]]:
        """Yield samples of all prompts with their requests."""
        requests = self.requests(SamplingParams(), tokens=4)
        results = self.serve(requests)
        return ((request, results[request.request_id]) for request in requests)

    def collect(self, count: int) -> dict[str, GenerationResult]:
        done: dict[str, GenerationResult] = {}
        while len(done) < count:
            done |= {result.request_id: result for result in self.engine.poll(None)}
        return done

    def generate(self, request: GenerationRequest) -> list[int]:
        """Return the greedy tokens of transformers."""
        types = self.types(request.prompt_ids) if request.media else {}
        found = self.module.generate(
            input_ids=request.prompt_ids[None],
            **request.media,
            **types,
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=None,
            suppress_tokens=image_tokens(self.module.config),
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.int64),
        )
        return found[0, len(request.prompt_ids) :].tolist()  # type: ignore[no-any-return]

    def types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mm_token_type_ids": (ids == tiny_vlms.IMAGE).int()[None]}

    @torch.no_grad()
    def require_logprobs(self, request: GenerationRequest, result: GenerationResult, first: int = 0) -> None:
        """Those of the tokens from `first` on must be those of a plain forward."""
        ids = torch.cat((request.prompt_ids, result.token_ids))
        media = {**request.media, **self.types(ids)} if request.media else {}
        logits = self.module(input_ids=ids[None], **media, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        expected = expected.gather(1, result.token_ids[:, None])[:, 0]
        torch.testing.assert_close(result.logprobs[first:], expected[first:], rtol=0, atol=1e-4)


@pytest.fixture(scope="module", params=KINDS)
def one_vision(request, tmp_path_factory) -> Iterator[Vision]:
    """One engine for all tests of a kind: starting one takes seconds, and there can be one in a process."""
    vision = Vision(request.param, tmp_path_factory.mktemp(request.param))
    yield vision
    vision.engine.close()


@pytest.fixture
def vision(one_vision) -> Iterator[Vision]:
    one_vision.refit()
    yield one_vision
    one_vision.engine.resume()
    one_vision.engine.abort(list(one_vision.engine._served))
    one_vision.engine.poll()


def require_greedy(vision: Vision) -> dict[str, list[int]]:
    requests = vision.requests()
    results = vision.serve(requests)
    for request in requests:
        result = results[request.request_id]
        assert result.token_ids.tolist() == vision.generate(request)
        vision.require_logprobs(request, result)
    return {name: result.token_ids.tolist() for name, result in results.items()}


def test_greedy_tokens_are_those_of_transformers_after_each_update(vision):
    """Rows with one, two and no images; updates of the image encoder alone, and of all weights."""
    first = require_greedy(vision)
    vision.refit({"visual": 1.5})
    other = require_greedy(vision)
    assert {name for name in first if first[name] != other[name]} <= {"0", "1", "3", "5"}
    assert first != other
    vision.refit({"": 0.9})
    require_greedy(vision)


def test_samples_have_the_log_probabilities_of_their_temperature_and_no_image_tokens(vision):
    requests = vision.requests(SamplingParams(temperature=1.4), tokens=40)
    results = vision.serve(requests)
    for request in requests:
        vision.require_logprobs(request, results[request.request_id])
        assert not set(results[request.request_id].token_ids.tolist()) & set(image_tokens(vision.module.config))


def require_features_of_the_updated_encoder(vision: Vision) -> None:
    """For images that were seen before the update, and for requests that go on after it."""
    vision.serve(vision.requests(SamplingParams(), tokens=2))
    requests = vision.requests(SamplingParams(), tokens=12)
    vision.engine.submit(requests)
    for _ in range(4):
        vision.engine.poll(0)
    vision.engine.pause()
    vision.refit({"visual": 1.5})
    vision.engine.resume()
    results = vision.collect(len(requests))
    for request in requests:
        result = results[request.request_id]
        assert [span.start for span in result.spans] == [0, 4]
        vision.require_logprobs(request, result, first=4)
    for request, result in vision.serve_all():
        vision.require_logprobs(request, result)


def test_features_are_those_of_the_updated_encoder(vision):
    require_features_of_the_updated_encoder(vision)


def _reset_of_the_scheduler(vision: Vision, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vision.engine._vllm._engine, "reset_encoder_cache", lambda: None)


def _all_resets(vision: Vision, patch: pytest.MonkeyPatch) -> None:
    """Also that of vLLM's worker when it loads weights, and the version in the names of images."""
    _reset_of_the_scheduler(vision, patch)
    runtime = vision.engine._vllm
    runtime.call(lambda worker: patch.setattr(worker.model_runner, "reset_encoder_cache", lambda: None))
    add = runtime.add
    patch.setattr(runtime, "add", lambda request, tokens, top_k, _, places: add(request, tokens, top_k, 1, places))


@pytest.mark.parametrize(
    ("left_out", "error", "message"),
    [
        (_reset_of_the_scheduler, RuntimeError, "Encoder cache miss"),  # vLLM's own
        (_all_resets, AssertionError, "Tensor-likes are not close"),
    ],
)
def test_it_is_noticed_if_features_of_the_earlier_encoder_stay(vision, monkeypatch, left_out, error, message):
    vision.serve(vision.requests())
    left_out(vision, monkeypatch)
    with pytest.raises(error, match=message):
        require_features_of_the_updated_encoder(vision)


def test_a_layer_of_the_encoder_that_keeps_earlier_weights_is_noticed(vision, monkeypatch):
    def without(worker):
        load = worker.reload_weights

        def reload_weights(*, weights_iterator):
            kept = ((name, weight) for name, weight in weights_iterator if not name.endswith("attn.proj.weight"))
            load(weights_iterator=kept)

        monkeypatch.setattr(worker, "reload_weights", reload_weights)

    vision.engine._vllm.call(without)
    with pytest.raises(RefitError, match=r"vLLM computes .*visual.*attn\.proj\.weight with other weights"):
        vision.refit({"visual": 1.5})


def test_what_is_held_of_the_encoder_is_reported(vision):
    vision.refit({"visual": 1.5})
    held = vision.engine._sink.finish()  # loads the same weights again
    for part in ("visual.patch_embed.proj.weight", "visual.blocks.0.norm1.weight"):
        (name,) = (name for name in held if name.endswith(part))
        (sent,) = (weight for own, weight in vision.module.state_dict().items() if own.endswith(part))
        assert torch.equal(held[name].view_as(sent), sent)


def test_features_that_do_not_fit_the_prompt_are_rejected_and_others_served(vision):
    good, *_ = requests = vision.requests()
    for other in (requests[1].media, {}):
        with pytest.raises(RequestError, match=r"image tokens, but the model makes \d+ features"):
            vision.engine.submit([replace(good, media=other)])
    assert vision.serve([good])
