"""The entry point: sends the checkpoints of a run to `checkpoints.upload`, and fetches the one that it resumes from."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rlframework.config.sections import RunConfig
from rlframework.plugins.hookspec import Uploads, hookimpl


@hookimpl
def rlframework_resume_from(config: RunConfig, checkpoint: Path | None) -> Path | None:
    """Check the address; with `checkpoints.resume_uploaded`, return the newest checkpoint, here or there."""
    if config.checkpoints.upload is None:
        return None
    from rlframework_storage.remote_folder import RemoteFolder
    from rlframework_storage.transfer import checkpoint_to_resume, require_unused, require_writable

    remote = RemoteFolder(config.checkpoints.upload)
    searched = checkpoint is None and config.checkpoints.resume_uploaded
    if checkpoint is None and not searched:
        require_unused(remote)
    require_writable(remote)
    return checkpoint_to_resume(config, remote) if searched else checkpoint


@hookimpl
def rlframework_uploads(config: RunConfig) -> Uploads | None:
    """Return the uploads to `checkpoints.upload`, if it is set."""
    if config.checkpoints.upload is None:
        return None
    from rlframework.algorithms.checkpoints import kept_checkpoints
    from rlframework_storage.remote_folder import RemoteFolder
    from rlframework_storage.uploads import Uploads as UploadsInBackground

    keep = partial(kept_checkpoints, config=config.checkpoints)
    return UploadsInBackground(RemoteFolder(config.checkpoints.upload), keep)
