"""Formats of tool calls: what is read as a call, and the grammars that permit only valid calls."""

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvad.cache.config import CacheConfig
from kvad.engine import Engine
from kvad.engine.execution import grammar
from kvad.engine.execution.grammar import GrammarCompiler, compute_masks
from kvad.engine.options import EngineConfig
from kvad.engine.scheduling import SamplingParams, StructuredOutput
from kvad.server.api.chat import ToolUse
from kvad.server.api.errors import ApiError
from kvad.server.api.tool_formats import FORMATS, PLAIN_JSON, call_grammar, find_format, has_text_arguments
from kvad.server.api.tools import ToolCallParser
from kvad.text import Detokenizer
from kvad.text.hf_tokenizer import HFTokenizer, byte_alphabet
from tests.support.random_models import build, model_config

ROOT = Path(__file__).parents[2]
FORMS = {form.name: form for form in (*FORMATS, PLAIN_JSON)}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "unit": {"enum": ["C", "F", 7, None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"tag": {"enum": ["a", "b</tool_call>"]}},
}
FUNCTIONS = {"f": SCHEMA, "g": {}}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
G = {"type": "function", "function": {"name": "g"}}

PLAIN, LIST = '{"name": "f", "arguments": {"a": 1}}', '[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]'
OTHER = '{"name": "Alice", "age": 30}'
QWEN = "<function=f>\n<parameter=city>\nRome\n</parameter>\n</function>"
GLM = "f\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
SEED = f"<seed:tool_call>\n{QWEN}\n</seed:tool_call>"
BEGIN, CALL, SEP, END, CLOSE = (
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)
V3, V31 = f'{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{END}', f'{CALL}f{SEP}{{"a": 1}}{END}'
MINIMAX = '<invoke name="f">\n<parameter name="city">Rome</parameter>\n</invoke>'
KIMI, KIMI_ARGUMENTS, KIMI_END, SECTION, SECTION_END = (
    f"<|tool_call{name}|>" for name in ("_begin", "_argument_begin", "_end", "s_section_begin", "s_section_end")
)
K2, Q = f'{KIMI}functions.f:0{KIMI_ARGUMENTS}{{"a": 1}}{KIMI_END}', '<|"|>'
GEMMA, LFM = f"<|tool_call>call:f{{a:{Q}Rome{Q},b:2}}<tool_call|>", ("<|tool_call_start|>", "<|tool_call_end|>")
TEXTS = {  # format -> texts with their content and names of calls
    "hermes": [
        (f"Hi. <tool_call>{PLAIN}</tool_call>", "Hi.", ["f"]),
        (f"<tool_call>\n{PLAIN}\n</tool_call>\n<tool_call>{PLAIN}</tool_call>", "", ["f", "f"]),
        ("a < b, <tool_cat> and <tool_", "a < b, <tool_cat> and <tool_", []),
        (f"<tool_call>{PLAIN}", "", ["f"]),
        ("so <tool_call>{broken", "so <tool_call>{broken", []),
        ("so <tool_call>{broken}</tool_call> it is", "so <tool_call>{broken}</tool_call> it is", []),
        (f"<tool_call>{OTHER}</tool_call>!", f"<tool_call>{OTHER}</tool_call>!", []),
        ('<tool_call>{"name": "f", "arguments": {"x": "</tool_call>\\""}}</tool_call>.', ".", ["f"]),
    ],
    "qwen3_coder": [
        (f"I look. <tool_call>\n{QWEN}\n</tool_call> ok", "I look. ok", ["f"]),
        (f"<tool_call>{QWEN}</tool_call>\n<tool_call>\n{QWEN}\n</tool_call>", "", ["f", "f"]),
        ("<tool_call>\n<function=g>\n</function>\n</tool_call>", "", ["g"]),
        ("<tool_call><function=h></function></tool_call>", "<tool_call><function=h></function></tool_call>", []),
        ("<tool_call>\n<function=f>\n<parameter=x>", "<tool_call>\n<function=f>\n<parameter=x>", []),
        ("<tool_call><function=g><parameter=x>\n</tool_call></parameter></function></tool_call>a", "a", ["g"]),
        (f"<tool_call>{PLAIN}</tool_call>", f"<tool_call>{PLAIN}</tool_call>", []),
    ],
    "seed_oss": [(f"a {SEED} b", "a b", ["f"])],
    "glm45": [
        (f"I look. <tool_call>{GLM}</tool_call>\n<tool_call>g</tool_call> ok", "I look. ok", ["f", "g"]),
        ("<tool_call>g<arg_key>k</arg_key><arg_value></tool_call></arg_value></tool_call>", "", ["g"]),
        ("<tool_call>h</tool_call>", "<tool_call>h</tool_call>", []),
        ("<tool_call>g<arg_key>k</arg_key></tool_call>.", "<tool_call>g<arg_key>k</arg_key></tool_call>.", []),
    ],
    "mistral": [
        (f"[TOOL_CALLS]{LIST}", "", ["f", "g"]),
        (f"Well [TOOL_CALLS] {LIST}", "Well", ["f", "g"]),
        ("[TOOL] is [TOOL_CALLS] not", "[TOOL] is [TOOL_CALLS] not", []),
        (f"[TOOL_CALLS][{PLAIN}, {OTHER}]", f"[TOOL_CALLS][{PLAIN}, {OTHER}]", []),
    ],
    "mistral_args": [
        ('Well[TOOL_CALLS]f[ARGS]{"a": 1}', "Well", ["f"]),
        ('[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": "[TOOL_CALLS]"}[TOOL_CALLS]g[ARGS]{}', "", ["f", "g"]),
        ("[TOOL_CALLS]h[ARGS]{}", "[TOOL_CALLS]h[ARGS]{}", []),
        ("[TOOL_CALLS]f[ARGS]{[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]f[ARGS]{", ["g"]),
        ("[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]g[ARGS]5", "[TOOL_CALLS]g[ARGS]5", ["g"]),
    ],
    "granite": [(f"<|tool_call|>{LIST}", "", ["f", "g"]), (f"a <|tool_call|>{OTHER}", f"a <|tool_call|>{OTHER}", [])],
    "deepseek_v3": [
        (f"Hi {BEGIN}{V3}\n{V3}{CLOSE} ok", "Hi ok", ["f", "f"]),
        (f"{BEGIN}{V3}", "", ["f"]),
        (f"{BEGIN}{CALL}x{END}{CLOSE}", f"{BEGIN}{CALL}x{END}{CLOSE}", []),
        (f"{BEGIN}{V3}{CALL}x{END}{CLOSE}", f"{CALL}x{END}", ["f"]),
    ],
    "deepseek_v31": [
        (f"Hi {BEGIN}{V31}{V31}{CLOSE} ok", "Hi ok", ["f", "f"]),
        (f"{BEGIN}{V31.replace('1}', '1')}{CLOSE}", f"{BEGIN}{V31.replace('1}', '1')}{CLOSE}", []),
        (f'{BEGIN}{CALL}f{SEP}{{"a": "{END}"}}{END}{CLOSE}', "", ["f"]),
        (f"{BEGIN}{V31.replace('f', 'h')}{CLOSE}", f"{BEGIN}{V31.replace('f', 'h')}{CLOSE}", []),
    ],
    "minimax_m2": [
        (f"Hi <minimax:tool_call>\n{MINIMAX}\n{MINIMAX}\n</minimax:tool_call> ok", "Hi ok", ["f", "f"]),
        ('<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>', "", ["g"]),
        (f"<minimax:tool_call>{MINIMAX.replace('Rome', '</invoke>')}</minimax:tool_call>", "", ["f"]),
        (f"<minimax:tool_call>{MINIMAX.replace('f', 'h', 1)}</minimax:tool_call>",) * 2 + ([],),
        ("<minimax:tool_call><invoke name=g></invoke>.</minimax:tool_call>",) * 2 + ([],),
    ],
    "kimi_k2": [
        (f"Hi {SECTION}{K2}\n{K2.replace(':0', ':1')}{SECTION_END} ok", "Hi ok", ["f", "f"]),
        (f'{SECTION}{KIMI} g:12 {KIMI_ARGUMENTS} {{"a": "{KIMI_END}"}} {KIMI_END}', "", ["g"]),
        (f"{SECTION}{K2.replace('f:', 'h:')}{SECTION_END}", f"{SECTION}{K2.replace('f:', 'h:')}{SECTION_END}", []),
        (f"{SECTION}{K2.replace(':0', '')}{SECTION_END}", f"{SECTION}{K2.replace(':0', '')}{SECTION_END}", []),
    ],
    "gemma4": [
        (f"Hi {GEMMA}{GEMMA} ok", "Hi ok", ["f", "f"]),
        ("<|tool_call>call:g{}<tool_call|>", "", ["g"]),
        (GEMMA.replace("Rome", '"<tool_call|>\\'), "", ["f"]),
        (GEMMA.replace("f{", "h{"), GEMMA.replace("f{", "h{"), []),
        (GEMMA.replace(":2", ":two"), GEMMA.replace(":2", ":two"), []),
        (f"<|tool_call>call:g{{a:{Q}x}}<tool_call|>", f"<|tool_call>call:g{{a:{Q}x}}<tool_call|>", []),
    ],
    "lfm2": [
        (f"Hi {LFM[0]}[f(a='x', b=2), g()]{LFM[1]} ok", "Hi ok", ["f", "g"]),
        (f"{LFM[0]}{LIST}{LFM[1]}", "", ["f", "g"]),
        (f"""{LFM[0]}[f(a="it's", b='{LFM[1]}', c='it's')]{LFM[1]}.""", ".", ["f"]),
        (f"{LFM[0]}[h(a=1)]{LFM[1]}", f"{LFM[0]}[h(a=1)]{LFM[1]}", []),
        (f"{LFM[0]}[g(1)]{LFM[1]}", f"{LFM[0]}[g(1)]{LFM[1]}", []),
        (f"{LFM[0]}[g(a=1, a=2)]{LFM[1]}", f"{LFM[0]}[g(a=1, a=2)]{LFM[1]}", []),
    ],
    "llama3_json": [
        (PLAIN, "", ["f"]),
        (f"\n {PLAIN} ", "", ["f"]),
        (PLAIN.replace("arguments", "parameters"), "", ["f"]),
        (f"\x85{PLAIN}", PLAIN, []),  # no white space of JSON
        (f"Use {PLAIN}", f"Use {PLAIN}", []),
        ('{"x": 1}', '{"x": 1}', []),
        (OTHER, OTHER, []),
    ],
}  # fmt: skip


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("name", FORMS)
def test_parser_finds_calls_whatever_the_split(name):
    """Every text in one piece, in single characters, and in every pair of pieces has the same content and calls."""
    for text, content, names in TEXTS[name]:
        splits = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
        splits += [[text[:a], text[a:b], text[b:]] for a, b in itertools.combinations(range(1, len(text)), 2)][::97]
        for pieces in splits:
            parser = ToolCallParser(FORMS[name], {"f": {}, "g": {}})
            results = [*(parser.push(piece) for piece in pieces), parser.finish("")]
            calls = [call for _, found in results for call in found]
            assert [call.name for call in calls] == names, pieces
            assert "".join(part for part, _ in results).strip() == content, pieces
            assert parser.num_calls == len(names) and len({call.id for call in calls}) == len(names)


