const names = Object.keys(data.states);
const LABEL = 130, BARS = 44, HIGH = 15, UNWRITTEN = names.indexOf("unwritten"), EVICTED = names.indexOf("evicted");
const last = data.steps.length, end = last + 1; // the slider's last stop: every sequence has ended
const MOST_BLOCKS = 512; // of a pool that are drawn
const met = new Set(["hot", "evicted", "unwritten", ...data.rows.flatMap((row) => row.lines.flatMap((line) => line.changes.map((c) => c.state)))]);
const view = { row: 0, step: last, at: -1, pinned: false, lines: [], wide: 8, timer: 0, pools: [], tables: [] };

const spans = (name, values) => {
  const runs = [];
  for (const value of [...values].sort((a, b) => a - b)) {
    const run = runs[runs.length - 1];
    if (run && run[1] + 1 === value) run[1] = value; else runs.push([value, value]);
  }
  const said = runs.map(([low, high]) => (low === high ? `${low}` : `${low}\u2013${high}`)).join(", ");
  return `${name}${values.length > 1 ? "s" : ""} ${said}`;
};
const label = (line) => spans("layer", line.layers) + (line.head === null ? "" : ` head ${line.head}`);

// The states of every line after a step: one code per position.
const replay = (row, step) => row.lines.map((line) => {
  const codes = new Uint8Array(row.tokens.length).fill(UNWRITTEN);
  for (const change of line.changes) {
    if (change.step > step) break;
    codes.fill(names.indexOf(change.state), change.first, change.last + 1);
  }
  return codes;
});
const heads = (row, line) => (line.head === null ? line.layers.reduce((n, layer) => n + row.attention_mass[layer].length, 0) : 1);
const massOf = (row, at) => row.attention_mass.reduce((n, layer) => n + layer.reduce((m, head) => m + head[at], 0), 0);

function tally(row) {
  const counts = names.map(() => 0);
  row.lines.forEach((line, n) => view.lines[n].forEach((code) => { counts[code] += heads(row, line); }));
  const whole = counts.reduce((a, b) => a + b, 0) || 1;
  $("legend").replaceChildren(...names.map((name, code) => [name, code]).filter(([name]) => met.has(name)).map(([name, code]) => {
    const key = make("span", undefined, "key"), box = make("i");
    box.style.background = `var(--${name})`;
    key.append(box, `${name} ${((100 * counts[code]) / whole).toFixed(1)}%`);
    return key;
  }));
}

let spansOf = []; // the elements of the sequence's tokens

function words(row) {
  const every = row.lines.map((line) => heads(row, line));
  spansOf.forEach((span, at) => {
    const counts = names.map(() => 0);
    view.lines.forEach((codes, n) => { counts[codes[at]] += every[n]; });
    const most = counts.indexOf(Math.max(...counts));
    const alive = counts.some((count, code) => count && code !== EVICTED && code !== UNWRITTEN);
    span.className = (alive ? "" : most === UNWRITTEN ? "later" : "none") + (at === view.at ? " at" : "");
    const shown = alive ? counts.map((n, code) => (code === EVICTED || code === UNWRITTEN ? 0 : n)) : counts;
    const best = shown.indexOf(Math.max(...shown));
    span.style.borderBottomColor = best === UNWRITTEN ? "transparent" : `var(--${names[best]})`;
    const gone = counts[EVICTED] / counts.reduce((a, b) => a + b, 0);
    span.style.opacity = alive ? String(1 - 0.6 * gone) : "";
  });
}

// The pools and the block tables after a step; every step holds only what it changed.
function replayBlocks(step) {
  view.pools = data.groups.map(() => new Map());
  view.tables = data.rows.map(() => data.groups.map(() => []));
  for (const each of data.steps.slice(0, step)) {
    for (const block of each.pool) view.pools[block.group].set(block.block, block);
    for (const table of each.tables) {
      const entries = view.tables[table.row][table.group];
      entries.splice(table.start, entries.length, ...table.entries);
    }
  }
  if (step === end) {
    for (const block of data.end) view.pools[block.group].set(block.block, block);
    view.tables = data.rows.map(() => data.groups.map(() => []));
  }
}
const owner = (number) => `hsl(${(215 + number * 137.5) % 360} 58% 46%)`;
const touched = data.groups.map((_, group) => {
  const known = new Set();
  for (const step of data.steps) for (const block of step.pool) if (block.group === group) known.add(block.block);
  return [...known].sort((a, b) => a - b);
});

