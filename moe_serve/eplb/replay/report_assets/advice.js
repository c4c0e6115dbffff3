// Draws one advice from the data in #data, with charts.js before it in the same script.

// ---- what to type
for (const [engine, lines] of Object.entries(D.commands)) {
  const head = html("div", "command", "", $("commands"));
  html("h3", "", engine, head);
  const button = html("button", "", "copy", html("span", "switch", "", head));
  const text = html("pre", "", "", $("commands"));
  // Each word in an element of its own: lines break between words, and not at the hyphens of an option.
  for (const word of lines.join("\n").split(/([ \n]+)/)) text.append(word.trim() ? html("span", "", word) : word);
  button.type = "button";
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(text);
    // Browsers give no clipboard to a page that came over plain HTTP: the text stays selected then.
    try { await navigator.clipboard.writeText(text.textContent); button.textContent = "copied"; } catch { button.textContent = "selected: copy by hand"; }
  });
}

// ---- charts over redundant experts: a colour for each policy, a dash for each interval
const kindOf = (c) => c.interval_windows === null ? c.policy : `${c.policy}, every ${c.interval_windows}`;
const policies = [...new Set(D.choices.slice(1).map((c) => c.policy))];
const intervals = [...new Set(D.choices.map((c) => c.interval_windows).filter((n) => n !== null))];
// "in order" has one number of slots, and the first line says which the pointer can be at: it comes last.
const kinds = [...new Set([...D.choices.slice(1), D.choices[0]].map(kindOf))];
const curves = (key) => kinds.map((name) => {
  const found = D.choices.filter((c) => kindOf(c) === name), [{ policy, interval_windows }] = found, advised = name === kindOf(D.advised);
  const bars = key === "served_mean" && advised && D.advised.served_low !== null;
  return {
    name, x: found.map((c) => c.num_redundant), y: found.map((c) => c[key]), dots: true, wide: advised,
    color: policies.includes(policy) ? `var(--c${policies.indexOf(policy) % 6})` : "var(--floor)",
    dash: ["", "6 4", "2 3", "10 3 2 3"][Math.max(intervals.indexOf(interval_windows), 0) % 4],
    ...(bars && { low: found.map((c) => c.served_low), high: found.map((c) => c.served_high) }),
  };
});
const priced = D.advised.price_per_million_tokens !== null;
$("speed-title").textContent = priced ? "Price of a million tokens" : "Tokens/s of a rank";
$("bars").hidden = D.advised.served_low === null;
for (const [id, key, more] of [
  ["served", "served_mean", { range: balanceRange, format: (v) => v.toFixed(3) }],
  ["speed", priced ? "price_per_million_tokens" : "tokens_per_s_per_rank", { range: closeRange, format: short }],
]) lineChart($(id), {
  series: () => curves(key), label: key.replaceAll("_", " "), xLabel: "redundant experts per layer", xName: "redundant experts:",
  xTicks: () => [...new Set(D.choices.map((c) => c.num_redundant))],
  marks: () => [{ x: D.advised.num_redundant, text: "advised" }], ...more,
});

// ---- all choices
fillTable("choices", D.columns, D.rows, D.kinds);
for (const line of D.missing) html("li", "", line, $("missing"));
startPage();
