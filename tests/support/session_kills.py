"""Children that go on with a session and save it, over and over, until they are killed at an operation of the disk.

Run in a process of its own (``mortal.py``).  After each death a living child looks: the file is there as soon as one
save was acknowledged, it is whole, it is not older than the last acknowledgement, it goes on as the text would have
without any stop, and nothing else is in the folder.
"""

from pathlib import Path

from kvad.cache.sessions.directory import remove_session_leftovers
from kvad.storage.filesystem import FileSystem
from tests.support.crash_process import live
from tests.support.engine_sessions import PROMPT, engine, left, load, run, save
from tests.support.random_models import model_config

CONFIG = model_config("rope", heads="mqa", layers=1)
OPERATIONS = ("create", "open", "write", "read", "size", "sync", "close", "replace", "sync_dir", "remove")
START, TURNS, PER_TURN = PROMPT[:5], 3, 2


class MortalDisk(FileSystem):
    """Each operation is one on which this process may die: before it, or, of a write, in its middle."""

    def __init__(self, death):
        self._death = death

    def write(self, file, data):
        half = memoryview(data).cast("B")[: len(data) // 2] if len(data) else b""
        FileSystem.write(self, file, half)
        self._death.tick()
        FileSystem.write(self, file, memoryview(data).cast("B")[len(half) :] if len(data) else b"")


def _mortal(name):
    def operation(self, *args):
        self._death.tick()
        return getattr(FileSystem, name)(self, *args)

    return operation


for _name in OPERATIONS:
    if _name != "write":
        setattr(MortalDisk, _name, _mortal(_name))


def go_on(folder, death):
    """Load what there is, go on, save, say so."""
    path, disk = folder / "trip.session", MortalDisk(death)
    remove_session_leftovers(folder)
    made = engine(CONFIG, max_seq_len=2000)
    history, state = START, None
    if path.exists():
        found = load(made, path, fs=disk)
        history, state = list(found.history), found.state
    for _ in range(TURNS):
        said, state = left(made, history, PER_TURN, resume=state)
        history = [*history, *said]
        save(made, state, path, history, fs=disk)
        with open(folder.parent / "acknowledged", "a") as file:
            file.write(f"{len(history)}\n")


def look(folder):
    path, acknowledged = folder / "trip.session", folder.parent / "acknowledged"
    known = [int(line) for line in acknowledged.read_text().split()] if acknowledged.exists() else []
    remove_session_leftovers(folder)
    names = [each.name for each in folder.iterdir()]
    assert names in ([path.name], []) and (not known or names), names
    if not names:
        return
    made = engine(CONFIG, max_seq_len=2000)
    found = load(made, path)
    history = list(found.history)
    assert not known or len(history) >= known[-1], (len(history), known[-1])
    _, right, _ = run(engine(CONFIG, max_seq_len=2000, dirty=False), START, len(history) - len(START) + 2)
    request, then, _ = run(made, history, 2, resume=found.state)
    assert history + then == START + right, "a wrong token"
    assert made.metrics(request).num_cached_tokens == found.state.length
    if len(history) > 60:  # begin anew: the model's limit is not far
        path.unlink()
        acknowledged.unlink(missing_ok=True)


def main(where, first, last):
    folder = Path(where) / "sessions"
    folder.mkdir()
    killed, at = 0, first
    while killed < last - first + 1:
        if live(lambda death: go_on(folder, death), at):
            at = 1  # it lived longer than it has operations
        else:
            killed, at = killed + 1, at + 1
        assert live(lambda death: look(folder), 0)
    print(f"{killed} killed")
