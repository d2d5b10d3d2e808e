// The box to try a prompt: streams an answer as any client would, and tells how long it took.

import { Refused, call, events } from "./api.js";
import { by, say } from "./dom.js";
import { count, rate, spell } from "./format.js";

const SENTENCE = "A sash window has two panes. The lower one slides";
// Each number is some five tokens: long enough for a window of 512 to slide, and easy to see whether it goes on.
const LONGEST = 40000;

let running = null;

export function setUpTrial({ modelName, onRefused, windowTokens, contextTokens }) {
  const form = by("trial");
  const text = by("prompt-text");
  const kind = () => form.elements.kind.value;

  by("sample-short").addEventListener("click", () => {
    text.value = kind() === "chat" ? "What is a sash window? Two sentences." : SENTENCE;
    text.focus();
  });
  by("sample-long").addEventListener("click", () => {
    const tokens = Math.min(2.5 * (windowTokens() || 512), 0.6 * (contextTokens() || 4096));
    const numbers = Array.from({ length: Math.max(Math.floor(tokens / 5), 20) }, (_, i) => i + 1);
    text.value = numbers.join(", ").slice(0, LONGEST) + ",";
    text.focus();
    text.scrollTop = text.scrollHeight;
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  by("stop").addEventListener("click", () => running?.abort());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run(request(kind(), text.value, modelName()), kind(), onRefused);
  });
}

function request(kind, text, model) {
  const body = {
    model,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(by("temperature").value),
    max_tokens: Number(by("max-tokens").value),
  };
  return kind === "chat" ? { ...body, messages: [{ role: "user", content: text }] } : { ...body, prompt: text };
}

// One answer, its text and times.
class Answer {
  constructor() {
    this.started = performance.now();
    this.tokens = 0;
    this.reason = "";
    this.node = document.createTextNode("");
    by("answer").replaceChildren(this.node);
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    const piece = choice?.text ?? choice?.delta?.content ?? "";
    if (piece) {
      this.first ??= performance.now();
      this.last = performance.now();
      this.show(piece);
    }
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (chunk.usage) this.usage = chunk.usage;
  }

  show(piece) {
    const box = by("answer");
    const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.node.appendData(piece);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  told() {
    const parts = [];
    if (this.first) parts.push(`first token after ${spell((this.first - this.started) / 1000)}`);
    const tokens = this.usage?.completion_tokens;
    if (this.usage) parts.push(`${count(this.usage.prompt_tokens)} + ${count(tokens)} tokens`);
    if (tokens > 1 && this.last > this.first) parts.push(`${rate((1000 * (tokens - 1)) / (this.last - this.first))} tok/s`);
    if (this.reason) parts.push({ length: "stopped at max tokens", stop: "came to its end" }[this.reason] || this.reason);
    return parts.join(" · ");
  }
}

async function run(body, kind, onRefused) {
  const told = by("trial-error");
  const aborter = (running = new AbortController());
  const answer = new Answer();
  told.hidden = true;
  busy(true);
  say(by("trial-stats"), "waiting for the first token");
  try {
    const path = kind === "chat" ? "v1/chat/completions" : "v1/completions";
    for await (const data of events(await call(path, { body, signal: aborter.signal }))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
      if (answer.first && !answer.reason) say(by("trial-stats"), answer.told());
    }
  } catch (error) {
    if (aborter.signal.aborted) {
      answer.reason = "stopped here";
    } else {
      if (error instanceof Refused && error.status === 401) onRefused();
      say(told, error instanceof TypeError ? "The server can't be reached." : error.message);
      told.hidden = false;
    }
  } finally {
    running = null;
    busy(false);
    say(by("trial-stats"), answer.told() || "\u00a0");
  }
}

function busy(yes) {
  by("send").disabled = yes;
  by("stop").disabled = !yes;
  by("answer").classList.toggle("streaming", yes);
}
