"""Child processes that continue and save a session until they are killed at a file operation.

Runs in a separate process (``crash_process.py``). After each kill another child checks that the file exists once a
save was acknowledged, is whole and no older than the last acknowledgement, continues like an uninterrupted text, and
is the only file in the folder.
"""

from pathlib import Path

from kvad.cache.sessions.directory import remove_session_leftovers
from kvad.storage.filesystem import FileSystem
from tests.support.crash_process import finishes
from tests.support.engine_sessions import PROMPT, engine, left, load, run, save
from tests.support.faulty_filesystems import WatchedFileSystem
from tests.support.random_models import model_config

CONFIG = model_config("rope", heads="short-conv", layers=2)  # a layer with a state, then attention
OPERATIONS = ("create", "open", "read", "size", "sync", "close", "replace", "sync_dir", "remove")
START, TURNS, PER_TURN = PROMPT[:5], 3, 2


class KillingDisk(WatchedFileSystem):
    """May kill this process before each operation, or in the middle of a write."""

    def __init__(self, killer):
        self._killer = killer

    def before(self, name, *args):
        if name in OPERATIONS:
            self._killer.tick()

    def write(self, file, data):
        content = memoryview(data).cast("B") if len(data) else b""
        FileSystem.write(self, file, content[: len(content) // 2])
        self._killer.tick()
        FileSystem.write(self, file, content[len(content) // 2 :])


def continue_session(folder, killer):
    """Load the session if any, continue it, save it, and acknowledge."""
    path, disk = folder / "trip.session", KillingDisk(killer)
    remove_session_leftovers(folder)
    running = engine(CONFIG, max_seq_len=2000)
    history, state = START, None
    if path.exists():
        loaded = load(running, path, fs=disk)
        history, state = list(loaded.history), loaded.state
    for _ in range(TURNS):
        new_tokens, state = left(running, history, PER_TURN, resume=state)
        history = [*history, *new_tokens]
        save(running, state, path, history, fs=disk)
        with open(folder.parent / "acknowledged", "a") as file:
            file.write(f"{len(history)}\n")


def check_session(folder):
    path, acknowledged = folder / "trip.session", folder.parent / "acknowledged"
    acknowledged_lengths = [int(line) for line in acknowledged.read_text().split()] if acknowledged.exists() else []
    remove_session_leftovers(folder)
    names = [each.name for each in folder.iterdir()]
    assert names in ([path.name], []) and (not acknowledged_lengths or names), names
    if not names:
        return
    running = engine(CONFIG, max_seq_len=2000)
    loaded = load(running, path)
    history = list(loaded.history)
    assert not acknowledged_lengths or len(history) >= acknowledged_lengths[-1], (
        len(history),
        acknowledged_lengths[-1],
    )
    _, expected, _ = run(engine(CONFIG, max_seq_len=2000, dirty=False), START, len(history) - len(START) + 2)
    request, next_tokens, _ = run(running, history, 2, resume=loaded.state)
    assert history + next_tokens == START + expected, "a wrong token"
    assert running.metrics(request).num_cached_tokens == loaded.state.length
    if len(history) > 60:  # start over before the model's limit
        path.unlink()
        acknowledged.unlink(missing_ok=True)


def main(where, first, last):
    folder = Path(where) / "sessions"
    folder.mkdir()
    killed, at = 0, first
    while killed < last - first + 1:
        if finishes(lambda killer: continue_session(folder, killer), at):
            at = 1  # the child finished before operation ``at``
        else:
            killed, at = killed + 1, at + 1
        assert finishes(lambda killer: check_session(folder), 0)
    print(f"{killed} killed")
