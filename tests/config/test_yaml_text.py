"""Reading YAML: what counts as a number, where values stand, and what is refused with which message."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError
from rlframework.config.yaml_text import parse_value, parse_yaml, read_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1e4", 10000.0),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("1_000", 1000),
        ("0x1F", 31),
        ("-.inf", -math.inf),
        (".nan", math.nan),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, a, {b: 2.0}]", [1, "a", {"b": 2.0}]),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_value_is_read_as_people_mean_it(text: str, value: object) -> None:
    read = parse_value(text, "here")
    assert read == value or (text == ".nan" and math.isnan(read))
    assert type(read) is type(value)


def test_every_place_knows_its_line() -> None:
    layer = parse_yaml("a: 1\nb:\n  - x\n  - c: 2\n", "f.yaml")
    assert layer.values == {"a": 1, "b": ["x", {"c": 2}]}
    assert layer.origins == {
        ("a",): "f.yaml:1",
        ("b",): "f.yaml:2",
        ("b", 0): "f.yaml:3",
        ("b", 1): "f.yaml:4",
        ("b", 1, "c"): "f.yaml:4",
    }


def test_merge_keys_of_yaml_work_and_are_no_duplicates() -> None:
    layer = parse_yaml("base: &x {a: 1, b: 2}\nmore:\n  <<: *x\n  b: 3\n", "f.yaml")
    assert layer.values["more"] == {"a": 1, "b": 3}
    assert layer.origins["more", "b"] == "f.yaml:4"


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
"""Ten lines that stand for 9 ** 9 values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: duplicate key `a`, first given on line 1"),
        ("p:\n  q: 1\n  q: 2\n", "f.yaml:3: duplicate key `p.q`, first given on line 2"),
        ("a: [1\nb: 2\n", "f.yaml:2:2: not valid YAML: "),
        ("a:\n\t- 1\n", "f.yaml:2:1: not valid YAML: "),
        ("- 1\n", "f.yaml: a configuration must be a mapping of keys to values, not a list"),
        ("text", "f.yaml: a configuration must be a mapping of keys to values, not a str"),
        ("1: x\n", "f.yaml:1: keys must be strings, not 1; put the key in quotes"),
        ("true: x\n", "f.yaml:1: keys must be strings, not true; put the key in quotes"),
        ("? [a]\n: x\n", "f.yaml:1: keys must be strings, not a list or mapping"),
        ("a: &a\n  - *a\n", "f.yaml:1: this YAML anchor contains itself"),
        ("a: !!python/object:os.system {}\n", "f.yaml:1:4: not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2:1: not valid YAML: "),
        ("a: *b\n", "f.yaml:1:4: not valid YAML: found undefined alias 'b'"),
        ("a: \x01\n", "f.yaml: not valid YAML: "),
        (r'a: "\ud800"', r"f.yaml:1: '\ud800' has half of a pair of \u escapes, which is not text"),
        ("a: !!bool maybe\n", "f.yaml:1: not valid YAML: 'maybe' is not a bool"),
        ("a: !!timestamp x\n", "f.yaml:1:4: not valid YAML: could not determine a constructor"),
        ("a: " + "[" * 65 + "]" * 65, "f.yaml:1: nested more than 64 levels deep"),
        ("a: " + "[" * 3000 + "]" * 3000, "f.yaml: nested more than 64 levels deep"),
        (ALIASES, "f.yaml:6: more than 100,000 values, with each YAML alias written out"),
        (ALIASES.replace("[x]", "{}").replace("[", "{<<: [").replace("]", "]}"), "f.yaml:7: more than 100,000 values"),
    ],
)
def test_what_is_not_a_configuration_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_yaml(text, "f.yaml")
    assert str(error.value).startswith(message)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"configuration file not found: {tmp_path}/none.yaml"):
        read_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=f"cannot read the configuration file '{tmp_path}': Is a directory"):
        read_yaml(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.py is a Python script, not a configuration, .* `python train\.py`"):
        read_yaml(Path("train.py"))
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml is not a UTF-8 text file: .* at byte 3"):
        read_yaml(latin)


def test_a_file_without_an_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match="/dev/zero: a configuration has at most 10,000,000 characters"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text", ["1e-6", "1e4", "no", "on", "010", "1:30", "2024-01-01", "null", "~", "<<", "=", "0x1F", ""]
)
def test_text_that_looks_like_something_else_stays_text(text: str) -> None:
    assert parse_yaml(to_yaml({text: text}), "f.yaml").values == {text: text}
