"""Byte-level BPE, trained by the ``tokenizers`` library.

The scheme is GPT-2's (Radford et al. 2019): text becomes bytes, so nothing is unknown and decoding is lossless; the
same texts give the same file, byte for byte.  Ids: specials first (0, ...), then the 256 bytes, then the merges.

``tokenizers`` is imported only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvad.errors import TokenizerError
from kvad.text.base import ENCODER_NAMES, NAMES, split_text, standard_specials
from kvad.text.frame import PostProcessor, write_post_processor
from kvad.text.library import HFTokenizer
from kvad.text.pieces import byte_alphabet

__all__ = ["train_bpe"]


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
    from tokenizers import (  # type: ignore[import-untyped]
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
