"""A teacher behind an endpoint: a model that `rlframework serve` serves, and endpoints that answer something else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlframework.base.errors import ConfigError, NotSupported, UserError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.endpoint import TeacherEndpointConfig
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_serve.teacher import TeacherEndpoint

KEY = "a-token-of-enough-characters"
TOKENIZER = character_tokenizer("0123456789+=")


def batch() -> BatchedDataDict[Any]:
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([[5, 6, 7, 8, 9], [3, 4, 9, 0, 0]]),
            "input_lengths": torch.tensor([5, 3]),
            "token_mask": torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0, 0.0]]),
            "sample_mask": torch.ones(2),
        }
    )


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)


def endpoint(base_url: str, temperature: float = 1.0, **options: Any) -> TeacherEndpoint:
    config = TeacherEndpointConfig(base_url=base_url, model="policy", api_key_env="TEACHER_KEY", **options)
    return TeacherEndpoint(config, TOKENIZER, temperature)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_served_model_gives_the_log_probabilities_of_the_model(tmp_path: Path, key: None) -> None:
    model = make_llama(tmp_path / "model", TOKENIZER, hidden=32, layers=1, heads=2)
    command = [sys.executable, "-m", "rlframework.cli", "serve", str(model), "--port", "0", "--token", KEY]
    data, plain = batch(), AutoModelForCausalLM.from_pretrained(model).double()
    with torch.no_grad():
        logs = plain(data["input_ids"]).logits.log_softmax(-1).roll(1, 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            assert line.startswith("base_url="), process.communicate()
            teacher = endpoint(line.removeprefix("base_url="))
            wanted = data["token_mask"].double()
            got = teacher.get_logprobs(data, positions="loss")["logprobs"].double()
            own = logs.gather(-1, data["input_ids"][..., None])[..., 0] * wanted
            torch.testing.assert_close(got, own, rtol=0, atol=1e-5)
            top = teacher.get_topk_logits(data, 3, positions="loss")
            torch.testing.assert_close(
                top["topk_logits"].double(), logs.topk(3).values * wanted[..., None], rtol=0, atol=1e-5
            )
            assert torch.equal(top["topk_indices"], logs.topk(3).indices * wanted[..., None].long())
            with pytest.raises(UserError, match="prompt_logprobs"):
                teacher.get_topk_logits(data, 2000)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
        finally:
            process.kill()


@contextmanager
def answering(reply: Any) -> Iterator[str]:
    """The address of an endpoint that answers each request with `reply(body)`, as JSON."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = json.dumps(reply(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def completion(**choice: Any) -> dict[str, Any]:
    one = {"index": 0, "text": "", "finish_reason": "length", "logprobs": None, **choice}
    return {"id": "c", "object": "text_completion", "created": 1, "model": "policy", "choices": [one]}


def scored(body: Any, change: Any = lambda token, entry: entry, others: int = 1) -> Any:
    """Give each token of the prompt -0.5, and `others` tokens after it less."""
    rows: list[Any] = [None]
    for token in body["prompt"][1:]:
        ids = [(token + number) % 12 for number in range(1 + others)]
        entries = {
            each: {"logprob": -0.5 - place, "decoded_token": TOKENIZER.decode([each])} for place, each in enumerate(ids)
        }
        rows.append({str(each): change(each, entry) for each, entry in entries.items()})
    return completion(prompt_logprobs=rows)


@pytest.mark.slow
def test_requests_have_the_tokens_and_replies_are_read_by_id(key: None) -> None:
    bodies: list[Any] = []

    def reply(body: Any) -> Any:
        bodies.append(body)
        return scored(body)

    with answering(reply) as url:
        found = endpoint(url).get_topk_logits(batch(), 2, positions="loss")
    assert sorted(body["prompt"] for body in bodies) == [[3, 4, 9], [5, 6, 7, 8, 9]]
    assert all((body["max_tokens"], body["prompt_logprobs"]) == (1, 2) for body in bodies)
    assert found["topk_indices"].tolist()[1] == [[0, 0], [4, 5], [9, 10], [0, 0], [0, 0]]
    assert found["topk_logits"].tolist()[1] == [[0, 0], [-0.5, -1.5], [-0.5, -1.5], [0, 0], [0, 0]]
    assert not found["topk_normalizers"].any()


WRONG = {
    "no_field": (lambda body: completion(), UserError, "no `prompt_logprobs` by token id"),
    "too_few": (lambda body: scored(body, others=0), UserError, "returned 1 of algorithm.top_k=2 tokens"),
    "not_finite": (lambda body: scored(body, lambda _, e: {**e, "logprob": "-inf"}), UserError, "not finite numbers"),
    "short": (lambda body: completion(prompt_logprobs=[None]), UserError, "for each token of the prompt"),
    "other_tokenizer": (
        lambda body: scored(body, lambda _, entry: {**entry, "decoded_token": "x"}), ConfigError, "needs the tokenizer",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_replies_that_are_not_those_of_a_teacher(case: str, key: None) -> None:
    reply, kind, message = WRONG[case]
    with answering(reply) as url, pytest.raises(kind, match=message) as error:
        endpoint(url).get_topk_logits(batch(), 2)
    assert KEY not in str(error.value)


def test_what_an_endpoint_cannot_do_is_an_error_before_any_work(key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupported, match="not of given ones"):
        endpoint("http://127.0.0.1:9/v1").get_token_set_logprobs(batch())
    with pytest.raises(ConfigError, match=r"temperature=0\.5; set it to 1"):
        endpoint("http://127.0.0.1:9/v1", temperature=0.5)
    with pytest.raises(UserError, match=r"algorithm\.endpoint .*APIConnectionError"):
        endpoint("http://127.0.0.1:9/v1", max_retries=0).get_logprobs(batch())
    monkeypatch.delitem(os.environ, "TEACHER_KEY")
    with pytest.raises(ConfigError, match="TEACHER_KEY is not set"):
        endpoint("http://127.0.0.1:9/v1")
