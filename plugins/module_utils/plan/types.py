# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan, which the planner makes once and which never changes. Sizes are in MiB unless their names say otherwise."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.typed_json import ABSENT, Absent
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import fast_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types

SCHEMA = 1


class PatchPlan(NamedTuple):
    """A patch of a release."""

    path: str
    """path on the controller"""
    sha256: host_types.Sha256
    """SHA-256 of its content"""
    files: tuple[str, ...]
    """files that it changes"""


class ReleasePlan(NamedTuple):
    """A release of llama.cpp or of a fork, and its source."""

    source: Annotated[str, ("git", "pypi", "archive", "prebuilt", "binary", "package")]
    """kind of source"""
    ref: str
    """name of the release, with which its ids begin"""
    build: int
    """build number in its fork, which decides what the release supports"""
    commit: str
    """commit; `unknown` if the plan does not know it"""
    protocol: Optional[str]
    """version of the RPC protocol; null if unknown"""
    id: str
    """hash of all properties that affect its builds"""
    version: Absent[str] = None
    """version of llama-cpp-python, or of the distribution's package"""
    checksum: Absent[Annotated[str, Text("sha256:[0-9a-f]{64}")]] = None
    """SHA-256 of the archive"""
    path: Absent[str] = None
    """path of the archive on the controller"""
    url: Absent[str] = None
    """URL of the archive; for `prebuilt` the folder of all releases, unless it is GitHub's"""
    checksums: Absent[Mapping[str, Annotated[str, Text("sha256:[0-9a-f]{64}")]]] = None
    """archive of `prebuilt` → SHA-256 that the operator has set"""
    why: Absent[str] = None
    """reason why `auto` picked this release"""
    repository: Absent[str] = None
    """Git repository"""
    revision: Absent[str] = None
    """commit, or tag of a build"""
    member: Absent[str] = None
    """folder inside the archive that contains the sources"""
    patches: Annotated[tuple[PatchPlan, ...], ABSENT] = ()
    """patches in the order in which they are applied"""
    fork: Annotated[str, ABSENT] = MAINLINE
    """`ik_llama.cpp`; missing for llama.cpp"""

    @property
    def mainline(self) -> bool:
        """Return whether the release is llama.cpp itself, whose build numbers decide which advisories apply."""
        return self.fork == MAINLINE

    @property
    def loads_fast(self) -> bool:
        """Return whether its patches include the collection's patch for faster loading."""
        return any(fast_load.is_fast_load_patch(patch.sha256) for patch in self.patches)


class ModelPlan(NamedTuple):
    """The model that is served."""

    path: host_types.PathText
    """path on the head"""
    name: str
    """name for people"""
    architecture: str
    """architecture according to the file"""
    layers: int
    """number of layers"""
    large_tensor_bytes: tuple[int, ...]
    """sizes of the tensors that workers cache, each once"""
    known_answer: Optional[host_types.KnownAnswerPlan]
    """size of the known-answer model; null for any other model"""
    source: str
    """origin: `huggingface:REPO@COMMIT`, `url:…`, `ollama:…`, `copy:…`, `path:…` or `known-answer`"""
    revision: Optional[str]
    """commit of the repository; null without one"""
    files: tuple[host_types.ModelFilePlan, ...]
    """files of the model, of its projector and of its draft model, with parts in order; empty for the known-answer model"""
    chat_template: Absent[bool] = None
    """whether its file has a chat template; missing if unknown"""


class HeadMemory(NamedTuple):
    """Layers of the model that stay in the memory of the head."""

    layers: int
    """number of layers"""
    weights_mib: float
    """size of their tensors"""
    kv_mib: float
    """size of their KV cache"""


class ExternalWorkerPlan(NamedTuple):
    """A worker that others run. The collection never changes it."""

    name: str
    """name in `placement`"""
    host: str
    """`host` in `llama_external_workers`, by default its address; not a host of this cluster"""
    endpoint: host_types.Endpoint
    """address and port at which the head reaches it"""
    backend: host_types.Backend
    """declared backend of its device"""
    memory_mib: int
    """declared memory of its device that the model may use"""
    protocol: Optional[str]
    """declared version of its RPC protocol, or else the head's version; null if both are unknown"""
    used: bool
    """whether it has layers"""


