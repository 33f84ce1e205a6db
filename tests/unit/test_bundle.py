"""The bug bundle: no secret is in it."""

import base64
import html
import json
import os
import re
import shlex
import tarfile
import urllib.parse
from pathlib import Path

import jinja2
import pytest
import yaml
from ansible_collections.llamacpp.cluster.plugins.action import report as action
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names, redaction
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import host_report
from ansible_collections.llamacpp.cluster.plugins.plugin_utils import definitions
from conftest import ROOT, complete
from support import actions, playbook_runs
from test_status import answers_of, run

KEY, BECOME, VAULTED = "pl-anted/key+1", 'plänted "become"', "planted-vault-9"
PLANTED = {
    "hf_PlantedPlantedPlanted1": "loading with HF token {}",
    "plantedUserinfo": "GET https://{}@example.org/x",
    "plantedProxy7": "proxy socks5://me:{}@proxy:3128",
    "plantedQuery3": "GET https://example.org/m.gguf?access_token={}&x=1",
    "plantedBearer55": "Authorization: Bearer {}",
    "plantedOption": "llama-server --api-key {} --port 8080",
    "plantedArgv12": '["--api-key", "{}"]',
    "plantedJson88": '{{"HF_TOKEN": "{}", "n": 1}}',
    "plantedYaml77": "ansible_become_password: {}",
    "plantedEnv66": "LLAMA_API_KEY={}",
    "PlantedKeyBody": "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "616c6c20706c616e74656420": "$ANSIBLE_VAULT;1.1;AES256\n          {}",
    "0123456789abcdef0123456789abcdef": "cluster1:{}",
    "****plan": "srv  init: api_keys: {}",
    "pl anted$$\\x20systemd": 'Environment="DB_PWD={}"',
    "pl anted 'shell": "export WIFI_PSK='{}'",
    'pl\\"anted json': '{{"passphrase_backup": "{}", "n": 1}}',
    "cGxhbnRlZDpCYXNpYw==": "Authorization: Basic {}",
    "cGxhbnRlZDpwcm94eQ==": "sends Basic {} to the proxy",
    "cGxhbnRlZFdpcmVndWFyZA=": "PrivateKey = {}",
    "T0/B0/plantedHook1": "POST https://hooks.slack.com/services/{} failed",
    "plantedHook2": "POST http://192.0.2.5:8123/api/webhook/{}",
    "plantedHook3": r"https:\/\/discord.com\/api\/webhooks\/1\/{}",
    "planted31337": "user_pin: {}",
    "ghp_plantedplanted": "git clone with {}",
    "plantedNumbered": "LLAMACPP_KEY_1={}",
    "plantedAuth1": "authtoken={}",
    "plantedAuth2": '{{"authToken": "{}"}}',
    "plantedAuth3": "TS_AUTHKEY={}",
    "plantedPass": "DBPASS={}",
}
"""Secret → line of a log with it."""
LOG = "\n".join(line.format(secret) for secret, line in PLANTED.items())
SECRETS = [*PLANTED, KEY, BECOME, json.dumps(BECOME)[1:-1], VAULTED]


@pytest.mark.parametrize("secret, line", PLANTED.items())
def test_a_secret_is_taken_out_once(secret, line):
    text = redaction.redact(line.format(secret))
    assert secret not in text
    assert text.count("<removed: ") == 1
    assert redaction.redact(text) == text


@pytest.mark.parametrize(
    "line",
    [
        "print_info: EOG token        = 128009 '<|eot_id|>'",
        'task.n_tokens = 12345678, "network_ms_per_token": 12.3456, "ms_per_token": 1.25e-05, "api_key": null, "a_secret": true',
        "--api-key-file /etc/llamacpp.keys",
        '"checksum": "sha256:776ce936131df94a62e1aca7964a458f37bf73ad4d5e114fc381cbb5aa9be7dd"',
        "see https://github.com/ggml-org/llama.cpp/pull/13194#issuecomment-2868343055",
        "git@github.com:ggml-org/llama.cpp.git, 127.0.0.1:8080",
        "reads https://huggingface.co/ggml-org/models/resolve/main/x.gguf, listens on http://127.0.0.1:8080",
        "BUILD_KEYBOARD=us, general.key: 3, oauthtokens = 5, keys: 12",
        "kv  14: tokenizer.ggml.model str = gpt2, max_tokens: 16, verify passed: 3, PSK identities: 1 retrieved",
    ],
)
def test_what_is_no_secret_stays(line):
    assert redaction.redact(line) == line


