"""The transformers engine against full forward passes without a cache; see also the suite of the conformance kit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework.base.errors import BatchError, ConfigError, RLFrameworkError
from rlframework.generation.stop_tokens import stop_tokens
from rlframework.huggingface.tokenizer import character_tokenizer

ALPHABET = "0123456789+= "
EOS = 1
RAGGED = [[5], [3, 9, 4, 12, 6], [7, 2, 13] * 7, [5, 5], [14, 13], [3, 9, 4, 12, 6], [8] * 11]


@pytest.fixture
def shapes(tiny: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the `input_ids` of each forward."""
    found: list[tuple[int, ...]] = []
    handle = tiny.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield found
    handle.remove()


@pytest.mark.slow
def test_a_group_is_prefilled_once_and_its_rows_differ(tiny: Any, batch: Any, completions: Any, shapes: Any) -> None:
    prompts = [[3, 9, 4]] * 24 + [[6, 6]] * 24
    output = tiny.engine(max_new_tokens=8).generate(batch(prompts))
    rows = completions(output)
    assert shapes[0] == (1, 5), "two different prompts in one packed row"
    assert shapes[1][1] > 2, "a token of each row"
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
