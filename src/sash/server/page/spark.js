// One thin bar for each second, the newest at the right; a tick at the highest.

import { colour, surface } from "./dom.js";

export function drawSpark(canvas, values, tone) {
  const [pen, width, height, scale] = surface(canvas);
  if (!pen) return;
  pen.clearRect(0, 0, width, height);
  const top = Math.max(...values, 1);
  const pitch = width / values.length;
  const bar = Math.max(Math.floor(pitch - Math.max(scale, pitch * 0.25)), 1);
  const room = height - 2 * scale;
  pen.fillStyle = colour("--line");
  pen.fillRect(0, height - scale, width, scale);
  pen.fillStyle = colour(tone);
  values.forEach((value, i) => {
    if (!value) return;
    const tall = Math.max(Math.round((value / top) * room), Math.ceil(scale));
    pen.globalAlpha = 0.45 + 0.55 * (i / values.length);
    pen.fillRect(Math.round(i * pitch), height - scale - tall, bar, tall);
  });
  pen.globalAlpha = 1;
}
