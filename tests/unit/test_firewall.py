"""Outputs in data/firewall were recorded on hosts with systemd (ufw 0.36.2, firewalld 2.3.1, nftables 1.1.3), without what nothing reads."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import managers, rules
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.firewalld import Firewalld
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.nftables import Nftables
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

RECORDED = Path(__file__).parent / "data" / "firewall"
ADDED, ZONES, POLICIES, RULESET = (
    (RECORDED / name).read_text()
    for name in (
        "ufw-show-added.txt",
        "firewalld-list-all-zones.txt",
        "firewalld-list-all-policies.txt",
        "nft-list-ruleset.json",
    )
)
LOOKS = ("ufw show", "nft list", "nft --json", "systemctl is-active", "firewall-cmd --list", "firewall-cmd --get")


def rule(port=50060, *sources):
    return FirewallRule(port, "tcp", sources or ("10.1.0.11",), "10.1.0.12")


BOTH = [rule(50060), rule(50152)]


class Host(System):
    """A host whose files lie in a folder. Commands answer with what the test has put in, and are kept in ``changes``."""

    def __init__(self, root, *active, programs=(), **answers):
        super().__init__(root=root)
        self.programs = {"systemctl", *programs}
        self.on = active
        self.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}
        self.changes = []
        self.given = ""

    def file(self, name, text=""):
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        self.path(name).write_text(text)
        return self

    def program(self, name):
        return f"/usr/sbin/{name}" if name in self.programs else None

    def run(self, argv, text="", may_fail=False):
        line = shlex.join(argv)
        if argv[:2] == ["systemctl", "is-active"]:
            return "".join("active\n" if name in self.on else "inactive\n" for name in argv[2:])
        if not line.startswith(LOOKS):
            self.changes.append(line)
            self.given += text
        answer = self.answers.get(argv[0], "")
        answer = answer(line) if callable(answer) else answer
        if isinstance(answer, commands.CommandError):
            raise answer
        return answer


def test_the_active_manager(tmp_path):
    for active, enabled, expected in (
        (["firewalld", "ufw", "nftables"], "yes", "firewalld"),
        (["ufw", "nftables"], "yes", "ufw"),
        (["ufw", "nftables"], "no", "nftables"),
        (["ufw"], "no", None),
        ([], "yes", None),
    ):
        host = Host(tmp_path, *active).file("/etc/ufw/ufw.conf", f"# ufw\nENABLED={enabled}\n")
        assert managers.active_manager(host) == expected
    host = Host(tmp_path, "nftables")
    host.programs = set()
    assert managers.active_manager(host) is None
    assert managers.apply(None, [], check=False, system=host) == ([], [])


def test_rules_are_merged_and_in_order():
    assert rules.merge_rules([rule(50152), rule(50060, "10.1.0.14"), rule(50060, "10.1.0.13", "10.1.0.14")]) == [
        rule(50060, "10.1.0.13", "10.1.0.14"),
        rule(50152),
    ]


def test_what_no_manager_should_see(tmp_path):
    host = Host(tmp_path, "nftables", programs=["nft"])
    for field, value, said in (
        *(("port", number, f"port of a firewall rule is {number}: give numeric") for number in (0, 65536)),
        ("address", "fd00::1", "address of a firewall rule is 'fd00::1'"),
        *(("sources", (text,), f"sources[0] of a firewall rule is {text!r}") for text in ("10.1.0.11; reboot", "head")),
        ("protocol", "icmp", "protocol of a firewall rule is 'icmp'"),
    ):
        with pytest.raises(Refusal, match="^" + re.escape(said)):
            managers.apply("nftables", [rule()._replace(**{field: value})], check=False, system=host)
    assert host.changes == []


def test_a_manager_that_does_not_filter_is_refused(tmp_path):
    host = Host(tmp_path, "ufw", programs=["ufw"]).file("/etc/ufw/ufw.conf", "ENABLED=no\n")
    with pytest.raises(Refusal, match=r"ufw is to open .* is not the active .* which is none: start it, or name"):
        managers.apply("ufw", [rule()], check=False, system=host)
    assert host.changes == []


COMMENT = b"llamacpp.cluster".hex()


def ufw_host(tmp_path, added):
    host = Host(tmp_path, "ufw", programs=["ufw"], ufw=lambda line: "\n".join(added) if "show" in line else act(line))

    def act(line):
        words = shlex.split(line)
        if words[1] == "prepend":
            added.insert(0, f"ufw {' '.join(words[2:-2])} comment '{words[-1]}'")
        else:
            added.remove(f"ufw {' '.join(words[2:])} comment 'llamacpp.cluster'")
        write()
        return ""

    def write():
        host.file("/etc/ufw/user.rules", f"comment={COMMENT}" if "llamacpp.cluster" in str(added) else "")

    write()
    return host.file("/etc/ufw/ufw.conf", "ENABLED=yes\n")


def test_ufw_closes_first_and_opens_before_all_others(tmp_path):
    added = ["ufw allow 22/tcp", "ufw deny 50000:60000/tcp comment 'mine'"]
    host = ufw_host(tmp_path, added)
    before, after = managers.apply("ufw", [rule(50060, "10.1.0.11", "10.1.0.13")], check=False, system=host)
    assert before == []
    assert after == [
        "ufw allow from 10.1.0.11 to 10.1.0.12 port 50060 proto tcp",
        "ufw allow from 10.1.0.13 to 10.1.0.12 port 50060 proto tcp",
        "ufw deny to 10.1.0.12 port 50060 proto tcp",
    ]
    others = ["ufw allow 22/tcp", "ufw deny 50000:60000/tcp"]
    assert [line.partition(" comment ")[0] for line in added] == [*after, *others]
    assert host.changes[0] == "ufw prepend deny to 10.1.0.12 port 50060 proto tcp comment llamacpp.cluster"
    assert not managers.differs("ufw", [rule(50060, "10.1.0.11", "10.1.0.13")], host)


def test_ufw_leaves_a_rule_of_the_operator_alone(tmp_path):
    added = ADDED.splitlines()
    host = ufw_host(tmp_path, added)
    assert not managers.differs("ufw", BOTH, host), "port 50060 is open to the head by the operator's own rule"
    managers.apply(None, [], check=False, system=host)
    assert added[1:] == [
        "ufw allow 22/tcp",
        "ufw allow from 10.1.0.11 to 10.1.0.12 port 50060 proto tcp comment 'my own'",
        "ufw deny 50060/tcp",
    ]


def test_ufw_keeps_a_port_closed_while_its_sources_change(tmp_path):
    host = ufw_host(tmp_path, ADDED.splitlines()[:4])
    for sources in (["10.1.0.10", "10.1.0.11"], ["10.1.0.10"]):
        managers.apply("ufw", [rule(50152, *sources)], check=False, system=host)
    assert not any(" deny " in line for line in host.changes)


def test_ufw_is_not_even_asked_where_nothing_of_ours_is_in_its_file(tmp_path):
    host = Host(tmp_path, programs=["ufw"], ufw=commands.CommandError(["ufw"], "broken", 1))
    assert not managers.differs(None, [], host)


ACCEPT = (
    'rule priority="-20052" family="ipv4" source address="10.1.0.11" destination address="10.1.0.12" '
    'port port="{}" protocol="tcp" accept'
)
DROP = 'rule priority="-20051" family="ipv4" destination address="10.1.0.12" port port="{}" protocol="tcp" drop'
POLICY = "/etc/firewalld/policies/llamacpp.xml"
OURS = f"<policy><short>{names.DEFAULT.mark}</short></policy>"
NO_POLICY = POLICIES.partition("\nllamacpp")[0]
NO_RULES = "\n".join(line for line in ZONES.splitlines() if "priority=" not in line)


def firewalld_host(tmp_path, zones=ZONES, policies=NO_POLICY, broken=False):
    def answer(line):
        if "--check-config" in line and broken:
            return commands.CommandError(["firewall-cmd"], "INVALID_ZONE", 1)
        if "--get-default-zone" in line:
            return "trusted\n"
        return zones if "all-zones" in line else policies if "all-policies" in line else ""

    host = Host(tmp_path, "firewalld", programs=["firewall-cmd"], firewall_cmd=answer)
    host.path("/etc/firewalld/policies").mkdir(parents=True)
    return host


def test_firewalld_sets_zones_in_use_and_its_own_policy(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES)
    Firewalld(host).change([rule(50060)])
    assert [shlex.split(line)[1:] for line in host.changes] == [
        ["--check-config"],
        ["--zone=public", "--add-rich-rule=" + ACCEPT.format(50060)],
        ["--zone=public", "--add-rich-rule=" + DROP.format(50060)],
    ]
    text = host.text(POLICY)
    assert '<rule priority="-20051" family="ipv4"><destination address="10.1.0.12"/>' in text
    assert os.stat(host.path(POLICY)).st_mode & 0o777 == 0o644
    assert os.listdir(host.path("/etc/firewalld/policies")) == ["llamacpp.xml"]


def test_firewalld_before_and_after_a_reload_nothing_differs(tmp_path):
    host = firewalld_host(tmp_path)
    host.file(POLICY, Firewalld(host)._xml(BOTH))
    assert not managers.differs("firewalld", BOTH, host)
    host.answers["firewall-cmd"] = lambda line: NO_RULES if "zones" in line else POLICIES
    host.file(POLICY, Firewalld(host)._xml([rule(50060)]))
    assert not managers.differs("firewalld", [rule(50060)], host)
    assert host.changes == []


def test_firewalld_of_another_release_names_its_default_zone_only_when_asked(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES.replace(" (default, active)", ""))
    _before, after = Firewalld(host).state([rule(50060)])
    assert f"firewall-cmd --zone=trusted: {ACCEPT.format(50060)}" in after


def test_firewalld_a_port_that_moves_in_a_loaded_policy(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES, policies=POLICIES)
    Firewalld(host).change([rule(50061)])
    assert [shlex.split(line)[1:] for line in host.changes] == [
        ["--check-config"],
        ["--policy=llamacpp", "--add-rich-rule=" + ACCEPT.format(50061)],
        ["--policy=llamacpp", "--add-rich-rule=" + DROP.format(50061)],
        ["--policy=llamacpp", "--remove-rich-rule=" + ACCEPT.format(50060)],
        ["--policy=llamacpp", "--remove-rich-rule=" + DROP.format(50060)],
    ]


def test_firewalld_a_loaded_policy_is_emptied(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES, policies=POLICIES).file(POLICY, OURS)
    host.file(POLICY + ".old", "<policy/>")
    Firewalld(host).change([])
    assert [shlex.split(line)[1:3] for line in host.changes[:2]] == [
        ["--policy=llamacpp", "--remove-ingress-zone=ANY"],
        ["--policy=llamacpp", "--remove-egress-zone=HOST"],
    ]
    assert len(host.changes) == 4
    assert os.listdir(host.path("/etc/firewalld/policies")) == []


def test_firewalld_finds_what_was_made_permanent_with_the_zones(tmp_path):
    host = firewalld_host(tmp_path).file("/etc/firewalld/zones/public.xml", '<rule priority="-20052">')
    lines, _after = Firewalld(host).state([])
    assert f"firewall-cmd --permanent --zone=public: {ACCEPT.format(50060)}" in lines
    Firewalld(host).change([])
    assert sum("--permanent --zone=public" in line for line in host.changes) == 4


def test_firewalld_puts_back_a_policy_that_is_not_taken(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES, broken=True)
    with pytest.raises(Refusal, match=r"refuses /etc/.*llamacpp.xml, which is as before: .*INVALID_ZONE"):
        managers.apply("firewalld", [rule()], check=False, system=host)
    assert not host.path(POLICY).exists()
    host.file(POLICY, OURS)
    with pytest.raises(Refusal, match="INVALID_ZONE"):
        managers.apply("firewalld", [rule()], check=False, system=host)
    assert host.text(POLICY) == OURS


def test_firewalld_removes_a_policy_that_a_killed_run_left_and_that_is_not_taken(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES, broken=True)
    host.file(POLICY, Firewalld(host)._xml([rule()]))
    with pytest.raises(Refusal, match=r"which was removed: .*INVALID_ZONE"):
        managers.apply("firewalld", [rule()], check=False, system=host)
    assert not host.path(POLICY).exists()


def test_firewalld_a_policy_of_others_is_refused_and_stays(tmp_path):
    host = firewalld_host(tmp_path, zones=NO_RULES, policies=POLICIES).file(POLICY, "<policy/>")
    for check in (True, False):
        with pytest.raises(Refusal, match=r"This host has /etc/.*llamacpp\.xml, which this collection did not"):
            managers.apply("firewalld", [rule()], check, host)
    assert managers.apply(None, [], check=False, system=host) == ([], [])
    assert (host.changes, host.text(POLICY)) == ([], "<policy/>")
    assert managers.foreign_names(host) == [POLICY]


def test_firewalld_without_policies_is_too_old(tmp_path):
    host = firewalld_host(tmp_path)
    host.path("/etc/firewalld/policies").rmdir()
    with pytest.raises(Refusal, match=r"older than 0\.9: update firewalld"):
        managers.apply("firewalld", [rule()], check=False, system=host)


def test_firewalld_that_is_off_may_still_hold_our_policy(tmp_path):
    host = Host(
        tmp_path, programs=["firewall-cmd"], firewall_cmd=commands.CommandError(["firewall-cmd"], "not running", 252)
    ).file(POLICY, OURS)
    assert managers.differs(None, [], host)
    assert managers.apply(None, [], check=False, system=host) == ([f"{POLICY}: holds these rules"], [])
    assert not host.path(POLICY).exists()


UNIT = "firewall-llamacpp.service"
FOREIGN = ["inet filter input", "inet late in1", "ip early-1 early_in", "ip filter INPUT"]
ITEMS = json.loads(RULESET)["nftables"]
OTHERS = json.dumps(
    {
        "nftables": [
            item
            for item in ITEMS
            if "llamacpp" not in item.get("rule", {}).get("comment", "")
            and "llamacpp" not in (item.get("table", {}).get("name"), item.get("chain", {}).get("table"))
        ]
    }
)


def nft_host(tmp_path, ruleset, *active):
    host = Host(tmp_path, "nftables", *active, programs=["nft"], nft=lambda line: ruleset if "--json" in line else "")
    host.path("/etc/systemd/system/nftables.service.wants").mkdir(parents=True)
    return host


def test_nftables_accepts_in_every_chain_that_may_close(tmp_path):
    host = nft_host(tmp_path, OTHERS)
    assert Nftables(host)._read().chains == FOREIGN, "not in a chain that only counts"
    Nftables(host).change([rule(50060)])
    assert host.changes == ["nft -f -", "systemctl daemon-reload", f"systemctl enable --now {UNIT}"]
    accepts = "ip saddr 10.1.0.11 ip daddr 10.1.0.12 tcp dport 50060 accept comment llamacpp.cluster/"
    assert all(f"insert rule {chain} {accepts}" in host.given for chain in FOREIGN)
    assert "\ndelete table inet llamacpp\ntable inet llamacpp {" in host.given
    assert "delete rule" not in host.given
    unit = host.text(f"/etc/systemd/system/{UNIT}")
    assert unit.count("ExecStart=-/bin/sh") == unit.count("ExecReload=-/bin/sh") == len(FOREIGN)
    assert "tcp dport 50060" in host.text("/etc/firewall-llamacpp.nft")


def test_nftables_as_planned(tmp_path):
    host = nft_host(tmp_path, RULESET, UNIT)
    manager = Nftables(host)
    host.file(manager.file, manager._table(BOTH)).file(manager.unit, manager._unit(BOTH, FOREIGN))
    host.path(manager.link).symlink_to("/nowhere")
    before, after = managers.apply("nftables", BOTH, check=False, system=host)
    assert before == after
    assert host.changes == []
    assert not managers.differs("nftables", BOTH, host)
    assert managers.differs("nftables", [rule(50060)], host)
    for name in (manager.file, manager.unit, manager.link):
        host.path(name).rename(tmp_path / "away")
        assert managers.differs("nftables", BOTH, host), name
        (tmp_path / "away").rename(host.path(name))
    host.on = ("nftables",)
    assert managers.differs("nftables", BOTH, host), "a unit that is off does not follow a reload"


def test_nftables_a_port_that_moves_leaves_no_rule(tmp_path):
    host = nft_host(tmp_path, RULESET, UNIT)
    Nftables(host).change([rule(50061)])
    ours = [item["rule"] for item in ITEMS if item.get("rule", {}).get("comment", "").startswith("llamacpp.cluster/")]
    foreign = [entry for entry in ours if entry["table"] != "llamacpp"]
    assert len(foreign) == 2 * len(FOREIGN)
    for entry in foreign:
        assert "delete rule {family} {table} {chain} handle {handle}\n".format(**entry) in host.given
    assert host.given.count("delete rule") == len(foreign)
    assert "50060" not in host.given
    assert "50060" not in host.text(f"/etc/systemd/system/{UNIT}")


def test_nftables_removal_leaves_no_file(tmp_path):
    host = nft_host(tmp_path, RULESET, UNIT)
    manager = Nftables(host)
    host.file(manager.file, manager._table(BOTH)).file(manager.unit, manager._unit(BOTH, FOREIGN))
    Nftables(host).change([])
    assert host.given.endswith("\ntable inet llamacpp\ndelete table inet llamacpp\n")
    assert "insert" not in host.given
    assert not host.path(manager.file).exists()
    assert not host.path(manager.unit).exists()
    assert host.changes[1:] == [f"systemctl disable --now {UNIT}", "systemctl daemon-reload"]


OF_TABLE = {"family": "inet", "table": "llamacpp"}
MINE = {**OF_TABLE, "chain": "input", "handle": 5, "comment": "llamacpp.cluster/x", "expr": []}
OTHER = {**OF_TABLE, "name": "other"}
THEIRS = '{"nftables": [{"table": {"family": "inet", "name": "llamacpp"}}%s]}'


@pytest.mark.parametrize("inside", [{}, {"set": OTHER}, {"chain": OTHER}, {"rule": {**MINE, "comment": "x"}}])
def test_nftables_a_table_of_others_is_refused_and_stays(tmp_path, inside):
    more = f", {json.dumps({'rule': MINE})}, {json.dumps(inside)}" if inside else ""
    host = nft_host(tmp_path, THEIRS % more).file(f"/etc/systemd/system/{UNIT}", "[Unit]\n")
    host.answers["nft"] = lambda line: THEIRS % more
    for check in (True, False):
        with pytest.raises(Refusal, match=r"-llamacpp\.service and the table inet llamacpp of nftables, which"):
            managers.apply("nftables", [rule()], check, host)
    assert managers.apply(None, [], check=False, system=host) == ([], [])
    assert (host.changes, host.text(f"/etc/systemd/system/{UNIT}")) == ([], "[Unit]\n")


def test_nftables_leaves_tables_alone_that_belong_to_a_program(tmp_path):
    ruleset = json.loads(OTHERS)
    next(item for item in ruleset["nftables"] if "table" in item)["table"]["flags"] = ["owner"]
    chains = Nftables(nft_host(tmp_path, json.dumps(ruleset)))._read().chains
    assert chains == [chain for chain in FOREIGN if chain != "inet filter input"]


def test_nftables_keeps_its_accept_in_a_chain_that_closes_nothing_just_now(tmp_path):
    ruleset = {"nftables": [item for item in ITEMS if "9.9.9.9" not in json.dumps(item)]}
    assert Nftables(nft_host(tmp_path, json.dumps(ruleset)))._read().chains == FOREIGN


def test_nftables_that_cannot_be_read_on_a_host_that_does_not_use_it(tmp_path):
    host = Host(tmp_path, programs=["nft"], nft=commands.CommandError(["nft"], "Operation not permitted", 1))
    assert not managers.differs(None, [], host)


def firewalld_that_remembers(tmp_path):
    """One zone, whose rich rules are those that firewall-cmd was given."""
    rich = []

    def answer(line):
        words = shlex.split(line)
        verb, _equals, text = words[-1].partition("=")
        if verb == "--add-rich-rule":
            rich.append(text)
        elif verb == "--remove-rich-rule":
            rich.remove(text)
        zone = "\n".join(["public (default, active)", "  rich rules: ", *(f"\t{text}" for text in rich)])
        return zone if "all-zones" in line else ""

    host = firewalld_host(tmp_path)
    host.answers["firewall-cmd"] = answer
    return host, lambda: "\n".join(rich) + host.text(POLICY)


@pytest.fixture
def network(popen):
    """A process that has a network of its own; nft has rules there and nowhere else."""
    argv = ["unshare", "--net", "sh", "-c", "echo ready; exec sleep 60"]
    process = popen(argv, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    return process.pid


class Netfilter(Host):
    """A host with the kernel's own rules, in a network of its own, and a systemd that answers as if all were well."""

    def __init__(self, root, pid):
        super().__init__(root, "nftables", UNIT, programs=["nft"])
        self.inside = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        self.path("/etc/systemd/system/nftables.service.wants").mkdir(parents=True)
        self.path(Nftables(self).link).symlink_to("/nowhere")

    def run(self, argv, text="", may_fail=False):
        if argv[0] != "nft":
            return super().run(argv, text, may_fail)
        return commands.run([*self.inside, *argv], 20, text)


