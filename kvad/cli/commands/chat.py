"""``kvad chat MODEL``: a conversation in the model's own chat template, or, without one, one growing text.

Either way (``dialogue.py``) a turn begins with the tokens of the last one and finds them in the cache: in its prefixes,
or, where a policy or a layout has none, in what the last turn left.  What is saved has its keys and values with it.
Lines from a pipe work like lines from a keyboard.

How a chat becomes tokens: in the model's chat template, or as one growing text where it has none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from kvad import storage
from kvad.cache import sessions
from kvad.cli.cache_options import describe_evicted, describe_limit, parse_policy_options
from kvad.cli.commands.generate import note_empty
from kvad.cli.commands.session import sessions_option
from kvad.cli.line_batches import open_for_command
from kvad.cli.model_options import (
    InterruptFlag,
    add_cache_options,
    open_llm,
    parse_sampling_options,
    resolve_sampling_options,
    sampling_options,
)
from kvad.cli.options import SectionedCommand, format_bytes, model_argument
from kvad.cli.stats import RunMeter, RunStats, cache_lines, group_use, stats_lines
from kvad.errors import DataError, KvadError, RequestError, StorageError, UsageError, format_count, suggest
from kvad.text import ids_of_text

if TYPE_CHECKING:
    from kvad import cache
    from kvad import text as text_lib
    from kvad.engine import StreamChunk
    from kvad.engine.scheduling import SamplingParams
    from kvad.llm import LLM
    from kvad.text import Tokenizer


@dataclass(frozen=True)
class ChatTurn:
    """What was typed (as it entered the text) and what came, as text and as ids."""

    user_text: str
    user_ids: tuple[int, ...]
    reply: str
    reply_ids: tuple[int, ...]


class ChatFormat(Protocol):
    """``name``: what kind of chat this is, for /help and files."""

    name: str

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        """The line as it enters the chat, and its own ids where a turn has such."""
        ...

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        """Everything that the model is to go on from."""
        ...


def choose_chat_format(folder: Path, tokenizer: Tokenizer, system: str | None) -> ChatFormat:
    """In the template of the model's folder, where there is one.  ``system``: what the model is told first."""
    from kvad import text as text_lib

    template = text_lib.chat_template.ChatTemplate.load(folder)
    if template is not None:
        return TemplatedChat(template, tokenizer, system)
    if system is not None:
        from kvad.errors import UsageError

        raise UsageError("--system needs a chat template, and this model has none", "type it as the first line")
    return PlainText(tokenizer)


class PlainText:
    """One growing text.  History is kept as ids, so that each turn begins with exactly the tokens of the last one."""

    name = "plain continuation: each line is a line of the text, and the model goes on"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        """On a line of its own, unless it ends with a backslash."""
        text = "".join(turn.user_text + turn.reply for turn in turns)
        before = "\n" if text and not text.endswith("\n") else ""
        typed = before + (line[:-1] if line.endswith("\\") else f"{line}\n" if line else "")
        return typed, tuple(self._tokenizer.encode(typed))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        return [token for turn in turns for token in (*turn.user_ids, *turn.reply_ids)] + list(ids)


class TemplatedChat:
    """Messages in the model's own template.  Special tokens that a message spells out would be read as such: said once
    per message."""

    name = "the model's own chat template"

    def __init__(self, template: text_lib.chat_template.ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        self._template, self._tokenizer, self._system = template, tokenizer, system

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        spelled = [name for name in self._tokenizer.special_tokens.names() if name and name in line]
        if spelled:
            click.echo(f"kvad: {spelled[0]} in your text is a special token, and will be read as one", err=True)
        return line, tuple(self._tokenizer.encode(line))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user_text}, {"role": "assistant", "content": turn.reply}]
        messages.append({"role": "user", "content": typed})
        text = self._template.render(messages, generation_prompt=True).text
        return self._tokenizer.encode(text, specials=True)


