"""Routes without an event stream: models, embeddings, tokens, translations."""

from __future__ import annotations

import base64
from array import array
from typing import Any

from kvad.server.api import generation, reasoning, text_threads
from kvad.server.api.chat import render
from kvad.server.api.errors import invalid, naming
from kvad.server.api.generation import ApiContext, PromptInput, RequestGroup
from kvad.server.api.schema import ChatBody, DetokenizeBody, EmbeddingBody, TokenizeBody, TranslateBody


def list_models(context: ApiContext) -> dict[str, Any]:
    """Answer a request to /v1/models."""
    return {"object": "list", "data": [describe_model(context, name) for name in ("", *context.adapters)]}


def describe_model(context: ApiContext, adapter: str = "") -> dict[str, Any]:
    """Return OpenAI's model object, and what kvad knows of the model, or its adapter, and the cache."""
    info, template = context.llm.info, context.llm.chat_templates.find(adapter)
    source = "" if template is None else template.templates.get("default", "")
    return {
        "id": adapter or context.model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "kvad",
        "root": adapter or context.model_name,  # never a path of this machine
        "parent": context.model_name if adapter else None,
        "max_model_len": info["max_len"],
        "kind": context.llm.config.kind,
        "has_chat_template": template is not None,
        "thinking": reasoning.thinking_variables(source),  # variables for chat_template_kwargs
        "languages": sorted(context.llm.tokenizer.languages) if context.llm.tokenizer is not None else [],
        "cache": {
            name: info[name]
            for name in ("max_num_seqs", "block_size", "num_blocks", "policy", "formats", "dtype", "num_layers")
        },
        "features": {
            "attention": context.config.attention and not adapter,
            "sessions": context.config.session_dir is not None,
        },
    }


