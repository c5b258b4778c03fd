"""``kvad chat MODEL``: a conversation in the model's chat template, or one growing text without a template.

A turn begins with the tokens of the previous turn and reuses their cache: from the prefix cache, or, if the policy or
the layout has none, from the session. A saved chat includes its keys and values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvad import storage
from kvad import text as text_lib
from kvad.cache import sessions
from kvad.cli import parameters
from kvad.cli.chat_input import ChatInput, read_turns
from kvad.cli.commands.generate import note_empty
from kvad.cli.fields import command, option
from kvad.cli.line_batches import open_for_command
from kvad.cli.output import note, print_error
from kvad.cli.stats import RunMeter, RunStats, cache_line, describe_evicted, describe_limit, group_use, stats_lines
from kvad.errors import KvadError, RequestError, StorageError, UsageError, format_bytes, format_count, suggest
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

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer, self.system = tokenizer, system

    def encode_turn(self, turns: Sequence[ChatTurn], given: ChatInput) -> tuple[str, tuple[int, ...]]:
        """Return the text that a turn adds (on its own line, with a newline unless it is a block) and its ids."""
        text = "".join(turn.user_text + turn.reply for turn in turns)
        before = "\n" if text and not text.endswith("\n") else ""
        typed = before + (f"{given.text}\n" if given.text and not given.is_block else given.text)
        return typed, tuple(self._tokenizer.encode(typed))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        """Return the token ids of the whole prompt."""
        return [token for turn in turns for token in (*turn.user_ids, *turn.reply_ids)] + list(ids)


class TemplatedChat(PlainChat):
    """Chat in the model's template. A warning is printed if a message contains the text of a special token."""

    name = "the model's chat template"

    def __init__(self, template: text_lib.chat_template.ChatTemplate, tokenizer: Tokenizer, system: str | None) -> None:
        super().__init__(tokenizer, system)
        self._template = template

    def encode_turn(self, turns: Sequence[ChatTurn], given: ChatInput) -> tuple[str, tuple[int, ...]]:
        line = given.text
        special = [name for name in self._tokenizer.special_tokens.names() if name and name in line]
        if special:
            note(f"{special[0]} in your text is read as a special token")
        return line, tuple(self._tokenizer.encode(line))

    def prompt(self, turns: Sequence[ChatTurn], typed: str, ids: Sequence[int]) -> list[int]:
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in turns:
            messages += [{"role": "user", "content": turn.user_text}, {"role": "assistant", "content": turn.reply}]
        messages.append({"role": "user", "content": typed})
        text = self._template.render(messages, generation_prompt=True).text
        return self._tokenizer.encode(text, specials=True)


HELP = """\
What you type is your turn.  A \\ at the end of a line continues it on the next line; a pasted text is one turn.
\"\"\" opens a block of lines and closes it; in a plain continuation chat, its end is left open (no newline).
/stats       speed of the last reply and cache statistics
/kv          the cache now: policy, evicted tokens, blocks; tokens of this chat; prefix hits
/undo        take back the last turn
/retry       generate the last reply once more
/clear       take back all turns
/set         show the sampling options;  /set NAME VALUE changes one:  /set temperature 0.5
/system      show the system message;  /system TEXT changes it
/save NAME   save the chat and its cache as a session (kvad session list); --overwrite replaces another one
/save FILE   write the chat as JSON (a path, or a name that ends with .json), and its cache next to it
/load NAME   or FILE: continue a saved chat without recomputing it
/quit        leave (or /exit, Ctrl-D); Ctrl-C stops a reply"""
CHAT_COMMANDS = (
    "/help", "/stats", "/kv", "/undo", "/retry", "/clear", "/set", "/system", "/save", "/load", "/quit", "/exit",
)  # fmt: skip
SETTABLE: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "typical_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "no_repeat_ngram_size", "seed"), int),
}
FILE_FORMAT = 1


