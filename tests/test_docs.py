"""What the documents tell people to type can be typed."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

from memjax.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = ("eval", "data", "train", "plan", "agents")  # commands whose options live in the __main__ of their room


def code_of(page):
    """The lines of fenced and indented code, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    fenced, lines = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line)
    return lines


def commands():
    """Every memjax command in the documents, as (page, words)."""
    found = []
    for page in PAGES:
        for line in code_of(page):
            match = re.search(r"(?:^|[\s|(])(?:python -m memjax\.|memjax )(?=(\w+))", line)
            if match and not line.lstrip().startswith(("#", "import", "from", "ExecStart=")):
                words = shlex.split(line[match.end() :].split(" > ")[0], comments=True)
                found.append(pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}"))
    return found


def parse(command, words, parent=None):
    """Parse as the command would, down to its subcommand, and run nothing."""
    context = command.make_context(command.name, list(words), parent=parent)
    given = [*context._protected_args, *context.args]
    if hasattr(command, "resolve_command") and given:  # some groups do something by themselves
        name, inner, rest = command.resolve_command(context, given)
        if name in ELSEWHERE and parent is None:
            return parse(get_command(import_module(f"memjax.{name}.__main__").app), rest, context)
        return parse(inner, rest, context)
    return context


def test_the_documents_have_commands():
    assert len(commands()) > 10


@pytest.mark.parametrize("words", commands())
def test_every_command_of_the_documents_parses(words):
    words = [word for word in words if word != "..."]
    parse(get_command(app), words)


def test_a_wrong_option_would_be_noticed():
    with pytest.raises(Exception, match="No such option"):  # Typer's own copy of click raises it
        parse(get_command(app), ["ask", "--chunk-size", "5", "q", "file"])


def test_the_links_of_the_documents_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
