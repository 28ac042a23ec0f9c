"""Names of repositories: which texts are names, which are paths, and which are refused."""

import pytest

from model_hub.faults import HubError, HubFault
from model_hub.names import RepoName, read_commit, read_name

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.mark.parametrize(
    ("text", "repo_id", "revision"),
    [
        ("org/name", "org/name", None),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", None),
        ("org/name@main", "org/name", "main"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
        (f"org/name@{COMMIT}", "org/name", COMMIT),
        ("o/n@v1.0+cpu", "o/n", "v1.0+cpu"),
    ],
)
def test_names(text, repo_id, revision):
    found = read_name(text)
    assert found == RepoName(repo_id, revision)
    assert str(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "model",
        "./org/name",
        "../name",
        "/org/name",
        "~/name",
        "a/b/c",
        "org/",
        "",
        "../../x",
        "~x/y",
    ],
)
def test_paths(text):
    assert read_name(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("org/..", "org/na--me", "org/name.git", "org/-name", "org/na me", "org/näme"),
        *("org/na..me", "org/name.", "org/" + "n" * 97, "org/na\nme", "org/na\0me"),
        *("org/name@", "org/name@..", "org/name@a/../b", "org/name@/a", "org/name@a//b"),
        *("org/name@a.lock", "org/name@-x", "org/name@a b", "org/name@" + "r" * 300),
        *("org/name@.hidden", "org/name@a/.hidden", "org/name@a@b", "org/name@a\n"),
    ],
)
def test_what_only_looks_like_a_name_is_refused_with_the_fix(text):
    with pytest.raises(HubError) as caught:
        read_name(text)
    assert caught.value.fault is HubFault.NAME
    assert caught.value.name == text[:300] and caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        *("org/name", "org/name@main", f"../{'x' * 5}@{COMMIT}", f"org/..@{COMMIT}"),
        *(f"org/name@{COMMIT.upper()}", f"org/name@{COMMIT}0", f"org/name@{COMMIT}\n"),
        *(f"a/b/c@{COMMIT}", f"name@{COMMIT}", f"/name@{COMMIT}", f"or\0g/name@{COMMIT}"),
    ],
)
def test_a_daemon_takes_nothing_but_a_name_and_a_commit(text):
    assert read_commit(text) is None
    assert read_commit(f"org/name@{COMMIT}") == RepoName("org/name", COMMIT)
