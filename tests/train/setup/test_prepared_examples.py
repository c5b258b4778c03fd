"""Prepared examples, conversations, masked tokens and spans, and their check."""

import io
import json
import re
from itertools import count
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvad.checkpoint.folder import file_digest
from kvad.model_input import AttentionPattern
from kvad.text.tokenizer import load_tokenizer
from kvad.train.config.toml import dumps
from kvad.train.data import token_store
from kvad.train.monitoring import console
from kvad.train.setup.objective_factory import OBJECTIVE_TOPOLOGY
from kvad.train.sources import examples
from tests.support.training_runs import PRESETS, hashes, tiny_shape
from tests.train.objectives.test_all_objectives import files  # noqa: F401  (a fixture)
from tests.train.test_cli import kvad

EXAMPLE_KINDS = ("masked-lm", "span-corruption", "tag", "classify", "chat")


TRAIN = {"batch_size": 2, "precision": "fp32", "eval_tokens": 200}


def run_file(kind, folder, **data):
    """A run file of a tiny model; ``data``: keys of [data]."""
    topology = OBJECTIVE_TOPOLOGY[kind]
    preset = "t5-tiny" if kind == "span-corruption" else PRESETS[topology]
    lines = {"document_unit": "lines"} if kind in ("masked-lm", "span-corruption") else {}
    content = {
        "model": {"preset": preset, "set": tiny_shape(topology)},
        "data": {"seq_len": 128, "validation_fraction": 0.2, **lines, **data},
        "tokenizer": {"kind": "byte"},
        "objective": {"kind": kind},
        "train": {"steps": 3, **TRAIN},
    }
    path = folder / f"{kind}.toml"
    path.write_text(dumps(content))
    return path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", EXAMPLE_KINDS)
def test_run_on_prepared_data_equals_run_on_files(kind, files, tmp_path):  # noqa: F811
    run = run_file(kind, tmp_path)
    code, _, err = kvad("data", "prepare", run, files / kind, "--out", tmp_path / "data")
    assert code == 0, err
    manifest = json.loads((tmp_path / "data/manifest.json").read_text())
    assert manifest["kind"] == kind and manifest["documents"] >= 60
    assert ("noun" in manifest) == (kind in ("tag", "classify", "chat"))
    assert kvad("train", run, files / kind, "--out", tmp_path / "files")[0] == 0
    code, _, err = kvad("train", run, tmp_path / "data", "--out", tmp_path / "tokens")
    assert code == 0 and "prepared: " in err, err
    assert hashes(tmp_path / "tokens") == hashes(tmp_path / "files")
    assert not (tmp_path / "tokens/data").exists()
    assert kvad("train", "--resume", "--out", tmp_path / "tokens")[0] == 0


def test_held_out_files_are_fixed_when_prepared(files, tmp_path):  # noqa: F811
    run = run_file("tag", tmp_path)
    lines = (files / "tag").read_text()
    (tmp_path / "dev.tsv").write_text(lines.split("\n\n")[0] + "\n")
    (tmp_path / "unseen.tsv").write_text("ada\tA\n\nbob\tZ\n")
    held = ["--validation", tmp_path / "dev.tsv"]
    code, _, err = kvad("data", "prepare", run, files / "tag", *held, "--out", tmp_path / "data")
    assert code == 0 and "1 of them for validation" in err, err
    assert json.loads((tmp_path / "data/manifest.json").read_text())["held"] == 1
    code, _, err = kvad("train", run, tmp_path / "data", *held, "--out", tmp_path / "run")
    assert code == 2 and "name validation files when preparing it" in err
    held = ["--validation", tmp_path / "unseen.tsv"]
    code, _, err = kvad("data", "prepare", run, files / "tag", *held, "--out", tmp_path / "other")
    assert code == 2 and "unseen.tsv, line 3: tag 'Z' is held out" in err
    code, _, err = kvad("train", run, tmp_path / "data", "--validation", 0.3, "--out", tmp_path / "run")
    assert code == 0, "the held-out files apply"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "{run}", "{data}", "--validation", "0.4"], "must be 0.2, as in {data}, got 0.4"),
        (["train", "{run}", "{data}", "{files}/classify"], "is prepared, and objective classify reads one corpus"),
        (["train", "{run}", "{data}", "--objective", "tag"], "objective tag has its own format"),
        (["train", "{data}", "--preset", "tiny"], "for objective classify, and this model reads documents"),
        (["train", "{data}", "--preset", "encoder-tiny"], "hint: Train with --objective classify, or prepare the"),
        (["train", "{data}", "--preset", "tiny"], "hint: Prepare them with --objective next-token"),
        (
            ["data", "prepare", "{files}/masked", "--validation", "0.3"],
            "a fraction of texts and pairs is set by each run",
        ),
    ],
)
def test_invalid_combinations_are_refused(files, tmp_path, arguments, message):  # noqa: F811
    run = run_file("classify", tmp_path)
    assert kvad("data", "prepare", run, files / "classify", "--out", tmp_path / "data")[0] == 0
    names = {"run": run, "data": tmp_path / "data", "files": files}
    code, _, err = kvad(*(a.format(**names) for a in arguments), "--out", tmp_path / "out")
    assert code == 2 and message.format(**names) in err and "Traceback" not in err, err