@pytest.mark.parametrize("word", ["password", "api_key", "$ANSIBLE_VAULT;"])
def test_redaction_time_grows_with_the_length_of_a_line(word):
    """If it grew with the square of the length, this test would take minutes."""
    line = word * (600_000 // len(word))
    assert redaction.redact(line) == line


def test_known_secrets_are_found_as_texts_write_them():
    known = {BECOME: "Ansible password", KEY: "API key", "abc": "too short"}
    text = redaction.redact(f"abc {json.dumps([BECOME])} {BECOME} ?k=pl-anted%2Fkey%2B1", known)
    assert text == 'abc ["<removed: Ansible password>"] <removed: Ansible password> ?k=<removed: API key>'


WRITERS = {
    "JSON": json.dumps,
    "JSON in JSON": lambda secret: json.dumps(json.dumps(secret)),
    "a shell": shlex.quote,
    "a shell, in JSON": lambda secret: json.dumps(shlex.quote(secret)),
    "a URL": urllib.parse.quote,
    "a form": urllib.parse.quote_plus,
    "HTML": html.escape,
    "a unit's command": lambda secret: definitions.systemd_command([secret]),
    "a unit's environment": lambda secret: definitions.systemd_environment({"A": secret}),
    "supervisor": lambda secret: definitions.supervisor_command([secret]),
    "Python": repr,
    **{f"Basic, behind {user}": lambda secret, user=user: basic(f"{user}:{secret}") for user in ("", "a", "ab")},
}


def basic(text):
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_known_secret_is_found_however_it_is_written(writer):
    secret = "a'b\"c$d%e fä\\z"
    text = redaction.redact(f"x {WRITERS[writer](secret)} y", {secret: "K"})
    assert "<removed: K>" in text


@pytest.fixture
def reported(tmp_path, monkeypatch):
    """What a host reports whose logs and kernel have every secret."""
    place = installation.InstallationPaths(
        "user", "supervisor", *(str(tmp_path / name) for name in ("prefix", "cache", "units"))
    )
    for folder in (place.units, f"{place.prefix}/supervisor"):
        Path(folder).mkdir(parents=True)
    Path(place.units, "llamacpp-server.conf").write_text(names.DEFINITION_MARK)
    Path(place.prefix, "supervisor", "llamacpp-server.log").write_text(f"{LOG}\nkey {KEY}")
    (tmp_path / "keys").write_text(f"\n{KEY}\n")
    monkeypatch.setattr(host_report.installation, "detect_paths", lambda *_scope: place)
    monkeypatch.setattr(host_report, "system_report", lambda: LOG)
    return host_report.read_report("user", str(tmp_path / "keys"))


def test_a_host_reports_no_secret(reported):
    assert [*reported] == ["system.txt", "llamacpp-server.log"]
    text = "".join(reported.values())
    assert [secret for secret in SECRETS if secret in text] == []
    assert text.count("<removed: ") == 2 * len(PLANTED) + 1


@pytest.mark.parametrize("manager", ["supervisor", "launchd"])
def test_what_the_account_of_the_services_puts_in_place_of_a_log_is_not_read(tmp_path, manager):
    folders = [str(tmp_path / name) for name in ("prefix", "cache", "units")]
    place = installation.InstallationPaths("system", manager, *folders)
    logs = services.manager_of(place)
    secret, path = tmp_path / "shadow", Path(logs.spec.log.format(prefix=place.prefix, service="x"))
    path.parent.mkdir(parents=True)
    secret.write_text("root:$6$")
    path.symlink_to(secret)
    assert logs.log("x") == ""
    path.unlink()
    os.mkfifo(path)
    assert logs.log("x") == "", "and a pipe is not waited for"
    path.unlink()
    path.write_bytes(bytes(services.MAX_LOG_BYTES) + b"last\n")
    assert len(logs.log("x")) == services.MAX_LOG_BYTES


def test_what_a_host_shows_of_kernel_and_drivers():
    found = host_report.system_report(lambda argv: commands.output(argv) if argv[0] in ("uname", "sh") else "")
    assert found.startswith("--- uname -a\nLinux ")
    assert "\n/proc/version:Linux version " in found
    assert "nvidia-smi" not in found


# ----------------------------------------------------------------------------------------------------------- the archive


@pytest.fixture
def found(pair, reported):
    """What report.yml has found of a cluster, with secrets in all that others said."""
    plan, line = pair.plan(), f"{LOG} {BECOME}".replace("\n", " ")
    answers = answers_of(plan)
    answers["worker2"] = {"unreachable": True}
    status = run(plan, answers, fail=False)[0]["status"]
    status["cluster"]["detail"] = line
    texts = {"../x": "y", "a.log": f"\x1b[2J\t{BECOME}", "b.log": VAULTED}
    reports = {"head": {"report": reported}, "worker1": {"report": texts}, "worker2": {}}
    asked = {"facts": {"head": {"kernel": LOG}}}
    return {"plan": plan, "status": status, "reports": reports, **asked}


def bundled(found, path, own=(), **others):
    """Name → text of each file."""
    own = {
        **dict(own),
        "ansible_become_password": BECOME,
        "my_vault": {"deep": [VAULTED]},
        "llama_server_port": 8080,
        "other": 1,
    }
    made = actions.made(action, path=str(path), bundle=found, **others)
    made.run(task_vars={"hostvars": dict.fromkeys(found["reports"], own)})
    if not path.exists():
        return {}
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as archive:
        return {e.name.partition("/")[2]: archive.extractfile(e).read().decode() for e in archive}


def test_no_secret_is_in_the_bundle(found, tmp_path, capsys):
    (tmp_path / "bundle").touch(0o644)
    texts = bundled(found, tmp_path / "bundle")
    assert f"The bundle was written to {tmp_path}/bundle. Read the bundle before you send it" in capsys.readouterr().out
    assert {secret: name for secret in SECRETS for name, text in texts.items() if secret in text} == {}
    made = {"README.txt", "plan.txt", "plan.json", "status.txt", "status.json"}
    made |= {"ansible.log", "controller.json", "facts.json", "worker1/.._x", "worker1/a.log", "worker1/b.log"}
    assert {*texts} == made | {f"head/{name}" for name in found["reports"]["head"]["report"]}
    assert [json.loads(texts[f"{name}.json"]) for name in ("plan", "status", "facts")]
    assert texts["worker1/a.log"] == "\\x1b[2J    <removed: Ansible password>\n"
    assert "<removed: value of my_vault>" in texts["worker1/b.log"]


def test_of_what_operators_set_only_what_is_known_is_shown(found, pair, tmp_path):
    """A name that says nothing, and a value that looks like nothing."""
    given = {"LIGHT": "pl-anted environment", "CUDA_VISIBLE_DEVICES": "0,1", "LAMP": "17"}
    pair.set(
        "head", llama_server_environment=given, llama_server_extra_args=["--hook", "pl-anted option", "--temp", "1"]
    )
    found["plan"] = complete(pair.plan())
    found["facts"]["head"]["wifi_psk"] = "pl-anted fact"
    found["status"]["cluster"]["detail"] = "started as LIGHT=pl-anted\\x20environment: pl-anted option"
    own = {
        "heating": ["pl-anted deep", {"db_pwd": 9753}],
        "ansible_ssh_common_args": "-o pl-anted",
        "lan": "192.0.2.10",
    }
    found["reports"]["worker1"]["report"]["a.log"] = "9753 pl-anted deep -o pl-anted 192.0.2.10"
    texts = bundled(found, tmp_path / "bundle", own)
    assert {name for name, text in texts.items() if "pl-anted" in text or "9753" in text} == set()
    plan = json.loads(texts["plan.json"])
    assert plan["head"]["environment"] == {**found["plan"]["head"]["environment"], "LIGHT": "<removed: value of LIGHT>"}
    assert "--hook '<removed: value of --hook>' --temp 1" in " ".join(texts["plan.txt"].replace("\\\n", " ").split())
    assert {file.get("content", "<removed: ")[:10] for host in plan["hosts"].values() for file in host["files"]} == {
        "<removed: "
    }
    assert texts["worker1/a.log"].split(" ")[-1] == "192.0.2.10\n"


def test_versions_inventory_and_the_failed_run_are_shown_without_secrets(found, tmp_path, monkeypatch):
    log = tmp_path / "ansible.log"
    log.write_text(f"fatal: [head]: FAILED! => the disk is full\nTASK {BECOME}\n")
    monkeypatch.setattr(action.constants, "DEFAULT_LOG_PATH", str(log))
    own = {
        "llama_server_extra_args": ["--hook", "planted argument", "--top-k", "40"],
        "llama_models": [{"name": "a", "llama_server_environment": {"LIGHT": "planted light", "HOME": "/h"}}],
        "llama_model_url": "https://u:planted-password@h/m.gguf",
    }
    texts = bundled(found, tmp_path / "bundle", own)
    shown = json.loads(texts["controller.json"])
    assert shown["ansible_core"].startswith("2.")
    assert shown["collection"] == yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
    assert re.fullmatch("[0-9a-f]{7,40}(-dirty)?", shown["commit"])
    assert shown["inventory"]["head"]["llama_server_port"] == 8080
    assert shown["inventory"]["head"]["llama_server_extra_args"][2:] == ["--top-k", "40"]
    assert shown["inventory"]["head"]["llama_models"][0]["llama_server_environment"]["HOME"] == "/h"
    assert "other" not in shown["inventory"]["head"]
    assert "planted" not in texts["controller.json"]
    assert "the disk is full" in texts["ansible.log"]
    assert BECOME not in texts["ansible.log"]


def test_a_refused_plan_and_check_mode(found, pair, tmp_path):
    pair.hosts["head"]["variables"]["llama_release"] = "b1"
    refused = {**found, "plan": pair.plan()}
    assert refused["plan"]["refused"]
    assert bundled(refused, tmp_path / "bundle", check_mode=True) == {}
    assert "plan.txt" in bundled(refused, tmp_path / "bundle")


@pytest.mark.parametrize("odd", [None, [], "x", {"a": []}, {}])
def test_a_host_may_report_anything(found, odd, tmp_path):
    found["reports"]["head"]["report"] = odd
    assert [name for name in bundled(found, tmp_path / "bundle") if name.startswith("head/")] == []


def test_a_host_that_did_not_answer_is_not_asked_again():
    (play,) = (
        one
        for one in yaml.safe_load((ROOT / "playbooks/report.yml").read_text())
        if one["name"] == "Write the bug bundle"
    )
    asked = jinja2.Environment(undefined=jinja2.ChainableUndefined).compile_expression(play["tasks"][1]["when"])
    lost = {"unreachable": True}
    assert [asked(__llama_host_status=lost), asked(__llama_facts=lost), asked()] == [False, False, True]


@pytest.mark.programs
def test_a_run_with_a_host_that_does_not_answer(tmp_path):
    groups = {"llama_head": {"hosts": {"head": {**playbook_runs.LOCAL, "ansible_host": "192.0.2.10"}}}}
    groups["llama_workers"] = {"hosts": {"worker": playbook_runs.LOST}}
    known = {"llama_host_scope": "user", "llama_model_known_answer": {"layers": 16}}
    known["ansible_remote_tmp"] = str(tmp_path / "remote")
    inventory = {"llama_cluster": {"children": groups, "vars": known}}
    given = ["-e", "llama_report_bundle=bundle.tar.gz"]
    status, shown = playbook_runs.run(tmp_path, ROOT / "playbooks/report.yml", inventory, *given, HOME=str(tmp_path))
    assert status == 0, shown
    assert not (tmp_path / "data").exists()
    with tarfile.open(tmp_path / "bundle.tar.gz") as archive:
        assert "llama_cluster-bundle/head/system.txt" in archive.getnames()
