"use strict";
// Draws on canvases: heat maps of layers x columns, and the curve of balancedness. Knows nothing of the server.

/** Returns the value of a style sheet's colour by its name. */
function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Sizes a canvas to its place on the page, in device pixels; returns its context, in CSS pixels. */
function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  if (height) canvas.style.height = `${height}px`;
  const width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.font = "11px ui-sans-serif, system-ui, sans-serif";
  return { context, width, height: canvas.clientHeight };
}

/** Returns the colour at `share` (0..1) of a list of [r, g, b] stops. */
function between(stops, share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (at - low)));
}

function rgb(hex) {
  const digits = hex.length === 4 ? [...hex.slice(1)].map((digit) => digit + digit).join("") : hex.slice(1);
  return [0, 2, 4].map((i) => parseInt(digits.slice(i, i + 2), 16));
}

/** Colours of the load of experts, 0 .. 4 times the mean, and of ranks, 0.5 .. 1.5 times: 256 of each, as [r, g, b]. */
function palettes() {
  const none = rgb(themeColor("none")), isDark = none[1] < 128;
  const hot = isDark
    ? [none, [35, 72, 108], [38, 116, 140], [82, 172, 150], [240, 196, 92], [255, 104, 72]]
    : [none, [132, 193, 196], [44, 133, 161], [52, 75, 140], [122, 36, 120], [200, 40, 80]];
  const even = [[43, 108, 176], isDark ? [46, 84, 128] : [140, 180, 220], none, isDark ? [150, 92, 52] : [240, 170, 110], [214, 77, 30]];
  const table = (stops) => Array.from({ length: 256 }, (_, i) => between(stops, i / 255));
  return { hot: table(hot), even: table(even) };
}

/**
 * Draws rows x columns of values. Returns the layout, with which `cellAt` finds the cell under a pointer.
 * scale: value -> 0..1 of the palette; labels: of the rows; cursor: [row, column] to mark, or null
 */
function drawHeat(canvas, values, scale, labels, palette, cursor) {
  const rows = values.length, columns = rows ? values[0].length : 0;
  const cell = Math.min(Math.max(220 / rows, 7), 26);
  const { context, width, height } = prepare(canvas, Math.round(rows * cell) + 18);
  context.clearRect(0, 0, width, height);
  const left = 10 + 7 * Math.max(...labels.map((label) => String(label).length), 1);
  const area = { left, top: 0, width: width - left, height: height - 18, rows, columns };
  const image = new ImageData(columns, rows);
  let at = 0;
  for (const row of values) {
    for (const value of row) {
      const color = palette[Math.min(Math.max(Math.round(scale(value) * 255), 0), 255)];
      image.data[at++] = color[0];
      image.data[at++] = color[1];
      image.data[at++] = color[2];
      image.data[at++] = 255;
    }
  }
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  small.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = area.width < 1.5 * columns;
  context.drawImage(small, left, 0, area.width, area.height);
  drawGaps(context, area);
  drawLabels(context, area, labels);
  if (area.width / columns >= 40 && cell >= 16) drawTexts(context, area, values, image.data);
  if (cursor) {
    const w = area.width / columns, h = area.height / rows;
    context.strokeStyle = themeColor("ink");
    context.lineWidth = 2;
    context.strokeRect(left + cursor[1] * w, cursor[0] * h, w, h);
  }
  return area;
}

/** Lines between cells, where these are large enough. */
function drawGaps(context, area) {
  const w = area.width / area.columns, h = area.height / area.rows;
  context.fillStyle = themeColor("panel");
  if (w < 6 || h < 6) return;
  for (let i = 1; i < area.columns; i++) context.fillRect(area.left + i * w - 0.5, 0, 1, area.height);
  for (let i = 1; i < area.rows; i++) context.fillRect(area.left, i * h - 0.5, area.width, 1);
}

/** The values in their cells. colors: of the cells, as in ImageData */
function drawTexts(context, area, values, colors) {
  const w = area.width / area.columns, h = area.height / area.rows;
  context.textAlign = "center";
  context.textBaseline = "middle";
  values.forEach((row, i) => row.forEach((value, j) => {
    const at = 4 * (i * area.columns + j), light = 0.3 * colors[at] + 0.6 * colors[at + 1] + 0.1 * colors[at + 2] > 140;
    context.fillStyle = light ? "#1b2330" : "#fff";
    context.fillText(value.toFixed(2), area.left + (j + 0.5) * w, (i + 0.5) * h);
  }));
}

/** Names of layers on the left, numbers of columns below, as many as are readable. */
function drawLabels(context, area, labels) {
  context.fillStyle = themeColor("soft");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const h = area.height / area.rows, every = Math.ceil(13 / h);
  labels.forEach((label, i) => i % every === 0 && context.fillText(label, area.left - 6, (i + 0.5) * h));
  context.textAlign = "center";
  const w = area.width / area.columns, step = [1, 2, 4, 8, 16, 32, 64, 128].find((n) => n * w >= 26) || 256;
  for (let i = 0; i < area.columns; i += step) context.fillText(i, area.left + (i + 0.5) * w, area.height + 11);
}

/** Returns [row, column] under a pointer, null beside the cells. */
function cellAt(area, x, y) {
  const column = Math.floor(((x - area.left) / area.width) * area.columns);
  const row = Math.floor((y / area.height) * area.rows);
  return column >= 0 && column < area.columns && row >= 0 && row < area.rows ? [row, column] : null;
}

