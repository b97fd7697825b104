"""Which values are hidden as secrets, and which are not."""

import pytest

from rlframework.base.secrets import hide_in_text, hide_secrets, is_secret_name

SECRET = [
    *("api_key", "hub.api_key", "--api-key", "password", "HF_TOKEN", "client_secret", "secret", "AWS_ACCESS_KEY"),
    *("TOKEN", "HF_TOKEN_2", "PGPASSWORD", "DB_PASS", "apiKey", "accessToken", "secrets.x_secret", "APIKEY"),
    "Authorization",
]
SETTINGS = [
    *("max_new_tokens", "tokenizer_name", "stop_token_ids", "key", "tokens", "keyboard", "pad_token", "token_mask"),
    *("author", "num_key_value_heads", "TOKENIZERS_PARALLELISM", "sort_key", "GPG_KEY", "secretary", "patience"),
]
TEXTS = {
    "get from-outside, ask wpw": "get ***, ask wpw",
    "a@b.org, http://host/x@y and http://host:5000/x@y": "a@b.org, http://host/x@y and http://host:5000/x@y",
    "http://me:pw@host:5000/x": "http://***@host:5000/x",
    "no folder https:/me:pw@host/x": "no folder https:/***@host/x",
    "`w.env={MY_API_KEY: abc`:1:3: bad": "`w.env={MY_API_KEY: ***`:1:3: bad",
    "s3://me:p@w/with#all@host/x": "s3://***@host/x",
    "GET https://h/x?sig=a%20b&y=1&access_token=abc": "GET https://h/x?sig=***&y=1&access_token=***",
    "KeyError: {'MY_API_KEY': 'it\\'s', \"password\": \"a b\", 'lr': 1}": (
        "KeyError: {'MY_API_KEY': '***', \"password\": \"***\", 'lr': 1}"
    ),
    '{"text": "{\\"api_key\\": \\"abc\\", \\"lr\\": 1}"}': '{"text": "{\\"api_key\\": \\"***\\", \\"lr\\": 1}"}',
    '"password": "cut off': '"password": "***"',
    "--set=hub.api_key=abc seed=1": "--set=hub.api_key=*** seed=1",
    "unexpected token: `}`, `hub.api_key`: must be text": "unexpected token: `}`, `hub.api_key`: must be text",
    "HF_TOKEN: ${oc.env:HF_TOKEN}": "HF_TOKEN: ${oc.env:HF_TOKEN}",
    "Authorization: Bearer abc.def-123": "Authorization: *** ***",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\n": "***\n",
}


def test_names_of_secrets_and_of_settings() -> None:
    assert [name for name in [*SECRET, *SETTINGS] if is_secret_name(name)] == SECRET


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_in_texts_are_hidden_by_name_and_place(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "pw")  # too short to tell it from parts of words
    monkeypatch.setenv("HF_TOKEN", "from-outside")
    assert hide_in_text(text) == TEXTS[text]
    assert hide_in_text(TEXTS[text]) == TEXTS[text]


@pytest.mark.parametrize(
    "key", ["hf_" + "a1B2" * 8, "sk-" + "a1B2" * 8, "AKIA" + "A1B2" * 4, "eyJ" + "a" * 9 + ".eyJhbGciOiJ9"]
)
def test_known_key_formats_are_hidden(key: str) -> None:
    # made of parts, so that nobody takes them for real ones
    assert hide_in_text(f"login with {key} please") == "login with *** please"


def test_a_secret_is_hidden_wherever_its_value_stands_and_in_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a/b'c\"d\n")
    monkeypatch.setenv("DATA", "https://ada:hunter-two@host/data")  # a secret by its format
    texts = ["a/b'c\"d", repr("'a/b'c\"d"), '{"x": "a/b\'c\\"d"}', "x?y=a%2Fb%27c%22d"]
    texts.append("at https://ada:hunter-two@host/data")
    assert [text for text in map(hide_in_text, texts) if "b" in text or "hunter" in text] == []
    values = {"env": {"TOKEN": "k3y-of-mine", "A_TOKEN": "${oc.env:A}"}, "url": "x?k3y-of-mine", "a": "pw"}
    assert hide_secrets(values) == {"env": {"TOKEN": "***", "A_TOKEN": "${oc.env:A}"}, "url": "x?***", "a": "pw"}
    values = {
        "path": "https://ada:hunter-two@host/x",
        "b": ["hunter-two"],
        "secret": {"deep": [123456]},
        "c": "=123456",
    }
    assert hide_secrets(values) == {"path": "https://***@host/x", "b": ["***"], "secret": "***", "c": "=***"}


def test_the_current_directory_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/me/project")
    monkeypatch.setenv("DB_PWD", "/hunter2/three")
    assert hide_in_text("in /home/me/project, with /hunter2/three") == "in /home/me/project, with ***"


def test_values_are_hidden_at_any_depth_and_the_original_is_unchanged() -> None:
    values = {"a": {"api_key": "k", "lr": 0.1}, "b": [{"password": 5}, "x"], "c": {"secret": {"inner": 1}}, "d": None}
    hidden = {"a": {"api_key": "***", "lr": 0.1}, "b": [{"password": "***"}, "x"], "c": {"secret": "***"}, "d": None}
    assert hide_secrets(values) == hidden
    assert values["a"]["api_key"] == "k"


@pytest.mark.slow
@pytest.mark.timeout(60)  # with a quadratic search, each of these takes minutes
@pytest.mark.parametrize(
    "part", ["a", "://", "eyJ-", 'a="', "api_key='", "a ", "?&", "authorization", "https://a:", "a_"]
)
def test_long_texts_take_linear_time(part: str) -> None:
    assert len(hide_in_text(part * 100_000)) <= len(part) * 100_000 + 3
