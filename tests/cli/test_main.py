"""The command line as a whole: the table, help, errors, exit codes, completion; and the helpers of cli/output.py."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import kvad
from kvad.cli import main as cli_main
from kvad.cli import output, parameters
from kvad.errors import CheckpointError, EngineError, KvadError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Put ``kvad probe`` into the table, with the given body."""

    def install(body, *params):
        module = type(sys)("kvad_probe")
        module.probe = click.Command("probe", callback=body, params=list(params))
        monkeypatch.setitem(sys.modules, "kvad_probe", module)
        monkeypatch.setitem(cli_main.cli.table, "probe", ("kvad_probe:probe", "A probe."))

    return install


def raising(error):
    def body(**_):
        raise error

    return body


def kvad_process(*args, code="", env=None, **options):
    """``kvad args`` in a process of its own; ``code`` runs first, with ``cli`` at hand."""
    program = (
        f"import sys\nfrom kvad.cli.main import cli, main\n{textwrap.dedent(code)}\nsys.exit(main({list(args)!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_help_lists_every_command_with_its_line(capsys):
    assert cli_main.main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for name, (_, short_help) in cli_main.COMMANDS.items():
        assert name in out and short_help in out
    places = [out.index(f"{title}:") for title in ("Run", "Train", "Cache", "Models", "Inspect")]
    assert places == sorted(places) and out.endswith("kvad completion SHELL: Print the completion script of a shell.")


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("serve", "not available yet"),
        ("run", "kvad generate"),
        ("pull", "kvad import"),
        ("list", "--list-models"),
        ("finetune", "kvad train DATA --init MODEL --lora-rank RANK"),
    ],
)
def test_a_command_of_another_tool_is_answered_in_one_line(word, answer, capsys):
    assert cli_main.main([word]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1 and answer in seen.err


def test_a_word_that_is_near_no_command_gets_no_suggestion(capsys):
    assert cli_main.main(["zzzyyy"]) == 2
    assert capsys.readouterr().err == "kvad: error: No such command 'zzzyyy'\nkvad: hint: see kvad --help\n"


def test_help_imports_no_command():
    ran = kvad_process(
        "--help",
        code="""
        import atexit
        from kvad.cli.main import COMMANDS
        homes = {target.partition(":")[0] for target, _ in COMMANDS.values()} - {"kvad.cli.main"}
        atexit.register(lambda: print("imported:", sorted(homes & set(sys.modules))))
        """,
    )
    assert ran.returncode == 0 and "imported: []" in ran.stdout, ran


def test_a_listed_command_without_a_module_breaks_only_itself(monkeypatch, capsys):
    monkeypatch.setitem(cli_main.cli.table, "later", ("kvad.cli.not_written_yet:later", "Not here."))
    assert cli_main.main(["--help"]) == 0
    assert "Not here." in capsys.readouterr().out
    assert cli_main.main(["later"]) == 1
    assert "kvad: error: 'later' is not part of this installation" in capsys.readouterr().err


def test_version(capsys):
    assert cli_main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvad {kvad.__version__}\n"


def test_without_arguments_it_shows_help_on_stderr(capsys):
    assert cli_main.main([]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and "Run:" in seen.err and "Inspect:" in seen.err


def test_python_m_kvad():
    ran = subprocess.run(
        [sys.executable, "-m", "kvad", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, f"kvad {kvad.__version__}\n")


@pytest.mark.parametrize(("typed", "meant"), [("generat", "generate"), ("verfy", "verify"), ("bnch", "bench")])
def test_an_unknown_command_gets_the_nearest_name(typed, meant, capsys):
    assert cli_main.main([typed]) == 2
    err = capsys.readouterr().err
    assert err == f"kvad: error: No such command {typed!r}; did you mean {meant!r}?\nkvad: hint: see kvad --help\n"


def test_an_unknown_flag_gets_the_nearest_name(command, capsys):
    command(lambda context: None, click.Option(["--context"], type=int))
    assert cli_main.main(["probe", "--contxt", "3"]) == 2
    err = capsys.readouterr().err
    assert "--contxt" in err and "Did you mean '--context'" in err and "kvad probe --help" in err


def test_an_unknown_flag_of_kvad_itself(capsys):
    assert cli_main.main(["--debg", "train"]) == 2
    assert "--debug" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says", "hints"),
    [
        (UsageError("bad value", "use 3"), 2, "bad value", "use 3"),
        (CheckpointError("no config.json in x"), 2, "no config.json in x", ""),
        (EngineError("it stopped"), 1, "it stopped", ""),
        (KvadError("two\nlines"), 1, "two lines", ""),
        (OSError(errno.ENOSPC, "No space left", "/d/model"), 2, "/d/model: no space is left on the disk", ""),
        (OSError(errno.EROFS, "Read-only", "/d"), 2, "/d: the file system is read-only", ""),
        (PermissionError(errno.EACCES, "Permission denied", "/d"), 2, "/d: permission denied", ""),
        (FileNotFoundError(errno.ENOENT, "No such file", "/d"), 2, "/d: no such file or folder", ""),
        (ModuleNotFoundError("No module", name="matplotlib.pyplot"), 2, "this needs matplotlib", "kvad[plot]"),
        (MemoryError(), 1, "out of memory", "kvad plan"),
        (RuntimeError("oops"), 1, "this is a bug in kvad: RuntimeError: oops", "--debug"),
        (OSError(errno.EIO, "I/O error"), 1, "this is a bug in kvad: OSError", "--debug"),
    ],
)
def test_an_error_is_one_line_a_hint_and_a_code(command, capsys, error, code, says, hints):
    command(raising(error))
    assert cli_main.main(["probe"]) == code
    seen = capsys.readouterr()
    lines = seen.err.splitlines()
    assert seen.out == ""
    assert lines[0].startswith("kvad: error: ") and says in lines[0]
    assert len(lines) == 1 + bool(hints)
    assert not hints or (lines[1].startswith("kvad: hint: ") and hints in lines[1])


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback(command, capsys, arguments):
    command(raising(UsageError("bad value")))
    assert cli_main.main(arguments) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("kvad: error: bad value\n")


def test_debug_is_accepted_by_the_commands_of_a_group(monkeypatch, capsys):
    module = type(sys)("kvad_probe")
    module.probe = click.Group("probe", commands=[click.Command("inner", callback=raising(UsageError("bad")))])
    monkeypatch.setitem(sys.modules, "kvad_probe", module)
    monkeypatch.setitem(cli_main.cli.table, "probe", ("kvad_probe:probe", ""))
    assert cli_main.main(["probe", "inner", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_and_the_exit_code_of_a_command(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert cli_main.main(["probe"]) == 130
    command(lambda: click.get_current_context().exit(1))
    assert cli_main.main(["probe"]) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", ["'--help'", "'completion', 'bash'"])
def test_a_reader_that_goes_away_is_no_error(arguments):
    program = f"import sys; from kvad.cli.main import main; sys.exit(main([{arguments}]))"
    read, write = os.pipe()
    os.close(read)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(write)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout_is_reported():
    program = "import sys; from kvad.cli.main import main; sys.exit(main(['--help']))"
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60)
    assert ran.returncode == 2 and ran.stderr.startswith(b"kvad: error: no space is left"), ran


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell, capsys):
    assert cli_main.main(["completion", shell]) == 0
    assert "_KVAD_COMPLETE" in capsys.readouterr().out


def test_completion_offers_commands_and_options_by_prefix():
    def complete(words, at):
        env = {"_KVAD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        return kvad_process(env=env).stdout.split()

    assert complete("kvad ver", 1) == ["plain,verify"]
    assert set(complete("kvad ", 1)) == {f"plain,{name}" for name in cli_main.COMMANDS}
    assert "plain,--debug" in complete("kvad --", 1)
    assert complete("kvad completion z", 2) == ["plain,zsh"]


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Report:
    path: Path
    point: Point
    values: tuple[float, ...]


def test_emit_json_is_one_line_of_plain_json(capsys):
    output.emit_json({"report": Report(Path("a/b"), Point(1, 0.5), (float("nan"), float("inf"))), 3: "é"})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"report": {"path": "a/b", "point": {"x": 1, "y": 0.5}, "values": [None, None]}, "3": "é"}
    with pytest.raises(TypeError, match="object has no JSON form"):
        output.emit_json(object())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        ("4GB", 4 * 10**9),
        ("2t", 2 * 2**40),
        ("1024", 1024),
        ("7b", 7),
    ],
)
def test_parse_bytes(text, size):
    assert parameters.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1GiB", "8Gi", "8iB", "0", "1e9", "nan"])
def test_parse_bytes_refuses(text):
    with pytest.raises(UsageError) as caught:
        parameters.parse_bytes(text)
    assert caught.value.hint


def test_format_bytes():
    shown = [output.format_bytes(size) for size in (0, 1023, 1024, 3_221_225_472, 2**20 - 1, 5 * 2**40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "3.00 GiB", "1.00 MiB", "5.00 TiB"]


def test_console_writes_to_stderr(capsys):
    output.console().print("note")
    seen = capsys.readouterr()
    assert (seen.out, seen.err) == ("", "note\n")
