"""Real models on real llama.cpp: they compute alike alone and over workers, and clients use them through the package openai."""

import concurrent.futures
import json
import math
import sys
import urllib.request

import openai
import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import start_log
from buffers import compared
from conftest import ROOT, Cluster, until
from test_placement import SERVER_PORT, planned, running

sys.path.append(str(ROOT / "tests"))
import real_models  # it lies in the folder of the line before

PARAGRAPHS = (ROOT / "tests/integration/data/paragraphs.txt").read_text().strip().split("\n\n")
PROMPT_WORDS = (50, 75, 100, 125, 149)
"""Lengths of the prompts that are cut from each paragraph: 50 to 200 tokens."""
URL = f"http://127.0.0.1:{SERVER_PORT}"
GENERATED, SCORED = 8, 24
"""Numbers of tokens that a prompt generates, and that the perplexity counts."""


def asked(path, url=URL, **body):
    """Return the reply of llama-server to its own kind of request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def completions():
    """Return the number of prompt tokens, the text and its log-probabilities for each prompt."""
    found = []
    for paragraph in PARAGRAPHS:
        for words in PROMPT_WORDS:
            prompt = " ".join(paragraph.split()[:words])
            said = asked("/completion", prompt=prompt, n_predict=GENERATED, temperature=0, n_probs=5)
            found.append((said["tokens_evaluated"], said["content"], said["completion_probabilities"]))
    return found


def perplexity():
    """Return the perplexity of words that follow a prompt; the server is made to say each of their tokens."""
    tokens = asked("/tokenize", content=PARAGRAPHS[0], add_special=True)["tokens"]
    start = len(tokens) // 2
    total = 0.0
    for place in range(start, start + SCORED):
        forced = {"n_predict": 1, "n_probs": 1, "temperature": 0, "logit_bias": [[tokens[place], 1000]]}
        [said] = asked("/completion", prompt=tokens[:place], **forced)["completion_probabilities"]
        assert said["id"] == tokens[place]
        total += said["logprob"]
    return math.exp(-total / SCORED)


@pytest.mark.parametrize(
    "model, alone",
    [
        pytest.param(real_models.SMOLLM2, {}, id="smollm2"),
        # A worker never repacks weights as the head's processor does.
        pytest.param(real_models.GEMMA, {"extra_args": ["--no-repack"]}, id="gemma"),
    ],
)
def test_workers_compute_what_one_process_computes(programs, workers, tmp_path, model, alone):
    path = real_models.path_of(model)
    results = []
    for count in range(4):
        placed, arguments = planned(path, workers, (1,) * count, threads=1, **({} if count else alone))
        with running(programs, arguments, tmp_path) as log:
            results.append((completions(), perplexity()))
        assert not compared(placed, start_log.parse_buffers(log.read_text())), count
    (expected, expected_perplexity), *others = results
    assert len(expected) == 20
    assert all(50 <= tokens <= 200 for tokens, _text, _probabilities in expected)
    for answers, found in others:
        assert answers == expected
        assert found == pytest.approx(expected_perplexity, rel=1e-5)


CONTEXT = 256
"""Tokens that each of four clients has."""
VARIABLES = {
    "llama_proof": "never",
    "llama_placement": "all",
    "llama_server_context": 4 * CONTEXT,
    "llama_server_parallel": 4,
}
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Japan": "Tokyo", "Russia": "Moscow"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """SmolLM2 over two workers, for four clients."""
    path = str(real_models.path_of(real_models.SMOLLM2))
    made = Cluster(tmp_path_factory.mktemp("real"), llama_model_known_answer=None, llama_model_path=path, **VARIABLES)
    yield made
    made.clear()


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=120, max_retries=0)


def question(country):
    return [{"role": "user", "content": f"Name the capital of {country}."}]


def chat(client, country="France", **options):
    options = {"model": "any", "temperature": 0, "max_tokens": 32, **options}
    return client.chat.completions.create(messages=question(country), **options)


def test_a_chat_uses_the_template_of_the_file(served, client):
    reply = chat(client).choices[0]
    assert "Paris" in reply.message.content
    assert reply.finish_reason == "stop"
    prompt = asked("/apply-template", served.url, messages=question("France"))["prompt"]
    assert "You are a helpful AI assistant named SmolLM" in prompt
    assert asked("/completion", served.url, prompt=prompt, temperature=0)["content"] == reply.message.content


def test_a_stream_says_what_a_whole_reply_says(client):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    reply = chat(client)
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == reply.choices[0].message.content
    assert len(said) > 5
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens


def test_a_stop_string_ends_the_reply_before_it(client):
    whole = chat(client).choices[0].message.content
    reply = chat(client, stop=["Paris"])
    assert reply.choices[0].message.content == whole.split("Paris")[0]
    assert reply.choices[0].finish_reason == "stop"


def test_a_reply_follows_a_json_schema(client):
    properties = {"capital": {"type": "string", "maxLength": 20}, "old": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["capital", "old"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    said = json.loads(chat(client, response_format=form, max_tokens=64).choices[0].message.content)
    assert {name: type(value) for name, value in said.items()} == {"capital": str, "old": bool}


def test_log_probabilities_name_the_likeliest_tokens(client):
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens).startswith(choice.message.content)
    for token in tokens:
        likely = [other.logprob for other in token.top_logprobs]
        assert len(likely) == 3
        assert likely == sorted(likely, reverse=True)
        assert token.logprob == likely[0] <= 0


def test_four_clients_at_once_get_their_own_replies(client):
    with concurrent.futures.ThreadPoolExecutor(len(CAPITALS)) as clients:
        replies = list(clients.map(lambda country: chat(client, country), CAPITALS))
    for capital, reply in zip(CAPITALS.values(), replies):
        assert capital in reply.choices[0].message.content


def slots(cluster):
    with urllib.request.urlopen(f"{cluster.url}/slots", timeout=30) as reply:
        return json.load(reply)


def test_a_client_that_disconnects_frees_its_slot(served, client):
    stream = chat(client, stream=True, max_tokens=-1, extra_body={"ignore_eos": True})
    next(iter(stream))
    (used,) = (slot["id"] for slot in slots(served) if slot["is_processing"])
    stream.close()
    (freed,) = until(lambda: [slot for slot in slots(served) if slot["id"] == used and not slot["is_processing"]])
    assert freed["n_prompt_tokens"] < CONTEXT - 1, "the server went on until the context was full"


def test_a_context_is_filled_to_its_last_token(client):
    messages = [{"role": "user", "content": PARAGRAPHS[0]}]
    reply = client.chat.completions.create(
        model="any", messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == CONTEXT


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(client):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="any", prompt=" ".join(PARAGRAPHS), max_tokens=1)
    assert refused.value.type == "exceed_context_size_error"
    assert refused.value.body["n_ctx"] == CONTEXT
    assert refused.value.body["n_prompt_tokens"] > CONTEXT
    assert "Paris" in chat(client).choices[0].message.content


def test_two_models_answer_behind_one_url(served, client):
    models = [
        {"name": "chat", "path": str(real_models.path_of(real_models.SMOLLM2))},
        {"name": "text", "path": str(real_models.path_of(real_models.GEMMA))},
    ]
    router = Cluster(served.folder, llama_model_known_answer=None, llama_models=models, **VARIABLES)
    result = router.site()
    assert result.status == "successful", result.text
    assert {model.id for model in client.models.list()} == {"chat", "text"}
    # docs/models.md: the router closes connections that it offers to keep.
    patient = client.with_options(max_retries=openai.DEFAULT_MAX_RETRIES)
    for _turn in range(2):
        assert "Paris" in chat(patient, model="chat").choices[0].message.content
        reply = patient.completions.create(model="text", prompt="Paris is the capital of", temperature=0, max_tokens=8)
        assert "France" in reply.choices[0].text
