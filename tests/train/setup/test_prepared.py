"""``kvad data prepare`` and ``check``: prepared data is used or refused; leaks are reported."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from kvad.cli.main import main
from kvad.errors import ConfigError, DataError, UsageError
from kvad.model_input import AttentionPattern
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.config.toml import dumps
from kvad.train.data import token_store
from kvad.train.data.token_store import is_prepared
from kvad.train.loop import run as job
from kvad.train.setup.prepared import PreparedData
from kvad.train.setup.run_data import RunData
from kvad.train.sources.pairs import PairPaths
from tests.support.training_runs import hashes, tiny_shape
from tests.train.conftest import Listener
from tests.train.test_cli import QUICK, kvad


@pytest.fixture
def run(tmp_path):
    """``run(seq_len=16)``: a run file; keywords are keys of [data]."""

    def make(name="run.toml", tokenizer="byte", **data):
        content = {
            "model": {"preset": "tiny", "set": tiny_shape(layers=1, mlp=32)},
            "data": {"seq_len": 16, **data},
            "tokenizer": {"kind": tokenizer},
            "train": {"steps": 3, "batch_size": 2, "precision": "fp32", "eval_tokens": 100},
        }
        if tokenizer is None:
            del content["tokenizer"]
        (tmp_path / name).write_text(dumps(content))
        return tmp_path / name

    return make


@pytest.fixture
def prepared(tmp_path, corpus):
    code, out, err = kvad("data", "prepare", corpus, "--tokenizer", "byte", "--out", tmp_path / "data")
    assert code == 0 and "12 documents, 1 shard, vocabulary 257" in out, err
    return tmp_path / "data"


def test_manifest_of_a_prepared_folder(prepared, corpus):
    manifest = json.loads((prepared / "manifest.json").read_text())
    texts = [path.read_bytes() for path in sorted(corpus.iterdir())]
    assert manifest["documents"] == 12 and manifest["tokens"] == sum(len(text) + 1 for text in texts)
    assert manifest["largest"] == 256 and manifest["vocab"] == 257 and manifest["kind"] == "documents"
    assert manifest["tokenizer"] == train_tokenizer("byte", []).fingerprint()
    found = PreparedData(prepared)
    assert found.store.take(np.arange(1, 6)).tolist() == list(texts[0][:5]) and is_prepared(prepared)
    assert not is_prepared(corpus)


def test_runs_on_texts_on_prepared_data_and_on_a_stream(prepared, corpus, run, tmp_path):
    """The same weights from texts and from prepared data; a stream resumes to the same weights from any save."""
    for name, where in (("texts", corpus), ("tokens", prepared)):
        assert kvad("train", run(), where, "--out", tmp_path / name)[0] == 0
    assert hashes(tmp_path / "texts") == hashes(tmp_path / "tokens")
    assert not (tmp_path / "tokens" / "data").exists() and (tmp_path / "texts" / "data").exists()
    assert kvad("train", "--resume", "--out", tmp_path / "tokens")[0] == 0
    settings = {"order": "stream", "shuffle_buffer": 2, "validation_fraction": 0.3, "document_unit": "lines"}
    stream = run("stream.toml", **settings)
    steps = ["--steps", 6, "--save-interval", 2, "--batch-size", 16]
    assert kvad("train", stream, corpus, "--out", tmp_path / "through", *steps)[0] == 0
    config, _ = job.read_run_config(tmp_path / "through")

    class Stop(Listener):
        def on_save(self, path, step):
            if step == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.train_model(config, [corpus], tmp_path / "killed", callbacks=[Stop()])
    state = json.loads((tmp_path / "killed/checkpoints/step-00000004/training/state.json").read_text())
    assert len(state["stream_position"][0]) == 4 and state["stream_position"][0][0] > 0
    assert not (tmp_path / "killed" / "data").exists()
    job.resume_model(tmp_path / "killed")
    assert hashes(tmp_path / "killed") == hashes(tmp_path / "through")


def test_a_mixture_is_trained_on_by_its_run_file(prepared, corpus, run, tmp_path):
    sources = [{"paths": [str(prepared)], "weight": 3}, {"paths": [str(corpus / "03.txt")]}]
    path = run(tokenizer=None, sources=sources)
    code, _, err = kvad("train", path, "--out", tmp_path / "mixed")
    assert code == 0 and "prepared: " in err and "corpus: 1 file" in err, err
    assert kvad("train", "--resume", "--out", tmp_path / "mixed")[0] == 0
    code, _, err = kvad("train", path, corpus, "--out", tmp_path / "other")
    assert code == 2 and "data.sources: already names the texts" in err


def run_data(prepared, **tables):
    return RunData(RunConfig.from_dict(tables), [prepared], lambda _: None)


def test_mismatched_prepared_data_is_refused(prepared, tmp_path):
    char = train_tokenizer("char", ["abc"])
    char.save(tmp_path / "char")
    with pytest.raises(DataError, match=r"char is not the tokenizer that made the tokens of .*data"):
        run_data(prepared, tokenizer={"path": str(tmp_path / "char")}).make_tokenizer()
    with pytest.raises(ConfigError, match=r"\[tokenizer\]: the tokens of .*data were made by byte"):
        run_data(prepared, tokenizer={"kind": "char"}).make_tokenizer()
    with pytest.raises(ConfigError, match=r"with the run file: kvad data prepare RUN.toml TEXTS --out DIR"):
        run_data(prepared, tokenizer={"kind": "bpe", "vocab_size": 300}).make_tokenizer()
    assert run_data(prepared, tokenizer={"kind": "byte"}).make_tokenizer().kind == "byte"
    with pytest.raises(ConfigError, match=r"'stream' reads texts, but .* is prepared"):
        run_data(prepared, data={"order": "stream"})
    with pytest.raises(DataError, match=r"the run's tokenizer is not the tokenizer that made the tokens"):
        run_data(prepared).open(tmp_path / "x", char)
    char.save(prepared / "tokenizer")
    with pytest.raises(DataError, match=r"tokenizer.json differs from its manifest: another sha256 .*Prepare it again"):
        PreparedData(prepared)


def test_two_folders_share_the_first_ones_tokenizer(corpus, tmp_path, run):
    """The hint's command works."""
    path = run(tokenizer=None)
    for name, size in (("a", 300), ("b", 280)):
        code, _, err = kvad("data", "prepare", corpus, "--vocab-size", size, "--out", tmp_path / name)
        assert code == 0, err
    code, _, err = kvad("train", path, tmp_path / "a", tmp_path / "b", "--out", tmp_path / "run")
    hint = f"kvad data prepare TEXTS --tokenizer {tmp_path / 'a'} --out DIR"
    assert code == 2 and err.rstrip().endswith(f"Prepare it again with that one: {hint}"), err
    words = hint.replace("TEXTS", str(corpus)).replace("DIR", str(tmp_path / "c")).split()[1:]
    assert kvad(*words)[0] == 0
    code, _, err = kvad("train", path, tmp_path / "a", tmp_path / "c", "--out", tmp_path / "run")
    assert code == 0, err
    own = ["--tokenizer", tmp_path / "a" / "tokenizer", "--out", tmp_path / "d"]
    assert kvad("data", "prepare", corpus, *own)[0] == 0
    made = [json.loads((tmp_path / name / "manifest.json").read_text())["tokenizer"] for name in "acd"]
    assert len(set(made)) == 1