class DevicePlacement(NamedTuple):
    """Share of the model on a device."""

    device: str
    """name in llama-server's log"""
    host: str
    """host of the device"""
    worker: Optional[str]
    """name of its worker; null if llama-server drives the device itself"""
    endpoint: Optional[str]
    """endpoint of that worker"""
    layers: int
    """number of layers"""
    output: bool
    """whether it holds the output layer"""
    weights_mib: float
    """size of the tensors"""
    kv_mib: float
    """size of the KV cache, including states of recurrent layers"""
    compute_mib: float
    """upper bound of the compute buffers"""
    auxiliary_mib: float
    """total size of the `auxiliary_models` on this device"""
    total_mib: float
    """sum of these four sizes"""
    capacity_mib: float
    """memory of the device without the reserve, or the size that the operator has set"""
    reason: str
    """rate at which the device reads weights, source of this rate, and reason for this share"""
    exact: tuple[Annotated[str, ("weights_mib", "kv_mib")], ...]
    """names of the sizes that are exact; the other sizes are upper bounds"""
    without: tuple[str, ...]
    """items in memory that no size includes, such as auxiliary models that llama-server places itself"""


class AuxiliaryModelPlan(NamedTuple):
    """A projector or a draft model, and its device."""

    role: Annotated[str, (host_types.MMPROJ, host_types.DRAFT)]
    """mmproj or draft"""
    name: str
    """name for people"""
    host: str
    """name of the head's host"""
    device: Optional[str]
    """device of the head; null for the head's processor"""
    weights_mib: float
    """size of the tensors"""
    kv_mib: float
    """size of the KV cache for all requests together"""
    compute_mib: float
    """upper bound of the compute buffers"""
    total_mib: float
    """sum of these three sizes"""
    in_memory_mib: float
    """size of the weights that the head's memory holds in addition to the device's memory"""
    assumed: bool
    """whether compute_mib is assumed, as it is for a projector"""


class UncountedModel(NamedTuple):
    """A projector or a draft model whose size is unknown."""

    role: Annotated[str, (host_types.MMPROJ, host_types.DRAFT)]
    """mmproj or draft"""
    reason: str
    """reason why its size is unknown"""


class SpeedRange(NamedTuple):
    """Range of tokens per second, with two significant digits: four of five measurements on other machines fell within their ranges."""

    low: float
    """lower end"""
    high: float
    """upper end"""

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


class FallbackHead(NamedTuple):
    """llama-server with a fallback's placement."""

    argv: tuple[str, ...]
    """command line"""


class FallbackPlan(NamedTuple):
    """A placement on which the head can serve while a worker, or a host with several workers, is absent."""

    without: str
    """absent worker as `HOST:WORKER`, or absent host as `HOST`"""
    endpoint: host_types.Endpoint
    """endpoint of that worker, or of the first worker of that host"""
    placement: tuple[DevicePlacement, ...]
    """placement without this worker or host, in the form of the plan's `placement`"""
    head: FallbackHead
    """command line of llama-server"""
    workers: tuple[host_types.Endpoint, ...]
    """endpoints of the workers that this placement uses"""
    generation_tokens_per_s: Optional[float]
    """predicted tokens per second with an empty context; null for a model that generates no text"""
    generation_range: Optional[SpeedRange]
    """predicted range of these tokens per second"""


class NoFallback(NamedTuple):
    """A worker, or a host with several workers, in whose absence the head cannot serve."""

    without: str
    """name as in `fallbacks`"""
    endpoint: host_types.Endpoint
    """endpoint as in `fallbacks`"""
    missing_mib: Optional[int]
    """memory that the other devices lack to hold the model; null if memory is not the reason"""
    reason: str
    """reason why the head cannot serve"""


class DeviceEstimate(NamedTuple):
    """Speed of a device with layers."""

    device: str
    """name in llama-server's log"""
    host: str
    """host of the device"""
    gb_per_s: float
    """gigabytes (1e9 bytes) that it reads per second in generation"""
    prompt_gflops: float
    """gigaflops (1e9 operations per second) that it reaches in prompts"""
    source: Annotated[str, ("table", "assumed")]
    """source of these rates: `table` (found by name and architecture) or `assumed` (for devices of its kind)"""
    ms_per_token: float
    """milliseconds that it takes to compute its share of a token"""


