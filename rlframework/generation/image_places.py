"""Where the images of a prompt are: the tokens that stand for the features of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlframework.base.errors import RequestError
from rlframework.generation.media import Media
from rlframework.interfaces.generation import GenerationRequest


class ImagePlace(NamedTuple):
    """An image, and the number of consecutive `tokens` from `start` on that stand for its features."""

    media: Media
    start: int
    tokens: int


def image_places(request: GenerationRequest, config: Any) -> list[ImagePlace]:
    """Return the places of the images of a request for a model of `config`, in the order of their tokens.

    Raises `RequestError` unless the prompt has one token for each feature that the model makes of them, those of an
    image consecutive.
    """
    from rlframework.huggingface.image_processor import image_token

    name, tokens = request.request_id, (request.prompt_ids == image_token(config)).nonzero()[:, 0].tolist()
    each = [*_counted(request, config)]
    expected = sum(count for _, count in each)
    if len(tokens) != expected:
        raise RequestError(
            f"the prompt of request {name!r} has {len(tokens)} image tokens, but the model makes {expected} features "
            f"of its images; give the token ids and the media of one and the same processor"
        )
    places, first = [], 0
    for media, count in each:
        own = tokens[first : first + count]
        if own != [*range(own[0], own[0] + count)]:
            raise RequestError(f"request {name!r} has other tokens among those of an image; they must be consecutive")
        places.append(ImagePlace(media, own[0], count))
        first += count
    return places


def _counted(request: GenerationRequest, config: Any) -> Iterator[tuple[Media, int]]:
    """Yield each image of a request, and the number of its features."""
    from rlframework.huggingface.image_features import count_features

    for media in Media.of(request.media).each if request.media else ():
        count = count_features(config, media.inputs)
        if not count:
            raise RequestError(
                f"request {request.request_id!r} has media {', '.join(sorted(media.inputs))}, of which the number of "
                f"features of a {config.model_type} model cannot be told"
            )
        yield media, count
