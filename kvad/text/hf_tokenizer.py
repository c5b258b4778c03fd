"""Tokenizers of the ``tokenizers`` library: BPE, Unigram, WordPiece and WordLevel.

Ids and text are those of transformers' fast tokenizers, with three deliberate differences. Text that spells a special
token remains text unless ``specials=True``. Invalid bytes become one U+FFFD per broken sequence, not one per byte. And
``clean_up_tokenization_spaces`` is not applied, because it rewrites text that was already streamed (the clean-up of a
WordPiece decoder works per token and is applied).

``TokenBytes`` gives the bytes of each token, so ids are decoded one by one. Three schemes are supported: byte
level (GPT-2's alphabet of 256 printable characters), SentencePiece (``▁`` for a space, ``<0xE3>`` for a byte) and
WordPiece (``##``). In the last two, the first token of a text has no leading space, hence ``first`` and ``rest``. The
library's decoder gives the text of a token, once per token; bytes are handled here, because text cannot contain half a
character. A decoder that needs lookahead is refused by name.

``tokenizers`` is imported on first use.
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

from kvad import storage
from kvad.errors import TokenizerError
from kvad.text.base import (
    ENCODER_NAMES,
    MAX_PIECE_CHARS,
    NAMES,
    PostProcessor,
    SpecialTokens,
    Tokenizer,
    check_token_id,
    split_text,
    standard_specials,
)
from kvad.text.hf_config import CONFIG_NAME, ROLES_KEY, SPECIAL_ROLES, TokenizerSettings
from kvad.text.post_processor import configure_post_processor, read_post_processor, write_post_processor

if TYPE_CHECKING:
    import tokenizers  # type: ignore[import-untyped]

_STEPWISE = {"ByteLevel", "Metaspace", "WordPiece", "Replace", "ByteFallback", "Fuse", "Strip"}
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes of a token at the start of a text (``first(id)``) and inside it (``rest(id)``).

    They are computed on first use, so a vocabulary of 250,000 costs nothing until used.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        steps = flatten_components(backend.decoder)
        types = [step["type"] for step in steps]
        self.byte_level = types == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in types
        unsupported = [type_ for type_ in types if type_ not in _STEPWISE]
        if unsupported or ("ByteLevel" in types and not self.byte_level) or any(step.get("stop") for step in steps):
            raise TokenizerError(f"the decoder {' + '.join(unsupported or types)} cannot decode token by token")
        self.rest = functools.cache(self._bytes_inside)
        self.first = self.rest if self.byte_level else functools.cache(self._bytes_at_start)

    def _token(self, token_id: int) -> str:
        check_token_id(token_id, self.vocab_size)
        return self._backend.id_to_token(int(token_id)) or ""

    def is_unused(self, token_id: int) -> bool:
        """True if the id is not assigned to a token; it decodes to nothing."""
        return self._backend.id_to_token(int(token_id)) is None

    def _bytes_inside(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if self.byte_level:
            return token.encode() if token_id in self._added else _from_alphabet(token)
        byte = self._fallback_byte(token)
        return self._decode_tokens(["a", token])[1:].encode() if byte is None and token else byte or b""

    def _bytes_at_start(self, token_id: int) -> bytes:
        token = self._token(token_id)
        byte = self._fallback_byte(token)
        if byte is None or byte == b" ":  # a space given as a byte is stripped at the start like any other
            return self._decode_tokens([token]).encode()
        return byte

    def _fallback_byte(self, token: str) -> bytes | None:
        match = _FALLBACK.fullmatch(token) if self._byte_fallback else None
        return bytes.fromhex(match[1]) if match else None

    def _decode_tokens(self, tokens: list[str]) -> str:
        decoder = self._backend.decoder
        text: str = decoder.decode(tokens) if decoder is not None else " ".join(tokens)
        return text

    def missing_bytes(self) -> frozenset[int]:
        """Return bytes without a token in a byte-level vocabulary, which the library would drop."""
        if not self.byte_level or getattr(self._backend.model, "unk_token", None) is not None:
            return frozenset()
        alphabet = byte_alphabet()
        return frozenset(alphabet[char] for char in alphabet if self._backend.token_to_id(char) is None)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for byte values: themselves, else 256 and up in order.

    Source: ``bytes_to_unicode`` in openai/gpt-2, ``encoder.py``.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}


def _from_alphabet(token: str) -> bytes:
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:  # outside the alphabet: the token's own text
        return token.encode()


def flatten_components(component: Any) -> list[dict[str, Any]]:
    """Return the parts ({"type": ...}) of a normalizer, pre-tokenizer or decoder, without sequences."""

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        inner = next((state[key] for key in ("decoders", "pretokenizers", "normalizers") if key in state), None)
        return [state] if inner is None else [part for child in inner for part in flat(child)]

    return [] if component is None else flat(json.loads(component.__getstate__()))


BATCH_CHARS = 4 * MAX_PIECE_CHARS  # the library's results take ~100 bytes per token
_KNOWN_NAMES = {  # role -> its common names
    "separator": (NAMES["separator"], "<|endoftext|>"),
    "bos": (NAMES["bos"], "<s>", "<bos>", "<|begin_of_text|>"),
    "eos": (NAMES["eos"], "</s>", "<eos>", "<|end_of_text|>"),
    "pad": (NAMES["pad"], "<pad>", "[PAD]"),
    "unk": (NAMES["unk"], "<unk>", "[UNK]"),
    "cls": ("[CLS]",),
    "sep": ("[SEP]",),
    "mask": ("[MASK]", "<mask>"),
}


class HFTokenizer(Tokenizer):
    """A ``tokenizers.Tokenizer``; ``roles`` ({"bos": "<s>"}) precede the common names."""

    def __init__(self, backend: tokenizers.Tokenizer, roles: Mapping[str, str | None] | None = None) -> None:
        backend.no_truncation()  # a file may contain a limit; a tokenizer must not truncate silently
        backend.no_padding()
        backend.encode_special_tokens = True  # text that spells a special token remains text
        _register_special(backend, [name for name in (roles or {}).values() if name is not None])
        added = backend.get_added_tokens_decoder().items()
        special_ids = {token.content: token_id for token_id, token in added if token.special}
        self.special_tokens = find_specials(special_ids, roles or {})
        self.kind = str(type(backend.model).__name__).lower()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self._post_processor = read_post_processor(backend, special_ids)
        self.vocab_size = self._token_bytes.vocab_size
        self._protected_ids = self._special_ids - {self.special_tokens.unk}
        self._missing_bytes = self._token_bytes.missing_bytes()
        self._is_splittable = _is_splittable_backend(backend)

    @property
    def _has_unk(self) -> bool:
        return super()._has_unk and not self._missing_bytes

    def _encode_batch(self, texts: Iterable[str], specials: bool, unknown: Counter[str]) -> list[list[int]]:
        """Encode the texts; long ones are split and short ones grouped to bound memory."""
        backend = self._specials_backend if specials else self._backend
        rows: list[list[int]] = []
        queued: list[tuple[list[int], str]] = []  # (target row, piece of its text)
        chars = 0
        for text in texts:
            rows.append([])
            for piece in split_text(text) if self._is_splittable else [text]:
                if queued and chars + len(piece) > BATCH_CHARS:
                    self._encode_pieces(backend, queued, unknown)
                    queued, chars = [], 0
                queued.append((rows[-1], piece))
                chars += len(piece)
        self._encode_pieces(backend, queued, unknown)
        return rows

    def _encode_pieces(
        self, backend: tokenizers.Tokenizer, queued: list[tuple[list[int], str]], unknown: Counter[str]
    ) -> None:
        texts = [piece for _, piece in queued]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for (row, piece), encoding in zip(queued, encodings, strict=True):
            ids, active_backend = encoding.ids, backend
            if backend is self._backend and not self._protected_ids.isdisjoint(ids):
                active_backend = self._renamed_backend
                ids = active_backend.encode(piece, add_special_tokens=False).ids
            row += ids
            if self._missing_bytes:
                unknown.update(char for char in piece if not self._missing_bytes.isdisjoint(char.encode()))
            elif not self._token_bytes.byte_level and self.special_tokens.unk in ids:
                unknown.update(self._unknown_parts(active_backend, piece))

    def _unknown_parts(self, backend: tokenizers.Tokenizer, piece: str) -> list[str]:
        """Return the parts of a text that became UNK, found by a slower encoding with offsets."""
        encoding = backend.encode(piece, add_special_tokens=False)
        id_offsets = zip(encoding.ids, encoding.offsets, strict=True)
        parts = (piece[start:end] for token_id, (start, end) in id_offsets if token_id == self.special_tokens.unk)
        return [part for part in parts if part not in self.special_tokens.names()]

    @functools.cached_property
    def _specials_backend(self) -> tokenizers.Tokenizer:
        """Copy of the backend that parses special tokens; the flag itself is not thread-safe."""
        copy = type(self._backend).from_str(self._backend.to_str())
        copy.encode_special_tokens = False
        return copy

    @functools.cached_property
    def _renamed_backend(self) -> tokenizers.Tokenizer:
        """Copy of the backend whose special tokens have names that no text contains.

        A Unigram model has ``</s>`` among its pieces and would produce the special token for a text that contains it.
        """
        content = json.loads(self._backend.to_str())
        names = {self._backend.id_to_token(i): f"\ue000{i}\ue001" for i in self._protected_ids}
        vocab, merges = content["model"]["vocab"], content["model"].get("merges", [])
        if isinstance(vocab, dict):
            content["model"]["vocab"] = {names.get(name, name): token_id for name, token_id in vocab.items()}
        else:
            content["model"]["vocab"] = [[names.get(name, name), score] for name, score in vocab]
        if merges:  # ["a", "b"], in older files "a b"
            joined = [pair.replace(" ", "") if isinstance(pair, str) else "".join(pair) for pair in merges]
            pairs = zip(merges, joined, strict=True)
            content["model"]["merges"] = [pair for pair, token in pairs if token not in names]
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        copy = type(self._backend).from_str(json.dumps({**content, "post_processor": None}))
        copy.encode_special_tokens = True
        return copy

    def incremental_decoder(self, *, skip_specials: bool = True) -> Callable[[int], bytes]:
        first, rest, is_unused = self._token_bytes.first, self._token_bytes.rest, self._token_bytes.is_unused
        skipped_ids: frozenset[int] = self._special_ids if skip_specials else frozenset()
        started = False

        def add(token_id: int) -> bytes:
            nonlocal started
            if token_id in skipped_ids:
                return b""
            if started:
                return rest(token_id)
            piece = first(token_id)
            started = bool(piece) or not is_unused(token_id)
            return piece

        return add

    def _display_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.rest(token_id)

    @property
    def file_text(self) -> str:
        return f"{self._backend.to_str(pretty=True)}\n"

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json``, and a config with the roles and the class for AutoTokenizer."""
        super().save(folder)
        names = {token_id: name for name, token_id in self.special_tokens.named}
        roles = {f"{role}_token": names.get(getattr(self.special_tokens, role)) for role in SPECIAL_ROLES}
        if find_specials(self.special_tokens.names(), {}) == self.special_tokens:  # names alone identify these roles
            roles = {role: name for role, name in roles.items() if name is not None}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **roles,
        }
        if self.special_tokens.cls is None:  # a generator: no token types; generate() needs an end and a padding token
            config["model_input_names"] = ["input_ids", "attention_mask"]
            end = next((names[token] for token in self.special_tokens.end_ids), None)
            missing = {name: end for name in ("eos_token", "pad_token") if end is not None and not roles.get(name)}
            config |= {**missing, ROLES_KEY: roles} if missing else {}
        content = json.dumps(config, ensure_ascii=False, indent=1) + "\n"
        storage.atomic.write_bytes(Path(folder) / CONFIG_NAME, content.encode())

    def fingerprint(self) -> str:
        roles = {role: getattr(self.special_tokens, role) for role in NAMES}  # other roles change neither text nor ids
        return hashlib.sha256((self._backend.to_str() + json.dumps(roles)).encode()).hexdigest()


