"""What hosts on paper build with: toolkits found, options and environment, and every refusal."""

import copy
import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import toolkits
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import DEFAULT_FACTS
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs as entry
from conftest import RELEASE, Cluster, known_answer_of
from machines import Machine
from support.clusters import CUDA, accelerator, head_with_cards


@functools.cache
def facts_of(machine):
    """What is found on a machine of fixtures/hardware."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        return Machine(machine, Path(root)).stand_in(patch).facts()


def planned(machine, change=None, **variables):
    """The plan of a machine as head and worker; ``change`` may alter its facts before."""
    facts = copy.deepcopy(facts_of(machine))
    if change:
        change(facts)
    return plan_of(facts, **variables)


def plan_of(facts, **variables):
    given = {"llama_model_known_answer": known_answer_of(), "llama_release": RELEASE, **variables}
    return Cluster().add("here", "head", "worker", facts=facts, **given).plan()


def build_of(plan):
    assert not plan["refused"], plan["reasons"]
    return plan["hosts"]["here"]["builds"][0]


def found(name, tmp_path, monkeypatch):
    machine = Machine(name, tmp_path).stand_in(monkeypatch)
    return toolchains.find_toolchains(tmp_path, machine.ask)


OF_HIP, OF_VULKAN = {"hip-headers", "hipblas", "rocblas"}, {"vulkan-headers", "vulkan-loader", "spirv-headers"}
CUDA_LINK = "/usr/local/cuda"


@pytest.mark.parametrize(
    "name, prefixes, libraries",
    [
        ("constructed/strix_halo", {"/opt/rocm-6.4.1": [], "/opt/rocm-7.2.0": ["/opt/rocm"]}, OF_HIP),
        ("constructed/rdna4", {"/opt/rocm-6.4.2": ["/opt/rocm"]}, OF_HIP),
        ("constructed/mi300x", {"/opt/rocm-7.2.0": []}, set()),
        ("constructed/rdna3", {"/usr": []}, OF_HIP),
        ("constructed/intel_integrated", {}, OF_VULKAN),
        ("recorded/h200", {"/usr/local/cuda-13.0": [CUDA_LINK, f"{CUDA_LINK}-13"]}, {"cublas"}),
        ("recorded/vm_without_devices", {"/usr/local/cuda-13.0": [CUDA_LINK]}, set()),
    ],
)
def test_toolkits_with_the_links_to_them_and_libraries(tmp_path, monkeypatch, name, prefixes, libraries):
    toolkits = found(name, tmp_path, monkeypatch)
    assert {one["prefix"]: one["links"] for one in toolkits} == prefixes
    assert all(one["prefix"].endswith(("/usr", one["version"])) for one in toolkits)
    there = toolchains.library_versions(toolkits, tmp_path)
    assert {library for library, version in there.items() if version} == libraries


def test_a_toolkit_that_does_not_answer_is_none(tmp_path, monkeypatch):
    for program in ("opt/rocm-6.2.0/bin/hipconfig", "usr/local/cuda-12.8/bin/nvcc"):
        (tmp_path / program).parent.mkdir(parents=True)
        (tmp_path / program).touch()
    assert len(found("recorded/vm_without_devices", tmp_path, monkeypatch)) == 1


@pytest.mark.parametrize("folder", ["usr/include", "opt/homebrew/opt/openssl@3/include"])
def test_openssl_is_no_library_of_a_backend_and_is_looked_for(tmp_path, folder):
    assert toolchains.library_versions([], tmp_path)["openssl"] is None
    (tmp_path / folder / "openssl").mkdir(parents=True)
    (tmp_path / folder / "openssl" / "ssl.h").touch()
    assert toolchains.library_versions([], tmp_path)["openssl"] == toolchains.ANY_VERSION
    assert not [backend for backend in BACKENDS if "openssl" in toolkits.libraries_of(backend)]


ROCM = {"HIPCXX": "/opt/rocm-7.2.0/llvm/bin/clang", "HIP_PATH": "/opt/rocm-7.2.0", "ROCM_PATH": "/opt/rocm-7.2.0"}


def cuda(version):
    prefix = f"/usr/local/cuda-{version}"
    return {"CUDACXX": f"{prefix}/bin/nvcc", "CUDAToolkit_ROOT": prefix}


ONEAPI = "/opt/intel/oneapi"
ONEAPI_LIBRARIES = ":".join(
    f"{ONEAPI}/{component}/lib"
    for component in ("compiler/2025.3", "mkl/2025.3", "dnnl/2025.3", "tbb/2022.3", "umf/1.0")
)
SYCL = {
    "CC": f"{ONEAPI}/compiler/2025.3/bin/icx",
    "CXX": f"{ONEAPI}/compiler/2025.3/bin/icpx",
    "ONEAPI_ROOT": ONEAPI,
    "CMPLR_ROOT": f"{ONEAPI}/compiler/2025.3",
    "CMAKE_PREFIX_PATH": ONEAPI_LIBRARIES.replace("/lib", ""),
    "LD_LIBRARY_PATH": ONEAPI_LIBRARIES,
}


@pytest.mark.parametrize(
    "machine, backend, targets, environment",
    [
        ("constructed/strix_halo", "hip", "gfx1151", ROCM),
        ("constructed/rdna3", "hip", "gfx1036;gfx1100", {"HIPCXX": "/usr/lib/llvm-21/bin/clang", "HIP_PATH": "/usr"}),
        ("constructed/rdna4", "hip", "gfx1201", {key: value.replace("7.2.0", "6.4.2") for key, value in ROCM.items()}),
        ("constructed/rtx_3060_3090", "cuda", "86-real", cuda("12.4")),
        ("constructed/rtx_5090", "cuda", "120a-real;61-real", cuda("12.9")),
        ("constructed/gb10", "cuda", "121a-real", cuda("13.0")),
        ("recorded/h200", "cuda", "90-real", cuda("13.0")),
        ("constructed/intel_integrated", "vulkan", "", {}),
        ("constructed/m4_max", "metal", "", {}),
        ("recorded/vm_without_devices", "cpu", "", {}),
    ],
)
def test_options_for_each_backend(machine, backend, targets, environment):
    build = build_of(planned(machine))
    expected = {"CMAKE_BUILD_TYPE": "Release", "GGML_RPC": "ON"}
    if backend != "cpu":
        expected[f"GGML_{backend.upper()}"] = "ON"
    off = ["BUILD_SHARED_LIBS", "GGML_BLAS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_OPENSSL"]
    off += ["GGML_RPC_RDMA", "LLAMA_USE_PREBUILT_UI", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI"]
    if backend == "hip":
        expected["GPU_TARGETS"] = targets
    if backend == "cuda":
        expected["CMAKE_CUDA_ARCHITECTURES"] = targets
        off += ["GGML_CUDA_NCCL", "GGML_CUDA_CCCL_VERSION"]
    assert build["backend"] == backend
    assert build["cmake_options"] == {**expected, **dict.fromkeys(off, "OFF")}
    assert build["environment"] == environment


def without(*libraries, version=None):
    """Takes libraries from a host, from every toolkit that it has, or from that of one version alone."""

    def take(facts):
        facts["toolchain"].update({} if version else dict.fromkeys(libraries))
        for toolchain in facts["toolchains"]:
            if version in (None, toolchain["version"]):
                toolchain["libraries"] = [name for name in toolchain["libraries"] if name not in libraries]

    return take


def moved(facts):
    facts["toolchains"][-1]["prefix"] = "/opt/elsewhere"


@pytest.mark.parametrize(
    "machine, change, wanted, prefix",
    [
        ("constructed/strix_halo", {}, "/opt/rocm-6.4.1", "/opt/rocm-6.4.1"),
        ("constructed/strix_halo", {}, "/opt/rocm-6.4.1/", "/opt/rocm-6.4.1"),
        ("constructed/strix_halo", {}, "/opt/rocm", None),
        ("constructed/strix_halo", without("hipblas", version="7.2.0"), None, "/opt/rocm-6.4.1"),
        ("recorded/h200", moved, None, "/opt/elsewhere"),
        ("recorded/vm_without_devices", {}, CUDA_LINK, None),
    ],
)
def test_another_toolkit_is_another_build(machine, change, wanted, prefix):
    """Named by the operator, the newest that has its libraries, or the same at another place: its programs look for their libraries where
    they were linked."""
    default = build_of(planned(machine))
    build = build_of(planned(machine, change=change, llama_build_toolchain=wanted))
    if prefix:
        assert prefix in [build["environment"].get(name) for name in ("HIP_PATH", "CUDAToolkit_ROOT")]
        assert (build["kind"] == default["kind"], build["id"] == default["id"]) == (False, False)
    else:
        assert build == default


@pytest.mark.parametrize(
    "machine, prefix, name",
    [
        ("constructed/bare_cpu", "/opt/rh/gcc-toolset-14/root/usr", "g"),
        ("constructed/a5000x4", "/usr/lib/llvm-21", "clang"),
    ],
)
def test_a_compiler_that_the_operator_names(machine, prefix, name):
    build = build_of(planned(machine, llama_build_toolchain=prefix))
    default = build_of(planned(machine, change=lambda facts: facts["toolchain"].update({"c++": "14.2"})))
    assert build["kind"] != default["kind"]
    expected = {"CC": f"{prefix}/bin/{'gcc' if name == 'g' else name}", "CXX": f"{prefix}/bin/{name}++"}
    if build["backend"] == "cuda":
        cuda = "/usr/local/cuda-12.4"
        expected.update(CUDAHOSTCXX=expected["CXX"], CUDACXX=f"{cuda}/bin/nvcc", CUDAToolkit_ROOT=cuda)
    assert build["environment"] == expected


def with_architecture(architecture):
    return lambda facts: [device.update(architecture=architecture) for device in facts["accelerators"]]


def all_of(*changes, **more):
    return lambda facts: ([change(facts) for change in changes], facts.update(more))


def refusal(machine, *said, change=None, **variables):
    return pytest.param(machine, change, variables, said, id=said[0])


ARC = [{"device": "SYCL0", "memory_mib": 16000}]
HIP = {"llama_backend": "hip"}
OF_SYCL = {"llama_backend": "sycl", "llama_worker_endpoints": ARC}
MAC = {"distribution": {"id": "darwin", "version": "25", "family": "darwin"}}
STRIX, RTX, GTX, INTEL = (f"constructed/{name}" for name in ("strix_halo", "rtx_5090", "a5000x4", "arc_a770"))
WITHOUT_TOOLS = "constructed/nvidia_without_tools"
REFUSALS = [
    refusal(
        *("constructed/rdna3", "here has ROCm 5.7", "too old", "install ROCm 6.1 or newer"),
        change=lambda facts: facts["toolchains"][0].update(version="5.7.31921"),
        **HIP,
    ),
    refusal(
        *(RTX, "here has CUDA 12.6", "too old for compute capability 12.0", "install CUDA 12.8 or newer"),
        change=lambda facts: facts.update(toolchains=[one for one in facts["toolchains"] if one["version"] == "12.6"]),
    ),
    refusal(
        *(RTX, "CUDA 13.0", "no longer compiles for compute capability 6.1", "install a version of CUDA before 13.0"),
        llama_build_toolchain=CUDA_LINK,
    ),
    refusal(
        *(
            WITHOUT_TOOLS,
            "here has NVIDIA GeForce RTX 3090, but the compute capability of this device is unknown",
            "nvidia-smi",
        ),
        *("llama_hardware", "set llama_backend"),
    ),
    refusal(
        *(WITHOUT_TOOLS, "llama_worker_endpoints[0] for here lends CUDA0 (NVIDIA GeForce RTX 3090), whose"),
        "RTX 3090), whose memory size is unknown",
        change=with_architecture("8.6"),
    ),
    refusal(
        *(GTX, "llama_hardware for here gives a cuda device the architecture 'sm_86'", "like 8.6"),
        change=with_architecture("sm_86"),
    ),
    refusal("constructed/intel_arc", "lends Vulkan0 (Intel graphics 8086:e20b)", "memory_mib"),
    refusal(*("constructed/bare_cpu", "here has the C++ compiler 8.5.0", "GCC 9", "llama_build_toolchain")),
    refusal(
        *(STRIX, "here has ROCm 7.2.0 in /opt/rocm-7.2.0 without hipblas, rocblas: install", "llama_build_toolchain"),
        change=without("hipblas", "rocblas"),
        **HIP,
    ),
    refusal(
        *("constructed/rdna3", "here lacks rocblas", "ask an administrator to install librocblas-dev"),
        change=all_of(without("rocblas"), scope="user"),
        **HIP,
    ),
    refusal(
        *("constructed/m4_max", "here lacks ninja: run brew install ninja on that host"),
        change=all_of(without("ninja", "ccache"), **MAC),
    ),
    refusal(
        *(INTEL, "here lacks icx, mkl, dnnl, level-zero-driver"),
        "from Intel's graphics driver repository and Intel's oneAPI repository",
        change=all_of(without("icx", "mkl", "dnnl", "level-zero-driver"), toolchains=[]),
        **OF_SYCL,
    ),
]


@pytest.mark.parametrize("machine, change, variables, said", REFUSALS)
def test_what_cannot_be_built_with(machine, change, variables, said):
    plan = planned(machine, change=change, **variables)
    assert plan["refused"]
    for part in said:
        assert part in " ".join(plan["reasons"])


def test_a_toolkit_compiles_for_the_oldest_architecture_that_it_still_has():
    facts = with_architecture("7.5")
    assert build_of(planned(RTX, change=facts, llama_build_toolchain=CUDA_LINK))["backend"] == "cuda"


def test_a_toolkit_compiles_for_the_newest_architecture_that_it_has():
    (known,) = [one for one in facts_of(RTX)["toolchains"] if one["version"] == "12.6"]
    plan = planned(RTX, change=lambda facts: facts.update(toolchains=[{**known, "version": "12.8"}]))
    assert build_of(plan)["backend"] == "cuda"


@pytest.mark.parametrize(
    "type_k, type_v, all_quants",
    [("f16", "f16", None), ("q8_0", "q8_0", None), ("q8_0", "q4_0", "ON"), ("q5_1", "q5_1", "ON")],
)
def test_kernels_for_types_of_the_cache(type_k, type_v, all_quants):
    for machine in ("constructed/a5000x4", "constructed/strix_halo", "constructed/intel_integrated"):
        plan = planned(machine, llama_server_cache_type_k=type_k, llama_server_cache_type_v=type_v)
        expected = None if machine == "constructed/intel_integrated" else all_quants
        assert build_of(plan)["cmake_options"].get("GGML_CUDA_FA_ALL_QUANTS") == expected


@pytest.mark.parametrize(
    "machine, lacking, tools",
    [
        ("constructed/intel_integrated", "spirv-headers", {"spirv-headers": "spirv-headers"}),
        ("constructed/rdna3", "rocblas", {"hipblas": "libhipblas-dev", "rocblas": "librocblas-dev"}),
    ],
)
def test_a_library_that_is_missing_is_installed(machine, lacking, tools):
    backend = build_of(planned(machine))["backend"]
    plan = planned(machine, change=without(lacking), llama_backend=backend)
    assert tools.items() <= plan["hosts"]["here"]["tools"].items()


def test_a_device_without_all_of_its_toolkit_is_not_chosen_but_told():
    plan = planned("constructed/mi300x")
    assert build_of(plan)["backend"] == "cpu"
    assert [entry["id"] for entry in plan["advisories"]] == ["accelerator-unused"]


def test_devices_that_differ_are_counted_as_they_are_listed():
    workers = planned("constructed/rtx_3060_3090")["hosts"]["here"]["workers"]
    assert [worker["environment"] for worker in workers] == [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}] * 2
    alike = planned("constructed/a5000x4")["hosts"]["here"]["workers"]
    assert [worker["environment"] for worker in alike] == [{}] * 4


DECLARED_STRIX = accelerator("hip", "declared", "gfx1151", 126976, unified=True)


def test_a_host_that_is_only_declared_builds_with_what_it_is_said_to_have():
    facts = entry.merge_hardware("here", None, {"memory_mib": 128200, "accelerators": [DECLARED_STRIX]})
    assert build_of(plan_of(facts))["environment"] == {}
    prefix = {"llama_build_toolchain": "/opt/rocm-7.2.0"}
    assert build_of(plan_of(facts, **prefix))["environment"] == ROCM
    tools = {**DEFAULT_FACTS["toolchain"], "hipconfig": "5.7"}
    old = entry.merge_hardware("here", None, {"accelerators": [DECLARED_STRIX], "toolchain": tools})
    assert "here has ROCm 5.7" in plan_of(old)["reasons"][0]


def test_a_declared_toolchain_stands_for_all(tmp_path, monkeypatch):
    facts = Machine("constructed/strix_halo", tmp_path).stand_in(monkeypatch).facts()
    known = entry.merge_hardware("here", facts, {"toolchain": {**facts["toolchain"], "hipconfig": "7.3"}})
    build = build_of(plan_of(known))
    assert build["environment"] == {}
    named = build_of(plan_of(known, llama_build_toolchain="/opt/rocm-7.3.0"))
    assert named["environment"]["ROCM_PATH"] == "/opt/rocm-7.3.0"


def test_sycl_is_planned_from_the_toolkit_to_the_services():
    plan = planned("constructed/arc_a770", llama_worker_endpoints=[*ARC, {"device": "SYCL1"}])
    build = build_of(plan)
    own = {name: value for name, value in build["cmake_options"].items() if "SYCL" in name}
    assert (build["backend"], own) == ("sycl", {"GGML_SYCL": "ON", "GGML_SYCL_SUPPORT_LEVEL_ZERO_API": "OFF"})
    assert build["cmake_options"]["BUILD_SHARED_LIBS"] == "OFF"
    assert build["environment"] == SYCL
    runs = {"LD_LIBRARY_PATH": ONEAPI_LIBRARIES, "ZES_ENABLE_SYSMAN": "1"}
    arc, integrated = plan["hosts"]["here"]["workers"]
    assert (arc["device"], integrated["device"]) == ("SYCL0", "SYCL1")
    assert arc["environment"] == plan["head"]["environment"] == runs
    arguments = arc["argv"]
    assert arguments[arguments.index("-d") + 1] == "SYCL0"
    arc, integrated, server = plan["hosts"]["here"]["services"]
    assert arc["devices"] == integrated["devices"] == ["char-drm"]
    assert server["environment"] == runs


def test_vulkan_serves_where_oneapi_is_not_whole():
    variables = {"llama_worker_endpoints": [{"memory_mib": 16000}]}
    plan = planned("constructed/arc_a770", change=without("mkl"), **variables)
    assert build_of(plan)["backend"] == "vulkan"
    assert plan["hosts"]["here"]["workers"][0]["environment"] == {}


@pytest.mark.parametrize(
    "installed, chosen",
    [(["2024.2", "2025.3", "2025.10"], "2025.3"), (["2025.1", "2025.2", "2026.0"], "2025.2"), (["2024.2"], None)],
)
def test_a_component_is_of_the_compilers_version_or_of_its_year(tmp_path, monkeypatch, installed, chosen):
    machine = Machine("constructed/arc_a770", tmp_path).stand_in(monkeypatch)
    shutil.rmtree(tmp_path / "opt/intel/oneapi/mkl")
    for version in installed:
        header = tmp_path / f"opt/intel/oneapi/mkl/{version}/include/oneapi/mkl.hpp"
        header.parent.mkdir(parents=True)
        header.touch()
    newest = toolchains.find_toolchains(tmp_path, machine.ask)[-1]
    assert newest["components"].get("mkl") == (f"{ONEAPI}/mkl/{chosen}" if chosen else None)
    assert ("mkl" in newest["libraries"]) == bool(chosen)


def test_a_card_that_is_known_by_one_backend_can_use_vulkan_too():
    card = accelerator("cuda", "Tesla P40", "6.1", 24576)
    cluster = head_with_cards(1, 4, llama_backend="cuda")
    cluster.hosts["head"]["facts"].update(accelerators=[card], toolchain={**CUDA, "nvcc": "13.0"})
    cluster.reason(
        "or set llama_backend to vulkan (and declare the card for that backend in llama_hardware) or cpu for head"
    )
