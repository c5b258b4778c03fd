"""Conversations: the mask covers exactly the assistant's tokens, for any messages and tokenizer."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad.errors import ChatTemplateError, ConfigError, DataError
from kvad.text.chat_template import ChatTemplate
from kvad.text.tokenizer import train_tokenizer
from kvad.train.config.run import RunConfig
from kvad.train.data.token_store import open_store
from kvad.train.setup.corpora import CorpusOpener
from kvad.train.sources.chat import (
    CHATML,
    CHATML_TOKENS,
    ChatCorpus,
    Conversation,
    encode_with_mask,
    render_with_spans,
    with_tokenizer_specials,
)
from kvad.train.sources.pairs import PairPaths

GENERATION = CHATML.replace(
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\\n' }}",
)
BRACKETS = (  # another style: no generation prompt of its own, the end of a turn is EOS
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
)
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SPECIALS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
TEXT = "".join(chr(c) for c in range(32, 127)) + "äöü 안녕 \n\n  don't stop.\t"
TOKENIZERS = {
    kind: train_tokenizer(
        kind, [TEXT, "user assistant hello there " * 5], vocab_size=330, specials=("bos", "eos", "unk", *CHATML_TOKENS)
    )
    for kind in ("bpe", "byte", "char")
}
TEMPLATES = {
    "chatml": (ChatTemplate(CHATML), "<|im_end|>"),
    "generation": (ChatTemplate(GENERATION), "<|im_end|>"),
    "brackets": (ChatTemplate(BRACKETS, SPECIALS), "<|eos|>"),
}
content = st.text(alphabet="ab .'\n\t ä안<|", max_size=12).map(lambda s: s.replace("<|", "< |"))
talks = st.lists(st.tuples(content, content), min_size=1, max_size=3).map(
    lambda pairs: [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(talk=talks)
def test_mask_covers_the_assistant_turns(name, kind, talk):
    """Masked tokens decode to the contents and the end token of each turn, all tokens to the conversation, and the
    tokens before a turn to its prompt."""
    (template, end), tokenizer = TEMPLATES[name], TOKENIZERS[kind]
    text, spans = render_with_spans(template, Conversation(talk, None), tokenizer.special_tokens.names())
    ids, mask = encode_with_mask(tokenizer, text, spans)
    assert tokenizer.decode(ids, skip_specials=False) == text == template.render(talk).text
    turns, at = [], 0
    while 1 in mask[at:]:
        low = at + mask[at:].index(1)
        at = low + ([*mask[low:], 0]).index(0)
        turns.append((low, ids[low:at]))
    answers = [message["content"] for message in talk if message["role"] == "assistant"]
    assert [tokenizer.decode(turn, skip_specials=False) for _, turn in turns] == [each + end for each in answers]
    for number, (low, _) in enumerate(turns):
        prompt = template.render(talk[: 2 * number + 1], generation_prompt=True).text
        assert tokenizer.decode(ids[:low], skip_specials=False) == prompt
    assert ids[: turns[0][0]] == tokenizer.encode(
        template.render(talk[:1], generation_prompt=True).text, specials=True
    ), "equal to the engine's prompt"


def test_template_that_rewrites_messages_is_refused():
    trimming = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% if loop.last %}!{% endif %}{% endfor %}")
    with pytest.raises(ChatTemplateError, match=r"messages\[1\]: the chat template does not render it"):
        render_with_spans(trimming, Conversation(TALK, None), ())
    with pytest.raises(ChatTemplateError, match="has no prompt"):
        render_with_spans(ChatTemplate(CHATML), Conversation(TALK[1:], None), ())


class Prefixing:
    """Like SentencePiece: a space before every text; tokens of two characters."""

    specials = TOKENIZERS["byte"].special_tokens

    def encode(self, text, *, specials=False):
        text = "_" + text
        return [tuple(text[i : i + 2]) for i in range(0, len(text), 2)]

    def encode_batch(self, texts, *, specials=False):
        return [self.encode(text) for text in texts]

    def decode(self, ids, *, skip_specials=True):
        return "".join("".join(token) for token in ids).removeprefix("_")

    def incremental_decoder(self, *, skip_specials=True):
        first = []

        def add(token):
            text = "".join(token)
            text, _ = (text.removeprefix("_"), first.append(1)) if not first else (text, None)
            return text.encode()

        return add


def test_tokenizer_that_prefixes_texts_encodes_the_whole():
    ids, mask = encode_with_mask(Prefixing(), "abcdef", [(3, 5)])
    assert ids == [("_", "a"), ("b", "c"), ("d", "e"), ("f",)] and mask == [0, 0, 1, 0]
    with pytest.raises(DataError, match="a token of this tokenizer spans the prompt"):
        encode_with_mask(Prefixing(), "abcdef", [(2, 5)])


# ---------------------------------------------------------------- files


def open_chats(path, template):
    return ChatCorpus(errors="strict", template=template).open(PairPaths(((path,),)), 0.1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2, is not JSON"),
        ("[]", "line 2: must be an object"),
        ('{"text": "x"}', r"line 2: a conversation is {\"messages\": \[...\]}"),
        ('{"messages": []}', "line 2: a conversation is"),
        ('{"messages": ["hi"]}', r"line 2: messages\[0\] has no role"),
        ('{"messages": [{"role": "user"}]}', r"line 2: messages\[0\] has no content"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": 1}', "line 2: tools must be a list"),
    ],
)
def test_invalid_conversations_are_named_by_line(line, message, tmp_path):
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    (tmp_path / "c.jsonl").write_text(good + line + "\n")
    with pytest.raises(DataError, match=message):
        open_chats(tmp_path / "c.jsonl", ChatTemplate(CHATML))


def test_conversation_that_cannot_be_rendered_is_named_by_line(tmp_path):
    strict = ChatTemplate("{% if messages[0]['content'] == 'x' %}{{ raise_exception('no x') }}{% endif %}" + CHATML)
    bad = [{"role": "user", "content": "x"}, *TALK[1:]]
    lone = [{"role": "user", "content": "no answer"}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in (TALK, lone, bad)))
    corpus = open_chats(tmp_path / "c.jsonl", strict)
    assert (corpus.num_texts, corpus.skipped) == (2, 1)
    with pytest.raises(DataError, match=r"c.jsonl, line 3: .*no x"):
        open_store(tmp_path / "data", corpus, TOKENIZERS["byte"])


def test_choice_of_the_template(tmp_path):
    (tmp_path / "c.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 2)
    paths = PairPaths(((tmp_path / "c.jsonl",),))
    (tmp_path / "mine.jinja").write_text(BRACKETS)

    def chosen(saved=None, path=None, **objective):
        content = {"objective": {"kind": "chat", **objective}, "tokenizer": {"path": path}}
        (((corpus,), _),) = CorpusOpener(RunConfig.from_dict(content), print, template=saved).open(paths)
        return corpus.template.templates["default"]

    assert chosen() == CHATML
    assert chosen(chat_template=str(tmp_path / "mine.jinja")) == BRACKETS
    with pytest.raises(ConfigError, match=r"objective.chat_template: cannot read .*none.jinja"):
        chosen(chat_template=str(tmp_path / "none.jinja"))
    folder = tmp_path / "tokenizer"
    TOKENIZERS["bpe"].save(folder)
    with pytest.raises(ConfigError, match="has no chat template"):
        chosen(path=str(folder))
    (folder / "chat_template.jinja").write_text(GENERATION)
    assert chosen(path=str(folder)) == GENERATION == chosen(folder)


def test_saved_template_sets_its_special_tokens(tmp_path):
    (tmp_path / "c.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 2)
    template = ChatTemplate({"default": BRACKETS, "tool_use": CHATML}, {"bos_token": "<s>"})
    corpus = open_chats(tmp_path / "c.jsonl", template)
    for name, text in corpus.template_files(TOKENIZERS["bpe"]).items():
        (tmp_path / "saved" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "saved" / name).write_bytes(text)
    again, whole = ChatTemplate.load(tmp_path / "saved"), with_tokenizer_specials(template, TOKENIZERS["bpe"])
    assert again.render(TALK).text == whole.render(TALK).text == "<s>[INST] a [/INST]b<|eos|>"
    saved = open_chats(tmp_path / "c.jsonl", again)
    assert saved.settings() == corpus.settings()
    assert saved.template_files(TOKENIZERS["bpe"]) == corpus.template_files(TOKENIZERS["bpe"])
    assert again.render(TALK, tools=[]).text == template.render(TALK, tools=[]).text
