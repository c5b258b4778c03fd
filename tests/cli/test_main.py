"""The command line as a whole: the table of commands, help, errors, exit codes, completion; and ``cli/output.py``."""

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

from kvad import __version__
from kvad.cli import main as cli_main
from kvad.cli import output, parameters
from kvad.errors import (
    CheckpointError,
    EngineError,
    KvadError,
    MemoryPlanError,
    NetworkError,
    SaveError,
    UsageError,
    format_bytes,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(monkeypatch):
    """Put ``kvad probe`` into the table, with the given body."""

    def install(body, *params, group=None):
        module = type(sys)("kvad_probe")
        module.probe = click.Command("probe", callback=body, params=list(params))
        if group is not None:
            module.probe = click.Group("probe", commands=group)
        monkeypatch.setitem(sys.modules, "kvad_probe", module)
        monkeypatch.setitem(cli_main.cli.table, "probe", ("kvad_probe:probe", "A probe."))

    return install


def raising(error):
    def body(**_):
        raise error

    return body


def kvad_process(*args, code="", env=None, stdout=subprocess.PIPE):
    """Run ``kvad args`` in a process; ``code`` runs first, with ``cli`` as a global."""
    program = (
        f"import sys\nfrom kvad.cli.main import cli, main\n{textwrap.dedent(code)}\nsys.exit(main({list(args)!r}))"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, **(env or {})}
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=60, check=False, **pipes)


def assert_loads_no_torch(*args, code=0):
    result = kvad_process(*args, code="import atexit\natexit.register(lambda: print('torch' in sys.modules))")
    assert result.returncode == code and result.stdout.endswith("False\n"), result


def test_help_lists_every_command_with_its_line(kvad):
    out = " ".join(kvad("--help").out.split())
    for name, (_, short_help) in cli_main.COMMANDS.items():
        assert name in out and short_help in out
    places = [out.index(f"{title}:") for title in ("Run", "Train", "Cache", "Models", "Inspect")]
    places.append(out.index("kvad completion SHELL: Print the completion script of a shell. Exit codes: 0 success"))
    assert places == sorted(places) and out.endswith(" 143 SIGTERM")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run", "kvad generate"),
        ("pull", "kvad import"),
        ("list", "--list-models"),
        ("show", "kvad inspect MODEL"),
        ("finetune", "kvad train DATA --init MODEL --lora-rank RANK"),
    ],
)
def test_command_of_another_tool(kvad, word, message):
    result = kvad(word)
    assert (result.code, result.out) == (2, "") and result.err.count("\n") == 1 and message in result.err


@pytest.mark.parametrize(
    ("command", "flag", "meant"),
    [
        ("train", "--learning-rate", "--lr"),
        ("generate", "--max-model-len", "--max-seq-len"),
        ("generate", "--kv-cache-dtype", "--cache-dtype"),
        ("train", "--kv-cache-dtype", None),  # train has no such option
        ("tokenize", "--context", None),
    ],
)
def test_option_of_another_tool(kvad, command, flag, meant):
    result = kvad(f"{command} x {flag} 1")
    nearest = f"; did you mean '{meant}'?" if meant else ""
    assert result.code == 2 and result.err.startswith(f"kvad: error: No such option '{flag}'{nearest}\n")


def test_help_imports_no_command():
    result = kvad_process(
        "--help",
        code="""
        import atexit
        from kvad.cli.main import COMMANDS
        homes = {target.partition(":")[0] for target, _ in COMMANDS.values()} - {"kvad.cli.main"}
        atexit.register(lambda: print("imported:", sorted(homes & set(sys.modules))))
        """,
    )
    assert result.returncode == 0 and "imported: []" in result.stdout, result


def test_missing_module_breaks_only_its_command(kvad, monkeypatch):
    monkeypatch.setitem(cli_main.cli.table, "later", ("kvad.cli.not_written_yet:later", "Not here."))
    assert "Not here." in kvad("--help").out
    result = kvad("later")
    assert result.code == 1 and "kvad: error: 'later' is not part of this installation" in result.err


def test_version():
    result = subprocess.run(
        [sys.executable, "-m", "kvad", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, f"kvad {__version__}\n")


def test_no_arguments_print_help_on_stderr(kvad):
    result = kvad("")
    assert (result.code, result.out) == (2, "") and "Run:" in result.err and "Inspect:" in result.err


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("generat", "; did you mean 'generate'?"),
        ("verfy", "; did you mean 'verify'?"),
        ("bnch", "; did you mean 'bench'?"),
        ("zzzyyy", ""),
        ("quantise", "; did you mean 'quantize'?"),
        ("eva", "; did you mean 'eval'?"),
    ],
)
def test_unknown_command_suggests_the_nearest_name(kvad, typed, suggestion):
    message = f"kvad: error: No such command {typed!r}{suggestion}\nkvad: hint: see kvad --help\n"
    assert kvad(typed) == (2, "", message)


def test_only_a_near_flag_is_suggested(kvad):
    for flag, suggestion in (("--temprature", "; did you mean '--temperature'?\n"), ("--quantize", "\n")):
        result = kvad(f"generate x {flag} 1")
        assert result.code == 2 and result.err.startswith(f"kvad: error: No such option '{flag}'{suggestion}")
    assert "use kvad --help" in kvad("help").err


