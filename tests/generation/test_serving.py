"""The transformers engine beyond the suite of the conformance kit: what is computed, and what is rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_kinds import KINDS, tiny_model
from torch import Tensor

from rlframework.base.errors import BatchError, ConfigError, RequestError, RLFrameworkError
from rlframework.generation.stop_tokens import stop_tokens
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams, WeightSpan
from rlframework_transformers.decoding import RowBatch
from rlframework_transformers.engine import TransformersEngine


def request(
    name: str, prompt: list[int], new: int = 8, seed: int = 0, sampling: SamplingParams | None = None, **given: Any
) -> GenerationRequest:
    return GenerationRequest(name, torch.tensor(prompt), seed, new, sampling or SamplingParams(), **given)


def finish(engine: TransformersEngine) -> dict[str, GenerationResult]:
    results: dict[str, GenerationResult] = {}
    while polled := engine.poll(None):
        results |= {result.request_id: result for result in polled}
    return results


def alone(engine: TransformersEngine, asked: GenerationRequest) -> GenerationResult:
    engine.submit([asked])
    return finish(engine)[asked.request_id]


def same(one: GenerationResult, other: GenerationResult) -> None:
    assert one.token_ids.tolist() == other.token_ids.tolist()
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def scored(model: Any, asked: GenerationRequest, result: GenerationResult) -> Tensor:
    ids = torch.cat((asked.prompt_ids, result.token_ids))
    logprobs = model(ids[None]).logits[0].log_softmax(-1)[len(asked.prompt_ids) - 1 : -1]
    return logprobs.gather(1, result.token_ids[:, None])[:, 0]


@pytest.fixture
def forwards(tiny: Any) -> Iterator[list[int]]:
    """The number of tokens of each forward."""
    found: list[int] = []
    handle = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    yield found
    handle.remove()


def test_a_finished_row_makes_room_at_once(tiny: Any, forwards: list[int]) -> None:
    """Two rows at a time: three short ones pass by one long one, in no more steps than that has."""
    engine = tiny.engine(batch_size=2).engine
    engine.submit([request("long", [3], 30), *(request(f"short {row}", [4 + row, 2], 10) for row in range(3))])
    order = []
    while polled := engine.poll(None):
        order += [result.request_id for result in polled]
    assert set(order[:2]) < {"short 0", "short 1", "short 2"}
    steps = [tokens for tokens in forwards if tokens <= 2]
    assert len(steps) <= 30 + 3
    assert max(forwards) <= 4


@pytest.mark.slow
def test_an_equal_prompt_is_computed_once_also_later(tiny: Any, forwards: list[int]) -> None:
    engine, prompt = tiny.engine().engine, [3, 9, 4, 7, 7, 2]
    engine.submit([request("a", prompt, 6, 1), request("b", prompt, 6, 2)])
    engine.poll(0.0)
    engine.submit([request("c", prompt, 6, 3)])
    found = finish(engine)
    assert [tokens for tokens in forwards if tokens >= len(prompt)] == [len(prompt)]
    for seed, name in enumerate("abc", 1):
        same(found[name], alone(tiny.engine().engine, request(name, prompt, 6, seed)))


@pytest.mark.slow
def test_the_next_turn_of_a_session_computes_its_new_tokens(tiny: Any, forwards: list[int]) -> None:
    engine, prompt = tiny.engine(session_cache_tokens=30).engine, list(range(2, 12))
    first = alone(engine, request("1", prompt, 4, session_id="s"))
    turn = [*prompt, *first.token_ids.tolist(), 5, 6]
    other = [*prompt, 13, 13]
    for name, ids, known in (("2", turn, len(turn) - 3), ("3", other, len(prompt)), ("4", [9, 9], 0)):
        forwards.clear()
        result = alone(engine, request(name, ids, 4, session_id="s"))
        assert forwards[0] == len(ids) - known
        same(result, alone(tiny.engine().engine, request(name, ids, 4)))
    alone(engine, request("5", [7] * 29, 4, session_id="larger than the cache"))
    assert engine.release() > 0 or not engine._sessions.tokens
    engine.attach(tiny.model, 1)
    forwards.clear()
    alone(engine, request("6", turn, 1, session_id="s"))
    assert forwards[0] == len(turn), "nothing computed with earlier weights may be used"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bloom"])
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_weights_change_between_tokens(tiny: Any, cache: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(RowBatch, "use", lambda self, model, _use=RowBatch.use: used.append(model) or _use(self, model))
    model, other = tiny_model(KINDS[kind]), tiny_model(KINDS[kind])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    engine = tiny.engine(model=model, cache_after_update=cache).engine
    asked = request("a", [3, 9, 4], 10)
    engine.submit([asked])
    for _ in range(4):
        engine.poll(0.0)
    engine.pause()
    engine.attach(other, 7)
    engine.resume()
    result = finish(engine)["a"]
    assert result.spans == (WeightSpan(0, 4, 0), WeightSpan(4, 10, 7))
    torch.testing.assert_close(result.logprobs[:4], scored(model, asked, result)[:4], atol=1e-5, rtol=1e-5)
    new = torch.allclose(result.logprobs[4:], scored(other, asked, result)[4:], atol=1e-5, rtol=1e-5)
    assert new == (cache == "recompute")
    assert used == ([other] if cache == "keep" else [])
    rest = request("b", [3, 9, 4], 10)
    same(alone(engine, rest), alone(tiny.engine(model=other).engine, rest))


@pytest.mark.slow
def test_weights_that_are_updated_in_place_are_those_that_are_used(tiny: Any) -> None:
    """The packed copy of a linear layer's weight is made again."""
    model = tiny_model(KINDS["llama"])
    engine = tiny.engine(model=model).engine
    asked = request("a", [3, 9, 4], 10)
    alone(engine, asked)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    engine.attach(model, 1)
    result = alone(engine, asked)
    torch.testing.assert_close(result.logprobs, scored(model, asked, result), atol=1e-5, rtol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())
    assert engine.release() >= sum(layer.weight.nbytes for layer in model.modules() if type(layer) is torch.nn.Linear)


