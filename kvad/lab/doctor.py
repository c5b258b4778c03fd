"""Look a checkpoint over, in kvad's layout or Hugging Face's: what is right, what is not, and what to do about it.

Each examination gives a finding or several; one that an earlier problem makes impossible is left out.  Every tensor is
read, a piece at a time in memory.  Nothing is changed, and no code of the folder runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvad.cache.weights import misfits, num_parameters
from kvad.checkpoint.folder import CONFIG, check_file, is_foreign, listed, locate
from kvad.checkpoint.generation import Generation
from kvad.checkpoint.hub import resolve
from kvad.checkpoint.imported import Imported
from kvad.checkpoint.native import Own
from kvad.checkpoint.opened import Opened
from kvad.checkpoint.shards import ShardedTensors, find_nonfinite, open_tensors
from kvad.config import ModelConfig
from kvad.errors import CheckpointError, KvadError, a, counted
from kvad.text.tokenizer import Tokenizer

__all__ = ["Finding", "examine"]

T = TypeVar("T")
MOST = 8  # findings of one kind that are told one by one
AGAIN = "copy or download it again"


class Finding(NamedTuple):
    """``check``: what was looked at; ``todo``: what to do, "" where all is well."""

    check: str
    ok: bool
    says: str
    todo: str = ""


def examine(where: str | Path) -> Iterator[Finding]:
    """Findings, as they are made.  Raises CheckpointError for what is no checkpoint at all."""
    folder = locate(resolve(where))
    yield from _manifest(folder)
    unread = set[str]()
    tensors = yield from _tried("headers", AGAIN, lambda: open_tensors(folder), _headers, unread)
    opened: Opened
    if is_foreign(folder):
        opened = Imported(folder)
        config = yield from _examine_foreign(opened, tensors)
    else:
        opened = Own(folder)
        config = yield from _examine_own(opened, tensors)
    yield from _finite(tensors)
    if config is not None:
        yield from (finding for finding in _words(config, opened) if finding.says not in unread)


def _manifest(folder: Path) -> Iterator[Finding]:
    """Nothing of a folder that kvad did not write."""
    try:
        files = listed(folder)
    except CheckpointError as error:
        yield Finding("manifest", False, error.message, error.hint or AGAIN)
        return
    if files is not None:
        yield Finding("manifest", True, f"it lists {counted(len(files), 'file')}")
        yield from _checksums(folder, files)


def _examine_own(opened: Own, tensors: ShardedTensors | None) -> Generator[Finding, None, ModelConfig | None]:
    config = yield from _tried("config", f"correct {CONFIG}", lambda: opened.config, _config)
    if config is not None and tensors is not None:
        problems = misfits(config, {name: tensors.shape(name) for name in tensors})
        yield from _told("tensors", problems, "the tensors are those of the config", AGAIN)
    return config


def _examine_foreign(opened: Imported, tensors: ShardedTensors | None) -> Generator[Finding, None, ModelConfig | None]:
    def read() -> ModelConfig:
        return opened.config if tensors is not None else opened.family.read(opened.fields)

    config = yield from _tried("config", f"correct {CONFIG}", read, lambda made: f"{opened.origin}, {_config(made)}")
    if config is not None and tensors is not None:
        yield from _tried(
            "tensors", AGAIN, lambda: sum(1 for _ in opened.weights()), lambda _: "the tensors are those of the config"
        )
    return config


def _tried(
    check: str, todo: str, make: Callable[[], T], says: Callable[[T], str], failed: set[str] | None = None
) -> Generator[Finding, None, T | None]:
    """What ``make`` makes, after a finding that says it; None after one that says why not, which ``failed`` keeps."""
    try:
        made = make()
    except KvadError as error:
        if failed is not None:
            failed.add(error.message)
        yield Finding(check, False, error.message, error.hint or todo)
        return None
    yield Finding(check, True, says(made))
    return made


def _told(check: str, problems: list[str], well: str, todo: str) -> Iterator[Finding]:
    """A finding for each problem, the first of them one by one."""
    if not problems:
        yield Finding(check, True, well)
    for problem in problems[:MOST]:
        yield Finding(check, False, problem, todo)
    if len(problems) > MOST:
        yield Finding(check, False, f"and {len(problems) - MOST:,} more like these", todo)


# ---------------------------------------------------------------- files and tensors


def _checksums(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    failed = False
    for name, entry in files.items():
        try:
            check_file(folder / name, entry, verify=True)
        except CheckpointError as error:
            failed = True
            text = (folder / name).exists() and not name.endswith(".safetensors")
            yield Finding("sha256", False, error.message, f"{error.hint or AGAIN}{', unless you edited it' * text}")
    if not failed:
        yield Finding("sha256", True, "every file is the one that was saved")


def _headers(tensors: ShardedTensors) -> str:
    files = {tensors.file_of(name) for name in tensors}
    dtypes = sorted({str(tensors.dtype(name)).removeprefix("torch.") for name in tensors})
    where = counted(len(files), "file")
    return f"{counted(len(tensors), 'tensor')} in {where}, {', '.join(dtypes)}, {counted(tensors.total_bytes, 'byte')}"


def _finite(tensors: ShardedTensors | None) -> Iterator[Finding]:
    if tensors is None:
        return
    broken = [f"{name}: {counted(count, 'element')} NaN or infinite" for name, count in find_nonfinite(tensors)]
    todo = f"{AGAIN}; if it was trained so, go back to an older checkpoint"
    yield from _told("finite", broken, "every weight is a finite number", todo)


# ---------------------------------------------------------------- config, tokenizer, generation


def _config(config: ModelConfig) -> str:
    return f"{a(config.kind)} of {num_parameters(config):,} parameters, at most {counted(config.limit, 'token')} a row"


def _words(config: ModelConfig, opened: Opened) -> Iterator[Finding]:
    """What the folder says of text: its tokenizer and how it generates."""
    todo = "put the model's own tokenizer files there"
    yield from _tried("tokenizer", todo, lambda: _fitting(config, opened.tokenizer), lambda says: says)
    generation = yield from _tried("generation", f"correct {CONFIG}", lambda: opened.generation, _generation)
    if generation is not None:
        outside = [
            f"{name} {token} is outside the vocabulary of {config.vocab:,}"
            for name, token in _ids(generation)
            if not 0 <= token < config.vocab
        ]
        if outside:
            yield from _told("generation", outside, "", "correct it in the file that says so")


def _fitting(config: ModelConfig, tokenizer: Tokenizer | None) -> str:
    """What there is to say of a tokenizer that fits.  Raises CheckpointError for one that does not."""
    if tokenizer is None:
        return "none: prompts can only be token ids"
    said = []
    vocab = config.vocab if config.source is None or config.source.vocab is None else config.source.vocab
    sides = [("", tokenizer, config.vocab)]
    if tokenizer.source is not None:
        sides.append((" of the source", tokenizer.source, vocab))
    for side, each, places in sides:
        if each.vocab_size > places:
            raise CheckpointError(
                f"the tokenizer{side} has {each.vocab_size:,} ids, the model places for {places:,}",
                "they do not belong together: put the model's own tokenizer files there",
            )
        said.append(f"{each.kind}{side}, {counted(each.vocab_size, 'id')} in {counted(places, 'place')}")
    return "; ".join(said)


def _generation(generation: Generation) -> str:
    stops = f"it ends with {', '.join(map(str, generation.stops))}" if generation.stops else "no token ends it"
    begins = f"a target begins with {generation.start}, " if generation.start is not None else ""
    return begins + stops


def _ids(generation: Generation) -> Iterator[tuple[str, int]]:
    singles = {"start": generation.start, "bos": generation.bos}
    singles |= {"forced_first": generation.forced_first, "forced_last": generation.forced_last}
    yield from ((name, token) for name, token in singles.items() if token is not None)
    yield from (("end", token) for token in generation.stops)
    yield from (("banned", token) for token in generation.banned)
