"""The models and meshes of docs/parallel.md: each model is trained under each mesh, and compared with one process."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.jobfile import load_job

WIDTH, HEADS, LENGTH, VOCABULARY = 32, 8, 16, 64
BATCH = 16
_MICRO_BATCH = 2


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random samples, always the same: `make(generator)` returns one."""

    def __init__(self, make: Callable[[torch.Generator], dict[str, Tensor]], count: int = 2 * BATCH + 3) -> None:
        self._make, self._count = make, count  # an epoch's last batch is partial

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._make(torch.Generator().manual_seed(index))


def _tokens(generator: torch.Generator) -> dict[str, Tensor]:
    window = torch.randint(VOCABULARY, (LENGTH + 1,), generator=generator)
    return {"x": window[:-1], "y": window[1:]}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    image = torch.randn(3, 16, 16, generator=generator)
    return {"x": image, "y": torch.randint(10, (), generator=generator)}


def _job(model: Callable[[], nn.Module], make: Any, *, inputs: Any, output: Any, steps: int, **fields: Any) -> Job:
    return Job(
        model=model,
        inputs=inputs,
        loss=lambda out, batch: F.cross_entropy(output(out).flatten(0, -2), batch["y"].flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        data=Samples(make),
        batch_size=BATCH,
        steps=steps,
        clip_norm=1.0,
        **fields,
    )


def gpt(steps: int = 20, layers: int = 4) -> Job:
    """The GPT of examples/gpt.py: query, key and value in one product."""
    source: Any = load_job(Path(__file__).parents[1] / "examples" / "gpt.py").model
    model = lambda: source(layers=layers, width=WIDTH, heads=HEADS)  # noqa: E731
    return _job(model, _tokens, inputs=lambda batch: batch["x"], output=lambda out: out, steps=steps)


def gpt2(steps: int = 20, layers: int = 4, dropout: float = 0.1) -> Job:
    """Hugging Face's GPT-2: tied embedding and head, Conv1D, and dropout as it comes."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, vocab_size=VOCABULARY, use_cache=False,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = lambda: transformers.GPT2LMHeadModel(config).train()  # noqa: E731
    return _job(model, _tokens, inputs=lambda b: {"input_ids": b["x"]}, output=lambda out: out.logits, steps=steps)


def llama(steps: int = 20, layers: int = 4) -> Job:
    """Hugging Face's Llama: rotary positions, twice as many heads for queries as for keys and values."""
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
        intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    model = lambda: transformers.LlamaForCausalLM(config).train()  # noqa: E731
    return _job(model, _tokens, inputs=lambda b: {"input_ids": b["x"]}, output=lambda out: out.logits, steps=steps)


class Encoder(nn.Module):
    """A block of a vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return what comes out of the block for `x`."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (each.reshape(batch, length, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Written by hand, with a class token and positions that are parameters of the model itself."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Encoder() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])  # type: ignore[no-any-return]


def vit(steps: int = 20, layers: int = 4) -> Job:
    """A vision transformer, with dropout."""
    return _job(lambda: VisionTransformer(layers), _image, inputs=lambda b: b["x"], output=lambda out: out, steps=steps)


JOBS: dict[str, Callable[..., Job]] = {"gpt": gpt, "gpt2": gpt2, "llama": llama, "vit": vit}
TENSORS = {"gpt": 8, "gpt2": 8, "llama": 4, "vit": 8}
"""The largest tensor axis that divides the heads of keys and values."""


def plans() -> Iterator[tuple[str, Plan]]:
    """Yield every mesh of 1, 2, 4 and 8 workers with its title; ZeRO stages and schedules take turns over them."""
    number = 0
    for workers in (1, 2, 4, 8):
        for mesh in _meshes(workers):
            zero = 1 + number % 3 if mesh.shard > 1 else 0
            schedule = ("1f1b", "gpipe", "zero-bubble")[number % 3] if mesh.pipeline > 1 else "1f1b"
            micro_batch = _MICRO_BATCH if mesh.pipeline > 1 or (number % 2 and mesh.tensor == 1) else None
            plan = Plan(mesh=mesh, zero=zero, schedule=schedule, batch=Batch(micro_batch=micro_batch))
            yield title_of(plan), plan
            number += 1
    yield from _special()


def _special() -> Iterator[tuple[str, Plan]]:
    """Yield what the meshes alone do not show: interleaved pieces, recomputation, divided tokens, unequal shares."""
    two = Batch(micro_batch=_MICRO_BATCH)
    for plan in (
        Plan(mesh=Mesh(pipeline=2, replicate=2), schedule="interleaved", chunks=2, batch=two),
        Plan(mesh=Mesh(pipeline=2, shard=2), zero=3, recompute="full", batch=two),
        Plan(mesh=Mesh(shard=2, tensor=2), zero=3, recompute="selective", sequence=True),
        Plan(mesh=Mesh(tensor=2), sequence=True, recompute="full"),
        Plan(mesh=Mesh(shard=4), zero=2, batch=Batch(micro_batch=2, shares=(0.4, 0.3, 0.2, 0.1))),
    ):
        yield title_of(plan), plan


def _meshes(workers: int) -> Iterator[Mesh]:
    sizes = [size for size in (1, 2, 4, 8) if workers % size == 0]
    for pipeline in sizes:
        for replicate in sizes:
            for shard in sizes:
                tensor = workers // (pipeline * replicate * shard)
                if tensor and pipeline * replicate * shard * tensor == workers:
                    yield Mesh(pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)


def layers_for(plan: Plan) -> int:
    """Return how many layers a model needs: each stage of a pipeline wants one."""
    return max(4, plan.mesh.pipeline)


def runs_on(plan: Plan, model: str) -> bool:
    """Return whether the mesh divides `model`; tokens are divided where their number can be."""
    return plan.mesh.tensor <= TENSORS[model] and not (plan.sequence and model == "vit")


def title_of(plan: Plan) -> str:
    """Return a plan in a few words."""
    mesh = plan.mesh
    words = [f"{axis.name}={size}" for axis in dataclasses.fields(mesh) if (size := getattr(mesh, axis.name)) > 1]
    words += [f"ZeRO-{plan.zero}"] * (plan.zero > 0) + [plan.schedule] * (mesh.pipeline > 1)
    words += [f"chunks={plan.chunks}"] * (plan.chunks > 1) + [f"recompute {plan.recompute}"] * (
        plan.recompute != "none"
    )
    words += ["sequence"] * plan.sequence + ["unequal shares"] * bool(plan.batch.shares)
    return ", ".join(words) or "one worker"