def nft_works():
    tried = ["unshare", "--net", "nft", "list", "ruleset"]
    return (
        os.geteuid() == 0
        and subprocess.run(["sh", "-c", '"$@"', "sh", *tried], capture_output=True, check=False).returncode == 0
    )


@pytest.fixture(params=["ufw", "firewalld", "nftables"])
def remembering(request, tmp_path):
    """Name of a manager, a host on which it keeps what it is given, and a function that returns all that it keeps."""
    if request.param == "ufw":
        added = []
        return request.param, ufw_host(tmp_path, added), lambda: "\n".join(added)
    if request.param == "firewalld":
        return (request.param, *firewalld_that_remembers(tmp_path))
    if not nft_works():
        pytest.skip("nft does not work in a network of its own here: that needs root, nft and unshare")
    host = Netfilter(tmp_path, request.getfixturevalue("network"))
    chain = "{ chain input { type filter hook input priority 0; policy drop; }; }"
    host.run(["nft", "-f", "-"], f"table inet filter {chain}\ntable ip old {chain}\n")
    files = ["/etc/firewall-llamacpp.nft", f"/etc/systemd/system/{UNIT}"]
    return request.param, host, lambda: "".join([host.run(["nft", "list", "ruleset"]), *map(host.text, files)])


OTHER_HEAD = [one._replace(sources=("10.1.0.99",)) for one in BOTH]
OTHER_WORKER = [one._replace(address="10.1.0.98") for one in BOTH]
NETWORKS = ("10.2.0.0/16", "10.1.0.7")
DOORS = [
    [rule(8080, *NETWORKS)._replace(address="0.0.0.0")],
    [rule(8080, *NETWORKS)],
    [rule(8080, "0.0.0.0/0")._replace(address="0.0.0.0")],
    [rule(8080, "0.0.0.0/0")],
]


