// Requests as bars on one scale of tokens. The window is a sash on the bar: it covers what window layers still hold
// and slides on as tokens come.

import { el, say } from "./dom.js";
import { answerName, count, hue } from "./format.js";

const MOST = 24;
const LEAVES_MS = 900;
// A bar shows at least so much of what an answer may still become.
const AHEAD = 128;

const rows = new Map();
let scale = 0;

export function drawRequests(root, axis, stats) {
  const all = stats.engine.requests;
  const shown = all.slice(0, MOST);
  const windows = stats.engine.pools.filter((pool) => pool.window > 0);
  const known = new Set(shown.map((request) => request.answer_id));
  for (const [id, row] of rows) if (!known.has(id)) leave(id, row);
  rescale(axis, Math.max(...shown.map(extent), 1), shown.length > 0);
  for (const request of shown) {
    let row = rows.get(request.answer_id);
    if (!row) {
      row = new Row(request, windows);
      rows.set(request.answer_id, row);
      root.append(row.root);
    }
    row.show(request, windows);
  }
  return all.length - shown.length;
}

function leave(id, row) {
  rows.delete(id);
  row.root.classList.add("leaving");
  setTimeout(() => row.root.remove(), LEAVES_MS);
}

export function clearRequests(root) {
  rows.clear();
  root.replaceChildren();
}

// How far a bar reaches: what is there, and some of what may come.
function extent(request) {
  const rest = Math.max(request.max_tokens - request.generated_tokens, 0);
  return request.prompt_tokens + request.generated_tokens + Math.min(rest, Math.max(request.generated_tokens, AHEAD));
}

function nice(value) {
  let step = 64;
  while (step < value) step *= step & (step - 1) ? 4 / 3 : 1.5;
  return Math.round(step);
}

function rescale(axis, most, any) {
  const wanted = nice(most);
  axis.hidden = !any;
  if (!any || wanted === scale) return;
  scale = wanted;
  axis.replaceChildren();
  const parts = 4;
  for (let i = 0; i <= parts; i++) {
    const tick = el("span", "tick", count((scale * i) / parts));
    tick.style.left = `${(100 * i) / parts}%`;
    axis.append(tick);
  }
}

const percent = (tokens) => `${(100 * Math.min(Math.max(tokens / scale, 0), 1)).toFixed(3)}%`;

// The positions that a window's layers hold after `computed` tokens; null while that is all of them or nothing.
function held(pool, request) {
  const end = request.computed_tokens;
  if (!end) return null;
  if (pool.kind === "chunked") return [Math.floor((end - 1) / pool.window) * pool.window, end];
  const first = Math.max(end - pool.window, 0);
  if (pool.kind === "reference") return [Math.max(first, Math.min(request.prompt_tokens, end)), end];
  if (pool.kind === "prefill_window" && end > request.prompt_tokens) return [0, end];
  return [first, end];
}

class Row {
  constructor(request, windows) {
    this.name = el("span", "name", el("span", "swatch"), answerName(request.answer_id));
    this.does = el("span", "does");
    this.numbers = el("span", "number");
    this.limit = el("span", "limit");
    this.prompt = el("span", "prompt");
    this.computed = el("span", "computed");
    this.answer = el("span", "written");
    this.sashes = windows.map(() => el("span", "sash"));
    this.bar = el("span", "bar", this.limit, this.prompt, this.computed, this.answer, ...this.sashes);
    this.bar.setAttribute("aria-hidden", "true");
    this.root = el("li", "request", this.name, this.does, this.numbers, this.bar);
    this.root.style.setProperty("--hue", hue(request.answer_id).toFixed(1));
  }

  show(request, windows) {
    const { prompt_tokens: prompt, computed_tokens: computed, generated_tokens: generated } = request;
    this.root.dataset.state = request.state;
    const progress = prompt ? Math.floor((100 * Math.min(computed, prompt)) / prompt) : 100;
    say(this.does, { waiting: "waits", prefill: `reads ${progress} %`, decode: "writes" }[request.state]);
    this.does.title = request.preemptions ? `gave its pages away ${request.preemptions} ×` : "";
    say(this.numbers, `${count(prompt)} + ${count(generated)} of ${count(request.max_tokens)}`);
    this.limit.style.width = percent(prompt + request.max_tokens);
    this.prompt.style.width = percent(prompt);
    this.computed.style.width = percent(Math.min(computed, prompt));
    this.answer.style.left = percent(prompt);
    this.answer.style.width = percent(generated);
    windows.forEach((pool, i) => {
      const sash = this.sashes[i];
      const range = held(pool, request);
      sash.hidden = !range;
      if (!range) return;
      const [from, to] = range;
      sash.style.left = percent(from);
      sash.style.width = percent(to - from);
      const edge = Math.min(Math.max((prompt - from) / Math.max(to - from, 1), 0), 1);
      sash.style.setProperty("--split", `${(100 * edge).toFixed(2)}%`);
    });
  }
}
