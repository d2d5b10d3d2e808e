// Elements. Text goes in as text, never as markup.

export const by = (id) => document.getElementById(id);

export function el(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// Writes only what has changed, so that nothing is laid out again four times a second.
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const calm = matchMedia("(prefers-reduced-motion: reduce)");

// Sizes a canvas to its box in device pixels; returns [context, width, height, scale], the first null without a box.
export function surface(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (!width || !height) return [null, 0, 0, scale];
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  return [canvas.getContext("2d"), width, height, scale];
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
