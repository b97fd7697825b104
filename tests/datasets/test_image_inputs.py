"""Images in rows: their places, their tokens as the processor itself writes them, and what cannot be used."""

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

from rlframework.base.errors import DataError, ImageError
from rlframework.config.environments import ColumnsConfig, DatasetConfig
from rlframework.config.sections import ImagesConfig
from rlframework.datasets.chat.rendering import render_prompt, render_samples
from rlframework.datasets.conversations import Conversation, conversation_of
from rlframework.datasets.image_inputs import ImageInputs
from rlframework.datasets.pictures import ImageAddresses, PictureReader, decoded
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.huggingface.model_directories import read_config
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.huggingface.vision_models import load_processor
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, pictures_of, text_of


def image(width: int = 8, height: int = 8, shade: int = 100) -> Image.Image:
    made = Image.new("RGB", (width, height), (shade, 255 - shade, 7))
    made.putpixel((0, 0), (1, 2, 3))
    return made


def encoded(made: Image.Image, kind: str = "PNG") -> bytes:
    out = BytesIO()
    made.save(out, kind)
    return out.getvalue()


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """`read(row)`: the conversation of a row, whose relative paths start from `tmp_path`."""

    addresses = ImageAddresses()

    def read(row: dict[str, Any], **section: Any) -> Conversation:
        return conversation_of(
            row, ColumnsConfig(), "row 7", PictureReader(ImagesConfig(**section), tmp_path, addresses)
        )

    return read


def shades(conversation: Conversation) -> list[int]:
    return [decoded(picture).getpixel((1, 1))[0] for picture in pictures_of(conversation.messages)]


def test_openai_s_and_llava_s_format_and_columns(read, tmp_path):
    """Parts, places in texts, and images before the first user turn; files, bytes, data URIs, PIL, frames."""
    image(shade=30).save(tmp_path / "a.png")
    uri = "data:image/png;base64," + base64.b64encode(encoded(image(shade=40))).decode()
    parts: list[Any] = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": uri}}]
    parts += [{"type": "image", "image": "a.png"}, {"type": "video", "video": [image(shade=50), image(shade=60)]}]
    talk = read({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]})
    assert shades(talk) == [40, 30, 50, 60]
    assert [part["type"] for part in talk.messages[0]["content"]] == ["text", *["image"] * 4]

    turns = [{"from": "human", "value": "<image>\nleft <image> right"}, {"from": "gpt", "value": "yes"}]
    talk = read({"conversations": turns, "image": "a.png", "images": [{"bytes": encoded(image(shade=70))}]})
    assert shades(talk) == [30, 70]
    assert [part.get("text") for part in talk.messages[0]["content"]] == [None, "left", None, "right"]
    assert text_of(talk.messages[0]) == "leftright"

    talk = read({"question": "how many?", "answer": 2, "images": ["a.png", encoded(image(shade=80), "BMP")]})
    assert shades(talk) == [30, 80]
    assert [part["type"] for part in talk.messages[0]["content"]] == ["image", "image", "text"]
    assert read({"question": "how many?", "answer": 2}).messages[0]["content"] == "how many?"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "<image> a <image>", "image": "a.png"}, "row 7: there are 2 places for images .* and 1 images"),
        ({"prompt": "a <image>"}, "row 7: there are 1 places for images .* and 0 images"),
        ({"prompt": "a", "image": "gone.png"}, r"row 7, column 'image': there is no image file .*gone\.png"),
        ({"prompt": "a", "image": "."}, "row 7, column 'image': there is no image file"),
        ({"prompt": "a", "images": [b"", "x"]}, "row 7, column 'images', image 0: the image is empty"),
        ({"prompt": "a", "image": b"no image"}, "the image is in no known format, or damaged"),
        ({"prompt": "a", "image": encoded(image(64, 64))[:-40]}, "the image cannot be decoded"),
        ({"prompt": "a", "image": encoded(image(60, 60))}, "has 60 x 60 pixels; it may have 1 to 3,000"),
        ({"prompt": "a", "image": 3}, "must be a path, bytes, a data URI or a PIL image, not int"),
        ({"prompt": "a", "image": "data:image/png;base64,a"}, "the data URI is not base64"),
        ({"prompt": "a", "image": "https://example.org/a.png"}, "'image', https://.*a.png: .* is not read unless env"),
        ({"prompt": "a", "image": "S3://bucket/a.png"}, "S3://bucket/a.png: .* only http and https are read"),
        ({"prompt": "a", "completion": "<image>", "image": "a.png"}, "an assistant turn has an image"),
    ],
)
def test_images_that_cannot_be_used_are_named(read, tmp_path, row, problem):
    image().save(tmp_path / "a.png")
    with pytest.raises(ImageError, match=problem):
        shades(read(row, max_pixels=3000 if "60 x" in problem else 10**6))


def test_without_the_section_images_are_rejected():
    parts = [{"type": "image_url", "image_url": {"url": "a.png"}}]
    with pytest.raises(DataError, match=r"row 7.*\['image_url'\] are not supported.*set environment.images"):
        conversation_of({"messages": [{"role": "user", "content": parts}]}, ColumnsConfig(), "row 7")


# -- tokens and tensors ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=tiny_vlm_directories.FAMILIES)
def model_folder(request, tmp_path_factory):
    return tiny_vlm_directories.save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return load_tokenizer(str(model_folder))


@pytest.fixture(scope="module")
def images(model_folder, tokenizer):
    return ImageInputs(str(model_folder), read_config(str(model_folder)), tokenizer)


