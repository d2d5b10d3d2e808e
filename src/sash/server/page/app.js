// Watches the server: one stream of statistics, a few times a second, as long as the page can be seen.

import { Refused, call, events, useKey } from "./api.js";
import { by, say } from "./dom.js";
import { bytes, count, duration, rate, spell, uptime } from "./format.js";
import { drawPools, repaintPools } from "./pools.js";
import { clearRequests, drawRequests } from "./requests.js";
import { drawSpark } from "./spark.js";
import { setUpTrial } from "./trial.js";

const EVERY_MS = 250;
const SILENCE_MS = 8000;
const FIRST_RETRY_S = 1;
const LAST_RETRY_S = 10;
const SECONDS_SHOWN = 3;

const STATES = {
  connecting: "connecting",
  loading: "the model is loading",
  ready: "ready",
  draining: "shutting down",
  dead: "the engine has failed",
  lost: "lost",
  locked: "needs a key",
};
const NOTICES = {
  loading: "The model is loading; this page will follow.",
  draining: "The server is shutting down: what runs will finish, and it takes nothing new.",
  dead: "The engine has failed. The server starts it again.",
};
const WAITS = { seats: "for a seat", pages: "for pages", turn: "for their turn" };

let latest = null;
let watching = null;
let retryS = FIRST_RETRY_S;

// ---------------------------------------------------------------------------------- connection

async function watch() {
  if (watching || document.hidden) return;
  const aborter = (watching = new AbortController());
  let silence = 0;
  const listen = () => {
    clearTimeout(silence);
    silence = setTimeout(() => aborter.abort("silent"), SILENCE_MS);
  };
  try {
    listen();
    for await (const data of events(await call(`stats/stream?interval_ms=${EVERY_MS}`, { signal: aborter.signal }))) {
      listen();
      retryS = FIRST_RETRY_S;
      show(JSON.parse(data));
    }
    lost();
  } catch (error) {
    if (aborter.signal.reason === "hidden") return;
    if (error instanceof Refused && error.status === 401) lock();
    else lost(error instanceof Refused ? error.message : "");
  } finally {
    clearTimeout(silence);
    if (watching === aborter) watching = null;
  }
}

let retrying = 0;

function lost(words = "") {
  state("lost");
  by("live").classList.add("stale");
  notice(`${words || "The server can't be reached."} Trying again every few seconds.`, true);
  clearTimeout(retrying);
  retrying = setTimeout(watch, retryS * 1000);
  retryS = Math.min(retryS * 1.6, LAST_RETRY_S);
}

function lock() {
  const form = by("key-form");
  state("locked");
  notice("");
  by("live").classList.add("stale");
  if (!form.hidden) say(by("key-told"), "This key was refused.");
  form.hidden = false;
  by("key").focus();
}

function notice(words, canRetry = false) {
  say(by("notice-text"), words);
  by("retry").hidden = !canRetry;
  by("notice").hidden = !words;
}

function state(name) {
  by("state").dataset.state = name;
  say(by("state-text"), STATES[name]);
  document.title = name === "ready" ? "sash" : `sash: ${STATES[name]}`;
}

// ---------------------------------------------------------------------------------- numbers

function show(stats) {
  const first = latest === null;
  latest = stats;
  by("key-form").hidden = true;
  by("live").classList.toggle("stale", !stats.engine);
  state(stats.state);
  notice(NOTICES[stats.state] || "");
  header(stats);
  dials(stats);
  if (stats.engine) engine(stats);
  else clearRequests(by("requests"));
  if (first) curl(stats);
  by("links").hidden = stats.limits.needs_key; // a link brings no key
}

function header({ model, uptime_s: seconds, versions }) {
  say(by("model"), model.names[0]);
  const facts = [];
  if (model.dtype) {
    facts.push(model.quantization === "none" ? model.dtype : `${model.quantization} weights, ${model.dtype}`);
    facts.push(`${count(model.max_model_len)} tokens of context`);
  }
  say(by("facts"), facts.join(" · "));
  say(by("uptime"), `sash ${versions.sash}, up ${uptime(seconds)}.`);
  say(by("versions"), `Python ${versions.python}${versions.torch ? `, torch ${versions.torch}` : ""}.`);
}

