"""Random damage to every kind of stored file: it is refused in one line, or the results are identical."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvad import LLM
from kvad.checkpoint.folder import list_steps
from kvad.errors import KvadError
from kvad.train.config.run import RunConfig
from kvad.train.loop.run import resume_model, train_model
from kvad.train.monitoring.metrics import read_metrics
from tests.support.golden_files import PROMPT, run, scores
from tests.support.training_runs import tiny_config, tiny_shape

MODEL = {"preset": "tiny", "set": tiny_shape(layers=1, mlp=16, width=16)}
NATIVE = {"preset": "shakespeare-char", "set": tiny_shape(layers=1, mlp=16, width=16)}
SETTINGS = {"data": {"seq_len": 16}, "steps": 4, "save_interval": 2, "keep_best": False, "log_interval": 1}


def damage(path: Path, rng: random.Random) -> str:
    """Change a file in one of four ways and return what was changed."""
    content = bytearray(path.read_bytes())
    before, at = bytes(content), rng.randrange(len(content))
    kind = rng.choice(("flip", "cut", "zero", "append"))
    if kind == "flip":
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "zero":
        content[at : at + rng.randint(1, 64)] = bytes(min(rng.randint(1, 64), len(content) - at))
    else:
        content += rng.randbytes(rng.randint(1, 16))
    path.write_bytes(content)
    return f"{kind} at {at} of {path.name}" if bytes(content) != before else ""


@dataclass
class Stored:
    """A folder with stored files, and a function of a copy whose results must not change."""

    folder: Path
    use: Callable[[Path], object]

    def damage_all(self, scratch: Path, count: int, seed: int) -> int:
        """Use ``count`` damaged copies; return how many were refused."""
        expected, rng, refused = self.use(self.copy(scratch)), random.Random(seed), 0
        files = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        files = [name for name in files if (self.folder / name).stat().st_size]
        while count:
            copy = self.copy(scratch)
            if not (what := damage(copy / rng.choice(files), rng)):
                continue
            count -= 1
            result = self._use(copy)
            refused += isinstance(result, KvadError)
            assert "\n" not in str(result) if isinstance(result, KvadError) else result == expected, what
        return refused

    def _use(self, copy: Path) -> object:
        try:
            return self.use(copy)
        except KvadError as error:
            return error

    def copy(self, scratch: Path) -> Path:
        shutil.rmtree(scratch, ignore_errors=True)
        return Path(shutil.copytree(self.folder, scratch, symlinks=True))


def generate(model: Path, **options: object) -> object:
    with LLM.load(model, **options) as llm:
        answer = llm.generate(PROMPT, max_tokens=4, temperature=0, logprobs=0).choices[0]
        return answer.token_ids, answer.text, repr(answer.logprobs)


def continue_session(model: Path, folder: Path) -> object:
    with LLM.load(model) as llm:
        return llm.session("notes", folder).generate("", max_tokens=4, temperature=0).choices[0].token_ids


def find_prefix(model: Path, folder: Path) -> object:
    return generate(model, prefix_cache_dir=folder, block_size=4)[:2]


def train_on(folder: Path, out: Path) -> object:
    shutil.rmtree(out, ignore_errors=True)
    train_model(tiny_config(model=MODEL, data={"seq_len": 16}, tokenizer={}, steps=1, batch_size=2), [folder], out)
    return trained(out)


def resume(folder: Path) -> object:
    resume_model(folder)
    return trained(folder)


def trained(out: Path) -> object:
    """Tensors of the newest checkpoint, and the losses of the last two steps."""
    files = sorted(list_steps(out)[-1].rglob("*.safetensors"))
    losses = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if line["kind"] == "step"]
    return [path.read_bytes() for path in files], losses[-2:]


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Stored]:
    """One folder of each kind, written by the current code."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("stored")
    texts = root / "texts.txt"
    texts.write_text("".join(f"{a} {b}\n" for a in ("ada", "bob", "cleo") for b in ("dan", "eve", "flo") * 4))
    for name, model in (("hf", MODEL), ("native", NATIVE)):
        train_model(tiny_config(model=model, **SETTINGS), [texts], root / name)
    lora = {"model": {"init": str(root / "hf")}, "lora": {"rank": 2}, "data": {"seq_len": 16}}
    train_model(RunConfig.from_dict({**lora, "train": {"steps": 1, "precision": "fp32"}}), [texts], root / "lora")
    model, adapter = list_steps(root / "hf")[-1], list_steps(root / "lora")[-1]
    shutil.copytree(model, root / "model")
    run("data", "prepare", texts, "--tokenizer", "byte", "--out", root / "prepared")
    run("session", "save", model, "notes", "--prompt", PROMPT, "--session-dir", root / "sessions")
    prefix = ("--prompt", PROMPT, "--name", "names", "--prefix-cache-dir", root / "prefix")
    run("prefix", "add", model, *prefix, "--block-size", 4)
    for name in ("hf", "native"):
        shutil.rmtree(list_steps(root / name)[-1])
    return {
        "checkpoint": Stored(root / "model", generate),
        "native": Stored(list_steps(root / "native")[-1], generate),
        "adapter": Stored(adapter, lambda folder: scores(root / "model", adapter=folder)),
        "session": Stored(root / "sessions", lambda folder: continue_session(root / "model", folder)),
        "prefix": Stored(root / "prefix", lambda folder: find_prefix(root / "model", folder)),
        "prepared": Stored(root / "prepared", lambda folder: train_on(folder, root / "out")),
        "run": Stored(root / "hf", resume),
    }


KINDS = ["checkpoint", "native", "adapter", "session", "prefix", "prepared", "run"]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_or_harmless(stored, kind, tmp_path, one_thread):
    refused = stored[kind].damage_all(tmp_path / "copy", 12 if kind == "run" else 25, seed=1)
    assert refused > 0 or kind == "prefix"


@pytest.mark.parametrize("kind", ["checkpoint", "native", "adapter", "session", "prepared", "run"])
def test_a_flipped_bit_in_any_file_is_refused(stored, kind, tmp_path, one_thread):
    """Except in files that are not read, or that are written again: state of training, a run's tokens and logs."""
    part = "checkpoints/*/**/*" if kind == "run" else "**/*"
    for path in filter(Path.is_file, stored[kind].folder.glob(part)):
        name = path.relative_to(stored[kind].folder)
        if path.name == "manifest.json" or (kind != "run" and name.parts[0] == "training"):
            continue
        copy = stored[kind].copy(tmp_path / "copy")
        content = bytearray((copy / name).read_bytes())
        digits = [at for at, byte in enumerate(content) if path.suffix == ".json" and chr(byte).isdigit()]
        content[digits[-1] if digits else -2] ^= 1  # another digit is valid JSON
        (copy / name).write_bytes(content)
        with pytest.raises(KvadError, match=rf"{path.name}"):
            stored[kind].use(copy)


@pytest.mark.long(minutes=3)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_many_damages_are_refused_or_harmless(stored, kind, seed, tmp_path, one_thread):
    stored[kind].damage_all(tmp_path / "copy", 100, seed)