def sample(*parts: Any, completion: str = "yes") -> Sample:
    reader = PictureReader(ImagesConfig(), Path())
    row = {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": completion}]}
    talk = conversation_of(row, ColumnsConfig(), "row 7", reader)
    return Sample("7", talk.messages, "", talk.completion)


def part(made: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": made}


A, B = part(image(16, 16, 20)), part(image(16, 16, 90))


@pytest.mark.slow
def test_rows_are_those_of_the_processor(model_folder, tokenizer, images):
    """Ids and tensors are those of the model's own processor, called with the whole text and all images at once."""
    row = sample({"type": "text", "text": "first "}, A, {"type": "text", "text": " then "}, B)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": "first "}, {"type": "image"},
                                      {"type": "text", "text": " then "}, {"type": "image"}]}],
        tokenize=False,
    )  # fmt: skip
    processor = load_processor(str(model_folder), read_config(str(model_folder)), tokenizer)
    whole = processor(text=[text], images=[A["image"], B["image"]], return_tensors="pt")
    prompt = render_prompt(tokenizer, row.messages, images=images)
    assert prompt == whole["input_ids"][0].tolist()
    [(ids, mask)] = render_samples(tokenizer, [row], images=images)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode([token for token, trained in zip(ids, mask, strict=True) if trained]) == "yes<eos>"
    columns = images.columns([pictures_of(row.messages)], torch.tensor([prompt]))
    for name, value in columns.items():
        made = value if isinstance(value, torch.Tensor) else value.as_tensor()
        torch.testing.assert_close(made, whole[name].to(made.dtype))
    assert set(columns) == set(whole) - {"input_ids", "attention_mask"}


def test_rows_with_the_same_images_share_their_tensors(tokenizer, images):
    """Rows of a group, and copies of an image; rows without images have none."""
    rows = [sample(A), sample(part(A["image"].copy())), sample({"type": "text", "text": "a"}), sample(B)]
    columns = images.columns([pictures_of(row.messages) for row in rows], torch.zeros(4, 3, dtype=torch.int64))
    for value in columns.values():
        if not isinstance(value, torch.Tensor):
            first, copy, none, other = value.tensors
            assert first is copy
            assert none is None
            assert other is not first
    assert images.columns([()], torch.zeros(1, 3, dtype=torch.int64)).keys() == columns.keys()


@pytest.mark.slow
def test_each_different_image_is_processed_once(model_folder, tokenizer):
    """The turns of an episode have all images so far; joined, they are what the processor makes of all at once."""
    images = ImageInputs(str(model_folder), read_config(str(model_folder)), tokenizer)
    shown = [part(image(16, 16, 20 * turn)) for turn in range(6)]
    for turn in range(6):
        images.processed(pictures_of(sample(*shown[: turn + 1]).messages))
    assert images.made == 6
    several = pictures_of(sample(*shown, part(image(24, 16)), part(image(48, 16))).messages)
    for pictures in (several[:6], several):
        made, together = images.processed(pictures), images._process([decoded(picture) for picture in pictures])
        assert made.tensors.keys() == together.tensors.keys()
        for name, tensor in together.tensors.items():
            assert torch.equal(made.tensors[name], tensor)
        assert (list(made.texts), made.features) == (list(together.texts), together.features)


@pytest.mark.slow
def test_placeholders_in_texts_and_images_that_are_cut_off_are_errors(tokenizer, images):
    placeholder = tokenizer.convert_ids_to_tokens(images.token)
    written: Message = {"role": "user", "content": f"a {placeholder}"}
    with pytest.raises(ImageError, match=r"wrote 1 placeholders .* for 0 images"):
        render_prompt(tokenizer, [written], images=images)
    with pytest.raises(DataError, match=r"'7': row 7.*image tokens, but the model makes \d+ features of its images"):
        render_samples(tokenizer, [sample(A, B)], max_tokens=3, images=images)
    with pytest.raises(DataError, match="has images, which are not supported here"):
        render_prompt(tokenizer, sample(A).messages)


# -- the data set ------------------------------------------------------------------------------------------------------


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def test_rows_with_bad_images_end_the_run_or_are_left_out_and_counted(tmp_path, caplog):
    """Equal texts with different images are different prompts; a copy of an image is never in both splits."""
    for number in range(6):
        image(shade=number // 2).save(tmp_path / f"{number}.png")
    (tmp_path / "5.png").write_bytes(b"")
    path = write(tmp_path, [{"question": "shade?", "answer": n // 2, "image": f"{n}.png"} for n in range(6)])
    keys: dict[str, Any] = {"path": str(path), "check": "exact", "instruction": " a number", "validation_fraction": 0.4}
    with pytest.raises(ImageError, match=r"rows\.jsonl, line 6, column 'image': the image .*5\.png is empty"):
        DatasetEnvironment(DatasetConfig(**keys, images={}), seed=0)
    environment = DatasetEnvironment(DatasetConfig(**keys, images={"invalid": "skip"}), seed=0)
    assert "1 of 6 rows are left out, because their images cannot be used; the first: " in caplog.text
    train, held_out = (
        {picture.digest for row in environment.samples(split) for picture in pictures_of(row.messages)}
        for split in ("train", "validation")
    )
    assert len(environment.samples("train")) + len(environment.samples("validation")) == 5
    assert train
    assert held_out
    assert not train & held_out
    assert [part["type"] for part in environment.samples("train")[0].messages[-1]["content"]] == [
        "image",
        "text",
        "text",
    ]