def test_damaged_column_is_named(files, tmp_path):  # noqa: F811
    run = run_file("tag", tmp_path)
    assert kvad("data", "prepare", run, files / "tag", "--out", tmp_path / "data")[0] == 0
    labels = tmp_path / "data/labels.bin"
    content = bytearray(labels.read_bytes())
    content[4] ^= 1
    labels.write_bytes(content)
    code, out, _ = kvad("data", "check", run, tmp_path / "data")
    assert code == 1 and out.startswith("damaged: ") and "labels.bin" in out
    labels.write_bytes(content[:-1])
    code, _, err = kvad("train", run, tmp_path / "data", "--out", tmp_path / "run")
    assert code == 2 and "labels.bin has" in err


def test_a_prepared_conversation_keeps_its_template(files, tmp_path):  # noqa: F811
    run = run_file("chat", tmp_path)
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    run.write_text(
        run.read_text().replace('kind = "chat"', f'kind = "chat"\nchat_template = "{tmp_path / "own.jinja"}"')
    )
    assert kvad("data", "prepare", run, files / "chat", "--out", tmp_path / "data")[0] == 0
    assert kvad("train", run, tmp_path / "data", "--out", tmp_path / "run")[0] == 0
    (step,) = (tmp_path / "run/checkpoints").iterdir()
    assert (step / "chat_template.jinja").read_text() == (tmp_path / "own.jinja").read_text()
    by_it = ["--objective", "chat", "--tokenizer", tmp_path / "data", "--out", tmp_path / "more"]
    code, _, err = kvad("data", "prepare", files / "chat", *by_it)
    assert code == 0, err
    (template,) = (tmp_path / "more/template").iterdir()
    assert template.read_text() == (tmp_path / "own.jinja").read_text()


# ---------------------------------------------------------------- progress


@pytest.fixture
def in_batches(monkeypatch):
    """Batches of a few texts; each takes four seconds."""
    seconds = count(0, 4)
    monkeypatch.setattr(examples, "ENCODE_BATCH", 5)
    monkeypatch.setattr(token_store, "BATCH_CHARS", 100)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))


PROGRESS_CASES = [
    *(("prepare", kind) for kind in ("next-token", "seq2seq", *EXAMPLE_KINDS)),
    ("train", "next-token"),
    ("train", "tag"),
]


@pytest.mark.parametrize(("command", "kind"), PROGRESS_CASES)
def test_encoding_reports_progress(command, kind, files, tmp_path, in_batches):  # noqa: F811
    """One line every ten seconds, here at every third batch."""
    run = run_file(kind, tmp_path, **({"document_unit": "lines"} if kind == "next-token" else {}))
    words = ["train"] if command == "train" else ["data", "prepare"]
    code, _, err = kvad(*words, run, files / kind, "--out", tmp_path / "out")
    assert code == 0, err
    found = re.findall(r"^0\.0 M characters, ([\d,]+) tokens, ([\d,]+) a second$", err, re.MULTILINE)
    lines = [tuple(int(number.replace(",", "")) for number in line) for line in found]
    assert len(lines) >= 3, err
    assert [speed for _, speed in lines] == [round(tokens / (12 * n)) for n, (tokens, _) in enumerate(lines, 1)]
    tokens = [tokens for tokens, _ in lines]
    folder = tmp_path / "out" / ("data" if command == "train" else "")
    whole = json.loads((folder / "manifest.json").read_text())["tokens"]
    assert tokens == sorted(set(tokens)) and whole / 2 < tokens[-1] <= whole


@pytest.mark.parametrize("kind", ["tag", "classify", "chat"])
def test_last_progress_report_counts_all_examples(kind, files, tmp_path, in_batches, monkeypatch):  # noqa: F811
    """A terminal shows one live line."""
    shown, updates = io.StringIO(), []
    monkeypatch.setattr("kvad.cli.commands.data.console", lambda: Console(file=shown, force_terminal=True, width=120))
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: updates.append(text))
    code, _, err = kvad("data", "prepare", run_file(kind, tmp_path), files / kind, "--out", tmp_path / "out")
    assert code == 0 and "a second" not in err, err
    assert len(updates) in (12, 13) and "reading" in shown.getvalue(), "60 texts, or 61, five at a time"
    whole = json.loads((tmp_path / "out/manifest.json").read_text())["tokens"]
    assert f" {whole:,} tokens, " in updates[-1]


# ---------------------------------------------------------------- check


