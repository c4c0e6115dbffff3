// Draws one replay from the data in #data, with charts.js before it in the same script.

// ---- table
const colorOf = (policy) => policy.role === "floor" ? "var(--floor)" : policy.role === "ceiling" ? "var(--ceiling)" : `var(--c${policy.color % 6})`;
{
  const head = html("tr", "", "", html("thead", "", "", $("table")));
  for (const column of D.columns) html("th", "", column, head);
  const body = html("tbody", "", "", $("table"));
  D.policies.forEach((policy) => {
    const row = html("tr", policy.best ? "best" : policy.role, "", body);
    policy.cells.forEach((text, i) => {
      const cell = html("td", "", "", row);
      if (i === 0) html("span", "dot", "", cell).style.background = colorOf(policy);
      cell.append(text);
    });
  });
  for (const line of D.missing) html("li", "", line, $("missing"));
}

// ---- sweep of a simulation
if (D.sweep) {
  const S = D.sweep, names = [...new Set(S.series.filter((s) => s.role === "policy").map((s) => s.name))];
  $("sweep-section").hidden = false;
  $("sweep-note").textContent = `${S.yLabel}, against ${S.xLabel}. The pictures below show the best combination.`;
  lineChart($("sweep"), {
    series: () => S.series.map((s) => ({ name: s.name, x: s.x, y: s.y, dots: true, wide: s.role === "policy",
      dash: s.role === "policy" ? "" : "5 4",
      color: s.role === "floor" ? "var(--floor)" : s.role === "ceiling" ? "var(--ceiling)" : `var(--c${names.indexOf(s.name) % 6})` })),
    label: "sweep", xLabel: S.xLabel, xName: S.xLabel, height: 300, format: (v) => S.digits ? v.toFixed(S.digits) : short(v),
    xTicks: () => [...new Set(S.series[0].x)],
    range: closeRange,
  });
  fillTable("sweep-table", S.columns, S.rows);
}

// ---- an earlier report
if (D.against) {
  const A = D.against;
  $("against-section").hidden = false;
  $("against-title").textContent = `Against ${A.name}`;
  for (const sentence of A.verdict) html("li", "", sentence, $("against-verdict"));
  fillTable("against-table", A.columns, A.rows);
  const both = D.policies.filter((p) => p.role !== "ceiling" && A.served[p.name]);
  lineChart($("against"), {
    series: () => both.flatMap((p) => [
      { name: p.name, color: colorOf(p), x: D.steps, y: p.served_mean, wide: true },
      { name: `${p.name}, before`, color: colorOf(p), x: A.steps, y: A.served[p.name], dash: "4 3" },
    ]),
    label: "balancedness against the earlier report", xLabel: "first engine step of the window", xName: "step", height: 260, format: (v) => v.toFixed(3),
    range: balanceRange,
  });
}

// ---- charts over time
const timed = (key, roles) => D.policies.filter((p) => roles.includes(p.role) && p[key])
  .map((p) => ({ name: p.name, color: colorOf(p), x: D.steps, y: p[key], dash: p.role === "policy" ? "" : "5 4", wide: p.best }));
let balanceKey = "served_mean";
lineChart($("balance"), {
  series: () => timed(balanceKey, ["floor", "policy", "ceiling"]), label: "balancedness over time", xLabel: "engine step", xName: "step",
  format: (v) => v.toFixed(3), height: 300,
  range: balanceRange,
});
const hasMoves = D.policies.some((p) => p.role === "policy" && p.moved_share.some((v) => v > 0)), hasCurve = D.redundancy.length > 0;
$("moves-part").hidden = !hasMoves; $("redundancy-part").hidden = !hasCurve; $("curves-section").hidden = !hasMoves && !hasCurve;
if (hasMoves) lineChart($("moves"), {
  series: () => timed("moved_share", ["policy"]), label: "moves per rebalance", xLabel: "engine step", xName: "step",
  format: (v) => `${(100 * v).toFixed(v < 0.1 ? 1 : 0)}%`,
});
if (hasCurve) lineChart($("redundancy"), {
  series: () => [
    { name: "mean layer", color: "var(--c0)", x: D.redundancy.map((r) => r[0]), y: D.redundancy.map((r) => r[1]), wide: true, dots: true },
    { name: "worst layer", color: "var(--c1)", x: D.redundancy.map((r) => r[0]), y: D.redundancy.map((r) => r[2]), dots: true },
  ],
  label: "redundancy curve", xLabel: D.slotLabel, xName: "slots", format: (v) => v.toFixed(3),
  range: balanceRange,
  xTicks: () => D.redundancy.map((r) => r[0]).filter((_, i, all) => all.length < 9 || i % 2 === 0),
  marks: () => [{ x: D.numSlots, text: `now: ${D.numSlots}` }],
});

