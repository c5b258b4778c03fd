// Helpers for elements, numbers and timers. Text is always set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. Props: class, dataset, style (object), on* (listeners), aria-* and other attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an icon of the page's sprite. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

/** Return a button with an icon; the label is its accessible name and its tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  const { class: extra = "", ...rest } = props;
  return h("button", { type: "button", class: `icon-button ${extra}`, "aria-label": label, title: label, onclick, ...rest }, icon(name));
}

/** Replace the children of an element; absent ones (null, false) are left out. */
export const fill = (element, ...children) => element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));

export const byId = (id) => document.getElementById(id);

/** Return a function that runs `work` at most every `interval` ms, in an animation frame; `.now()` runs it at once. */
export function coalesce(work, interval = 50) {
  let timer = 0;
  let frame = 0;
  let last = -Infinity;
  const run = () => {
    frame = 0;
    last = performance.now();
    work();
  };
  const call = () => {
    if (timer || frame) return;
    const wait = last + interval - performance.now();
    if (wait <= 0) frame = requestAnimationFrame(run);
    else timer = setTimeout(() => { timer = 0; frame = requestAnimationFrame(run); }, wait);
  };
  call.now = () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
    timer = frame = 0;
    run();
  };
  return call;
}

/** Return a function that runs `work` once no call has come for `wait` ms. */
export function debounce(work, wait) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), wait);
  };
}

export const count = (value) => Math.round(value).toLocaleString("en-US");

/** "1 block", "3 blocks". */
export const plural = (value, noun) => `${count(value)} ${noun}${Math.round(value) === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let index = 0;
  while (value >= 1000 && index < units.length - 1) { value /= 1000; index++; }
  return `${value >= 100 || index === 0 ? Math.round(value) : value.toFixed(1)} ${units[index]}`;
}

export function duration(seconds) {
  if (seconds < 0.995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(time) {
  const seconds = (Date.now() - time) / 1000;
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return new Date(time).toLocaleDateString(undefined, { day: "numeric", month: "short" });
}

let toastTimer = 0;

/** Show a short message, with an optional action, and announce it to screen readers. */
export function toast(message, action = null) {
  const box = byId("toast");
  clearTimeout(toastTimer);
  const close = () => { box.hidden = true; };
  box.replaceChildren(
    h("span", {}, message),
    ...(action ? [h("button", { type: "button", class: "link", onclick: () => { close(); action.run(); } }, action.label)] : []),
  );
  box.hidden = false;
  toastTimer = setTimeout(close, action ? 8000 : 3500);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or a page without TLS
    const focused = document.activeElement;
    const area = h("textarea", { class: "offscreen", value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused.focus();
  }
}

/** Set the children of an element; those that stay keep their focus and selection. */
export function setChildren(element, children) {
  for (const child of [...element.childNodes]) if (!children.includes(child)) child.remove();
  for (const [index, child] of children.entries()) if (element.childNodes[index] !== child) element.insertBefore(child, element.childNodes[index] ?? null);
}

/** Set the text of an element; an equal one keeps its selection. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Return a button that copies a text and confirms it. */
export function copyButton(getText, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    await copyText(getText());
    button.replaceChildren(icon("check"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => { button.replaceChildren(icon("copy")); button.setAttribute("aria-label", label); }, 1500);
  });
  return button;
}

/** Save a text as a file of the user. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Prepare a canvas for the screen's resolution and return its context; sizes are CSS pixels. */
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Return a color of the current theme. */
export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Let a text area grow with its text, up to `max` pixels. */
export function autoGrow(area, max) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, max)}px`;
}

/** Make the arrow keys move between the tabs of a tab list. */
export function arrowKeys(list, selector) {
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tabs = [...list.querySelectorAll(selector)].filter((tab) => !tab.hidden);
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    next?.focus();
    next?.click();
    event.preventDefault();
  });
}
