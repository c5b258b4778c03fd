// Translation mode of encoder-decoders: a source, and its translations with scores.

import { newRequestId, post } from "./api.js";
import { byId, copyButton, h, icon } from "./dom.js";
import { timeoutField } from "./settings.js";
import { read, write } from "./store.js";
import { errorBox } from "./thread.js";

export class TranslateView {
  #controller = null;

  constructor(app) {
    this.app = app;
    this.state = { text: "", source: "", target: app.model.languages[0] ?? "", beams: 4, alternatives: 3, penalty: 1, results: null, ...read("translate", {}) };
    this.#build();
  }

  get run() { return this.#controller ? { isActive: true } : null; }

  #build() {
    const { languages } = this.app.model;
    const { state } = this;
    const choose = (label, name, extra = []) => h("label", { class: "inline-field" }, h("span", {}, label),
      h("select", { onchange: (event) => this.#set(name, event.target.value) }, ...extra.map((text) => h("option", { value: "" }, text)), ...languages.map((each) => h("option", { value: each, ...(state[name] === each ? { selected: true } : {}) }, each))));
    const number = (label, name, attributes) => h("label", { class: "inline-field" }, h("span", {}, label), h("input", { type: "number", value: state[name], onchange: (event) => this.#set(name, Number(event.target.value)), ...attributes }));
    this.area = h("textarea", { id: "source-text", "aria-label": "Source text", placeholder: "Text to translate", value: state.text, oninput: () => this.#set("text", this.area.value) });
    this.area.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.#submit(); } });
    this.button = h("button", { type: "button", class: "primary", title: "Translate (Ctrl Enter)", onclick: () => this.#submit() });
    this.output = h("div", { class: "outputs", "aria-live": "polite" });
    byId("view-translate").append(h("div", { class: "translate" },
      h("div", { class: "pane" }, h("div", { class: "pane-head" }, h("h2", {}, "Source"), languages.length ? choose("from", "source", ["detect"]) : null), this.area),
      h("div", { class: "pane" }, h("div", { class: "pane-head" }, h("h2", {}, "Translation"), languages.length ? choose("to", "target") : null), this.output)),
    h("div", { class: "composer" }, h("div", { class: "row controls" }, this.button,
      number("Beams", "beams", { min: 1, max: 32 }), number("Alternatives", "alternatives", { min: 1, max: 16 }), number("Length penalty", "penalty", { min: 0, max: 5, step: 0.1 }))));
    this.render();
  }

  #set(name, value) {
    this.state[name] = value;
    write("translate", this.state);
  }

  show() { this.render(); }

  render() {
    this.button.replaceChildren(icon(this.#controller ? "stop" : "arrow"), this.#controller ? "Stop" : "Translate");
    const { results } = this.state;
    if (this.#controller) this.output.replaceChildren(h("p", { class: "hint" }, "Translating…"));
    else if (!results) this.output.replaceChildren(h("p", { class: "hint" }, "The translation appears here; with several beams also the alternatives, each with its score."));
    else this.output.replaceChildren(...results.map((result, index) => output(result, index)));
  }

  stop() { this.#controller?.abort(); }

  async #submit() {
    if (this.#controller) { this.stop(); return; }
    const { text, source, target, beams, alternatives, penalty } = this.state;
    if (!text.trim()) { this.area.focus(); return; }
    const hasBeams = beams > 1;
    const body = { model: this.app.model.id, text, num_beams: beams, n: hasBeams ? Math.min(alternatives, beams) : alternatives, request_id: newRequestId(), ...timeoutField(this.app.settings) };
    if (hasBeams) body.length_penalty = penalty;
    if (target) body.target_language = target;
    if (source) body.source_language = source;
    this.app.addRequest(body.request_id, this.app.conversation);
    this.#controller = new AbortController();
    this.render();
    let error = null;
    try {
      this.#set("results", (await post("v1/translate", body, this.#controller.signal)).data[0].alternatives);
    } catch (caught) {
      error = caught;
    }
    this.#controller = null;
    this.render();
    if (error && error.name !== "AbortError") this.output.prepend(errorBox(error, { label: "Try again", run: () => this.#submit() }));
  }
}

function output(result, index) {
  const score = typeof result.score === "number" ? h("span", { class: "score", title: "Sum of log-probabilities over the length penalty" }, result.score.toFixed(2).replace(/^-0\.00$/, "0.00")) : null;
  return h("article", { class: index ? "output other" : "output best" },
    h("p", { dir: "auto" }, result.text || "(empty)"),
    h("div", { class: "row" }, h("span", { class: "hint" }, index ? `Alternative ${index}` : "Best"), score, h("span", { class: "grow" }), copyButton(() => result.text, "Copy translation")));
}
