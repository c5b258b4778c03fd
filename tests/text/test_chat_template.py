"""Chat templates render the same text as transformers, character by character, and share no state."""

import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvad.errors import ChatTemplateError, UsageError
from kvad.text.chat_template import ChatTemplate, RenderedChat, RenderLimits

# ---------------------------------------------------------------- templates, in the style of these families

CHATML = """
{%- for turn in messages -%}
<|im_start|>{{ turn.role }}
{{ turn.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set turns = messages[1:] %}
    {%- set rules = '<<SYS>>\\n' + messages[0]['content'].strip() + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set turns = messages %}
    {%- set rules = '' %}
{%- endif %}
{%- for turn in turns %}
    {%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns: ' ~ turn['role'] ~ ' at ' ~ loop.index0) }}
    {%- endif %}
    {%- set text = rules + turn['content'].strip() if loop.first else turn['content'].strip() %}
    {%- if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' + text + ' [/INST]' }}
    {%- else %}
        {{- ' ' + text + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA3 = """
{{- bos_token }}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "You help." %}
{%- endif %}
{{- header('system') }}{{ system }}
{%- if documents %}{{ '\\n' }}{% for document in documents %}[{{ document.title | upper }}] {{ document.text }}
{% endfor %}{% endif %}<|eot_id|>
{%- for message in messages %}
    {%- if message.content is string %}
        {{- header(message.role) + message.content | trim + '<|eot_id|>' }}
    {%- else %}
        {{- header(message.role) }}
        {%- for part in message.content if part.type == 'text' %}{{ part.text | trim }}{% endfor %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.index = ns.index + 1 %}
        {%- if tools and ns.index == users | length %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {%- if value is string %}
                        {{- '"' + key + '": "' + value + '"' }}
                    {%- else %}
                        {{- '"%s": %s' | format(key, value | tojson) }}
                    {%- endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{{ ', ' if not loop.last else ']' }}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call ids have 9 letters') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set reply = message.content is string and message.content.startswith('<tool_response>') %}
    {%- if ns.open and message.role == 'user' and not reply %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') if thought else content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

MASKED = """
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

KITCHEN = """
{#- Everything that the others leave out. -#}
{%- macro kind(schema, depth=0) -%}
    {%- if schema.type == 'object' -%}
        {{ '{' }}{% for name, field in (schema.properties or {}) | dictsort %}
        {{- name }}{{ '' if name in (schema.required or []) else '?' }}: {{ kind(field, depth + 1) -}}
        {{ ', ' if not loop.last }}
        {%- endfor %}{{ '}' }}
    {%- elif schema.type == 'array' -%}
        {{ kind(schema['items'], depth + 1) }}[]
    {%- elif schema.enum is defined -%}
        {{ schema.enum | map('tojson') | join(' | ') }}
    {%- else -%}
        {{ schema.type | default('any', true) }}
    {%- endif -%}
{%- endmacro -%}
{%- macro wrapped(tag) %}<{{ tag }}>{{ caller() }}</{{ tag }}>{% endmacro -%}
{%- set ns = namespace(turns=0, roles=[]) -%}
Today: {{ date_string if date_string is defined else strftime_now('%d %b %Y') }}
{% for tool in tools or [] %}
{{ loop.index }}/{{ loop.length }} {{ tool.function.name }}({{ kind(tool.function.parameters) }}):
    {{- ' ' + tool.function.description | replace('\\n', ' ') | capitalize }}
{% else %}
no tools
{% endfor %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% set ns.turns = ns.turns + 1 %}
    {% set ns.roles = ns.roles + [message.role] %}
    {% call wrapped(message.role | lower) %}
{% set text = message.content if message.content is string else message.content | map(attribute='text') | join('|') %}
{{ text | indent(2) }}
    {%- endcall %}

{% endfor %}
{% set summary %}{{ ns.turns }} turns, {{ ns.roles | unique | sort | join('/') }}{% endset %}
{{ "%-12s|" % summary[:10] }}{{ '{:>4}|{!r}'.format(ns.turns, 'it\\'s') }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 1.5 * 2 }}
{{- ' ' }}{{ -ns.turns }} {{ [1, 2.0, none, true, 'a'] }}
{{- ' ' ~ (messages | first).role ~ (messages | last).get('name', '-') ~ missing ~ ('x' if missing is defined) }}
{%- filter upper %} done {{ eos_token }}{% endfilter %}
{%- if add_generation_prompt %}{{ '\\n<assistant>' }}{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen": QWEN,
    "zephyr": ZEPHYR,
    "masked": MASKED,
    "kitchen": KITCHEN,
}
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}
NOW = datetime(2026, 3, 9, 12, 30)


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "tells the weather <of> a town\nnow",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string"},
                    "unit": {"enum": ["°C", "°F"]},
                    "days": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
                },
                "required": ["town"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "description": "é", "parameters": {"type": "object"}}},
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"town": "Köln"}}}
CHATS = {
    "one": turns(("user", "Hi & <bye>")),
    "two": turns(("user", " Hi\n"), ("assistant", "\nHello 'you' ")),
    "three": turns(("user", "Hi"), ("assistant", "Hello"), ("user", "Grüß 🙂\r\n\ttab")),
    "system": turns(("system", " Be brief. "), ("user", "Hi"), ("assistant", "Yes."), ("user", "")),
    "thinking": turns(("user", "2+2"), ("assistant", "<think>\nfour\n</think>\n\n4")),
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "tools": [
        *turns(("system", "Use tools."), ("user", "Weather?")),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 7}', "tool_call_id": "abcdefghi", "name": "weather"},
        {"role": "tool", "content": "8", "tool_call_id": "abcdefghi", "name": "weather"},
        *turns(("assistant", "7 degrees"), ("user", "Thanks")),
    ],
    "odd": turns(("skip", "x"), ("User", "a\nb"), ("stop", "y"), ("user", "z")),
    "assistant": turns(("assistant", "I begin"), ("user", "so")),
}
CASES = [(name, chat) for name in TEMPLATES for chat in CHATS]


