// Settings of generation, and what the model and its cache have.

import { count, h } from "./dom.js";
import { DEFAULTS, write } from "./store.js";

const SAMPLING = [
  ["temperature", "Temperature", "0 always takes the best token", { min: 0, max: 2, step: 0.05 }],
  ["top_p", "Top p", "Smallest set of tokens with this probability", { min: 0, max: 1, step: 0.01, placeholder: "off" }],
  ["top_k", "Top k", "Only the k best tokens", { min: 0, step: 1, placeholder: "off" }],
  ["min_p", "Min p", "Share of the best token's probability", { min: 0, max: 1, step: 0.01, placeholder: "off" }],
  ["repetition_penalty", "Repetition penalty", "Above 1: repeated tokens are less likely", { min: 0.1, max: 3, step: 0.05, placeholder: "off" }],
  ["max_tokens", "New tokens", "Most tokens of one answer", { min: 1, step: 1, placeholder: "to the end of the context" }],
  ["seed", "Seed", "The same seed repeats an answer", { step: 1, placeholder: "random" }],
];
const TIMEOUT = ["timeout", "Time limit", "Seconds; what was written until then is kept", { min: 1, max: 86400, step: 1, placeholder: "default" }];
const OVERFLOW = [["", "default"], ["preempt", "wait"], ["stop", "end early"], ["reject", "refuse first"]];
const SWITCH = ["Thinking", "Whether the model writes thoughts before the answer"];
const THINKING = { enable_thinking: SWITCH, thinking: SWITCH, reasoning_effort: ["Reasoning effort", "How long the model thinks before the answer"] }; // variables of chat templates

/** Return the numbers among the settings; empty ones are left to the server. */
function numbers(settings, fields) {
  const isGiven = ([name]) => settings[name] !== "" && settings[name] !== null && Number.isFinite(Number(settings[name]));
  return Object.fromEntries(fields.filter(isGiven).map(([name]) => [name, Number(settings[name])]));
}

export const timeoutField = (settings) => numbers(settings, [TIMEOUT]);

/** Return the request's fields for the settings. */
export function requestFields({ settings, model }, conversation) {
  const fields = { max_tokens: null, ...numbers(settings, [...SAMPLING, TIMEOUT]) };
  if (settings.overflow) fields.overflow = settings.overflow;
  if (settings.cache_salt) fields.cache_salt = settings.cache_salt;
  if (settings.session && model.features.sessions) { // a session belongs to one adapter
    fields.session = conversation.id + (model.parent ? `-${model.id.replace(/[^A-Za-z0-9._-]/g, "_")}`.slice(0, 40) : "");
  }
  const stops = settings.stop.split("\n").filter(Boolean).map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (stops.length) fields.stop = stops;
  return fields;
}

/** Return the field with the variables of the chat template that are set and that this model's template reads. */
export function templateFields({ settings, model }) {
  const given = Object.entries(model.thinking).map(([name, values]) => [name, values.find((value) => String(value) === settings[name])]);
  const variables = given.filter(([, value]) => value !== undefined);
  return variables.length ? { chat_template_kwargs: Object.fromEntries(variables) } : {};
}

/** Return [label, hint, select] of each variable of the chat template that controls thoughts. */
export function thinkingChoices(app) {
  return Object.entries(app.model.thinking).map(([name, values]) => {
    const options = ["", ...values].map((value) => h("option", { value: String(value) }, value === "" ? "default" : value === true ? "on" : value === false ? "off" : value));
    return [...THINKING[name], h("select", { dataset: { name }, oninput: (event) => changeSetting(app, event.target) }, ...options)];
  });
}

/** Show the settings in all fields of the page; a setting may have two. */
export function showSettings(settings) {
  for (const input of document.querySelectorAll("[data-name]")) {
    if (input.type === "checkbox") input.checked = Boolean(settings[input.dataset.name]);
    else if (input.value !== String(settings[input.dataset.name])) input.value = settings[input.dataset.name];
    if (input.tagName === "SELECT" && input.selectedIndex < 0) input.selectedIndex = 0; // a value of another model
  }
}

function changeSetting(app, input) {
  const isValid = input.checkValidity();
  input.setAttribute("aria-invalid", String(!isValid));
  if (!isValid) return;
  app.settings[input.dataset.name] = input.type === "checkbox" ? input.checked : input.value;
  write("settings", app.settings);
  if (input.tagName === "SELECT") showSettings(app.settings);
  if (input.dataset.name === "system" || input.dataset.name in THINKING) app.thread.measure();
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
    const isTranslation = model.kind === "encoder-decoder"; // its settings are next to the text
    this.element.replaceChildren(
      model.has_chat_template && !isTranslation ? this.#area("system", "System prompt", "How the model should answer", 4) : "",
      ...(model.has_chat_template ? thinkingChoices(this.app).map(([label, hint, select]) => this.#field(label, hint, select)) : []),
      isTranslation ? "" : h("section", {}, h("h3", {}, "Sampling"), ...SAMPLING.map((field) => this.#number(field)), this.#area("stop", "Stop strings", "One per line; \\n is a line break", 2)),
      h("section", {}, h("h3", {}, isTranslation ? "Requests" : "Cache and requests"), ...(isTranslation ? [] : this.#cacheFields(model)), this.#number(TIMEOUT)),
      h("div", { class: "row" }, h("button", { type: "button", class: "ghost small", onclick: () => this.#reset() }, "Reset to defaults")),
      h("section", {}, h("h3", {}, "Model and cache"), facts(model), h("p", { class: "hint" }, "Policy, number format and budget are those of the one cache that all requests share. They are set when the server starts: ", ...["--policy", "--cache-dtype", "--num-blocks"].flatMap((name) => [h("code", {}, name), " "]), "of kvad serve.")),
    );
    showSettings(settings);
  }

  #number([name, label, hint, attributes]) {
    return this.#field(label, hint, h("input", { type: "number", inputmode: "decimal", dataset: { name }, oninput: (event) => changeSetting(this.app, event.target), ...attributes }));
  }

  /** Fields of the cache that each request may choose. */
  #cacheFields(model) {
    const events = { oninput: (event) => changeSetting(this.app, event.target) };
    const modes = OVERFLOW.map(([value, label]) => h("option", { value }, label));
    return [
      this.#field("When the cache is full", "An answer that needs more blocks than are free", h("select", { dataset: { name: "overflow" }, ...events }, ...modes)),
      this.#field("Cache salt", "Share cached blocks only with requests of the same salt", h("input", { type: "text", maxlength: 256, placeholder: "none", dataset: { name: "cache_salt" }, ...events })),
      model.features.sessions ? this.#field("Keep on disk", "The cache of each conversation, in a session file", h("input", { type: "checkbox", dataset: { name: "session" }, ...events })) : "",
    ];
  }

  #field(label, hint, input) {
    return h("label", { class: "field" }, h("span", {}, h("b", {}, label), h("small", {}, hint)), input);
  }

  #area(name, label, hint, rows) {
    return h("label", { class: "field tall" }, h("span", {}, h("b", {}, label), h("small", {}, hint)),
      h("textarea", { rows, dataset: { name }, oninput: (event) => changeSetting(this.app, event.target) }));
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
    [model.parent ? "Adapter" : "Model", model.id],
    ...(model.parent ? [["Base", model.parent]] : []),
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
