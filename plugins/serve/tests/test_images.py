"""Requests with images: what is read, what is rejected, what a session keeps, and training on what was sampled."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import tiny_vlm_directories
import torch
from PIL import Image
from transformers import AutoConfig

from rlframework import load_config
from rlframework.config.sections import ImagesConfig
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.datasets.image_inputs import ImageInputs
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.messages import pictures_of
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import rollout
from rlframework.runner.parts import build_parts
from rlframework_serve.agent_environment import openai_messages
from rlframework_serve.server import MAX_BODY, MAX_BODY_WITH_IMAGES, Endpoint

pytestmark = pytest.mark.slow

IMAGE_TOKENS = {16: 4, 24: 6}
"""Tokens of an image of 16 pixels in height, by its width: one for 2 x 2 patches of 4 x 4 pixels."""


def png(number: int, width: int = 16, kind: str = "PNG") -> str:
    stored = BytesIO()
    Image.new("RGB", (width, 16), (40 * number, 90, 200 - 40 * number)).save(stored, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(stored.getvalue()).decode()}"


def user(*content: str) -> dict[str, Any]:
    """A user's message; data URIs are images."""
    parts = [
        {"type": "image_url", "image_url": {"url": part, "detail": "auto"}}
        if ":" in part
        else {"type": "text", "text": part}
        for part in content
    ]
    return {"role": "user", "content": parts}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tiny_vlm_directories.save("qwen2_vl", tmp_path_factory.mktemp("vlm") / "model")


@pytest.fixture(scope="module")
def vision(folder: Path) -> Any:
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, ImagesConfig(max_pixels=1000), ImageInputs(
        str(folder), AutoConfig.from_pretrained(folder), tokenizer
    )  # fmt: skip


