"""Messages of a conversation as in OpenAI's chat completions: roles, content parts, tools and their calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, TypedDict


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, not decoded. `source`: a file, an encoded image (PNG, JPEG, ...), or a PIL image.

    `where` names its row and place for errors; an image of more than `max_pixels` is rejected when it is decoded.
    """

    source: Path | bytes | Any
    where: str
    max_pixels: int = 50_000_000

    @cached_property
    def digest(self) -> str:
        """A digest of the content, equal for copies. Raises `OSError` for a file that cannot be read."""
        found = hashlib.blake2b(digest_size=16)
        if isinstance(self.source, (Path, bytes)):
            found.update(self.encoded())
        else:
            found.update(f"{self.source.mode} {self.source.size} ".encode())
            found.update(self.source.tobytes())
        return found.hexdigest()

    def __str__(self) -> str:
        if isinstance(self.source, Path):
            return str(self.source)
        return f"image of {len(self.source)} bytes" if isinstance(self.source, bytes) else "image"

    def encoded(self) -> bytes:
        """Return the bytes of the file, or the encoded image. Not for a PIL image."""
        return self.source.read_bytes() if isinstance(self.source, Path) else bytes(self.source)


class TextPart(TypedDict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """A part of a message that is an image."""

    type: Literal["image"]
    image: Picture


ContentPart = TextPart | ImagePart
"""A part of a message's content."""

Content = str | Sequence[ContentPart]
"""The content of a message: text, or a sequence of parts."""


class FunctionCall(TypedDict):
    """The function that a tool call names; `arguments` is a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of a tool in an assistant message; the tool's answer names its `id` as `tool_call_id`."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict, total=False):
    """One turn of a conversation; `role` is system, user, assistant or tool.

    `tool_calls` belong to assistant messages, `tool_call_id` and `name` to the answer of a tool. `reasoning_content` is
    an assistant's reasoning, where the chat format keeps it apart from the content.
    """

    role: Required[str]
    content: Required[Content]
    tool_calls: NotRequired[Sequence[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    reasoning_content: NotRequired[str]


class FunctionSpec(TypedDict):
    """A function that the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class ToolSpec(TypedDict):
    """A tool as chat templates and OpenAI's API describe it."""

    type: Literal["function"]
    function: FunctionSpec


def text_of(message: Message) -> str:
    """Return the text of a message: its content, or the joined texts of its parts, without its images."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def pictures_of(messages: Iterable[Message]) -> tuple[Picture, ...]:
    """Return the images of a conversation in their order."""
    contents = (message["content"] for message in messages)
    parts = (part for content in contents if not isinstance(content, str) for part in content)
    return tuple(part["image"] for part in parts if part["type"] == "image")


def encodable(text: str) -> str:
    """Return `text` with surrogates, which no tokenizer can encode, replaced."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
