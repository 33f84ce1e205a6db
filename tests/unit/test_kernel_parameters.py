"""Options of kernel modules: the file, the initramfs, conflicts with an operator's own, and tuned."""

import re

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KernelTuning
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.kernel_parameters import parameters

WANTED = {"amdgpu.gttsize": "126976", "ttm.pages_limit": "32505856"}
OTHER = {"amdgpu.gttsize": "100000", "ttm.pages_limit": "25600000"}
PAIRS = ("amdgpu.gttsize=126976", "ttm.pages_limit=32505856")
FILE = "etc/modprobe.d/llamacpp.conf"
TEXT = f"{kernel_parameters.HEADER}options amdgpu gttsize=126976\noptions ttm pages_limit=32505856\n"


class Machine:
    """A host as a tree of files, with the programs that it has; commands are recorded, and answered as the real ones would be."""

    def __init__(self, root, *programs):
        self.root, self.programs, self.commands, self.broken = root, {*programs}, [], set()
        self.profile = "balanced"
        self.initramfs = ""
        """The file for modprobe as the initramfs has it."""
        self.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet\n")
        (root / "run").mkdir()
        (root / "etc").mkdir()
        self.restart()

    def put(self, name, text=""):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def read(self, name):
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def run(self, argv, seconds=0):
        if argv == ["tuned-adm", "active"]:
            if self.profile is None:
                return "It seems that tuned daemon is not running, preset profile is not activated.\nPreset profile: balanced\n"
            if not self.profile:
                raise commands.CommandError(argv, "No current active profile.", 1)
            return f"Current active profile: {self.profile}\n"
        self.commands.append(" ".join(argv))
        if argv[0] in self.broken:
            raise commands.CommandError(argv, "disk full", 1)
        if argv[:2] == ["tuned-adm", "profile"]:
            self.profile = argv[2]
        else:
            self.initramfs = self.read(FILE)
        return ""

    def apply(self, wanted=None, check=False, profile="", owner=names.DEFAULT):
        self.commands.clear()
        tuning = KernelTuning(WANTED if wanted is None else wanted, profile, reboot=False)
        system = System(owner, self.root)
        system.run = self.run
        return kernel_parameters.apply(tuning, check, system)

    def restart(self):
        """Modules take what the initramfs says."""
        values = {"amdgpu.gttsize": "-1", "ttm.pages_limit": "8000000"}
        values.update(kernel_parameters._module_options(self.initramfs))
        for name, value in values.items():
            module, option = name.split(".")
            self.put(f"sys/module/{module}/parameters/{option}", f"{value}\n")
        (self.root / "run/llamacpp-kernel-parameters").unlink(missing_ok=True)

    def files(self):
        return {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    made = Machine(tmp_path, "update-initramfs")
    monkeypatch.setattr(commands, "find", lambda program: program if program in made.programs else None)
    return made


def test_sizes_are_given_in_mib_and_in_pages():
    assert parameters(131072, None) == WANTED
    assert parameters(65536, 1024) == {"amdgpu.gttsize": "1024", "ttm.pages_limit": "262144"}
    assert parameters(65536, 63488)["amdgpu.gttsize"] == "63488"
    for memory, size in ((65536, 64513), (65536, 1023), (65536, -1), (5000, None), (0, None)):
        with pytest.raises(ValueError, match="llama_host_tuning_gtt_mib"):
            parameters(memory, size)


def test_parameters_are_set_once_and_taken_back_without_a_trace(machine):
    machine.put("etc/modprobe.d/other.conf", "options snd_hda_intel power_save=1\n")
    untouched = machine.files()
    change = machine.apply()
    assert (change.before, change.after, change.missing, change.removed) == ("", TEXT, PAIRS, ())
    assert machine.read(FILE) == TEXT
    assert machine.commands == ["update-initramfs -u -k all"]

    settled = machine.files()
    again = machine.apply()
    assert (again.before, again.after, again.missing) == (TEXT, TEXT, PAIRS)
    assert (machine.commands, machine.files()) == ([], settled)
    machine.restart()
    assert machine.apply() == (TEXT, TEXT, (), ())

    assert machine.apply({}) == (TEXT, "", (), PAIRS)
    assert machine.commands
    assert machine.apply({}) == ("", "", (), PAIRS)
    machine.restart()
    assert machine.apply({}) == ("", "", (), ())
    assert machine.files() == untouched


def test_check_mode_reports_the_same_and_changes_nothing(machine):
    for wanted in (WANTED, {}):
        before = machine.files()
        reported = machine.apply(wanted, check=True)
        assert (machine.files(), machine.commands) == (before, [])
        assert reported.before != reported.after
        assert machine.apply(wanted) == reported
        machine.restart()


def test_another_value_replaces_the_one_before(machine):
    machine.apply(OTHER)
    machine.restart()
    change = machine.apply()
    assert (change.after, change.missing) == (TEXT, PAIRS)
    assert change.removed == ("amdgpu.gttsize=100000", "ttm.pages_limit=25600000")
    assert "100000" not in machine.read(FILE) + machine.initramfs


def test_a_change_that_failed_is_done_again(machine):
    untouched = machine.files()
    for wanted in (WANTED, {}):
        machine.broken = {"update-initramfs"}
        with pytest.raises(Refusal, match="disk full"):
            machine.apply(wanted)
        machine.broken = set()
        again = machine.apply(wanted)
        assert again.before != again.after
        assert machine.commands == ["update-initramfs -u -k all"]
        last = machine.apply(wanted)
        assert last.before == last.after
    assert machine.files() == untouched


def test_the_initramfs_is_made_as_the_distribution_does(machine):
    for programs, expected in (
        ({"update-initramfs", "dracut"}, ["update-initramfs -u -k all"]),
        ({"dracut"}, ["dracut --force --regenerate-all"]),
        ({"mkinitcpio"}, ["mkinitcpio -P"]),
        (set(), []),
    ):
        machine.programs = programs
        machine.apply()
        assert machine.commands == expected
        machine.apply({})
        assert machine.commands == expected


def test_another_value_of_the_operator_is_refused_with_its_file(machine):
    for file, text in (
        ("proc/cmdline", "quiet amdgpu.gttsize=98304\n"),
        ("etc/modprobe.d/gpu.conf", "# for models\noptions amdgpu dc=1 gttsize=98304\n"),
        ("usr/lib/modprobe.d/gpu.conf", "options  amdgpu gttsize=98304\n"),
        ("run/modprobe.d/gpu.conf", "options ttm pages-limit=5\n"),
    ):
        kept = machine.read(file)
        machine.put(file, text)
        before = machine.files()
        with pytest.raises(Refusal, match=re.escape(f" in /{file}. Remove them there")):
            machine.apply()
        assert (machine.files(), machine.commands) == (before, [])
        machine.put(file, kept)
    same = (
        "options amdgpu gttsize=126976\n#options amdgpu gttsize=1\noptions amdgpu dc=1\noptions radeon gttsize=98304\n"
    )
    assert machine.put("etc/modprobe.d/gpu.conf", same).apply().after == TEXT


def test_a_file_of_others_is_refused_and_stays(machine):
    machine.put("etc/modprobe.d/llamacpp.conf", "options snd_hda_intel power_save=0\n")
    before = machine.files()
    with pytest.raises(Refusal, match=r"This host has /etc/modprobe\.d/llamacpp\.conf, which this"):
        machine.apply()
    assert machine.apply({}) == ("", "", (), ())
    assert (machine.files(), machine.commands) == (before, [])
    assert kernel_parameters.foreign_files(System(root=machine.root)) == ["/etc/modprobe.d/llamacpp.conf"]


def test_clusters_on_a_host_have_files_of_their_own(machine):
    machine.apply(owner=names.of("night"))
    assert machine.read("etc/modprobe.d/llamacpp-night.conf") == TEXT
    assert machine.apply({}).before == ""
    with pytest.raises(Refusal, match=r"gttsize=126976 in /etc/modprobe.d/llamacpp-night.conf"):
        machine.apply(OTHER)


def test_a_host_whose_initramfs_comes_with_its_image_is_refused_with_what_to_set_by_hand(machine):
    machine.put("run/ostree-booted")
    with pytest.raises(Refusal, match=f"set «{' '.join(PAIRS)}» with «rpm-ostree kargs»"):
        machine.apply()
    machine.initramfs = TEXT
    machine.restart()
    assert machine.apply() == ("", "", (), ())
    assert machine.commands == []


def test_text_that_is_no_parameter_or_profile_is_refused(machine):
    before = machine.files()
    for name, value in (
        ("a b", "1"),
        ("a.b", "1 init=/bin/sh"),
        ("a.b", "$(id)"),
        ("a.b", ""),
        ("a.b", "1\n"),
        ("a", "1"),
    ):
        with pytest.raises(Refusal, match="is not a parameter of a kernel module"):
            machine.apply({name: value})
    for profile in ("--help", "a b", "../x", "a\n"):
        with pytest.raises(Refusal, match="not the name of a tuned profile"):
            machine.apply(profile=profile)
    assert machine.files() == before


def test_the_profile_is_selected_once_where_tuned_runs(machine):
    machine.programs = {"tuned-adm"}
    for before, shown in (("balanced", "tuned: balanced\n"), ("", "tuned: off\n")):
        machine.profile = before
        reported = machine.apply({}, profile="accelerator-performance", check=True)
        assert machine.commands == []
        assert reported == (shown, "tuned: accelerator-performance\n", (), ())
        assert machine.apply({}, profile="accelerator-performance") == reported
        assert machine.commands == ["tuned-adm profile accelerator-performance"]
        assert machine.apply({}, profile="accelerator-performance").before == ""
    machine.profile = None
    assert machine.apply({}, profile="accelerator-performance").after == ""
    machine.programs.clear()
    machine.profile = "balanced"
    assert machine.apply({}, profile="accelerator-performance").after == ""
