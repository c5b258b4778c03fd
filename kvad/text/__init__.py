"""Text to token ids and back: tokenizers, incremental detokenizing, stop strings.  No torch, and no import on import.

``kvad.text.tokenizer`` trains and loads, ``kvad.text.detokenize`` streams, ``kvad.text.stop`` ends a stream.
"""
