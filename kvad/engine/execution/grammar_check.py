"""Child process of ``kvad.engine.execution.grammar`` that compiles a grammar under limits of time, memory and stack.

A grammar is untrusted: rules or references that nest too deeply overflow the stack of a native thread, which ends the
process, and some schemas take seconds and hundreds of megabytes. So each new grammar is first compiled here, with bytes
as tokens and in a thread with a small stack; the engine compiles it again, in a larger stack, if it passes. Standard
input is JSON: "grammar", "limits" and "seconds" of CPU time; standard output is the error, or nothing. It imports no
other module of kvad, so that it starts within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_MEMORY = 512 << 20  # bytes of address space
STACK = 1 << 20  # bytes


class _Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8, and an end token."""

    tokens = [*(bytes([value]) for value in range(255)), b"", b""]  # noqa: RUF012  # llguidance reads a list
    special_token_ids: tuple[int, ...] = ()
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _check(request: dict[str, Any], errors: list[str]) -> None:
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    limits = LLParserLimits(**request["limits"])
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    errors.append(matcher.get_error())


def main() -> None:
    """Check the grammar of the standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # macOS does not limit the address space
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    request, errors = json.loads(sys.stdin.buffer.read()), list[str]()
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    threading.stack_size(STACK)
    thread = threading.Thread(target=_check, args=(request, errors))
    thread.start()
    thread.join()
    sys.stdout.buffer.write(errors[0].encode())


if __name__ == "__main__":
    main()
