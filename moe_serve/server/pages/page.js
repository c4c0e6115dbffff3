"use strict";
// Asks the server for news every second, keeps what it has seen, and shows it. Text from outside is set as text only.

const PERIOD_MS = 1000, DEADLINE_MS = 5000, MAX_POINTS = 720, MAX_EVENTS = 300, MAX_LOADS = 240, SHOWN_EVENTS = 60, RATE_S = 8;
const KINDS = { plan: "plan", move: "move", done: "live", keep: "keep", failed: "failed", watch: "measured", leader: "leader", alarm: "alarm" };

const PHASES = ["prefill", "decode"];

const known = nothing();
const view = { curve: null, heat: {}, expert: null, range: Infinity, cursor: { curve: null, experts: null, ranks: null, traffic: null, before: null, prefill: null, decode: null }, drawn: "", timeline: "" };
const element = (id) => document.getElementById(id);

function nothing() {
  return { start: "", windows: 0, events: 0, placements: 0, points: [], timeline: [], load: null, loads: [], phases: {}, placement: null, answer: null, totals: [], heardMs: 0 };
}

// --- news from the server

function take(answer) {
  if (answer.start !== known.start) Object.assign(known, nothing());
  known.start = answer.start;
  known.windows = answer.num_windows;
  known.events = answer.num_events;
  known.placements = answer.num_placements;
  for (const [at, first, steps, phase, step_s, lowest, middle, mean] of answer.points) {
    known.points.push({ at, first, steps, phase, step_s, lowest, middle, mean });
  }
  known.points.splice(0, known.points.length - MAX_POINTS);
  known.timeline.push(...answer.events);
  known.timeline.splice(0, known.timeline.length - MAX_EVENTS);
  if (answer.load) {
    known.load = answer.load;
    known.loads.push({ at: answer.now_s, tokens: answer.load.tokens });
    known.loads.splice(0, known.loads.length - MAX_LOADS);
  }
  Object.assign(known.phases, answer.phases);
  if (answer.placement) known.placement = answer.placement;
  known.totals.push([answer.now_s, new Map(answer.ranks.map((rank) => [rank.rank, rank.output_tokens || 0]))]);
  while (known.totals.length > 2 && answer.now_s - known.totals[0][0] > RATE_S) known.totals.shift();
  known.answer = answer;
  known.heardMs = performance.now();
}

async function ask() {
  if (!document.hidden) {
    const query = new URLSearchParams({ start: known.start, windows: known.windows, events: known.events, placements: known.placements });
    try {
      const response = await fetch(`dashboard/data?${query}`, { cache: "no-store", signal: AbortSignal.timeout(DEADLINE_MS) });
      if (!response.ok) throw new Error(`HTTP ${response.status}`);
      take(await response.json());
      show();
    } catch (error) {
      showSilence(error);
    }
  }
  setTimeout(ask, PERIOD_MS);
}

// --- words and numbers

const whole = (value) => Math.round(value).toLocaleString("en");
const share = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));
const windowsOf = (points) => `${whole(points.length)} ${points.length === 1 ? "window" : "windows"}`;
const milliseconds = (value) => (value ? `${(value * 1000).toFixed(1)}\u00a0ms` : "–");

function seconds(value) {
  if (value === null) return "–";
  if (Math.abs(value) < 10) return `${Number(value.toPrecision(2))}\u00a0s`;
  for (const [unit, size] of [["s", 1], ["min", 60], ["h", 3600]]) if (Math.abs(value) < 120 * size) return `${Math.round(value / size)}\u00a0${unit}`;
  return `${Math.round(value / 86400)}\u00a0days`;
}

function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = value > 0 ? Math.min(Math.floor(Math.log10(value) / 3), 4) : 0;
  return `${(value / 1000 ** power).toFixed(power && value / 1000 ** power < 10 ? 1 : 0)}\u00a0${units[power]}`;
}

/** Returns output tokens a second of a rank over the last seconds; null: not known yet. */
function rate(rank) {
  const [before, after] = [known.totals[0], known.totals[known.totals.length - 1]];
  if (after[0] - before[0] < 0.5 || !before[1].has(rank)) return null;
  return Math.max(0, after[1].get(rank) - before[1].get(rank)) / (after[0] - before[0]);
}