// One square: its color is its owner, two owners share it.
function square(number, rows, state, entry, size) {
  const box = make("div", String(number), "block" + (rows.length ? " used" : "") + (state && state.is_cached ? " cached" : ""));
  const colors = rows.map(owner), part = 100 / (colors.length || 1);
  if (colors.length === 1) box.style.background = colors[0];
  if (colors.length > 1) {
    box.style.background = `linear-gradient(90deg, ${colors.map((c, n) => `${c} ${n * part}% ${(n + 1) * part}%`).join(", ")})`;
    box.append(make("s", `\u00d7${colors.length}`));
  }
  const facts = [`block ${number}`, rows.length ? `${spans("sequence", rows)}` : state && state.is_cached ? "no sequence" : "free"];
  if (state && state.is_cached) facts.push("in the prefix cache");
  if (entry) {
    const fill = make("em");
    fill.style.width = `${(100 * entry[1]) / size}%`;
    box.append(fill);
    facts.push(entry[1] ? `${entry[1]} of ${size} slots, tokens ${entry[2]}\u2013${entry[3]}` : "empty");
    box.dataset.first = entry[2]; box.dataset.last = entry[3];
  }
  box.title = facts.join(", ");
  return box;
}

function pools() {
  $("pools").replaceChildren(...data.groups.map((group, index) => {
    const owners = new Map(), card = make("div", undefined, "pool"), strip = make("div", undefined, "strip");
    view.tables.forEach((tables, number) => tables[index].forEach(([block]) => {
      if (!owners.has(block)) owners.set(block, []);
      owners.get(block).push(number);
    }));
    const states = view.pools[index], drawn = touched[index].slice(0, MOST_BLOCKS);
    const live = [...states.values()].filter((each) => each.references).length;
    const cached = [...states.values()].filter((each) => each.is_cached && !each.references).length;
    const kind = group.state === "hot" ? "" : `, ${group.state}`;
    card.append(make("h3", `${spans("layer", group.layers)}${kind}: ${live} of ${group.blocks} blocks in use, ` +
      `${cached} kept for reuse, ${group.blocks - live - cached} free; ${group.block_size} slots each`));
    strip.append(...drawn.map((block) => square(block, owners.get(block) || [], states.get(block))));
    const rest = group.blocks - drawn.length;
    if (rest > 0) strip.append(make("span", `and ${rest} blocks that were never used`, "dim"));
    card.append(strip, ...view.tables.map((tables, number) => [tables[index], number]).filter(([table]) => table.length).map(([table, number]) => {
      const line = make("div", undefined, "table");
      line.dataset.row = number;
      line.append(make("b", `sequence ${number}`), ...table.map((entry) =>
        square(entry[0], owners.get(entry[0]), states.get(entry[0]), entry, group.block_size)));
      return line;
    }));
    return card;
  }));
}

// Marks the blocks of the chosen sequence that hold the token under the pointer.
function holders() {
  for (const box of document.querySelectorAll("#pools .table .block")) {
    const inside = view.at >= 0 && Number(box.dataset.first) <= view.at && view.at <= Number(box.dataset.last);
    box.classList.toggle("at", inside && Number(box.parentNode.dataset.row) === view.row);
  }
}

function sentence(row) {
  const counts = names.map(() => 0), step = Math.min(view.step, last);
  row.tokens.forEach((_, at) => {
    const codes = view.lines.map((line) => line[at]), held = codes.filter((code) => code !== EVICTED && code !== UNWRITTEN);
    counts[held.length ? held[0] : codes.includes(EVICTED) ? EVICTED : UNWRITTEN] += 1;
  });
  const kinds = { hot: "in its own blocks", shared: "in blocks that others may use too", quantized: "in a smaller format",
    summarized: "in summaries", offloaded: "outside the pool", swapped: "swapped out", evicted: "dropped by every head",
    unwritten: "not computed yet" };
  const parts = names.map((name, code) => [name, counts[code]]).filter(([, count]) => count).map(([name, count]) => `${count} ${kinds[name]}`);
  $("sentence").textContent = (view.step === end ? "After the last step all sequences have ended; " : `After step ${step}, `) +
    `of the ${row.tokens.length} tokens of sequence ${view.row}, ${parts.join(", ").replace(" ", " are ")}. ` +
    (last ? "Move the slider to see which step computed, moved or dropped what." : "");
}

