// Numbers for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

export function count(value) {
  return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
}

export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit && value < 99.5 ? value.toFixed(value < 9.95 ? 2 : 1) : Math.round(value)}\u00a0${UNITS[unit]}`;
}

// A duration as [number, unit].
export function duration(seconds) {
  const ms = seconds * 1000;
  if (ms < 9.95) return [ms.toFixed(1), "ms"];
  if (ms < 999.5) return [Math.round(ms).toString(), "ms"];
  if (seconds < 99.5) return [seconds.toFixed(seconds < 9.95 ? 2 : 1), "s"];
  return [Math.round(seconds).toString(), "s"];
}

export function spell(seconds) {
  return duration(seconds).join(" ");
}

export function rate(value) {
  return value > 0 && value < 9.95 ? value.toFixed(1) : count(value);
}

export function uptime(seconds) {
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  const days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

// "12.0" is the only answer of request 12: #12; "12.1" one of several: #12.1
export function answerName(id) {
  return `#${id.endsWith(".0") ? id.slice(0, -2) : id}`;
}

// The hue of a request, the same wherever it is drawn: neighbours are a golden angle apart.
export function hue(id) {
  const [request, answer] = id.split(".").map(Number);
  return (32 + request * 137.508 + (answer || 0) * 47) % 360;
}
