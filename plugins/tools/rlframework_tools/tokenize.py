"""Render the training samples of a configuration: once, into token data for supervised training, or to look at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.algorithms.algorithm import Algorithm
from rlframework.algorithms.input_checks import BATCH
from rlframework.base.errors import ConfigError, DataError
from rlframework.base.logs import ProgressCallback
from rlframework.base.secrets import hide_secrets
from rlframework.config.algorithms import GRPOConfig, SFTConfig
from rlframework.config.sections import RunConfig
from rlframework.datasets.chat.rendering import Rendered, render_prompt, render_samples
from rlframework.datasets.chat.template_checks import RowWarnings, require_contents, warn_of_template
from rlframework.datasets.tokens import TokenData, write_token_data
from rlframework.huggingface.hub import require_available
from rlframework.huggingface.model_directories import model_positions
from rlframework.huggingface.tokenizer import tokenizer_fingerprint
from rlframework.interfaces.environment import Sample
from rlframework.plugins.manager import create_manager
from rlframework.runner.parts import open_environment, open_images, open_tokenizer
from rlframework_tools.command_output import check_new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenize(config: RunConfig, out: str | Path, *, progress: ProgressCallback = lambda done, total: None) -> TokenData:
    """Write the training samples of `config` to the folder `out`, as `algorithm: {name: sft}` renders them, in order.

    Data is streamed, so it may exceed memory. The folder is written completely or not at all: a non-empty `out`, an
    algorithm other than `sft`, and invalid data raise `UserError`.
    """
    algorithm = _supervised(config)
    if config.environment.images is not None:
        raise ConfigError(
            "environment.images is set, but token data has no images; train without it (algorithm.token_data), or look "
            "at the rows with --show"
        )
    check_new_folder(Path(out), f"OUT={str(out)!r}")
    tokenizer = _tokenizer(config)
    limit, cut = model_positions(config.policy.model_name, config.policy.trust_remote_code), algorithm.max_tokens

    def rendered(samples: Sequence[Sample]) -> Iterator[Rendered]:
        trained, warnings = False, RowWarnings(tokenizer, algorithm.train_on)
        for start in range(0, len(samples), BATCH):
            batch = list(samples[start : start + BATCH])
            warnings.add(batch)
            for sample, row in zip(batch, render_samples(tokenizer, batch, algorithm.train_on, cut), strict=True):
                if limit is not None and len(row[0]) > limit:
                    raise DataError(
                        f"sample {sample.id!r} has {len(row[0])} tokens, and the model (policy.model_name="
                        f"{config.policy.model_name}) takes {limit}; algorithm.max_tokens={limit} truncates such rows"
                    )
                trained = trained or any(row[1][1:])
                yield row
            progress(start + len(batch), len(samples))
        warnings.log()
        if not trained:
            why = "" if cut is None else f", because algorithm.max_tokens={cut} cuts them off"
            raise DataError(f"no row has a token to train on after its first token, which nothing predicts{why}")

    with open_environment(config, create_manager(config.plugins)) as environment:
        return write_token_data(
            Path(out),
            rendered(environment.samples("train")),
            vocab_size=1 + max(tokenizer.get_vocab().values()),
            tokenizer=tokenizer_fingerprint(tokenizer),
            train_on=algorithm.train_on,
            max_tokens=cut,
            source=hide_secrets({"environment": config.environment.model_dump(mode="json"), "seed": config.seed}),
        )


@dataclass(frozen=True)
class ShownRow:
    """A training row to look at: its sample's `id`, its number of `tokens`, and its text in `parts`.

    Each part is the text of consecutive tokens, and whether they are trained on. Consecutive tokens of images are one
    part with their number, such as `<image> x 64`.
    """

    id: str
    tokens: int
    parts: tuple[tuple[str, bool], ...]


def shown_rows(config: RunConfig, count: int) -> list[ShownRow]:
    """Return the first `count` training rows of `config` as `algorithm: {name: sft}` renders them, special tokens too.

    Of an algorithm with rollouts, such as `grpo`, rows are prompts, as they are given to the model. Of one on
    preference pairs, such as `dpo`, each of `count` pairs is two rows, the chosen answer before the rejected one.
    Raises like `tokenize`.
    """
    algorithm, manager = config.algorithm, create_manager(config.plugins)
    tokenizer = _tokenizer(config)
    with open_environment(config, manager) as environment:
        samples = list(environment.samples("train")[:count])
        names, images = [sample.id for sample in samples], open_images(config, tokenizer)
        if not isinstance(algorithm, GRPOConfig):
            warnings = RowWarnings(tokenizer, algorithm.train_on if isinstance(algorithm, SFTConfig) else "last")
            warnings.add(samples)
            warnings.log()
        if isinstance(algorithm, SFTConfig):
            rendered = render_samples(tokenizer, samples, algorithm.train_on, algorithm.max_tokens, images)
            rows = list(zip(names, rendered, strict=True))
        elif isinstance(algorithm, GRPOConfig):
            prompts = [render_prompt(tokenizer, sample.messages, sample.tools, images) for sample in samples]
            rows = [(name, (ids, [False] * len(ids))) for name, ids in zip(names, prompts, strict=True)]
        else:
            part: type[Algorithm] = manager.load(manager.select("algorithm", algorithm.name).record)
            rows = part.shown_rows(config, samples, tokenizer, images)
    media = None if images is None else images.token
    return [ShownRow(name, len(row[0]), tuple(_parts(tokenizer, row, media))) for name, row in rows]


def _parts(tokenizer: PreTrainedTokenizerBase, row: Rendered, media: int | None) -> Iterator[tuple[str, bool]]:
    """The parts of a shown row; `media`: the token of images."""
    for (trained, of_image), run in groupby(zip(*row, strict=True), lambda token: (token[1], token[0] == media)):
        ids = [token for token, _ in run]
        text = str(tokenizer.decode(ids[:1] if of_image else ids))
        yield (f"{text} x {len(ids)}" if of_image else text), trained


def _supervised(config: RunConfig) -> SFTConfig:
    if not isinstance(config.algorithm, SFTConfig):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, but only supervised training reads token data; "
            "set algorithm.name=sft"
        )
    return config.algorithm


def _tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer; log a warning if its chat template is not one to train with, or raise a `DataError`."""
    require_available(config.policy.model_name)
    tokenizer = open_tokenizer(config.policy)
    require_contents(tokenizer)
    warn_of_template(tokenizer, rows=not isinstance(config.algorithm, GRPOConfig))
    return tokenizer