def template(name, **settings):
    return ChatTemplate(TEMPLATES.get(name, name), SPECIALS, **settings)


# ---------------------------------------------------------------- the reference


@pytest.fixture(scope="module")
def reference():
    """``reference(source, messages, **arguments)``: what transformers makes of them, or the error that it raises."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.bos_token, tokenizer.eos_token = SPECIALS["bos_token"], SPECIALS["eos_token"]
    tokenizer.additional_special_tokens = SPECIALS["additional_special_tokens"]

    def ask(source, messages, **arguments):
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=source, **{"tokenize": False, "strftime_now": NOW.strftime, **arguments}
            )
        except Exception as error:  # whatever it is
            return error

    return ask


def render_or_error(source, messages, *, variables=None, **arguments):
    try:
        return template(source).render(messages, now=NOW, variables=variables, **arguments)
    except ChatTemplateError as error:
        return error


def agree(reference, name, messages, *, variables=None, generation_prompt=False, continue_final=False, **more):
    """Compare a template's text, or that it fails, with transformers; return True if it renders."""
    endings = {"add_generation_prompt": generation_prompt, "continue_final_message": continue_final}
    expected = reference(TEMPLATES.get(name, name), messages, **endings, **more, **(variables or {}))
    endings = {"generation_prompt": generation_prompt, "continue_final": continue_final}
    rendered = render_or_error(name, messages, variables=variables, **endings, **more)
    assert isinstance(expected, Exception) == isinstance(rendered, Exception), (expected, rendered)
    assert isinstance(expected, Exception) or rendered.text == expected
    return not isinstance(expected, Exception)


@pytest.mark.parametrize(("name", "chat"), CASES)
def test_text_equals_transformers(reference, name, chat):
    for tools in (None, TOOLS):
        for ending in ({}, {"generation_prompt": True}, {"continue_final": True}):
            agree(reference, name, CHATS[chat], tools=tools, **ending)
        documents = [{"title": "a", "text": "b <c>"}]
        agree(reference, name, CHATS[chat], tools=tools, documents=documents, variables={"enable_thinking": False})


def test_most_compared_cases_render(reference):
    """The comparison above would be content with templates that always fail."""
    rendered = [agree(reference, name, CHATS[chat]) for name, chat in CASES]
    assert sum(rendered) > 0.7 * len(CASES)
    assert {name for (name, _), fine in zip(CASES, rendered, strict=True) if fine} == set(TEMPLATES)


