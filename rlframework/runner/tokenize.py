"""Render the training samples of a configuration once, into token data for supervised training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.config.algorithms import SFTConfig
from rlframework.datasets.rendering import Rendered, render_samples
from rlframework.datasets.tokens.writing import write_token_data
from rlframework.errors import ConfigError, DataError, UserError
from rlframework.files import check_writable
from rlframework.huggingface.hub import require_available
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

BATCH = 256
"""Samples per call of the tokenizer."""

Progress = Callable[[int, int], None]
"""Called with the number of finished rows and the total."""


def tokenize(
    config: RunConfig, out: str | Path, *, manager: PluginManager | None = None, progress: Progress | None = None
) -> TokenData:
    """Write the training samples of `config` to the folder `out`, as `algorithm: {name: sft}` renders them, in order.

    Data is streamed, so it may exceed memory. The folder is written completely or not at all: a non-empty `out`, an
    algorithm other than `sft`, and invalid data raise `UserError`.
    """
    out = Path(out)
    if not isinstance(config.algorithm, SFTConfig):
        raise ConfigError(
            f"algorithm.name is {config.algorithm.name!r}, but only supervised training reads token data; "
            "set algorithm.name=sft"
        )
    _check_out(out)
    require_available(config.policy.model_name)
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
    trained = False
    for start in range(0, len(samples), BATCH):
        batch = list(samples[start : start + BATCH])
        for sample, row in zip(
            batch, render_samples(tokenizer, batch, algorithm.train_on, algorithm.max_tokens), strict=True
        ):
            if limit is not None and len(row[0]) > limit:
                raise DataError(
                    f"sample {sample.id!r} has {len(row[0])} tokens, and the model (policy.model_name="
                    f"{config.policy.model_name}) takes {limit}; algorithm.max_tokens={limit} truncates such rows"
                )
            trained = trained or any(row[1][1:])
            yield row
        progress(start + len(batch), len(samples))
    if not trained:
        cut = (
            ""
            if algorithm.max_tokens is None
            else f", because algorithm.max_tokens={algorithm.max_tokens} cuts them off"
        )
        raise DataError(f"no row has a token to train on after its first token, which nothing predicts{cut}")


def _check_out(out: Path) -> None:
    try:
        check_writable(out)
    except UserError as error:
        raise ConfigError(f"OUT={str(out)!r}: {error}") from error
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"OUT={str(out)!r}: the folder is not empty, and nothing is overwritten. Give another, or empty this one"
        )
