// Markdown as DOM nodes. Text of a model is only ever text: no HTML is parsed, images are links, and links are http(s) or mailto.
// Formulas become MathML.

import { copyButton, h } from "./dom.js";

const MAX_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const FORMULA = /^ {0,3}(?:\\\[|\$\$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const SAFE_URL = /^(?:https?:\/\/|mailto:)/i;
const FORMULA_ENDS = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
const MAX_FORMULA = 5000; // characters

/** Keeps an element equal to the Markdown of a growing text; blocks that have not changed keep their nodes. */
export class MarkdownView {
  #raws = [];

  constructor(element) {
    this.element = element;
    element.classList.add("markdown");
  }

  update(text) {
    const blocks = parseBlocks(text.split("\n"));
    let index = 0;
    while (index < blocks.length && this.#raws[index] === blocks[index].raw) index++;
    while (this.element.childNodes.length > index) this.element.lastChild.remove();
    for (const block of blocks.slice(index)) this.element.append(render(block, 0));
    this.#raws = blocks.map((block) => block.raw);
  }
}

// ---------------------------------------------------------------- blocks

/** Return [{type, raw, ...}]; every line belongs to one block. */
export function parseBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at++; continue; }
    const [block, end] = nextBlock(lines, at);
    blocks.push({ ...block, raw: `${block.type}\n${lines.slice(at, end).join("\n")}` });
    at = end;
  }
  return blocks;
}

function nextBlock(lines, at) {
  const line = lines[at];
  let match;
  if ((match = FENCE.exec(line))) return fence(lines, at, match);
  if ((match = HEADING.exec(line))) return [{ type: "heading", level: match[1].length, text: match[2].replace(/[ \t]+#+[ \t]*$/, "") }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !startsBlock(lines, end)))) end++;
    return [{ type: "quote", lines: lines.slice(at, end).map((each) => each.replace(QUOTE, "")) }, end];
  }
  if (ITEM.test(line)) return items(lines, at);
  if (FORMULA.test(line)) {
    const found = formulaBlock(lines, at);
    if (found) return found;
  }
  if (isTable(lines, at)) {
    let end = at + 2;
    while (end < lines.length && lines[end].includes("|")) end++;
    return [{ type: "table", rows: lines.slice(at, end) }, end];
  }
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end++;
  return [{ type: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1]);

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line) || FORMULA.test(line) || isTable(lines, at);
}

/** Return a formula that has its lines to itself; a line in it may look like an item of a list. */
function formulaBlock(lines, at) {
  const mark = lines[at].trimStart().slice(0, 2);
  let text = lines[at].trimStart().slice(2);
  for (let end = at + 1; text.length <= MAX_FORMULA; text += `\n${lines[end++]}`) {
    const last = text.indexOf(FORMULA_ENDS[mark]);
    if (last >= 0) return text.slice(last + 2).trim() ? null : [{ type: "formula", text: text.slice(0, last) }, end];
    if (end >= lines.length) return null;
  }
  return null;
}

function fence(lines, at, [, marks, info]) {
  let end = at + 1;
  const isEnd = (line) => line.trim().startsWith(marks) && !line.trim().replaceAll(marks[0], "");
  while (end < lines.length && !isEnd(lines[end])) end++;
  const language = info.trim().split(/\s/)[0];
  return [{ type: "code", language, text: lines.slice(at + 1, end).join("\n") }, Math.min(end + 1, lines.length)];
}

function items(lines, at) {
  const [, margin, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const entries = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    const indent = lines[end].search(/\S/);
    if (match && match[1].length <= margin.length + 1 && indent <= margin.length + 1) {
      if (/\d/.test(match[2]) !== isOrdered || RULE.test(lines[end])) break;
      entries.push({ indent: match[0].length, lines: [lines[end].slice(match[0].length)] });
    } else if (indent < 0) {
      const next = lines.slice(end + 1).find((line) => line.trim());
      const belongs = next !== undefined && (next.search(/\S/) > margin.length + 1 || ITEM.test(next));
      if (!belongs) break;
      entries.at(-1).lines.push("");
    } else if (indent > margin.length || !lines[end - 1].trim() === false) {
      if (indent <= margin.length && startsBlock(lines, end)) break;
      entries.at(-1).lines.push(lines[end].slice(Math.min(indent, entries.at(-1).indent)));
    } else break;
    end++;
  }
  return [{ type: "list", isOrdered, start: parseInt(mark, 10) || 1, entries: entries.map((entry) => entry.lines) }, end];
}

// ---------------------------------------------------------------- nodes

function render(block, depth) {
  switch (block.type) {
    case "heading": return h(`h${Math.min(6, block.level + 1)}`, {}, ...inline(block.text));
    case "rule": return h("hr");
    case "code": return codeBlock(block.text, block.language);
    case "formula": return formula(block.text, true);
    case "quote": return h("blockquote", {}, ...children(block.lines, depth));
    case "list": return h(block.isOrdered ? "ol" : "ul", { start: block.isOrdered && block.start !== 1 ? block.start : null }, ...block.entries.map((entry) => listItem(entry, depth)));
    case "table": return table(block.rows);
    default: return h("p", {}, ...inline(block.text));
  }
}

function children(lines, depth) {
  if (depth >= MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  return parseBlocks(lines).map((block) => render(block, depth + 1));
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const nodes = children(task ? [lines[0].slice(4), ...lines.slice(1)] : lines, depth);
  const isTight = !lines.includes("") && nodes[0]?.tagName === "P";
  const content = isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
  const box = task ? h("input", { type: "checkbox", checked: task[1] !== " ", disabled: true, "aria-label": "task" }) : null;
  return h("li", { class: task ? "task" : null }, box, ...content);
}

function table(rows) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const aligns = cells(rows[1]).map((cell) => (/^:-+:$/.test(cell) ? "center" : /-:$/.test(cell) ? "right" : null));
  const line = (row, tag) => h("tr", {}, ...cells(row).slice(0, 64).map((cell, index) => h(tag, { style: aligns[index] ? { "text-align": aligns[index] } : {} }, ...inline(cell))));
  const body = h("tbody", {}, ...rows.slice(2).map((row) => line(row, "td")));
  return h("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", {}, h("thead", {}, line(rows[0], "th")), body));
}

