"""The site has a page for each command, and each option on it has a sentence."""

import runpy
from typing import Any

import pytest

from mtp_jax.cli.main import COMMANDS, command_of
from tests.architecture.repository import ROOT

COMMAND_PAGES: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "commands.py"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_commands_page_with_a_sentence(name: str) -> None:
    page = COMMAND_PAGES["page_of"](name)
    _, parser = command_of(name)
    for action in parser._actions:
        text = COMMAND_PAGES["help_of"](parser, action)
        assert len(text) > 3, f"mtp-jax {name}: {action.dest} has no help"
        assert all(flag in page for flag in action.option_strings)
        assert text.split()[0] in page


def test_an_option_without_a_sentence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor, _ = command_of("doctor")
    monkeypatch.setattr(doctor, "add_options", lambda parser: parser.add_argument("--mute", action="store_true"))
    with pytest.raises(AssertionError, match="doctor: mute has no help"):
        test_every_option_is_on_the_commands_page_with_a_sentence("doctor")


def test_every_command_has_a_page() -> None:
    assert set(COMMAND_PAGES["pages"]()) == {f"docs/reference/cli/{name.replace(' ', '-')}.md" for name in COMMANDS}
