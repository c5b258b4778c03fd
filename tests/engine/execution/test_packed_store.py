"""Packed weights on disk: mapped by later processes, written again if anything differs, and never required."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import kvad
from kvad import checkpoint, ops
from kvad.checkpoint.native import save_checkpoint
from kvad.errors import CheckpointError
from kvad.ops.native import packed_store
from kvad.storage import REAL_FILE_SYSTEM
from kvad.storage.container import ContainerWriter, read_header
from tests.cli.test_convert import CONFIGS, write_hf_folder
from tests.support.faulty_filesystems import FailingDisk
from tests.support.random_models import build, model_config

pytestmark = pytest.mark.skipif(
    ops.native.load().library is None or not ops.native.library.SMAPS.is_file(),
    reason="no kernels, or the system does not say what is mapped",
)
PROMPT = [[5, 6, 7, 8]]
SMALL = (
    "import kvad, kvad.engine.engine; from kvad.ops.native import library, packed_store; "
    "packed_store.MIN_BYTES = kvad.engine.engine.MAX_PACKED_BYTES = 0"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packed weights, also for small models."""
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(tmp_path / "packed"))
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    monkeypatch.setattr("kvad.engine.engine.MAX_PACKED_BYTES", 0)  # joined weights are not in the file
    return tmp_path / "packed"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write_model(path: Path, seed: int = 0) -> Path:
    config = model_config()
    save_checkpoint(path, config, build(config, seed=seed, dtype=torch.float32).state_dict(), None)
    return path


def tokens(model: Path | kvad.LLM) -> list[int]:
    llm = model if isinstance(model, kvad.LLM) else kvad.LLM.load(model, max_num_seqs=1, max_seq_len=40)
    (result,) = llm.generate(PROMPT, max_tokens=16, temperature=0)
    assert llm.engine.runner.native_reason == ""
    return list(result.tokens)


def packed_files(folder: Path) -> list[Path]:
    """Return all files but records of what was verified."""
    return sorted(path for path in folder.glob("*") if path.suffix != ".verified")


def panels(llm: kvad.LLM) -> dict[int, torch.Tensor]:
    """Return the panels of the model by number, for comparison."""
    return {index: each.packed for index, each in enumerate(llm.model.packed_weights._panels.values())}


