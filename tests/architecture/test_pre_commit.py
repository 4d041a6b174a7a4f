"""What runs at each commit is what CI runs: the same tools with the same options."""

import re

import yaml

from tests.architecture.repository import ROOT

OF_COMMITS = {"--force-exclude", "--quiet", "-q", "-n", "0", "env", "not long"}
"""What only a commit says: fewer files, fewer words."""


def words(command: str) -> list[str]:
    return [word for word in re.findall(r'"[^"]*"|\S+', command) if word.strip('"') not in OF_COMMITS]


def test_every_hook_is_a_step_of_ci() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    [repo] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local", "the tools are those of the environment, in the versions of constraints.txt"
    for hook in repo["hooks"]:
        missing = [word for word in words(hook["entry"]) if word not in ci]
        assert not missing, f"{hook['id']}: {missing} of its command is no part of .ci/run"


def test_every_check_of_ci_is_a_hook() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = set(
        re.findall(
            r"\.venv/bin/(ruff check|ruff format|pyright|lint-imports|mkdocs)", (ROOT / ".ci" / "run").read_text()
        )
    )
    assert len(tools) == 5
    assert all(f".venv/bin/{tool}" in config for tool in tools)
