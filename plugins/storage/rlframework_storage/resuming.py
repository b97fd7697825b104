"""The checkpoint from which a run resumes on a machine that has none, and checks of the address for uploads."""

from __future__ import annotations

from pathlib import Path

from rlframework.algorithms.checkpoints import FOLDER, newest_checkpoint
from rlframework.base.errors import ConfigError
from rlframework.base.files import exclusive_directory
from rlframework.base.logs import plugin_logger
from rlframework.base.secrets import hide_in_text
from rlframework.config.sections import RunConfig
from rlframework.runner.output_folder import check_output_dir
from rlframework_storage.remote_folder import RemoteFolder
from rlframework_storage.transfer import complete_checkpoints, fetch

_LOG = plugin_logger(__name__)


def checkpoint_to_resume(config: RunConfig, remote: RemoteFolder) -> Path | None:
    """The newest checkpoint in `output_dir` or in `remote`, which is fetched first; None if there is none.

    Raises `StorageError` if `remote` cannot be read, or if what it has is damaged.
    """
    local, found = newest_checkpoint(config.output_dir), complete_checkpoints(remote)
    newest = max(found, default=None)
    if newest is None or (local is not None and local.name >= newest):
        return local
    if local is None:
        check_output_dir(config)
    path = config.output_dir / FOLDER / newest
    _LOG.info("fetching %s to %s", remote.address(newest), path)
    with exclusive_directory(config.output_dir):
        fetch(remote, newest, found[newest], path)
    return path


def require_unused(remote: RemoteFolder) -> None:
    """Raise `ConfigError` if `remote` has complete checkpoints, which a new run would mix with its own."""
    if found := complete_checkpoints(remote):
        raise ConfigError(
            f"checkpoints.upload={hide_in_text(remote.url)!r} holds checkpoints of another run ({', '.join(found)}). "
            "Resume that run with checkpoints.resume_uploaded=true, give an address of its own, or delete them"
        )


def require_writable(remote: RemoteFolder) -> None:
    """Raise `StorageError` if files cannot be written to `remote` and deleted.

    This takes minutes if the endpoint never answers.
    """
    _LOG.info("checking that checkpoints can be uploaded to %s", hide_in_text(remote.url))
    remote.check()
