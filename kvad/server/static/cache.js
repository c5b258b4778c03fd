// The cache panel: a live map of the blocks in the pool, in RAM and on disk, what prompts found and why not more,
// rates, counts, traffic between the tiers, and evictions with their reasons.

import { connection } from "./api.js";
import { byId, bytes, coalesce, color, count, h, plural, sizeCanvas } from "./dom.js";
import { hideTip, showTip } from "./inspect.js";

// Kinds of blocks, in the order of the legend; the letters are those of /cache.
const FREE = 0, CACHED = 1, MINE = 2, OTHER = 3, SHARED = 4, MINE_CACHED = 5, RAM = 6, DISK = 7;
const PACKED = 8; // added to the code of a block that is stored in a smaller format
const KINDS = [
  { code: MINE, name: "This conversation", tone: "mine", title: "Blocks that a running request of this conversation uses" },
  { code: MINE_CACHED, name: "Its cached blocks", tone: "mine-cached", title: "Blocks of this conversation that only the prefix cache still has: its next turn finds them" },
  { code: OTHER, name: "Other requests", tone: "other", title: "Blocks that other running requests use" },
  { code: SHARED, name: "Shared", tone: "shared", title: "Blocks of several sequences, kept once" },
  { code: CACHED, name: "Other cached blocks", tone: "cached", title: "Blocks in the prefix cache that no running request uses" },
  { code: FREE, name: "Free", tone: "free", title: "Blocks that hold nothing" },
  { code: PACKED, name: "Packed", tone: "packed", title: "Blocks in a smaller format: quantized, merged into summaries, or compressed in RAM; counted in their other kind too" },
  { code: RAM, name: "In RAM", tone: "ram", title: "Blocks in host memory beyond the pool: evicted, swapped out or offloaded" },
  { code: DISK, name: "On disk", tone: "disk", title: "Blocks in files: prefix cache, swapped out, offloaded, sessions" },
];
const MAX_BAND = 2048; // cells of a band beyond the pool
const LABEL = 20; // pixels above a band
const MAX_PROMPTS = 6;
const SAMPLES = 120; // points of a curve
const SAMPLE_MS = 500;
const MAP_HEIGHT = 200; // of the pool, and of what is stored beyond it
const STORED_HEIGHT = 70;
const MAX_LOG = 20;
const MAX_BARS = 24;