@pytest.mark.programs
@pytest.mark.parametrize(
    "door", DOORS, ids=["networks", "networks, one address", "everybody", "everybody, one address"]
)
def test_the_port_of_a_server_is_opened_for_networks_and_closed_to_others(remembering, door):
    manager, host, kept = remembering
    managers.apply(manager, BOTH + door, check=False, system=host)
    assert not managers.differs(manager, BOTH + door, host)
    assert ("10.2.0.0/16" in kept()) == (door[0].sources == NETWORKS)
    closes = {"ufw": "deny", "firewalld": "drop", "nftables": "ack) == syn"}[manager]
    closed = [line for line in kept().splitlines() if closes in line and "8080" in line]
    assert bool(closed) == (door[0].sources == NETWORKS)
    for moved in ([door[0]._replace(port=8081)], [door[0]._replace(sources=("10.3.0.0/16",))], []):
        managers.apply(manager, BOTH + moved, check=False, system=host)
        assert not managers.differs(manager, BOTH + moved, host)
        assert "10.2.0.0" not in kept() or (moved and moved[0].port == 8081)


@pytest.mark.programs
def test_the_port_of_wireguard_is_opened_to_peers_stays_as_long_as_it_may_be_used_and_goes(remembering):
    manager, host, kept = remembering
    peers = [rule(51852)._replace(protocol="udp")]
    managers.apply(manager, BOTH + peers, check=False, system=host)
    assert not managers.differs(manager, BOTH + peers, host)
    own = [line for line in kept().splitlines() if "51852" in line]
    assert own
    assert all("udp" in line and "syn" not in line and "drop" not in line for line in own)
    managers.apply(manager, BOTH, check=False, system=host, keep=True)
    assert "51852" in kept()
    managers.apply(manager, BOTH, check=False, system=host)
    assert "51852" not in kept()