function put(id, text) {
  const node = element(id);
  if (node.textContent !== text) node.textContent = text;
}

function tag(name, text, className) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

// --- what is shown

function show() {
  showHead();
  showCards();
  showTable();
  showTimeline();
  const drawing = JSON.stringify([known.start, known.windows, known.events, known.placements, view.cursor, view.range, view.expert, Math.floor(known.answer.now_s / 5)]);
  if (drawing !== view.drawn) {
    view.drawn = drawing;
    requestAnimationFrame(draw);
  }
}

function showHead() {
  const { system, balancer } = known.answer;
  put("model", system.model);
  document.title = `${system.model} · moe_serve`;
  const serving = element("serving");
  put("serving", system.state === "ready" ? "serving" : system.state);
  serving.className = `chip ${system.state === "ready" ? "good" : "bad"}`;
  put("state", balancer.mode === "dynamic" ? `balancer: ${balancer.state}` : `balancing: ${balancer.mode}`);
  element("state").className = `chip ${balancer.alarm ? "bad" : balancer.state === "moving" || balancer.state === "planning" ? "busy" : ""}`;
  element("alarm").hidden = !balancer.alarm;
  put("alarm", balancer.alarm ? `The balancer has switched itself off: ${balancer.alarm}` : "");
  element("note").hidden = !balancer.note;
  put("note", balancer.note || "");
  element("rebalance").hidden = balancer.mode !== "dynamic";
}

function showSilence(error) {
  if (known.heardMs && performance.now() - known.heardMs < 3000) return;
  put("serving", `no answer: ${error.message}`);
  element("serving").className = "chip bad";
}

function showHandover(handover) {
  element("handover-card").hidden = !handover;
  if (!handover) return;
  const parts = handover.parts_ms, routes = Object.entries(handover.routes).map(([route, count]) => `${route} ${whole(count)}`);
  put("handover", handover.num ? seconds((parts.waiting + parts.decode_rank) / 1000) : "–");
  put("handover-more", `mean; until a decode rank had room ${seconds(parts.waiting / 1000)}. ${routes.join(", ")}`);
}

function showPages(pages) {
  element("pages-card").hidden = !pages;
  if (!pages) return;
  const fates = Object.entries(pages).filter(([, count]) => count), came = ([fate]) => fate.startsWith("from_");
  const text = (some) => some.map(([fate, count]) => `${fate.replace("from_", "").replaceAll("_", " ")} ${whole(count)}`).join(", ");
  const up = fates.filter(came), others = fates.filter((each) => !came(each));
  put("pages", whole(up.reduce((total, [, count]) => total + count, 0)));
  put("pages-more", `came${up.length ? `, from: ${text(up)}` : ""}${others.length ? `; others: ${text(others)}` : ""}`);
}

const SOURCES = { own: "own text", shared: "other texts", form: "forms", mtp: "layer" };

function showDrafts(drafts) {
  element("drafts-card").hidden = !drafts;
  if (!drafts) return;
  const right = Object.entries(drafts.sources).map(([source, [number, all]]) => `${SOURCES[source] || source} ${hits(number, all)} of ${whole(all)}`);
  const [with_, without] = ["with_drafts", "without"].map((steps) => drafts.experts_per_token[steps]?.toFixed(1));
  const experts = with_ || without ? `; experts read for a token ${with_ || "–"}, without drafts ${without || "–"}` : "";
  const saved = drafts.saved_s ? `; ${drafts.saved_s < 0 ? "cost" : "saved"} ${seconds(Math.abs(drafts.saved_s))}` : "";
  put("drafts", drafts.tokens_per_step === null ? "–" : drafts.tokens_per_step.toFixed(2));
  put("drafts-more", `tokens of a request in a step${right.length ? `; right: ${right.join(", ")}` : ", none verified yet"}${experts}${saved}`);
}

