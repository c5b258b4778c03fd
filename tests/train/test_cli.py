"""``kvad train``: flags over a run file, output and exit codes."""

import io
import json
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from kvad.checkpoint.native import open_folder
from kvad.cli.main import main
from kvad.train.objectives.cross_entropy import CrossEntropyObjective, EvalResult
from tests.support.training_runs import tiny_shape

SMALL = [part for key, value in tiny_shape(layers=1, mlp=32).items() for part in ("--set", f"{key}={value}")]
RUN = ["--tokenizer", "byte", "--seq-len", "16", "--batch-size", "2", "--precision", "fp32"]
QUICK = ["--preset", "tiny", *SMALL, *RUN]


def kvad(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def test_a_run_prints_its_result_and_draws_its_losses(corpus, tmp_path):
    out = tmp_path / "run"
    code, stdout, stderr = kvad("train", corpus, "--out", out, *QUICK, "--steps", 20, "--eval-interval", 10, "--json")
    assert code == 0, stderr
    result = json.loads(stdout)
    assert result["reason"] == "done" and result["step"] == 20
    assert result["val_loss"] == open_folder(out).training.state["trainer_state"]["val_loss"]
    assert result["config"]["data"]["seq_len"] == 16 and result["checkpoint"].endswith("step-00000020")
    assert "20 steps" in stderr and "val " in stderr and f"kvad generate {out}" in stderr
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (out / "loss.svg").read_text()


def test_the_best_step_is_printed_and_evaluated(corpus, tmp_path, monkeypatch):
    found = iter([3.0, 2.0, 2.5, 2.6])
    monkeypatch.setattr(CrossEntropyObjective, "evaluate_loss", lambda *_: EvalResult(next(found), 100))
    out = tmp_path / "run"
    few = ["--steps", 8, "--eval-interval", 2, "--set", "train.keep_checkpoints=1"]
    code, stdout, stderr = kvad("train", corpus, "--out", out, *QUICK, *few, "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["best_step"] == 4
    assert f"best:  {out}/best, validation 2.0000 at step 4" in stderr
    monkeypatch.undo()
    code, stdout, stderr = kvad("eval", out / "best", corpus / "03.txt", "--json")
    assert code == 0, stderr
    assert json.loads(stdout)["perplexity"] > 1
    code, _, stderr = kvad("train", "--resume", "--out", out / "best")
    assert code == 2 and "is a checkpoint, not a run" in stderr and f"--resume --out {out}" in stderr


def test_flags_override_the_run_file(corpus, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nsteps = 3\nbatch_size = 2\nprecision = "fp32"\n[data]\nseq_len = 8\n[tokenizer]\nkind = "byte"\n'
    )
    code, stdout, stderr = kvad("train", corpus, "--config", file, "--out", tmp_path / "run", "--preset", "tiny",
                                "--set", "decoder.num_layers=1", "--steps", 2, "--json")  # fmt: skip
    assert code == 0, stderr
    config = json.loads(stdout)["config"]
    assert (config["train"]["steps"], config["train"]["batch_size"], config["data"]["seq_len"]) == (2, 2, 8)
    assert open_folder(tmp_path / "run").config.decoder.num_layers == 1


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_prints_the_resume_command(corpus, tmp_path, monkeypatch, number, expected):
    real = CrossEntropyObjective.accumulate_gradients
    calls = iter(range(1000))

    def interrupted(*arguments):
        if next(calls) == 4:
            os.kill(os.getpid(), number)
        return real(*arguments)

    monkeypatch.setattr(CrossEntropyObjective, "accumulate_gradients", interrupted)
    out = tmp_path / "run"
    code, _, stderr = kvad("train", corpus, "--out", out, *QUICK, "--steps", 12)
    assert code == expected and f"kvad train --resume --out {out}" in stderr
    monkeypatch.undo()
    assert open_folder(out, verify=True).path.name == "step-00000005"
    code, _, stderr = kvad("train", "--resume", "--out", out)
    assert code == 0 and "12 steps" in stderr and "from step 5" in stderr


def test_resume_with_another_configuration_is_refused(corpus, tmp_path):
    out = tmp_path / "run"
    assert kvad("train", corpus, "--out", out, *QUICK, "--steps", 3)[0] == 0
    for flags, message in {
        ("--lr", "0.5"): "optim.lr: 0.001 there, 0.5 here",
        ("--set", "hidden_size=64"): "model.hidden_size: 32 there, 64 here",
        ("--tokenizer", "char"): "tokenizer.kind: 'byte' there, 'char' here",
    }.items():
        code, _, stderr = kvad("train", "--resume", "--out", out, *flags)
        assert code == 2 and message in stderr, stderr
    code, stdout, stderr = kvad("train", "--resume", "--out", out, "--json")
    assert code == 0 and json.loads(stdout)["reason"] == "unchanged"
    assert "nothing to do: the run has all 3 steps. Extend it with --steps or --minutes" in stderr
    assert "saved:" not in stderr
    code, _, stderr = kvad("train", "--resume", "--out", out, "--steps", 5, "--eval-interval", 2)
    assert code == 0 and "5 steps" in stderr and "saved:" in stderr
    for change in ("train.steps: 3 -> 5", "train.eval_interval: 250 -> 2"):
        assert f"changed: {change}" in stderr
    assert "learning rate: cosine over the new length: " in stderr


@pytest.fixture
def bad(tmp_path):
    files = {"empty.txt": b"", "binary.txt": b"a\0b", "latin.txt": b"caf\xe9" * 100, "short.txt": b"ab"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "typo.toml").write_text("[train]\nstepz = 3\n")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "no such file or folder: nowhere.txt"),
        (["empty.txt"], "empty.txt is empty"),
        (["binary.txt"], "binary.txt is binary (a zero byte at offset 1)"),
        (["latin.txt"], "latin.txt, line 1, is not UTF-8: byte 0xE9 at offset 3"),
        (["short.txt"], "too short: 3 tokens"),
        ([], "no corpus was named"),
        (["latin.txt", "--encoding-errors", "replace", "--precision", "fp16"], "fp16 must not be used on a CPU"),
        (["latin.txt", "--config", "typo.toml"], "unknown key train.stepz"),
        (["latin.txt", "--config", "none.toml"], "no such file: none.toml"),
        (["latin.txt", "--set", "decoder.layrs=4"], "unknown key decoder.layrs"),
        (["latin.txt", "--set", "layers"], "--set 'layers' is not KEY=VALUE"),
        (["latin.txt", "--tokenizer", "bpee"], "neither a kind nor a file"),
        (["latin.txt", "--preset", "huge"], "model.preset: unknown preset 'huge'"),
        (["latin.txt", "--stepz", "3"], "No such option"),
        (["latin.txt", "--lr", "0"], "optim.lr: must be above 0"),
        (["latin.txt", "--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--resume"], "no such folder: run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bad, monkeypatch, arguments, message):
    monkeypatch.chdir(bad)
    defaults = [] if "--tokenizer" in arguments or "--resume" in arguments else ["--tokenizer", "byte"]
    errors = ["--encoding-errors", "replace"] if arguments[:1] == ["latin.txt"] and len(arguments) > 1 else []
    code, stdout, stderr = kvad(
        "train", *arguments, *defaults, *(e for e in errors if e not in arguments), "--out", "run"
    )
    assert code == 2 and message in stderr and not stdout, stderr
    assert "Traceback" not in stderr and not Path("run", "checkpoints").exists()
    line = next(line for line in stderr.splitlines() if "error:" in line)
    assert message in line


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        (2, ["short.txt"]),
        (2, ["latin.txt"]),
        (2, ["long.txt", "--device", "tpu9"]),
        (1, ["long.txt", "--batch-size", "10000000"]),  # 1: it does not fit into memory
        (1, ["long.txt", "--seq-len", "500000000"]),
        (2, ["long.txt", "--seq-len", "5000", "--batch-size", "1"]),
        (2, ["long.txt", "--set", "hidden_size=31"]),
        (1, ["long.txt", "--gradient-accumulation-steps", "100000000000"]),
        (2, ["long.txt", "--validation", "1e-9"]),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_bad_input_leaves_nothing_behind(bad, monkeypatch, expected, arguments, there):
    monkeypatch.chdir(bad)
    Path("long.txt").write_text("1 is less than 2. " * 100)
    if there:
        Path("runs/x").mkdir(parents=True)
    code, _, stderr = kvad("train", "--tokenizer", "byte", "--preset", "tiny", *arguments, "--out", "runs/x")
    assert code == expected and "Traceback" not in stderr, stderr
    assert (not Path("runs").exists()) if not there else not list(Path("runs/x").iterdir())


def test_a_run_that_would_be_overwritten_keeps_its_tokens(corpus, tmp_path):
    out = tmp_path / "run"
    assert kvad("train", corpus, "--out", out, *QUICK, "--steps", 2)[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "short.txt").write_text("ab")
    code, _, stderr = kvad("train", tmp_path / "short.txt", "--out", out, *QUICK, "--overwrite")
    assert code == 2 and "too short" in stderr
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "flags", [["--batch-size", "10000000"], ["--seq-len", "100000000"], ["--set", "hidden_size=3200000"]]
)
def test_runs_that_cannot_fit_are_refused_before_allocation(corpus, tmp_path, flags):
    code, _, stderr = kvad("train", corpus, "--out", tmp_path / "run", *QUICK, *flags)
    assert code == 1
    error, hint = stderr.splitlines()[-2:]
    assert error.startswith("kvad: error: training on ") and " needs about " in error and "is available" in error
    assert "--batch-size" in hint


def test_the_batch_that_would_fit_is_named(corpus, tmp_path, monkeypatch):
    from kvad.cache import sizing

    monkeypatch.setattr(sizing, "available_bytes", lambda: 3_000_000)
    code, _, stderr = kvad("train", corpus, "--out", tmp_path / "run", *QUICK, "--batch-size", "5000")
    assert code == 1 and "2.86 MiB is available" in stderr
    batch = stderr.partition("This fits: --batch-size ")[2].split()[0]
    code, _, stderr = kvad("train", corpus, "--out", tmp_path / "run", *QUICK, "--batch-size", batch, "--steps", "1")
    assert code == 0 and int(batch) > 1, stderr
    monkeypatch.setattr(sizing, "available_bytes", lambda: 30_000)
    code, _, stderr = kvad("train", "--resume", "--out", tmp_path / "run")
    assert code == 1 and "Not even --batch-size 1 fits" in stderr


def test_a_run_inside_its_corpus_is_refused(bad, monkeypatch):
    monkeypatch.chdir(bad)
    Path("texts").mkdir()
    Path("texts/long.txt").write_text("1 is less than 2. " * 100)
    for out in ("texts", "texts/run", "texts/../texts/deep/run", bad / "texts" / "run"):
        code, _, stderr = kvad("train", "texts", "--out", out, *QUICK, "--steps", "1")
        error, hint = stderr.splitlines()
        assert code == 2 and error.startswith(f"kvad: error: {out} is inside the corpus texts; "), stderr
        assert "Choose another --out" in hint
    assert [path.name for path in Path("texts").iterdir()] == ["long.txt"]
    for out, flags in {"texts2": [], "texts/.run": [], "texts/run": ["--suffix", ".txt"]}.items():
        code, _, stderr = kvad("train", "texts", "--out", out, *QUICK, "--steps", "1", *flags)
        assert code == 0, stderr  # another folder, a hidden one, or other suffixes
        code, _, stderr = kvad("train", "--resume", "--out", out)
        assert code == 0, stderr


@pytest.mark.parametrize("out", ["short.txt", "short.txt/run"])
def test_an_out_that_is_a_file_is_refused(bad, monkeypatch, out):
    monkeypatch.chdir(bad)
    code, _, stderr = kvad("train", "latin.txt", "--encoding-errors", "replace", "--out", out, *QUICK)
    error, hint = stderr.splitlines()
    assert code == 2 and "short.txt is a file, and --out needs a folder" in error
    assert hint == "kvad: hint: Choose another folder for --out." and Path("short.txt").read_bytes() == b"ab"


def test_counts_of_one_are_singular(bad, monkeypatch):
    monkeypatch.chdir(bad)
    Path("long.txt").write_text("1 is less than 2. " * 100)
    code, _, stderr = kvad("train", "long.txt", "--out", "run", *QUICK, "--steps", "1")
    assert code == 0 and "corpus: 1 file, " in stderr and "in 1 document\n" in stderr and "\n1 step, " in stderr
    short = kvad("train", "short.txt", "--out", "no", *QUICK, "--validation", "0.5")[2]
    assert "2 tokens to train on" in short or "3 tokens cannot" in short


def test_help_shows_examples():
    code, stdout, _ = kvad("train", "--help")
    for text in ("kvad train --resume --out runs/mine", "--overwrite", "--pairs SOURCE TARGET"):
        assert code == 0 and text in stdout
