"""The engine, with a Llama of two layers, against transformers. Runs in the environment of vLLM only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from rlframework.base.errors import EngineNotReady, RefitError, RequestError
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams, WeightSpan
from rlframework.weight_sync.buffers import as_bytes, checksum
from rlframework.weight_sync.ipc import IpcSender, device_id

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed in this environment: make vllm"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # vLLM's and those of what it imports
]

ALPHABET = "0123456789+= "
Weights = Mapping[str, Tensor]


class Model:
    """A model directory, its transformers module, and versions of its weights."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        self.module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def weights(self, version: int, dtype: torch.dtype = torch.float32) -> Weights:
        """The weights under their names in files; those of version 0 are the files'."""
        draw = torch.Generator().manual_seed(version)
        names = {name: one for name, one in self.module.state_dict().items() if name != "lm_head.weight"}
        noise = {name: 0.1 * version * torch.randn(one.shape, generator=draw) for name, one in names.items()}
        return {name: (one.detach() + noise[name]).to(dtype) for name, one in names.items()}

    def logprobs(self, weights: Weights, result: GenerationResult, request: GenerationRequest) -> Tensor:
        """Log-probabilities of a completion, in one forward of transformers."""
        from torch.func import functional_call

        ids = torch.cat((request.prompt_ids, result.token_ids))[None]
        tied = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
        logits = functional_call(self.module, tied, (ids,)).logits[0, len(request.prompt_ids) - 1 : -1].detach()
        scaled = logits / (request.sampling.temperature or 1.0)
        return scaled.log_softmax(-1).gather(-1, result.token_ids[:, None])[:, 0]


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(ALPHABET)


@pytest.fixture(scope="module")
def model(tmp_path_factory, tokenizer) -> Model:
    folder = tmp_path_factory.mktemp("vllm") / "llama"
    return Model(str(make_llama(folder, tokenizer, hidden=64, layers=2, heads=2, kv_heads=1, init_std=0.4)))


def make_engine(model: Model, tokenizer, precision: str = "float32", **keys):
    from rlframework_vllm.config import VllmGenerationConfig
    from rlframework_vllm.engine import VllmEngine

    config = VllmGenerationConfig(name="vllm", batch_size=16, vllm={"kv_cache_memory_bytes": 64 << 20, **keys})
    return VllmEngine(config, tokenizer, model_name=model.path, device="cpu", precision=precision)


def update(engine, version: int, weights: Weights):
    engine.begin_weight_update(version, {name: (tuple(one.shape), one.dtype) for name, one in weights.items()})
    engine.load_weights(weights.items())
    return engine.finish_weight_update()


class OneEngine:
    """The engine of all tests: starting one takes seconds, and there can be one in a process."""

    def __init__(self, model: Model, tokenizer) -> None:
        self.new = partial(make_engine, model, tokenizer)
        self.engine = self.new()

    def restart(self, **keys):
        self.engine.close()
        self.engine = self.new(**keys)
        return self.engine


@pytest.fixture(scope="module")
def one_engine(model, tokenizer) -> Iterator[OneEngine]:
    one = OneEngine(model, tokenizer)
    yield one
    one.engine.close()


@pytest.fixture
def engine(one_engine, model):
    """An engine with the files' weights and no requests."""
    engine = one_engine.engine
    update(engine, (engine.weight_state._version or 0) + 1, model.weights(0))
    yield engine
    engine.resume()
    engine.abort(list(engine._served))
    engine.poll()


def requests(
    count: int = 6, *, tokens: int = 12, prompt: int = 3, seed: int = 0, **sampling
) -> list[GenerationRequest]:
    rule = SamplingParams(**{"stop_token_ids": frozenset({5}), **sampling})
    return [
        GenerationRequest(f"{seed}-{row}", (torch.arange(prompt) + row) % 13, (seed + row) << 40, tokens, rule)
        for row in range(count)
    ]


