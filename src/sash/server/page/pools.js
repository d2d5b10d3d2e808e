// Both pools as maps: every cell is a page (or, in a large pool, some), coloured by the request that holds it. In a
// window's ring the newest page is brightest and the oldest faintest, so that one sees the ring turn.

import { calm, colour, el, say, surface } from "./dom.js";
import { answerName, bytes, count, hue } from "./format.js";

const SHADES = 8;
const GLOW_MS = 700;
// A pool of so few cells is shown whole; of a larger one as much as holds something, and at least so much.
const WHOLE = 1024;
const LEAST_CELLS = 128;

const views = new Map();

export function drawPools(root, stats) {
  const pools = stats.engine.pools;
  if ([...views.keys()].join() !== pools.map((pool) => pool.name).join()) {
    views.clear();
    root.replaceChildren();
    for (const pool of pools) {
      views.set(pool.name, new PoolView(pool));
      root.append(views.get(pool.name).root);
    }
  }
  for (const pool of pools) views.get(pool.name).show(pool, stats.page_maps?.[pool.name], stats.engine.requests);
}

export function repaintPools() {
  for (const view of views.values()) view.paint();
}

// What the numbers of a map stand for, cell by cell.
function expand(map) {
  const cells = [];
  for (const [owner, length, number, held] of map.runs) {
    for (let i = 0; i < length; i++) cells.push({ owner: owner < 0 ? "" : map.owners[owner], number: number + i, held });
  }
  return cells;
}

function words(pool) {
  if (!pool.window) return "sees everything";
  return { sliding: `window of ${count(pool.window)}`, chunked: `chunks of ${count(pool.window)}` }[pool.kind] || pool.span;
}

// A round number of cells at least as many as asked for, so that the picture holds still while a pool fills.
function roomy(cells, most) {
  if (most <= WHOLE) return most;
  let room = LEAST_CELLS;
  while (room < cells) room *= 2;
  return Math.min(room, most);
}