HELP = """\
What you type is your turn.  In a plain continuation chat, end a line with \\ to leave it open.
/stats       speed of the last reply, and what the cache did
/kv          the cache now: blocks in use, kept for reuse and free; tokens of this chat; prefix hits
/undo        take back the last turn
/save NAME   keep the chat and what the cache holds of it, as a session (kvad session list)
/save FILE   write the chat as JSON (a path, or a name that ends with .json), and beside it what the cache holds
/load NAME   or FILE: go on with a saved chat, without computing it again
/quit        leave (or Ctrl-D); Ctrl-C stops a reply"""
CHAT_COMMANDS = ("/help", "/stats", "/kv", "/save", "/load", "/undo", "/quit")
FILE_FORMAT = 1


@click.command(cls=SectionedCommand)
@model_argument
@sampling_options
@add_cache_options
@sessions_option
@click.option("--system", metavar="TEXT", help="What the model is told first, in its chat template.")
def chat_command(model: Path, **options: Any) -> None:
    """Talk with a model, in its chat template; without one it continues one growing text.  /help lists what else can be
    typed.

    \b
    kvad chat runs/demo --max-tokens 64 --temperature 0.7 --stop "\\n\\n"
    kvad chat runs/demo --on-full sinks
    kvad chat ./Qwen3-0.6B --system "You answer in verse."
    """
    given = parse_sampling_options(options)
    parse_policy_options(options)
    from kvad.llm import resolve_sampling

    opened = open_for_command(model, "chat")
    with open_llm(opened.path, options, rows=resolve_sampling(given, opened.generation).num_beams) as llm:
        if llm.tokenizer is None:
            raise RequestError("this model came without a tokenizer", "kvad generate --ids speaks in token ids")
        dialogue = choose_chat_format(opened.tokenizer_folder, llm.tokenizer, options["system"])
        sampling = resolve_sampling_options(llm, given, options["bad_word"], endless=options["endless"])
        talk = _Chat(llm, sampling, dialogue, options["sessions"] or sessions.directory.default_session_dir())
        for line in _lines():
            try:
                if not talk.take(line):
                    break
            except KvadError as error:
                _print_stderr(f"kvad: error: {error.message}" + (f"; {error.hint}" if error.hint else ""))
            except OSError as error:  # a path that cannot be: the chat is worth more than it
                _print_stderr(f"kvad: error: {error.filename}: {error.strerror}")


def _print_stderr(text: str) -> None:
    click.echo(text, err=True)


def _lines() -> Iterator[str]:
    """Lines of the keyboard, with editing where readline exists, or of a pipe.  Ctrl-D ends them, Ctrl-C drops one."""
    if not sys.stdin.isatty():
        yield from _read_piped()
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines once it is imported
    _print_stderr("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            _print_stderr("\n(/quit or Ctrl-D leaves)")


def _read_piped() -> Iterator[str]:
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            yield raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"standard input, line {number}: not UTF-8 at byte {error.start}") from None