def test_tokens_beyond_the_vocabulary_and_damaged_files_are_refused(prepared, run, tmp_path, corpus):
    path, shard = prepared / "manifest.json", prepared / "tokens-00000.bin"
    manifest, tokens = json.loads(path.read_text()), bytearray(shard.read_bytes())
    tokens[1::2] = b"\x02" * (len(tokens) // 2)  # every id is 512 more
    first = "the first is token 1 of document 1, at byte 0 of "

    def refused(message, content=manifest, data=None):
        path.write_text(json.dumps({**content, "checksum": token_store._checksum(content)}))
        if data is not None:
            shard.write_bytes(data)
        code, _, err = kvad("train", run(), prepared, "--out", tmp_path / "run")
        assert code == 2 and message in err, err

    refused("holds token id 300, outside the vocabulary of 257", manifest | {"largest": 300})
    refused(f"outside the vocabulary of 257: {first}", data=tokens)
    refused(f"{first}tokens-00000.bin\n", manifest | {"largest": 300})
    path.write_text(json.dumps(manifest))
    code, out, _ = kvad("data", "check", run(), prepared)
    assert code == 1 and out.startswith("damaged: "), out
    refused("tokens-00000.bin has", data=tokens[:-2])
    refused("its manifest is damaged", {"prepared": manifest["prepared"]})


def resealed(folder, **changes):
    """Write changed keys of a manifest, with its checksum."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    manifest["checksum"] = token_store._checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"a": 1}', None])
def test_a_folder_of_tokens_is_never_read_as_text(prepared, run, tmp_path, content):
    """A damaged or missing manifest is an error, also of a folder with text files; the hint's command works."""
    (prepared / "notes.txt").write_text("some text " * 50)
    (prepared / "manifest.json").unlink()
    if content is not None:
        (prepared / "manifest.json").write_bytes(content)
    for command in ("train", "data prepare"):
        code, _, err = kvad(
            *command.split(), *([run()] if command == "train" else []), prepared, "--out", tmp_path / "x"
        )
        assert code == 2 and "cannot be used: " in err and not (tmp_path / "x").exists(), err
    if content != b'{"a": 1}':
        with pytest.raises(
            DataError, match=r"manifest.json is missing or damaged .*kvad data prepare TEXTS --overwrite"
        ):
            PreparedData(prepared)
        text = tmp_path / "text.txt"
        text.write_text("some text " * 50)
        code, _, err = kvad("data", "prepare", text, "--tokenizer", "byte", "--overwrite", "--out", prepared)
        assert code == 0 and PreparedData(prepared).manifest["documents"] == 1, err


def test_one_changed_value_of_the_manifest_is_noticed(prepared):
    """The manifest has a checksum of its content, not of its spelling."""
    path = prepared / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest, indent=4, sort_keys=True))
    PreparedData(prepared)
    for key in ("held", "tokens", "documents", "fingerprint", "kind", "cuts"):
        path.write_text(json.dumps(manifest | {key: [3] if key == "cuts" else manifest[key] * 2 or 1}))
        with pytest.raises(DataError, match=r"manifest.json is missing or damaged"):
            PreparedData(prepared)


