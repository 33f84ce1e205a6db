"""Outputs in data/firewall were recorded on hosts with systemd (ufw 0.36.2, firewalld 2.3.1, nftables 1.1.3), without what nothing reads."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.llamacpp.cluster.plugins.filter import missing_collection
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall as facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import rules as firewall_rules
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall import steps as firewall_steps
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

RECORDED = Path(__file__).parent / "data" / "firewall"
ADDED, ZONES = ((RECORDED / name).read_text() for name in ("ufw-show-added.txt", "firewalld-list-all-zones.txt"))


def rule(port=50060, *sources, address="10.1.0.12"):
    return FirewallRule(port, sources or ("10.1.0.11",), address)


BOTH = [rule(50060), rule(50152)]
OPEN = rule(8080, names.ANY_NETWORK, address=names.ANY_ADDRESS)


class Host(System):
    """A host with one manager, which has what it was given: lines of «ufw show added», rich rules by zone, or a table of nftables."""

    def __init__(self, root, manager, lines=()):
        super().__init__(root=root)
        self.manager, self.lines, self.table, self.zones = manager, [*lines], "", {"": set(), "--permanent": set()}

    def program(self, name):
        return f"/usr/sbin/{name}" if name == {"nftables": "nft"}.get(self.manager, self.manager) else None

    def run(self, argv, *_more, **_options):
        answers = {
            "ufw show added": "".join(f"{line}\n" for line in self.lines),
            "firewall-cmd --get-default-zone": "public\n",
            "firewall-cmd --get-active-zones": "public (default)\n  interfaces: eth0\ntrusted\n  interfaces: tb0\n",
            "nft list table inet llamacpp": self.table,
            "nft list chains": "table inet filter {\n\tchain input {\n\t\ttype filter hook input priority filter; policy drop;\n",
        }
        if argv[-1] == "--list-all-zones":
            held = self.zones["".join(argv[1:-1])]
            return "".join(
                f"{zone} (active)\n  rich rules: \n" + "".join(f"\t{rich}\n" for at, rich in sorted(held) if at == zone)
                for zone in ("public", "trusted")
            )
        return answers[" ".join(argv)]

    def steps(self, *rules, keep=False):
        return firewall_steps.steps_of(self.manager, rules, keep, self)

    def apply(self, *rules, keep=False):
        """As the modules do it. Returns the lines of before and after."""
        steps = self.steps(*rules, keep=keep)
        if self.manager == "nftables":
            self.path(firewall_rules.NFT_FILE).parent.mkdir(exist_ok=True)
            self.path(firewall_rules.NFT_FILE).write_text(steps.text)
            link = self.path(firewall_rules.NFT_BOOT_LINK)
            link.unlink(missing_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to("../unit") if steps.text else None
            self.table = "".join(f"\t\t{line.strip()}\n" for line in steps.text.splitlines() if "comment" in line)
        for step in [*steps.rules_to_add, *({**step, "delete": True} for step in steps.rules_to_remove)]:
            gone = step.pop("delete", False)
            if self.manager == "firewalld":
                for held in self.zones.values():
                    (held.discard if gone else held.add)((step["zone"], step["rich_rule"]))
                continue
            source, to = (f" {word} {step[f'{word}_ip']}" for word in ("from", "to"))
            line = f"ufw {step['rule']}{source * (step['from_ip'] != 'any')}{to} port {step['to_port']} proto tcp"
            line = line.replace(" to any port 8080 proto tcp", " 8080/tcp")
            self.lines = [each for each in self.lines if each.partition(" comment")[0] != line]
            self.lines = self.lines if gone else [f"{line} comment 'llamacpp'", *self.lines]
        return steps.rules_before, steps.rules_after

    def differs(self, *rules):
        return firewall_rules.has_differences(self.manager, rules, self)


@pytest.mark.parametrize(
    "active, enabled, expected",
    [
        (["firewalld", "ufw", "nftables"], "yes", "firewalld"),
        (["ufw", "nftables"], "yes", "ufw"),
        (["ufw", "nftables"], "no", "nftables"),
        (["ufw"], "no", None),
        ([], "yes", None),
    ],
)
def test_the_active_manager(active, enabled, expected):
    assert facts.select_manager(active, f"# ufw\nENABLED={enabled}\n") == expected


@pytest.mark.parametrize("manager", names.FIREWALLS)
def test_ports_are_opened_once_for_those_who_are_planned_and_closed_again(tmp_path, manager):
    host = Host(tmp_path, manager)
    zones = 2 if manager == "firewalld" else 1
    assert host.differs(*BOTH)
    before, both = host.apply(*BOTH)
    assert (before, len(both)) == ([], 4 * zones)
    assert all(sum(str(port) in line for line in both) == 2 * zones for port in (50060, 50152))
    assert host.apply(*BOTH) == (both, both)
    assert not host.differs(*BOTH)
    steps = host.steps(*BOTH)
    assert (steps.rules_to_add, steps.rules_to_remove) == ([], [])
    # Another head, and a port less: nothing goes before the new plan serves.
    moved = rule(50060, "10.1.0.99")
    before, after = host.apply(moved, keep=True)
    assert before == both
    assert len({*after} - {*both}) == len([line for line in after if "10.1.0.99" in line]) == zones
    assert host.differs(moved)
    _before, after = host.apply(moved)
    assert len(after) == 2 * zones
    assert not host.differs(moved)
    opened = host.apply(OPEN)[1]
    assert (len(opened), all("8080" in line for line in opened)) == (zones, True)
    assert not host.differs(OPEN)
    assert host.apply() == (opened, [])
    assert not host.differs()
    assert (host.lines, host.table, [*host.zones.values()]) == ([], "", [set(), set()])


def test_ufw_puts_what_accepts_before_what_drops_and_both_before_others(tmp_path):
    host = Host(tmp_path, "ufw", ["ufw deny 50000:60000/tcp comment 'closed by the operator'"])
    theirs = list(host.lines)
    host.apply(*BOTH)
    drop = host.lines.index("ufw deny to 10.1.0.12 port 50060 proto tcp comment 'llamacpp'")
    assert host.lines.index("ufw allow from 10.1.0.11 to 10.1.0.12 port 50060 proto tcp comment 'llamacpp'") < drop
    del host.lines[drop]
    assert host.differs(*BOTH)
    planned = [*host.lines]
    host.apply(*BOTH)
    assert {*host.lines} > {*planned}
    assert host.lines.index("ufw allow from 10.1.0.11 to 10.1.0.12 port 50060 proto tcp comment 'llamacpp'") == 0
    assert host.lines[-1:] == theirs
    more = host.steps(*BOTH, rule(50162)).rules_to_add
    assert [(step["rule"], step["to_port"]) for step in more] == [("deny", "50162"), ("allow", "50162")]
    host.apply()
    assert host.lines == theirs


def test_ufw_leaves_a_rule_of_the_operator_that_lets_the_head_in(tmp_path):
    host = Host(tmp_path, "ufw", ADDED.splitlines()[1:])
    theirs = [*host.lines]
    assert "ufw allow from 10.1.0.11 to 10.1.0.12 port 50060 proto tcp comment 'my own'" in theirs
    assert host.apply(rule(50060)) == ([], [])
    assert host.lines == theirs


def test_firewalld_reads_its_own_rules_by_their_priority_where_one_side_lacks_them(tmp_path):
    host = Host(tmp_path, "firewalld")
    host.apply(rule())
    for held in host.zones.values():
        held.add(("public", 'rule priority="5" family="ipv4" port port="50060" protocol="tcp" accept'))
    recorded = ZONES.replace("-20052", "-20050").replace("-20051", "-20049")
    host.run = lambda argv, run=host.run: recorded if argv[-1] == "--list-all-zones" else run(argv)
    present = firewall_rules.state_of("firewalld", [], host).present_rules
    assert [line.partition(": ")[0] for line in present] == ["public"] * 4
    assert {*present} < {*firewall_rules.state_of("firewalld", BOTH, host).goals}
    del host.run
    host.zones[""] = {(zone, rich) for zone, rich in host.zones[""] if not rich.endswith("drop")}
    assert host.differs(rule())
    host.apply(rule())
    assert not host.differs(rule())
    host.apply()
    assert {*host.zones["--permanent"]} <= {
        ("public", 'rule priority="5" family="ipv4" port port="50060" protocol="tcp" accept')
    }


def test_nftables_has_the_table_again_where_it_was_flushed(tmp_path):
    host = Host(tmp_path, "nftables")
    host.apply(rule())
    assert host.steps(rule()).drop_chains == ("input",)
    text, host.table = host.path(firewall_rules.NFT_FILE).read_text(), ""
    assert host.differs(rule())
    assert host.steps(rule()).text == text
    accept, drop = (line.split("comment")[0].strip() for line in text.splitlines() if "comment" in line)
    assert accept == "ip saddr 10.1.0.11 ip daddr 10.1.0.12 tcp dport 50060 accept"
    host.table += '\t\ttcp dport 1 accept comment "llamacpp by hand"\n'
    assert host.steps(rule(), keep=True).text == text
    assert host.steps(rule()).differs
    assert drop == 'iifname != "lo" ip daddr 10.1.0.12 tcp dport 50060 tcp flags & (syn | ack) == syn drop'


LOSSES = {
    "nftables-table": lambda host: setattr(host, "table", ""),
    "nftables-unit": lambda host: host.path(firewall_rules.NFT_BOOT_LINK).unlink(),
    "firewalld-until a reload": lambda host: host.zones[""].clear(),
    "firewalld-at a reload": lambda host: host.zones["--permanent"].clear(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_rules_that_do_not_last_are_set_again_and_removed(tmp_path, loss):
    host = Host(tmp_path, loss.partition("-")[0])
    host.apply(rule())
    assert not host.steps(rule()).differs
    LOSSES[loss](host)
    assert host.differs(rule())
    steps = host.steps(rule())
    assert steps.differs
    assert steps.text or steps.rules_to_add
    assert all(line.endswith(firewall_rules.PARTIAL_NOTE) for line in steps.rules_before)
    assert host.steps().differs, "what comes back with a restart has to go too"
    host.apply()
    assert not host.steps().differs
    assert (host.table, [*host.zones.values()]) == ("", [set(), set()])


@pytest.mark.parametrize("place", ["table", "file"])
def test_what_others_have_under_our_names_stays(tmp_path, place):
    host = Host(tmp_path, "nftables")
    if place == "table":
        host.table = "table inet llamacpp {\n\tchain input {\n\t\ttcp dport 4242 accept\n\t}\n}\n"
    else:
        host.path(firewall_rules.NFT_FILE).parent.mkdir()
        host.path(firewall_rules.NFT_FILE).write_text("# theirs\n")
    named = {"table": "the nftables table inet llamacpp", "file": "/etc/firewall-llamacpp.nft"}[place]
    assert firewall_rules.find_foreign_objects(host) == [named]
    assert not host.differs()
    with pytest.raises(Refusal, match=f"This host has {named}, which this collection did not create"):
        host.steps(rule())


@pytest.mark.programs
def test_nft_takes_the_table_twice_and_prints_what_is_read(tmp_path):
    commands = "nft -f table && nft -f table && nft list table inet llamacpp"
    (tmp_path / "table").write_text(Host(tmp_path, "nftables").steps(*BOTH, OPEN).text)
    if not shutil.which("nft") or subprocess.run(["unshare", "-n", "nft", "list", "ruleset"], check=False).returncode:
        pytest.skip("nft needs root and its program")
    done = subprocess.run(["unshare", "-n", "sh", "-c", commands], cwd=tmp_path, capture_output=True, text=True)
    host = Host(tmp_path, "nftables")
    host.table = done.stdout
    assert firewall_rules.find_foreign_objects(host) == [], done.stderr
    assert {*firewall_rules.state_of("nftables", [], host).present_rules} == {
        *Host(tmp_path, "nftables").steps(*BOTH, OPEN).rules_after
    }


@pytest.mark.parametrize("installed", [False, True])
def test_the_collection_that_drives_a_firewall_is_named_if_it_is_missing(monkeypatch, installed):
    finder = SimpleNamespace(find_plugin_with_context=lambda _name: SimpleNamespace(resolved=installed))
    monkeypatch.setattr(missing_collection, "module_loader", finder)
    named = [missing_collection.missing_collection(manager) for manager in ("firewalld", "ufw", "nftables", None)]
    assert named == ["" if installed else "ansible.posix", "" if installed else "community.general", "", ""]
