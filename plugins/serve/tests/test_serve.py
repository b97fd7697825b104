"""`rlframework serve` as a process, with OpenAI's client."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework_serve.server import _listen

pytestmark = pytest.mark.slow

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@contextmanager
def serve(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process and what it prints, for a model of random weights."""
    model = make_llama(folder / "model", character_tokenizer(ALPHABET), hidden=32, layers=1)
    command = [sys.executable, "-m", "rlframework.cli", "serve", str(model), "--port", "0", *words]
    limits = ["generation.max_new_tokens=5"]
    with subprocess.Popen([*command, *limits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], printed: dict[str, str], **options: Any) -> Any:
    from openai import OpenAI

    assert printed.keys() == {"base_url", "api_key"}, process.communicate()
    with OpenAI(base_url=printed["base_url"], max_retries=0, **{"api_key": printed["api_key"], **options}) as client:
        return client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], seed=1, logprobs=True
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_a_model_is_served_until_a_signal_and_its_token_is_not_printed(tmp_path: Path, number: int) -> None:
    token = "a-token-of-enough-characters"
    with serve(tmp_path, "--token", token) as (process, printed):
        assert printed["api_key"] == "(as given)"
        assert ask(process, printed, api_key=token).choices
        assert process.stdout is not None
        told = "requests without their own are answered with temperature=1, top_p=1 and at most 5 tokens, which is"
        assert process.stdout.readline().startswith(told)
        process.send_signal(number)
        assert token not in "".join(process.communicate(timeout=60))
        assert process.returncode == 0


def test_the_requests_of_lm_eval_are_answered_with_the_models_log_probabilities(tmp_path: Path) -> None:
    """Recorded from `lm_eval --model local-completions --batch_size 2` of lm-eval 0.4.13, which is not installed here.

    It reads `token_logprobs[context:-1]`, whose sum is the continuation's log-probability, and takes a continuation
    for the greedy one if each value is the largest of its `top_logprobs`.
    """
    import httpx
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    token = "a-token-of-enough-characters"
    with serve(tmp_path, "--token", token) as (_, printed):
        tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").double()
        context, rows = 4, [tokenizer("2+2= four")["input_ids"], tokenizer("abc x")["input_ids"]]
        with torch.no_grad():
            greedy_token = int(model(torch.tensor([rows[1][:-1]])).logits[0, -1].argmax())
            rows[1] = [*rows[1][:-1], greedy_token]
            logs = [model(torch.tensor([row])).logits[0].log_softmax(-1) for row in rows]

        def answer(**body: Any) -> list[Any]:
            sent = {"prompt": rows, "model": "policy", "temperature": 0, "seed": 1234, **body}
            headers = {"Authorization": f"Bearer {token}"}
            reply = httpx.post(f"{printed['base_url']}/completions", json=sent, headers=headers, trust_env=False)
            return list(reply.raise_for_status().json()["choices"])

        scored = answer(max_tokens=1, logprobs=1, echo=True)
        for choice, row, log in zip(scored, rows, logs, strict=True):
            got = choice["logprobs"]
            assert len(got["token_logprobs"]) == len(got["top_logprobs"]) == len(row) + 1
            own = [log[place - 1, row[place]].item() for place in range(1, len(row))]
            assert got["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-5)
            greedy = [log[place - 1].argmax().item() == row[place] for place in range(context, len(row))]
            pairs = zip(got["token_logprobs"][context:-1], got["top_logprobs"][context:-1], strict=True)
            assert [value == max(top.values()) for value, top in pairs] == greedy
        assert scored[1]["logprobs"]["token_logprobs"][4] == max(scored[1]["logprobs"]["top_logprobs"][4].values())

        generated = answer(max_tokens=8, stop=["\n", "<eos>"])
        for choice, row in zip(generated, rows, strict=True):
            with torch.no_grad():
                more = model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=5)[0, len(row) :]
            expected = tokenizer.decode(more, skip_special_tokens=True).partition("\n")[0]
            assert choice["text"] == expected


def test_answers_are_sent_without_waiting_for_acknowledgements() -> None:
    """Head and body of an answer are two writes; the second would wait for the client without TCP_NODELAY."""

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(connected, sock=_listen("127.0.0.1", 0)) as server:
            _, client = await asyncio.open_connection(*server.sockets[0].getsockname())
            client.close()
            return await found

    assert asyncio.run(accepted()) != 0
