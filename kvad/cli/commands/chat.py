"""``kvad chat MODEL``: a conversation in the model's chat template, or one growing text without a template.

A turn begins with the tokens of the previous turn and reuses their cache: from the prefix cache, or, if the policy or
the layout has none, from the session. A saved chat includes its keys and values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad import storage
from kvad import text as text_lib
from kvad.cache import sessions
from kvad.cli import parameters
from kvad.cli.commands.generate import note_empty
from kvad.cli.fields import command, option
from kvad.cli.line_batches import open_for_command
from kvad.cli.output import format_bytes, note, print_error
from kvad.cli.stats import RunMeter, RunStats, cache_line, describe_evicted, describe_limit, group_use, stats_lines
from kvad.errors import DataError, KvadError, RequestError, StorageError, UsageError, format_count, suggest
from kvad.text import ids_of_text

if TYPE_CHECKING:
    from kvad.engine.scheduling import SamplingParams
    from kvad.llm import LLM
    from kvad.text import Tokenizer


@dataclass(frozen=True)
class ChatTurn:
    """A line of the user (as it entered the text) and the reply."""

    user_text: str
    user_ids: tuple[int, ...]
    reply: str
    reply_ids: tuple[int, ...]


class PlainChat:
    """Chat as one growing text, stored as ids: each turn begins with the tokens of the previous one."""

    name = "plain continuation: each line is a line of the text, and the model continues it"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        """Return the text that a line adds (on its own line, unless it ends with a backslash) and its ids."""
        text = "".join(turn.user_text + turn.reply for turn in turns)
        before = "\n" if text and not text.endswith("\n") else ""
        typed = before + (line[:-1] if line.endswith("\\") else f"{line}\n" if line else "")
        return typed, tuple(self._tokenizer.encode(typed))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        """Return the token ids of the whole prompt."""
        return [token for turn in turns for token in (*turn.user_ids, *turn.reply_ids)] + list(ids)


class TemplatedChat(PlainChat):
    """Chat in the model's template. A warning is printed if a message contains the text of a special token."""

    name = "the model's chat template"

    def __init__(self, template: text_lib.chat_template.ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        super().__init__(tokenizer)
        self._template, self._system = template, system

    def encode_turn(self, turns: Sequence[ChatTurn], line: str) -> tuple[str, tuple[int, ...]]:
        special = [name for name in self._tokenizer.special_tokens.names() if name and name in line]
        if special:
            note(f"{special[0]} in your text is read as a special token")
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
/stats       speed of the last reply and cache statistics
/kv          the cache now: blocks in use, cached for reuse and free; tokens of this chat; prefix hits
/undo        take back the last turn
/save NAME   save the chat and its cache as a session (kvad session list)
/save FILE   write the chat as JSON (a path, or a name that ends with .json), and its cache next to it
/load NAME   or FILE: continue a saved chat without recomputing it
/quit        leave (or Ctrl-D); Ctrl-C stops a reply"""
CHAT_COMMANDS = ("/help", "/stats", "/kv", "/save", "/load", "/undo", "/quit")
FILE_FORMAT = 1


class _ChatOptions(
    parameters.ModelArgument, parameters.SamplingFlags, parameters.CacheFlags, parameters.SessionDirOption
):
    system: str | None = option("System message of the chat template")


@command("chat", _ChatOptions)
def chat_command(options: _ChatOptions) -> None:
    """Chat with a model in its chat template; without a template it continues one growing text. /help lists commands.

    \b
    kvad chat runs/demo --max-tokens 64 --temperature 0.7 --stop "\\n\\n"
    kvad chat runs/demo --overflow sinks
    kvad chat ./Qwen3-0.6B --system "You answer in verse."
    """
    load, given = parameters.load_fields(options), options.sampling_fields()
    handle = open_for_command(options.model, "chat")
    sampling = options.resolve(given, handle, endless=options.endless)
    with parameters.open_llm(handle, load, max_num_seqs=sampling.num_beams) as llm:
        if llm.tokenizer is None:
            raise RequestError("the model has no tokenizer", "kvad generate --ids accepts token ids")
        dialogue, template = PlainChat(llm.tokenizer), text_lib.chat_template.ChatTemplate.load(handle.tokenizer_folder)
        if template is not None:
            dialogue = TemplatedChat(template, llm.tokenizer, options.system)
        elif options.system is not None:
            raise UsageError("--system: the model has no chat template", "type the text as the first line")
        chat = _Chat(llm, llm.tokenizer, sampling, dialogue, options.session_folder)
        for line in _lines():
            try:
                if not chat.handle_line(line):
                    break
            except KvadError as error:
                note(f"error: {error.message}" + (f"; {error.hint}" if error.hint else ""))
            except OSError as error:  # an invalid path does not end the chat
                note(f"error: {error.filename}: {error.strerror}")


def _lines() -> Iterator[str]:
    """Read lines from the keyboard (with readline, if available) or a pipe. Ctrl-D ends, Ctrl-C drops a line."""
    if not sys.stdin.isatty():
        for number, raw in enumerate(sys.stdin.buffer, 1):
            try:
                yield raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(f"standard input, line {number}: not UTF-8 at byte {error.start}") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines once it is imported
    print_error("/help lists the commands; Ctrl-D leaves")
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            print_error("\n(/quit or Ctrl-D leaves)")


class _Chat:
    """The turns of a chat, and the commands that act on them."""

    def __init__(
        self, llm: LLM, tokenizer: Tokenizer, sampling: SamplingParams, dialogue: PlainChat, folder: Path
    ) -> None:
        self.llm, self.tokenizer, self.sampling, self.dialogue = llm, tokenizer, sampling, dialogue
        self.folder, self.session = folder, llm.session()
        self.turns: list[ChatTurn] = []
        self.last: RunStats | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for turn in self.turns for token in (*turn.user_ids, *turn.reply_ids)]

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the chat, reply included; None without a limit."""
        limits = self.llm.engine.limits
        return None if limits.endless else limits.max_len_for(self.sampling)[0]

    def handle_line(self, line: str) -> bool:
        """Handle one line; return False to end the chat."""
        if not line.startswith("/"):
            self.reply(line)
            return True
        name, _, rest = line.partition(" ")
        path = rest.strip()
        if name not in CHAT_COMMANDS:
            raise UsageError(f"no such command {name}", suggest(name, CHAT_COMMANDS))
        if (name in ("/save", "/load")) != bool(path):
            raise UsageError(f"{name} needs a name or a file" if not path else f"{name} takes nothing after it")
        if path:
            print_error(self.save(path) if name == "/save" else self.load(path))
        elif name != "/quit":
            actions = {"/undo": self.undo, "/stats": self.stats, "/kv": self.kv}
            print_error(f"This chat is in {self.dialogue.name}.\n{HELP}" if name == "/help" else actions[name]())
        return name != "/quit"

    def reply(self, line: str) -> None:
        """Add a line to the chat and print the reply; a turn that fails changes nothing."""
        typed, ids = self.dialogue.encode_turn(self.turns, line)
        prompt = self.dialogue.prompt(self.turns, typed, ids)
        if self.limit is not None and len(prompt) >= self.limit:
            raise RequestError(
                f"no room for a reply: {format_count(len(prompt), 'token')} with this line, the limit is {self.limit}",
                "/undo takes back the last turn" if self.turns else "shorten it",
            )
        note_empty(self.llm, prompt)
        meter, text, tokens, limit = RunMeter(self.llm), "", list[int](), None
        # A beam search cannot continue a session, so it uses the prefix cache only.
        stream = self.llm.stream if self.sampling.num_beams > 1 else self.session.continue_from
        with parameters.InterruptFlag() as stop, closing(stream(prompt, self.sampling)) as chunks:
            for chunk in chunks:
                meter.add(chunk)
                click.echo(chunk.text, nl=False)
                text += chunk.text
                if chunk.token_id is not None:
                    tokens.append(chunk.token_id)
                limit = chunk.limit
                if stop.requested:
                    break
        click.echo()
        self.last = meter.stats()
        self.turns.append(ChatTurn(typed, ids, text, ids_of_text(self.tokenizer, text, tokens)))
        length = len(prompt) + len(tokens)
        if self.limit is not None and length >= self.limit:
            print_error(f"the context of {format_count(self.limit, 'token')} is full: /undo takes back the last turn")
        elif limit == "pool":
            print_error(f"the reply {describe_limit(self.llm, limit)}")
        if self.session.missed:
            note(f"the cached chat could not be reused: {self.session.missed}")
        if evicted := describe_evicted(self.llm, length):
            note(evicted)

    # ------------------------------------------------------------ commands

    def stats(self) -> str:
        return "no reply was generated yet" if self.last is None else "\n".join(stats_lines(self.last))

    def kv(self) -> str:
        cache_stats = self.llm.engine.kv_cache_manager.stats()
        num_cached = self.last.cached_tokens if self.last is not None else 0
        hits, misses = format_count(cache_stats.hits, "hit"), format_count(cache_stats.misses, "miss", "misses")
        limit = "without a limit" if self.limit is None else f"of at most {self.limit}"
        return "\n".join([
            *map(cache_line, group_use(self.llm)),
            f"this chat: {format_count(len(self.tokens), 'token')} {limit}",
            f"the last turn: {num_cached} of its tokens were in the cache",
            f"prefix cache: {hits}, {misses}, {format_count(cache_stats.hit_tokens, 'token')} reused in total",
        ])  # fmt: skip

    def undo(self) -> str:
        if not self.turns:
            raise UsageError("there is no turn to take back")
        self.turns.pop()
        return f"{self._num_turns()} left"

    def _num_turns(self) -> str:
        return f"{format_count(len(self.turns), 'turn')} {'is' if len(self.turns) == 1 else 'are'}"

    def save(self, where: str) -> str:
        """Save the chat as a session, or as JSON with its cache next to it; return a message.

        Files are written under a temporary name and renamed: if writing fails, an older file is unchanged.
        """
        message = f"{self._num_turns()} in"
        session, path = self._files(where)
        offloads = self.llm.engine.kv_cache_manager.uses_offload
        if path is None and offloads:
            raise UsageError("offloaded tokens cannot be saved", "/save FILE.json saves the text, which is recomputed")
        if path is not None:
            _check_chat_file(path)
            text_lib.base.write_text(path, json.dumps(self._content(), ensure_ascii=False, indent=1) + "\n")
        if self.turns and not offloads:
            last = self.turns[-1]
            self.session.tokens = self.dialogue.prompt(self.turns[:-1], last.user_text, last.user_ids)
            self.session.tokens += last.reply_ids
            nbytes = self.session.save(session, chat=self._content())
            message += f" {path or session}; {format_bytes(nbytes)} of cache" + (f" in {session}" if path else "")
        elif path is None:
            raise UsageError("the chat is empty")
        else:
            message += f" {path}" + ("; its cache is not saved, because its tokens are offloaded" if offloads else "")
        return message

    def _content(self) -> dict[str, Any]:
        turns = [{"typed": turn.user_text, "reply": turn.reply} for turn in self.turns]
        ids = [{"typed": list(turn.user_ids), "reply": list(turn.reply_ids)} for turn in self.turns]
        return {"kvad_chat": FILE_FORMAT, "tokenizer": self.tokenizer.fingerprint(), "turns": turns, "ids": ids}

    def _files(self, where: str) -> tuple[Path, Path | None]:
        """Return the path of the session file, and of the JSON file if ``where`` is a file and not a name."""
        if storage.filesystem.is_valid_name(where) and not where.endswith(".json"):
            return sessions.directory.session_path(where, self.folder), None
        return Path(f"{where}{sessions.directory.FILE_SUFFIX}"), Path(where)

    def load(self, where: str) -> str:
        """Replace this chat with a saved one, and return a message.

        Texts of another tokenizer are encoded again. A saved cache that does not fit is not used, and reported.
        """
        session, path = self._files(where)
        if path is None and not session.exists():
            path = Path(where)  # chats were JSON files before there were sessions
        if path is None:
            content = storage.container.read_header(session).metadata.get("writer", {}).get("chat")
        elif where == path.name and not path.exists():
            message = f"there is no session {where} in {self.folder}, and no file {where} here"
            raise UsageError(message, "kvad session list")
        else:
            try:
                content = json.loads(path.read_text("utf-8"))
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from None
            except ValueError:
                raise UsageError(f"{path} is not JSON") from None
        try:
            turns = self._turns(content)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UsageError(f"{path or session} is not a chat that /save wrote") from None
        loaded, reason = self.llm.session(), ""
        if session.exists():
            try:
                loaded.load(session)
            except StorageError as error:
                if error.reason == "damaged" and path is None:
                    raise
                reason = f"; {error.message}"
        self.turns, self.session = turns, loaded
        num_turns, length = format_count(len(turns), "turn"), format_count(len(self.tokens), "token")
        tokens = format_count(len(loaded.tokens or self.tokens), "token")
        return f"{num_turns}, {length} from {path or session}; {loaded.restored:,} of {tokens} restored{reason}"

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
    """Raise UsageError if the file was not written by /save."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except ValueError:
        content = None
    if not isinstance(content, dict) or "kvad_chat" not in content:
        raise UsageError(f"{path} is not a chat that /save wrote, and is not overwritten", "choose another name")
