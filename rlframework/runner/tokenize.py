"""Rendering the training samples of a configuration once, into token data that supervised training then reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.config.algorithms import SFTConfig
from rlframework.datasets.rendering import Rendered, render_samples
from rlframework.datasets.tokens.writing import write_token_data
from rlframework.errors import ConfigError, DataError, UserError
from rlframework.files import check_writable
from rlframework.huggingface.model_directories import model_positions
from rlframework.huggingface.tokenizer import load_tokenizer, tokenizer_fingerprint
from rlframework.plugins.manager import create_manager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import RunConfig
    from rlframework.datasets.tokens.reading import TokenData
    from rlframework.interfaces.environment import Environment, Sample
    from rlframework.plugins.manager import PluginManager

TOGETHER = 256
"""Samples that are rendered together."""

Progress = Callable[[int, int], None]
"""Called with the rows that are done, and all there are."""


def tokenize(
    config: RunConfig, out: str | Path, *, manager: PluginManager | None = None, progress: Progress | None = None
) -> TokenData:
    """Write the training samples of `config` to the folder `out`, as `algorithm: {name: sft}` renders them, in order.

    All or nothing, and in a stream: data larger than memory is no more work for it than any other. An `out` that holds
    something, an algorithm other than `sft`, and whatever is wrong with the data is a `UserError`, and nothing is
    written.
    """
    out = Path(out)
    if not isinstance(config.algorithm, SFTConfig):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, and rows are rendered for supervised training; "
            "set algorithm.name=sft"
        )
    _check_out(out)
    manager = manager or create_manager(config.plugins)
    policy = config.policy
    tokenizer = load_tokenizer(
        policy.tokenizer_name or policy.model_name, policy.trust_remote_code, policy.chat_template
    )
    part = manager.load(manager.select("environment", config.environment.name).record)
    environment: Environment = part(config.environment, seed=config.seed)
    try:
        samples = environment.samples("train")
        return write_token_data(
            out,
            _rendered(config, tokenizer, samples, progress or (lambda done, total: None)),
            vocab_size=1 + max(tokenizer.get_vocab().values()),
            tokenizer=tokenizer_fingerprint(tokenizer),
            train_on=config.algorithm.train_on,
            max_tokens=config.algorithm.max_tokens,
            source={"environment": config.environment.model_dump(mode="json"), "seed": config.seed},
        )
    finally:
        environment.shutdown()


def _rendered(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample], progress: Progress
) -> Iterator[Rendered]:
    algorithm = config.algorithm
    assert isinstance(algorithm, SFTConfig)  # see `tokenize`
    limit = model_positions(config.policy.model_name, config.policy.trust_remote_code)
    learnt = False
    for start in range(0, len(samples), TOGETHER):
        some = list(samples[start : start + TOGETHER])
        for sample, row in zip(
            some, render_samples(tokenizer, some, algorithm.train_on, algorithm.max_tokens), strict=True
        ):
            if limit is not None and len(row[0]) > limit:
                raise DataError(
                    f"sample {sample.id!r} has {len(row[0])} tokens, and the model (policy.model_name="
                    f"{config.policy.model_name}) takes {limit}; algorithm.max_tokens={limit} cuts such rows"
                )
            learnt = learnt or any(row[1][1:])
            yield row
        progress(start + len(some), len(samples))
    if not learnt:
        cut = "" if algorithm.max_tokens is None else f": algorithm.max_tokens={algorithm.max_tokens} cuts them"
        raise DataError(f"no token of any row is trained on, the first aside, which nothing predicts{cut}")


def _check_out(out: Path) -> None:
    try:
        check_writable(out)
    except UserError as error:
        raise ConfigError(f"OUT={str(out)!r}: {error}") from error
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"OUT={str(out)!r} is not empty, and nothing in it is overwritten. Take another folder, or remove it"
        )
