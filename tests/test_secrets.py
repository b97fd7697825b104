"""Which values are hidden as secrets, and which are not."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rlframework.secrets import clean_command, hide_in_text, hide_secrets, is_secret_name, refer_to_environment

SECRET = [
    "api_key",
    "hub.api_key",
    "--api-key",
    "password",
    "HF_TOKEN",
    "client_secret",
    "secret",
    "AWS_ACCESS_KEY",
    "TOKEN",
    "GH_TOKEN",
]
SETTINGS = [
    "max_tokens",
    "max_new_tokens",
    "tokenizer_name",
    "stop_token_ids",
    "key",
    "tokens",
    "keyboard",
    "pad_token",
]


def test_names_of_secrets_and_of_settings():
    assert [name for name in [*SECRET, *SETTINGS] if is_secret_name(name)] == SECRET


def test_a_secret_is_hidden_wherever_its_value_stands(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "pw")  # too short to tell it from parts of words
    monkeypatch.setenv("HF_TOKEN", "from-outside")
    assert hide_in_text("get from-outside, ask wpw") == "get ***, ask wpw"
    assert hide_secrets({"env": {"TOKEN": "k3y-of-mine"}, "url": "x?k3y-of-mine", "a": "pw"}) == {
        "env": {"TOKEN": "***"},
        "url": "x?***",
        "a": "pw",
    }
    values = {"a": "Bearer from-outside", "b": ["from-outside"], "c": 1}
    assert refer_to_environment(values) == {"a": "Bearer ${oc.env:HF_TOKEN}", "b": ["${oc.env:HF_TOKEN}"], "c": 1}


def test_known_key_formats_and_users_in_addresses_are_hidden():
    # made of parts, so that nobody takes them for real ones
    token = "hf_" + "a1B2" * 8
    assert hide_in_text(f"login with {token} please") == "login with *** please"
    assert hide_in_text("http://me:pw@host:5000/x") == "http://***@host:5000/x"
    assert hide_in_text("a@b.org, http://host/x@y") == "a@b.org, http://host/x@y"


def test_values_are_hidden_at_any_depth_and_the_original_is_unchanged():
    values = {"a": {"api_key": "k", "lr": 0.1}, "b": [{"password": 5}, "x"], "c": {"secret": {"inner": 1}}, "d": None}
    assert hide_secrets(values) == {
        "a": {"api_key": "***", "lr": 0.1},
        "b": [{"password": "***"}, "x"],
        "c": {"secret": "***"},
        "d": None,
    }
    assert values["a"]["api_key"] == "k"


def test_a_command_is_recorded_without_secrets_and_home_directory(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: Path("/home/ada"))
    command = [
        "/home/ada/env/bin/rlframework", "train", "/home/ada/run.yaml", "hub.api_key=abc", "--token-file", "x",
        "--api-key", "abc", "seed=1", "environment.path=/home/ada/data", "/home/adam/y",
        "w.env={MY_API_KEY: abc, HOME: /home/ada}", "w.env={MY_API_KEY: abc", "w.env={A: 1}",
    ]  # fmt: skip
    assert clean_command(command) == [
        "rlframework", "train", "~/run.yaml", "hub.api_key=***", "--token-file", "x",
        "--api-key", "***", "seed=1", "environment.path=~/data", "/home/adam/y",
        'w.env={"MY_API_KEY": "***", "HOME": "~"}', "w.env=***", "w.env={A: 1}",
    ]  # fmt: skip
    assert clean_command([]) == []


@given(st.recursive(st.none() | st.integers() | st.text("abc:/@ ", max_size=6), lambda inner: st.lists(inner)))
def test_hiding_is_idempotent(values):
    assert hide_secrets(hide_secrets(values)) == hide_secrets(values)
