// Conversations and settings in this browser's storage. A conversation is a tree: siblings are alternative messages.

const PREFIX = "kvad.";
const INDEX = `${PREFIX}conversations`;
const ONE = `${PREFIX}c.`;

export const DEFAULTS = {
  temperature: 0.7, top_p: "", top_k: "", min_p: "", max_tokens: 512, seed: "", stop: "", system: "", repetition_penalty: "",
  overflow: "", cache_salt: "", session: false, timeout: "", enable_thinking: "", thinking: "", reasoning_effort: "",
};

/** Token details of messages (texts, log-probabilities, ids), by message; kept until the page is reloaded. */
export const tokenDetails = new Map();

const removed = new Set(); // ids of conversations that were deleted; what still runs does not save them

let onFull = () => {};
export function whenFull(callback) { onFull = callback; }

export function read(name, fallback) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function write(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    onFull();
    return false;
  }
}

const newId = () => Date.now().toString(36) + Math.random().toString(36).slice(2, 8);

export function loadSettings() {
  return { ...DEFAULTS, ...read("settings", {}) };
}

// ---------------------------------------------------------------- conversations

/** Return [{id, title, mode, updated}], the newest first. */
export function list() {
  return read("conversations", []).sort((a, b) => b.updated - a.updated);
}

export function create(mode) {
  return {
    id: newId(), title: "", mode, created: Date.now(), updated: Date.now(),
    nodes: { root: { id: "root", parent: null, role: "root", children: [], selected: 0 } },
    text: "", take: null,
  };
}

export function load(id) {
  const stored = read(`c.${id}`, null);
  return stored?.nodes?.root ? stored : null;
}

/** Save a conversation; one without content is not stored. */
export function save(conversation) {
  if (isEmpty(conversation) || removed.has(conversation.id)) return;
  if (!write(`c.${conversation.id}`, conversation)) return;
  const { id, title, mode, updated } = conversation;
  write("conversations", [{ id, title, mode, updated }, ...list().filter((each) => each.id !== id)]);
}

export function touch(conversation) {
  conversation.updated = Date.now();
  if (!conversation.title) conversation.title = titleOf(conversation);
  save(conversation);
}

export function remove(id) {
  removed.add(id);
  localStorage.removeItem(`${PREFIX}c.${id}`);
  write("conversations", list().filter((each) => each.id !== id));
}

export function isEmpty(conversation) {
  return !conversation.nodes.root.children.length && !conversation.text;
}

export function restore(conversation) {
  removed.delete(conversation.id);
  save(conversation);
}

function titleOf(conversation) {
  const first = path(conversation)[0]?.content ?? conversation.text;
  const line = first.trim().split("\n")[0].trim();
  return line.length > 48 ? `${line.slice(0, 47).trimEnd()}…` : line;
}

/** Another tab has changed the list of conversations (null), or one of them (its id). */
export function onOtherTab(callback) {
  addEventListener("storage", (event) => {
    if (event.key === INDEX) callback(null);
    if (!event.key?.startsWith(ONE)) return;
    const id = event.key.slice(ONE.length);
    if (event.newValue === null) removed.add(id); else removed.delete(id);
    callback(id);
  });
}

// ---------------------------------------------------------------- the tree

/** Return the messages of the selected branch. */
export function path(conversation) {
  const messages = [];
  let node = conversation.nodes.root;
  while (node.children.length) {
    node = conversation.nodes[node.children[Math.min(node.selected, node.children.length - 1)]];
    if (!node) break;
    messages.push(node);
  }
  return messages;
}

/** Add a message below `parent` and select it. */
export function add(conversation, parent, role, content) {
  const node = { id: newId(), parent, role, content, children: [], selected: 0, meta: {} };
  const above = conversation.nodes[parent];
  conversation.nodes[node.id] = node;
  above.selected = above.children.push(node.id) - 1;
  return node;
}

/** Return the position of a message among its siblings: [index, number]. */
export function position(conversation, node) {
  const { children } = conversation.nodes[node.parent];
  return [children.indexOf(node.id), children.length];
}

export function select(conversation, node, step) {
  const above = conversation.nodes[node.parent];
  above.selected = Math.min(Math.max(above.children.indexOf(node.id) + step, 0), above.children.length - 1);
}

/** Return the messages up to and including `node`. */
export function upTo(conversation, node) {
  const messages = [];
  for (let each = node; each && each.id !== "root"; each = conversation.nodes[each.parent]) messages.unshift(each);
  return messages;
}

/** Return the selected branch as Markdown. */
export function toMarkdown(conversation) {
  const head = `# ${conversation.title || "Conversation"}\n`;
  if (conversation.mode === "completion") return `${head}\n${conversation.text}\n`;
  const names = { user: "You", assistant: "Assistant", system: "System" };
  return head + path(conversation).map((node) => `\n**${names[node.role]}**\n\n${node.content}\n`).join("");
}
