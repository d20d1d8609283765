"""DeepSpeed's configuration, which is a pure function of the plan; and when DeepSpeed is imported at all."""

import ast
import sys
from pathlib import Path

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.parallel.deepspeed.config import deepspeed_config
from shoal.parallel.deepspeed.load import load_deepspeed
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync


def test_the_configuration_says_what_the_plan_says() -> None:
    plan = Plan(engine="deepspeed", zero=2, mesh=Mesh(shard=4), sync=Sync(bucket_bytes=4000))
    config = deepspeed_config(plan, micro_batch=3, clip_norm=0.5)
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_clipping"]) == (3, 0.5)
    assert deepspeed_config(plan, micro_batch=1, clip_norm=None)["gradient_clipping"] == 0.0
    assert not {"fp16", "bf16", "optimizer", "scheduler"} & config.keys()  # these stay the job's


def test_offload_keeps_the_optimizer_in_the_hosts_memory() -> None:
    plan = Plan(engine="deepspeed", zero=3, mesh=Mesh(shard=2), offload=True)
    config = deepspeed_config(plan, micro_batch=1, clip_norm=None)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert deepspeed_config(plan, micro_batch=1, clip_norm=None, gpu=True)["zero_optimization"][
        "offload_optimizer"
    ] == {
        "device": "cpu",
        "pin_memory": True,
    }
    assert config["zero_force_ds_cpu_optimizer"] is False  # the job's own, which needs no compiler


def test_an_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[deepspeed\]'"):
        load_deepspeed(torch.device("cpu"))


def test_no_module_imports_deepspeed_before_a_plan_asks_for_it() -> None:
    package = Path(__file__).parents[3] / "shoal"
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "deepspeed" for name in names), path