async def create_embeddings(context: ApiContext, body: EmbeddingBody, key: str) -> dict[str, Any]:
    """Answer a request to /v1/embeddings."""
    adapter = context.check_model(body.model)
    texts = generation.split_prompts(context, "input", body.input)
    encode = context.llm.texts.encode_embedding
    with naming("input"):
        inputs = await context.threads.run(sum(map(len, texts)), lambda: [encode(text) for text in texts])
    num_tokens = sum(map(len, inputs))
    context.check_room(len(inputs), num_tokens)
    vectors = await context.llm.embed_ids(inputs, adapter=adapter, cache_salt=context.salt(key, None))
    size = len(vectors[0])
    if body.dimensions not in (None, size):
        raise invalid("dimensions", f"must be {size}, the size of this model's vectors, got {body.dimensions}")
    data = [
        {"object": "embedding", "index": index, "embedding": _encode_vector(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": adapter or context.model_name, "usage": usage}


def _encode_vector(vector: list[float], form: str) -> list[float] | str:
    """Return a vector as numbers, or as base64 of little-endian 32-bit floats."""
    if form == "float":
        return vector
    values = array("f", vector)
    return base64.b64encode(values.tobytes()).decode()


async def tokenize(context: ApiContext, body: TokenizeBody, key: str) -> dict[str, Any] | bytes:
    """Answer a request to /tokenize."""
    adapter = context.check_model(body.model)
    limits, llm = context.config.limits, context.llm
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "either prompt or messages must be given")
    if body.messages is not None:
        if body.add_special_tokens:
            raise invalid("add_special_tokens", "cannot be combined with messages: the template has special tokens")
        size = generation.check_chars(context, "messages", body.messages)
        names = ("messages", "chat_template_kwargs", "reasoning_effort")
        chat = ChatBody(**{name: getattr(body, name) for name in names})
        tokens, _, _ = await render(context, chat, adapter)
    else:
        for name in ("chat_template_kwargs", "reasoning_effort"):
            if getattr(body, name) is not None:
                raise invalid(name, "requires messages")
        assert body.prompt is not None
        size = len(body.prompt)
        generation.check_limit("prompt", size, limits.max_prompt_chars, "characters")
        tokenizer = llm.texts.require_tokenizer()
        # special tokens are parsed, as in other servers: clients find the id of "</s>" so
        tokens = await context.threads.run(size, tokenizer.encode, body.prompt, specials=True)
        if body.add_special_tokens is not False:
            tokens = tokenizer.add_special_tokens(tokens)
    reply: dict[str, Any] = {"count": len(tokens), "max_model_len": llm.info["max_len"], "tokens": tokens}
    if body.return_token_strs:
        reply["token_strs"] = await context.threads.run(size, lambda: [context.token_texts(token) for token in tokens])
    if len(tokens) < text_threads.LARGE:
        return reply
    return await context.threads.run(len(tokens), text_threads.encode_json, reply)


async def detokenize(context: ApiContext, body: DetokenizeBody, key: str) -> dict[str, Any]:
    """Answer a request to /detokenize."""
    context.check_model(body.model)
    generation.check_limit("tokens", len(body.tokens), context.config.limits.max_prompt_tokens, "tokens")
    tokenizer = context.llm.texts.require_tokenizer()
    with naming("tokens"):
        text = await context.threads.run(len(body.tokens), tokenizer.decode, body.tokens, skip_specials=False)
    return {"prompt": text}


def tokenizer_info(context: ApiContext) -> dict[str, Any]:
    """Answer a request to /tokenizer_info."""
    tokenizer, template = context.llm.texts.require_tokenizer(), context.llm.chat_template
    special = tokenizer.special_tokens
    names: dict[int | None, str] = {token: name for name, token in special.names().items()}
    eos = special.eos if special.eos is not None else special.separator
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": context.llm.info["max_len"],
        "bos_token": names.get(special.bos),
        "eos_token": names.get(eos),
        "pad_token": names.get(special.pad),
        "unk_token": names.get(special.unk),
        "chat_template": None if template is None else template.templates.get("default"),
    }


async def translate(context: ApiContext, body: TranslateBody, key: str) -> dict[str, Any]:
    """Answer a request to /v1/translate: decode texts with an encoder-decoder."""
    adapter = context.check_model(body.model)
    llm, limits = context.llm, context.config.limits
    if llm.config.kind != "encoder-decoder":
        raise invalid("model", f"is a {llm.config.kind} and does not translate. Use /v1/completions.")
    texts = generation.split_prompts(context, "text", body.text)
    generation.check_limit("n", body.n, limits.max_n, "samples")
    given = {
        "language": body.target_language, "source_language": body.source_language, "num_beams": body.num_beams,
        "target_prefix": body.target_prefix, "length_penalty": body.length_penalty, "max_tokens": body.max_tokens,
        "temperature": body.temperature, "seed": body.seed, "n": body.n if body.n > 1 else None,
    }  # fmt: skip
    settings: Any = {name: value for name, value in given.items() if value is not None}
    if body.target_language is not None:
        with naming("target_language"):
            llm.texts.language_token(body.target_language)
    if body.source_language is not None:
        tokenizer = llm.texts.require_tokenizer()
        with naming("source_language"):
            (tokenizer.source_tokenizer or tokenizer).add_special_tokens([], language=body.source_language)
    settings |= {"cache_salt": context.salt(key, None), "adapter": adapter}
    make = llm.builder.generation(None, settings)
    submissions = await generation.build(context, make, list[PromptInput](texts))
    group = RequestGroup(context, submissions, request_id=body.request_id)
    results = await group.all_chunks()
    group.observe()
    translations = []
    for chunks in results:
        samples = []
        for sample in range(body.n):
            own = [chunk for chunk in chunks if chunk.sample_index == sample]
            score = own[-1].cumulative_logprob
            text = "".join(chunk.text for chunk in own)
            context.metrics.observe_finish(str(own[-1].finish_reason))
            samples.append({"text": text, "score": score, "finish_reason": own[-1].finish_reason})
        translations.append({"text": samples[0]["text"], "alternatives": samples})
    return {"object": "list", "model": group.model_name, "data": translations, "usage": group.usage()}
