import re
import stat
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import kernel_parameters
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.kernel_parameters import parameters

DATA = Path(__file__).parent / "data" / "tuning"
WANTED = {"amdgpu.gttsize": "126976", "ttm.pages_limit": "32505856"}
OTHER = {"amdgpu.gttsize": "100000", "ttm.pages_limit": "25600000"}
TEXT = "amdgpu.gttsize=126976 ttm.pages_limit=32505856"
VERSION = "6.18.5-amd64"


class Machine(kernel_parameters.System):
    """A host as a tree of files, with the programs that it has; commands are noted, and answered as the real ones would be."""

    def __init__(self, root, *programs):
        super().__init__(root)
        self.programs, self.commands, self.broken = {*programs}, [], set()
        self.systemd_boot, self.entries, self.profile = True, {}, "balanced"
        self.put("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet\n")
        (root / "var/lib").mkdir(parents=True)
        (root / "run").mkdir()

    def put(self, name, text=""):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def has(self, program):
        return program in self.programs

    def run(self, argv):
        if argv == ["grubby", "--info=ALL"]:
            return re.sub(
                r'^kernel="(.*)"\nargs=".*"$',
                lambda found: f'kernel="{found[1]}"\nargs="{self.entries[found[1]]}"',
                (DATA / "grubby.txt").read_text(),
                flags=re.MULTILINE,
            )
        if argv == ["bootctl", "is-installed"]:
            if not self.systemd_boot:
                raise kernel_parameters.TuningError("bootctl failed: status 1")
            return "yes\n"
        if argv == ["tuned-adm", "active"]:
            if self.profile is None:
                return "It seems that tuned daemon is not running, preset profile is not activated.\nPreset profile: balanced\n"
            if not self.profile:
                raise kernel_parameters.TuningError(
                    "«tuned-adm active» failed: No current active profile.. Mend that on the host."
                )
            return f"Current active profile: {self.profile}\n"
        self.commands.append(" ".join(argv))
        if argv[:2] == ["tuned-adm", "profile"]:
            self.profile = argv[2]
        if argv[0] in self.broken:
            raise kernel_parameters.TuningError(f"«{' '.join(argv)}» failed: disk full.")
        if argv[0] == "update-grub":
            set_here = re.findall(r"\$GRUB_CMDLINE_LINUX (.*)\"$", self.read(self.drop_in), re.MULTILINE)
            self.put("boot/grub/grub.cfg", f"\tlinux /vmlinuz root=/dev/sda1 ro {' '.join(set_here)} quiet\n")
        if argv[0] == "grubby":
            options = dict(option[2:].split("=", 1) for option in argv[2:])
            for kernel, line in self.entries.items():
                gone, new = (options.get(option, "").split() for option in ("remove-args", "args"))
                kept = [word for word in line.split(" ") if word not in [*gone, *new]]
                self.entries[kernel] = " ".join(kept + new)
        return ""

    def apply(self, wanted=None, check=False, profile=""):
        self.commands.clear()
        done = kernel_parameters.apply(WANTED if wanted is None else wanted, profile, check, self)
        return {**done, "changed": done["before"] != done["after"], "reboot_needed": bool(done["waiting"])}

    def restart(self, extra=""):
        self.put("proc/cmdline", f"BOOT_IMAGE=/vmlinuz {extra} quiet\n")
        (self.root / self.taken_back).unlink(missing_ok=True)

    def files(self):
        held = {str(path.relative_to(self.root)): path.read_bytes() for path in self.root.rglob("*") if path.is_file()}
        return {**held, "entries": dict(self.entries)}


def grub(root):
    return Machine(root, "update-grub").put("etc/default/grub", (DATA / "grub").read_text())


def grubby(root):
    machine = Machine(root, "grubby", "bootctl", "kernel-install")
    found = re.findall(r'^kernel="(.*)"\nargs="(.*)"$', (DATA / "grubby.txt").read_text(), re.MULTILINE)
    machine.entries = dict(found)
    return machine


def kernel_install(root):
    machine = Machine(root, "bootctl", "kernel-install").put("etc/kernel/cmdline", "root=/dev/sda1 ro quiet\n")
    return machine.put(f"boot/vmlinuz-{VERSION}").put(f"boot/loader/entries/0123-{VERSION}.conf")