// ---- rank load over time: bytes around the mean; layers: bytes, 1..3 times the mean
let timeKey = "ranks";
const layerAxis = [D.heat.layers[0], "layer", D.heat.layers[D.heat.layers.length - 1]];
$("after-part").hidden = !D.time.after;
for (const side of ["before", "after"].filter((name) => D.time[name])) {
  const picture = D.time[side], load = bytes(picture.load), layers = bytes(picture.layers), columns = picture.columns;
  $(`${side}-name`).textContent = picture.name;
  const x = [`step ${D.steps[0].toLocaleString("en")}`, "first engine step of the window", D.steps[D.steps.length - 1].toLocaleString("en")];
  const relative = (byte) => 1 + (byte / 127.5 - 1) * D.time.span;
  pixelMap($(side), () => timeKey === "ranks" ? {
    rows: picture.ranks, columns, x, y: [0, "rank", picture.ranks - 1], color: diverging, at: (r, c) => load[r * columns + c] / 255,
    describe: (r, c) => [`rank ${r}, step ${D.steps[c].toLocaleString("en")}`, `${relative(load[r * columns + c]).toFixed(2)} × mean load`],
  } : {
    rows: D.heat.layers.length, columns, x, y: layerAxis, color: heated, at: (r, c) => layers[r * columns + c] / 255,
    describe: (r, c) => [`layer ${D.heat.layers[r]}, step ${D.steps[c].toLocaleString("en")}`, `busiest rank: ${(1 + layers[r * columns + c] / 127.5).toFixed(2)} × mean`],
  });
}
const percent = Math.round(100 * D.time.span);
legend($("rank-legend"), () => timeKey === "ranks" ? diverging() : heated(),
  () => timeKey === "ranks" ? `${percent === 100 ? 0 : (1 - D.time.span).toFixed(2)} × mean` : "1 × mean (balanced)", () => timeKey === "ranks" ? "mean in the middle" : "",
  () => timeKey === "ranks" ? `${(1 + D.time.span).toFixed(2)} × mean or more` : "3 × mean or more");

