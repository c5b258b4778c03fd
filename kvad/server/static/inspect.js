// Tokens with their probabilities, attention weights of a token, and the curves of a training run.

import { get, post } from "./api.js";
import { byId, color, count, duration, fill, h, sizeCanvas } from "./dom.js";

// ---------------------------------------------------------------- tokens

const BYTES = /^bytes:((?:\\x[0-9a-f]{2})+)$/;

/** Return a token's text with visible spaces for tooltips. */
export function visible(text) {
  if (BYTES.test(text)) return `bytes ${BYTES.exec(text)[1].replaceAll("\\x", " ").trim()}`;
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

/** Return what is drawn in the running text: line breaks stay, and a part of a character is a mark. */
function shown(text) {
  return BYTES.test(text) ? "·" : text.replaceAll("\n", "⏎\n");
}

/** The tokens of a text as focusable spans, colored by probability; the arrow keys move between them. */
export class TokenView {
  #details = [];

  constructor(onclick) {
    this.onclick = onclick;
    this.element = h("div", { class: "tokens", role: "group", "aria-label": "Tokens of the text", hidden: true,
      onclick: (event) => { const index = indexOf(event.target); if (index >= 0) this.onclick(index); },
      onmouseover: (event) => this.#tip(event.target), onmouseout: hideTip,
      onfocusin: (event) => this.#tip(event.target), onfocusout: hideTip,
      onkeydown: (event) => this.#key(event) });
  }

  update(details) {
    const isSame = this.#details.length <= details.length && this.#details.every((detail, index) => detail === details[index]);
    if (!isSame) this.element.replaceChildren();
    this.#details = details.slice();
    for (let index = this.element.childElementCount; index < details.length; index++) {
      const { text, logprob } = details[index];
      const chance = logprob === null ? null : Math.exp(logprob);
      this.element.append(h("span", { class: `token${chance === null ? " given" : ""}`, role: "button", tabindex: index ? "-1" : "0", dataset: { index },
        "aria-label": `${visible(text)}${chance === null ? "" : `, ${percent(chance)}`}`, style: chance === null ? {} : { "--doubt": `${Math.round(Math.min(1, -logprob / 6) * 100)}%` } }, shown(text)));
    }
  }

  #tip(target) {
    const index = indexOf(target);
    if (index < 0) return;
    const { text, logprob, top } = this.#details[index];
    const rows = (top ?? []).map((each) => alternative(each, each.text === text));
    showTip(target, h("div", { class: "tip-head" }, h("code", {}, visible(text)), h("b", {}, logprob === null ? "given" : percent(Math.exp(logprob)))), ...rows);
  }

  #key(event) {
    const index = indexOf(event.target);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (index < 0) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.onclick(index); }
    if (!step) return;
    event.preventDefault();
    const next = this.element.children[index + step];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

const indexOf = (target) => (target.dataset?.index === undefined ? -1 : Number(target.dataset.index));
export const percent = (share) => (share >= 0.0995 ? `${Math.round(share * 100)}%` : share >= 0.001 ? `${(share * 100).toFixed(1)}%` : "<0.1%");

function alternative({ text, logprob }, isChosen) {
  const chance = Math.exp(logprob);
  return h("div", { class: `alt${isChosen ? " chosen" : ""}` }, h("code", {}, visible(text)), h("span", { class: "alt-bar" }, h("i", { style: { width: `${chance * 100}%` } })), h("span", {}, percent(chance)));
}

export function showTip(target, ...content) {
  const tip = byId("tooltip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = target.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(8, box.left + Math.min(box.width, 60) / 2 - width / 2), innerWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

export function hideTip() { byId("tooltip").hidden = true; }

// ---------------------------------------------------------------- attention

const MAX_TOKENS = 2048; // of a request to /attention

export class AttentionPanel {
  #context = null;
  #query = 0;
  #layer = 0;
  #head = -1; // -1: the mean of all heads
  #weights = null;
  #request = 0;

  constructor(element, app) {
    Object.assign(this, { element, app });
    this.clear();
  }

  /** Forget the token whose weights are shown. */
  clear() {
    this.#request++; // a reply that is still to come
    const { features, kind, parent } = this.app.model;
    const text = kind === "encoder-decoder" ? "Attention weights can be read for decoder models."
      : parent ? `Attention weights are those of the base model: choose ${parent} to see them.`
      : features.attention ? "Turn on “Tokens” above the text, let the model write, and click a token: its attention to every earlier token appears here, exact, for each layer and head."
        : "Start the server with --attention to read attention weights.";
    this.element.replaceChildren(h("div", { class: "panel-empty" }, h("h3", {}, "What does a token look at?"), h("p", {}, text),
      features.attention || parent || kind === "encoder-decoder" ? null : h("code", { class: "command" }, "kvad serve MODEL --attention")));
  }

  /** Show the weights of token `index` of the answer; `load` returns {ids, texts, start, model}. */
  async open(load, index) {
    if (!this.app.model.features.attention) { this.clear(); return; }
    this.element.replaceChildren(h("p", { class: "hint" }, "Computing…"));
    try {
      this.#context = await load();
      this.#query = Math.min(this.#context.start + index, this.#context.ids.length - 1);
      await this.#fetch();
    } catch (error) {
      this.#fail(error);
    }
  }

  #fail(error) {
    this.element.replaceChildren(h("div", { class: "error", role: "alert" }, h("b", {}, error.title ?? "The page has a problem"), h("p", {}, error.message)));
  }

  async #select(query, layer) {
    this.#query = query;
    this.#layer = layer;
    try { await this.#fetch(); } catch (error) { this.#fail(error); }
  }

  async #fetch() {
    const { ids, model } = this.#context;
    const number = ++this.#request;
    if (this.#query + 1 > MAX_TOKENS) throw new Error(`Weights are computed for the first ${count(MAX_TOKENS)} tokens of a text only.`);
    const reply = await post("attention", { prompt: ids.slice(0, this.#query + 1), layer: this.#layer, model });
    if (number !== this.#request) return; // a later click
    this.#weights = reply.weights;
    if (this.#head >= reply.weights.length) this.#head = -1;
    this.#render();
  }

  #chosen() {
    const heads = this.#head < 0 ? this.#weights : [this.#weights[this.#head]];
    return heads[0].map((_, position) => heads.reduce((sum, head) => sum + head[position], 0) / heads.length);
  }

  #render() {
    const { texts } = this.#context;
    const focusKey = document.activeElement?.dataset?.key;
    const layers = Array.from({ length: this.app.model.cache.num_layers }, (_, layer) => h("option", { value: String(layer) }, `Layer ${layer}`));
    const select = h("select", { "aria-label": "Layer", dataset: { key: "layer" }, onchange: (event) => this.#select(this.#query, Number(event.target.value)) }, ...layers);
    select.value = String(this.#layer);
    const weights = this.#chosen();
    this.element.replaceChildren(
      h("p", { class: "lead" }, "Attention of ", h("code", {}, visible(texts[this.#query])), ` (token ${this.#query}) to itself and the tokens before it.`),
      h("div", { class: "row spread" }, select, h("span", { class: "hint" }, this.#head < 0 ? `Mean of ${this.#weights.length} heads` : `Head ${this.#head}`)),
      this.#heads(),
      h("h3", {}, "Text"), this.#text(weights),
      h("h3", {}, "Most weight"), this.#top(weights),
    );
    this.element.querySelectorAll("canvas[data-head]").forEach((canvas) => strip(canvas, Number(canvas.dataset.head) < 0 ? this.#mean() : this.#weights[Number(canvas.dataset.head)]));
    if (focusKey) this.element.querySelector(`[data-key="${focusKey}"]`)?.focus();
  }

  #mean() {
    return this.#weights[0].map((_, position) => this.#weights.reduce((sum, head) => sum + head[position], 0) / this.#weights.length);
  }

  #heads() {
    const head = (index) => h("button", { type: "button", role: "radio", class: "head", dataset: { key: `head${index}` }, "aria-checked": String(index === this.#head), onclick: () => { this.#head = index; this.#render(); } },
      h("span", {}, index < 0 ? "Mean" : `Head ${index}`), h("canvas", { dataset: { head: index }, "aria-hidden": "true" }));
    return h("div", { class: "heads", role: "radiogroup", "aria-label": "Head" }, head(-1), ...this.#weights.map((_, index) => head(index)));
  }

  #text(weights) {
    const { texts, start, written = start } = this.#context;
    const most = Math.max(...weights);
    const first = Math.max(0, this.#query - 600);
    const spans = texts.map((text, index) => ({ text, index })).slice(first, this.#query + 60).map(({ text, index }) => h("span", {
      role: "button", class: `att${index === this.#query ? " query" : index > this.#query ? " later" : ""}${index >= written ? " written" : ""}`, tabindex: index === this.#query ? "0" : "-1", dataset: { key: `t${index}` },
      style: index <= this.#query ? { "--weight": `${Math.round((weights[index] / most) ** 0.7 * 80)}%` } : {},
      title: index <= this.#query ? `${visible(text)}: ${percent(weights[index])}` : "later token: click to see its attention", onclick: () => this.#select(index, this.#layer) }, shown(text)));
    const box = h("div", { class: "att-text" }, first ? `… ${count(first)} tokens … ` : null, ...spans);
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const at = Number(event.target.dataset.key?.slice(1));
      if (event.key === "Enter" && at >= 0) this.#select(at, this.#layer);
      const next = step && this.#query + step;
      if (step && next >= 0 && next < texts.length) { event.preventDefault(); document.activeElement.dataset.key = `t${next}`; this.#select(next, this.#layer); }
    });
    return box;
  }

  #top(weights) {
    const order = weights.map((weight, index) => [weight, index]).sort((a, b) => b[0] - a[0]).slice(0, 6);
    return h("ol", { class: "top-list" }, ...order.map(([weight, index]) => h("li", {}, h("code", {}, visible(this.#context.texts[index])), h("span", { class: "alt-bar" }, h("i", { style: { width: `${(weight / order[0][0]) * 100}%` } })), h("span", {}, percent(weight)))));
  }
}

/** Draw one head's weights as a strip; many positions are joined by their maximum. */
function strip(canvas, weights) {
  const width = Math.max(40, canvas.parentElement.clientWidth - 74);
  const context = sizeCanvas(canvas, width, 12);
  const most = Math.max(...weights);
  context.clearRect(0, 0, width, 12);
  context.fillStyle = color("accent");
  const columns = Math.min(width, weights.length);
  for (let column = 0; column < columns; column++) {
    const from = Math.floor((column * weights.length) / columns);
    const to = Math.max(from + 1, Math.floor(((column + 1) * weights.length) / columns));
    context.globalAlpha = 0.06 + 0.94 * (Math.max(...weights.slice(from, to)) / most) ** 0.7;
    context.fillRect((column * width) / columns, 0, Math.ceil(width / columns) - (width / columns > 4 ? 1 : 0), 12);
  }
  context.globalAlpha = 1;
}

// ---------------------------------------------------------------- training

const POLL = 2000;
const SILENT = 120; // seconds without a line after which a run does not count as live

export class TrainingPanel {
  #run = null;
  #shown = ""; // key of what is rendered
  #hover = null;

  constructor(element, app, onFound) {
    Object.assign(this, { element, app, onFound });
    let tick = 0;
    setInterval(() => { if (!document.hidden && (!this.element.hidden || ++tick % 8 === 0)) this.refresh(); }, POLL);
    this.refresh();
  }

  async refresh() {
    let run;
    try { run = await get("training"); } catch { return; }
    if (!run.lines?.length) return;
    this.#run = run;
    this.onFound(this.#isLive);
    if (!this.element.hidden && this.#shown !== this.#key) this.render();
  }

  get #key() { return JSON.stringify([this.#run.name, this.#run.lines.at(-1), this.#isLive]); }

  /** The last step, or what ended the run; a run that was resumed has steps after an end. */
  get #end() { return this.#run.lines.findLast(({ kind }) => kind === "step" || kind === "end" || kind === "failed"); }
  get #isLive() { return this.#run.seconds_since_write < SILENT && (this.#end?.kind ?? "step") === "step"; }

  render() {
    if (!this.#run) return;
    this.#shown = this.#key;
    const { lines, name } = this.#run;
    const steps = lines.filter((line) => line.kind === "step" && Number.isFinite(line.loss));
    const evals = lines.filter((line) => line.kind === "eval" && Number.isFinite(line.val_loss));
    const last = steps.at(-1);
    const end = this.#end;
    const state = this.#isLive ? "running" : { failed: "failed", end: "finished" }[end?.kind] ?? "no news";
    fill(this.element,
      h("div", { class: "row spread" }, h("h3", { class: "run-name" }, name || "run"), h("span", { class: `pill ${state.replace(" ", "-")}` }, state)),
      end?.kind === "failed" ? h("div", { class: "error" }, h("b", {}, "The run has failed"), h("p", {}, end.text)) : null,
      last ? h("div", { class: "tiles" }, ...tiles(last, evals, this.#isLive)) : h("p", { class: "hint" }, "No step is written yet."),
      steps.length > 1 ? this.#chart(steps, evals) : null,
      ...samples(lines),
    );
  }

  #chart(steps, evals) {
    const canvas = h("canvas", { role: "img", "aria-label": `Loss from ${steps[0].loss.toFixed(2)} to ${steps.at(-1).loss.toFixed(2)} over ${count(steps.at(-1).step)} steps` });
    const label = h("p", { class: "hint chart-label" });
    const figure = h("figure", { class: "chart" }, h("figcaption", {}, h("span", { class: "key loss" }, "training loss"), evals.length ? h("span", { class: "key val" }, "validation loss") : null), canvas, label);
    const draw = () => drawCurve(canvas, label, steps, evals, this.#hover);
    canvas.addEventListener("mousemove", (event) => { this.#hover = event.offsetX; draw(); });
    canvas.addEventListener("mouseleave", () => { this.#hover = null; draw(); });
    requestAnimationFrame(draw);
    return figure;
  }
}

function tiles(last, evals, isLive) {
  const best = evals.length ? Math.min(...evals.map((line) => line.val_loss)) : null;
  const entries = [["Step", count(last.step)], ["Loss", last.loss.toFixed(3)], ["Best validation", best === null ? "–" : best.toFixed(3)], ["Tokens/s", last.tokens_per_second ? count(last.tokens_per_second) : "–"],
    ["Learning rate", last.lr.toExponential(1)], isLive && last.eta !== null ? ["Time left", duration(last.eta)] : ["Time", duration(last.elapsed)]];
  return entries.map(([name, value]) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, name)));
}

function samples(lines) {
  const newest = lines.findLast((line) => line.kind === "samples");
  if (!newest) return [];
  return [h("h3", {}, `Samples at step ${count(newest.step)}`), ...newest.samples.slice(0, 4).map((sample) => h("dl", { class: "sample" },
    h("dt", {}, "Source"), h("dd", {}, sample.source), h("dt", {}, "Reference"), h("dd", {}, sample.target), h("dt", {}, "Output"), h("dd", {}, sample.text || "(empty)")))];
}

function drawCurve(canvas, label, steps, evals, hover) {
  const width = canvas.parentElement.clientWidth;
  const [height, left, bottom, top] = [190, 34, 20, 8];
  const context = sizeCanvas(canvas, width, height);
  const values = [...steps.map((line) => line.loss), ...evals.map((line) => line.val_loss)];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const span = high - low || 1;
  const [firstStep, lastStep] = [steps[0].step, steps.at(-1).step];
  const x = (step) => left + ((step - firstStep) / Math.max(1, lastStep - firstStep)) * (width - left - 4);
  const y = (loss) => top + (1 - (loss - low) / span) * (height - bottom - top);
  context.clearRect(0, 0, width, height);
  context.font = "11px Inter, system-ui, sans-serif";
  context.lineWidth = 1;
  for (let line = 0; line <= 3; line++) {
    const loss = low + (span * line) / 3;
    context.strokeStyle = color("line");
    context.beginPath();
    context.moveTo(left, Math.round(y(loss)) + 0.5);
    context.lineTo(width, Math.round(y(loss)) + 0.5);
    context.stroke();
    context.fillStyle = color("soft");
    context.fillText(loss.toFixed(span < 1 ? 2 : 1), 0, y(loss) + 4);
  }
  context.fillText(count(firstStep), left, height - 4);
  context.textAlign = "right";
  context.fillText(`step ${count(lastStep)}`, width - 2, height - 4);
  context.textAlign = "left";
  const curve = (points, name, get, weight) => {
    context.strokeStyle = color(name);
    context.lineWidth = weight;
    context.lineJoin = "round";
    context.beginPath();
    points.forEach((line, index) => context[index ? "lineTo" : "moveTo"](x(line.step), y(get(line))));
    context.stroke();
  };
  curve(steps, "accent", (line) => line.loss, 1.6);
  curve(evals, "other", (line) => line.val_loss, 1.6);
  context.fillStyle = color("other");
  for (const line of evals) { context.beginPath(); context.arc(x(line.step), y(line.val_loss), 2.6, 0, 7); context.fill(); }
  if (hover === null) { label.textContent = ""; return; }
  const nearest = steps.reduce((best, line) => (Math.abs(x(line.step) - hover) < Math.abs(x(best.step) - hover) ? line : best));
  context.strokeStyle = color("soft");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x(nearest.step), top);
  context.lineTo(x(nearest.step), height - bottom);
  context.stroke();
  label.textContent = `step ${count(nearest.step)}: loss ${nearest.loss.toFixed(3)}`;
}
