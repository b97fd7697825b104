"""Model directories with hostile values: each loads as the original does, or raises one error of ours.

Every field of `config.json`, the tokenizer's files and the safetensors header is replaced in turn, by values of other
types and sizes. A field may also change what the model computes, which only its author can know: the weights are then
those of the original.
"""

from __future__ import annotations

import copy
import json
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlframework.base.errors import UserError
from rlframework.config.policy import PolicyConfig
from rlframework.huggingface.hub import require_available
from rlframework.huggingface.model_directories import model_positions, quiet_transformers
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.models.file_weights import FileLayout, by_file_names
from rlframework.models.loading import empty_model, load_config, load_model, pretrained_weights, require_vocabulary
from rlframework.models.probing import probe_packing
from rlframework.policy.checkpoint.pretrained import write_config
from rlframework_conformance import cases

REMOVED: Any = object()
HOSTILE: tuple[Any, ...] = (
    *(REMOVED, None, True, False, 0, 1, -1, 3, 5, 1000, 10**9, 2**63, 10**30),
    *(0.5, -1e308, 1e308, float("inf"), float("nan"), "", "x", "\0", "\ud800", "x" * 100_000),
    *([], [1], {}, {"a": 1}, [[[]]], ["a", None]),
)
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's and transformers', about the values
]


def weights_as_loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Load `folder` as a worker does, once as a whole and once by slices, and save what goes with the weights.

    Returns the weights, after checking that both ways read the same ones.
    """
    config = PolicyConfig(model_name=str(folder))
    require_available(config.model_name)
    tokenizer = load_tokenizer(config.model_name)
    model_positions(config.model_name)
    model_config = load_config(config)
    probe_packing(config, model_config, torch.device("cpu"), "auto")
    whole = load_model(config, None)
    require_vocabulary(whole, tokenizer)
    (folder / "saved").mkdir()
    write_config(folder / "saved", config, tokenizer)  # at the end of the run
    empty = empty_model(config, model_config, None)
    weights = pretrained_weights(FileLayout.of(empty), empty, config, None)
    found = {name: weights[name] for name in weights}
    loaded = by_file_names(whole, dict(whole.named_parameters()))
    assert all(torch.equal(found[name], weight) for name, weight in loaded.items())
    return found


def places(values: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indices that lead to every value inside `values`."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*above, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*above, key))


def changed(values: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of `values` with `value` at `place`."""
    result = copy.deepcopy(values)
    target = result
    for key in place[:-1]:
        target = target[key]
    if value is REMOVED:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    return result


def read(path: Path) -> Any:
    """Return the JSON in a file, of safetensors the header."""
    if path.suffix == ".json":
        return json.loads(path.read_text())
    data = path.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def write(path: Path, values: Any) -> None:
    """Replace the JSON in a file, of safetensors the header."""
    text = json.dumps(values).encode()
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        text = struct.pack("<Q", len(text)) + text + data[8 + struct.unpack("<Q", data[:8])[0] :]
    path.write_bytes(text)


@pytest.mark.timeout(900)
def test_every_field_of_a_model(soak: Any, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    random = soak.random()
    longest = ""
    for kind in ("tied", "untied", "experts") if soak.full else ("tied",):
        original = cases.model(kind, tmp_path)
        expected = load_file(original / "model.safetensors")
        inputs = [
            (file, place, value) for file in FILES for place in places(read(original / file)) for value in HOSTILE
        ]
        same = (FILES[0], ("model_type",), read(original / FILES[0])["model_type"])  # which must load
        for file, place, value in [same, *random.sample(inputs, soak.times(30, 1000))]:
            folder = tmp_path / "changed"
            shutil.copytree(original, folder)
            write(folder / file, changed(read(original / file), place, value))
            given = ascii(f"{kind}/{file} {place}: {value!r:.60}")
            try:
                with quiet_transformers():
                    found = weights_as_loaded(folder)
            except UserError as error:
                assert (file, place, value) != same, given
                counts["rejected"] += 1
                longest = max(longest, str(error), key=len)
            except BaseException as error:
                raise AssertionError(f"{given} raised {type(error).__name__}: {error}") from error
            else:
                assert found.keys() == expected.keys(), given
                assert all(torch.equal(found[name], weight) for name, weight in expected.items()), given
                counts["loaded"] += 1
            shutil.rmtree(folder)
    soak.figures |= {"inputs": counts.total(), **counts}
    assert counts["rejected"] > counts.total() / 10
    assert len(longest) < 2000, longest[:500]
