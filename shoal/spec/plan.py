"""Plan: how to train, and what that is predicted to cost."""

import math
import os
from dataclasses import dataclass, field, fields

from shoal.core.errors import PlanError, did_you_mean
from shoal.spec.engine import check_engine
from shoal.spec.on_loss import OnLoss
from shoal.spec.parts import parts
from shoal.spec.sync import Sync

PRECISIONS = ("fp32", "bf16")
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
STAGING = ("auto", "off", "memory", "local", "scratch", "project")
"""Words for where packs are staged; anything else is a folder."""
MOST_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many workers stand along each axis. Neighbours along `tensor` are next to each other, then `shard`."""

    pipeline: int = 1
    """Stages that the layers are cut into; a micro-batch goes through one after the other."""
    replicate: int = 1
    """Copies of the model, each on its own part of every global batch."""
    shard: int = 1
    """Workers over which each copy's training state is spread (ZeRO); each has its own part of the batch, too."""
    tensor: int = 1
    """Workers that compute each layer together, on the same samples."""

    def __post_init__(self) -> None:
        for axis in fields(self):
            if getattr(self, axis.name) < 1:
                raise PlanError(f"mesh.{axis.name}={getattr(self, axis.name)}: a mesh has at least 1 worker.")

    @property
    def data(self) -> int:
        """How many parts a global batch is cut into."""
        return self.replicate * self.shard

    @property
    def workers(self) -> int:
        """How many workers stand in the mesh."""
        return self.pipeline * self.data * self.tensor

    @property
    def keeps_whole(self) -> bool:
        """Whether every worker holds the whole model."""
        return self.workers == self.replicate


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When checkpoints are written, and which of them stay."""

    every_steps: int = 0
    """Write one after so many steps, and one at the end. 0: by `Plan.checkpoint_s`, or only when asked for."""
    keep: int = 2
    """How many of the latest stay."""
    best: str = ""
    """A metric of the job's evaluation (without eval_data: "loss", of the step): the checkpoint with the best stays."""
    best_is: str = "lowest"
    """Which of its values is the best: lowest or highest."""
    local: str = ""
    """A folder on storage of the node, to write them to first; they are copied to the run folder while training goes
    on. $TMPDIR, ~ and the like stand for what they are on each node. Empty: to the run folder at once."""
    on_error: str = "continue"
    """What happens where one cannot be written, as on a full disk: continue, and say so; or stop."""
    resume: bool = False
    """Go on with the run of the same name, if there is one, from the last of its checkpoints."""

    def __post_init__(self) -> None:
        if self.every_steps < 0 or self.keep < 1:
            raise PlanError(
                f"checkpoint.every_steps={self.every_steps}, checkpoint.keep={self.keep}: every_steps is at least 0 "
                "(0: not by steps), keep at least 1."
            )
        for name, known in (("best_is", ["lowest", "highest"]), ("on_error", ["continue", "stop"])):
            value = getattr(self, name)
            if value not in known:
                raise PlanError(f"checkpoint.{name}={value!r} is none.{did_you_mean(value, known)}")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a global batch is cut up."""

    micro_batch: int | None = None
    """The most samples in one forward; a larger part is accumulated. None: the whole part at once."""
    shares: tuple[float, ...] = ()
    """The fraction of each global batch that each replica takes. Empty: equal shares."""
    live: bool = True
    """Whether the shares follow what the workers are measured to take for a sample: a slow one gets fewer. With
    all-reduce, and without a pipeline."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise PlanError(f"micro_batch={self.micro_batch}: a micro-batch has at least 1 sample.")
        if any(not share > 0 for share in self.shares):
            raise PlanError(f"shares {_listed(self.shares)}: each share must be more than 0.")
        if self.shares and abs(math.fsum(self.shares) - 1) > 1e-6:
            raise PlanError(f"shares {_listed(self.shares)} sum to {math.fsum(self.shares):.6g}. They must sum to 1.")


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a worker loads its samples."""

    threads: int = 0
    """How many threads load batches. 0: of a pack, as many as the worker computes with, up to 8; of another dataset 1,
    for nobody knows whether it bears several."""
    workers: int = 0
    """How many processes load batches instead: for datasets and transforms in Python, of which one thread runs at a
    time. 0: threads load."""

    def __post_init__(self) -> None:
        if not 0 <= self.workers <= MOST_THREADS:
            raise PlanError(f"loading.workers={self.workers}: from 1 to {MOST_THREADS} processes load; 0: threads do.")
        if self.workers and self.threads:
            raise PlanError(
                f"loading.workers={self.workers} beside loading.threads={self.threads}: processes load, or threads do. "
                "Give one of the two."
            )
        if not 0 <= self.threads <= MOST_THREADS:
            raise PlanError(
                f"loading.threads={self.threads}: from 1 to {MOST_THREADS} threads load; 0: as many as fit."
            )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a plan is predicted to cost; the run measures the same under the same names."""

    step_s: float
    """Seconds of one step, without data loading."""
    comm_s: float
    """Seconds of a step in which the slowest worker waits for communication."""
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    """The most memory each worker holds for the model, its training state and its activations."""
    bubble_s: float = 0.0
    """Seconds of a step in which a pipeline stage waits for the others."""
    inside_bytes: int = 0
    """Bytes that one worker sends in a step to workers of its own node."""
    between_bytes: int = 0
    """Bytes that one worker sends in a step to other nodes."""
    fixed_s: float = 0.0
    """Seconds of forward and backward of a micro-batch, however few samples it has."""
    sample_s: float = 0.0
    """Seconds that each of its samples adds."""
    stall_s: float = 0.0
    """Seconds that a checkpoint holds training up."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train. A plan that exists is consistent in itself; `training.prepare` holds it against the job."""

    mesh: Mesh = field(default_factory=Mesh)
    batch: Batch = field(default_factory=Batch)
    engine: str = "torch"
    """What runs it: torch's own engines, or deepspeed, which knows ZeRO alone."""
    offload: bool = False
    """With engine="deepspeed": keep the optimizer's state, and do its step, in the host's memory (ZeRO-Offload)."""
    precision: str = "fp32"
    """fp32, or bf16: parameters in float32, matrix products in bfloat16 (autocast)."""
    zero: int = 0
    """What the `shard` axis spreads: 1 the optimizer's state, 2 also the gradients, 3 also the parameters."""
    recompute: str = "none"
    """What the backward computes again instead of keeping it: selective (all but products), full (each layer)."""
    schedule: str = "1f1b"
    """In which order a pipeline's stages take their micro-batches."""
    chunks: int = 1
    """How many pieces of the model each pipeline stage holds; more than 1 with the interleaved schedule."""
    stages: tuple[str, ...] = ()
    """The modules with which the second, third, ... piece of a pipeline begins. Empty: pieces of equal cost."""
    sequence: bool = False
    """With mesh.tensor above 1: divide what lies between the products as well, by tokens."""
    compile: bool = False
    """Whether torch.compile makes the forward and backward pass faster, after a minute or so of compiling."""
    sync: Sync = field(default_factory=Sync)
    loading: Loading = field(default_factory=Loading)
    staging: str = "auto"
    """Where a job's packs are copied to when it starts: "off" leaves them where they lie; a folder, or a kind of
    storage (memory, local, scratch, project); auto: to what is measurably faster, if they lie on shared storage."""
    checkpoint_s: float | None = None
    """Seconds between checkpoints, where `checkpoint.every_steps` does not say it in steps."""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    on_loss: OnLoss = field(default_factory=OnLoss)
    weights: str = ""
    """Where the model begins: a folder or file of safetensors, as `shoal export` and Hugging Face write them."""
    timeout_s: float = 600.0
    """How long a worker waits for the others in one collective before it gives up."""
    predicted: Predicted | None = None
    why: tuple[str, ...] = field(default=(), compare=False)
    """Why it is this one, in sentences of whoever made it; for the report. Two plans that do the same are equal."""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision!r} is none.{did_you_mean(self.precision, list(PRECISIONS))}")
        if not self.timeout_s > 0:
            raise PlanError(f"timeout_s={self.timeout_s:g}: a timeout must be more than 0.")
        if self.staging not in STAGING and os.sep not in self.staging:
            hint = did_you_mean(self.staging, list(STAGING))
            raise PlanError(f"staging={self.staging!r} is none.{hint} A folder has a slash: './{self.staging}'.")
        if self.loading.workers and self.sync.asynchronous:
            raise PlanError(
                f"loading.workers={self.loading.workers} with sync.asynchronous: which part comes next is only known "
                "when it is given out, and a thread loads it. Leave loading.workers out."
            )
        self._check_mesh()
        check_engine(self)
        shares, count = self.batch.shares, self.mesh.data
        if shares and len(shares) != count:
            who = "worker" if count == self.workers else "replica"
            raise PlanError(f"{len(shares)} shares for {count} {who}s. Give one share to each {who}.")

    def _check_mesh(self) -> None:
        if self.zero not in range(4):
            raise PlanError(f"zero={self.zero}: ZeRO has the stages 0 to 3.")
        may_be_alone = self.engine == "deepspeed" and self.mesh.shard == 1  # one GPU and the host's memory
        if (self.zero > 0) != (self.mesh.shard > 1) and not may_be_alone:
            raise PlanError(
                f"zero={self.zero} with mesh.shard={self.mesh.shard}. "
                "A stage of 1 to 3 needs mesh.shard of 2 or more, and mesh.shard above 1 needs a stage."
            )
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute={self.recompute!r} is none.{did_you_mean(self.recompute, list(RECOMPUTE))}")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule={self.schedule!r} is none.{did_you_mean(self.schedule, list(SCHEDULES))}")
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise PlanError(
                f"chunks={self.chunks} with schedule={self.schedule!r}. "
                "Several pieces a stage (chunks of 2 or more) and schedule='interleaved' go together."
            )
        if self.schedule != "1f1b" and self.mesh.pipeline == 1:
            raise PlanError(f"schedule={self.schedule!r} needs mesh.pipeline of 2 or more.")
        if self.stages and len(self.stages) != self.pieces - 1:
            raise PlanError(
                f"stages names {len(self.stages)} modules for {self.pieces} pieces. Name {self.pieces - 1}: the module "
                "with which the second piece begins, the third, and so on."
            )
        if self.checkpoint_s is not None and not self.checkpoint_s > 0:
            raise PlanError(f"checkpoint_s={self.checkpoint_s:g}: the time between checkpoints must be more than 0.")

    @property
    def workers(self) -> int:
        """How many processes the plan runs."""
        return self.mesh.workers

    @property
    def pieces(self) -> int:
        """How many pieces a pipeline cuts the model into; piece k lies on stage k % mesh.pipeline."""
        return self.mesh.pipeline * self.chunks

    @property
    def shares(self) -> tuple[float, ...]:
        """Each replica's fraction of a global batch, equal unless the plan says otherwise."""
        return self.batch.shares or (1 / self.mesh.data,) * self.mesh.data

    @property
    def goes_on(self) -> bool:
        """Whether the workers go on when they lose one."""
        return self.on_loss.go_on and self.engine == "torch"

    def at_once(self, batch_size: int) -> int:
        """Return the samples of the largest micro-batch, where the global batch has `batch_size`."""
        largest = max(parts(batch_size, self.shares))
        return max(1, min(largest, self.batch.micro_batch or largest))


def _listed(shares: tuple[float, ...]) -> str:
    return ",".join(f"{share:g}" for share in shares)
