"""Exit codes: one definition, one table in the documents, and a description of each."""

import re
from pathlib import Path

from worker_host.exit_codes import DO_NOT_RESTART, ExitCode, describe_exit

ROOT = Path(__file__).parents[3]


def test_the_table_in_the_documents_is_complete():
    text = (ROOT / "docs" / "cli.md").read_text()
    table = text[text.index("| exit code |") :].split("\n\n")[0]
    documented = {int(n) for row in table.splitlines()[2:] for n in re.findall(r"\d+", row[:12])}
    assert documented == set(ExitCode)
    prevented = re.search(r"RestartPreventExitStatus=([\d ]+)", text)
    assert prevented and {int(n) for n in prevented[1].split()} == DO_NOT_RESTART


def test_every_code_has_words():
    assert all(len(code.meaning) > 3 for code in ExitCode)
    assert describe_exit(87) == "exit code 87: the GPU is lost or needs a reset"
    assert describe_exit(-9).startswith("exit code 137: it was killed (SIGKILL)")
    assert describe_exit(3) == "exit code 3"


def test_no_code_is_written_as_a_number():
    for path in (ROOT / "worker_daemon").rglob("*.py"):
        assert not re.search(r"(?i)exit\w*\((?:[1-9]\d*)\)|EXIT_\w+: Final", path.read_text()), path
