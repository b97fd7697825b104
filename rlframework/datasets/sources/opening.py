"""Open data sets: JSON lines, Parquet, CSV, folders of `datasets.save_to_disk`, and names on the Hugging Face hub.

A name that looks like a path is never looked up on the hub. Local files are read directly, without a cache, so no row
is stale. JSON lines are read in place; Parquet, which has no access by row, is unpacked into an unnamed temporary file
(in `TMPDIR`) that the system frees with the process, and CSV is read into memory. The `datasets` library caches only
data from the hub.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.config.environments import RowsConfig
from rlframework.datasets.sources.csv_rows import read_csv
from rlframework.datasets.sources.rows import ArrowRows, JsonlRows, Rows, read_parquet, reading
from rlframework.huggingface.hub import announce_hub_request, hub_problem, is_path, quiet_hub
from rlframework.plugins.discovery import did_you_mean

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_ALLOWED = (
    "give a JSONL, Parquet or CSV file, a directory or glob pattern of them, a directory written by "
    "datasets.save_to_disk, or the name of a data set on the Hugging Face hub"
)


def open_rows(source: str | Path, *, subset: str | None = None, split: str | None = None, key: str = "") -> Rows:
    """Open the rows of `source` in order, memory-mapped or read in place.

    `source`: a file (.jsonl, .json, .ndjson, .parquet, .pq, .csv, .tsv), a glob pattern or a directory of files of one
    kind, a directory of `datasets.save_to_disk`, or a name on the hub (a `str`: a `Path` is always local). `split`
    applies to the last three, `subset` to a directory of files and a name. `split` defaults to `train`, or the only
    split. `key`: the setting that names the source, for the error that a file does not exist.

    Raises a `DataError` if nothing is found, the hub cannot be reached, the split does not exist (listing those that
    do), or a file is empty, damaged or of another kind. An invalid JSON line is an error when its row is read.
    """
    if isinstance(source, str) and not is_local(source):
        return _from_hub(source, subset, split)
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_directory(path, subset, split)
    if (split is not None or subset is not None) and (path.exists() or glob.has_magic(str(path))):
        given = "split" if split is not None else "subset"
        raise DataError(f"{path}: a file has no {given}; remove {given}, or give a directory or a name with splits")
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        if not os.path.lexists(path):
            raise DataError(_missing(path, key))
        return _from_files([path], path.stem)
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]
    if not found:
        raise DataError(f"{path}: no file matches this pattern; {_ALLOWED}")
    return _from_files(found, path.stem)


def _missing(path: Path, key: str = "") -> str:
    """The message that `path` does not exist, with the file beside it whose name is most similar."""
    try:
        beside = [each.name for each in path.parent.iterdir()]
    except OSError:  # the folder does not exist either
        beside = []
    start = f"{key}: " if key else ""
    near = did_you_mean(path.name, beside)
    return f"{start}{path}: cannot be read (No such file or directory); {_ALLOWED}{f'.{near}' if near else ''}"


def is_local(name: str) -> bool:
    """Whether `name` can only be local files, existing or not, so that the hub is not asked for it."""
    return is_path(name) or os.path.exists(name) or Path(name).suffix in _KINDS or glob.has_magic(name)


def _choose_split(splits: Sequence[str], wanted: str | None, where: str) -> str:
    if wanted is None and len(splits) == 1:
        return splits[0]
    chosen = wanted or "train"
    if chosen not in splits:
        raise DataError(f"{where}: there is no split {chosen!r}; the splits are {sorted(splits)}")
    return chosen


def _from_files(paths: Sequence[Path], label: str) -> Rows:
    for path in paths:
        if path.suffix not in _KINDS and not path.exists():
            raise DataError(_missing(path))
        if path.suffix not in _KINDS:
            allowed = sorted(_KINDS)
            raise DataError(f"{path}: files of type {path.suffix!r} are not supported, only {allowed}; convert it")
    kinds = {_KINDS[path.suffix] for path in paths}
    if len(kinds) > 1:
        raise DataError(
            f"{paths[0].parent}: has files of several kinds ({', '.join(sorted(kinds))}); give a pattern for one"
        )
    if kinds == {"jsonl"}:
        return JsonlRows(paths)
    return read_parquet(paths, label) if kinds == {"parquet"} else read_csv(paths, label)


def _from_directory(path: Path, subset: str | None, split: str | None) -> Rows:
    """The rows of a directory of files, whose splits follow from their names or its README.md, as on the hub."""
    from datasets import load_dataset_builder

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(path, subset, split)
    # it creates a lock file in its cache, and reads only file names and the README
    with (
        tempfile.TemporaryDirectory() as cache,
        reading(f"{path}: no data files found", _ALLOWED[0].upper() + _ALLOWED[1:]),
    ):
        builder: Any = load_dataset_builder(str(path), subset, cache_dir=cache)
        files = {str(split): [Path(name) for name in names] for split, names in builder.config.data_files.items()}
    chosen = _choose_split(list(files), split, str(path))
    return _from_files(files[chosen], chosen)


def _saved(path: Path, subset: str | None, split: str | None) -> Rows:
    from datasets import Dataset, load_from_disk

    if subset is not None:
        raise DataError(f"{path}: was written by save_to_disk and has no subsets; remove subset")
    with reading(f"{path}: cannot be read as a folder of datasets.save_to_disk"):
        saved = load_from_disk(str(path))
    if isinstance(saved, Dataset):
        if split is not None:
            raise DataError(f"{path}: was written by save_to_disk without splits; remove split")
        return dataset_rows(saved, str(path), path.name)
    chosen = _choose_split(list(saved), split, str(path))
    return dataset_rows(saved[chosen], f"{path}, split {chosen}", chosen)


def _from_hub(name: str, subset: str | None, split: str | None) -> Rows:
    from datasets import config, get_dataset_split_names, load_dataset

    announce_hub_request(name)
    where = f"the data set {name!r} (subset {subset!r}, split {split!r}) cannot be loaded"
    remedy = f"There is no local file or directory of that name. Check the name and the network, or {_ALLOWED}"
    problem = hub_problem()
    if problem is not None and not (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir():
        raise DataError(f"{where}: {problem}. {remedy}")
    with quiet_hub(), reading(where, remedy):
        if split is None:
            split = _choose_split(get_dataset_split_names(name, subset), None, f"the data set {name!r}")
        return dataset_rows(load_dataset(name, subset, split=split), f"data set {name}, split {split}", split)


def dataset_rows(dataset: Dataset, where: str, label: str) -> Rows:
    """Return the rows of `dataset` as stored, without its format. Raises a `DataError` if there are none."""
    if dataset._indices is not None:  # a selection of rows that is not materialised
        dataset = dataset.flatten_indices(keep_in_memory=True)
    table = dataset.data.table
    if not table.num_rows:
        raise DataError(f"{where}: it is empty")
    return ArrowRows(table, [(where, table.num_rows)], label)


def open_splits(
    config: RowsConfig, *, subset: str | None, split: str | None, validation: str | None, train: Rows | None = None
) -> tuple[Rows, Rows | None]:
    """Return the rows to train on, and those given for validation, or None to hold out part of the first.

    `validation`: the split of `config.path` to validate on, without a `validation_path`. `train`: the training rows, if
    they are open already. Raises a `DataError` if they are neither named nor given.
    """
    given = config.given
    if train is None and given is not None:
        train = given.train
    elif train is None and config.path is not None:
        train = open_rows(config.path, subset=subset, split=split, key="environment.path")
    elif train is None:
        raise DataError("environment.path is not set, and no rows were given; set it, or give rows from Python")
    path = config.validation_path or config.path
    if path is None or (config.validation_path is None and validation is None):
        return train, None if given is None else given.validation
    subset = subset if config.validation_path is None or not is_local(path) else None
    key = "environment.path" if config.validation_path is None else "environment.validation_path"
    return train, open_rows(path, subset=subset, split=validation, key=key)
