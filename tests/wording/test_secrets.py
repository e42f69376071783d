"""Tests for the names of variables and arguments whose values are kept out of files and notebooks."""

from __future__ import annotations

import time

import pytest

from notebook_launcher.wording import describe_value, is_secret, recordable_variables, redact, without_secrets

SECRETS = """
    AZURE_STORAGE_CONNECTION_STRING DATABASE_DSN PASSWORD2 access_tokens jwt DB_PASS GITHUB_PAT HF_TOKENS MYSQL_PWD
    PGPASSWORD SESSION_COOKIE SSH_PASSPHRASE aws-creds hfToken APIKEY AWS_SECRET_ACCESS_KEY DBPASSWORD HF_AUTH
    HF_AUTHTOKEN HF_TOKEN OPENAI_API_KEY api_keys credentials password private_key
"""
OTHERS = """
    HF_HOME MAX_TOKENS OLDPWD PATH PWD compass TOKENIZERS_PARALLELISM author keyboard lr monkey num_tokens tokens
"""


def test_name_of_a_secret_is_recognised_and_others_stay_visible() -> None:
    names = [*SECRETS.split(), *OTHERS.split()]
    assert [name for name in names if is_secret(name)] == SECRETS.split()
    assert [name for name, _ in without_secrets((name, "x") for name in names)] == OTHERS.split()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://me:hunter2@db/x?y", "postgres://me:***@db/x?y"),
        ("postgres://me:p@ss@db/x", "postgres://me:***@db/x"),
        ("https://host/x?a=1&api_key=hunter2&b=2", "https://host/x?a=1&api_key=***&b=2"),
        ("sk_live_0123456789abcdefgh", "***"),
        ('password = "hunter2"', 'password = "***"'),
        ("def f(db_password: str | None = 'hunter2')", "def f(db_password: str | None = '***')"),
        ('{"apiKey": "hunter2"}', '{"apiKey": "***"}'),
        ('+os.environ["HF_TOKEN"] = "hunter2"', '+os.environ["HF_TOKEN"] = "***"'),
        ('pad_token = "<pad>"; key = "loss"; password = given', 'pad_token = "<pad>"; key = "loss"; password = given'),
        ("train.py --password hunter2 --lr 0.1", "train.py --password *** --lr 0.1"),
        ("--api-key=hunter2 --max_tokens 55", "--api-key=*** --max_tokens 55"),
        ("Authorization: Bearer hunter2abc", "Authorization: Bearer ***"),
        ("https://hooks.slack.com/services/T0/B0/hunter2abcdefgh", "https://hooks.slack.com/services/***"),
        ("https://:pw@host", "https://:***@host"),
        ("key hf_abcdefghijklmnopqrstuv.", "key ***."),
        ("a ghp_0123456789abcdefghij b", "a *** b"),
        ("sk-proj-0123456789abcdef", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "***"),
        ("https://host:8080/path and me@host", "https://host:8080/path and me@host"),
        ("task-2026-11-27-of-the-long-run", "task-2026-11-27-of-the-long-run"),
    ],
)
def test_secret_is_recognised_by_the_looks_of_its_value(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert is_secret("plain", text) == (text != shown)


def test_variables_are_recorded_by_name_unless_they_change_a_launch() -> None:
    env = {"ACCELERATE_DEBUG_MODE": "1", "NCCL_DEBUG": "INFO", "MY_FLAG": "1", "NCCL_TOKEN": "x"}
    expected = {"ACCELERATE_DEBUG_MODE": "1", "NCCL_DEBUG": "INFO", "MY_FLAG": None, "NCCL_TOKEN": None}
    assert recordable_variables(env) == expected


def test_words_of_a_program_are_shown_without_the_secret_that_follows_an_option() -> None:
    assert describe_value(["--password", "hunter2", "--lr", "0.1"]) == "['--password', '***', '--lr', '0.1']"
    assert describe_value(("--token", "hunter2")) == "('--token', '***')"
    assert describe_value({"headers": {"Authorization": "hunter2"}}) == "{'headers': {...}}"


def test_search_for_secrets_takes_no_square_of_the_length() -> None:
    began = time.process_time()
    for text in ("a_" * 200_000, "password='" * 40_000, "password:" + " " * 200_000, "--a" * 100_000):
        redact(text)
    assert time.process_time() - began < 10  # 1 s; of another order, minutes.