function showCards() {
  const { balancer, ranks } = known.answer, window = balancer.window, totals = balancer.totals;
  put("balance", window ? share(window.balancedness.mean) : "–");
  put("balance-more", window ? `lowest layer ${share(window.balancedness.min)}, median ${share(window.balancedness.p50)}` : "mean / max of the ranks");
  const move = balancer.moves[0];
  put("gain", !move ? "–" : move.state === "failed" ? "failed" : move.state === "moving" ? "moving" : `${share(move.balancedness_before)} → ${share(move.balancedness_after)}`);
  put("gain-more", !move ? "none yet" : gained(move) || `predicted: ${seconds(move.predicted_gain_s)} for ${seconds(move.predicted_cost_s)}`);
  put("version", balancer.placement.age_s === null ? "–" : `v${balancer.placement.version}`);
  put("version-more", balancer.placement.age_s === null ? "" : `live for ${seconds(balancer.placement.age_s)}`);
  put("moved", `${whole(totals.num_experts_moved || 0)}`);
  put("moved-more", `experts, ${bytes(totals.num_bytes_moved || 0)}, ${whole(totals.num_rounds || 0)} rounds`);
  const sum = (name) => ranks.reduce((total, rank) => total + (rank[name] || 0), 0);
  put("requests", whole(sum("running")));
  put("requests-more", `running, ${whole(sum("waiting"))} waiting`);
  showHandover(known.answer.system.handover);
  showPages(known.answer.system.pages);
  showDrafts(known.answer.system.drafts);
  const rates = ranks.map((rank) => rate(rank.rank)).filter((value) => value !== null);
  put("output", rates.length ? whole(rates.reduce((a, b) => a + b, 0)) : "–");
  put("output-more", `tokens/s, prefix hits ${hits(sum("cached_tokens"), sum("prompt_tokens"))}`);
}

/** Returns what the newest move has gained of its promise; "": it has not been measured yet. */
function gained(move) {
  const measured = known.timeline.findLast((event) => event.realised_gain_s !== null);
  return measured && move.ended_s !== null && measured.at_s >= move.ended_s ? gainText(measured) : "";
}

const gainText = (event) => `gained ${seconds(event.realised_gain_s)} of ${seconds(event.predicted_gain_s)} promised`;
const hits = (cached, prompt) => (prompt ? `${Math.round((100 * cached) / prompt)}\u00a0%` : "–");

function showTable() {
  const body = element("table"), { ranks } = known.answer;
  while (body.rows.length > ranks.length) body.deleteRow(-1);
  ranks.forEach((rank, i) => {
    const row = body.rows[i] || newRow(body);
    const used = rank.blocks ? 1 - rank.free_blocks / rank.blocks : null, perSecond = rate(rank.rank);
    const texts = [rank.rank, rank.state, rank.running, rank.waiting, used === null ? "–" : `${Math.round(100 * used)}\u00a0%`,
      hits(rank.cached_tokens, rank.prompt_tokens), perSecond === null ? "–" : whole(perSecond)];
    texts.forEach((text, column) => {
      const cell = column === 4 ? row.cells[4].lastChild : row.cells[column];
      cell.textContent = text ?? "–";
    });
    row.cells[1].className = rank.serves ? "" : "out";
    row.cells[1].title = rank.state;
    row.cells[4].firstChild.value = used || 0;
  });
}

function newRow(body) {
  const row = body.insertRow();
  for (let column = 0; column < 7; column++) row.insertCell();
  const meter = tag("meter");
  meter.setAttribute("aria-label", "cache in use");
  row.cells[4].append(meter, document.createTextNode(""));
  return row;
}

function showTimeline() {
  const { moves } = known.answer;
  const key = JSON.stringify([known.start, known.events, moves]);
  if (key === view.timeline) return;
  view.timeline = key;
  if (!known.timeline.length) element("timeline").replaceChildren(tag("li", "Nothing has been decided yet.", "empty"));
  else element("timeline").replaceChildren(...known.timeline.slice(-SHOWN_EVENTS).reverse().map((event) => timelineItem(event, moves)));
}

