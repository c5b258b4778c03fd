// The chat: messages of the selected branch, their tools, and the generation of answers.

import { ApiError, Run, post } from "./api.js";
import { byId, coalesce, copyButton, count, debounce, duration, h, icon, iconButton, autoGrow, setChildren, setText } from "./dom.js";
import { TokenView } from "./inspect.js";
import { MarkdownView } from "./markdown.js";
import { detailFields, requestFields, templateFields, thinkingChoices } from "./settings.js";
import * as store from "./store.js";

const TOUCH = matchMedia("(pointer: coarse)"); // a keyboard on the screen has no Shift with Enter: it breaks the line
const SAVE_EVERY = 1000; // ms, while an answer is written
const EXAMPLES = [
  ["Explain", "Explain what a key-value cache stores, in three sentences."],
  ["Write", "Write a Python function that merges two sorted lists."],
  ["Compare", "Compare beam search and sampling in a small table."],
];

export class Thread {
  #views = new Map(); // message id -> {element, markdown, tokens, ...}
  #runs = new Map(); // conversation id -> {run, conversation, node}
  #editing = null;

  constructor(app) {
    this.app = app;
    this.list = byId("thread");
    this.input = byId("message");
    this.meter = new Meter(byId("chat-meter"), app.model.max_model_len);
    byId("chat-meter").append(h("span", { class: "choices" }, ...thinkingChoices(app).map(([label, hint, select]) => h("label", { title: hint }, label, select))));
    this.examples = this.#buildExamples();
    this.toEnd = h("div", { class: "to-end", hidden: true }, iconButton("end", "To the end", () => this.#toEnd()));
    this.list.addEventListener("scroll", () => this.#updateToEnd());
    addEventListener("resize", () => this.#updateToEnd());
    byId("view-chat").append(this.examples);
    this.measure = debounce(() => this.#measure(), 450);
    byId("composer").addEventListener("submit", (event) => { event.preventDefault(); this.#submit(); });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
      event.preventDefault();
      if (!this.#active) this.#submit(); // the next message waits; the button and Esc stop an answer
    });
    this.input.addEventListener("input", () => { autoGrow(this.input, 220); this.measure(); this.#saveDraft(); });
    this.input.value = store.read("draft", "");
  }

  #saveDraft = debounce(() => store.write("draft", this.input.value), 300);

  get #active() { return this.#runs.get(this.app.conversation.id) ?? null; }
  get run() { return this.#active?.run ?? null; }

  /** Return a conversation that is being written, so that two views share it. */
  running(id) { return this.#runs.get(id)?.conversation ?? null; }

  // -------------------------------------------------------------- rendering

  show() {
    this.#views.clear();
    this.#editing = null;
    this.render();
    this.#toEnd();
    autoGrow(this.input, 220);
    this.measure();
  }

  /** Rebuild the list of messages; unchanged ones keep their elements. */
  render() {
    const messages = store.path(this.app.conversation);
    const elements = messages.map((node) => this.#view(node).element);
    if (!messages.length) elements.push(this.#emptyState());
    byId("view-chat").classList.toggle("is-empty", !messages.length);
    this.examples.hidden = messages.length > 0;
    setChildren(this.list, [...elements, this.toEnd]);
    this.#renderSend();
    this.#updateToEnd();
  }

  #emptyState() {
    const { model } = this.app;
    return h("div", { class: "empty" },
      h("h2", {}, `Chat with ${model.id}`),
      h("p", {}, `It reads up to ${count(model.max_model_len)} tokens at a time. Conversations are kept in this browser only.`),
    );
  }

  /** Suggestions below the message box of an empty chat. */
  #buildExamples() {
    const use = (text) => { this.input.value = text; autoGrow(this.input, 220); this.input.focus(); this.measure(); };
    return h("div", { class: "examples-below" }, h("div", { class: "examples" }, ...EXAMPLES.map(([label, text]) => h("button", { type: "button", onclick: () => use(text) }, h("b", {}, label), h("span", {}, text)))));
  }

  #view(node) {
    let view = this.#views.get(node.id);
    if (!view) {
      view = this.#create(node);
      this.#views.set(node.id, view);
    }
    this.#update(node, view);
    return view;
  }

  #create(node) {
    const body = h("div", { class: "body" });
    const element = h("article", { class: `message ${node.role}`, "aria-label": node.role === "user" ? "Your message" : "Answer" }, body);
    const view = { element, body, foot: h("div", { class: "foot" }), notice: h("div", { class: "notice" }) };
    if (node.role === "user") {
      view.text = h("div", { class: "bubble" });
      body.append(view.text);
    } else {
      view.text = h("div");
      view.summary = h("summary");
      view.reasoning = h("div");
      view.thoughts = h("details", { class: "thoughts", hidden: true }, view.summary, view.reasoning);
      view.markdown = new MarkdownView(view.text);
      view.tokens = new TokenView((index) => this.app.showAttention(() => this.#contextOf(node), index));
      body.append(view.thoughts, view.text, view.tokens.element);
    }
    element.append(view.notice, view.foot);
    return view;
  }

  #update(node, view) {
    const active = this.#active?.node === node ? this.#active.run : null;
    if (this.#editing === node.id) return;
    if (node.role === "user") {
      setText(view.text, node.content);
    } else {
      const details = store.tokenDetails.get(node.id);
      const showsTokens = this.app.showsTokens && details?.length > 0;
      view.text.hidden = showsTokens;
      view.thoughts.hidden = showsTokens || !node.reasoning;
      setText(view.reasoning, node.reasoning ?? "");
      setText(view.summary, active && !node.content ? "Thinking…" : "Thoughts");
      view.tokens.element.hidden = !showsTokens;
      if (showsTokens) view.tokens.update(details);
      else view.markdown.update(node.content);
      view.element.classList.toggle("waiting", active?.state === "waiting");
      view.element.classList.toggle("writing", Boolean(active));
      view.element.setAttribute("aria-busy", String(Boolean(active)));
    }
    this.#updateNotice(node, view, active);
    this.#updateFoot(node, view, active);
  }

  #updateNotice(node, view, active) {
    const { finish, error } = node.meta;
    const isEnd = !active && node.role === "assistant" && !node.children.length;
    const key = JSON.stringify([Boolean(active), isEnd, finish, error, this.app.showsTokens, store.tokenDetails.has(node.id)]);
    if (view.noticeKey === key) return;
    view.noticeKey = key;
    const parts = [];
    if (!active && error) {
      parts.push(errorBox(error, { label: node.content ? "Continue" : "Try again", run: () => (node.content ? this.#continue(node) : this.#regenerate(node)) }));
    } else if (isEnd && finish === "length" && !(node.meta.limit !== null && node.meta.stats?.tokens >= node.meta.limit)) {
      parts.push(notice("Stopped: the context is full. Start a new chat, or shorten this one.", null));
    } else if (isEnd && finish === "length") {
      parts.push(notice(`Stopped at the limit of ${count(node.meta.limit ?? 0)} new tokens.`, node.content ? "Continue" : "Try again", () => (node.content ? this.#continue(node) : this.#regenerate(node))));
    } else if (isEnd && node.meta.limit !== undefined && finish === undefined) {
      parts.push(notice("This answer was interrupted.", node.content ? "Continue" : "Try again", () => (node.content ? this.#continue(node) : this.#regenerate(node))));
    } else if (isEnd && finish === "stopped") {
      parts.push(notice("You stopped this answer.", node.content ? "Continue" : null, () => this.#continue(node)));
    }
    if (isEnd && this.app.showsTokens && !store.tokenDetails.has(node.id) && node.content) {
      parts.push(notice("This answer has no token details: they are recorded while “Tokens” is on, until the page is reloaded.", "Regenerate", () => this.#regenerate(node)));
    }
    view.notice.replaceChildren(...parts);
  }

  #updateFoot(node, view, active) {
    const [index, number] = store.position(this.app.conversation, node);
    const stats = active ? active.stats() : node.meta.stats;
    const key = JSON.stringify([Boolean(active), index, number, Boolean(this.#active)]);
    if (view.footKey !== key) {
      view.footKey = key;
      view.stats = h("span", { class: "stats" });
      view.foot.replaceChildren(...this.#tools(node, index, number, active), view.stats);
    }
    if (node.role !== "assistant") return;
    const model = this.app.models.length > 1 && node.meta.model ? [h("span", { title: "Model of this answer" }, node.meta.model)] : [];
    view.stats.replaceChildren(...model, ...statsText(stats, Boolean(active)));
  }

  #tools(node, index, number, active) {
    if (active) return [];
    const tools = [];
    if (number > 1) tools.push(branchSwitch(index, number, (step) => this.#switchBranch(node, step), "version"));
    tools.push(copyButton(() => node.content, "Copy text"));
    if (!this.#active) {
      tools.push(iconButton("edit", "Edit", () => this.#edit(node)));
      if (node.role === "assistant") tools.push(iconButton("retry", "Regenerate", () => this.#regenerate(node)));
    }
    return [h("div", { class: "tools" }, ...tools)];
  }

  #renderSend() {
    const button = byId("send");
    const isActive = Boolean(this.#active);
    button.classList.toggle("stop", isActive);
    button.replaceChildren(icon(isActive ? "stop" : "send"));
    button.setAttribute("aria-label", isActive ? "Stop" : "Send");
    button.title = isActive ? "Stop (Esc)" : "Send (Enter)";
  }

  get #isAtEnd() { return this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 90; }
  #toEnd() { this.list.scrollTop = this.list.scrollHeight; }
  #updateToEnd() { this.toEnd.hidden = this.#isAtEnd; }

  // -------------------------------------------------------------- actions

  #submit() {
    if (this.#active) { this.stop(); return; }
    const text = this.input.value.trim();
    if (!text) { this.input.focus(); return; }
    const { conversation } = this.app;
    const last = store.path(conversation).at(-1);
    store.add(conversation, last?.id ?? "root", "user", text);
    this.input.value = "";
    store.write("draft", "");
    autoGrow(this.input, 220);
    this.#answer(store.path(conversation).at(-1));
  }

  stop(id = this.app.conversation.id) { this.#runs.get(id)?.run.stop(); }

  #switchBranch(node, step) {
    store.select(this.app.conversation, node, step);
    store.save(this.app.conversation);
    this.render();
    this.measure();
    const above = this.app.conversation.nodes[node.parent];
    const label = step < 0 ? "Previous version" : "Next version";
    this.#views.get(above.children[above.selected])?.foot.querySelector(`[aria-label="${label}"]`)?.focus();
  }

  #regenerate(node) { this.#answer(this.app.conversation.nodes[node.parent]); }

  #edit(node) {
    const other = this.#editing;
    this.#editing = node.id;
    if (other) { this.#views.delete(other); this.render(); }
    const view = this.#views.get(node.id);
    const area = h("textarea", { class: "edit", "aria-label": "Edit the message", value: node.content });
    const end = () => {
      this.#editing = null;
      this.#views.delete(node.id);
      this.render();
      this.#views.get(node.id)?.foot.querySelector("[aria-label=Edit]")?.focus();
    };
    const accept = () => {
      const text = area.value.trim();
      if (!text || text === node.content.trim()) { end(); return; }
      const copy = store.add(this.app.conversation, node.parent, node.role, text);
      copy.reasoning = node.reasoning;
      end();
      if (node.role === "user") this.#answer(copy);
      else { store.touch(this.app.conversation); this.app.refreshList(); this.measure(); }
    };
    area.addEventListener("input", () => autoGrow(area, 400));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) accept();
    });
    const buttons = h("div", { class: "row end" },
      h("button", { type: "button", class: "ghost", onclick: end }, "Cancel"),
      h("button", { type: "button", class: "primary", onclick: accept }, node.role === "user" ? "Send" : "Save"));
    view.body.replaceChildren(h("div", { class: "editor" }, area, buttons));
    view.foot.replaceChildren();
    view.footKey = "";
    autoGrow(area, 400);
    area.focus();
  }

  /** Write a new answer below a user's message. */
  #answer(parent) {
    const node = store.add(this.app.conversation, parent.id, "assistant", "");
    this.#generate(node, false);
  }

  /** Write on at the end of an answer. */
  #continue(node) { this.#generate(node, true); }

  async #generate(node, isContinued) {
    const { conversation, settings } = this.app;
    const messages = this.#messages(conversation, isContinued ? node : conversation.nodes[node.parent], settings);
    if (isContinued && node.reasoning) messages.at(-1).reasoning_content = node.reasoning; // templates write them before the answer
    const before = isContinued ? node.content : "";
    const thoughts = (isContinued && node.reasoning) || "";
    const details = isContinued && store.tokenDetails.has(node.id) ? [...store.tokenDetails.get(node.id)] : [];
    const body = { model: this.app.model.id, messages, ...requestFields(this.app, conversation), ...templateFields(this.app), ...detailFields(this.app, "chat") };
    if (isContinued) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    node.meta = { model: body.model, limit: body.max_tokens, variables: templateFields(this.app) };
    const update = coalesce(() => this.#onUpdate(entry), 50);
    const run = new Run("v1/chat/completions", body, update);
    const entry = { run, conversation, node, before, thoughts, details, saved: performance.now() };
    this.stop(conversation.id); // an edited message was sent while another answer was written
    this.#runs.set(conversation.id, entry);
    this.app.addRequest(run.id, conversation);
    store.touch(conversation);
    this.app.refreshList();
    this.render();
    this.#toEnd();
    this.#count(messages);
    await run.start();
    update.now();
    this.#end(entry);
  }

  #onUpdate(entry) {
    const { run, conversation, node } = entry;
    node.content = entry.before + run.text;
    node.reasoning = entry.thoughts + run.reasoning;
    if (run.tokens.some((token) => token.logprob !== null)) store.tokenDetails.set(node.id, [...entry.details, ...run.tokens]);
    if (performance.now() - entry.saved > SAVE_EVERY) { entry.saved = performance.now(); store.save(conversation); }
    if (this.app.conversation !== conversation) return;
    const isAtEnd = this.#isAtEnd;
    const view = this.#views.get(node.id);
    if (view) this.#update(node, view);
    if (isAtEnd) this.#toEnd();
    this.#updateToEnd();
    this.meter.add(run.numTokens);
  }

  #end(entry) {
    const { run, conversation, node } = entry;
    if (this.#runs.get(conversation.id) === entry) this.#runs.delete(conversation.id);
    node.meta.stats = run.stats();
    node.meta.finish = run.state === "stopped" ? "stopped" : run.finish;
    node.meta.error = run.error ? errorFields(run.error) : null;
    store.touch(conversation);
    this.app.refreshList();
    this.app.announce(run.error ? run.error.title : run.state === "stopped" ? "Stopped" : "The answer is complete");
    if (this.app.conversation !== conversation) return;
    const isAtEnd = this.#isAtEnd;
    this.render();
    if (isAtEnd) this.#toEnd();
    this.measure();
  }

  // -------------------------------------------------------------- requests

  #messages(conversation, node, settings) {
    const messages = store.upTo(conversation, node).map(({ role, content }) => ({ role, content }));
    return settings.system.trim() ? [{ role: "system", content: settings.system.trim() }, ...messages] : messages;
  }

  /** Return ids and texts of all tokens of the context of an answer, and the index of its first token. */
  async #contextOf(node) {
    const { conversation, settings } = this.app;
    const messages = this.#messages(conversation, conversation.nodes[node.parent], settings);
    const model = node.meta.model ?? this.app.model.id;
    const prompt = await post("tokenize", { model, messages, ...node.meta.variables, return_token_strs: true });
    const answer = store.tokenDetails.get(node.id).filter((token) => token.id !== null);
    return { ids: [...prompt.tokens, ...answer.map((token) => token.id)], texts: [...prompt.token_strs, ...answer.map((token) => token.text)], start: prompt.tokens.length, model };
  }

  async #measure() {
    const { conversation, settings } = this.app;
    if (this.app.mode !== "chat" || this.#active) return;
    const messages = this.#messages(conversation, store.path(conversation).at(-1) ?? conversation.nodes.root, settings);
    const draft = this.input.value.trim();
    if (draft) messages.push({ role: "user", content: draft });
    if (messages.length) await this.#count(messages);
    else this.meter.set(0);
  }

  async #count(messages) {
    const { model } = this.app;
    try {
      this.meter.set((await post("tokenize", { model: model.id, messages, ...templateFields(this.app) })).count);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the text cannot be counted: sending it will tell why
    }
  }
}

// ---------------------------------------------------------------- parts

/** Shows how much of the context is used and left. */
export class Meter {
  #used = 0;

  constructor(element, limit) {
    this.limit = limit;
    this.fill = h("span", { class: "fill" });
    this.bar = h("span", { class: "bar", role: "meter", "aria-label": "Context used", "aria-valuemin": "0" }, this.fill);
    this.text = h("span");
    element.append(this.bar, this.text);
  }

  set(used) {
    this.#used = used;
    this.#render(used);
  }

  /** Show `tokens` more than at the last `set`. */
  add(tokens) { this.#render(this.#used + tokens); }

  #render(used) {
    const { limit } = this;
    const share = Math.min(1, used / limit);
    this.fill.style.width = `${share * 100}%`;
    this.bar.classList.toggle("high", share > 0.85);
    this.bar.setAttribute("aria-valuenow", used);
    this.bar.setAttribute("aria-valuemax", limit);
    if (used > limit) this.text.textContent = `${count(used)} tokens, the context has ${count(limit)}`;
    else this.text.textContent = used ? `${count(used)} of ${count(limit)} tokens used, ${count(limit - used)} left` : `Context of ${count(limit)} tokens`;
  }
}

/** Return the nodes of a line such as "42 tokens/s, first after 180 ms". */
export function statsText(stats, isLive) {
  if (!stats || (!stats.tokens && isLive)) return isLive ? [h("span", { class: "dots", role: "img", "aria-label": "Waiting for the first token" }, h("i"), h("i"), h("i"))] : [];
  const parts = [];
  if (stats.rate) parts.push([`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`, "Tokens per second after the first one"]);
  if (stats.first !== null) parts.push([`first after ${duration(stats.first)}`, "Time to the first token, waiting and the prompt's computation included"]);
  parts.push([`${count(stats.tokens)} tokens`, "Generated tokens"]);
  if (stats.prompt !== null) {
    const share = stats.cached ? `${count(stats.cached)} of ${count(stats.prompt)} prompt tokens from cache` : `${count(stats.prompt)} prompt tokens computed`;
    parts.push([share, "Tokens of the prompt that the prefix cache had"]);
  }
  if (stats.drafts) parts.push([`${count(stats.accepted)} of ${count(stats.drafts)} drafts accepted`, "Speculative decoding: drafted tokens that the model agreed with"]);
  if (stats.preemptions) parts.push([`preempted ${stats.preemptions}×`, "The pool was full: the sequence had to wait and was restored"]);
  return parts.map(([text, title]) => h("span", { title }, text));
}

export function branchSwitch(index, number, onstep, noun) {
  return h("span", { class: "branches", role: "group", "aria-label": `${noun} ${index + 1} of ${number}` },
    iconButton("left", `Previous ${noun}`, () => onstep(-1), { disabled: index === 0 }),
    h("span", {}, `${index + 1}/${number}`),
    iconButton("right", `Next ${noun}`, () => onstep(1), { disabled: index === number - 1 }));
}

export const errorFields = (error) => ({ title: error.title, message: error.message, hint: error.hint });

export function errorBox(error, action = null) {
  const button = action ? h("button", { type: "button", class: "ghost small", onclick: action.run }, action.label) : null;
  const message = error.message.charAt(0).toUpperCase() + error.message.slice(1).replace(/[^.!?…]$/, "$&.");
  return h("div", { class: "error", role: "alert" }, h("b", {}, error.title), h("p", {}, message, error.hint ? h("span", {}, ` ${error.hint}`) : null), button);
}

function notice(text, label, run) {
  return h("p", { class: "note" }, text, label ? h("button", { type: "button", class: "link", onclick: run }, label) : null);
}
