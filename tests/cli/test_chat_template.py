"""``kvad chat-template``: the prompt to the byte, its tokens, and invalid input."""

import json

import pytest

from kvad.text.tokenizer import train_tokenizer
from tests.cli.test_main import assert_loads_no_torch

TEMPLATE = """{{ bos_token }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' -%}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content }}{% endif %}{% endfor %}
{{- '|' ~ tools | length ~ '|' if tools }}{{ '<think>' if think }}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "chatty"
    folder.mkdir()
    train_tokenizer("byte", [], specials=("bos", "eos")).save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R{{ messages[0].content }}\n\n")
    return folder


def test_prompt_is_exact(kvad, model):
    result = kvad("chat-template", model, "-m", "system=Be = brief", "--message", "user=Grüß\n")
    assert (result.code, result.err) == (0, "") and result.out == "<|bos|><system>Be = brief<user>Grüß\n<assistant>"
    command = f"chat-template {model} -m user=a"
    assert kvad(f"{command} --no-generation-prompt").out == "<|bos|><user>a"
    assert kvad(f"{command} --template-name rag").out == "Ra\n"
    assert kvad(f"{command} -m assistant=b --continue-final-message").out.endswith("<assistant>b")


def test_variables(kvad, model):
    assert "<think>" in kvad("chat-template", model, "-m", "user=a", "--set", "think=true").out
    assert "<think>" not in kvad("chat-template", model, "-m", "user=a", "--set", "think=false").out
    assert kvad("chat-template", model, "-m", "user=a", "--set", "bos_token=B").out.startswith("B<user>")


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\nc"}]
FORMS = {
    "list": json.dumps(MESSAGES, indent=1),
    "object": json.dumps({"messages": MESSAGES}),
    "lines": "".join(json.dumps(message) + "\n\n" for message in MESSAGES),
}


@pytest.mark.parametrize("form", FORMS)
def test_files(kvad, model, tmp_path, form):
    path = tmp_path / "talk"
    path.write_text(FORMS[form], "utf-8")
    expected = "<|bos|><user>a<assistant>b\nc<|eos|><user>d<assistant>"
    assert kvad("chat-template", model, "--file", path, "-m", "user=d").out == expected
    assert kvad("chat-template", model, "--file", "-", "-m", "user=d", stdin=FORMS[form].encode()).out == expected


def test_one_json_line_is_one_message(kvad, model):
    result = kvad("chat-template", model, "-f", "-", stdin=b'{"role": "user", "content": "x"}\n')
    assert result.out == "<|bos|><user>x<assistant>"


def test_tools(kvad, model, tmp_path):
    (tmp_path / "tools.json").write_text('[{"type": "function"}, {"type": "function"}]')
    assert "|2|" in kvad("chat-template", model, "-m", "user=a", "--tools", tmp_path / "tools.json").out
    both = json.dumps({"messages": MESSAGES, "tools": [{"type": "function"}]}).encode()
    assert "|1|" in kvad("chat-template", model, "-f", "-", stdin=both).out
    assert "|2|" in kvad("chat-template", model, "-f", "-", "--tools", tmp_path / "tools.json", stdin=both).out


def test_tokens(kvad, model):
    result = kvad("chat-template", model, "-m", "user=a ", "--tokens")
    head, *rows, last = result.out.splitlines()
    assert head.split() == ["index", "id", "piece"] and result.code == 0
    assert rows[0].split() == ["0", "257", "*<|bos|>"] and rows[1].split() == ["1", "60", "<"]
    assert rows[8].split() == ["8", "32", "␣"] and len(rows) == 20
    assert last == "20 tokens, 1 of them special (*)"


def test_json(kvad, model):
    record = json.loads(kvad("chat-template", model, "-m", "user=a", "-m", "assistant=b", "--json").out)
    assert record["template"] == "default" and "ids" not in record
    assert [record["text"][start:end] for start, end in record["spans"]] == ["b<|eos|>"]
    record = json.loads(
        kvad("chat-template", model, "-m", "user=a", "--json", "--tokens", "--no-generation-prompt").out
    )
    assert record["text"] == "<|bos|><user>a"
    assert record["ids"] == [257, *b"<user>a"] and record["pieces"][0] == "<|bos|>" and record["num_tokens"] == 8


def test_special_tokens_of_an_instruct_model(kvad, tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    record = json.loads(kvad("chat-template", tmp_path, "-m", "user=a", "--tokens", "--json").out)
    assert record["pieces"][0] == "<|im_start|>" and record["pieces"][-2] == "<|im_end|>" and record["num_tokens"] == 9


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ((), None, "no message was given"),
        (("-m", "Hi"), None, "--message 'Hi' is not ROLE=TEXT"),
        (("-m", "user=a", "--set", "1x=2"), None, "--set '1x=2' is not NAME=VALUE"),
        (("-m", "user=a", "--template-name", "rga"), None, "did you mean 'rag'?"),
        (("-m", "user=a", "--tools", "absent.json"), None, "absent.json: No such file"),
        (("-f", "-"), b"[1", "- is not JSON: line 1, column 3"),
        (("-f", "-"), b'{"role": "user", "content": "a"}\n{"role"\n', "- is not JSON: line 2, column 8"),
        (("-f", "-"), b"3", "- contains no messages"),
        (("-f", "-"), b"[]", "no message was given"),
        (("-f", "-"), b'[{"role": "user"}]', "messages[0] (role 'user') has no content"),
        (("-f", "-"), b'{"messages": []}\n{"messages": []}\n', "contains 2 conversations"),
        (("-m", "user=a", "--no-generation-prompt", "--jsn"), None, "--jsn"),
    ],
)
def test_invalid_input(kvad, model, arguments, stdin, message):
    result = kvad("chat-template", model, *arguments, stdin=stdin)
    assert result.code == 2 and result.out == "" and message in result.err, result


def test_model_without_template(kvad, tmp_path):
    result = kvad("chat-template", tmp_path, "-m", "user=a")
    assert result.code == 2 and f"{tmp_path} has no chat template" in result.err
    result = kvad("chat-template", tmp_path / "absent", "-m", "user=a")
    assert result.code == 2 and "no such folder" in result.err


def test_hub_weights_are_not_downloaded(kvad, model, tmp_path, monkeypatch):
    import huggingface_hub

    calls = []

    def download(repo, *, allow_patterns, **options):
        calls.append((repo, options["revision"], "*.safetensors" in allow_patterns))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert kvad("chat-template", "org/chatty@v2", "-m", "user=a").out == "<|bos|><user>a<assistant>"
    assert kvad("tokenize", "hf://org/chatty", "a", "--ids").out == "97\n"
    assert calls == [("org/chatty", "v2", False), ("org/chatty", None, False)]


def test_template_that_raises(kvad, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('System role not supported') }}")
    result = kvad("chat-template", tmp_path, "-m", "user=a")
    assert result.code == 2 and result.err.startswith(
        "kvad: error: the chat template (line 1) refuses: System role not supp"
    )


def test_loads_no_torch(model):
    assert_loads_no_torch("chat-template", str(model), "-m", "user=a", "--tokens")
