"""Structured output: grammars compiled by llguidance, and the tokens that they allow next.

``GrammarCompiler`` (one per engine) compiles a ``StructuredOutput`` under limits and caches it. ``GrammarState`` is
where one sample is in its grammar: a function of its tokens so far, so that a preemption, a step that is repeated and
tokens that are taken back cannot make it wrong. ``allowed_tokens`` is the mask of all constrained rows of a step.

A grammar is matched with bytes of text. A tokenizer may drop the space before a text's first token (SentencePiece,
WordPiece), so the vocabulary given to llguidance has a second entry for each token whose text differs at the start:

    "▁the" (id 7) is b" the" inside a text and b"the" at its start: entries 7 and, say, 32000

Special tokens have no text and are never allowed, except end tokens where the grammar may end, and those that the
request makes visible, whose text is their name. The last entry stands for "the grammar may end here"; which tokens end
a sample is a matter of its request, not of the grammar.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvad.engine.scheduling import StructuredOutput, TokenSequence
from kvad.errors import RequestError, UsageError
from kvad.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
Words = npt.NDArray[np.int32]  # 32 tokens each, the lowest bit first
MAX_CACHED = 16  # compiled grammars of an engine
MAX_COMPILE_SECONDS = 1.0  # of CPU time, in the process that checks a grammar
WAIT_SECONDS = 15.0  # for that process, on a busy machine
MAX_THREADS = 8  # that compute the masks of several rows
MAX_ERROR_CHARS = 200
NO_TOKEN = "no token of this vocabulary can continue the text"
START = "import sys; sys.path += sys.argv[1:]; from grammar_check import main; main()"
STACK = 16 << 20  # bytes of the thread that compiles: 16 times that of the check
# llguidance's limits (``LLParserLimits``). A lexer state takes 1 to 2 kB; fuel is time, 20 to 50 units a microsecond.
LIMITS: dict[str, Any] = {
    "max_grammar_size": 200_000,
    "max_lexer_states": 32_768,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,  # an object with N optional properties has 4N in one
    "verbose_errors": False,  # no state of the parser in messages
}
# Parts of llguidance's messages, and the limits that were exceeded.
LIMIT_ERRORS = {
    "too many expressions": "step_lexer_fuel",
    "too many states": "max_lexer_states",
    "Too many items": "step_max_items",
    "items; max is": "max_items_in_row",
}
# Without it llguidance allows only its own choice of tokens for text that the grammar forces.
HEADER = '%llguidance {"no_forcing": true}\n'
# Between tokens of JSON: nothing, a space, or a line break with up to 20 spaces, so that no text is endless space.
JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"( |\n[ \t]{0,20})?"}
SPECIAL_MARKER = b"\xff"  # llguidance reads tokens that begin with it, which are not UTF-8, as special tokens
# Attributes of a Lark rule: a request has one temperature, and a limit of tokens would end a text inside a character.
# Strings, comments and regular expressions match first and whole, open ones too, so that the time is linear.
_UNSUPPORTED = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|(?:#|//).*|/(?:\\.|[^/\\])*/?|\b(?P<attribute>temperature|max_tokens)\s*='
)


class Vocabulary:
    """The texts of a tokenizer's tokens as llguidance's vocabulary, and which of its entries are tokens with text.

    Entries of the same tokenizer have the same numbers, whatever special tokens (ids and texts) are ``visible``.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Mapping[int, bytes] = MappingProxyType({})) -> None:
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

        texts = [_text_bytes(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        entries, self.first_entries = list(texts), np.arange(len(texts))
        first_texts = [_text_bytes(tokenizer.incremental_decoder()(token)) for token in range(len(texts))]
        for token, text in enumerate(first_texts):
            if text != texts[token]:
                self.first_entries[token] = len(entries)
                entries.append(text)
        for token, text in visible.items():
            entries[token] = text
        self.size, self.end_entry = len(texts), len(entries)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(_Entries([*entries, b""])))
        self.num_words = self.end_entry // 32 + 1
        has_text = np.array([bool(text) for text in entries])
        self.first_words = self._pack(self.first_entries[has_text[self.first_entries]])
        self.text_words = self._pack(np.flatnonzero(has_text[: self.size]))
        self.executor: LLExecutor = LLExecutor(min(MAX_THREADS, os.cpu_count() or 1))

    def _pack(self, entries: npt.NDArray[np.int64]) -> Words:
        bits = np.zeros(self.num_words * 32, dtype=bool)
        bits[entries] = True
        words: Words = np.packbits(bits, bitorder="little").view(np.int32)
        return words


class _Entries:
    """The object that llguidance reads a vocabulary from; its last entry is the end."""

    special_token_ids: tuple[int, ...] = ()
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.eos_token_id = tokens, len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        """Return no tokens: with ``HEADER`` llguidance does not tokenize."""
        return []


def _text_bytes(text: bytes) -> bytes:
    return b"" if text.startswith(SPECIAL_MARKER) else text


class MatcherState:
    """Position of a sample in its grammar, after ``tokens``.

    Attributes:
        words: The tokens that may be next, as bits of the vocabulary's entries.
        may_end: The text may end here.
        error: A reason why the text cannot be continued, or "".
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar, self.tokens = grammar, list[int]()
        self._matcher: LLMatcher | None = None  # copied from the grammar's at the first token
        self.words, self.may_end, self.error = grammar.first_words, grammar.may_be_empty, ""

    @property
    def is_complete(self) -> bool:
        """True if the text may end here and no token can continue it."""
        return self.may_end and not self.words.any()

    def copy(self) -> MatcherState:
        """Return a separate state after the same tokens."""
        state = copy(self)
        state._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return state

    def advance(self, tokens: list[int]) -> LLMatcher:
        """Set the tokens and return the matcher after them, of which ``compute_masks`` reads the words."""
        matcher, num_equal = self._matcher, len(self.tokens)
        if self.tokens != tokens[:num_equal]:  # a step was repeated, or tokens were taken back
            num_equal = next(i for i, pair in enumerate(zip_longest(self.tokens, tokens)) if pair[0] != pair[1])
        if matcher is None or self.error or not matcher.rollback(len(self.tokens) - num_equal):
            matcher, num_equal = self.grammar.matcher.deep_copy(), 0
        entries = tokens[num_equal:]
        if entries and not num_equal:
            entries[0] = int(self.grammar.vocabulary.first_entries[entries[0]])
        matcher.consume_tokens(entries)
        self._matcher, self.tokens = matcher, tokens
        return matcher


def compute_masks(states: Sequence[MatcherState], all_tokens: Sequence[list[int]]) -> None:
    """Advance the states of one engine to these tokens and compute the tokens that may be next, of all at once."""
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

    if not states:
        return
    matchers = [state.advance(tokens) for state, tokens in zip(states, all_tokens, strict=True)]
    vocabulary = states[0].grammar.vocabulary
    words = allocate_token_bitmask(len(states), vocabulary.num_words * 32)
    if len(states) == 1:
        fill_next_token_bitmask(matchers[0], words)
    else:
        fill_next_token_bitmask_par(vocabulary.executor, [(each, i) for i, each in enumerate(matchers)], words)
    ends = words[:, vocabulary.end_entry // 32] >> vocabulary.end_entry % 32 & 1
    for state, matcher, mask, end in zip(states, matchers, words, ends.tolist(), strict=True):
        state.error = describe_error(matcher.get_error()) if matcher.is_error() else ""
        state.may_end = bool(end) and not state.error
        state.words = mask & (vocabulary.text_words if state.tokens else vocabulary.first_words)


def allowed_tokens(sequences: Sequence[TokenSequence], num_tokens: int) -> npt.NDArray[np.bool_]:
    """Return the tokens [N, num_tokens] that may be next in sequences with a structured output.

    End tokens are allowed where the text may end, and only there; other tokens without text never.

    Raises:
        RequestError: If a sequence cannot be continued.
    """
    states = [_state(seq) for seq in sequences]
    outputs = [_output_tokens(seq) for seq in sequences]
    stale = [(state, tokens) for state, tokens in zip(states, outputs, strict=True) if state.tokens != tokens]
    compute_masks([state for state, _ in stale], [tokens for _, tokens in stale])
    if error := next((state.error for state in states if state.error), ""):
        raise RequestError(f"structured_output: {error}")
    vocabulary = states[0].grammar.vocabulary
    words = np.stack([state.words for state in states])
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").view(np.bool_)
    allowed = np.zeros((len(states), num_tokens), dtype=bool)
    size = min(vocabulary.size, num_tokens)
    allowed[:, :size] = bits[:, :size]
    for row, state, seq in zip(range(len(states)), states, sequences, strict=True):
        if not state.tokens:
            allowed[row, :size] = bits[row, vocabulary.first_entries[:size]]
        allowed[row, [token for token in seq.stop_tokens if token < num_tokens]] = state.may_end
    return allowed


def num_valid_drafts(seq: TokenSequence, drafts: Sequence[int]) -> int:
    """Return how many drafts the grammar of a sequence allows one after the other, end tokens excluded."""
    stop = next((i for i, token in enumerate(drafts) if token in seq.stop_tokens), len(drafts))
    if not is_constrained(seq):
        return 0 if seq.grammar_state is not None else len(drafts)  # 0: behind a forced token
    state, tokens = _state(seq), _output_tokens(seq)
    entries = list(drafts[:stop])
    if entries and not tokens:
        entries[0] = int(state.grammar.vocabulary.first_entries[entries[0]])
    return state.copy().advance(tokens).validate_tokens(entries) if entries else 0


def complete_outputs(sequences: Sequence[TokenSequence], tokens: Sequence[int]) -> list[bool]:
    """Return for each sequence whether its sampled token completes its structured output, which no token continues."""
    rows = [i for i, seq in enumerate(sequences) if is_constrained(seq) and tokens[i] not in seq.stop_tokens]
    states = [_state(sequences[i]) for i in rows]
    compute_masks(states, [[*_output_tokens(sequences[i]), tokens[i]] for i in rows])
    complete = {row for row, state in zip(rows, states, strict=True) if state.is_complete}
    return [i in complete for i in range(len(sequences))]


def is_constrained(seq: TokenSequence) -> bool:
    """Return True if the next token of a sequence has a grammar; a forced first token precedes the grammar."""
    return seq.grammar_state is not None and seq.num_generated_tokens >= _num_forced(seq)


def _num_forced(seq: TokenSequence) -> int:
    return int(seq.sampling_params.forced_bos_token_id is not None)


def _output_tokens(seq: TokenSequence) -> list[int]:
    return seq.token_ids[seq.num_prompt_tokens + _num_forced(seq) :]


def _state(seq: TokenSequence) -> MatcherState:
    return cast("MatcherState", seq.grammar_state)


class CompiledGrammar:
    """A grammar and the tokens that may be first. Its matcher is only copied.

    Raises:
        RequestError: If the grammar is invalid, exceeds a limit, or no token can begin its text.
    """

    def __init__(self, grammar: str, vocabulary: Vocabulary) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.vocabulary = vocabulary
        self.first_words, self.may_be_empty = vocabulary.first_words, False
        self.matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        state = self.start()
        compute_masks([state], [[]])
        if state.error:
            raise RequestError(state.error)
        if not state.words.any():
            raise RequestError("allows no text" if state.may_end else NO_TOKEN)
        self.first_words, self.may_be_empty = state.words, state.may_end

    def start(self) -> MatcherState:
        """Return the state of a sample without tokens."""
        return MatcherState(self)


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer, from any thread. The last ``MAX_CACHED`` grammars are kept."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._vocabularies: dict[tuple[str, ...], Vocabulary] = {}
        self._cache: OrderedDict[tuple[StructuredOutput, tuple[str, ...]], CompiledGrammar] = OrderedDict()

    def compile(self, output: StructuredOutput, visible_special_tokens: Iterable[str] = ()) -> CompiledGrammar:
        """Return the compiled grammar.

        Args:
            output: The form of the text.
            visible_special_tokens: Names of special tokens that are part of the text.

        Raises:
            UsageError: If llguidance is not installed.
            RequestError: If the tokenizer has no fixed text per token, or the output is invalid or exceeds a limit.
        """
        names = {} if self._tokenizer is None else self._tokenizer.special_tokens.names()
        visible = tuple(sorted(names.keys() & visible_special_tokens))
        key = output, visible
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            vocabulary = self._open_vocabulary(visible)
        try:
            source = grammar_source(output)
            if error := _check_in_process(source):
                raise RequestError(describe_error(error))
            grammar = self._with_large_stack(partial(CompiledGrammar, source, vocabulary))
        except RequestError as error:
            raise RequestError(f"structured_output: {output.kind}: {error.message}", error.hint) from None
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _open_vocabulary(self, visible: tuple[str, ...]) -> Vocabulary:
        if self._tokenizer is None:
            raise RequestError("structured_output: requires a tokenizer, and this model has none")
        if not self._tokenizer.has_token_bytes:
            raise RequestError(
                f"structured_output: the text of a token of this {self._tokenizer.kind} tokenizer varies"
            )
        if visible not in self._vocabularies:
            names = self._tokenizer.special_tokens.names()
            try:
                vocabulary = Vocabulary(self._tokenizer, {names[name]: name.encode() for name in visible})
            except ImportError:
                hint = "Run pip install 'kvad[structured]'."
                raise UsageError("structured_output: requires the package llguidance", hint) from None
            self._vocabularies[visible] = vocabulary
        return self._vocabularies[visible]

    def _with_large_stack(self, function: Callable[[], T]) -> T:
        with ThreadPoolExecutor(1) as pool:
            with self._lock:  # the size is a setting of the process
                default = threading.stack_size(STACK)
                try:
                    future = pool.submit(function)
                finally:
                    threading.stack_size(default)
            return future.result()


def grammar_source(output: StructuredOutput) -> str:
    """Return llguidance's JSON form of a structured output."""
    from llguidance import LLMatcher

    if output.kind == "grammar":
        for match in _UNSUPPORTED.finditer(output.source):
            if match["attribute"] is not None:
                raise RequestError(f"{match['attribute']} is not supported in a rule", "Set the option of the request.")
        return json.dumps({"grammars": [{"lark_grammar": f"{output.source}\n{HEADER}"}]})
    if output.kind in ("json_schema", "json_object"):
        schema = json.loads(output.source) if output.source else {"type": "object"}
        options = schema.get("x-guidance", {})
        if not isinstance(options, dict):
            raise RequestError(f"x-guidance: must be an object, got {type(options).__name__}")
        defaults = {} if "whitespace_flexible" in options else JSON_OPTIONS
        (grammar,) = json.loads(LLMatcher.grammar_from_json_schema(schema, defaults=defaults))["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": f"start: @json\n{HEADER}"}, {**grammar, "name": "json"}]})
    regex = output.source
    if output.kind == "choice":
        regex = "|".join(map(_regex_of_text, json.loads(output.source)))
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(regex))["grammars"]
    return json.dumps({"grammars": [{**grammar, "lark_grammar": f"{grammar['lark_grammar']}\n{HEADER}"}]})


