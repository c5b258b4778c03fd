"""LLM.session: turns, files, reuse of the cache, and errors."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from kvad.engine.session import Session
from kvad.errors import EngineError, RequestError, SaveError, StorageError, UsageError
from kvad.llm import LLM
from tests.support.cli_checkpoints import write_model
from tests.support.faulty_filesystems import FailingDisk

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CACHES = {
    "paged": {},
    "contiguous": {"layout": "contiguous"},
    "sinks": {"policy": "sinks(4, 20)"},
    "heavy-hitters": {"policy": "heavy-hitters(16, 8)"},
    "tiered": {"policy": "tiered(16, quantized=16, summaries=8, ratio=4, interval=16)"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(model):
    with LLM.load(model, max_num_seqs=2) as opened:
        yield opened


@pytest.mark.parametrize("name", CACHES)
def test_session_equals_one_long_prompt(model, tmp_path, name):
    turns, tokens = [], []
    for turn in ("hello there", ", and you", "?", ""):
        with LLM.load(model, max_num_seqs=2, **CACHES[name]) as opened:
            session = opened.session("trip", tmp_path)
            assert session.tokens == tokens
            done = session.generate(turn, **GREEDY)
            assert not session.missed
            whole = max(0, len(tokens) - 1)
            assert session.restored in (len(tokens), whole) and session.reused in (session.restored, whole)
            right = opened.generate([*tokens, *turn.encode()], **GREEDY)
            assert done.text == right.text
            tokens = session.tokens
            assert tokens[-len(right.tokens) :] == list(right.tokens) or len(right.text) < 6
            assert session.save() == (tmp_path / "trip.session").stat().st_size
        turns.append(done.text)
    assert len(turns) == 4


def test_turns_reuse_the_cache(llm):
    session = llm.session()
    session.generate("a text of more than a block or two, so", **GREEDY)
    assert session.reused == 0
    session.generate(" that", **GREEDY)
    assert session.reused >= 32
    assert session.tokens[:4] == list(b"a te")


def test_closed_stream_keeps_its_tokens(llm):
    session = llm.session()
    stream = session.stream("hello", **{**GREEDY, "max_tokens": 40})
    chunks = [next(stream).token_id for _ in range(3)]
    stream.close()
    assert session.tokens[:5] == list(b"hello") and len(session.tokens) <= 5 + len(chunks)
    right = llm.generate([*session.tokens, *b" you"], **GREEDY).text
    assert session.generate(" you", **GREEDY).text == right


def test_failed_turn_changes_nothing(llm, tmp_path):
    session = llm.session("trip", tmp_path)
    session.generate("hello", **GREEDY)
    before = list(session.tokens)
    for options in ({"n": 2}, {"num_beams": 2}, {"temperature": -1}):
        with pytest.raises(RequestError):
            session.generate("x", **options)
    with pytest.raises(RequestError, match="prompt: must have at most 96 tokens, got 211"):
        session.generate("x" * 200, **GREEDY)
    with pytest.raises(RequestError, match="encoder_input: this model has no encoder input"):
        session.generate("x", encoder_input="y", **GREEDY)
    assert session.tokens == before
    with pytest.raises(RequestError, match="the session is empty"):
        llm.session("other", tmp_path).save()
    with pytest.raises(RequestError, match="has no file"):
        llm.session().save()
    with pytest.raises(RequestError, match="has no file"):
        llm.session().load()


def test_prefill_only_leaves_one_token_to_compute(model, tmp_path):
    for fields in CACHES.values():
        with LLM.load(model, max_num_seqs=2, **fields) as opened:
            session = opened.session("read", tmp_path)
            session.append("a text that is read, and nothing more")
            session.save()
            count = len(session.tokens)
        with LLM.load(model, max_num_seqs=2, **fields) as opened:
            session = opened.session("read", tmp_path)
            assert (len(session.tokens), session.restored) == (count, count - 1)
            text = session.generate("", **GREEDY).text
            assert (session.reused, session.missed) == (count - 1, "")
            assert text == opened.generate("a text that is read, and nothing more", **GREEDY).text
        (tmp_path / "read.session").unlink()


def test_session_that_changed_meanwhile_is_not_overwritten(llm, tmp_path):
    llm.session("trip", tmp_path).generate("x", **GREEDY)
    first, second = llm.session("trip", tmp_path), llm.session("trip", tmp_path)
    first.generate("one", **GREEDY)
    second.generate("two", **GREEDY)
    first.save()
    path = tmp_path / "trip.session"
    for _ in range(2):
        before = path.read_bytes()
        with pytest.raises(StorageError, match=r"trip\.session: changed meanwhile by another session") as caught:
            second.save()  # in the first round, there was no file when it was opened
        assert caught.value.reason == "changed" and path.read_bytes() == before
        assert sorted(each.name for each in tmp_path.iterdir()) == ["trip.session"]
        second = llm.session("trip", tmp_path)
        second.generate("three", **GREEDY)
        first.generate("four", **GREEDY)
        first.save()
    second.save(tmp_path / "other.session")
    second.save(overwrite=True)
    assert llm.session("trip", tmp_path).tokens == second.tokens
    path.unlink()
    second.save()
    assert path.exists(), "a session that was removed meanwhile is written"


def test_seed_is_stored_in_the_session(model, tmp_path):
    sampled = {"temperature": 1.3, "max_tokens": 5, "ignore_eos": True}
    with LLM.load(model, max_num_seqs=2) as opened:
        session = opened.session("trip", tmp_path)
        session.generate("hello", seed=7, **sampled)
        session.save()
        right = opened.generate(session.tokens, seed=7, **sampled).text
        assert session.generate("", **sampled).text == right
    with LLM.load(model, max_num_seqs=2) as opened:
        session = opened.session("trip", tmp_path)
        assert session.seed == 7 and session.generate("", **sampled).text == right


def test_changed_text_draws_other_numbers_and_a_saved_session_continues_exactly(model, tmp_path):
    """The same question, three times: three replies. A saved session draws what the unsaved one draws."""
    sampled = {"temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    question = list(b"hello, you")

    def reply(session):
        return [chunk.token_id for chunk in session.continue_from(question, **sampled)]

    with LLM.load(model, max_num_seqs=2) as opened:
        session = opened.session("trip", tmp_path)
        session.seed = 3
        first, second = reply(session), reply(session)
        assert first == list(opened.generate(question, seed=3, **sampled).tokens) != second
        session.tokens = question[:4]  # the turn is taken back, then saved
        session.save()
        third = reply(session)
        more = session.generate(" so", **sampled)
    with LLM.load(model, max_num_seqs=2) as opened:
        session = opened.session("trip", tmp_path)
        assert reply(session) == third and third not in (first, second)
        assert session.generate(" so", **sampled).tokens == more.tokens and more.seed == 3


def test_unsaved_session_has_a_random_seed(llm):
    seeds = {llm.session().generate("hello", max_tokens=2).seed for _ in range(2)}
    session = llm.session()
    seeds |= {session.generate("hello", max_tokens=2).seed, session.generate(" x", max_tokens=2).seed}
    assert len(seeds) == 3 and None not in seeds


def test_session_of_another_model_names_the_difference(model, tmp_path):
    with LLM.load(model, max_num_seqs=2) as opened:
        session = opened.session("trip", tmp_path)
        session.generate("hello there", **GREEDY)
        session.save()
    with LLM.load(model, max_num_seqs=2, policy="window(20)") as other:
        with pytest.raises(StorageError, match=r"policy: window\(20\) here, full there"):
            other.session("trip", tmp_path)
        session = other.session()
        session.generate("hi", **GREEDY)
        before = list(session.tokens)
        with pytest.raises(StorageError):
            session.load(tmp_path / "trip.session")
        assert session.tokens == before and session.generate("", **GREEDY).text
    templated = write_model(tmp_path / "templated")
    (templated / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with LLM.load(templated, max_num_seqs=2) as other, pytest.raises(StorageError, match=r"cache: template \("):
        other.session("trip", tmp_path)


def test_session_of_a_closed_llm(model, tmp_path):
    with LLM.load(model, max_num_seqs=1) as opened:
        session = opened.session("trip", tmp_path)
        session.generate("hello", **GREEDY)
        session.save()
    for call in (session.load, session.generate, lambda: opened.session("trip", tmp_path)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_names_and_paths(llm, tmp_path, monkeypatch):
    for name in ("../x", "a/b", ".x", ""):
        with pytest.raises(UsageError, match="is not a valid name of a session"):
            llm.session(name, tmp_path)
    monkeypatch.setenv("KVAD_SESSION_DIR", str(tmp_path / "mine"))
    session = llm.session("trip")
    session.generate("hello", **GREEDY)
    session.save()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["trip.session"]
    assert llm.session(tmp_path / "mine" / "trip.session").tokens == session.tokens
    (tmp_path / "mine" / ".trip.session.999999999.01234567.tmp").write_bytes(b"x")
    llm.session("other")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["trip.session"]


def test_failing_disk(llm, tmp_path):
    def session_of(disk):
        session_files = Session(
            llm.client, llm.texts, llm._requests.resolve_sampling, path=tmp_path / "trip.session", fs=disk
        )
        session_files.generate("hello", **GREEDY)
        return session_files

    session_of(FailingDisk()).save()
    before = (tmp_path / "trip.session").read_bytes()
    session = session_of(FailingDisk(2, code=errno.ENOSPC))
    with pytest.raises(SaveError, match="No space left") as unsaved:
        session.save(overwrite=True)
    assert unsaved.value.__cause__.errno == errno.ENOSPC, "the exit code depends on it"
    assert (tmp_path / "trip.session").read_bytes() == before
    assert session.save(overwrite=True)  # the second save succeeds
    session = session_of(FailingDisk(1, which=("read",)))
    with pytest.raises(StorageError, match="Input/output error") as caught:
        session.load()
    assert caught.value.reason == "unread" and session.generate(" x", **GREEDY).text is not None


def test_commands_of_the_sessions_page(model, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "kv-cache" / "sessions.md").read_text("utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.setenv("KVAD_SESSION_DIR", str(tmp_path))
    assert code.count('"runs/demo"') == 2
    ran = subprocess.run(
        [sys.executable, "-c", code.replace('"runs/demo"', repr(str(model)))],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert (
        " tokens were not recomputed" in ran.stdout
        and "\n0 tokens" not in ran.stdout
        and (tmp_path / "notes.session").exists()
    )
