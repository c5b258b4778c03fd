// Settings of generation, and what the model and its cache have.

import { count, h } from "./dom.js";
import { DEFAULTS, write } from "./store.js";

const FIELDS = [
  ["temperature", "Temperature", "0 always takes the best token", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", "Smallest set of tokens with this probability", { min: 0, max: 1, step: 0.01, placeholder: "off" }],
  ["top_k", "Top k", "Only the k best tokens", { min: 0, step: 1, placeholder: "off" }],
  ["min_p", "Min p", "Share of the best token's probability", { min: 0, max: 1, step: 0.01, placeholder: "off" }],
  ["repetition_penalty", "Repetition penalty", "Above 1: repeated tokens are less likely", { min: 0.1, max: 3, step: 0.05, placeholder: "off" }],
  ["max_tokens", "New tokens", "Most tokens of one answer", { min: 1, step: 1, placeholder: "to the end of the context" }],
  ["seed", "Seed", "The same seed repeats an answer", { step: 1, placeholder: "random" }],
];

/** Return the request's fields for the settings; empty ones are left to the server. */
export function samplingFields(settings) {
  const fields = {};
  for (const [name] of FIELDS) {
    const value = settings[name];
    if (value !== "" && value !== null && Number.isFinite(Number(value))) fields[name] = Number(value);
  }
  if (!("max_tokens" in fields)) fields.max_tokens = null;
  const stops = settings.stop.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (stops.length) fields.stop = stops;
  return fields;
}

/** Return the fields that ask for token details, if the page shows them. */
export function detailFields(app, kind) {
  if (!app.showsTokens) return {};
  return { return_token_ids: true, ...(kind === "chat" ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 }) };
}

export class SettingsPanel {
  constructor(element, app) {
    Object.assign(this, { element, app });
    this.render();
  }

  render() {
    const { settings, model } = this.app;
    this.element.replaceChildren(
      model.has_chat_template ? this.#area("system", "System prompt", "How the model should answer", 4) : "",
      h("section", {}, h("h3", {}, "Sampling"), ...FIELDS.map((field) => this.#number(field)), this.#area("stop", "Stop strings", "One per line; \\n is a line break", 2)),
      h("div", { class: "row" }, h("button", { type: "button", class: "ghost small", onclick: () => this.#reset() }, "Reset to defaults")),
      h("section", {}, h("h3", {}, "Model and cache"), facts(model), h("p", { class: "hint" }, "Policy and budget of the cache are set when the server starts: kvad serve --help.")),
    );
    this.element.querySelectorAll("[data-name]").forEach((input) => { input.value = settings[input.dataset.name]; });
  }

  #number([name, label, hint, attributes]) {
    return h("label", { class: "field" }, h("span", {}, h("b", {}, label), h("small", {}, hint)),
      h("input", { type: "number", inputmode: "decimal", dataset: { name }, oninput: (event) => this.#change(event.target), ...attributes }));
  }

  #area(name, label, hint, rows) {
    return h("label", { class: "field tall" }, h("span", {}, h("b", {}, label), h("small", {}, hint)),
      h("textarea", { rows, dataset: { name }, oninput: (event) => this.#change(event.target) }));
  }

  #change(input) {
    const isValid = input.checkValidity();
    input.setAttribute("aria-invalid", String(!isValid));
    if (!isValid) return;
    this.app.settings[input.dataset.name] = input.value;
    write("settings", this.app.settings);
    if (input.dataset.name === "system") this.app.thread.measure();
  }

  #reset() {
    Object.assign(this.app.settings, DEFAULTS);
    write("settings", this.app.settings);
    this.render();
  }
}

function facts(model) {
  const { cache } = model;
  const capacity = cache.num_blocks.length ? cache.num_blocks[0] * cache.block_size : 0;
  const rows = [
    ["Model", model.id],
    ["Kind", model.kind],
    ["Context", `${count(model.max_model_len)} tokens`],
    ["Cache policy", cache.policy],
    ["Number format", cache.formats],
    ["Budget", capacity ? `${count(cache.num_blocks[0])} blocks of ${cache.block_size} tokens` : "no blocks"],
    ["Room for", capacity ? `${count(capacity)} tokens, ${count(cache.max_num_seqs)} sequences` : `${count(cache.max_num_seqs)} sequences`],
    ["Computation", `${cache.dtype}, ${cache.num_layers} layers`],
    ["Attention view", model.features.attention ? "on" : "off"],
  ];
  return h("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}
