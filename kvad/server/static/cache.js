// The cache panel: a live map of the pool's blocks, sequences, rates, counts and what has happened.

import { connection } from "./api.js";
import { byId, bytes, coalesce, color, count, h, plural, sizeCanvas } from "./dom.js";
import { hideTip, showTip } from "./inspect.js";

// Kinds of blocks, in the order of the legend; the letters are those of /cache.
const FREE = 0, CACHED = 1, MINE = 2, OTHER = 3, SHARED = 4, MINE_CACHED = 5;
const KINDS = [
  { code: MINE, name: "This conversation", tone: "mine" },
  { code: MINE_CACHED, name: "Its blocks in the prefix cache", tone: "mine-cached" },
  { code: OTHER, name: "Other requests", tone: "other" },
  { code: SHARED, name: "Shared by several", tone: "shared" },
  { code: CACHED, name: "Other prefix cache", tone: "cached" },
  { code: FREE, name: "Free", tone: "free" },
];
const SAMPLES = 120; // points of a curve
const SAMPLE_MS = 500;
const MAP_HEIGHT = 220;
const MAX_LOG = 40;
const MAX_BARS = 24;

export class CachePanel {
  #source = null;
  #state = null;
  #pool = 0;
  #codes = new Uint8Array(0);
  #painted = new Uint8Array(0);
  #owners = new Int32Array(0);
  #counts = [0, 0, 0, 0, 0, 0];
  #kept = new Set(); // blocks of this conversation that only the prefix cache still has
  #conversation = null;
  #numbers = new Map(); // the server's number of a request -> the conversation that sent it
  #cursor = -1;
  #log = [];
  #history = { rate: Array(SAMPLES).fill(0), used: Array(SAMPLES).fill(0), hits: Array(SAMPLES).fill(0) };
  #lastSample = null;