function codeBlock(text, language) {
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copyButton(() => text, "Copy code"));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, ...highlight(text, language))));
}

// ---------------------------------------------------------------- inline

/** Return the nodes of a line of text. */
export function inline(text, depth = 0) {
  const nodes = [];
  const missing = new Set(); // delimiters without an end after here
  let plain = "";
  let at = 0;
  const flush = () => { if (plain) { nodes.push(document.createTextNode(plain)); plain = ""; } };
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const end = text.indexOf(mark, from);
    if (end < 0) missing.add(mark);
    return end;
  };
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? span(text, at, find, depth) : null;
    if (found) {
      flush();
      nodes.push(found[0]);
      at = found[1];
    } else if (text[at] === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      const run = text[at] === "`" ? /^`+/.exec(text.slice(at, at + 64))[0] : text[at];
      plain += run;
      at += run.length;
    }
  }
  flush();
  return nodes;
}

/** Return [node, end] of the construct that begins at `at`, or null. */
function span(text, at, find, depth) {
  switch (text[at]) {
    case "\n": return [h("br"), at + 1];
    case "<": {
      const tag = /^<br ?\/?>/i.exec(text.slice(at, at + 6)); // models write it in tables
      return tag && [h("br"), at + tag[0].length];
    }
    case "\\": case "$": return inlineFormula(text, at, find);
    case "`": {
      const marks = /^`+/.exec(text.slice(at, at + 64))[0];
      const end = find(marks, at + marks.length);
      return end < 0 ? null : [h("code", {}, text.slice(at + marks.length, end).replace(/^ (.*) $/, "$1")), end + marks.length];
    }
    case "*": case "_": return emphasis(text, at, find, depth);
    case "~": return text.startsWith("~~", at) ? delimited(text, at, "~~", "del", find, depth) : null;
    case "!": return text[at + 1] === "[" ? link(text, at + 1, find, depth) : null;
    case "[": return link(text, at, find, depth);
    case "h": return /^https?:\/\/[^\s<>"'`)\]]+/.test(text.slice(at, at + 12)) && !/\w/.test(text[at - 1] ?? " ") ? bareLink(text, at) : null;
    default: return null;
  }
}

function inlineFormula(text, at, find) {
  const mark = text[at] === "$" && text[at + 1] !== "$" ? "$" : text.slice(at, at + 2);
  const start = at + mark.length;
  const end = FORMULA_ENDS[mark] ? find(FORMULA_ENDS[mark], start) : -1;
  if (end < 0) return null;
  const source = text.slice(start, end);
  // as in Pandoc: the dollars of "$5 and $6" or "$HOME/$USER" are no formula
  if (mark === "$" && (/^\s|\s$|\n/.test(source) || /\w/.test(text[at - 1] ?? " ") || /\w/.test(text[end + 1] ?? " "))) return null;
  return [formula(source, mark === "$$" || mark === "\\["), end + mark.length];
}

function emphasis(text, at, find, depth) {
  const mark = text[at];
  if (mark === "_" && /\w/.test(text[at - 1] ?? " ")) return null;
  if (text[at + 1] === mark) return delimited(text, at, mark + mark, "strong", find, depth);
  return delimited(text, at, mark, "em", find, depth);
}

function delimited(text, at, mark, tag, find, depth) {
  const start = at + mark.length;
  if (/\s/.test(text[start] ?? " ")) return null;
  let end = find(mark, start + 1);
  for (let tries = 0; end > 0 && tries < 20; tries++) {
    const isInWord = mark[0] === "_" && /\w/.test(text[end + mark.length] ?? " ");
    const isLonger = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    if (mark.length === 2 && text[end + 2] === mark[0] && text[start] === mark[0]) end++; // ***a***
    if (!/\s/.test(text[end - 1]) && !isInWord && !isLonger) return [h(tag, {}, ...inline(text.slice(start, end), depth + 1)), end + mark.length];
    end = text.indexOf(mark, end + (isLonger && text[end + 1] === mark ? 2 : 1));
  }
  return null;
}