def _regex_of_text(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _check_in_process(grammar: str) -> str:
    """Compile a grammar in a child process (``grammar_check.py``) and return its error, or ""."""
    command = [sys.executable, "-I", "-c", START, str(Path(__file__).parent), *filter(None, sys.path)]
    request = json.dumps({"grammar": grammar, "limits": LIMITS, "seconds": MAX_COMPILE_SECONDS}).encode()
    slow = f"takes more than {MAX_COMPILE_SECONDS:g} s to compile"
    try:
        # A new session: the terminal's Ctrl-C is for this process.
        done = subprocess.run(command, input=request, capture_output=True, timeout=WAIT_SECONDS, start_new_session=True)
    except subprocess.TimeoutExpired:
        return slow
    if done.returncode < 0:
        is_slow = done.returncode == -signal.SIGPROF
        return slow if is_slow else "is nested too deeply, or takes too much memory to compile"
    return done.stdout.decode() if done.returncode == 0 else f"its check ended with status {done.returncode}"


def describe_error(error: str) -> str:
    """Return llguidance's error as one short line."""
    if error.startswith("NoExtensionBias"):
        return NO_TOKEN
    if "missing special token prefix" in error:
        return "a special token has no text and cannot be generated"
    if name := next((name for text, name in LIMIT_ERRORS.items() if text in error), ""):
        return f"the text or its form is too complex: it exceeds the limit {name} of {LIMITS[name]:,}"
    lines = [line for line in error.splitlines() if line.strip() and line != "<non-verbose/>"]
    line = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "cannot be compiled")
    line = line.removeprefix("error: ")
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}..."