KINDS = {"grub": grub, "grubby": grubby, "kernel-install": kernel_install}


@pytest.fixture(params=KINDS)
def machine(tmp_path, request):
    """The machine with each mechanism."""
    made = KINDS[request.param](tmp_path)
    made.kind = request.param
    return made


# ------------------------------------------------------------------------------------------------------------ parameters


def test_sizes_are_given_in_mib_and_in_pages():
    assert parameters(131072, None) == WANTED
    assert parameters(131072, 126976) == WANTED
    assert parameters(65536, 1024) == {"amdgpu.gttsize": "1024", "ttm.pages_limit": "262144"}
    assert parameters(65536, 63488)["amdgpu.gttsize"] == "63488"


@pytest.mark.parametrize("memory, size", [(65536, 64513), (65536, 1023), (65536, -1), (5000, None), (0, None)])
def test_a_size_that_the_host_cannot_lend_is_refused(memory, size):
    with pytest.raises(ValueError, match="llama_host_tuning_gtt_mib"):
        parameters(memory, size)


# --------------------------------------------------------------------------------------------------------- each mechanism


def test_parameters_are_set_once_and_taken_back_without_a_trace(machine):
    machine.put("etc/modprobe.d/other.conf", "options snd_hda_intel power_save=1\n")
    untouched = machine.files()
    done = machine.apply()
    assert done["changed"]
    assert done["reboot_needed"]
    assert done["mechanism"] == machine.kind
    assert done["waiting"] == TEXT.split()
    assert TEXT in done["after"]
    assert TEXT not in done["before"]
    assert "interrupted" not in machine.read(machine.record) + machine.read(machine.drop_in)

    settled = machine.files()
    again = machine.apply()
    assert not again["changed"]
    assert again["reboot_needed"]
    assert machine.commands == []
    assert machine.files() == settled
    machine.restart(TEXT)
    assert not machine.apply()["reboot_needed"]

    back = machine.apply({})
    assert back["changed"]
    assert back["reboot_needed"]
    assert back["waiting"] == TEXT.split()
    assert machine.apply({})["reboot_needed"]
    assert not machine.apply({})["changed"]
    machine.restart()
    assert machine.apply({}) == {
        **back,
        "before": "",
        "after": "",
        "changed": False,
        "waiting": [],
        "reboot_needed": False,
        "mechanism": None,
    }
    left = machine.files()
    left.pop("boot/grub/grub.cfg", None)
    assert left == {**untouched, "proc/cmdline": left["proc/cmdline"]}


def test_check_mode_tells_the_same_and_changes_nothing(machine):
    before = machine.files()
    told = machine.apply(check=True)
    assert machine.files() == before
    assert machine.commands == []
    assert machine.apply() == told
    machine.restart(TEXT)
    before = machine.files()
    told = machine.apply({}, check=True)
    assert told["changed"]
    assert machine.files() == before
    assert machine.apply({}) == told


def test_another_value_replaces_ours(machine):
    machine.apply(OTHER)
    done = machine.apply()
    assert done["changed"]
    assert TEXT in done["after"]
    assert "100000" not in done["after"]
    everything = str(machine.files())
    assert "100000" not in everything
    assert "25600000" not in everything
    machine.restart("amdgpu.gttsize=100000 ttm.pages_limit=25600000")
    assert machine.apply()["reboot_needed"]


def test_a_change_that_failed_is_done_again(machine):
    machine.broken = {"update-grub", "grubby", "kernel-install"}
    before = machine.files()
    with pytest.raises(kernel_parameters.TuningError, match="disk full"):
        machine.apply()
    machine.broken = set()
    again = machine.apply()
    assert again["changed"]
    assert "interrupted" in again["before"]
    assert machine.commands
    assert not machine.apply()["changed"]
    machine.broken = {"update-grub", "grubby", "kernel-install"}
    with pytest.raises(kernel_parameters.TuningError, match="disk full"):
        machine.apply({})
    machine.broken = set()
    assert machine.apply({})["changed"]
    assert machine.commands
    assert not machine.apply({})["changed"]
    left = machine.files()
    left.pop("boot/grub/grub.cfg", None)
    assert left == before


