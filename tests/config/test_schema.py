"""The JSON schema: it takes what loads, and refuses what does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rlframework.config.policy import OptimizerConfig, PolicyConfig
from rlframework.config.yaml_text import parse_yaml, read_yaml
from rlframework.plugins.configure import config_schema, config_yaml, load_config
from rlframework.plugins.manager import create_manager

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def schema(manager: Any) -> dict[str, Any]:
    return config_schema(manager)


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """The schema with all parts that are installed."""
    return config_schema(create_manager())


def accepts(schema: dict[str, Any], data: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(data)


@pytest.mark.slow
def test_it_is_a_valid_schema_that_can_be_written_as_json(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["algorithm"]["description"] == "Settings that all algorithms share."
    texts = ("how far a step goes", "settings specific to the backend `dtensor`", "name of a model on the Hub")
    assert [text for text in texts if text not in json.dumps(schema)] == []


@pytest.mark.slow
def test_every_resolved_configuration_is_accepted(schema: dict[str, Any], manager: Any, minimal: Any) -> None:
    for overrides in (
        [],
        ["algorithm.name=copy", "policy.needy.license=x", "policy.lora.rank=4"],
        ["environment={name: cards, suits: 4, mix: {a: 0.5}}", "policy.tokenizer_name=t"],
    ):
        resolved = config_yaml(load_config(minimal, overrides, manager=manager))
        jsonschema.Draft202012Validator(schema).validate(parse_yaml(resolved, "resolved").values)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        {},
        {"defaults": "base.yaml"},
        {"defaults": ["a.yaml", "b.yaml"], "algorithm": {"num_steps": 5}},
        {"policy": {"optimizer": {"lr": 1e-5}}},
        {"~generation": None, "environment": {"~path": None}},
        {"policy": {"train_global_batch_size": "${policy.train_micro_batch_size}"}},
        {"algorithm": {"name": "climb", "loss": {"clip": "${seed}"}}},
        {"algorithm": "${other}"},
        {"generation": {"temperature": 0.5}},
        {"policy": {"dtensor": {"lr_scale": 2}, "needy": {"license": "x"}}},
    ],
)
def test_a_part_that_inherits_the_rest_is_accepted(schema: dict[str, Any], part: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(part)


@pytest.mark.parametrize(
    "wrong",
    [
        {"polcy": {}},
        {"policy": {"lr": 1}},
        {"policy": {"optimizer": {"lrr": 1}}},
        {"policy": {"dtensor": {"lr": 2}}},
        {"policy": {"train_global_batch_size": "many"}},
        {"policy": {"train_global_batch_size": 0}},
        {"policy": {"precision": "float8"}},
        {"algorithm": {"name": "climb", "temperature_of_copies": 1.0}},
        {"algorithm": {"name": "nope"}},
        {"environment": {"name": "dice", "suits": 3}},
        {"worker_group": {"name": "inline", "num_wrkers": 3}},
        {"device": "gpu"},
        {"defaults": 3},
        {"~generation": 3},
    ],
)
def test_what_does_not_load_is_refused(schema: dict[str, Any], wrong: Any) -> None:
    assert not accepts(schema, wrong)


@pytest.mark.slow
def test_sections_of_one_class_name_do_not_mix(manager: Any) -> None:
    """Two plugins may both call a model `LossConfig`."""
    from pydantic import create_model

    from rlframework.config.base import Section
    from rlframework.config.sections import AlgorithmConfig
    from rlframework.plugins.types import AlgorithmRecord

    for name, kind in (("one", int), ("two", str)):
        inner = create_model("LossConfig", __base__=Section, __module__=f"plugin_{name}", value=(kind, ...))
        model = create_model("TheConfig", __base__=AlgorithmConfig, __module__=f"plugin_{name}", loss=(inner, ...))
        manager.records.append(AlgorithmRecord(name, "x:Y", 1, config_model=model))
    schema = config_schema(manager)
    assert accepts(schema, {"algorithm": {"name": "one", "loss": {"value": 1}}})
    assert accepts(schema, {"algorithm": {"name": "two", "loss": {"value": "x"}}})
    assert not accepts(schema, {"algorithm": {"name": "one", "loss": {"value": "x"}}})
    assert not accepts(schema, {"algorithm": {"name": "two", "loss": {"value": 1}}})


def test_parts_of_yours_take_any_keys_with_their_import_path(schema: dict[str, Any]) -> None:
    for section in ("algorithm", "environment"):
        assert accepts(schema, {section: {"name": "my_parts:Mine", "decay": 0.9}})
        assert not accepts(schema, {section: {"name": "mine", "decay": 0.9}})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.yaml")), ids=lambda path: path.name)
def test_the_examples_fit_the_schema_and_a_misspelt_key_does_not(installed: dict[str, Any], path: Path) -> None:
    validator = jsonschema.Draft202012Validator(installed)
    data = read_yaml(path).values
    validator.validate(data)
    assert not validator.is_valid({**data, "polcy": {}})
    assert not validator.is_valid({**data, "algorithm": {**data.get("algorithm", {}), "num_stps": 1}})


def test_every_number_of_ours_has_bounds(installed: dict[str, Any]) -> None:
    """Also the numbers in lists, mappings and unions; the largest and smallest are finite."""
    unbounded = []

    def visit(schema: Any, place: str) -> None:
        if isinstance(schema, dict) and schema.get("type") in ("integer", "number"):
            bounds = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
            if "enum" not in schema and not all(any(key in schema for key in pair) for pair in bounds):
                unbounded.append(place)
        for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
            if isinstance(value, (dict, list)) and key != "default":
                visit(value, f"{place}/{key}")

    visit(installed, "")
    assert unbounded == []


def test_a_section_shows_the_keys_that_differ_from_their_defaults():
    policy = PolicyConfig(model_name="m", optimizer=OptimizerConfig(lr=0.5))
    assert repr(policy) == "PolicyConfig(model_name='m', optimizer=OptimizerConfig(lr=0.5))"
