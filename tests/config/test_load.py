"""Inheritance, merging, overrides and interpolation, before any key has a meaning."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlframework.base.errors import ConfigError
from rlframework.base.secrets import hide_in_text
from rlframework.config.load import compose, escape_interpolation


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def refused(*args: object) -> str:
    with pytest.raises(ConfigError) as error:
        compose(*args)  # type: ignore[arg-type]
    return str(error.value)


def test_each_value_with_an_unknown_function_is_listed() -> None:
    values = {
        "a": {"b": "${mul:2, 3}", "c": ["${add:${x}, 1}"]},
        "token": "s${mul:1}",
        "x": 1,
        "home": "${oc.env:HOME}",
        "text": "\\${mul:1}",
    }
    with pytest.raises(ConfigError, match="3 problems in the") as error:
        compose(values)
    lines = str(error.value).splitlines()[1:]
    assert (
        lines[0]
        == '- `a.b`: there is no function `mul` for interpolation (given "${mul:2, 3}"). Write the value itself.'
    )
    assert lines[1].startswith("- `a.c.0`: there is no function `add` for interpolation")
    assert lines[2].startswith("- `token`: ")
    assert "s${" not in lines[2]


@pytest.mark.parametrize(
    ("files", "values", "origins"),
    [
        (
            {
                "one.yaml": "a: 1\nb: 1\nc: 1\nd: {x: 1, y: 1}\nl: [1, 2]\n",
                "sub/two.yaml": "b: 2\nc: 2\nd: {y: 2}\nl: [3]\n",
                "top.yaml": "defaults: [one.yaml, sub/two.yaml]\nc: 3\n",
            },
            {"a": 1, "b": 2, "c": 3, "d": {"x": 1, "y": 2}, "l": [3]},
            {"a": "one.yaml:1", "d.y": "sub/two.yaml:3", "c": "top.yaml:2", "nothing": ""},
        ),
        (
            {
                "one.yaml": "a: 1\nb: {x: 1, y: {z: 1}}\nc: {d: 1}\ne: ${a}\n",
                "two.yaml": "defaults: one.yaml\n~e:\nb:\n  ~x:\n  y: {w: 2}\n~c:\nc: {f: 2}\n",
                "top.yaml": "defaults: two.yaml\nb: {y: {~z: null}}\n~a: ~\n",
            },
            {"b": {"y": {"w": 2}}, "c": {"f": 2}},
            {"c": "two.yaml:7", "a": ""},
        ),
        (
            {
                "base.yaml": "a: base\n",
                "sub/base.yaml": "a: sub\n",
                "sub/l.yaml": "defaults: base.yaml\nl: 1\n",
                "sub/r.yaml": "defaults: base.yaml\nr: 1\n",
                "top.yaml": "defaults: [sub/l.yaml, sub/r.yaml]\n",
            },
            {"a": "sub", "l": 1, "r": 1},
            {"a": "sub/base.yaml:1"},
        ),
    ],
    ids=["the file itself comes last", "removed keys", "one file on two ways"],
)
def test_a_file_inherits_others(tmp_path: Path, files: dict[str, str], values: object, origins: dict[str, str]) -> None:
    write(tmp_path, files)
    tree = compose(tmp_path / "top.yaml")
    assert tree.values == values
    for key, origin in origins.items():
        assert tree.origin(tuple(key.split("."))) == (f"{tmp_path}/{origin}" if origin else "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {~y: }", "`a.~y` ({}/top.yaml:2): there is no inherited key `y` to remove"),
        ("a: {x: {~y: }}", "`a.x.~y` ({}/top.yaml:2): there is no inherited key `y` to remove"),
        ("~a: 2", "`~a` ({}/top.yaml:2) removes a key: write nothing after the colon"),
    ],
)
def test_a_removal_that_cannot_be_done_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, {"one.yaml": "a: {x: 1}\n", "top.yaml": f"defaults: one.yaml\n{text}\n"})
    assert refused(tmp_path / "top.yaml") == message.format(tmp_path)


def test_defaults_are_relative_to_their_file_and_one_may_be_inherited_along_two_ways(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "base.yaml": "a: base\n",
            "sub/base.yaml": "a: sub\n",
            "sub/l.yaml": "defaults: base.yaml\nl: 1\n",
            "sub/r.yaml": "defaults: base.yaml\nr: 1\n",
            "top.yaml": "defaults: [sub/l.yaml, sub/r.yaml]\n",
        },
    )
    assert compose(tmp_path / "top.yaml").values == {"a": "sub", "l": 1, "r": 1}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a.yaml": "defaults: b.yaml", "b.yaml": "defaults: a.yaml"},
            "are circular: {0}/a.yaml -> {0}/b.yaml -> {0}/a",
        ),
        ({"a.yaml": "x: 1\ndefaults: z.yaml\n"}, "not found: {0}/z.yaml, listed under `defaults` in {0}/a.yaml:2"),
        ({"a.yaml": f"defaults: {'x' * 5000}\n"}, "configuration file not found: {0}/xxxx"),
        (
            {"a.yaml": "defaults: 3\n"},
            "`defaults` in {0}/a.yaml:1 must be a file name or a list of file names, given 3",
        ),
        ({"a.yaml": "defaults: [a.yaml, 3]\n"}, "must be a file name or a list of file names"),
        ({"a.yaml": 'defaults: "a\\0b"\n'}, "must be a file name or a list of file names"),
        ({"a.yaml": "x: 1\ny:\n  z: ${nope}\n"}, "`y.z` ({0}/a.yaml:3): Interpolation key 'nope' not found"),
    ],
)
def test_files_that_cannot_be_composed_are_named(tmp_path: Path, files: dict[str, str], message: str) -> None:
    write(tmp_path, files)
    assert message.replace("{0}", str(tmp_path)) in refused(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("values", "overrides", "result"),
    [
        ({"a": 1}, ["b=1e-3", "c=[1, x]", "d=null", "e='7'", "f=x=y", "g=", "h.i.j=true"],
         {"a": 1, "b": 1e-3, "c": [1, "x"], "d": None, "e": "7", "f": "x=y", "g": None, "h": {"i": {"j": True}}}),
        ({"a": {"b": 1, "c": 2}}, ["a.c=5", "a.c=6"], {"a": {"b": 1, "c": 6}}),
        ({"a": {"b": 1, "c": 2}}, ["a={c: 3, d: 4}"], {"a": {"b": 1, "c": 3, "d": 4}}),
        ({"lora": None}, ["lora.rank=8"], {"lora": {"rank": 8}}),
        ({"l": [1, 2]}, ["l.1=5"], {"l": [1, 5]}),
        ({"a": {"b": 1, "c": 2}, "d": 3}, ["~a.b", "~d"], {"a": {"c": 2}}),
        ({}, "a.b=1", {"a": {"b": 1}}),
        ({"a": {"b": {"c": 1}, "d": 1}}, ["a.b=[1, 2]"], {"a": {"b": [1, 2], "d": 1}}),
        ({"a": {"b": [1], "d": 1}}, ["a={b: {c: 2}}"], {"a": {"b": {"c": 2}, "d": 1}}),
        ({"a": "${b}", "b": {"c": 1}}, ["a=[3]"], {"a": [3], "b": {"c": 1}}),
    ],
)  # fmt: skip
def test_overrides_merge_open_replace_and_remove(
    values: dict[str, object], overrides: list[str], result: object
) -> None:
    assert compose(values, overrides).values == result


@pytest.mark.parametrize(
    ("overrides", "keys", "line"),
    [
        (["~a", "a={b: {c: 5}}"], "a.b.c", ""),
        (["a={b: {c: 5}}"], "a.b.c", ""),
        (["a={b: {c: 5}}"], "a.d", "run.yaml:4"),
        (["l=[3]"], "l.0", ""),
        (["a.new.x=1"], "a.new", ""),
        (["a.new.x=1"], "a.d", "run.yaml:4"),
        (["a.new.x=1"], "a", "run.yaml:1"),
    ],
)
def test_the_origin_is_where_a_value_was_given_last(tmp_path: Path, overrides: list[str], keys: str, line: str) -> None:
    write(tmp_path, {"run.yaml": "a:\n  b:\n    c: 1\n  d: 2\nl: [1, 2]\n"})
    place = tuple(int(key) if key.isdigit() else key for key in keys.split("."))
    wanted = f"{tmp_path}/{line}" if line else f"override `{overrides[-1]}`"
    assert compose(tmp_path / "run.yaml", overrides).origin(place) == wanted


@pytest.mark.parametrize(
    "override", ["lr", "=1", "a..b=1", ".a=1", "a.=1", "a b=1", "~", "~a..b", "", "a[0]=1", "+a.b=1"]
)
def test_what_is_no_override_is_told_how_to_write_one(override: str) -> None:
    message = refused({}, [override])
    assert message.startswith(f"`{override}` is not a valid override: write `key=value`")
    assert message.endswith(", without Hydra's +") == override.startswith("+")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a=[1", "override `a=[1`:1:3: not valid YAML: "),
        ("a=${", "override `a=${`: "),
        ("a=" + "${" * 400, "override `a=${${"),
        (".".join("a" * 500) + "=1", "`a.a.a."),
        ("l.4=1", "override `l.4=1`: list index out of range"),
        ("l.name=4", "override `l.name=4`: the items of a list are numbered: `list.0=value`"),
        ("~a.b", "`~a.b`: there is no key `a.b` to remove"),
        ("defaults=x.yaml", "`defaults=x.yaml`: `defaults` cannot be overridden"),
        ("a={x: 1, x: 2}", "override `a={x: 1, x: 2}`:1: duplicate key `x`"),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str) -> None:
    assert refused({"l": [1]}, [override]).startswith(message)


def test_values_may_refer_to_values_and_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFRAMEWORK_TEST_VALUE", "from outside")
    values = {
        "a": {"b": 3},
        "c": "${a.b}",
        "d": "x${a.b}y",
        "e": "${oc.env:RLFRAMEWORK_TEST_VALUE}",
        "f": "???",
        "g": [1],
    }
    before = copy.deepcopy(values)
    tree = compose(values, ["a.b=4", "f=1", "g.0=2"])
    assert tree.values == {"a": {"b": 4}, "c": 4, "d": "x4y", "e": "from outside", "f": 1, "g": [2]}
    assert values == before
    assert refused({"a": "???"}).startswith("`a`: Missing mandatory value")


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {f"a{n}": f"${{a{n - 1}}}" * 9 if n else "x" for n in range(10)},
        {f"a{n}": [f"${{.....a{n - 1}}}"] * 9 if n else "x" for n in range(10)},
        {"a": {str(n): f"${{a[{n - 1}]}}" * 9 if n else "x" for n in range(10)}},
        {f"a{n}": f"${{a{n + 1}}}" for n in range(2000)} | {"a2000": 1},
    ],
)
def test_a_few_lines_cannot_fill_the_memory(values: dict[str, object]) -> None:
    assert "characters after interpolation" in (message := refused(values)) or "refer to one another" in message


def test_python_values_become_plain_ones() -> None:
    class Model(BaseModel):
        text: str = "${not.a.reference}"

    tree = compose({"path": Path("x/y"), "t": (1, 2), "m": Model()})
    assert tree.values == {"path": "x/y", "t": [1, 2], "m": {"text": "${not.a.reference}"}}


class Callable:
    def __call__(self) -> None: ...


def test_functions_and_classes_become_their_import_paths() -> None:
    tree = compose({"algorithm": {"loss": Callable, "advantage": refused}})
    assert tree.values == {"algorithm": {"loss": f"{__name__}:Callable", "advantage": f"{__name__}:refused"}}
    told = refused({"algorithm": {"loss": Callable()}})
    assert told.startswith("algorithm.loss: an object of the class Callable has no import path; give the class")
    assert f"{__name__}:Callable" in told


def test_keys_and_values_that_no_file_can_hold_are_refused() -> None:
    assert refused({"a": {1: 2}}) == "a: keys must be strings, given 1"
    assert "not a supported primitive type" in refused({"a": object()})


texts = st.text(alphabet="a\\${}:. '\"", max_size=12).filter(lambda text: text != "???")


@pytest.mark.slow
@settings(deadline=None)  # the first interpolation builds OmegaConf's parser
@given(st.dictionaries(st.sampled_from("abc"), texts | st.lists(texts, max_size=2)))
def test_escaped_text_is_loaded_as_it_was(data: dict[str, object]) -> None:
    assert compose(escape_interpolation(data)).values == data


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), st.lists(texts | st.just("s3cr${t")).map("".join)))
def test_values_of_variables_are_written_as_references(data: dict[str, str]) -> None:
    with patch.dict(os.environ, {"A_TOKEN": "s3cr${t"}):
        written = escape_interpolation(data, {"s3cr${t": "A_TOKEN", "x": "no-identifier"})
        assert "s3cr" not in str(written)
        assert compose(written).values == data


@pytest.mark.parametrize(
    "override",
    [
        "a.MY_API_KEY=*s3cr3t",
        "a.MY_API_KEY=!!bool s3cr3t",
        "a.MY_API_KEY=${s3cr3t}",
        "a={MY_API_KEY: *s3cr3t}",
        "a={MY_API_KEY: s3cr3t",
        "a={b: 1, MY_API_KEY:\n *s3cr3t}",
    ],
)
def test_messages_show_no_part_of_a_secret(override: str) -> None:
    assert "s3cr3t" not in hide_in_text(refused({}, [override]))


@pytest.mark.parametrize("source", [None, 3, ["run.yaml"]])
def test_a_source_of_another_type_is_named(source):
    match = f"a YAML file, a mapping or a RunConfig, given a {type(source).__name__}"
    with pytest.raises(ConfigError, match=match):
        compose(source)
