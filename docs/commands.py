"""A page for each command, made of its parser when the site is built: no option is missing, and none is gone."""

import re
from argparse import SUPPRESS, Action

from mtp_jax.cli.main import COMMANDS, command_of
from mtp_jax.cli.options import Parser

FOLDER = "docs/reference/cli"


def pages() -> dict[str, str]:
    """Markdown by path, one page a command."""
    return {f"{FOLDER}/{name.replace(' ', '-')}.md": page_of(name) for name in COMMANDS}


def page_of(name: str) -> str:
    """What `mtp-jax NAME --help` says, in sections."""
    _, parser = command_of(name)
    actions = [action for group in parser._action_groups for action in _shown(group._group_actions)]
    usage = " ".join(["mtp-jax", name, *(_written(action) for action in actions if not action.option_strings)])
    lines = [f"# `mtp-jax {name}`", "", parser.description or "", "", "```", f"{usage} [options]", "```"]
    for group in parser._action_groups:
        actions = _shown(group._group_actions)
        if actions:
            lines += ["", f"## {(group.title or 'options').capitalize()}", "", "| | |", "| --- | --- |"]
            lines += [f"| {_cell(f'`{_written(action)}`')} | {_cell(help_of(parser, action))} |" for action in actions]
    return "\n".join([*lines, ""])


def help_of(parser: Parser, action: Action) -> str:
    """An option's sentence, defaults put in."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _shown(actions: list[Action]) -> list[Action]:
    return [action for action in actions if action.help != SUPPRESS]


def _written(action: Action) -> str:
    """`--flag VALUE`, or the name of a place."""
    if not action.option_strings:
        return f"[{action.dest.upper()}]" if action.nargs in ("?", "*") else action.dest.upper()
    flags = ", ".join(action.option_strings)
    if action.nargs == 0:
        return flags
    value = action.metavar or "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.metavar
    return f"{flags} {value or action.dest.upper()}"


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")