def stopping(token: int) -> GenerationRequest:
    return request("b", [3], sampling=SamplingParams(stop_token_ids=frozenset({token})))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt_ids": torch.tensor([1.5])}, "request 'b' has prompt_ids in torch.float32; they must be torch.int64"),
        ({"prompt_ids": torch.tensor([], dtype=torch.int64)}, "request 'b' has prompt_ids of shape \\(0,\\); it needs"),
        ({"seed": 2**63}, "request 'b' has seed=9223372036854775808; it must be a signed 64-bit integer"),
        ({"max_new_tokens": 0}, "request 'b' has max_new_tokens=0; it must be at least 1"),
    ],
)
def test_requests_that_cannot_be_constructed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        GenerationRequest("b", **{"prompt_ids": torch.tensor([3]), "seed": 0, "max_new_tokens": 4, **given})


def test_requests_that_cannot_be_served(tiny: Any) -> None:
    engine = tiny.engine().engine
    engine.submit([request("a", [3])])
    for bad, message in (
        (request("a", [3]), "request 'a' was submitted before"),
        (request("b", [3, 15]), "prompt of request 'b' has token 15; the model's tokens are 0 to 14"),
        (request("b", [3], sampling=SamplingParams(-1.0)), "request 'b' has temperature=-1.0; it must be 0 or more"),
        (request("b", [3], sampling=SamplingParams(top_k=0)), "request 'b' has top_k=0"),
        (request("b", [3], media={"pixel_values": 1}), "request 'b' has media"),
        (stopping(15), "request 'b' has stop token 15; the model's tokens are 0 to 14"),
        (stopping(-1), "request 'b' has stop token -1"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit([request("good", [3]), bad])
    assert set(finish(engine)) == {"a"}


ALPHABET = "0123456789+= "
EOS = 1
RAGGED = [[5], [3, 9, 4, 12, 6], [7, 2, 13] * 7, [5, 5], [14, 13], [3, 9, 4, 12, 6], [8] * 11]


@pytest.mark.slow
def test_a_group_is_prefilled_once_and_its_rows_differ(tiny: Any, batch: Any, completions: Any, forwards: Any) -> None:
    prompts = [[3, 9, 4]] * 24 + [[6, 6]] * 24
    output = tiny.engine(max_new_tokens=8).generate(batch(prompts))
    rows = completions(output)
    assert forwards[0] == 5, "two different prompts in one packed row"
    assert forwards[1] > 2, "a token of each row"
    assert len({tuple(row) for row in rows[:24]}) > 8
    for row in (0, 13, 24, 47):
        alone = tiny.engine(max_new_tokens=8).generate(batch([prompts[row]], [row]))
        assert completions(alone)[0] == rows[row]


@pytest.mark.slow
def test_all_sources_of_end_tokens(tiny: Any, batch: Any, completions: Any, plain_greedy: Any, tmp_path: Path) -> None:
    """Stop ids, stop strings, and the model's own end-of-sequence tokens, in a file beside it."""
    prompt = next(p for p in RAGGED if len(plain_greedy(tiny.model, p, {EOS}, 24)) > 3)
    path = plain_greedy(tiny.model, prompt, {EOS}, 24)
    stop = path[2]
    cut = path[: path.index(stop) + 1]
    text = tiny.tokenizer.decode([stop])
    for options in ({"stop_token_ids": (stop,)}, {"stop_strings": (text,)}):
        output = tiny.engine(max_new_tokens=24, temperature=0.0, **options).generate(batch([prompt]))
        assert completions(output) == [cut]
        assert output["truncated"].tolist() == [False]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, stop]}), encoding="utf-8")
    engine = replace(tiny.engine(max_new_tokens=24, temperature=0.0))
    engine.stops = stop_tokens(engine.config, tiny.tokenizer, str(tmp_path))
    assert completions(engine.generate(batch([prompt]))) == [cut]


