"""Any tokenizer of the ``tokenizers`` library, behind kvad's protocol: byte-level BPE, SentencePiece-like BPE and
Unigram, WordPiece, WordLevel.

Ids and text are those of transformers' fast tokenizers, with three deliberate differences.  Text that spells a special
token stays text unless ``specials=True``.  Bytes that are no valid text become one U+FFFD per broken sequence, where
the library writes one per byte.  And ``clean_up_tokenization_spaces`` is not applied: it rewrites a whole text, and
what a stream has shown cannot be taken back (the clean-up of a WordPiece decoder works by token, so it is).

The bytes of each token of a ``tokenizers`` library tokenizer, so that ids become text one by one.

Three schemes are known: byte level (GPT-2's alphabet of 256 printable characters), SentencePiece (``▁`` for a space,
``<0xE3>`` for a byte) and WordPiece (``##``).  In the last two a token that opens a text is written without its leading
space: hence ``first`` and ``rest``.  The library's decoder says what a token looks like, asked once per token; bytes
are ours, because text cannot hold half a character.  A decoder that must look ahead or back is refused by name.

Byte-level BPE, trained by the ``tokenizers`` library.

The scheme is GPT-2's (Radford et al. 2019): text becomes bytes, so nothing is unknown and decoding is lossless; the
same texts give the same file, byte for byte.  Ids: specials first (0, ...), then the 256 bytes, then the merges.

``tokenizers`` is imported only when it is needed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvad.errors import TokenizerError
from kvad.text.base import (
    ENCODER_NAMES,
    FILE_NAME,
    MAX_PIECE_CHARS,
    NAMES,
    SpecialTokens,
    UnknownPolicy,
    check_on_unknown,
    check_text,
    check_texts,
    out_of_range_error,
    printable_token,
    report_unknown,
    split_text,
    standard_specials,
    write_text,
)
from kvad.text.hf_config import CONFIG_NAME, SPECIAL_ROLES, TokenizerSettings
from kvad.text.post_processor import PostProcessor, configure_post_processor, read_post_processor, write_post_processor

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

_STEPWISE = {"ByteLevel", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """``first[id]`` and ``rest[id]``: the bytes that a token adds at the start of a text and inside it."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        steps = flatten_components(backend.decoder)
        types = [step["type"] for step in steps]
        self.byte_level = types == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in types
        refused = [type_ for type_ in types if type_ not in _STEPWISE]
        if refused or ("ByteLevel" in types and not self.byte_level) or any(step.get("stop") for step in steps):
            raise TokenizerError(f"the decoder {' + '.join(refused or types)} cannot decode token by token")
        self.rest = _DecodeCache(self._inside)
        self.first = self.rest if self.byte_level else _DecodeCache(self._opening)

    def _token(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            raise out_of_range_error(token_id, self.vocab_size)
        return self._backend.id_to_token(int(token_id)) or ""

    def is_unused(self, token_id: int) -> bool:
        """Whether the numbering leaves this id out: then it is no token, and says nothing."""
        return self._backend.id_to_token(int(token_id)) is None

    def _inside(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if self.byte_level:
            return token.encode() if token_id in self._added else _from_alphabet(token)
        byte = self._fallback(token)
        return self._decoded(["a", token])[1:].encode() if byte is None and token else byte or b""

    def _opening(self, token_id: int) -> bytes:
        token = self._token(token_id)
        byte = self._fallback(token)
        if byte is None or byte == b" ":  # a space by its byte is stripped from the start like any other
            return self._decoded([token]).encode()
        return byte

    def _fallback(self, token: str) -> bytes | None:
        match = _FALLBACK.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    def _decoded(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        text: str = decoder.decode(tokens) if decoder is not None else " ".join(tokens)
        return text

    def missing_bytes(self) -> frozenset[int]:
        """Byte values that a byte-level vocabulary has no token for, and that the library would drop in silence."""
        if not self.byte_level or getattr(self._backend.model, "unk_token", None) is not None:
            return frozenset()
        alphabet = byte_alphabet()
        return frozenset(alphabet[char] for char in alphabet if self._backend.token_to_id(char) is None)


class _DecodeCache(dict[int, bytes]):
    """Computed when first asked for: a vocabulary of 250,000 costs nothing until it is used."""

    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._compute(token_id)
        return piece


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the byte values: themselves where printable, else 256 and up in order.

    Source: ``bytes_to_unicode`` in openai/gpt-2, ``encoder.py``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _from_alphabet(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # not of this alphabet, so it stands for itself
        return token.encode()


def flatten_components(component: Any) -> list[dict[str, Any]]:
    """What a normalizer, pre-tokenizer or decoder of the library is made of, sequences flattened: [{"type": ...}]."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        inner = next((state[key] for key in ("decoders", "pretokenizers", "normalizers") if key in state), None)
        return [state] if inner is None else [part for child in inner for part in flat(child)]

    return [] if component is None else flat(json.loads(component.__getstate__()))


BATCH_CHARS = 4 * MAX_PIECE_CHARS  # the library's results weigh ~100 bytes per token until they are ours
_KNOWN_NAMES = {  # role -> the names it goes by
    "separator": (NAMES["separator"], "<|endoftext|>"),
    "bos": (NAMES["bos"], "<s>", "<bos>", "<|begin_of_text|>"),
    "eos": (NAMES["eos"], "</s>", "<eos>", "<|end_of_text|>"),
    "pad": (NAMES["pad"], "<pad>", "[PAD]"),
    "unk": (NAMES["unk"], "<unk>", "[UNK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}


class HFTokenizer:
    """A ``tokenizers.Tokenizer``.  ``roles`` ({"bos": "<s>"}) go before the well-known names."""

    on_unknown: UnknownPolicy
    source_tokenizer: None = None

    def __init__(
        self, backend: tokenizers.Tokenizer, roles: Mapping[str, str | None] | None = None, *, on_unknown: str = "warn"
    ) -> None:
        self.on_unknown = check_on_unknown(on_unknown)
        backend.no_truncation()  # a file may carry a limit: cutting a prompt in silence is not a tokenizer's business
        backend.no_padding()
        backend.encode_special_tokens = True  # text that spells a special token stays text
        _register_special(backend, [name for name in (roles or {}).values() if name is not None])
        added = backend.get_added_tokens_decoder().items()
        named = {token.content: token_id for token_id, token in added if token.special}
        self.special_tokens = find_specials(named, roles or {})
        self.kind = str(type(backend.model).__name__).lower()
        self._backend = backend
        self._pieces = TokenBytes(backend)
        self._frame = read_post_processor(backend, named)
        self.vocab_size = self._pieces.vocab_size
        self._special_ids = frozenset(named.values())
        self._accidents = self._special_ids - {self.special_tokens.unk}
        self._missing_bytes = self._pieces.missing_bytes()
        self._cuttable = _is_cuttable(backend)

    @property
    def languages(self) -> Mapping[str, int]:
        return self._frame.languages

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        return self.encode_batch([text], specials=specials)[0]

    def encode_batch(self, texts: Iterable[str], *, specials: bool = False) -> list[list[int]]:
        """Ids of each text.  Long texts are cut and short ones gathered: memory stays near that of the result."""
        backend = self._obeying if specials else self._backend
        rows: list[list[int]] = []
        waiting: list[tuple[list[int], str]] = []  # (the row that it goes to, piece of its text)
        unknown: Counter[str] = Counter()
        chars = 0
        for text in check_texts(texts):
            rows.append([])
            check_text(text)
            for piece in split_text(text) if self._cuttable else [text]:
                if waiting and chars + len(piece) > BATCH_CHARS:
                    self._encode_pieces(backend, waiting, unknown)
                    waiting, chars = [], 0
                waiting.append((rows[-1], piece))
                chars += len(piece)
        self._encode_pieces(backend, waiting, unknown)
        has_unk = self.special_tokens.unk is not None and not self._missing_bytes
        report_unknown(unknown, "piece of text", "pieces of text", has_unk=has_unk, on_unknown=self.on_unknown)
        return rows

    def _encode_pieces(
        self, backend: tokenizers.Tokenizer, waiting: list[tuple[list[int], str]], unknown: Counter[str]
    ) -> None:
        texts = [piece for _, piece in waiting]
        for (row, piece), encoding in zip(
            waiting, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            ids, used = encoding.ids, backend
            if backend is self._backend and not self._accidents.isdisjoint(ids):
                used = self._blind
                ids = used.encode(piece, add_special_tokens=False).ids
            row += ids
            if self._missing_bytes:
                unknown.update(char for char in piece if not self._missing_bytes.isdisjoint(char.encode()))
            elif not self._pieces.byte_level and self.special_tokens.unk in ids:
                unknown.update(self._unknown_parts(used, piece))

    def _unknown_parts(self, backend: tokenizers.Tokenizer, piece: str) -> list[str]:
        """The parts of a text that became UNK: encoded again, slowly, with their places."""
        encoding = backend.encode(piece, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets, strict=True)
        spelled = [piece[start:end] for token_id, (start, end) in found if token_id == self.special_tokens.unk]
        return [part for part in spelled if part not in self.special_tokens.names()]

    @functools.cached_property
    def _obeying(self) -> tokenizers.Tokenizer:
        """A twin that turns the names of special tokens into them.  Two, because a flag is not safe between threads."""
        twin = type(self._backend).from_str(self._backend.to_str())
        twin.encode_special_tokens = False
        return twin

    @functools.cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        """A twin whose special tokens have names that no text spells.

        A Unigram model has ``</s>`` among its pieces, and would make the special token of a text that holds it.
        """
        content = json.loads(self._backend.to_str())
        names = {self._backend.id_to_token(i): f"\ue000{i}\ue001" for i in self._accidents}
        vocab, merges = content["model"]["vocab"], content["model"].get("merges", [])
        if isinstance(vocab, dict):
            content["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
        else:
            content["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocab]
        if merges:
            content["model"]["merges"] = [pair for pair in merges if _merged(pair) not in names]
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        twin = type(self._backend).from_str(json.dumps({**content, "post_processor": None}))
        twin.encode_special_tokens = True
        return twin

    def add_special_tokens(self, ids: Sequence[int], *, language: str | None = None) -> list[int]:
        return self._frame.apply(ids, language)

    def decode(self, ids: Sequence[int], *, skip_specials: bool = True) -> str:
        return b"".join(map(self.incremental_decoder(skip_specials=skip_specials), ids)).decode("utf-8", "replace")

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        first, rest, is_hole = self._pieces.first, self._pieces.rest, self._pieces.is_unused
        skipped: frozenset[int] = self._special_ids if skip_specials else frozenset()
        started = False

        def add(token_id: int) -> bytes:
            nonlocal started
            if token_id in skipped:
                return b""
            if started:
                return rest[token_id]
            piece = first[token_id]
            started = bool(piece) or not is_hole(token_id)
            return piece

        return add

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self._pieces.rest[token_id]

    def token_text(self, token_id: int) -> str:
        return printable_token(self._pieces.rest[token_id])

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and beside it the roles of the specials and the class of transformers that reads
        both (AutoTokenizer asks for one)."""
        write_text(Path(folder) / FILE_NAME, self._backend.to_str(pretty=True) + "\n")
        names = {token_id: name for name, token_id in self.special_tokens.named}
        roles = {f"{role}_token": names.get(getattr(self.special_tokens, role)) for role in SPECIAL_ROLES}
        if find_specials(self.special_tokens.names(), {}) == self.special_tokens:  # what their names tell is no news
            roles = {role: name for role, name in roles.items() if name is not None}
        said = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **roles}
        write_text(Path(folder) / CONFIG_NAME, json.dumps(said, ensure_ascii=False, indent=1) + "\n")

    def fingerprint(self) -> str:
        roles = {role: getattr(self.special_tokens, role) for role in NAMES}  # the others change no text and no id
        return hashlib.sha256((self._backend.to_str() + json.dumps(roles)).encode()).hexdigest()


def find_specials(named: Mapping[str, int], roles: Mapping[str, str | None]) -> SpecialTokens:
    """Give each special token its role: by ``roles`` (role -> name; None: nobody), else by the names in common use.

    A tokenizer without a separator opens its documents with its BOS (Llama) where it has one.
    """
    for role, name in roles.items():
        if role not in SPECIAL_ROLES or (name is not None and name not in named):
            raise TokenizerError(f"the {role} token {name!r} is not among the special tokens", ", ".join(named))
    ids: dict[str, int | None] = {}
    for role, names in _KNOWN_NAMES.items():
        wanted = [roles[role]] if role in roles else names
        ids[role] = next((named[name] for name in wanted if name is not None and name in named), None)
    if "separator" not in roles and ids["separator"] is None:
        ids["separator"] = ids["bos"]
    return SpecialTokens(**ids, named=tuple(sorted(named.items(), key=lambda item: item[1])))


def _register_special(backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Make special those of the names that the vocabulary has; what else is said of a token (lstrip, ...) stays."""
    from tokenizers import AddedToken

    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name, AddedToken(name, normalized=False))
        if backend.token_to_id(name) is not None and not (name in added and token.special):
            token.special = True
            backend.add_special_tokens([token])


def _merged(pair: str | list[str]) -> str:
    """What a merge makes: ``["a", "b"]``, in older files ``"a b"``."""
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


def _is_cuttable(backend: tokenizers.Tokenizer) -> bool:
    """Whether ``base.cut`` leaves the ids as they are: GPT-2's pattern cuts words, and nothing is put before a text."""
    before = flatten_components(backend.pre_tokenizer)
    gpt2 = len(before) == 1 and before[0]["type"] == "ByteLevel" and before[0].get("use_regex", True)
    return bool(gpt2) and not before[0]["add_prefix_space"] and backend.normalizer is None


# ---------------------------------------------------------------- what a Hugging Face folder says beside the file


def apply_settings(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Give the backend the added tokens and the frame that the folder's other files speak of, as transformers does."""
    _add_tokens(backend, settings)
    roles = special_roles(backend, settings)
    ids = {role: None if name is None else backend.token_to_id(name) for role, name in roles.items()}
    named = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    write_post_processor(
        backend,
        configure_post_processor(read_post_processor(backend, named), settings, {"eos": named.get("</s>"), **ids}),
    )


def special_roles(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> dict[str, str | None]:
    return settings.roles_in(_Names(backend))


class _Names:
    """``name in names``, without copying a vocabulary of 250,000."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._backend.token_to_id(name) is not None


def _add_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    from tokenizers import AddedToken

    def spelled(token: Any) -> tuple[object, ...]:
        return token.content, token.lstrip, token.rstrip, token.single_word, token.normalized, token.special

    there = {spelled(token) for token in backend.get_added_tokens_decoder().values()}
    new = [token for _, token in sorted(settings.added.items()) if spelled(token) not in there]
    backend.add_tokens([AddedToken(**vars(token)) for token in new])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in settings.marked:
        if token.content not in known and backend.token_to_id(token.content) is not None:
            backend.add_special_tokens([AddedToken(**vars(token))])


def train_bpe(
    texts: Iterable[str],
    roles: Sequence[str] = (),
    *,
    vocab_size: int = 4096,
    min_freq: int = 1,
    closed: bool = False,
    on_unknown: str = "warn",
) -> HFTokenizer:
    """Learn merges until the vocabulary has ``vocab_size`` tokens, or no pair occurs ``min_freq`` times.

    The first specials and the 256 bytes are always there, so that is the least ``vocab_size``.  ``closed``: EOS is part
    of a text's frame; the roles cls and sep always are.
    """
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        trainers,
    )

    names = list(standard_specials(roles, first=0).names())
    least = 256 + len(names)
    if vocab_size < least:
        raise TokenizerError(
            f"vocab_size {vocab_size} is too small for byte-level BPE",
            f"at least {least}: 256 bytes and {len(names)} special token{'s' * (len(names) > 1)}",
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_freq,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in names],
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in split_text(text)), trainer)
    if "cls" in roles and "sep" in roles:
        first, last = (backend.token_to_id(ENCODER_NAMES[role]) for role in ("cls", "sep"))
        write_post_processor(backend, PostProcessor((first,), (last,)))
    elif closed:
        write_post_processor(backend, PostProcessor(suffix_ids=(backend.token_to_id(NAMES["eos"]),)))
    return HFTokenizer(backend, on_unknown=on_unknown)