async def test_images_are_tokens_once_and_inputs_of_the_model(serving: Any, vision: Any) -> None:
    """Both APIs, in one conversation: the image of the first turn is in the prompt of the second, at its place."""
    tokenizer, _, inputs = vision

    async with serving(vision=vision) as served, served.client() as client:
        say = [user("is ", png(1), "red?")]
        first = await client.chat.completions.create(model="policy", messages=say)
        prompt = served.completer.asked[0][0]
        assert tokenizer.decode(prompt) == "is <|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>red?"
        said = {"role": "assistant", "content": first.choices[0].message.content}
        more = [*say, said, user(png(2, 24), png(1))]
        await client.chat.completions.create(model="policy", messages=more)
        (row,) = served.session.trajectory.rows
        assert row.token_ids.tolist().count(inputs.token) == 4 + 6 + 4
        second, media = served.completer.asked[1][0], served.completer.media[1]
        assert second[: len(prompt) + 6] == [*prompt, *tokenizer("hello")["input_ids"], tokenizer.eos_token_id]
        assert media["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 6], [1, 4, 4]]
        assert torch.equal(media["pixel_values"][:16], served.completer.media[0]["pixel_values"])
        assert len(row.pictures) == 3
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": png(1), "detail": "low"}]}]
        reply = await client.responses.create(model="policy", input=items)
        assert served.completer.asked[2][0].count(inputs.token) == 4
        items[0]["content"][0]["image_url"] = png(3)
        await client.responses.create(model="policy", input=items, previous_response_id=reply.id)
        assert served.completer.asked[3][0].count(inputs.token) == 8
        assert served.completer.media[3]["image_grid_thw"].tolist() == [[1, 4, 4]] * 2


async def test_an_image_that_is_sent_again_is_stored_once(serving: Any, vision: Any) -> None:
    """Ten turns, each with all images so far: the session holds the bytes of the different images."""

    async with serving(vision=vision) as served, served.client() as client:
        messages: list[Any] = []
        for turn in range(10):
            messages.append(user(png(turn % 4), f"{turn}?"))
            reply = await client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        session = served.session
        (row,) = session.trajectory.rows
        kept = [*row.pictures, *pictures_of(session.transcript), *session.pictures.values()]
        assert len(row.pictures) == 10
        assert len({id(picture.source) for picture in kept}) == 4
        assert sum(len(picture.source) for picture in set(row.pictures)) == sum(
            len(base64.b64decode(png(number).partition(",")[2])) for number in range(4)
        )


async def test_conversations_with_other_images_are_other_conversations(serving: Any, vision: Any) -> None:
    async with serving(vision=vision) as served, served.client() as client:
        for number in (1, 2):
            say = [user(png(number), "red?")]
            reply = await client.chat.completions.create(model="policy", messages=say)
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            await client.chat.completions.create(model="policy", messages=[*say, said, user("sure?")])
        assert [int(row.token_mask.sum()) for row in served.session.trajectory.rows] == [12, 12]
        (first, _, second, _) = served.completer.asked
        assert first[0] == second[0]  # the same tokens
        assert first[1] != second[1]  # not the same seed


BROKEN = {
    "https://example.com/a.png": r"is an address on the network \('https://example.com/a.png'\), which is never read, "
    "so that no client can make this machine send requests, also with environment.images.allow_addresses",
    "file:///etc/hostname": "it must be a data URI",
    "data:text/plain;base64,aGk=": "it must be a data URI",
    "data:image/png;base64,": "the image is empty",
    "data:image/png;base64,%%%": "the data URI is not base64",
    "data:image/png;base64,aGVsbG8=": "the image is damaged, or in no format that is served",
    png(1)[:-40]: "damaged|cannot be decoded|not base64",
    png(1, kind="TIFF"): "in no format that is served",
    png(1, width=100): "has 100 x 16 pixels; it may have 1 to 1,000",
}


@pytest.mark.parametrize("address", BROKEN, ids=lambda address: address[:30] + address[-8:])
async def test_an_image_that_cannot_be_used_is_400_with_its_place(serving: Any, vision: Any, address: str) -> None:
    from openai import BadRequestError

    async with serving(vision=vision) as served, served.client() as client:
        messages = [user("hi"), {"role": "assistant", "content": "hello"}, user("look ", png(1), address)]
        with pytest.raises(BadRequestError, match=rf"messages\[2\]\.content\[2\].*(?:{BROKEN[address]})"):
            await client.chat.completions.create(model="policy", messages=messages)
        items = [{"role": "user", "content": [{"type": "input_image", "image_url": address}]}]
        with pytest.raises(BadRequestError, match=r"input\[0\]\.content\[0\]"):
            await client.responses.create(model="policy", input=items)
        assert not served.completer.asked
        assert len(served.session.pictures) == 1


async def test_images_where_none_can_be(serving: Any, vision: Any) -> None:
    from openai import BadRequestError

    async with serving() as served, served.client() as client:
        with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[1\] is an image, and .* text only"):
            await client.chat.completions.create(model="policy", messages=[user("hi", png(1))])
    async with serving(vision=vision) as served, served.client() as client:
        said = {**user(png(1)), "role": "assistant"}
        with pytest.raises(BadRequestError, match=r"messages\[1\]\.content\[0\] is an image; only user, system"):
            await client.chat.completions.create(model="policy", messages=[user("hi"), said])


def test_bodies_may_be_larger_with_images(vision: Any) -> None:
    sampler: Any = object()
    assert Endpoint(sampler, "policy")._max_body == MAX_BODY == 4 * 2**20
    assert Endpoint(sampler, "policy", images=vision[1])._max_body == MAX_BODY_WITH_IMAGES == 64 * 2**20


async def looks(sample: Any, session: Any) -> float:
    """An agent that sees the row's image, and two more after the model's first answer."""
    from openai import AsyncOpenAI

    number = int(sample.answer)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        messages = openai_messages(sample.messages)
        first = await client.chat.completions.create(model=session.model, messages=messages)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        messages += [said, user(png(number + 1, 24), "and ", png(number))]
        await client.chat.completions.create(model=session.model, messages=messages)
    return 1.0


@pytest.fixture
def agents(folder: Path, tmp_path: Path, monkeypatch: Any) -> Any:
    """The parts of a run of `looks`, on rows with an image each. Every second token ends a turn."""
    rows = []
    for number in range(3):
        Image.new("RGB", (16, 16), (80 * number, 200, 10)).save(tmp_path / f"{number}.png")
        rows.append({"prompt": f"<image>{number}?", "image": f"{number}.png", "answer": str(number)})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections = {
        "algorithm": {"name": "grpo", "num_steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2},
        "environment": {
            "name": "agent",
            "agent": "probe_agents:with_tool",
            "path": f"{tmp_path}/rows.jsonl",
            "images": {},
        },
        "policy": {"model_name": str(folder), "train_global_batch_size": 4},
        "generation": {"max_new_tokens": 5},
        "observers": {"console": False, "curve": False},
        "output_dir": f"{tmp_path}/run",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(sections))
    with build_parts(load_config(tmp_path / "run.yaml")) as parts:
        ends = {*range(1, len(parts.tokenizer), 2), parts.tokenizer.eos_token_id}
        monkeypatch.setattr(ChatFormat, "turn_end_ids", frozenset(ends))
        monkeypatch.setattr(parts.environment, "_agent", looks)
        yield parts


def test_training_scores_what_agents_sampled_with_the_images_that_they_sent(agents: Any) -> None:
    """Contract 11: exact tokens, and log-probabilities within rounding; with images swapped they differ."""
    samples = [sample for sample in agents.environment.samples("train") for _ in range(2)]
    result = rollout(agents, samples, row_seeds(0, 1, len(samples)))
    assert result.failures == [""] * len(samples)
    assert result.rewards.tolist() == [1.0] * len(samples)
    mask, ids = result.data["token_mask"].bool(), result.data["input_ids"]
    assert (ids == agents.images.token).sum(1).tolist() == [4 + 6 + 4] * len(samples)
    assert not (ids[mask] == agents.images.token).any()
    sampled = result.data["generation_logprobs"][mask]
    agents.policy.prepare_for_lp_inference()
    scored = agents.policy.get_logprobs(result.data)["logprobs"][mask]
    torch.testing.assert_close(scored, sampled, rtol=1e-5, atol=1e-5)

    seen = [pictures_of(turns) for turns in result.transcripts]
    swapped = [(row[2], row[1], row[0]) for row in seen]
    result.data.update(agents.images.columns(swapped, ids))
    scored = agents.policy.get_logprobs(result.data)["logprobs"][mask]
    assert float((scored - sampled).abs().max()) > 1e-3
