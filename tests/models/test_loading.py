"""Loading models: folders that are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlframework.config.policy import PolicyConfig
from rlframework.errors import DataError
from rlframework.models.loading import load_model


def test_an_index_that_leads_out_of_the_folder_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "of another.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../of another.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"cannot be loaded .*outside its directory"):
        load_model(PolicyConfig(model_name=str(folder)), None)