function drawScale(canvas, palette) {
  const { context, width, height } = prepare(canvas);
  for (let x = 0; x < width; x++) {
    context.fillStyle = `rgb(${palette[Math.round((x / Math.max(width - 1, 1)) * 255)].join()})`;
    context.fillRect(x, 0, 1, height);
  }
}

/**
 * Draws mean and lowest balancedness over time, with a band for each move and a mark for each failure or alarm.
 * points: {at, mean, lowest}, oldest first; bands: [from, to]; marks: times; cursor: index of a point, or null
 */
function drawCurve(canvas, points, bands, marks, now, cursor) {
  const { context, width, height } = prepare(canvas);
  context.clearRect(0, 0, width, height);
  const from = points[0].at, to = Math.max(now, points[points.length - 1].at, from + 10);
  const floor = Math.min(0.9, Math.floor(Math.min(...points.map((point) => point.lowest)) * 10) / 10);
  const area = { left: 30, right: 8, top: 8, bottom: 20 };
  const x = (at) => area.left + ((at - from) / (to - from)) * (width - area.left - area.right);
  const y = (value) => area.top + ((1 - value) / (1 - floor)) * (height - area.top - area.bottom);
  drawAxes(context, { x, y, from, to, floor, width, height });
  context.fillStyle = themeColor("band");
  for (const [start, end] of bands) {
    if (end >= from) context.fillRect(x(Math.max(start, from)), area.top, Math.max(x(end) - x(Math.max(start, from)), 4), height - area.top - area.bottom);
  }
  context.fillStyle = themeColor("bad");
  for (const at of marks) if (at >= from) context.fillRect(x(at) - 1, area.top, 2, height - area.top - area.bottom);
  context.beginPath();
  points.forEach((point, i) => context[i ? "lineTo" : "moveTo"](x(point.at), y(point.mean)));
  [...points].reverse().forEach((point) => context.lineTo(x(point.at), y(point.lowest)));
  context.fillStyle = themeColor("fill");
  context.fill();
  drawLine(context, points.map((point) => [x(point.at), y(point.lowest)]), themeColor("second"), 1.3);
  drawLine(context, points.map((point) => [x(point.at), y(point.mean)]), themeColor("accent"), 2.2);
  if (cursor !== null) {
    context.fillStyle = themeColor("soft");
    context.fillRect(x(points[cursor].at) - 0.5, area.top, 1, height - area.top - area.bottom);
  }
  return { timeAt: (pixel) => from + ((pixel - area.left) / (width - area.left - area.right)) * (to - from) };
}

/** Draws times the mean over time. points: {at, value}, oldest first; now: the right edge */
function drawLoads(canvas, points, now) {
  const { context, width, height } = prepare(canvas);
  context.clearRect(0, 0, width, height);
  const from = points[0].at, to = Math.max(now, from + 10), top = Math.max(2, Math.ceil(Math.max(...points.map((point) => point.value))));
  const x = (at) => 30 + ((at - from) / (to - from)) * (width - 38), y = (value) => 8 + (1 - value / top) * (height - 28);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of new Set([0, 1, top])) {
    context.fillStyle = themeColor("grid");
    context.fillRect(30, y(value), width - 38, 1);
    context.fillStyle = themeColor("soft");
    context.fillText(`${value}×`, 25, y(value));
  }
  drawTimes(context, { x, from, to, width, height });
  drawLine(context, points.map((point) => [x(point.at), y(point.value)]), themeColor("accent"), 2);
}

function drawAxes(context, { x, y, from, to, floor, width, height }) {
  context.textBaseline = "middle";
  context.textAlign = "right";
  const tick = 1 - floor > 0.45 ? 0.2 : 1 - floor > 0.15 ? 0.1 : 0.05;
  for (let value = 1; value >= floor - 1e-9; value -= tick) {
    context.fillStyle = themeColor("grid");
    context.fillRect(30, y(value), width - 38, 1);
    context.fillStyle = themeColor("soft");
    context.fillText(value.toFixed(tick < 0.1 ? 2 : 1), 25, y(value));
  }
  drawTimes(context, { x, from, to, width, height });
}

/** Times of day below an axis. */
function drawTimes(context, { x, from, to, width, height }) {
  context.fillStyle = themeColor("soft");
  context.textAlign = "center";
  const steps = [5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 10800, 21600, 43200, 86400, 604800];
  const every = steps.find((seconds) => (seconds / (to - from)) * width >= 74) || 604800;
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  for (let at = Math.ceil((from - shift) / every) * every + shift; at <= to; at += every) {
    if (x(at) < 50 || x(at) > width - 28) continue;
    context.fillText(clock(at, every < 60), x(at), height - 8);
  }
}

function drawLine(context, corners, color, width) {
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.beginPath();
  corners.forEach(([x, y], i) => context[i ? "lineTo" : "moveTo"](x, y));
  context.stroke();
  if (corners.length === 1) context.fillRect(corners[0][0] - 2, corners[0][1] - 2, 4, 4);
}

/** Returns the local time of day. */
function clock(at, withSeconds) {
  const date = new Date(at * 1000), two = (n) => String(n).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}` + (withSeconds ? `:${two(date.getSeconds())}` : "");
}
