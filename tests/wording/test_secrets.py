"""Tests for the names of variables and arguments whose values are kept out of files and notebooks."""

from __future__ import annotations

import pytest

from notebook_launcher.wording.value_text import is_secret, without_secrets

SECRETS = (
    "APIKEY",
    "AWS_SECRET_ACCESS_KEY",
    "DBPASSWORD",
    "HF_AUTH",
    "HF_AUTHTOKEN",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "api_keys",
    "credentials",
    "password",
    "private_key",
)
OTHERS = ("HF_HOME", "TOKENIZERS_PARALLELISM", "author", "keyboard", "lr", "monkey", "num_tokens", "tokens")


@pytest.mark.parametrize("name", SECRETS)
def test_name_of_a_secret_is_recognised(name: str) -> None:
    assert is_secret(name)
    assert dict(without_secrets([(name, "x"), ("lr", "0.1")])) == {"lr": "0.1"}


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_stay_visible(name: str) -> None:
    assert not is_secret(name)
