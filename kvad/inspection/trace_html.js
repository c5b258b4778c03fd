"use strict";
// Every text of the run reaches the page by textContent: nothing of it is ever read as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const names = Object.keys(data.states);
const $ = (id) => document.getElementById(id);
const make = (tag, text, kind) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const LABEL = 130, BARS = 44, HIGH = 15, UNWRITTEN = names.indexOf("unwritten"), EVICTED = names.indexOf("evicted");
const last = data.steps.length;
const met = new Set(["hot", "evicted", "unwritten", ...data.rows.flatMap((row) => row.lines.flatMap((line) => line.changes.map((c) => c.state)))]);
const view = { row: 0, step: last, at: -1, pinned: false, lines: [], wide: 8, timer: 0 };

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

function words(row) {
  const every = row.lines.map((line) => heads(row, line));
  [...$("words").children].forEach((span, at) => {
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
  const span = view.step ? data.steps[view.step - 1].spans.find((each) => each.row === view.row) : undefined;
  const did = span ? `: tokens ${span.start}\u2013${span.start + span.count - 1}` : "";
  const used = view.step ? data.steps[view.step - 1].used.map((n, g) => `${n} of ${data.groups[g].blocks}`).join(", ") : "0";
  $("now").textContent = `step ${view.step} of ${last}${did}; blocks in use: ${used}`;
  $("events").textContent = row.events.filter((each) => each.step <= view.step).map((each) => `step ${each.step}: ${each.text}`).join("; ");
  tally(row); words(row); map(row); story(row);
}

function point(at, hold) {
  if (view.pinned && !hold) return;
  if (hold) view.pinned = !(view.pinned && view.at === at);
  if (at === view.at && !hold) return;
  view.at = at;
  const row = data.rows[view.row];
  words(row); map(row); story(row);
}

function choose(number) {
  view.row = number; view.at = -1; view.pinned = false;
  const row = data.rows[number];
  $("words").replaceChildren(...row.pieces.map((piece, at) => {
    const span = make("span", piece);
    span.addEventListener("mouseenter", () => point(at, false));
    span.addEventListener("click", () => point(at, true));
    return span;
  }));
  $("rows").value = number;
  blocks(row);
  show();
}

$("title").textContent = data.model || "a run";
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
$("step").max = last;
$("step").addEventListener("input", (event) => { view.step = Number(event.target.value); show(); });
$("play").addEventListener("click", () => {
  if (view.timer) { clearInterval(view.timer); view.timer = 0; $("play").textContent = "Play"; return; }
  if (view.step >= last) view.step = 0;
  $("play").textContent = "Pause";
  view.timer = setInterval(() => {
    view.step += 1; show();
    if (view.step >= last) { clearInterval(view.timer); view.timer = 0; $("play").textContent = "Play"; }
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
if (number("step") >= 0 && number("step") <= last) view.step = number("step");
if (data.rows.length) choose(data.rows[number("row")] ? number("row") : 0);
if (data.rows.length && data.rows[view.row].tokens[number("token")] !== undefined) point(number("token"), true);
