"""Commands in docs and run files: each corpus is created in the folder that a later command reads."""

import shlex
from pathlib import Path

from kvad.cli.commands.data import create_group

ROOT = Path(__file__).parents[2]


def commands():
    """Yield (file, words) of every line that is a command."""
    for path in (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "recipes").glob("*.toml"))):
        for line in path.read_text("utf-8").splitlines():
            text = line.removeprefix("#").strip().removesuffix("\\")
            if text.startswith("kvad "):
                yield path.name, shlex.split(text, comments=True)


def test_corpus_is_created_where_it_is_read():
    created, read = set(), dict[str, str]()
    for name, words in commands():
        if words[1:3] == ["data", "create"]:
            created.add(create_group.commands[words[3]].make_context(words[3], words[4:]).params["folder"])
        read |= {word: name for word in words if word.endswith(("/train", "/held-out"))}
    assert len(created) >= 3 and len(read) >= 2
    assert {word: name for word, name in read.items() if Path(word).parent not in created} == {}
