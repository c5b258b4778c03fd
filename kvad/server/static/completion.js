// Completion mode: one text that the model continues in place. The last continuation has alternatives ("takes").

import { ApiError, Run, post } from "./api.js";
import { byId, coalesce, copyButton, count, debounce, h, icon, iconButton, toast } from "./dom.js";
import { TokenView } from "./inspect.js";
import { detailFields, requestFields } from "./settings.js";
import * as store from "./store.js";
import { Meter, branchSwitch, errorBox, errorFields, statsText } from "./thread.js";

export class CompletionView {
  #run = null;
  #running = null; // the conversation that #run writes to
  #error = null;
  #promptTokens = null; // {text, tokens}: the tokens of the given text, for the token view

  constructor(app) {
    this.app = app;
    this.#build();
    this.measure = debounce(() => this.#measure(), 450);
    this.area.addEventListener("input", () => this.#edited());
    this.area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); this.#submit(); }
    });
  }

  get run() { return this.app.conversation === this.#running ? this.#run : null; }
  running(id) { return this.#running?.id === id ? this.#running : null; }

  #build() {
    this.backdrop = h("div", { class: "backdrop", "aria-hidden": "true" });
    this.area = h("textarea", { id: "completion-text", spellcheck: "false", "aria-label": "Text that the model continues", placeholder: "Write the beginning of a text…" });
    this.tokens = new TokenView((index) => this.app.showAttention(() => this.#context(), index));
    this.paper = h("div", { class: "paper" }, this.backdrop, this.area);
    this.intro = h("div", { class: "intro" });
    this.scroller = h("div", { class: "scroller" }, h("div", { class: "sheet" }, this.intro, this.paper, this.tokens.element));
    this.problem = h("div", { class: "problem" });
    this.generate = h("button", { type: "button", class: "primary", onclick: () => this.#submit() });
    this.tools = h("div", { class: "row" });
    this.stats = h("span", { class: "stats" });
    const meter = h("div", { class: "meter" });
    this.meter = new Meter(meter, this.app.model.max_model_len);
    meter.append(h("span", { class: "grow" }), this.stats);
    byId("view-completion").append(this.scroller, h("div", { class: "composer" }, this.problem, h("div", { class: "row controls" }, this.generate, this.tools), meter));
  }

  // -------------------------------------------------------------- rendering

  show() {
    this.area.value = this.app.conversation.text;
    this.#error = null;
    this.render();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.measure();
  }

  render() {
    const { conversation, model } = this.app;
    const isActive = Boolean(this.run?.isActive);
    this.intro.hidden = Boolean(conversation.text);
    this.intro.replaceChildren(h("h2", {}, `Continue a text with ${model.id}`), h("p", {}, `${model.has_chat_template ? "Here the model does not answer" : `${model.id} has no chat template, so it does not answer`}: it continues what you write. Press Ctrl Enter to generate, edit anything, and generate again.`));
    this.generate.replaceChildren(icon(isActive ? "stop" : "play"), isActive ? "Stop" : "Generate");
    this.generate.classList.toggle("stopping", isActive);
    this.generate.title = isActive ? "Stop (Esc)" : "Continue the text (Ctrl Enter)";
    this.area.readOnly = isActive;
    this.#renderTools(isActive);
    this.problem.replaceChildren(...(this.#error ? [errorBox(this.#error, { label: "Try again", run: () => this.#submit() })] : []));
    this.#renderText();
    this.stats.replaceChildren(...statsText(this.run ? this.run.stats() : this.#take?.stats, isActive));
  }

  /** The last continuation, if the text still ends with it. */
  get #take() {
    const { take, text } = this.app.conversation;
    return take && text === take.base + take.texts[take.selected] ? take : null;
  }

  #renderTools(isActive) {
    const take = this.#take;
    const tools = [];
    if (!isActive && take) {
      tools.push(iconButton("retry", "Regenerate", () => this.#generate(take.base)));
      tools.push(iconButton("undo", "Take the continuation back", () => this.#set(take.base, null)));
      if (take.texts.length > 1) tools.push(branchSwitch(take.selected, take.texts.length, (step) => this.#switch(step), "version"));
    }
    if (!isActive && this.app.conversation.text) tools.push(copyButton(() => this.app.conversation.text, "Copy text"));
    this.tools.replaceChildren(...tools);
  }

  #renderText() {
    const { conversation, showsTokens } = this.app;
    const take = this.#take;
    const details = take && store.tokenDetails.get(this.#key(take));
    const asTokens = showsTokens && details?.length > 0;
    this.paper.hidden = asTokens;
    this.tokens.element.hidden = !asTokens;
    if (asTokens) {
      const given = this.#promptTokens?.text === take.base ? this.#promptTokens.tokens : [];
      if (!given.length && take.base) this.#loadPrompt(take.base);
      this.given = given.length;
      this.tokens.update([...given, ...details]);
      return;
    }
    const start = take ? take.base.length : conversation.text.length;
    this.backdrop.replaceChildren(conversation.text.slice(0, start), h("mark", {}, conversation.text.slice(start)), "\n");
    this.area.style.height = "auto";
    this.area.style.height = `${Math.max(this.area.scrollHeight, 160)}px`;
  }

  async #loadPrompt(text) {
    const tokens = await this.#tokenize(text).catch(() => null);
    if (!tokens) return;
    this.#promptTokens = { text, tokens: tokens.tokens.map((id, index) => ({ id, text: tokens.token_strs[index], logprob: null, top: [] })) };
    this.#renderText();
  }

  #tokenize(text) { return post("tokenize", { model: this.app.model.id, prompt: text, return_token_strs: true }); }
  #key(take) { return `${this.app.conversation.id}/${take.base.length}/${take.selected}`; }

  async #context() {
    const take = this.#take;
    const prompt = await this.#tokenize(take.base);
    const written = store.tokenDetails.get(this.#key(take)).filter((token) => token.id !== null);
    return { ids: [...prompt.tokens, ...written.map((token) => token.id)], texts: [...prompt.token_strs, ...written.map((token) => token.text)], start: prompt.tokens.length - (this.given ?? 0), written: prompt.tokens.length, model: this.app.model.id };
  }

  // -------------------------------------------------------------- actions

  #edited() {
    const { conversation } = this.app;
    conversation.text = this.area.value;
    this.#error = null;
    this.render();
    this.#saveSoon(conversation);
    this.measure();
  }

  #saveSoon = debounce((conversation) => { store.touch(conversation); this.app.refreshList(); }, 600);

  #set(text, take) {
    const { conversation } = this.app;
    conversation.text = text;
    conversation.take = take;
    this.area.value = text;
    store.touch(conversation);
    this.render();
    this.measure();
  }

  #switch(step) {
    const { take } = this.app.conversation;
    take.selected = Math.min(Math.max(0, take.selected + step), take.texts.length - 1);
    this.#set(take.base + take.texts[take.selected], take);
  }

  #submit() {
    if (this.run?.isActive) { this.stop(); return; }
    const { text } = this.app.conversation;
    if (!text) { this.area.focus(); return; }
    this.#generate(text);
  }

  stop(id = this.app.conversation.id) { if (this.#running?.id === id) this.#run.stop(); }

  async #generate(base) {
    if (this.#run?.isActive) { toast("Another text is being written. Stop it first, or wait."); return; }
    const { conversation, model } = this.app;
    const previous = conversation.take?.base === base ? conversation.take : null;
    const take = previous ?? { base, texts: [], selected: 0 };
    take.selected = take.texts.push("") - 1;
    conversation.take = take;
    const update = coalesce(() => this.#onUpdate(), 50);
    const body = { model: model.id, prompt: base, ...requestFields(this.app, conversation), ...detailFields(this.app, "completion") };
    this.#run = new Run("v1/completions", body, update);
    this.#running = conversation;
    this.app.addRequest(this.#run.id, conversation);
    this.#error = null;
    this.#onUpdate();
    this.app.refreshList();
    await this.#run.start();
    update.now();
    this.#end();
  }

  #onUpdate() {
    const run = this.#run;
    const conversation = this.#running;
    const { take } = conversation;
    take.texts[take.selected] = run.text;
    take.stats = run.stats();
    conversation.text = take.base + run.text;
    if (this.app.conversation !== conversation) return;
    if (run.tokens.some((token) => token.logprob !== null)) store.tokenDetails.set(this.#key(take), run.tokens.slice());
    const isAtEnd = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 90;
    this.area.value = conversation.text;
    this.render();
    this.meter.add(run.numTokens);
    if (isAtEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  #end() {
    const run = this.#run;
    const conversation = this.#running;
    const isShown = this.app.conversation === conversation;
    if (run.error && isShown) this.#error = errorFields(run.error);
    const { take } = conversation;
    if (!run.text && run.error) { // nothing was written: no version
      take.texts.splice(take.selected, 1);
      take.selected = Math.max(0, take.texts.length - 1);
      if (!take.texts.length) conversation.take = null;
      conversation.text = take.base + (take.texts[take.selected] ?? "");
    }
    store.touch(conversation);
    this.app.refreshList();
    this.app.announce(run.error ? run.error.title : `${count(run.numTokens)} tokens were written`);
    if (!isShown) return;
    this.area.value = conversation.text;
    this.render();
    this.measure();
  }

  async #measure() {
    const { model, conversation } = this.app;
    if (this.app.mode !== "completion" || this.#run?.isActive) return;
    if (!conversation.text) { this.meter.set(0); return; }
    try {
      this.meter.set((await post("tokenize", { model: model.id, prompt: conversation.text })).count);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
    }
  }
}
