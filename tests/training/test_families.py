"""Models as they come: families of transformers and timm, the examples with them, and what of a batch may be."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import families
from benchmarks.families import PLANS, Row, Table
from benchmarks.families_cases import FAMILIES, job
from benchmarks.families_timm import timm_folder
from shoal.core.run_folder import RunFolder
from shoal.profile.trace import trace
from shoal.spec.plan import Plan
from shoal.training.verify import compare_runs
from tests.support.parallel import record
from tests.support.ranks import RankPool

ROOT = Path(__file__).parents[2]
TIMM = timm_folder()
needs_timm = pytest.mark.skipif(TIMM is None, reason="timm is not installed: make setup")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # DeBERTa's own
@pytest.mark.parametrize(
    ("family", "plan"),
    [("bert", "ZeRO-3 over 2"), ("deberta-v2", "tensor=2")],
)
def test_families_train_as_in_one_process(family: str, plan: str, ranks: RankPool, tmp_path: Path) -> None:
    case = "benchmarks.families_cases:job"
    settings: Any = {"name": family, "steps": 4}
    one, other = (record(ranks, case, each, folder=tmp_path, **settings) for each in (Plan(), PLANS[plan]))
    verdict = compare_runs(one, other)
    assert verdict.equal, verdict.first
    assert verdict.left_out < 0.05 * verdict.numbers


def test_the_table_has_a_row_of_cells_that_are_equal_or_refused_as_they_are_to_be(
    ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert families.main(["--only", "falcon", "t5", "--json"], pool=ranks) == 0
    falcon, t5 = json.loads(capsys.readouterr().out)["families"]
    assert [cell["outcome"] for cell in falcon["cells"].values()] == ["equal", "refused", "equal"]
    assert [cell["outcome"] for cell in t5["cells"].values()] == ["equal", "equal", "refused"]
    assert min(falcon["peak_bytes"], t5["peak_bytes"]) > 0


@pytest.mark.parametrize("refused", [{}, {"tensor": "its age"}], ids=["of which nobody knew", "for another reason"])
def test_a_refusal_that_its_family_does_not_name_fails_the_table(
    refused: dict[str, str], ranks: RankPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(FAMILIES, "falcon", dataclasses.replace(FAMILIES["falcon"], refused=refused))
    cell = Table(ranks, tmp_path, 1).cell("falcon", PLANS["tensor=2"], RunFolder(tmp_path))
    assert str(cell) == "REFUSED"
    row = Row(name="", kind="", model="", parameters=1, peak_bytes=1, best="", cells={"tensor=2": cell})
    monkeypatch.setattr(families, "rows", lambda *_, **__: iter([row]))
    assert families.main(["--only", "falcon"], pool=ranks) == 1


@pytest.mark.parametrize("family", ["mixtral", "bart"])
def test_families_that_look_at_numbers_are_traced(family: str) -> None:
    profile = trace(job(family), micro_batch=2, precision="fp32")
    model = FAMILIES[family].build()
    layers = sum(layer.parameters * layer.repeats for layer in profile.layers)
    assert layers == sum(parameter.numel() for parameter in model.parameters())


def test_there_are_more_than_fifteen_families_of_every_kind() -> None:
    assert len(FAMILIES) >= 15
    kinds = {family.kind for family in FAMILIES.values()}
    assert kinds == {"causal LM", "masked LM", "encoder-decoder", "vision"}


def _shoal(*arguments: str, folder: Path, extra: tuple[Path, ...] = ()) -> dict[str, object]:
    paths = os.pathsep.join(map(str, (ROOT, *extra)))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    command = [sys.executable, "-m", "shoal", *arguments, "--json"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_the_example_of_hugging_face_learns(tmp_path: Path) -> None:
    losses = _losses(_shoal("train", str(ROOT / "examples/huggingface.py"), "--steps", "30", folder=tmp_path))
    assert losses[-1] < losses[0] - 0.5


@needs_timm
def test_the_example_of_timm_learns(tmp_path: Path) -> None:
    assert TIMM is not None
    extra = (ROOT / "tests/support/timm_site", TIMM)
    answer = _shoal("train", str(ROOT / "examples/timm_images.py"), folder=tmp_path, extra=extra)
    losses = _losses(answer)
    assert losses[-1] < losses[0] - 0.2


def _losses(answer: dict[str, object]) -> list[float]:
    losses = answer["losses"]
    assert isinstance(losses, list)
    return [float(loss) for loss in losses]
