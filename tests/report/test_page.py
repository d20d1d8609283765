import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.advice import advise
from shoal.report.page.figures import MOST_POINTS, split_figure, thin
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from shoal.report.verdict import headline
from shoal.spec.plan import Mesh, Plan

MakeRun = Callable[..., RunFolder]

HOSTILE = "a\"b'c </script><script>alert(1)</script> <img src=x onerror=alert(1)> & \u2028 $verdict ${x} üñ鯨"


class Reader(HTMLParser):
    """Collects what a browser would see: the tags, the text outside scripts, the scripts, the attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.titles: list[str] = []
        self.unclosed: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in ("meta", "br", "img"):
            self.unclosed.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.unclosed and self.unclosed[-1] == "script":
            self.scripts[-1] += data
        elif self.unclosed and self.unclosed[-1] != "style":
            self.words.append(data)
            if self.unclosed[-1] == "h2":
                self.titles.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> Any:
        return json.loads(self.scripts[0])


def read_page(run: RunFolder) -> Reader:
    return Reader(write_page(run).read_text())


def test_the_page_is_the_runs_report_html_and_every_tag_in_it_is_closed(run: RunFolder) -> None:
    assert write_page(run) == run.report_html
    assert read_page(run).unclosed == []


def test_the_page_says_the_verdict_before_anything_else(run: RunFolder) -> None:
    words = read_page(run).text
    summary = summarize(run)
    verdict = advise(summary)[0].sentence
    assert "worker 0" in verdict  # which is the slow one
    after_title = words.split(verdict, 1)[1]
    assert after_title.strip().startswith(f"gpt-1 done {verdict} {headline(summary)}")


def test_a_run_that_needs_no_advice_is_told_what_it_did(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, workers=1, steps=1)
    words = read_page(run).text
    assert advise(summarize(run)) == []
    assert "What to change next" not in words
    assert "Trained 1 step on 1 worker" in words


SECTIONS = (
    "What to change next",
    "Loss",
    "Where the time of a step goes",
    "One step of each worker",
    "Memory over a step",
    "Communication",
    "Predicted and measured",
    "Stragglers",
    "Each worker",
    "Faults and recoveries",
    "Checkpoints",
    "Data and storage",
    "Evaluations",
    "The plan and why",
    "Circumstances",
)


def test_a_rich_run_has_every_section_in_order_and_a_link_to_each(rich_run: RunFolder) -> None:
    reader = read_page(rich_run)
    assert tuple(reader.titles) == SECTIONS
    ids = [value for name, value in reader.attributes if name == "id"]
    links = [value for name, value in reader.attributes if name == "href"]
    assert len(links) == len(SECTIONS)
    assert all(link is not None and link.removeprefix("#") in ids for link in links)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "fact",
    [
        "shoal train train.py",
        "tide-3",
        "torch 2.11.0",
        "accuracy",
        "Worker 1 was lost; 1 goes on.",
        "noticed 1 s, agreed 250 ms, rebuilt 500 ms",
        "Worker 1 has been silent for 30 s.",
        "2 events, 2.5 s of recovery, 3 steps lost.",
        "sockets of the host all-reduce ring 2 5.24 MB 40 ms 131 MB/s",
        "In step 6 worker 1 held the most: 55 MB, 50 ms into it (forward); 50 MB were predicted.",
        "Gradients are summed by ring, in buckets of 4.19 MB: 2 workers on processors of one host.",
        "Shares from step 8 on: 62%, 38%, by the measured speeds, predicted to bring 1.20x.",
        "4.19 MB sockets of the host all-reduce ring 24 4.21 ms 30 ms 140 MB/s",
        "bytes a worker sends inside its node, a step - 5.24 MB -",
        "0 20 ms 50 ms 2 3 batches 40 40 kB/s 160 samples/s ext4",
        "1 10 MB 200 ms 500 ms 20 MB/s",
        "Step 6 took 100 ms; worker 0 was the last to end. Traced because: asked.",
        "traces/rank-1-step-9.json",
        "Worker 0 was the slowest: 1.20 of the median.",
    ],
)
def test_a_rich_runs_page_says(rich_run: RunFolder, fact: str) -> None:
    assert fact in read_page(rich_run).text


def test_the_page_says_why_the_plan_is_this_one(run: RunFolder) -> None:
    assert "The plan does not say why it is this one." in read_page(run).text
    why = ("The fastest of 7 plans that were looked at.", "replicate=8 does not fit: 90 GB needed, 85 GB there.")
    write_toml(run.plan_toml, Plan(mesh=Mesh(replicate=2), why=why))
    assert f"Why {why[0]} {why[1]}" in read_page(run).text


def test_a_run_without_the_later_events_leaves_their_sections_out(run: RunFolder) -> None:
    reader = read_page(run)
    assert "Communication" not in reader.titles
    assert "Memory over a step" not in reader.titles
    assert "No step was traced" in reader.text
    assert "What is missing" not in reader.text


def test_the_page_needs_no_network(run: RunFolder) -> None:
    reader = read_page(run)
    assert not {"link", "iframe", "img"} & set(reader.tags)
    assert "src" not in {name for name, _ in reader.attributes}
    assert all(str(value).startswith("#") for name, value in reader.attributes if name == "href")
    assert ("content", "width=device-width, initial-scale=1") in reader.attributes
    assert "plotly.js" in reader.scripts[1][:200]


def test_each_plot_has_a_text_alternative(run: RunFolder) -> None:
    reader = read_page(run)
    words = "Loss over steps. The loss was 4 at step 1 and 0.3333 at step 12; the lowest was 0.3333, at step 12."
    assert ("aria-label", words) in reader.attributes
    assert reader.attributes.count(("role", "img")) == len(reader.figures) == 4


def test_the_plots_hold_the_losses_the_evaluations_and_the_mean_split(run: RunFolder) -> None:
    figures = read_page(run).figures
    training, evaluation = figures["loss"]["data"]
    assert training["x"] == list(range(1, 13))
    assert training["y"] == [4 / step for step in range(1, 13)]
    assert (evaluation["x"], evaluation["y"]) == ([6, 12], [5 / 6, 5 / 12])
    split = {trace["name"]: trace["y"][5] for trace in figures["split"]["data"]}
    assert split == pytest.approx({"data": 20, "compute": 55, "communication": 10, "waiting": 15})


def test_hostile_text_is_shown_and_never_obeyed(tmp_path: Path, make_run: MakeRun) -> None:
    name = HOSTILE.replace("/", "|")
    run = make_run(tmp_path, name=name, status="failed", message=HOSTILE, unit=HOSTILE, command=HOSTILE, metric=HOSTILE)
    reader = read_page(run)
    assert "img" not in reader.tags
    assert reader.tags.count("script") == 3
    assert not any(attribute.startswith("on") for attribute, _ in reader.attributes)
    # U+2028 is a line break to a terminal and to some scripts: it is shown as a question mark.
    assert reader.text.count(HOSTILE.replace("\u2028", "?")) >= 4
    assert name.replace("\u2028", "?") in reader.text


def test_a_hostile_status_is_no_class_name(run: RunFolder) -> None:
    run.write_result('"><b>')
    assert ("class", "status unknown") in read_page(run).attributes


def test_what_is_missing_stands_on_the_page(run: RunFolder) -> None:
    run.events_of(1).unlink()
    assert "No log of worker 1" in read_page(run).text


def test_a_run_without_any_step_has_a_page_with_its_error(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, steps=0, status="failed", message="worker 1: no such file")
    reader = read_page(run)
    assert "Failed before the first step on 2 workers." in reader.text
    assert "worker 1: no such file" in reader.text
    assert reader.figures == {}


def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    assert "What is missing" in read_page(RunFolder(tmp_path)).text


def test_without_plotly_the_page_says_so_and_keeps_its_words(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    words = read_page(run).text
    assert "The plots are left out" in words
    assert "The loss was 4 at step 1" in words


def test_a_long_run_is_drawn_with_few_points_and_keeps_its_spikes(tmp_path: Path, make_run: MakeRun) -> None:
    losses = [1.0] * 5000
    losses[1234], losses[4321] = 50.0, -50.0
    drawn = thin(tuple(losses))
    assert len(drawn) <= MOST_POINTS + 2
    assert {0, 1234, 4321, 4999} <= set(drawn)
    figure = split_figure(summarize(make_run(tmp_path, steps=2500, workers=1)))
    assert {len(trace["x"]) for trace in figure["data"]} == {MOST_POINTS}


def test_a_long_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    assert len(thin((None,) * 5000)) <= MOST_POINTS + 2
