"""Each block of commands in README, CONTRIBUTING and docs/ is run by a test or says why not, and
each command line of ours in them is one that the program accepts."""

import os
import re
import shlex

import click
import pytest
import typer

from tests.support.documented import ROOT, Block, blocks
from worker_client.__main__ import app as client_app
from worker_client.cli.probe import _parser as probe_parser
from worker_daemon.cli import app as daemon_app

PAGES = ["README.md", "CONTRIBUTING.md", "docs/upgrading.md"]
PAGES += sorted({f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} - set(PAGES))
BLOCKS = [block for page in PAGES for block in blocks(page)]
PROGRAMS = {
    "worker-client": typer.main.get_command(client_app),
    "worker-daemon": typer.main.get_command(daemon_app),
}
OURS = re.compile(r"(?:^|[ /])(worker-(?:client|daemon|probe)) +([a-z].*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
META = re.compile(r"\[|\.\.\.|\w\|\w|[a-z] {2,}[a-z]")
"""What only a synopsis has."""
INLINE = re.compile(r"`(worker-(?:client|daemon) [^`]+)`", re.DOTALL)


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def lines_of(block):
    return [match for line in block.commands if (match := OURS.search(line))]


def found(program, words):
    """Return the command that words name, and the words after its name."""
    command = PROGRAMS[program]
    while isinstance(command, click.Group | typer.core.TyperGroup) and words:
        assert words[0] in command.commands, f"{program} has no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


def known_options(program, text):
    """Return the options of the command that a text names."""
    if program == "worker-probe":
        return set(OPTION.findall(probe_parser(os.environ).format_help()))
    command, _ = found(program, [word.split("|")[0] for word in text.split()[:2]])
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("block", BLOCKS, ids=name_of)
def test_block_is_run_by_a_test_or_says_why_not(block):
    assert block.run_by or block.reason, (
        f"{name_of(block)}: put `<!-- run by PATH -->` or `<!-- not run: REASON -->` before it"
    )
    if block.run_by:
        page = block.page.removeprefix("docs/")
        assert page in (ROOT / block.run_by).read_text(), f"{block.run_by} does not name {page}"
    for path in re.findall(r"tests/[\w/.]+\w", block.reason or ""):
        assert (ROOT / path).exists()


@pytest.mark.parametrize("block", [block for block in BLOCKS if lines_of(block)], ids=name_of)
def test_commands_of_ours_are_accepted(block):
    for match in lines_of(block):
        program, text = match.groups()
        ours = text.partition(" -- ")[0]
        assert known_options(program, ours).issuperset(OPTION.findall(ours)), text
        if META.search(ours) or program == "worker-probe":
            continue
        text = re.sub(r"<\(.*\)", "FILE", text).rstrip("& ")
        command, words = found(program, shlex.split(text))
        with command.make_context(program, words):
            pass


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_have_the_options_that_they_name(page):
    for text in INLINE.findall((ROOT / page).read_text()):
        program, _, rest = " ".join(text.split()).partition(" ")
        if rest and not rest.startswith("-"):
            assert known_options(program, rest).issuperset(OPTION.findall(rest)), text


@pytest.mark.parametrize(
    ("text", "commands", "run_by", "reason"),
    [
        ("    make run   # all\n", ("make run",), None, None),
        ("<!-- not run: slow -->\n\n    make run\n", ("make run",), None, "slow"),
        (
            "<!-- run by tests/a.py -->\n```bash\nA=1 make run\n```\n",
            ("A=1 make run",),
            "tests/a.py",
            None,
        ),
        (
            "<!-- not run: slow -->\n\nText.\n\n    pip install \\\n        .\n",
            ("pip install .",),
            None,
            None,
        ),
    ],
)
def test_a_mark_belongs_to_the_block_behind_it(
    text, commands, run_by, reason, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.support.documented.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"# Page\n\n{text}\n    step = driver.step()\n")
    (block,) = blocks("page.md")
    assert (block.commands[:1], block.run_by, block.reason) == (commands, run_by, reason)