class SingleHostEstimate(NamedTuple):
    """Host that would run the model fastest alone; the host with the most memory if no host can hold the model."""

    host: str
    """name of the host"""
    fits: bool
    """whether its devices and its processor can hold the model"""
    gpu_layers: Optional[int]
    """`llama_server_gpu_layers` that it would need; null if all layers and the output fit on its devices, or it has no devices"""
    generation_tokens_per_s: Optional[float]
    """predicted tokens per second of generation; null if the model does not fit or generates no text"""
    prompt_tokens_per_s: Optional[float]
    """predicted tokens per second of a prompt with 512 tokens; null if the model does not fit"""
    generation_range: Optional[SpeedRange]
    """predicted range of generation"""
    prompt_range: Optional[SpeedRange]
    """predicted range of prompts"""
    faster: bool
    """whether it is predicted to be faster than the plan for all users together, by more than the uncertainty"""
    override_tensor: Absent[str] = None
    """entry of `llama_server_override_tensor` that it would need, if its processor has to hold experts; missing otherwise"""


class LinkEstimate(NamedTuple):
    """The link to a worker with layers, and the time that the worker takes in addition to computing."""

    host: str
    """host of the worker"""
    endpoint: host_types.Endpoint
    """endpoint of the worker"""
    kind: Annotated[
        str, ("loopback", "ethernet", "infiniband", "thunderbolt", "tunnel", "usb4", "wireguard", "wireless")
    ]
    """kind of the link"""
    one_way_ms: float
    """half of the round-trip time in milliseconds"""
    gbit_per_s: float
    """Gbit/s: measured, declared in `llama_hardware`, or assumed for links of this kind"""
    measured: bool
    """whether the round-trip time was measured; otherwise it is assumed for links of this kind"""
    ms_per_token: float
    """milliseconds per token that the worker takes in addition to computing"""


class ContextSpeed(NamedTuple):
    """Speed of a request whose context is full."""

    context: int
    """number of tokens in the context"""
    generation_tokens_per_s: float
    """predicted tokens per second of generation"""
    prompt_tokens_per_s: float
    """predicted tokens per second for the next 512 tokens of a prompt"""


class UsersEstimate(NamedTuple):
    """Total speed for users who send requests at the same time."""

    users: int
    """number of users: `llama_users`"""
    at_once: int
    """number of requests that are processed at the same time, at most `llama_server_parallel` on each server; other requests wait"""
    generation_tokens_per_s: Optional[float]
    """predicted tokens per second of generation, after the planned prompts if `at_once` is more than 1; null if the model generates no text"""
    generation_range: Optional[SpeedRange]
    """predicted range of generation"""
    prompt_tokens_per_s: float
    """predicted tokens per second of prompts with 512 tokens"""
    prompt_range: SpeedRange
    """predicted range of prompts"""


class ShapeEstimate(NamedTuple):
    """A way in which the cluster could serve the model."""

    kind: Annotated[str, ("host", "replicas", "split")]
    """`host`: one of `hosts` alone; `replicas`: a server on each of them; `split`: the model split over all of them"""
    hosts: tuple[str, ...]
    """names of the hosts; with `host`, hosts that are equivalent"""
    fits: bool
    """whether these hosts can hold the model in this way"""
    chosen: bool
    """whether the plan has this shape"""
    free_mib: int
    """free memory of the devices with layers; with several servers, the minimum; negative if memory is missing"""
    generation_tokens_per_s: Optional[float]
    """predicted tokens per second of generation for one user with an empty context; null if the model does not fit or generates no text"""
    generation_range: Optional[SpeedRange]
    """predicted range of generation"""
    users: Optional[UsersEstimate]
    """speed for all users together; null if the model does not fit"""
    prompt_s: Optional[float]
    """predicted seconds for a prompt of a quarter of the context; null if the model does not fit"""
    settings: tuple[str, ...]
    """changes to the inventory that select this shape, each as an instruction"""


class PromptEstimate(NamedTuple):
    """Speed of a long prompt, and the batches in which it is computed."""

    tokens: int
    """number of tokens: a quarter of the context"""
    tokens_per_s: float
    """predicted tokens per second"""
    speed_range: SpeedRange
    """predicted range"""
    batch: int
    """number of tokens that llama-server processes at a time"""
    micro_batch: int
    """number of these tokens that a device computes at once"""
    pipelined: bool
    """whether llama.cpp's pipeline is enabled; workers compute different micro-batches at the same time even without a pipeline"""