@pytest.mark.parametrize(
    "file, text",
    [
        ("etc/default/grub", 'GRUB_CMDLINE_LINUX_DEFAULT="quiet amdgpu.gttsize=98304"\n'),
        ("etc/default/grub.d/50-cloud.cfg", "GRUB_CMDLINE_LINUX=amdgpu.gttsize=98304\n"),
        ("etc/kernel/cmdline", "root=/dev/sda1 amdgpu.gttsize=98304\n"),
        ("etc/cmdline.d/gpu.conf", "amdgpu.gttsize=98304\n"),
        ("etc/modprobe.d/gpu.conf", "# for models\noptions amdgpu dc=1 gttsize=98304\n"),
        ("usr/lib/modprobe.d/gpu.conf", "options  amdgpu gttsize=98304\n"),
    ],
)
def test_another_value_of_the_operator_is_refused_with_its_file(machine, file, text):
    machine.put(file, text)
    before = machine.files()
    with pytest.raises(kernel_parameters.TuningError, match=re.escape(f"amdgpu.gttsize=98304 in /{file}")):
        machine.apply()
    assert machine.files() == before
    assert machine.commands == []


@pytest.mark.parametrize(
    "file, text",
    [
        (
            "etc/default/grub",
            '# GRUB_CMDLINE_LINUX="amdgpu.gttsize=98304"\nGRUB_CMDLINE_LINUX="xamdgpu.gttsize=1 my-amdgpu.gttsize=2"\n',
        ),
        (
            "etc/modprobe.d/gpu.conf",
            "#options amdgpu gttsize=98304\noptions amdgpu dc=1\noptions radeon gttsize=98304\n",
        ),
        ("etc/modprobe.d/gpu.conf", "options amdgpu gttsize=126976\n"),
    ],
)
def test_what_only_looks_like_another_value_is_not_refused(machine, file, text):
    assert machine.put(file, text).apply()["changed"]


def test_dashes_and_underscores_are_the_same_to_the_kernel(machine):
    machine.put("etc/modprobe.d/gpu.conf", "options ttm pages-limit=5\n")
    with pytest.raises(kernel_parameters.TuningError, match=r"ttm\.pages_limit=5 in /etc/modprobe\.d/gpu\.conf"):
        machine.apply()


@pytest.mark.parametrize(
    "wanted",
    [
        {"a b": "1"},
        {"a": "1 init=/bin/sh"},
        {"a": "$(id)"},
        {"a": '"'},
        {"a": ""},
        {"a": "1\n"},
        {"": "1"},
        {"a=b": "1"},
    ],
)
def test_text_that_is_no_parameter_is_refused(machine, wanted):
    before = machine.files()
    with pytest.raises(kernel_parameters.TuningError, match="not a valid kernel parameter"):
        machine.apply(wanted)
    assert machine.files() == before


# -------------------------------------------------------------------------------------------------------------- operators'


def test_grub_leaves_out_what_the_operator_has_set(tmp_path):
    machine = grub(tmp_path).put("etc/default/grub.d/gpu.cfg", 'GRUB_CMDLINE_LINUX="amdgpu.gttsize=126976"\n')
    machine.apply()
    assert "gttsize" not in machine.read(machine.drop_in)
    assert "ttm.pages_limit=32505856" in machine.read(machine.drop_in)


def test_grubby_and_kernel_install_leave_what_the_operator_has_set(tmp_path):
    for machine in (grubby(tmp_path / "a"), kernel_install(tmp_path / "b")):
        machine.entries = {kernel: f"{line} amdgpu.gttsize=126976" for kernel, line in machine.entries.items()}
        if not machine.entries:
            machine.put("etc/kernel/cmdline", "root=/dev/sda1 amdgpu.gttsize=126976 ro\n")
        machine.apply()
        assert "gttsize" not in machine.read(machine.record)
        machine.apply({})
        left = str(machine.entries) + machine.read("etc/kernel/cmdline")
        assert "amdgpu.gttsize=126976" in left
        assert "pages_limit" not in left


def test_grubby_refuses_another_value_in_one_entry(tmp_path):
    machine = grubby(tmp_path)
    rescue = list(machine.entries)[1]
    machine.entries[rescue] += " ttm.pages_limit=7"
    with pytest.raises(
        kernel_parameters.TuningError, match=r"ttm.pages_limit=7 in /boot/vmlinuz-0-rescue-\w+ \(entry 1\)"
    ):
        machine.apply()


