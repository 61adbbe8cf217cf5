"use strict";
// The page asks this server alone, by its API, with the token that was entered (kept until the window is closed).

const EVERY_MS = 2000, POINTS = 150, PAGE = 50, WINDOW = 2048, NEAR = 32;
const byId = (id) => document.getElementById(id);
const show = (id, yes) => { byId(id).hidden = !yes; };
const make = (tag, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
};
const size = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes ? Math.min(4, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
};
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const ms = (value) => (value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(1)} s`);

let token = sessionStorage.getItem("token") || "";
let model = "", chosen = null, pages = 1, timer = 0, history = [], answers = [], asking = null;
const ordered = new Map();

// ---- asking the server

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function call(path, options = {}) {
  const headers = { ...(token && { authorization: `Bearer ${token}` }), ...options.headers };
  if (options.json) Object.assign(options, { body: JSON.stringify(options.json) });
  if (options.json) headers["content-type"] = "application/json";
  const reply = await fetch(path, { ...options, headers });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, body.error?.message || body.phase || `${reply.status} ${reply.statusText}`);
}

const ask = async (path, options) => (await call(path, options)).json();

function tell(error) {
  if (error.name === "AbortError") return;
  const refused = error instanceof Refused;
  byId("problem").textContent = refused ? error.message : "The server does not answer. It is asked again.";
  show("problem", true);
  if (error.status === 401) signOut();
}

function signOut() {
  token = "";
  sessionStorage.removeItem("token");
  show("login", true); show("logout", false); show("main", false);
  byId("token").focus();
}

async function guarded(work) {
  try { await work(); } catch (error) { tell(error); }
}

// ---- what the server does, every two seconds

async function refresh() {
  clearTimeout(timer);
  try {
    const status = await ask("/v1/status").catch((error) => { if (error.status !== 403) throw error; });
    const served = status ? status.model : (await ask("/v1/models")).data[0].id;
    const [contexts, operations] = await Promise.all([listContexts(), ask("/v1/operations")]);
    if (model !== served) show("problem", false);
    model = served;
    byId("model").textContent = `Model ${model}`;
    if (byId("state").textContent !== "Serving") { byId("state").textContent = "Serving"; show("problem", false); }
    show("main", true); show("login", false); show("logout", token !== "");
    if (status) drawStatus(status);
    drawContexts(contexts);
    drawOperations(operations.data.filter((one) => !one.done));
    tellEnds(operations.data);
  } catch (error) {
    byId("state").textContent = error.status === 401 ? "Asks for a token" : "Not serving";
    if (error.status !== 401 || token) tell(error); else signOut();
  }
  if (byId("login").hidden) timer = setTimeout(refresh, EVERY_MS);
}

async function listContexts() {
  const all = [];
  let next = "", left = pages, more = true;
  while (left-- && more) {
    const page = await ask(`/v1/contexts?page_size=${PAGE}&page_token=${encodeURIComponent(next)}`);
    all.push(...page.data);
    next = page.next_page_token || "";
    more = page.has_more;
  }
  show("more", more);
  return all;
}

function drawStatus(status) {
  const now = performance.now(), last = history.at(-1);
  const seconds = last ? (now - last.at) / 1000 : 0;
  const made = last ? Math.max(0, status.decode_tokens - last.made) : 0;
  history.push({
    at: now,
    made: status.decode_tokens,
    sessions: status.prompting + status.decoding,
    tokens: seconds ? made / seconds : 0,
    memory: status.context_limit_bytes ? status.context_bytes / status.context_limit_bytes : 0,
  });
  history = history.slice(-POINTS);
  const { sessions, tokens } = history.at(-1);
  const waiting = status.requests - sessions;
  byId("sessions-now").textContent = `${sessions} of ${status.max_sessions}, ${waiting} waiting`;
  byId("tokens-now").textContent = tokens.toFixed(1);
  byId("memory-now").textContent = `${size(status.context_bytes)} of ${size(status.context_limit_bytes)}`;
  drawLine("sessions", status.max_sessions);
  drawLine("tokens", Math.max(1, ...history.map((point) => point.tokens)));
  drawLine("memory", 1);
}

function paper(canvas) {
  const ratio = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  return canvas.getContext("2d");
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

function drawLine(name, most) {
  const canvas = byId(name), pen = paper(canvas), { width, height } = canvas;
  pen.strokeStyle = colour("--accent");
  pen.lineWidth = 2 * (devicePixelRatio || 1);
  pen.beginPath();
  history.forEach((point, index) => {
    const x = width - (history.length - 1 - index) * (width / (POINTS - 1));
    pen.lineTo(x, (height - pen.lineWidth) * (1 - point[name] / most) + pen.lineWidth / 2);
  });
  pen.stroke();
}

// ---- contexts

function drawContexts(contexts) {
  const held = document.activeElement?.dataset?.key;
  const rows = contexts.map((context) => {
    const name = context.display_name || context.id.slice(0, 12), usable = context.state === "READY";
    const open = make("button", { type: "button", textContent: name, disabled: !usable, onclick: () => choose(context) });
    const remove = make("button", { type: "button", className: "danger", textContent: "Delete", onclick: () => guarded(() => removeContext(context, name)) });
    open.dataset.key = `open ${context.id}`;
    remove.dataset.key = `remove ${context.id}`;
    remove.setAttribute("aria-label", `Delete ${name}`);
    open.setAttribute("aria-label", `Chat on ${name}`);
    const where = !context.resident ? "disk" : context.placement === "device" ? "memory" : `memory (${context.placement})`;
    const state = context.state.toLowerCase() + (context.children ? `, ${context.children} children` : "");
    const row = make("tr", { className: chosen?.id === context.id ? "chosen" : "" },
      make("td", {}, open),
      make("td", { textContent: state, title: context.state_message }),
      make("td", { textContent: where }),
      make("td", { className: "number", textContent: context.token_count.toLocaleString("en") }),
      make("td", { className: "number", textContent: size(context.kv_bytes + context.index_bytes) }),
      make("td", { textContent: context.default_method }),
      make("td", {}, remove));
    return row;
  });
  const nothing = make("tr", {}, make("td", { colSpan: 7, textContent: "There are no contexts. Upload a text to make one." }));
  byId("contexts").replaceChildren(...(rows.length ? rows : [nothing]));
  if (held) document.querySelector(`[data-key="${held}"]`)?.focus();
}

function drawOperations(operations) {
  byId("operations").replaceChildren(...operations.map((one) => {
    const name = ordered.get(one.id) || one.context_name.slice(9, 21), part = one.tokens_total ? one.tokens_done / one.tokens_total : 0;
    const bar = make("progress", { max: 1, value: part });
    bar.setAttribute("aria-label", `How much of ${name} has been read`);
    const cancel = make("button", { type: "button", textContent: "Cancel", onclick: () => guarded(async () => {
      await ask(`/v1/operations/${one.id}/cancel`, { method: "POST" });
      await refresh();
    }) });
    return make("li", {}, bar, make("span", { textContent: `${name}: ${one.phase} ${percent(part)}${one.waiting_reason && `; ${one.waiting_reason}`}` }), cancel);
  }));
}

function tellEnds(operations) {
  for (const one of operations.filter((each) => each.done && ordered.delete(each.id))) {
    if (one.error) tell(new Refused(0, one.error.message));
  }
}

async function upload(event) {
  event.preventDefault();
  const form = new FormData(), name = byId("name").value.trim(), [file] = byId("file").files;
  form.append("file", file);
  form.append("purpose", "user_data");
  const taken = await ask("/v1/files", { method: "POST", body: form });
  const order = await ask("/v1/contexts", { method: "POST", json: { file_id: taken.id, display_name: name || file.name } });
  ordered.set(order.id, name || file.name);
  byId("create").reset();
  await refresh();
}

async function removeContext(context, name) {
  const dialog = byId("sure");
  const others = context.children ? ` and the ${context.children} that continue it` : "";
  byId("sure-text").textContent = `Delete ${name}${others}? Nobody can bring it back.`;
  dialog.returnValue = "no";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  if (dialog.returnValue !== "yes") return;
  await ask(`/v1/contexts/${context.id}?force=${context.children > 0}`, { method: "DELETE" });
  if (chosen?.id === context.id) { chosen = null; show("talk", false); }
  await refresh();
}

// ---- chat

function choose(context) {
  asking?.abort();
  chosen = context;
  answers = [];
  byId("talk-title").textContent = `Chat on ${context.display_name || context.id.slice(0, 12)}`;
  byId("turns").replaceChildren();
  byId("continue").disabled = true;
  show("talk", true); show("map", false);
  byId("question").focus();
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function say(question) {
  const answer = { context: chosen, question, text: "", words: [], looks: [] }, stop = new AbortController();
  const earlier = answers.flatMap((one) => [{ role: "user", content: one.question }, { role: "assistant", content: one.text || " " }]);
  const shown = make("div"), about = make("small", { textContent: "…" });
  const turn = make("div", { className: "turn answer" }, shown, about);
  byId("turns").append(make("div", { className: "turn", textContent: question }), turn);
  asking = stop;
  busy(true);
  try {
    const reply = await call("/v1/chat/completions", { method: "POST", signal: stop.signal, json: {
      model, context: answer.context.id, messages: [...earlier, { role: "user", content: question }], stream: true,
      stream_options: { include_usage: true }, temperature: 0, max_tokens: Number(byId("most").value) || 64,
      logprobs: true, map_every: 1, explain: true } });
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Refused(0, chunk.error.message);
      const choice = chunk.choices[0];
      answer.text += choice?.delta.content || "";
      answer.words.push(...(choice?.logprobs?.content || []).map((each) => each.token));
      answer.looks.push(...(chunk.looks || []));
      if (chunk.sparsekv) answer.figures = chunk.sparsekv;
      shown.textContent = answer.text;
    }
  } catch (error) {
    tell(error);
  } finally {
    if (asking === stop) { asking = null; busy(false); }
    if (chosen === answer.context) answers.push(answer);
    about.textContent = described(answer);
    if (answer.looks.length) turn.append(make("button", { type: "button", textContent: "Where it looked", onclick: () => guarded(() => openMap(answer)) }));
  }
}

function described({ figures, words }) {
  const tokens = `${words.length} token${words.length === 1 ? "" : "s"}`;
  if (!figures) return `Stopped after ${tokens}.`;
  const why = figures.explanation, missed = why.missed && `; no longer beginning: ${why.missed}`;
  const audited = why.audited_steps ? ` Audits: ${why.audited_kl.toPrecision(3)} nats from full attention in ${why.audited_steps} steps.` : "";
  return `${tokens}, ${percent(figures.fraction_of_keys)} of the keys by ${figures.method} (${why.method_reason}). ` +
    `Context ${why.lookup}${why.tier && `, was on ${why.tier}`}${missed}. Load ${ms(why.load_ms)}, queue ${ms(why.queue_ms)}, prompt ${ms(why.prompt_ms)}, answer ${ms(why.decode_ms)}.${audited}`;
}

function busy(yes) {
  byId("send").disabled = yes;
  byId("stop").disabled = !yes;
  byId("continue").disabled = yes || !byId("turns").children.length;
}

// ---- the map: heat over the text, by layers and by token of the answer

let map = null;

async function openMap(answer) {
  map = { answer, texts: new Map(), total: answer.context.token_count, at: 0, heat: new Map() };
  const groups = answer.looks[0].layers.map((each, index) => make("option", { value: index, textContent: each.first === each.last ? `${each.first}` : `${each.first} to ${each.last}` }));
  byId("layers").replaceChildren(make("option", { value: "", textContent: "all that search" }), ...groups);
  Object.assign(byId("word"), { max: answer.looks.length - 1, value: -1 });
  show("map", true);
  await drawMap(true);
  byId("map").scrollIntoView({ block: "nearest" });
}

function heatOf() {
  const one = Number(byId("word").value), group = byId("layers").value, heat = new Map();
  const looks = one < 0 ? map.answer.looks : [map.answer.looks[one]];
  for (const look of looks) {
    const layers = group === "" ? look.layers : [look.layers[group]];
    for (const each of layers) each.positions.forEach((place, index) => {
      heat.set(place, (heat.get(place) || 0) + each.weights[index] / layers.length / looks.length);
    });
  }
  return heat;
}

async function drawMap(jump) {
  const one = Number(byId("word").value);
  const word = one < 0 ? "the whole answer" : JSON.stringify(map.answer.words[map.answer.looks[one].token] ?? "end");
  byId("word-now").textContent = word;
  byId("word").setAttribute("aria-valuetext", word);
  map.heat = heatOf();
  const near = new Map();
  for (const [place, weight] of map.heat) {
    const part = Math.floor(place / NEAR);
    near.set(part, (near.get(part) || 0) + weight);
  }
  const best = [...near].sort((a, b) => b[1] - a[1]).slice(0, 6);
  drawStrip(near);
  const buttons = await Promise.all(best.map(async ([part, weight]) => {
    const words = (await textOf(part * NEAR, NEAR)).join("").trim().slice(0, 48);
    return make("li", {}, make("button", { type: "button", textContent: `${percent(weight)} “${words}…”`, onclick: () => guarded(() => drawText(part * NEAR)) }));
  }));
  byId("places").replaceChildren(...buttons);
  if (jump || best.length) await drawText(jump || one >= 0 ? best[0][0] * NEAR : map.at);
}

function drawStrip(near) {
  const canvas = byId("strip"), pen = paper(canvas), { width, height } = canvas;
  const most = Math.max(...near.values()), scale = width / map.total;
  for (const [part, weight] of near) {
    pen.fillStyle = `rgba(${colour("--heat")}, ${Math.sqrt(weight / most)})`;
    pen.fillRect(part * NEAR * scale, 0, Math.max(2, NEAR * scale), height);
  }
}

async function textOf(start, count) {
  const block = Math.floor(start / WINDOW);
  if (!map.texts.has(block)) map.texts.set(block, ask(`/v1/contexts/${map.answer.context.id}/tokens?start=${block * WINDOW}&count=${WINDOW}`));
  const { texts } = await map.texts.get(block), from = start - block * WINDOW, own = texts.slice(from, from + count);
  const left = count - own.length, next = (block + 1) * WINDOW;
  return left > 0 && next < map.total ? [...own, ...(await textOf(next, left))] : own;
}

async function drawText(place) {
  map.at = place;
  const start = Math.max(0, Math.min(place - WINDOW / 4, map.total - WINDOW)), texts = await textOf(start, WINDOW);
  const most = Math.max(...map.heat.values()), parts = [];
  let here = null;
  texts.forEach((text, index) => {
    const weight = map.heat.get(start + index), at = start + index === place;
    if (!weight && !at) return parts.push(text);
    const mark = make("mark", { textContent: text, title: weight ? `token ${start + index}: ${percent(weight)} of the attention` : "" });
    if (weight) mark.style.backgroundColor = `rgba(${colour("--heat")}, ${0.15 + 0.6 * Math.sqrt(weight / most)})`;
    if (at) { mark.className = "here"; here = mark; }
    return parts.push(mark);
  });
  const pane = byId("text");
  pane.replaceChildren(...parts);
  if (here) pane.scrollTop = here.offsetTop - pane.clientHeight / 3;
}

// ---- what people do

byId("login").onsubmit = (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem("token", token);
  byId("token").value = "";
  show("problem", false); show("login", false);
  refresh();
};
byId("logout").onclick = () => { clearTimeout(timer); signOut(); byId("state").textContent = ""; };
byId("create").onsubmit = (event) => guarded(() => upload(event));
byId("more").onclick = () => { pages += 1; refresh(); };
byId("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  byId("question").value = "";
  if (question) say(question);
};
byId("question").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); byId("ask").requestSubmit(); }
};
byId("stop").onclick = () => asking?.abort();
byId("continue").onclick = () => say("Go on.");
byId("layers").onchange = () => guarded(() => drawMap(false));
byId("word").oninput = () => guarded(() => drawMap(false));
byId("strip").onclick = (event) => guarded(() => drawText(Math.floor((event.offsetX / event.target.clientWidth) * map.total)));
addEventListener("resize", () => map && !byId("map").hidden && guarded(() => drawMap(false)));
if (token || !("tokens" in document.documentElement.dataset)) refresh(); else signOut();