class _Chat:
    """The turns so far, and what every command does with them."""

    def __init__(self, llm: LLM, sampling: SamplingParams, dialogue: ChatFormat, folder: Path) -> None:
        assert llm.tokenizer is not None
        self.llm, self.tokenizer, self.sampling, self.dialogue = llm, llm.tokenizer, sampling, dialogue
        self.folder, self.session = folder, llm.session()
        self.turns: list[ChatTurn] = []
        self.last: RunStats | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for turn in self.turns for token in (*turn.user_ids, *turn.reply_ids)]

    @property
    def limit(self) -> int | None:
        """Tokens that the context holds, the reply included; None: it goes on."""
        limits = self.llm.engine.limits
        return None if limits.endless else limits.max_len_for(self.sampling)[0]

    def take(self, line: str) -> bool:
        """One line typed; False: leave."""
        if not line.startswith("/"):
            self.reply(line)
            return True
        name, _, rest = line.partition(" ")
        path = rest.strip()
        if name not in CHAT_COMMANDS:
            raise UsageError(f"no such command {name}", suggest(name, CHAT_COMMANDS))
        if (name in ("/save", "/load")) != bool(path):
            raise UsageError(f"{name} needs a name or a file" if not path else f"{name} takes nothing after it")
        if name == "/save":
            self.save(path)
        elif name == "/load":
            self.load(path)
        elif name == "/undo":
            self.undo()
        elif name != "/quit":
            _print_stderr({"/help": self.help, "/stats": self.stats, "/kv": self.kv}[name]())
        return name != "/quit"

    def reply(self, line: str) -> None:
        """Add the line to the text and let the model go on; nothing is kept of a turn that fails.

        RequestError: the text with this line leaves no room for a reply.
        """
        typed, ids = self.dialogue.encode_turn(self.turns, line)
        prompt = self.dialogue.prompt(self.turns, typed, ids)
        if self.limit is not None and len(prompt) >= self.limit:
            raise RequestError(
                f"no room for a reply: {format_count(len(prompt), 'token')} with this line, in a context of {self.limit}",
                "/undo takes back the last turn" if self.turns else "shorten it",
            )
        note_empty(self.llm, prompt)
        meter, text, tokens, limit = RunMeter(self.llm), "", list[int](), None
        with InterruptFlag() as stop, closing(self._stream(prompt)) as pieces:
            for piece in pieces:
                meter.add(piece)
                click.echo(piece.text, nl=False)
                text += piece.text
                if piece.token_id is not None:
                    tokens.append(piece.token_id)
                limit = piece.limit
                if stop.requested:
                    break
        click.echo()
        self.last = meter.stats()
        self.turns.append(ChatTurn(typed, ids, text, ids_of_text(self.tokenizer, text, tokens)))
        self._tell(len(prompt) + len(tokens), limit)

    def _stream(self, prompt: list[int]) -> Generator[StreamChunk, None, None]:
        """A search is no text that goes on while it runs: it finds its prefix, and leaves nothing else."""
        searching = self.sampling.num_beams > 1
        return (
            self.llm.stream(prompt, self.sampling) if searching else self.session.continue_from(prompt, self.sampling)
        )

    def _tell(self, length: int, limit: cache.config.LengthLimit | None) -> None:
        """What the chat has come to with its last reply: the end of the context, or of what is still seen of it."""
        if self.limit is not None and length >= self.limit:
            _print_stderr(f"the context of {format_count(self.limit, 'token')} is full: /undo takes back the last turn")
        elif limit == "pool":
            _print_stderr(f"the reply {describe_limit(self.llm, limit)}")
        if self.session.missed:
            _print_stderr(f"kvad: what was kept of the chat was of no use: {self.session.missed}")
        lost = describe_evicted(self.llm, length)
        if lost:
            _print_stderr(f"kvad: {lost}")

    # ------------------------------------------------------------ commands

    def help(self) -> str:
        return f"This chat is in {self.dialogue.name}.\n{HELP}"

    def stats(self) -> str:
        return "nothing was generated yet" if self.last is None else "\n".join(stats_lines(self.last))

    def kv(self) -> str:
        ledger = self.llm.engine.kv_cache_manager.stats()
        held = self.last.cached_tokens if self.last is not None else 0
        hits, misses = format_count(ledger.hits, "hit"), format_count(ledger.misses, "miss", "misses")
        most = "without an end" if self.limit is None else f"of at most {self.limit}"
        return "\n".join(
            [
                *(line for _, line in cache_lines(group_use(self.llm))),
                f"this chat: {format_count(len(self.tokens), 'token')} {most}",
                f"the last turn: {held} of its tokens were in the cache",
                f"prefix cache: {hits}, {misses}, {format_count(ledger.hit_tokens, 'token')} reused in all",
            ]
        )

    def undo(self) -> None:
        if not self.turns:
            raise UsageError("there is no turn to take back")
        self.turns.pop()
        left = len(self.turns)
        _print_stderr(f"{format_count(left, 'turn')} {'is' if left == 1 else 'are'} left")

    def save(self, where: str) -> None:
        """As a session; or as JSON, and beside it what the cache holds.  All of it is written beside and renamed: what
        was there before stays whole if the disk refuses."""
        from kvad import text as text_lib

        said = f"{format_count(len(self.turns), 'turn')} {'is' if len(self.turns) == 1 else 'are'} in"
        session, path = self._files(where)
        spills = self.llm.engine.kv_cache_manager.uses_offload
        if path is None and spills:
            raise UsageError("what a row has spilled is not saved", "/save FILE.json keeps the text, to be read again")
        if path is not None:
            _check_chat_file(path)
            text_lib.base.write_text(path, json.dumps(self._content(), ensure_ascii=False, indent=1) + "\n")
        if self.turns and not spills:
            last = self.turns[-1]
            self.session.tokens = self.dialogue.prompt(self.turns[:-1], last.user_text, last.user_ids)
            self.session.tokens += last.reply_ids
            nbytes = self.session.save(session, chat=self._content())
            said += f" {path or session}; {format_bytes(nbytes)} of cache" + (f" in {session}" if path else "")
        elif path is None:
            raise UsageError("there is nothing to save yet")
        else:
            said += f" {path}" + ("; what the cache holds of it is not kept, for its rows spill" if spills else "")
        _print_stderr(said)

    def _content(self) -> dict[str, Any]:
        turns = [{"typed": turn.user_text, "reply": turn.reply} for turn in self.turns]
        ids = [{"typed": list(turn.user_ids), "reply": list(turn.reply_ids)} for turn in self.turns]
        return {"kvad_chat": FILE_FORMAT, "tokenizer": self.tokenizer.fingerprint(), "turns": turns, "ids": ids}

    def _files(self, where: str) -> tuple[Path, Path | None]:
        """The session's file, and the JSON beside it where ``where`` is a file and no name."""
        if storage.filesystem.is_valid_name(where) and not where.endswith(".json"):
            return sessions.directory.session_path(where, self.folder), None
        return Path(f"{where}{sessions.directory.FILE_SUFFIX}"), Path(where)

    def load(self, where: str) -> None:
        """Replace this chat by a saved one.  Ids of another tokenizer are made anew from the texts; what of the cache
        was saved with it and does not belong here is left out, and said."""
        session, path = self._files(where)
        if path is None and not session.exists():
            path = Path(where)  # as chats were saved before there were sessions
        if path is None:
            content = storage.container.read_header(session).metadata.get("said", {}).get("chat")
        elif where == path.name and not path.exists():
            raise UsageError(
                f"there is no session {where} in {self.folder}, and no file {where} here", "kvad session list"
            )
        else:
            content = self._read_json(path)
        try:
            turns = self._turns(content)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UsageError(f"{path or session} is not a chat that /save wrote") from None
        fresh, why = self.llm.session(), ""
        if session.exists():
            try:
                fresh.load(session)
            except StorageError as error:
                if error.reason == "torn" and path is None:
                    raise
                why = f"; {error.message}"
        self.turns, self.session = turns, fresh
        tokens = fresh.tokens or self.tokens
        _print_stderr(
            f"{format_count(len(self.turns), 'turn')}, {format_count(len(self.tokens), 'token')} from {path or session}; "
            f"{fresh.restored:,} of {format_count(len(tokens), 'token')} restored{why}"
        )

    def _read_json(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise UsageError(f"{path} is not JSON") from None

    def _turns(self, content: Any) -> list[ChatTurn]:
        if content["kvad_chat"] != FILE_FORMAT:
            raise ValueError
        texts = [(str(turn["typed"]), str(turn["reply"])) for turn in content["turns"]]
        if content["tokenizer"] == self.tokenizer.fingerprint():
            ids = [(tuple(map(int, turn["typed"])), tuple(map(int, turn["reply"]))) for turn in content["ids"]]
        else:
            ids = [(tuple(self.tokenizer.encode(a)), tuple(self.tokenizer.encode(b))) for a, b in texts]
        return [ChatTurn(a, c, b, d) for (a, b), (c, d) in zip(texts, ids, strict=True)]


def _check_chat_file(path: Path) -> None:
    """UsageError: there is a file that /save did not write, and nothing of it would be left."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        content = None
    if not isinstance(content, dict) or "kvad_chat" not in content:
        raise UsageError(f"{path} is not a chat that /save wrote, and stays as it is", "choose another name")
