// Requests to the server that this page came from. The key stays in this tab.

const STORED = "sash-key";
let key = "";
try {
  key = sessionStorage.getItem(STORED) || "";
} catch {
  // Storage is off: the key lasts as long as the page.
}

export function useKey(value) {
  key = value;
  try {
    sessionStorage.setItem(STORED, value);
  } catch {
    // As above.
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Sends a request; raises Refused with the server's own words for anything but success.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "same-origin",
  });
  if (response.ok) return response;
  let told = `${response.status} ${response.statusText}`;
  try {
    told = (await response.json()).error.message || told;
  } catch {
    // Not one of our bodies: a proxy's, perhaps.
  }
  throw new Refused(response.status, told);
}

// The data of server-sent events, one after another.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