@pytest.mark.parametrize("name", ["hermes", "deepseek_v31", "mistral_args"])
def test_a_call_is_passed_on_when_it_is_complete(name):
    text, _, names = TEXTS[name][1 if name != "deepseek_v31" else 0]
    parser = ToolCallParser(FORMS[name], {"f": {}, "g": {}})
    ends = [at for at, character in enumerate(text) for _ in parser.push(character)[1]]
    assert len(ends) == len(names) - (name == "mistral_args"), "its last call ends with the text"
    assert ends[0] == text.index(FORMS[name].end, text.index("}")) + len(FORMS[name].end) - 1


@pytest.mark.parametrize("arguments", ["[1]", "5", "[" * 2000, "[" * 500 + "]" * 500, '{"x": NaN}'])
def test_arguments_that_are_not_strict_json_are_content(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert ToolCallParser(FORMS["hermes"], {"f": {}}).finish(text) == (text, [])


def test_arguments_that_are_null_are_an_empty_object():
    ((call,),) = (ToolCallParser(FORMS["llama3_json"], {"f": {}}).finish('{"name": "f", "arguments": null}')[1],)
    assert call.arguments == "{}"


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3"])
def test_without_parallel_calls_the_first_one_is_passed_on(name):
    text = {"hermes": TEXTS["hermes"][1][0], "mistral": f"[TOOL_CALLS]{LIST}", "deepseek_v3": f"{BEGIN}{V3}{V3}{CLOSE}"}
    parser = ToolCallParser(FORMS[name], {"f": {}, "g": {}}, is_parallel=False)
    content, calls = parser.finish(text[name])
    assert (content, [call.name for call in calls], parser.num_calls) == ("", ["f"], 1)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, " a\n\nb ", " a\n\nb "),
        ({"type": "integer"}, "5", 5),
        ({"type": "number"}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"type": "string"}]}, "5", 5),
        ({"type": ["number", "string"]}, "5", 5),
        ({"enum": ["5", "6"]}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "integer"}, "many", "many"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/tree"}, "5", 5),  # followed without end, 9 ways at each step
        ({"type": 5}, "5", 5),
        ({"type": [{}]}, "many", "many"),
        ({}, "[1]", [1]),
        (True, "x", "x"),
        (None, "5", "5"),  # a parameter that the schema does not have
    ],
)
def test_types_of_parameters_in_tags_are_those_of_the_schema(schema, text, value):
    tree = {"anyOf": [{"$ref": "#/$defs/tree"}] * 9 + [{"type": "integer"}]}
    definitions = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}, "tree": tree}
    function = {"properties": {} if schema is None else {"k": schema}, "$defs": definitions}
    for name, call in (
        ("qwen3_coder", f"<tool_call>\n<function=f>\n<parameter=k>\n{text}\n</parameter>\n</function>\n</tool_call>"),
        ("glm45", f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
        ("minimax_m2", f'<minimax:tool_call><invoke name="f"><parameter name="k">{text}</parameter></invoke>'),
    ):
        (found,) = ToolCallParser(FORMS[name], {"f": function}).finish(call)[1]
        assert json.loads(found.arguments) == {"k": value} and type(json.loads(found.arguments)["k"]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("gemma4", f"a:{Q}say \"hi\", b: 1\n{Q}", {"a": 'say "hi", b: 1\n'}),
        ("gemma4", f"a:[{Q}x{Q},{{b-c:-1.5,{Q}d e{Q}:None}}],f:true",
            {"a": ["x", {"b-c": -1.5, "d e": None}], "f": True}),
        ("lfm2", """a='x\\n\\'"\\u00e9\\d', b="l'eau, c=1\n"
            """, {"a": "x\n'\"é\\d", "b": "l'eau, c=1\n"}),
        ("lfm2", """a=[True, None, {'b': "c"}], d={"e": false}""", {"a": [True, None, {"b": "c"}], "d": {"e": False}}),
    ],
)  # fmt: skip
def test_values_of_formats_that_are_nearly_json(name, text, arguments):
    text = f"<|tool_call>call:g{{{text}}}<tool_call|>" if name == "gemma4" else f"{LFM[0]}[g({text})]{LFM[1]}"
    ((call,),) = (ToolCallParser(FORMS[name], FUNCTIONS).finish(text)[1],)
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ call | tojson }}{{ '</tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' + call.name + '>\\n' }}", "qwen3_coder"),
        ("{{ '<seed:tool_call>\\n<function=' + call.name + '>' }}", "seed_oss"),
        ("{{ '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS][' }}{{ calls | tojson }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' + arguments }}", "mistral_args"),
        ("{{ '<|tool_call|>' }}", "granite"),
        (f"{{{{ '{BEGIN}{CALL}' + call.type + '{SEP}' + call.name + '\\n```json\\n' }}}}", "deepseek_v3"),
        (f"{{{{ '{BEGIN}{CALL}' + call.name + '{SEP}' + arguments }}}}", "deepseek_v31"),
        ("{%- set begin = '<minimax:tool_call>' -%}", "minimax_m2"),
        (f"{{{{ '{SECTION}{KIMI}' + call.id + '{KIMI_ARGUMENTS}' }}}}", "kimi_k2"),
        ("{{ '<|tool_call>call:' + call.name }}", "gemma4"),
        ("{{ '<|tool_call_start|>[' + calls }}", "lfm2"),
        ("{{ 'List of tools: <|tool_list_start|>[' }}", "lfm2"),
        ('{{ \'{"name": "\' + call.name + \'", "parameters": \' }}', "llama3_json"),
    ],
)
def test_format_follows_from_the_template(template, name):
    assert find_format(template).name == name