class Packings:
    """Counts the panels that are packed instead of mapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, original = 0, ops.native.library.Library.pack

        def counted(library: ops.native.Library, *arguments: object) -> None:
            self.count += 1
            original(library, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(ops.native.library.Library, "pack", counted)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> Packings:
    return Packings(monkeypatch)


def test_the_second_start_maps_what_the_first_one_wrote(
    folder: Path, model: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, "off")
    plain = tokens(model)
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(folder))
    assert packings.take() > 4 and not packed_files(folder)
    first = kvad.LLM.load(model, max_num_seqs=1, max_seq_len=40)
    assert tokens(first) == plain and packings.take() > 4
    (path,) = packed_files(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    second = kvad.LLM.load(model, max_num_seqs=1, max_seq_len=40)
    assert tokens(second) == plain and packings.take() == 0
    files = ops.native.FileMappings()
    for index, packed in panels(second).items():
        assert torch.equal(packed, panels(first)[index]) and packed.data_ptr() % 64 == 0
    assert any(files.contain(packed) for packed in panels(second).values())


def test_small_models_and_changed_weights_are_not_stored(
    folder: Path, model: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_store, "MIN_BYTES", 256 << 20)
    tokens(model)
    assert packings.take() and not packed_files(folder)
    monkeypatch.setattr(packed_store, "MIN_BYTES", 0)
    llm = kvad.LLM.load(model, max_num_seqs=1, max_seq_len=40)
    with torch.no_grad():
        llm.model.decoder.layers[0].mlp.down.weight.mul_(3)  # the mapped file has other numbers now
    changed = tokens(llm)
    stored = sum(header.nbytes for path in packed_files(folder) for header in [read_header(path)])
    assert packings.take() and stored < 8192
    assert tokens(model) != changed


@pytest.mark.parametrize("name", ["gpt2", "openai-gpt"])
def test_transposed_weights_of_a_file_are_packed_and_stay_mapped(
    folder: Path, tmp_path: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """These families store [in, out]; the weights in memory are views of the file, and columns of it."""
    monkeypatch.setitem(CONFIGS, name, CONFIGS["gpt2"])
    write_hf_folder(tmp_path / "hf", name, tokenizer=False)
    first = kvad.LLM.load(tmp_path / "hf", max_num_seqs=1, max_seq_len=40)
    ours, packed = tokens(first), packings.take()
    second = kvad.LLM.load(tmp_path / "hf", max_num_seqs=1, max_seq_len=40)
    assert packed == 9 and tokens(second) == ours and packings.take() == 0 and len(packed_files(folder)) == 1
    theirs = kvad.LLM.load(tmp_path / "hf", max_num_seqs=1, max_seq_len=40)
    monkeypatch.setattr(ops.native, "load", lambda: ops.native.library.LoadResult(None, "off"))
    (result,) = theirs.generate(PROMPT, max_tokens=16, temperature=0)
    assert list(result.tokens) == ours and theirs.engine.runner.native_reason == "off"
    files = ops.native.FileMappings()
    for layer in (layer for each in first.model.decoder.layers for layer in (each.attention.q, each.mlp.down)):
        assert layer.weight.stride(0) == 1 and files.contain(layer.weight)


def test_models_with_equal_files_share_the_packed_weights(folder: Path, model: Path, packings: Packings) -> None:
    tokens(model)
    assert packings.take()
    tokens(write_model(model.parent / "copy"))
    assert packings.take() == 0 and len(packed_files(folder)) == 1
    tokens(write_model(model.parent / "other", seed=1))
    assert packings.take() and len(packed_files(folder)) == 2


def test_files_without_a_manifest_are_identified_by_content_and_times(
    folder: Path, model: Path, packings: Packings
) -> None:
    assert "manifest.json" in os.listdir(model)
    path = model / "model.safetensors"
    content = packed_store.np.fromfile(path, packed_store.np.uint8)
    first = packed_store.WeightFile.create(path, content, None).fingerprint
    assert packed_store.WeightFile.create(path, content, None).fingerprint == first
    stat = path.stat()
    content[-1] ^= 1
    content.tofile(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the time of the change cannot be set back
    assert packed_store.WeightFile.create(path, content, None).fingerprint != first


# ---------------------------------------------------------------- damage


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


def rewrite(path: Path, **parts: str) -> None:
    """Write the file again with other parts of its fingerprint and valid checksums."""
    header, content = read_header(path), path.read_bytes()
    writer = ContainerWriter(path, 4096)
    for section in header.sections.values():
        writer.write(section.name, bytes(section.nbytes) if "zeros" in parts else
                     content[section.offset : section.offset + section.nbytes])  # fmt: skip
    writer.commit(header.kind, {**header.fingerprint, **parts})
    writer.close()


POISON = {
    "a bit of the panels": lambda path: flip(path, path.stat().st_size // 2),
    "a bit of the last panels": lambda path: flip(path, list(read_header(path).sections.values())[-1].offset + 200),
    "a bit of the padding": lambda path: flip(path, -200),
    "a bit of the header": lambda path: flip(path, 40),
    "the end": lambda path: flip(path, -1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "another file": lambda path: path.write_bytes(b"a text" * 1000),
    "other weights": lambda path: rewrite(path, sources="others", zeros=""),
    "another instruction set": lambda path: rewrite(path, variant="avx10", zeros=""),
    "another layout": lambda path: rewrite(path, layout="0 little", zeros=""),
}


@pytest.mark.parametrize("poison", POISON)
def test_a_poisoned_file_is_never_used_and_is_written_again(
    folder: Path, model: Path, packings: Packings, poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(model)
    (path,) = packed_files(folder)
    good = read_header(path)
    POISON[poison](path)
    packings.take()
    with caplog.at_level(logging.WARNING, "kvad"):
        assert tokens(model) == expected
    assert packings.take() and "It is written again." in caplog.text
    assert packed_files(folder) == [path] and read_header(path) == good
    assert tokens(model) == expected and packings.take() == 0


@pytest.mark.parametrize("part", ["panels", "weights"])
def test_checksums_are_compared_again_only_after_a_write(
    folder: Path, model: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(packed_store, "MIN_AGE_NS", 0)
    compared: list[object] = []
    if part == "panels":
        original = packed_store._are_intact
        monkeypatch.setattr(packed_store, "_are_intact", lambda *args: compared.append(0) or original(*args))
    else:
        check = checkpoint.folder._crc32
        monkeypatch.setattr(checkpoint.folder, "_crc32", lambda file: compared.append(0) or check(file))
    expected = tokens(model)
    compared.clear()
    counts, records = [], set[int]()
    for _ in range(3):
        assert tokens(model) == expected
        counts.append(len(compared))
        records.add(next(folder.glob("*.verified")).stat().st_ino)
    assert len(records) == 1, "what is recorded is recorded again"
    assert counts == [1, 1, 1] if part == "panels" else [0, 0, 0]
    packings.take()
    if part == "panels":
        (path,) = folder.glob("*.packed")
        flip(path, path.stat().st_size // 2)
        assert tokens(model) == expected and packings.take() and len(compared) > 1
    else:
        stat = (model / "model.safetensors").stat()
        flip(model / "model.safetensors", -100)
        os.utime(model / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(CheckpointError, match="differs from its manifest"):
            tokens(model)


@pytest.mark.parametrize("content", [b"", b"(1, 2)", None])
def test_a_wrong_record_is_no_record(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    monkeypatch.setattr(packed_store, "MIN_AGE_NS", 0)
    for _ in range(2):
        expected = tokens(model)
    records = list(folder.glob("*.verified"))
    assert len(records) == 2
    for record in records:
        record.unlink()
        if content is None:
            os.mkfifo(record)
        else:
            record.write_bytes(content)
    flip(next(folder.glob("*.packed")), -200)
    assert tokens(model) == expected


def test_nothing_is_recorded_right_after_a_write(folder: Path, model: Path) -> None:
    for _ in range(2):
        tokens(model)
    assert not list(folder.glob("*.verified"))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_something_else_in_its_place_is_left_alone(folder: Path, model: Path, packings: Packings, kind: str) -> None:
    expected = tokens(model)
    (path,) = packed_files(folder)
    path.rename(folder / "elsewhere")
    {"link": lambda: path.symlink_to("elsewhere"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    packings.take()
    assert tokens(model) == expected and packings.take()
    assert (folder / "elsewhere").is_file()


def test_a_file_without_some_panels_is_removed(folder: Path, model: Path, packings: Packings) -> None:
    expected = tokens(model)
    (path,) = packed_files(folder)
    header, content = read_header(path), path.read_bytes()
    writer = ContainerWriter(path, 4096)
    for section in list(header.sections.values())[1:]:
        writer.write(section.name, content[section.offset : section.offset + section.nbytes])
    writer.commit(header.kind, header.fingerprint)
    writer.close()
    packings.take()
    assert tokens(model) == expected and packings.take() == 1
    assert not packed_files(folder)


@pytest.mark.long
def test_the_file_of_another_instruction_set_is_another_one(
    folder: Path, model: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = ops.native.library.runnable_variants()
    for variant in variants:
        library = ops.native.library.load_variant(variant)
        monkeypatch.setattr(ops.native, "load", lambda found=library: ops.native.library.LoadResult(found))
        tokens(model)
        assert packings.take()
    assert len(packed_files(folder)) == len(variants)


# ---------------------------------------------------------------- disks and processes


def test_an_unwritable_folder_is_no_error(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(model)
    folder.with_name("file").write_text("")
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(folder.with_name("file") / "below"))
    assert tokens(model) == expected


def test_every_failure_of_the_disk_leaves_the_same_output(folder: Path, model: Path) -> None:
    expected = tokens(model)

    def run(disk: FailingDisk) -> None:
        for path in packed_files(folder):
            path.unlink()
        handle = checkpoint.open_checkpoint(model)
        llm = kvad.LLM.load(handle, max_num_seqs=1, max_seq_len=40)
        store = ops.native.PackedStore(handle.weight_files(), folder, disk)
        llm.model.packed_weights = ops.native.PackedWeights(store)
        assert tokens(llm) == expected
        assert not list(folder.glob("*.packed")) or not read_header(next(folder.glob("*.packed"))).metadata

    counting = FailingDisk()
    run(counting)
    assert counting.count > 20 and len(packed_files(folder)) == 1
    for k in range(counting.count):
        run(FailingDisk(k, code=(errno.EIO, errno.ENOSPC)[k % 2]))


def test_a_full_disk_is_not_filled_and_old_files_are_removed(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(model)
    (first,) = packed_files(folder)
    size = first.stat().st_size
    free = 0
    monkeypatch.setattr(type(REAL_FILE_SYSTEM), "free_bytes", lambda self, path: free)
    tokens(write_model(model.parent / "second", seed=1))
    assert packed_files(folder) == [first]  # no room
    free = packed_store.DISK_SHARE * size
    tokens(write_model(model.parent / "second", seed=1))
    (second,) = packed_files(folder)
    assert second != first and abs(second.stat().st_size - size) < 64  # the first one was used before


WORKER = f"""
import sys, time
{SMALL}
packings, original = [], library.Library.pack
def pack(*arguments):
    packings.append(0)
    time.sleep(0.2)
    original(*arguments)