function timelineItem(event, moves) {
  const item = tag("li"), time = tag("time", clock(event.at_s, true));
  time.dateTime = new Date(event.at_s * 1000).toISOString();
  time.title = `step ${whole(event.step)}`;
  const text = tag("div");
  text.append(tag("p", event.reason));
  const more = [];
  if (event.realised_gain_s !== null) more.push(gainText(event));
  else if (event.predicted_gain_s || event.predicted_cost_s) more.push(`predicted: gains ${seconds(event.predicted_gain_s)}, costs ${seconds(event.predicted_cost_s)}`);
  const move = event.kind === "done" ? moves.find((one) => one.ended_s === event.at_s) : event.kind === "move" ? moves.find((one) => one.began_s === event.at_s) : null;
  if (move && (event.kind === "done" || move.state === "moving")) more.push(move.summary.replace("->", "→"));
  if (move && event.kind === "done" && move.num_bytes) more.push(bytes(move.num_bytes));
  if (move && event.kind === "done" && move.step_time_after_s) more.push(`a step took ${milliseconds(move.step_time_before_s)}, now ${milliseconds(move.step_time_after_s)}`);
  if (more.length) text.append(tag("p", more.join(" · "), "more"));
  const kind = Object.hasOwn(KINDS, event.kind) ? event.kind : "";
  item.append(time, tag("span", KINDS[kind] || event.kind, `kind ${kind}`), text);
  return item;
}

// --- pictures

function draw() {
  document.body.classList.toggle("waiting", !known.load);
  if (!known.load) return waiting();
  const colors = palettes(), { load } = known, points = shownPoints();
  drawScale(element("experts-scale"), colors.hot);
  drawScale(element("ranks-scale"), colors.even);
  if (points.length) {
    const bands = known.answer.moves.map((move) => [move.began_s, move.ended_s ?? known.answer.now_s]);
    const marks = known.timeline.filter((event) => event.kind === "failed" || event.kind === "alarm").map((event) => event.at_s);
    if (view.cursor.curve !== null) view.cursor.curve = Math.min(view.cursor.curve, points.length - 1);
    view.curve = drawCurve(element("curve"), points, bands, marks, known.answer.now_s, view.cursor.curve);
    const last = points[points.length - 1];
    if (view.cursor.curve === null) put("curve-text", `Now ${share(last.mean)}; lowest layer ${share(last.lowest)}. ${windowsOf(points)}, the last of ${last.steps} steps, ${milliseconds(last.step_s)} a step.`);
  }
  view.heat.experts = drawHeat(element("experts"), timesMean("experts"), (value) => value / 4, load.layers, colors.hot, view.cursor.experts);
  view.heat.ranks = drawHeat(element("ranks"), timesMean("ranks"), (value) => value - 0.5, load.layers, colors.even, view.cursor.ranks);
  const shown = ["traffic", "before"].filter((id) => rowsOf(id).length > 1), ranksOf = (id) => rowsOf(id).map((_, rank) => `${rank}`);
  element("traffic-section").hidden = !shown.includes("traffic");
  element("before-part").hidden = !shown.includes("before");
  if (shown.includes("traffic")) drawScale(element("traffic-scale"), colors.hot);
  for (const id of shown) view.heat[id] = drawHeat(element(id), timesMean(id), (value) => value / 2, ranksOf(id), colors.hot, view.cursor[id]);
  const phases = PHASES.every((id) => known.phases[id]) ? PHASES : [];
  element("phases-section").hidden = !phases.length;
  if (phases.length) drawScale(element("phases-scale"), colors.hot);
  for (const id of phases) {
    view.heat[id] = drawHeat(element(id), timesMean(id), (value) => value / 4, load.layers, colors.hot, view.cursor[id]);
    put(`${id}-more`, phaseText(id, points));
  }
  for (const id of ["experts", "ranks", ...shown, ...phases]) if (!view.cursor[id]) put(`${id}-text`, hottest(id));
  element("expert").hidden = !view.expert;
  if (view.expert) showExpert(...view.expert);
}

/** Returns the windows of the chosen time; the newest one always. */
function shownPoints() {
  const { points } = known, first = points.findIndex((point) => known.answer.now_s - point.at <= view.range);
  return first < 0 ? points.slice(-1) : points.slice(first);
}

/** Returns what the shown windows of a phase were like, in words. */
function phaseText(phase, points) {
  const own = points.filter((point) => point.phase === phase), mean = (name) => own.reduce((sum, point) => sum + point[name], 0) / own.length;
  if (!own.length) return `${phase}: no window of the shown time; the newest one before it`;
  const lowest = Math.min(...own.map((point) => point.lowest));
  return `${phase}: balancedness ${share(mean("mean"))}, lowest layer ${share(lowest)}; ${windowsOf(own)}, ${milliseconds(mean("step_s"))} a step`;
}