def test_end_tokens_of_the_model_beyond_its_vocabulary_are_ignored_with_a_warning(
    tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.model.config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 9999]}), encoding="utf-8")
    assert stop_tokens(tiny.engine().config, tiny.tokenizer, str(tmp_path)) == {EOS}
    assert len([record for record in caplog.records if "9999" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_strings": ("12",)}, r"stop_strings: '12' is not a single token of the tokenizer but 2"),
        ({"stop_strings": ("x",)}, r"stop_strings: 'x' is not a single token .*no token for it"),
        ({"stop_token_ids": (99,)}, r"stop_token_ids: 99 is not a token of the tokenizer; its tokens are 0 to 14"),
    ],
)
def test_stops_that_are_not_tokens(tiny: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny.engine(**options)


@pytest.mark.slow
def test_rows_that_run_out_of_positions_leave_the_others_alone(
    tiny: Any, batch: Any, completions: Any, plain_greedy: Any
) -> None:
    """A GPT-2 has a table of positions and none beyond it. The pad token is the end-of-sequence token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=15, n_positions=12, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4)
    model = GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = None
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.pad_token = tokenizer.eos_token
    prompts = [[token] * length for length in (1, 3) for token in range(2, 14)] + [[4] * 8, [5] * 10, [6] * 11]
    engine = tiny.engine(tokenizer, model, max_new_tokens=9, temperature=0.0)
    output = engine.generate(batch(prompts, pad=EOS))
    expected = [plain_greedy(model, prompt, {EOS}, min(9, 12 - len(prompt))) for prompt in prompts]
    assert completions(output) == expected
    assert output["truncated"].tolist() == [row[-1] != EOS for row in expected]
    assert len({len(row) for row in expected if row[-1] != EOS}) > 2


def test_bad_batches(tiny: Any, batch: Any) -> None:
    engine = tiny.engine()
    data = batch([[3, 4], [5]])
    del data["seeds"]
    with pytest.raises(BatchError, match=r"needs input_ids, input_lengths and seeds; \['seeds'\] are not in"):
        engine.generate(data)
    data = batch([[3, 4], [5]])
    data["input_lengths"] = torch.tensor([2, 0])
    with pytest.raises(BatchError, match="input_lengths of row 1 is 0; it must be between 1 and 2"):
        engine.generate(data)
    data["input_lengths"] = torch.tensor([2])
    with pytest.raises(BatchError, match=r"input_lengths \[B\] and seeds \[B\]"):
        engine.generate(data)


def test_weights_that_are_not_finite(tiny: Any, batch: Any) -> None:
    weight = tiny.model.model.norm.weight
    saved = weight.detach().clone()
    try:
        weight.data.fill_(float("nan"))
        with pytest.raises(RLFrameworkError, match="probabilities are not finite"):
            tiny.engine(max_new_tokens=2).generate(batch([[3]]))
    finally:
        weight.data.copy_(saved)
