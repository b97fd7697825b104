"""Read Parquet files as a memory-mapped Arrow table, for random access to data larger than memory."""

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
"""Number of rows to unpack at a time."""


def read_parquet(paths: Sequence[Path]) -> tuple[pa.Table, list[int]]:
    """Return the rows of all files in order, memory-mapped, and the number of rows of each file.

    The rows are unpacked into an unnamed temporary file, which is freed with the table. Columns that a file lacks are
    null in its rows. Raises a `DataError` if a file is missing or damaged, if its columns do not fit the other files',
    or if there are no rows.
    """
    import pyarrow as pa

    schema = _common_schema(paths)
    rows = []
    with _temporary_file() as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for path in paths:
                rows.append(0)
                for batch in _batches(path, schema):
                    stream.write_batch(batch)
                    rows[-1] += batch.num_rows
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not sum(rows):
        raise DataError(f"{paths[0]}: the file has no rows; give one with rows")
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
                f"{path}: its columns do not fit those of {paths[0]} ({error}); give files with the same columns"
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
                f"({field.type}): {error}; give files with the same column types"
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
        raise DataError(f"{path}: is damaged, or not a Parquet file ({reason})") from error


@contextmanager
def _temporary_file() -> Iterator[BinaryIO]:
    """Open an unnamed temporary file, whose content exists while it is mapped."""
    try:
        with tempfile.TemporaryFile() as file:
            yield cast("BinaryIO", file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space left in {tempfile.gettempdir()!r} to unpack the Parquet files; set TMPDIR to a directory with "
            "space for several times their size"
        ) from error
