"use strict";
// What the page draws with: elements, tooltips, line charts, pixel maps. No library, no network. Charts put a function
// into `redraws`, which runs on resize and on a change of theme.
const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const redraws = [];
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, parent = null, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function html(tag, className = "", text = "", parent = null) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function bytes(text) { return Uint8Array.from(atob(text), (c) => c.charCodeAt(0)); }
function css(name) { return getComputedStyle(root).getPropertyValue(name).trim(); }

// ---- tooltip
function tip(event, lines) {
  const box = $("tip");
  box.replaceChildren(...lines.map((line) => html("div", "", line)));
  box.style.opacity = 1;
  const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
  const below = event.clientY + 16;
  box.style.left = `${left}px`;
  box.style.top = `${below + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : below}px`;
}
function untip() { $("tip").style.opacity = 0; }

// ---- scales
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const out = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) out.push(+value.toPrecision(10));
  return out;
}
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return `${+value.toPrecision(4)}`;
}

// ---- line charts: series [{name, color, x, y, dash, dots, wide, low, high}]; low, high: ends of an interval around each y
const balanceRange = (ys) => [Math.max(0, Math.floor(Math.min(...ys) * 20 - 0.5) / 20), 1.005];  // of an axis, in steps of 0.05
const closeRange = (ys) => { const low = Math.min(...ys), high = Math.max(...ys); return [Math.max(0, low - 0.15 * (high - low)), high + 0.05 * (high - low)]; };
function lineChart(holder, options) {
  const hidden = new Set();
  const draw = () => {
    holder.replaceChildren();
    const shown = options.series().filter((s) => !hidden.has(s.name));
    const width = Math.max(holder.clientWidth, 280), height = options.height || 280;
    const pad = { left: 52, right: 14, top: 10, bottom: 40 };
    const xs = shown.flatMap((s) => s.x), ys = shown.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])]).filter((v) => v !== null);
    if (!ys.length) { html("p", "empty", options.empty || "Nothing to show.", holder); addKeys(); return; }
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = options.range ? options.range(ys) : [0, Math.max(...ys) * 1.05];
    if (x0 === x1) { x0 -= 1; x1 += 1; }
    if (y0 === y1) y1 = y0 + 1;
    pad.left = Math.max(pad.left, 16 + 6.5 * Math.max(...ticks(y0, y1, 5).map((v) => options.format(v).length)));
    const X = (v) => pad.left + (v - x0) / (x1 - x0) * (width - pad.left - pad.right);
    const Y = (v) => height - pad.bottom - (v - y0) / (y1 - y0) * (height - pad.top - pad.bottom);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": options.label }, null);
    for (const v of ticks(y0, y1, 5)) {
      make("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: Y(v), y2: Y(v) }, svg);
      make("text", { x: pad.left - 8, y: Y(v) + 4, "text-anchor": "end" }, svg, options.format(v));
    }
    for (const v of options.xTicks ? options.xTicks() : ticks(x0, x1, Math.min(8, width / 90))) {
      make("text", { x: X(v), y: height - pad.bottom + 17, "text-anchor": "middle" }, svg, short(v));
      make("line", { class: "axis", x1: X(v), x2: X(v), y1: height - pad.bottom, y2: height - pad.bottom + 4 }, svg);
    }
    make("line", { class: "axis", x1: pad.left, x2: width - pad.right, y1: height - pad.bottom, y2: height - pad.bottom }, svg);
    make("text", { x: (pad.left + width - pad.right) / 2, y: height - 5, "text-anchor": "middle" }, svg, options.xLabel);
    for (const mark of options.marks ? options.marks() : []) {
      make("line", { x1: X(mark.x), x2: X(mark.x), y1: pad.top, y2: height - pad.bottom, stroke: "var(--soft)", "stroke-dasharray": "2 3" }, svg);
      make("text", { x: X(mark.x) + 5, y: height - pad.bottom - 8 }, svg, mark.text);
    }
    for (const s of shown) {
      let path = "", pen = false;
      s.x.forEach((x, i) => {
        if (s.y[i] === null) { pen = false; return; }
        path += `${pen ? "L" : "M"}${X(x).toFixed(1)} ${Y(s.y[i]).toFixed(1)}`;
        pen = true;
      });
      make("path", { d: path, fill: "none", stroke: s.color, "stroke-width": s.wide ? 2.4 : 1.7, "stroke-linejoin": "round",
        "stroke-dasharray": s.dash || "none" }, svg);
      if (s.low) s.x.forEach((x, i) => make("line", { class: "interval", x1: X(x), x2: X(x), y1: Y(s.low[i]), y2: Y(s.high[i]), stroke: s.color }, svg));
      if (s.dots) s.x.forEach((x, i) => make("circle", { cx: X(x), cy: Y(s.y[i]), r: 3, fill: s.color }, svg));
    }
    const cross = make("line", { y1: pad.top, y2: height - pad.bottom, stroke: "var(--soft)", opacity: 0 }, svg);
    svg.addEventListener("mousemove", (event) => {
      const at = x0 + ((event.clientX - svg.getBoundingClientRect().left) * width / svg.clientWidth - pad.left) / (width - pad.left - pad.right) * (x1 - x0);
      const base = shown[0].x;
      const nearest = base.reduce((a, b) => Math.abs(b - at) < Math.abs(a - at) ? b : a);
      cross.setAttribute("x1", X(nearest)); cross.setAttribute("x2", X(nearest)); cross.setAttribute("opacity", 0.6);
      const lines = shown.map((s) => [s, s.x.indexOf(nearest)]).filter(([s, i]) => i >= 0 && s.y[i] !== null)
        .map(([s, i]) => `${s.name}: ${options.format(s.y[i])}`);
      tip(event, [`${options.xName} ${nearest.toLocaleString("en")}`, ...lines]);
    });
    svg.addEventListener("mouseleave", () => { untip(); cross.setAttribute("opacity", 0); });
    holder.append(svg);
    addKeys();
  };
  function addKeys() {
    const keys = html("div", "keys", "", holder);
    for (const s of options.series()) {
      const button = html("button", hidden.has(s.name) ? "off" : "", "", keys);
      const dot = html("span", "dot", "", button);
      dot.style.background = s.color;
      button.append(s.name);
      button.addEventListener("click", () => { hidden.has(s.name) ? hidden.delete(s.name) : hidden.add(s.name); draw(); });
    }
  }
  redraws.push(draw);
  return draw;
}