@pytest.mark.parametrize("change", [(1, 10**6), (0, 1), (-1, 5)])
def test_offsets_must_ascend_to_the_number_of_tokens(prepared, change):
    """Also if the hashes are those of these offsets."""
    path = prepared / "offsets.bin"
    offsets = np.fromfile(path, "<u8")
    offsets[change[0]] = offsets[change[0]] + change[1] if change[0] else 1
    offsets.tofile(path)
    resealed(prepared, offsets=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=r"offsets.bin: must ascend from 0 to the [\d,]+ tokens"):
        PreparedData(prepared)


def test_changed_tokens_are_refused_before_the_first_step(prepared, run, tmp_path):
    """Tokens inside the vocabulary, an offset and the tokenizer are compared with their hashes."""
    for name in ("tokens-00000.bin", "offsets.bin", "tokenizer/tokenizer.json"):
        path = prepared / name
        content = path.read_bytes()
        path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
        code, _, err = kvad("train", run(), prepared, "--out", tmp_path / "run")
        assert code == 2 and name in err and not (tmp_path / "run").exists(), err
        path.write_bytes(content)
    assert kvad("train", run(), prepared, "--out", tmp_path / "run")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{corpus}", "--out", "{corpus}"], "is not empty (Choose another --out.)"),
        (["{corpus}", "--out", "{data}"], "is not empty (Replace it with --overwrite.)"),
        (["{data}", "--out", "{data}2"], "only texts can be prepared"),
        (["{corpus}", "--out", "{data}2", "--format", "jsnl"], "'jsnl' is not one of"),
        (["{corpus}", "--format", "pairs", "--out", "{data}2"], "is a folder, and pairs come from files"),
        (["nowhere", "--out", "{data}2"], "no such file or folder: nowhere (looked for /"),
        (["{corpus}", "--out", "{corpus}/00.txt"], "00.txt is a file, and prepared data is a folder"),
    ],
)
def test_unpreparable_input_is_refused(prepared, corpus, arguments, message):
    code, _, err = kvad("data", "prepare", *(a.format(corpus=corpus, data=prepared) for a in arguments))
    text = err.replace("\nkvad: hint: ", " (").rstrip() + ")"
    assert code == 2 and message in text and "Traceback" not in err, err
    assert kvad("data", "prepare", corpus, "--tokenizer", "byte", "--out", prepared, "--overwrite")[0] == 0