class Correction(NamedTuple):
    """Last measurement of the same model on the same devices. Its factor is already included in the generation speeds of this estimate."""

    factor: float
    """measured tokens per second of generation, divided by the tokens per second that were predicted without a correction"""
    date: str
    """date of the measurement"""
    model: str
    """model that was measured"""
    release: str
    """release that was measured"""


class Estimate(NamedTuple):
    """Predicted speed of the plan. If the model does not fit, speeds are null."""

    generation_tokens_per_s: Optional[float]
    """predicted tokens per second of generation for one user with an empty context; null if the model generates no text"""
    prompt_tokens_per_s: Optional[float]
    """predicted tokens per second of a prompt with 512 tokens; less certain than the speed of generation"""
    generation_range: Optional[SpeedRange]
    """predicted range of generation"""
    prompt_range: Optional[SpeedRange]
    """predicted range of prompts"""
    load_s: Optional[float]
    """predicted seconds until all weights are on their devices, if no worker has cached them"""
    limited_by: Optional[str]
    """what takes the largest share of a token's time, such as `memory of HOST`, `steps of the graph on HOST` or `link to HOST`"""
    prompt_limited_by: Optional[str]
    """what takes the largest share of a prompt's time, such as `memory of HOST`, `computing on HOST` or `link to HOST`"""
    load_limited_by: Optional[str]
    """what takes the largest share of the loading time, such as `disk of HOST` or `link to HOST`"""
    rates: Optional[Annotated[str, ("table", "assumed")]]
    """`assumed` if the rates of a device with layers are assumed, otherwise `table`; null if the model does not fit"""
    devices: tuple[DeviceEstimate, ...]
    """speeds of the devices with layers"""
    best_single_host: SingleHostEstimate
    """host that would run the model fastest alone; the host with the most memory if no host can hold the model"""
    network_ms_per_token: float
    """milliseconds per token that the workers take in addition to computing: the sum of `links[].ms_per_token`"""
    links: tuple[LinkEstimate, ...]
    """link to each worker with layers"""
    at_context: tuple[ContextSpeed, ...] = ()
    """speeds at the end of a request's context; empty if the model does not fit or generates no text"""
    prompt: Optional[PromptEstimate] = None
    """speed of a prompt of a quarter of the context; null if the model does not fit"""
    users: Optional[UsersEstimate] = None
    """speed for all users together; null if the model does not fit"""
    shapes: tuple[ShapeEstimate, ...] = ()
    """ways in which the cluster could serve the model; empty if it does not fit, and for the known-answer model"""
    correction: Absent[Correction] = None
    """correction by the last measurement; missing if this model was not measured on these devices"""


class ProvenDevice(NamedTuple):
    """A device that a proof tests."""

    id: host_types.PlanId
    """hash of everything that affects the verdict"""
    name: str
    """name of its host, and of its worker or itself"""


class ProofPlan(NamedTuple):
    """A proof: each device and the head's processor compute a small model of some layers before the server starts."""

    layers: tuple[int, ...]
    """numbers of these layers; empty if there is no proof"""
    bytes: int
    """size of the small model's file, which the head stores during the proof"""
    every_kind: bool
    """whether these layers include every kind of layer in the model"""
    experts: bool
    """whether one of these layers has experts, or the model has no experts"""
    context: int
    """number of tokens in the longest prompt and its answer together"""
    seconds: int
    """predicted seconds for which the head's processor computes; if memory allows, before the server stops"""
    outage_s: int = 0
    """predicted seconds for which the devices compute, while the server is stopped"""
    devices: tuple[ProvenDevice, ...] = ()
    """devices that the proof tests, each alone"""
    reason: Absent[str] = None
    """why there is no proof, as the end of a sentence"""

    def coverage_text(self, layers: int) -> str:
        """Return what the proof covers.

        :param layers: number of the model's layers.
        """
        note = "" if self.every_kind else ", not every kind of layer" if self.experts else ", none with experts"
        return f"{len(self.layers)} of {layers} layers{note}"