// ---- tables; kinds: class of each row
function fillTable(id, columns, rows, kinds = []) {
  const head = html("tr", "", "", html("thead", "", "", $(id))), body = html("tbody", "", "", $(id));
  for (const column of columns) html("th", "", column, head);
  rows.forEach((cells, i) => { const row = html("tr", kinds[i], "", body); for (const text of cells) html("td", "", text, row); });
}

// ---- tables that a click on a column sorts, with a button that saves them: columns [{name, format}], rows of numbers or null
function sortedTable(table, columns, rows, file) {
  let by = 0, falls = false, sorted = rows;
  const value = (row) => row[by] === null ? -Infinity : row[by];
  const draw = () => {
    sorted = [...rows].sort((a, b) => (falls ? -1 : 1) * (value(a) - value(b) || 0));
    table.replaceChildren();
    const head = html("tr", "", "", html("thead", "", "", table)), body = html("tbody", "", "", table);
    columns.forEach((column, i) => {
      const cell = html("th", "", "", head), button = html("button", "", column.name + (i === by ? (falls ? " ↓" : " ↑") : ""), cell);
      cell.setAttribute("aria-sort", i === by ? (falls ? "descending" : "ascending") : "none");
      button.addEventListener("click", () => { falls = i === by ? !falls : i > 0; by = i; draw(); });
    });
    for (const cells of sorted) {
      const row = html("tr", "", "", body);
      cells.forEach((cell, i) => html("td", "", cell === null ? "–" : columns[i].format(cell), row));
    }
  };
  draw();
  return () => {
    const lines = [columns.map((column) => `"${column.name.replace(/"/g, '""')}"`), ...sorted.map((row) => row.map((cell) => cell ?? ""))];
    const text = lines.map((line) => `${line.join(",")}\n`).join("");
    const link = Object.assign(html("a"), { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: file });
    link.click();
    URL.revokeObjectURL(link.href);
  };
}

