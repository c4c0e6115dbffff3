// The chat at /chat: one conversation, kept in this page alone, over OpenAI's routes of the same server.
"use strict";

const at = (id) => document.getElementById(id);
let messages = []; // of the conversation, as /v1/chat/completions takes them
let running = null; // the AbortController of the answer that comes
let keepsExperts = false; // whether answers can say which experts computed each token

function headers() {
  const key = at("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

function showProblem(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

// Returns the error that an answer holds, and asks for a key where one is missing.
async function problemOf(response) {
  if (response.status === 401) {
    at("key-row").hidden = false;
    at("key").focus();
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

function newMessage(role) {
  const box = document.createElement("article");
  box.className = `message ${role}`;
  const text = document.createElement("div");
  text.className = "text";
  box.append(text);
  at("talk").append(box);
  return { box, text };
}

function showReasoning(shown, more) {
  if (!shown.reasoning) {
    const details = document.createElement("details");
    details.innerHTML = "<summary>reasoning</summary>";
    shown.reasoning = document.createElement("div");
    shown.reasoning.className = "text";
    details.append(shown.reasoning);
    shown.box.prepend(details);
  }
  shown.reasoning.append(more);
}

// Yields the JSON of each server-sent event.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function bodyOf(text) {
  const fields = { stream: true, stream_options: { include_usage: true }, max_tokens: Number(at("length").value) || 256 };
  if (at("temperature").value !== "") fields.temperature = Number(at("temperature").value);
  if (keepsExperts) fields.return_routed_experts = true;
  if (at("kind").value === "continue") return ["v1/completions", { ...fields, prompt: text, ...(keepsExperts ? { logprobs: 0 } : {}) }];
  if (keepsExperts) fields.logprobs = true;
  const system = at("system").value.trim();
  const all = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: text }];
  return ["v1/chat/completions", { ...fields, messages: all }];
}

function setRunning(controller) {
  running = controller;
  at("send").hidden = Boolean(controller);
  at("stop").hidden = !controller;
}

async function ask(text) {
  const isChat = at("kind").value === "chat";
  const [route, body] = bodyOf(text);
  showProblem("");
  setRunning(new AbortController());
  const beganMs = performance.now();
  let asked = null, shown = null, answer = "", firstMs = 0, reason = "", usage = null, experts = null;
  const tokens = [], before = keepsExperts ? await placement() : null;
  try {
    const response = await fetch(route, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error(await problemOf(response));
    at("text").value = "";
    if (isChat) {
      asked = newMessage("user");
      asked.text.textContent = text;
    }
    shown = newMessage("assistant");
    if (!isChat) {
      const prompt = document.createElement("span");
      prompt.className = "prompt";
      prompt.textContent = text;
      shown.text.append(prompt);
    }
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      experts = choice.routed_experts ?? experts;
      tokens.push(...(choice.logprobs?.content?.map((each) => each.token) ?? choice.logprobs?.tokens ?? []));
      const more = choice.delta?.content ?? choice.text ?? "";
      const thought = choice.delta?.reasoning_content ?? "";
      if (more || thought) firstMs ||= performance.now();
      if (thought) showReasoning(shown, thought);
      if (more) {
        answer += more;
        shown.text.append(more);
      }
      at("talk").parentElement.scrollTo({ top: 1e9 });
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else showProblem(error.message);
  } finally {
    setRunning(null);
    if (shown) describe(shown.box, usage, reason, beganMs, firstMs);
    if (shown && experts && usage && tokens.length) showExperts(shown.box, tokens, experts, usage.prompt_tokens, before, await placement());
    if (isChat && shown) messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
    at("text").focus();
  }
}

// Writes below an answer how long it took, and why it ended.
function describe(box, usage, reason, beganMs, firstMs) {
  const line = document.createElement("p");
  line.className = "more";
  const parts = [];
  if (firstMs) parts.push(`first token after ${Math.round(firstMs - beganMs)} ms`);
  if (usage) {
    const seconds = (performance.now() - firstMs) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && firstMs) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} in the prompt${cached ? `, ${cached} of them cached` : ""}`);
  }
  if (reason === "length") parts.push("ended at the most tokens that the settings allow");
  if (reason === "stopped") parts.push("stopped");
  line.textContent = parts.join(" · ");
  box.append(line);
}

// Returns where experts lie: the slots of each MoE layer, the number of ranks, and the placement's version; null if unknown.
async function placement() {
  try {
    const answer = await (await fetch("dashboard/data", { headers: headers() })).json();
    const ranks = answer.ranks.filter((rank) => typeof rank.rank === "number").length;
    return answer.placement && { rows: answer.placement, ranks, version: answer.balancer.placement.version };
  } catch {
    return null;
  }
}

// Returns the experts of a token in a layer, best first where a gate chose. experts: as the server sends them
function reader(experts) {
  const bytes = Uint8Array.from(atob(experts.data), (letter) => letter.charCodeAt(0)), [rows, layers, topk] = experts.shape;
  const numbers = experts.dtype === "uint16" ? new Uint16Array(bytes.buffer) : bytes;
  return { rows, layers, of: (row, layer) => numbers.subarray((row * layers + layer) * topk, (row * layers + layer + 1) * topk) };
}

const hue = (rank, ranks) => `hsl(${Math.round((360 * rank) / ranks + 200) % 360} 65% 50%)`;

// Shows each token of an answer with a strip of the ranks whose experts computed it, and on demand the experts themselves.
function showExperts(box, tokens, experts, promptLength, before, now) {
  const read = reader(experts), line = document.createElement("div"), text = document.createElement("p"), title = document.createElement("p");
  line.className = "tokens";
  text.className = title.className = "more";
  const holders = (layer, expert) => {
    if (!now?.rows[layer]) return [];
    const perRank = now.rows[layer].length / now.ranks;
    return [...new Set(now.rows[layer].flatMap((held, slot) => (held === expert ? [Math.floor(slot / perRank)] : [])))];
  };
  const buttons = tokens.map((token, i) => {
    const row = promptLength - 1 + i; // whose logits the token was drawn from
    if (row >= read.rows) return null;
    const shares = new Map();
    for (let layer = 0; layer < read.layers; layer++) {
      for (const expert of read.of(row, layer)) {
        const ranks = holders(layer, expert);
        for (const rank of ranks) shares.set(rank, (shares.get(rank) ?? 0) + 1 / ranks.length);
      }
    }
    const button = document.createElement("button"), strip = document.createElement("i");
    button.type = "button";
    button.className = "token";
    button.tabIndex = i ? -1 : 0;
    button.append(token.replaceAll("\n", "⏎") || " ", strip);
    const all = [...shares.values()].reduce((a, b) => a + b, 0);
    let from = 0;
    strip.style.background = !all ? "" : `linear-gradient(90deg, ${[...shares].sort(([a], [b]) => a - b).map(([rank, share]) => {
      const begin = from;
      from += (100 * share) / all;
      return `${hue(rank, now.ranks)} ${begin}% ${from}%`;
    }).join(", ")})`;
    const tell = () => {
      const layers = Array.from({ length: read.layers }, (_, layer) => `layer ${layer}: ` + [...read.of(row, layer)].map((expert) => {
        const ranks = holders(layer, expert);
        if (ranks.length) return `${expert} (rank ${ranks.join(" or ")})`;
        const isIdentity = now?.rows[layer] && expert > Math.max(...now.rows[layer]); // its id lies behind the others'
        return isIdentity ? `${expert} (gives back its input)` : expert;
      }).join(", "));
      text.textContent = `${JSON.stringify(token)}, experts by MoE layer, best first where a gate chose. ${layers.join("; ")}`;
      for (const other of buttons) if (other) other.tabIndex = -1;
      button.tabIndex = 0;
    };
    for (const name of ["pointerenter", "focus", "click"]) button.addEventListener(name, tell);
    button.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) buttons[i + step]?.focus();
    });
    return button;
  });
  const ranks = now ? Array.from({ length: now.ranks }, (_, rank) => rank) : [];
  title.append("Ranks whose experts computed each token: ");
  for (const rank of ranks) {
    const mark = document.createElement("span");
    mark.className = "rank";
    mark.style.borderColor = hue(rank, now.ranks);
    mark.textContent = rank;
    title.append(mark, " ");
  }
  if (before && now && before.version !== now.version) title.append(`Experts moved meanwhile: placement ${before.version} → ${now.version}.`);
  text.textContent = "A token shows its experts: point at it, or use the arrow keys.";
  line.append(...buttons.filter(Boolean));
  box.append(title, line, text);
}

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await problemOf(response));
    const { engine, speculation } = (await (await fetch("server_info", { headers: headers() })).json()).config;
    keepsExperts = engine.return_routed_experts;
    at("no-experts").hidden = keepsExperts;
    at("beside-layer").hidden = speculation.mode !== "mtp";
    at("model").textContent = (await response.json()).data[0].id;
    at("key-row").hidden = true;
    showProblem("");
  } catch (error) {
    showProblem(error.message);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value;
  if (text.trim() && !running) ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("stop").addEventListener("click", () => running?.abort());
at("key").addEventListener("change", showModel);
at("anew").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("talk").replaceChildren();
  showProblem("");
  at("text").focus();
});
showModel();