def test_unknown_flag_suggests_the_nearest_name(kvad, command):
    command(lambda context: None, click.Option(["--context"], type=int))
    result = kvad("probe --contxt 3")
    assert result.code == 2 and "--contxt" in result.err
    assert "did you mean '--context'?" in result.err and "kvad probe --help" in result.err
    result = kvad("--debg train")
    assert result.code == 2 and "--debug" in result.err


def caused(error, number):
    error.__cause__ = OSError(number, "reason")
    return error


@pytest.mark.parametrize(
    ("error", "code", "message", "hint"),
    [
        (UsageError("bad value", "use 3"), 2, "bad value", "use 3"),
        (CheckpointError("no config.json in x"), 2, "no config.json in x", ""),
        (EngineError("it stopped"), 1, "it stopped", ""),
        (SaveError("cannot save x: disk full"), 1, "cannot save x: disk full", ""),
        (caused(SaveError("cannot save x"), errno.ENOSPC), 1, "cannot save x", ""),
        (caused(SaveError("cannot save x"), errno.EDQUOT), 1, "cannot save x", ""),
        (caused(SaveError("cannot save x"), errno.EIO), 1, "cannot save x", ""),
        (caused(SaveError("cannot save x", "another"), errno.EACCES), 2, "cannot save x", "another"),
        (caused(SaveError("cannot save x"), errno.EROFS), 2, "cannot save x", ""),
        (caused(SaveError("cannot save x"), errno.ENOTDIR), 2, "cannot save x", ""),
        (caused(SaveError("cannot save x"), errno.EEXIST), 2, "cannot save x", ""),
        (MemoryPlanError("it does not fit"), 1, "it does not fit", ""),
        (NetworkError("cannot reach the hub"), 1, "cannot reach the hub", ""),
        (KvadError("two\nlines"), 1, "two lines", ""),
        (OSError(errno.ENOSPC, "No space left", "/d/model"), 1, "/d/model: no space is left on the disk", ""),
        (OSError(errno.EROFS, "Read-only", "/d"), 2, "/d: the file system is read-only", ""),
        (PermissionError(errno.EACCES, "Permission denied", "/d"), 2, "/d: permission denied", ""),
        (OSError(errno.ENAMETOOLONG, "Too long", "/d"), 2, "/d: the name is too long", ""),
        (FileNotFoundError(errno.ENOENT, "No such file", "/d"), 2, "/d: no such file or folder", ""),
        (ModuleNotFoundError("No", name="matplotlib.pyplot"), 2, "this needs matplotlib", "pip install matplotlib"),
        (MemoryError(), 1, "out of memory", "kvad plan"),
        (RuntimeError("oops"), 1, "this is a bug in kvad: RuntimeError: oops", "--debug"),
        (OSError(errno.EIO, "I/O error"), 1, "this is a bug in kvad: OSError", "--debug"),
    ],
)
def test_error_is_one_line_a_hint_and_a_code(kvad, command, error, code, message, hint):
    command(raising(error))
    result = kvad("probe")
    first, *hints = result.err.splitlines()
    assert (result.code, result.out) == (code, "") and first.startswith("kvad: error: ") and message in first
    assert len(hints) == bool(hint) and all(line.startswith("kvad: hint: ") and hint in line for line in hints)


@pytest.mark.parametrize("arguments", ["--debug probe inner", "probe --debug inner", "probe inner --debug"])
def test_debug_prints_the_traceback(kvad, command, arguments):
    command(None, group=[click.Command("inner", callback=raising(UsageError("bad value")))])
    result = kvad(arguments)
    assert result.code == 2 and "Traceback" in result.err and result.err.endswith("kvad: error: bad value\n")


def test_ctrl_c_and_the_exit_code_of_a_command(kvad, command):
    command(raising(KeyboardInterrupt()))
    assert kvad("probe") == (130, "", "")
    command(lambda: click.get_current_context().exit(1))
    assert kvad("probe") == (1, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["completion", "bash"]])
def test_closed_pipe(arguments):
    read, write = os.pipe()
    os.close(read)
    try:
        result = kvad_process(*arguments, stdout=write)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_under_stdout_is_reported():
    with open("/dev/full", "w") as full:
        result = kvad_process("--help", stdout=full)
    assert result.returncode == 1 and result.stderr.startswith("kvad: error: no space is left"), result


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(kvad, shell):
    result = kvad("completion", shell)
    assert result.code == 0 and "_KVAD_COMPLETE" in result.out


def test_completion_by_prefix():
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
        ("0", 0),
    ],
)
def test_parse_bytes(text, size):
    assert parameters.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1GiB", "8Gi", "8iB", "1e9", "nan"])
def test_parse_bytes_refuses(text):
    with pytest.raises(UsageError) as caught:
        parameters.parse_bytes(text)
    assert caught.value.hint


def test_format_bytes():
    shown = [format_bytes(size) for size in (0, 1023, 1024, 3_221_225_472, 2**20 - 1, 5 * 2**40)]
    assert shown == ["0 B", "1023 B", "1.00 KiB", "3.00 GiB", "1.00 MiB", "5.00 TiB"]


def test_console_writes_to_stderr(capsys):
    output.console().print("note")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "note\n")


def test_closed_stdout_is_no_error(monkeypatch):
    """As ``kvad --version >&-``."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli_main.main(["--version"]) == 0