class PoolView {
  constructor(pool) {
    this.cells = [];
    this.glows = new Map();
    this.shades = new Map();
    this.cursor = -1;
    this.name = pool.name;
    this.canvas = el("canvas", "map");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.caption = el("p", "caption");
    this.facts = el("p", "quiet");
    this.held = el("span", "number");
    this.share = el("span", "share");
    this.fill = el("span", "fill");
    this.numbers = el("dl", "numbers");
    this.values = {};
    for (const name of ["held", "free", "cached", "slid", "promised", "most"]) {
      const value = el("dd", "");
      this.values[name] = value;
      this.numbers.append(el("div", name, el("dt", "", name), value));
    }
    const title = el("h3", "", pool.name, " ");
    title.append(this.facts);
    this.root = el("article", "pool", title, this.canvas, this.caption, this.numbers);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.paint()).observe(this.canvas);
  }

  show(pool, map, requests) {
    this.pool = pool;
    this.tokens = new Map(requests.map((request) => [request.answer_id, request.computed_tokens]));
    if (map) this.take(map);
    const layers = `${pool.layers} ${pool.layers === 1 ? "layer" : "layers"}`;
    say(this.facts, `${layers} · ${words(pool)} · ${pool.dtype} · ${pool.page_size} tokens, ${bytes(pool.page_bytes)} a page`);
    const sized = (pages) => `${count(pages)} · ${bytes(pages * pool.page_bytes)}`;
    say(this.values.held, sized(pool.held_pages));
    say(this.values.free, sized(pool.free_pages));
    say(this.values.cached, sized(pool.cached_pages));
    say(this.values.slid, count(pool.slid_pages));
    say(this.values.promised, count(pool.promised_pages));
    say(this.values.most, sized(pool.peak_pages));
    this.values.cached.parentNode.hidden = !pool.cached_pages;
    this.values.slid.parentNode.hidden = !pool.window;
    const told = `${pool.name} pool: ${count(pool.held_pages)} of ${count(pool.num_pages)} pages held by ${
      Object.keys(pool.requests).length} answers, ${count(pool.slid_pages)} slid`;
    if (this.canvas.getAttribute("aria-label") !== told) this.canvas.setAttribute("aria-label", told);
    this.describe();
    this.paint();
  }

  take(map) {
    const before = this.cells;
    const same = this.map && this.map.cell_pages === map.cell_pages;
    this.map = map;
    this.cells = expand(map);
    this.newest = new Map();
    this.oldest = new Map();
    for (const { owner, number } of this.cells) {
      if (!owner) continue;
      if (!(this.newest.get(owner) >= number)) this.newest.set(owner, number);
      if (!(this.oldest.get(owner) <= number)) this.oldest.set(owner, number);
    }
    if (!same || calm.matches) return;
    const now = performance.now();
    this.cells.forEach((cell, i) => {
      const old = before[i];
      if (cell.owner && (!old || old.owner !== cell.owner || old.number !== cell.number)) this.glows.set(i, now);
    });
  }

  // Which of a request's shades a page has: in a ring the newest has the last, elsewhere all but the newest are equal.
  shade(cell) {
    const newest = this.newest.get(cell.owner);
    const behind = newest - cell.number;
    if (behind === 0) return SHADES - 1;
    if (!this.pool.window) return Math.round((SHADES - 3) * Math.min(cell.held / this.map.cell_pages, 1));
    const span = Math.max(newest - this.oldest.get(cell.owner), 1);
    return Math.max(Math.round((SHADES - 2) * (1 - behind / span)), 0);
  }

  palette(owner) {
    const key = `${owner} ${this.tones}`;
    if (!this.shades.has(key)) {
      if (this.shades.size > 256) this.shades.clear();
      const [light, chroma] = this.tones.split(" ").map(Number);
      const list = [];
      for (let i = 0; i < SHADES; i++) list.push(`oklch(${light} ${chroma} ${hue(owner)} / ${0.28 + (0.72 * i) / (SHADES - 1)})`);
      this.shades.set(key, list);
    }
    return this.shades.get(key);
  }

  // How cells are laid out in the canvas.
  layout(width, height, scale) {
    const all = Math.ceil(this.pool.num_pages / this.map.cell_pages);
    const shown = roomy(this.cells.length, all);
    let pitch = Math.min(Math.floor(Math.sqrt((width * height) / shown)), Math.round(15 * scale));
    while (pitch > 2 && Math.ceil(shown / Math.floor(width / pitch)) * pitch > height) pitch -= 1;
    pitch = Math.max(pitch, 2);
    const columns = Math.max(Math.floor(width / pitch), 1);
    return { shown, all, pitch, columns, gap: pitch > 5 * scale ? Math.max(Math.round(scale), 1) : pitch > 3 ? 1 : 0 };
  }

  paint() {
    const [pen, width, height, scale] = surface(this.canvas);
    if (!pen || !this.map) return;
    this.tones = `${colour("--tone-light")} ${colour("--tone-chroma")}`;
    const { shown, pitch, columns, gap } = (this.placed = this.layout(width, height, scale));
    const size = pitch - gap;
    pen.clearRect(0, 0, width, height);
    const free = colour("--cell");
    for (let i = 0; i < shown; i++) {
      const cell = this.cells[i];
      const x = (i % columns) * pitch;
      const y = Math.floor(i / columns) * pitch;
      pen.fillStyle = free;
      pen.fillRect(x, y, size, size);
      if (!cell?.owner) continue;
      pen.fillStyle = this.palette(cell.owner)[this.shade(cell)];
      pen.fillRect(x, y, size, size);
    }
    this.glow(pen, size);
    if (this.cursor >= 0 && this.cursor < shown) {
      pen.strokeStyle = colour("--ink");
      pen.lineWidth = Math.max(scale, 1);
      const x = (this.cursor % columns) * pitch;
      pen.strokeRect(x - 0.5, Math.floor(this.cursor / columns) * pitch - 0.5, size + 1, size + 1);
    }
  }

  // Pages that were just taken or taken over light up and fade.
  glow(pen, size) {
    if (!this.glows.size) return;
    const now = performance.now();
    const { pitch, columns } = this.placed;
    pen.fillStyle = colour("--glow");
    for (const [i, since] of this.glows) {
      const left = 1 - (now - since) / GLOW_MS;
      if (left <= 0 || i >= this.cells.length) {
        this.glows.delete(i);
        continue;
      }
      pen.globalAlpha = 0.6 * left * left;
      pen.fillRect((i % columns) * pitch, Math.floor(i / columns) * pitch, size, size);
    }
    pen.globalAlpha = 1;
    if (this.glows.size && !this.waiting) {
      this.waiting = requestAnimationFrame(() => {
        this.waiting = 0;
        this.paint();
      });
    }
  }

  at(event) {
    if (!this.placed) return -1;
    const scale = window.devicePixelRatio || 1;
    const column = Math.floor((event.offsetX * scale) / this.placed.pitch);
    const cell = Math.floor((event.offsetY * scale) / this.placed.pitch) * this.placed.columns + column;
    return column < this.placed.columns && cell < this.placed.shown ? cell : -1;
  }

  point(cell) {
    this.cursor = cell;
    this.describe();
    this.paint();
  }

  step(event) {
    if (!this.placed) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.placed.columns, ArrowUp: -this.placed.columns }[event.key];
    if (!by) return;
    event.preventDefault();
    this.point(Math.min(Math.max(this.cursor < 0 ? 0 : this.cursor + by, 0), this.placed.shown - 1));
  }

  // The line below the map: the cell that is pointed at, or what the map leaves out.
  describe() {
    if (!this.map) return;
    const { cell_pages: pages, num_pages: all } = this.map;
    if (this.cursor >= 0) {
      const cell = this.cells[this.cursor];
      const first = this.cursor * pages;
      const last = Math.min(first + pages, all) - 1;
      const name = pages === 1 ? `page ${count(first)}` : `pages ${count(first)} to ${count(last)}`;
      if (!cell?.owner) return say(this.caption, `${name}: free`);
      const size = this.pool.page_size;
      const from = cell.number * size;
      const end = Math.min(from + size, this.tokens.get(cell.owner) ?? Infinity) - 1;
      const what = pages === 1 ? `tokens ${count(from)} to ${count(Math.max(end, from))}` : `${cell.held} held`;
      return say(this.caption, `${name}: ${answerName(cell.owner)}, ${what}`);
    }
    const shown = Math.min(roomy(this.cells.length, Math.ceil(all / pages)) * pages, all);
    const each = pages === 1 ? "a cell is a page" : `a cell is ${pages} pages`;
    const rest = all - shown;
    say(this.caption, rest ? `${each}; ${count(rest)} more are free` : each);
  }
}