function dials({ throughput, latency, engine: report, machine, model }) {
  const lately = (counts) => counts.slice(-SECONDS_SHOWN).reduce((sum, one) => sum + one, 0) / SECONDS_SHOWN;
  say(by("generated"), rate(lately(throughput.generated_by_second)));
  say(by("prompt"), rate(lately(throughput.prompt_by_second)));
  peak("generated", throughput.generated_by_second);
  peak("prompt", throughput.prompt_by_second);
  sparks();
  percentiles("ttft", latency.first_token_s);
  percentiles("itl", latency.inter_token_s);
  if (report) {
    say(by("running"), count(report.running));
    say(by("seats"), `of ${count(model.max_num_seqs)}`);
    const [[why, waiting] = []] = Object.entries(report.waiting_for);
    say(by("waiting"), waiting ? `${count(waiting)} ${waiting === 1 ? "waits" : "wait"} ${WAITS[why] || ""}` : "none waits");
  }
  const busy = machine.device.busy_ratio;
  say(by("busy"), busy === null ? "–" : Math.round(100 * busy).toString());
  say(by("use"), machine.processes.map((one) => `${one.process}\u00a0${bytes(one.resident_bytes)}`).join(" · "));
}

function peak(name, counts) {
  const most = Math.max(...counts);
  say(by(`${name}-more`), most ? `up to ${rate(most)}` : "none in two minutes");
}

function sparks() {
  if (!latest) return;
  drawSpark(by("generated-spark"), latest.throughput.generated_by_second, "--accent");
  drawSpark(by("prompt-spark"), latest.throughput.prompt_by_second, "--ink");
}

function percentiles(name, { count: values, p50, p95 }) {
  const [number, unit] = values ? duration(p50) : ["–", "ms"];
  say(by(`${name}-50`), number);
  say(by(`${name}-unit`), unit);
  say(by(`${name}-more`), values ? `p95 ${spell(p95)}` : "none in five minutes");
}

function engine(stats) {
  const report = stats.engine;
  by("key-sash").hidden = !report.pools.some((pool) => pool.window);
  const hidden = drawRequests(by("requests"), by("axis"), stats);
  say(by("more-requests"), hidden ? `and ${count(hidden)} more` : "");
  by("empty").hidden = report.requests.length > 0;
  drawPools(by("pools"), stats);
  const held = report.pools.reduce((sum, pool) => sum + pool.held_pages * pool.page_bytes, 0);
  const most = Math.max(held, report.uniform_bytes, 1);
  by("beam-held").style.width = `${(100 * held) / most}%`;
  by("beam-uniform").style.width = `${(100 * report.uniform_bytes) / most}%`;
  say(by("held-bytes"), bytes(held));
  const times = report.uniform_bytes / held;
  say(by("less"), held && times >= 1.05 ? `${times.toFixed(1)} × less than without windows` : "");
  say(by("uniform-bytes"), bytes(report.uniform_bytes));
}

function curl({ model, limits }) {
  const key = limits.needs_key ? ' -H "Authorization: Bearer $KEY"' : "";
  const body = JSON.stringify({ model: model.names[0], prompt: "Hello", max_tokens: 32 });
  say(by("curl"), `curl ${new URL("v1/completions", document.baseURI)}${key} \\\n  -H "Content-Type: application/json" \\\n  -d '${body}'`);
}

// ---------------------------------------------------------------------------------- controls

function setUpTheme() {
  const button = by("theme");
  const themes = ["", "light", "dark"];
  const signs = { "": ["◐", "as the system"], light: ["○", "light"], dark: ["●", "dark"] };
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    say(button, signs[theme][0]);
    button.setAttribute("aria-label", `Colours: ${signs[theme][1]}`);
    button.title = `Colours: ${signs[theme][1]}`;
    repaint();
  };
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "") + 1) % themes.length];
    try {
      localStorage.setItem("sash-theme", next);
    } catch {
      // Storage is off: until the page is left.
    }
    apply(next);
  });
  apply(document.documentElement.dataset.theme || "");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
}

function repaint() {
  sparks();
  repaintPools();
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(by("key").value);
  by("key").value = "";
  say(by("key-told"), "");
  watch();
});
by("retry").addEventListener("click", () => {
  clearTimeout(retrying);
  watch();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    watching?.abort("hidden");
    watching = null;
  } else watch();
});
setUpTheme();
setUpTrial({
  modelName: () => latest?.model.names[0],
  onRefused: lock,
  windowTokens: () => latest?.engine?.pools.map((pool) => pool.window).find(Boolean),
  contextTokens: () => latest?.model.max_model_len,
});
watch();