def test_grubby_that_sets_nothing_or_knows_no_kernel_is_told(tmp_path, monkeypatch):
    machine = grubby(tmp_path)
    done = machine.run
    monkeypatch.setattr(machine, "run", lambda argv: done(argv) if argv[1] == "--info=ALL" else "")
    with pytest.raises(kernel_parameters.TuningError, match="did not set «amdgpu"):
        machine.apply()
    monkeypatch.setattr(machine, "run", lambda argv: "")
    with pytest.raises(kernel_parameters.TuningError, match="reports no kernel"):
        machine.apply()


def test_grub_whose_later_files_throw_ours_away_is_told(tmp_path, monkeypatch):
    machine = grub(tmp_path)
    monkeypatch.setattr(machine, "run", lambda argv: machine.put("boot/grub/grub.cfg", "  linux /vmlinuz quiet\n"))
    with pytest.raises(kernel_parameters.TuningError, match="overwrites GRUB_CMDLINE_LINUX"):
        machine.apply()


# -------------------------------------------------------------------------------------------------- which mechanism it is


def test_grub_appends_in_a_file_of_its_own(tmp_path):
    machine = grub(tmp_path)
    machine.apply()
    assert (
        machine.read(machine.drop_in)
        == f'# Set by llamacpp.cluster.\nGRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX {TEXT}"\n'
    )
    assert machine.commands == ["update-grub"]


def test_grubby_changes_all_kernels_in_one_call(tmp_path):
    machine = grubby(tmp_path)
    machine.apply(OTHER)
    machine.apply()
    assert machine.commands == [
        f"grubby --update-kernel=ALL --remove-args=amdgpu.gttsize=100000 ttm.pages_limit=25600000 --args={TEXT}"
    ]


def test_boot_images_are_made_as_the_distribution_does(tmp_path):
    machine = kernel_install(tmp_path).put("boot/vmlinuz-0-rescue-0123")
    machine.put("usr/lib/modules/6.17.1/vmlinuz").put("efi/EFI/Linux/0123-6.17.1+3-1.efi").put(
        "usr/lib/modules/6.1/vmlinuz"
    )
    machine.apply()
    assert machine.commands == [
        "kernel-install add 6.17.1 /usr/lib/modules/6.17.1/vmlinuz",
        f"kernel-install add {VERSION} /boot/vmlinuz-{VERSION}",
    ]
    machine.apply({})
    machine.put("etc/mkinitcpio.d/linux.preset", (DATA / "linux.preset").read_text()).programs.add("mkinitcpio")
    machine.apply()
    assert machine.commands == ["mkinitcpio -P"]
    machine.apply({})
    machine.programs.add("reinstall-kernels")
    machine.apply()
    assert machine.commands == ["reinstall-kernels"]


def test_the_boot_loader_that_is_installed_is_used(tmp_path):
    machine = kernel_install(tmp_path).put("etc/default/grub", (DATA / "grub").read_text())
    machine.programs.add("update-grub")
    assert kernel_parameters.mechanism(machine).name == "kernel-install"
    machine.systemd_boot = False
    assert kernel_parameters.mechanism(machine).name == "grub"


@pytest.mark.parametrize("owner", [*kernel_parameters.OTHER_TOOLS, "ostree", "nothing"])
def test_an_unknown_mechanism_is_refused_with_what_to_set_by_hand(tmp_path, owner):
    machine = grub(tmp_path)
    machine.programs.add(owner)
    if owner == "ostree":
        machine.put("run/ostree-booted")
    if owner == "nothing":
        machine.programs.clear()
    with pytest.raises(kernel_parameters.TuningError, match=f"set «{TEXT}» by hand"):
        machine.apply()
    machine.restart(TEXT)
    done = machine.apply()
    assert not done["changed"]
    assert not done["reboot_needed"]
    assert done["mechanism"] is None
    machine.put(machine.record, "a=1\n")
    with pytest.raises(
        kernel_parameters.TuningError, match="remove the parameters that /var/lib/llamacpp-kernel-parameters names"
    ):
        machine.apply({})