@pytest.mark.parametrize("kind", EXAMPLE_KINDS)
def test_check_finds_no_leak_in_a_real_batch(kind, files, tmp_path):  # noqa: F811
    run = run_file(kind, tmp_path)
    code, out, err = kvad("data", "check", run, files / kind, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["ok"] and found["gradient"] <= 1e-12 and found["documents"] > found["rows"]
    assert found["perturbed"] and all(each["leak"] == 0 and each["own_change"] > 1e-9 for each in found["perturbed"])
    sides = {each["side"] for each in found["perturbed"]}
    assert sides == ({"source", "target"} if kind == "span-corruption" else {"tokens"})
    code, out, _ = kvad("data", "check", run, files / kind)
    assert code == 0 and out.rstrip().endswith("ok") and "tokens: " in out


@pytest.mark.parametrize("kind", ["masked-lm", "chat", "tag"])
def test_check_reports_a_broken_mask(kind, files, tmp_path, monkeypatch):  # noqa: F811
    real = AttentionPattern.visible
    monkeypatch.setattr(AttentionPattern, "visible", lambda self, q, k: real(self, q._replace(document_id=None), k))
    code, out, err = kvad("data", "check", run_file(kind, tmp_path), files / kind)
    assert code == 1 and "LEAK" in out and "packed gradients differ" in out, err


def test_masked_tokens_without_isolation_are_not_checked(files, tmp_path):  # noqa: F811
    run = run_file("masked-lm", tmp_path, isolate_documents=False)
    code, _, err = kvad("data", "check", run, files / "masked-lm")
    assert code == 2 and "data.isolate_documents is off" in err


def test_check_of_a_run_file_with_init_uses_that_model(files, tmp_path):  # noqa: F811
    """A new head on a trained body, and a run's folder."""
    run = run_file("masked-lm", tmp_path)
    assert kvad("train", run, files / "masked-lm", "--out", tmp_path / "base")[0] == 0
    (tmp_path / "tags.toml").write_text(
        f'[model]\ninit = "{tmp_path / "base"}"\n[data]\nseq_len = 128\n[objective]\nkind = "tag"\n'
        '[train]\nsteps = 1\nbatch_size = 2\nprecision = "fp32"\n'
    )
    code, out, err = kvad("data", "check", tmp_path / "tags.toml", files / "tag", "--json")
    assert code == 0 and json.loads(out)["ok"] and json.loads(out)["perturbed"], err
    code, _, err = kvad("data", "prepare", tmp_path / "tags.toml", files / "tag", "--out", tmp_path / "made")
    assert code == 0 and "tokenizer: training" not in err, "the model's own"
    assert kvad("train", tmp_path / "tags.toml", tmp_path / "made", "--out", tmp_path / "tags")[0] == 0
    code, out, err = kvad("data", "check", tmp_path / "tags")
    assert code == 0 and out.rstrip().endswith("ok"), err


def test_pairs_are_prepared_for_the_model_that_reads_them(files, tmp_path):  # noqa: F811
    """Pairs framed for a pretrained model are refused by a new one, and the reverse."""
    options = {"preset": "marian-tiny", "seq-len": 64, "steps": 1, "batch-size": 2, "precision": "fp32"}
    small = [part for name, value in options.items() for part in (f"--{name}", value)]
    code, _, err = kvad("train", files / "seq2seq", *small, "--vocab-size", 300, "--out", tmp_path / "base")
    assert code == 0, err
    (step,) = (tmp_path / "base/checkpoints").iterdir()
    content = json.loads((step / "generation_config.json").read_text())
    content["decoder_start_token_id"] = content["pad_token_id"]  # as Marian's own models begin
    (step / "generation_config.json").write_text(json.dumps(content))
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"]["generation_config.json"] = file_digest(step / "generation_config.json")
    (step / "manifest.json").write_text(json.dumps(manifest))
    on = tmp_path / "on.toml"
    on.write_text(
        f'[model]\ninit = "{step}"\n[data]\nseq_len = 64\n[train]\nsteps = 1\nbatch_size = 2\nprecision = "fp32"\n'
    )
    for name, first in (("own", [on]), ("new", ["--tokenizer", step, "--format", "pairs"])):
        where = [*first[:1], files / "seq2seq", *first[1:]] if name == "own" else [files / "seq2seq", *first]
        code, _, err = kvad("data", "prepare", *where, "--out", tmp_path / name)
        assert code == 0, err
    assert kvad("train", on, tmp_path / "own", "--out", tmp_path / "a")[0] == 0
    assert kvad("train", tmp_path / "new", *small, "--out", tmp_path / "b")[0] == 0
    code, _, err = kvad("train", on, tmp_path / "new", "--out", tmp_path / "c")
    assert code == 2 and "frames its pairs with other tokens than this model" in err
    code, _, err = kvad("train", tmp_path / "own", *small, "--out", tmp_path / "c")
    assert code == 2 and "frames its pairs with other tokens than this model" in err


def test_a_run_folder_may_name_the_tokenizer(files, tmp_path):  # noqa: F811
    run = run_file("masked-lm", tmp_path)
    assert kvad("train", run, files / "masked-lm", "--out", tmp_path / "base")[0] == 0
    other = ["--objective", "masked-lm", "--tokenizer", tmp_path / "base", "--out", tmp_path / "data"]
    code, _, err = kvad("data", "prepare", files / "masked-lm", *other)
    assert code == 0, err
    made = json.loads((tmp_path / "data/manifest.json").read_text())["tokenizer"]
    (step,) = (tmp_path / "base/checkpoints").iterdir()
    assert load_tokenizer(step).fingerprint() == made