def test_ufw_writes_the_rules_of_a_server_as_it_lists_them(tmp_path):
    """A deny that stands in a group of its own could come before what it must not close."""
    host = ufw_host(tmp_path, added := ["ufw allow 22/tcp"])
    managers.apply("ufw", DOORS[0], check=False, system=host)
    assert [line.partition(" comment ")[0] for line in added] == [
        "ufw allow from 10.1.0.7 to any port 8080 proto tcp",
        "ufw allow from 10.2.0.0/16 to any port 8080 proto tcp",
        "ufw deny 8080/tcp",
        "ufw allow 22/tcp",
    ]
    added.remove("ufw deny 8080/tcp comment 'llamacpp.cluster'")
    managers.apply("ufw", DOORS[0], check=False, system=host)
    assert added[2].startswith("ufw deny 8080/tcp")


def test_networks_are_shown_as_they_are_written(tmp_path):
    host = nft_host(tmp_path, OTHERS)
    _before, after = managers.apply("nftables", DOORS[0], check=True, system=host)
    assert "nft list chain inet llamacpp input: accept from 10.2.0.0/16 to 0.0.0.0 tcp 8080" in after


@pytest.mark.programs
@pytest.mark.parametrize("door", DOORS, ids=["networks", "one address", "everybody", "everybody, one address"])
def test_what_may_still_listen_keeps_its_rules_until_it_has_stopped(remembering, door):
    """On ports that are planned the plan holds at once."""
    manager, host, kept = remembering
    managers.apply(manager, BOTH + door, check=False, system=host)
    moved = [rule(50061), rule(50152)._replace(sources=("10.1.0.99",))]
    before, after = managers.apply(manager, moved, check=False, system=host, keep=True)
    assert {line for line in before if "50060" in line or "8080" in line} <= set(after)
    assert all(port in kept() for port in ("50060", "50061", "8080"))
    assert not [line for line in after if "50152" in line and "10.1.0.11" in line]
    assert managers.apply(manager, moved, check=False, system=host, keep=True) == (after, after)
    managers.apply(manager, moved, check=False, system=host)
    assert not any(port in kept() for port in ("50060", "8080"))