def test_the_page_lists_the_formats():
    page, names = (ROOT / "docs" / "reference" / "request-fields.md").read_text(), ["openai", *FORMS]
    assert [name for name in re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) if name in names] == names


def test_templates_of_deepseek_read_arguments_as_text():
    assert has_text_arguments("{{ '```json\\n' + tool['function']['arguments'] + '\\n```' }}")
    assert not has_text_arguments("{{ '[ARGS]' + tool['function']['arguments']|tojson }}{{ '[ARGS]' + arguments }}")


def test_ids_of_mistral_have_nine_characters():
    """Its templates refuse others in the next turn."""
    (call,) = ToolCallParser(FORMS["mistral"], FUNCTIONS).finish(f"[TOOL_CALLS][{PLAIN}]")[1]
    assert len(call.id) == 9 and call.id.isalnum()


def test_ids_of_kimi_are_those_that_it_writes():
    """Its template writes the id of a call instead of the function's name."""
    calls = ToolCallParser(FORMS["kimi_k2"], FUNCTIONS).finish(TEXTS["kimi_k2"][0][0])[1]
    assert [call.id for call in calls] == ["functions.f:0", "functions.f:1"]


# ---------------------------------------------------------------- grammars


def compiler_of(form):
    """Return the compiler of a tokenizer with a token per byte and special tokens for all marks."""
    characters = {byte: character for character, byte in byte_alphabet().items()}
    backend = Tokenizer(models.BPE({characters[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *form.all_marks])
    backend.add_tokens(["</parameter>"])
    tokenizer = HFTokenizer(backend, {"eos": "</s>"})
    return tokenizer, GrammarCompiler(tokenizer)


@pytest.fixture(autouse=True)
def _skip_check(monkeypatch):
    monkeypatch.setattr(grammar, "_check_in_process", lambda source: "")


def text_of(tokenizer, form, tokens):
    detokenizer = Detokenizer(tokenizer, visible=form.all_marks)
    return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()


def write(form, tokenizer, compiled, prefix, seed):
    """Return a random text that the masks allow after a prefix; values and calls end soon."""
    state, draw, tokens = compiled.start(), random.Random(seed), tokenizer.encode(prefix, specials=True)
    closing = {*b'"}]>\n', *range(257, tokenizer.vocab_size)}
    for number in range(1500):
        compute_masks([state], [tokens])
        text = text_of(tokenizer, form, tokens)
        assert not state.error, (state.error, text)
        allowed = np.flatnonzero(np.unpackbits(state.words.view(np.uint8), bitorder="little")).tolist()
        if not allowed or (number and state.may_end and draw.random() < 0.5):
            return text
        soon = [token for token in allowed if token in closing]
        tokens = [*tokens, draw.choice(soon if soon and draw.random() < 0.5 else allowed)]
    raise AssertionError(text)


def check_calls(form, text, tools=(F, G), *, is_parallel=True):
    """Check that the text is content and valid calls; return both."""
    content, calls = ToolCallParser(form, FUNCTIONS, is_parallel=True).finish(text)
    assert calls and (is_parallel or len(calls) == 1), text
    assert not form.start or form.start not in content, text
    for call in calls:
        assert call.name in [tool["function"]["name"] for tool in tools]
        jsonschema_rs.validate(SCHEMA if call.name == "f" else {"type": "object"}, json.loads(call.arguments))
    return content, calls


@pytest.mark.parametrize("name", FORMS)
def test_after_a_start_mark_the_masks_allow_valid_calls_only(name):
    """Random texts: free until the mark, then calls, those of the strict function with arguments of its schema."""
    form = FORMS[name]
    tokenizer, compiler = compiler_of(form)
    names = set()
    for is_parallel, is_required, prefix in (
        (True, False, f"Hm <{{[ é{form.start}" if form.start else "{"),
        (False, False, form.start or "{"),
        (True, True, ""),
    ):
        source = call_grammar(form, [F, G], is_required=is_required, is_parallel=is_parallel)
        compiled = compiler.compile(StructuredOutput("grammar", source), form.all_marks)
        for seed in range(3):
            text = write(form, tokenizer, compiled, prefix, seed)
            content, calls = check_calls(form, text, is_parallel=is_parallel)
            assert content.startswith(prefix[: -len(form.start)] if form.start else "")
            names |= {call.name for call in calls}
    assert "g" in names


def test_free_text_is_free():
    """Without a start mark all texts are allowed, also parts of the mark, and an answer may be empty."""
    for form in FORMS.values():
        tokenizer, compiler = compiler_of(form)
        source = call_grammar(form, [F], is_required=False, is_parallel=True)
        state = compiler.compile(StructuredOutput("grammar", source), form.all_marks).start()
        assert state.may_end and state.words.any()
        text = f"é {{}} [TOOL] <tool </tool_call>\n\x00 {form.start[:-1]}|"
        tokens = [token for token in tokenizer.encode(text) if token < 256]
        for size in range(1, len(tokens) + 1):
            compute_masks([state], [tokens[:size]])
            assert not state.error and state.words.any()
        assert state.may_end


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "llama3_json"])
def test_random_weights_write_valid_calls(name):
    """A model writes free text as without the grammar, and a call of the schema where a bias starts one."""
    form = FORMS[name]
    tokenizer, _ = compiler_of(form)
    config = replace(model_config(), vocab_size=tokenizer.vocab_size + 3, max_seq_len=512)
    end = tokenizer.special_tokens.eos
    cache = CacheConfig(dtype="float32", max_num_seqs=4, max_seq_len=512, block_size=8, prefill_chunk_size=8)
    engine = Engine(
        build(config, dtype=torch.float32), cache, EngineConfig(stop_tokens=frozenset({end})), tokenizer=tokenizer
    )

    def generate(source, **options):
        output = None if source is None else StructuredOutput("grammar", source)
        engine.add_request(
            [7, 8],
            SamplingParams(structured_output=output, visible_special_tokens=form.all_marks, seed=3, n=4, **options),
        )
        texts = dict.fromkeys(range(4), "")
        while not engine.idle:
            for chunk in engine.step():
                assert chunk.error is None
                texts[chunk.sample_index] += chunk.text
        return list(texts.values())

    properties = {"days": {"type": "integer", "minimum": 1, "maximum": 99}, "unit": {"enum": ["C", "F", None]}}
    schema = {"type": "object", "properties": properties, "required": ["unit"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    source = call_grammar(form, tools, is_required=False, is_parallel=False)
    start = tokenizer.special_tokens.names()[form.start] if form.start else ord("{")
    for text in generate(source, max_tokens=400, logit_bias={start: 1000}):
        calls = ToolCallParser(form, {"f": schema}).finish(text)[1]
        assert len(calls) == 1, text
        (call,) = calls
        jsonschema_rs.validate(schema, json.loads(call.arguments))
    no_marks = dict.fromkeys((*range(128, tokenizer.vocab_size), ord("{")), -1000)
    free = generate(source, max_tokens=40, logit_bias=no_marks)
    assert free == generate(None, max_tokens=40, logit_bias=no_marks) and len("".join(free)) > 100


def test_a_required_or_strict_schema_that_tags_cannot_express_is_refused():
    form = FORMS["glm45"]
    properties = {"day": {"type": "string", "format": "date"}}
    for schema, keyword in (({"properties": properties}, "format"), ({"oneOf": [{}]}, "oneOf")):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert call_grammar(form, [tool], is_required=True, is_parallel=True)
        tool["function"]["strict"] = True
        with pytest.raises(ApiError, match=rf"^tools\[0\].function.parameters.*: {keyword} is not supported"):
            call_grammar(form, [tool], is_required=False, is_parallel=True)
    assert call_grammar(FORMS["hermes"], [tool], is_required=False, is_parallel=True)
    for schema in ({"properties": [1]}, {"properties": {"a": {}}, "required": 5}):
        tool["function"] = {"name": "f", "parameters": schema}
        with pytest.raises(ApiError, match=r"^tools: properties of parameters must be an object, and required a list"):
            call_grammar(form, [tool], is_required=True, is_parallel=True)


def test_values_between_quotes_follow_schemas_that_contain_themselves():
    """Gemma 4: texts have quotes at every level; a schema that is a part of itself has one rule."""
    node = {"type": "object", "properties": {"x": {"enum": ["a", ["b"], 1]}, "next": {"$ref": "#/$defs/node"}}}
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "integer"}]}, "maxItems": 2}
    members = {"n": {"$ref": "#/$defs/node"}, "t": {"$ref": "#/$defs/tree"}, "any": {}}
    schema = {"type": "object", "properties": members, "$defs": {"node": node, "tree": tree}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    form = FORMS["gemma4"]
    tokenizer, compiler = compiler_of(form)
    source = call_grammar(form, [tool], is_required=True, is_parallel=False)
    compiled = compiler.compile(StructuredOutput("grammar", source), form.all_marks)
    good = [
        f"{{n:{{x:[{Q}b{Q}],next:{{next:{{}}}}}}}}", f"{{n:{{x:{Q}a{Q}}}}}", "{n:{x:1},t:[[1,[]],2]}", "{}",
        f"{{any:[{{a:{Q}x{Q},b:[null]}}]}}",
    ]  # fmt: skip
    for text in (*good, f"{{n:{{x:{Q}c{Q}}}}}", "{n:{x:1,}}", "{n:{next:{y:1}}}", "{t:[1,2,3]}", "{t:[true]}"):
        tokens = tokenizer.encode(f"<|tool_call>call:f{text}<tool_call|>", specials=True)
        state = compiled.matcher.deep_copy()
        assert (state.validate_tokens(tokens) == len(tokens)) == (text in good), text
        calls = ToolCallParser(form, {"f": {}}).finish(f"<|tool_call>call:f{text}<tool_call|>")[1]
        assert len(calls) == (",}" not in text)
    node["properties"]["x"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(ApiError, match=r"^tools\[0\].function.parameters.*: uniqueItems is not supported"):
        call_grammar(form, [tool], is_required=True, is_parallel=False)


def test_a_grammar_is_used_for_required_and_strict_calls_only():
    assert ToolUse([G]).grammar() is None and ToolUse([G, F]).grammar() is not None
    assert ToolUse([G], is_required=True).grammar() is not None
    lenient = {"type": "function", "function": {**F["function"], "name": "h", "strict": False}}
    strict, mixed = ToolUse([F]).grammar(), ToolUse([G, lenient, F]).grammar()
    assert '\\"h\\"' in mixed and mixed.count("city") == strict.count("city")
    named = ToolUse([F, G], is_required=True, name="g", form=FORMS["hermes"]).grammar()
    assert '\\"g\\"' in named and '\\"f\\"' not in named and "(ws" not in named.splitlines()[0]
