"""The files that pages take as given: made when a command or a block first names one, in the page's folder.

What takes a while to make is made once, and copied.
"""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.docs.blocks import ROOT
from tests.docs.warm import Playing

_MAKE_S = 120.0

TRAIN = """
import shoal, torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


job = shoal.Job(
    model=lambda: nn.Sequential(nn.Flatten(), *[Block() for _ in range(4)], nn.Linear(64, 10)),
    loss=lambda output, batch: F.cross_entropy(output, batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
    data=torch.utils.data.TensorDataset(torch.rand(320, 8, 8), torch.randint(10, (320,))),
    batch_size=64,
    epochs=2,
)
"""

PREPARE = "from pathlib import Path\n\n\ndef resize(path):\n    return len(Path(path).read_bytes())\n"
SIMULATE = "def run(case):\n    return case**2\n\n\nsimulate = run\n"
TUNE = """
def objective(trial):
    x = trial.suggest_float("x", -2.0, 2.0)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    return (x - 1) ** 2 + (kind == "a")
"""
BIG = """
[[nodes]]
host = "node"
cores = 64
memory_bytes = 1_000_000_000_000
device = "H100"
devices = 8
count = 2

[between]
source = "as the catalog says of ib-ndr"
bytes_per_s = 50e9
latency_s = 10e-6
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 4}

Make = Callable[[Path], None]


class Given:
    """Makes the files, each once in a session, in the folder `store`."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def give(self, name: str, folder: Path) -> None:
        """Put the file or folder `name` there, unless it is there, or is nothing that pages take as given."""
        name = name.rstrip("/")
        there = folder / name
        make = MAKE.get(name)
        if make is None or there.exists():
            return
        kept = self._store / name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            make(self, kept)
        if there == kept:
            return
        there.parent.mkdir(parents=True, exist_ok=True)
        if kept.is_dir():
            shutil.copytree(kept, there, symlinks=True)
        else:
            shutil.copy(kept, there)

    def by_command(self, path: Path, *words: str) -> None:
        """Have `path` made by a command, which finds its own files."""
        for name in ("cluster.toml", *named_by(words)):
            self.give(name, self._store)
        playing = Playing(words, self._store, self._store / "making.txt")
        code = playing.wait(_MAKE_S)
        assert code == 0, f"{words} ended with {code}: {playing.text()}"
        assert path.exists(), f"{words} made no {path}"


def _text(text: str) -> Callable[[Given, Path], None]:
    def make(_: Given, path: Path) -> None:
        path.write_text(text)

    return make


def _command(*words: str) -> Callable[[Given, Path], None]:
    def make(given: Given, path: Path) -> None:
        given.by_command(path, *words)

    return make


def _trained(name: str) -> Callable[[Given, Path], None]:
    """A run of train.py, with checkpoints."""
    return _command("shoal", "train", "train.py", "--name", name, "--checkpoint-every", "5", "--steps", "10")


def _photos(_: Given, path: Path) -> None:
    """80 JPEGs in 2 classes."""
    generator = np.random.default_rng(0)
    for number in range(80):
        file = path / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(_jpeg(generator))


def _jpeg(generator: np.random.Generator) -> bytes:
    from PIL import Image

    pixels = np.kron(generator.integers(0, 255, (8, 10, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "JPEG")
    return held.getvalue()


def _tar(_: Given, path: Path) -> None:
    """100 samples for WebDataset, of which number 77 is cut off."""
    generator = np.random.default_rng(0)
    with tarfile.open(path, "w") as tar:
        for number in range(100):
            image = _jpeg(generator)
            for suffix, data in (("jpg", image[: len(image) // 2] if number == 77 else image), ("cls", b"3")):
                member = tarfile.TarInfo(f"{number:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _reviews(_: Given, path: Path) -> None:
    """20,000 rows of features, a text, and stars."""
    generator = np.random.default_rng(0)
    words = np.array(["a", "good", "bad", "long", "short", "film", "book", "was", "it", "very", "not"])
    texts = [" ".join(row) for row in words[generator.integers(0, len(words), (20_000, 40))]]
    features = (generator.integers(0, 60, (20_000, 64)) / 60).astype(np.float32)
    columns = {
        "features": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), 64),
        "review": pa.array(texts),
        "stars": pa.array(generator.integers(1, 6, 20_000)),
    }
    pq.write_table(pa.table(columns), path)


def _corpus(_: Given, path: Path) -> None:
    path.write_text("".join(f"Document {number} says {'something ' * (number % 50)}.\n" for number in range(2000)))


def _tokens(_: Given, path: Path) -> None:
    np.random.default_rng(0).integers(0, 50256, 100_000).astype(np.uint16).tofile(path)


def _config(**fields: int) -> Callable[[Given, Path], None]:
    return _text(json.dumps({**LLAMA, **fields}))


def _cluster(_: Given, path: Path) -> None:
    """This host, measured once."""
    code = "import pathlib; from shoal.core.toml import write_toml; from shoal.training.host import measured_host; "
    script = path.with_name("measure.py")
    script.write_text(f"{code}write_toml(pathlib.Path({str(path)!r}), measured_host())\n")
    playing = Playing(("python", str(script)), path.parent, path.with_name("measured.txt"))
    assert playing.wait(_MAKE_S) == 0, playing.text()


PACK = ("--workers", "1", "--no-sync")

MAKE: dict[str, Callable[[Given, Path], None]] = {
    "train.py": _text(TRAIN),
    "other.py": _text(TRAIN),
    **{f"examples/{path.name}": _text(path.read_text()) for path in (ROOT / "examples").glob("*.py")},
    "prepare.py": _text(PREPARE),
    "simulate.py": _text(SIMULATE),
    "tune.py": _text(TUNE),
    "sweep.py": _text(TUNE),
    "photos": _photos,
    "imagenet/train": _photos,
    "photos.pack": _command("shoal", "pack", "photos", "photos.pack", *PACK),
    "corpus.txt": _corpus,
    "corpus.pack": _command("shoal", "pack", "corpus.txt", "corpus.pack", "--tokenizer", "bytes", *PACK),
    "train.bin": _tokens,
    "reviews.parquet": _reviews,
    "reviews.pack": _command("shoal", "pack", "reviews.parquet", "reviews.pack", "--storage-speed", "200MB/s", *PACK),
    "web.tar": _tar,
    "config.json": _config(**TINY),
    "llama-7b.json": _config(**LLAMA_7B),
    "llama-70b.json": _config(**LLAMA_70B),
    "cluster.toml": _cluster,
    "big.toml": _text(BIG),
    "plan.toml": _text("zero = 3\n\n[mesh]\nshard = 2\n\n[batch]\nmicro_batch = 16\n"),
    "runs/train-1": _trained("train-1"),
    "runs/gpt-1": _trained("gpt-1"),
    "runs/gpt-2": _trained("gpt-2"),
    "weights": _command("shoal", "export", "runs/train-1", "weights"),
}


def named_by(words: tuple[str, ...]) -> list[str]:
    """Return what a command names that must be there before it, less what it writes."""
    names = list(words[1:])
    if "--out" in names:
        del names[names.index("--out") + 1]
    is_writing = words[1:2] == ("export",) or (words[1:2] == ("pack",) and not {"--check", "--show"} & set(words))
    if is_writing and len(names) > 2:
        del names[2]
    return [part for name in names for part in (name.split(":")[0], name.split("/*")[0])]
