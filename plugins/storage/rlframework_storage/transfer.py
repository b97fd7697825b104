"""Send checkpoints to a remote folder and fetch them; an interrupted upload continues, and is never read.

    step-000010/model/model.safetensors    the files of the checkpoint, under their own names
    step-000010/uploading.json             files sent so far; deleted at the end
    step-000010/uploaded.json              written last: the upload is complete

`uploaded.json` has size and XXH3 digest of each file. A checkpoint is deleted beginning with this file. Digests protect
against accidents, not against somebody who can write to the folder.

A run resumes from the newest checkpoint on a machine that has none; its address for uploads is checked before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel, NonNegativeInt, ValidationError, field_validator

from rlframework.algorithms.checkpoints import FOLDER, newest_checkpoint
from rlframework.base.errors import ConfigError
from rlframework.base.files import exclusive_directory, replacing_directory
from rlframework.base.logs import plugin_logger
from rlframework.base.secrets import hide_in_text
from rlframework.config.sections import RunConfig
from rlframework.runner.output_folder import check_output_dir
from rlframework_storage.remote_folder import RemoteFolder, StorageError

FORMAT = 1
COMPLETE = "uploaded.json"
PROGRESS = "uploading.json"


class FileFacts(BaseModel):
    """Size and digest of a file."""

    bytes: NonNegativeInt
    xxh3: str


class UploadManifest(BaseModel):
    """The contents of `uploaded.json` and `uploading.json`. `score`: the metric by which the best are kept."""

    format: int = FORMAT
    files: dict[str, FileFacts]
    score: float | None = None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, FileFacts]) -> dict[str, FileFacts]:
        for name in files:
            if name.startswith("/") or "\\" in name or {"..", ".", ""} & set(name.split("/")):
                raise ValueError(f"it names {name!r}, which is outside its folder")
        return files


@dataclass(frozen=True)
class Sent:
    """The files and bytes that `send` copied, without those that were there."""

    files: int
    bytes: int


def describe_file(path: Path) -> FileFacts:
    """Return size and digest of a local file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileFacts(bytes=file.tell(), xxh3=digest.hexdigest())


def describe_folder(folder: Path) -> dict[str, FileFacts]:
    """Return size and digest of each file below `folder`, by its path relative to it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): describe_file(path) for path in paths}


def send(folder: Path, remote: RemoteFolder, score: float | None = None) -> Sent:
    """Copy the local `folder` to the folder of the same name in `remote`, and mark it as complete.

    Files that an interrupted upload copied are not sent again: those in `uploading.json` whose size is the remote one.
    """
    wanted, name = describe_folder(folder), folder.name
    complete = _read(remote, f"{name}/{COMPLETE}")
    if complete is not None and complete.files == wanted:
        remote.delete(f"{name}/{PROGRESS}")
        return Sent(0, 0)
    if complete is not None:
        remote.delete(f"{name}/{COMPLETE}")
    there = remote.sizes(name)
    earlier = complete or _read(remote, f"{name}/{PROGRESS}") or UploadManifest(files={})
    done = {
        file: facts
        for file, facts in earlier.files.items()
        if wanted.get(file) == facts and there.get(f"{name}/{file}") == facts.bytes
    }
    missing = [file for file in wanted if file not in done]
    _write(remote, f"{name}/{PROGRESS}", UploadManifest(files=done))
    for file in missing:
        remote.send(f"{name}/{file}", folder / file)
        done[file] = wanted[file]
        _write(remote, f"{name}/{PROGRESS}", UploadManifest(files=done))
    _finish(remote, name, UploadManifest(files=wanted, score=score))
    return Sent(len(missing), sum(wanted[file].bytes for file in missing))


def _finish(remote: RemoteFolder, name: str, manifest: UploadManifest) -> None:
    """Check the remote sizes, remove other files, and write the manifest."""
    there = remote.sizes(name)
    for file, facts in manifest.files.items():
        if there.get(f"{name}/{file}") != facts.bytes:
            raise StorageError(
                f"{remote.address(f'{name}/{file}')} has {there.get(f'{name}/{file}')} bytes after it was sent, "
                f"instead of {facts.bytes}: somebody changed it, or its file has changed meanwhile"
            )
    for path in there.keys() - {f"{name}/{file}" for file in (*manifest.files, PROGRESS)}:
        remote.delete(path)  # of an earlier checkpoint with this name
    _write(remote, f"{name}/{COMPLETE}", manifest)
    remote.delete(f"{name}/{PROGRESS}")


def complete_checkpoints(remote: RemoteFolder) -> dict[str, UploadManifest]:
    """The manifests of the complete checkpoints, by name, oldest first."""
    names = sorted(path.partition("/")[0] for path in remote.sizes() if _is_manifest(path))
    found = {name: _read(remote, f"{name}/{COMPLETE}") for name in names}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def fetch(remote: RemoteFolder, name: str, manifest: UploadManifest, destination: Path) -> None:
    """Copy the checkpoint `name` to `destination`, which appears when all sizes and digests are verified.

    Raises `StorageError` if a file is missing or differs; the message names it.
    """
    with replacing_directory(destination) as folder:
        for file, facts in manifest.files.items():
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            remote.fetch(f"{name}/{file}", path)
            if describe_file(path) != facts:
                raise StorageError(
                    f"{remote.address(f'{name}/{file}')} is damaged: its contents differ from what was uploaded. To "
                    f"resume from the checkpoint before, delete {remote.address(f'{name}/{COMPLETE}')}"
                )


def delete(remote: RemoteFolder, name: str) -> None:
    """Delete a checkpoint, beginning with its manifest."""
    remote.delete(f"{name}/{COMPLETE}")
    for path in remote.sizes(name):
        remote.delete(path)
    remote.delete_empty(name)


def delete_unfinished(remote: RemoteFolder, before: str) -> None:
    """Delete what interrupted uploads and deletions have left of checkpoints older than `before`.

    `before` is complete, so they will not be continued.
    """
    paths = remote.sizes()
    complete = {path.partition("/")[0] for path in paths if _is_manifest(path)}
    for name in {path.partition("/")[0] for path in paths} - complete:
        if _is_checkpoint(name) and name < before:
            delete(remote, name)


def _is_checkpoint(name: str) -> bool:
    return name.startswith("step-") and name.removeprefix("step-").isdigit()


def _is_manifest(path: str) -> bool:
    name, _, file = path.partition("/")
    return _is_checkpoint(name) and file == COMPLETE


def _read(remote: RemoteFolder, path: str) -> UploadManifest | None:
    """The manifest at `path`; None if it does not exist or was not written to its end."""
    content = remote.read(path)
    if content is None:
        return None
    try:
        manifest = UploadManifest.model_validate_json(content)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":  # killed while writing, where writes are not atomic
            return None
        raise StorageError(f"{remote.address(path)} is not a list of uploaded files: {error}") from error
    if manifest.format != FORMAT:
        raise StorageError(f"{remote.address(path)} has format {manifest.format}; this version reads {FORMAT}")
    return manifest


def _write(remote: RemoteFolder, path: str, manifest: UploadManifest) -> None:
    remote.write(path, manifest.model_dump_json().encode())


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
