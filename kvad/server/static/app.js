// Start of the page: layout, modes, conversations, theme and the state of the connection.

import { connection, get } from "./api.js";
import { CachePanel } from "./cache.js";
import { CompletionView } from "./completion.js";
import { ago, arrowKeys, byId, count, download, fill, h, icon, iconButton, toast } from "./dom.js";
import { AttentionPanel, TrainingPanel } from "./inspect.js";
import { SettingsPanel } from "./settings.js";
import * as store from "./store.js";
import { Thread } from "./thread.js";
import { TranslateView } from "./translate.js";

const THEMES = [["system", "Theme of the system"], ["light", "Light theme"], ["dark", "Dark theme"]];
const NARROW = matchMedia("(max-width: 900px)");
const DARK = matchMedia("(prefers-color-scheme: dark)");
const SEARCH_FROM = 8; // conversations from which on they can be searched
const NAMES = { chat: "Chat", completion: "Completion", translate: "Translation" };

/** What the page is built from, of a model. */
const traits = ({ kind, has_chat_template, thinking }) => JSON.stringify([kind, has_chat_template, thinking]);

class App {
  #requests = new Map(); // request id -> conversation id
  conversation = null;
  settings = store.loadSettings();
  showsTokens = store.read("tokens", false);

  async start() {
    this.#setTheme(store.read("theme", "system"));
    DARK.addEventListener("change", () => this.#setTheme(store.read("theme", "system")));
    this.#watchConnection();
    await this.#loadModel();
    document.body.classList.remove("loading");
    this.#buildModes();
    this.#buildPanels();
    this.#buildSidebar();
    this.#keys();
    this.setTokens(this.showsTokens);
    this.#openLast();
    this.refreshList();
    store.whenFull(() => toast("This browser's storage is full: export and delete old conversations."));
    store.onOtherTab((id) => this.#changedElsewhere(id));
    addEventListener("pagehide", () => { if (this.conversation) store.save(this.conversation); });
  }

  /** Show what another tab has written; an older copy here would replace it. */
  #changedElsewhere(id) {
    const stored = id === this.conversation?.id && !this.view.run?.isActive && store.load(id);
    if (stored) this.open(stored);
    else this.refreshList();
  }

  /** Whether a request was sent for what is shown: its blocks are "mine" in the cache panel. */
  isOwn(requestId) { return requestId !== null && this.#requests.get(requestId) === this.conversation.id; }
  addRequest(requestId, conversation) { this.#requests.set(requestId, conversation.id); }
  get view() { return { chat: this.thread, completion: this.completion, translate: this.translate }[this.mode]; }

  async #loadModel() {
    for (;;) {
      try {
        this.models = (await get("v1/models")).data; // the base, and its adapters
        const chosen = store.read("model", "");
        this.model = this.models.find(({ id }) => id === chosen) ?? this.models[0];
        return;
      } catch (error) {
        document.body.classList.remove("loading");
        this.#banner(error.status ? `${error.title}: ${error.message}. ${error.hint}` : "The server cannot be reached. Trying again…");
        await new Promise((resolve) => setTimeout(resolve, 1500));
      }
    }
  }

  // -------------------------------------------------------------- modes and views

  get modes() {
    if (this.model.kind === "encoder-decoder") return ["translate"];
    return this.model.has_chat_template ? ["chat", "completion"] : ["completion"];
  }

  #buildModes() {
    this.thread = new Thread(this);
    this.completion = new CompletionView(this);
    this.translate = this.model.kind === "encoder-decoder" ? new TranslateView(this) : null;
    const stored = store.read("mode", "");
    this.mode = this.modes.includes(stored) ? stored : this.modes[0];
    const tabs = byId("modes");
    tabs.hidden = this.modes.length < 2;
    tabs.append(...this.modes.map((mode) => h("button", { type: "button", role: "tab", dataset: { mode }, onclick: () => { if (mode !== this.mode) this.#newConversation(mode); } }, NAMES[mode])));
    arrowKeys(tabs, "[role=tab]");
    document.title = `${this.model.id} – kvad`;
  }

  /** Show a conversation in the view of its mode. */
  open(conversation) {
    if (conversation !== this.conversation) this.attention.clear();
    this.conversation = conversation;
    this.mode = conversation.mode;
    store.write("mode", this.mode);
    for (const mode of Object.keys(NAMES)) byId(`view-${mode}`).hidden = mode !== this.mode;
    for (const tab of byId("modes").children) {
      tab.setAttribute("aria-selected", String(tab.dataset.mode === this.mode));
      tab.tabIndex = tab.dataset.mode === this.mode ? 0 : -1;
    }
    byId("toggle-tokens").hidden = this.mode === "translate";
    byId("new-conversation").children[1].textContent = this.mode === "completion" ? "New text" : "New chat";
    this.view.show();
    this.refreshList();
    this.#closeSidebar();
  }

  openStored(id) {
    const conversation = this.thread.running(id) ?? this.completion.running(id) ?? store.load(id);
    if (!conversation) { store.remove(id); this.refreshList(); return; }
    if (!this.modes.includes(conversation.mode)) { toast(`This conversation needs ${conversation.mode === "chat" ? "a model with a chat template" : "a decoder model"}.`); return; }
    this.open(conversation);
  }

  #openLast() {
    const last = store.load(store.read("open", ""));
    this.open(last?.mode === this.mode ? last : store.create(this.mode));
  }

  #newConversation(mode = this.mode) {
    this.open(store.create(mode));
    store.write("open", "");
    if (!NARROW.matches) (mode === "chat" ? byId("message") : byId("completion-text"))?.focus();
  }

  setTokens(isOn) {
    this.showsTokens = isOn;
    store.write("tokens", isOn);
    byId("toggle-tokens").setAttribute("aria-pressed", String(isOn));
    if (this.conversation) this.view.render();
  }

  showAttention(load, index) {
    this.showTab("attention");
    this.attention.open(load, index);
  }

  announce(text) { byId("announce").textContent = text; }

  // -------------------------------------------------------------- the panel

  #buildPanels() {
    this.cache = new CachePanel(byId("panel-cache"), this);
    this.attention = new AttentionPanel(byId("panel-attention"), this);
    this.settingsPanel = new SettingsPanel(byId("panel-settings"), this);
    const training = byId("panel-training");
    this.training = new TrainingPanel(training, this, (isLive) => {
      byId("tab-training").hidden = false;
      byId("tab-training").classList.toggle("has-news", isLive);
    });
    const tabs = document.querySelectorAll("#inspector [role=tab]");
    for (const tab of tabs) tab.addEventListener("click", () => this.showTab(tab.id.slice(4)));
    arrowKeys(document.querySelector("#inspector .tabs"), "[role=tab]");
    byId("toggle-inspector").addEventListener("click", () => this.#toggleInspector());
    byId("close-inspector").addEventListener("click", () => this.#toggleInspector(false));
    byId("toggle-tokens").addEventListener("click", () => this.setTokens(!this.showsTokens));
    this.showTab(store.read("tab", "cache"), false);
    this.#toggleInspector(store.read("inspector", true) && !NARROW.matches, false);
  }

  showTab(name, opens = true) {
    if (!byId(`tab-${name}`)) name = "cache";
    for (const panel of document.querySelectorAll("#inspector .panel")) panel.hidden = panel.id !== `panel-${name}`;
    for (const tab of document.querySelectorAll("#inspector [role=tab]")) {
      tab.setAttribute("aria-selected", String(tab.id === `tab-${name}`));
      tab.tabIndex = tab.id === `tab-${name}` ? 0 : -1;
    }
    store.write("tab", name);
    if (opens) this.#toggleInspector(true);
    this.cache.sync();
    this.cache.draw();
    if (name === "training") { this.training.render(); this.training.refresh(); }
  }

  #toggleInspector(isOpen = byId("inspector").hidden, isStored = true) {
    const isChanged = byId("inspector").hidden === isOpen;
    byId("inspector").hidden = !isOpen;
    this.#coverMain();
    byId("toggle-inspector").setAttribute("aria-expanded", String(isOpen));
    if (isStored && !NARROW.matches) store.write("inspector", isOpen);
    if (isChanged && NARROW.matches) byId(isOpen ? "close-inspector" : "toggle-inspector").focus();
    this.cache.sync();
    this.cache.draw();
  }

  /** On a narrow screen the panel covers the page: the keyboard stays in it. */
  #coverMain() { byId("main").inert = NARROW.matches && !byId("inspector").hidden; }

  // -------------------------------------------------------------- the sidebar

  #buildSidebar() {
    const { model } = this;
    byId("model-card").append(this.#modelName(), h("span", {}, `${model.kind}, ${count(model.max_model_len)} tokens`));
    byId("new-conversation").addEventListener("click", () => this.#newConversation());
    byId("new-conversation").hidden = model.kind === "encoder-decoder";
    if (model.kind === "encoder-decoder") byId("no-conversations").textContent = "The last translation is kept in this browser.";
    byId("search").addEventListener("input", () => this.refreshList());
    byId("open-sidebar").addEventListener("click", () => { document.body.classList.add("sidebar-open"); byId("scrim").hidden = false; byId("main").inert = true; byId("close-sidebar").focus(); });
    NARROW.addEventListener("change", () => { this.#closeSidebar(); this.#coverMain(); });
    byId("close-sidebar").addEventListener("click", () => this.#closeSidebar());
    byId("scrim").addEventListener("click", () => this.#closeSidebar());
    const group = document.querySelector(".theme");
    group.append(...THEMES.map(([name, label]) => h("button", { type: "button", role: "radio", dataset: { theme: name }, "aria-label": label, title: label, onclick: () => { store.write("theme", name); this.#setTheme(name); } }, icon(name))));
    arrowKeys(group, "[role=radio]");
    this.#setTheme(store.read("theme", "system"));
  }

  /** The name of the model, or a choice of the base and its adapters. */
  #modelName() {
    if (this.models.length === 1) return h("b", { title: this.model.id }, this.model.id);
    const options = this.models.map(({ id, parent }) => h("option", { value: id, selected: id === this.model.id }, parent ? `${id} (adapter)` : id));
    return h("select", { "aria-label": "Model", title: "The base model or one of its adapters; the next answer is of it", onchange: (event) => this.#chooseModel(event.target.value) }, ...options);
  }

  #chooseModel(id) {
    const before = this.model;
    store.write("model", id);
    this.model = this.models.find((each) => each.id === id);
    if (traits(before) !== traits(this.model)) { location.reload(); return; } // other modes or other choices
    document.title = `${id} – kvad`;
    this.settingsPanel.render();
    this.attention.clear();
    this.view.render(); // what is written stays as it is
    this.view.measure?.();
  }

  #closeSidebar() {
    if (!document.body.classList.contains("sidebar-open")) return;
    document.body.classList.remove("sidebar-open");
    byId("scrim").hidden = true;
    byId("main").inert = false;
    byId("open-sidebar").focus();
  }

  refreshList() {
    const all = store.list();
    const shown = this.conversation;
    if (shown && !store.isEmpty(shown)) store.write("open", shown.id);
    byId("no-conversations").hidden = all.length > 0;
    const search = byId("search");
    search.hidden = all.length < SEARCH_FROM && !search.value;
    const wanted = search.value.trim().toLowerCase();
    const found = all.filter((each) => (each.title || "Untitled").toLowerCase().includes(wanted));
    const conversations = byId("conversations");
    if (!conversations.querySelector(".menu, .rename:focus")) { // these are left alone until they close
      const focused = conversations.contains(document.activeElement) ? document.activeElement : null;
      const place = focused && `[data-id="${focused.closest("li").dataset.id}"] .${focused.classList.contains("more") ? "more" : "open"}`;
      conversations.replaceChildren(...found.map((each) => this.#listItem(each, each.id === shown?.id)));
      if (place) conversations.querySelector(place)?.focus();
    }
    byId("title").textContent = shown && !store.isEmpty(shown) ? shown.title : this.mode === "translate" ? "Translation" : "";
  }

  #listItem(entry, isShown) {
    const isRunning = Boolean(this.thread.running(entry.id) ?? (this.completion.running(entry.id) && this.completion.run?.isActive));
    const open = h("button", { type: "button", class: "open", "aria-current": isShown ? "page" : null, onclick: () => this.openStored(entry.id) }, h("span", {}, entry.title || "Untitled"), isRunning ? h("i", { class: "live", role: "img", "aria-label": "is being written" }) : h("time", {}, ago(entry.updated)));
    const item = h("li", { dataset: { id: entry.id } }, open, iconButton("more", "Rename, export or delete", () => this.#menu(item, entry), { class: "more", "aria-haspopup": "true" }));
    return item;
  }

  #menu(item, entry) {
    const isOpen = item.querySelector(".menu");
    document.querySelectorAll(".menu").forEach((each) => each.remove());
    if (isOpen) return;
    const close = () => { menu.remove(); removeEventListener("pointerdown", outside); };
    const outside = (event) => {
      if (menu.contains(event.target)) return;
      close();
      addEventListener("click", () => this.refreshList(), { once: true }); // its target stays until then
    };
    const action = (name, label, run) => h("button", { type: "button", role: "menuitem", onclick: () => { run(); close(); this.refreshList(); } }, icon(name), label);
    const menu = h("div", { class: "menu", role: "menu" },
      action("edit", "Rename", () => this.#rename(item, entry)), action("download", "Export as Markdown", () => this.#export(entry, "md")),
      action("download", "Export as JSON", () => this.#export(entry, "json")), action("trash", "Delete", () => this.#delete(entry)));
    menu.addEventListener("keydown", (event) => {
      const buttons = [...menu.children];
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step) { event.preventDefault(); buttons[(buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length].focus(); }
      if (event.key === "Escape") { event.stopPropagation(); item.querySelector(".more").focus(); close(); this.refreshList(); }
    });
    item.append(menu);
    menu.firstChild.focus();
    setTimeout(() => addEventListener("pointerdown", outside));
  }

  #stored(entry) { return entry.id === this.conversation.id ? this.conversation : this.thread.running(entry.id) ?? store.load(entry.id); }

  #rename(item, entry) {
    const input = h("input", { class: "rename", value: entry.title, "aria-label": "Name of the conversation", maxlength: "120" });
    const accept = () => {
      const conversation = this.#stored(entry);
      if (conversation && input.value.trim()) { conversation.title = input.value.trim(); store.save(conversation); }
      this.refreshList();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      if (event.key === "Escape") input.value = "";
      input.blur();
      byId("conversations").querySelector(`[data-id="${entry.id}"] .open`)?.focus();
    });
    input.addEventListener("blur", accept);
    item.replaceChildren(input);
    input.focus();
    input.select();
  }

  #export(entry, kind) {
    const conversation = this.#stored(entry);
    const name = (entry.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
    if (kind === "md") download(`${name}.md`, store.toMarkdown(conversation), "text/markdown");
    else download(`${name}.json`, JSON.stringify({ model: this.model.id, ...conversation }, null, 1), "application/json");
  }

  #delete(entry) {
    const conversation = this.#stored(entry);
    store.remove(entry.id);
    for (const view of [this.thread, this.completion, this.translate]) view?.stop(entry.id);
    if (entry.id === this.conversation.id) this.#newConversation();
    this.refreshList();
    toast("The conversation was deleted.", { label: "Undo", run: () => { if (conversation) { store.restore(conversation); this.open(conversation); } } });
  }

  // -------------------------------------------------------------- theme, keys, connection

  #setTheme(name) {
    const shown = name === "system" ? (DARK.matches ? "dark" : "light") : name;
    document.documentElement.dataset.theme = name;
    document.documentElement.dataset.shown = shown;
    for (const each of document.querySelectorAll(".theme [role=radio]")) {
      each.setAttribute("aria-checked", String(each.dataset.theme === name));
      each.tabIndex = each.dataset.theme === name ? 0 : -1;
    }
    this.cache?.draw();
  }

  #keys() {
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        if (this.view.run?.isActive) this.view.stop();
        else if (document.body.classList.contains("sidebar-open")) this.#closeSidebar();
        else if (NARROW.matches && !byId("inspector").hidden) this.#toggleInspector(false);
      }
      if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); this.#newConversation(); }
    });
  }

  #banner(text, action = null) {
    const banner = byId("banner");
    banner.hidden = !text;
    if (text) fill(banner, h("span", { class: "spinner", "aria-hidden": "true" }), h("span", {}, text), action);
  }

  #watchConnection() {
    connection.addEventListener("change", async () => {
      const isLost = connection.state === "reconnecting";
      this.#banner(isLost ? "The server cannot be reached. Reconnecting…" : "", h("button", { type: "button", class: "link", onclick: () => connection.retryNow() }, "Try now"));
      document.body.classList.toggle("offline", isLost);
      if (isLost || !this.model) return;
      const served = () => JSON.stringify(this.models.map((model) => [model.id, traits(model)]));
      const before = served();
      await this.#loadModel();
      if (before !== served()) location.reload();
    });
  }
}

const app = new App();
app.start();