class _ChatOptions(
    parameters.ModelArgument,
    parameters.SamplingFlags,
    parameters.CacheFlags,
    parameters.SpeculativeOptions,
    parameters.SessionDirOption,
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
    handle = open_for_command(options.model, "chat", options.rope_scaling)
    sampling = options.resolve(given, handle, endless=options.endless)
    is_keyboard = sys.stdin.isatty()
    with parameters.open_llm(handle, load, max_num_seqs=sampling.num_beams, shows_room=is_keyboard) as llm:
        if llm.tokenizer is None:
            raise RequestError("the model has no tokenizer", "kvad generate --ids accepts token ids")
        dialogue, template = PlainChat(llm.tokenizer), text_lib.chat_template.ChatTemplate.load(handle.tokenizer_folder)
        if template is not None:
            dialogue = TemplatedChat(template, llm.tokenizer, options.system)
        elif options.system is not None:
            raise UsageError("--system: the model has no chat template", "type the text as the first line")
        chat = _Chat(llm, llm.tokenizer, sampling, dialogue, options.session_folder, options.cache_salt)
        if sampling.seed is None:
            chat.session.seed = parameters.choose_seed(sampling).seed
        for turn in read_turns(CHAT_COMMANDS):
            try:
                if not chat.handle_turn(turn):
                    break
            except KvadError as error:
                note(f"error: {error.message}" + (f"; {error.hint}" if error.hint else ""))
            except OSError as error:  # an invalid path does not end the chat
                note(f"error: {error.filename}: {error.strerror}")


class _Chat:
    """The turns of a chat, and the commands that act on them."""

    def __init__(
        self,
        llm: LLM,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        dialogue: PlainChat,
        folder: Path,
        cache_salt: str | None,
    ) -> None:
        self.llm, self.tokenizer, self.sampling, self.dialogue = llm, tokenizer, sampling, dialogue
        self.folder, self.cache_salt, self.session = folder, cache_salt, llm.session(cache_salt=cache_salt)
        self.turns: list[ChatTurn] = []
        self._own_files: set[Path] = set()  # that this chat was saved to or loaded from
        self.last: RunStats | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for turn in self.turns for token in (*turn.user_ids, *turn.reply_ids)]

    @property
    def limit(self) -> int | None:
        """Maximum tokens of the chat, reply included; None without a limit."""
        limits = self.llm.engine.limits
        return None if limits.endless else limits.max_len_for(self.sampling)[0]

    def handle_turn(self, turn: ChatInput) -> bool:
        """Handle one turn; return False to end the chat."""
        if turn.is_block or "\n" in turn.text or not turn.text.startswith("/"):
            self.reply(*self.dialogue.encode_turn(self.turns, turn))
            return True
        name, _, rest = turn.text.partition(" ")
        argument = rest.strip()
        if name not in CHAT_COMMANDS:
            raise UsageError(f"no such command {name}", suggest(name, CHAT_COMMANDS))
        if name in ("/quit", "/exit"):
            return False
        with_argument = {"/save": self.save, "/load": self.load, "/set": self.set, "/system": self.system}
        if argument and name not in with_argument:
            raise UsageError(f"{name} takes nothing after it")
        if name in ("/save", "/load") and not argument:
            raise UsageError(f"{name} needs a name or a file")
        if name == "/retry":
            self.retry()
        elif name in with_argument:
            print_error(with_argument[name](argument))
        else:
            actions = {"/undo": self.undo, "/clear": self.clear, "/stats": self.stats, "/kv": self.kv}
            print_error(f"This chat is in {self.dialogue.name}.\n{HELP}" if name == "/help" else actions[name]())
        return True

    def reply(self, typed: str, ids: tuple[int, ...]) -> None:
        """Add a turn of the user to the chat and print the reply; a turn that fails changes nothing."""
        prompt = self.dialogue.prompt(self.turns, typed, ids)
        if self.limit is not None and len(prompt) >= self.limit:
            raise RequestError(
                f"no room for a reply: {format_count(len(prompt), 'token')} with this line, the limit is {self.limit}",
                self._room_hint() if self.turns else "shorten it",
            )
        note_empty(self.llm, prompt)
        meter, text, tokens, limit = RunMeter(self.llm), "", list[int](), None
        # A beam search cannot continue a session, so it uses the prefix cache only.
        salt = self.cache_salt or ""
        beam_stream = partial(self.llm.stream, cache_salt=salt)
        stream = beam_stream if self.sampling.num_beams > 1 else self.session.continue_from
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
            print_error(f"the context of {format_count(self.limit, 'token')} is full: {self._room_hint()}")
        elif limit == "pool":
            print_error(f"the reply {describe_limit(self.llm, limit)}")
        if self.session.missed:
            note(f"the cached chat could not be reused: {self.session.missed}")
        if evicted := describe_evicted(self.llm, length):
            note(evicted)

    # ------------------------------------------------------------ commands

    def stats(self) -> str:
        if self.last is None:
            return "no reply was generated yet"
        seed = [] if self.session.seed is None else [f"{'seed':<11} {self.session.seed}"]
        return "\n".join([*stats_lines(self.last), *seed])

    def kv(self) -> str:
        cache_stats = self.llm.engine.kv_cache_manager.stats()
        hits, misses = format_count(cache_stats.hits, "hit"), format_count(cache_stats.misses, "miss", "misses")
        limit = "without a limit" if self.limit is None else f"of at most {self.limit}"
        last_turn = []
        if self.last is not None:
            last_turn = [f"the last turn: {self.last.cached_tokens} of its tokens were in the cache"]
        return "\n".join([
            *map(cache_line, group_use(self.llm, [len(self.tokens)])),
            f"this chat: {format_count(len(self.tokens), 'token')} {limit}",
            *last_turn,
            f"prefix cache: {hits}, {misses}, {format_count(cache_stats.hit_tokens, 'token')} reused in total",
        ])  # fmt: skip

    def undo(self) -> str:
        if not self.turns:
            raise UsageError("there is no turn to take back")
        self.turns.pop()
        self.last = None
        return f"{self._num_turns()} left"

    def retry(self) -> None:
        """Replace the last reply by another one; if that fails, the turn stays."""
        if not self.turns:
            raise UsageError("there is no reply to replace")
        last = self.turns.pop()
        try:
            self.reply(last.user_text, last.user_ids)
        except KvadError:
            self.turns.append(last)
            raise

    def clear(self) -> str:
        seed, draw_salt = self.session.seed, self.session.draw_salt + 1
        self.turns, self.last, self.session = [], None, self.llm.session(cache_salt=self.cache_salt)
        self.session.seed, self.session.draw_salt = seed, draw_salt
        return "the chat is empty"

    def set(self, text: str) -> str:
        """Change a sampling option, "NAME VALUE"; return all of them."""
        name, _, value = text.replace("=", " ").partition(" ")
        name = name.strip("-").replace("-", "_")
        if name and name not in SETTABLE:
            raise UsageError(f"no sampling option {name}", suggest(name, SETTABLE))
        if name:
            try:
                self.sampling = replace(self.sampling, **{name: SETTABLE[name](value)})
            except ValueError:
                raise UsageError(f"/set {name}: {value.strip()!r} is not a number", f"/set {name} 1") from None
        values = ((each, getattr(self.sampling, each)) for each in SETTABLE)
        return ", ".join(f"{each} {value}" for each, value in values if value is not None)

    def system(self, text: str) -> str:
        """Change the system message, if there is a text, and return it."""
        if not isinstance(self.dialogue, TemplatedChat):
            raise UsageError("/system: the model has no chat template", "type the text as the first line")
        if text:
            self.dialogue.system = text
        return f"system message: {self.dialogue.system}" if self.dialogue.system is not None else "no system message"

    def _room_hint(self) -> str:
        """Return how a full chat can continue."""
        can_evict = self.llm.model.config.embedding.position is None
        overflow = "; kvad chat --overflow sinks continues without the oldest tokens" if can_evict else ""
        return f"/undo takes back the last turn, /clear all turns{overflow}"

    def _num_turns(self) -> str:
        return f"{format_count(len(self.turns), 'turn')} {'is' if len(self.turns) == 1 else 'are'}"

    def save(self, where: str) -> str:
        """Save the chat as a session, or as JSON with its cache next to it; return a message.

        Files are written under a temporary name and renamed: if writing fails, an older file is unchanged.
        """
        message = f"{self._num_turns()} in"
        name = where.removesuffix("--overwrite").rstrip()
        session, path = self._files(name)
        target, overwrite = path or session, name != where
        offloads = self.llm.engine.kv_cache_manager.uses_offload
        if path is None and offloads:
            raise UsageError("offloaded tokens cannot be saved", "/save FILE.json saves the text, which is recomputed")
        if path is not None:
            _check_chat_file(path)
        if path is None:
            sessions.directory.check_overwritable(session)
        if target.exists() and target not in self._own_files and not overwrite:
            kind = "session " if path is None else ""
            raise UsageError(f"{kind}{name} exists", f"/save {name} --overwrite replaces it")
        if path is not None:
            text = json.dumps(self._content(), ensure_ascii=False, indent=1)
            storage.atomic.write_bytes(path, f"{text}\n".encode())
        if self.turns and not offloads:
            last = self.turns[-1]
            self.session.tokens = self.dialogue.prompt(self.turns[:-1], last.user_text, last.user_ids)
            self.session.tokens += last.reply_ids
            nbytes = self.session.save(session, overwrite=overwrite, chat=self._content())
            message += f" {path or session}; {format_bytes(nbytes)} of cache" + (f" in {session}" if path else "")
        elif path is None:
            raise UsageError("the chat is empty")
        else:
            message += f" {path}" + ("; its cache is not saved, because its tokens are offloaded" if offloads else "")
        self._own_files.add(target)
        return message

    def _content(self) -> dict[str, Any]:
        turns = [{"typed": turn.user_text, "reply": turn.reply} for turn in self.turns]
        ids = [{"typed": list(turn.user_ids), "reply": list(turn.reply_ids)} for turn in self.turns]
        content = {"kvad_chat": FILE_FORMAT, "tokenizer": self.tokenizer.fingerprint(), "turns": turns, "ids": ids}
        return content if self.dialogue.system is None else content | {"system": self.dialogue.system}

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
                content = storage.strict_json.loads(storage.filesystem.read_text(path))
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}") from None
            except ValueError:
                raise UsageError(f"{path} is not JSON") from None
        try:
            turns = self._turns(content)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UsageError(f"{path or session} is not a chat that /save wrote") from None
        loaded, reason = self.llm.session(cache_salt=self.cache_salt), ""
        if session.exists():
            try:
                loaded.load(session)
            except StorageError as error:
                if error.reason == "damaged" and path is None:
                    raise
                reason = f"; {error.message}"
        loaded.seed = self.session.seed if loaded.seed is None else loaded.seed
        self.turns, self.session = turns, loaded
        if isinstance(self.dialogue, TemplatedChat):
            self.dialogue.system = content.get("system")
        self._own_files.add(path or session)
        num_turns, length = format_count(len(turns), "turn"), format_count(len(self.tokens), "token")
        tokens = format_count(len(loaded.tokens or self.tokens), "token")
        return f"{num_turns}, {length} from {path or session}; {loaded.restored:,} of {tokens} restored{reason}"

    def _turns(self, content: Any) -> list[ChatTurn]:
        if content["kvad_chat"] != FILE_FORMAT:
            raise ValueError
        if not isinstance(content.get("system"), str | None):
            raise TypeError
        texts = [(str(turn["typed"]), str(turn["reply"])) for turn in content["turns"]]
        if content["tokenizer"] == self.tokenizer.fingerprint():
            ids = [(tuple(map(int, turn["typed"])), tuple(map(int, turn["reply"]))) for turn in content["ids"]]
        else:
            ids = [(tuple(self.tokenizer.encode(a)), tuple(self.tokenizer.encode(b))) for a, b in texts]
        return [ChatTurn(a, c, b, d) for (a, b), (c, d) in zip(texts, ids, strict=True)]


def _check_chat_file(path: Path) -> None:
    """Raise UsageError if the file was not written by /save."""
    try:
        content = storage.strict_json.loads(storage.filesystem.read_bytes(path))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or "kvad_chat" not in content:
        raise UsageError(f"{path} is not a chat that /save wrote, and is not overwritten", "choose another name")
