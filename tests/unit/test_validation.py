"""What an operator or a host says reaches no command, definition or screen unless it can stand there."""

import datetime
import json
import time

import pytest
from ansible_collections.llamacpp.cluster.plugins.action import plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.planner import refused_plan
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import inventory
from support import actions

ALONE = {"llama_cluster": ["a"], "llama_head": ["a"]}
"""Groups of a cluster of one host."""
CHARACTERS = ["\n", "\r", "\t", "\0", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\u202e", "\ud800"]

EVERYWHERE = {
    "llama_build_cmake_options": lambda text: {"CMAKE_C_FLAGS": text},
    "llama_hardware": lambda text: {"accelerators": [{"backend": "cuda", "name": text}]},
    "llama_links": lambda text: [{"interface": text, "address": "192.0.2.1"}],
    "llama_model_gguf_summary": lambda text: {"tensors": [{"name": text}]},
    "llama_release": lambda text: {"source": "git", "ref": "b11434", "repository": text},
    "llama_server_host": lambda text: text,
    "llama_worker_endpoints": lambda text: [{"name": text, "environment": {"NAME": text}}],
}


def test_a_control_character_is_refused_by_the_name_of_its_variable(local):
    cases = [(variable, "\x1b") for variable in EVERYWHERE]
    for variable, character in [*cases, *(("llama_server_host", character) for character in CHARACTERS)]:
        own = local.hosts["here"]["variables"]
        before, own[variable] = own[variable], EVERYWHERE[variable](f"a{character}User=root")
        reason = local.reason()
        own[variable] = before
        assert reason.startswith(variable)
        assert "control character: remove it (host here)" in reason
        assert character not in reason


def test_letters_of_all_languages_may_be_there(local):
    local.hosts["here"]["variables"]["llama_server_extra_args"] = ["--chat-template", "Größe 大きい ñ"]
    assert local.plan()["head"]["argv"][-1] == "Größe 大きい ñ"


def test_what_a_text_becomes_is_looked_at_too():
    """Ansible takes JSON in a text for the mapping that it stands for."""
    own = {"llama_server_environment": '{"A": "b\\u001b[2J"}'}
    task_vars = {"groups": ALONE, "hostvars": {"a": own}}
    with pytest.raises(Refusal, match=r"llama_server_environment.A is 'b\\x1b\[2J', which has a line break"):
        cluster_inputs.read_cluster(*inventory.cluster_hosts(task_vars))


def test_names_of_hosts(pair):
    host = pair.hosts.pop("worker1")
    for name in ("a b", "a\nb", "::1", "../a", ".a", "-rf", "a/b", "", "a\x1b[2J", "x" * 300):
        pair.hosts[name] = host
        assert pair.reason().startswith(
            f"a host has the name {validation.quote(name)} in the inventory: use at most 255 letters"
        )
        del pair.hosts[name]


def test_the_name_of_a_cluster(local):
    with pytest.raises(Refusal, match=r"the cluster has the name 'a\\x1bb' in the inventory") as raised:
        cluster_inputs.checked_hosts("a\x1bb", local.hosts)
    assert refused_plan("a\x1bb", raised.value).cluster == r"a\x1bb"
    with pytest.raises(Refusal, match=r"no group 'a\\x1bb'"):
        inventory.cluster_hosts({"groups": {}, "hostvars": {}, "llama_cluster_group": "a\x1bb"})


def test_ansibles_messages_repeat_no_control_character():
    own = {"llama_server_flash_attention": "on\x1b[2J"}
    task_vars = {"groups": ALONE, "hostvars": {"a": own}}
    with pytest.raises(Refusal) as raised:
        inventory.cluster_hosts(task_vars)
    assert "llama_server_flash_attention is 'on\\x1b[2J', which has a line break" in str(raised.value)
    assert "\x1b" not in str(raised.value)


SECRETS = [
    *("https://me:SECRET@192.0.2.1/x", "https://SECRET@192.0.2.1/x", "ssh://me:SECRET@192.0.2.1/x"),
    *(f"http://192.0.2.1/x?{name}=SECRET" for name in ("token", "a=1&access_token", "api-key", "sig")),
    "http://192.0.2.1/x?X-Amz-Signature=SECRET&b=2",
    *(f"https://h/x#{name}=S" for name in ("access_token", "jwt", "passphrase", "code", "key", "tokens")),
    *(f"https://h/x?a=b&{name}=S" for name in ("AWSAccessKeyId", "subscription-key", "apikey2")),
    *("user:pw@proxy:3128", "--proxy=user:p@ss@192.0.2.1:3128/", "user:pw@[::1]:3128"),
]
NO_SECRETS = """
ssh://git@192.0.2.1/x git@192.0.2.1:x https://192.0.2.1/x?download=true https://192.0.2.1/a@b?keys
https://192.0.2.1/x?monkey=1&turkey=2&keyboard=3 https://192.0.2.1/x?barcode=1&codec=2
model:7b@q4_k_m image:tag@sha256:0123456789abcdef blk.1:CPU
"""


def test_a_secret_in_a_url_is_found():
    assert [text for text in SECRETS if not redaction.has_secret(text)] == []
    assert [text for text in NO_SECRETS.split() if redaction.has_secret(text)] == []


@pytest.mark.parametrize(
    "variable, value",
    [
        ("llama_release", lambda url: {"source": "archive", "url": url, "nonsense": 1}),
        ("llama_release_cuda", lambda url: {"source": "git", "repository": url, "ref": 1}),
        ("llama_release", lambda url: url),
        ("llama_model_path", lambda url: url),
        ("llama_server_environment", lambda url: {"https_proxy": url}),
        ("llama_worker_endpoints", lambda url: [{"name": "one", "environment": {"http_proxy": url}}]),
        ("llama_server_extra_args", lambda url: ["--lora", url]),
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_repeated(local, variable, value):
    local.hosts["here"]["variables"][variable] = value(SECRETS[0])
    reason = local.reason()
    assert reason.startswith(variable)
    assert "has a password or token in a URL" in reason
    assert "SECRET" not in reason


def test_names_of_secrets():
    secrets = "HF_TOKEN2 API_KEY_1 OPENAI_KEY MY_PASS PASSPHRASE MYSQL_PWD GITHUB_PAT PROXY_AUTH SECRET_KEY_BASE"
    for name in secrets.split():
        with pytest.raises(Refusal, match=f"sets {name}, a secret"):
            cluster_inputs.read_environment("environment", {name: "S"})
    others = "PATH TOKENIZERS_PARALLELISM GGML_VK_DISABLE_COOPMAT COMPASS KEYBOARD BYPASS"
    given = dict.fromkeys(others.split(), "S")
    assert cluster_inputs.read_environment("environment", given) == given


def test_a_misspelt_variable_with_a_control_character_is_not_shown(local):
    local.hosts["here"]["unknown_variables"] = {"llama_b\x1b[31mad": ""}
    assert "'llama_b\\x1b[31mad'" in local.reason()


def test_a_proxy_with_a_password(local):
    for name, value in (("http_proxy", "me:SECRET@proxy"), ("ALL_PROXY", "SECRET@proxy:3128")):
        local.hosts["here"]["variables"]["llama_server_environment"] = {name: value}
        assert f"llama_server_environment sets {name}, a secret" in local.reason()
        assert "SECRET" not in local.reason()
    local.hosts["here"]["variables"]["llama_server_environment"] = {"http_proxy": "http://proxy:3128"}
    local.plan()


def test_a_long_text_is_read_in_no_time():
    """A text of 64 kB took four seconds where each beginning of a URL was followed to the end."""
    parts = ("://", "https://", ":", "?token", "https://a?", "a", ";x", "=a:@", "=a:a@b", "?api_")
    for text in (begin + part * (65000 // len(part)) for begin in ("https://", "") for part in parts):
        started = time.process_time()
        redaction.has_secret(text)
        assert time.process_time() - started < 1, text[:40]


def test_a_secret_among_the_arguments(local):
    words = dict.fromkeys(("--api-key", "--api_key"), "set llama_server_api_key_file instead")
    words |= dict.fromkeys(("--hf_token", "-hft"), "every account on the host could read the token")
    for word, instead in words.items():
        for arguments in ([f"--seed 1 {word} SECRET"], [word, "SECRET"], [f"{word}=SECRET"]):
            local.hosts["here"]["variables"]["llama_server_extra_args"] = arguments
            reason = local.reason()
            assert f"llama_server_extra_args has {word}, which cannot be set there" in reason
            assert instead in reason
            assert "SECRET" not in reason


def test_a_secret_in_an_environment(local):
    variables = local.hosts["here"]["variables"]
    for name in ("LLAMA_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"):
        variables["llama_worker_endpoints"], variables["llama_server_environment"] = [], {name: "SECRET"}
        reason = local.reason()
        assert f"llama_server_environment sets {name}, a secret " in reason
        variables["llama_server_environment"] = {}
        variables["llama_worker_endpoints"] = [{"name": "one", "environment": {name: "SECRET"}}]
        reason += local.reason()
        assert f"environment in llama_worker_endpoints[0] for here sets {name}, a secret " in reason
        assert "SECRET" not in reason.replace(name, "")


def test_words_that_belong_to_options(local):
    arguments = ["--metrics", "--seed", "-1", "--lora-scaled", "/srv/x", "0.5", "--an-option-of-a-later-build", "a"]
    local.hosts["here"]["variables"]["llama_server_extra_args"] = arguments
    assert local.plan()["head"]["argv"][-len(arguments) :] == arguments


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"llama_server_context": 1 << 31}, "llama_server_context is 2147483648: use 2147483647 or less"),
        ({"llama_server_parallel": 5000}, "llama_server_parallel is 5000: use 1024 or less"),
        ({"llama_server_context": 10**30}, "llama_server_context is a 100-bit number: use a finite number"),
        ({"llama_server_port": 65536}, "llama_server_port is 65536: use 1 to 65535"),
        ({"llama_server_fallback": True, "llama_server_fallback_after": 0}, "llama_server_fallback_after is 0"),
        ({"llama_server_fallback": True, "llama_server_fallback_after": 10**7}, "fallback_after is 10000000"),
        ({"llama_worker_endpoints": [{"threads": 10**6}]}, "sets threads to 1000000: use 4096 or less"),
        ({"llama_worker_endpoints": [{"memory_mib": 1 << 50}]}, f"sets memory_mib to {1 << 50}: use {1 << 40} or less"),
        ({"llama_worker_endpoints": [{"cache_mib": -1}]}, "sets cache_mib to -1: use 1 or more"),
        (
            {"llama_links": [{"address": "192.0.2.1", "mtu": 10**6}]},
            "llama_links[0].mtu for here is 1000000: use 65535",
        ),
        (
            {"llama_hardware": {"system": "Windows"}},
            "sets system to 'Windows': use Linux or Darwin. For another system",
        ),
        (
            {"llama_hardware": {"system": "windows"}},
            "declare its workers in llama_external_workers for a Linux or macOS head",
        ),
        (
            {"llama_hardware": {"distribution": "Windows 11"}},
            "sets distribution to 'Windows 11': use a Linux distribution",
        ),
        ({"llama_hardware": {"memory_mib": -1}}, "llama_hardware.memory_mib for here is -1: correct it"),
        ({"llama_hardware": {"memory_mib": 1 << 50}}, f"llama_hardware.memory_mib for here is {1 << 50}: correct it"),
        ({"llama_server_environment": {"A\x1b": 1}}, r"llama_server_environment has the key 'A\x1b': use letters"),
        ({"llama_build_cmake_options": {"A\r": 1}}, r"llama_build_cmake_options has the key 'A\r': use letters"),
        ({"llama_build_cmake_options": {1: 2}}, "llama_build_cmake_options has the key '1': use letters"),
        ({"llama_release": {"source": "pypi", "version": datetime.date(2026, 1, 2)}}, "release.version is a date"),
        ({"llama_model_gguf_summary": {"context": 10**5000}}, "llama_model_gguf_summary.context is a 16610-bit number"),
        ({"llama_server_extra_args": ["x" * 70000]}, "llama_server_extra_args[0] has 70000 characters: use 65536"),
        ({"llama_release": json.loads("[" * 40 + "]" * 40)}, "is nested more than 32 levels deep: flatten it"),
        ({"llama_release": json.loads("[" * 30 + "]" * 30)}, f"llama_release is {30 * '['}"),
    ],
)
def test_what_no_plan_can_hold(local, variables, said):
    local.hosts["here"]["variables"].update(variables)
    assert said in local.reason()


NVIDIA = {"backend": "cuda", "name": "A", "architecture": "8.6", "memory_mib": 1, "unified": False}
REPORTED = {
    "architecture": ["x86_64\x1b[2J", "../..", 1],
    "distribution": [None, {"id": "debian"}],
    "cpu": [{"model": "a", "cores": cores, "features_id": "f"} for cores in (0, 10**30, True)],
    "memory_mib": [-1, float("nan"), "65536", 1 << 50],
    "accelerators": [
        [{**NVIDIA, **odd}]
        for odd in (
            {"name": "A\x1b]0;x\x07"},
            {"backend": "vulcan"},
            {"architecture": "8.6;-DX=1"},
            {"name": "x" * 300},
        )
    ],
    "toolchain": [{"cmake": 3.3}, {"cmake\n": "3"}],
    "toolchains": [[{"backend": "cuda", "prefix": "opt", "links": [], "version": "1"}]],
    "packaged": [{"version": 1, "installed": []}],
    "python": ["python3"],
    "prefix": ["opt", "", "/opt/a\nb", "/home/50%", "/home/a\\", '/home/"x"', "/home/$x", "/home/x ;y"],
    "addresses": [["192.0.2.1/24"], ["localhost"], ["fe80::1"]],
}


def test_a_host_may_report_anything(pair):
    own = pair.hosts["worker1"]["facts"]
    for fact, values in REPORTED.items():
        before = own.get(fact)
        for value in values:
            own[fact] = value
            reason = pair.reason()
            assert f"does not match this version's format ({fact}" in reason
            assert reason.isprintable()
            assert len(reason) < 500
        own[fact] = before


def test_facts_in_which_null_stands_for_nothing(pair):
    unknown = dict.fromkeys(("accounts", "device_groups", "kernel", "packaged"))
    pair.hosts["worker1"]["facts"].update(unknown, measured={"head": None}, python="/x")
    pair.hosts["worker1"]["facts"]["cpu"]["unusable"] = None
    assert not pair.plan()["refused"]


def hosts_of(answer):
    groups = {"llama_cluster": ["a", "b"], "llama_head": ["a"], "llama_workers": ["b"]}
    return inventory.cluster_hosts({"groups": groups, "hostvars": {"a": {}, "b": {}}}, {"a": answer})[1]


@pytest.mark.parametrize("junk", [["facts"], "x", 3])
def test_answers_and_facts_of_another_shape(pair, junk):
    kept = {"facts": {**pair.hosts["head"]["facts"], "cached": junk}}
    assert hosts_of(junk)["a"]["facts"] is None
    assert hosts_of(kept)["b"]["facts"] is None
    for answer, name in (({"facts": junk}, "a"), ({"facts": {**kept["facts"], "cached": {"b": junk}}}, "b")):
        with pytest.raises(Refusal, match=f"The report from {name} about itself does not match"):
            hosts_of(answer)


def test_a_number_as_the_name_of_a_setting():
    """Ansible's own validation fails with a TypeError there."""
    own = {"llama_links": {0: "x"}}
    with pytest.raises(Refusal, match="llama_links has the key '0': use letters"):
        inventory.cluster_hosts({"groups": ALONE, "hostvars": {"a": own}})


@pytest.mark.parametrize("variable, value", [("llama_server_port", 0), ("llama_server_host", "a\x1b")])
@pytest.mark.parametrize("page", [True, False])
def test_a_refusal_is_in_the_red_line_and_written(monkeypatch, tmp_path, page, variable, value):
    shown = []
    monkeypatch.setattr("ansible.utils.display.Display.display", lambda _display, text, *_arguments: shown.append(text))
    own = {"ansible_host": "192.0.2.1", "llama_hardware": {"memory_mib": 1000}, variable: value}
    task_vars = {"groups": ALONE, "hostvars": {"a": own}, "inventory_hostname": "a"}
    path = tmp_path / "plan.json"
    monkeypatch.setattr(plan.sources, "look_up", lambda _find, cluster, _catalogue: cluster)
    own["llama_model_known_answer"] = {}
    result = actions.run(plan, task_vars, page=page, path=str(path))
    assert result["failed"]
    assert json.loads(path.read_text())["reasons"][0].startswith(f"{variable} is {value!r}")
    assert [text.count(f"{variable} is {value!r}") for text in (*shown, result["msg"])] == [1] * (1 + page)


def test_what_is_to_be_measured_is_checked_when_it_is_planned():
    own = {"ansible_host": "192.0.2.1", "llama_hardware": {"memory_mib": 1000}}
    own.update(llama_model_known_answer={}, llama_benchmark_prompts=[0])
    task_vars = {"groups": ALONE, "hostvars": {"a": own}, "inventory_hostname": "a"}
    result = actions.run(plan, task_vars, page=False)
    assert "llama_benchmark_prompts or llama_benchmark_depths contains 0: use" in result["msg"]


def test_the_facts_of_this_machine_have_the_form_that_planning_reads(local):
    local.hosts["here"]["facts"] = host.facts("user")
    assert not local.plan()["refused"]
