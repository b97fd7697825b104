"""Directories that appear complete or not at all: written from rank 0 one weight at a time, or by all ranks together.

The former are Hugging Face directories, the latter the sharded and the native form, on a file system that the ranks
share.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self

from rlframework.base.errors import PluginError, UserError
from rlframework.base.files import Replacement, replacing_directory, writing
from rlframework.huggingface.vision_models import scoring_architecture
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import FileFacts, describe_file, write_manifest, write_save_id
from rlframework.policy.checkpoint.saved import ENGINE, NATIVE
from rlframework.workers.process_groups import exhausting, run_on_all_ranks

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.policy import PolicyConfig

SHARD_BYTES = 4 << 30
"""Size at which a safetensors file is closed and the next one started; bounds the memory in use."""


class PendingSave:
    """The directories of one checkpoint: each is written beside its place, and all are moved there at the end.

    So a save that is interrupted leaves those of the save before, and not some of each. `id`: that of the save, which
    each directory has in `save.json`.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._written: list[Replacement] = []

    def add(self, path: str | Path, write: Callable[[Path], None]) -> None:
        """Fill a directory for `path` by `write(folder)`, and add the id and a manifest."""
        replacement = Replacement(path)
        self._written.append(replacement)
        with writing(path):
            write(replacement.folder)
            write_save_id(replacement.folder, self.id)
            write_manifest(replacement.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                for replacement in self._written:  # before the first is moved, since it may take long
                    replacement.flush()
                while self._written:
                    self._written[0].commit()
                    del self._written[0]
        finally:
            for replacement in self._written:
                replacement.abandon()


def write_from_rank_0(
    path: str | Path, rank: int, tensors: Iterator[object], write: Callable[[Path], None], *, save: PendingSave | None
) -> None:
    """Fill the directory `path` by `write(folder)` on rank 0, atomically, at once or as a part of `save`.

    `tensors`, which `write` reads, is exhausted on every rank, even on failure: reading it is a collective.
    """
    with exhausting(tensors):
        if rank == 0 and save is not None:
            save.add(path, write)
        elif rank == 0:
            with replacing_directory(path) as folder:
                write(folder)


def write_config(folder: Path, policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the non-weight files of a Hugging Face directory for the model of `policy`, with fp32 as the dtype."""
    from transformers import AutoConfig, GenerationConfig

    from rlframework.huggingface.vision_models import copy_processor

    model_name = policy.model_name
    config = AutoConfig.from_pretrained(model_name, trust_remote_code=policy.trust_remote_code)
    config.dtype = "float32"
    if policy.head_init != "checkpoint":  # a language model's files, to which a head was added
        config.num_labels = 1
        config.architectures = [scoring_architecture(config)]
    config.save_pretrained(folder)
    with suppress(OSError):  # the model has none
        GenerationConfig.from_pretrained(model_name).save_pretrained(folder)
    copy_processor(model_name, folder)
    tokenizer.save_pretrained(folder)


def read_config(policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase) -> Mapping[str, bytes]:
    """Return by name the contents of the files that `write_config` writes, which does not read the model later."""
    with TemporaryDirectory() as folder:
        write_config(Path(folder), policy, tokenizer)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files`, contents by name, into `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def write_tensors(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write tensors that arrive one at a time as `model*.safetensors`, with an index if there are several files."""
    from safetensors.torch import save_file

    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    places: dict[int, str] = {}  # names of the pending tensors, by address
    size = total = 0

    def close() -> None:
        save_file(pending, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()
        places.clear()

    for name, weight in weights:
        if pending and size + weight.nbytes > SHARD_BYTES:
            close()
            size = 0
        pending[name] = weight.detach().cpu().contiguous()
        if weight.numel() and (same := places.setdefault(pending[name].data_ptr(), name)) != name:
            raise PluginError(
                f"`{same}` and `{name}` are one tensor: `weight_specs` must list a tied weight once, an output "
                "head that is tied to the embedding under the embedding's name"
            )
        size += weight.nbytes
        total += weight.nbytes
    close()
    if len(files) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file_name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"part-{number}").rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class SharedDirectory:
    """Ranks write into the temporary `folder`, and `commit` moves it to `path`: it appears complete or not at all.

    Constructor and `commit` are collective. As a context manager, it abandons the directory if the block fails.
    """

    def __init__(self, path: str | Path, context: WorkerContext, form: str, begin: Callable[[Path], None]) -> None:
        """Create `folder`, in which rank 0 calls `begin`; `form` is the checkpoint's form, for errors."""
        self.path, self._context = Path(path), context
        self._replacement: Replacement | None = None
        with self:
            self.folder = Path(run_on_all_ranks(context, lambda: self._create(begin))[0])
            run_on_all_ranks(context, lambda: self._require_visible(form))

    def _create(self, begin: Callable[[Path], None]) -> str:
        if self._context.rank:
            return ""
        with writing(self.path):
            self._replacement = Replacement(self.path)
            begin(self._replacement.folder)
        return str(self._replacement.folder)

    def _require_visible(self, form: str) -> None:
        if not self.folder.is_dir():
            raise UserError(
                f"{self.folder} was created by rank 0, but rank {self._context.rank} does not see it: {form} "
                "checkpoints need a file system that all workers share; set checkpoints.format=portable, or another "
                "output_dir"
            )

    def commit(self, describe: Callable[[], Mapping[str, FileFacts]], end: Callable[[], None] = lambda: None) -> None:
        """Call `end` on rank 0, add the manifest, and move the directory into place.

        `describe` returns entries of the manifest that this rank has computed; rank 0 computes the others.
        """
        parts = run_on_all_ranks(self._context, describe)

        def commit() -> None:
            if self._replacement is not None:
                with writing(self.path):
                    end()
                    write_manifest(self.folder, {name: facts for part in parts for name, facts in part.items()})
                self._replacement.commit()

        run_on_all_ranks(self._context, commit)

    def abandon(self) -> None:
        """Remove what was written, on rank 0. No collective."""
        if self._replacement is not None:
            self._replacement.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()


def save_native(
    path: str, context: WorkerContext, *, beside: Callable[[Path], None], write: Callable[[Path], None], facts: object
) -> None:
    """Write the directory `path` atomically: `beside` on rank 0, `write` on all ranks. Collective.

    `write` gets the new, empty folder `engine`; `facts` become `native.json`.
    """

    def begin(folder: Path) -> None:
        beside(folder)
        (folder / ENGINE).mkdir()
        (folder / NATIVE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    def share_of_files() -> dict[str, FileFacts]:  # the ranks compute checksums in parallel
        files = sorted(path for path in (directory.folder / ENGINE).rglob("*") if path.is_file())
        own = files[context.rank :: context.world_size]
        return {path.relative_to(directory.folder).as_posix(): describe_file(path) for path in own}

    with SharedDirectory(path, context, "native", begin) as directory:
        with writing(path):
            write(directory.folder / ENGINE)
        directory.commit(share_of_files)