ROLE = st.sampled_from(["user", "assistant", "system", "tool"])
WORDS = st.text(st.sampled_from("ab <>&\"'\\\n\t{}%é🙂"), max_size=12) | st.sampled_from(
    ["</think>", "<think>", "</s>"]
)
ANY_MESSAGE = st.builds(lambda role, content: {"role": role, "content": content}, ROLE, WORDS)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(TEMPLATES)), messages=st.lists(ANY_MESSAGE, min_size=1, max_size=6), data=st.data())
def test_any_conversation_equals_transformers(reference, name, messages, data):
    ending = data.draw(st.sampled_from([{}, {"generation_prompt": True}, {"continue_final": True}]))
    agree(reference, name, messages, tools=data.draw(st.sampled_from([None, [], TOOLS])), **ending)


EXPRESSIONS = [
    "{{ {'b': 1, 'a': [1.0, none, true, 'é<>&\\'', '\\u2028']} | tojson }}",
    "{{ {'b': 1, 'a': [1, {'c': 2}]} | tojson(indent=2) }}",
    "{{ {'b': 'é', 'a': 1} | tojson(true, sort_keys=true, separators=(',', ':')) }}",
    "{{ '<a>' | tojson(false, 4) }}{{ [[1], []] | tojson(indent='--') }}",
    "{{ {'a': 1} }}{{ ['a', \"it's\"] }}{{ (1,) }}{{ none }}{{ true }}{{ 1e20 }}{{ 0.1 + 0.2 }}{{ 10 ** 30 }}",
    "{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a\\nb'.splitlines() }}",
    "{{ 'abc'[::-1] }}{{ 'abc'[1] }}{{ [1, 2, 3][:-1] }}{{ (1, 2)[0] }}{{ 'abc'[9] is defined }}",
    "{{ 'a'.ljust(5, '.') }}{{ 'a'.zfill(3) }}{{ 'a'.center(5) }}{{ 'a\\tb'.expandtabs(4) }}{{ 'aXa'.swapcase() }}",
    "{{ 'a-b'.partition('-') }}{{ 'aab'.strip('a') }}{{ 'aab'.rfind('a') }}{{ 'prefix'.removeprefix('pre') }}",
    "{{ 'aaa'.replace('a', 'b', 2) }}{{ 'aaa' | replace('a', 'b', 2) }}{{ 'ab'.replace('', '-') }}",
    "{{ '{0} {a:>5} {1!r:.3} {b[k]} {{}}'.format(1, 'text', a='x', b={'k': 2}) }}{{ '{a}'.format_map({'a': 1}) }}",
    "{{ '%s %5.2f %-5d| %% %(a)s' | format(a=1) if false else '%s %5.2f %-5d|%r' % ('a', 1.5, 3, 'é') }}",
    "{{ '%(a)s%%' % {'a': [1]} }}{{ '%*d' % (5, 1) }}{{ '%s' % 'a' }}{{ '%s' | format({'a': 1}) }}",
    "{{ range(3) | list }}{{ range(10, 0, -3) | list }}{% for i in range(2) %}{{ loop.revindex }}{% endfor %}",
    "{{ [3, 1, 2] | sort }}{{ ['b', 'A'] | sort(case_sensitive=true) }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}{{ [1, 2, 3, 4, 5] | slice(2) | list }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ [{'a': 1}, {'a': 2}] | sum('a') }}{{ [1, 2] | sum }}{{ [1, 5, 2] | max }}{{ ['a', 'B'] | min }}",
    "{{ [{'a': 1, 'b': 2}, {'a': 1, 'b': 3}] | groupby('a') }}",
    "{{ ['a', 'b'] | map('upper') | join(', ') }}{{ [{'x': 1}, {}] | map(attribute='x', default=0) | list }}",
    "{{ [0, 1, 2] | select | list }}{{ [1, 2, 3] | reject('odd') | list }}{{ [{'a': 0}] | rejectattr('a') | list }}",
    "{{ 'a b' | title }}{{ 'a' | center(5) }}{{ ' a ' | trim }}{{ '--a' | trim('-') }}{{ 'a b c' | wordcount }}",
    "{{ 'a\\nb' | indent }}{{ 'a\\nb' | indent('>', true) }}{{ 'a b c d' | truncate(5) }}{{ 'a b c' | wordwrap(3) }}",
    "{{ '<a href>' | escape }}{{ '<a>' | e | string }}{{ '<a> b' | striptags }}{{ 'a b/c' | urlencode }}",
    "{{ ('<b>' | safe) ~ '<' }}{{ ('<b>{}' | safe).format('<') }}{{ ('%s' | safe) % '<' }}{{ '<' | forceescape }}",
    "{% autoescape true %}{{ '<' }}{{ '<' | safe }}{{ '<' ~ '>' }}{% endautoescape %}{{ '<' }}",
    "{{ 3.7 | int }}{{ '0x1f' | int(0, 16) }}{{ '1.5' | float }}{{ 'x' | int(7) }}{{ 2.567 | round(2) }}",
    "{{ 7 | round(-1) }}",
    "{{ 1000000 | filesizeformat }}{{ -3 | abs }}{{ {'a': 1} | pprint }}{{ {'a': 'b'} | xmlattr }}",
    "{{ missing }}{{ missing | default('d') }}{{ missing is undefined }}{{ (missing | length) }}{{ [] | first }}",
    (
        "{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.items() | list }}{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}"
        "{% endfor %}"
    ),
    "{{ {'items': 1}['items'] }}{{ {'a': 1}.keys() | list }}{{ {'a': 1} == {'a': 1.0} }}{{ 'a' in {'a': 1} }}",
    "{{ 1 in [1] }}",
    "{{ 1 < 2 < 3 }}{{ 'a' not in 'b' }}{{ not 1 }}{{ 1 and 0 or 'x' }}{{ 7 % 3 }}{{ -7 // 2 }}{{ 7 / 2 }}{{ +1 }}",
    "{{ 4 is divisibleby 2 }}{{ 'a' is in 'ab' }}{{ 1 is sameas 1 }}{{ 'A' is upper }}{{ {} is mapping }}",
    "{{ '' is iterable }}",
    "{% set a, b = 1, [2] %}{{ a }}{{ b }}{% with c = 3 %}{{ c }}{% endwith %}{{ c is defined }}",
    (
        "{% set ns = namespace({'a': 1}, b=2) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}"
        "{{ ns.a }}{{ ns.b }}"
    ),
    (
        "{% for i in [1, 2] recursive %}{{ i }}{{ loop.depth }}{{ loop([3]) if i is number and i == 1 else '' }}"
        "{% endfor %}"
    ),
    (
        "{% for a in [1, 1, 2] %}{{ loop.changed(a) }}{{ loop.cycle('x', 'y') }}{{ loop.previtem }}"
        "{{ loop.nextitem }}{% endfor %}"
    ),
    "{% for c in 'aé🙂' %}{{ c }}{{ loop.length }}{% endfor %}{% for k in {'a': 1} %}{{ k }}{% else %}none{% endfor %}",
    "{% for x in [1, 2, 3, 4] | select('even') if x > 2 %}{{ x }}{{ loop.last }}{% endfor %}",
    (
        "{% macro m(a, b='d') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}"
        "{{ m(1, 2, 3, x=4) }}{{ m.name }}"
    ),
    (
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner(',') %}"
        "{{ j() }}{{ j() }}"
    ),
    "{% block b %}x{% endblock %}{{ self.b() }}{{ dict(a=1, b=[2]) }}{{ dict({'a': 1}) }}",
    (
        "{% set x %}  <{{ 1 }}>  {% endset %}[{{ x }}]{% set y | upper %}a{% endset %}{{ y }}"
        "{% filter replace('a', 'b') %}a{% endfilter %}"
    ),
    "{% if false %}{% endif %}  \n  {%- if true -%}  x  {%- endif +%}  \n{# c #}\n  {% raw %}{{ x }}{% endraw %}\n\n",
    "{{ bos_token }}{{ eos_token }}{{ additional_special_tokens | join }}{{ pad_token }}{{ unk_token is defined }}",
    "{{ messages | length }}{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ messages[0]['role'] }}",
    "{{ messages }}",
    "{{ 'ǆß'.upper() }}{{ 'ß' | title }}{{ 'İ'.lower() | length }}{{ 'a'.isalpha() }}{{ 'ABC'.casefold() }}",
    "{{ '½'.isnumeric() }}",
    "{{ {'a': 1} | attr('a') is defined }}{{ 'a' | attr('upper') is callable }}{{ 'x' is filter }}",
    "{{ 'upper' is filter }}",
    "{{ strftime_now('%Y-%m-%d %H:%M') }}{{ 5 | string ~ 'a' }}{{ [1, [2]] | string }}{{ 'a' * 3 }}{{ [0] * 2 }}",
    "{{ 2 * (1,) }}",
]


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_values_and_control_structures_equal_transformers(reference, source):
    assert agree(reference, source, CHATS["one"]), render_or_error(source, CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.a }}",
        "{{ missing() }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + 1 }}",
        "{{ 'a' | nofilter }}",
        "{{ 'a' is notest }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ missing | tojson }}",
        "{{ [1] | sum(start='') }}",
        "{{ 'a'() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ ['a', 1] | sort }}",
        "{{ range(10 ** 6) }}",
        "{% for x in 3 %}{% endfor %}",
        "{% include 'a' %}",
        "{% set messages.a = 1 %}",
    ],
)
def test_failures_equal_transformers(reference, source):
    assert not agree(reference, source, CHATS["one"])