def find_specials(special_ids: Mapping[str, int], roles: Mapping[str, str | None]) -> SpecialTokens:
    """Assign roles to special tokens by ``roles`` (None: no token), else by common names.

    Without a separator, documents start with BOS (Llama) if there is one.
    """
    for role, name in roles.items():
        if role not in SPECIAL_ROLES or (name is not None and name not in special_ids):
            raise TokenizerError(f"the {role} token {name!r} is not among the special tokens", ", ".join(special_ids))
    ids: dict[str, int | None] = {}
    for role, names in _KNOWN_NAMES.items():
        candidates = [roles[role]] if role in roles else names
        ids[role] = next((special_ids[name] for name in candidates if name is not None and name in special_ids), None)
    if "separator" not in roles and ids["separator"] is None:
        ids["separator"] = ids["bos"]
    return SpecialTokens(**ids, named=tuple(sorted(special_ids.items(), key=lambda item: item[1])))


def _register_special(backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Make those names special that the vocabulary has; other flags of a token are unchanged."""
    from tokenizers import AddedToken

    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name in names:
        token = added.get(name, AddedToken(name, normalized=False))
        if backend.token_to_id(name) is not None and not (name in added and token.special):
            token.special = True
            backend.add_special_tokens([token])


def _is_splittable_backend(backend: tokenizers.Tokenizer) -> bool:
    """True if ``split_text`` keeps ids: GPT-2's pattern, and no prefix space or normalizer."""
    components = flatten_components(backend.pre_tokenizer)
    gpt2 = len(components) == 1 and components[0]["type"] == "ByteLevel" and components[0].get("use_regex", True)
    return bool(gpt2) and not components[0]["add_prefix_space"] and backend.normalizer is None


def apply_settings(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> dict[str, str | None]:
    """Apply added tokens and post-processor of the folder's other files, as transformers does; return the roles."""
    _add_tokens(backend, settings)
    roles = settings.roles_in(lambda name: backend.token_to_id(name) is not None)
    special_ids = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    role_ids = {role: None if name is None else backend.token_to_id(name) for role, name in roles.items()}
    ids = {"eos": special_ids.get("</s>"), **role_ids}
    post_processor = read_post_processor(backend, special_ids)
    write_post_processor(backend, configure_post_processor(post_processor, settings, ids))
    return roles


def _add_tokens(backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    from tokenizers import AddedToken

    def properties(token: Any) -> tuple[object, ...]:
        return token.content, token.lstrip, token.rstrip, token.single_word, token.normalized, token.special

    present = {properties(token) for token in backend.get_added_tokens_decoder().values()}
    missing = [token for _, token in sorted(settings.added.items()) if properties(token) not in present]
    backend.add_tokens([AddedToken(**vars(token)) for token in missing])
    known_names = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in settings.marked:
        if token.content not in known_names and backend.token_to_id(token.content) is not None:
            backend.add_special_tokens([AddedToken(**vars(token))])


def train_bpe(
    texts: Iterable[str], roles: Sequence[str] = (), *, vocab_size: int = 4096, min_freq: int = 1, closed: bool = False
) -> HFTokenizer:
    """Learn merges up to ``vocab_size`` tokens, while a pair occurs ``min_freq`` times; equal texts give equal files.

    This is byte-level BPE like GPT-2's (Radford et al. 2019): text becomes bytes, so nothing is unknown and decoding is
    lossless. Ids: specials (0, ...), the 256 bytes, the merges. ``closed``: texts end with EOS; the roles cls and sep
    always enclose texts.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    names = list(standard_specials(roles, first=0).names())
    min_vocab_size = 256 + len(names)
    if vocab_size < min_vocab_size:
        raise TokenizerError(
            f"vocab_size: must be at least {min_vocab_size} for byte-level BPE, got {vocab_size}",
            f"It has 256 bytes and {len(names)} special token{'s' * (len(names) > 1)}.",
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
    return HFTokenizer(backend)