def serve(engine, asked: Sequence[GenerationRequest]) -> dict[str, GenerationResult]:
    engine.submit(asked)
    done: dict[str, GenerationResult] = {}
    while len(done) < len(asked):
        done |= {result.request_id: result for result in engine.poll(None)}
    return done


def same(left: GenerationResult, right: GenerationResult) -> bool:
    return torch.equal(left.token_ids, right.token_ids) and torch.equal(left.logprobs, right.logprobs)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}])
def test_log_probabilities_are_those_of_transformers_at_the_temperature_before_truncation(engine, model, sampling):
    asked = requests(**sampling)
    done = serve(engine, asked)
    for request in asked:
        result = done[request.request_id]
        expected = model.logprobs(model.weights(0), result, request)
        torch.testing.assert_close(result.logprobs, expected, atol=1e-4, rtol=0)
        assert result.finish_reason == ("stop" if 5 in result.token_ids else "length")
        assert 5 not in result.token_ids[:-1]
        assert result.spans == (WeightSpan(0, len(result.token_ids), engine.weight_state.require()),)


def test_temperatures_of_one_batch_do_not_mix(engine, model):
    asked = [
        *requests(3, temperature=0.5),
        *requests(3, seed=9, temperature=0.0),
        *requests(3, seed=20, temperature=1.5),
    ]
    done = serve(engine, asked)
    for request in asked:
        result = done[request.request_id]
        torch.testing.assert_close(
            result.logprobs, model.logprobs(model.weights(0), result, request), atol=1e-4, rtol=0
        )


def test_a_sample_depends_on_its_seed_alone_and_on_all_its_bits(engine):
    first = serve(engine, requests(8))
    again = serve(engine, list(reversed(requests(8))))
    assert all(same(first[name], again[name]) for name in first)
    (request,) = requests(1, tokens=30)
    high = GenerationRequest("high", request.prompt_ids, request.seed + (1 << 62), 30, request.sampling)
    low = GenerationRequest("low", request.prompt_ids, request.seed + 1, 30, request.sampling)
    done = serve(engine, [request, high, low])
    assert not same(done[request.request_id], done["high"])
    assert not same(done[request.request_id], done["low"])


def test_an_update_equals_a_fresh_engine_to_the_bit(engine, one_engine, model):
    version = engine.weight_state.require()
    serve(engine, requests(prompt=70))  # fills the cache
    report = update(engine, version + 1, model.weights(7))
    assert report.dropped_tokens >= 64
    found = serve(engine, requests(prompt=70))
    fresh = one_engine.restart()
    update(fresh, 0, model.weights(7))
    expected = serve(fresh, requests(prompt=70))
    assert all(same(found[name], expected[name]) for name in expected)


def test_cached_prefixes_of_an_earlier_version_are_not_hit_even_if_they_are_not_dropped(engine, model, monkeypatch):
    serve(engine, requests(prompt=70))  # fills the cache
    monkeypatch.setattr(engine, "drop_caches", lambda: 0)
    update(engine, engine.weight_state.require() + 1, model.weights(6))
    asked = requests(prompt=70)
    for name, result in serve(engine, asked).items():
        (request,) = (one for one in asked if one.request_id == name)
        expected = model.logprobs(model.weights(6), result, request)
        torch.testing.assert_close(result.logprobs, expected, atol=1e-3, rtol=0)  # 1.2e-4 on some CPUs


