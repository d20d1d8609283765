"""How long a trace takes, and how much memory: Llama 70B from its config, in a process of its own.

python benchmarks/trace_llama.py
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "dtype": "bfloat16",
}


def trace_here(path: Path) -> None:
    """Trace the config at `path` and print the figures."""
    from shoal.profile.config import job_from_config
    from shoal.profile.trace import trace

    job = job_from_config(path, sequence=2048, batch_size=1)
    begin = time.perf_counter()
    profile = trace(job, micro_batch=1, precision="fp32", gpu=True)
    seconds = time.perf_counter() - begin
    peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(
        f"Llama 70B ({profile.parameters / 1e9:.1f} G parameters): {seconds:.1f} s to trace, {peak_gb:.2f} GB in all."
    )


def main() -> None:
    """Trace in a fresh process, and print also how long that took with all imports."""
    if len(sys.argv) > 1:
        trace_here(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_70B))
        begin = time.perf_counter()
        subprocess.run([sys.executable, __file__, str(path)], check=True, timeout=300)
        print(f"With a fresh process, torch and transformers: {time.perf_counter() - begin:.1f} s.")


if __name__ == "__main__":
    main()