library.Library.pack = pack
llm = kvad.LLM.load(sys.argv[1], max_num_seqs=1, max_seq_len=40)
(result,) = llm.generate([[5, 6, 7, 8]], max_tokens=16, temperature=0)
print(len(packings), *result.tokens)
"""


def test_of_two_processes_one_packs(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, "off")
    expected = tokens(model)
    monkeypatch.setenv(packed_store.ENVIRONMENT_VARIABLE, str(folder))
    workers = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(model)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [list(map(int, output[1:])) for output in outputs] == [expected, expected]
    counts = sorted(int(output[0]) for output in outputs)
    assert counts[0] == 0 and counts[1] > 4
    assert [path.suffix for path in packed_files(folder)] == [".packed"]


def test_a_killed_writer_leaves_nothing_in_the_way(folder: Path, model: Path, packings: Packings) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(model)], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not list(folder.glob(".*.packed.*.tmp")):
        assert time.monotonic() < deadline and worker.poll() is None
        time.sleep(0.01)
    worker.kill()
    worker.wait(timeout=60)
    tokens(model)
    assert packings.take()
    assert [path.suffix for path in packed_files(folder)] == [".packed"]
    tokens(model)
    assert packings.take() == 0


def test_a_lock_that_is_held_too_long_is_not_waited_for(
    folder: Path, model: Path, packings: Packings, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens(model)
    (path,) = packed_files(folder)
    path.unlink()
    monkeypatch.setattr(packed_store, "LOCK_SECONDS", 0.1)
    lock = REAL_FILE_SYSTEM.lock(path.with_suffix(".lock"))
    packings.take()
    tokens(model)
    assert packings.take() and not path.exists()
    os.close(lock)


def test_a_file_of_weights_that_changes_meanwhile_is_not_stored(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ops.native.PackedStore.add

    def add(store: ops.native.PackedStore, name: str, packed: torch.Tensor) -> torch.Tensor:
        os.utime(model / "model.safetensors")
        return original(store, name, packed)

    monkeypatch.setattr(ops.native.PackedStore, "add", add)
    tokens(model)
    assert not packed_files(folder)


def test_the_manifest_identifies_the_weights(model: Path) -> None:
    handle = checkpoint.open_checkpoint(model)
    dict(handle.weights())
    (file,) = handle.weight_files()
    entry = json.loads((model / "manifest.json").read_text())["files"]["model.safetensors"]
    assert file.fingerprint == f"{entry['crc32']} {entry['sha256']}" and file.size == entry["bytes"]