def test_kernels_of_which_kernel_install_made_no_entry_are_not_its_own(tmp_path):
    machine = kernel_install(tmp_path)
    (tmp_path / f"boot/loader/entries/0123-{VERSION}.conf").rename(tmp_path / "boot/loader/entries/arch.conf")
    assert kernel_parameters.mechanism(machine) is None
    machine.programs.discard("kernel-install")
    assert kernel_parameters.mechanism(machine) is None
    assert kernel_parameters.mechanism(kernel_install(tmp_path / "b").put("etc/kernel/cmdline", "\n")) is None


# --------------------------------------------------------------------------------------------------------- tuned's profile


@pytest.mark.parametrize("before, shown", [("balanced", "tuned: balanced\n"), ("", "tuned: off\n")])
def test_the_profile_is_chosen_once_and_told_by_check_mode(tmp_path, before, shown):
    machine = Machine(tmp_path, "tuned-adm")
    machine.profile = before
    told = machine.apply({}, profile="accelerator-performance", check=True)
    assert machine.commands == []
    assert (told["before"], told["after"], told["reboot_needed"]) == (shown, "tuned: accelerator-performance\n", False)
    assert machine.apply({}, profile="accelerator-performance") == told
    assert machine.commands == ["tuned-adm profile accelerator-performance"]
    assert not machine.apply({}, profile="accelerator-performance")["changed"]
    assert machine.commands == []


def test_without_tuned_or_a_name_the_profile_stays(tmp_path):
    machine = Machine(tmp_path, "tuned-adm")
    assert not machine.apply({})["changed"]
    machine.profile = None
    assert not machine.apply({}, profile="accelerator-performance")["changed"]
    machine.programs.clear()
    assert not machine.apply({}, profile="accelerator-performance")["changed"]
    for name in ("--help", "a b", "../x", "a\n"):
        with pytest.raises(kernel_parameters.TuningError, match="not the name of a tuned profile"):
            machine.apply({}, profile=name)
    assert machine.commands == []


# ------------------------------------------------------------------------------------------------------------------ parts


@pytest.mark.parametrize(
    "text, gone, new, result",
    [
        ("ro quiet\n", [], ["a=1", "b=2"], "ro quiet a=1 b=2\n"),
        ("ro  quiet", [], ["a=1"], "ro  quiet a=1"),
        ("ro a=1 quiet\n", ["a=1"], [], "ro quiet\n"),
        ("a=1 ro\n", ["a=1"], ["a=2"], " ro a=2\n"),
        ("ro a=12 xa=1 a=1\n", ["a=1"], [], "ro a=12 xa=1\n"),
        ("ro a.b=1 axb=1\n", ["a.b=1"], [], "ro axb=1\n"),
        ("ro\na=1 quiet\n\n", [], ["a=1"], "ro\na=1 quiet\n\n"),
        ("", [], ["a=1"], "a=1"),
    ],
)
def test_only_whole_pairs_are_edited(text, gone, new, result):
    assert kernel_parameters.edit(text, gone, new) == result


def test_files_are_replaced_in_one_step_and_keep_mode_and_link(tmp_path):
    system = kernel_parameters.System(tmp_path)
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to("real")
    system.write("link", "new")
    assert (tmp_path / "link").is_symlink()
    assert system.read("real") == "new"
    assert system.read("none") == ""
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o600
    system.write("made/file", "text")
    assert stat.S_IMODE((tmp_path / "made/file").stat().st_mode) == 0o644
    (tmp_path / "made/file").write_bytes(b"\xff root\n")
    system.write("made/file", system.read("made/file") + "a")
    assert (tmp_path / "made/file").read_bytes() == b"\xff root\na"
    system.write("made/file", "")
    assert list((tmp_path / "made").iterdir()) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_command_that_fails_is_told(monkeypatch):
    system = kernel_parameters.System()
    assert system.has("sh")
    assert not system.has("no-such-program")
    assert system.run(["echo", "a"]) == "a\n"
    for argv, reason in (
        (["sh", "-c", "echo why >&2; exit 3"], "why"),
        (["false"], "status 1"),
        (["no-such-program"], "No such file"),
    ):
        with pytest.raises(kernel_parameters.TuningError, match=reason):
            system.run(argv)
    monkeypatch.setattr(kernel_parameters, "COMMAND_SECONDS", 0.05)
    with pytest.raises(kernel_parameters.TuningError, match="timed out"):
        system.run(["sleep", "5"])
