"""The native form without an engine: written atomically, and distinguished from the forms that every backend reads."""

import json

import pytest

from rlframework.base.errors import DataError
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.checkpoint.manifest import check_files, read_manifest
from rlframework.policy.checkpoint.pretrained import save_native
from rlframework.policy.checkpoint.saved import is_native, native_files
from rlframework.policy.trained_weights import open_saved
from rlframework.runner.models import find_model
from rlframework_tools.convert import find_source

FACTS = {"backend": "Mine", "workers": 1, "optimizer": False}


def write_config(folder):
    (folder / "config.json").write_text("{}")


def write_engine(folder):
    (folder / "parts").mkdir()
    (folder / "parts" / "a.bin").write_bytes(b"12345")


def saved(path, **facts):
    given = {"beside": write_config, "write": write_engine, "facts": {**FACTS, **facts}}
    save_native(str(path), WorkerContext(), **given)
    return path


def test_it_holds_the_engines_files_with_their_checksums(tmp_path):
    path = saved(tmp_path / "model")
    assert is_native(path)
    assert (native_files(str(path), "Mine", optimizer=False) / "parts" / "a.bin").read_bytes() == b"12345"
    assert json.loads((path / "native.json").read_text()) == FACTS
    assert set(read_manifest(path)) == {"config.json", "native.json", "engine/parts/a.bin"}
    assert read_manifest(path)["engine/parts/a.bin"] == {"bytes": 5, "crc32": "cbf53a1c"}  # CRC-32 of b"12345"
    check_files(path, required=True)
    (path / "engine" / "parts" / "a.bin").write_bytes(b"12346")
    with pytest.raises(DataError, match=r"a\.bin is damaged"):
        check_files(path)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    path = saved(tmp_path / "model")

    def fail(folder):
        raise RuntimeError("the engine stumbled")

    with pytest.raises(RuntimeError, match="stumbled"):
        save_native(str(path), WorkerContext(), beside=write_config, write=fail, facts=FACTS)
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    check_files(path, required=True)


def test_another_backends_files_and_a_missing_optimizer_are_rejected(tmp_path):
    path = saved(tmp_path / "model")
    with pytest.raises(DataError, match=r"a native checkpoint of Mine \(1 workers\), which Yours cannot read"):
        native_files(str(path), "Yours", optimizer=False)
    with pytest.raises(DataError, match="saved without its optimizer"):
        native_files(str(path), "Mine", optimizer=True)
    (path / "native.json").write_text("[]")
    with pytest.raises(DataError, match=r"native\.json is damaged or cannot be read"):
        native_files(str(path), "Mine", optimizer=False)


@pytest.mark.parametrize("reader", [open_saved, find_source, find_model])
def test_portable_readers_reject_the_native_form(tmp_path, reader):
    path = saved(tmp_path / "model")
    with pytest.raises(DataError, match="in the format of the engine that wrote it"):
        reader(str(path))