class ServedModel(NamedTuple):
    """One of several models. Keys that `head` or the plan has too describe the plan in which it is the only model."""

    name: str
    """name by which clients request it"""
    aliases: tuple[str, ...]
    """its other names"""
    model: ModelPlan
    """the model and its files"""
    argv: tuple[str, ...]
    """command line of its own llama-server; the router adds options"""
    context: int
    """number of tokens"""
    context_per_request: int
    """number of tokens for each of the concurrent requests"""
    load_mode: Optional[str]
    """how the model is read, as in `head`"""
    devices: tuple[str, ...]
    """devices of the head, without RPC"""
    cpu: HeadMemory
    """layers that stay in the memory of the head"""
    prompt_cache_mib: int
    """memory of the head for conversations that have lost their slot; 0 if none are cached"""
    checkpoints_mib: int
    """memory of the head for checkpoints, for all slots together"""
    placement: tuple[DevicePlacement, ...]
    """share of each device while this model is loaded"""
    auxiliary_models: tuple[AuxiliaryModelPlan, ...]
    """its projector and draft model, if their sizes are known"""
    auxiliary_uncounted: tuple[UncountedModel, ...]
    """auxiliary models whose size is unknown"""
    estimate: Estimate
    """predicted speed; `load_s` is the time to change to this model"""
    idle_seconds: Absent[host_types.Seconds] = None
    """seconds without a request after which it is unloaded"""
    proof: Absent[ProofPlan] = None
    """proof of the devices, as in `head`"""
    reading: Absent[host_types.PlanId] = None
    """key of its record of reading plain text, as in `head`"""


class ConversationsPlan(NamedTuple):
    """Conversations that survive a restart in files on the head's disk."""

    limit_mib: int
    """size limit of all files together"""
    file_mib: int
    """size of the file of a conversation whose context is full"""
    move_s: float
    """predicted seconds to save or restore a full context, over the links and the disk"""
    computing_s: float
    """predicted seconds to compute a full context again"""
    timeout_s: host_types.Seconds
    """seconds without progress after which saving or restoring counts as hung"""


class HeadPlan(NamedTuple):
    """llama-server on the head."""

    host: str
    """name of its host"""
    service: str
    """name of its service"""
    argv: tuple[str, ...]
    """command line"""
    launcher: tuple[str, ...]
    """command line of the launcher, which waits for the workers and then runs `argv`"""
    runtime: str
    """folder of the launcher"""
    environment: Mapping[str, str]
    """environment of the process"""
    url: str
    """URL for clients"""
    own_url: Annotated[str, Text(r"https?://[0-9.]+:[0-9]+")]
    """URL at which the head itself reaches the server"""
    address: str
    """address on which it listens"""
    port: host_types.Port
    """port on which it listens"""
    allowed: tuple[str, ...]
    """networks in `llama_server_allowed`"""
    api_key_file: Optional[host_types.PathText]
    """file with API keys"""
    tls_certificate_file: Optional[host_types.PathText]
    """file with its certificate; null with plain HTTP"""
    tls_key_file: Optional[host_types.PathText]
    """file with the certificate's key"""
    start_timeout: host_types.Seconds
    """seconds in which it must become healthy after its start: `llama_server_start_timeout` or its default"""
    fallback_after: Optional[host_types.Seconds]
    """seconds that a worker must be absent before the head serves without it; null if the head always waits"""
    context: int
    """number of tokens: llama_server_context, or the model's trained context if that is smaller"""
    context_per_request: int
    """number of tokens for each of the concurrent requests"""
    load_mode: Optional[Annotated[str, ("mmap", "none", "dio", "mlock", "mmap+mlock", "auto")]]
    """how the model is read; null for llama-server's default"""
    devices: tuple[str, ...]
    """devices of the head that llama-server drives itself, without workers"""
    backends: tuple[str, ...]
    """backends of these devices"""
    cpu: HeadMemory
    """layers of the model that stay in the memory of the head"""
    prompt_cache_mib: int = 0
    """memory of the head for conversations that lost their slot; 0 if none are cached"""
    checkpoints_mib: int = 0
    """memory of the head for checkpoints of windows and states, for all slots together"""
    idle_seconds: Absent[host_types.Seconds] = None
    """seconds without a request after which it unloads its model; missing if it never unloads the model"""
    conversations: Absent[ConversationsPlan] = None
    """conversations on its disk; missing if they do not survive a restart"""
    page_port: Absent[host_types.Port] = None
    """port of the status page, `llama_server_page_port`; missing without a page"""
    proof: Absent[ProofPlan] = None
    """how the run proves the devices; missing for the known-answer model, for a model that generates no text, and without devices"""
    reading: Absent[host_types.PlanId] = None
    """key under which the head records how well the model reads plain text; missing if the model generates no text"""
    models: Absent[tuple[ServedModel, ...]] = None
    """models of `llama_models`; missing with a single model. With several models, `argv` is the router's, and other keys describe the first model"""