def test_output_inside_the_corpus_is_refused(corpus, tmp_path):
    """A later run would read its JSON as text."""
    texts = shutil.copytree(corpus, tmp_path / "texts")
    byte = ["--tokenizer", "byte"]
    code, _, err = kvad("data", "prepare", texts, *byte, "--out", texts / "prep")
    assert code == 2 and "is inside the corpus" in err and not (texts / "prep").exists(), err
    code, out, err = kvad("data", "prepare", texts, "--suffix", ".txt", *byte, "--out", texts / "prep")
    assert code == 0 and "in 12 documents" in out, err
    code, out, err = kvad("data", "prepare", texts, "--suffix", ".txt", *byte, "--out", tmp_path / "again")
    assert code == 0 and "in 12 documents" in out, err


@pytest.mark.parametrize("there", [False, True])
def test_ctrl_c_reports_that_nothing_was_written(prepared, corpus, tmp_path, monkeypatch, there):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvad.train.data.token_store.write_store", interrupt)
    out = prepared if there else tmp_path / "new"
    before = hashlib.sha256((prepared / "tokens-00000.bin").read_bytes()).hexdigest()
    code, _, err = kvad("data", "prepare", corpus, "--tokenizer", "byte", "--out", out, "--overwrite")
    text = f"{out} is unchanged" if there else f"nothing was written to {out}"
    assert code == 130 and err.endswith(f"kvad: interrupted: {text}\n"), err
    assert hashlib.sha256((prepared / "tokens-00000.bin").read_bytes()).hexdigest() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_tsv_read_as_a_document_is_logged(tmp_path):
    """The objective decides, then the format, then the name."""
    table = tmp_path / "p.tsv"
    table.write_text("".join(f"{'ab'[n % 2]}\t{n} and {n + 1}\n" for n in range(9)))
    for number, (flags, kind, is_logged) in enumerate(
        [
            ([], "documents", True),
            (["--format", "text"], "documents", False),
            (["--format", "lines"], "documents", False),
            (["--format", "pairs"], "pairs", False),
            (["--objective", "seq2seq"], "pairs", False),
            (["--objective", "classify"], "classify", False),
        ]
    ):
        out = tmp_path / str(number)
        code, _, err = kvad("data", "prepare", table, *flags, "--vocab-size", 300, "--out", out)
        assert code == 0 and json.loads((out / "manifest.json").read_text())["kind"] == kind, err
        assert (f"{table} is read as a document; --objective seq2seq reads pairs, tag" in err) is is_logged, err


def test_pairs_are_for_an_encoder_decoder(prepared, tmp_path, corpus):
    with pytest.raises(DataError, match=r"holds documents, and this model reads pairs"):
        RunData(RunConfig(), PairPaths(((prepared,),)), lambda _: None)
    with pytest.raises(UsageError, match="only texts can be prepared"):
        run_data(prepared).single_corpus()


def test_one_token_beyond_the_vocabulary_is_found_before_the_first_step(prepared, run, tmp_path):
    """The error names document, shard and byte, although the manifest has another maximum."""
    shard, offsets = prepared / "tokens-00000.bin", np.fromfile(prepared / "offsets.bin", "<u8")
    whole = shard.read_bytes()
    for at, place in (
        (int(offsets[1]) - 1, f"token {offsets[1]} of document 1"),
        (int(offsets[7]) + 4, "token 5 of document 8"),
    ):
        tokens = np.frombuffer(whole, "<u2").copy()
        tokens[at] = 32767
        shard.write_bytes(tokens.tobytes())
        code, _, err = kvad("train", run(), prepared, "--out", tmp_path / "run")
        start = "holds token id 32,767, outside the vocabulary of 257: the first is"
        assert code == 2 and f"{start} {place}, at byte {2 * at:,} of tokens" in err, err
        assert not (tmp_path / "run").exists()