// ---- pixel maps: one cell per value of a byte array
function ramp(stops) {
  const colors = stops.map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return (t) => {
    const at = Math.min(Math.max(t, 0), 1) * (colors.length - 1), i = Math.min(Math.floor(at), colors.length - 2);
    return colors[i].map((c, k) => Math.round(c + (colors[i + 1][k] - c) * (at - i)));
  };
}
const dark = () => root.dataset.theme === "dark";
const diverging = () => ramp(dark() ? ["#3d8fd9", "#2a5d8c", "#222a35", "#a04a26", "#ff8a4a"] : ["#2166ac", "#92c5de", "#f4f5f7", "#f4a582", "#b2182b"]);
const sequential = () => ramp(dark() ? ["#161c26", "#1f4068", "#1f8a8a", "#8bd35f", "#fdf6a8"] : ["#f4f7fb", "#b9d6ea", "#4ea3c9", "#1c6296", "#0a2447"]);

const heated = () => ramp(dark() ? ["#222a35", "#6b3a2a", "#c4562f", "#ff9a4d", "#ffe08a"] : ["#f4f5f7", "#fddbc7", "#f4a582", "#d6604d", "#8a1020"]);

// map() returns {rows, columns, at, color, describe, x, y}; x, y: what stands at the start, in the middle and at the end of an axis
function pixelMap(canvas, map) {
  const frame = html("div", "map");
  canvas.before(frame);
  const sides = [html("div", "y", "", frame), html("div", "x")];
  frame.append(canvas, sides[1]);
  const draw = () => {
    const { rows, columns, at, color, x, y } = map(), paint = color();
    sides.forEach((side, i) => side.replaceChildren(...[y, x][i].map((words, k) => html("span", k === 1 ? "name" : "", `${words}`))));
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth || 600;
    const height = Math.max(Math.min(rows * Math.max(3, Math.min(18, 260 / rows)), 420), 60);
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const context = canvas.getContext("2d"), small = document.createElement("canvas");
    small.width = columns; small.height = rows;
    const image = small.getContext("2d").createImageData(columns, rows);
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
      const [red, green, blue] = paint(at(r, c));
      image.data.set([red, green, blue, 255], 4 * (r * columns + c));
    }
    small.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
  };
  canvas.addEventListener("mousemove", (event) => {
    const { rows, columns, describe } = map(), box = canvas.getBoundingClientRect();
    const c = Math.min(Math.floor((event.clientX - box.left) / box.width * columns), columns - 1);
    const r = Math.min(Math.floor((event.clientY - box.top) / box.height * rows), rows - 1);
    if (r >= 0 && c >= 0) tip(event, describe(r, c));
  });
  canvas.addEventListener("mouseleave", untip);
  redraws.push(draw);
}
function legend(holder, color, left, middle, right) {
  redraws.push(() => {
    holder.replaceChildren();
    const say = (words) => typeof words === "function" ? words() : words;
    html("span", "", say(left), holder);
    const canvas = html("canvas", "", "", holder), paint = color();
    canvas.width = 240; canvas.height = 1;
    const context = canvas.getContext("2d");
    for (let x = 0; x < 240; x++) { context.fillStyle = `rgb(${paint(x / 239).join()})`; context.fillRect(x, 0, 1, 1); }
    html("span", "", say(right), holder);
    if (say(middle)) html("span", "", `(${say(middle)})`, holder);
  });
}

// ---- what every page has: its head, a theme, and sizes that follow the window; a page calls startPage() last
function drawAll() { for (const draw of redraws) draw(); }
function setTheme(theme) { root.dataset.theme = theme; drawAll(); }
function startPage() {
  for (const [name, words] of D.conditions) {
    const item = html("li", "", "", $("conditions"));
    html("b", "", name, item);
    item.append(words);
  }
  for (const card of D.cards) {
    const box = html("div", "card", "", $("cards"));
    html("div", "label", card.label, box);
    html("div", "value", card.value, box);
    if (card.from) html("div", "from", card.from, box);
  }
  for (const sentence of D.verdict) html("p", "", sentence, $("verdict"));
  $("theme").addEventListener("click", () => setTheme(dark() ? "light" : "dark"));
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  prefers.addEventListener("change", () => setTheme(prefers.matches ? "dark" : "light"));
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(drawAll); });
  setTheme(prefers.matches ? "dark" : "light");
}
