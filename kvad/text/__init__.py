"""Tokenizers, the incremental detokenizer and chat templates; no torch.

``tokenizer`` trains and loads tokenizers, ``detokenizer`` streams text and finds stop strings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvad._lazy import lazy_names

if TYPE_CHECKING:
    from kvad.text import base as base
    from kvad.text import chat_template as chat_template
    from kvad.text import hf_config as hf_config
    from kvad.text.base import Tokenizer as Tokenizer
    from kvad.text.detokenizer import Detokenizer as Detokenizer
    from kvad.text.detokenizer import StopStringMatcher as StopStringMatcher
    from kvad.text.detokenizer import ids_of_text as ids_of_text
    from kvad.text.hf_tokenizer import HFTokenizer as HFTokenizer
    from kvad.text.simple_tokenizers import split_words as split_words
    from kvad.text.tokenizer import KINDS as KINDS
    from kvad.text.tokenizer import load_tokenizer as load_tokenizer
    from kvad.text.tokenizer import train_tokenizer as train_tokenizer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
