"""Parquet files as an Arrow table that lies on disk, so that single rows of data larger than memory can be read."""

from __future__ import annotations

import errno
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from rlframework.datasets.sources.rows import DAMAGE
from rlframework.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH = 1024
"""Rows that are unpacked at a time."""


def read_parquet(paths: Sequence[Path]) -> tuple[pa.Table, list[int]]:
    """The rows of all files in order, memory-mapped, and how many each file has.

    They are unpacked into a temporary file without a name, which is gone when the table is. Columns that a file lacks
    are null there. A file that is missing, damaged, without rows, or whose columns do not fit the others' is a
    `DataError`.
    """
    import pyarrow as pa

    schema = _common_schema(paths)
    rows = []
    with _spooled() as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for path in paths:
                rows.append(0)
                for batch in _batches(path, schema):
                    stream.write_batch(batch)
                    rows[-1] += batch.num_rows
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not sum(rows):
        raise DataError(f"{paths[0]}: there are no rows in it; give a file with rows")
    return pa.ipc.open_stream(pa.py_buffer(content)).read_all(), rows


def _common_schema(paths: Sequence[Path]) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas: list[pa.Schema] = []
    for path in paths:
        with _damage(path):
            schemas.append(pq.read_schema(path).remove_metadata())
        try:
            pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: its columns do not fit those of {paths[0]} ({error}); give files of one kind"
            ) from error
    return pa.unify_schemas(schemas, promote_options="permissive")


def _batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of `path` with the columns of `schema`."""
    import pyarrow.parquet as pq

    with _damage(path), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH):
            yield _fitted(batch, schema, path)


def _fitted(batch: pa.RecordBatch, schema: pa.Schema, path: Path) -> pa.RecordBatch:
    import pyarrow as pa

    columns = []
    for field in schema:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        try:
            columns.append(batch[field.name].cast(field.type))
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: the column {field.name!r} ({batch[field.name].type}) does not fit the other files' "
                f"({field.type}): {error}; give files of one kind"
            ) from error
    return pa.record_batch(columns, schema=schema)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EACCES):
            raise DataError(f"{path}: cannot be read ({error}); check the path") from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: is damaged, or no Parquet file ({reason})") from error


@contextmanager
def _spooled() -> Iterator[BinaryIO]:
    """A temporary file without a name. Its content stays for as long as it is mapped."""
    try:
        with tempfile.TemporaryFile() as file:
            yield cast("BinaryIO", file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space in {tempfile.gettempdir()!r} to unpack the Parquet files into; set TMPDIR to a directory with "
            "room for several times their size"
        ) from error