@pytest.mark.parametrize(
    "source",
    [MASKED, CHATML, f"{MASKED}{MASKED}", "x{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}"],
)
@pytest.mark.parametrize("chat", ["one", "two", "system", "thinking", "assistant"])
def test_masks_equal_transformers(reference, source, chat):
    arguments = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}
    expected = reference(source, CHATS[chat], **arguments)["assistant_masks"]
    rendered = render_or_error(source, CHATS[chat])
    if "{% generation %}a" in source:  # blocks within blocks: they count the inner one at the place of the outer one
        assert rendered.generation_marks is None
        return
    mask = [0] * len(rendered.text)
    for start, end in rendered.spans:
        mask[start:end] = [1] * (end - start)
    assert mask == expected and rendered.text.isascii()


# ---------------------------------------------------------------- goldens: the same without the reference

GOLDENS = {
    ("chatml", "three"): (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nGrüß 🙂\r\n"
        "\ttab<|im_end|>\n<|im_start|>assistant\n"
    ),
    ("llama2", "system"): "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes. </s><s>[INST]  [/INST]",
    ("llama3", "parts"): (
        "<s><|start_header_id|>system<|end_header_id|>\n\nYou "
        "help.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "ab<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    ("gemma", "three"): (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>user\n"
        "Grüß 🙂\r\n\ttab<end_of_turn>\n<start_of_turn>model\n"
    ),
    ("mistral", "tools"): (
        '<s> Use tools.</s>[INST] Weather?[/INST][TOOL_CALLS] [{"name": "weather", "arguments": {"town": "Köln"}}, '
        '"id": "abcdefghi"}]</s>[TOOL_RESULTS] {"content": {"t": 7}, "call_id": '
        '"abcdefghi"}[/TOOL_RESULTS][TOOL_RESULTS] {"content": 8, "call_id": "abcdefghi"}[/TOOL_RESULTS] 7 '
        'degrees</s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "weather", "description": "tells '
        'the weather <of> a town\nnow", "parameters": {"type": "object", "properties": {"town": {"type": '
        '"string"}, "unit": {"enum": ["°C", "°F"]}, "days": {"type": "array", "items": {"type": "object", '
        '"properties": {"n": {"type": "integer"}}}}}, "required": ["town"]}}}, {"type": "function", "function": '
        '{"name": "time", "description": "é", "parameters": {"type": "object"}}}][/AVAILABLE_TOOLS][INST] '
        "Thanks[/INST]"
    ),
    ("qwen", "tools"): (
        '<|im_start|>system\nUse tools.\n\n# Tools\n\n<tools>\n{"type": "function", "function": {"name": '
        '"weather", "description": "tells the weather <of> a town\\nnow", "parameters": {"type": "object", '
        '"properties": {"town": {"type": "string"}, "unit": {"enum": ["°C", "°F"]}, "days": {"type": "array", '
        '"items": {"type": "object", "properties": {"n": {"type": "integer"}}}}}, "required": ["town"]}}}\n'
        '{"type": "function", "function": {"name": "time", "description": "é", "parameters": {"type": "object"}}}\n'
        '</tools><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n\n<tool_call>\n{"name": '
        '"weather", "arguments": {"town": "Köln"}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n'
        '{"t": 7}\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n<|im_start|>assistant\n7 '
        "degrees<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    ),
    ("qwen", "thinking"): (
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n<think>\nfour\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    (
        "zephyr",
        "system",
    ): "<|system|>\n Be brief. </s>\n<|user|>\nHi</s>\n<|assistant|>\nYes.</s>\n<|user|>\n</s>\n<|assistant|>\n",
    ("masked", "two"): "<|user|>\n Hi\n\n<|assistant|>\n\nHello 'you' </s>\n<|assistant|>\n",
    ("kitchen", "odd"): (
        'Today: 09 Mar 2026\nno tools\n<user>a\n  b</user>\n1 turns, U  |   1|"it\'s" 3 32 3.0 -1 [1, 2.0, None, '
        "True, 'a'] skip- DONE </S>\n<assistant>"
    ),
    ("kitchen", "tools"): (
        'Today: 09 Mar 2026\n1/2 weather({days?: {n?: integer}[], town: string, unit?: "°C" | "°F"}): Tells the '
        "weather <of> a town now\n2/2 time({}): É\n<system>Use tools.</system>\n<user>Weather?</user>\n"
        '<assistant></assistant>\n<tool>{"t": 7}</tool>\n<tool>8</tool>\n<assistant>7 degrees</assistant>\n'
        "<user>Thanks</user>\n7 turns, a  |   7|\"it's\" 3 32 3.0 -7 [1, 2.0, None, True, 'a'] system- DONE </S>\n"
        "<assistant>"
    ),
}


@pytest.mark.parametrize(("name", "chat"), list(GOLDENS))
def test_goldens(name, chat):
    tools = TOOLS if chat == "tools" else None
    assert template(name).render(CHATS[chat], tools=tools, generation_prompt=True, now=NOW).text == GOLDENS[name, chat]


def test_masks_without_transformers():
    rendered = template("masked").render(CHATS["three"])
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["Hello</s>"]
    assert template("chatml").render(CHATS["three"]).spans == ()


INNER = "{% macro m() %}{% generation %}a{% endgeneration %}{% endmacro %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m() %}a{% generation %}a{% endgeneration %}{% endmacro %}b{{ m() }}",
        INNER + "b{{ m() | upper }}",
        INNER + "{% macro n() %}a{{ m() }}{% endmacro %}b{{ n() }}",
        INNER + "b{{ 'a' ~ m() }}",
        "b{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x | upper }}",
        "b{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
    ],
)
def test_text_is_rendered_if_its_mask_is_unknown(source):
    rendered = render_or_error(source, CHATS["one"])
    assert rendered.text in ("baa", "bA", "bab") and rendered.generation_marks is None
    with pytest.raises(ChatTemplateError, match="generation"):
        _ = rendered.spans


def test_macro_of_one_generation_block_has_a_span(reference):
    source = "b{% macro m() %}{% generation %}ac{% endgeneration %}{% endmacro %}{{ m() }}d{{ m() }}"
    arguments = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenize": True}
    assert reference(source, CHATS["one"], **arguments)["assistant_masks"] == [0, 1, 1, 0, 1, 1]
    assert render_or_error(source, CHATS["one"]).spans == ((1, 3), (4, 6))


def test_repeated_generation_block_has_two_spans():
    source = "{% set x %}{% generation %}ab{% endgeneration %}{% endset %}{{ x }}-{{ x }}"
    assert render_or_error(source, CHATS["one"]).spans == ((0, 2), (3, 5))


def test_continuing_truncates_the_masks():
    rendered = template("masked").render(turns(("user", "a"), ("assistant", "b c")), continue_final=True)
    assert rendered == RenderedChat("<|user|>\na\n<|assistant|>\nb c", ((25, 28),))


# ---------------------------------------------------------------- invalid arguments and templates

MESSAGE = {"role": "user", "content": "Hi"}


NESTED = [1]
NESTED.append(NESTED)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        *(
            ({"messages": messages}, error)
            for messages, error in [
                ([], "there are no messages"),
                ("Hi", "messages must be a list of objects, not a text"),
                (["Hi"], "messages[0] is a text, not an object"),
                ([MESSAGE, {"content": "x"}], "messages[1] has no role"),
                ([MESSAGE, {"role": 1, "content": "x"}], "messages[1] has a role that is a number"),
                ([{"role": "user"}], "messages[0] (role 'user') has no content"),
                ([{**MESSAGE, "content": 3}], "messages[0]: its content is a number"),
                ([{**MESSAGE, "content": ["a"]}], "messages[0]: its content contains an item that is not an object"),
                ([{**MESSAGE, "x": {"y": [object()]}}], "messages[0].x.y[0] is a object"),
                ([{**MESSAGE, "x": NESTED}], "messages[0] is nested more than 200 levels deep"),
                ([{**MESSAGE, 1: 2}], "messages[0] has the key 1, which is not a text"),
            ]
        ),
        ({"tools": {"a": 1}}, "tools must be a list of objects, not an object"),
        ({"tools": [len]}, "tools[0] is a builtin_function_or_method, not an object"),
        ({"documents": ["a"]}, "documents[0] is a text"),
        ({"variables": {"messages": []}}, "the variable 'messages' is a separate argument"),
        ({"generation_prompt": True, "continue_final": True}, "generation_prompt and continue_final cannot be"),
    ],
)
def test_invalid_arguments(arguments, error):
    with pytest.raises(ChatTemplateError) as caught:
        template("chatml").render(**{"messages": [MESSAGE], **arguments})
    assert caught.value.message.startswith(error) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("a\n{% if %}", "the chat template cannot be read: line 2: Expected an expression"),
        ("{% for a in b %}\n\n{{ a }}", "the chat template cannot be read: line 3: Unexpected end of template"),
        ("\n\n{{ 'a' | nothing }}", "cannot be read: line 3: No filter named 'nothing'"),
        ("a\n{{ raise_exception('No system, please: ' ~ 1) }}", "(line 2) refuses: No system, please: 1"),
        ("\n\n{{ message.content.x }}", "(line 3) failed: 'message' is undefined"),
        ("{% macro m() %}\n{{ 1 + 'a' }}{% endmacro %}\n\n{{ m() }}", "(line 2) failed: TypeError: unsupported"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "it is nested too deeply"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("a" * (1 << 17), "has 131,072 characters"),
    ],
)
def test_invalid_templates(source, error):
    with pytest.raises(ChatTemplateError) as caught:
        template(source).render([MESSAGE])
    assert error in caught.value.message
    assert isinstance(caught.value, UsageError) and caught.value.__context__ is None


