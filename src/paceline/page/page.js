"use strict";
(() => {
const at = (id) => document.getElementById(id);
const MOST_ROWS = 48, GRID_FROM = 64, MOST_CHARTS = 12;
const WORDS = {compute: "computing", wait: "waiting", push: "gradient on its way", pull: "parameters on their way",
  exchange: "exchange", aborted: "given up", dead: "not there"};
const COLOR_OF = {computes: "--compute", waits: "--wait", pushes: "--push", reads: "--pull", finished: "--good", gone: "--bad"};
const measures = window.paceline = {frames: 0, longest_ms: 0, last_ms: 0, time_s: 0};

// All texts are set as text, never as HTML: names of metrics and reasons come from scripts and other machines.
function make(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}
function say(node, text) { if (node.textContent !== text) node.textContent = text; }
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function number(value, digits = 1) { return value === null || value === undefined ? "–" : value.toFixed(digits); }
function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(+value.toPrecision(4));
}
function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  const minutes = seconds / 60;
  return minutes < 100 ? `${minutes.toFixed(0)} min` : `${(minutes / 60).toFixed(1)} h`;
}
function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}/s`;
  return `${value.toFixed(0)} B/s`;
}
function children(parent, count, build) {
  while (parent.children.length > count) parent.lastChild.remove();
  while (parent.children.length < count) parent.append(build());
  return parent.children;
}
function canvas(element, height) {
  const width = element.clientWidth, ratio = window.devicePixelRatio || 1;
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio); element.height = Math.round(height * ratio);
    element.style.height = `${height}px`;
  }
  const pen = element.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return [pen, width];
}

const SAID = {starting: "starting", runs: "runs", ended: "has ended", lost: "lost"};
function header(run) {
  const state = at("state");
  say(state, run.state === "ended" && run.how ? `has ended: ${run.how}` : SAID[run.state]);
  state.className = `chip ${run.state}`;
  say(at("name"), run.name);
  document.title = `${run.name} – paceline`;
  const noun = run.peers ? "peer" : "worker";
  const present = run.workers.filter((row) => row.state !== "gone" && row.state !== "finished").length;
  const facts = [run.policy, run.script, `${present} of ${run.workers_wanted} ${noun}s`];
  if (!run.peers) facts.push(`${run.servers} server${run.servers === 1 ? "" : "s"}`);
  if (run.target) facts.push(`target ${run.target}`);
  if (run.state === "lost") facts.unshift("its driver ended without a word");
  say(at("facts"), facts.filter(Boolean).join(" · "));
  say(at("left"), run.left_s === null ? "" : `about ${duration(run.left_s)} left, ${run.left_how}`);
  for (const each of document.querySelectorAll(".noun")) say(each, noun);
  say(at("workers-title"), run.peers ? "Peers" : "Workers");
  const count = at("count");
  if (count.dataset.known !== String(run.servers)) { count.dataset.known = count.value = String(run.servers); }
  at("resize").hidden = run.peers;
  at("controls").hidden = document.body.dataset.control !== "yes" || run.state !== "runs";
}

function findings(run) {
  const list = run.findings.length ? run.findings : [];
  const parent = at("findings");
  if (!list.length) {
    children(parent, run.healthy ? 1 : 0, () => make("p", "healthy"));
    if (run.healthy) { parent.firstChild.className = "healthy"; say(parent.firstChild, run.healthy); }
    return;
  }
  const key = JSON.stringify(list);
  if (parent.dataset.key === key) return;
  parent.dataset.key = key;
  parent.replaceChildren(...list.map((found) => {
    const card = make("div", "finding");
    card.append(make("p", "saying", found.saying), make("p", "", found.why));
    const measured = make("ul");
    for (const line of found.evidence) measured.append(make("li", "", `measured: ${line}`));
    for (const line of found.helps) measured.append(make("li", "", `what would help: ${line}`));
    card.append(measured);
    return card;
  }));
}

function tiles(run) {
  const shown = [
    [duration(run.time_s), "since training began"],
    [number(run.gradients_per_s), "gradients/s"],
    [String(run.iteration), "iterations done by all"],
    [`${(100 * run.wait_share).toFixed(0)} %`, "waiting, last minute"],
    [number(run.staleness_mean), `${run.peers ? "iterations" : "updates"} stale, at most ${run.staleness_max}`],
    [String(run.dropped), "dropped"],
    ...Object.entries(run.bytes_per_s).map(([what, value]) => [bytes(value), `${what}, tensors`]),
  ];
  const made = children(at("tiles"), shown.length, () => { const tile = make("div", "tile"); tile.append(make("b"), make("span")); return tile; });
  shown.forEach(([value, about], place) => { say(made[place].firstChild, value); say(made[place].lastChild, about); });
}

function workers(run) {
  const slow = new Set(run.findings.filter((found) => found.rank >= 0 && !found.who.startsWith("server")).map((found) => found.rank));
  let rows = run.workers;
  grid(run, slow);
  if (rows.length > MOST_ROWS) {
    const most = [...rows].sort((a, b) => (slow.has(b.rank) - slow.has(a.rank)) || (b.caused_s - a.caused_s) || ((b.own_s || 0) - (a.own_s || 0)));
    rows = most.slice(0, MOST_ROWS).sort((a, b) => a.rank - b.rank);
  }
  const body = document.querySelector("#workers tbody");
  const made = children(body, rows.length, () => {
    const line = make("tr");
    for (let cell = 0; cell < 9; cell++) line.append(make("td"));
    line.lastChild.className = "why";
    return line;
  });
  const ms = (value) => value === null ? "–" : (1000 * value).toFixed(value < 0.01 ? 1 : 0);
  rows.forEach((row, place) => {
    const line = made[place], cells = line.children;
    line.className = slow.has(row.rank) ? "slow" : "";
    const lasted = run.time_s - row.since_s;
    cells[1].className = `does ${row.state}`;
    const texts = [String(row.rank), row.state, String(row.iteration), number(row.rate), ms(row.own_s), ms(row.compute_s),
      `${(100 * row.wait_share).toFixed(0)} %`, `${row.caused_s.toFixed(1)} s`,
      [row.reason, lasted >= 2 ? `for ${duration(lasted)}` : ""].filter(Boolean).join(", ")];
    texts.forEach((text, cell) => say(cells[cell], text));
  });
}

function grid(run, slow) {
  const element = at("grid");
  element.hidden = run.workers.length < GRID_FROM;
  if (element.hidden) return;
  const size = 15, wide = Math.max(1, Math.floor(element.clientWidth / size));
  const [pen] = canvas(element, Math.ceil(run.workers.length / wide) * size);
  const colors = Object.fromEntries(Object.entries(COLOR_OF).map(([state, name]) => [state, color(name)]));
  const ink = color("--ink");
  run.workers.forEach((row, place) => {
    const x = (place % wide) * size, y = Math.floor(place / wide) * size;
    pen.fillStyle = colors[row.state];
    pen.fillRect(x, y, size - 2, size - 2);
    if (slow.has(row.rank)) { pen.strokeStyle = ink; pen.lineWidth = 2; pen.strokeRect(x + 1, y + 1, size - 4, size - 4); }
  });
}

function lanes(run) {
  const kinds = new Set();
  for (const [, spans] of run.lanes) for (const [kind] of spans) kinds.add(kind);
  const legend = at("legend"), key = [...kinds].sort().join();
  if (legend.dataset.key !== key) {
    legend.dataset.key = key;
    legend.replaceChildren(...Object.keys(WORDS).filter((kind) => kinds.has(kind)).map((kind) => make("span", `k-${kind}`, WORDS[kind])));
  }
  const high = run.lanes.length > 16 ? 14 : 22, left = 44, bottom = 20;
  const [pen, width] = canvas(at("lanes"), run.lanes.length * high + bottom + 6);
  const since = Math.max(0, run.time_s - 60), span = Math.max(run.time_s - since, 1e-3), wide = width - left - 10;
  const colors = Object.fromEntries(Object.keys(WORDS).map((kind) => [kind, color(`--${kind}`)]));
  pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle";
  run.lanes.forEach(([rank, spans], place) => {
    const y = place * high + 4;
    pen.fillStyle = color("--soft"); pen.textAlign = "right";
    pen.fillText(String(rank), left - 8, y + high / 2 - 1);
    for (const [kind, start, end] of spans) {
      const x = left + (start - since) / span * wide;
      pen.fillStyle = colors[kind] || colors.exchange;
      pen.fillRect(x, y, Math.max((end - start) / span * wide, 0.3), high - 4);
    }
  });
  pen.fillStyle = color("--soft"); pen.textAlign = "center";
  const step = [1, 2, 5, 10, 20].find((each) => span / each <= Math.max(3, width / 110)) || 20;
  for (let tick = Math.ceil(since / step) * step; tick <= run.time_s; tick += step)
    pen.fillText(`${tick} s`, Math.min(left + (tick - since) / span * wide, width - 22), run.lanes.length * high + bottom / 2 + 5);
}

function bars(parent, items, name) {
  const most = Math.max(...items.map((item) => item[1]), 1e-9);
  const made = children(parent, Math.max(1, items.length), () => {
    const bar = make("div", "bar");
    bar.append(make("span"), make("meter"), make("b"));
    return bar;
  });
  if (!items.length) {
    say(made[0].children[0], "nobody waited in the last minute");
    made[0].children[1].hidden = true; say(made[0].children[2], "");
    return;
  }
  items.forEach(([what, seconds], place) => {
    const [label, meter, value] = made[place].children;
    say(label, name(what)); say(value, `${seconds.toFixed(1)} s`);
    meter.hidden = false; meter.value = seconds / most;
  });
}

function chart(element, points, caption, value) {
  say(element.querySelector("span"), caption);
  say(element.querySelector("b"), value);
  const [pen, width] = canvas(element.querySelector("canvas"), 110);
  const known = points.filter(([, each]) => each !== null);
  if (known.length < 1) return;
  const times = known.map(([time]) => time), values = known.map(([, each]) => each);
  const first = Math.min(...times), last = Math.max(...times), low = Math.min(...values), top = Math.max(...values);
  const x = (time) => 4 + (last > first ? (time - first) / (last - first) : 0.5) * (width - 8);
  const y = (each) => 100 - (top > low ? (each - low) / (top - low) : 0.5) * 86;
  pen.strokeStyle = color("--grid"); pen.lineWidth = 1;
  for (const line of [14, 57, 100]) { pen.beginPath(); pen.moveTo(0, line); pen.lineTo(width, line); pen.stroke(); }
  pen.strokeStyle = pen.fillStyle = color("--line"); pen.lineWidth = 1.6; pen.beginPath();
  known.forEach(([time, each], place) => place ? pen.lineTo(x(time), y(each)) : pen.moveTo(x(time), y(each)));
  pen.stroke();
  if (known.length === 1) pen.fillRect(x(first) - 2, y(low) - 2, 4, 4);
  pen.fillStyle = color("--soft"); pen.font = "11px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "bottom";
  pen.fillText(figure(top), 2, 13); pen.fillText(figure(low), 2, 99);
  pen.textAlign = "right"; pen.fillText(`${duration(first)} – ${duration(last)}`, width - 2, 13);
}
function charts(run) {
  const series = [["gradients/s", run.throughput], ...Object.entries(run.metrics)].slice(0, MOST_CHARTS);
  const made = children(at("charts"), series.length, () => {
    const figure_ = make("figure", "chart"), caption = make("figcaption");
    caption.append(make("span"), make("b"));
    figure_.append(caption, make("canvas"));
    return figure_;
  });
  series.forEach(([name, points], place) => chart(made[place], points, name, points.length ? figure(points[points.length - 1][1]) : "–"));
}

function happenings(run) {
  const list = [...run.happenings].reverse().slice(0, 60);
  if (!list.length) list.push({at: run.time_s, text: "nothing worth telling so far", kind: "membership"});
  const made = children(at("happenings"), list.length, () => { const item = make("li"); item.append(make("span"), make("span")); return item; });
  list.forEach((each, place) => {
    made[place].className = each.kind;
    say(made[place].firstChild, `${each.at.toFixed(1)} s`); say(made[place].lastChild, each.text);
  });
}

let latest = null, due = false;
function draw() {
  due = false;
  if (!latest) return;
  const began = performance.now(), run = latest;
  header(run); findings(run); tiles(run); workers(run); lanes(run);
  bars(at("by-worker"), run.waiting_by_worker, (rank) => `${run.peers ? "peer" : "worker"} ${rank}`);
  bars(at("by-reason"), run.waiting_by_reason, (reason) => reason || "–");
  charts(run); happenings(run);
  void document.body.offsetHeight;  // the layout is part of the frame
  measures.frames++; measures.time_s = run.time_s;
  measures.last_ms = performance.now() - began;
  measures.longest_ms = Math.max(measures.longest_ms, measures.last_ms);
}
function ask() { if (!due && latest) { due = true; requestAnimationFrame(draw); } }
addEventListener("resize", ask);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", ask);

const source = new EventSource("feed");
source.onmessage = (event) => { latest = JSON.parse(event.data); at("lost").hidden = true; ask(); };
source.onerror = () => { at("lost").hidden = false; };

if (document.body.dataset.control === "yes") {
  const buttons = at("controls").querySelectorAll("button");
  const control = async (what, body) => {
    buttons.forEach((each) => { each.disabled = true; });
    say(at("said"), "…");
    try {
      const answer = await fetch(`control/${what}`, {method: "POST", body: JSON.stringify(body)});
      say(at("said"), (await answer.text()).trim());
    } catch (error) { say(at("said"), String(error)); }
    buttons.forEach((each) => { each.disabled = false; });
  };
  at("resize").addEventListener("submit", (event) => { event.preventDefault(); control("servers", {count: Number(at("count").value)}); });
  at("checkpoint").addEventListener("click", () => control("checkpoint", {}));
  at("stop").addEventListener("click", () => { if (confirm("End the run after the current iterations?")) control("stop", {}); });
}
})();