  constructor(element, app) {
    Object.assign(this, { element, app });
    this.draw = coalesce(() => this.#draw(), 50);
    this.#build();
    setInterval(() => this.#sample(), SAMPLE_MS);
    document.addEventListener("visibilitychange", () => this.sync());
    connection.addEventListener("change", () => this.sync());
    new ResizeObserver(() => { this.#painted = new Uint8Array(0); this.draw(); }).observe(element);
  }

  #build() {
    this.canvas = h("canvas", { class: "block-map", tabindex: "0", role: "img", "aria-describedby": "block-text" });
    this.text = h("p", { class: "offscreen", id: "block-text", "aria-live": "polite" });
    this.legend = h("ul", { class: "legend" });
    this.pools = h("select", { "aria-label": "Pool", onchange: (event) => { this.#pool = Number(event.target.value); this.#kept.clear(); this.#classify(); this.#painted = new Uint8Array(0); this.draw(); } });
    this.summary = h("p", { class: "lead" });
    this.sequences = h("div", { class: "sequences" });
    this.sparks = { rate: spark("Tokens per second", "accent"), used: spark("Blocks in use", "other"), hits: spark("Tokens from cache", "cached-ink") };
    this.tiles = h("div", { class: "tiles" });
    this.stores = h("div");
    this.events = h("ol", { class: "events" });
    this.canvas.addEventListener("mousemove", (event) => this.#point(this.#blockAt(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("mouseleave", () => this.#point(-1));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#point(-1));
    this.element.replaceChildren(
      h("section", {}, h("div", { class: "row spread" }, h("h3", {}, "Blocks"), this.pools), this.summary, this.canvas, this.text, this.legend),
      h("section", {}, h("div", { class: "row spread heading" }, h("h3", {}, "Sequences"), h("p", { class: "hint keys" }, h("span", { class: "key-cache" }, "from cache"), h("span", { class: "key-computed" }, "computed"), h("span", { class: "key-todo" }, "to do"))), this.sequences),
      h("section", {}, h("h3", {}, "Last minute"), ...Object.values(this.sparks).map((each) => each.element)),
      h("section", {}, h("h3", {}, "Since the start"), this.tiles), this.stores,
      h("section", {}, h("h3", {}, "What happened"), this.events),
    );
  }

  /** Open or close the event stream: it is open while the panel can be seen. */
  sync() {
    const isWanted = !this.element.hidden && !byId("inspector").hidden && !document.hidden && connection.state !== "reconnecting";
    if (isWanted && !this.#source) {
      this.#source = new EventSource("cache/events");
      this.#source.onmessage = (event) => this.#receive(event.data);
      this.#source.onerror = () => { this.#close(); this.#numbers.clear(); connection.lost(); };
    } else if (!isWanted) this.#close();
  }

  #close() {
    this.#source?.close();
    this.#source = null;
  }

  #receive(data) {
    const state = JSON.parse(data);
    if (state.error) { this.summary.textContent = state.error.message; return; }
    if (this.#state) this.#note(this.#state, state);
    this.#state = state;
    this.#classify();
    this.draw();
  }

  // -------------------------------------------------------------- blocks

  /** The name of a request that has just ended may be gone while its blocks are not: its number is remembered. */
  #isMine(sequence) {
    if (this.app.isOwn(sequence.request_id)) this.#numbers.set(sequence.request, this.app.conversation.id);
    return this.#numbers.get(sequence.request) === this.app.conversation.id;
  }

  /** Set the kind and the owner of every block of the shown pool. */
  #classify() {
    const { pools, sequences, first_block: first } = this.#state;
    if (this.#conversation !== this.app.conversation?.id) { this.#conversation = this.app.conversation?.id; this.#kept.clear(); }
    if (this.#pool >= pools.length) this.#pool = 0;
    const letters = pools[this.#pool] ?? "";
    const size = letters.length;
    if (this.#codes.length !== size) { this.#codes = new Uint8Array(size); this.#owners = new Int32Array(size); }
    this.#owners.fill(-1);
    sequences.forEach((sequence, index) => {
      const isMine = this.#isMine(sequence);
      for (const block of sequence.blocks[this.#pool] ?? []) {
        if (block < first) continue;
        this.#owners[block - first] = index;
        if (isMine) this.#kept.add(block - first);
        else if (letters[block - first] === "u") this.#kept.delete(block - first);
      }
    });
    this.#counts.fill(0);
    for (let block = 0; block < size; block++) {
      const code = this.#kindOf(letters[block], block, sequences);
      this.#codes[block] = code;
      this.#counts[code]++;
    }
  }

  #kindOf(letter, block, sequences) {
    if (letter === "f") { this.#kept.delete(block); return FREE; }
    if (letter === "c") return this.#kept.has(block) ? MINE_CACHED : CACHED;
    if (letter === "s") return SHARED;
    const owner = this.#owners[block];
    return owner >= 0 && this.#isMine(sequences[owner]) ? MINE : OTHER;
  }

  #layout() {
    const width = this.canvas.parentElement.clientWidth;
    const size = Math.max(1, this.#codes.length);
    const pitch = Math.max(3, Math.min(16, Math.floor(Math.sqrt((width * MAP_HEIGHT) / size))));
    const columns = Math.max(1, Math.floor(width / pitch));
    return { pitch, columns, width: columns * pitch, height: Math.ceil(size / columns) * pitch };
  }

  #paint() {
    const { pitch, columns, width, height } = this.#layout();
    const isNew = this.#painted.length !== this.#codes.length || this.theme !== document.documentElement.dataset.shown || this.canvas.style.width !== `${width}px`;
    const context = sizeCanvas(this.canvas, width, height);
    if (isNew) {
      this.theme = document.documentElement.dataset.shown;
      this.#painted = new Uint8Array(this.#codes.length).fill(255);
      this.tones = [];
      for (const kind of KINDS) this.tones[kind.code] = color(`cell-${kind.tone}`);
      context.clearRect(0, 0, width, height);
    }
    const side = pitch - (pitch > 6 ? 2 : pitch > 2 ? 1 : 0);
    for (let block = 0; block < this.#codes.length; block++) {
      if (this.#painted[block] === this.#codes[block]) continue;
      this.#painted[block] = this.#codes[block];
      context.fillStyle = this.tones[this.#codes[block]];
      const [x, y] = [(block % columns) * pitch, Math.floor(block / columns) * pitch];
      context.clearRect(x, y, pitch, pitch);
      if (side > 5) { context.beginPath(); context.roundRect(x, y, side, side, 1.5); context.fill(); } else context.fillRect(x, y, side, side);
    }
    if (this.#cursor >= 0) {
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      context.strokeRect((this.#cursor % columns) * pitch - 0.25, Math.floor(this.#cursor / columns) * pitch - 0.25, side + 0.5, side + 0.5);
    }
  }

  #blockAt(x, y) {
    const { pitch, columns } = this.#layout();
    const block = Math.floor(y / pitch) * columns + Math.floor(x / pitch);
    return Math.floor(x / pitch) < columns && block < this.#codes.length ? block : -1;
  }

  #point(block) {
    if (block === this.#cursor) return;
    for (const each of [this.#cursor, block]) if (each >= 0) this.#repaintAround(each);
    this.#cursor = block;
    if (block < 0) hideTip();
    this.draw();
  }

  #repaintAround(block) {
    const { columns } = this.#layout();
    for (const row of [-columns, 0, columns]) for (const step of [-1, 0, 1]) if (this.#painted[block + row + step] !== undefined) this.#painted[block + row + step] = 255;
  }

  #key(event) {
    const { columns } = this.#layout();
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (event.key === "Escape") this.#point(-1);
    if (!step) return;
    event.preventDefault();
    const next = Math.min(Math.max(0, this.#cursor + step), this.#codes.length - 1);
    this.#point(this.#cursor < 0 ? 0 : next);
  }

  #describe(block) {
    const kind = KINDS.find((each) => each.code === this.#codes[block]);
    const owner = this.#owners[block];
    const sequence = owner >= 0 ? this.#state.sequences[owner] : null;
    const who = sequence && kind.code === OTHER ? nameOf(sequence, false) : kind.code === SHARED ? "shared by several sequences, kept once" : kind.name;
    return `Block ${block + this.#state.first_block}: ${who.charAt(0).toLowerCase() + who.slice(1)}`;
  }

  // -------------------------------------------------------------- rendering

  #draw() {
    if (!this.#state || this.element.hidden) return;
    const { pools, groups, cache, block_size: size } = this.#state;
    this.#renderPools(pools, groups);
    this.#paint();
    const total = cache.total[this.#pool] ?? 0;
    const used = cache.used[this.#pool] ?? 0;
    const shownPart = this.#codes.length < total ? ` The map shows the first ${count(this.#codes.length)}.` : "";
    this.summary.textContent = total ? `${count(used)} of ${plural(total, "block")} in use; a block holds ${plural(size, "token")}.${shownPart}` : "This model keeps no blocks.";
    this.canvas.setAttribute("aria-label", `Map of ${count(total)} blocks: ${KINDS.map((kind) => `${this.#counts[kind.code]} ${kind.name.toLowerCase()}`).join(", ")}. Arrow keys move between blocks.`);
    this.#renderTip();
    this.#renderLegend();
    this.#renderSequences();
    this.#renderTiles();
    this.#renderStores();
  }

  #renderTip() {
    const isOn = this.#cursor >= 0 && this.#cursor < this.#codes.length;
    const text = isOn ? this.#describe(this.#cursor) : "";
    if (this.text.textContent !== text) this.text.textContent = text;
    if (!isOn) return;
    const { pitch, columns } = this.#layout();
    const box = this.canvas.getBoundingClientRect();
    const [left, top] = [box.left + (this.#cursor % columns) * pitch, box.top + Math.floor(this.#cursor / columns) * pitch];
    showTip({ getBoundingClientRect: () => ({ left, top, width: pitch, bottom: top + pitch }) }, text);
  }

  #renderPools(pools, groups) {
    this.pools.hidden = pools.length < 2;
    if (this.pools.childElementCount === pools.length) return;
    this.pools.replaceChildren(...pools.map((_, index) => h("option", { value: String(index) }, groupName(groups[index], index))));
  }

  #renderLegend() {
    if (!this.legend.childElementCount) {
      this.legend.append(...KINDS.map((kind) => h("li", { dataset: { code: kind.code } }, h("i", { class: `swatch ${kind.tone}` }), h("span", {}, kind.name), h("b"))));
    }
    for (const item of this.legend.children) {
      const number = this.#counts[Number(item.dataset.code)];
      item.lastChild.textContent = count(number);
      item.classList.toggle("none", !number);
    }
  }

  #renderSequences() {
    const { sequences, scheduler } = this.#state;
    const order = [...sequences].sort((a, b) => this.#isMine(b) - this.#isMine(a) || (a.request ?? 0) - (b.request ?? 0));
    const rows = order.slice(0, MAX_BARS).map((sequence) => this.#bar(sequence));
    if (!rows.length) rows.push(h("p", { class: "hint" }, "Nothing runs now. Blocks of ended requests stay in the prefix cache until their space is needed."));
    if (order.length > MAX_BARS) rows.push(h("p", { class: "hint" }, `and ${count(order.length - MAX_BARS)} more`));
    if (scheduler.waiting) rows.push(h("p", { class: "note" }, this.#waitingReason(scheduler)));
    this.sequences.replaceChildren(...rows);
  }

  #waitingReason({ waiting, running }) {
    const limit = this.app.model.cache.max_num_seqs;
    const reason = running >= limit ? `all ${count(limit)} places are taken` : "their blocks are not free yet";
    return `${plural(waiting, "request")} waiting: ${reason}.`;
  }

  #bar(sequence) {
    const limit = Math.max(1, Math.min(sequence.max_len, this.app.model.max_model_len));
    const share = (tokens) => `${Math.min(100, (tokens / limit) * 100)}%`;
    const isMine = this.#isMine(sequence);
    const title = `${count(sequence.cached)} cached, ${count(Math.max(0, sequence.computed - sequence.cached))} computed, ${count(Math.max(0, sequence.tokens - sequence.computed))} to do, limit ${count(limit)}`;
    return h("div", { class: "sequence", title },
      h("div", { class: "row spread" }, h("span", {}, nameOf(sequence, isMine), h("span", { class: `pill ${sequence.state}` }, stateText(sequence))), h("span", { class: "hint" }, `${count(sequence.tokens)} of ${count(limit)}`)),
      h("div", { class: `seq-bar${isMine ? " mine" : ""}`, role: "img", "aria-label": title },
        h("i", { class: "part todo", style: { width: share(sequence.tokens) } }), h("i", { class: "part computed", style: { width: share(sequence.computed) } }), h("i", { class: "part from-cache", style: { width: share(Math.min(sequence.cached, sequence.computed)) } })));
  }

  #renderTiles() {
    const { cache, scheduler } = this.#state;
    const sum = (values) => values.reduce((total, value) => total + value, 0);
    const admissions = cache.hits + cache.misses;
    const entries = [
      [admissions ? `${Math.round((100 * cache.hits) / admissions)}%` : "–", "hit rate", `${count(cache.hits)} hits, ${count(cache.misses)} misses`],
      [count(cache.hit_tokens), "tokens from cache", "Prompt tokens that the prefix cache had"],
      [count(scheduler.tokens), "tokens computed", `in ${count(scheduler.steps)} steps`],
      [count(sum(cache.evictions)), "blocks evicted", "Cached blocks that were reused for new tokens"],
      [count(scheduler.preemptions), "preemptions", "Sequences that had to leave the full pool"],
      [count(Math.max(0, ...cache.peak)), "blocks at most", "Most blocks in use at a time, since the engine's last reset of the maximum"],
    ];
    this.tiles.replaceChildren(...entries.map(([value, name, title]) => h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, name))));
  }

  #renderStores() {
    const { store, preemption } = this.#state;
    const rows = [];
    if (store) {
      rows.push(["RAM store", `${plural(store.ram.num_blocks ?? 0, "block")}, ${bytes(store.ram.bytes ?? 0)}`], ["Disk store", `${plural(store.disk.num_blocks, "block")}, ${bytes(store.disk.bytes)} of ${bytes(store.disk.limit)}`],
        ["Copied out of the pool", bytes(store.bytes_out)], ["Copied back", bytes(store.bytes_in)],
        ["Disk read / written", `${bytes(store.disk.read_bytes)} / ${bytes(store.disk.written_bytes)}`], ["Disk hits / evictions", `${count(store.disk.hits)} / ${count(store.disk.evictions)}`]);
      const missed = Object.entries(store.disk.misses ?? {}).filter(([, number]) => number);
      if (missed.length) rows.push(["Disk misses", missed.map(([reason, number]) => `${reason}: ${count(number)}`).join(", ")]);
      if (store.disk.disabled_reason) rows.push(["Disk store is off", store.disk.disabled_reason]);
      if (store.num_not_written) rows.push(["Not written", `${plural(store.num_not_written, "block")}: the write queue was full`]);
    }
    if (preemption.swapped_bytes) rows.push(["Swapped sequences", `${count(preemption.to_ram)} to RAM, ${count(preemption.to_disk)} to disk, ${bytes(preemption.swapped_bytes)}`]);
    if (preemption.recomputed) rows.push(["Recomputed sequences", `${count(preemption.recomputed)}, ${plural(preemption.recomputed_tokens, "token")}`]);
    this.stores.replaceChildren(...(rows.length ? [h("section", {}, h("h3", {}, "Beyond the pool"), h("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])))] : []));
  }

  // -------------------------------------------------------------- rates and events

  #sample() {
    if (!this.#state || !this.#source) return;
    const now = performance.now();
    const { cache, scheduler } = this.#state;
    const previous = this.#lastSample;
    this.#lastSample = { time: now, tokens: scheduler.tokens, hits: cache.hit_tokens };
    if (!previous || scheduler.tokens < previous.tokens) return;
    const seconds = (now - previous.time) / 1000;
    const add = (name, value) => { this.#history[name].push(value); if (this.#history[name].length > SAMPLES) this.#history[name].shift(); };
    add("rate", (scheduler.tokens - previous.tokens) / seconds);
    add("hits", (cache.hit_tokens - previous.hits) / seconds);
    add("used", cache.used[this.#pool] ?? 0);
    if (!this.element.hidden) for (const [name, each] of Object.entries(this.sparks)) each.draw(this.#history[name]);
  }

  /** Add the differences of two states to the log, with reasons. */
  #note(before, now) {
    const lines = [];
    const hits = now.cache.hits - before.cache.hits;
    const misses = now.cache.misses - before.cache.misses;
    if (hits > 0) lines.push(["hit", `Prefix cache hit: ${plural(now.cache.hit_tokens - before.cache.hit_tokens, "token")} not computed again.`]);
    if (misses > 0) lines.push(["miss", `${misses > 1 ? `${count(misses)} misses` : "Miss"}: ${missReason(before, now)}.`]);
    const evicted = now.cache.evictions.reduce((sum, value, index) => sum + value - (before.cache.evictions[index] ?? 0), 0);
    if (evicted > 0) lines.push(["evict", `${plural(evicted, "cached block")} evicted: the space was needed for new tokens.`]);
    const preempted = now.scheduler.preemptions - before.scheduler.preemptions;
    if (preempted > 0) lines.push(["preempt", `Preempted ${plural(preempted, "sequence")}: the pool is full. ${preemptionOutcome(before.preemption, now.preemption)}`]);
    if (!lines.length) return;
    const time = new Date().toLocaleTimeString([], { hour12: false });
    this.#log.unshift(...lines.map(([kind, text]) => h("li", { class: kind }, h("time", {}, time), h("span", {}, text))));
    this.#log.length = Math.min(this.#log.length, MAX_LOG);
    this.events.replaceChildren(...this.#log);
  }
}

function missReason(before, now) {
  const known = new Set(before.sequences.filter((each) => each.state !== "waiting").map((each) => each.request));
  const fresh = now.sequences.filter((each) => !known.has(each.request) && !each.cached);
  if (fresh.length && fresh.every((each) => each.prompt_tokens <= now.block_size)) return `the prompt is not longer than a block of ${now.block_size} tokens`;
  return "no cached block begins like this prompt";
}

function preemptionOutcome(before, now) {
  if (now.recomputed > before.recomputed) return `${plural(now.recomputed_tokens - before.recomputed_tokens, "token")} will be recomputed.`;
  const size = bytes(now.swapped_bytes - before.swapped_bytes);
  if (now.to_ram > before.to_ram) return `${size} copied to RAM.`;
  return now.to_disk > before.to_disk ? `${size} copied to disk.` : "";
}

const nameOf = (sequence, isMine) => (isMine ? "This conversation" : `Request ${sequence.request ?? "?"}`) + (sequence.sample ? `, sample ${sequence.sample + 1}` : "");

function stateText({ state, tokens, computed, prompt_tokens: prompt }) {
  if (state === "swapped") return "swapped out";
  if (state === "running" && computed < prompt) return `reading the prompt, ${Math.round((100 * computed) / Math.max(1, Math.min(prompt, tokens)))}%`;
  return state === "running" ? "writing" : state;
}

function groupName(group, index) {
  if (!group) return `Pool ${index}`;
  const { layers } = group;
  const range = layers.length > 1 ? `layers ${layers[0]}–${layers.at(-1)}` : `layer ${layers[0]}`;
  const extra = group.is_cross_attention ? ", cross-attention" : group.window ? `, window ${count(group.window)}` : group.is_lower_level ? ", lower level" : "";
  return `${range.charAt(0).toUpperCase()}${range.slice(1)}${extra}`;
}

/** A row with a name, a curve of the last minute and the newest value. */
function spark(name, tone) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const value = h("b", {}, "0");
  const element = h("div", { class: "spark" }, h("span", {}, name), canvas, value);
  const draw = (values) => {
    const [width, height] = [canvas.clientWidth || 120, 24];
    const context = sizeCanvas(canvas, 120, height);
    const most = Math.max(...values, 1);
    value.textContent = count(values.at(-1) ?? 0);
    context.clearRect(0, 0, width, height);
    const x = (index) => 120 - (values.length - 1 - index) * (120 / (SAMPLES - 1));
    const y = (each) => height - 2 - (each / most) * (height - 5);
    context.beginPath();
    values.forEach((each, index) => context[index ? "lineTo" : "moveTo"](x(index), y(each)));
    context.strokeStyle = color(tone);
    context.lineWidth = 1.4;
    context.stroke();
    context.lineTo(120, height);
    context.lineTo(x(0), height);
    context.globalAlpha = 0.14;
    context.fillStyle = color(tone);
    context.fill();
    context.globalAlpha = 1;
  };
  return { element, draw };
}