export class CachePanel {
  #source = null;
  #state = null;
  #pool = 0;
  #codes = new Uint8Array(0);
  #painted = new Uint8Array(0);
  #owners = new Int32Array(0);
  #bands = []; // parts of the map: {label, first, size, owners: name of a cell's owner, describe}
  #counts = Array(PACKED + 1).fill(0);
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
    this.prompts = h("ol", { class: "prompts" });
    this.promptKeys = h("p", { class: "hint keys" });
    this.traffic = h("div");
    this.stores = h("div");
    this.events = h("ol", { class: "events" });
    this.canvas.addEventListener("mousemove", (event) => this.#point(this.#blockAt(event.offsetX, event.offsetY)));
    this.canvas.addEventListener("mouseleave", () => this.#point(-1));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#point(-1));
    this.element.replaceChildren(
      h("section", {}, h("div", { class: "row spread" }, h("h3", {}, "Blocks"), this.pools), this.summary, this.canvas, this.text, this.legend),
      h("section", {}, h("div", { class: "row spread heading" }, h("h3", {}, "Sequences"), h("p", { class: "hint keys" }, h("span", { class: "key-cache" }, "from cache"), h("span", { class: "key-computed" }, "computed"), h("span", { class: "key-todo" }, "to do"))), this.sequences),
      h("section", {}, h("div", { class: "row spread heading" }, h("h3", {}, "Prompts"), this.promptKeys), this.prompts),
      h("section", {}, h("h3", {}, "Last minute"), ...Object.values(this.sparks).map((each) => each.element)),
      h("section", {}, h("h3", {}, "Since the start"), this.tiles), this.traffic, this.stores,
      h("section", {}, h("h3", {}, "Evictions and preemptions"), this.events),
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

  /** Set the bands of the map, and the kind and the owner of every cell. */
  #classify() {
    const { pools, groups, sequences } = this.#state;
    if (this.#conversation !== this.app.conversation?.id) { this.#conversation = this.app.conversation?.id; this.#kept.clear(); }
    if (this.#pool >= pools.length) this.#pool = 0;
    const codes = [];
    const owners = [];
    this.#bands = [];
    this.#counts.fill(0);
    for (const request of sequences) this.#isMine(request);
    const lower = groups.map((group, index) => index).filter((index) => groups[index].is_lower_level && groups[index].token_group === this.#pool);
    for (const pool of [this.#pool, ...lower]) if (pools[pool] !== undefined) this.#addPool(pool, codes, owners);
    for (const band of this.#storedBands()) {
      this.#bands.push({ ...band, first: codes.length, size: Math.min(band.number, MAX_BAND) });
      for (let cell = 0; cell < Math.min(band.number, MAX_BAND); cell++) { codes.push(band.code); owners.push(band.owner ?? -1); }
      this.#counts[band.code & ~PACKED] += band.number;
      if (band.code & PACKED) this.#counts[PACKED] += band.number;
    }
    this.#codes = Uint8Array.from(codes);
    this.#owners = Int32Array.from(owners);
  }

  #addPool(pool, codes, owners) {
    const { pools, groups, sequences, first_block: first } = this.#state;
    const [letters, group] = [pools[pool], groups[pool]];
    const own = new Int32Array(letters.length).fill(-1);
    const isUpper = pool === this.#pool;
    sequences.forEach((sequence, index) => {
      const isMine = this.#isMine(sequence);
      for (const block of sequence.blocks[pool] ?? []) {
        if (block < first) continue;
        own[block - first] = index;
        if (isUpper && isMine) this.#kept.add(block - first);
        else if (isUpper && letters[block - first] === "u") this.#kept.delete(block - first);
      }
    });
    this.#bands.push({ label: isUpper ? "Pool" : levelName(group), first: codes.length, size: letters.length, number: letters.length, pool });
    const isPacked = group.is_packed || group.has_summaries;
    for (let block = 0; block < letters.length; block++) {
      let code = this.#kindOf(letters[block], block, isUpper, sequences[own[block]]);
      if (code !== FREE && group.num_ram_blocks !== null) code = block < group.num_ram_blocks ? RAM : DISK;
      if (code !== FREE && isPacked) { code |= PACKED; this.#counts[PACKED]++; }
      codes.push(code);
      owners.push(own[block]);
      this.#counts[code & ~PACKED]++;
    }
  }

  /** Blocks beyond the pool: evicted and stored ones, swapped sequences, sessions. */
  #storedBands() {
    const { store, sequences, sessions, groups, block_size: size } = this.#state;
    const form = groups[this.#pool]?.is_packed ? PACKED : 0; // a copy has the format of the pool
    const bands = [];
    const add = (place, code, number, what, owner = -1) => { if (number > 0) bands.push({ label: place, code, number, what, owner }); };
    const packed = store?.ram.compressed ?? 0;
    add("RAM", RAM | form, (store?.ram.num_blocks ?? 0) - packed, "evicted from the pool, copied to RAM");
    add("RAM", RAM | PACKED, packed, "evicted from the pool, compressed in RAM");
    sequences.forEach((sequence, index) => { if (sequence.swapped?.place === "ram") add("RAM", RAM | form, sequence.swapped.blocks, "swapped out to RAM", index); });
    add("Disk", DISK | form, store?.disk.num_blocks ?? 0, "in the folder of the prefix cache");
    sequences.forEach((sequence, index) => { if (sequence.swapped?.place === "disk") add("Disk", DISK | form, sequence.swapped.blocks, "swapped out to disk", index); });
    add("Disk", DISK | form, Math.ceil(sessions.num_tokens / size), `in ${plural(sessions.num_files, "session file")}`);
    return bands;
  }

  #kindOf(letter, block, isUpper, owner) {
    if (letter === "f") { if (isUpper) this.#kept.delete(block); return FREE; }
    if (letter === "c") return isUpper && this.#kept.has(block) ? MINE_CACHED : CACHED;
    if (letter === "s") return SHARED;
    return owner && this.#isMine(owner) ? MINE : OTHER;
  }

  /** Lines of cells: bands with the same label follow each other, and other ones begin below a new label. */
  #layout() {
    const width = this.canvas.parentElement.clientWidth;
    const pitchOf = (isStored, height, most) => {
      const size = this.#bands.reduce((sum, band) => sum + ((band.pool === undefined) === isStored ? band.size : 0), 0);
      return Math.max(3, Math.min(most, Math.floor(Math.sqrt((width * height) / Math.max(1, size)))));
    };
    const pools = pitchOf(false, MAP_HEIGHT, 16);
    const stored = pitchOf(true, STORED_HEIGHT, pools);
    const lines = [];
    const labels = [];
    let y = 0;
    for (const [index, band] of this.#bands.entries()) {
      const pitch = band.pool === undefined ? stored : pools;
      const columns = Math.max(1, Math.floor(width / pitch));
      const isSame = index > 0 && this.#bands[index - 1].label === band.label;
      if (this.#bands.length > 1 && !isSame) {
        const number = this.#bands.reduce((sum, each) => sum + (each.label === band.label ? each.number : 0), 0);
        labels.push({ y: y + (index ? 6 : 0), text: band.label, number });
        y += index ? LABEL + 6 : LABEL;
      }
      let first = band.first;
      if (isSame && lines.at(-1).number < columns) { // fill the line of the band before
        const room = Math.min(columns - lines.at(-1).number, band.size);
        lines.at(-1).number += room;
        first += room;
      }
      for (; first < band.first + band.size; first += columns) { lines.push({ y, first, pitch, number: Math.min(columns, band.first + band.size - first) }); y += pitch; }
    }
    return { lines, labels, width, height: Math.max(y, pools) };
  }

  /** Position of a cell: its line and its left upper corner. */
  #place(block, { lines }) {
    const line = lines.findIndex((each) => block >= each.first && block < each.first + each.number);
    const { first, pitch, y } = lines[line];
    return { line, column: block - first, pitch, x: (block - first) * pitch, y };
  }

  #paint() {
    const layout = this.#layout();
    const { lines, labels, width, height } = layout;
    const shape = [document.documentElement.dataset.shown, width, height, ...lines.map((each) => `${each.y} ${each.first}`)].join();
    const context = sizeCanvas(this.canvas, width, height);
    if (this.#painted.length !== this.#codes.length || this.shape !== shape) {
      this.shape = shape;
      this.#painted = new Uint8Array(this.#codes.length).fill(255);
      this.tones = [];
      for (const kind of KINDS) this.tones[kind.code] = color(`cell-${kind.tone}`);
      context.clearRect(0, 0, width, height);
    }
    context.font = "12px Inter, system-ui, sans-serif";
    context.fillStyle = color("soft");
    for (const { y, text, number } of labels) {
      context.clearRect(0, y, width, LABEL);
      const isCut = number > MAX_BAND && text !== "Pool";
      context.fillText(`${text}: ${plural(number, "block")}${isCut ? ", not all shown" : ""}`, 0, y + 12);
    }
    for (const { y, first, number, pitch } of lines) {
      for (let block = first; block < first + number; block++) {
        if (this.#painted[block] === this.#codes[block]) continue;
        this.#painted[block] = this.#codes[block];
        context.clearRect((block - first) * pitch, y, pitch, pitch);
        drawCell(context, this.#codes[block], this.tones[this.#codes[block] & ~PACKED], (block - first) * pitch, y, sideOf(pitch));
      }
    }
    if (this.#cursor >= 0 && this.#cursor < this.#codes.length) {
      const { x, y, pitch } = this.#place(this.#cursor, layout);
      context.strokeStyle = color("ink");
      context.lineWidth = 1.5;
      context.strokeRect(x - 0.25, y - 0.25, sideOf(pitch) + 0.5, sideOf(pitch) + 0.5);
    }
  }

  #blockAt(x, y) {
    const line = this.#layout().lines.find((each) => y >= each.y && y < each.y + each.pitch);
    const column = line ? Math.floor(x / line.pitch) : -1;
    return line && column >= 0 && column < line.number ? line.first + column : -1;
  }

  #point(block) {
    if (block === this.#cursor) return;
    for (const each of [this.#cursor, block]) if (each >= 0) this.#repaintAround(each);
    this.#cursor = block;
    if (block < 0) hideTip();
    this.draw();
  }

  #repaintAround(block) {
    if (block >= this.#codes.length) return;
    const layout = this.#layout();
    const { line, column } = this.#place(block, layout);
    for (const { first, number } of layout.lines.slice(Math.max(0, line - 1), line + 2)) {
      for (const at of [column - 1, column, column + 1]) if (at >= 0 && at < number) this.#painted[first + at] = 255;
    }
  }

  #key(event) {
    if (event.key === "Escape") this.#point(-1);
    const isMove = ["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "Home", "End"].includes(event.key);
    if (!isMove || !this.#codes.length) return;
    event.preventDefault();
    if (this.#cursor < 0) { this.#point(0); return; }
    const layout = this.#layout();
    const { line, x } = this.#place(this.#cursor, layout);
    const below = layout.lines[line + { ArrowDown: 1, ArrowUp: -1 }[event.key]];
    const next = { ArrowRight: this.#cursor + 1, ArrowLeft: this.#cursor - 1, Home: 0, End: this.#codes.length - 1 }[event.key]
      ?? (below ? below.first + Math.min(Math.floor(x / below.pitch), below.number - 1) : this.#cursor);
    this.#point(Math.min(Math.max(0, next), this.#codes.length - 1));
  }

  #describe(block) {
    const band = this.#bands.find((each) => block >= each.first && block < each.first + each.size);
    const code = this.#codes[block] & ~PACKED;
    const sequence = this.#state.sequences[this.#owners[block]];
    const owner = sequence ? nameOf(sequence, this.#isMine(sequence), this.app) : null;
    const lower = (text) => text.charAt(0).toLowerCase() + text.slice(1);
    if (band.pool === undefined) return `${band.label}: a block ${band.what}${owner ? `, of ${lower(owner)}` : ""}`;
    const group = this.#state.groups[band.pool];
    const kind = KINDS.find((each) => each.code === code);
    const who = code === SHARED ? "shared by several sequences, kept once" : owner && code !== FREE && code !== CACHED ? lower(owner) : lower(kind.name);
    const place = code === RAM ? ", offloaded to RAM" : code === DISK ? ", offloaded to disk" : "";
    const form = this.#codes[block] & PACKED ? `, packed as ${group.has_summaries ? "summaries" : group.formats}` : "";
    return `Block ${block - band.first + this.#state.first_block}: ${who}${place}${form}`;
  }

  // -------------------------------------------------------------- rendering

  #draw() {
    if (!this.#state || this.element.hidden) return;
    const { pools, groups, cache, block_size: size } = this.#state;
    this.#renderPools(pools, groups);
    this.#paint();
    const total = cache.total[this.#pool] ?? 0;
    const used = cache.used[this.#pool] ?? 0;
    const shownPart = (pools[this.#pool] ?? "").length < total ? ` The map shows the first ${count(pools[this.#pool].length)}.` : "";
    const group = groups[this.#pool];
    this.summary.textContent = total ? `${count(used)} of ${plural(total, "block")} in use. A block holds ${plural(size, "token")} in ${bytes(group.block_bytes)} (${group.formats}).${shownPart}` : "This model keeps no blocks.";
    this.canvas.setAttribute("aria-label", `Map of ${count(total)} blocks: ${KINDS.map((kind) => `${this.#counts[kind.code]} ${kind.name.toLowerCase()}`).join(", ")}. Arrow keys move between blocks.`);
    this.#renderTip();
    this.#renderLegend();
    this.#renderSequences();
    this.#renderPrompts();
    this.#renderTiles();
    this.#renderTraffic();
    this.#renderStores();
    this.#renderEvents();
  }

  #renderTip() {
    const isOn = this.#cursor >= 0 && this.#cursor < this.#codes.length;
    const text = isOn ? this.#describe(this.#cursor) : "";
    if (this.text.textContent !== text) this.text.textContent = text;
    if (!isOn) return;
    const { x, y, pitch } = this.#place(this.#cursor, this.#layout());
    const box = this.canvas.getBoundingClientRect();
    const [left, top] = [box.left + x, box.top + y];
    showTip({ getBoundingClientRect: () => ({ left, top, width: pitch, bottom: top + pitch }) }, text);
  }

  #renderPools(pools, groups) {
    const upper = pools.map((_, index) => index).filter((index) => !groups[index].is_lower_level);
    this.pools.hidden = upper.length < 2;
    if (this.pools.childElementCount === upper.length) return;
    this.pools.replaceChildren(...upper.map((index) => h("option", { value: String(index) }, groupName(groups[index], index))));
  }

  #renderLegend() {
    if (!this.legend.childElementCount) {
      this.legend.append(...KINDS.map((kind) => h("li", { dataset: { code: kind.code }, title: kind.title }, h("i", { class: `swatch ${kind.tone}` }), h("span", {}, kind.name), h("b"))));
    }
    for (const item of this.legend.children) {
      const number = this.#counts[Number(item.dataset.code)];
      item.lastChild.textContent = count(number);
      if (item.dataset.code === String(MINE)) item.children[1].textContent = ownName(this.app);
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

  /** What the newest prompts found in the cache, and why the next block was computed. */
  #renderPrompts() {
    const { prompts } = this.#state;
    const key = JSON.stringify([prompts, this.#conversation]);
    if (this.promptKey === key) return;
    this.promptKey = key;
    const shown = prompts.slice(0, MAX_PROMPTS);
    const rows = shown.map((prompt) => this.#prompt(prompt));
    this.prompts.replaceChildren(...(rows.length ? rows : [h("li", { class: "hint" }, "What each prompt finds in the cache appears here, with the reason why it finds no more.")]));
    const has = (test) => shown.some(test);
    this.promptKeys.replaceChildren(...[["key-cache", "from cache", true], ["key-ram", "from RAM", has((each) => each.num_ram_tokens)], ["key-disk", "from disk", has((each) => each.num_disk_tokens || each.is_resumed)], ["key-computed", "computed", true]]
      .filter(([, , isShown]) => isShown).map(([tone, name]) => h("span", { class: tone }, name)));
  }

  #prompt(prompt) {
    const isMine = this.#isMine(prompt);
    const total = Math.max(1, prompt.num_prompt_tokens);
    const cached = prompt.is_source_cached ? total : prompt.num_cached_tokens;
    const loaded = prompt.num_ram_tokens + prompt.num_disk_tokens;
    const parts = prompt.is_resumed ? [["disk", cached]] : [["pool", cached - loaded], ["ram", prompt.num_ram_tokens], ["disk", prompt.num_disk_tokens]];
    return h("li", { class: `prompt${isMine ? " mine" : ""}` },
      h("div", { class: "row spread" }, h("span", {}, nameOf({ ...prompt, sample: 0 }, isMine, this.app)), h("span", { class: "hint" }, cached ? `${count(cached)} of ${plural(total, "token")} from cache` : `${plural(total, "token")}, all computed`)),
      h("div", { class: "prompt-bar", "aria-hidden": "true" }, ...parts.filter(([, tokens]) => tokens > 0).map(([tone, tokens]) => h("i", { class: tone, style: { width: `${(100 * tokens) / total}%` } }))),
      h("p", { class: "hint" }, promptReason(prompt, cached, this.#state.block_size)));
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
      h("div", { class: "row spread" }, h("span", {}, nameOf(sequence, isMine, this.app), h("span", { class: `pill ${sequence.state}` }, stateText(sequence))), h("span", { class: "hint" }, `${count(sequence.tokens)} of ${count(limit)}`)),
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
      [count(sum(cache.evictions)), "blocks evicted", "Cached blocks whose space was needed; the reasons are below"],
      [count(scheduler.preemptions), "preemptions", "Sequences that had to leave the full pool"],
      [count(Math.max(0, ...cache.peak)), "blocks at most", "Most blocks in use at a time, since the engine's last reset of the maximum"],
    ];
    this.tiles.replaceChildren(...entries.map(([value, name, title]) => h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, name))));
  }

  #renderStores() {
    const { store, preemption, sessions } = this.#state;
    const rows = [];
    if (store) {
      if (store.ram.limit) rows.push(["RAM store", `${plural(store.ram.num_blocks, "block")}, ${bytes(store.ram.bytes)} of ${bytes(store.ram.limit)}${store.ram.evictions ? `; ${count(store.ram.evictions)} dropped at the limit` : ""}`]);
      if (store.disk.limit) rows.push(["Disk store", `${plural(store.disk.num_blocks, "block")}, ${bytes(store.disk.bytes)} of ${bytes(store.disk.limit)}${store.disk.evictions ? `; ${count(store.disk.evictions)} dropped at the limit` : ""}`]);
      const missed = Object.entries(store.disk.misses ?? {}).filter(([, number]) => number);
      if (missed.length) rows.push(["Disk misses", missed.map(([reason, number]) => `${reason}: ${count(number)}`).join(", ")]);
      if (store.disk.disabled_reason) rows.push(["Disk store is off", store.disk.disabled_reason]);
      if (store.num_not_written) rows.push(["Not written", `${plural(store.num_not_written, "block")}: the write queue was full`]);
    }
    if (preemption.swapped_bytes) rows.push(["Swapped sequences", `${count(preemption.to_ram)} to RAM, ${count(preemption.to_disk)} to disk, ${bytes(preemption.swapped_bytes)}`]);
    if (sessions.saved || sessions.loaded) rows.push(["Sessions", `${plural(sessions.num_files, "file")}; ${plural(sessions.saved, "turn")} saved, ${count(sessions.loaded)} loaded${sessions.removed ? `; ${plural(sessions.removed, "file")} removed at the limit` : ""}`]);
    if (preemption.recomputed) rows.push(["Recomputed sequences", `${count(preemption.recomputed)}, ${plural(preemption.recomputed_tokens, "token")}`]);
    this.stores.replaceChildren(...(rows.length ? [h("section", {}, h("h3", {}, "Beyond the pool"), h("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])))] : []));
  }

  /** Blocks and bytes that were copied out of the pool and back, by kind and place. */
  #renderTraffic() {
    const rows = new Map(); // replicas have rows of their own
    for (const { kind, place, ...counts } of this.#state.traffic) {
      const sums = rows.get(`${kind} ${place}`) ?? {};
      for (const [name, value] of Object.entries(counts)) if (value !== null) sums[name] = (sums[name] ?? 0) + value;
      rows.set(`${kind} ${place}`, sums);
    }
    const key = JSON.stringify([...rows]);
    if (this.trafficKey === key) return;
    this.trafficKey = key;
    const amount = (blocks, size) => (size === undefined ? "" : [blocks === undefined ? null : h("span", {}, plural(blocks, "block")), h("span", {}, bytes(size))]);
    this.traffic.replaceChildren(...(rows.size ? [h("section", {}, h("h3", {}, "Traffic between tiers"), h("table", { class: "traffic" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Tier"), h("th", { scope: "col" }, "Out of the pool"), h("th", { scope: "col" }, "Back"))),
      h("tbody", {}, ...[...rows].map(([name, sums]) => h("tr", {}, h("th", { scope: "row" }, ...trafficName(name)), h("td", {}, amount(sums.blocks_out, sums.bytes_out)), h("td", {}, amount(sums.blocks_in, sums.bytes_in)))))))] : []));
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

  /** Add the preemptions between two states to the log. */
  #note(before, now) {
    const preempted = now.scheduler.preemptions - before.scheduler.preemptions;
    if (preempted <= 0) return;
    this.#log.push({ kind: "preempt", time: Date.now(), text: `Preempted ${plural(preempted, "sequence")}: the pool is full. ${preemptionOutcome(before.preemption, now.preemption)}` });
    if (this.#log.length > MAX_LOG) this.#log.shift();
  }

  #renderEvents() {
    const evictions = this.#state.evictions.map((event) => ({ kind: "evict", time: event.time * 1000, text: this.#evictionText(event) }));
    const all = [...evictions, ...this.#log].sort((a, b) => b.time - a.time).slice(0, MAX_LOG);
    const key = JSON.stringify(all);
    if (this.eventsKey === key) return;
    this.eventsKey = key;
    this.events.replaceChildren(...all.map(({ kind, time, text }) => h("li", { class: kind }, h("time", {}, new Date(time).toLocaleTimeString([], { hour12: false })), h("span", {}, text))));
  }

  #evictionText(event) {
    const who = this.#isMine(event) ? ownName(this.app).toLowerCase() : event.request === null ? "an earlier request" : `request ${event.request}`;
    return `${plural(event.blocks, "cached block")} evicted ${EVICTION_CAUSES[event.cause]} ${who}${onReplica(event)}.`;
  }
}

const sideOf = (pitch) => pitch - (pitch > 6 ? 2 : 1);

/** Draw a block: a square in the pool, two bars if it is packed, a ring in RAM, a ring with a core on disk. */
function drawCell(context, code, tone, x, y, side) {
  const place = code & ~PACKED;
  context.fillStyle = tone;
  const isTiny = side < (place === RAM || place === DISK ? 7 : 5);
  if (isTiny) {
    context.fillRect(x, y, side, code & PACKED ? Math.ceil(side / 2) : side);
  } else if (code & PACKED) {
    const bar = Math.floor((side - 2) / 2);
    context.fillRect(x, y, side, bar);
    context.fillRect(x, y + side - bar, side, bar);
  } else if (place === RAM || place === DISK) {
    context.strokeStyle = tone;
    context.lineWidth = 1.5;
    context.beginPath();
    context.roundRect(x + 0.75, y + 0.75, side - 1.5, side - 1.5, 1.5);
    context.stroke();
    if (place === DISK) context.fillRect(x + side / 2 - 1.5, y + side / 2 - 1.5, 3, 3);
  } else {
    context.beginPath();
    context.roundRect(x, y, side, side, 1.5);
    context.fill();
  }
}

const EVICTION_CAUSES = {
  tokens: "for new tokens of",
  load: "for stored blocks that were loaded for",
  "swap-in": "to swap in",
  input: "for the source text of",
};
const MISS_REASONS = {
  "": "they fill no whole block",
  root: "first prompt with this API key, salt and adapter",
  new: "no earlier prompt continues like this",
  window: "blocks that the attention window needs were freed",
  scores: "their log-probabilities were requested",
  off: "this cache policy shares no blocks",
  "no room": "the pool had no room for the stored blocks",
  moved: "evicted while the request waited",
  gone: "dropped from the store while the request waited",
  withdrawn: "withdrawn after a numerical error",
};
const EVICTED = { tokens: "evicted for new tokens", load: "evicted for loaded blocks", "swap-in": "evicted to swap a sequence in", input: "evicted for a source text" };

/** Return why the rest of a prompt was computed. */
function promptReason(prompt, cached, size) {
  const { miss_reason: reason, miss_cause: cause, num_prompt_tokens: total } = prompt;
  if (prompt.is_source_cached !== null) return prompt.is_source_cached ? "This source text was encoded before." : "Encoded now: no cached source text is the same.";
  if (prompt.is_resumed) return `Restored from a session; ${count(total - cached)} computed: they continue it.`;
  const why = reason === "short" ? `no whole block of ${count(size)} before the last token` : reason === "evicted" ? EVICTED[cause] : MISS_REASONS[reason] ?? `a stored block is unusable (${reason})`;
  const session = prompt.resume_miss_reason ? ` The session was not used: ${prompt.resume_miss_reason}.` : "";
  return `${count(total - cached)} computed: ${why}.${session}`;
}

const TRAFFIC = { prefix: "prefix cache", swapped: "swapped sequences", offload: "offloaded tokens", session: "sessions" };

function trafficName(name) {
  const [kind, place] = name.split(" ");
  return [{ ram: "RAM", disk: "Disk", all: "RAM and disk" }[place], h("span", {}, TRAFFIC[kind])];
}

const levelName = (group) => (group.has_summaries ? "Packed as summaries" : group.num_ram_blocks !== null ? "Offloaded" : `Packed as ${group.formats}`);

function preemptionOutcome(before, now) {
  if (now.recomputed > before.recomputed) return `${plural(now.recomputed_tokens - before.recomputed_tokens, "token")} will be recomputed.`;
  const size = bytes(now.swapped_bytes - before.swapped_bytes);
  if (now.to_ram > before.to_ram) return `${size} copied to RAM.`;
  return now.to_disk > before.to_disk ? `${size} copied to disk.` : "";
}

const OWN = { chat: "This conversation", completion: "This text", translate: "This translation" };
const ownName = (app) => OWN[app.mode];

/** The replica of a request or a pool, if the server has several. */
const onReplica = ({ replica }, word = " on") => (replica === undefined ? "" : `${word} replica ${replica + 1}`);

const nameOf = (sequence, isMine, app) => (isMine ? ownName(app) : sequence.request === null ? "A request" : `Request ${sequence.request}`) + onReplica(sequence) + (sequence.sample ? `, sample ${sequence.sample + 1}` : "");

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
  return `${range.charAt(0).toUpperCase()}${range.slice(1)}${extra}${onReplica(group, ",")}`;
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
