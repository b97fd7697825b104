"""`checkpoints.upload`: which addresses are accepted, and that errors do not repeat a secret."""

from __future__ import annotations

from typing import Any

import pytest

from rlframework.base.errors import ConfigError
from rlframework.plugins.configure import load_config

SECRETS = [
    "s3://me:s3cr3t-word@bucket/run",
    "abfs://me:s3cr3t-word@account.dfs.core.windows.net/run",
    "abfs://s3cr3t-word@host/run",
    "abfs://data@account.dfs.core.windows.net/run?sig=s3cr3t-word",
    "s3://bucket/run?secret_access_key=s3cr3t-word",
]
ADDRESSES = [
    "s3://bucket/run-7",
    "file:///mnt/share/run-7",
    "abfs://data/run-7",
    "abfss://data@account.dfs.core.windows.net/run-7",
]


@pytest.mark.parametrize("url", SECRETS)
def test_an_address_with_a_secret_is_rejected_and_the_secret_not_repeated(manager: Any, minimal: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=r"`checkpoints\.upload`: .* password or key; give .* environment") as error:
        load_config({**minimal, "checkpoints": {"upload": url}}, manager=manager)
    assert "s3cr3t-word" not in str(error.value)


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_stays_as_it_was_given(manager: Any, minimal: Any, url: str) -> None:
    assert load_config({**minimal, "checkpoints": {"upload": url}}, manager=manager).checkpoints.upload == url


def test_a_path_without_a_protocol_is_rejected(manager: Any, minimal: Any) -> None:
    with pytest.raises(ConfigError, match=r"`checkpoints\.upload`: must be an address such as s3://"):
        load_config({**minimal, "checkpoints": {"upload": "bucket/run"}}, manager=manager)


def test_resuming_from_uploads_needs_their_address(manager: Any, minimal: Any) -> None:
    with pytest.raises(ConfigError, match="resume_uploaded needs upload, the address"):
        load_config(minimal, ["checkpoints.resume_uploaded=true"], manager=manager)
