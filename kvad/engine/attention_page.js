const NOT_FINITE = 65535, LABEL = 110, TOP = 96, THUMBNAIL = 56;
const view = { map: 0, query: -1, key: -1, cell: 14, thumbnails: [] };
const decoded = new Map();

function weights(number) {
  if (!decoded.has(number)) {
    const bytes = Uint8Array.from(atob(data.maps[number].weights), (char) => char.charCodeAt(0));
    const codes = new Uint16Array(bytes.length / 2);
    for (let at = 0; at < codes.length; at += 1) codes[at] = bytes[2 * at] | (bytes[2 * at + 1] << 8);
    decoded.set(number, codes);
  }
  return decoded.get(number);
}
const sizes = (map) => [data.texts[map.queries].length, data.texts[map.keys].length];
const weightOf = (number, query, key) => {
  const code = weights(number)[query * sizes(data.maps[number])[1] + key];
  return code === NOT_FINITE ? NaN : code / (NOT_FINITE - 1);
};
const shade = (weight, base) => (Number.isNaN(weight) ? "#dd0000" : `rgb(${base} / ${Math.sqrt(weight)})`);

// A cell of a picture covers several tokens if there are more of them than pixels; it shows the largest weight.
function paint(pen, number, x, y, wide, high) {
  const [queries, keys] = sizes(data.maps[number]), base = color("shade");
  const rows = Math.min(queries, Math.floor(high)), columns = Math.min(keys, Math.floor(wide));
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      let most = 0;
      for (let q = Math.floor((row * queries) / rows); q < ((row + 1) * queries) / rows; q += 1) {
        for (let k = Math.floor((column * keys) / columns); k < ((column + 1) * keys) / columns; k += 1) {
          const weight = weightOf(number, q, k);
          if (Number.isNaN(weight) || weight > most) most = weight;
        }
      }
      if (most === 0) continue;
      pen.fillStyle = shade(most, base);
      pen.fillRect(x + (column * wide) / columns, y + (row * high) / rows, wide / columns, high / rows);
    }
  }
}

function sized(canvas, wide, high) {
  const scale = devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = wide * scale; canvas.height = high * scale;
  canvas.style.width = `${wide}px`; canvas.style.height = `${high}px`;
  pen.scale(scale, scale);
  return pen;
}

function drawMap() {
  const map = data.maps[view.map], [queries, keys] = sizes(map), pen0 = $("scroll").clientWidth - LABEL - 4;
  view.cell = Math.max(2, Math.min(22, Math.floor(pen0 / keys)));
  const wide = view.cell * keys, high = view.cell * queries;
  const pen = sized($("map"), LABEL + wide + 2, TOP + high + 2);
  paint(pen, view.map, LABEL, TOP, wide, high);
  pen.strokeStyle = color("edge"); pen.strokeRect(LABEL - 0.5, TOP - 0.5, wide + 1, high + 1);
  pen.fillStyle = color("dim"); pen.font = "11px ui-monospace, monospace"; pen.textBaseline = "middle";
  const every = Math.ceil(12 / view.cell), short = (piece) => (piece.length > 14 ? `${piece.slice(0, 13)}\u2026` : piece);
  pen.textAlign = "right";
  for (let at = 0; at < queries; at += every) pen.fillText(short(data.texts[map.queries][at]), LABEL - 6, TOP + (at + 0.5) * view.cell);
  pen.textAlign = "left";
  for (let at = 0; at < keys; at += every) {
    pen.save();
    pen.translate(LABEL + (at + 0.5) * view.cell, TOP - 6); pen.rotate(-Math.PI / 2);
    pen.fillText(short(data.texts[map.keys][at]), 0, 0);
    pen.restore();
  }
  if (view.query >= 0) {
    pen.strokeStyle = color("mark"); pen.lineWidth = 1.5;
    pen.strokeRect(LABEL, TOP + view.query * view.cell, wide, view.cell);
    if (view.key >= 0) pen.strokeRect(LABEL + view.key * view.cell, TOP + view.query * view.cell, view.cell, view.cell);
  }
}

