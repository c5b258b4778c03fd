"""Session files: damaged and foreign ones are rejected, and the next request is always right."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvad.cache.sessions import state as state_module
from kvad.cache.sessions.directory import inspect_session, list_sessions, remove_session_leftovers, session_path
from kvad.cache.sessions.state import load_session
from kvad.errors import StorageError, UsageError
from kvad.storage.container import FORMAT_VERSION, CacheFingerprint, write_container
from kvad.storage.filesystem import is_valid_name
from tests.support.engine_sessions import PROMPT, engine, identity_of, left, load, run, save, worst
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import build, model_config

ROOT = Path(__file__).parents[2]
CONFIG = model_config("rope", heads="mqa", layers=1)
SHORT = PROMPT[:5]


@pytest.fixture(scope="module")
def llm_engine():
    return engine(CONFIG)


@pytest.fixture(scope="module")
def expected(llm_engine):
    return run(engine(CONFIG, dirty=False), [*SHORT, 9, 8], 4)


@pytest.fixture
def path(llm_engine, tmp_path):
    path = tmp_path / "trip.session"
    save(llm_engine, left(llm_engine, SHORT, 2)[1], path)
    return path


def assert_unaffected(llm_engine, expected):
    _, tokens, scores = run(llm_engine, [*SHORT, 9, 8], 4)
    assert tokens == expected[1] and worst(scores, expected[2]) <= 1e-10
    assert not llm_engine.kv_cache.swapped


def test_every_flipped_byte_is_detected(llm_engine, expected, path):
    raw, other = path.read_bytes(), path.with_name("flipped.session")
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << at % 8
        other.write_bytes(changed)
        with pytest.raises(StorageError) as caught:
            load(llm_engine, other)
        assert caught.value.reason in ("damaged", "foreign")
        if at % 256 == 0:
            assert_unaffected(llm_engine, expected)
    assert_unaffected(llm_engine, expected)
    assert load(llm_engine, path).state.tokens == tuple(SHORT + run(llm_engine, SHORT, 2)[1][:1])


def test_truncated_and_extended_files_are_rejected(llm_engine, expected, path):
    raw, other = path.read_bytes(), path.with_name("cut.session")
    for size in [*range(0, len(raw), 64), len(raw) - 1]:
        other.write_bytes(raw[:size])
        with pytest.raises(StorageError):
            load(llm_engine, other)
    other.write_bytes(raw + b"\0")
    with pytest.raises(StorageError):
        load(llm_engine, other)
    assert_unaffected(llm_engine, expected)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_failing_write_keeps_the_previous_file(llm_engine, path, code):
    before, state = path.read_bytes(), left(llm_engine, SHORT, 4)[1]
    counted = FailingDisk()
    save(llm_engine, state, path.with_name("other.session"), fs=counted)
    assert counted.count > 6
    path.with_name("other.session").unlink()
    for k in range(counted.count):
        with pytest.raises(OSError) as caught:
            save(llm_engine, state, path, fs=FailingDisk(k, code=code))
        assert caught.value.errno == code
        full = load(llm_engine, path)
        assert path.read_bytes() == before or (k == counted.count - 1 and full.state.tokens == state.tokens)
    for k in range(counted.count):
        with pytest.raises(OSError):
            save(llm_engine, state, path, fs=FailingDisk(k, on=True))
        load(llm_engine, path)
    for left_over in path.parent.glob(".*"):  # a disk that fails for ever removes nothing either
        left_over.unlink()


def test_a_failing_read_leaves_the_session_unchanged(llm_engine, expected, path):
    counted = FailingDisk()
    load(llm_engine, path, fs=counted)
    for k in range(counted.count):
        with pytest.raises(OSError):
            load(llm_engine, path, fs=FailingDisk(k))
    assert_unaffected(llm_engine, expected)


def test_a_damaged_file_leaves_nothing_in_the_pool(llm_engine, path):
    """All or nothing: the last section is wrong, and no tensor of the cache has changed."""
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    before = [leaf.clone() for leaf in llm_engine.kv_cache.tensors()]
    with pytest.raises(StorageError):
        load(llm_engine, path)
    assert all(
        torch.equal(a, b) or (a.isnan() == b.isnan()).all()
        for a, b in zip(before, llm_engine.kv_cache.tensors(), strict=True)
    )


# ---------------------------------------------------------------- of another


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("policy", {"policy": "window(40)"}),
        ("keys", {"key_dtype": "int8"}),
        ("values", {"value_dtype": "float32"}),
        ("rotate", {"rope_at": "read"}),
        ("endless", {"policy": "window(40)", "endless": True}),
    ],
)
def test_a_session_of_another_cache_names_the_difference(path, part, fields):
    with pytest.raises(StorageError, match=rf"does not belong to this model and cache: .*{part}: ") as caught:
        load(engine(CONFIG, **fields), path)
    assert caught.value.reason == "mismatch"


def test_a_session_of_another_model_names_the_difference(llm_engine, path):
    other = engine(CONFIG)
    other.model.load_state_dict(build(CONFIG, seed=1).state_dict())
    with pytest.raises(StorageError, match=r"cache: model$|cache: model \("):
        load(other, path)
    with pytest.raises(StorageError, match="computed: float32 here, float64 there; model"):
        load(engine(CONFIG, dtype=torch.float32), path)
    for name in ("tokenizer", "template", "adapter", "summaries"):
        identity = identity_of(llm_engine)

        def changed(regime, salt, name=name, identity=identity):
            parts = {**identity(regime, salt).parts, name: "another"}
            return CacheFingerprint(**{key: value for key, value in parts.items() if key != "version"})

        with pytest.raises(StorageError, match=f"cache: {name}"):
            load_session(path, changed, llm_engine.kv_cache, llm_engine.state_keeper.engine_id)


def test_files_of_another_version_or_kind_are_rejected(llm_engine, path):
    identity = {**identity_of(llm_engine)("", "").parts, "version": f"{int(FORMAT_VERSION) + 1}"}
    write_container(path, "session", identity, {"rope_regime": "", "cache_salt": ""}, [], durable=False)
    with pytest.raises(StorageError, match=f"version: {FORMAT_VERSION} here, {int(FORMAT_VERSION) + 1} there"):
        load(llm_engine, path)
    write_container(path, "block", {}, {}, [], durable=False)
    with pytest.raises(StorageError, match="a block, not a session"):
        load(llm_engine, path)
    write_container(
        path, "session", identity_of(llm_engine)("", "").parts, {"rope_regime": "", "cache_salt": ""}, [], durable=False
    )
    with pytest.raises(StorageError, match="not a session of this version"):
        load(llm_engine, path)


def test_channel_formats_need_an_equal_block_size(tmp_path):
    for policy, size in (("tiered(12, quantized=8, summaries=8, ratio=2, interval=8)", 2), ("quest(12)", 8)):
        llm_engine = engine(CONFIG, policy=policy)
        save(llm_engine, left(llm_engine, PROMPT, 3)[1], tmp_path / "a")
        with pytest.raises(StorageError, match=f"block size: {size} here, 4 there"):
            load(engine(CONFIG, policy=policy, block_size=size), tmp_path / "a")
    llm_engine = engine(CONFIG, policy="block-window(16)")
    save(llm_engine, left(llm_engine, PROMPT, 3)[1], tmp_path / "a")
    with pytest.raises(
        StorageError, match=r"policy: AttentionPattern\(.*window_step=8.* here, AttentionPattern\(.*window_step=4"
    ):
        load(engine(CONFIG, policy="block-window(16)", block_size=8), tmp_path / "a")


def test_a_session_longer_than_the_cache_is_rejected(path, llm_engine):
    save(llm_engine, left(llm_engine, PROMPT, 30)[1], path)
    with pytest.raises(StorageError, match="max_seq_len: 58 tokens there, no room for them here"):
        load(engine(CONFIG, max_seq_len=40), path)


def test_arrays_of_another_shape_are_rejected(llm_engine, path, monkeypatch):
    """A file whose header differs from its arrays."""
    state = left(llm_engine, SHORT, 2)[1]
    part = state.groups[0]
    short = part._replace(arrays={name: array[:-1] for name, array in part.arrays.items()})
    save(llm_engine, replace(state, groups=(short,)), path)
    with pytest.raises(StorageError, match="the arrays of group 0 do not match its held range"):
        load(llm_engine, path)
    monkeypatch.setattr(state_module, "_check", lambda *args: None)  # broken on purpose: now it gets through
    load(llm_engine, path)


# ---------------------------------------------------------------- names, folders


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "-x", "a" * 65, "a\0b", "a\nb", "ä", "a b", "a\\b", "~"],
)
def test_invalid_names_are_rejected(name, tmp_path):
    assert not is_valid_name(name)
    with pytest.raises(UsageError, match="is not a valid name of a session"):
        session_path(name, tmp_path)


def test_names_stay_in_their_folder(tmp_path):
    folder = tmp_path / "sessions"
    folder.mkdir()
    assert session_path("a.b-C_9", folder) == folder / "a.b-C_9.session"
    (tmp_path / "secret").write_text("x")
    (folder / "out.session").symlink_to(tmp_path / "secret")
    with pytest.raises(UsageError, match="link out of its folder"):
        session_path("out", folder)
    alias = tmp_path / "alias"
    alias.symlink_to(folder)
    assert session_path("fine", alias).parent == alias


def test_sessions_of_a_folder_are_listed(llm_engine, path):
    folder = path.parent
    raw = path.read_bytes()
    (folder / "torn.session").write_bytes(raw[:-20])
    (folder / "alien.session").write_bytes(b"{}")
    (folder / "flipped.session").write_bytes(raw[:-30] + bytes([raw[-30] ^ 1]) + raw[-29:])
    command = [sys.executable, "-c", "import os; print(os.getpid())"]
    dead = subprocess.run(command, capture_output=True, text=True, timeout=60)
    (folder / f".trip.session.{int(dead.stdout)}.01234567.tmp").write_bytes(raw[:50])
    (folder / f".trip.session.{os.getpid()}.01234567.tmp").write_bytes(raw[:50])
    states = {each.path.name: each.state for each in inspect_session(folder)}
    assert sorted(states.values()) == ["damaged", "damaged", "foreign", "leftover", "whole", "writing"]
    assert (states["trip.session"], states["flipped.session"], states["alien.session"]) == (
        "whole",
        "damaged",
        "foreign",
    )
    assert {each.path.stem: each.state for each in list_sessions(folder)}["flipped"] == "whole"  # its header is
    assert remove_session_leftovers(folder) == 1 and remove_session_leftovers(folder) == 0
    assert (
        len(list(folder.iterdir())) == 5
        and not list(list_sessions(folder / "nowhere"))
        and remove_session_leftovers(folder / "nowhere") == 0
    )


# ---------------------------------------------------------------- kill -9


def killed(folder, first, last):
    code = f"from tests.support import session_kills; session_kills.main({str(folder)!r}, {first}, {last})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=120 + 10 * (last - first),
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    said = killed(tmp_path, 1, 20)
    assert "20 killed" in said


@pytest.mark.long(minutes=20)
def test_five_hundred_kills(tmp_path):
    assert "500 killed" in killed(tmp_path, 1, 500)