class AdvisoryPlan(NamedTuple):
    """A known problem that affects the plan."""

    id: Annotated[str, Text("[a-z0-9-]+")]
    """ID for `llama_accept_advisories`"""
    severity: Annotated[str, ("error", "warning")]
    """severity; the plan is refused if an error is not accepted"""
    host: Optional[str]
    """affected host; null if the advisory concerns the cluster or several hosts"""
    hosts: tuple[str, ...]
    """all affected hosts; empty if the advisory concerns the cluster"""
    message: str
    """effect of the problem, and affected hosts"""
    remedy: str
    """remedies: variables to set or actions to take"""
    reference: str
    """issue or page that describes the problem"""
    accepted: bool
    """whether the operator accepts it"""


class Plan(NamedTuple):
    """The whole intended state of the cluster."""

    schema: Annotated[int, Number(1, 1)]
    """version of the format, 1; keys may be added to it, but are never renamed"""
    cluster: str
    """name of the group"""
    refused: bool
    """whether the plan must not be applied"""
    reasons: tuple[str, ...]
    """reasons for the refusal: a sentence each, with variable, value and remedy"""
    fits: bool
    """whether the model fits into the memory of the devices and the head"""
    release: ReleasePlan
    """release of the head's llama-server"""
    releases: Mapping[str, ReleasePlan]
    """id → release, for all releases of which hosts have builds"""
    model: ModelPlan
    """model that is served; the first of several models"""
    hosts: Mapping[str, host_types.HostPlan]
    """host → its part of the plan"""
    head: HeadPlan
    """llama-server on the head"""
    external_workers: tuple[ExternalWorkerPlan, ...]
    """workers that others run, which the collection never changes"""
    placement: tuple[DevicePlacement, ...]
    """share of each device, in llama-server's order"""
    auxiliary_models: tuple[AuxiliaryModelPlan, ...]
    """projector and draft model with their devices, if their sizes are known"""
    auxiliary_uncounted: tuple[UncountedModel, ...]
    """auxiliary models whose size is unknown"""
    links: tuple[str, ...]
    """names of the hosts whose links to the head can be measured"""
    fallbacks: tuple[FallbackPlan, ...]
    """placements for the absence of a used worker, or of a host with several, if the rest can serve; only used if `llama_server_fallback` is true"""
    no_fallback: tuple[NoFallback, ...]
    """used workers, and hosts with several of them, in whose absence the head cannot serve"""
    estimate: Estimate
    """predicted speed, from the rates of devices and links"""
    advisories: tuple[AdvisoryPlan, ...]
    """known problems that affect the plan"""
    id: Absent[host_types.PlanId] = None
    """hash under which hosts keep their parts of the plan; missing in a refused plan"""

    @property
    def head_host(self) -> host_types.HostPlan:
        return self.hosts[self.head.host]

    @property
    def workers(self) -> tuple[host_types.WorkerPlan, ...]:
        """Return the workers of all hosts."""
        return tuple(worker for host in self.hosts.values() for worker in host.workers)

    def per_model(self) -> "tuple[Plan, ...]":
        """Return the plan of each model as if it were the only model; this plan with a single model."""
        return tuple(self._plan_of(model) for model in self.head.models or ()) or (self,)

    def _plan_of(self, model: ServedModel) -> "Plan":
        fields = model._asdict()
        head_fields = {name: fields[name] for name in HeadPlan._fields if name in fields}
        plan_fields = {name: fields[name] for name in Plan._fields if name in fields}
        return self._replace(**plan_fields, head=self.head._replace(**head_fields, models=None))


class Refused(NamedTuple):
    """Reasons why there is no plan, instead of a plan."""

    schema: Annotated[int, Number(1, 1)]
    """1"""
    cluster: str
    """name of the group"""
    refused: Annotated[bool, (True,)]
    """true: there is no plan to apply"""
    fits: Annotated[bool, (False,)]
    """false: no placement was found"""
    reasons: tuple[str, ...]
    """a sentence for each reason, with variable, value and remedy"""