function map(row) {
  const canvas = $("map"), length = row.tokens.length, room = $("scroll").clientWidth - LABEL - 4;
  view.wide = Math.max(4, Math.min(16, Math.floor(room / length)));
  const width = LABEL + view.wide * length, height = BARS + HIGH * row.lines.length + 20, scale = devicePixelRatio || 1;
  canvas.width = width * scale; canvas.height = height * scale;
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), fill = names.map(color), ink = color("ink"), dim = color("dim");
  pen.scale(scale, scale);
  pen.font = "12px system-ui, sans-serif"; pen.textBaseline = "middle"; pen.fillStyle = dim;
  pen.fillText("attention", 0, BARS - 14);
  const mass = row.tokens.map((_, at) => massOf(row, at)), top = Math.max(...mass) || 1;
  pen.fillStyle = color("bar");
  mass.forEach((x, at) => {
    const high = Math.sqrt(x / top) * (BARS - 8);
    pen.fillRect(LABEL + at * view.wide, BARS - 4 - high, Math.max(1, view.wide - 1), high);
  });
  row.lines.forEach((line, n) => {
    const y = BARS + n * HIGH;
    pen.fillStyle = ink; pen.fillText(label(line), 0, y + HIGH / 2, LABEL - 8);
    view.lines[n].forEach((code, at) => {
      if (code === UNWRITTEN) return;
      pen.fillStyle = fill[code];
      pen.fillRect(LABEL + at * view.wide, y + 1, view.wide - 1, HIGH - 2);
    });
  });
  pen.fillStyle = dim;
  for (let at = 0; at < length; at += Math.max(10, 10 * Math.ceil(4 / view.wide))) {
    pen.fillText(String(at), LABEL + at * view.wide, height - 9);
  }
  pen.fillStyle = color("mark");
  pen.fillRect(LABEL + row.prompt * view.wide - 1, BARS - 2, 1, HIGH * row.lines.length + 4);
  if (view.at >= 0) {
    pen.strokeStyle = color("mark"); pen.lineWidth = 2;
    pen.strokeRect(LABEL + view.at * view.wide - 1, BARS - 1, view.wide + 1, HIGH * row.lines.length + 2);
  }
}

function story(row) {
  const at = view.at, box = $("story");
  if (at < 0) {
    box.replaceChildren(make("p", "Point at a token, in the text or on the map; a click holds it.", "dim"));
    return;
  }
  const piece = make("b", row.pieces[at]);
  const kind = at < row.prompt ? "prompt" : "generated", got = massOf(row, at);
  const all = row.tokens.reduce((n, _, other) => n + massOf(row, other), 0) || 1;
  const parts = [piece, make("p", `token ${at}, id ${row.tokens[at]}, ${kind}`, "dim"),
    make("p", `attention ${got.toPrecision(4)}, ${((100 * got) / all).toFixed(2)}% of all`)];
  parts.push(make("p", row.attention_mass.map((layer, n) =>
    `layer ${n}: ${layer.reduce((m, head) => m + head[at], 0).toPrecision(3)}`).join(", "), "dim"));
  const told = new Map();
  row.lines.forEach((line, n) => {
    const said = line.changes.filter((c) => c.step <= view.step && c.first <= at && at <= c.last).map((c) => c.why.text);
    const key = JSON.stringify([view.lines[n][at], said]);
    if (!told.has(key)) told.set(key, { code: view.lines[n][at], said, where: [] });
    told.get(key).where.push(label(line));
  });
  const list = make("dl");
  for (const { code, said, where } of told.values()) {
    const head = make("dt"), dot = make("i");
    dot.style.background = `var(--${names[code]})`;
    head.append(dot, `${names[code]}: ${where.length > 6 ? `${where.slice(0, 6).join(", ")} and ${where.length - 6} more` : where.join(", ")}`);
    list.append(head, ...said.map((text) => make("dd", text)));
  }
  box.replaceChildren(...parts, list);
}

function blocks(row) {
  const body = $("blocks"), shares = row.blocks.map((b) => b.share.reduce((a, x) => a + x, 0) / (b.share.length || 1));
  const top = Math.max(...shares, 1e-9);
  body.replaceChildren(...row.blocks.map((block, n) => {
    const line = make("tr"), bar = make("td", undefined, "share"), inner = make("div");
    inner.style.width = `${(100 * shares[n]) / top}%`;
    bar.append(inner);
    const group = data.groups[block.group], held = block.tokens ? `${block.tokens} of ${block.first}\u2013${block.last}` : "none";
    const known = (block.rows > 1 ? `${block.rows} sequences` : "1 sequence") + (block.published ? ", published" : "");
    line.append(make("td", String(block.block)), make("td", spans("layer", group.layers)), make("td", group.state),
      make("td", held), make("td", known), make("td", `${(100 * shares[n]).toFixed(1)}%`), bar);
    return line;
  }));
}

function show() {
  const row = data.rows[view.row];
  view.lines = replay(row, view.step);
  $("step").value = view.step;
  const span = view.step && view.step <= last ? data.steps[view.step - 1].spans.find((each) => each.row === view.row) : undefined;
  const did = span ? `: tokens ${span.start}\u2013${span.start + span.count - 1}` : "";
  $("now").textContent = view.step === end ? "the end" : `step ${view.step} of ${last}${did}`;
  $("events").textContent = row.events.filter((each) => each.step <= view.step).map((each) => `step ${each.step}: ${each.text}`).join("; ");
  replayBlocks(view.step);
  tally(row); words(row); map(row); story(row); pools(); holders(); sentence(row);
}

