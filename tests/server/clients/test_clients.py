"""Other people's clients, unmodified: schemathesis, lm-eval and litellm (``openai`` is in ``tests/server``).

schemathesis is installed with the tests. lm-eval and litellm need packages of other versions: ``make test`` and
``make clients`` make their environment, ``.venv-clients`` or ``$KVAD_CLIENTS``.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import KEYS

CLIENTS = Path(os.environ.get("KVAD_CLIENTS", Path(__file__).parents[3] / ".venv-clients")).absolute()
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "negative_data_rejection", "unsupported_method", "ignored_auth",
)  # fmt: skip


def run_client(command, folder, seconds, **variables):
    """Run a client in a folder and return its output."""
    environment = {**os.environ, "OPENAI_API_KEY": KEYS[0], "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), **variables}
    environment.pop("PYTHONPATH", None)
    command = list(map(str, command))
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    return done.stdout


def client_program(name):
    program = CLIENTS / "bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed: make clients")
    return program


# ---------------------------------------------------------------- schemathesis


def run_schemathesis(server, folder, *options, seconds=120):
    """Send the requests that schemathesis makes of /openapi.json: no 5xx, bad ones are refused."""
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: make install")
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{server.url}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {KEYS[0]}", "--checks", ",".join(CHECKS), "--request-timeout", 30]
    command += ["--continue-on-failure", "--no-shrink", "--no-color", "--warnings", "off", "--seed", 1, *options]
    return run_client(command, folder, seconds)


def test_schemathesis(server, tmp_path):
    """The systematic cases of two routes: every field with every kind of invalid value."""
    paths = ("--include-path", "/tokenize", "--include-path", "/v1/completions")
    assert "No issues found" in run_schemathesis(server, tmp_path, "--phases", "coverage", *paths)
    assert server.complete("x", max_tokens=1)


@pytest.mark.long(minutes=4)
def test_schemathesis_of_all_routes(server, tmp_path):
    options = ("--phases", "coverage,fuzzing", "-n", 100)
    assert "No issues found" in run_schemathesis(server, tmp_path, *options, seconds=900)
    assert server.complete("x", max_tokens=1)


# ---------------------------------------------------------------- lm-eval

TEXTS = ["the first text, of some words", "and another one: a longer text, with more words in it than the first"]
CHOICES = [
    {"question": "the color of the sky is", "choices": [" blue", " green, or so", " 7"], "label": 0},
    {"question": "two and two are", "choices": [" five", " four"], "label": 1},
]
WORDS = [{"context": "once upon a", "word": " time"}, {"context": "to be or not to", "word": " be"}]
TASKS = {  # name -> (documents, fields of the task)
    "choice": (CHOICES, {"output_type": "multiple_choice", "target_delimiter": "",
                         "doc_to_text": "{{question}}", "doc_to_target": "label",
                         "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}),
    "words": (WORDS, {"output_type": "loglikelihood", "doc_to_text": "{{context}}", "doc_to_target": "{{word}}",
                      "target_delimiter": "", "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]}),
    "texts": ([{"text": text} for text in TEXTS],
              {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
               "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}),
    "prompts": ([{"prompt": text, "answer": "?"} for text in TEXTS],
                {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
                 "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
                 "metric_list": [{"metric": "exact_match"}]}),
}  # fmt: skip


def run_lm_eval(server, folder, *options):
    """Run the tasks from files of a folder; return the results and the documents of each task."""
    for name, (documents, fields) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, documents)))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": f"kvad_{name}", **source, **fields}))  # JSON is YAML
    fields = {"model": "tiny", "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "remote"}
    fields |= {"auth_token": KEYS[0], "max_length": 500, "num_concurrent": 2}
    arguments = ",".join(f"{name}={value}" for name, value in fields.items())
    run_client(
        [client_program("lm_eval"), "--model", "local-completions", "--model_args", arguments, "--batch_size", 1,
         "--tasks", ",".join(f"kvad_{name}" for name in TASKS), "--include_path", folder, "--log_samples",
         "--output_path", folder / "out", *options], folder, 300,
    )  # fmt: skip
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        (path,) = (folder / "out").rglob(f"samples_kvad_{name}_*.jsonl")
        documents = map(json.loads, path.read_text().splitlines())
        samples[name] = sorted(documents, key=lambda document: document["doc_id"])
    scores = json.loads(results.read_text())["results"]
    return {name: scores[f"kvad_{name}"] for name in TASKS}, samples


def test_scores_of_lm_eval(server, llm, tmp_path):
    """Its tasks by HTTP have the scores that the engine in this process computes."""
    client_program("lm_eval")
    results, samples = run_lm_eval(server, tmp_path)

    def score(context, continuation):
        """Return the sum of the continuation's log-probabilities."""
        head = llm.encode(context)
        return math.fsum(llm.score(head + llm.encode(continuation)).logprobs[len(head) :])

    scores = [[score(each["question"], choice) for choice in each["choices"]] for each in CHOICES]
    for expected, sample in zip(scores, samples["choice"], strict=True):
        assert [float(reply[0][0]) for reply in sample["resps"]] == pytest.approx(expected, abs=1e-4)
    best = [max(range(len(each)), key=each.__getitem__) for each in scores]
    accuracy = sum(found == each["label"] for found, each in zip(best, CHOICES, strict=True)) / len(CHOICES)
    assert results["choice"]["acc,none"] == pytest.approx(accuracy)

    totals = [score(each["context"], each["word"]) for each in WORDS]
    perplexity = math.exp(-sum(totals) / len(totals))
    assert results["words"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)

    end = llm.tokenizer.special_tokens.eos
    totals = [math.fsum(llm.score([end, *llm.encode(text)]).logprobs[1:]) for text in TEXTS]
    bits = -sum(totals) / sum(len(text.encode()) for text in TEXTS) / math.log(2)
    assert results["texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)

    for text, sample in zip(TEXTS, samples["prompts"], strict=True):
        expected = llm.generate(text, max_tokens=24, temperature=0, stop=("\n\n", "</s>")).text
        assert sample["resps"][0][0] == expected


# ---------------------------------------------------------------- litellm

LITELLM = """
import json, sys, litellm
url, key = sys.argv[1:]
shared = {"model": "openai/tiny", "api_base": url, "api_key": key, "temperature": 0, "max_tokens": 12}
messages = [{"role": "user", "content": "hello"}]
whole = litellm.completion(messages=messages, **shared)
stream = litellm.completion(messages=messages, stream=True, **shared)
parts = [chunk.choices[0].delta.content or "" for chunk in stream]
text = litellm.text_completion(prompt="hello", **{**shared, "model": "text-completion-openai/tiny"})
errors = []
for fields in ({"api_key": "wrong-key-0001"}, {"temperature": -1}, {"model": "openai/gpt-9"}):
    try:
        litellm.completion(messages=messages, num_retries=0, **{**shared, **fields})
    except Exception as error:
        errors.append(type(error).__name__)
vectors = litellm.embedding(model="openai/tiny", input=["one"], api_base=url, api_key=key, encoding_format="float")
print(json.dumps({"whole": whole.choices[0].message.content, "parts": "".join(parts), "text": text.choices[0].text,
                  "tokens": whole.usage.completion_tokens, "errors": errors,
                  "size": len(vectors.data[0]["embedding"])}))
"""


def test_litellm(server, llm, tmp_path):
    client_program("litellm")
    command = [CLIENTS / "bin/python", "-c", LITELLM, f"{server.url}/v1", KEYS[0]]
    reply = json.loads(run_client(command, tmp_path, 120, LITELLM_LOCAL_MODEL_COST_MAP="True").splitlines()[-1])
    settings = {"max_tokens": 12, "temperature": 0}
    assert reply["whole"] == reply["parts"] == llm.chat([{"role": "user", "content": "hello"}], **settings).text
    assert reply["text"] == llm.generate("hello", **settings).text and reply["tokens"] == 12
    assert reply["errors"] == ["AuthenticationError", "BadRequestError", "NotFoundError"]
    assert reply["size"] == llm.model.config.hidden_size
