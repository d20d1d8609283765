"use strict";
/* The live page: asks for the run's state once a second, and shows it. All text goes in as text, never as HTML. */
(function () {
  const EVERY_MS = 1000, HIDDEN_MS = 5000, OVER_MS = 5000, LOST_MS = 3000, ANSWER_MS = 10000;
  const MANY = 12;  /* workers: more are shown in fewer words each, those in trouble first */
  const TROUBLE = ["late", "silent", "blamed", "lost", "failed"];
  const byId = (id) => document.getElementById(id);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let latest = null;

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function count(value) {
    const units = ["", " k", " M", " G", " T"];
    let unit = 0;
    while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${Number(value.toPrecision(3))}${units[unit]}`;
  }

  function bytes(value) {
    const text = count(value);
    return text.includes(" ") ? `${text}B` : `${text} B`;
  }

  function seconds(value) {
    if (value < 1) return `${Number((1000 * value).toPrecision(3))} ms`;
    if (value < 60) return `${Number(value.toPrecision(3))} s`;
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    if (value < 3600) return `${Math.floor(value / 60)} min ${two(value % 60)} s`;
    return `${Math.floor(value / 3600)} h ${two((value % 3600) / 60)} min`;
  }

  function whole(value) {
    return Math.max(1, Math.round(value));
  }

  function percent(fraction) {
    return fraction > 0 && fraction < 0.005 ? "under 1%" : `${Math.round(100 * fraction)}%`;
  }

  function fine(fraction) {
    return `${Number((100 * fraction).toPrecision(2))}%`;
  }

  function lossText(state) {
    if (state.is_lost_loss) return "not finite";
    return state.loss === null ? "–" : state.loss.toFixed(4);
  }

  function showHead(state) {
    const done = state.steps ? Math.min(100, 100 * state.step / state.steps) : 0;
    byId("run").textContent = state.run;
    const status = byId("status");
    const word = state.is_over ? state.status : state.step ? "running" : "starting";
    if (status.textContent !== word) status.textContent = word;
    status.className = `status ${["done", "failed", "stopped"].includes(state.status) ? state.status : ""}`;
    byId("progress").setAttribute("aria-valuenow", done.toFixed(0));
    byId("progress").firstElementChild.style.width = `${done}%`;
    const left = state.left_s ? `, ${seconds(whole(state.left_s))} left` : "";
    byId("steps").textContent = `step ${state.step.toLocaleString("en")}` +
      (state.steps ? ` of ${state.steps.toLocaleString("en")}` : "") + left;
    document.title = `${state.run}: ${Math.floor(done)}%, loss ${lossText(state)}`;
    say(state.hang ? `Waiting: ${state.hang}` : state.message ? state.message
      : state.silent_s !== null ? `Nothing has been written for ${seconds(state.silent_s)}.` : "");
  }

  function say(text) {
    const note = byId("note");
    note.hidden = !text;
    if (note.textContent !== text) note.textContent = text;
  }

  function showNumbers(state) {
    const known = state.workers.filter((worker) => worker.peak_bytes !== null);
    const part = (worker) => worker.peak_bytes / (worker.predicted_bytes || 1);
    const fullest = known.sort((a, b) => part(b) - part(a))[0];
    const of = fullest && fullest.predicted_bytes ? ` of ${bytes(fullest.predicted_bytes)} predicted` : "";
    const most = Math.max(0, ...state.workers.map((worker) => worker.predicted_bytes || 0));
    const expected = most ? ` ${bytes(most)} predicted` : "";
    const rows = [
      ["loss", lossText(state)],
      [`${state.unit}/s`, state.units_per_s === null ? "–" : count(state.units_per_s)],
      ["a step takes", state.step_s === null ? "–" : seconds(state.step_s)],
      ["time left", state.left_s ? seconds(whole(state.left_s)) : "–"],
      ["most memory", fullest ? bytes(fullest.peak_bytes) : "–", fullest ? of : expected],
    ];
    byId("numbers").replaceChildren(...rows.map(([name, value, more]) => {
      const pair = element("div"), shown = element("dd", value);
      if (more) shown.append(element("small", more));
      pair.append(element("dt", name), shown);
      return pair;
    }));
  }

  function showSplit(state) {
    const parts = Object.entries(state.split);
    byId("split-section").hidden = parts.length === 0;
    byId("split").replaceChildren(...parts.map(([name, fraction]) => {
      const bar = element("span");
      bar.style.width = `${100 * fraction}%`;
      bar.style.background = `var(--${name})`;
      return bar;
    }));
    const shown = parts.filter(([, fraction]) => fraction >= 0.005)
      .sort((a, b) => Math.round(100 * b[1]) - Math.round(100 * a[1]));  /* equals do not change places all the time */
    byId("legend").replaceChildren(...shown.map(([name, fraction]) => {
      const item = element("li"), mark = element("i");
      mark.style.background = `var(--${name})`;
      item.append(mark, `${name} `, element("b", percent(fraction)));
      return item;
    }));
  }

  function showWorkers(state) {
    const list = byId("workers");
    list.className = state.workers.length > MANY ? "workers many" : "workers";
    byId("counts").textContent = Object.entries(state.counts).map(([name, number]) => `${number} ${name}`).join(", ");
    const isMany = state.workers.length > MANY, isTroubled = (one) => TROUBLE.includes(one.state);
    const ordered = isMany ? [...state.workers.filter(isTroubled), ...state.workers.filter((one) => !isTroubled(one))]
      : state.workers;
    list.replaceChildren(...ordered.map((one) => worker(one, isMany && !isTroubled(one))));
  }

  function worker(one, isShort) {
    const item = element("li", `${one.rank}: ${one.words}`, one.state);
    const share = one.share === null ? "" : `${fine(one.share)} of a batch`;
    const waits = one.split.waiting >= 0.01 ? `waits ${percent(one.split.waiting)}` : "";
    const memory = one.peak_bytes === null ? "" : bytes(one.peak_bytes) +
      (one.predicted_bytes ? ` of ${bytes(one.predicted_bytes)}` : "");
    const lines = isShort ? [share, memory] : [share, waits, memory, one.host];
    item.append(...lines.filter(Boolean).map((line) => element("small", line)));
    if (one.peak_bytes !== null && one.predicted_bytes) {
      const bar = element("div", "", "memory"), full = element("div");
      full.style.width = `${Math.min(100, 100 * one.peak_bytes / one.predicted_bytes)}%`;
      if (one.peak_bytes > 1.2 * one.predicted_bytes) full.className = "beyond";
      bar.append(full);
      bar.setAttribute("aria-hidden", "true");
      item.append(bar);
    }
    return item;
  }

  function plot(id, points, colour, title, inWords, zero = false) {
    const last = points.length ? points[points.length - 1] : null;
    const caption = last === null ? "Nothing yet." :
      `${last[1] === null ? "Not finite" : inWords(last[1])} at step ${last[0].toLocaleString("en")}.`;
    byId(`${id}-caption`).textContent = caption;
    byId(id).setAttribute("aria-label", `${title} over steps. ${caption}`);
    if (!window.Plotly) { byId(id).hidden = true; return; }
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const axis = {gridcolor: value("--line"), linecolor: value("--line"), zeroline: false, automargin: true};
    const trace = {type: "scatter", mode: points.length < 2 ? "markers" : "lines", x: points.map((point) => point[0]),
      y: points.map((point) => point[1]), line: {color: value(colour), width: 1.8},
      hovertemplate: "%{y:.4g}<extra>step %{x}</extra>"};
    Plotly.react(id, [trace], {
      font: {family: value("--font"), size: 13, color: value("--muted")}, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 8, r: 8, t: 8, b: 8}, showlegend: false, dragmode: false,
      hoverlabel: {bgcolor: value("--card"), bordercolor: value("--line"), font: {color: value("--ink")}},
      xaxis: {...axis, title: {text: "step"}, showgrid: false},
      yaxis: {...axis, title: {text: title}, rangemode: zero ? "tozero" : "normal"},
    }, {responsive: true, displayModeBar: false});
  }

  function show(state) {
    latest = state;
    showHead(state);
    showNumbers(state);
    showSplit(state);
    showWorkers(state);
    plot("loss", state.losses, "--compute", "loss", (value) => value.toFixed(4));
    plot("rate", state.rates, "--good", `${state.unit}/s`, (value) => `${count(value)} ${state.unit}/s`, true);
  }

  async function ask() {
    let next = document.hidden ? HIDDEN_MS : EVERY_MS;
    try {
      const patience = AbortSignal.timeout(ANSWER_MS);
      const answer = await fetch(`state${location.search}`, {cache: "no-store", signal: patience});
      if (!answer.ok) throw new Error(`the watch answered ${answer.status}`);
      const state = await answer.json();
      show(state);
      if (state.is_over) next = OVER_MS;
    } catch (error) {
      say("No answer: the watch has ended, or the way to it is cut. What stands here is the last that was known.");
      next = LOST_MS;
    }
    setTimeout(ask, next);
  }

  dark.addEventListener("change", () => latest && show(latest));
  ask();
})();