// ---- experts: load as bytes, log2 of load over mean, 0..255 over -3..+3; replicas and moves of the best policy
const heat = bytes(D.heat.data), experts = D.heat.columns, C = D.changes;
const before = C && bytes(C.before), after = C && bytes(C.after), received = C && new Uint16Array(bytes(C.received).buffer);
let heatOrder = "id", shown = "load";
$("shown").hidden = !C;
const orders = D.heat.layers.map((_, r) => Array.from({ length: experts }, (_, c) => c).sort((a, b) => heat[r * experts + b] - heat[r * experts + a] || a - b));
const sizeOf = (value) => value ? `${short(value).replace(/([kMG]?)$/, " $1")}B` : "0";
const size = (count) => C.expertBytes ? `, ${sizeOf(count * C.expertBytes)}` : "";
const HEATS = {
  load: {
    title: "Expert load by layer", note: "Tokens of each expert over the mean of its layer. The strongest cells are the experts worth replicating.",
    color: sequential, at: (i) => heat[i] / 255, legend: ["⅛ × mean or less", "logarithmic; mean in the middle", "8 × mean or more"],
  },
  replicas: {
    title: "What changed: replicas of each expert", note: C && `Replicas at the end less those at the start, ${C.name}.`,
    color: diverging, at: (i) => 0.5 + (after[i] - before[i]) / 4, legend: ["2 fewer, or less still", "unchanged in the middle", "2 more, or more still"],
  },
  received: {
    title: "What it cost: how often each expert was moved", note: C && C.words,
    color: heated, at: (i) => received[i] / C.most, legend: ["never", "", C && `${C.most} time${C.most > 1 ? "s" : ""}${size(C.most)}`],
  },
};
pixelMap($("heat"), () => {
  const expert = (r, c) => heatOrder === "id" ? c : orders[r][c], kind = HEATS[shown];
  $("heat-title").textContent = kind.title; $("heat-note").textContent = kind.note;
  return {
    rows: D.heat.layers.length, columns: experts, color: kind.color, at: (r, c) => kind.at(r * experts + expert(r, c)),
    x: heatOrder === "id" ? [0, "expert", experts - 1] : ["hottest", "experts of the layer by load", "coldest"], y: layerAxis,
    describe: (r, c) => {
      const i = r * experts + expert(r, c), lines = [`layer ${D.heat.layers[r]}, expert ${expert(r, c)}`, `${(2 ** (heat[i] / 42.5 - 3)).toFixed(2)} × mean load of its layer`];
      if (C) lines.push(`replicas: ${before[i]} → ${after[i]}`, received[i] ? `moved ${received[i]} time${received[i] > 1 ? "s" : ""}${size(received[i])}` : "never moved");
      return lines;
    },
  };
});
legend($("heat-legend"), () => HEATS[shown].color(), ...[0, 1, 2].map((k) => () => HEATS[shown].legend[k]));

$("layers-section").hidden = !C || C.layers.length < 2;
if (!$("layers-section").hidden) {
  $("layers-note").textContent = `Means over all windows, and what the ranks received for ${C.name} in all of them.`;
  const scale = C.expertBytes ? C.expertBytes : 1, x = D.heat.layers;
  $("layers-cost-title").textContent = C.expertBytes ? "Bytes of experts received" : "Experts received";
  lineChart($("layers-gain"), {
    series: () => [{ name: "do nothing", color: "var(--floor)", x, y: C.layers.map((l) => l[0]), dash: "5 4" },
      { name: C.name, color: "var(--c0)", x, y: C.layers.map((l) => l[1]), wide: true }],
    label: "served balancedness by layer", xLabel: "layer", xName: "layer", format: (v) => v.toFixed(3),
    range: balanceRange,
  });
  lineChart($("layers-cost"), {
    series: () => [{ name: C.name, color: "var(--c1)", x, y: C.layers.map((l) => l[2] * scale), wide: true }],
    label: "cost by layer", xLabel: "layer", xName: "layer", format: (v) => C.expertBytes ? sizeOf(v) : short(v),
  });
}

// ---- layers as a table
{
  const number = (digits) => (value) => value.toFixed(digits);
  const columns = [{ name: "layer", format: String }, { name: "hottest expert, × mean", format: number(2) }, { name: "do nothing", format: number(4) },
    { name: D.layerPolicy, format: number(4) }, { name: "its worst window", format: number(4) }, { name: "experts received", format: (v) => v.toLocaleString("en") },
    { name: "bytes received", format: (v) => sizeOf(v) }];
  const compared = D.layerPolicy !== "do nothing", sized = compared && D.layerRows.some((row) => row[6] !== null);
  const kept = columns.map((_, i) => i).filter((i) => (compared || (i !== 3 && i !== 5)) && (sized || i !== 6));
  const save = sortedTable($("layer-table"), kept.map((i) => columns[i]), D.layerRows.map((row) => kept.map((i) => row[i])), "layers.csv");
  $("layer-save").addEventListener("click", save);
}