def test_a_manager_that_is_not_the_active_one_keeps_its_rules_until_the_services_have_changed(tmp_path):
    host = ufw_host(tmp_path, added := ADDED.splitlines()[:4])
    host.on = ()
    for keep, left in ((True, 2), (False, 0)):
        managers.apply(None, [], check=False, system=host, keep=keep)
        assert str(added).count("llamacpp.cluster") == left


def dying_after(run, left):
    """Runs so many commands that change something, then ends as a killed run does."""

    def dying(argv, *more, **options):
        nonlocal left
        if not shlex.join(argv).startswith(LOOKS):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return run(argv, *more, **options)

    return dying


@pytest.mark.programs
@pytest.mark.parametrize("changed, old", [(OTHER_HEAD, "10.1.0.11"), (OTHER_WORKER, "10.1.0.12")])
def test_nothing_is_left_of_an_address_that_changed_also_after_a_run_that_was_killed(
    remembering, monkeypatch, changed, old
):
    manager, host, kept = remembering
    run, killed = host.run, 0
    for last in range(20):
        managers.apply(manager, BOTH, check=False, system=host)
        assert old in kept()
        assert managers.differs(manager, changed, host)
        monkeypatch.setattr(host, "run", dying_after(run, last))
        try:
            managers.apply(manager, changed, check=False, system=host)
        except KeyboardInterrupt:
            killed += 1
        monkeypatch.setattr(host, "run", run)
        managers.apply(manager, changed, check=False, system=host)
        assert old not in kept()
        assert "10.1.0.99" in kept() or "10.1.0.98" in kept()
        assert not managers.differs(manager, changed, host)
        if killed == last:
            break
    assert killed >= 2


@pytest.mark.parametrize("manager", ["ufw", "firewalld", "nftables"])
def test_check_mode_shows_and_changes_nothing(tmp_path, manager):
    host = {
        "ufw": lambda: ufw_host(tmp_path, ["ufw allow 22/tcp"]),
        "firewalld": lambda: firewalld_host(tmp_path, zones=NO_RULES),
        "nftables": lambda: nft_host(tmp_path, OTHERS),
    }[manager]()
    files = sorted(tmp_path.rglob("*"))
    before, after = managers.apply(manager, [rule()], check=True, system=host)
    assert before == []
    assert any("50060" in line for line in after)
    assert host.changes == []
    assert sorted(tmp_path.rglob("*")) == files


def test_a_manager_that_did_not_do_as_told(tmp_path):
    host = nft_host(tmp_path, OTHERS)
    with pytest.raises(Refusal, match=r"nftables holds .* after the change, planned .*50060.*: check its log"):
        managers.apply("nftables", [rule()], check=False, system=host)


def test_commands_that_may_fail_or_hang():
    host = System()
    assert host.run(["false"], may_fail=True) == ""
    with pytest.raises(Refusal, match="timed out"):
        host.run(["sleep", "5"], seconds=0.1)