function link(text, at, find, depth) {
  const middle = find("](", at);
  if (middle < 0 || middle - at > 500) return null;
  const end = closingParenthesis(text, middle + 2);
  if (end < 0) return null;
  const url = text.slice(middle + 2, end).trim().split(/\s/)[0];
  const label = text.slice(at + 1, middle);
  if (label.includes("[")) return null;
  if (!SAFE_URL.test(url)) return [h("span", {}, ...inline(label, depth + 1)), end + 1];
  return [anchor(url, inline(label || url, depth + 1)), end + 1];
}

/** Return the index of the ")" that ends a link's address; pairs inside it belong to the address. */
function closingParenthesis(text, from) {
  let open = 1;
  for (let at = from; at < Math.min(text.length, from + 2000); at++) {
    if (text[at] === "\n") return -1;
    if (text[at] === "(") open++;
    if (text[at] === ")" && --open === 0) return at;
  }
  return -1;
}

function bareLink(text, at) {
  let url = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + 2000))[0].replace(/[).,;:!?\]]+$/, "");
  if (text[at + url.length] === ")" && url.lastIndexOf("(") > url.lastIndexOf(")")) url += ")"; // .../Merge_(sort)
  return [anchor(url, [url]), at + url.length];
}

function anchor(url, content) {
  const link = h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow", title: url }, ...content);
  for (const inner of link.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
  return link;
}

// ---------------------------------------------------------------- formulas

const TEMML = { throwOnError: true, maxSize: [40, 400] }; // em and pt
let loadingTemml = null;

/** Return an element with a formula: its source until Temml is loaded, and if Temml cannot read it. */
function formula(source, isDisplayed) {
  const scrolled = { class: "formula displayed", tabindex: "0", role: "group", "aria-label": "Formula" };
  const text = source.trim();
  const element = h("span", isDisplayed ? scrolled : { class: "formula" }, text);
  const show = () => {
    try {
      window.temml.render(text, element, { ...TEMML, displayMode: isDisplayed });
      element.title = text;
    } catch {
      element.textContent = text;
    }
  };
  if (!text || text.length > MAX_FORMULA) return element;
  if (window.temml) show();
  else loadTemml().then(show, () => {}); // the source stays if the server has gone
  return element;
}

/** Load Temml, which makes MathML of LaTeX: 170 KB that only a formula needs. Its files are those of the npm package temml 0.13.5. */
function loadTemml() {
  loadingTemml ??= new Promise((resolve, reject) => {
    document.head.append(h("link", { rel: "stylesheet", href: "temml.css" }), h("script", { src: "temml.min.js", onload: resolve, onerror: reject }));
  }).catch((error) => { loadingTemml = null; throw error; });
  return loadingTemml;
}

// ---------------------------------------------------------------- code colors

const HASH = new Set(["py", "python", "sh", "bash", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "perl", "make", "makefile", "dockerfile", "console"]);
const PLAIN = new Set(["", "text", "txt", "plain", "output", "markdown", "md", "diff"]);
const KEYWORDS = new Set((
  "and as assert async await break case catch class const continue def default del do elif else enum except export extends extern false False finally fn for from func function global if impl import in interface is lambda let "
  + "match mod mut new nil None nonlocal not null or package pass private protected pub public raise return self static struct super switch this throw trait true True try type typedef typeof undefined unsafe use using var void where while with yield "
  + "int float double bool char string str select insert update delete create table values set join group order by echo then fi done esac local"
).split(" "));
const STRINGS = "\"\"\"[\\s\\S]*?(?:\"\"\"|$)|'''[\\s\\S]*?(?:'''|$)|\"(?:\\\\.|[^\"\\\\\\n])*\"?|'(?:\\\\.|[^'\\\\\\n])*'?|`(?:\\\\.|[^`\\\\])*`?";
const REST = "\\b\\d[\\w.]*|[A-Za-z_$][\\w$]*";
const WITH_HASH = new RegExp(`(#.*)|(${STRINGS})|(${REST})`, "g");
const WITH_SLASH = new RegExp(`(//.*|/\\*[\\s\\S]*?(?:\\*/|$))|(${STRINGS})|(${REST})`, "g");

/** Return the nodes of a program's text, with classes for comments, strings, numbers and keywords. */
export function highlight(text, language) {
  const name = (language ?? "").toLowerCase();
  if (PLAIN.has(name) || text.length > 100_000) return [text];
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(HASH.has(name) ? WITH_HASH : WITH_SLASH)) {
    const kind = match[1] ? "c" : match[2] ? "s" : /^\d/.test(match[3]) ? "n" : KEYWORDS.has(match[3]) ? "k" : text[match.index + match[0].length] === "(" ? "f" : "";
    if (!kind) continue;
    if (match.index > last) nodes.push(text.slice(last, match.index));
    nodes.push(h("span", { class: `hl-${kind}` }, match[0]));
    last = match.index + match[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}