// ---- phases side by side
$("phases-section").hidden = !D.phases;
if (D.phases) {
  fillTable("phases-table", D.phases.columns, D.phases.rows);
  for (const phase of D.phases.lines) {
    const part = html("div", "", "", $("phases"));
    html("h3", "", phase.name, part);
    lineChart(html("div", "chart", "", part), {
      series: () => D.policies.filter((p) => phase.served[p.name]).map((p) => ({ name: p.name, color: colorOf(p), x: phase.steps, y: phase.served[p.name],
        dash: p.role === "policy" ? "" : "5 4", wide: p.best })),
      label: `balancedness of ${phase.name}`, xLabel: "engine step", xName: "step", format: (v) => v.toFixed(3), range: balanceRange,
    });
  }
}

// ---- traffic
$("traffic-section").hidden = !D.traffic;
if (D.traffic) {
  const T = D.traffic, R = T.numRanks;
  for (const [name, text] of T.ranks) {
    const figure = html("figure", "", "", $("traffic-ranks")), share = new Uint16Array(bytes(text).buffer);
    html("figcaption", "", name, figure);
    pixelMap(html("canvas", "", "", figure), () => ({
      rows: R, columns: R, color: sequential, at: (r, c) => share[r * R + c] / 65535, x: [0, "rank of the expert", R - 1], y: [0, "rank of the token", R - 1],
      describe: (r, c) => [`rank ${r} → rank ${c}`, `${(100 * T.most * share[r * R + c] / 65535).toFixed(3)}% of all routes`],
    }));
  }
  legend($("traffic-legend"), () => sequential(), "none", "", `${(100 * T.most).toPrecision(3)}% of all routes`);
  $("traffic-nodes").hidden = !T.nodes.length;
  for (const [name, matrix] of T.nodes) {
    const figure = html("figure", "matrix", "", $("traffic"));
    html("figcaption", "", name, figure);
    const size = matrix.length, cell = Math.min(74, 520 / (size + 1)), edge = cell * size + 46;
    const most = Math.max(...matrix.flat(), 2 / size ** 2);  // an even share is the middle of the scale
    const draw = () => {
      figure.querySelector("svg")?.remove();
      const svg = make("svg", { viewBox: `0 0 ${edge + 8} ${edge}`, style: `max-width:${edge + 8}px;width:100%` });
      const paint = sequential();
      matrix.forEach((row, r) => {
        make("text", { x: 40, y: 40 + r * cell + cell / 2 + 4, "text-anchor": "end" }, svg, size > 12 && r % 4 ? "" : `n${r}`);
        make("text", { x: 46 + r * cell + cell / 2, y: 30, "text-anchor": "middle" }, svg, size > 12 && r % 4 ? "" : `n${r}`);
        row.forEach((share, c) => {
          const box = make("rect", { x: 46 + c * cell, y: 40 + r * cell, width: cell - 1.5, height: cell - 1.5, rx: 2, fill: `rgb(${paint(share / most).join()})` }, svg);
          box.addEventListener("mousemove", (event) => tip(event, [`node ${r} → node ${c}`, `${(100 * share).toFixed(2)}% of all routes`]));
          box.addEventListener("mouseleave", untip);
          if (size <= 8) {
            const light = share / most > 0.55;
            make("text", { x: 46 + c * cell + cell / 2, y: 44 + r * cell + cell / 2, "text-anchor": "middle", "pointer-events": "none",
              style: `fill:${light !== dark() ? "#fff" : "#1b2330"}` }, svg, `${(100 * share).toFixed(1)}%`);
          }
        });
      });
      figure.append(svg);
    };
    redraws.push(draw);
  }
}

// ---- switches
for (const group of document.querySelectorAll(".switch")) group.addEventListener("click", (event) => {
  const key = event.target.dataset.key;
  if (!key) return;
  for (const button of group.children) button.classList.toggle("on", button === event.target);
  if (group.dataset.for === "balance") balanceKey = key; else if (group.dataset.for === "time") timeKey = key; else if (group.dataset.for === "shown") shown = key; else heatOrder = key;
  drawAll();
});
startPage();