// Scrolls the map and the text to the tokens that the step computed.
function follow() {
  const each = view.step && view.step <= last ? data.steps[view.step - 1].spans.find((span) => span.row === view.row) : undefined;
  if (!each) return;
  const at = each.start + each.count - 1, box = $("scroll"), x = LABEL + at * view.wide;
  if (x < box.scrollLeft + LABEL || x > box.scrollLeft + box.clientWidth - 40) box.scrollLeft = x - box.clientWidth / 2;
  const span = spansOf[at], pane = $("words"), y = span.offsetTop - pane.offsetTop;
  if (y < pane.scrollTop || y > pane.scrollTop + pane.clientHeight - 30) pane.scrollTop = y - pane.clientHeight / 2;
}

function point(at, hold) {
  if (view.pinned && !hold) return;
  if (hold) view.pinned = !(view.pinned && view.at === at);
  if (at === view.at && !hold) return;
  view.at = at;
  const row = data.rows[view.row];
  words(row); map(row); story(row); holders();
}

function choose(number) {
  view.row = number; view.at = -1; view.pinned = false;
  const row = data.rows[number];
  spansOf = row.pieces.map((piece, at) => {
    const span = make("span", piece);
    span.addEventListener("mouseenter", () => point(at, false));
    span.addEventListener("click", () => point(at, true));
    return span;
  });
  // A token with a line break ends its line; "\\n" is how the report writes the break.
  $("words").replaceChildren(...spansOf.flatMap((span, at) => (row.pieces[at].includes("\\n") ? [span, make("br")] : [span])));
  $("rows").value = number;
  blocks(row);
  show();
}

$("title").textContent = `KV cache of ${data.model || "a run"}, step by step`;
$("paging").textContent = data.layout === "paged"
  ? "A square is a block of slots in the pool; a sequence's table lists the blocks that hold its tokens, in order."
  : "A square is a block of the pool; in the contiguous layout a sequence has one.";
$("owners").replaceChildren(...data.rows.slice(0, 12).map((_, number) => {
  const key = make("span", undefined, "key"), box = make("i");
  box.style.background = owner(number);
  key.append(box, `sequence ${number}`);
  return key;
}), make("span", "\u00d72: read by two sequences", "key"), make("span", "outlined: in the prefix cache", "key"),
make("span", "line at the bottom: filled slots", "key"));
$("facts").textContent = `${data.policy}, ${data.layout}, ${data.layers} layers, ${last} steps`;
$("groups").replaceChildren(...data.groups.map((group) => make("p",
  `${spans("layer", group.layers)}: ${group.state === "hot" ? group.policy : group.state}, ${group.stored}, ` +
  `${group.kv_heads} kv heads, blocks of ${group.block_size}`, "dim")));
$("storage").replaceChildren(...data.storage.map((place) => make("p", `at the end, ${place.text}`, "dim")));
$("rows").replaceChildren(...data.rows.map((row, number) => {
  const option = make("option", `sequence ${number}: ${row.pieces.slice(0, 8).join("").slice(0, 40)}\u2026`);
  option.value = number;
  return option;
}));
$("rows").addEventListener("change", (event) => choose(Number(event.target.value)));
$("step").max = end;
const go = (step) => { view.step = Math.max(0, Math.min(end, step)); show(); follow(); };
$("step").addEventListener("input", (event) => go(Number(event.target.value)));
$("back").addEventListener("click", () => go(view.step - 1));
$("next").addEventListener("click", () => go(view.step + 1));
$("play").addEventListener("click", () => {
  if (view.timer) { clearInterval(view.timer); view.timer = 0; $("play").textContent = "Play"; return; }
  if (view.step >= end) view.step = 0;
  $("play").textContent = "Pause";
  view.timer = setInterval(() => {
    go(view.step + 1);
    if (view.step >= end) { clearInterval(view.timer); view.timer = 0; $("play").textContent = "Play"; }
  }, Math.max(30, Math.min(400, 12000 / (last || 1))));
});
const under = (event) => {
  const at = Math.floor((event.offsetX - LABEL) / view.wide);
  return at >= 0 && at < data.rows[view.row].tokens.length ? at : -1;
};
$("map").addEventListener("mousemove", (event) => point(under(event), false));
$("map").addEventListener("click", (event) => point(under(event), true));
addEventListener("resize", () => map(data.rows[view.row]));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
// #row=1&step=40&token=7 opens the page there.
const asked = new URLSearchParams(location.hash.slice(1)), number = (name) => (asked.has(name) ? Number(asked.get(name)) : NaN);
if (number("step") >= 0 && number("step") <= end) view.step = number("step");
if (data.rows.length) choose(data.rows[number("row")] ? number("row") : 0);
if (data.rows.length && data.rows[view.row].tokens[number("token")] !== undefined) point(number("token"), true);