def test_adapters_alone_are_merged_into_the_model_of_the_directory_and_whole_weights_follow(engine, model):
    layer, version = "model.layers.1.self_attn.q_proj", engine.weight_state.require()
    draw = torch.Generator().manual_seed(0)
    (request,) = requests(1, tokens=20)
    for number in (1, 2):  # the second is not added to the first
        a, b = torch.randn(2, 64, generator=draw), torch.randn(64, 2, generator=draw)
        update(engine, version + number, {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b})
        result = serve(engine, [request])[request.request_id]
        merged = {**model.weights(0), f"{layer}.weight": model.weights(0)[f"{layer}.weight"] + b @ a}
        torch.testing.assert_close(result.logprobs, model.logprobs(merged, result, request), atol=1e-4, rtol=0)
        assert {span.version for span in result.spans} == {version + number}
    update(engine, version + 3, model.weights(3))
    result = serve(engine, [request])[request.request_id]
    torch.testing.assert_close(result.logprobs, model.logprobs(model.weights(3), result, request), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_by_ipc_are_written_into_the_engine_s_memory_and_checked(engine, model, dtype):
    weights = model.weights(3, dtype)
    info = {name: (tuple(one.shape), one.dtype) for name, one in weights.items()}
    engine.begin_weight_update(engine.weight_state.require() + 1, info)
    device = device_id(torch.device("cpu"))
    sender = IpcSender(torch.device("cpu"))
    sender.begin(info, engine.offer_refit_memory()[device], [device])
    for names in (list(info)[:4], list(info)[4:]):
        engine.update_weights_from_ipc_handles({device: sender.pack(names, iter([(n, weights[n]) for n in names]))})
    sender.close()
    report = engine.finish_weight_update()
    held = ["model.embed_tokens.weight", "model.norm.weight"] if dtype == torch.float32 else []
    assert set(held) <= report.checksums.keys()
    assert report.checksums == {name: checksum(as_bytes(weights[name])) for name in report.checksums}
    (request,) = requests(1, tokens=20)
    result = serve(engine, [request])[request.request_id]
    expected = model.logprobs({name: one.float() for name, one in weights.items()}, result, request)
    torch.testing.assert_close(result.logprobs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "adapter of no layer"])
def test_weights_that_do_not_fit_are_rejected_by_name_and_the_next_update_is_right(engine, model, fault):
    weights, version = dict(model.weights(2)), engine.weight_state.require()
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del weights[name]
    elif fault == "unknown":
        name = "model.layers.2.mlp.up_proj.weight"
        weights[name] = torch.zeros(2, 2)
    elif fault == "shape":
        weights[name] = weights[name].T.contiguous()
    else:
        name = "model.layers.1.mlp.no_proj"
        weights = {f"{name}.lora_{one}.weight": torch.zeros(2, 2) for one in "AB"}
    with pytest.raises(RefitError, match=name):
        update(engine, version + 1, weights)
    engine.submit(requests(1))
    with pytest.raises(EngineNotReady, match="failed"):
        engine.poll(0)
    update(engine, version + 1, model.weights(2))
    (result,) = engine.poll(None)
    expected = model.logprobs(model.weights(2), result, requests(1)[0])
    torch.testing.assert_close(result.logprobs, expected, atol=1e-4, rtol=0)


def test_requests_go_on_with_new_weights_and_spans_say_which_tokens_are_whose(engine, model):
    (request,) = requests(1, tokens=40, prompt=70, stop_token_ids=frozenset())
    first = engine.weight_state.require()
    engine.submit([request])
    for _ in range(10):
        assert engine.poll(0) == []
    engine.pause()
    assert engine.poll(None) == []
    update(engine, first + 1, model.weights(4))
    assert engine.poll(None) == []
    engine.resume()
    (result,) = engine.poll(None)
    assert result.spans == (WeightSpan(0, 10, first), WeightSpan(10, 40, first + 1))
    for start, end, weights in ((0, 10, model.weights(0)), (10, 40, model.weights(4))):
        expected = model.logprobs(weights, result, request)[start:end]
        torch.testing.assert_close(result.logprobs[start:end], expected, atol=1e-4, rtol=0)


def test_abort_returns_the_tokens_that_there_are(engine):
    asked = requests(3, tokens=100, stop_token_ids=frozenset())
    engine.submit(asked[:2])
    for _ in range(5):
        engine.poll(0)
    engine.submit(asked[2:])
    names = [request.request_id for request in asked]
    engine.abort([*names[1:], "unknown"])
    aborted = {result.request_id: result for result in engine.poll(0)}
    assert {name: (len(one.token_ids), one.finish_reason) for name, one in aborted.items()} == {
        names[1]: (5, "aborted"),
        names[2]: (0, "aborted"),
    }
    engine.pause("abort")
    (last,) = engine.poll(0)
    assert (last.request_id, last.finish_reason, len(last.token_ids)) == (names[0], "aborted", 5)
    engine.resume()
    assert engine.poll(None) == []


