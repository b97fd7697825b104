"""Render the training samples of a configuration once, into token data for supervised training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rlframework.config.algorithms import SFTConfig
from rlframework.config.sections import RunConfig
from rlframework.datasets.rendering import Rendered, render_samples
from rlframework.datasets.tokens import TokenData, write_token_data
from rlframework.errors import ConfigError, DataError
from rlframework.files import check_new_folder
from rlframework.huggingface.hub import require_available
from rlframework.huggingface.model_directories import model_positions
from rlframework.huggingface.tokenizer import tokenizer_fingerprint
from rlframework.interfaces.environment import Sample
from rlframework.logs import ProgressCallback
from rlframework.plugins.manager import create_manager
from rlframework.runner.parts import open_environment, open_tokenizer
from rlframework.secrets import hide_secrets
from rlframework.training.input_checks import BATCH


def tokenize(config: RunConfig, out: str | Path, *, progress: ProgressCallback = lambda done, total: None) -> TokenData:
    """Write the training samples of `config` to the folder `out`, as `algorithm: {name: sft}` renders them, in order.

    Data is streamed, so it may exceed memory. The folder is written completely or not at all: a non-empty `out`, an
    algorithm other than `sft`, and invalid data raise `UserError`.
    """
    algorithm = config.algorithm
    if not isinstance(algorithm, SFTConfig):
        raise ConfigError(
            f"algorithm.name is {algorithm.name!r}, but only supervised training reads token data; "
            "set algorithm.name=sft"
        )
    check_new_folder(Path(out), f"OUT={str(out)!r}")
    require_available(config.policy.model_name)
    tokenizer = open_tokenizer(config.policy)
    limit, cut = model_positions(config.policy.model_name, config.policy.trust_remote_code), algorithm.max_tokens

    def rendered(samples: Sequence[Sample]) -> Iterator[Rendered]:
        trained = False
        for start in range(0, len(samples), BATCH):
            batch = list(samples[start : start + BATCH])
            for sample, row in zip(batch, render_samples(tokenizer, batch, algorithm.train_on, cut), strict=True):
                if limit is not None and len(row[0]) > limit:
                    raise DataError(
                        f"sample {sample.id!r} has {len(row[0])} tokens, and the model (policy.model_name="
                        f"{config.policy.model_name}) takes {limit}; algorithm.max_tokens={limit} truncates such rows"
                    )
                trained = trained or any(row[1][1:])
                yield row
            progress(start + len(batch), len(samples))
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