def test_the_final_message_must_appear():
    with pytest.raises(ChatTemplateError, match="not in the rendered chat"):
        template("{{ messages[0].content | upper }}").render([MESSAGE], continue_final=True)
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        template("chatml").render([{"role": "assistant", "content": [{"type": "image"}]}], continue_final=True)


def test_arguments_are_not_modified():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(chat)
    template("llama3").render(chat, continue_final=True)
    assert json.dumps(chat) == before


def test_default_time_is_now():
    assert template("{{ strftime_now('%Y') }}").render([MESSAGE], now=NOW).text == "2026"
    assert abs(int(template("{{ strftime_now('%Y') }}").render([MESSAGE]).text) - datetime.now().year) <= 1


# ---------------------------------------------------------------- files


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


LISTED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]
FOLDERS = {
    "nothing": ({}, None),
    "config without": ({"tokenizer_config.json": {"bos_token": "<s>"}}, None),
    "jinja": ({"chat_template.jinja": "J\n"}, {"default": "J\n"}),
    "config": ({"tokenizer_config.json": {"chat_template": "C"}}, {"default": "C"}),
    "list": ({"tokenizer_config.json": {"chat_template": LISTED}}, {"default": "D", "tool_use": "T", "rag": "R"}),
    "both": ({"tokenizer_config.json": {"chat_template": "C"}, "chat_template.jinja": "J"}, {"default": "J"}),
    "more": (
        {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"},
        {"default": "J", "tool_use": "T"},
    ),
    "legacy": ({"chat_template.json": {"chat_template": "L"}}, {"default": "L"}),
    "late legacy": ({"chat_template.json": {"chat_template": "L"}, "chat_template.jinja": "J"}, {"default": "J"}),
}


@pytest.mark.parametrize("files", FOLDERS)
def test_template_files_and_their_precedence(tmp_path, files):
    loaded = ChatTemplate.load(write(tmp_path, FOLDERS[files][0]))
    assert (loaded and loaded.templates) == FOLDERS[files][1]


ADDED = {"content": "<e>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
SPECIAL_FILES = {
    "texts": {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None}},
    "objects": {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **ADDED}, "sep_token": "[SEP]"}},
    "map only": {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": ADDED, "pad_token": "</s>"}},
    "map wins": {
        "tokenizer_config.json": {"bos_token": "<a>", "additional_special_tokens": ["<x>"]},
        "special_tokens_map.json": {"bos_token": "<b>", "additional_special_tokens": ["<y>", ADDED, "<x>"]},
    },
    "decoder wins": {
        "tokenizer_config.json": {"bos_token": "<a>", "added_tokens_decoder": {"0": {**ADDED, "special": True}}},
        "special_tokens_map.json": {"bos_token": "<b>"},
    },
    "extra": {"tokenizer_config.json": {"bos_token": "<a>", "extra_special_tokens": {"image_token": "<i>"}}},
}