def test_error_names_the_side_of_a_pair(tmp_path):
    (tmp_path / "p.tsv").write_text("".join(f"{n} und {n + 1}\t{n} and {n + 1}\n" for n in range(9)))
    out = tmp_path / "data"
    assert kvad("data", "prepare", tmp_path / "p.tsv", "--format", "pairs", "--vocab-size", 300, "--out", out)[0] == 0
    tokens, offsets = np.fromfile(out / "tokens-00000.bin", "<u2"), np.fromfile(out / "offsets.bin", "<u8")
    tokens[int(offsets[5]) + 1] = 9999
    tokens.tofile(out / "tokens-00000.bin")
    with pytest.raises(DataError, match=r"the first is token 2 of the target of pair 3, at byte"):
        PreparedData(out).check_tokens()


# ---------------------------------------------------------------- check


@pytest.mark.parametrize(
    "data", [{}, {"packing": "first-fit", "reset_positions": False}, {"order": "sequential", "shuffle_buffer": 3}]
)
def test_check_finds_no_leak_in_a_real_batch(prepared, run, data):
    data = {"document_unit": "lines", "validation_fraction": 0.2, "seq_len": 400, **data}
    file = run(**data)
    code, out, err = kvad("data", "check", file, prepared, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["ok"] and found["gradient"] <= 1e-12 and found["documents"] > found["rows"]
    assert all(each["leak"] == 0 and each["own_change"] > 1e-6 for each in found["perturbed"]) and found["perturbed"]
    assert found["loss_packed"] == pytest.approx(found["loss_alone"], rel=1e-12)
    code, out, _ = kvad("data", "check", file, prepared)
    assert code == 0 and out.rstrip().endswith("ok") and "<|endofdoc|>" in out and "% filled" in out


def test_check_reports_a_broken_mask(prepared, run, monkeypatch):
    real = AttentionPattern.visible
    monkeypatch.setattr(AttentionPattern, "visible", lambda self, q, k: real(self, q._replace(document_id=None), k))
    file = run(seq_len=400)
    code, out, err = kvad("data", "check", file, prepared)
    assert code == 1 and "LEAK" in out and "changes another document's logits" in out, err
    assert "packed gradients differ from those of single documents" in out
    code, out, _ = kvad("data", "check", file, prepared, "--json")
    assert code == 1 and not json.loads(out)["ok"]


def test_check_with_positions_that_do_not_restart(prepared, run, monkeypatch):
    """Documents that are not isolated: only later logits may change."""
    file = run(seq_len=400, isolate_documents=False)
    code, out, _ = kvad("data", "check", file, prepared)
    assert code == 0 and "gradients   not compared" in out and "(data.isolate_documents is off)" in out
    real = AttentionPattern.visible

    def by_position(self, q, k):
        return real(self, q._replace(causal_order=None), k._replace(causal_order=None))

    monkeypatch.setattr(AttentionPattern, "visible", by_position)
    code, out, _ = kvad("data", "check", file, prepared)
    assert code == 1 and "changes another document's logits" in out, "positions alone do not order documents"


def test_check_of_a_run_uses_its_weights(tmp_path):
    (tmp_path / "p.tsv").write_text("".join(f"{n} und {n + 1}\t{n} and {n + 1}\n" for n in range(40)))
    small = ["--preset", "transformer-tiny", "--set", "hidden_size=32", *QUICK[8:]]
    code, _, err = kvad("train", tmp_path / "p.tsv", *small, "--seq-len", 48, "--steps", 2, "--out", tmp_path / "run")
    assert code == 0, err
    code, out, err = kvad("data", "check", tmp_path / "run", "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and {each["side"] for each in found["perturbed"]} == {"source", "target"}, err
    assert found["gradient"] <= 1e-12
    assert main(["data", "check", str(tmp_path / "run.toml")]) == 2


def test_a_damaged_shard_is_named(prepared, run, monkeypatch):
    """Damaged data is not checked further."""
    tokens = bytearray((prepared / "tokens-00000.bin").read_bytes())
    tokens[40] ^= 1
    (prepared / "tokens-00000.bin").write_bytes(tokens)
    monkeypatch.setattr("kvad.train.setup.data_check.check_packing", lambda *_: pytest.fail("checked"))
    code, out, _ = kvad("data", "check", run(), prepared)
    assert (code, out) == (1, f"damaged: {prepared / 'tokens-00000.bin'}: run kvad data prepare again\n")
    code, out, _ = kvad("data", "check", run(), prepared, "--json")
    assert code == 1 and json.loads(out) == {"ok": False, "problems": [f"{prepared / 'tokens-00000.bin'} is damaged"]}