def test_more_requests_than_rows_and_a_short_cache_change_nothing(engine):
    many = serve(engine, requests(40))
    for request in requests(40)[::13]:
        alone = serve(engine, [request])[request.request_id]
        assert torch.equal(alone.token_ids, many[request.request_id].token_ids)
        torch.testing.assert_close(alone.logprobs, many[request.request_id].logprobs, atol=1e-4, rtol=0)


def test_prompts_beyond_the_tokens_of_one_forward_change_nothing(engine, one_engine, model):
    expected = serve(engine, requests(16, prompt=100))
    small = one_engine.restart(max_num_batched_tokens=512)
    update(small, 0, model.weights(0))
    found = serve(small, requests(16, prompt=100))
    assert all(torch.equal(found[name].token_ids, expected[name].token_ids) for name in expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt_ids": torch.tensor([0, 99])}, "token 99"),
        ({"prompt_ids": torch.zeros(512, dtype=torch.int64)}, "512"),
        ({"sampling": SamplingParams(2.5)}, "temperature=2.5"),
        ({"media": {"pixel_values": torch.zeros(1)}}, "media"),
    ],
)
def test_a_request_that_cannot_be_served_is_rejected_by_name_with_all_others(engine, wrong, message):
    good = requests(1)
    bad = GenerationRequest(
        **{"request_id": "bad", "prompt_ids": torch.tensor([1]), "seed": 0, "max_new_tokens": 3, **wrong}
    )
    with pytest.raises(RequestError, match=message):
        engine.submit([*good, bad])
    assert engine.poll(None) == []


def test_a_long_prompt_ends_at_the_last_position(engine):
    (request,) = requests(1, tokens=50, prompt=500, stop_token_ids=frozenset())
    result = serve(engine, [request])[request.request_id]
    assert (len(result.token_ids), result.finish_reason) == (12, "length")


def test_without_weights_nothing_is_served_and_vllm_does_not_start(model, tokenizer):
    new = make_engine(model, tokenizer)
    new.submit(requests(1))
    with pytest.raises(EngineNotReady, match="no weights"):
        new.poll(0)
    assert new._started is None
    new.close()


def test_a_cache_without_room_is_an_error_that_says_so(one_engine, model):
    small = one_engine.restart(kv_cache_memory_bytes=4096)
    with pytest.raises(RefitError, match=r"vLLM does not start with the settings of generation\.vllm"):
        update(small, 1, model.weights(0))
    one_engine.restart()


def test_a_second_engine_of_a_process_is_rejected(engine, model, tokenizer):
    with pytest.raises(RefitError, match="process of its own"):
        update(make_engine(model, tokenizer), 1, model.weights(0))
    assert serve(engine, requests(1))


def test_the_state_of_torch_is_as_before(engine):
    torch.manual_seed(3)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    serve(engine, requests(2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_num_threads(threads)
    assert torch.get_num_threads() == threads


def test_the_start_compiles_all_that_requests_need_and_leaves_no_named_lock(one_engine, model):
    """So that the first refit does not take the seconds of a compilation, and a kill reports no leaked semaphore."""
    from torch._dynamo.utils import counters
    from tqdm import tqdm

    engine = one_engine.restart()
    report = update(engine, 1, model.weights(0))
    compiled = dict(counters["stats"])
    serve(engine, requests(1, seed=1))
    serve(engine, requests(5, seed=2))
    assert dict(counters["stats"]) == compiled
    assert report.start_seconds > 0
    assert report.dropped_tokens == 0
    assert isinstance(tqdm.get_lock(), type(threading.RLock()))