/** Shows a chosen expert: where it lies, and its load in the windows that this page has seen. */
function showExpert(row, column) {
  const { loads, placement } = known, ofRow = loads.filter((window) => window.tokens[row] && column < window.tokens[row].length);
  if (!ofRow.length) return choose(null);
  put("expert-title", `Expert ${column} of layer ${known.load.layers[row]}`);
  const points = ofRow.map(({ at, tokens }) => {
    const mean = tokens[row].reduce((a, b) => a + b, 0) / tokens[row].length;
    return { at, value: mean ? tokens[row][column] / mean : 0 };
  });
  drawLoads(element("expert-curve"), points, known.answer.now_s);
  const values = points.map((point) => point.value), slots = [];
  if (placement && placement[row]) placement[row].forEach((expert, slot) => expert === column && slots.push(slot));
  const perRank = placement && placement[row] ? placement[row].length / known.load.ranks[row].length : 1;
  const where = slots.map((slot) => `rank ${Math.floor(slot / perRank)} (slot ${slot})`).join(", ");
  const history = `${windowsOf(points)} since this page was opened: ${share(Math.min(...values))} to ${share(Math.max(...values))} × the mean, now ${share(values[values.length - 1])}`;
  put("expert-text", where ? `${slots.length} ${slots.length === 1 ? "replica" : "replicas"}: ${where}. ${history}` : history);
}

function choose(expert) {
  view.expert = expert;
  requestAnimationFrame(draw);
}

/** Asks the balancer to plan now, and shows what it answers. */
async function rebalance() {
  const button = element("rebalance"), key = element("key").value, headers = key ? { authorization: `Bearer ${key}` } : {};
  button.disabled = true;
  let words;
  try {
    const response = await fetch("eplb/rebalance", { method: "POST", headers, signal: AbortSignal.timeout(60_000) }), answer = await response.json();
    if (response.status === 401) {
      element("key-row").hidden = false;
      element("key").focus();
    }
    words = response.ok ? answer.message : answer.error.message;
  } catch (error) {
    words = `no answer: ${error.message}`;
  }
  button.disabled = false;
  element("answered").hidden = false;
  put("answered", words);
}

/** Says in the place of each picture that there is no window yet. */
function waiting() {
  const off = known.answer.balancer.mode === "off";
  for (const id of ["curve", "experts", "ranks"]) put(`${id}-text`, off ? "No load is recorded: eplb.mode is off." : "Waiting for the first window.");
}

/** Returns the rows of a picture as the server counts them. */
const rowsOf = (id) => ({ experts: known.load.tokens, ranks: known.load.ranks, traffic: known.load.traffic, before: known.load.traffic_before, ...known.phases })[id];
const isTraffic = (id) => id === "traffic" || id === "before";

/** Returns each value over the mean of its row, traffic over an even share; 0 without load. A rank without any load counts as masked. */
function timesMean(id) {
  const rows = rowsOf(id), sum = (row) => row.reduce((a, b) => a + b, 0);
  const live = id === "ranks" ? rows[0].filter((_, column) => rows.some((row) => row[column] > 0)).length : rows[0].length;
  const even = isTraffic(id) ? sum(rows.map(sum)) / live ** 2 : null;
  return rows.map((row) => {
    const mean = even ?? sum(row) / Math.max(live, 1);
    return row.map((value) => (mean ? value / mean : 0));
  });
}

/** Returns the cell of the largest load over the mean of its layer, in words. */
function hottest(id) {
  let best = [0, 0, -1];
  timesMean(id).forEach((row, i) => row.forEach((value, j) => value > best[2] && (best = [i, j, value])));
  return `Busiest: ${cellText(id, best[0], best[1])}`;
}