// The text: keys are shaded by the weight that the chosen query gives them.
function words() {
  const map = data.maps[view.map], base = color("shade"), same = map.queries === map.keys;
  [...$("words").querySelectorAll("span[data-key]")].forEach((span) => {
    const key = Number(span.dataset.key);
    span.style.background = view.query < 0 ? "" : shade(weightOf(view.map, view.query, key), base);
    span.classList.toggle("query", same && key === view.query);
  });
  [...$("words").querySelectorAll("span[data-query]")].forEach((span) => {
    span.classList.toggle("query", Number(span.dataset.query) === view.query);
  });
}

function fact() {
  const map = data.maps[view.map];
  if (view.query < 0) { $("fact").textContent = ""; return; }
  const from = `query ${view.query} \u201c${data.texts[map.queries][view.query]}\u201d`;
  if (view.key >= 0) {
    const weight = weightOf(view.map, view.query, view.key);
    $("fact").textContent = `${from} gives key ${view.key} \u201c${data.texts[map.keys][view.key]}\u201d the weight ${weight.toFixed(4)}`;
    return;
  }
  const most = data.texts[map.keys].map((piece, key) => [weightOf(view.map, view.query, key), piece, key]);
  most.sort((a, b) => b[0] - a[0]);
  $("fact").textContent = `${from} reads most from ` + most.slice(0, 3).map(([weight, piece, key]) =>
    `key ${key} \u201c${piece}\u201d (${weight.toFixed(3)})`).join(", ");
}

function point(query, key) {
  if (query === view.query && key === view.key) return;
  view.query = query; view.key = key;
  drawMap(); words(); fact();
}

function listWords() {
  const map = data.maps[view.map], same = map.queries === map.keys;
  const line = (tokens, kind) => tokens.flatMap((piece, at) => {
    const span = make("span", piece);
    span.dataset[kind] = at;
    if (kind === "query" || same) span.addEventListener("mouseenter", () => point(at, -1));
    return piece.includes("\\n") ? [span, make("br")] : [span];
  });
  const parts = same ? [] : [make("p", "queries", "dim"), ...line(data.texts[map.queries], "query"), make("p", "keys", "dim")];
  $("words").replaceChildren(...parts, ...line(data.texts[map.keys], "key"));
}

function choose(number) {
  view.map = number; view.query = view.key = -1;
  view.thumbnails.forEach((canvas, at) => canvas.classList.toggle("chosen", at === number));
  $("name").textContent = data.maps[number].name;
  listWords(); drawMap(); words(); fact();
}

function thumbnails() {
  const lines = new Map();
  view.thumbnails = data.maps.map((map, number) => {
    const place = `${map.side ? `${map.side}, ` : ""}layer ${map.layer}`, canvas = make("canvas");
    if (!lines.has(place)) lines.set(place, [make("span", place)]);
    lines.get(place).push(canvas);
    canvas.title = map.name;
    paint(sized(canvas, THUMBNAIL, THUMBNAIL), number, 0, 0, THUMBNAIL, THUMBNAIL);
    canvas.addEventListener("click", () => choose(number));
    return canvas;
  });
  $("heads").replaceChildren(...[...lines.values()].map((parts) => {
    const line = make("div", undefined, "layer");
    line.append(...parts);
    return line;
  }));
}

$("title").textContent = data.title;
$("map").addEventListener("mousemove", (event) => {
  const key = Math.floor((event.offsetX - LABEL) / view.cell), query = Math.floor((event.offsetY - TOP) / view.cell);
  const [queries, keys] = sizes(data.maps[view.map]);
  if (query >= 0 && query < queries && key < keys) point(query, Math.max(-1, key));
});
addEventListener("resize", drawMap);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { thumbnails(); choose(view.map); });
if (data.maps.length) {
  thumbnails();
  // #map=3&query=7 opens the page there.
  const asked = new URLSearchParams(location.hash.slice(1));
  choose(data.maps[Number(asked.get("map"))] ? Number(asked.get("map")) : 0);
  if (asked.has("query") && Number(asked.get("query")) < sizes(data.maps[view.map])[0]) point(Number(asked.get("query")), -1);
}