@pytest.mark.parametrize("files", SPECIAL_FILES)
def test_special_tokens_equal_transformers(tmp_path, files):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    write(tmp_path, {"chat_template.jinja": "J", **SPECIAL_FILES[files]})
    Tokenizer(models.BPE(vocab={"<e>": 0}, merges=[])).save(str(tmp_path / "tokenizer.json"))
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).special_tokens_map
    assert ChatTemplate.load(tmp_path).specials == expected


def test_special_tokens_without_transformers(tmp_path):
    write(
        tmp_path, {"chat_template.jinja": "{{ bos_token }}|{{ image_token }}|{{ eos_token }}", **SPECIAL_FILES["extra"]}
    )
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.render([MESSAGE]).text == "<a>|<i>|"
    assert loaded.render([MESSAGE], variables={"bos_token": "<z>"}).text == "<z>|<i>|"


def test_template_is_chosen_by_name_and_tools(tmp_path):
    write(tmp_path, FOLDERS["list"][0])
    loaded = ChatTemplate.load(tmp_path)
    assert loaded.render([MESSAGE]).text == "D" and loaded.render([MESSAGE], tools=TOOLS).text == "T"
    assert loaded.render([MESSAGE], tools=[]).text == "T"  # as in transformers: tools were given, if none
    assert ChatTemplate.load(tmp_path, name="rag").render([MESSAGE], tools=TOOLS).text == "R"
    with pytest.raises(ChatTemplateError, match="did you mean 'tool_use'"):
        ChatTemplate.load(tmp_path, name="tool-use")
    with pytest.raises(ChatTemplateError, match="no default"):
        ChatTemplate({"a": "A", "b": "B"}).render([MESSAGE])


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"tokenizer_config.json": "{"}, "tokenizer_config.json: not JSON: line 1, column 2"),
        ({"tokenizer_config.json": "[]"}, "expected a JSON object, found a list"),
        ({"tokenizer_config.json": {"chat_template": 3}}, "neither a text nor a list"),
        ({"tokenizer_config.json": {"chat_template": [{"cache_key": "a"}]}}, "neither a text nor a list"),
    ],
)
def test_invalid_files(tmp_path, files, error):
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate.load(write(tmp_path, files))
    assert error in caught.value.message and str(tmp_path) in caught.value.message


def test_invalid_utf8_and_missing_folders_are_refused(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"a\xff")
    with pytest.raises(ChatTemplateError, match="not UTF-8 at byte 1"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(ChatTemplateError, match="no such folder"):
        ChatTemplate.load(tmp_path / "absent")


# ---------------------------------------------------------------- limits


def test_limits_are_parameters():
    small = template("{{ messages[0].content }}", limits=RenderLimits(output=3))
    assert small.render([{"role": "user", "content": "abc"}]).text == "abc"
    with pytest.raises(ChatTemplateError, match="writes more than 3 characters"):
        small.render([{"role": "user", "content": "abcd"}])


def test_large_conversations_within_the_limits_are_rendered():
    chat = turns(*[("user" if i % 2 == 0 else "assistant", "🙂" * 2000) for i in range(1000)])
    for name in ("chatml", "llama2", "llama3", "gemma", "zephyr", "qwen"):
        assert len(template(name, limits=RenderLimits(seconds=30)).render(chat).text) > 2_000_000
    gathered = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t }}"
    )
    assert len(template(gathered, limits=RenderLimits(seconds=30)).render(chat).text) == 2_000_000