function cellText(id, row, column) {
  const { load, placement } = known, values = rowsOf(id)[row];
  const times = timesMean(id)[row][column].toFixed(2);
  if (isTraffic(id)) return `rank ${row} → rank ${column}: ${whole(values[column])} tokens of experts, ${times} × an even share`;
  const text = `layer ${load.layers[row]}, ${id === "ranks" ? "rank" : "expert"} ${column}: ${whole(values[column])} tokens, ${times} × the mean`;
  if (id === "ranks") return `${text}; balancedness of the layer ${share(load.balancedness[row])}`;
  if (!placement || !placement[row]) return text;
  const perRank = placement[row].length / load.ranks[row].length;
  const holders = [...new Set(placement[row].flatMap((expert, slot) => (expert === column ? [Math.floor(slot / perRank)] : [])))];
  return `${text}; on rank ${holders.join(", ") || "none"}`;
}

function pointText(i) {
  const point = shownPoints()[i];
  return `${clock(point.at, true)}, step ${whole(point.first + point.steps)}: mean ${share(point.mean)}, median ${share(point.middle)}, lowest layer ${share(point.lowest)}, ${milliseconds(point.step_s)} a step, ${point.phase}`;
}

// --- pointer and keyboard

function select(id, cursor, pointer) {
  view.cursor[id] = cursor;
  const text = cursor === null ? "" : id === "curve" ? pointText(cursor) : cellText(id, ...cursor);
  if (text) put(`${id}-text`, text);
  const tip = element("tip");
  tip.classList.toggle("on", Boolean(pointer && text));
  if (pointer && text) {
    tip.textContent = text;
    const x = Math.min(pointer.clientX + 14, innerWidth - tip.offsetWidth - 6), below = pointer.clientY + 18;
    const y = below + tip.offsetHeight > innerHeight ? pointer.clientY - tip.offsetHeight - 12 : below;
    tip.style.transform = `translate(${Math.max(x, 4)}px, ${y}px)`;
  }
  requestAnimationFrame(draw);
}

function under(id, event) {
  const box = element(id).getBoundingClientRect();
  if (id !== "curve") return view.heat[id] ? cellAt(view.heat[id], event.clientX - box.left, event.clientY - box.top) : null;
  if (!view.curve) return null;
  const at = view.curve.timeAt(event.clientX - box.left);
  const points = shownPoints();
  return points.reduce((best, point, i) => (Math.abs(point.at - at) < Math.abs(points[best].at - at) ? i : best), 0);
}

/** Returns the cursor after a key: arrows move it by one, Home and End to the edges. */
function moved(id, key) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6] }[key];
  if (!step) return undefined;
  const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
  const num = id === "curve" ? shownPoints().length : 0;
  if (id === "curve") return num ? clamp((view.cursor.curve ?? num) + step[1], num) : undefined;
  const area = view.heat[id], [row, column] = view.cursor[id] || [0, 0];
  if (!area) return undefined;
  return view.cursor[id] ? [clamp(row + step[0], area.rows), clamp(column + step[1], area.columns)] : [row, column];
}

for (const id of Object.keys(view.cursor)) {
  const canvas = element(id);
  for (const name of ["pointermove", "pointerdown"]) canvas.addEventListener(name, (event) => known.answer && select(id, under(id, event), event));
  // A finger that is lifted leaves too: what it has tapped stays, until another tap or the page scrolls.
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && select(id, null, null));
  canvas.addEventListener("blur", () => select(id, null, null));
  canvas.addEventListener("keydown", (event) => {
    const cursor = event.key === "Escape" ? null : moved(id, event.key);
    if (cursor === undefined) return;
    event.preventDefault();
    select(id, cursor, null);
  });
}
element("experts").addEventListener("click", (event) => known.load && choose(under("experts", event)));
element("experts").addEventListener("keydown", (event) => event.key === "Enter" && view.cursor.experts && choose(view.cursor.experts));
element("expert-close").addEventListener("click", () => choose(null));
element("rebalance").addEventListener("click", rebalance);
// Not on "change", which leaving the field fires as well: nobody asked for a move then.
element("key").addEventListener("keydown", (event) => event.key === "Enter" && rebalance());
element("range").addEventListener("change", (event) => {
  view.range = Number(event.target.value) || Infinity;
  select("curve", null, null);
});
document.addEventListener("visibilitychange", () => document.hidden || requestAnimationFrame(() => known.answer && draw()));
addEventListener("scroll", () => element("tip").classList.remove("on"), { passive: true });
addEventListener("resize", () => known.answer && requestAnimationFrame(draw));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.answer && requestAnimationFrame(draw));
ask();
